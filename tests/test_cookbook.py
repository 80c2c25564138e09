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
NEEDED = ("bfcl_eval", "mpmath", "langchain", "torch", "trl")


def run(name: str, *arguments: str, seconds: int) -> str:
    done = subprocess.run([sys.executable, COOKBOOK / name, *arguments], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_walk_through_is_tested() -> None:
    assert {path.name for path in COOKBOOK.glob("*.py")} == {
        "own_environment.py",
        "bfcl_agent.py",
        "webarena.py",  # tests/integrations/browsergym
    }
    assert {path.parent.name for path in COOKBOOK.glob("*/run.py")} == {"support_desk", "reproduce"}  # tests of their own
    assert [path.parent.name for path in COOKBOOK.rglob("*.ipynb")] == ["hotel"]


@pytest.mark.slow
def test_own_environment() -> None:
    assert "success: True" in run("own_environment.py", seconds=60)


@pytest.mark.slow
@pytest.mark.skipif(any(find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}")
def test_bfcl_agent(tmp_path: Path) -> None:
    shown = run("bfcl_agent.py", "--quick", "--model", str(SMALL_BASE), "--out", str(tmp_path), seconds=180)
    assert "problems: 0" in shown and re.search(r"20 tool: simulated", shown)

    equal, total = map(int, re.search(r"nearest-recorded: (\d+) of (\d+) answers", shown).groups())  # type: ignore[union-attr]
    assert 0 < equal < total, "some answers depend on no state, and a baseline without state cannot know the others"

    dreamed, real = map(int, re.search(r"dreamed steps: (\d+), answers of real tools: (\d+)", shown).groups())  # type: ignore[union-attr]
    assert dreamed >= 8 and real == 0
    assert re.search(r"iteration 0: reward \d\.\d\d, .* 0 failed, [1-9]\d* tokens to train on", shown)
    assert len(re.findall(r"success \d of 6, \d\.\d\d \[0\.\d\d, \d\.\d\d\]", shown)) == 2
    assert (tmp_path / "run" / "models" / "policy" / "progress.json").exists()


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
