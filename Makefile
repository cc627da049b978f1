# `make demo` and `make test` work on a new machine: they create the virtual environment if needed.
PYTHON ?= python3
VENV ?= .venv
# The PyTorch requirement for pip. Unpinned it may install gigabytes of CUDA; see README, "Install".
TORCH ?= torch
BIN := $(VENV)/bin
# One thread per process, because the tests' models are tiny. An idle process takes over tests of a busy one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := --numprocesses auto --dist worksteal

.PHONY: demo docs publish space space-screenshot library-tests test lint test-all test-faults test-space test-gpu clean

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

# Needs a login: hf auth login
publish: $(VENV)/.train
	$(BIN)/python model_cards/publish.py "$(NAME)" "$(REPO)"

$(VENV)/.demo: $(VENV)/.train
	$(BIN)/python -m pip install --quiet --editable ".[demo]"
	touch $@

# Needs models in checkpoints/; for others: make space CHECKPOINTS=outputs
CHECKPOINTS ?= checkpoints
space: $(VENV)/.demo
	$(BIN)/python examples/space/app.py "$(CHECKPOINTS)"

space-screenshot: $(VENV)/.dev
	$(BIN)/python tests/space_screenshot.py "$(CHECKPOINTS)"

# The documentation site, in site/. Needs no network once the development extras are installed.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Read it at http://localhost:8000: $(BIN)/python -m http.server --directory site"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Transformers' own tests, which tests/library runs on our models; they are in its source distribution only.
library-tests: $(VENV)/.dev
	$(BIN)/python tests/library/transformers_suite.py

test: lint library-tests
	$(PYTEST) -m "not slow and not gpu" $(PARALLEL)

test-all: lint library-tests
	$(PYTEST) -m "not gpu" $(PARALLEL)

# The cases of a command run one after the other, in one process.
test-faults: $(VENV)/.dev
	$(PYTEST) tests/test_faults.py -m faults --numprocesses auto --dist loadgroup --write-faults

# Needs Chromium: apt-get install chromium
test-space: $(VENV)/.dev
	$(PYTEST) tests/test_space_browser.py

test-gpu: $(VENV)/.dev
	$(PYTEST) -m gpu

clean:
	rm -rf $(VENV) build site *.egg-info src/*.egg-info
