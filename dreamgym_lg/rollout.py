"""Rollouts: run an agent's graph on tasks, many at once, and record every episode exactly once."""

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any, Protocol, TypeVar

from langchain_core.runnables import RunnableConfig

from dreamgym_lg.environment import CreateEnvironment, EpisodeContext
from dreamgym_lg.errors import ConfigurationError, RunStopped
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Source, Task, Trajectory

Result = TypeVar("Result")


class Agent(Protocol):
    """What plays an episode: a compiled graph whose state has `steps` and `success`, or a `SimulatedAgent`."""

    @property
    def astream(self) -> Callable[..., AsyncIterator[Any]]: ...


async def rollout(
    graph: Agent, tasks: Sequence[Task], create_environment: CreateEnvironment | None = None, *,
    num_generations: int = 1, source: Source, run: str = "", iteration: int = 0, seed: int = 0, concurrency: int = 64,
    replay_buffer: ReplayBuffer | None = None, policy_version: str = "", experience_version: str = "",
    recursion_limit: int = 200, on_episode: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Play `num_generations` episodes of every task; results ordered by task, then rollout index.

    Each episode runs in a context of its own, with its own sampling seed (from `seed`, iteration, task and index), and is
    stored in `replay_buffer` the moment it ends. An episode stored before under the same (run, iteration, task, index) is
    read instead of played, so that a killed run repeats nothing. An exception is a trajectory with an `error`; only
    `RunStopped` is raised, once the other episodes have ended: those it stopped are not stored, and played next time.

    Args: `create_environment`: None for an agent that acts on its own real tools.
    """
    for name, given in (("num_generations", num_generations), ("concurrency", concurrency)):
        if given < 1:
            raise ConfigurationError(f"{name}={given}: at least 1")
    found = replay_buffer.trajectories(run=run, iteration=iteration, segments=True) if replay_buffer is not None else ()
    stored = {(trajectory.task.id, trajectory.rollout_index): trajectory for trajectory in found}
    slots = asyncio.Semaphore(concurrency)

    async def episode(task: Task, index: int) -> Trajectory | RunStopped:
        if (task.id, index) in stored:
            return stored[task.id, index]
        recorder = TokenRecorder(seed=random.Random(f"{seed}/{iteration}/{task.id}/{index}").getrandbits(40))
        async with slots:
            try:
                with closing(create_environment()) if create_environment else nullcontext() as environment:
                    context = EpisodeContext(environment=environment)
                    played = await _play(graph, task, context, recorder, {"recursion_limit": recursion_limit})
            except RunStopped as stopped:
                return stopped
            except Exception as fault:  # no environment could be created: this episode's fault, not the others'
                played = [], False, f"{type(fault).__name__}: {fault}"
        steps, success, error = played
        trajectory = Trajectory(
            task=task, steps=steps, source=source, success=success, error=error, run=run, iteration=iteration,
            rollout_index=index, policy_version=policy_version, experience_version=experience_version,
            segments=recorder.segments(),
        )  # fmt: skip
        if replay_buffer is not None:
            replay_buffer.add(trajectory)
        if on_episode is not None:
            on_episode(trajectory)
        return trajectory

    numbered = [(task, index) for task in tasks for index in range(num_generations)]
    ended = await _all([asyncio.create_task(episode(*each), context=contextvars.Context()) for each in numbered])
    for each in ended:
        if isinstance(each, RunStopped):
            raise each
    return [each for each in ended if isinstance(each, Trajectory)]


async def _all(tasks: Sequence["asyncio.Task[Result]"]) -> list[Result]:
    """Their results; if one raises, the others are ended first: nothing plays on behind an error."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _play(
    graph: Agent, task: Task, context: Any, recorder: TokenRecorder, config: RunnableConfig
) -> tuple[Sequence[Any], bool, str | None]:
    """The steps, the outcome and, if it broke, the cause of one episode; what was played before a fault is kept."""
    state: dict[str, Any] = {}
    try:
        with recorder:
            # streamed, so that what was played before a fault is known
            async for values in graph.astream({"task": task}, config, context=context, stream_mode="values"):
                state = values
    except RunStopped:
        raise
    except Exception as error:
        return state.get("steps", []), False, f"{type(error).__name__}: {error}"
    return state.get("steps", []), state.get("success", False), None
