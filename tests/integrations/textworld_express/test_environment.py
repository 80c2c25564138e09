"""The TextWorld-Express adapter, its tasks and its pool, against the real game."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dreamgym_lg.environment import check_environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.textworld_express.text import GAMES, UNKNOWN_ACTION, Check, vary_task, world_split
from dreamgym_lg.types import Task

pytest.importorskip("textworld_express")

from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress, TextWorldExpressPool, make_tasks
from dreamgym_lg.integrations.textworld_express.scripted_policies import KINDS, behave

Worlds = dict[str, list[Task]]
World = Callable[..., Task]

# --- the contract ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "actions"),
    [
        ("peckingorder", ["read instructions book", "take grapefruit", "put grapefruit in garden", "take peach"]),
        ("twc", ["take black blanket", "open chest of drawers", "put black blanket in chest of drawers", "inventory"]),
        *((game, ["look around", "inventory"]) for game in GAMES if game not in ("peckingorder", "twc", "simonsays")),
        ("simonsays", ["eat banana", "touch pineapple"]),
    ],
)
def test_adapter_keeps_the_environment_contract(
    environment: TextWorldExpress, world: World, game: str, actions: list[str]
) -> None:
    check_environment(environment, world(game), actions)


def test_rewards_sum_to_the_score_and_a_failure_keeps_what_was_reached(
    environment: TextWorldExpress, world: World
) -> None:
    environment.reset(world("peckingorder"))
    rewards = [environment.step(action).reward for action in ("take grapefruit", "put grapefruit in garden")]
    assert rewards == [0.25, -0.25]
    assert environment.step("take grapefruit").reward == 0.25
    failed = environment.step("take grape")  # the book says: the peach
    assert failed == ("You take the grape.", 0.0, True, False, {"success": False, "valid": True})
    for task in (world("twc", seed) for seed in range(20)):
        path = environment.gold_path(task)
        environment.reset(task)
        results = [environment.step(action) for action in path]
        assert sum(result.reward for result in results) == pytest.approx(1.0)
        assert results[-1].terminated and results[-1].info["success"]


def test_observation_is_one_line_without_the_instruction(environment: TextWorldExpress, worlds: Worlds) -> None:
    for task in worlds["twc"][:20]:
        observation = environment.reset(task)
        assert observation == " ".join(observation.split()) == task.metadata["observation"]
        assert observation.startswith("You are in the ") and task.instruction not in observation


def test_episode_is_truncated_once_and_then_over(world: World) -> None:
    environment = TextWorldExpress(max_steps=3)
    with pytest.raises(RuntimeError, match="before reset"):
        environment.step("inventory")
    environment.reset(world("twc"))
    assert [environment.step("inventory").truncated for _ in range(3)] == [False, False, True]
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step("inventory")
    assert (environment.counter.steps, environment.counter.resets) == (3, 1)


@pytest.mark.parametrize("action", ["", " ", "help", "take \ud800", "take\x00", "é", "a\nb", "x" * 10_000, '"}'])
def test_any_text_is_answered_as_unknown(environment: TextWorldExpress, world: World, action: str) -> None:
    first = environment.reset(world("twc"))
    assert environment.step(action).info["valid"] is False
    assert environment.check_action(action, [first]) == UNKNOWN_ACTION


@pytest.mark.parametrize(("check", "answer"), [("names", None), ("state", UNKNOWN_ACTION)])
def test_adapter_and_pool_check_as_much_as_they_are_told(world: World, check: Check, answer: str | None) -> None:
    not_held = "put black blanket in chest of drawers"
    pool = TextWorldExpressPool(1, check=check)
    for environment in (TextWorldExpress(check=check), pool.create()):
        assert environment.check_action(not_held, []) is None, "before a reset there is no game to know"
        first = environment.reset(world("twc"))
        assert environment.check_action(not_held, [first]) == answer
        assert environment.check_action("take black blanket", [first]) is None
        assert environment.check_action("take elephant", [first]) == UNKNOWN_ACTION
    assert TextWorldExpress().check == "names"


# --- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"game": "twcc"}, "unknown game 'twcc'.*Did you mean 'twc'"),
        ({"fold": "trian"}, "unknown fold 'trian'.*Did you mean 'train'"),
        ({"params": "rooms=1"}, "refuses twc with 'rooms=1': Unrecognized property name"),
        ({"params": "rooms"}, "cannot build"),
        ({"seed": 2**40}, "32-bit"),
        ({"seed": None}, "32-bit"),
    ],
)
def test_wrong_metadata_is_named(
    environment: TextWorldExpress, world: World, change: dict[str, Any], said: str
) -> None:
    task = world("twc")
    with pytest.raises(ConfigurationError, match=said):
        environment.reset(replace(task, metadata={**task.metadata, **change}))
    assert environment.reset(task)


@pytest.mark.parametrize("key", ["game", "params", "seed", "fold"])
def test_missing_metadata_is_named(environment: TextWorldExpress, world: World, key: str) -> None:
    task = world("twc")
    with pytest.raises(ConfigurationError, match=rf"lacks metadata\['{key}'\]"):
        environment.reset(replace(task, metadata={k: v for k, v in task.metadata.items() if k != key}))


def test_a_synthetic_task_has_no_real_world(environment: TextWorldExpress, training: Worlds) -> None:
    observations = [task.metadata["observation"] for task in training["twc"]]
    varied = (vary_task(task, Random(0), observations) for task in training["twc"])
    with pytest.raises(ConfigurationError, match="synthetic: no real world"):
        environment.reset(next(task for task in varied if task is not None))


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_tasks_are_distinct_stable_and_split_by_world(environment: TextWorldExpress, worlds: Worlds) -> None:
    for game, tasks in worlds.items():
        again = make_tasks(game, reversed(range(200)), environment=environment)
        assert {task.id: task.split for task in again} == {task.id: task.split for task in tasks}
        assert len({task.id for task in tasks}) == len({task.metadata["observation"] for task in tasks}) == len(tasks)
        assert {task.split for task in tasks} == {"train", "validation", "test"}
        assert all(task.split == world_split(f" {task.metadata['observation']}\n") for task in tasks)
        assert all(task.instruction.startswith("Your task is to ") for task in tasks)


def test_other_folds_are_evaluation_only(environment: TextWorldExpress) -> None:
    for fold, split in (("dev", "validation"), ("test", "test")):
        assert {task.split for task in make_tasks("twc", range(5), environment=environment, fold=fold)} == {split}


def test_tasks_of_an_unknown_game(environment: TextWorldExpress) -> None:
    with pytest.raises(ConfigurationError, match="unknown game"):
        make_tasks("chess", [1], environment=environment)


# --- many at once ---------------------------------------------------------------------------------------------------


def test_32_threads_play_what_one_plays(training: Worlds) -> None:
    jobs = [(kind, task) for game in ("twc", "peckingorder") for task in training[game][:16] for kind in KINDS]
    pool = TextWorldExpressPool(32)

    def play(number: int) -> object:
        kind, task = jobs[number]
        with pool.lend() as environment:
            return behave(kind, environment, task, Random(number))

    sequential = [play(number) for number in range(len(jobs))]
    before = pool.counter.steps
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(play, range(len(jobs)))) == sequential
    assert pool.counter.steps == 2 * before and pool.counter.resets == 2 * len(jobs)


def test_pool_is_bounded_and_forgives_a_second_close(world: World) -> None:
    pool = TextWorldExpressPool(2, max_steps=1)
    first, second = pool.create(), pool.acquire()
    waiting: list[TextWorldExpress] = []
    thread = threading.Thread(target=lambda: waiting.append(pool.create()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not waiting
    first.close()
    thread.join(20)
    first.close()  # must not give away the place that `waiting` holds now
    assert pool._free.acquire(blocking=False) is False
    for environment in (second, *waiting):
        environment.reset(world("twc"))
        assert environment.step("inventory").truncated
        pool.release(environment)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.create()
    with pytest.raises(ConfigurationError, match="size"):
        TextWorldExpressPool(0)
