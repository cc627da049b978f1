"""Puts the packages that the commands of this folder use on the path; imported for that alone.

Started as a script, a command has its own folder first on the path, where `tasks` would hide that of `training/`.
"""

import sys
from pathlib import Path

_OWN = Path(__file__).resolve().parent
_others = [place for place in sys.path if Path(place).resolve() != _OWN]
_new = [str(folder) for folder in (_OWN.parents[1] / "training", _OWN.parent) if str(folder) not in _others]
# Last, so that a process that measures memory can import this module again.
sys.path[:] = [*_new, *_others, str(_OWN)]
