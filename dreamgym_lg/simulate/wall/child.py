"""What runs in a worker: it loads the agent, and plays the episodes that it is told, its policy and world being the parent's.

The episode itself is a `SimulatedAgent`, as in process. Only its policy and its environment are of this file: both ask the
parent, over the pipe.
"""

import asyncio
import contextlib
import errno
import itertools
import json
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any, BinaryIO

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, message_to_dict
from langchain_core.outputs import ChatResult
from pydantic import PrivateAttr
from pydantic_core import to_json

from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.simulate.agent import SimulatedAgent
from dreamgym_lg.simulate.guard.guard import Allow
from dreamgym_lg.simulate.loading import load_agent
from dreamgym_lg.types import StepResult, Task


class ParentFailed(Exception):
    """The parent's policy or world raised; the parent keeps what, under this number."""

    def __init__(self, number: int, told: str) -> None:
        super().__init__(told)
        self.number = number


class Parent:
    """The other end of the pipes, as one episode sees it: asked by any thread, answered by number."""

    def __init__(self, said: "Said", episode: int) -> None:
        self._said, self.episode, self.ended = said, episode, False
        self._numbers, self._asked = itertools.count(1), dict[int, Future[Any]]()
        self.failure: BaseException | None = None
        """Of a question whose answer nobody waits for: it ends the episode."""

    def ask(self, kind: str, *args: Any) -> "Future[Any]":
        """Raises `RuntimeError` once the episode has ended: a thread that lives on gets no answers of the next one."""
        if self.ended:
            raise RuntimeError("the episode of this thread has ended")
        self.check()
        number, future = next(self._numbers), Future[Any]()
        self._asked[number] = future
        self._said.tell(ask=kind, episode=self.episode, number=number, args=args)
        return future

    def tell(self, kind: str, *args: Any) -> None:
        """Ask, and go on: questions are heard in their order. Later ones raise what came of it, as `check` does."""
        self.ask(kind, *args).add_done_callback(self._keep_failure)

    def _keep_failure(self, told: "Future[Any]") -> None:
        self.failure = self.failure or told.exception()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def answer(self, number: int, value: Any, failed: str | None) -> None:
        """Nothing to do for an answer that was under way when the episode ended."""
        future = self._asked.pop(number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(value) if failed is None else future.set_exception(ParentFailed(number, failed))

    def end(self) -> None:
        self.ended = True
        for number in list(self._asked):
            self.answer(number, None, "the episode has ended")


class Said:
    """What is told to the parent: one line of JSON each, for the parent unpickles nothing."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe, self._writing = pipe, threading.Lock()

    def tell(self, **what: Any) -> None:
        line = _json(what) + b"\n"
        with self._writing:
            self._pipe.write(line)
            self._pipe.flush()


def _json(what: object) -> bytes:
    try:
        return to_json(what, fallback=str)
    except ValueError:  # half of a surrogate pair, which only the standard library writes
        return json.dumps(what, default=_plain).encode()


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


class ParentPolicy(BaseChatModel):
    """The policy, which is in the parent. A streamed reply comes in one chunk."""

    parent: Any
    _told: dict[str, int] = PrivateAttr(default_factory=dict)
    _telling: Any = PrivateAttr(default_factory=threading.Lock)

    @property
    def _llm_type(self) -> str:
        return "dreamgym-parent"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result: ChatResult = self._ask(messages, stop, kwargs).result()
        return result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result: ChatResult = await asyncio.wrap_future(self._ask(messages, stop, kwargs))
        return result

    def _ask(self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]) -> "Future[ChatResult]":
        """Each message is sent once, with a number, and is that number in later calls: a history grows by its end."""
        sent = list[Any]()
        with self._telling:
            told = self._told.copy()
            for message in messages:
                text = _json(message_to_dict(message)).decode()
                number = told.setdefault(text, len(told))
                sent.append((number, text) if number >= len(self._told) else number)
            future: Future[ChatResult] = self.parent.ask("policy", sent, stop, given)
            self._told = told
        return future


class ParentEnvironment(Environment):
    """The world, which is in the parent, and has been reset there."""

    def __init__(self, parent: Parent, first: str) -> None:
        self._parent, self._first = parent, first

    def reset(self, task: Task) -> str:
        return self._first

    def step(self, action: str) -> StepResult:
        result: StepResult = self._parent.ask("step", action).result()
        return result

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        answer: str | None = self._parent.ask("check_action", action, observations).result()
        return answer

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parent.tell("show_tools", tools)

    async def areset(self, task: Task) -> str:
        return self._first

    async def astep(self, action: str) -> StepResult:
        result: StepResult = await asyncio.wrap_future(self._parent.ask("step", action))
        return result


def main() -> None:
    """The worker's program: the agent and its options come first, then tasks and answers; it ends where its orders do."""
    orders, said = os.fdopen(os.dup(0), "rb"), Said(os.fdopen(os.dup(1), "wb"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the agent prints is no answer
    path, options = pickle.load(orders)
    try:
        graph, options = load_agent(path), _unpickled(options)
        options["allow"] = _with_scratch(options["allow"] or Allow())
    except Exception as error:
        failure = _failure(error)
        if _is_of_the_wall(error):
            failure["text"] += "; behind the wall nothing is written but what allow= names: do it in a tool, or allow it"
        return said.tell(**failure)
    said.tell(ready=True)
    loop = asyncio.new_event_loop()
    given = orders, said, loop, partial(SimulatedAgent, graph, **options)  # type: ignore[arg-type]
    threading.Thread(target=_obey, args=given, name="dreamgym-orders", daemon=True).start()
    while True:
        with contextlib.suppress(BaseException):  # SystemExit of an agent ends its episode alone
            loop.run_forever()


def _unpickled(options: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = pickle.loads(options)
    except Exception as error:
        raise ConfigurationError(
            f"a worker cannot import the functions that it was given ({type(error).__name__}: {error}): let them be of a "
            "module that can be imported without touching anything, such as the agent's own, or take isolation='guard'"
        ) from error
    return found


def _obey(orders: BinaryIO, said: Said, loop: asyncio.AbstractEventLoop, create: Callable[..., SimulatedAgent]) -> None:
    parents: dict[int, Parent] = {}
    with contextlib.suppress(EOFError):
        while True:
            order, episode, *given = pickle.load(orders)
            if order == "play":
                parents = {number: parent for number, parent in parents.items() if not parent.ended}
                parents[episode] = parent = Parent(said, episode)
                playing = _play(create(ParentPolicy(parent=parent, cache=False)), parent, said, *given)
                loop.call_soon_threadsafe(partial(loop.create_task, playing, context=Context()))
            elif episode in parents:
                parents[episode].answer(*given)
    os.killpg(0, signal.SIGKILL)  # with the children, and threads of the agent that may run for ever


def _with_scratch(allow: Allow) -> Allow:
    """What the guard lets through too: the scratch folder is this process's own, which `start_walled` made its `TMPDIR`."""
    return Allow(hosts=allow.hosts, paths=[*allow.paths, os.environ["TMPDIR"]])


async def _play(agent: SimulatedAgent, parent: Parent, said: Said, task: Task, first: str) -> None:
    told: dict[str, Any] = {}
    try:
        async for state in agent.astream({"task": task}, context=EpisodeContext(environment=ParentEnvironment(parent, first))):
            told["state"] = state
        parent.check()
        told["ended"] = True
    except BaseException as error:
        told |= _failure(error)
    parent.end()
    try:
        said.tell(episode=parent.episode, **told)
    except Exception as error:  # it cannot be written: the parent waits all the same
        said.tell(episode=parent.episode, **_failure(error))


def _failure(error: BaseException) -> dict[str, Any]:
    """What ended the episode; `number` is that of the parent's own error behind it."""
    behind: dict[int, BaseException] = {}
    following: BaseException | None = error
    while following is not None and id(following) not in behind:  # two may be each other's context
        behind[id(following)] = following
        following = following.__cause__ or following.__context__
    number = next((each.number for each in behind.values() if isinstance(each, ParentFailed)), None)
    name, text = type(error).__name__, str(error)
    if number is None and not isinstance(error, DreamGymError) and any(map(_is_of_the_wall, behind.values())):
        name, text = "AccessBlocked", f"the wall stopped {name}: {text}; allow it with allow=, or simulate it"
    return {"failed": name, "text": text, "number": number}


def _is_of_the_wall(error: BaseException) -> bool:
    """Whether this is how the kernel's refusal reaches Python; native libraries have it in the text alone."""
    refused = (os.strerror(errno.EACCES), os.strerror(errno.EPERM), "readonly database")  # the last is SQLite's
    return isinstance(error, PermissionError) or any(told.lower() in str(error).lower() for told in refused)
