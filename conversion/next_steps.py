"""The commands that train a converted model on, which the scripts print last."""

import shlex
from collections.abc import Collection

# Where the only new thing is a convolution; the recipes' own groups are for a control or a packed sequence.
CONVOLUTION = "[{match: convolution, learning_rate: 2e-3}]"


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
    to_train = new if alike else names
    has_memory = any("control." in name or "pack" in name for name in to_train)
    has_convolution = any("convolution" in name for name in to_train)
    fits = not alike and (has_memory or has_convolution)
    start = f"{target}-fitted" if fits else target
    words = [
        *("python", "training/pretrain_mlm.py", f"training/recipes/pretrain_mlm/{family}-base-continue.yaml"),
        *("--model_name_or_path", start, "--output_dir", f"{target}-continued"),
    ]
    if not has_memory:
        words += ["--parameter_groups", CONVOLUTION if has_convolution else "[]"]
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
