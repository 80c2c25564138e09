"""Plays dreamed episodes of an agent, given by its path, in processes behind the wall.

Simulation and guard run in the workers. Policy, environment, `TokenRecorder` and replay buffer stay in this process.
"""

import asyncio
import contextlib
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
from dreamgym_lg.simulate.episode import uncached
from dreamgym_lg.simulate.wall.resources import remove_stale_scratch
from dreamgym_lg.simulate.wall.wall import check_allowed, check_wall
from dreamgym_lg.simulate.wall.worker import Worker

RENEWED_AFTER = 200
"""Episodes after which a worker is replaced, so that what agents leave behind (threads, mostly) does not accumulate."""


class Workers:
    """The worker processes of an agent. Each plays many episodes at once, on an event loop.

    A new one is started if all are busy; it imports the agent, which takes seconds. A worker ends after its running episodes if
    it began `RENEWED_AFTER`, one was cancelled, or it could read a replay buffer opened later. All end with this object.

    Args:
        path: `FILE.py:NAME` or `package.module:NAME`; imported in each worker.
        count: Most workers that take new episodes. Default: the number of cores of this process.
        allow: As of `start_walled`.
        options: `payload`, `verify` and those of `simulated`, all picklable: functions of a module, no lambdas.

    Raises `ConfigurationError` if this machine cannot build the wall, or an option cannot be pickled.
    """

    def __init__(self, path: str, *, count: int | None = None, allow: Allow | None = None, **options: Any) -> None:
        if count is not None and count < 1:
            raise ConfigurationError(f"count={count}: at least 1 worker")
        check_wall()
        check_allowed(allow or Allow())
        remove_stale_scratch()
        source, _, name = path.rpartition(":")
        self._path = f"{os.path.abspath(source)}:{name}" if source.endswith(".py") else path
        self._options, self._allow = _pickle_options(options | {"allow": allow}), allow
        self.verifies = options.get("verify") is not None
        """True if the worker judges the outcome, and not the environment."""
        self._count = count or len(os.sched_getaffinity(0))
        self._workers, self._lock = list[Worker](), threading.Lock()
        weakref.finalize(self, _close, self._workers)

    @contextlib.contextmanager
    def lease(self) -> Iterator[Worker]:
        """The worker with the fewest episodes, for one episode. Raises `ConfigurationError` as `start_walled`."""
        with self._lock:
            self._workers[:], hidden = [each for each in self._workers if not each.failure], hidden_files()
            for each in self._workers:
                if not hidden <= each.hidden:
                    each.retired = True
                    if not each.playing:
                        each.end()
            active = [each for each in self._workers if not each.retired]
            worker = min(active, key=lambda each: each.playing, default=None)
            if worker is None or (worker.playing and len(active) < self._count):
                worker = Worker(self._path, self._options, self._allow, hidden)
                self._workers.append(worker)
            worker.playing += 1
            worker.taken += 1
            worker.retired |= worker.taken >= RENEWED_AFTER  # a cancelled episode may just have retired it
        try:
            yield worker
        except (asyncio.CancelledError, GeneratorExit):
            worker.retired = True  # its code may still be running there
            raise
        finally:
            with self._lock:
                worker.playing -= 1
                if worker.retired and not worker.playing:
                    worker.end()

    def check(self) -> None:
        """Wait until a worker has loaded the agent. Raises `ConfigurationError` if that fails."""
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


def _pickle_options(options: dict[str, Any]) -> bytes:
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
    """Plays an agent for `rollout` in worker processes, which several policies may share.

    Raises `ConfigurationError` for a policy that is no chat model. The policy stays in this process.
    """

    def __init__(self, workers: Workers, policy: BaseChatModel) -> None:
        self._workers, self.policy = workers, uncached(policy)

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
                async for played in states:
                    yield played
