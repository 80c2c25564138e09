"""The TextWorld-Express adapter, its tasks and its slots, against the real game."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import cycle
from random import Random
from typing import Any

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from dreamgym_lg.environment import check_environment
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.integrations.text_games.game import split_of
from dreamgym_lg.integrations.text_games.scripted_policies import KINDS, play_episode
from dreamgym_lg.integrations.textworld_express.text import GAMES, UNKNOWN_ACTION
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import StepResult, Task

pytest.importorskip("textworld_express")

from dreamgym_lg.integrations.textworld_express import environment as module
from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress, make_tasks
from dreamgym_lg.integrations.textworld_express.world import create_oracle

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


def test_rewards_sum_to_the_score_and_a_failure_keeps_what_was_reached(environment: TextWorldExpress, world: World) -> None:
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
        assert observation == " ".join(observation.split()) == task.observation
        assert observation.startswith("You are in the ") and task.instruction not in observation


def test_episode_is_truncated_once_and_then_over(world: World) -> None:
    environment = TextWorldExpress(max_steps=3)
    with pytest.raises(RuntimeError, match="before reset"):
        environment.step("inventory")
    environment.reset(world("twc"))
    assert [environment.step("inventory").truncated for _ in range(3)] == [False, False, True]
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step("inventory")
    with pytest.raises(ConfigurationError, match="max_steps=0; allowed: 1 or more"):
        TextWorldExpress(max_steps=0)


@pytest.mark.parametrize("action", ["", " ", "help", "take \ud800", "take\x00", "é", "a\nb", "x" * 10_000, '"}'])
def test_any_text_is_answered_as_unknown(environment: TextWorldExpress, world: World, action: str) -> None:
    first = environment.reset(world("twc"))
    assert environment.step(action).info["valid"] is False
    assert environment.check_action(action, [first]) == UNKNOWN_ACTION


# --- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"game": "twcc"}, "unknown game 'twcc'.*Did you mean 'twc'"),
        ({"fold": "trian"}, "unknown fold 'trian'.*Did you mean 'train'"),
        ({"params": "rooms=1"}, "refuses twc with 'rooms=1': Unrecognized property name"),
        ({"params": "rooms"}, "cannot build"),
    ],
)
def test_wrong_metadata_is_named(environment: TextWorldExpress, world: World, change: dict[str, Any], said: str) -> None:
    task = world("twc")
    with pytest.raises(ConfigurationError, match=said):
        environment.reset(replace(task, metadata={**task.metadata, **change}))
    assert environment.reset(task)


@pytest.mark.parametrize("seed", [2**40, None])
def test_a_seed_that_names_no_world_is_named(environment: TextWorldExpress, world: World, seed: int | None) -> None:
    with pytest.raises(ConfigurationError, match="32-bit"):
        environment.reset(replace(world("twc"), seed=seed))


@pytest.mark.parametrize("key", ["game", "params", "fold"])
def test_missing_metadata_is_named(environment: TextWorldExpress, world: World, key: str) -> None:
    task = world("twc")
    with pytest.raises(ConfigurationError, match=rf"lacks metadata\['{key}'\]"):
        environment.reset(replace(task, metadata={k: v for k, v in task.metadata.items() if k != key}))


def test_a_synthetic_task_has_no_real_world(environment: TextWorldExpress, training: Worlds) -> None:
    with pytest.raises(ConfigurationError, match="synthetic: no real world"):
        environment.reset(replace(training["twc"][0], origin="synthetic"))


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_tasks_are_distinct_stable_and_split_by_world(environment: TextWorldExpress, worlds: Worlds) -> None:
    for game, tasks in worlds.items():
        again = make_tasks(game, reversed(range(200)), environment=environment)
        assert {task.id: task.split for task in again} == {task.id: task.split for task in tasks}
        assert len({task.id for task in tasks}) == len({task.observation for task in tasks}) == len(tasks)
        assert {task.split for task in tasks} == {"train", "validation", "test"}
        assert all(task.split == split_of(task.observation) for task in tasks)
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

    def play(number: int) -> object:
        kind, task = jobs[number]
        with closing(TextWorldExpress()) as environment:
            return play_episode(kind, create_oracle, environment, task, Random(number))

    sequential = [play(number) for number in range(len(jobs))]
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(play, range(len(jobs)))) == sequential


async def test_100_episodes_at_once_in_an_event_loop(training: Worlds) -> None:
    """More than any pool of slots held: all 100 are open before the first one ends."""
    tasks = training["peckingorder"][:100]
    open_at_once = asyncio.Barrier(100)

    class Waiting(TextWorldExpress):
        async def astep(self, action: str) -> StepResult:
            await open_at_once.wait()
            return await super().astep(action)

    policy = GenericFakeChatModel(messages=cycle([AIMessage("look around")]))
    graph = create_episode_graph(policy, max_steps=2).compile()
    create = partial(Waiting, max_steps=2)
    async with asyncio.timeout(60):
        episodes = await rollout(graph, tasks, create, source="real", concurrency=100)
    assert [episode.error for episode in episodes] == [None] * 100
    for task, episode in zip(tasks, episodes, strict=True):
        assert [step.next_observation for step in episode.steps] == [task.observation] * 2


def test_close_gives_the_slot_to_the_next(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE", [])
    first, second = TextWorldExpress(), TextWorldExpress()
    first.reset(world("twc"))
    slot = first._slot
    first.close()
    first.close()
    assert [slot] == module._IDLE
    with pytest.raises(RuntimeError, match="step called before reset"):
        first.step("inventory")
    second.reset(world("peckingorder"))
    assert second._slot is slot and not module._IDLE


async def test_a_slot_in_use_is_not_given_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled episode is closed while its thread still waits for Java."""
    monkeypatch.setattr(module, "_IDLE", [])
    environment = TextWorldExpress()
    environment.reset(world("twc"))
    called, answer = threading.Event(), threading.Event()

    def slow(*arguments: object) -> str:
        called.set()
        answer.wait(20)
        raise EnvironmentFailed("too late")

    monkeypatch.setattr(module.Interface, "call", slow)
    step = asyncio.create_task(environment.astep("inventory"))
    await asyncio.to_thread(called.wait, 20)
    step.cancel()
    environment.close()
    assert module._IDLE == []
    answer.set()
    with pytest.raises(asyncio.CancelledError):
        await step
