"""Publishing: what `push_to_hub` and the Trainer upload is complete, and loads back from the Hub by its name.

The Hub is `hub_stub.py` on the loopback interface. One process pushes, with the package; one loads, without it.
"""

import json

import pytest
import torch
from helpers import TINY, code_name, run_python, tiny_tokenizer
from hub_stub import HubStub
from safetensors.torch import load

from luna_hf import FAMILIES

PUSH = """
import sys, torch
from helpers import inputs_for, model_class, tiny_model, tiny_tokenizer
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments, default_data_collator, pipeline
family, folder = sys.argv[1:3]
tokenizer = tiny_tokenizer()
model = tiny_model(family, "mlm", vocab_size=len(tokenizer))
model.push_to_hub("tester/pushed")
tokenizer.push_to_hub("tester/pushed")
rows = inputs_for("sequence", batch=4, labels=True)
rows = [{name: tensor[row] for name, tensor in rows.items()} for row in range(4)]
arguments = TrainingArguments(
    output_dir=f"{folder}/trained", use_cpu=True, max_steps=1, hub_model_id="tester/trained", save_strategy="no"
)
trainer = Trainer(
    tiny_model(family, "sequence", vocab_size=len(tokenizer)), arguments,
    train_dataset=rows, data_collator=default_data_collator, processing_class=tokenizer,
)
trainer.train()
trainer.push_to_hub(tags=["linear-attention"], dataset="made up")
# With the package no flag is needed.
back = AutoModelForMaskedLM.from_pretrained("tester/pushed")
assert type(back) is model_class(family, "mlm")
batch = inputs_for("mlm")
with torch.no_grad():
    torch.save([batch, back(**batch).logits, trainer.model.eval()(**batch).logits], f"{folder}/expected.pt")
"""

LOAD = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
folder = sys.argv[1]
batch, masked_lm, classes = torch.load(f"{folder}/expected.pt")
model = AutoModelForMaskedLM.from_pretrained("tester/pushed", trust_remote_code=True)
trained = AutoModelForSequenceClassification.from_pretrained("tester/trained", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("tester/pushed")
with torch.no_grad():
    assert torch.equal(model(**batch).logits, masked_lm)
    torch.testing.assert_close(trained(**batch).logits, classes)
fill = pipeline("fill-mask", model="tester/pushed", trust_remote_code=True, device="cpu")
torch.save([len(tokenizer), [proposal["token"] for proposal in fill("the quick <mask>")]], f"{folder}/loaded.pt")
"""


@pytest.fixture(scope="module", params=list(FAMILIES))
def published(request, tmp_path_factory):
    """Family, the stand-in with both repositories, and what the loading process found."""
    folder = tmp_path_factory.mktemp("published")
    with HubStub() as hub:
        run_python(PUSH, request.param, folder, env=hub.environment(folder / "pushing"))
        run_python(LOAD, folder, env=hub.environment(folder / "loading"), blocked=True)
        yield request.param, hub, torch.load(folder / "loaded.pt")


@pytest.mark.parametrize("name", ["pushed", "trained"])
def test_a_pushed_repository_is_complete(published, name):
    family, hub, _ = published
    files = hub.repositories[f"tester/{name}"]
    own = code_name(family)
    code = {f"configuration_{own}.py", f"modeling_{own}.py", "configuration_base.py", "modeling_base.py"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", *code} <= set(files)
    config = json.loads(files["config.json"])
    assert config["model_type"] == family
    for auto_class in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
        module, _, class_name = config["auto_map"][auto_class].partition(".")
        assert f"class {class_name}(" in files[f"{module}.py"].decode()


def test_the_pushed_weights_are_those_of_the_model(published):
    family, hub, _ = published
    weights = load(hub.repositories["tester/pushed"]["model.safetensors"])
    prefix = FAMILIES[family].base_model.base_model_prefix
    assert weights[f"{prefix}.embeddings.word_embeddings.weight"].shape[1] == TINY["hidden_size"]
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_a_pushed_model_comes_back_without_the_package(published):
    # The process itself compares outputs; here what its pipeline and tokenizer made of the repository.
    vocabulary, proposals = published[2]
    assert vocabulary == len(tiny_tokenizer())
    assert len(set(proposals)) == 5 and max(proposals) < vocabulary


def test_the_stand_in_answered_everything(published):
    # An unknown route would mean that the libraries have changed and something here is no longer tested.
    assert not published[1].unknown


def test_the_trainer_writes_a_model_card(published):
    card = published[1].repositories["tester/trained"]["README.md"].decode()
    assert "linear-attention" in card and "made up" in card
