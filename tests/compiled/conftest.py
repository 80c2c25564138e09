"""The folder of the local chat server, for `import chat_server`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "hosted"))
