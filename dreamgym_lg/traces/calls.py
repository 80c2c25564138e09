"""Puts a conversation together from the model and tool calls of one trace."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage

from dreamgym_lg.traces.conversation import ParsedConversation, linked
from dreamgym_lg.traces.rows import Conversation, Rejected, TraceRow


@dataclass(frozen=True)
class ModelCall:
    """One call of a chat model: its prompt and its reply (empty if it failed)."""

    prompt: Sequence[BaseMessage]
    reply: Sequence[BaseMessage]


@dataclass(frozen=True)
class ToolRun:
    """One run of a tool."""

    name: str
    content: str | None
    """Its return value as text; None if not recorded."""
    call_id: str = ""
    """The call that it answers; "" if unknown."""
    error: bool = False
    arguments: Mapping[str, Any] | None = None
    """Its arguments; None if not recorded."""


class Part(NamedTuple):
    """A part of a trace: a LangSmith run, an OpenTelemetry span."""

    line: int
    id: str
    parent: str
    start: float
    """Seconds since 1970."""
    kind: str
    """`tool` for a tool's run; others as its format has them."""
    data: Any


def by_trace(
    rows: Iterable[TraceRow | Rejected],
    parts: Callable[[TraceRow], Iterable[tuple[str, Part]]],
    conversation: Callable[[str, Sequence[Part]], Conversation],
) -> Iterator[Conversation | Rejected]:
    """One conversation a trace, and the rows and traces that cannot be read.

    Args: `parts`, of a row, each with its trace; `conversation`, of a trace and its parts in the order of their start, without
    what tools called. Both raise `ValueError` for what cannot be read.
    """
    traces: dict[str, list[Part]] = {}
    for row in rows:
        if isinstance(row, Rejected):
            yield row
            continue
        try:
            for trace, part in list(parts(row)):
                traces.setdefault(trace, []).append(part)
        except ValueError as error:
            yield Rejected(row.line, f"{row.place}{error}")
    for trace in list(traces):
        recorded = traces.pop(trace)
        known = {part.id: part for part in recorded if part.id}
        outer = [part for part in recorded if not _inside_tool(part, known)]
        try:
            yield conversation(trace, sorted(outer or recorded, key=lambda part: part.start))
        except ValueError as error:
            yield Rejected(recorded[0].line, f"trace {trace}: {error}")


def _inside_tool(part: Part, known: Mapping[str, Part]) -> bool:
    """True for a call that a tool made, such as a sub-agent."""
    passed = {part.id}
    while (parent := known.get(part.parent)) and parent.id not in passed:
        if parent.kind == "tool":
            return True
        passed.add(parent.id)
        part = parent
    return False


def join_calls(calls: Iterable[ModelCall], tools: Iterable[ToolRun]) -> list[BaseMessage]:
    """Join model calls, in the order of their start, to their longest conversation. Tool runs give missing answers.

    A call goes on with the conversation whose last reply it was shown, whatever was trimmed before it. So the calls of a
    router, a guard or another agent in the same trace stay apart.
    """
    held: list[list[BaseMessage]] = []
    for call in calls:
        for messages in reversed(held):
            if (new := _new_messages(messages, call.prompt)) is not None:
                messages += [*new, *call.reply]
                break
        else:
            held.append([*call.prompt, *call.reply])
    return _completed(max(held, key=len, default=[]), tools)


def has_calls(messages: Iterable[BaseMessage]) -> bool:
    return any(isinstance(message, AIMessage) and message.tool_calls for message in messages)


def join_runs(agent: ModelCall, tools: Sequence[ToolRun]) -> list[BaseMessage]:
    """Join an agent's prompt, tool runs and answer, where its model calls were not recorded.

    Empty if its messages leave the calls out and a tool's arguments are unknown: that would be another conversation.
    """
    whole = [*agent.prompt, *agent.reply]
    if has_calls(whole):
        return _completed(whole, tools)
    messages = list(agent.prompt)
    for number, run in enumerate(tools):
        if run.arguments is None or run.content is None:
            return []
        call_id, status = run.call_id or f"run {number}", "error" if run.error else "success"
        call = {"name": run.name, "args": dict(run.arguments), "id": call_id}
        messages += [AIMessage("", tool_calls=[call]), ToolMessage(run.content, tool_call_id=call_id, status=status)]
    return [*messages, *agent.reply]


def _new_messages(messages: Sequence[BaseMessage], prompt: Sequence[BaseMessage]) -> Sequence[BaseMessage] | None:
    """The messages that `prompt` adds to the conversation so far. None if it belongs to another one."""
    last = next((message for message in reversed(messages) if isinstance(message, AIMessage)), None)
    if last is None:
        return None
    for position in range(len(prompt) - 1, -1, -1):
        if _words_and_calls(prompt[position]) == _words_and_calls(last):
            return prompt[position + 1 :]
    # A provider that keeps the history is sent the tools' answers alone.
    return prompt if prompt and all(isinstance(message, ToolMessage) for message in prompt) else None


def _words_and_calls(message: BaseMessage) -> tuple[str, list[tuple[str, dict[str, Any]]]] | None:
    if not isinstance(message, AIMessage):
        return None
    return message.text, [(call["name"], call["args"]) for call in message.tool_calls]


def _completed(messages: Sequence[BaseMessage], tools: Iterable[ToolRun]) -> list[BaseMessage]:
    """The conversation, with missing tool answers taken from the tools' own runs."""
    left, result, whole = [run for run in tools if run.content is not None], list[BaseMessage](), linked(messages)
    answered = {message.tool_call_id for message in whole if isinstance(message, ToolMessage)}
    for message in whole:
        result.append(message)
        for call in message.tool_calls if isinstance(message, AIMessage) else ():
            run = next((run for run in left if run.call_id == call["id"]), None)
            run = run or next((run for run in left if not run.call_id and run.name == call["name"]), None)
            if run:
                left.remove(run)
            if run and call["id"] not in answered:
                status = "error" if run.error else "success"
                result.append(ToolMessage(run.content or "", tool_call_id=call["id"] or "", status=status))
    return result


def add_system(messages: Sequence[BaseMessage], called: Sequence[BaseMessage]) -> list[BaseMessage]:
    """A graph's messages with the system messages of the `called` model. `create_agent` keeps its own out of the state."""
    state, prompt = ([*takewhile(lambda each: isinstance(each, SystemMessage), each)] for each in (messages, called))
    return [*prompt, *messages[len(state) :]] if messages and len(prompt) > len(state) else list(messages)


def best(candidates: Iterable[Sequence[BaseMessage]]) -> list[BaseMessage]:
    """Choose among readings of one trace. The first that ends in an answer, else the longest that can be read.

    Raises `ValueError` if none can be read.
    """
    readable: list[list[BaseMessage]] = []
    problem: ValueError | None = None
    for messages in filter(None, candidates):
        try:
            if ParsedConversation.parse(messages).ended:
                return list(messages)
            readable.append(list(messages))
        except ValueError as error:
            problem = problem or error
    if readable:
        return max(readable, key=len)
    raise problem or ValueError("no model call with messages is in it (were inputs and outputs recorded?)")


def timestamp(value: object) -> float:
    """Seconds since 1970 of a start time, in nanoseconds or as an ISO date. 0 for None.

    Raises `ValueError` for anything else.
    """
    if value is None:
        return 0.0
    try:
        if isinstance(value, int) or str(value).isdigit():
            return (value if isinstance(value, int) else int(str(value))) / 1e9
        date = datetime.fromisoformat(str(value))
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"start time {str(value)[:40]!r} is neither nanoseconds since 1970 nor an ISO date") from error
