"""Helper modules of this folder and of tests/simulate: pytest's importlib mode puts no folder on the path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "simulate")]
