"""Markers that transformers puts on its own tests; `--strict-markers` refuses those it has not been told about."""

import pytest

LIBRARY_MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_training_test",
    "torch_compile_test",
    "torch_export_test",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in LIBRARY_MARKERS:
        config.addinivalue_line("markers", f"{marker}: set by transformers' own test suite")
