"""A `FairseqBpeTokenizer` in use: what it is trained and called with, more tokens, copies, and folders with its code.

`test_fairseq_tokenizer.py` has its ids. The one here is of a checkpoint of the authors' code, over a small BPE.
"""

import copy
import json
import pickle
import sys

import pytest
from gpt2_files import TEXTS, gpt2_folder, small_gpt2_folder
from helpers import ROOT, run_python, tiny_config, tiny_model
from tokenizers import AddedToken
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, RobertaTokenizer, pipeline

from luna_hf import FairseqBpeTokenizer

sys.path.insert(0, str(ROOT / "conversion"))  # the scripts import their siblings plainly

from fairseq_tokenizer import build_tokenizer, read_bpe, read_dictionary

DICTIONARY = ROOT / "tests" / "fixtures" / "luna_fairseq_checkpoint" / "tied" / "dict.txt"
BATCH = [text for text in TEXTS if text.strip()]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return read_bpe(str(small_gpt2_folder(tmp_path_factory.mktemp("small"))))


@pytest.fixture
def tokenizer(small):
    return build_tokenizer(read_dictionary(DICTIONARY), small, 64)


def ids(tokenizer, *texts, **options):
    return tokenizer(*texts, **options, verbose=False)["input_ids"]


def test_the_pieces_that_are_missing_have_no_id(tokenizer):
    assert tokenizer.decode(ids(tokenizer, "Zq7~")[1:-1]) == "Zq7~"  # bytes, which are all there
    assert "he" not in tokenizer.get_vocab() and "Ġthe" in tokenizer.get_vocab()
    assert tokenizer.convert_tokens_to_ids(["he", "Ġthe", "neither"]) == [3, 5, 3]


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))])
def test_copies(tokenizer, twin):
    tokenizer.add_tokens(["[E]"])
    other = twin(tokenizer)
    assert ids(other, [*BATCH, "the [E]"]) == ids(tokenizer, [*BATCH, "the [E]"])
    assert len(other) == len(tokenizer) == 295
    other.add_tokens(["[F]"])
    assert len(other) == 296 and len(tokenizer) == 295


# ---- in use ----


def test_a_collator_draws_only_tokens_that_have_a_row(tokenizer):
    collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.9, mask_replace_prob=0, random_replace_prob=1
    )
    rows = [{"input_ids": row} for row in ids(tokenizer, BATCH)]
    drawn = [collator(rows)["input_ids"] for _ in range(3)]
    assert all(batch.max() < 294 for batch in drawn) and max(batch.max() for batch in drawn) > 280


def test_filling_a_mask(tokenizer):
    fill = pipeline("fill-mask", model=tiny_model("luna", "mlm", vocab_size=294), tokenizer=tokenizer, device="cpu")
    answers = fill("the pieces <mask> of", top_k=294)
    assert sorted(answer["token"] for answer in answers) == list(range(294))
    assert all(
        tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(a["token"])) == a["token"] for a in answers
    )


def test_sanitised_chats(tokenizer):
    template = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
    chat = [{"role": "user", "content": "the pieces <mask> of"}]
    options = {"chat_template": template, "return_dict": False}
    given = tokenizer.apply_chat_template(chat, sanitize_control_tokens=True, add_special_tokens=False, **options)
    text = ids(tokenizer, "<mask>", split_special_tokens=True)[1:-1]
    assert given == [*ids(tokenizer, "the pieces ")[1:-1], *text, *ids(tokenizer, " of")[1:-1], 2] and max(given) < 294


# ---- more tokens ----


def test_added_tokens_follow_the_vocabulary(tokenizer):
    before = ids(tokenizer, BATCH)
    missing = tokenizer.missing_tokens
    assert tokenizer.add_tokens(["[E1]", "[E2]"]) == 2
    assert tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken("[S]", lstrip=True, special=True)]}) == 1
    assert tokenizer.add_tokens(["[E1]", ""]) == 0
    assert len(tokenizer) == 297 and tokenizer.vocab_size == 294 and tokenizer.missing_tokens == missing
    assert tokenizer.convert_tokens_to_ids(["[E1]", "[E2]", "[S]", "<mask>"]) == [294, 295, 296, 293]
    assert ids(tokenizer, "the[E2] of [S]<mask>") == [0, *ids(tokenizer, "the")[1:-1], 295, 9, 296, 293, 2]
    assert tokenizer.decode([294, 9, 296]) == "[E1] of[S]"
    assert tokenizer.decode([294, 9, 296], skip_special_tokens=True) == "[E1] of"
    assert ids(tokenizer, BATCH) == before
    assert tokenizer.get_added_vocab() | {"[E1]": 294} == tokenizer.get_added_vocab()
    assert tokenizer.convert_ids_to_tokens([295, 297]) == ["[E2]", None]


def test_a_missing_piece_that_is_added_is_no_longer_unknown(tokenizer):
    # Not as a word of a text, where "Ġs" is three bytes: the piece that the BPE makes of " s".
    missing, text = tokenizer.missing_tokens, "xz sz the sz"
    assert tokenizer.tokenize(text) == ["x", "z", "Ġs", "z", "Ġthe", "Ġs", "z"]
    before = ids(tokenizer, text)
    assert before[3] == before[6] == 3
    tokenizer.add_tokens(["[E]", "Ġs"])
    assert tokenizer.convert_tokens_to_ids(["[E]", "Ġs"]) == [294, 295]
    assert len(tokenizer) == 296 and tokenizer.missing_tokens == missing - 1
    assert ids(tokenizer, text) == [295 if place in (3, 6) else row for place, row in enumerate(before)]


def test_added_tokens_are_saved(tokenizer, tmp_path):
    tokenizer.add_tokens(["[E1]"])
    tokenizer.add_tokens([AddedToken("[S]", rstrip=True)], special_tokens=True)
    for folder in (tmp_path / "first", tmp_path / "second"):
        tokenizer.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder)
        assert type(loaded) is FairseqBpeTokenizer
        assert (len(loaded), loaded.vocab_size, loaded.missing_tokens) == (296, 294, tokenizer.missing_tokens)
        for text in [*BATCH, "the [E1] of [S]  b <mask>"]:
            assert ids(loaded, text) == ids(tokenizer, text)
        loaded.add_tokens("[E3]")
        assert loaded.convert_tokens_to_ids("[E3]") == 296
        tokenizer = AutoTokenizer.from_pretrained(folder)


def test_tokens_added_while_loading(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, extra_special_tokens=["[E]"], model_max_length=9)
    assert len(loaded) == 295 and loaded.convert_tokens_to_ids("[E]") == 294 and loaded.model_max_length == 9
    assert ids(loaded, BATCH) == ids(tokenizer, BATCH)


def test_training_a_new_one_gives_a_plain_tokenizer(tokenizer):
    new = tokenizer.train_new_from_iterator([["the quick brown fox"] * 10], vocab_size=300)
    assert type(new) is RobertaTokenizer
    assert [new.cls_token_id, new.pad_token_id, new.sep_token_id, new.unk_token_id] == [0, 1, 2, 3]
    assert 3 not in ids(new, "the quick brown fox") and new.decode(ids(new, "the quick")[1:-1]) == "the quick"


def test_without_missing_pieces_it_is_a_roberta_tokenizer(small):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *small.tokens, "<mask>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    ours, plain = (kind(vocab=vocab, merges=small.merges) for kind in (FairseqBpeTokenizer, RobertaTokenizer))
    assert ids(ours, BATCH) == ids(plain, BATCH) and len(ours) == len(plain) == ours.vocab_size == 662
    ours.add_tokens(["[E]"])
    assert ids(ours, "[E]") == [0, 662, 2] and len(ours) == 663 and ours.vocab_size == 662


def test_files_that_do_not_say_what_is_missing_are_refused(small, tmp_path):
    small_gpt2_folder(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        FairseqBpeTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="missing_tokens is 9"):
        FairseqBpeTokenizer(vocab={"a": 0}, merges=[], missing_tokens=9)


# ---- folders ----

WITHOUT_PACKAGE = """
import json, sys
import transformers
source, target, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=True)
assert type(tokenizer).__module__.startswith("transformers_modules.")
tokenizer.save_pretrained(target)
result = {"class": type(tokenizer).__name__, "length": len(tokenizer)}
result["ids"] = tokenizer(texts, truncation=True)["input_ids"]
tokenizer.add_tokens(["[E]"])
result["added"] = tokenizer("[E]")["input_ids"]
try:
    transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
except ValueError as error:
    result["refused"] = str(error)
assert sys.modules["luna_hf"] is None
print(json.dumps(result))
"""


def test_loading_without_the_package(tokenizer, tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(first)
    tokenizer.save_pretrained(first)
    texts = [*BATCH, "the <mask> of"]
    for source, target in ((first, second), (second, third)):
        cache = {"HF_MODULES_CACHE": str(tmp_path / f"{target.name}-modules"), "HF_HOME": str(tmp_path / "home")}
        printed = run_python(WITHOUT_PACKAGE, source, target, json.dumps(texts), env=cache, blocked=True)
        result = json.loads(printed.splitlines()[-1])
        assert result["class"] == "FairseqBpeTokenizer" and result["length"] == 294
        assert result["ids"] == ids(tokenizer, texts, truncation=True)
        assert result["added"] == [0, 294, 2]
        assert "trust_remote_code=True" in result["refused"]
    assert type(AutoTokenizer.from_pretrained(third)) is FairseqBpeTokenizer


def test_the_default_of_every_family_stays_the_plain_tokenizer(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    gpt2_folder(tmp_path, merges=10)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    names = ["<s>", "<pad>", "</s>", "<unk>", *vocab, "<mask>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(names)}))
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is RobertaTokenizer
