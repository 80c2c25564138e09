"""pytest's importlib mode puts no folder on the path, so `import desk_traces` and `import bench_curriculum` need this."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]
