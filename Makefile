# Two commands for a new machine: `make demo` and `make test`. Both make the virtual environment if needed.
PYTHON ?= python3
VENV ?= .venv
# What pip installs as PyTorch. Unpinned it may bring gigabytes of CUDA; see README, "Install".
TORCH ?= torch
BIN := $(VENV)/bin
# One thread a process: the tests' models are small, and threads that wait for a busy core cost more than they bring.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test lint test-all test-slow test-gpu clean

$(VENV)/.train: pyproject.toml src/luna_hf/__init__.py
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"luna_hf needs Python 3.10 or newer, but $(PYTHON) is {v[0]}.{v[1]}. Choose another: make PYTHON=python3.11")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[train]"
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(VENV)/.train
	OMP_WAIT_POLICY=passive $(BIN)/python training/pretrain_mlm.py training/recipes/pretrain_mlm/demo.yaml

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(PYTEST) -m "not slow and not gpu" --numprocesses auto --dist loadscope

test-all: lint
	$(PYTEST) -m "not gpu" --numprocesses auto --dist loadscope

test-slow: $(VENV)/.dev
	$(PYTEST) -m slow

test-gpu: $(VENV)/.dev
	$(PYTEST) -m gpu

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
