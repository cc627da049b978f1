"""Imported first by every command: exits with one line if packages of the `train` extra are missing."""

import sys
from importlib.util import find_spec

_NEEDED = ("accelerate", "datasets", "evaluate", "matplotlib", "scipy", "sklearn", "tqdm", "xxhash", "yaml")

_missing = [name for name in _NEEDED if find_spec(name) is None]
if _missing:
    sys.exit(f'error: {", ".join(_missing)} not installed. Install the train extra: pip install -e ".[train]"')
