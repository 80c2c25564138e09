"""BFCL as the world of an experiment."""

from typing import Any

import pytest

from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.dream import Episode, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Trajectory

pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed: pip install --no-deps bfcl-eval")

from dreamgym_lg.integrations.bfcl.world import BFCLWorld, next_request, refusal


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


def test_the_user_of_the_dream_makes_the_real_requests(world: BFCLWorld, played: list[Trajectory]) -> None:
    for trajectory in played:
        for number, step in enumerate(trajectory.steps):
            if is_answer(step.action):
                episode = Episode(task=trajectory.task, steps=trajectory.steps[:number], action=step.action)
                assert next_request(episode) == (None if step.terminated else step.next_observation)


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
                accepted.setdefault((task.id, action), set()).add(refusal(task, action, seen) is None)
            expected, result = refusal(task, step.action, seen), environment.step(step.action)
            assert (result.info.get("decided_by") == "rules") == (expected is not None)
            assert expected in (None, result.observation)
            seen.append(result.observation)
    assert {False} in accepted.values() and {True} in accepted.values()
    assert ({False, True} in accepted.values()) == (category == "multi_turn_miss_func"), "withheld, then there"


def test_the_dream_refuses_what_the_tools_schemas_refuse(world: BFCLWorld, scripted: Any) -> None:
    task = next(task for task in world.tasks("train") if task.metadata["involved_classes"] == ["TradingBot"])
    model = scripted(reply=lambda _: "valid, fine\nreward 0, continues\nNext.")
    episode = world.create_dream(Model(model)).create_environment()
    episode.reset(task)
    assert episode.step(render_call("get_stock_info", {"symbol": "X"})).info["decided_by"] == "model"
    refused = episode.step(render_call("rm", {}))
    assert "not a valid tool" in refused.observation and refused.info["decided_by"] == "rules"
    following = episode.step(render_answer("Done."))
    requests = task.metadata["user_turns"]
    assert (following.info["decided_by"] == "user") == (len(requests) > 1) and following.observation == requests[1]
