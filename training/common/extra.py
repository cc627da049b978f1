"""Imported first by every script: stops with one line where the packages of the `train` extra are not installed."""

import sys
from importlib.util import find_spec

_NEEDED = ("accelerate", "datasets", "evaluate", "matplotlib", "scipy", "sklearn", "tqdm", "yaml")

_missing = [name for name in _NEEDED if find_spec(name) is None]
if _missing:
    sys.exit(f'error: {", ".join(_missing)} not installed. The scripts need the train extra: pip install -e ".[train]"')
