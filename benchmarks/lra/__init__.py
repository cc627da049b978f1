"""Long Range Arena (Tay et al. 2020, arXiv 2011.04006): five tasks on sequences of 1,000 to 4,000 tokens."""

import sys
from pathlib import Path

# The commands of training/ share their readers and caches. First, because a script in this folder would hide `tasks`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "training"))
