"""The folders of the local chat server and of this shop, for `import chat_server` and `import compiled_shop`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "hosted"), str(Path(__file__).parent)]
