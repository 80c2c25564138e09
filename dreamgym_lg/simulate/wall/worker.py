"""`WalledAgent`: episodes of an agent that is given by its path, each played in a process behind the wall.

What crosses the wall is what an episode asks of others anyway, and nothing more: a call of the policy (messages, tools and
other arguments, as OpenAI's form has them), and the calls of `Environment` (reset, step, check_action, show_tools). So the
whole simulation, the guard included, runs in the worker as it does in process, and policy, world, `TokenRecorder` and replay
buffer stay as they are in the parent: `rollout` plays a `WalledAgent` as it plays a `SimulatedAgent`.

What comes up is JSON, one line for each request: the worker is not trusted, and to unpickle is to run what was sent. What goes
down is pickled.
"""

import asyncio
import contextlib
import copy
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
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import IO, Any, Literal, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import messages_from_dict
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langsmith.run_helpers import tracing_context

from dreamgym_lg import errors
from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.errors import ConfigurationError, DreamGymError, EnvironmentFailed
from dreamgym_lg.simulate.agent import AgentInput, AgentState
from dreamgym_lg.simulate.guard.guard import Allow
from dreamgym_lg.simulate.wall.wall import check_wall, start_walled
from dreamgym_lg.types import Act, Step, Task

logger = logging.getLogger(__name__)

_CHILD = "from dreamgym_lg.simulate.wall.child import main; main()"

RENEWED_AFTER = 200
"""Episodes of a worker: what an agent leaves in its process, threads above all, does not grow for ever."""

Answer = Callable[..., Awaitable[Any]]
"""What the parent does when it is asked, with the arguments that came."""


class WalledAgent:
    """What `rollout` plays: an agent given by its path, its episodes in worker processes that cannot touch the real world.

    A worker plays one episode after the other; there are as many as episodes play at once, `workers` at most. One that dies,
    or whose episode was cancelled, is replaced, and so is one that has played `RENEWED_AFTER` episodes; an episode whose worker
    died has failed, with the cause. A worker starts in some seconds: it imports this library and the agent.

    Args:
        path: `FILE.py:NAME` or `package.module:NAME`; imported behind the wall, never here.
        policy: The chat model that is trained; it stays in this process.
        workers: The most processes.
        allow: What may be touched: see `start_walled` for what that means for hosts.
        options: `payload`, `verify` and the options of `simulated`. They are pickled: functions of a module, no lambdas.

    Raises `ConfigurationError` if this machine cannot build the wall or an option cannot be pickled.
    """

    def __init__(
        self, path: str, policy: BaseChatModel, *, workers: int = 1, allow: Allow | None = None, **options: Any
    ) -> None:
        if workers < 1:
            raise ConfigurationError(f"workers={workers}: at least 1")
        check_wall()
        self.policy = policy if policy.cache is False else copy.copy(policy)
        self.policy.cache = False  # as of an episode in process
        self._path, self._allow = path, allow
        try:
            self._options = pickle.dumps(options | {"allow": allow})
        except Exception as error:
            raise ConfigurationError(
                f"the options {sorted(options)} cannot be sent to a worker ({error}): give functions that a module defines, or "
                "play in this process (`SimulatedAgent`)"
            ) from error
        self._idle: list[_Worker] = []
        self._free = asyncio.Semaphore(workers)

    async def astream(
        self,
        state: AgentInput,
        config: RunnableConfig | None = None,
        *,
        context: EpisodeContext,
        stream_mode: Literal["values"] = "values",
    ) -> AsyncIterator[AgentState]:
        """Play one episode of `state["task"]` in `context.environment`, as `SimulatedAgent.astream` does.

        Raises what the policy or the world raised, and `EnvironmentFailed` for what the agent raised, for a real access that
        was stopped, and for a worker that died. Callbacks of `config` stay here and see nothing of the episode.
        """
        if context.environment is None:
            raise ConfigurationError("a walled agent is simulated, so rollout needs create_environment=")
        async with self._free:
            given = self._path, self._options, self._allow
            worker = self._idle.pop() if self._idle else await asyncio.to_thread(_Worker, *given)
            try:
                async with contextlib.aclosing(worker.play(state["task"], self.policy, context.environment)) as states:
                    async for each in states:
                        yield each
            finally:
                if worker.idle and worker.played < RENEWED_AFTER:
                    self._idle.append(worker)
                else:
                    worker.close()

    def close(self) -> None:
        """End the processes; the agent can be played again, with new ones."""
        while self._idle:
            self._idle.pop().close()


class _Mail:
    """Where the lines of a worker go: a thread reads them, whoever plays listens."""

    def __init__(self) -> None:
        self.listener: Callable[[dict[str, Any]], object] = lambda message: None
        self.errors: deque[str] = deque(maxlen=20)
        self.ended = False

    def read(self, said: IO[bytes]) -> None:
        with contextlib.suppress(ValueError, OSError):  # no JSON, or closed here
            for line in said:
                if not isinstance(message := json.loads(line), dict):
                    break
                self._hand_on(message)
        self.ended = True
        self._hand_on({"gone": True})

    def _hand_on(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # between episodes: the loop of the last one is closed
            self.listener(message)

    def read_errors(self, said: IO[bytes]) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in said:
                self.errors.append(line.decode(errors="replace").rstrip())
                logger.info("worker: %s", self.errors[-1])


class _Worker:
    """One walled process with its pipes and its scratch folder; ends with this object."""

    def __init__(self, path: str, options: bytes, allow: Allow | None) -> None:
        self._scratch = tempfile.mkdtemp(prefix="dreamgym-")
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
            os.rmdir(self._scratch)
            raise
        self.close = weakref.finalize(self, _end, self._process, self._scratch)
        self.idle = False
        """Waits for a task; else it plays, or is of no use any more."""
        self.played = 0
        """Episodes, the present one included: its number."""
        self._mail = _Mail()
        first = queue.SimpleQueue[dict[str, Any]]()
        self._mail.listener = first.put
        reading = ((self._mail.read, self._process.stdout), (self._mail.read_errors, self._process.stderr))
        self._readers = [threading.Thread(target=target, args=(pipe,), daemon=True) for target, pipe in reading]
        for reader in self._readers:
            reader.start()
        self._send((path, options))
        if "ready" not in (message := first.get()):
            self.close()
            raise self._error(message, {})
        self.idle = True

    async def play(self, task: Task, policy: BaseChatModel, environment: Environment) -> AsyncGenerator[AgentState]:
        """One episode: what is asked is answered as it comes, many at once, in the context of the caller."""
        self.idle, self.played, loop = False, self.played + 1, asyncio.get_running_loop()
        messages = asyncio.Queue[dict[str, Any]]()
        self._mail.listener = lambda message: loop.call_soon_threadsafe(messages.put_nowait, message)
        asked, causes = set[asyncio.Task[None]](), dict[int, Exception]()
        if not self._send((self.played, task)) or self._mail.ended:
            messages.put_nowait({"gone": True})
        try:
            while "ended" not in (message := await messages.get()):
                if "ask" in message and message["episode"] == self.played:
                    asked.add(asyncio.create_task(self._answer(message, _answers(task, policy, environment), causes)))
                elif "state" in message:
                    steps = [Step(**step) for step in message["state"]["steps"]]
                    acts = [Act(*act) for act in message["state"]["acts"]]
                    yield cast(AgentState, message["state"] | {"steps": steps, "acts": acts})
                elif "failed" in message:
                    self.idle = self._send(None)
                    raise self._error(message, causes)
                elif "gone" in message:
                    raise self._error(message, causes)
            self.idle = self._send(None)
        finally:
            for each in asked:
                each.cancel()

    async def _answer(self, message: dict[str, Any], answers: dict[str, Answer], causes: dict[int, Exception]) -> None:
        number = message["number"]
        try:
            value = pickle.dumps((number, await answers[message["ask"]](*message["args"]), None))
        except Exception as error:
            causes[number] = error
            value = pickle.dumps((number, None, f"{type(error).__name__}: {error}"))
        self._write(value)

    def _send(self, item: Any) -> bool:
        return self._write(pickle.dumps(item))

    def _write(self, data: bytes) -> bool:
        """Whether the process is there to read it."""
        pipe: Any = self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            pipe.write(data)
            pipe.flush()
            return True
        return False

    def _error(self, message: dict[str, Any], causes: dict[int, Exception]) -> Exception:
        """What ended the episode: the parent's own error where that is behind it, else one of this library's."""
        if "failed" not in message:
            self._process.kill()  # it may live, and say what is no JSON
            status = self._process.wait()
            self._readers[1].join(timeout=1)  # no longer: its children may keep the pipe open
            last = " | ".join(self._mail.errors) or "nothing"
            cause = f"the walled worker has ended (status {status}: -9 may be a lack of memory); it said: {last}"
            return EnvironmentFailed(cause)
        if message["number"] in causes:
            return causes[message["number"]]
        kind = getattr(errors, message["failed"], None)
        if isinstance(kind, type) and issubclass(kind, DreamGymError):
            return kind(message["text"])
        return EnvironmentFailed(f"in the walled worker: {message['failed']}: {message['text']}")


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


def _end(process: "subprocess.Popen[bytes]", scratch: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and its children, unless they left the group
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError, AttributeError):
            pipe.close()  # type: ignore[union-attr]
    shutil.rmtree(scratch, ignore_errors=True)
