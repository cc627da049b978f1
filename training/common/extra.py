"""Imported first by every command: exits with one line if packages of the `train` extra are missing."""

import sys
from importlib.util import find_spec


def require(extra: str, *packages: str) -> None:
    """Exit with one line if packages of an extra are missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        sys.exit(f'error: {", ".join(missing)} not installed. Install the {extra} extra: pip install -e ".[{extra}]"')


require("train", "accelerate", "datasets", "evaluate", "matplotlib", "scipy", "sklearn", "tqdm", "xxhash", "yaml")
