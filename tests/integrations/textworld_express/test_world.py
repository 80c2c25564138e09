"""TextWorld-Express as the world of an experiment."""

from collections import Counter
from random import Random

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.worlds import load_world
from dreamgym_lg.replay.buffer import ReplayBuffer

pytest.importorskip("textworld_express")

from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld

SPLITS = ("train", "validation", "test")


def test_splits_share_no_task_and_the_seed_chooses_other_worlds() -> None:
    world = TextWorldExpressWorld("peckingorder")
    found = [task for split in SPLITS for task in world.tasks(split, limit=60, seed=1)]
    assert {task.environment for task in found} == {world.name} and 55 < len(found) <= 60
    assert len({task.metadata["observation"] for task in found}) == len(found)
    again = TextWorldExpressWorld("peckingorder").tasks("train", limit=60, seed=1)
    assert again == world.tasks("train", limit=60, seed=1)
    assert not {task.id for task in again} & {task.id for task in world.tasks("train", limit=60, seed=2)}


def test_the_panel_has_objects_that_no_training_world_has() -> None:
    world = TextWorldExpressWorld("peckingorder")
    (unseen,) = world.panels(limit=20).values()
    assert {task.split for task in unseen} == {"test"} and {task.metadata["fold"] for task in unseen} == {"test"}
    known = {task.id for split in SPLITS for task in world.tasks(split, limit=60)}
    assert len(unseen) > 15 and not known & {task.id for task in unseen}


def test_dream_and_reality_refuse_the_same_actions() -> None:
    for world in (TextWorldExpressWorld("twc"), TextWorldExpressWorld("peckingorder")):
        task, environment = world.tasks("train", limit=20)[0], world.create_environment()
        seen = [environment.reset(task)]
        for action in (*environment.valid_actions(), "take elephant", "put shelf in shelf", "take"):
            assert world.check_action(task, action, seen) == environment.check_action(action, seen)
        environment.close()


def test_collect_plays_as_many_episodes_of_each_kind_as_asked() -> None:
    world = TextWorldExpressWorld("twc")
    tasks = world.tasks("train", limit=30)
    played = list(world.collect(tasks, {"demonstration": 5, "random": 3}, seed=0))
    assert [trajectory.success for trajectory in played[:5]] == [True] * 5 and len(played) == 8


def test_generated_tasks_are_synthetic_and_of_the_same_game() -> None:
    world = TextWorldExpressWorld("peckingorder")
    tasks = world.tasks("train", limit=60)
    buffer = ReplayBuffer(":memory:")
    generate = world.task_generator(tasks, buffer)
    assert generate is not None
    made = [task for parent in tasks if (task := generate(parent, [], Random(0))) is not None]
    assert len(made) > len(tasks) / 2 and Counter(task.origin for task in made) == {"synthetic": len(made)}
    assert TextWorldExpressWorld("coin").task_generator(tasks, buffer) is None


def test_worlds_by_name() -> None:
    with pytest.raises(ConfigurationError, match="unknown game 'twcc'.*Did you mean 'twc'"):
        TextWorldExpressWorld("twcc")
    for name in ("peckingorder", "twc"):
        world = load_world(name)
        assert world.name == f"textworld_express/{name}" and world.settings.tasks == (5000 if name == "twc" else 2500)
