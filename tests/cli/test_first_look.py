"""The road before training: `dreamgym try`, then the train.py of `dreamgym init`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dreamgym_lg import DreamGym
from dreamgym_lg.cli.app import app
from dreamgym_lg.simulate.user_code import load_object
from dreamgym_lg.simulate.wall.wall import missing_for_wall

pytest.importorskip("langchain", reason="needs langchain")
DESK = Path(__file__).parents[2] / "cookbook" / "support_desk"
WRITES = ("refund", "cancel", "set_city", "escalate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A newcomer's folder: an agent and 60 traces of it."""
    folder = tmp_path_factory.mktemp("newcomer")
    sys.path.insert(0, str(DESK))
    try:
        from old_policy import write_traces
        from tickets import Shop, create_shop
    finally:
        sys.path.remove(str(DESK))
    tasks = create_shop(folder / "shop.db", seed=2, train=60, validation=0, test=0)
    write_traces(folder / "traces.jsonl", Shop(folder / "shop.db"), tasks, seed=2)
    (folder / "my_app.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DESK)!r})\nfrom agent import create_desk\nfrom old_policy import OldPolicy\n"
        "graph = create_desk(OldPolicy(habit='good'))\n"
    )
    return folder


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, writes: Sequence[str] = WRITES) -> Any:
    monkeypatch.chdir(folder)
    named = [each for tool in writes for each in ("--writes", tool)]
    return CliRunner().invoke(app, [arguments[0], "my_app.py:graph", "traces.jsonl", *named, *arguments[1:]])


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason="a compiled world needs the wall")
def test_an_agent_is_tried_before_anybody_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(folder, monkeypatch, "try", "--tasks", "8")
    output = " ".join(result.output.split())
    assert result.exit_code == 0, output
    assert "60 traces read, " in output
    assert "in the dream: success " in output and "on 8 tasks" in output
    assert output.count("what happened") == 3
    assert "answered by: " in output and "the gate: the responder 'recorded'" in output
    assert "next: dreamgym init my_app.py:graph traces.jsonl" in output


@pytest.mark.slow
def test_without_the_tools_that_write_recorded_answers_alone_are_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(folder, monkeypatch, "try", "--tasks", "4", "--out", "runs/other", writes=())
    output = " ".join(result.output.split())
    assert result.exit_code == 0, output
    assert "recorded answers alone: nothing could be compiled" in output and "(--writes)" in output
    assert "in the dream: success " in output and "on 4 tasks" in output


def test_init_writes_a_training_that_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(folder, monkeypatch, "init", "--to", "train.py", "--isolation", "guard")
    assert result.exit_code == 0, result.output
    text = (folder / "train.py").read_text()
    assert 'writes=["cancel", "escalate", "refund", "set_city"]' in text
    gym = load_object("train.py:gym")
    assert isinstance(gym, DreamGym) and gym.experiment.settings.references_only
    assert len(gym.tasks("train")) + len(gym.tasks("validation")) == 60
    again = run(folder, monkeypatch, "init", "--to", "train.py")
    assert again.exit_code == 2 and "train.py exists" in again.output
