"""Helper modules of this folder: pytest's importlib mode puts no folder on the path, so `import desk` needs this."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
