"""Records the real runs of a graph by callbacks: tool calls, answers, the end."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.pregel import Pregel
from pydantic_core import to_jsonable_python

from dreamgym_lg.actions import render_call
from dreamgym_lg.simulate.agent import derive
from dreamgym_lg.simulate.context import aiterate_in_episode, guarded_episode, iterate_in_episode
from dreamgym_lg.simulate.episode import AgentEpisode
from dreamgym_lg.simulate.tools import as_text

Graph = TypeVar("Graph", bound=Pregel)


@dataclass
class RecordedCall:
    """A tool call of a real run."""

    action: str
    """As `Step.action`."""
    answer: str = ""
    valid: bool = True
    id: str = ""
    """The model's id of the call; empty for a call by hand."""


class Recorder(BaseCallbackHandler):
    """Listens to one run; nothing of the graph, its models and its tools is replaced."""

    run_inline = True
    ignore_llm = ignore_chat_model = ignore_retriever = True  # `ignore_agent` is of tools, too

    def __init__(self) -> None:
        self.state: Any = None
        """The run's output, whatever was streamed; None until it has ended."""
        self.ended = self.interrupted = False
        self._root: UUID | None = None
        self._calls: dict[UUID, RecordedCall] = {}
        self._messages: dict[str, ToolMessage] = {}
        """The answers that the model reads, by call id: a tool node words the errors that tools raise."""
        self._replies: list[list[str]] = []
        """The ids of calls that one reply asks for."""

    @property
    def calls(self) -> list[RecordedCall]:
        """Calls in the order in which they began; of one reply, in the reply's."""
        started = list(self._calls.values())
        again = {(call.id, call.action) for call in started if call.id and call.valid}  # a middleware's retry is the same call
        calls = [call for call in started if call.valid or (call.id, call.action) not in again]
        for call in calls:
            if not call.answer and (message := self._messages.get(call.id)) is not None:
                call.answer = as_text(message)
        for ids in self._replies:
            places = [place for place, call in enumerate(calls) if call.id in ids]
            ordered = sorted((calls[place] for place in places), key=lambda call: ids.index(call.id))
            for place, call in zip(places, ordered, strict=True):
                calls[place] = call
        return calls

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: UUID, **_: Any) -> None:
        self._root = self._root or run_id

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        for message in _messages(outputs):
            if isinstance(message, ToolMessage):
                self._messages[message.tool_call_id] = message
            elif len(message.tool_calls) > 1:
                self._replies.append([str(call["id"]) for call in message.tool_calls])
        if run_id == self._root:
            self.state, self.ended = outputs, True

    def on_chain_error(self, error: BaseException, **_: Any) -> None:
        self.interrupted |= isinstance(error, GraphInterrupt)

    def on_tool_start(
        self, serialized: Mapping[str, Any] | None, input_str: str, *, run_id: UUID, inputs: Any = None, **more: Any
    ) -> None:
        arguments = inputs if isinstance(inputs, dict) else {"input": input_str}
        action = render_call(str((serialized or {}).get("name", "")), to_jsonable_python(arguments, fallback=str))
        self._calls[run_id] = RecordedCall(action, id=more.get("tool_call_id") or "")

    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        call = self._calls[run_id]
        call.answer, call.valid = as_text(output), getattr(output, "status", "success") != "error"

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self.interrupted |= isinstance(error, GraphInterrupt)
        self._calls[run_id].valid = isinstance(error, GraphBubbleUp)  # a handoff leaves by one


def _messages(outputs: Any) -> Iterator[AIMessage | ToolMessage]:
    """Messages of a node's output, a list or an update of the state."""
    for part in outputs.values() if isinstance(outputs, dict) else [outputs]:
        for each in part if isinstance(part, list) else [part]:
            if isinstance(each, AIMessage | ToolMessage):
                yield each


class RealRun(NamedTuple):
    """A run of a graph in production."""

    thread: str
    """Its `thread_id`, or that of a run around it. A run without one has an id of its own."""
    configurable: Mapping[str, Any]
    """The graph's own values, the run's, and those of a run around it."""
    input: Any
    arguments: Mapping[str, Any]
    recorder: Recorder
    loop: asyncio.AbstractEventLoop | None
    """The event loop of an asynchronous run."""


class Observer(Protocol):
    """Sees each run of a graph. Beside an asynchronous run, `begin` and `end` are called in other threads."""

    def begin(self, graph: Pregel, run: RealRun) -> AgentEpisode | None:
        """The episode whose policy plays the run; None: production plays."""

    def fail(self, run: RealRun) -> None:
        """The run raised."""

    def end(self, run: RealRun) -> None:
        """The run was streamed to its end."""


def observed(graph: Graph, observer: Observer) -> Graph:
    """The same graph with an observer of its runs. Runs in a dream, or of another graph's policy, are left alone."""

    def stream(served: Pregel, play: Any, input: Any, config: RunnableConfig | None = None, **more: Any) -> Iterator[Any]:
        if guarded_episode() is not None:
            yield from play(input, config, **more)
            return
        run, heard = _record(served, config, input, more, None)
        episode, chunks = observer.begin(served, run), play(input, heard, **more)
        with _failures_seen(observer, run):
            yield from iterate_in_episode(chunks, episode) if episode else chunks
        observer.end(run)

    async def astream(
        served: Pregel, play: Any, input: Any, config: RunnableConfig | None = None, **more: Any
    ) -> AsyncIterator[Any]:
        if guarded_episode() is not None:
            async for chunk in play(input, config, **more):
                yield chunk
            return
        run, heard = _record(served, config, input, more, asyncio.get_running_loop())
        episode = await asyncio.to_thread(observer.begin, served, run)
        chunks = play(input, heard, **more)
        with _failures_seen(observer, run):
            own: Any = aiterate_in_episode(chunks, episode) if episode else chunks
            async with aclosing(own):
                async for chunk in own:
                    yield chunk
        await asyncio.to_thread(observer.end, run)

    return derive(graph, stream, astream)


@contextmanager
def _failures_seen(observer: Observer, run: RealRun) -> Iterator[None]:
    """A run that raises has failed; one that stops for a person has not."""
    try:
        yield
    except GraphBubbleUp:
        raise
    except Exception:
        observer.fail(run)
        raise


def _record(
    graph: Pregel,
    config: RunnableConfig | None,
    input: Any,
    arguments: Mapping[str, Any],
    loop: asyncio.AbstractEventLoop | None,
) -> tuple[RealRun, RunnableConfig]:
    """The run, and its own config with the recorder among its callbacks."""
    recorder, config = Recorder(), config or {}
    outer = (var_child_runnable_config.get() or {}).get("configurable") or {}
    own = {**((graph.config or {}).get("configurable") or {}), **(config.get("configurable") or {})}
    thread = own.get("thread_id", outer.get("thread_id"))
    callbacks = config.get("callbacks") or []
    if isinstance(callbacks, BaseCallbackManager):
        callbacks = callbacks.copy()
        callbacks.add_handler(recorder)
    else:
        callbacks = [*callbacks, recorder]
    merged = {**{key: value for key, value in outer.items() if not is_langgraphs(key)}, **own}
    run = RealRun(uuid4().hex if thread is None else str(thread), merged, input, arguments, recorder, loop)
    return run, {**config, "callbacks": callbacks}


def is_langgraphs(key: str) -> bool:
    """True for LangGraph's own keys, which say whose checkpoints a run reads and writes."""
    return key.startswith("__") or key in ("thread_id", "checkpoint_id", "checkpoint_ns", "checkpoint_map")
