"""Episodes in Ray actors: the same as in this process, each exactly once, whatever dies. On a local cluster."""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import BudgetExceeded, ConfigurationError
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.world import World
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder
from dreamgym_lg.types import StepResult, Task, Trajectory

pytest.importorskip("ray", reason="needs: pip install 'dreamgym-lg[ray]'")

import ray

from dreamgym_lg.integrations.ray.rollouts import RayRollouts, _Actor, _Identity

pytestmark = pytest.mark.slow

TASKS = [Task(id=f"t{number}", instruction="add numbers up to 10", environment="adding") for number in range(4)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )
        yield
        ray.shutdown()


def create_adding(pids: Path | None = None, killed: Path | None = None) -> Any:
    """What creates a world of sums. Its classes are local: so they are sent to the actors, which cannot import this file.

    Args: `pids`, a folder that each process leaves its id in; `killed`, a file that the first process to reach a sum of 7 of
    the task t2 leaves, and dies.
    """

    class Adding(Environment):
        def reset(self, task: Task) -> str:
            self._task, self._sum = task, 0
            if pids is not None:
                (pids / str(os.getpid())).touch()
            return f"{task.id}: 0"

        def step(self, action: str) -> StepResult:
            if not action.isdigit():
                return StepResult("a number!", 0.0, False, False, {"valid": False})
            self._sum += int(action)
            if killed is not None and self._task.id == "t2" and self._sum >= 7 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            success = self._sum == 10
            return StepResult(f"{self._task.id}: {self._sum}", 0.1 + 0.2, self._sum >= 10, False, {"success": success})

    class AddingWorld(World):
        name = "adding"

        def __init__(self, most: int = 9) -> None:
            self.arguments = {"most": most}

        def tasks(self, split: str, **_: Any) -> list[Task]:
            return [task for task in TASKS if task.split == split]

        def create_environment(self) -> Environment:
            return Adding()

    return AddingWorld


@pytest.fixture
def policy(scripted: Any) -> Any:
    """Draws a number by the seed of the call, as a local model draws tokens, and reports what it read and said."""

    def reply(messages: list[BaseMessage]) -> str:
        recorder = TokenRecorder.current()
        assert recorder is not None, "the policy answers within the episode's recorder"
        number = Random(recorder.next_seed()).randint(1, 4)
        given = "".join(f"{message.type}: {message.text}\n" for message in messages) + "ai: "
        recorder.record(TokenCall(None, [*given.encode()], [*f"{number}\n".encode()], [-0.1, -1 / 3], 1.0))
        return str(number)

    return scripted(reply=reply)


def play(world: World, policy: Any, rollouts: RayRollouts | None, buffer: ReplayBuffer | None = None) -> list[Trajectory]:
    agent = (rollouts or world).agent(*([world] if rollouts else []), policy, real=True)
    create = None if rollouts else world.create_environment
    given = {"source": "real", "num_generations": 3, "seed": 3, "run": "r", "replay_buffer": buffer}
    return asyncio.run(rollout(agent, TASKS, create, **given))


def test_two_actors_play_what_this_process_plays(policy: Any, tmp_path: Path) -> None:
    create = create_adding(pids=tmp_path)
    rollouts = RayRollouts(create, num_actors=2, memory=2**20)
    there = play(create(), policy, rollouts)
    actors = {int(file.name) for file in tmp_path.iterdir()}
    assert len(actors) == 2 and os.getpid() not in actors
    here = play(create(), policy, None)
    assert there == here and len(there) == 12, "segments with their tokens and log-probabilities too"
    assert {each.success for each in there} == {True, False} and len({each.segments[0].trainable for each in there}) > 1
    rollouts.close()


def test_what_a_dying_actor_played_is_played_again_and_stored_once(policy: Any, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    rollouts = RayRollouts(create_adding(killed=killed), num_actors=2)
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        played = play(create_adding()(), policy, rollouts, buffer)
        assert killed.exists() and played == play(create_adding()(), policy, None)
        stored = list(buffer.trajectories(run="r", segments=True))
        assert sorted((each.task.id, each.rollout_index) for each in stored) == [(t.id, n) for t in TASKS for n in range(3)]
        assert not any(each.error for each in stored)
    rollouts.close()


class Dream(Environment):
    """Ends with the first step, well."""

    def reset(self, task: Task) -> str:
        return f"dreamed {task.id}"

    def step(self, action: str) -> StepResult:
        return StepResult(f"{action} in {os.getpid()}", 1.0, True, False, {"success": True, "reasoning": "so"})


def test_an_experiment_plays_dreams_of_this_process_and_real_episodes_of_the_actors(
    policy: Any, scripted: Any, tmp_path: Path
) -> None:
    def broke(_: Any) -> str:
        raise BudgetExceeded("spent")

    create = create_adding(pids=tmp_path)
    world = create()
    run = Experiment(world, tmp_path / "run", rollouts=RayRollouts(create, num_actors=1), experience_model="none")
    assert all(each.error is None for each in asyncio.run(run.aplay("real", policy, TASKS)))
    assert str(os.getpid()) not in os.listdir(tmp_path)
    agent, create_environment = run.players(policy, SimpleNamespace(create_environment=Dream))  # type: ignore[arg-type]
    (dreamed,) = asyncio.run(rollout(agent, TASKS[:1], create_environment, source="synthetic"))
    assert dreamed.error is None and dreamed.success and dreamed.steps[0].observation == "dreamed t0"
    assert dreamed.steps[0].next_observation.endswith(f"in {os.getpid()}") and dreamed.steps[0].reasoning == "so"
    (unfit,) = asyncio.run(rollout(agent, TASKS[:1], source="synthetic"))
    assert "create_environment= with real=False: give rollout one for dreams alone" in str(unfit.error)
    with pytest.raises(BudgetExceeded, match="spent"):
        asyncio.run(run.aplay("broke", scripted(reply=broke), TASKS))


def test_a_world_that_is_not_there_or_another_one_is_said() -> None:
    def raising() -> World:
        raise FileNotFoundError("no products")

    async def end_of(create: Callable[[], World]) -> Any:
        played = _Actor(create).play(1, _Identity.of(create_adding()()), TASKS[0], None, {})
        (message,) = [json.loads(line) async for line in played]
        return message["failed"], message["text"]

    said = "create_world failed in a Ray actor: FileNotFoundError: no products"
    assert asyncio.run(end_of(raising)) == ("ConfigurationError", said)
    kind, text = asyncio.run(end_of(partial(create_adding(), most=3)))
    assert (
        kind == "ConfigurationError" and "in a Ray actor, adding(most=3), than the experiment's, adding(most=9): give" in text
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [({"num_actors": 0}, "num_actors=0: at least 1"), ({"num_actors": 1, "num_cpu": 2}, "Ray refuses.*num_cpu")],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RayRollouts(create_adding(), **options)
