"""Imported first by the commands of this folder: makes the packages of `training/` importable, and checks extras."""

import sys

from luna_hf.scripting import ROOT

if (_folder := str(ROOT / "training")) not in sys.path:
    sys.path.append(_folder)

from common import extra  # noqa: F401
