"""What this installation has: `python -m luna_hf`."""

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from transformers.utils import is_flash_attn_2_available, is_torch_flex_attn_available

from . import FAMILIES, __version__
from .ops.dispatch import SLOW_CPU_DTYPES
from .scripting import Parser, UserError, cpu_name, run_script

_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "accelerate",
    "datasets",
    "sentence-transformers",
    "peft",
    "flash-attn",
)
# torch's queries for instructions on x86; on Arm only oneDNN knows.
_BF16_INSTRUCTIONS = {"AVX512-BF16": "_is_avx512_bf16_supported", "AMX": "_is_amx_tile_supported"}


def installed(package: str) -> str:
    """Version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_bf16() -> str:
    """Which instructions for bfloat16 the processor has."""
    found = [name for name, query in _BF16_INSTRUCTIONS.items() if getattr(torch.cpu, query, bool)()]
    if platform.machine().lower() in ("aarch64", "arm64") and torch.bfloat16 not in SLOW_CPU_DTYPES:
        found.append("Arm BF16")
    return f"yes ({', '.join(found)})" if found else "no instructions, emulated"


def facts() -> dict[str, str]:
    """What is printed, by its label."""
    backends = {"flash_attention_2": is_flash_attn_2_available(), "flex_attention": is_torch_flex_attn_available()}
    table = {
        "luna_hf": __version__,
        "families": ", ".join(FAMILIES),
        "attention backends": ", ".join(["sdpa (default)", "eager", *(name for name in backends if backends[name])]),
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        **{package: installed(package) for package in _PACKAGES},
        "CPU": cpu_name(),
        "CPU bf16": cpu_bf16(),
        "CUDA": f"yes ({torch.version.cuda})" if torch.cuda.is_available() else "no device",
    }
    for number in range(torch.cuda.device_count()):
        name, memory = torch.cuda.get_device_name(number), torch.cuda.get_device_properties(number).total_memory
        table[f"GPU {number}"] = f"{name}, {memory / 2**30:.0f} GiB"
        with torch.cuda.device(number):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        table[f"GPU {number} bf16"] = "yes" if native else "no instructions, emulated"
    return table


def main(words: Sequence[str]) -> int:
    """Print the facts, or run the command `convert`; see `run_script` for the exit status."""
    if words[:1] == ["convert"]:
        from .convert.command import main as convert  # slow to import

        return convert(words[1:])

    def script() -> None:
        if words and not words[0].startswith("-"):
            raise UserError(f"There is no command {words[0]!r}. The command is `python -m luna_hf convert`.")
        more = "`python -m luna_hf convert --help` describes the command that converts a trained encoder."
        Parser(prog="python -m luna_hf", description=__doc__, epilog=more).parse_args(words)
        table = facts()
        width = max(map(len, table))
        print("\n".join(f"{label:<{width}}  {value}" for label, value in table.items()))

    return run_script(script)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
