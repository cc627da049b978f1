"""Tiny configurations, models, batches and a tokenizer shared by the tests. Nothing here needs a network."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaTokenizer,
)
from variants import COMMON, ROWS

from luna_hf import FAMILIES, LunaConfig

ROOT = Path(__file__).resolve().parent.parent

TINY = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
# Short names of the heads, used as test parameters.
HEADS = {
    "sequence": AutoModelForSequenceClassification,
    "choice": AutoModelForMultipleChoice,
    "token": AutoModelForTokenClassification,
    "span": AutoModelForQuestionAnswering,
}
MODELS = ["base", "mlm", *HEADS]

# Test parameters, (family, variant): every variant, for what depends on the attention, and one variant per kind, for
# what does not (see `variants.py`).
FAMILY_VARIANTS = [(family, name) for family in FAMILIES for name in (*COMMON, *ROWS[family].encoder)]
FAMILY_CAUSAL_VARIANTS = [(family, name) for family in FAMILIES for name in (*COMMON, *ROWS[family].causal)]
FAMILY_KINDS = [(family, name) for family in FAMILIES for name in ROWS[family].kinds]
FAMILY_CAUSAL_KINDS = [(family, name) for family in FAMILIES for name in ROWS[family].causal_kinds]


def slow_unless(condition: Any, *case: Any) -> Any:
    """Parameters of a test; without the condition it runs in the slow suite only."""
    return pytest.param(*case, marks=[] if condition else pytest.mark.slow)


# Every variant, for what hardly depends on it: those that represent no kind of code path run in the slow suite only.
KINDS_FIRST = [slow_unless(case in FAMILY_KINDS, *case) for case in FAMILY_VARIANTS]
CAUSAL_KINDS_FIRST = [slow_unless(case in FAMILY_CAUSAL_KINDS, *case) for case in FAMILY_CAUSAL_VARIANTS]
# Families whose layers can read a window beside the slots.
MIXING_FAMILIES = [family for family in FAMILIES if ROWS[family].mixes]
# (family, pooling of a classification head)
FAMILY_POOLINGS = [
    (name, pooling) for name, family in FAMILIES.items() for pooling in family.config.choices["classifier_pooling"]
]

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a packed sequence of fixed length reads every token",
    "every token reads the packed sequence in turn",
    "Paris is the capital of France, and Rome of Italy.",
    "short one",
]


def slots_of(model_type: str, number: int = 8) -> dict[str, int]:
    """The config field that sets the number of slots; empty for a family without slots."""
    field = FAMILIES[model_type].config.slots_field
    return {field: number} if field else {}


def window_of(model_type: str, size: int) -> dict[str, int]:
    """The config field for a window of this size; empty for a family that cannot have one."""
    return {"local_window": size} if ROWS[model_type].mixes else {}


def tiny_config_for(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """A small configuration of a family, without dropout."""
    return FAMILIES[model_type].config(**{**TINY, **slots_of(model_type), **ROWS[model_type].sizes, **overrides})


def tiny_config(**overrides: Any) -> LunaConfig:
    """A small `LunaConfig` without dropout."""
    return tiny_config_for("luna", **overrides)


def variants_of(model_type: str) -> dict[str, dict[str, Any]]:
    """Options of a family's encoder variants by name: the common ones and its own."""
    return {**COMMON, **ROWS[model_type].encoder}


def causal_variants_of(model_type: str) -> dict[str, dict[str, Any]]:
    """Options of a family's causal variants by name: the common ones and its own."""
    return {**COMMON, **ROWS[model_type].causal}


def code_name(model_type: str) -> str:
    """The name of a family's folder, and in the names of its files in a checkpoint."""
    return FAMILIES[model_type].config.__module__.split(".")[-2]


def model_class(model_type: str, kind: str) -> type[PreTrainedModel]:
    """The class of a family for a name in `MODELS`."""
    family = FAMILIES[model_type]
    if kind in HEADS:
        return family.heads[HEADS[kind]]
    return {"base": family.base_model, "mlm": family.masked_lm}[kind]


def tiny_model(model_type: str = "luna", kind: str = "base", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A small model in eval mode with random parameters, biases and norms included."""
    torch.manual_seed(seed)
    model = model_class(model_type, kind)(tiny_config_for(model_type, **overrides)).eval()
    randomise(model)
    return model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Add noise to all parameters, so that no test passes only because a bias is zero."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)


def tiny_causal_model(model_type: str = "luna", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A small causal model in eval mode with random parameters."""
    torch.manual_seed(seed)
    config = tiny_config_for(model_type, is_decoder=True, **overrides)
    model = FAMILIES[model_type].causal_lm(config).eval()
    randomise(model)
    return model


def tiny_seq2seq_model(model_type: str = "luna", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A small encoder-decoder in eval mode with random parameters."""
    torch.manual_seed(seed)
    model = FAMILIES[model_type].seq2seq_lm(tiny_config_for(model_type, is_encoder_decoder=True, **overrides)).eval()
    randomise(model)
    return model


def normal_states(batch: int, length: int, width: int, seed: int = 0) -> torch.Tensor:
    """(batch, length, width) states in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, width, generator=generator, dtype=torch.float64)


def weighted_sum(states: torch.Tensor) -> torch.Tensor:
    """A loss with a different weight for every entry."""
    return (states * torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)).sum()


def gradients(outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Gradients of a randomly weighted sum of float64 outputs; zeros for tensors that do not take part."""
    generator = torch.Generator().manual_seed(9)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    loss = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, tensors, retain_graph=True, materialize_grads=True)


def rms(tensor: torch.Tensor) -> float:
    """Root mean square; NaN if any entry is NaN."""
    return tensor.pow(2).mean().sqrt().item()


def relative_rms(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of the exact result."""
    return rms(ours.double() - exact.double()) / rms(exact.double())


def random_ids(batch: int, length: int, vocab_size: int = 120, seed: int = 0) -> torch.Tensor:
    """(batch, length) ids: `<s>`, then ordinary tokens."""
    ids = torch.randint(4, vocab_size - 1, (batch, length), generator=torch.Generator().manual_seed(seed))
    ids[:, 0] = 0
    return ids


def padded_batch(lengths: list[int], seed: int = 0, pad_token_id: int = 1) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of rows of these lengths, padded on the right."""
    ids = random_ids(len(lengths), max(lengths), seed=seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids.masked_fill(~mask, pad_token_id), "attention_mask": mask.long()}


def inputs_for(kind: str, batch: int = 3, length: int = 12, seed: int = 0, labels: bool = False) -> dict[str, Any]:
    """A padded batch for a model of this kind (two choices for multiple choice), optionally with labels."""
    rows = 2 * batch if kind == "choice" else batch
    inputs = padded_batch([length - row % 4 for row in range(rows)], seed)
    if kind == "choice":
        inputs = {name: tensor.view(batch, 2, -1) for name, tensor in inputs.items()}
    if not labels or kind == "base":
        return inputs
    generator = torch.Generator().manual_seed(seed + 1)
    if kind == "mlm":
        # A different number of labels in every row.
        labelled = (torch.arange(length) <= torch.arange(rows)[:, None] % 6) & (inputs["attention_mask"] == 1)
        inputs["labels"] = inputs["input_ids"].masked_fill(~labelled, -100)
    elif kind == "token":
        targets = torch.randint(0, 2, (rows, length), generator=generator)
        inputs["labels"] = targets.masked_fill(inputs["attention_mask"] == 0, -100)
    elif kind == "span":
        inputs["start_positions"] = torch.randint(0, 4, (rows,), generator=generator)
        inputs["end_positions"] = torch.randint(4, min(8, length), (rows,), generator=generator)
    else:
        inputs["labels"] = torch.randint(0, 2, (batch,), generator=generator)
    return inputs


def tiny_tokenizer(sentences: list[str] | None = None, vocab_size: int = 400) -> RobertaTokenizer:
    """A byte-level BPE with RoBERTa's special tokens (`<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, `<mask>` last)."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=specials,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences or SENTENCES, trainer)
    vocab = bpe.get_vocab()
    vocab["<mask>"] = len(vocab)
    merges = json.loads(bpe.to_str())["model"]["merges"]
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    return RobertaTokenizer(vocab=vocab, merges=merges, model_max_length=TINY["max_position_embeddings"])


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of test parameters; all are slow but a few in which any two values meet."""
    rows = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, fast = set().union(*pairs.values()), set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        fast.add(best)
    values = {row: [axis[place] for axis, place in zip(axes, row, strict=True)] for row in rows}
    return [slow_unless(row in fast, *values[row]) for row in rows]


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Every combination of test parameters; all are slow but one for each value, with the others in turn.

    A value that is a tuple stands for several parameters.
    """
    cases = [(place, value if isinstance(value, tuple) else (value,)) for place, value in enumerate(values)]
    return [
        slow_unless(other == others[place % len(others)], *case, other) for place, case in cases for other in others
    ]


@contextmanager
def refused(*named: Any, error: type[Exception] = ValueError) -> Iterator[None]:
    """Expect an error of this class with a message that names each of these values, in any order and wording."""
    with pytest.raises(error) as caught:
        yield
    missing = [value for value in map(str, named) if value not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def run_python(code: str, *args: Any, env: dict[str, str] | None = None, blocked: bool = False) -> str:
    """Run code in a new process and return its standard output; fail with its error output.

    Args:
        code: the program. `sys.argv[1:]` holds `args`; this folder and the package are importable.
        env: environment variables to add.
        blocked: make `import luna_hf` fail, as on a machine without the package.
    """
    if blocked:
        code = "import sys\nsys.modules['luna_hf'] = None\n" + code
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": "" if blocked else os.pathsep.join((str(ROOT / "tests"), str(ROOT / "src"))),
        **(env or {}),
    }
    command = [sys.executable, "-c", code, *map(str, args)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout
