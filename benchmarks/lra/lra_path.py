"""Lets the commands of this folder import the package that it is, and what the benchmarks share; imported for that."""

import sys
from pathlib import Path

if (_folder := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _folder)
