"""Markers of transformers' own tests, and which of these tests are slow here."""

from pathlib import Path

import pytest
import transformers_suite

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
# Tests of files and of missing weights, which every suite runs for one family; `test_saving.py` tests all of them.
SHARED = (
    "test_base_model_prefix_loads_base_weights",
    "test_can_init_all_missing_weights",
    "test_can_use_safetensors",
    "test_correct_missing_keys",
    "test_from_pretrained_no_checkpoint",
    "test_load_contiguous_weights",
    "test_load_save_without_tied_weights",
    "test_load_with_mismatched_shapes",
    "test_model_weights_reload_no_missing_tied_weights",
    "test_save_load",
    "test_torch_save_load",
)
# Tests of generation, which every suite runs for one family; `test_generation.py` and `test_causal_state.py` test all.
GENERATION = (
    *("test_assisted_decoding", "test_beam_", "test_generate_compile", "test_generate_from_", "test_generate_methods"),
    *("test_generate_with", "test_generate_without", "test_inherits_generation", "test_prompt_lookup", "test_sample_"),
)


def pytest_configure(config: pytest.Config) -> None:
    transformers_suite.with_slow = "not slow" not in config.option.markexpr
    for marker in LIBRARY_MARKERS:
        config.addinivalue_line("markers", f"{marker}: set by transformers' own test suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            slow = SLOW if getattr(item.cls, "shared_code", True) else (*SLOW, *SHARED, *GENERATION)
            if item.name.startswith(slow):
                item.add_marker(pytest.mark.slow)
