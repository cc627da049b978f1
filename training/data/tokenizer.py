"""Training tokenizers, and encoding documents with any."""

import json
import math
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, RobertaTokenizer

from luna_hf.scripting import UserError


def train_tokenizer(documents: Iterable[str], vocab_size: int, max_length: int) -> RobertaTokenizer:
    """A byte-level BPE in RoBERTa's layout: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, and `<mask>` last.

    The vocabulary is smaller than `vocab_size` if the text has too few pairs to merge.
    """
    bpe = _train_bpe(documents, vocab_size - 1, ["<s>", "<pad>", "</s>", "<unk>"])  # <mask> follows
    trained = json.loads(bpe.to_str())["model"]
    vocab = {**trained["vocab"], "<mask>": len(trained["vocab"])}
    merges = [tuple(merge) for merge in trained["merges"]]
    # RoBERTa's mask takes the space before it, so that "The <mask> of" asks for " end" and not for "end".
    mask = AddedToken("<mask>", lstrip=True, special=True)
    return RobertaTokenizer(vocab=vocab, merges=merges, mask_token=mask, model_max_length=max_length)


def train_causal_tokenizer(
    documents: Iterable[str], vocab_size: int, max_length: int | float
) -> PreTrainedTokenizerFast:
    """A byte-level BPE for a causal model: `<s>` 0 starts a text, `<pad>` 1 pads on the left, `</s>` is 2.

    As with `train_tokenizer`, the vocabulary may be smaller. `max_length` is `math.inf` if there is no limit.
    """
    bpe = _train_bpe(documents, vocab_size, ["<s>", "<pad>", "</s>"])
    bpe.decoder = decoders.ByteLevel()
    return open_ended(bpe, {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}, max_length)


def open_ended(backend: Tokenizer, special: dict[str, str], max_length: int | float) -> PreTrainedTokenizerFast:
    """A tokenizer that puts the `bos_token` before a text and nothing after it.

    It has the generic class: those of model types restore their own template on loading. RoBERTa's would end every
    prompt with `</s>`, after which a model starts another text instead of continuing. The post-processor of `backend`
    is replaced; `special` has the special tokens by their names in transformers.
    """
    start = special["bos_token"]
    backend.post_processor = TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, backend.token_to_id(start))]
    )
    limit = {} if math.isinf(max_length) else {"model_max_length": max_length}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **limit, **special)


def ending(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer that puts the `eos_token` after a text and nothing before it, for encoder-decoders.

    It is the given one if that does so, or one of the generic class with the same ids: see `open_ended`. One that the
    generic class cannot stand in for stays, if its texts end with the `eos_token`.

    Raises:
        UserError: There is no `eos_token`, or texts cannot end with it.
    """
    end, added = tokenizer.eos_token_id, tokenizer("")["input_ids"]
    if end is None:
        raise UserError("The tokenizer has no token that ends a text (eos). Use another one, or train one.")
    if added == [end]:
        return tokenizer
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        token, backend = tokenizer.eos_token, Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.post_processor = TemplateProcessing(
            single=f"$A {token}", pair=f"$A {token} $B {token}", special_tokens=[(token, end)]
        )
        kept = ("model_max_length", "padding_side", "clean_up_tokenization_spaces", "extra_special_tokens")
        options = {name: getattr(tokenizer, name) for name in kept}
        generic = PreTrainedTokenizerFast(tokenizer_object=backend, **options, **tokenizer.special_tokens_map)
        if len(generic) == len(tokenizer):
            return generic
    if added[-1:] != [end]:
        raise UserError(
            f"A {type(tokenizer).__name__} does not end texts with its eos token. Use another, or train one."
        )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> list[list[int]]:
    """Token ids of whole documents without special tokens; a literal "<s>" in the text is text."""
    return tokenizer(
        documents,
        add_special_tokens=False,
        split_special_tokens=True,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


def borders(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids that start and end a row: `<s>` and `</s>`, or `[CLS]` and `[SEP]`.

    Raises:
        UserError: The tokenizer lacks one of them, or a padding token.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    last = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if first is None or last is None or tokenizer.pad_token_id is None:
        raise UserError(
            "Rows need a token to start with (bos or cls), one to end with (eos or sep) and one for padding, but the "
            "tokenizer lacks one of these. Use another tokenizer, or train one."
        )
    return first, last


def _train_bpe(documents: Iterable[str], vocab_size: int, special: list[str]) -> Tokenizer:
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return bpe
