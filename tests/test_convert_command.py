"""`python -m luna_hf convert`: the folder it writes, the figures it prints, and what it refuses."""

import json
import re
import string

import huggingface_hub
import pytest
import torch
from helpers import run_python
from hub_stub import HubStub
from huggingface_hub import ModelCard, hf_hub_download
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
)

from luna_hf import AbcConfig, __main__
from luna_hf.convert import command as convert
from luna_hf.convert.report import (
    exact_length,
    measured_lengths,
    pool_states,
    read_ids,
    shipped_texts,
    special_tokens,
    spread_rows,
    table_lines,
)

WORDS = ["every", "token", "reads", "the", "packed", "sequence", "in", "turn"]
LONGEST, MAX_LENGTH = 40, 200
# A memory that even the tiny source's texts exceed: plain sources are exact up to 40 tokens, others up to 16.
SMALL = ["--local_window", "8", "--num_selected_tokens", "8", "--memory_size", "4", "--max_length", str(MAX_LENGTH)]
SHORT = ["the token", "turn in turn", "every sequence"]
LONG = [" ".join(WORDS * count) for count in (1, 4, 18)]
PROMPTS = {"query": "the query: ", "document": ""}
ATOL = 1e-5


# ---- tiny sources ----


def write_tokenizer(folder):
    """A WordPiece whose files truncate and pad to 16 tokens, as those of all-MiniLM-L6-v2 do to 128."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, model_max_length=LONGEST)
    tokenizer.backend_tokenizer.enable_truncation(16)
    tokenizer.backend_tokenizer.enable_padding(length=16)
    tokenizer.save_pretrained(folder)
    return len(pieces)


@torch.no_grad()
def write_model(folder, model_class=BertModel, **fields):
    """A tiny source with its tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **fields}
    config = BertConfig(vocab_size=write_tokenizer(folder), max_position_embeddings=LONGEST, **shape)
    model = model_class(config)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def write_json(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_sentences(folder, pooling=None, kinds=("Transformer", "Pooling", "Normalize"), path=""):
    """A folder of sentence-transformers, as its early versions wrote them."""
    write_model(folder / path)
    paths = [path, *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    modules = [
        {"idx": number, "name": str(number), "path": paths[number], "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", pooling or {"pooling_mode_cls_token": True})
    settings = json.loads((folder / "1_Pooling" / "config.json").read_text())
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, **settings})
    write_json(folder / path / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True})
    write_json(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "similarity_fn_name": "dot"})
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of tiny sources; tests must not change them."""
    folder = tmp_path_factory.mktemp("sources")
    write_model(folder / "plain")
    write_model(folder / "mlm", BertForMaskedLM)
    write_model(folder / "classifier", BertForSequenceClassification)
    write_sentences(folder / "sentences")
    return folder


@pytest.fixture(scope="module")
def converted(sources):
    """A measured conversion of the folder of sentence-transformers."""
    target = sources.parent / "converted"
    assert __main__.main(["convert", str(sources / "sentences"), str(target), *SMALL]) == 0
    return target


def run(*words):
    return convert.main([*map(str, words), *SMALL, "--no_measure"])


def short_batch(folder):
    return AutoTokenizer.from_pretrained(folder)(SHORT, padding=True, return_tensors="pt")


# ---- the folder ----


@pytest.mark.parametrize(
    ("name", "auto", "own"),
    [
        ("plain", AutoModel, "AbcModel"),
        ("mlm", AutoModelForMaskedLM, "AbcForMaskedLM"),
        ("classifier", AutoModel, "AbcModel"),
    ],
)
@torch.no_grad()
def test_a_plain_source(name, auto, own, sources, tmp_path, capsys):
    assert run(sources / name, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    source, model = (auto.from_pretrained(folder).eval() for folder in (sources / name, tmp_path / "out"))
    assert type(model).__name__ == own and ("classifier" in printed) == (name == "classifier")
    batch = short_batch(sources / name)
    ours, expected = (encoder(**batch)[0][batch["attention_mask"].bool()] for encoder in (model, source))
    torch.testing.assert_close(ours, expected, atol=ATOL, rtol=0)
    config = model.config
    assert (config.max_position_embeddings, config.position_period) == (MAX_LENGTH, LONGEST)
    assert (config.local_window, config.num_selected_tokens, config.memory_size) == (8, 8, 4)
    assert config.memory_control == "compressive" and config.num_selection_queries == 32
    assert config.sep_token_id == AutoTokenizer.from_pretrained(tmp_path / "out").sep_token_id > 0
    assert "Nothing has been measured" in (tmp_path / "out" / "README.md").read_text()


def test_the_tokenizer_cuts_and_pads_only_when_asked(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    words = " ".join(WORDS * 40)
    assert [len(ids) for ids in tokenizer(["the token", words]).input_ids] == [4, 322]
    assert len(tokenizer(words, truncation=True).input_ids) == MAX_LENGTH == tokenizer.model_max_length
    assert tokenizer(SHORT, padding=True, return_tensors="pt").input_ids.shape == (3, 5)
    saved = json.loads((converted / "tokenizer.json").read_text())
    assert saved["truncation"] is saved["padding"] is None
    assert (
        not {"max_length", "truncation_strategy"} & json.loads((converted / "tokenizer_config.json").read_text()).keys()
    )


_ENCODE = """
import json, torch
from sentence_transformers import SentenceTransformer

own, source, place, texts, short = sys.argv[1:]
model = SentenceTransformer(own, trust_remote_code=True, device="cpu")
print(model.max_seq_length, model.prompts["query"], model.similarity_fn_name, [type(part).__name__ for part in model])
theirs = SentenceTransformer(source, device="cpu").encode(json.loads(short))
torch.save([torch.as_tensor(found) for found in (model.encode(json.loads(texts), batch_size=3), theirs)], place)
"""


@torch.no_grad()
def own_embeddings(folder, texts, pooling):
    """The embeddings of this package's model, without sentence-transformers."""
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    return pool_states(AutoModel.from_pretrained(folder)(**batch).last_hidden_state, batch["attention_mask"], pooling)


@pytest.mark.slow
def test_sentence_transformers_without_the_package(converted, sources, tmp_path):
    texts = [*SHORT, *LONG, LONG[1].upper()]
    words = [converted, sources / "sentences", tmp_path / "found.pt", json.dumps(texts), json.dumps(SHORT)]
    printed = run_python(_ENCODE, *words, env={"HF_HOME": str(tmp_path)}, blocked=True)
    found, theirs = torch.load(tmp_path / "found.pt")
    assert printed.strip() == f"{MAX_LENGTH} the query:  dot ['Transformer', 'Pooling', 'Normalize']"
    expected = normalize(own_embeddings(converted, [text.lower() for text in texts], "cls"), dim=-1)
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)
    torch.testing.assert_close(found[:3], theirs, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    ("pooling", "name"),
    [
        ({"pooling_mode": "max"}, "max"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
    ],
)
def test_other_layouts(pooling, name, tmp_path):
    """A transformer in a subfolder, a Dense module, and both ways to name a pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense

    source = write_sentences(tmp_path / "in", pooling, ("Transformer", "Pooling", "Dense"), "0_Transformer")
    torch.manual_seed(1)
    dense = Dense(32, 8)
    (source / "2_Dense").mkdir()
    dense.save(str(source / "2_Dense"))
    assert run(source, tmp_path / "out") == 0
    found = torch.as_tensor(SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(LONG))
    expected = own_embeddings(tmp_path / "out", LONG, name)
    # Heads pool as the embeddings do, where they can.
    assert AutoConfig.from_pretrained(tmp_path / "out").classifier_pooling == {"mean": "mean", "max": "cls"}[name]
    with torch.no_grad():
        torch.testing.assert_close(found, dense.linear(expected).tanh(), atol=ATOL, rtol=0)


# ---- the figures ----


def test_the_printed_table(converted, sources, tmp_path, capsys):
    facts = json.loads((converted / "conversion.json").read_text())
    figures = {figure["tokens"]: figure for figure in facts["figures"]}
    assert list(figures) == [16, 64, 128, MAX_LENGTH] and facts["exact_length"] == 16
    assert [figures[length]["short_windows"] is None for length in figures] == [True, False, False, False]
    assert facts["command"].startswith("python -m luna_hf convert sentences converted --local_window 8")
    card = (converted / "README.md").read_text()
    assert facts["command"] in card and f"| 16 | {figures[16]['cosine']:.3f} |" in card
    assert "library_name: sentence-transformers" in card and "base_model" not in card

    # One cell of each kind, by sentence-transformers' own means: the texts, cut at the measured length.
    tokenizer = AutoTokenizer.from_pretrained(converted)
    first, last = special_tokens(tokenizer)
    texts = read_ids(tokenizer, shipped_texts(), lower=True)
    ours, theirs = (AutoModel.from_pretrained(folder).eval() for folder in (converted, sources / "sentences"))

    def state(model, text):
        with torch.no_grad():
            ids = torch.cat([first, text, last])[None]
            return normalize(model(ids).last_hidden_state[0, 0].double(), dim=0)

    short = spread_rows(texts, 14, 4)
    cosines = [float(state(ours, row) @ state(theirs, row)) for row in short]
    assert len(cosines) == figures[16]["rows"] and sum(cosines) / 4 > 1 - 1e-6  # exact
    assert figures[16]["cosine"] == pytest.approx(sum(cosines) / 4, abs=2e-6)
    long = spread_rows(texts, 62, 2)
    goals = [torch.stack([state(theirs, part) for part in row.tensor_split(5)]).mean(0) for row in long]  # 14 fit
    cosines = [float(state(ours, row) @ normalize(goal, dim=0)) for row, goal in zip(long, goals, strict=True)]
    assert figures[64]["cosine"] == pytest.approx(sum(cosines) / 2, abs=2e-6) and sum(cosines) / 2 < 0.999
    assert figures[64]["short_windows"] == figures[64]["cosine"]  # the source's windows have 16 tokens, below 128


def test_texts_of_the_user(sources, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS * 4))
    assert convert.main([str(sources / "mlm"), str(tmp_path / "out"), *SMALL, "--texts", str(text)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^ *16 +\d\.\d{3} +\d+\.\d\d$", output, re.MULTILINE) and "\n 64" not in output
    text.write_text("turn")
    for path in (text, tmp_path / "none.txt"):
        assert convert.main([str(sources / "mlm"), str(tmp_path / "new"), *SMALL, "--texts", str(path)]) == 2
        assert "--texts" in capsys.readouterr().err


@pytest.mark.parametrize("limit", [24, 10**30])
def test_a_limit_that_the_tokenizer_has(limit, tmp_path):
    """As recent versions of sentence-transformers store it; a huge number stands for none."""
    folder = write_sentences(tmp_path / "source")
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": False})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": limit})
    assert run(folder, tmp_path / "out") == 0
    config = AbcConfig.from_pretrained(tmp_path / "out")
    assert config.softmax_length == config.position_period == min(limit, LONGEST)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["exact_length"] == min(limit, LONGEST)


def test_what_is_said_of_other_options(sources, tmp_path, capsys):
    def said(name, *words):
        assert convert.main([str(sources / "plain"), str(tmp_path / name), *SMALL, "--no_measure", *words]) == 0
        card = (tmp_path / name / "README.md").read_text()
        return AbcConfig.from_pretrained(tmp_path / name), capsys.readouterr().out, card

    config, printed, card = said("full", "--full_attention_layers", "0,1")
    assert (
        "All layers keep softmax attention, in time that grows with the square of the length." in card
        and f"up to {LONGEST} tokens are read exactly as by the source." in printed
    )
    config, printed, card = said("rounded", "--dtype", "bfloat16", "--position_period", "20")
    assert "source up to the rounding of bfloat16." in printed and "linearly" in card
    assert config.position_period == 20 and config.dtype == torch.bfloat16
    config, _, card = said("some", "--full_attention_layers", "1")
    assert "linearly with the length. Softmax attention remains in layer 1 (the first is 0), in quadratic" in card
    config, _, card = said("unselected", "--num_selected_tokens", "0")
    assert "Each token reads its neighbours and means of the rest, in" in card
    assert (config.num_selected_tokens, config.softmax_length, config.local_window) == (0, 0, 8)
    assert convert.main([str(sources / "plain"), str(tmp_path / "alone"), "--local_window", "0", "--no_measure"]) == 0
    config, card = AbcConfig.from_pretrained(tmp_path / "alone"), (tmp_path / "alone" / "README.md").read_text()
    assert "Each token reads means of the text, in" in card
    assert (config.num_selected_tokens, config.softmax_length, config.local_window) == (0, 0, 0)
    config, *_ = said("short", "--max_length", "30")
    assert config.max_position_embeddings == 30


def test_another_command_is_named(capsys):
    assert __main__.main(["convertt"]) == 2 and "python -m luna_hf convert" in capsys.readouterr().err


def test_lengths():
    assert measured_lengths(512, 8192) == [16, 64, 128, 256, 512, 1024, 2048, 4096]
    assert measured_lengths(512, 3000) == [16, 64, 128, 256, 512, 1024, 2048, 3000]
    assert measured_lengths(40, 40) == [16]
    config = AbcConfig.preset("selected", max_position_embeddings=4096)
    assert exact_length(config) == 128
    config.num_selected_tokens = 0
    assert exact_length(config) == 32
    config.full_attention_layers = "all"
    assert exact_length(config) == 4096
    config.position_period = 256
    assert exact_length(config) == 256


def test_rows():
    rows = spread_rows([torch.arange(10), torch.arange(3), torch.arange(100, 112)], 4, 4)
    assert [row.tolist() for row in rows] == [[*range(n, n + 4)] for n in (0, 100, 5, 106)]
    assert [row.tolist() for row in spread_rows([torch.arange(10), torch.arange(100, 112)], 4, 3)] == [
        [*range(n, n + 4)] for n in (0, 100, 5)
    ]
    assert not spread_rows([torch.arange(3)], 4, 2)
    assert all(len(text) > 19_000 and text.isascii() for text in shipped_texts()) and len(shipped_texts()) == 3
    assert table_lines([])[0].split() == ["tokens", "cosine", "speed"]


# ---- what is refused ----


def with_third(**changes):
    """Modules of which the third, which would be Normalize, is another."""
    first = {"": "Transformer", "1_Pooling": "Pooling"}.items()
    first = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in first]
    return [*first, {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize", **changes}]


DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
# What is wrong with a source -> the changed files, of which some are removed, and what the error names.
SPOILT = {
    "a decoder": ({"modules.json": None, "config.json": {"model_type": "gpt2"}}, "gpt2"),
    "another library's": ({"modules.json": [{"path": "", "type": "CLIPModel"}]}, "CLIPModel"),
    "an own module": ({"modules.json": with_third(type="custom.Whitening")}, "custom.Whitening"),
    "modules without folders": ({"modules.json": with_third(path=None)}, "another form"),
    "settings of another form": ({"sentence_bert_config.json": [1]}, "another form"),
    "a length that is a text": ({"sentence_bert_config.json": {"max_seq_length": "x"}}, "`max_seq_length` of 'x'"),
    "options of its tokenizer": (
        {"sentence_bert_config.json": {"max_seq_length": 16, "tokenizer_args": {"do_lower_case": False}}},
        "tokenizer_args",
    ),
    "a tokenizer's length": ({"tokenizer_config.json": {"model_max_length": -1}}, "`model_max_length` is -1"),
    "files outside": ({"modules.json": with_third(path="../2_Normalize")}, "modules.json"),
    "Dense without weights": ({"modules.json": with_third(**DENSE)}, "2_Dense/model.safetensors"),
    "another pooling": ({"1_Pooling/config.json": {"pooling_mode": "lasttoken"}}, "lasttoken"),
    "no tokenizer": (dict.fromkeys(["tokenizer.json", "tokenizer_config.json"]), "no tokenizer"),
    "no weights": ({"model.safetensors": None}, "cannot be loaded"),
    "a pickle": ({"model.safetensors": None, "pytorch_model.bin": {}}, "--allow_pickle"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_refused_sources(name, tmp_path, capsys):
    (changed, word), source = SPOILT[name], write_sentences(tmp_path / "source")
    for file, content in changed.items():
        if content is None:
            (source / file).unlink()
        else:
            write_json(source / file, content)
    assert run(source, tmp_path / "out") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and word in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "value", "words", "named"),
    [
        ("model.safetensors", torch.nan, [], "word_embeddings.weight"),
        ("model.safetensors", 1e38, ["--dtype", "float16"], "word_embeddings.weight"),
        ("2_Dense/model.safetensors", torch.inf, [], "2_Dense/model.safetensors"),
    ],
)
def test_weights_that_are_not_finite(file, value, words, named, tmp_path, capsys):
    source = write_sentences(tmp_path / "source", kinds=("Transformer", "Pooling", "Dense"))
    (source / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(8, 32)}, source / "2_Dense" / "model.safetensors")
    weights = load_file(source / file)
    weights.get("embeddings.word_embeddings.weight", weights.get("linear.weight"))[2, 3] = value
    save_file(weights, source / file, metadata={"format": "pt"})
    assert run(source, tmp_path / "out", *words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and named in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["nowhere/none", "out"],
        ["plain", "out", "--local_window", "-1"],
        ["plain", "out", "--full_attention_layers", "first"],
        ["plain", "out", "--dtype", "int8"],
        ["plain", "plain"],
        ["plain", "foreign"],
        ["converted", "out"],
        ["plain"],
    ],
)
def test_refused_command_lines(words, sources, converted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").symlink_to(sources / "plain")
    (tmp_path / "converted").symlink_to(converted)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "work.txt").write_text("")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert convert.main([*words, "--no_measure"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("error: ") and len(error) <= 2
    assert not (tmp_path / "out").exists() and (tmp_path / "foreign" / "work.txt").exists()


def test_an_earlier_conversion_is_replaced_only_when_asked(sources, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert run(sources / "sentences", out) == 0
    assert run(sources / "plain", out) == 2 and "--overwrite" in capsys.readouterr().err
    assert (out / "modules.json").exists()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(convert, "describe", interrupt)
        for target in (out, tmp_path / "new"):
            assert run(sources / "plain", target, "--overwrite") == 130
    assert (out / "modules.json").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run(sources / "plain", out, "--overwrite") == 0
    assert not (out / "modules.json").exists() and "--overwrite" not in (out / "README.md").read_text()


def test_a_name_on_the_hub(sources, tmp_path, monkeypatch):
    folder = sources / "sentences"
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files["README.md"] = b"---\nlanguage: en\nlicense: mit\n---\n"
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        hub.repositories["tester/tiny"] = files
        assert run("tester/tiny", tmp_path / "out") == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.base_model, card.data.license, card.data.language) == ("tester/tiny", "mit", "en")
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists() and not hub.unknown


@pytest.mark.parametrize("lost", ["modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"])
def test_a_name_of_which_the_cache_lacks_a_file(lost, sources, tmp_path, monkeypatch, capsys):
    """Without a network, a file that was never asked for may exist or not; a download of everything tells."""
    folder = sources / "sentences"
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files[".gitattributes"] = b""
    with HubStub() as hub:
        hub.patch(monkeypatch, tmp_path)
        hub.repositories["tester/tiny"] = files
        for name in files.keys() - {lost, ".gitattributes"}:
            hf_hub_download("tester/tiny", name)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert run("tester/tiny", tmp_path / "out") == 2
        assert f"whether tester/tiny has a file {lost}. Name a folder, or run `hf download tester/tiny`" in " ".join(
            capsys.readouterr().err.split()
        )
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        for name in files:
            hf_hub_download("tester/tiny", name)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert run("tester/tiny", tmp_path / "out") == 0  # README.md and others do not exist, as is known now
    assert (tmp_path / "out" / lost).exists()


def test_lengths_of_queries_and_documents_are_kept(tmp_path, capsys):
    source = write_sentences(tmp_path / "source")
    settings = {"max_seq_length": 16, "query_length": 8, "document_length": 16}
    write_json(source / "sentence_bert_config.json", settings)
    assert run(source, tmp_path / "out") == 0
    written = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert (written["query_length"], written["document_length"]) == (8, 16)
    write_json(source / "sentence_bert_config.json", {**settings, "processing_kwargs": {"text": {"max_length": 8}}})
    assert run(source, tmp_path / "refused") == 2 and "processing_kwargs" in capsys.readouterr().err
