"""BFCL as the world of an experiment."""

from itertools import pairwise
from typing import Any

import pytest

from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.training_data import recorded_exchanges
from dreamgym_lg.types import Trajectory

pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed: pip install --no-deps bfcl-eval")

from dreamgym_lg.integrations.bfcl.world import BFCLWorld, next_request


@pytest.fixture(scope="module")
def world() -> BFCLWorld:
    return BFCLWorld()


@pytest.fixture(scope="module")
def played(world: BFCLWorld) -> list[Trajectory]:
    tasks = world.tasks("train", limit=30)
    return list(world.collect(tasks, {"demonstration": 4, "mistaken": 6}, seed=0))


def test_splits_share_no_task(world: BFCLWorld) -> None:
    found = {split: world.tasks(split) for split in ("train", "validation", "test")}
    ids = [task.id for tasks in found.values() for task in tasks]
    assert all(found.values()) and len(set(ids)) == len(ids) == 199
    assert {task.environment for tasks in found.values() for task in tasks} == {world.name}
    with pytest.raises(ConfigurationError, match="unknown BFCL category 'base'"):
        BFCLWorld("base")


def test_collect_plays_as_many_episodes_of_each_kind_as_asked(world: BFCLWorld, played: list[Trajectory]) -> None:
    assert sorted(trajectory.success for trajectory in played) == [False] * 6 + [True] * 4
    with pytest.raises(ConfigurationError, match="unknown kind 'noisy'; known: demonstration, mistaken"):
        list(world.collect(world.tasks("train"), {"noisy": 1}, seed=0))


def test_the_hidden_fact_is_the_users_next_request(world: BFCLWorld, played: list[Trajectory]) -> None:
    for trajectory in played:
        history = recorded_exchanges(ExperienceModel(None), trajectory, None)
        facts = next_request(trajectory.task, history, 0)
        assert len(facts) == len(trajectory.steps) + 1
        for step, (now, after) in zip(trajectory.steps, pairwise(facts), strict=True):
            if is_answer(step.action) and not step.terminated:
                assert step.next_observation == now
            else:
                assert after == now


@pytest.mark.parametrize("category", ["multi_turn_base", "multi_turn_miss_func"])
def test_records_are_checked_as_reality_checks(category: str) -> None:
    world = BFCLWorld(category)
    tasks = world.tasks("train", limit=30)
    if category == "multi_turn_miss_func":
        tasks = [task for task in tasks if task.metadata["withheld"]]
    accepted: dict[tuple[str, str], set[bool]] = {}
    for trajectory in world.collect(tasks[:4], {"demonstration": 4, "mistaken": 8}, seed=0):
        environment, task = world.create_environment(), trajectory.task
        seen = [environment.reset(task)]
        for step in trajectory.steps:
            for action in {each.action for each in trajectory.steps}:
                answer = environment.check_action(action, seen)
                assert world.check_action(task, action, seen) == answer
                accepted.setdefault((task.id, action), set()).add(answer is None)
            seen.append(environment.step(step.action).observation)
    assert {False} in accepted.values() and {True} in accepted.values()
    assert ({False, True} in accepted.values()) == (category == "multi_turn_miss_func"), "withheld, then there"


def test_the_dream_refuses_what_the_tools_schemas_refuse(world: BFCLWorld, scripted: Any) -> None:
    task = next(task for task in world.tasks("train") if task.metadata["involved_classes"] == ["TradingBot"])
    dream = world.create_dream(ExperienceModel(scripted(reply=lambda _: "valid, fine\nreward 0, continues\nNext.")))
    first = dream.reset(task)
    assert dream.check_action(render_call("get_stock_info", {"symbol": "X"}), [first]) is None
    assert "not a valid tool" in str(dream.check_action(render_call("rm", {}), [first]))
    assert dream.check_action(render_answer("Done."), [first]) is None
