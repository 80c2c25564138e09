"""`RayRollouts`: episodes in Ray actors, whose policy answers in this process, the driver.

An actor has the agent and, of real episodes, their environment. Requests to the policy (`simulate.remote_episode`) come
back here, where the calls of all actors become one batch of a local model, or go on to a server. `TokenRecorder` and replay
buffer are here alone. A streamed result of the actor carries its questions; a method of it takes the answers.
"""

import asyncio
import itertools
import json
import pickle
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig

from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.errors import ConfigurationError, MissingDependency, WorkerLost
from dreamgym_lg.event_loop import lasting_loop
from dreamgym_lg.experiment.world import World
from dreamgym_lg.rollout import Agent, episode_tracing
from dreamgym_lg.simulate.agent import AgentInput, AgentState
from dreamgym_lg.simulate.remote_episode import Parent, ParentEnvironment, ParentPolicy, RemoteEpisode, play_episode
from dreamgym_lg.types import Task

try:
    import ray
    from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError
except ImportError as error:
    raise MissingDependency.extra("ray", "ray") from error

_LOST = (RayActorError, NodeDiedError, ObjectLostError, OutOfMemoryError)
START_TIMEOUT = 60.0
"""Seconds to wait for all actors; then those that have started play."""
_MAX_CALLS = 100_000
"""Calls of an actor at once: its episodes and the answers to them."""


class _Actor:
    """The code of an actor: its own copy of the world, and its episodes.

    They are played in another thread than the calls of Ray, so that one that waits for an answer gets it.
    """

    def __init__(self, create_world: Callable[[], World]) -> None:
        self._parents: dict[int, Parent] = {}
        self._failure: ConfigurationError | None = None
        try:
            self._world = create_world()
        except Exception as error:  # raised here, it would be reported as the death of an actor
            self._failure = ConfigurationError(f"create_world failed in a Ray actor: {type(error).__name__}: {error}")

    def started(self) -> None:
        """Answered once the actor runs."""

    async def play(
        self, number: int, world: "_Identity", task: Task, first: tuple[str, bool] | None, config: RunnableConfig
    ) -> AsyncGenerator[bytes]:
        """The messages of an episode.

        Args: `world`, of the driver; `first`, the first observation of an environment that the driver has, and whether it has
        a user; None: real.
        """
        lines, loop = asyncio.Queue[bytes | None](), asyncio.get_running_loop()

        def put(line: bytes | None) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        self._parents[number] = parent = Parent(put, number)
        coroutine = play_episode(parent, task, partial(self._create, parent, world, first), **config)
        playing = Context().run(asyncio.run_coroutine_threadsafe, coroutine, lasting_loop("dreamgym-episodes"))
        playing.add_done_callback(lambda _: put(None))
        try:
            while (line := await lines.get()) is not None:
                yield line
        finally:
            playing.cancel()
            del self._parents[number]

    def answer(self, order: bytes) -> None:
        _, number, *answer = pickle.loads(order)
        if number in self._parents:  # else the episode has ended
            self._parents[number].answer(*answer)

    def _create(self, parent: Parent, world: "_Identity", first: tuple[str, bool] | None) -> tuple[Agent, Environment]:
        if self._failure is not None:
            raise self._failure
        if (own := _Identity.of(self._world)) != world:
            raise ConfigurationError(
                f"create_world creates another world in a Ray actor, {own}, than the experiment's, {world}: give the class and "
                "arguments that the experiment's world was created with"
            )
        policy = ParentPolicy(parent=parent, cache=False)
        environment = self._world.create_environment() if first is None else ParentEnvironment(parent, *first)
        return self._world.agent(policy, real=first is None), environment


class _Identity(NamedTuple):
    """A world's name and arguments."""

    name: str
    arguments: Mapping[str, object]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    @classmethod
    def of(cls, world: World) -> "_Identity":
        return cls(world.name, dict(world.arguments))


@dataclass(eq=False)
class _Member:
    """An actor, as the driver sees it."""

    actor: Any
    started: "Future[None]"
    playing: int = 0


class RayRollouts:
    """Plays the episodes of an experiment in Ray actors: `Experiment(world, out, rollouts=RayRollouts(...))`.

    Real episodes have agent and environment in the actor; of dreamed ones the dream is played by the driver. The policy always
    answers there, so that an episode is the same as without Ray, and its tokens are recorded as ever. An actor that dies is
    replaced, and what it played is played again. Actors start with the first episode: `ray.init()` may be called before.

    Args:
        create_world: Creates the experiment's world in each actor, e.g. `partial(WebShop, "products")`. Of an `AgentWorld`
            whose agent is given by its path, dreamed episodes stay behind the wall, on the actor's machine.
        num_actors: How many there are. One computes on one core, as any Python process does, and plays many episodes at once.
        options: Of each actor, as Ray takes them: `num_cpus` (1 by default), `num_gpus`, `memory`, `resources`, `runtime_env`,
            `scheduling_strategy` (`SPREAD` by default), ...

    Raises `ConfigurationError` for fewer than one actor and for options that Ray does not know.
    """

    def __init__(self, create_world: Callable[[], World], *, num_actors: int, **options: Any) -> None:
        if num_actors < 1:
            raise ConfigurationError(f"num_actors={num_actors}: at least 1")
        defaults = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_concurrency": _MAX_CALLS}
        try:
            self._remote = ray.remote(_Actor).options(**{**defaults, **options})
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"Ray refuses the options {options} of its actors: {error}") from error
        self._create_world, self._num_actors = create_world, num_actors
        self._members, self._lock, self._numbers = list[_Member](), threading.Lock(), itertools.count(1)
        self._patient_until: float | None = None

    def agent(self, world: World, policy: BaseChatModel, *, real: bool) -> Agent:
        """The world's agent, in the actors. Real episodes take no `create_environment`: it is there."""
        return _RayAgent(self, _Identity.of(world), policy, real)

    def close(self) -> None:
        """End the actors; the next episode starts new ones."""
        with self._lock:
            members, self._members, self._patient_until = self._members, [], None
        for member in members:
            ray.kill(member.actor)

    @asynccontextmanager
    async def _lease(self) -> AsyncIterator[Any]:
        """The actor that plays the fewest episodes, for one more. Raises `WorkerLost` if it dies."""
        member = await self._least_busy()
        member.playing += 1
        try:
            yield member.actor
        except _LOST as error:
            self._drop(member)
            raise WorkerLost(f"the Ray actor that played the episode is lost ({_first_line(error)})") from error
        finally:
            member.playing -= 1

    async def _least_busy(self) -> _Member:
        """Waits for all actors at first; later for none as long as there is one."""
        while True:
            members = self._fill()
            starting = [member for member in members if not member.started.done()]
            able = [member for member in members if member.started.done()]
            left = (self._patient_until or 0) - time.monotonic()
            for member in able:
                if (failed := member.started.exception()) is not None:
                    self._drop(member)
                    raise WorkerLost(f"a Ray actor did not start ({_first_line(failed)})")
            if able and (left <= 0 or not starting):
                self._patient_until = 0.0  # one that takes the place of another keeps nobody waiting
                return min(able, key=lambda member: member.playing)
            waited = [asyncio.wrap_future(member.started) for member in starting]
            when = asyncio.FIRST_COMPLETED if left <= 0 else asyncio.ALL_COMPLETED
            await asyncio.wait(waited, timeout=left if left > 0 else None, return_when=when)

    def _fill(self) -> list[_Member]:
        with self._lock:
            if self._patient_until is None:
                self._patient_until = time.monotonic() + START_TIMEOUT
            while len(self._members) < self._num_actors:
                actor = self._remote.remote(self._create_world)
                self._members.append(_Member(actor, actor.started.remote().future()))
            return self._members.copy()

    def _drop(self, member: _Member) -> None:
        with self._lock:
            if member in self._members:
                self._members.remove(member)


class _RayAgent:
    """Plays any number of episodes at once, each in one of the actors."""

    def __init__(self, rollouts: RayRollouts, world: _Identity, policy: BaseChatModel, real: bool) -> None:
        self._rollouts, self._world, self._policy, self._real = rollouts, world, policy, real

    async def astream(
        self,
        state: AgentInput,
        config: RunnableConfig | None = None,
        *,
        context: EpisodeContext,
        stream_mode: Literal["values"] = "values",
    ) -> AsyncIterator[AgentState]:
        """Raises what the policy or the driver's environment raised, `WorkerLost`, and `EnvironmentFailed` for all else."""
        environment, number = context.environment, next(self._rollouts._numbers)
        if (environment is None) != self._real:
            raise ConfigurationError(f"create_environment= with real={self._real}: give rollout one for dreams alone")
        first = None if environment is None else (await environment.areset(state["task"]), environment.has_user)
        async with self._rollouts._lease() as actor:
            with episode_tracing("real" if self._real else "dream"):
                episode = RemoteEpisode(actor.answer.remote, number, self._policy, environment)
            played = actor.play.options(num_returns="streaming").remote(number, self._world, state["task"], first, config or {})
            try:
                async for line in played:
                    episode.hear(json.loads(await line))
                if not episode.ended.done():
                    raise WorkerLost("a Ray actor ended an episode before its last message")
                played_state, error = episode.result("a Ray actor")
            finally:
                episode.end()
                ray.cancel(played)  # an episode that is not waited for any more; else nothing
        if played_state is not None:
            yield played_state
        if error is not None:
            raise error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
