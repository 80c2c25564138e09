"""A walled process that plays many episodes: its handle in the parent, and its program.

Its agent is a `SimulatedAgent` whose policy and environment are the parent's (`remote_episode`). The parent first sends the
agent's path and options; `{"ready": true}` or a failure comes back. Threads of the parent read and write the pipes.
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
from dreamgym_lg.simulate.context import serve_producers
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
from dreamgym_lg.simulate.wall.resources import WATCHED_EVERY, ResourceUse, create_scratch, kill_family, remove_scratch
from dreamgym_lg.simulate.wall.semaphore import Semaphore
from dreamgym_lg.simulate.wall.wall import start_walled
from dreamgym_lg.text import printable
from dreamgym_lg.types import Task
from dreamgym_lg.user_code import load_agent

logger = logging.getLogger(__name__)

SILENCE = 600.0
"""A worker hangs after so many seconds without a message and without an open request to the parent."""
LONGEST_LINE = 64 * 2**20
"""Largest message in bytes, for an episode's steps or a policy's prompt."""

_CHILD = "from dreamgym_lg.simulate.wall.worker import main; main()"


class Worker:
    """A walled process with its pipes and scratch folder. It starts in the background, in some seconds.

    Args: `path`, of the agent, for `load_agent`; `options`, pickled ones of its `SimulatedAgent`; `allow` and `hidden`, as of
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
        """Episodes that `Workers` gave it: running ones, and all."""
        self.retired = False
        """True if it takes no more episodes and ends after its last one."""
        self._end_reason, self._last_output, self._numbers = "", deque[str](maxlen=20), itertools.count(1)
        self.failure: Message | None = None
        """Once the process has ended: the failure of its episodes."""
        self._last_message_at = time.monotonic()
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

    def end(self, reason: str = "") -> None:
        """Kill the process and its children. `reason` is part of the error of its episodes."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            self._end_reason = self._end_reason or reason
            if not self._reaped:
                os.killpg(self._process.pid, signal.SIGKILL)  # children that left the group survive

    def close(self) -> None:
        """As `end`, and wait until the process is cleaned up, 10 seconds at most."""
        self.end()
        self._waiter.join(timeout=10)

    def send(self, order: bytes) -> None:
        """Queue an order for the process, without blocking."""
        self._orders.put(order)
        self._last_message_at = time.monotonic()  # restarts the time limit of `SILENCE`

    # --- an episode -------------------------------------------------------------------------------------------------------

    async def play(
        self, task: Task, policy: BaseChatModel, environment: Environment, *, verified: bool = False
    ) -> AsyncGenerator[AgentState]:
        """Play one episode; requests are answered in a copy of the caller's context. Args: `verified`, the worker judges.

        Raises the errors of policy and environment; `AccessBlocked` for a real access; `EnvironmentFailed` for other errors of
        the agent, and for a worker that died or hangs; `ConfigurationError` for an agent that cannot be loaded.
        """
        await asyncio.to_thread(self.check_loaded)
        first = await environment.areset(task)
        number = next(self._numbers)
        with episode_tracing("dream"), trace("dreamed episode", inputs={"task": task.instruction}):  # parent of calls
            episode = RemoteEpisode(self.send, number, policy, environment)
            with self._lock:
                self._episodes[number] = episode
                if self.failure is not None:
                    episode.hear(self.failure)
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
        if "ready" not in (message := self._started.result()):
            self.retired = True
            raise read_error(message, {})

    async def _await_end(self, episode: RemoteEpisode) -> None:
        """Wait for the episode's last message. A worker that hangs is ended."""
        while not episode.ended.done():
            left = self._last_message_at + SILENCE - time.monotonic()
            if left <= 0 and not episode.unanswered:
                self.end(f"it hung: no sign for {SILENCE:g} s, and nothing that it waited for")
                left = SILENCE
            await asyncio.wait([episode.ended], timeout=left if left > 0 else SILENCE)

    def _hear(self, episode: RemoteEpisode, message: Message) -> None:
        with self._ending_on_error():
            episode.hear(message)

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """End the worker if the block cannot read a message."""
        try:
            yield
        except Exception as error:
            self.end(f"what it sent is no message ({type(error).__name__}: {str(error)[:100]})")

    # --- the threads ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        pipe = cast(IO[bytes], self._process.stdout)
        with self._ending_on_error():
            while line := pipe.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"it is longer than {LONGEST_LINE:,} bytes")
                self._last_message_at = time.monotonic()
                message = json.loads(line)
                if (number := message.get("episode")) is None:
                    self._started.set_result(message)  # a second one raises InvalidStateError
                elif episode := self._episodes.get(number):  # else the episode has ended
                    with contextlib.suppress(RuntimeError):  # its loop is closed
                        episode.loop.call_soon_threadsafe(self._hear, episode, message)

    def _read_errors(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while line := cast(IO[bytes], self._process.stderr).readline(10_000):
                self._last_output.append(printable(redact_environment(line.decode(errors="replace").rstrip())))
                logger.info("worker: %s", self._last_output[-1])

    def _write(self) -> None:
        pipe = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(OSError):  # the process has ended
            while (order := self._orders.get()) is not None:
                pipe.write(order)
                pipe.flush()

    def _wait(self) -> None:
        """Watch the resources of the process until it has ended. Then clean up, and end every episode."""
        use, ending, pause = ResourceUse(self.pid, self._scratch), select.poll(), 0.0
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
                thread.join(timeout=1)  # a child that left the group may keep the pipe open
            remove_scratch(self._scratch)
        finally:  # even if the clean-up fails, no episode may wait for ever
            self._end_episodes(status)

    def _end_episodes(self, status: int) -> None:
        output = " | ".join(self._last_output) or "nothing"
        why = f": {self._end_reason}" if self._end_reason else " (-9 may be a lack of memory)"
        text = f"the walled worker has ended with status {status}{why}; it said: {output}"
        gone = {"failed": "EnvironmentFailed", "text": text, "number": None}
        with self._lock:
            self.failure, episodes = gone, list(self._episodes.values())
        if not self._started.done():
            self._started.set_result(gone)
        for episode in episodes:
            with contextlib.suppress(RuntimeError):
                episode.loop.call_soon_threadsafe(episode.hear, gone)


# --- in the worker ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Load the agent, then follow the parent's orders until they end."""
    orders, write = os.fdopen(os.dup(0), "rb"), _writer(os.fdopen(os.dup(1), "wb"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the agent prints is no message
    path, options = pickle.load(orders)
    serve_producers()
    multiprocessing.synchronize._multiprocessing.SemLock = Semaphore  # type: ignore[attr-defined]
    try:
        graph, options = load_agent(path), _unpickle(options)
        allow = options["allow"] or Allow()
        options["allow"] = replace(allow, paths=[*allow.paths, os.environ["TMPDIR"]])  # the scratch folder of `start_walled`
    except Exception as error:
        failure = _failure(error)
        if _is_refusal(error) or "unable to open database file" in str(error):
            failure["text"] += (
                "; behind the wall nothing is written but what allow= names: do it in a tool, allow it (allow= of DreamGym or "
                "AgentWorld), or take the guard (isolation='guard' there, --isolation guard of a command), which refuses an "
                "agent whose own code holds an open file or database"
            )
        return write(to_line(**failure))
    write(to_line(ready=True))
    loop = asyncio.new_event_loop()
    arguments = orders, write, loop, partial(SimulatedAgent, graph, **options)  # type: ignore[arg-type]
    threading.Thread(target=_follow_orders, args=arguments, name="dreamgym-orders", daemon=True).start()
    while True:
        with contextlib.suppress(BaseException):  # SystemExit of an agent ends its episode alone
            loop.run_forever()


def _unpickle(options: bytes) -> dict[str, Any]:
    try:
        return dict(pickle.loads(options))
    except Exception as error:
        raise ConfigurationError(
            f"a worker cannot import the functions that it was given ({type(error).__name__}: {error}): let them be of a "
            "module that can be imported without touching anything, such as the agent's own (not of the script that opens the "
            "replay buffer), or take isolation='guard'"
        ) from error


def _writer(pipe: BinaryIO) -> Callable[[bytes], None]:
    """A function that writes a line, callable from any thread."""
    lock = threading.Lock()

    def write(line: bytes) -> None:
        with lock:
            pipe.write(line)
            pipe.flush()

    return write


def _follow_orders(
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
    os.killpg(0, signal.SIGKILL)  # ends children and threads of the agent too


def _failure(error: BaseException) -> Message:
    """As `failure_of`, with `AccessBlocked` for refusals of the wall."""
    failure, is_refused = failure_of(error), any(map(_is_refusal, errors_behind(error)))
    if failure["number"] is None and not isinstance(error, DreamGymError) and is_refused:
        text = f"the wall stopped {type(error).__name__}: {error}; allow it with allow=, or simulate it"
        failure |= {"failed": "AccessBlocked", "text": text}
    return failure


def _is_refusal(error: BaseException) -> bool:
    """True for a refusal by the kernel. Errors of native libraries show it only as text."""
    if isinstance(error, PermissionError):  # one that the agent raises itself has no errno
        return error.errno in (errno.EACCES, errno.EPERM)
    refusals = (os.strerror(errno.EACCES), os.strerror(errno.EPERM), "readonly database")  # the last is SQLite's
    return any(text.lower() in str(error).lower() for text in refusals)
