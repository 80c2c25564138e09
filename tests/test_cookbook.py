"""Every walk-through of cookbook/ runs as it stands."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_models import SMALL_BASE

COOKBOOK = Path(__file__).parent.parent / "cookbook"


def run(name: str, *arguments: str, seconds: int) -> str:
    done = subprocess.run([sys.executable, COOKBOOK / name, *arguments], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_walk_through_is_tested() -> None:
    assert {path.name for path in COOKBOOK.glob("*.py")} == {
        "own_environment.py",
        "webarena.py",  # tests/integrations/browsergym
    }
    assert {path.parent.name for path in COOKBOOK.glob("*/run.py")} == {"support_desk", "reproduce"}  # tests of their own
    assert [path.parent.name for path in COOKBOOK.rglob("*.ipynb")] == ["hotel"]


@pytest.mark.slow
def test_own_environment() -> None:
    assert "success: True" in run("own_environment.py", seconds=60)


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(name) is None for name in ("langchain_openai", "trl")), reason="needs langchain_openai, trl")
def test_from_traces_to_production(tmp_path: Path) -> None:
    """The cells in order, as `jupyter` runs them; the notebook holds no output of an earlier run."""
    notebook = json.loads((COOKBOOK / "hotel" / "from_traces_to_production.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    program = "\n\n".join("".join(cell["source"]) for cell in code)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=COOKBOOK / "hotel",
        env={**os.environ, "SMOKE": "1", "OUT": str(tmp_path), "MODEL": str(SMALL_BASE)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = done.stdout
    assert len(re.findall(r"(base|trained), real, held-out: \d", shown)) == 2
    assert "of max_cost=0.0001 are spent" in shown and re.search(r"[2-9]\d* calls, \d+ tokens read, 0\.\d+ of 1\.0", shown)
    steps, episodes = map(int, re.search(r"(\d+) real steps in (\d+) episodes", shown).groups())  # type: ignore[union-attr]
    assert steps >= 4 and episodes >= 2
    assert "'manifest.json', 'model.safetensors'" in shown
    assert re.search(r"(running: nothing is proven yet|ended: .*) \{'policy': Rate\(.*'production': Rate\(", shown)
