"""An episode in another process, a walled worker or a Ray actor, whose policy stays in this one, the parent.

What an episode asks of its parent is a call of the policy (messages, tools and other arguments, as OpenAI's form has them; a
message that was sent before is a number) and, where the world stays there too, the calls of `Environment` (step, show_tools;
its `reset` is called by the parent, before the episode).

What comes up is JSON, one line for each message: a walled worker is not trusted, and to unpickle is to run what was sent. What
goes down is pickled.
"""

import asyncio
import itertools
import json
import pickle
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, is_dataclass
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManager, AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import PrivateAttr
from pydantic_core import to_json

from dreamgym_lg import errors
from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.errors import DreamGymError, EnvironmentFailed
from dreamgym_lg.rollout import Agent
from dreamgym_lg.simulate.agent import AgentState
from dreamgym_lg.types import Act, Step, StepResult, Task

Message = dict[str, Any]

# --- in the other process ---------------------------------------------------------------------------------------------------


class ParentFailed(Exception):
    """The parent's policy or world raised; the parent keeps what, under this number."""

    def __init__(self, number: int, told: str) -> None:
        super().__init__(told)
        self.number = number


class Parent:
    """The other end, as one episode sees it: asked by any thread, answered by number.

    Args: `write`, takes a line of JSON to the parent.
    """

    def __init__(self, write: Callable[[bytes], object], episode: int) -> None:
        self._write, self.episode, self.ended = write, episode, False
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
        self._write(to_line(ask=kind, episode=self.episode, number=number, args=args))
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

    def end(self, **told: Any) -> None:
        """Nothing more is asked; the last message is `told`."""
        self.ended = True
        for number in list(self._asked):
            self.answer(number, None, "the episode has ended")
        try:
            line = to_line(episode=self.episode, **told)
        except Exception as error:  # it cannot be written: the parent waits all the same
            line = to_line(episode=self.episode, **failure_of(error))
        self._write(line)


def to_line(**message: Any) -> bytes:
    """A message as a line of JSON."""
    try:
        return to_json(message, fallback=str) + b"\n"
    except ValueError:  # half of a surrogate pair, which only the standard library writes
        return json.dumps(message, default=_plain).encode() + b"\n"


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
                text = to_line(message=message_to_dict(message)).decode()
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

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parent.tell("show_tools", tools)

    async def areset(self, task: Task) -> str:
        return self._first

    async def astep(self, action: str) -> StepResult:
        result: StepResult = await asyncio.wrap_future(self._parent.ask("step", action))
        return result


def failure_of(error: BaseException) -> Message:
    """What ended an episode; `number` is that of the parent's own error behind it."""
    number = next((each.number for each in errors_behind(error) if isinstance(each, ParentFailed)), None)
    return {"failed": type(error).__name__, "text": str(error), "number": number}


def errors_behind(error: BaseException) -> list[BaseException]:
    """The error, and what it was raised from or while handling."""
    behind: dict[int, BaseException] = {}
    following: BaseException | None = error
    while following is not None and id(following) not in behind:  # two may be each other's context
        behind[id(following)] = following
        following = following.__cause__ or following.__context__
    return list(behind.values())


async def play_episode(
    parent: Parent,
    task: Task,
    create: Callable[[], tuple[Agent, Environment]],
    *,
    failure: Callable[[BaseException], Message] = failure_of,
    **config: Any,
) -> None:
    """Play one episode, and tell the parent what came of it. Args: `config`, LangGraph's."""
    told: Message = {}
    try:
        agent, environment = create()
        with closing(environment):
            context = EpisodeContext(environment=environment)
            async for state in agent.astream({"task": task}, config, context=context, stream_mode="values"):
                told["state"] = {name: state[name] for name in AgentState.__annotations__ if name in state}
        parent.check()
        told["ended"] = True
    except BaseException as error:
        told |= failure(error)
    parent.end(**told)


# --- in the parent ----------------------------------------------------------------------------------------------------------


Answer = Callable[..., Awaitable[Any]]
"""What the parent does when it is asked, with the arguments that came."""


class RemoteEpisode:
    """An episode in another process, as its parent sees it: what it asks is answered as it comes, until it has ended.

    Args: `send`, takes a pickled answer to the other process; `number`, the episode's there.
    """

    def __init__(self, send: Callable[[bytes], object], number: int, answers: dict[str, Answer]) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.causes, self.unanswered = dict[int, Exception](), set[int]()
        self._send, self._number, self._answers, self._tasks = send, number, answers, set[asyncio.Task[None]]()

    def hear(self, message: Message) -> None:
        if self.ended.done():
            return
        if "ask" in message:
            self.unanswered.add(message["number"])
            self._tasks.add(asyncio.create_task(self._answer(message)))
        else:
            self.ended.set_result(message)

    async def _answer(self, message: Message) -> None:
        asked = message["number"]
        try:
            value = await self._answers[message["ask"]](*message["args"])
            order = pickle.dumps(("answer", self._number, asked, value, None))
        except Exception as error:
            self.causes[asked] = error
            order = pickle.dumps(("answer", self._number, asked, None, f"{type(error).__name__}: {error}"))
        self._send(order)
        self.unanswered.discard(asked)

    def end(self) -> None:
        self.ended.cancel()
        for each in self._tasks:
            each.cancel()


def answers_of(policy: BaseChatModel, environment: Environment | None) -> dict[str, Answer]:
    """All that an episode can ask for. Args: `environment`, None where the other process has its own."""
    heard: dict[int, BaseMessage] = {}
    listeners = AsyncCallbackManager.configure(None, policy.callbacks, policy.verbose).handlers
    bare = not listeners and type(policy).agenerate is BaseChatModel.agenerate
    """Nothing is lost without `agenerate`, whose work is done in the other process already, around its `ParentPolicy`."""

    async def reply(sent: list[Any], stop: list[str] | None, given: dict[str, Any]) -> ChatResult:
        arguments = {name: given[name] for name in ("tools", "tool_choice", "response_format") if name in given}
        new = {number: json.loads(text)["message"] for number, text in (each for each in sent if isinstance(each, list))}
        heard.update(zip(new, messages_from_dict(list(new.values())), strict=True))
        asked = [heard[each[0] if isinstance(each, list) else each] for each in sent]
        if bare:
            return await policy._agenerate_with_cache(asked, stop=stop, **arguments)
        result = await policy.agenerate([asked], stop=stop, **arguments)
        return ChatResult(generations=cast(list[ChatGeneration], result.generations[0]), llm_output=result.llm_output)

    if environment is None:
        return {"policy": reply}

    async def show_tools(tools: list[dict[str, Any]]) -> None:
        environment.show_tools(tools)

    return {"policy": reply, "step": environment.astep, "show_tools": show_tools}


def read_state(message: Message) -> AgentState | None:
    """What was played, by the last message; None if nothing was."""
    if (sent := message.get("state")) is None:
        return None
    read: AgentState = {"steps": [Step(**step) for step in sent.get("steps", ())], "success": sent.get("success", False)}
    return read | {"acts": [Act(*act) for act in sent["acts"]]} if "acts" in sent else read


def read_error(message: Message, causes: Mapping[int, Exception], where: str) -> Exception:
    """What ended the episode: the parent's own error where that is behind it, else one of this library's.

    Args: `where`, what played the episode.
    """
    if message["number"] in causes:
        return causes[message["number"]]
    kind = getattr(errors, message["failed"], None)
    if isinstance(kind, type) and issubclass(kind, DreamGymError):
        return kind(message["text"])
    return EnvironmentFailed(f"in {where}: {message['failed']}: {message['text']}")
