"""OpenTelemetry spans of agents. OTLP as JSON, or a span a line, as the console exporters and Phoenix write them.

Read are the attributes of the GenAI conventions (`gen_ai.input.messages` and the like), the span events that came before them
(`gen_ai.user.message`, `gen_ai.choice`), LangSmith's and OpenLLMetry's `gen_ai.prompt` and `gen_ai.completion`, OpenInference's
`llm.input_messages`, Langfuse's, the AI SDK's and MLflow's own; each as JSON, as lists or flattened (`gen_ai.prompt.0.role`).
Events are read where they stand: in their span, or as log records (`resourceLogs`, a record a line) that name it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage, ToolMessage

from dreamgym_lg.traces.calls import ModelCall, Part, ToolRun, best, by_trace, has_calls, join_calls, join_runs, timestamp
from dreamgym_lg.traces.messages import decoded, messages_of, to_messages, tool_text, unpacked, with_system
from dreamgym_lg.traces.rows import Conversation, Rejected, TraceRow
from dreamgym_lg.traces.verdicts import FIELDS, feedback, own_metadata, recorded_tools, thread_of, without_schemas

_HOLDERS = (
    *("resourceSpans", "batches", "scopeSpans", "instrumentationLibrarySpans", "spans"),
    *("resourceLogs", "scopeLogs", "logRecords"),
)
_KINDS = (
    *("gen_ai.operation.name", "openinference.span.kind", "traceloop.span.kind", "langfuse.observation.type"),
    *("ai.operationId", "mlflow.spanType", "llm.request.type"),
)
"""Attributes that name a span's kind, one for each instrumentation."""
_OPERATIONS: Mapping[str, str] = {
    **dict.fromkeys(("chat", "generate_content", "text_completion", "completion", "llm", "chat_model", "generation"), "chat"),
    **dict.fromkeys(("ai.generatetext.dogenerate", "ai.streamtext.dostream"), "chat"),
    **dict.fromkeys(("execute_tool", "tool", "ai.toolcall"), "tool"),
    **dict.fromkeys(("create_agent", "embeddings", "embedding", "retriever", "reranker", "guardrail", "evaluator"), "none"),
}
"""`none`: no act of an agent, and often a trace of its own."""
_EXCHANGES = (
    ("gen_ai.input.messages", "gen_ai.output.messages"),
    ("gen_ai.prompt", "gen_ai.completion"),
    ("llm.input_messages", "llm.output_messages"),
    ("langfuse.observation.input", "langfuse.observation.output"),
    ("ai.prompt.messages", "ai.response"),
    ("ai.prompt", "ai.response"),
    ("mlflow.spanInputs", "mlflow.spanOutputs"),
    ("traceloop.entity.input", "traceloop.entity.output"),
    ("input.value", "output.value"),
)
"""The attributes of a call's prompt and reply."""
_PROMPTS, _REPLIES = zip(*_EXCHANGES, strict=True)
_TOOL_NAMES = ("gen_ai.tool.name", "tool.name", "ai.toolCall.name", "traceloop.entity.name")
_TOOL_IDS = ("gen_ai.tool.call.id", "tool_call.id", "ai.toolCall.id")
_TOOL_ARGUMENTS = ("gen_ai.tool.call.arguments", "tool_call.function.arguments", "ai.toolCall.args", *_PROMPTS)
_TOOL_RESULTS = ("gen_ai.tool.call.result", "ai.toolCall.result", *_REPLIES)
_TOOL_SCHEMAS = ("gen_ai.tool.definitions", "llm.tools", "llm.request.functions", "ai.prompt.tools")
_METADATA = ("metadata", "langsmith.metadata", "traceloop.association.properties", "langfuse.trace.metadata")
_THREAD = ("gen_ai.conversation.id", "session.id", "langfuse.session.id")
_EVENT_ROLES = {"system", "user", "assistant", "tool"}
_RECORD_KEYS = {"body", "eventName", "event_name", "severityNumber", "severity_number", "observedTimeUnixNano"}
"""Keys of log records that no span has."""
_SCORE, _SCORE_NAME = "gen_ai.evaluation.score.value", "gen_ai.evaluation.name"
_WRAPPERS = {"message", "tool_call", "message_content", "tool", "json_schema"}
"""Keys in which OpenInference wraps each element of a list."""


class _Span(NamedTuple):
    name: str
    attributes: Mapping[str, Any]
    events: Sequence[tuple[str, Mapping[str, Any]]]
    failed: bool
    row: Mapping[str, Any]
    """The fields that it was read from, with verdict and metadata of the rows around it."""


def is_span(value: object) -> bool:
    """True if a JSON value is a span or holds some."""
    if not isinstance(value, Mapping):
        return False
    return not value.keys().isdisjoint(_HOLDERS) or ("attributes" in value and bool(_trace(value)))


def conversations(rows: Iterator[TraceRow | Rejected]) -> Iterator[Conversation | Rejected]:
    """One conversation a trace, put together from its model and tool calls."""
    return by_trace(rows, _parts, _conversation)


# --- spans ------------------------------------------------------------------------------------------------------------------


def _parts(row: TraceRow) -> Iterator[tuple[str, Part]]:
    for fields in _spans(row.value):
        part = _read(row.line, fields) if _RECORD_KEYS.isdisjoint(fields) else _record(row.line, fields)
        if part.kind != "none":
            yield _trace(fields), part


def _spans(value: object) -> Iterator[Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        raise ValueError("not a span: it is no JSON object")
    lists = [value[key] for key in _HOLDERS if key in value]
    inherited = {key: value[key] for key in (*FIELDS, "annotations") if value.get(key) is not None}
    for children in lists:
        for child in children if isinstance(children, list) else ():
            yield from _spans({**inherited, **child} if isinstance(child, Mapping) else child)
    if not lists:
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
    code = status.get("code", status.get("status_code")) if isinstance(status, Mapping) else fields.get("status_code")
    failed = code in (2, "STATUS_CODE_ERROR", "ERROR") or "error.type" in attributes
    ids = _text(fields, "spanId", "span_id"), _text(fields, "parentSpanId", "parent_span_id", "parent_id")
    span = _Span(str(fields.get("name") or ""), attributes, events, failed, fields)
    return Part(line, *ids, timestamp(start), _operation(attributes, fields), span)


def _record(line: int, fields: Mapping[str, Any]) -> Part:
    """A log record as an event of its span. `none` for one of the application's own."""
    attributes, body = _plain_attributes(fields.get("attributes")) or {}, decoded(_plain(fields.get("body")))
    name = str(_text(fields, "eventName", "event_name") or attributes.get("event.name") or "")
    if name.startswith("gen_ai.") and not _trace(fields):
        raise ValueError(f"the log record {name!r} has no trace id")
    event = {**attributes, **(body if isinstance(body, Mapping) else {"content": body})}
    start = fields.get("timeUnixNano") or fields.get("observedTimeUnixNano") or fields.get("timestamp") or None
    kind = "event" if name.startswith("gen_ai.") else "none"
    return Part(line, "", _text(fields, "spanId", "span_id"), timestamp(start), kind, (name, event))


def _with_events(parts: Sequence[Part]) -> list[Part]:
    """The spans of a trace, with the events of log records. Events of a missing span become a model call."""
    by_span: dict[str, list[Part]] = {}
    for part in parts:
        if part.kind == "event":
            by_span.setdefault(part.parent, []).append(part)
    spans = [part for part in parts if part.kind != "event"]
    for span_id in by_span.keys() - {part.id for part in spans}:
        first = by_span[span_id][0]
        spans.append(Part(first.line, span_id, "", first.start, "chat", _Span("", {}, [], False, {})))
    for place, part in enumerate(spans):
        events = [*part.data.events, *(each.data for each in by_span.get(part.id, ()))]
        spans[place] = part._replace(data=part.data._replace(events=events))
    return sorted(spans, key=lambda part: part.start)


def _operation(attributes: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Kind of a span: `chat`, `tool`, `other`; `none` for no part of a run."""
    named = next((decoded(kind) for key in _KINDS if (kind := _value(attributes, key))), fields.get("span_kind"))
    if named is not None:
        operation = _OPERATIONS.get(str(named).lower(), "other")
        return "other" if operation == "chat" and attributes.get("langsmith.span.kind") == "prompt" else operation
    if "gen_ai.tool.call.id" in attributes:
        return "tool"
    return "chat" if any(key.startswith(("gen_ai.", "llm.")) for key in attributes) else "other"


def _trace(fields: Mapping[str, Any]) -> str:
    return _text(fields, "traceId", "trace_id")


def _text(fields: Mapping[str, Any], *names: str) -> str:
    """The first of these fields in the span or its `context`, as text; else ""."""
    context = fields.get("context")
    places = (fields, context) if isinstance(context, Mapping) else (fields,)
    return next((str(place[key]) for n in names for place in places for key in (n, f"context.{n}") if place.get(key)), "")


def _plain_attributes(recorded: object) -> dict[str, Any] | None:
    """Attributes by name, from OTLP's typed list or from a plain object."""
    if isinstance(recorded, Mapping):
        return dict(recorded)
    if not isinstance(recorded, list):
        return None
    pairs = [each for each in recorded if isinstance(each, Mapping) and "key" in each]
    return {str(each["key"]): _plain(each.get("value")) for each in pairs}


def _plain(value: Any) -> Any:
    """OTLP's typed value as plain JSON."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [_plain(each) for each in _list(inner.get("values"))] if isinstance(inner, Mapping) else []
    if kind == "kvlistValue":
        return (_plain_attributes(inner.get("values")) or {}) if isinstance(inner, Mapping) else {}
    return int(inner) if kind == "intValue" and str(inner).lstrip("-").isdigit() else inner


def _value(attributes: Mapping[str, Any], name: str) -> Any:
    """An attribute, also where it is nested or flattened (`NAME.0.role`). JSON texts are read; None for none."""
    flat = {key.removeprefix(f"{name}."): value for key, value in attributes.items() if key.startswith(f"{name}.")}
    value: Any = unpacked(attributes[name]) if name in attributes else _tree(flat) if flat else attributes
    for key in name.split(".") if value is attributes else ():
        value = value.get(key) if isinstance(value, Mapping) else None
    return _unwrapped(value) if name.startswith("llm.") else value


def _tree(flat: Mapping[str, Any]) -> Any:
    """The value that flattened attributes stand for; names that are numbers make a list."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        head, _, rest = key.partition(".")
        groups.setdefault(head, {})[rest] = value
    tree = {head: inner[""] if "" in inner else _tree(inner) for head, inner in groups.items()}
    if all(head.isdecimal() for head in tree):
        return [tree[head] for head in sorted(tree, key=int)]
    return tree


def _unwrapped(value: Any) -> Any:
    """A value without OpenInference's wrappers around list elements."""
    if isinstance(value, list):
        return [_unwrapped(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    fields = _tree(value) if any("." in str(key) for key in value) else value
    if isinstance(fields, Mapping) and len(fields) == 1 and (key := next(iter(fields))) in _WRAPPERS:
        return _unwrapped(unpacked(fields[key]))
    return {key: _unwrapped(each) for key, each in fields.items()} if isinstance(fields, Mapping) else _unwrapped(fields)


# --- conversations ----------------------------------------------------------------------------------------------------------


def _conversation(trace: str, parts: Sequence[Part]) -> Conversation:
    parts = _with_events(parts)
    calls = [_model_call(part.data) for part in parts if part.kind == "chat"]
    tools = [_tool_run(part.data) for part in parts if part.kind == "tool"]
    whole = [join_calls(calls, tools)]
    if not has_calls(whole[0]):
        # Some instrumentations know few models: left are the agent's question and answer, and what its tools were asked.
        agents = [join_runs(_model_call(part.data), tools) for part in parts if part.kind == "other"]
        whole = [*agents, *whole] if tools else [*whole, *agents]
    spans = [part.data for part in parts]
    schemas = [_value(span.attributes, key) for span in spans for key in _TOOL_SCHEMAS]
    schemas += [without_schemas(_value(span.attributes, "langfuse.observation.input"))[1] for span in spans]
    defined = [tool for recorded in schemas for tool in recorded_tools(recorded)]
    threads = ({"thread_id": _value(span.attributes, key)} for span in spans for key in _THREAD)
    thread = thread_of(*threads, *(_value(span.attributes, key) for span in spans for key in _METADATA))
    return Conversation(parts[0].line, best(whole), _fields(spans), trace, defined, thread=thread)


def _fields(spans: Sequence[_Span]) -> dict[str, Any]:
    """The verdict and metadata of a trace, each from the first span that has one."""
    fields = {key: next((span.row[key] for span in spans if span.row.get(key) is not None), None) for key in FIELDS}
    metadata = (own_metadata(_value(span.attributes, key)) for span in spans for key in _METADATA)
    scores = [
        {"name": each.get(_SCORE_NAME), "score": each[_SCORE]}
        for span in spans
        for each in (span.attributes, *(event for _, event in span.events))
        if _SCORE in each
    ]
    scores += [each for span in spans for each in _list(span.row.get("annotations"))]
    return {**fields, "metadata": fields["metadata"] or next(filter(None, metadata), None), "feedback": feedback(scores)}


def _model_call(span: _Span) -> ModelCall:
    attributes = {**span.attributes}
    for name, event in span.events:
        if name == "gen_ai.client.inference.operation.details":
            attributes |= event
    for names in _EXCHANGES:
        recorded, answer = (_value(attributes, name) for name in names)
        if recorded is not None or answer is not None:
            recorded, _ = without_schemas(recorded)
            prompt = to_messages(_list(recorded)) if names[0] == "gen_ai.input.messages" else _messages(recorded, "user")
            reply = _messages(answer[:1] if isinstance(answer, list) else answer, "assistant")
            if prompt or reply:
                system = _system(_value(attributes, "gen_ai.system_instructions"))
                return ModelCall(with_system(prompt, {"system": system}), reply)
    return ModelCall(*_of_events(span.events))


def _messages(recorded: Any, speaker: str) -> list[BaseMessage]:
    """The messages in an attribute."""
    if isinstance(recorded, Mapping) and ("toolCalls" in recorded or set(recorded) == {"text"}):  # the AI SDK's answer
        recorded = {"role": speaker, "content": recorded.get("text") or "", "tool_calls": decoded(recorded.get("toolCalls"))}
    for each in recorded if isinstance(recorded, list) else [recorded]:
        if isinstance(each, dict) and "content" in each:
            each["content"] = _blocks(each["content"])
    return messages_of(recorded, speaker)


def _blocks(content: Any) -> Any:
    """The content blocks in a JSON text; any other content unchanged."""
    blocks = decoded(content)
    is_blocks = isinstance(blocks, list) and all(isinstance(each, Mapping) and "type" in each for each in blocks)
    return blocks if is_blocks else content


def _list(value: object) -> list[Any]:
    """A list, also from JSON text; [] for None."""
    value = decoded(value)
    if value is None or isinstance(value, list):
        return value or []
    raise ValueError(f"{str(value)[:40]!r} where a list should be")


def _system(instructions: object) -> str:
    parts = instructions if isinstance(instructions, list) else [instructions] if instructions else []
    return "\n\n".join(str(part.get("content", "")) if isinstance(part, Mapping) else str(part) for part in parts)


def _of_events(events: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[list[BaseMessage], list[BaseMessage]]:
    """Prompt and reply of a call whose messages are span events (conventions up to 1.36)."""
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
    content = _blocks(body.get("content"))
    fields = {key: body[key] for key in ("name", "refusal", "function_call") if key in body}
    if role == "tool":
        fields["tool_call_id"] = body.get("id") or body.get("tool_call_id")
    if role == "assistant":
        fields["tool_calls"] = decoded(body.get("tool_calls"))
    return to_messages([{**fields, "role": role, "content": content}])


def _tool_run(span: _Span) -> ToolRun:
    def first(names: Sequence[str]) -> Any:
        return next((value for name in names if (value := _value(span.attributes, name)) is not None), None)

    arguments, result = first(_TOOL_ARGUMENTS), first(_TOOL_RESULTS)
    if "traceloop.entity.input" in span.attributes and isinstance(arguments, Mapping):
        arguments = next((arguments[key] for key in ("inputs", "kwargs") if arguments.get(key)), arguments)
    if isinstance(result, Mapping) and {"output", "kwargs"} == result.keys():
        result = result["output"]
    known = arguments if isinstance(arguments, Mapping) else None
    name, call_id = str(first(_TOOL_NAMES) or span.name), str(first(_TOOL_IDS) or "")
    for message in messages_of(result):  # LangChain's tools return the message itself
        if isinstance(message, ToolMessage):
            failed = span.failed or message.status == "error"
            return ToolRun(message.name or name, message.text, call_id or message.tool_call_id, failed, known)
    raw = next((span.attributes[key] for key in _TOOL_RESULTS if key in span.attributes), None)
    if isinstance(raw, str) and result == unpacked(raw):
        result = raw if not isinstance(decoded(raw), str) else decoded(raw)  # byte for byte, as the agent read it
    if result is None and span.failed:
        result = str(span.attributes.get("error.type") or "error")
    return ToolRun(name, None if result is None else tool_text(result), call_id, span.failed, known)
