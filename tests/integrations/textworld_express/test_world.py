"""TextWorld-Express as the world of an experiment."""

from contextlib import closing
from random import Random
from typing import Any

import pytest

from dreamgym_lg.dream import Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.world import load_world

pytest.importorskip("textworld_express")

from dreamgym_lg.integrations.textworld_express.text import GAMES, check_action
from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld, create_oracle

SPLITS = ("train", "validation", "test")


def test_splits_share_no_task_and_the_seed_chooses_other_worlds() -> None:
    world = TextWorldExpressWorld("peckingorder")
    found = [task for split in SPLITS for task in world.tasks(split, limit=60, seed=1)]
    assert {task.environment for task in found} == {world.name} and 55 < len(found) <= 60
    assert len({task.observation for task in found}) == len(found)
    again = TextWorldExpressWorld("peckingorder").tasks("train", limit=60, seed=1)
    assert again == world.tasks("train", limit=60, seed=1)
    assert not {task.id for task in again} & {task.id for task in world.tasks("train", limit=60, seed=2)}


def test_dream_and_reality_refuse_the_same_actions() -> None:
    for world in (TextWorldExpressWorld("twc"), TextWorldExpressWorld("peckingorder")):
        task, environment = world.tasks("train", limit=20)[0], world.create_environment()
        seen = [environment.reset(task)]
        for action in (*environment.valid_actions(), "take elephant", "put shelf in shelf", "take"):
            assert check_action(world.game, action, seen) == environment.check_action(action, seen)
        environment.close()


@pytest.mark.parametrize("game", sorted(set(GAMES) - {"simonsays"}))
def test_no_game_pays_an_action_twice_before_something_is_lost(game: str) -> None:
    """What `Score` has its dreams do."""
    world, repeated, rng = TextWorldExpressWorld(game, max_steps=30), 0, Random(0)
    with closing(world.create_environment()) as environment:
        for task in world.tasks("train", limit=60):
            right, seen, paid, over = create_oracle(environment, task, rng), [environment.reset(task)], set[str](), False
            while not over:
                valid = environment.valid_actions()
                undone = [action for action in valid if action.startswith("take ")]
                detour = sorted(paid) + undone if paid and rng.random() < 0.5 else []
                action = rng.choice(detour) if detour else right(seen, valid)
                result = environment.step(action)
                over = result.terminated or result.truncated
                seen.append(result.observation)
                paid = paid if result.reward >= 0 else set()
                assert result.reward <= 0 or action not in paid
                repeated += action in paid
                paid |= {action} if result.reward > 0 else set()
    assert repeated > 0 or game == "coin", "the test would say little"


def test_a_dreamed_game_pays_an_action_once(scripted: Any) -> None:
    taken = Model(scripted(reply=lambda _: "valid, fine\nreward 0.25, continues\nYou take it."))
    world = TextWorldExpressWorld("twc")
    task = world.tasks("train", limit=9)[0]
    dream = world.create_dream(taken).create_environment()
    assert "you see a clean brown shirt." in dream.reset(task)
    assert [dream.step("take clean brown shirt").reward, dream.step("inventory").reward] == [0.25, 0.25]
    assert dream.step("inventory").reward == 0.0
    assert [step.judged_by for step in dream.steps] == ["score"] * 3
    assert dream.step("take elephant").info["decided_by"] == "rules"


def test_a_dream_may_do_without_the_rules(scripted: Any) -> None:
    model = Model(scripted(reply=lambda _: "valid, fine\nreward 0, continues\nYou take it."))
    alone, helped = TextWorldExpressWorld("twc", rules=False), TextWorldExpressWorld("twc")
    dream = alone.create_dream(model).create_environment()
    dream.reset(alone.tasks("train", limit=9)[0])
    assert dream.step("take elephant").info["decided_by"] == "model"
    assert (alone.assisted, helped.assisted) == (False, True) and "rules" not in helped.arguments
    assert not load_world("twc", **alone.arguments).assisted, "a folder fixes it"


def test_collect_plays_as_many_episodes_of_each_kind_as_asked() -> None:
    world = TextWorldExpressWorld("twc")
    tasks = world.tasks("train", limit=30)
    played = list(world.collect(tasks, {"demonstration": 5, "random": 3}, seed=0))
    assert [trajectory.success for trajectory in played[:5]] == [True] * 5 and len(played) == 8


def test_worlds_by_name() -> None:
    with pytest.raises(ConfigurationError, match="unknown game 'twcc'.*Did you mean 'twc'"):
        TextWorldExpressWorld("twcc")
    for name in ("peckingorder", "twc"):
        world = load_world(name)
        assert world.name == f"textworld_express/{name}" and world.settings.tasks == (5000 if name == "twc" else 2500)
