"""A tokenizer for fairseq dictionaries, which may lack tokens of their byte-level BPE.

fairseq applies every merge of the BPE to a text, then looks the tokens up in a dictionary of those in its training
text. Any other token is `<unk>`. A BPE of the `tokenizers` library needs an id for every token.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, RobertaTokenizer


class FairseqBpeTokenizer(RobertaTokenizer):
    """A `RobertaTokenizer` with a vocabulary that lacks some tokens, which get the id of `<unk>` in a text.

    Internally, missing tokens have ids from `len(tokenizer)` upwards, which no method accepts or returns. Only the
    `tokenizers` library shows them: in `backend_tokenizer`, in the `encodings` of a result (not in its `input_ids`), or
    if it reads tokenizer.json. `tokenize` returns all tokens by name, including missing ones.

    Special tokens written in a text (`<s>`, `<mask>`) are special, as in every tokenizer of transformers. fairseq reads
    them as text; `split_special_tokens=True` does the same here.

    An added token gets the id `len(tokenizer)`. If it is a missing token, it is no longer `<unk>`.
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
            vocab: the id of every token; ids have no gaps, and missing tokens come last.
            merges: pairs of tokens, in order of priority.
            missing_tokens: number of missing tokens.
            base_vocab_size: number of the other tokens before any were added (default: all).
            kwargs: arguments of `RobertaTokenizer`.

        Raises:
            ValueError: The vocabulary or the merges are files.
        """
        if isinstance(vocab, str) or isinstance(merges, str):
            raise ValueError(
                "FairseqBpeTokenizer needs tokenizer.json, because vocab.json and merges.txt do not show which tokens "
                "are missing."
            )
        present = None if vocab is None else len(vocab) - missing_tokens
        # super().__init__ adds the special tokens and needs both.
        self.missing_tokens = missing_tokens
        self.base_vocab_size = present if base_vocab_size is None else base_vocab_size
        own = {"missing_tokens": self.missing_tokens, "base_vocab_size": self.base_vocab_size}
        super().__init__(vocab=vocab, merges=merges, **own, **kwargs)

    # ---- sizes and names ----

    def __len__(self) -> int:
        """Number of ids."""
        return super().__len__() - self.missing_tokens

    @property
    def vocab_size(self) -> int:
        """Number of ids except those of added tokens."""
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
        """An id unknown to the backend."""
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
        return index if index is None or index < len(self) else self.unk_token_id  # None without <unk>

    # ---- from ids to text ----

    def _convert_id_to_token(self, index: int) -> str | None:
        return super()._convert_id_to_token(self._known([int(index)], self._nowhere)[0])

    def convert_ids_to_tokens(self, ids: int | list[int], skip_special_tokens: bool = False) -> Any:
        """Tokens of ids; `None` for an id that does not exist."""
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
        # Added tokens come before the missing ones, whose ids move up. They join the BPE's vocabulary, where no merge
        # makes them unless they were missing tokens.
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
        """A tokenizer trained on a text: a `RobertaTokenizer`, because it lacks no tokens. Arguments are the same."""
        own = ("missing_tokens", "base_vocab_size")
        options = {name: value for name, value in self.init_kwargs.items() if name not in own}
        plain = RobertaTokenizer(vocab=self.get_vocab(), merges=[], **options)  # for its special tokens only
        return plain.train_new_from_iterator(*args, **kwargs)
