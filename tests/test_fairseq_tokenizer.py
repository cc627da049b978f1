"""Converted tokenizers give fairseq's ids, even where its dictionary lacks tokens.

`reference/gpt2_bpe.py` writes out what fairseq does. `complete` is RoBERTa's dictionary; `sparse` belongs to a
checkpoint of the authors' code and has all bytes and 30 of GPT-2's 50,000 merges; `thin` has a third of GPT-2's tokens
from the 100th on.
"""

import hashlib
import json
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from fairseq_format.tokenizer import (
    bpe_from_merges,
    build_tokenizer,
    export_tokenizer,
    read_bpe,
    read_dictionary,
)
from gpt2_files import MASKED, TEXTS, gpt2_folder, random_texts, roberta_dictionary, small_gpt2_folder
from helpers import refused, run_python, tiny_config, tiny_model, tiny_tokenizer
from official_luna import CHECKPOINTS
from reference.gpt2_bpe import FairseqEncoder, Gpt2Bpe
from tokenizers import AddedToken
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, ByT5Tokenizer, DataCollatorForLanguageModeling, RobertaTokenizer, pipeline

from luna_hf import FairseqBpeTokenizer
from luna_hf.scripting import UserError

# SHA-256 of published files, written again by json.dumps: GPT-2's vocab.json, and that of FacebookAI/roberta-base.
GPT2_VOCAB = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
ROBERTA_VOCAB = "babf5099d5a7cfc65e5fa18b47b2fc026868b8e05408cf6659c2d2bf1a58c791"
KINDS = ["complete", "sparse", "thin"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
kinds = pytest.mark.parametrize("kind", KINDS)
lacking = pytest.mark.parametrize("kind", KINDS[1:])


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
        "sparse": CHECKPOINTS / "tied" / "dict.txt",
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


def ids(tokenizer, *texts, **options):
    return tokenizer(*texts, **options, verbose=False)["input_ids"]


# ---- ids ----


@kinds
def test_ids_are_fairseq_s(tokenizers, references, kind):
    tokenizer, encoder = tokenizers[kind], references[kind]
    assert type(tokenizer) is (RobertaTokenizer if kind == "complete" else FairseqBpeTokenizer)
    assert tokenizer.mask_token_id == len(tokenizer) - 1 and tokenizer.model_max_length == 65
    unknown = 0
    for text in [*TEXTS, *random_texts()]:
        expected = encoder.encode(text)
        assert ids(tokenizer, text) == expected, text
        unknown += expected.count(3)
    assert (unknown > 0) is (kind != "complete")
    for first, second in pairwise(TEXTS):
        assert ids(tokenizer, first, second) == encoder.encode(first, second)
    for text in MASKED:
        assert ids(tokenizer, text) == encoder.encode_masked(text)
    # Special tokens written in a text are text to fairseq.
    text = "a <s> b <mask></s> <pad><unk>"
    assert ids(tokenizer, text, split_special_tokens=True) == encoder.encode(text) != ids(tokenizer, text)


def test_the_published_vocabulary(tokenizers):
    vocab = tokenizers["complete"].get_vocab()
    ordered = {token: vocab[token] for token in sorted(vocab, key=vocab.get)}
    assert hashlib.sha256(json.dumps(ordered).encode()).hexdigest() == ROBERTA_VOCAB


# ---- everything else a tokenizer does ----

CALLS = {
    "padding-left": {"padding": "max_length", "max_length": 70, "padding_side": "left", "pad_to_multiple_of": 8},
    "overflow": {
        **{"truncation": True, "max_length": 12, "stride": 3, "padding": True},
        **{"return_overflowing_tokens": True, "return_offsets_mapping": True, "return_special_tokens_mask": True},
    },
    "torch": {"padding": True, "return_tensors": "pt", "add_special_tokens": False},
    "words": {"is_split_into_words": True, "return_offsets_mapping": True},
}
BATCH = [text for text in TEXTS if text.strip()]


@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_call_it(tokenizers, dictionaries, call):
    """Equal to a plain tokenizer except for the ids, which are the other dictionary's."""
    known = {symbol: index for index, symbol in enumerate(read_dictionary(dictionaries["sparse"]))}
    rows = np.array([known.get(symbol, 3) for symbol in read_dictionary(dictionaries["complete"])])
    short = [text[:40] for text in BATCH]
    inputs = ([text.split() for text in short],) if call == "words" else (short, short[::-1])
    given, expected = (tokenizers[kind](*inputs, **CALLS[call], verbose=False) for kind in ("sparse", "complete"))
    assert given.keys() == expected.keys() and type(given["input_ids"]) is type(expected["input_ids"])
    for name in given:
        for ours, theirs in zip(given[name], expected[name], strict=True):
            assert np.array_equal(np.array(ours), rows[np.array(theirs)] if name == "input_ids" else np.array(theirs))
    assert given.word_ids(0) == expected.word_ids(0) and given.sequence_ids(0) == expected.sequence_ids(0)


@lacking
def test_encode_tokenize_and_decode(tokenizers, references, dictionaries, bpe, kind):
    tokenizer, plain = tokenizers[kind], tokenizers["complete"]
    for text in BATCH:
        expected, pieces = references[kind].encode(text), tokenizer.tokenize(text, verbose=False)
        assert tokenizer.encode(text, verbose=False) == expected and pieces == plain.tokenize(text, verbose=False)
        assert tokenizer.convert_tokens_to_ids(pieces) == expected[1:-1]
    symbols = read_dictionary(dictionaries[kind])
    names = [bpe.tokens[int(symbol)] if symbol.isdigit() else symbol for symbol in symbols]
    for every in (list(range(len(symbols))), torch.arange(len(symbols))):
        assert tokenizer.convert_ids_to_tokens(every) == names
    assert tokenizer.convert_ids_to_tokens(5) == names[5]
    # Ids of missing tokens do not exist, like any id beyond the vocabulary.
    beyond = [len(symbols), len(symbols) + tokenizer.missing_tokens - 1, 10**6]
    assert tokenizer.convert_ids_to_tokens(beyond) == [None] * 3 == [tokenizer.convert_ids_to_tokens(i) for i in beyond]
    assert tokenizer.decode([5, *beyond, 6]) == tokenizer.decode([5, 6])
    assert tokenizer.decode(5) == tokenizer.decode([5]) and tokenizer.decode(beyond[0]) == ""


@kinds
def test_loading_with_the_package_needs_no_flag(tokenizers, tmp_path, kind):
    tokenizer = tokenizers[kind]
    tiny_config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(tokenizer) and len(loaded) == len(tokenizer) and loaded.model_max_length == 65
    assert ids(loaded, [*BATCH, "the <mask> of<mask>"]) == ids(tokenizer, [*BATCH, "the <mask> of<mask>"])
    assert loaded.get_vocab() == tokenizer.get_vocab() and loaded.decode([9, 3, 10]) == tokenizer.decode([9, 3, 10])


# ---- in use: a checkpoint of the authors' code, over a small BPE ----


@pytest.fixture
def tokenizer(small):
    return build_tokenizer(read_dictionary(CHECKPOINTS / "tied" / "dict.txt"), small, 64)


def test_missing_tokens_have_no_id(tokenizer):
    assert tokenizer.decode(ids(tokenizer, "Zq7~")[1:-1]) == "Zq7~"  # all bytes are present
    assert "he" not in tokenizer.get_vocab() and "Ġthe" in tokenizer.get_vocab()
    assert tokenizer.convert_tokens_to_ids(["he", "Ġthe", "neither"]) == [3, 5, 3]


def test_collators_and_pipelines_use_only_ids_with_a_row(tokenizer):
    collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.9, mask_replace_prob=0, random_replace_prob=1
    )
    rows = [{"input_ids": row} for row in ids(tokenizer, BATCH)]
    drawn = [collator(rows)["input_ids"].max() for _ in range(3)]
    assert 280 < max(drawn) < 294
    fill = pipeline("fill-mask", model=tiny_model("luna", "mlm", vocab_size=294), tokenizer=tokenizer, device="cpu")
    answers = [answer["token"] for answer in fill("the pieces <mask> of", top_k=294)]
    assert sorted(answers) == list(range(294))
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(answers)) == answers


# ---- added tokens ----


def test_added_tokens_follow_the_vocabulary(tokenizer, tmp_path):
    before, missing = ids(tokenizer, BATCH), tokenizer.missing_tokens
    assert tokenizer.add_tokens(["[E1]", "[E2]"]) == 2 and tokenizer.add_tokens(["[E1]", ""]) == 0
    assert tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken("[S]", lstrip=True, special=True)]}) == 1
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert (len(tokenizer), tokenizer.vocab_size, tokenizer.missing_tokens) == (297, 294, missing)
        assert tokenizer.convert_tokens_to_ids(["[E1]", "[E2]", "[S]", "<mask>"]) == [294, 295, 296, 293]
        assert ids(tokenizer, "the[E2] of [S]<mask>") == [0, *ids(tokenizer, "the")[1:-1], 295, 9, 296, 293, 2]
        assert tokenizer.decode([294, 9, 296]) == "[E1] of[S]"
        assert ids(tokenizer, BATCH) == before
        tokenizer.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert type(tokenizer) is FairseqBpeTokenizer


def test_a_missing_token_can_be_added(tokenizer):
    missing, text = tokenizer.missing_tokens, "xz sz the sz"
    assert tokenizer.tokenize(text) == ["x", "z", "Ġs", "z", "Ġthe", "Ġs", "z"]
    before = ids(tokenizer, text)
    assert before[3] == before[6] == 3
    tokenizer.add_tokens(["[E]", "Ġs"])
    assert tokenizer.convert_tokens_to_ids(["[E]", "Ġs"]) == [294, 295]
    assert len(tokenizer) == 296 and tokenizer.missing_tokens == missing - 1
    assert ids(tokenizer, text) == [295 if place in (3, 6) else row for place, row in enumerate(before)]


def test_training_a_new_one_gives_a_plain_tokenizer(tokenizer):
    new = tokenizer.train_new_from_iterator([["the quick brown fox"] * 10], vocab_size=300)
    assert type(new) is RobertaTokenizer
    assert [new.cls_token_id, new.pad_token_id, new.sep_token_id, new.unk_token_id] == [0, 1, 2, 3]
    assert 3 not in ids(new, "the quick brown fox") and new.decode(ids(new, "the quick")[1:-1]) == "the quick"


def test_files_that_do_not_show_what_is_missing_are_refused(small, tmp_path):
    small_gpt2_folder(tmp_path)
    with refused("tokenizer.json"):
        FairseqBpeTokenizer.from_pretrained(tmp_path)


# ---- folders ----

WITHOUT_PACKAGE = """
import json, sys
import transformers
source, target, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=True)
tokenizer.save_pretrained(target)
result = {"class": str(type(tokenizer)), "ids": tokenizer(texts, truncation=True)["input_ids"]}
tokenizer.add_tokens(["[E]"])
print(json.dumps({**result, "added": tokenizer("[E]")["input_ids"]}))
"""


def test_loading_and_saving_without_the_package(tokenizer, tmp_path):
    first, second, texts = tmp_path / "first", tmp_path / "second", [*BATCH, "the <mask> of"]
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(first)
    tokenizer.save_pretrained(first)
    cache = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "home")}
    printed = run_python(WITHOUT_PACKAGE, first, second, json.dumps(texts), env=cache, blocked=True)
    result = json.loads(printed.splitlines()[-1])
    assert "transformers_modules." in result["class"] and "FairseqBpeTokenizer" in result["class"]
    assert result["ids"] == ids(tokenizer, texts, truncation=True) and result["added"] == [0, 294, 2]
    again = AutoTokenizer.from_pretrained(second)
    assert type(again) is FairseqBpeTokenizer and ids(again, texts) == ids(tokenizer, texts)


def test_the_plain_tokenizer_is_the_default_of_every_family(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    gpt2_folder(tmp_path, merges=10)
    names = [*SPECIAL, *json.loads((tmp_path / "vocab.json").read_text()), "<mask>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(names)}))
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is RobertaTokenizer


# ---- reading ----


def test_reading_a_dictionary(tmp_path, small, files):
    path = tmp_path / "dict.txt"
    path.write_bytes(b"\xef\xbb\xbf13 850\n<sep> 3\n0 2\r\nmadeupword0000 0\n50256 0")
    assert read_dictionary(path) == [*SPECIAL, "13", "<sep>", "0", "madeupword0000", "50256", "<mask>"]
    lines = ["262 9", "<mask> 0", "286 1"]  # a mask in the file keeps its row
    path.write_text("\n".join(lines))
    tokenizer = build_tokenizer(read_dictionary(path), small, 64)
    assert tokenizer.mask_token_id == 5 and len(tokenizer) == 7
    assert ids(tokenizer, "x the <mask> of") == FairseqEncoder(Gpt2Bpe(files), lines).encode_masked("x the <mask> of")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "dict.txt"),
        (b"", "line 1"),
        (b"13 5\n14\n", "line 2"),
        (b"13 5\n7 1\n13 2\n", "line 3: '13 2'"),
        (b"13 5\n<pad> 2\n", "'<pad> 2'"),
        (b"13 5\nthe 2\n", "'the'"),
        (b"007 5\n", "'007'"),
        (b"50000 5\n", "'50000'"),
    ],
)
def test_dictionaries_that_cannot_be_read(tmp_path, small, content, named):
    path = tmp_path / "dict.txt"
    if content is not None:
        path.write_bytes(content)
    with refused(named, error=UserError):
        build_tokenizer(read_dictionary(path), small, 64)


def test_reading_the_bpe(files, bpe, tmp_path):
    for ours, theirs in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (tmp_path / ours).write_bytes((files / theirs).read_bytes())
    assert read_bpe(str(tmp_path)) == bpe == bpe_from_merges(bpe.merges)
    assert len(bpe.merges) == 50000 and bpe.merges[0] == ("Ġ", "t")
    assert len(bpe.tokens) == 50257 and bpe.from_text() == bpe.tokens[:-1]
    assert ("#", "#") in bpe.merges  # not a comment
    vocab = {token: index for index, token in enumerate(bpe.tokens)}
    assert hashlib.sha256(json.dumps(vocab).encode()).hexdigest() == GPT2_VOCAB


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("vocab.json", "}", "", "vocab.json"),
        ("vocab.json", ": 300,", ": 3000,", "lacks ids"),
        ("vocab.json", '"!"', '"!!!!"', "bytes"),
        ("merges.txt", "\nĠ t\n", "\nĠ zzz\n", "zzz"),
    ],
)
def test_a_bpe_that_cannot_be_read(tmp_path, file, old, new, named):
    path = small_gpt2_folder(tmp_path) / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with refused(named, error=UserError):
        read_bpe(str(tmp_path))


# ---- back to fairseq ----


@kinds
def test_export_restores_the_dictionary(tokenizers, dictionaries, files, tmp_path, kind):
    export_tokenizer(tokenizers[kind], tmp_path)
    lines, original = (path.read_text().splitlines() for path in (tmp_path / "dict.txt", dictionaries[kind]))
    assert [line.split()[0] for line in lines] == [line.split()[0] for line in original]
    assert {line.split()[1] for line in lines} == {"0"}
    assert (tmp_path / "vocab.bpe").read_bytes() == (files / "merges.txt").read_bytes()
    assert json.loads((tmp_path / "encoder.json").read_text()) == json.loads((files / "vocab.json").read_text())


def test_export_of_saved_and_of_other_tokenizers(tokenizers, small, tmp_path):
    tokenizers["sparse"].save_pretrained(tmp_path / "saved")
    export_tokenizer(AutoTokenizer.from_pretrained(tmp_path / "saved"), tmp_path)
    assert read_dictionary(tmp_path / "dict.txt") == read_dictionary(CHECKPOINTS / "tied" / "dict.txt")
    inside = [*SPECIAL, "262", "<mask>", "286", "<sep>"]
    export_tokenizer(build_tokenizer(inside, small, 64), tmp_path)
    assert read_dictionary(tmp_path / "dict.txt") == inside
    # One that never was in fairseq.
    tokenizer = tiny_tokenizer(["the quick brown fox ## ##", "naïve café"] * 3)
    export_tokenizer(tokenizer, tmp_path)
    again = build_tokenizer(read_dictionary(tmp_path / "dict.txt"), read_bpe(str(tmp_path)), 64)
    assert type(again) is RobertaTokenizer and again.get_vocab() == tokenizer.get_vocab()
    fairseq = FairseqEncoder(Gpt2Bpe(tmp_path), (tmp_path / "dict.txt").read_text().splitlines())
    for text in [*TEXTS, *random_texts()]:
        assert ids(tokenizer, text) == fairseq.encode(text)


def altered(tokenizer, part, value):
    setattr(tokenizer.backend_tokenizer, part, value)
    return tokenizer


def roberta_like(small, names=SPECIAL, last=("<mask>",), drop=(), **options):
    tokens = [*names, *(token for token in small.from_text() if token not in drop), *last]
    vocab = {token: index for index, token in enumerate(tokens)}
    return RobertaTokenizer(vocab=vocab, merges=small.merges, **options)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda s: roberta_like(s, ("<pad>", "<s>", "</s>", "<unk>")), "'<pad>'"),
        (lambda s: roberta_like(s, last=("<mask>", "[E1]")), "'[E1]'"),
        (lambda s: roberta_like(s, last=(), mask_token="[M]"), "'[M]'"),
        (lambda s: roberta_like(s, add_prefix_space=True), "pre_tokenizer"),
        (lambda s: roberta_like(s, drop=("!",)), "tokens"),
        (lambda s: ByT5Tokenizer(), "ByT5Tokenizer"),
        (lambda s: altered(roberta_like(s), "pre_tokenizer", Whitespace()), "pre_tokenizer"),
        (lambda s: altered(roberta_like(s), "normalizer", NFC()), "normalizer"),
        (lambda s: altered(roberta_like(s), "model", BPE(roberta_like(s).get_vocab(), s.merges, dropout=0.1)), "drop"),
        (lambda s: altered(roberta_like(s), "model", WordLevel({"a": 0}, "a")), "RobertaTokenizer"),
    ],
)
def test_export_refuses_what_fairseq_cannot_express(small, tmp_path, make, named):
    with refused(named, error=UserError):
        export_tokenizer(make(small), tmp_path)
