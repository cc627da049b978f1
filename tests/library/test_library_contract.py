"""transformers' own model, training and configuration tests, on every model class of every family.

The mixins cover saving and loading, initialisation, tied and resized embeddings, outputs, masks, gradients,
checkpointing and attention backends. They come from the library's source distribution, which `make test` fetches;
without it, this module is skipped (see `transformers_suite.py`). The library's pipeline tests need models from the Hub
and are left out. The default variant of every family's encoders and causal models runs in every suite, the others in
the slow one. In the fast suite, only the first family has its heads, its encoder-decoder and the tests of files and of
generation, whose code the families share; `test_seq2seq_models.py` tests all.

A skip must not hide a forgotten attribute: a test that skips itself fails unless `EXPECTED_SKIPS` names it, and
decorators may only skip for missing hardware or optional libraries.
"""

import inspect
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers_suite
from helpers import slots_of
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.testing_utils import torch_device
from variants import ROWS, LibraryVariant

from luna_hf import FAMILIES
from luna_hf.configuration import BoundedMemoryConfig

transformers_suite.load()

from transformers_library_tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from transformers_library_tests.test_configuration_common import ConfigTester  # noqa: E402
from transformers_library_tests.test_modeling_common import ModelTesterMixin, ids_tensor  # noqa: E402
from transformers_library_tests.test_training_mixin import TrainingTesterMixin  # noqa: E402

# The default layout inverted.
OPPOSITE = {
    "norm_first": True,
    "position_embedding_type": "sinusoidal",
    "embedding_layer_norm": False,
    "conv_kernel_size": 3,
    "tie_word_embeddings": False,
}
# Fewer slots than most rows have tokens, or more than the longest row. Both differ from all other sizes.
SLOTS, OPPOSITE_SLOTS = 4, 12

# Prefix of a test's name, and the reason with which it skips.
EXPECTED_SKIPS: dict[str, str] = {
    # No composite models.
    "test_attn_implementation_composite_models": "not a composite model",
    "test_can_set_attention_dynamically_composite_model": "not composite",
    "test_flash_attn_2_can_dispatch_composite_models": "not a composite model",
    "test_flash_attn_3_can_dispatch_composite_models": "not a composite model",
    "test_flash_attn_4_can_dispatch_composite_models": "not a composite model",
    "test_internal_model_config_and_subconfig_are_same": "No subconfigs",
    "test_sdpa_can_dispatch_composite_models": "does not support SDPA",  # of composite models
    # Mechanisms missing here.
    "test_eager_matches_batched_and_grouped_inference": "does not support grouped_mm",  # mixture of experts
    "test_moe_models_record_router_logits": "no sparse experts",
    "test_output_router_logits_from_config": "no `output_router_logits`",
    "test_model_rope_scaling_from_config": "does not support RoPE scaling",
    "test_model_rope_scaling_frequencies": "does not support RoPE scaling",
    "test_model_rope_with_partial_rotation": "does not have RoPE",
    "test_vision_axial_rope": "no axial RoPE layer",
    "test_sliding_window_mask": "does not support sliding window",
    "test_keep_in_fp32_modules": "no _keep_in_fp32_modules",
    "test_keep_in_fp32_modules_strict": "No `_keep_in_fp32_modules_strict`",
    "test_tied_head_has_a_tp_plan_entry": "does not have a TP plan",
    "test_tp_plan_matches_params": "does not have a TP plan",
    # Parameters have the same names in files and in models.
    "test_can_load_from_already_mapped_keys": "No conversion found",
    "test_reverse_loading_mapping": "No conversion found",
    # Sinusoidal and rotary positions have no matrix to resize.
    "test_resize_position_vector_embeddings": "does not have position embeddings",
}
# Skips of decoders. The old name of the state is tested in `test_causal_state.py` and `test_seq2seq_models.py`.
DECODER_SKIPS: dict[str, str] = {"test_bc_cache_name_forward": "non standard Cache"}
CAUSAL_SKIPS: dict[str, str] = {
    **DECODER_SKIPS,
    "test_encoder_decoder_loss_no_double_shift": "No sequence-to-sequence language modeling head",
}
ENCODER_SKIPS: dict[str, str] = {
    "test_bc_cache_name_forward": "Do not take a cache",
    "test_causal_lm_loss_honors_shift_labels": "No decoder-only language modeling head",
    "test_encoder_decoder_loss_no_double_shift": "No sequence-to-sequence language modeling head",
}
SEQ2SEQ_SKIPS: dict[str, str] = {
    **DECODER_SKIPS,
    "test_causal_lm_loss_honors_shift_labels": "No decoder-only language modeling head",
    # Encoder and decoder have their own.
    "test_can_capture_specific_layers_hidden_states": "uses another name",
}

# Reasons of transformers' decorators to skip on a machine that lacks something.
MISSING_ON_THIS_MACHINE = (
    "test requires accelerator",
    "test requires multiple accelerators",
    "test requires MPS",
    "test requires Flash Attention",
    "test requires deepspeed",
    "test requires the kernels library",
    "test requires CUDA",
)


class TinyModelTester:
    """What transformers' mixins need to know about a model: sizes, a configuration, and inputs."""

    is_training = True
    batch_size = 5
    seq_length = 9
    num_choices = 3
    vocab_size = 99
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(
        self, family_name: str, variant: LibraryVariant, fields: dict[str, Any], special_ids: dict[str, int]
    ) -> None:
        self.config_class = FAMILIES[family_name].config
        self.base_model_class = FAMILIES[family_name].base_model
        slots = OPPOSITE_SLOTS if variant.opposite else SLOTS
        self.fields = {**fields, **slots_of(family_name, slots), **variant.fields}
        self.special_ids = special_ids
        self.pad_token_id = special_ids["pad_token_id"]
        self.key_length = variant.num_keys or slots

    def get_config(self) -> BoundedMemoryConfig:
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=48,
            max_position_embeddings=64,
            **self.special_ids,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[BoundedMemoryConfig, dict[str, torch.Tensor]]:
        """Rows of 9, 7, 5, 3 and 1 tokens, the second padded on the left."""
        lengths = torch.arange(self.seq_length, 0, -2, device=torch_device)[:, None]
        mask = (torch.arange(self.seq_length, device=torch_device) < lengths).long()
        mask[1] = mask[1].flip(0)
        first_word = 3  # after <s>, <pad> and </s>
        words = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - first_word) + first_word
        return self.get_config(), {"input_ids": words.where(mask.bool(), self.pad_token_id), "attention_mask": mask}


class TinySeq2SeqTester(TinyModelTester):
    """The same for an encoder-decoder."""

    @property
    def decoder_key_length(self) -> int:
        return self.key_length

    def prepare_config_and_inputs_for_common(self) -> tuple[BoundedMemoryConfig, dict[str, torch.Tensor]]:
        config, inputs = super().prepare_config_and_inputs_for_common()
        target = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 3) + 3
        return config, {**inputs, "decoder_input_ids": target}


@pytest.fixture(scope="class")
def listed_model_classes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Add the models to the library's tables of class names, by which the mixins distinguish kinds of models."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, family in FAMILIES.items():
            models = {
                AutoModel: family.model(request.cls.base_kind),
                AutoModelForMaskedLM: family.masked_lm,
                AutoModelForCausalLM: family.causal_lm,
                AutoModelForSeq2SeqLM: family.seq2seq_lm,
                **family.heads,
            }
            for auto_class, model_class in models.items():
                monkeypatch.setitem(auto_class._model_mapping._model_mapping, name, model_class.__name__)
        yield


@pytest.mark.usefixtures("listed_model_classes")
class FamilyTests(ModelTesterMixin, TrainingTesterMixin):
    """The mixins, set up for one variant of a family's encoders; `make_test_cases` makes the collected classes."""

    # It loads a file without any weight, which `from_pretrained` refuses.
    test_model_weights_reload_no_missing_tied_weights = None

    family_name: str
    variant: LibraryVariant
    shared_code: bool  # whether to test what all families share
    # Implements an abstract property of TrainingTesterMixin.
    model_tester: TinyModelTester = None
    # Off by default in the library, because its older models fail.
    test_can_init_all_missing_weights_before_2023 = True
    expected_skips = {**EXPECTED_SKIPS, **ENCODER_SKIPS}
    special_ids = {"pad_token_id": 1}
    model_tester_class = TinyModelTester
    base_kind = "Model"
    common_fields: dict[str, Any] = {}
    opposite_fields = {**OPPOSITE, "type_vocab_size": 2}
    maps_are_copies = False  # of every variant
    # ConfigTester leaves the number of heads at the default of 12; rotary positions need heads of an even size.
    configured_width = 48

    def setUp(self) -> None:
        fields = {**self.common_fields, **(self.opposite_fields if self.variant.opposite else {})}
        self.model_tester = self.model_tester_class(self.family_name, self.variant, fields, self.special_ids)
        self.training_overfit_steps = self.variant.overfit_steps
        positions = self.model_tester.get_config().position_embedding_type
        self.test_resize_position_embeddings = positions == "learned"

    @property
    def all_model_classes(self) -> tuple[type[PreTrainedModel], ...]:
        family = FAMILIES[self.family_name]
        return family.models if self.shared_code else (family.base_model, family.masked_lm)

    @property
    def _torch_compile_train_cls(self) -> type[PreTrainedModel]:
        return FAMILIES[self.family_name].masked_lm

    def _get_trainable_model_class(self) -> type[PreTrainedModel]:
        return FAMILIES[self.family_name].masked_lm

    def skipTest(self, reason: str) -> None:
        expected = [words for name, words in self.expected_skips.items() if self._testMethodName.startswith(name)]
        expected += [] if type(self).has_attentions else ["attentions"]  # of models without weights to return
        if not any(words in reason for words in expected):
            self.fail(f"{self._testMethodName} skips itself, and no list of skips says so: {reason}")
        super().skipTest(reason)

    def test_retain_grad_hidden_states_attentions(self) -> None:
        # Attention maps that are copies get no gradient; test the hidden states only.
        if self.maps_are_copies or self.variant.maps_are_copies:
            self.has_attentions = False
        super().test_retain_grad_hidden_states_attentions()

    def test_decorators_skip_only_for_what_the_machine_lacks(self) -> None:
        for name in unittest.TestLoader().getTestCaseNames(type(self)):
            reasons = list(decorator_skips(getattr(type(self), name)))
            if reasons:
                lacks = [reason for reason in reasons if reason.startswith(MISSING_ON_THIS_MACHINE)]
                self.assertTrue(lacks, f"{name} is skipped: {reasons}")

    def test_config(self) -> None:
        fields = {"hidden_size": self.configured_width, **self.model_tester.fields}
        ConfigTester(self, config_class=self.model_tester.config_class, **fields).run_common_tests()

    def test_compiles_for_training_as_one_graph(self) -> None:
        """The body of `test_torch_compile_for_training`, which the library runs on accelerators only.

        Without inductor, which would take minutes to generate C++; the graph is what matters.
        """
        # A compiled graph draws other random numbers: gradients are equal only without dropout.
        self.model_tester.fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        # The limit on recompilations counts across the whole process.
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)
        compile_model = torch.compile
        with patch("torch.compile", lambda model, **_: compile_model(model, fullgraph=True, backend="aot_eager")):
            inspect.unwrap(ModelTesterMixin.test_torch_compile_for_training)(self)


class CausalTests(FamilyTests, GenerationTesterMixin):
    """The same for a family's decoder and causal language model."""

    base_kind = "CausalModel"
    expected_skips = {**EXPECTED_SKIPS, **CAUSAL_SKIPS}
    # The sequence that TrainingTesterMixin trains on and generates begins with token 1.
    special_ids = {"pad_token_id": 0, "bos_token_id": 1}
    common_fields = {"is_decoder": True}
    opposite_fields = OPPOSITE
    maps_are_copies = True

    @property
    def all_model_classes(self) -> tuple[type[PreTrainedModel], ...]:
        return FAMILIES[self.family_name].causal_models

    @property
    def _torch_compile_train_cls(self) -> type[PreTrainedModel]:
        return FAMILIES[self.family_name].causal_lm

    def _get_trainable_model_class(self) -> type[PreTrainedModel]:
        return FAMILIES[self.family_name].causal_lm


class Seq2SeqTests(FamilyTests, GenerationTesterMixin):
    """The same for a family's encoder-decoder."""

    # It generates the source, as a decoder alone would.
    test_training_overfit = None
    expected_skips = {**EXPECTED_SKIPS, **SEQ2SEQ_SKIPS}
    special_ids = {"pad_token_id": 0, "bos_token_id": 1}
    is_encoder_decoder = True
    model_tester_class = TinySeq2SeqTester
    base_kind = "Seq2SeqModel"
    common_fields = {"is_encoder_decoder": True}
    opposite_fields = OPPOSITE
    maps_are_copies = True

    @property
    def all_model_classes(self) -> tuple[type[PreTrainedModel], ...]:
        return FAMILIES[self.family_name].seq2seq_models

    @property
    def _torch_compile_train_cls(self) -> type[PreTrainedModel]:
        return FAMILIES[self.family_name].seq2seq_lm

    def _get_trainable_model_class(self) -> type[PreTrainedModel]:
        return FAMILIES[self.family_name].seq2seq_lm


def decorator_skips(test: Callable[..., None] | None) -> Iterator[str]:
    """Reasons of all decorators that skip a test, from the outermost in."""
    while test is not None:
        if getattr(test, "__unittest_skip__", False):
            yield test.__unittest_skip_why__
        test = getattr(test, "__wrapped__", None)


def make_test_cases() -> dict[str, type[unittest.TestCase]]:
    """One test case for each variant of each family, its encoders' and its causal models'."""
    cases = {}
    for family_name, family in FAMILIES.items():
        prefix, row = family.config.__name__.removesuffix("Config"), ROWS[family_name]
        kinds = ((FamilyTests, row.library_encoder, ""), (CausalTests, row.library_causal, "Causal"))
        kinds += ((Seq2SeqTests, row.library_seq2seq, "Seq2Seq"),)
        for tests, variants, kind in kinds:
            for variant_name, variant in variants.items():
                name = f"{prefix}{kind}{variant_name}Test"
                fast = variant_name == "Default" and (family_name == next(iter(FAMILIES)) or tests is not Seq2SeqTests)
                body = {"family_name": family_name, "variant": variant, "__module__": __name__}
                body["shared_code"] = not fast or family_name == next(iter(FAMILIES))
                body["has_attentions"] = tests is FamilyTests or row.causal_maps
                if fast or transformers_suite.with_slow:  # to collect thousands of tests takes seconds
                    case = type(name, (tests, unittest.TestCase), body)
                    cases[name] = case if fast else pytest.mark.slow(case)
    return cases


globals().update(make_test_cases())
