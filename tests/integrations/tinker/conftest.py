"""pytest's importlib mode puts no folder on the path, so `import stand_in` needs this."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "trl")]
