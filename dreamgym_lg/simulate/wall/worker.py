"""One worker: a process behind the wall that plays episodes, many at once, as an event loop does.

What crosses the wall is what an episode asks of others anyway, and nothing more: a call of the policy (messages, tools and
other arguments, as OpenAI's form has them), and the calls of `Environment` (reset, step, check_action, show_tools).

What comes up is JSON, one line for each message: the worker is not trusted, and to unpickle is to run what was sent. What
goes down is pickled. Threads read and write the pipes, so that no worker can keep the caller's event loop waiting.
"""

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import messages_from_dict
from langchain_core.outputs import ChatGeneration, ChatResult
from langsmith.run_helpers import tracing_context

from dreamgym_lg import errors
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import DreamGymError, EnvironmentFailed
from dreamgym_lg.simulate.agent import AgentState
from dreamgym_lg.simulate.guard.checks import Allow
from dreamgym_lg.simulate.wall.wall import start_walled
from dreamgym_lg.types import Act, Step, Task

logger = logging.getLogger(__name__)

SILENCE = 600.0
"""Seconds without a message from a worker, while nothing that it asked for is unanswered, after which it hangs."""
LONGEST_LINE = 64 * 2**20
"""Bytes of a message: an episode's steps, or all that a policy is shown."""

_CHILD = "from dreamgym_lg.simulate.wall.child import main; main()"
_SCRATCH = "dreamgym-scratch-"

Message = dict[str, Any]


class Worker:
    """A walled process with its pipes and its scratch folder. It starts in the background, which takes some seconds.

    Args:
        path: The agent, as `load_agent` takes it.
        options: Those of its `SimulatedAgent`, pickled.
        allow: What may be touched: see `start_walled`.
    """

    def __init__(self, path: str, options: bytes, allow: Allow | None) -> None:
        self._scratch, self._claim = _make_scratch()
        python_path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        try:
            self._process = start_walled(
                [sys.executable, "-P", "-c", _CHILD],
                scratch=Path(self._scratch),
                allow=allow,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent
                env={**os.environ, "PYTHONPATH": python_path},
            )
        except BaseException:
            _remove_scratch(self._scratch, self._claim)
            raise
        self.playing = self.taken = 0
        """Episodes that it has to play, now and in all: of `Workers`."""
        self.retired = False
        """Takes no more episodes, and ends with its last."""
        self._why, self._errors, self._numbers = "", deque[str](maxlen=20), itertools.count(1)
        self._gone: Message | None = None
        self._heard = time.monotonic()
        self._listeners: dict[int, Callable[[Message], object]] = {}
        self._started, self._lock, self._reaped = Future[Message](), threading.Lock(), False
        self._orders = queue.SimpleQueue[bytes | None]()
        self._send((path, options))
        work = self._read, self._read_errors, self._write, self._wait
        threads = [threading.Thread(target=each, name="dreamgym-worker", daemon=True) for each in work]
        self._reader, self._error_reader, _, self._waiter = threads
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

    # --- the threads ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        pipe = cast(IO[bytes], self._process.stdout)
        try:
            while line := pipe.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"it is longer than {LONGEST_LINE:,} bytes")
                self._heard = time.monotonic()
                self._hand_on(json.loads(line))
        except Exception as error:
            self.end(f"what it sent is no message ({type(error).__name__}: {str(error)[:100]})")

    def _hand_on(self, message: Message) -> None:
        if (episode := message.get("episode")) is None:
            self._started.set_result(message)  # of a second one: InvalidStateError
        elif listener := self._listeners.get(episode):  # else the episode has ended
            with contextlib.suppress(RuntimeError):  # its loop is closed
                listener(message)

    def _read_errors(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while line := cast(IO[bytes], self._process.stderr).readline(10_000):
                self._errors.append(line.decode(errors="replace").rstrip())
                logger.info("worker: %s", self._errors[-1])

    def _write(self) -> None:
        pipe = cast(IO[bytes], self._process.stdin)
        with contextlib.suppress(OSError, ValueError):
            while (order := self._orders.get()) is not None:
                pipe.write(order)
                pipe.flush()

    def _wait(self) -> None:
        """Until the process has ended: then clear away what is left, and tell everyone who listens."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.end()  # its children
        with self._lock:
            status, self._reaped = self._process.wait(), True
        self._orders.put(None)
        for thread in (self._reader, self._error_reader):
            thread.join(timeout=1)  # no longer: a child that left the group may keep the pipe open
        _remove_scratch(self._scratch, self._claim)
        last = " | ".join(self._errors) or "nothing"
        why = f": {self._why}" if self._why else " (-9 may be a lack of memory)"
        gone = {"gone": f"the walled worker has ended with status {status}{why}; it said: {last}"}
        with self._lock:
            self._gone, listeners = gone, list(self._listeners.values())
        if not self._started.done():
            self._started.set_result(gone)
        for listener in listeners:
            with contextlib.suppress(RuntimeError):
                listener(gone)

    def _send(self, order: object) -> None:
        self._orders.put(pickle.dumps(order))

    # --- an episode -------------------------------------------------------------------------------------------------------

    async def play(self, task: Task, policy: BaseChatModel, environment: Environment) -> AsyncGenerator[AgentState]:
        """One episode: what is asked is answered as it comes, many at once, in the context of the caller.

        Raises what the policy or the world raised; `AccessBlocked` for what the guard or the wall stopped; `EnvironmentFailed`
        for what else the agent raised, for a worker that died, and for one that hangs; `ConfigurationError` for an agent that
        cannot be loaded.
        """
        await self._ready()
        number, messages = next(self._numbers), asyncio.Queue[Message]()
        causes, unanswered = dict[int, Exception](), set[int]()
        answers, tasks = _answers(task, policy, environment), set[asyncio.Task[None]]()

        async def answer(message: Message) -> None:
            asked = message["number"]
            try:
                value = pickle.dumps(("answer", number, asked, await answers[message["ask"]](*message["args"]), None))
            except Exception as error:
                causes[asked] = error
                value = pickle.dumps(("answer", number, asked, None, f"{type(error).__name__}: {error}"))
            self._orders.put(value)
            self._heard = time.monotonic()  # it has something to do again
            unanswered.discard(asked)
            messages.put_nowait({})

        with self._listening(number, messages):
            self._send(("play", number, task))
            try:
                while "ended" not in (message := await self._next(messages, unanswered)):
                    if "ask" in message:
                        unanswered.add(message["number"])
                        tasks.add(asyncio.create_task(answer(message)))
                    elif "state" in message:
                        yield _state(message["state"])
                    elif "failed" in message or "gone" in message:
                        raise _error(message, causes)
            finally:
                for each in tasks:
                    each.cancel()

    async def _ready(self) -> None:
        try:
            started = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._started)), SILENCE)
        except TimeoutError:
            self.end(f"the agent was not loaded within {SILENCE:g} s")
            started = await asyncio.shield(asyncio.wrap_future(self._started))
        if "ready" not in started:
            self.retired = True
            raise _error(started, {})

    @contextlib.contextmanager
    def _listening(self, number: int, messages: "asyncio.Queue[Message]") -> Iterator[None]:
        loop = asyncio.get_running_loop()
        with self._lock:
            self._listeners[number] = lambda message: loop.call_soon_threadsafe(messages.put_nowait, message)
            if self._gone is not None:
                messages.put_nowait(self._gone)
        try:
            yield
        finally:
            del self._listeners[number]

    async def _next(self, messages: "asyncio.Queue[Message]", unanswered: set[int]) -> Message:
        """The next message. Ends a worker that hangs; one that waits for the policy or the world does not."""
        while True:
            left = self._heard + SILENCE - time.monotonic()
            if left <= 0 and not unanswered:
                self.end(f"it hung: no sign for {SILENCE:g} s, and nothing that it waited for")
                return await messages.get()
            try:
                async with asyncio.timeout(None if unanswered else left):
                    return await messages.get()
            except TimeoutError:
                continue


def _state(sent: Any) -> AgentState:
    steps, acts = [Step(**step) for step in sent["steps"]], [Act(*act) for act in sent["acts"]]
    return cast(AgentState, sent | {"steps": steps, "acts": acts})


def _error(message: Message, causes: dict[int, Exception]) -> Exception:
    """What ended the episode: the parent's own error where that is behind it, else one of this library's."""
    if "gone" in message:
        return EnvironmentFailed(message["gone"])
    if message["number"] in causes:
        return causes[message["number"]]
    kind = getattr(errors, message["failed"], None)
    if isinstance(kind, type) and issubclass(kind, DreamGymError):
        return kind(message["text"])
    return EnvironmentFailed(f"in the walled worker: {message['failed']}: {message['text']}")


Answer = Callable[..., Awaitable[Any]]
"""What the parent does when it is asked, with the arguments that came."""


def _answers(task: Task, policy: BaseChatModel, environment: Environment) -> dict[str, Answer]:
    """All that a worker can ask for."""

    async def reply(messages: list[dict[str, Any]], stop: list[str] | None, given: dict[str, Any]) -> ChatResult:
        arguments = {name: given[name] for name in ("tools", "tool_choice", "response_format") if name in given}
        with tracing_context(enabled=False):
            result = await policy.agenerate([messages_from_dict(messages)], stop=stop, **arguments)
        return ChatResult(generations=cast(list[ChatGeneration], result.generations[0]), llm_output=result.llm_output)

    async def check_action(action: str, observations: list[str]) -> str | None:
        return environment.check_action(action, observations)

    async def show_tools(tools: list[dict[str, Any]]) -> None:
        environment.show_tools(tools)

    async def reset() -> str:
        return await environment.areset(task)

    return {
        "policy": reply,
        "reset": reset,
        "step": environment.astep,
        "check_action": check_action,
        "show_tools": show_tools,
    }


# --- scratch folders --------------------------------------------------------------------------------------------------------


def _make_scratch() -> tuple[str, int]:
    """A new folder, and the descriptor that locks it as long as this process lives."""
    folder = tempfile.mkdtemp(prefix=_SCRATCH)
    claim = os.open(folder, os.O_RDONLY)
    fcntl.flock(claim, fcntl.LOCK_EX)
    return folder, claim


def _remove_scratch(folder: str, claim: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(claim)


def remove_stale_scratch() -> None:
    """Remove the folders of processes that were killed: those, older than a minute, that nobody has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, or another process removes it
            if time.time() - folder.stat().st_mtime > 60:
                claim = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(claim)
