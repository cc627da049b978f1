"""Tokenizers converted from fairseq's files give the ids that fairseq gives, also where its dictionary lacks pieces.

What fairseq gives is written out literally in `reference/gpt2_bpe.py`. `complete` is RoBERTa's dictionary. `sparse` is
that of a checkpoint of the authors' code: all bytes, and 30 of GPT-2's 50,000 merges. `thin` has a third of
GPT-2's tokens from the 100th on.
"""

import hashlib
import json
import random
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from gpt2_files import MASKED, TEXTS, gpt2_folder, random_texts, roberta_dictionary, small_gpt2_folder
from helpers import ROOT, tiny_config, tiny_tokenizer
from reference.gpt2_bpe import FairseqEncoder, Gpt2Bpe
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, ByT5Tokenizer, GPT2Tokenizer, RobertaTokenizer

from luna_hf import FairseqBpeTokenizer

sys.path.insert(0, str(ROOT / "conversion"))  # the scripts import their siblings plainly

from fairseq_tokenizer import (
    Bpe,
    bpe_from_merges,
    build_tokenizer,
    export_tokenizer,
    is_roberta,
    read_bpe,
    read_dictionary,
)
from shared import UserError

FIXTURE = ROOT / "tests" / "fixtures" / "luna_fairseq_checkpoint"
# SHA-256 of published files, written again by json.dumps: GPT-2's vocab.json, and that of FacebookAI/roberta-base.
GPT2_VOCAB = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
ROBERTA_VOCAB = "babf5099d5a7cfc65e5fa18b47b2fc026868b8e05408cf6659c2d2bf1a58c791"
KINDS = ["complete", "sparse", "thin"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return gpt2_folder(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def bpe(files):
    return read_bpe(str(files))


@pytest.fixture(scope="module")
def dictionaries(tmp_path_factory):
    """Paths of the three dictionaries."""
    folder = tmp_path_factory.mktemp("dictionaries")
    thin = [f"{index} 7\n" for index in range(100, 50256, 3)]
    random.Random(1).shuffle(thin)
    (folder / "thin.txt").write_text("".join(["<sep> 9\n", *thin, "50256 1\n", "madeupword0000 0\n"]))
    return {
        "complete": roberta_dictionary(folder / "complete.txt"),
        "sparse": FIXTURE / "tied" / "dict.txt",
        "thin": folder / "thin.txt",
    }


@pytest.fixture(scope="module")
def tokenizers(dictionaries, bpe):
    return {name: build_tokenizer(read_dictionary(path), bpe, 65) for name, path in dictionaries.items()}


@pytest.fixture(scope="module")
def references(dictionaries, files):
    slow = Gpt2Bpe(files)
    return {name: FairseqEncoder(slow, path.read_text().splitlines()) for name, path in dictionaries.items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return read_bpe(str(small_gpt2_folder(tmp_path_factory.mktemp("small"))))


@pytest.fixture
def tokenizer(small):
    """A small one that lacks most pieces."""
    return build_tokenizer(read_dictionary(FIXTURE / "tied" / "dict.txt"), small, 64)


kinds = pytest.mark.parametrize("kind", KINDS)


def ids(tokenizer, *texts, **options):
    return tokenizer(*texts, **options, verbose=False)["input_ids"]


# ---- ids ----


@kinds
def test_ids_are_those_of_fairseq(tokenizers, references, kind):
    expected_class = RobertaTokenizer if kind == "complete" else FairseqBpeTokenizer
    assert type(tokenizers[kind]) is expected_class
    unknown = 0
    for text in [*TEXTS, *random_texts()]:
        expected = references[kind].encode(text)
        assert ids(tokenizers[kind], text) == expected, text
        unknown += expected.count(3)
    assert (unknown > 0) is (kind != "complete")


@kinds
def test_ids_of_pairs_are_those_of_fairseq(tokenizers, references, kind):
    for first, second in pairwise(TEXTS):
        assert ids(tokenizers[kind], first, second) == references[kind].encode(first, second)


@kinds
@pytest.mark.parametrize("text", MASKED)
def test_a_mask_takes_the_blanks_before_it(tokenizers, references, kind, text):
    assert ids(tokenizers[kind], text) == references[kind].encode_masked(text)


@kinds
@pytest.mark.parametrize(("text", "kept"), [("A <mask>  ", "  "), ("A\x1c<mask>", "\x1c")])
def test_blanks_that_only_fairseq_drops_beside_a_mask(tokenizers, references, kind, text, kept):
    reference = references[kind]
    assert ids(tokenizers[kind], text) != reference.encode_masked(text)
    without = [row for row in ids(tokenizers[kind], text) if row not in reference.words(kept)]
    assert without == [row for row in reference.encode_masked(text) if row not in reference.words(kept)]


def test_known_ids(tokenizers):
    assert ids(tokenizers["complete"], "Hello world") == [0, 31414, 232, 2]
    assert ids(tokenizers["complete"], " Hello world!") == [0, 20920, 232, 328, 2]
    assert ids(tokenizers["complete"], "Hello <mask>.") == [0, 31414, 50264, 4, 2]
    assert ids(tokenizers["sparse"], "the <mask> of.") == [0, 3, 293, 9, 4, 2]


@kinds
def test_special_tokens_as_words_are_text_to_fairseq(tokenizers, references, kind):
    text = "a <s> b <mask></s> <pad><unk>"
    assert ids(tokenizers[kind], text, split_special_tokens=True) == references[kind].encode(text)
    assert ids(tokenizers[kind], text) != references[kind].encode(text)


@kinds
def test_special_tokens_and_length(tokenizers, dictionaries, kind):
    tokenizer, symbols = tokenizers[kind], read_dictionary(dictionaries[kind])
    assert len(tokenizer) == tokenizer.vocab_size == len(symbols) == len(tokenizer.get_vocab())
    assert [tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id] == [0, 1, 2]
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 2, 3]
    assert tokenizer.mask_token_id == symbols.index("<mask>") == len(symbols) - 1
    assert tokenizer.model_max_length == 65 and tokenizer.is_fast
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(symbols)))
    assert tokenizer.vocab == tokenizer.get_vocab()


def test_the_complete_vocabulary_is_that_of_roberta(tokenizers):
    vocab = tokenizers["complete"].get_vocab()
    ordered = {token: vocab[token] for token in sorted(vocab, key=vocab.get)}
    assert hashlib.sha256(json.dumps(ordered).encode()).hexdigest() == ROBERTA_VOCAB


def test_the_dictionary_of_a_genuine_checkpoint():
    for name in ("tied", "untied"):
        expected = json.loads((FIXTURE / name / "config.json").read_text())["token_to_id"]
        symbols = read_dictionary(FIXTURE / name / "dict.txt")
        assert {symbol: index for index, symbol in enumerate(symbols)} == expected


# ---- everything else that a tokenizer does ----


@pytest.fixture(scope="module")
def row_of(tokenizers, dictionaries, bpe):
    """From an id of the complete tokenizer to the row of another."""

    def translate(kind):
        rows = {symbol: index for index, symbol in enumerate(read_dictionary(dictionaries[kind]))}
        return [rows.get(symbol, 3) for symbol in read_dictionary(dictionaries["complete"])]

    return {kind: translate(kind) for kind in KINDS}


CALLS = {
    "single": {},
    "no-special-tokens": {"add_special_tokens": False},
    "padding": {"padding": True, "return_special_tokens_mask": True},
    "padding-left": {"padding": "max_length", "max_length": 70, "padding_side": "left", "pad_to_multiple_of": 8},
    "truncation": {"truncation": True, "max_length": 9, "return_length": True},
    "overflow": {
        **{"truncation": True, "max_length": 12, "stride": 3, "padding": True},
        **{"return_overflowing_tokens": True, "return_offsets_mapping": True},
    },
    "torch": {"padding": True, "return_tensors": "pt"},
    "numpy": {"padding": True, "truncation": True, "max_length": 10, "return_tensors": "np"},
    "offsets": {"return_offsets_mapping": True, "return_token_type_ids": True},
}
BATCH = [text for text in TEXTS if text.strip()]
SAME = {
    *("attention_mask", "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length"),
    "token_type_ids",
}


def as_lists(values):
    return values.tolist() if isinstance(values, torch.Tensor | np.ndarray) else values


def assert_translated(given, expected, rows):
    """Equal but for the ids, which are those of the other dictionary."""
    assert given.keys() == expected.keys() and set(given) <= {"input_ids"} | SAME
    for name in given.keys() - {"input_ids"}:
        assert as_lists(given[name]) == as_lists(expected[name])
    assert type(given["input_ids"]) is type(expected["input_ids"])
    theirs = as_lists(expected["input_ids"])
    if theirs and isinstance(theirs[0], list):
        assert as_lists(given["input_ids"]) == [[rows[index] for index in row] for row in theirs]
    else:
        assert as_lists(given["input_ids"]) == [rows[index] for index in theirs]


@pytest.mark.parametrize("kind", ["sparse", "thin"])
@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_call_it(tokenizers, row_of, kind, call):
    options, (ours, plain) = CALLS[call], (tokenizers[kind], tokenizers["complete"])
    inputs = [(BATCH,), (BATCH, BATCH[::-1])]
    if "return_tensors" not in options or "padding" in options:
        inputs += [(BATCH[3],), (BATCH[3], BATCH[4])]
    for texts in inputs:
        given, expected = (tokenizer(*texts, **options, verbose=False) for tokenizer in (ours, plain))
        assert_translated(given, expected, row_of[kind])
        assert given.word_ids(0) == expected.word_ids(0) and given.sequence_ids(0) == expected.sequence_ids(0)


@pytest.mark.parametrize("kind", ["sparse", "thin"])
def test_words_that_are_split_already(tokenizers, row_of, kind):
    words = [text.split() for text in BATCH]
    options = {"is_split_into_words": True, "return_offsets_mapping": True, "truncation": True, "max_length": 20}
    given, expected = (tokenizers[name](words, **options) for name in (kind, "complete"))
    assert_translated(given, expected, row_of[kind])
    assert given.word_ids(2) == expected.word_ids(2)


@pytest.mark.parametrize("kind", ["sparse", "thin"])
def test_encode_tokenize_and_pad(tokenizers, references, kind):
    tokenizer, plain = tokenizers[kind], tokenizers["complete"]
    for text in BATCH:
        expected = references[kind].encode(text)
        assert tokenizer.encode(text, verbose=False) == expected
        pieces = tokenizer.tokenize(text, verbose=False)
        assert pieces == plain.tokenize(text, verbose=False)
        assert tokenizer.convert_tokens_to_ids(pieces) == expected[1:-1]
        assert [tokenizer.convert_tokens_to_ids(piece) for piece in pieces] == expected[1:-1]
    padded = tokenizer.pad({"input_ids": [[0, 5, 2], [0, 2]]}, return_tensors="pt")
    assert padded["input_ids"].tolist() == [[0, 5, 2], [0, 2, 1]]


@pytest.mark.parametrize("kind", ["sparse", "thin"])
def test_decoding(tokenizers, dictionaries, bpe, kind):
    tokenizer, symbols = tokenizers[kind], read_dictionary(dictionaries[kind])
    names = [bpe.tokens[int(symbol)] if symbol.isdigit() else symbol for symbol in symbols]
    assert tokenizer.convert_ids_to_tokens(list(range(len(symbols)))) == names
    assert tokenizer.convert_ids_to_tokens(torch.arange(len(symbols))) == names
    assert tokenizer.convert_ids_to_tokens(5) == names[5]
    text = "the <mask> of"
    assert tokenizer.decode(ids(tokenizer, text)).endswith("<mask> of</s>" if kind == "sparse" else "</s>")
    rows = ids(tokenizer, [text, "other"], padding=True, return_tensors="pt")
    assert tokenizer.batch_decode(rows) == [tokenizer.decode(row) for row in rows.tolist()]
    # What no model can answer is nothing, as for every other id that there is not.
    beyond = [len(symbols), len(symbols) + tokenizer.missing_tokens - 1, 10**6]
    assert tokenizer.convert_ids_to_tokens(beyond) == [None] * 3
    assert tokenizer.convert_ids_to_tokens(beyond[0]) is None
    assert tokenizer.decode([5, *beyond, 6]) == tokenizer.decode([5, 6])
    assert tokenizer.decode(5) == tokenizer.decode([5]) and tokenizer.decode(beyond[0]) == ""
    assert tokenizer.decode(tokenizer(text)) == tokenizer.decode(ids(tokenizer, text))


# ---- saving ----


@kinds
@pytest.mark.parametrize("with_model", [True, False])
def test_loading_with_the_package_asks_for_no_flag(tokenizers, tmp_path, kind, with_model):
    tokenizer = tokenizers[kind]
    if with_model:
        tiny_config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert ids(loaded, BATCH) == ids(tokenizer, BATCH) and len(loaded) == len(tokenizer)
    assert ids(loaded, "the <mask> of<mask>") == ids(tokenizer, "the <mask> of<mask>")
    assert loaded.model_max_length == 65 and loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.decode([9, 3, 10]) == tokenizer.decode([9, 3, 10])


# ---- reading ----


def test_the_dictionary(tmp_path):
    path, special = tmp_path / "dict.txt", ["<s>", "<pad>", "</s>", "<unk>"]
    path.write_text("13 850\n<sep> 3\n0 2\r\nmadeupword0000 0\n50256 0")
    assert read_dictionary(path) == [*special, "13", "<sep>", "0", "madeupword0000", "50256", "<mask>"]
    path.write_text("13 850\n<mask> 0\n7 1\n")
    assert read_dictionary(path) == [*special, "13", "<mask>", "7"]


def test_a_mask_inside_the_dictionary_keeps_its_row(tmp_path, small, files):
    lines = ["262 9", "<mask> 0", "286 1"]
    (tmp_path / "dict.txt").write_text("\n".join(lines))
    tokenizer = build_tokenizer(read_dictionary(tmp_path / "dict.txt"), small, 64)
    assert tokenizer.mask_token_id == 5 and len(tokenizer) == 7
    assert ids(tokenizer, "x the <mask> of") == FairseqEncoder(Gpt2Bpe(files), lines).encode_masked("x the <mask> of")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"dict\.txt cannot be read \(No such file"),
        (b"", "is empty"),
        (b"13 \xff\n", "not UTF-8"),
        (b"13 5\n14\n", "line 2: '14' is not a symbol and its count"),
        (b"13 5\n\n", "line 2: '' is not"),
        (b"13 many\n", "line 1: '13 many' is not a symbol"),
        (b"13 5\n7 1\n13 2\n", "line 3: '13' is in the dictionary already"),
        (b"13 5\n<pad> 2\n", "line 2: '<pad>' is in the dictionary already"),
        (b"13 5\nthe 2\n", "line 2: 'the' is not the id of a piece.*not one over GPT-2's BPE"),
        ("\u0664 5\n".encode(), "line 1: '\u0664' is not the id"),
        (b"007 5\n", "'007' is not the id"),
        (b"13 5\n13 5 #fairseq:overwrite\n", "line 2: the flag #fairseq:overwrite gives one symbol two rows"),
    ],
)
def test_a_dictionary_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "dict.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_dictionary(path)


def test_the_files_of_the_bpe(files, bpe, tmp_path):
    for ours, theirs in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (tmp_path / ours).write_bytes((files / theirs).read_bytes())
    assert read_bpe(str(tmp_path)) == bpe
    assert len(bpe.merges) == 50000 and bpe.merges[0] == ("Ġ", "t")
    assert len(bpe.tokens) == 50257 and bpe.from_text() == bpe.tokens[:-1]
    # A merge whose first half is a number sign is no comment.
    assert ("#", "#") in bpe.merges


def test_ids_follow_from_the_merges(files, bpe):
    assert bpe_from_merges(bpe.merges) == bpe
    vocab = {token: index for index, token in enumerate(bpe_from_merges(bpe.merges).tokens)}
    assert hashlib.sha256(json.dumps(vocab).encode()).hexdigest() == GPT2_VOCAB


def broken(name, change):
    def apply(folder):
        (folder / name).write_text(change((folder / name).read_text(encoding="utf-8")), encoding="utf-8")

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "merges.txt").unlink(),
            "does not have them.*--gpt2-bpe FOLDER",
        ),
        (broken("vocab.json", lambda text: text[:-1]), r"vocab\.json cannot be read as JSON"),
        (broken("vocab.json", lambda text: "[1, 2]"), "does not give every token an id"),
        (broken("vocab.json", lambda text: text.replace(": 300,", ": 3000,")), "without a gap"),
        (broken("vocab.json", lambda text: text.replace('"!"', '"!!!!"')), r"every byte \('!' is missing\)"),
        (broken("merges.txt", lambda text: text + "Ġ zzz\n"), "has no token 'zzz': the two files"),
        (broken("merges.txt", lambda text: text + "~ ~\n"), "merges '~' and '~', but .* has no token '~~'"),
        (broken("merges.txt", lambda text: text + "a b c\n"), "line 402: 'a b c' is not two tokens"),
    ],
)
def test_a_bpe_that_cannot_be_read(tmp_path, change, message):
    change(small_gpt2_folder(tmp_path))
    with pytest.raises(UserError, match=message):
        read_bpe(str(tmp_path))


@pytest.mark.parametrize("source", ["nowhere/at-all", "not a name", "{folder}/missing"])
def test_a_bpe_that_is_not_there(tmp_path, source):
    # Nothing in a test reaches the Hub (conftest.py), which is what a machine without a network looks like.
    with pytest.raises(UserError, match=r"vocab\.json and merges\.txt.*--gpt2-bpe FOLDER"):
        read_bpe(source.format(folder=tmp_path))


def test_a_dictionary_over_another_bpe(small):
    with pytest.raises(UserError, match=r"symbol 50000, but the BPE has only the tokens 0 to 656.*--gpt2-bpe"):
        build_tokenizer(["<s>", "<pad>", "</s>", "<unk>", "50000", "<mask>"], small, 64)
    pieces = Bpe([*small.tokens, "<x>"], small.merges)
    with pytest.raises(UserError, match="symbol '<x>', which is a piece of the BPE as well"):
        build_tokenizer(["<s>", "<pad>", "</s>", "<unk>", "657", "<x>", "<mask>"], pieces, 64)


def test_roberta_is_known_by_its_symbols(dictionaries):
    complete = read_dictionary(dictionaries["complete"])
    assert is_roberta(complete)
    assert not is_roberta([*complete[:4], complete[5], complete[4], *complete[6:]])
    assert not is_roberta(complete[:-1]) and not is_roberta(read_dictionary(dictionaries["sparse"]))


# ---- back to fairseq ----


@kinds
def test_export_gives_the_dictionary_back(tokenizers, dictionaries, files, tmp_path, kind):
    export_tokenizer(tokenizers[kind], tmp_path)
    lines, original = ((path.read_text().splitlines()) for path in (tmp_path / "dict.txt", dictionaries[kind]))
    assert [line.split()[0] for line in lines] == [line.split()[0] for line in original]
    assert {line.split()[1] for line in lines} == {"0"}
    assert (tmp_path / "vocab.bpe").read_bytes() == (files / "merges.txt").read_bytes()
    assert json.loads((tmp_path / "encoder.json").read_text()) == json.loads((files / "vocab.json").read_text())
    again = build_tokenizer(read_dictionary(tmp_path / "dict.txt"), read_bpe(str(tmp_path)), 64)
    assert type(again) is type(tokenizers[kind]) and again.get_vocab() == tokenizers[kind].get_vocab()


def test_export_of_a_saved_tokenizer_and_of_one_with_the_mask_inside(tokenizer, small, tmp_path):
    tokenizer.save_pretrained(tmp_path / "saved")
    for folder, exported in (("one", tokenizer), ("two", AutoTokenizer.from_pretrained(tmp_path / "saved"))):
        (tmp_path / folder).mkdir()
        export_tokenizer(exported, tmp_path / folder)
    assert (tmp_path / "one" / "dict.txt").read_text() == (tmp_path / "two" / "dict.txt").read_text()
    inside = ["<s>", "<pad>", "</s>", "<unk>", "262", "<mask>", "286", "<sep>"]
    export_tokenizer(build_tokenizer(inside, small, 64), tmp_path)
    assert read_dictionary(tmp_path / "dict.txt") == inside


def test_export_of_a_tokenizer_that_never_was_in_fairseq(tmp_path):
    tokenizer = tiny_tokenizer(["the quick brown fox ## ##", "naïve café"] * 3)
    export_tokenizer(tokenizer, tmp_path)
    again = build_tokenizer(read_dictionary(tmp_path / "dict.txt"), read_bpe(str(tmp_path)), 64)
    assert type(again) is RobertaTokenizer and again.get_vocab() == tokenizer.get_vocab()
    fairseq = FairseqEncoder(Gpt2Bpe(tmp_path), (tmp_path / "dict.txt").read_text().splitlines())
    for text in [*TEXTS, *random_texts()]:
        assert ids(tokenizer, text) == ids(again, text) == fairseq.encode(text)


TAG = [("<", "s"), ("<s", ">")]


def altered(tokenizer, part, value):
    setattr(tokenizer.backend_tokenizer, part, value)
    return tokenizer


def roberta_like(small, names=("<s>", "<pad>", "</s>", "<unk>"), last=("<mask>",), drop=(), merges=None, **options):
    tokens = [*names, *(token for token in small.from_text() if token not in drop), *last]
    vocab = {token: index for index, token in enumerate(tokens)}
    return RobertaTokenizer(vocab=vocab, merges=small.merges if merges is None else merges, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: roberta_like(s, ("<pad>", "<s>", "</s>", "<unk>")), "has '<s>' at id 1, and '<pad>' at 0"),
        (lambda s: roberta_like(s, ("<s>", "<pad>", "<unk>", "</s>")), "has '</s>' at id 3, and '<unk>' at 2"),
        (lambda s: roberta_like(s, last=("<mask>", "[E1]")), r"token '\[E1\]' \(id 661\), which is no piece"),
        (lambda s: roberta_like(s, last=("<mask>", "<a b>")), r"token '<a b>' \(id 661\)"),
        (lambda s: roberta_like(s, last=(), mask_token="[M]"), "no token '<mask>'"),
        (lambda s: roberta_like(s, drop=("!",), merges=[]), "no token for the byte '!'"),
        (lambda s: roberta_like(s, add_prefix_space=True), "blank before every text"),
        (lambda s: GPT2Tokenizer(vocab={"a": 0}, merges=[]), r"has '<s>' nowhere, and 'a' at 0"),
        (lambda s: ByT5Tokenizer(), "does not cut texts"),
        (lambda s: altered(roberta_like(s), "pre_tokenizer", Whitespace()), "does not cut texts"),
        (lambda s: altered(roberta_like(s), "normalizer", NFC()), "does not cut texts"),
        (lambda s: altered(roberta_like(s), "model", BPE({"a": 0}, [], dropout=0.1)), "does not cut texts"),
        (lambda s: altered(roberta_like(s), "model", WordLevel({"a": 0}, "a")), "does not cut texts"),
        (lambda s: roberta_like(bpe_from_merges(TAG), drop=("<s>",), merges=TAG), "special token '<s>' from text"),
        (
            lambda s: RobertaTokenizer(vocab={**roberta_like(s).get_vocab(), "madeupword0000": 700}, merges=s.merges),
            "no token with the id 661",
        ),
    ],
)
def test_export_refuses_what_fairseq_cannot_express(small, tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        export_tokenizer(make(small), tmp_path)
    assert not list(tmp_path.iterdir())


def test_export_refuses_added_tokens_that_have_no_symbol(tokenizer, tmp_path):
    tokenizer.add_tokens(["[E1]"])
    with pytest.raises(UserError, match=r"token '\[E1\]' \(id 294\)"):
        export_tokenizer(tokenizer, tmp_path)
