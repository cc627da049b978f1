"""Data-parallel training in two processes (gloo, CPU): no unused parameters, and the gradients of one large batch."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import MODELS, inputs_for, tiny_model
from processes import run_pair
from torch.nn.parallel import DistributedDataParallel
from variants import COMMON

from luna_hf import FAMILIES

# (family, kind, options): every head, and masked LMs with parameters that only some losses reach. That every parameter
# of every variant gets a gradient is tested in `test_model_contract.py`.
CASES = [("luna", kind, {}) for kind in MODELS if kind not in ("base", "mlm")]
CASES += [(family, "mlm", COMMON["convolution-segments-untied"]) for family in FAMILIES]
CASES += [
    ("luna", "mlm", {"sparse_prediction": True}),
    ("luna", "sequence", {"classifier_pooling": "packed_mean"}),
]


def train(rank, folder):
    """Run half of the rows of every case; rank 0 stores the gradients after their exchange."""
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    gradients = {}
    for number, (family, kind, options) in enumerate(CASES):
        model = tiny_model(family, kind, **options).double().train()
        parallel = DistributedDataParallel(model, find_unused_parameters=False)
        # A parameter without a gradient is reported at the start of the second step.
        for _ in range(2):
            model.zero_grad()
            parallel(**half_batch(kind, rank)).loss.backward()
        gradients[number] = {name: parameter.grad for name, parameter in model.named_parameters()}
    if rank == 0:
        torch.save(gradients, f"{folder}/gradients.pt")
    dist.barrier()  # neither leaves while the other still needs it
    dist.destroy_process_group()


def half_batch(kind, rank):
    """Two of four rows. Each half has as many labels as the other: DistributedDataParallel averages over processes."""
    batch = inputs_for(kind, batch=4, labels=True)
    if kind == "mlm":
        labelled = torch.tensor([[2, 5], [3, 4], [1, 6], [2, 7]])
        labels = torch.full_like(batch["input_ids"], -100)
        batch["labels"] = labels.scatter(1, labelled, batch["input_ids"].gather(1, labelled))
    elif kind == "token":
        batch["labels"][:, 8:] = -100
    return {name: tensor[2 * rank : 2 * rank + 2] for name, tensor in batch.items()}


@pytest.fixture(scope="module")
def parallel_gradients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    run_pair(train, folder)
    return torch.load(folder / "gradients.pt")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_processes_give_the_gradients_of_one_large_batch(parallel_gradients, number):
    family, kind, options = CASES[number]
    model = tiny_model(family, kind, **options).double().train()
    halves = [half_batch(kind, rank) for rank in range(2)]
    whole = {key: torch.cat([half[key] for half in halves]) for key in halves[0]}
    model(**whole).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        parallel = parallel_gradients[number][parameter_name]
        # Float64: only the order of additions differs.
        torch.testing.assert_close(parallel, parameter.grad, atol=1e-12, rtol=1e-9, msg=parameter_name)
