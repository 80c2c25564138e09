"""ALFWorld as the world of an experiment, on its eight games."""

from pathlib import Path

import pytest

from dreamgym_lg.errors import ConfigurationError

pytest.importorskip("alfworld", reason="alfworld is not installed: pip install 'dreamgym-lg[alfworld]'")

from dreamgym_lg.integrations.alfworld import world as module
from dreamgym_lg.integrations.alfworld.world import ALFWorldWorld


def test_splits_and_panel_share_no_task(packed: Path) -> None:
    world = ALFWorldWorld(packed)
    found = {split: world.tasks(split) for split in ("train", "validation", "test")}
    panel = world.panels(limit=5)["unseen rooms"]
    ids = [task.id for tasks in (*found.values(), panel) for task in tasks]
    assert all(found.values()) and panel and len(set(ids)) == len(ids) == 8
    assert sum(len(world.tasks(split, limit=3)) for split in found) == 3
    assert {task.environment for tasks in found.values() for task in tasks} == {world.name}


def test_collect_plays_every_episode_that_is_asked_for(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    world = ALFWorldWorld(packed)
    tasks = world.tasks("train")
    played = list(world.collect(tasks, {"demonstration": 5}, seed=0))
    assert len(tasks) > 2 and len(played) == 5 and all(trajectory.success for trajectory in played)
    assert len({(trajectory.task.id, trajectory.rollout_index) for trajectory in played}) == 5


def test_without_games_it_says_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="none does not exist; name the folder that `alfworld-download` made"):
        ALFWorldWorld().tasks("train")
