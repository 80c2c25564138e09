"""ALFWorld as the world of an experiment, on its eight games."""

from pathlib import Path

import pytest

from dreamgym_lg.errors import ConfigurationError

pytest.importorskip("alfworld", reason="alfworld is not installed: pip install 'dreamgym-lg[alfworld]'")

from dreamgym_lg.integrations.alfworld import world as module
from dreamgym_lg.integrations.alfworld.world import ALFWorldWorld


def test_splits_share_no_task(packed: Path) -> None:
    world = ALFWorldWorld(packed)
    found = {split: world.tasks(split) for split in ("train", "validation", "test")}
    ids = [task.id for tasks in found.values() for task in tasks]
    assert all(found.values()) and len(set(ids)) == len(ids) == 7, "without the one of other rooms"
    assert sum(len(world.tasks(split, limit=3)) for split in found) == 3
    assert {task.environment for tasks in found.values() for task in tasks} == {world.name}


@pytest.mark.slow
def test_collect_plays_every_episode_that_is_asked_for(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    monkeypatch.setattr(module, "REPEATED", 2)
    world = ALFWorldWorld(packed, max_steps=30)
    tasks = world.tasks("train")
    played = list(world.collect(tasks, {"demonstration": 8}, seed=0))
    assert len(tasks) == 5 and len(played) == 8 and all(trajectory.success for trajectory in played)
    assert len({(trajectory.task.id, trajectory.rollout_index) for trajectory in played}) == 8
    assert {trajectory.task.id for trajectory in played} == {task.id for task in tasks[:4]}, "twice, as `REPEATED` says"


def test_a_family_is_a_part_of_the_games(packed: Path) -> None:
    world = ALFWorldWorld(packed, family="pick_and_place_simple")
    found = [task for split in ("train", "validation", "test") for task in world.tasks(split)]
    assert found and {task.metadata["type"] for task in found} == {world.arguments["family"]}
    with pytest.raises(ConfigurationError, match="unknown family 'pick_and_place'"):
        ALFWorldWorld(packed, family="pick_and_place")  # type: ignore[arg-type]


def test_without_games_it_says_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="none does not exist; name the folder that `alfworld-download` made"):
        ALFWorldWorld().tasks("train")
