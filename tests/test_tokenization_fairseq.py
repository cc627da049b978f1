"""A `FairseqBpeTokenizer` in use: collators, pipelines, added tokens, and folders with its code.

`test_fairseq_tokenizer.py` tests its ids. This one belongs to a checkpoint of the authors' code, over a small BPE.
"""

import json

import pytest
from fairseq_format.tokenizer import build_tokenizer, read_bpe, read_dictionary
from gpt2_files import TEXTS, gpt2_folder, small_gpt2_folder
from helpers import refused, run_python, tiny_config, tiny_model
from official_luna import CHECKPOINTS
from tokenizers import AddedToken
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, RobertaTokenizer, pipeline

from luna_hf import FairseqBpeTokenizer

BATCH = [text for text in TEXTS if text.strip()]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return read_bpe(str(small_gpt2_folder(tmp_path_factory.mktemp("small"))))


@pytest.fixture
def tokenizer(small):
    return build_tokenizer(read_dictionary(CHECKPOINTS / "tied" / "dict.txt"), small, 64)


def ids(tokenizer, *texts, **options):
    return tokenizer(*texts, **options, verbose=False)["input_ids"]


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
    assert tokenizer.add_tokens(["[E1]", "[E2]"]) == 2
    assert tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken("[S]", lstrip=True, special=True)]}) == 1
    assert tokenizer.add_tokens(["[E1]", ""]) == 0
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert (len(tokenizer), tokenizer.vocab_size, tokenizer.missing_tokens) == (297, 294, missing)
        assert tokenizer.convert_tokens_to_ids(["[E1]", "[E2]", "[S]", "<mask>"]) == [294, 295, 296, 293]
        assert ids(tokenizer, "the[E2] of [S]<mask>") == [0, *ids(tokenizer, "the")[1:-1], 295, 9, 296, 293, 2]
        assert tokenizer.decode([294, 9, 296]) == "[E1] of[S]"
        assert tokenizer.decode([294, 9, 296], skip_special_tokens=True) == "[E1] of"
        assert ids(tokenizer, BATCH) == before
        assert tokenizer.get_added_vocab()["[E1]"] == 294
        assert tokenizer.convert_ids_to_tokens([295, 297]) == ["[E2]", None]
        tokenizer.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert type(tokenizer) is FairseqBpeTokenizer
    loaded = AutoTokenizer.from_pretrained(folder, extra_special_tokens=["[S]", "[T]"], model_max_length=9)
    assert loaded.convert_tokens_to_ids("[T]") == 297 and loaded.model_max_length == 9
    assert ids(loaded, BATCH) == before


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
assert type(tokenizer).__module__.startswith("transformers_modules.")
tokenizer.save_pretrained(target)
result = {"class": type(tokenizer).__name__, "length": len(tokenizer)}
result["ids"] = tokenizer(texts, truncation=True)["input_ids"]
tokenizer.add_tokens(["[E]"])
result["added"] = tokenizer("[E]")["input_ids"]
try:
    transformers.AutoTokenizer.from_pretrained(target, trust_remote_code=False)
except ValueError as error:
    result["refused"] = str(error)
print(json.dumps(result))
"""


def test_loading_and_saving_without_the_package(tokenizer, tmp_path):
    first, second, texts = tmp_path / "first", tmp_path / "second", [*BATCH, "the <mask> of"]
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(first)
    tokenizer.save_pretrained(first)
    cache = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "home")}
    printed = run_python(WITHOUT_PACKAGE, first, second, json.dumps(texts), env=cache, blocked=True)
    result = json.loads(printed.splitlines()[-1])
    assert result["class"] == "FairseqBpeTokenizer" and result["length"] == 294 and result["added"] == [0, 294, 2]
    assert result["ids"] == ids(tokenizer, texts, truncation=True) and "trust_remote_code=True" in result["refused"]
    again = AutoTokenizer.from_pretrained(second)
    assert type(again) is FairseqBpeTokenizer and ids(again, texts) == ids(tokenizer, texts)


def test_the_plain_tokenizer_is_the_default_of_every_family(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    gpt2_folder(tmp_path, merges=10)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    names = ["<s>", "<pad>", "</s>", "<unk>", *vocab, "<mask>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(names)}))
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is RobertaTokenizer
