"""Plays dreamed episodes of an agent, given by its path, in processes behind the wall.

The simulation runs in the worker, the guard included. Policy, world, `TokenRecorder` and replay buffer stay in the parent.
"""

import asyncio
import contextlib
import copy
import os
import pickle
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig

from dreamgym_lg.environment import EpisodeContext
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.redaction import hidden_files
from dreamgym_lg.simulate.agent import AgentInput, AgentState
from dreamgym_lg.simulate.allow import Allow
from dreamgym_lg.simulate.wall.resources import remove_stale_scratch
from dreamgym_lg.simulate.wall.wall import check_allowed, check_wall
from dreamgym_lg.simulate.wall.worker import Worker

RENEWED_AFTER = 200
"""Episodes of a worker: what an agent leaves in its process, threads above all, does not grow for ever."""


class Workers:
    """The worker processes of an agent. Each plays many episodes at once, as an event loop does.

    One is started when all others play: it imports the agent, which takes seconds. One that has begun `RENEWED_AFTER` episodes,
    had one cancelled, or may read a replay buffer that was opened since, ends with its last. They end with this object.

    Args:
        path: `FILE.py:NAME` or `package.module:NAME`; imported in each worker.
        count: The most processes that take episodes. Default: one for each core of this process.
        allow: What may be touched, as of `start_walled`.
        options: `payload`, `verify` and those of `simulated`. They are pickled: functions of a module, no lambdas.

    Raises `ConfigurationError` if this machine cannot build the wall, or an option cannot be sent.
    """

    def __init__(self, path: str, *, count: int | None = None, allow: Allow | None = None, **options: Any) -> None:
        if count is not None and count < 1:
            raise ConfigurationError(f"count={count}: at least 1 worker")
        check_wall()
        check_allowed(allow or Allow())
        remove_stale_scratch()
        source, _, name = path.rpartition(":")
        self._path = f"{os.path.abspath(source)}:{name}" if source.endswith(".py") else path
        self._options, self._allow = _pickled(options | {"allow": allow}), allow
        self.verifies = options.get("verify") is not None
        """The outcome of an episode is judged in the worker, not by the environment."""
        self._count = count or len(os.sched_getaffinity(0))
        self._workers, self._lock = list[Worker](), threading.Lock()
        weakref.finalize(self, _close, self._workers)

    @contextlib.contextmanager
    def lease(self) -> Iterator[Worker]:
        """The worker that plays the fewest episodes, for one more. Raises `ConfigurationError` as `start_walled` does."""
        with self._lock:
            self._workers[:], hidden = [each for each in self._workers if not each.gone], hidden_files()
            for each in self._workers:
                if not hidden <= each.hidden:
                    each.retired = True
                    if not each.playing:
                        each.end()
            able = [each for each in self._workers if not each.retired]
            worker = min(able, key=lambda each: each.playing, default=None)
            if worker is None or (worker.playing and len(able) < self._count):
                worker = Worker(self._path, self._options, self._allow, hidden)
                self._workers.append(worker)
            worker.playing += 1
            worker.taken += 1
            worker.retired = worker.taken >= RENEWED_AFTER
        try:
            yield worker
        except (asyncio.CancelledError, GeneratorExit):
            worker.retired = True  # what the episode began goes on there
            raise
        finally:
            with self._lock:
                worker.playing -= 1
                if worker.retired and not worker.playing:
                    worker.end()

    def check(self) -> None:
        """Start a first worker, and wait until it has loaded the agent. Raises `ConfigurationError` if it cannot."""
        with self.lease() as worker:
            worker.check_loaded()

    def close(self) -> None:
        """End the processes; the next episode starts new ones."""
        _close(self._workers)


def _close(workers: list[Worker]) -> None:
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.close()
    workers.clear()


def _pickled(options: dict[str, Any]) -> bytes:
    fix = "give functions of a module that can be imported, such as the agent's own, or isolation='guard'"
    for name, option in options.items():
        try:
            data = pickle.dumps(option)
        except Exception as error:
            raise ConfigurationError(f"{name}={option!r} cannot be sent to a worker ({error}): {fix}") from error
        if b"__main__" in data:
            raise ConfigurationError(
                f"{name}={option!r} is of the script or notebook that runs, which no worker imports: move it to a module, and "
                f"import it from there; {fix}"
            )
    return pickle.dumps(options)


class WalledAgent:
    """Plays an agent for `rollout`, in worker processes that cannot touch the real world. Policies may share them.

    Raises `ConfigurationError` for a policy that is no chat model. It stays in this process.
    """

    def __init__(self, workers: Workers, policy: BaseChatModel) -> None:
        if not isinstance(policy, BaseChatModel):
            raise ConfigurationError(f"policy={policy!r} is no chat model: give a BaseChatModel, without bound tools")
        self.policy = policy if policy.cache is False else copy.copy(policy)
        self.policy.cache = False  # as of an episode in process
        self._workers = workers

    async def astream(
        self,
        state: AgentInput,
        config: RunnableConfig | None = None,
        *,
        context: EpisodeContext,
        stream_mode: Literal["values"] = "values",
    ) -> AsyncIterator[AgentState]:
        """Play one episode, as `SimulatedAgent.astream` does; raises what `Worker.play` raises. `config` is not used."""
        if context.environment is None:
            raise ConfigurationError("a walled agent is simulated, so rollout needs create_environment=")
        with self._workers.lease() as worker:
            playing = worker.play(state["task"], self.policy, context.environment, verified=self._workers.verifies)
            async with contextlib.aclosing(playing) as states:
                async for each in states:
                    yield each
