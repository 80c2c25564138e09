"""Plays an episode in a walled worker process. Policy and environment stay in this process, the parent.

The worker sends lines of JSON, since unpickling could run code that it sent. The parent sends pickles. `N` numbers the
episodes of the worker, `K` the requests of an episode, of which several may be open:

    up      {"episode": N, "number": K, "ask": "policy", "args": [MESSAGES, STOP, OPTIONS]}    or "stream", for chunks
            {"episode": N, "number": K, "ask": "step", "args": [ACTION, TOOLS, PROMPT]}
    down    ("chunk", N, K, CHUNK), then ("answer", N, K, VALUE, None) or ("answer", N, K, None, ERROR)
    up      {"episode": N, "state": {...}, "ended": true}                          the last message of an episode
            {"episode": N, "state": {...}, "failed": TYPE, "text": TEXT, "number": K}    K: of the parent's error that caused it

An item of `MESSAGES` is `[number, text]`, or the number alone if it was sent before. `TOOLS` and `PROMPT` are None if unchanged
since the last step. `TYPE` is an error class of this library, or empty. The parent has reset the environment.
"""

import asyncio
import itertools
import json
import pickle
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import asdict, is_dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, BaseMessage, message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import PrivateAttr

from dreamgym_lg import errors
from dreamgym_lg.actions import is_answer, tool_schemas
from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.errors import EnvironmentFailed, RunStopped
from dreamgym_lg.rollout import Agent
from dreamgym_lg.simulate.agent import AgentState
from dreamgym_lg.simulate.models import bind_to
from dreamgym_lg.simulate.remote_messages import Message, read_error, read_message
from dreamgym_lg.text import clean
from dreamgym_lg.types import StepResult, Task
from dreamgym_lg.user_code import error_text


class ParentFailed(Exception):
    """The parent's policy or environment raised; the parent keeps the error under this number."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Parent:
    """The worker's connection to the parent for one episode, for any thread. Args: `write`, sends a line."""

    def __init__(self, write: Callable[[bytes], object], episode: int) -> None:
        self._write, self.episode, self.ended = write, episode, False
        self._numbers, self._requests = itertools.count(1), dict[int, Future[Any]]()
        self._on_chunk = dict[int, Callable[[Any], object]]()

    def ask(self, kind: str, *args: Any, on_chunk: Callable[[Any], object] | None = None) -> "Future[Any]":
        """Send a request to the parent. Args: `on_chunk`, called by the reading thread with each chunk of a streamed reply.

        Raises `RuntimeError` after the episode's end.
        """
        if self.ended:
            raise RuntimeError("the episode of this thread has ended")
        number, future = next(self._numbers), Future[Any]()
        self._requests[number] = future
        if on_chunk is not None:
            self._on_chunk[number] = on_chunk
        self._write(to_line(ask=kind, episode=self.episode, number=number, args=args))
        return future

    def chunk(self, number: int, chunk: Any) -> None:
        """Deliver a chunk of the parent's streamed reply."""
        if number in self._on_chunk:
            self._on_chunk[number](chunk)

    def answer(self, number: int, value: Any, error: str | None) -> None:
        """Deliver the parent's answer to a request; dropped after the episode's end."""
        future = self._requests.pop(number, None)
        self._on_chunk.pop(number, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(value) if error is None else future.set_exception(ParentFailed(number, error))

    def end(self, **message: Any) -> None:
        """Fail all open requests, and send the last message."""
        self.ended = True
        for number in list(self._requests):
            self.answer(number, None, "the episode has ended")
        try:
            line = to_line(episode=self.episode, **message)
        except Exception as error:  # not JSON, but the parent waits for a last message
            line = to_line(episode=self.episode, **failure_of(error))
        self._write(line)


def to_line(**message: Any) -> bytes:
    """A message as a line of JSON. The standard library also encodes lone surrogates."""
    return json.dumps(message, default=_as_json).encode() + b"\n"


def _as_json(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


class ParentPolicy(BaseChatModel):
    """The worker's stand-in for the policy, which is in the parent."""

    parent: Any
    _numbers: dict[str, int] = PrivateAttr(default_factory=dict)
    """JSON of each message that was sent -> its number: a growing history is not sent twice."""
    _sending: Any = PrivateAttr(default_factory=threading.Lock)

    @property
    def _llm_type(self) -> str:
        return "dreamgym-parent"

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        result: ChatResult = self._ask("policy", messages, stop, kwargs).result()
        return result

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        result: ChatResult = await asyncio.wrap_future(self._ask("policy", messages, stop, kwargs))
        return result

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        chunks = SimpleQueue[Any]()
        future = self._ask("stream", messages, stop, kwargs, chunks.put)
        future.add_done_callback(lambda _: chunks.put(None))
        while (chunk := chunks.get()) is not None:
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk
        future.result()

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def put(chunk: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        future = self._ask("stream", messages, stop, kwargs, put)
        future.add_done_callback(lambda _: put(None))
        while (chunk := await chunks.get()) is not None:
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk
        future.result()

    def _ask(
        self,
        kind: str,
        messages: list[BaseMessage],
        stop: list[str] | None,
        options: dict[str, Any],
        on_chunk: Callable[[Any], object] | None = None,
    ) -> "Future[Any]":
        items = list[Any]()
        with self._sending:
            numbers = self._numbers.copy()
            for message in messages:
                text = to_line(message=message_to_dict(message)).decode()
                number = numbers.setdefault(text, len(numbers))
                items.append((number, text) if number >= len(self._numbers) else number)
            future: Future[Any] = self.parent.ask(kind, items, stop, options, on_chunk=on_chunk)
            self._numbers = numbers
        return future


class ParentEnvironment(Environment):
    """The worker's stand-in for the environment, which is in the parent and already reset."""

    def __init__(self, parent: Parent, first_observation: str, has_user: bool) -> None:
        self._parent, self._first_observation, self.has_user = parent, first_observation, has_user
        self._tools: Sequence[Mapping[str, Any]] | None = None
        self._prompt: str | None = None

    def reset(self, task: Task) -> str:
        return self._first_observation

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools

    def show_prompt(self, text: str) -> None:
        self._prompt = text

    def step(self, action: str) -> StepResult:
        result: StepResult = self._ask(action).result()
        return result

    async def areset(self, task: Task) -> str:
        return self._first_observation

    async def astep(self, action: str) -> StepResult:
        result: StepResult = await asyncio.wrap_future(self._ask(action))
        return result

    def _ask(self, action: str) -> "Future[Any]":
        tools, prompt, self._tools, self._prompt = self._tools, self._prompt, None, None
        return self._parent.ask("step", action, tools, prompt)


def failure_of(error: BaseException) -> Message:
    """The fields of an episode's last message that describe the error that ended it.

    Only errors of this library keep their class; an error of the agent is sent as text.
    """
    number = next((each.number for each in errors_behind(error) if isinstance(each, ParentFailed)), None)
    name = type(error).__name__
    if getattr(errors, name, None) is type(error):
        return {"failed": name, "text": str(error), "number": number}
    return {"failed": "", "text": error_text(error), "number": number}


def errors_behind(error: BaseException) -> list[BaseException]:
    """The error and the chain of its causes and contexts."""
    chain: dict[int, BaseException] = {}
    current: BaseException | None = error
    while current is not None and id(current) not in chain:  # a chain may be a circle
        chain[id(current)] = current
        current = current.__cause__ or current.__context__
    return list(chain.values())


async def play_episode(
    parent: Parent,
    task: Task,
    create: Callable[[], tuple[Agent, Environment]],
    *,
    failure: Callable[[BaseException], Message],
) -> None:
    """Play one episode in the worker, and send the parent its last message."""
    message: Message = {}
    try:
        agent, environment = create()
        with closing(environment):
            context = EpisodeContext(environment=environment)
            async for state in agent.astream({"task": task}, context=context, stream_mode="values"):
                message["state"] = {name: state[name] for name in AgentState.__annotations__ if name in state}
        message["ended"] = True
    except BaseException as error:
        message |= failure(error)
    parent.end(**message)


class RemoteEpisode:
    """The parent's side of an episode in a worker. Requests are answered in a copy of this context, on this event loop.

    Args: `send`, takes pickled bytes to the worker.
    """

    def __init__(self, send: Callable[[bytes], object], number: int, policy: BaseChatModel, environment: Environment) -> None:
        self.loop, self._context = asyncio.get_running_loop(), copy_context()
        self.ended: asyncio.Future[Message] = self.loop.create_future()
        """Its last message."""
        self.unanswered = set[int]()
        self._send, self._number, self._errors = send, number, dict[int, Exception]()
        self._policy, self._environment, self._tasks = policy, environment, set[asyncio.Task[None]]()
        self._messages: dict[int, BaseMessage] = {}
        self._last: StepResult | None = None
        self._actions = Counter[str]()

    def hear(self, message: Message) -> None:
        """Handle a message of the worker. Raises `ValueError` if it is invalid."""
        message = read_message(message)
        if self.ended.done():
            return
        if "ask" not in message:
            self.ended.set_result(message)
            return
        number: int = message["number"]
        kinds: dict[str, Callable[..., Awaitable[Any]]]
        kinds = {"policy": self._reply, "stream": partial(self._stream, number), "step": self._step}
        answering = kinds[message["ask"]](*message["args"])
        self.unanswered.add(number)
        self._tasks.add(asyncio.create_task(self._answer(number, answering), context=self._context.copy()))

    async def _answer(self, number: int, answering: Awaitable[Any]) -> None:
        try:
            reply = pickle.dumps(("answer", self._number, number, await answering, None))
        except Exception as error:
            self._errors[number] = error
            reply = pickle.dumps(("answer", self._number, number, None, f"{type(error).__name__}: {error}"))
        self._send(reply)
        self.unanswered.discard(number)

    async def _stream(self, number: int, sent: list[Any], stop: list[str] | None, options: dict[str, Any]) -> None:
        messages, arguments = self._read_call(sent, options)
        async for chunk in self._policy.astream(messages, stop=stop, **arguments):
            if not isinstance(chunk, AIMessageChunk):  # a policy that does not stream
                chunk = AIMessageChunk(**chunk.model_dump(exclude={"type"}))
            self._send(pickle.dumps(("chunk", self._number, number, ChatGenerationChunk(message=chunk))))

    def _read_call(self, sent: list[Any], options: dict[str, Any]) -> tuple[list[BaseMessage], dict[str, Any]]:
        texts: dict[int, str] = dict(item for item in sent if isinstance(item, tuple))
        new = {number: clean(json.loads(text)["message"]) for number, text in texts.items()}
        self._messages.update(zip(new, messages_from_dict(list(new.values())), strict=True))
        arguments: dict[str, Any] = {name: options[name] for name in ("tool_choice", "response_format") if name in options}
        if tools := tool_schemas(options.get("tools") or ()):  # drops tools that would run at the provider
            arguments["tools"] = tools
        messages = [self._messages[item[0] if isinstance(item, tuple) else item] for item in sent]
        return messages, bind_to(self._policy, arguments)

    async def _reply(self, sent: list[Any], stop: list[str] | None, options: dict[str, Any]) -> ChatResult:
        (messages, arguments), policy = self._read_call(sent, options), self._policy
        has_listeners = AsyncCallbackManager.configure(None, policy.callbacks, policy.verbose).handlers
        if not has_listeners and type(policy).agenerate is BaseChatModel.agenerate:
            # the worker's `ParentPolicy` has already done what else `agenerate` does
            return await policy._agenerate_with_cache(messages, stop=stop, **arguments)
        result = await policy.agenerate([messages], stop=stop, **arguments)
        return ChatResult(generations=cast(list[ChatGeneration], result.generations[0]), llm_output=result.llm_output)

    async def _step(self, action: str, tools: list[dict[str, Any]] | None, prompt: str | None = None) -> StepResult:
        if tools is not None:
            self._environment.show_tools(tools)
        if prompt is not None:
            self._environment.show_prompt(prompt)
        self._actions[action] += 1
        self._last = await self._environment.astep(action)
        return self._last

    def end(self) -> None:
        """Stop answering."""
        self.ended.cancel()
        for each in self._tasks:
            each.cancel()

    def result(self) -> tuple[AgentState | None, Exception | None]:
        """The last state, and the error that ended the episode, if possible the parent's own."""
        message = self.ended.result()
        state: AgentState | None = message.get("state")
        if state is not None:
            state.setdefault("success", False)
        if stopped := next((each for each in self._errors.values() if isinstance(each, RunStopped)), None):
            return state, stopped  # also where the agent caught it
        return state, None if "ended" in message else read_error(message, self._errors)

    def contradiction(self, state: AgentState, *, verified: bool) -> EnvironmentFailed | None:
        """The error of an episode that claims more than its environment confirms; else None.

        Args: `verified`, the worker judges the outcome, so that only calls are checked.
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
