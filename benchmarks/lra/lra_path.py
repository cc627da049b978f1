"""Puts the packages that the commands of this folder use on the path; imported for that alone.

Started as a script, a command has its own folder first on the path, where `tasks` would hide that of `training/`.
"""

import sys
from pathlib import Path

_OWN = Path(__file__).resolve().parent
_FOLDERS = (_OWN.parent, _OWN.parents[1] / "training", _OWN)
sys.path[:] = [place for place in sys.path if Path(place).resolve() != _OWN]
sys.path += [str(folder) for folder in _FOLDERS if str(folder) not in sys.path]
