"""A walled process that plays episodes, many at once. Its handle in the parent, and its program.

The episode is a `SimulatedAgent` whose policy and environment are the parent's (`remote_episode`). The parent sends agent and
options first; `{"ready": true}` or a failure comes back. Threads of the parent read and write the pipes.
"""

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import multiprocessing.synchronize
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, wait
from contextvars import Context
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, BinaryIO, cast

from langchain_core.language_models import BaseChatModel
from langsmith.run_helpers import trace

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.redaction import redact_environment
from dreamgym_lg.rollout import episode_tracing
from dreamgym_lg.simulate.agent import AgentState, SimulatedAgent
from dreamgym_lg.simulate.allow import Allow
from dreamgym_lg.simulate.context import serve_givers
from dreamgym_lg.simulate.remote_episode import (
    Parent,
    ParentEnvironment,
    ParentPolicy,
    RemoteEpisode,
    errors_behind,
    failure_of,
    play_episode,
    to_line,
)
from dreamgym_lg.simulate.remote_messages import Message, read_error
from dreamgym_lg.simulate.wall.resources import WATCHED_EVERY, Use, create_scratch, kill_family, remove_scratch
from dreamgym_lg.simulate.wall.semaphore import Semaphore
from dreamgym_lg.simulate.wall.wall import start_walled
from dreamgym_lg.text import printable
from dreamgym_lg.types import Task
from dreamgym_lg.user_code import load_agent

logger = logging.getLogger(__name__)

SILENCE = 600.0
"""Seconds without a message from a worker, while nothing that it asked for is unanswered, after which it hangs."""
LONGEST_LINE = 64 * 2**20
"""Bytes of a message: an episode's steps, or all that a policy is shown."""

_CHILD = "from dreamgym_lg.simulate.wall.worker import main; main()"


class Worker:
    """A walled process with its pipes and its scratch folder. It starts in the background, which takes some seconds.

    Args: `path`, the agent, as `load_agent` takes it; `options`, of its `SimulatedAgent`, pickled; `allow` and `hidden`, as of
    `start_walled`.
    """

    def __init__(self, path: str, options: bytes, allow: Allow | None, hidden: frozenset[Path]) -> None:
        self._scratch, self.hidden = create_scratch(), hidden
        try:
            self._process = start_walled(
                [sys.executable, "-P", "-c", _CHILD],
                scratch=Path(self._scratch),
                allow=allow,
                hidden=hidden,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent
                env={**os.environ, "PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)},
            )
        except BaseException:
            remove_scratch(self._scratch)
            raise
        self.playing = self.taken = 0
        """Episodes that it has to play, now and in all: of `Workers`."""
        self.retired = False
        """Takes no more episodes, and ends with its last."""
        self._why, self._last_words, self._numbers = "", deque[str](maxlen=20), itertools.count(1)
        self._gone: Message | None = None
        self._heard = time.monotonic()
        self._episodes: dict[int, RemoteEpisode] = {}
        self._started, self._lock, self._reaped = Future[Message](), threading.Lock(), False
        self._orders = SimpleQueue[bytes | None]()
        self.send(pickle.dumps((path, options)))
        work = (self._read, self._read_errors, self._write, self._wait)
        threads = [threading.Thread(target=each, name="dreamgym-worker", daemon=True) for each in work]
        *self._readers, _, self._waiter = threads
        for thread in threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        return self._gone is not None

    def end(self, why: str = "") -> None:
        """Kill the process and its children; `why` is told to the episodes that it plays."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            self._why = self._why or why
            if not self._reaped:
                os.killpg(self._process.pid, signal.SIGKILL)  # but children that left the group

    def close(self) -> None:
        """As `end`; waits until nothing of it is left."""
        self.end()
        self._waiter.join(timeout=10)

    def send(self, order: bytes) -> None:
        """Takes no time, whatever the process does."""
        self._orders.put(order)
        self._heard = time.monotonic()  # it has something to do again

    # --- an episode -------------------------------------------------------------------------------------------------------

    async def play(
        self, task: Task, policy: BaseChatModel, environment: Environment, *, verified: bool = False
    ) -> AsyncGenerator[AgentState]:
        """Play one episode, answering in a copy of the caller's context. Args: `verified`, its outcome is judged there.

        Raises what policy or world raised; `AccessBlocked` for what was stopped; `EnvironmentFailed` for what else the agent
        raised, and a worker that died or hangs; `ConfigurationError` for an agent that cannot be loaded.
        """
        await asyncio.to_thread(self.check_loaded)
        first = await environment.areset(task)
        number = next(self._numbers)
        with episode_tracing("dream"), trace("dreamed episode", inputs={"task": task.instruction}):  # the calls' parent
            episode = RemoteEpisode(self.send, number, policy, environment)
            with self._lock:
                self._episodes[number] = episode
                if self._gone is not None:
                    episode.hear(self._gone)
            try:
                self.send(pickle.dumps(("play", number, task, first, environment.has_user)))
                await self._await_end(episode)
                state, error = episode.result()
                if state is not None and error is None:
                    error = episode.contradiction(state, verified=verified)
            finally:
                del self._episodes[number]
                episode.end()
        if state is not None:
            yield state
        if error is not None:
            raise error

    def check_loaded(self) -> None:
        """Wait until the agent is loaded. Raises `ConfigurationError` if it cannot be."""
        if not wait([self._started], timeout=SILENCE).done:
            self.end(f"the agent was not loaded within {SILENCE:g} s")
        if "ready" not in (started := self._started.result()):
            self.retired = True
            raise read_error(started, {})

    async def _await_end(self, episode: RemoteEpisode) -> None:
        """Wait for the last message. Ends a worker that hangs; one that waits for the policy or the world does not."""
        while not episode.ended.done():
            left = self._heard + SILENCE - time.monotonic()
            if left <= 0 and not episode.unanswered:
                self.end(f"it hung: no sign for {SILENCE:g} s, and nothing that it waited for")
                left = SILENCE
            await asyncio.wait([episode.ended], timeout=left if left > 0 else SILENCE)

    def _hear(self, episode: RemoteEpisode, message: Message) -> None:
        with self._ending_unreadable():
            episode.hear(message)

    @contextlib.contextmanager
    def _ending_unreadable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.end(f"what it sent is no message ({type(error).__name__}: {str(error)[:100]})")

    # --- the threads ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        pipe = cast(IO[bytes], self._process.stdout)
        with self._ending_unreadable():
            while line := pipe.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"it is longer than {LONGEST_LINE:,} bytes")
                self._heard = time.monotonic()
                message = json.loads(line)
                if (number := message.get("episode")) is None:
                    self._started.set_result(message)  # of a second one: InvalidStateError
                elif episode := self._episodes.get(number):  # else the episode has ended
                    with contextlib.suppress(RuntimeError):  # its loop is closed
                        episode.loop.call_soon_threadsafe(self._hear, episode, message)

    def _read_errors(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while line := cast(IO[bytes], self._process.stderr).readline(10_000):
                self._last_words.append(printable(redact_environment(line.decode(errors="replace").rstrip())))
                logger.info("worker: %s", self._last_words[-1])

    def _write(self) -> None:
        pipe = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(OSError):  # the process has ended
            while (order := self._orders.get()) is not None:
                pipe.write(order)
                pipe.flush()

    def _wait(self) -> None:
        """Watch what the process uses until it has ended. Then clear away, and tell every episode."""
        use, ending, pause = Use(self.pid, self._scratch), select.poll(), 0.0
        ending.register(number := os.pidfd_open(self.pid), select.POLLIN)
        while not ending.poll(1000 * pause):
            began = time.monotonic()
            if excess := use.excess():
                self.end(excess)
            pause = max(WATCHED_EVERY, 20 * (time.monotonic() - began))
        os.close(number)
        self.end()  # its children
        with self._lock:
            status, self._reaped = self._process.wait(), True
        self._orders.put(None)
        try:
            kill_family(self._scratch)
            for thread in self._readers:
                thread.join(timeout=1)  # no longer: a child that left the group may keep the pipe open
            remove_scratch(self._scratch)
        finally:  # whatever cannot be cleared away, no episode waits for ever
            self._tell_gone(status)

    def _tell_gone(self, status: int) -> None:
        words = " | ".join(self._last_words) or "nothing"
        why = f": {self._why}" if self._why else " (-9 may be a lack of memory)"
        text = f"the walled worker has ended with status {status}{why}; it said: {words}"
        gone = {"failed": "EnvironmentFailed", "text": text, "number": None}
        with self._lock:
            self._gone, episodes = gone, list(self._episodes.values())
        if not self._started.done():
            self._started.set_result(gone)
        for episode in episodes:
            with contextlib.suppress(RuntimeError):
                episode.loop.call_soon_threadsafe(episode.hear, gone)


# --- in the worker ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Load the agent, then obey the parent until its orders end."""
    orders, write = os.fdopen(os.dup(0), "rb"), _writer(os.fdopen(os.dup(1), "wb"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the agent prints is no answer
    path, options = pickle.load(orders)
    serve_givers()
    multiprocessing.synchronize._multiprocessing.SemLock = Semaphore  # type: ignore[attr-defined]
    try:
        graph, options = load_agent(path), _unpickled(options)
        allow = options["allow"] or Allow()
        options["allow"] = replace(allow, paths=[*allow.paths, os.environ["TMPDIR"]])  # the scratch folder of `start_walled`
    except Exception as error:
        failure = _failure(error)
        if _is_of_the_wall(error) or "unable to open database file" in str(error):
            failure["text"] += (
                "; behind the wall nothing is written but what allow= names: do it in a tool, allow it (allow= of DreamGym or "
                "AgentWorld), or take the guard (isolation='guard' there, --isolation guard of a command), which refuses an "
                "agent whose own code holds an open file or database"
            )
        return write(to_line(**failure))
    write(to_line(ready=True))
    loop = asyncio.new_event_loop()
    arguments = orders, write, loop, partial(SimulatedAgent, graph, **options)  # type: ignore[arg-type]
    threading.Thread(target=_obey, args=arguments, name="dreamgym-orders", daemon=True).start()
    while True:
        with contextlib.suppress(BaseException):  # SystemExit of an agent ends its episode alone
            loop.run_forever()


def _unpickled(options: bytes) -> dict[str, Any]:
    try:
        return dict(pickle.loads(options))
    except Exception as error:
        raise ConfigurationError(
            f"a worker cannot import the functions that it was given ({type(error).__name__}: {error}): let them be of a "
            "module that can be imported without touching anything, such as the agent's own (not of the script that opens the "
            "replay buffer), or take isolation='guard'"
        ) from error


def _writer(pipe: BinaryIO) -> Callable[[bytes], None]:
    """Writes lines, by any thread."""
    lock = threading.Lock()

    def write(line: bytes) -> None:
        with lock:
            pipe.write(line)
            pipe.flush()

    return write


def _obey(
    orders: BinaryIO,
    write: Callable[[bytes], None],
    loop: asyncio.AbstractEventLoop,
    create: Callable[[BaseChatModel], SimulatedAgent],
) -> None:
    def create_both(parent: Parent, first: str, has_user: bool) -> tuple[SimulatedAgent, Environment]:
        return create(ParentPolicy(parent=parent, cache=False)), ParentEnvironment(parent, first, has_user)

    parents: dict[int, Parent] = {}
    with contextlib.suppress(EOFError):
        while True:
            order, number, *rest = pickle.load(orders)
            if order == "play":
                parents = {number: parent for number, parent in parents.items() if not parent.ended}
                parents[number] = parent = Parent(write, number)
                task, *world = rest
                playing = play_episode(parent, task, partial(create_both, parent, *world), failure=_failure)
                loop.call_soon_threadsafe(partial(loop.create_task, playing, context=Context()))
            elif number in parents:
                deliver = parents[number].chunk if order == "chunk" else parents[number].answer
                deliver(*rest)
    os.killpg(0, signal.SIGKILL)  # with the children, and threads of the agent that may run for ever


def _failure(error: BaseException) -> Message:
    """`failure_of`, which tells the wall's refusals from others."""
    failure, refused = failure_of(error), any(map(_is_of_the_wall, errors_behind(error)))
    if failure["number"] is None and not isinstance(error, DreamGymError) and refused:
        text = f"the wall stopped {type(error).__name__}: {error}; allow it with allow=, or simulate it"
        failure |= {"failed": "AccessBlocked", "text": text}
    return failure


def _is_of_the_wall(error: BaseException) -> bool:
    """Tells if the kernel refused something; native libraries say so in the text alone."""
    if isinstance(error, PermissionError):  # the agent's own has no number
        return error.errno in (errno.EACCES, errno.EPERM)
    refusals = (os.strerror(errno.EACCES), os.strerror(errno.EPERM), "readonly database")  # the last is SQLite's
    return any(text.lower() in str(error).lower() for text in refusals)
