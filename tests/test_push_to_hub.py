"""Publishing: what `push_to_hub` and the Trainer upload is complete, and loads by its name without the package.

The Hub is `hub_stub.py` on the loopback interface.
"""

import json

import pytest
import torch
from helpers import code_name, inputs_for, run_python, tiny_model, tiny_tokenizer
from hub_stub import HubStub
from transformers import Trainer, TrainingArguments, default_data_collator

# Pushing is the same in every family; these differ in the names of their files.
FAMILIES = ("luna", "abc_memory")


def push(family, folder):
    """Upload a model and a trained classifier; their inputs and outputs."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, "mlm", vocab_size=len(tokenizer))
    model.push_to_hub(f"tester/{family}-pushed")
    tokenizer.push_to_hub(f"tester/{family}-pushed")
    rows = inputs_for("sequence", batch=4, labels=True)
    trainer = Trainer(
        tiny_model(family, "sequence", vocab_size=len(tokenizer)),
        TrainingArguments(
            output_dir=f"{folder}/{family}-trained",
            use_cpu=True,
            max_steps=1,
            hub_model_id=f"tester/{family}-trained",
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[{name: tensor[row] for name, tensor in rows.items()} for row in range(4)],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.push_to_hub(tags=["linear-attention"], dataset="made up")
    saved = {"push_to_hub": True, "repo_id": f"tester/{family}-configuration"}
    model.config.save_pretrained(f"{folder}/{family}-configuration", **saved)
    batch = inputs_for("mlm")
    with torch.no_grad():
        return [batch, model(**batch).logits, trainer.model.eval()(**batch).logits]


LOAD = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
folder = sys.argv[1]
for family, (batch, masked_lm, classes) in torch.load(f"{folder}/expected.pt").items():
    model = AutoModelForMaskedLM.from_pretrained(f"tester/{family}-pushed", trust_remote_code=True)
    trained = AutoModelForSequenceClassification.from_pretrained(f"tester/{family}-trained", trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(f"tester/{family}-pushed")
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, masked_lm)
        torch.testing.assert_close(trained(**batch).logits, classes)
    fill = pipeline("fill-mask", model=f"tester/{family}-pushed", trust_remote_code=True, device="cpu")
    assert len({proposal["token"] for proposal in fill("the quick <mask>")}) == 5
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The stand-in with all repositories, which a process without the package has loaded and compared."""
    folder = tmp_path_factory.mktemp("published")
    with HubStub() as hub, pytest.MonkeyPatch.context() as monkeypatch:
        hub.patch(monkeypatch, folder)
        torch.save({family: push(family, folder) for family in FAMILIES}, folder / "expected.pt")
        run_python(LOAD, folder, env=hub.environment(folder / "loading"), blocked=True)
        yield hub


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["pushed", "trained"])
def test_a_pushed_repository_is_complete(published, family, name):
    files = published.repositories[f"tester/{family}-{name}"]
    own = code_name(family)
    code = {f"configuration_{own}.py", f"modeling_{own}.py"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", *code} <= set(files)
    config = json.loads(files["config.json"])
    assert config["model_type"] == family
    for auto_class in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
        module, _, class_name = config["auto_map"][auto_class].partition(".")
        assert f"class {class_name}(" in files[f"{module}.py"].decode()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_is_pushed_with_its_code(published, family):
    files = published.repositories[f"tester/{family}-configuration"]
    own = code_name(family)
    assert {"config.json", f"configuration_{own}.py", f"modeling_{own}.py"} <= set(files)


def test_the_stand_in_answered_everything(published):
    # An unknown route means that the libraries have changed, and something here is no longer tested.
    assert not published.unknown


def test_the_trainer_writes_a_model_card(published):
    card = published.repositories["tester/luna-trained"]["README.md"].decode()
    assert "linear-attention" in card and "made up" in card
