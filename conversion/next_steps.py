"""The commands that train a converted model on, which the scripts print last."""

import shlex
from collections.abc import Collection

# What the groups of the recipes match.
GROUPED = ("control.", "pack", "convolution")


def next_steps(
    family: str, source: str, target: str, names: Collection[str], new: Collection[str], alike: bool
) -> list[str]:
    """Lines to print: attention transfer where there is something to fit, then masked words.

    Args:
        family: "abc" or "luna", with which the recipes begin.
        source: folder or Hub name.
        target: folder of the converted model.
        names: its parameters.
        new: those that the source has not.
        alike: whether it attends as the source does; all that is new then starts without effect, or is a head.

    Returns:
        No lines where there is nothing to train.
    """
    if alike and not new:
        return []
    has_groups = any(part in name for name in (new if alike else names) for part in GROUPED)
    fits = has_groups and not alike
    start = f"{target}-fitted" if fits else target
    words = [
        *("python", "training/pretrain_mlm.py", f"training/recipes/pretrain_mlm/{family}-base-continue.yaml"),
        *("--model_name_or_path", start, "--output_dir", f"{target}-continued"),
    ]
    if not has_groups:
        words += ["--parameter_groups", "[]"]
    if not fits:
        return ["Next, go on with masked words (`--data` names your text):", f"  {shlex.join(words)}"]
    transfer = [
        *("python", "training/transfer_attention.py", f"training/recipes/transfer_attention/{family}-base.yaml"),
        *("--teacher", source, "--model_name_or_path", target, "--output_dir", start),
    ]
    return [
        "Next, fit what is new to the source's attention, then go on with masked words (`--data` names your text):",
        f"  {shlex.join(transfer)}",
        f"  {shlex.join(words)}",
    ]
