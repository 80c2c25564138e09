"""OpenTelemetry GenAI spans: OTLP as JSON, or a span a line, as the console exporters write them.

Read are the attributes of the semantic conventions (`gen_ai.input.messages` and the like), the span events that came
before them (`gen_ai.user.message`, `gen_ai.choice`), and LangSmith's `gen_ai.prompt` and `gen_ai.completion`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage, SystemMessage, ToolMessage

from dreamgym_lg.traces.calls import ModelCall, Part, ToolRun, around, asks_tools, best, by_trace, mean_score, moment, rebuilt
from dreamgym_lg.traces.messages import as_content, as_text, decoded, messages_of, recorded_tools, to_messages
from dreamgym_lg.traces.rows import Conversation, Rejected, TraceRow

_HOLDERS = ("resourceSpans", "batches", "scopeSpans", "instrumentationLibrarySpans", "spans")
_MODEL_CALLS = {"chat", "generate_content", "text_completion"}
_NO_RUN = {"create_agent", "embeddings"}  # often a trace of their own, in which no agent does anything
_EVENT_ROLES = {"system", "user", "assistant", "tool"}
_SCORE = "gen_ai.evaluation.score.value"


class _Span(NamedTuple):
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, Mapping[str, Any]]]
    failed: bool


def _operation(attributes: Mapping[str, Any]) -> str:
    """`chat`, `tool`, `none` for what is no part of a run, or `other`."""
    name = str(attributes.get("gen_ai.operation.name") or "")
    if name in _MODEL_CALLS:
        return "other" if attributes.get("langsmith.span.kind") == "prompt" else "chat"
    if name == "execute_tool" or (not name and "gen_ai.tool.call.id" in attributes):
        return "tool"
    if name in _NO_RUN:
        return "none"
    return "chat" if not name and any(key.startswith("gen_ai.") for key in attributes) else "other"


def is_span(value: object) -> bool:
    """True if a JSON value is a span or holds some."""
    if not isinstance(value, Mapping):
        return False
    return not value.keys().isdisjoint(_HOLDERS) or ("attributes" in value and bool(_trace(value)))


def conversations(rows: Iterator[TraceRow | Rejected]) -> Iterator[Conversation | Rejected]:
    """One conversation a trace, put together from its model and tool calls."""
    return by_trace(rows, _parts, _conversation)


def _parts(row: TraceRow) -> Iterator[tuple[str, Part]]:
    for fields in _spans(row.value):
        part = _read(row.line, fields)
        if part.kind != "none":
            yield _trace(fields), part


def _spans(value: object) -> Iterator[Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        raise ValueError("not a span: it is no JSON object")
    held = [value[key] for key in _HOLDERS if key in value]
    for children in held:
        for child in children if isinstance(children, list) else ():
            yield from _spans(child)
    if not held:
        yield value


def _read(line: int, fields: Mapping[str, Any]) -> Part:
    attributes = _plain_attributes(fields.get("attributes"))
    if attributes is None or not _trace(fields):
        raise ValueError("not a span: it has no trace id and attributes")
    events = [
        (str(event.get("name")), _plain_attributes(event.get("attributes")) or {})
        for event in _list(fields.get("events"))
        if isinstance(event, Mapping)
    ]
    start = next((fields[key] for key in ("startTimeUnixNano", "start_time_unix_nano", "start_time") if key in fields), None)
    status = fields.get("status")
    code = status.get("code", status.get("status_code")) if isinstance(status, Mapping) else None
    failed = code in (2, "STATUS_CODE_ERROR", "ERROR") or "error.type" in attributes
    ids = _text(fields, "spanId", "span_id"), _text(fields, "parentSpanId", "parent_span_id", "parent_id")
    return Part(line, *ids, moment(start), _operation(attributes), _Span(attributes, events, failed))


def _trace(fields: Mapping[str, Any]) -> str:
    return _text(fields, "traceId", "trace_id")


def _text(fields: Mapping[str, Any], *names: str) -> str:
    """The first of these that the span or its `context` has, as text."""
    context = fields.get("context")
    places = (fields, context) if isinstance(context, Mapping) else (fields,)
    return next((str(place[name]) for name in names for place in places if place.get(name)), "")


def _plain_attributes(recorded: object) -> dict[str, Any] | None:
    """Attributes by name, from OTLP's typed list or from a plain object."""
    if isinstance(recorded, Mapping):
        return dict(recorded)
    if not isinstance(recorded, list):
        return None
    pairs = [each for each in recorded if isinstance(each, Mapping) and "key" in each]
    return {str(each["key"]): _plain(each.get("value")) for each in pairs}


def _plain(value: Any) -> Any:
    """OTLP's typed value as it is in JSON."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [_plain(each) for each in _list(inner.get("values"))] if isinstance(inner, Mapping) else []
    if kind == "kvlistValue":
        return (_plain_attributes(inner.get("values")) or {}) if isinstance(inner, Mapping) else {}
    return int(inner) if kind == "intValue" and str(inner).lstrip("-").isdigit() else inner


def _conversation(trace: str, parts: Sequence[Part]) -> Conversation:
    calls = [_model_call(part.data) for part in parts if part.kind == "chat"]
    tools = [_tool_run(part.data) for part in parts if part.kind == "tool"]
    whole = [rebuilt(calls, tools)]
    if not asks_tools(whole[0]):
        # Some instrumentations know few models: left are the agent's question and answer, and what its tools were asked.
        agents = [around(_model_call(part.data), tools) for part in parts if part.kind == "other"]
        whole = [*agents, *whole] if tools else [*whole, *agents]
    score = mean_score(event.get(_SCORE) for part in parts for _, event in part.data.events)
    defined = [tool for part in parts for tool in recorded_tools(part.data.attributes.get("gen_ai.tool.definitions"))]
    return Conversation(parts[0].line, best(whole), {"score": score}, trace, defined)


def _model_call(span: _Span) -> ModelCall:
    attributes = {**span.attributes}
    for name, event in span.events:
        if name == "gen_ai.client.inference.operation.details":
            attributes |= event
    if "gen_ai.input.messages" in attributes or "gen_ai.output.messages" in attributes:
        system = _system(decoded(attributes.get("gen_ai.system_instructions")))
        prompt = to_messages(_list(attributes.get("gen_ai.input.messages")))
        return ModelCall([*system, *prompt], to_messages(_list(attributes.get("gen_ai.output.messages"))[:1]))
    if "gen_ai.prompt" in attributes:
        return ModelCall(
            messages_of(decoded(attributes["gen_ai.prompt"])), messages_of(decoded(attributes.get("gen_ai.completion")))
        )
    return ModelCall(*_of_events(span.events))


def _list(value: object) -> list[Any]:
    """A list, or what holds one as JSON; none for None."""
    value = decoded(value)
    if value is None or isinstance(value, list):
        return value or []
    raise ValueError(f"{str(value)[:40]!r} where a list should be")


def _system(instructions: object) -> list[BaseMessage]:
    parts = instructions if isinstance(instructions, list) else [instructions] if instructions else []
    texts = [str(part.get("content", "")) if isinstance(part, Mapping) else str(part) for part in parts]
    return [SystemMessage("\n\n".join(texts))] if texts else []


def _of_events(events: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[BaseMessage], list[BaseMessage]]:
    """Prompt and reply of a call, from one event a message (conventions up to 1.36)."""
    prompt: list[BaseMessage] = []
    reply: list[BaseMessage] = []
    for name, attributes in events:
        body = decoded(attributes.get("gen_ai.event.content"))
        body = {**attributes, **body} if isinstance(body, Mapping) else attributes
        role = name.removeprefix("gen_ai.").removesuffix(".message")
        if name == "gen_ai.choice" and not reply:
            message = decoded(body.get("message", body.get("content")))
            fields = message if isinstance(message, Mapping) else {"content": message}
            reply = _of_event("assistant", {"tool_calls": body.get("tool_calls"), **fields})
        elif name == f"gen_ai.{role}.message" and role in _EVENT_ROLES:
            prompt += _of_event(role, body)
    return prompt, reply


def _of_event(role: str, body: Mapping[str, Any]) -> list[BaseMessage]:
    content = body.get("content")
    structured = decoded(content)
    if isinstance(structured, list) and all(isinstance(part, Mapping) and "type" in part for part in structured):
        content = structured
    content = content if isinstance(content, list) else "" if content is None else as_text(content)
    if role == "tool":
        return [ToolMessage(content, tool_call_id=str(body.get("id") or body.get("tool_call_id") or ""))]
    fields = {"role": role, "content": content}
    calls = decoded(body.get("tool_calls"))
    return to_messages([{**fields, "tool_calls": calls} if role == "assistant" and calls else fields])


def _tool_run(span: _Span) -> ToolRun:
    attributes = span.attributes
    arguments = decoded(attributes.get("gen_ai.tool.call.arguments"))
    known = arguments if isinstance(arguments, Mapping) else None
    name, call_id = str(attributes.get("gen_ai.tool.name") or ""), str(attributes.get("gen_ai.tool.call.id") or "")
    result = attributes.get("gen_ai.tool.call.result", attributes.get("gen_ai.completion"))
    for message in messages_of(decoded(result)):  # LangChain's tools return the message itself
        if isinstance(message, ToolMessage):
            failed = span.failed or message.status == "error"
            return ToolRun(message.name or name, message.content, call_id or message.tool_call_id, failed, known)
    if result is None and span.failed:
        result = str(attributes.get("error.type") or "error")
    return ToolRun(name, as_content(result), call_id, span.failed, known)
