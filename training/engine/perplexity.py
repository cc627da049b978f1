"""Perplexity of causal language models at any context length.

The same tokens are scored at every length. A sequence of that length starts with `<s>` and an empty state. There are
two modes:

* "carried": it passes through the model in parts, each with the state that the previous one has left. Memory is that of
  one part, at any length.
* "sliding": it passes through in overlapping windows, each from scratch; only tokens that no earlier window has scored
  count. For models with a last position and a growing cache.
"""

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from common.models import CAUSAL, load_config, load_tokenizer
from data.corpus import Section, open_source
from data.token_store import document_batches
from data.tokenizer import encode
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from engine.loop import perplexity
from luna_hf import MemoryCache
from luna_hf.configuration import BoundedMemoryConfig
from luna_hf.scripting import UserError, portable, progress

# Characters of the documents that are tokenized together.
_BATCH_CHARACTERS = 100_000


@dataclass(frozen=True)
class Settings:
    """Options of `evaluate_perplexity.py`.

    Raises:
        UserError: Values out of range, or that contradict each other.
    """

    models: Annotated[list[str], "Folders or names on the Hub, or LABEL=MODEL."]
    data: Annotated[str, "Text to score: a file, a folder, a dataset on the Hub, or cpython."]
    text_column: Annotated[str, "Column that holds the text of a table."] = "text"
    lengths: Annotated[list[int], "Context lengths in tokens; each divides the longest."] = field(
        default_factory=lambda: [512, 2048, 8192, 16384]
    )
    tokens: Annotated[int, "Most tokens to score, the same at every length; rounded down to whole sequences."] = 262144
    part: Annotated[int, "Tokens in a forward pass with a carried state, and in a sliding window."] = 512
    stride: Annotated[int | None, "Tokens that each sliding window scores; half of --part by default."] = None
    rows: Annotated[int, "Most tokens in a forward pass, over all its rows."] = 8192
    mode: Annotated[Literal["", "carried", "sliding"], "carried (default for models of luna_hf) or sliding."] = ""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], "Type of models; states stay in float32."] = "float32"
    output: Annotated[str, "Folder for perplexity.json, perplexity.md and perplexity.png."] = ""

    def __post_init__(self) -> None:
        longest = max(self.lengths)
        uneven = [length for length in self.lengths if length < 2 or longest % length]
        if uneven:
            raise UserError(f"`--lengths`: {uneven[0]} does not divide the longest ({longest}), or is below 2.")
        if self.tokens < longest:
            raise UserError(f"`--tokens` is {self.tokens}, but a sequence has {longest}. Raise it.")
        if self.part < 2 or self.rows < self.part:
            raise UserError(f"`--part` is {self.part}, but must be between 2 and `--rows` ({self.rows}).")
        if not 1 <= self.step <= self.part:
            raise UserError(f"`--stride` is {self.stride}, but must be between 1 and `--part` ({self.part}).")

    @property
    def step(self) -> int:
        """Tokens that each window scores."""
        return self.part // 2 if self.stride is None else self.stride


@dataclass(frozen=True)
class Scores:
    """Losses at one length, float64 [sequences, length] in nats, and the size of one sequence's state at the end."""

    losses: np.ndarray
    state_bytes: int | None

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return float(self.losses.mean())


def load(folder: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal model and its tokenizer, for evaluation.

    Raises:
        UserError: No such model, a damaged file, another kind of model, or missing weights.
    """
    config = load_config(folder, kind=CAUSAL)
    tokenizer = load_tokenizer(folder, config, padded=False)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(f"The weights of {folder} cannot be loaded: {error}") from error
    if info["missing_keys"]:
        raise UserError(
            f"{folder} lacks {len(info['missing_keys'])} weights of its model, {min(info['missing_keys'])} for one."
        )
    if getattr(model.config, "bos_token_id", None) is None or tokenizer.eos_token_id is None:
        raise UserError(f"{folder} lacks a start token (bos) or an end token (eos).")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def read_tokens(tokenizer: PreTrainedTokenizerBase, data: str, text_column: str, count: int) -> np.ndarray:
    """The first `count` tokens of a text, or all, with an end token after each document: int64 [at most count].

    Raises:
        UserError: There is no such text.
    """
    source = open_source(Section(data), "--data", "validation", text_column, streaming=False)
    tokens: list[int] = []
    for batch in document_batches(source.stream(), _BATCH_CHARACTERS):
        for ids in encode(tokenizer, batch):
            tokens += [*ids, tokenizer.eos_token_id]
        if len(tokens) >= count:
            break
    return np.array(tokens[:count], dtype=np.int64)


@torch.no_grad()
def score(model: PreTrainedModel, tokens: np.ndarray, length: int, mode: str, settings: Settings) -> Scores:
    """Losses of all tokens in sequences of `length`, which divides their number.

    Raises:
        UserError: The window exceeds the model's positions.
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
        losses.append(token_losses(model(part, cache=cache, use_cache=True).logits, wanted))
    shared = sum(tensor.nbytes for layer in cache.layers for tensor in layer.constants.values())
    return torch.cat(losses, 1), (cache.nbytes - shared) // inputs.shape[0] + shared


def _sliding(model: PreTrainedModel, inputs: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, None]:
    longest = getattr(model.config, "max_position_embeddings", None)
    window, length, losses, done = min(settings.part, inputs.shape[1]), inputs.shape[1], [], 0
    if not isinstance(model.config, BoundedMemoryConfig) and longest is not None and window > longest:
        raise UserError(f"`--part`: a window of {window} tokens exceeds the model's {longest} positions.")
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


def evaluate(folder: str, settings: Settings) -> dict[str, Any]:
    """Evaluate a model at all lengths.

    Returns:
        Figures for JSON: `model`, `mode`, `parameters`, and for every length `loss`, `perplexity` and `state_bytes`;
        `by_position` of the longest, between the lengths.

    Raises:
        UserError: The model, the text or the mode cannot be used.
    """
    model, tokenizer = load(folder, getattr(torch, settings.dtype))
    bounded = isinstance(model.config, BoundedMemoryConfig)
    mode = settings.mode or ("carried" if bounded else "sliding")
    if mode == "carried" and not bounded:
        raise UserError(f"{folder} has no state of constant size to carry: use `--mode sliding`.")
    longest = max(settings.lengths)
    tokens = read_tokens(tokenizer, settings.data, settings.text_column, settings.tokens)
    if len(tokens) < longest:
        raise UserError(
            f"{settings.data} has {len(tokens):,} tokens, but a sequence has {longest:,}. Name a longer text, or "
            "shorter `--lengths`."
        )
    if len(tokens) < settings.tokens:
        progress(f"{settings.data} has only {len(tokens):,} of the {settings.tokens:,} tokens to score.")
    tokens = tokens[: len(tokens) // longest * longest]
    lengths = {}
    for length in sorted(settings.lengths):
        scores = score(model, tokens, length, mode, settings)
        value = perplexity(scores.loss, f"{settings.data} ({folder} at {length:,} tokens)")
        lengths[str(length)] = {"loss": scores.loss, "perplexity": value, "state_bytes": scores.state_bytes}
    borders = [0, *sorted(settings.lengths)]
    by_position = [float(scores.losses[:, first:end].mean()) for first, end in itertools.pairwise(borders)]
    return {
        "model": portable(Path(os.path.abspath(folder)).name),
        "model_type": model.config.model_type,
        "mode": mode,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": len(tokens),
        "lengths": lengths,
        "by_position": {"borders": borders, "loss": by_position},
    }
