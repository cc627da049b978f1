"""Imported first by the commands of this folder: makes the packages of `training/` importable, and checks extras."""

import sys
from pathlib import Path

if (_folder := str(Path(__file__).resolve().parents[1] / "training")) not in sys.path:
    sys.path.append(_folder)

from common import extra  # noqa: F401
