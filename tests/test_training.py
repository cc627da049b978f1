"""Pretraining: corpus, tokenizer, packing, masking, loop, and the script from end to end."""

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter

import pytest
import torch
import yaml
from helpers import ROOT, run_python, tiny_config, tiny_tokenizer
from tiny_training import DEMO, WORDS, arguments, data, loop, pretrain_mlm, recipe, run, write_corpus
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForMaskedLM, AutoTokenizer, RobertaConfig

SCRIPT = "training/pretrain_mlm.py"
SPECIAL = {"bos_token_id": 0, "eos_token_id": 2}


def script(*words, launcher=()):
    """The script as a user starts it, from the repository root."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, *launcher, SCRIPT, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


# ---- corpus ----


def make_library(folder, topics):
    (folder / "pydoc_data").mkdir(parents=True)
    (folder / "pydoc_data" / "topics.py").write_text(topics)
    (folder / "first.py").write_text(
        '"""First module.\n\nShared paragraph of\nboth.\n"""\n\nraise SystemExit\n\n\n'
        'def f():\n    """What f does."""\n\n\n'
        'class C:\n    """What C is."""\n\n    def m(self):\n        """Method m."""\n'
    )
    (folder / "second.py").write_text('"""Second module.\n\nShared paragraph of both.\n"""\n')
    (folder / "broken.py").write_text("def :\n")
    for skipped in ("test", "site-packages"):
        (folder / skipped).mkdir()
        (folder / skipped / "other.py").write_text('"""Never read."""\n')
    return folder


def test_cpython_corpus_is_topics_and_docstrings_without_repeated_paragraphs(tmp_path):
    library = make_library(tmp_path, "topics = {'b': 'Heading\\n*******\\n\\nWhat f does.\\n', 'a': 'Topic a.\\n'}\n")
    corpus = data.read_cpython(library)
    assert corpus.documents == [
        "Topic a.",
        "Heading\n\nWhat f does.",
        "First module.\n\nShared paragraph of\nboth.\n\nWhat C is.\n\nMethod m.",
        "Second module.",
    ]
    assert "2 topics" in corpus.description and "2 modules" in corpus.description


@pytest.mark.parametrize(
    "quoted", [r"'One \"x\"\n\n\\d.\n'", "r'''One \"x\"\n\n\\d.\n'''", r"'One \"x\"\n' '\n\\d.\n'"]
)
def test_topics_are_the_same_in_every_format_of_the_file(tmp_path, quoted):
    file = tmp_path / "topics.py"
    file.write_text(f"# made by Sphinx\n\ntopics = {{'a': {quoted}}}\n")
    assert data.read_topics(file) == ['One "x"\n\n\\d.\n']


def test_topics_of_this_interpreter_are_those_that_pydoc_shows():
    from pydoc_data import topics

    assert data.read_topics(data.Path(topics.__file__)) == [topics.topics[name] for name in sorted(topics.topics)]


def test_python_without_sources_is_refused(tmp_path):
    with pytest.raises(recipe.UserError, match="comes without the sources"):
        data.read_cpython(tmp_path)


def test_blank_lines_end_documents_and_files_are_read_in_order(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "2.txt").write_text("three\n")
    (tmp_path / "1.txt").write_text("\n\none\nline two\n \n\n\ntwo\n\n")
    (tmp_path / "ignored.md").write_text("no")
    assert data.read_corpus(str(tmp_path)).documents == ["one\nline two", "two", "three"]
    assert data.read_corpus(str(tmp_path / "1.txt")).documents == ["one\nline two", "two"]


def test_split_is_by_document_and_complete():
    documents = [f"document {index}" for index in range(50)]
    training, held_out = data.split_documents(documents, 0.1, seed=3)
    assert len(held_out) == 5
    assert sorted(training + held_out) == sorted(documents)
    assert not set(training) & set(held_out)
    assert data.split_documents(documents, 0.1, seed=3) == (training, held_out)
    assert data.split_documents(documents, 0.1, seed=4)[1] != held_out
    assert [len(part) for part in data.split_documents(documents[:2], 0.001, seed=0)] == [1, 1]


# ---- tokenizer ----


def test_tokenizer_has_robertas_layout_and_survives_saving(tmp_path):
    texts = [" ".join(random.Random(0).choices(WORDS, k=500))]
    trained = data.train_tokenizer(texts, 300, max_length=40)
    assert trained.get_vocab() == data.train_tokenizer(texts, 300, max_length=40).get_vocab()
    trained.save_pretrained(tmp_path)
    for tokenizer in (trained, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 299]) == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        assert len(tokenizer) == 300 and tokenizer.model_max_length == 40
        assert tokenizer.convert_ids_to_tokens(tokenizer("token<mask> of").input_ids) == [
            *["<s>", *tokenizer.tokenize("token"), "<mask>", *tokenizer.tokenize(" of"), "</s>"]
        ]
        # As RoBERTa's: the mask swallows the space before it, so that it stands for a word with its space.
        assert tokenizer("of <mask> of").input_ids == tokenizer("of<mask> of").input_ids
        for text in ("the packed sequence", "any bytes: é 語 \n\t x"):
            assert tokenizer.decode(data.encode(tokenizer, [text])[0]) == text


def test_special_tokens_in_the_text_are_text():
    tokenizer = tiny_tokenizer()
    ids = data.encode(tokenizer, ["the <s> tag and <mask>"])[0]
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == "the <s> tag and <mask>"


# ---- packing and masking ----


@pytest.mark.parametrize("block_size", [3, 7, 32])
def test_packing_loses_no_token(block_size):
    generator = random.Random(block_size)
    documents = [[generator.randrange(4, 99) for _ in range(length)] for length in (11, 0, 1, 30, 5, 17)]
    blocks = data.pack(documents, block_size, **SPECIAL)
    assert {len(block["input_ids"]) for block in blocks[:-1]} == {block_size}
    assert 3 <= len(blocks[-1]["input_ids"]) <= block_size
    content, inner = [], []
    for block in blocks:
        ids, special = block["input_ids"], block["special_tokens_mask"]
        assert (ids[0], ids[-1], special[0], special[-1]) == (0, 2, 1, 1)
        assert special == [int(token in (0, 2)) for token in ids]
        inner += ids[1:-1]
        content += [token for token, is_special in zip(ids, special, strict=True) if not is_special]
    assert content == [token for document in documents for token in document]
    expected = " 2 ".join(" ".join(map(str, document)) for document in documents if document)
    assert " ".join(map(str, inner)) == expected


def test_masking_proportions_and_that_masks_change():
    tokenizer = tiny_tokenizer()
    generator = random.Random(0)
    documents = [[generator.randrange(4, len(tokenizer) - 1) for _ in range(40_000)], [5] * 11]
    blocks = data.pack(documents, 64, **SPECIAL)
    collator = data.masking(tokenizer, 0.3, seed=5)
    batch, again = collator(blocks), collator(blocks)
    ids = torch.full(batch["input_ids"].shape, tokenizer.pad_token_id)
    for row, block in enumerate(blocks):
        ids[row, : len(block["input_ids"])] = torch.tensor(block["input_ids"])
    labels, chosen = batch["labels"], batch["labels"] != -100
    ordinary = (ids != 0) & (ids != 1) & (ids != 2)
    assert torch.equal(batch["attention_mask"].bool(), ids != tokenizer.pad_token_id) and not ordinary.all(1)[-1]
    assert torch.equal(labels[chosen], ids[chosen]) and torch.equal(batch["input_ids"][~chosen], ids[~chosen])
    assert not (chosen & ~ordinary).any()
    # Standard deviations of these shares are 0.0023, 0.0037 and 0.0028.
    assert abs((chosen.sum() / ordinary.sum()).item() - 0.3) < 0.012
    inputs = batch["input_ids"][chosen]
    masked = inputs == tokenizer.mask_token_id
    kept = inputs == labels[chosen]
    assert abs(masked.float().mean().item() - 0.8) < 0.02
    assert abs(kept.float().mean().item() - 0.1) < 0.015
    assert not torch.equal(labels, again["labels"])


def test_evaluation_masks_are_fixed_by_the_seed():
    tokenizer = tiny_tokenizer()
    blocks = data.pack(data.encode(tokenizer, ["every token reads the packed sequence in turn " * 9]), 16, **SPECIAL)
    first, same, other = (data.mask_once(blocks, tokenizer, 0.3, seed) for seed in (1, 1, 2))
    assert len(first) == len(blocks)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, same, strict=True))
    assert any(not torch.equal(a["labels"], b["labels"]) for a, b in zip(first, other, strict=True))


def test_unigram_baseline_equals_a_literal_computation():
    training = [[4, 4, 4, 5], [], [6, 5, 4]]
    rows = [{"labels": torch.tensor([-100, 4, 7])}, {"labels": torch.tensor([5, -100, 4])}]
    counts = Counter(token for document in training for token in document)
    targets = [4, 7, 5, 4]
    expected = -sum(math.log((counts[token] + 1) / (7 + 9)) for token in targets) / len(targets)
    result = data.unigram_baseline(training, rows, vocab_size=9)
    assert result["loss"] == pytest.approx(expected, rel=1e-12)
    assert (result["accuracy"], result["targets"]) == (0.5, 4)


# ---- loop ----


def masked_rows(rows=6, length=12, vocab_size=120):
    """Rows with padding, and a different number of labels in each (1, 2, ...)."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for row in range(rows):
        ids = torch.randint(4, vocab_size - 1, (length,), generator=generator)
        keep = torch.arange(length) < length - row
        labels = torch.where(torch.arange(length) <= row, ids, -100).where(keep, torch.tensor(-100))
        examples.append(
            {"input_ids": ids.where(keep, torch.tensor(1)), "attention_mask": keep.long(), "labels": labels}
        )
    return examples


def small_model(kind):
    torch.manual_seed(0)
    if kind == "luna":
        return AutoModelForMaskedLM.from_config(tiny_config(sparse_prediction=True, conv_kernel_size=3))
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return AutoModelForMaskedLM.from_config(
        RobertaConfig(vocab_size=120, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    )


def one_epoch(kind, batch_size, accumulation, path, steps=1):
    """Parameters and training loss after updates on `masked_rows` by plain gradient descent."""
    accelerator = loop.make_accelerator("no", accumulation, seed=0)
    model = small_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = loop.warmup_then_linear(optimizer, steps, 0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(masked_rows(), batch_size=batch_size))
    log = loop.RunLog(path, is_main_process=True)
    options = {"max_steps": steps, "max_grad_norm": 1e9, "log_steps": 1, "eval_steps": 1}
    loop.train(
        accelerator,
        model,
        optimizer,
        scheduler,
        loader,
        lambda: loop.evaluate(accelerator, model, loader),
        log,
        **options,
    )
    return dict(model.named_parameters()), log


@pytest.mark.parametrize("kind", ["luna", "roberta"])
def test_accumulated_update_is_that_of_one_large_batch(kind, tmp_path):
    whole, whole_log = one_epoch(kind, 6, 1, tmp_path / "whole")
    parts, parts_log = one_epoch(kind, 2, 3, tmp_path / "parts")
    start = dict(small_model(kind).named_parameters())
    moved = max((whole[name] - start[name]).abs().max().item() for name in start)
    assert moved > 0.01
    for name in whole:  # float32 sums in another order
        torch.testing.assert_close(
            parts[name], whole[name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert parts_log.series("train", "loss")[1] == pytest.approx(whole_log.series("train", "loss")[1], rel=1e-5)


def test_a_batch_without_labels_is_passed_over(tmp_path):
    rows = masked_rows(4)
    for row in rows[:2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    accelerator = loop.make_accelerator("no", 1, seed=0)
    group, labels, total, tokens = next(loop.update_batches(accelerator, accelerator.prepare(DataLoader(rows, 2)), 1))
    assert torch.equal(group[0]["labels"], torch.stack([row["labels"] for row in rows[2:]]))
    assert labels.tolist() == [total] == [3 + 4]
    assert tokens == sum(int(row["attention_mask"].sum()) for row in rows[2:])


def test_evaluation_equals_a_literal_computation(tmp_path):
    rows = masked_rows(5)
    accelerator = loop.make_accelerator("no", 1, seed=0)
    model = small_model("luna").train()
    result = loop.evaluate(accelerator, model, accelerator.prepare(DataLoader(rows, batch_size=2)))
    assert model.training
    losses, hits = [], []
    for row in rows:
        one = {name: row[name].unsqueeze(0) for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            logits = model.eval()(**one).logits[0].double()
        for position, label in enumerate(row["labels"].tolist()):
            if label != -100:
                losses.append(-logits[position].log_softmax(-1)[label].item())
                hits.append(logits[position].argmax().item() == label)
    assert result.targets == len(losses) == 15
    assert result.loss == pytest.approx(sum(losses) / 15, rel=1e-5)
    assert result.accuracy == pytest.approx(sum(hits) / 15)


def test_biases_and_norms_do_not_decay():
    model = small_model("luna")
    decayed, plain = loop.parameter_groups(model, 0.01)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    plain_names = {names[id(parameter)] for parameter in plain["params"]}
    assert plain_names == {name for name in names.values() if name.endswith("bias") or "norm" in name.lower()}
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_schedule_warms_up_and_falls_to_zero():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = loop.warmup_then_linear(optimizer, max_steps=10, warmup_fraction=0.2)
    rates = []
    for _ in range(11):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])


def test_diverging_run_says_what_to_change(corpus, tmp_path, capsys):
    words = arguments(DEMO, tmp_path / "out", data=corpus, learning_rate=1e30, max_grad_norm=1e30)
    assert pretrain_mlm.main(words) == 2
    assert "Lower `learning_rate`" in capsys.readouterr().err


# ---- the script ----


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run that cannot reach its gain; the others of this file end with 0."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    return script(*arguments(DEMO, folder, data=corpus, gradient_accumulation_steps=2, min_gain_nats=50)), folder


def test_missed_gain_fails_the_process(finished):
    process, _ = finished
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1].startswith("The gain over the unigram baseline is ")


def test_script_writes_a_checkpoint_with_its_figures(finished):
    process, folder = finished
    written = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "metrics.json", "log.jsonl"} <= written
    assert {"modeling_luna.py", "configuration_luna.py", "loss.png"} <= written
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((folder / "metrics.json").read_text())
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    held_out = [entry for entry in entries if entry["kind"] == "held_out"]
    assert [entry["step"] for entry in held_out] == [2, 3]
    assert [entry["step"] for entry in entries if entry["kind"] == "train"] == [1, 2, 3]
    assert held_out[-1]["loss"] == pytest.approx(figures["held_out_loss"], rel=1e-5)
    assert held_out[-1]["loss"] < held_out[0]["loss"]
    assert figures["gain_nats"] == pytest.approx(figures["unigram_loss"] - figures["held_out_loss"])
    assert figures["seen_tokens"] == entries[-2]["seen_tokens"] <= 3 * 2 * 8 * 32
    assert (figures["training_documents"], figures["held_out_documents"]) == (32, 8)
    for value in (f"{figures['held_out_loss']:.3f}", f"{figures['unigram_loss']:.3f}", "of 2 text file(s)"):
        assert value in process.stdout
    assert "step      2: held-out loss" in process.stdout


def test_checkpoint_answers_alike_where_the_package_is_missing(finished):
    _, folder = finished
    code = """
import json, sys
from transformers import pipeline
fill_mask = pipeline("fill-mask", sys.argv[1], trust_remote_code=True, top_k=3)
print(json.dumps([fill_mask(sentence) for sentence in json.loads(sys.argv[2])]))
"""
    expected = json.loads((folder / "metrics.json").read_text())["fill_mask"]
    assert len(expected) == 3 and all(len(answer["guesses"]) == 3 for answer in expected)
    sentences = json.dumps([answer["sentence"] for answer in expected])
    answers = json.loads(run_python(code, folder, sentences, blocked=True).splitlines()[-1])
    for answer, rows in zip(expected, answers, strict=True):
        assert [guess["token"] for guess in answer["guesses"]] == [row["token_str"] for row in rows]
        assert [guess["score"] for guess in answer["guesses"]] == pytest.approx(
            [row["score"] for row in rows], rel=1e-4
        )


def test_runs_are_reproducible_and_the_folder_can_be_written_again(corpus, tmp_path):
    first, again, other = (run(tmp_path / "out", data=corpus, seed=seed) for seed in (1, 1, 2))
    assert first["held_out_loss"] == again["held_out_loss"]
    assert first["held_out_loss"] != other["held_out_loss"]


def test_a_mistake_leaves_the_earlier_run_alone(corpus, tmp_path):
    run(tmp_path / "out", data=corpus)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=tmp_path / "none")) == 2
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=corpus, model__hidden_size=33)) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()} == before


def test_a_run_interrupted_early_can_be_started_again(corpus, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pretrain_mlm, "encode", interrupt)  # the tokenizer is saved, training has not begun
        pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=corpus))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert run(tmp_path / "out", data=corpus)["held_out_loss"] > 0


def test_files_of_no_earlier_run_are_never_overwritten(corpus, tmp_path, capsys):
    (tmp_path / "README.md").write_text("somebody's own")
    assert pretrain_mlm.main(arguments(DEMO, tmp_path, data=corpus)) == 2
    assert "--output_dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_roberta_trains_with_the_same_script(corpus, tmp_path):
    roberta = tmp_path / "roberta.yaml"
    content = {**yaml.safe_load(DEMO.read_text()), "model": {"model_type": "roberta", "num_attention_heads": 4}}
    roberta.write_text(yaml.safe_dump(content))
    figures = run(tmp_path / "out", roberta, data=corpus)
    assert figures["longest_input"] == 62  # 64 rows, of which RoBERTa leaves two unused
    assert "custom_code" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_two_processes_see_every_held_out_row_once(corpus, tmp_path):
    one = run(tmp_path / "one", data=corpus, batch_size=8)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = script(*arguments(DEMO, tmp_path / "two", data=corpus, batch_size=4), launcher=launcher)
    assert process.returncode == 0, process.stderr[-3000:]
    two = json.loads((tmp_path / "two" / "metrics.json").read_text())
    assert two["processes"] == 2
    for name in ("held_out_targets", "unigram_loss", "training_tokens"):
        assert two[name] == one[name]
    # The same number of blocks an update, but in other groups and with other masks.
    assert two["held_out_loss"] == pytest.approx(one["held_out_loss"], rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data": "no/such/folder"}, "no such file or folder"),
        ({"block_size": 80}, "raise `model.max_position_embeddings`"),
        ({"fill_mask": f"['{'word ' * 99}<mask>']"}, "`fill_mask`"),
        ({"model__model_type": "lunar"}, "Choose luna"),
        ({"model__hiden_size": 32}, "Did you mean `hidden_size`"),
        ({"model__vocab_size": 32}, "follows from the tokenizer"),
        ({"model__num_attention_heads": 5}, "num_attention_heads"),
        ({"model__num_attention_heads": "many"}, "num_attention_heads"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(corpus, tmp_path, capsys, overrides, message):
    words = arguments(DEMO, tmp_path / "out", **{"data": corpus, **overrides})
    assert pretrain_mlm.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_output_folder_with_something_in_it_is_refused(corpus, tmp_path, capsys):
    (tmp_path / "note").write_text("mine")
    assert pretrain_mlm.main(arguments(DEMO, tmp_path, data=corpus, overwrite_output_dir="false")) == 2
    assert "--overwrite_output_dir true" in capsys.readouterr().err
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "note", data=corpus)) == 2
    assert "is a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no .txt file"), (b" \n\n", "no text"), (b"one document\n", "single document"), (b"\xff\xfe", "not UTF-8")],
)
def test_unusable_text_is_refused(tmp_path, capsys, content, message):
    texts = tmp_path / "texts"
    texts.mkdir()
    if content is not None:
        (texts / "a.txt").write_bytes(content)
    assert pretrain_mlm.main(arguments(DEMO, tmp_path / "out", data=texts)) == 2
    assert message in capsys.readouterr().err
