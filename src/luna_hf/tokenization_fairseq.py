"""A tokenizer for dictionaries that lack some tokens of their byte-level BPE, as fairseq makes them.

fairseq cuts a text by every merge of the BPE and then looks the pieces up in a dictionary, which holds those that its
training text had. Any other piece is `<unk>`. A BPE of the `tokenizers` library needs an id for every piece.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, RobertaTokenizer


class FairseqBpeTokenizer(RobertaTokenizer):
    """`RobertaTokenizer` over a vocabulary that lacks some pieces: where a text has one of them, its id is that of
    `<unk>`.

    Inside, the missing pieces have the ids from `len(tokenizer)` upwards, which no method takes or gives. Only objects
    of the `tokenizers` library show them: `backend_tokenizer`, the `encodings` of a result (but not its `input_ids`),
    and what that library itself makes of tokenizer.json. `tokenize` gives the pieces by name, also the missing ones.

    Special tokens that stand in a text as words (`<s>`, `<mask>`) are special, as in every tokenizer of transformers;
    to fairseq they are text, for which `split_special_tokens=True` is the option here.

    A token that is added gets the id `len(tokenizer)`, also if it is a missing piece, which then is no longer `<unk>`.
    """

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        merges: list[tuple[str, str]] | None = None,
        missing_tokens: int = 0,
        base_vocab_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            vocab: the id of every piece; ids are 0, 1, 2, ..., and the missing pieces have the last ones.
            merges: the pairs of pieces to merge, the most urgent first.
            missing_tokens: how many pieces are missing.
            base_vocab_size: how many of the others were there before tokens were added (default: all).
            kwargs: what `RobertaTokenizer` takes.

        Raises:
            ValueError: The vocabulary and the merges are files, or there are too few pieces.
        """
        if isinstance(vocab, str) or isinstance(merges, str):
            raise ValueError(
                "FairseqBpeTokenizer takes its vocabulary and merges from tokenizer.json, since vocab.json and "
                "merges.txt do not say which pieces are missing."
            )
        present = None if vocab is None else len(vocab) - missing_tokens
        if present is not None and (missing_tokens < 0 or present < 0):
            raise ValueError(f"missing_tokens is {missing_tokens}, of a vocabulary of {len(vocab)}.")
        # Before super().__init__, which adds the special tokens.
        self.missing_tokens = missing_tokens
        self.base_vocab_size = present if base_vocab_size is None else base_vocab_size
        super().__init__(
            vocab=vocab,
            merges=merges,
            missing_tokens=self.missing_tokens,
            base_vocab_size=self.base_vocab_size,
            **kwargs,
        )

    # ---- sizes and names ----

    def __len__(self) -> int:
        """Number of ids, which are those below it."""
        return super().__len__() - self.missing_tokens

    @property
    def vocab_size(self) -> int:
        """Number of ids without those of added tokens."""
        return super().vocab_size if self.base_vocab_size is None else self.base_vocab_size

    def get_vocab(self) -> dict[str, int]:
        """The id of every token that has one."""
        length = len(self)
        return {token: index for token, index in super().get_vocab().items() if index < length}

    def _known(self, ids: Iterable[int], replacement: int) -> list[int]:
        length = len(self)
        return [index if index < length else replacement for index in ids]

    @property
    def _nowhere(self) -> int:
        """An id that the backend does not know."""
        return super().__len__()

    # ---- from text to ids ----

    def _convert_encoding(self, encoding: Encoding, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], list[Encoding]]:
        columns, encodings = super()._convert_encoding(encoding, *args, **kwargs)
        columns["input_ids"] = [self._known(ids, self.unk_token_id) for ids in columns["input_ids"]]
        return columns, encodings

    def _encode_without_added_tokens(self, text: str) -> list[int]:
        return self._known(super()._encode_without_added_tokens(text), self.unk_token_id)

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        index = super()._convert_token_to_id_with_added_voc(token)
        return index if index is None or index < len(self) else self.unk_token_id  # None: there is no <unk> either

    # ---- from ids to text ----

    def _convert_id_to_token(self, index: int) -> str | None:
        return super()._convert_id_to_token(self._known([int(index)], self._nowhere)[0])

    def convert_ids_to_tokens(self, ids: int | list[int], skip_special_tokens: bool = False) -> Any:
        """Tokens of ids; `None` for one that there is not."""
        if isinstance(ids, int):
            return self._convert_id_to_token(ids)
        return super().convert_ids_to_tokens(self._known(map(int, ids), self._nowhere), skip_special_tokens)

    def _decode(self, token_ids: int | list[int], *args: Any, **kwargs: Any) -> str:
        if isinstance(token_ids, dict):
            token_ids = token_ids["input_ids"]
        token_ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return super()._decode(self._known(token_ids, self._nowhere), *args, **kwargs)

    # ---- more tokens ----

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        known = self.get_vocab()
        words = dict.fromkeys(str(token) for token in new_tokens)
        if new := [word for word in words if word and word not in known]:
            self._make_room(known, new)
        return super()._add_tokens(new_tokens, special_tokens)

    def _make_room(self, known: dict[str, int], new: list[str]) -> None:
        # The added tokens come before the missing pieces, whose ids move up. They become part of the BPE's vocabulary,
        # where no merge leads to them unless they are pieces.
        if not self.missing_tokens:
            return
        pieces = self._tokenizer.get_vocab(with_added_tokens=False)
        missing = sorted(pieces.keys() - known.keys() - set(new), key=pieces.__getitem__)
        order = [*sorted(known, key=known.__getitem__), *new, *missing]
        self.missing_tokens = len(missing)
        merges = json.loads(self._tokenizer.to_str())["model"]["merges"]
        self._tokenizer.model = BPE(
            vocab={token: index for index, token in enumerate(order)},
            merges=[tuple(merge) for merge in merges],
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )

    def train_new_from_iterator(self, *args: Any, **kwargs: Any) -> PreTrainedTokenizerBase:
        """A tokenizer trained on a text, which lacks nothing: a `RobertaTokenizer`, and the arguments are its own."""
        own = ("missing_tokens", "base_vocab_size")
        options = {name: value for name, value in self.init_kwargs.items() if name not in own}
        plain = RobertaTokenizer(vocab=self.get_vocab(), merges=[], **options)  # gives its special tokens, no more
        return plain.train_new_from_iterator(*args, **kwargs)
