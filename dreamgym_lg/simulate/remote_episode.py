"""Plays an episode in another process (a walled worker, a Ray actor), whose policy stays in this one, the parent.

What comes up is a line of JSON for each message: a walled worker is not trusted, and to unpickle is to run what was sent. What
goes down is pickled. `N` numbers the episodes of the process, `K` the questions of an episode, which may be open at once:

    up      {"episode": N, "number": K, "ask": "policy", "args": [MESSAGES, STOP, OPTIONS]}
            {"episode": N, "number": K, "ask": "step", "args": [ACTION, TOOLS, PROMPT]}   where the world is in the parent, too
    down    ("answer", N, K, VALUE, None) or ("answer", N, K, None, ERROR)
    up      {"episode": N, "state": {...}, "ended": true}                          the last message of an episode
            {"episode": N, "state": {...}, "failed": TYPE, "text": TEXT, "number": K}    K: of the parent's own error behind it

`TOOLS` are what the agent was offered since the step before; `TYPE` is one of this library's own errors, or empty. The parent
has reset the world before.
"""

import asyncio
import itertools
import json
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from contextvars import copy_context
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage, message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from dreamgym_lg import errors
from dreamgym_lg.actions import is_answer
from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.errors import DreamGymError, EnvironmentFailed, RunStopped
from dreamgym_lg.rollout import Agent
from dreamgym_lg.simulate.agent import AgentState
from dreamgym_lg.text import clean, printable
from dreamgym_lg.types import StepResult, Task

Message = dict[str, Any]

# --- in the other process ---------------------------------------------------------------------------------------------------


class ParentFailed(Exception):
    """The parent's policy or world raised; the parent keeps the error under this number."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Parent:
    """The other end, as one episode sees it: asked by any thread, answered by number.

    Args: `write`, takes a line of JSON to the parent.
    """

    def __init__(self, write: Callable[[bytes], object], episode: int) -> None:
        self._write, self.episode, self.ended = write, episode, False
        self._numbers, self._questions = itertools.count(1), dict[int, Future[Any]]()

    def ask(self, kind: str, *args: Any) -> "Future[Any]":
        """Ask the parent. Raises `RuntimeError` after the episode's end: its threads get no answers of the next one."""
        if self.ended:
            raise RuntimeError("the episode of this thread has ended")
        number, future = next(self._numbers), Future[Any]()
        self._questions[number] = future
        self._write(to_line(ask=kind, episode=self.episode, number=number, args=args))
        return future

    def answer(self, number: int, value: Any, error: str | None) -> None:
        """Deliver the parent's answer to a question; dropped after the episode's end."""
        future = self._questions.pop(number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(value) if error is None else future.set_exception(ParentFailed(number, error))

    def end(self, **message: Any) -> None:
        """Send the last message; nothing more is asked."""
        self.ended = True
        for number in list(self._questions):
            self.answer(number, None, "the episode has ended")
        try:
            line = to_line(episode=self.episode, **message)
        except Exception as error:  # it cannot be written: the parent waits all the same
            line = to_line(episode=self.episode, **failure_of(error))
        self._write(line)


def to_line(**message: Any) -> bytes:
    """A message as a line of JSON, by the standard library: it also writes half of a surrogate pair."""
    return json.dumps(message, default=_as_json).encode() + b"\n"


def _as_json(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


class ParentPolicy(BaseChatModel):
    """The policy, which is in the parent."""

    parent: Any

    @property
    def _llm_type(self) -> str:
        return "dreamgym-parent"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        result: ChatResult = self._ask(messages, stop, kwargs).result()
        return result

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        result: ChatResult = await asyncio.wrap_future(self._ask(messages, stop, kwargs))
        return result

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        """The reply as one chunk: in a dream nobody reads along."""
        message = self._generate(messages, stop, **kwargs).generations[0].message
        chunk = ChatGenerationChunk(message=AIMessageChunk(**message.model_dump(exclude={"type"})))
        if run_manager is not None:
            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
        yield chunk

    def _ask(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> "Future[Any]":
        future: Future[Any] = self.parent.ask("policy", [message_to_dict(each) for each in messages], stop, options)
        return future


class ParentEnvironment(Environment):
    """The world, which is in the parent, and has been reset there."""

    def __init__(self, parent: Parent, first: str, has_user: bool) -> None:
        self._parent, self._first, self.has_user = parent, first, has_user
        self._tools: Sequence[Mapping[str, Any]] | None = None
        self._prompt: str | None = None

    def reset(self, task: Task) -> str:
        return self._first

    async def areset(self, task: Task) -> str:
        return self._first

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools

    def show_prompt(self, text: str) -> None:
        self._prompt = text

    def step(self, action: str) -> StepResult:
        result: StepResult = self._ask(action).result()
        return result

    async def astep(self, action: str) -> StepResult:
        result: StepResult = await asyncio.wrap_future(self._ask(action))
        return result

    def _ask(self, action: str) -> "Future[Any]":
        tools, prompt, self._tools, self._prompt = self._tools, self._prompt, None, None
        return self._parent.ask("step", action, tools, prompt)


def failure_of(error: BaseException) -> Message:
    """The part of an episode's last message that says what ended it: one of this library's errors by name, else by text."""
    number = next((each.number for each in errors_behind(error) if isinstance(each, ParentFailed)), None)
    name = type(error).__name__
    is_own = getattr(errors, name, None) is type(error)  # the agent's own may have the same name
    return {"failed": name if is_own else "", "text": str(error) if is_own else f"{name}: {error}", "number": number}


def errors_behind(error: BaseException) -> list[BaseException]:
    """The error, and what it was raised from or while handling."""
    behind = [error]
    while (following := behind[-1].__cause__ or behind[-1].__context__) is not None:
        if any(following is each for each in behind):  # two may be each other's context
            break
        behind.append(following)
    return behind


async def play_episode(
    parent: Parent,
    task: Task,
    create: Callable[[], tuple[Agent, Environment]],
    *,
    failure: Callable[[BaseException], Message] = failure_of,
    **config: Any,
) -> None:
    """Play one episode, and send the parent its last message. Args: `config`, LangGraph's."""
    message: Message = {}
    try:
        agent, environment = create()
        with closing(environment):
            context = EpisodeContext(environment=environment)
            async for state in agent.astream({"task": task}, config, context=context, stream_mode="values"):
                message["state"] = {name: state[name] for name in AgentState.__annotations__ if name in state}
        message["ended"] = True
    except BaseException as error:
        message |= failure(error)
    parent.end(**message)


# --- in the parent ----------------------------------------------------------------------------------------------------------


class RemoteEpisode:
    """An episode in another process, whose questions are answered in this context and event loop.

    Args: `send`, takes a pickled answer there; `number`, the episode's there; `environment`, None where it has its own there.
    """

    def __init__(
        self, send: Callable[[bytes], object], number: int, policy: BaseChatModel, environment: Environment | None
    ) -> None:
        self.loop, self._context = asyncio.get_running_loop(), copy_context()
        self.ended: asyncio.Future[Message] = self.loop.create_future()
        """Its last message."""
        self.unanswered = set[int]()
        self._send, self._number, self._errors = send, number, dict[int, Exception]()
        self._policy, self._environment, self._tasks = policy, environment, set[asyncio.Task[None]]()
        self._last: StepResult | None = None
        self._actions = Counter[str]()

    def hear(self, message: Message) -> None:
        message = read_message(message)
        if not self.ended.done() and "ask" in message:
            number, args = message["number"], message["args"]
            answering: Awaitable[Any] = (self._reply if message["ask"] == "policy" else self._step)(*args)
            self.unanswered.add(number)
            self._tasks.add(asyncio.create_task(self._answer(number, answering), context=self._context.copy()))
        elif not self.ended.done():
            self.ended.set_result(message)

    async def _answer(self, number: int, answering: Awaitable[Any]) -> None:
        try:
            order = pickle.dumps(("answer", self._number, number, await answering, None))
        except Exception as error:
            self._errors[number] = error
            order = pickle.dumps(("answer", self._number, number, None, f"{type(error).__name__}: {error}"))
        self._send(order)
        self.unanswered.discard(number)

    async def _reply(self, sent: list[Any], stop: list[str] | None, options: dict[str, Any]) -> ChatResult:
        messages = messages_from_dict(sent)
        arguments: Any = {name: options[name] for name in ("tools", "tool_choice", "response_format") if name in options}
        policy = self._policy
        has_listeners = AsyncCallbackManager.configure(None, policy.callbacks, policy.verbose).handlers
        if not has_listeners and type(policy).agenerate is BaseChatModel.agenerate:
            # `agenerate` did its work in the other process already, around its `ParentPolicy`
            return await policy._agenerate_with_cache(messages, stop=stop, **arguments)
        result = await policy.agenerate([messages], stop=stop, **arguments)
        return ChatResult(generations=cast(list[ChatGeneration], result.generations[0]), llm_output=result.llm_output)

    async def _step(self, action: str, tools: list[dict[str, Any]] | None, prompt: str | None = None) -> StepResult:
        if self._environment is None:
            raise EnvironmentFailed("an episode with a world of its own asked for the parent's")
        if tools is not None:
            self._environment.show_tools(tools)
        if prompt is not None:
            self._environment.show_prompt(prompt)
        self._actions[action] += 1
        self._last = await self._environment.astep(action)
        return self._last

    def end(self) -> None:
        """Answer nothing more."""
        self.ended.cancel()
        for each in self._tasks:
            each.cancel()

    def result(self, where: str) -> tuple[AgentState | None, Exception | None]:
        """The played state, and the error that ended the episode: the parent's own where one is behind.

        Args: `where`, what played the episode.
        """
        message = self.ended.result()
        state: AgentState | None = message.get("state")
        if state is not None:
            state.setdefault("success", False)
        ends_runs = self._environment is None  # a world of its own may end the run; an agent alone ends its episode
        return state, None if "ended" in message else read_error(message, where, self._errors, ends_runs=ends_runs)

    def contradiction(self, state: AgentState, *, verified: bool) -> EnvironmentFailed | None:
        """An error for calls that the world was never asked, and an outcome that it has not given.

        Args: `verified`, the other process judges the outcome, with a function that this one has not.
        """
        calls = Counter(step.action for step in state.get("steps", ()) if step.valid)
        if invented := [action for action in calls - self._actions if not is_answer(action)]:
            return EnvironmentFailed(
                f"the agent's process claims the call {invented[0][:200]!r}, and its world had no such one"
            )
        if verified:
            return None
        claimed = state["steps"][-1].reward if state.get("steps") else 0.0, state.get("success", False)
        from_world = (0.0, False) if self._last is None else (self._last.reward, bool(self._last.info.get("success", False)))
        if not any(claimed) or claimed == from_world:
            return None
        return EnvironmentFailed(f"the agent's process claims (reward, success) {claimed}, and its world gave {from_world}")


class _Sent(TypedDict, total=False):
    """The parts of every message, of which one asks, ends, or says what failed."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    episode: int
    number: int | None
    ask: Literal["policy", "step"]
    args: list[Any]
    state: AgentState
    ended: Literal[True]
    failed: str
    text: str


_SENT: TypeAdapter[Any] = TypeAdapter(_Sent)
_ARGUMENTS = {
    "policy": TypeAdapter[Any](tuple[list[dict[str, Any]], list[str] | None, dict[str, Any]]),
    "step": TypeAdapter[Any](tuple[str, list[dict[str, Any]] | None, str | None]),
}
_NEEDED = {"ask": {"number", "args"}, "ended": set[str](), "failed": {"number", "text"}}


def read_message(sent: Any) -> Message:
    """A message of the other process, its types and ranges checked. Raises `ValueError` for what is none."""
    message: Message = _SENT.validate_python(clean(sent))
    if "ask" in message:
        message["args"] = _ARGUMENTS[message["ask"]].validate_python(message.get("args"))
    rewards = [step.reward for step in message.get("state", {}).get("steps", ())]
    if (message.get("number") or 1) < 1 or not all(-1 <= reward <= 1 for reward in rewards):
        raise ValueError(f"its number {message.get('number')} or one of its rewards {rewards} is outside of its range")
    if [needed <= message.keys() for kind, needed in _NEEDED.items() if kind in message] != [True]:
        raise ValueError(f"no message: {', '.join(message)}")
    return message


def read_error(message: Message, where: str, own: Mapping[int, Exception], *, ends_runs: bool = False) -> Exception:
    """The error of a message: by its number one of `own`, else this library's. Args: `ends_runs`, a `RunStopped` is one."""
    if message["number"] in own:
        return own[message["number"]]
    kind = getattr(errors, message["failed"] or "-", None)
    if isinstance(kind, type) and issubclass(kind, DreamGymError) and (ends_runs or not issubclass(kind, RunStopped)):
        return kind(printable(message["text"]))
    return EnvironmentFailed(f"in {where}: {printable(message['text'])}")
