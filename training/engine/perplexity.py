"""Perplexity of causal language models at any context length: with a state that is carried on, or a window that slides.

The same tokens are scored at every length. A sequence of that length starts with `<s>` and an empty state, and

* "carried": goes through the model in parts, each with the state that the one before has left. Memory is that of one
  part, whatever the length.
* "sliding": goes through in windows that overlap, each from scratch; of a window only what no window before has scored
  counts. For models whose positions end, and whose cache grows.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common.models import CAUSAL, load_config, load_tokenizer
from data.corpus import open_source
from data.token_store import document_batches
from data.tokenizer import encode
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from luna_hf import MemoryCache
from luna_hf.configuration_base import BoundedMemoryConfig
from luna_hf.scripting import UserError

MODES = ("carried", "sliding")
# Characters of the documents that are tokenized together.
_BATCH_CHARACTERS = 100_000


@dataclass(frozen=True)
class Settings:
    """How to evaluate.

    Attributes:
        lengths: context lengths in tokens; each divides the longest.
        tokens: scored tokens at most, rounded down to whole sequences of the longest length.
        part: tokens of a forward pass with a carried state, and of a sliding window.
        stride: tokens that each window scores; half of `part` if not given.
        rows: tokens of all rows of a forward pass at most.
    """

    lengths: tuple[int, ...]
    tokens: int
    part: int
    stride: int | None
    rows: int

    def __post_init__(self) -> None:
        longest = max(self.lengths)
        uneven = [length for length in self.lengths if length < 2 or longest % length]
        if uneven:
            raise UserError(f"`--lengths`: {uneven[0]} does not divide the longest ({longest}), or is below 2.")
        if self.tokens < longest:
            raise UserError(f"`--tokens` is {self.tokens}, but one sequence has {longest}. Raise it.")
        if self.part < 2 or self.rows < self.part:
            raise UserError(
                f"`--part` is {self.part} and `--rows` {self.rows}, but a part has at least 2 tokens, and the rows of "
                "a pass at least one part."
            )
        if not 1 <= self.step <= self.part:
            raise UserError(f"`--stride` is {self.stride}, but must be between 1 and `--part` ({self.part}).")

    @property
    def step(self) -> int:
        """Tokens that each window scores."""
        return self.part // 2 if self.stride is None else self.stride


@dataclass(frozen=True)
class Scores:
    """Losses at one length: float64 [sequences, length] in nats, and the bytes of one sequence's state at the end."""

    losses: np.ndarray
    state_bytes: int | None

    @property
    def loss(self) -> float:
        """Mean loss in nats a token."""
        return float(self.losses.mean())

    def by_position(self, borders: list[int]) -> list[float]:
        """Mean losses of the positions between neighbouring borders."""
        return [float(self.losses[:, a:b].mean()) for a, b in itertools.pairwise(borders)]


def load(folder: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal model and its tokenizer, for evaluation.

    Raises:
        UserError: Nothing there, a damaged file, no causal model, or weights missing.
    """
    config = load_config(folder, kind=CAUSAL)
    tokenizer = load_tokenizer(folder, config, padded=False)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(f"The weights of {folder} cannot be loaded: {error}") from error
    if info["missing_keys"]:
        raise UserError(
            f"{folder} lacks {len(info['missing_keys'])} weights of its model: its figures would mean nothing."
        )
    model.eval()
    if getattr(model.config, "bos_token_id", None) is None or tokenizer.eos_token_id is None:
        raise UserError(f"{folder} lacks a token to start with (bos) or to end documents with (eos).")
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def read_tokens(tokenizer: PreTrainedTokenizerBase, data: str, text_column: str, count: int) -> np.ndarray:
    """The first `count` tokens of a text, an end token between documents: int64 [count].

    Raises:
        UserError: There is no such text, or it is too short.
    """
    source = open_source({"path": data}, "--data", "validation", text_column, streaming=False)
    pieces, found = [], 0
    for batch in document_batches(source.stream(), _BATCH_CHARACTERS):
        for ids in encode(tokenizer, batch):
            pieces.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.int64))
            found += len(ids) + 1
        if found >= count:
            return np.concatenate(pieces)[:count]
    raise UserError(f"{source.description} has {found:,} tokens, fewer than {count:,}. Lower `--tokens`.")


def mode_of(model: PreTrainedModel) -> str:
    """ "carried" for models with a state of constant size, else "sliding"."""
    return "carried" if isinstance(model.config, BoundedMemoryConfig) else "sliding"


@torch.no_grad()
def score(model: PreTrainedModel, tokens: np.ndarray, length: int, mode: str, settings: Settings) -> Scores:
    """Losses of all tokens in sequences of `length`.

    Args:
        model: a causal model in eval mode.
        tokens: int64 [a multiple of length].
        length: of the context.
        mode: one of `MODES`.
        settings: parts, stride, rows.

    Raises:
        UserError: The window is longer than the model's positions.
    """
    sequences = torch.from_numpy(tokens).view(-1, length).to(model.device)
    rows = max(1, settings.rows // min(length, settings.part))
    run = _carried if mode == "carried" else _sliding
    losses, state_bytes = [], None
    for batch in tqdm(sequences.split(rows), desc=f"{length:,} tokens", unit="batch", leave=False):
        inputs = F.pad(batch[:, :-1], (1, 0), value=model.config.bos_token_id)  # <s>, and all but the last token
        scored, state_bytes = run(model, inputs, batch, settings)
        losses.append(scored.cpu().numpy())
    return Scores(np.concatenate(losses), state_bytes)


def _carried(model: PreTrainedModel, inputs: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, int]:
    cache, losses = MemoryCache(model.config), []
    for part, wanted in zip(inputs.split(settings.part, 1), targets.split(settings.part, 1), strict=True):
        logits = model(part, past_key_values=cache, use_cache=True).logits
        losses.append(token_losses(logits, wanted))
    shared = sum(tensor.nbytes for layer in cache.layers for tensor in layer.constants.values())
    return torch.cat(losses, 1), (cache.nbytes - shared) // inputs.shape[0] + shared


def _sliding(model: PreTrainedModel, inputs: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, None]:
    longest = getattr(model.config, "max_position_embeddings", None)
    window, length, losses, done = min(settings.part, inputs.shape[1]), inputs.shape[1], [], 0
    if not isinstance(model.config, BoundedMemoryConfig) and longest is not None and window > longest:
        raise UserError(f"The window of {window} tokens is longer than the model's {longest} positions (`--part`).")
    while done < length:
        end = min(window if done == 0 else done + settings.step, length)
        first = max(0, end - window)
        logits = model(inputs[:, first:end], use_cache=False).logits[:, done - first :]
        losses.append(token_losses(logits, targets[:, done:end]))
        done = end
    return torch.cat(losses, 1), None


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """(b, n, vocabulary) and (b, n) to (b, n) in nats, float64 from float32 logits."""
    return F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").double()


def evaluate(folder: str, data: str, text_column: str, settings: Settings, dtype: torch.dtype, mode: str) -> dict:
    """All lengths for one model.

    Args:
        folder: of the model, or its name on the Hub.
        data, text_column: the text, as in recipes.
        settings: what to score.
        dtype: of the model.
        mode: one of `MODES`, or "" for `mode_of` the model.

    Returns:
        Figures as JSON holds them: `model`, `mode`, `parameters`, and for every length `loss`, `perplexity` and
        `state_bytes`; `by_position` of the longest, by powers of two.
    """
    model, tokenizer = load(folder, dtype)
    mode = mode or mode_of(model)
    if mode == "carried" and mode_of(model) != mode:
        raise UserError(f"{folder} has no state of constant size to carry on: use `--mode sliding`.")
    longest = max(settings.lengths)
    tokens = read_tokens(tokenizer, data, text_column, settings.tokens // longest * longest)
    lengths = {}
    for length in sorted(settings.lengths):
        scores = score(model, tokens, length, mode, settings)
        figures = {"loss": scores.loss, "perplexity": math.exp(scores.loss), "state_bytes": scores.state_bytes}
        lengths[str(length)] = figures
    borders = [0, *sorted(settings.lengths)]
    return {
        "model": Path(folder).name,
        "model_type": model.config.model_type,
        "mode": mode,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": len(tokens),
        "lengths": lengths,
        "by_position": {"borders": borders, "loss": scores.by_position(borders)},
    }
