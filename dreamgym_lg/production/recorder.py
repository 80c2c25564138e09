"""Records a real run of a graph by callbacks: its tool calls with their answers, and its end."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from pydantic_core import to_jsonable_python

from dreamgym_lg.actions import render_call
from dreamgym_lg.simulate.tools import as_text


@dataclass
class RecordedCall:
    """A tool call of a real run."""

    action: str
    """As `Step.action`."""
    answer: str = ""
    valid: bool = True
    id: str = ""
    """By which the model asked for it; empty for a call by hand."""


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
        self._read: dict[str, ToolMessage] = {}
        """The answers that the model reads, by call id: a tool node words the errors that tools raise."""
        self._replies: list[list[str]] = []
        """The ids of calls that one reply asks for."""

    @property
    def calls(self) -> list[RecordedCall]:
        """In the order in which they began; those of one reply in that of the reply, since they begin at once."""
        started = list(self._calls.values())
        again = {(call.id, call.action) for call in started if call.id and call.valid}  # a middleware's retry is the same call
        calls = [call for call in started if call.valid or (call.id, call.action) not in again]
        for call in calls:
            if not call.answer and (message := self._read.get(call.id)) is not None:
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
                self._read[message.tool_call_id] = message
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
    """Those of a node's output: a list of messages, or an update of the state with one in it."""
    for part in outputs.values() if isinstance(outputs, dict) else [outputs]:
        for each in part if isinstance(part, list) else [part]:
            if isinstance(each, AIMessage | ToolMessage):
                yield each
