"""Simultaneous translation: write a translation while its source is still being read.

    translator = SimultaneousTranslator(model, tokenizer, WaitK(3))
    for piece in translator.stream(chunks_of_text):
        print(piece, end="", flush=True)

The model is an encoder-decoder with `source_is_causal=True`. Its state has constant size, whatever the length of the
source and of the translation. A *policy* decides when a token is written (Ma et al. 2019, "STACL", arXiv 1810.08398).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .layers.cache import MemoryCache
from .models.policy import needed, visible

_COUNTS = ("last", "read_tokens", "written", "late", "ended", "done")
# Default of the tokens that are written at most after the end of a source; and more than a policy may ever write ahead.
_MOST, _MANY = 200, 2**20


class Policy:
    """When to write. Derive from it and define `needed` for another policy."""

    def needed(self, written: Tensor) -> Tensor:
        """Return how many source tokens must be read before a target token is written, unless the source has ended.

        Args:
            written: long, of any shape: number of target tokens written before it.

        Returns:
            Integers of the same shape. They may not fall as `written` grows, and must grow in the long run: a source
            is not read to its end otherwise.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `needed`.")

    def visible(self, source_lengths: Tensor, length: int) -> Tensor:
        """Return `visible_source` (b, length) of a model's forward pass, for sources of these lengths (b,)."""
        return visible(self, source_lengths, torch.arange(length, device=source_lengths.device)[None])


@dataclass(frozen=True)
class WaitK(Policy):
    """Read `k` tokens, then write and read in turn (Ma et al. 2019, section 3.1).

    Raises:
        ValueError: `k` is no integer of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, Integral) or self.k < 1:
            raise ValueError(f"`k` is {self.k}, but it must be an integer of at least 1.")

    def needed(self, written: Tensor) -> Tensor:
        """Like `Policy.needed`."""
        return written + self.k


@dataclass(frozen=True)
class ReadAll(Policy):
    """Read the whole source before writing."""

    def needed(self, written: Tensor) -> Tensor:
        """Like `Policy.needed`."""
        return torch.full_like(written, torch.iinfo(torch.long).max)


class TranslationStream:
    """Translations of a batch of sources that arrive token by token; the tokens with the highest scores are written.

    Of the model's `generation_config`, it follows the ids of the start and the end and `max_new_tokens`. It neither
    searches with beams nor samples.

    Args:
        model: an encoder-decoder with `source_is_causal=True`, in evaluation mode.
        policy: when to write.
        rows: number of sources.
        max_new_tokens: number of tokens that are written at most after a source has ended. Defaults to that of the
            model's `generation_config`, or 200.

    Raises:
        TypeError: `policy` is no policy, or a wrong one.
        ValueError: The model reads its source whole, is in training mode, or has a `generation_config` that changes the
            scores of tokens; the policy is wrong, or `max_new_tokens` is below 1.
    """

    is_unfinished = False  # whether `write` has begun a token, and not ended
    unreturned: tuple[Tensor, ...] = ()  # columns that were written before a call of `write` failed

    def __init__(
        self, model: PreTrainedModel, policy: Policy, rows: int = 1, max_new_tokens: int | None = None
    ) -> None:
        if not getattr(model.config, "source_is_causal", False):
            raise ValueError(
                "A stream needs an encoder-decoder with `source_is_causal=True`; this model reads its source whole."
            )
        if model.training:
            raise ValueError("The model is in training mode, with dropout. Call `model.eval()` first.")
        refuse_processors(model)
        self.model, self.policy, self.cache = model, policy, MemoryCache(model.config)
        settings, ends = model.generation_config, model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        limits = (max_new_tokens, settings.max_new_tokens, _MOST)
        self.most = next(limit for limit in limits if limit is not None)
        if self.most < 1:
            raise ValueError(f"`max_new_tokens` is {self.most}, but a translation has at least 1 token.")
        starts = (settings.decoder_start_token_id, model.config.decoder_start_token_id)
        start, new = next(start for start in starts if start is not None), {"device": model.device}
        self.last = torch.full((rows, 1), start, **new)  # the newest target token
        # Source tokens, target tokens, and the latter since the end of the source.
        self.read_tokens, self.written, self.late = torch.zeros(3, rows, dtype=torch.long, **new)
        self.ended, self.done = torch.zeros(2, rows, dtype=torch.bool, **new)
        needed(policy, self.written)  # refuses a wrong policy before the first token

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state by name, of constant size; `safetensors.torch.save_file` saves it.

        Raises:
            ValueError: A call has failed midway.
        """
        if self.is_unfinished or self.unreturned:
            raise ValueError("`write` has failed midway, so that there is no state to save.")
        return {**self.cache.state_dict(), **{name: getattr(self, name) for name in _COUNTS}}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        """Continue from the state of another stream of the same model.

        Raises:
            ValueError: The tensors are no state of the model.
        """
        if missing := [name for name in _COUNTS if name not in tensors]:
            raise ValueError(f"The tensors lack {', '.join(missing)}, so they are no state of a stream.")
        tensors = {name: tensor.to(self.model.device) for name, tensor in tensors.items()}
        self.cache.load_state_dict({name: state for name, state in tensors.items() if name not in _COUNTS})
        for name in _COUNTS:
            setattr(self, name, tensors[name].clone())
        self.unreturned, self.is_unfinished = (), False

    @torch.no_grad()
    def read(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Read more source tokens (b, s), if there are any; 0 in the mask marks rows that wait.

        Raises:
            ValueError: A shape is wrong, or a source goes on after its end.
        """
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if not keep.any():
            return
        if ((keep != 0).any(1) & self.ended).any():
            raise ValueError("A source has ended and cannot go on. Start another stream.")
        self.model.base_model.write_source(self.cache, input_ids, keep)
        self.read_tokens = self.read_tokens + (keep != 0).sum(1)

    def end(self, rows: Tensor | None = None) -> None:
        """Mark the end of all sources, or of those of a boolean mask (b,), which are then translated to the end.

        A source that ends before its first token has no translation.

        Raises:
            ValueError: The mask has another shape, or is not boolean.
        """
        rows = torch.ones_like(self.ended) if rows is None else rows.to(self.ended.device)
        if rows.dtype != torch.bool or rows.shape != self.ended.shape:
            raise ValueError(f"`rows` must be a boolean mask of shape {tuple(self.ended.shape)}.")
        self.ended = self.ended | rows
        self.done = self.done | (self.ended & (self.read_tokens == 0))

    def ready(self) -> Tensor:
        """Return which rows may write a token, (b,)."""
        may = self.ended | (self.read_tokens >= needed(self.policy, self.written))
        return may & ~self.done & (self.read_tokens > 0)

    @torch.no_grad()
    def write(self) -> Tensor:
        """Write as many tokens as the policy allows: (b, n), padded where a row writes fewer.

        Raises:
            ValueError: The policy would write without end before the source has ended.
        """
        padding = self.model.config.pad_token_id
        if (~self.done & ~self.ended & (needed(self.policy, self.written + _MANY) <= self.read_tokens)).any():
            raise ValueError(f"{type(self.policy).__name__} never reads on: `needed` must grow with `written`.")
        while (ready := self.ready()).any():
            if self.is_unfinished:
                raise ValueError("`write` has failed midway. Load a state from before, or start another stream.")
            self.is_unfinished = True
            target = {"decoder_input_ids": self.last, "decoder_attention_mask": ready[:, None].long()}
            logits = self.model(**target, cache=self.cache).logits[:, -1]
            logits[:, self.ends] = logits[:, self.ends].masked_fill(~self.ended[:, None], -torch.inf)
            token = logits.argmax(-1)
            is_end = torch.isin(token, torch.tensor(self.ends, device=token.device)) & ready
            self.last = torch.where(ready, token, self.last[:, 0])[:, None]
            self.written, self.late = self.written + ready, self.late + (ready & self.ended)
            self.done = self.done | is_end | (self.late >= self.most)
            self.unreturned = (*self.unreturned, torch.where(ready & ~is_end, token, padding))
            self.is_unfinished = False
        columns, self.unreturned = self.unreturned, ()
        return torch.stack(columns, 1) if columns else self.last[:, :0]


class SimultaneousTranslator:
    """Translates a text that arrives in chunks.

    Args:
        model: see `TranslationStream`.
        tokenizer: its tokenizer, which splits texts at spaces before anything else, as byte-level BPE does.
        policy: when to write.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: Policy) -> None:
        self.model, self.tokenizer, self.policy = model, tokenizer, policy

    def stream(self, chunks: Iterable[str | Sequence[int]], max_new_tokens: int | None = None) -> Iterator[str]:
        """Yield the translation of a source word by word, as soon as the policy allows.

        Args:
            chunks: the source in pieces of any size, which may split words; or lists of its token ids, without special
                tokens.
            max_new_tokens: see `TranslationStream`.

        Raises:
            TypeError: A chunk is bytes.
            ValueError: The source is empty, or ids contain a token that ends it.
        """
        stream = TranslationStream(self.model, self.policy, 1, max_new_tokens)
        first, last = self.special_tokens()
        text, words = "", Words(self.decode)
        yield from self.translate(stream, first, words)
        for chunk in chunks:
            if isinstance(chunk, str):
                whole, text = finished_words(text, chunk)
                ids = self.encode(whole)
            elif isinstance(chunk, bytes):
                raise TypeError("A chunk is bytes, not text: decode it with an incremental decoder of `codecs`.")
            else:
                ids, text = [*self.encode(text), *map(int, chunk)], ""
            if {*first, *last} & {*ids}:
                raise ValueError("A chunk of ids contains a special token of the source's ends: leave these out.")
            yield from self.translate(stream, ids, words)
        ids = self.encode(text.rstrip())
        if not ids and stream.read_tokens.item() == len(first):
            raise ValueError("The source is empty. Pass chunks of text.")
        yield from self.translate(stream, [*ids, *last], words, ends=True)
        if words.unfinished:
            yield words.text()

    def translate(
        self, stream: TranslationStream, ids: Sequence[int], words: "Words", ends: bool = False
    ) -> Iterator[str]:
        """Read tokens one by one, and yield finished words."""
        steps = [[token] for token in ids] or [[]] * ends
        for number, step in enumerate(steps, 1):
            if step:
                stream.read(torch.tensor([step], device=self.model.device))
            if ends and number == len(steps):
                stream.end()
            for token in stream.write()[0].tolist():
                if word := words.add(token):
                    yield word

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        options = {"add_special_tokens": False, "split_special_tokens": True, "truncation": False, "verbose": False}
        return self.tokenizer(text, **options)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Return the text of target tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before and after a text."""
        ids = self.tokenizer("a", return_special_tokens_mask=True)
        special, found = ids["special_tokens_mask"], ids["input_ids"]
        first = special.index(0)
        return found[:first], found[len(special) - special[::-1].index(0) :]


class Words:
    """Splits target tokens into words, each with the space before it.

    A word is decoded behind the one before it, because many tokenizers leave out the space before a text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.before, self.unfinished = list[int](), list[int]()

    def text(self) -> str:
        """Return the text of the unfinished word."""
        return self.behind(self.before, self.unfinished)

    def add(self, token: int) -> str:
        """Add a token, and return the word that ends before it, if one does."""
        word = ""
        if self.unfinished and self.behind(self.unfinished[-1:], [token]).startswith(" "):
            word = self.text()
            self.before, self.unfinished = self.unfinished, []
        self.unfinished.append(token)
        return word

    def behind(self, before: list[int], tokens: list[int]) -> str:
        """Return the text of tokens behind others."""
        return self.decode([*before, *tokens])[len(self.decode(before)) :]


def refuse_processors(model: PreTrainedModel) -> None:
    """Refuse a `generation_config` by which `generate` would change the scores of tokens.

    Raises:
        ValueError: Such a `generation_config`.
    """
    settings = copy.deepcopy(model.generation_config)
    settings.do_sample = False
    model._prepare_special_tokens(settings, True, device=model.device)
    processors = model._get_logits_processor(settings, 1, torch.zeros(1, 1), device=model.device, model_kwargs={})
    if processors:
        names = ", ".join(type(processor).__name__ for processor in processors)
        raise ValueError(
            f"The model's `generation_config` asks for {names}, but a stream writes the tokens with the highest "
            "scores. Unset these fields, or call `generate(policy=...)`."
        )


def finished_words(text: str, chunk: str) -> tuple[str, str]:
    """Split a text that goes on with a chunk: what cannot change any more, and its last word, which may go on."""
    text += chunk
    if not any(map(str.isspace, chunk)):
        return "", text
    last = "" if text[-1].isspace() else text.split()[-1]
    whole = text[: len(text) - len(last)].rstrip()
    return whole, text[len(whole) :]
