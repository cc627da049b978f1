"""Markers of transformers' own tests, and which of these tests are slow here."""

from pathlib import Path

import pytest

# Set by the library; `--strict-markers` refuses unregistered ones.
LIBRARY_MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_training_test",
    "torch_compile_test",
    "torch_export_test",
)
# More than half of the time; every suite tests learning, compilation, dtypes and backends elsewhere.
SLOW = (
    "test_bc_torch_dtype",
    "test_compiles_for_training",
    "test_eager_matches_sdpa_inference",
    "test_training_overfit",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in LIBRARY_MARKERS:
        config.addinivalue_line("markers", f"{marker}: set by transformers' own test suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
