"""Every walk-through of cookbook/ runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

COOKBOOK = sorted((Path(__file__).parent.parent / "cookbook").glob("*.py"))


@pytest.mark.parametrize("path", COOKBOOK, ids=lambda path: path.stem)
def test_walk_through_runs(path: Path) -> None:
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "success: True" in done.stdout
