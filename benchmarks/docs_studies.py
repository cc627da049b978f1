"""The tables of the documentation that summarise studies."""

import statistics

from docs_sources import load, with_source

from luna_hf.scripting import markdown_table


def learning() -> str:
    """Held-out loss of every system of the learning study."""
    name = "learning-pretrain-cpu-bfloat16"
    labels = {
        "luna-32": "Luna, 32 slots",
        "luna-128": "Luna, one slot for each token",
        "roberta": "RoBERTa",
        "luna-conv": "Luna, 32 slots, convolution",
        "luna-conv-tied": "the same with tied key and value",
        "roberta-conv": "RoBERTa with the same convolution",
        "luna-conv-1": "baseline: Luna, one slot, convolution",
    }
    rows = []
    for system, label in labels.items():
        runs = sorted((run for run in load(name)["runs"] if run["system"] == system), key=lambda run: run["seed"])
        accuracy = statistics.mean(run["curve"]["accuracy"][-1] for run in runs)
        losses = ", ".join(f"{run['final_loss']:.3f}" for run in runs)
        rows.append([f"`{system}`", label, f"{runs[0]['parameters']:,}", losses, f"{accuracy:.1%}"])
    table = markdown_table(["name", "model", "parameters", "held-out loss, by seed", "accuracy"], rows)
    note = f"The unigram entropy of the held-out text is {load(name)['unigram_loss']:.2f} nats."
    return with_source(f"{table}\n\n{note}", name)


def swap(rate: str) -> str:
    """Final losses at one learning rate: direct, with transfer, with a convolution, with both."""
    runs = [run for run in load("swap-pretrain-cpu-bfloat16")["runs"] if run["rate"] == rate]
    found = {(run["system"], run["convolution"], run["transfer"]): run for run in runs}
    rows = []
    for system in dict.fromkeys(run["system"] for run in runs):
        ends = [found.get((system, *kind)) for kind in ((False, False), (False, True), (True, False), (True, True))]
        losses = [f"{run['final_loss']:.3f}" if run else "-" for run in ends]
        rows.append([f"`{system}`", f"{ends[0]['swapped_loss']:.3f}", *losses])
    header = ["attention", "after the swap", "continued", "with transfer", "with a convolution", "with both"]
    return markdown_table(header, rows)
