"""Spans of a real run as the instrumentations write them: each way of recording messages, each way of writing spans.

The ways are those of langsmith's own exporter (0.14), OpenTelemetry's (1.3b0) and Traceloop's (0.62) LangChain
instrumentation, whose real output was read when this was written; none of them is needed here.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.load import dumpd
from langchain_core.messages import BaseMessage, SystemMessage

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.traces import load_traces

SYSTEM = SystemMessage("You help.")
GIVEN = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Where to?"}]
Span = dict[str, Any]


def span(number: int, operation: str, attributes: Span, *, parent: int | None = None, events: Any = (), **fields) -> Span:
    """A span as the Python SDK's console exporter writes it."""
    return {
        "name": f"{operation} x",
        "context": {"trace_id": "0xabc", "span_id": f"0x{number}"},
        "parent_id": None if parent is None else f"0x{parent}",
        "start_time": f"2026-11-21T08:00:{number:02}.5Z",
        "attributes": {"gen_ai.operation.name": operation, **attributes},
        "events": [{"name": name, "attributes": given} for name, given in events],
        **fields,
    }


def test_the_schemas_of_what_the_agent_could_call(write) -> None:
    tools = [{"type": "function", "name": name, "description": "", "parameters": {}} for name in ("weather", "map")]
    given = {
        "gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "Hi."}]}],
        "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "Hello."}]}],
        "gen_ai.tool.definitions": json.dumps(tools),
    }
    (trajectory,) = load_traces(write(span(1, "chat", given)), reward={"0xabc": 0.5})
    assert [tool["function"]["name"] for tool in trajectory.task.tools] == ["map", "weather"]
    assert trajectory.reward == 0.5


def parts(message: BaseMessage) -> Span:
    """A message in the form of the semantic conventions."""
    role = {"human": "user", "ai": "assistant"}.get(message.type, message.type)
    if message.type == "tool":
        response = {"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}  # type: ignore[attr-defined]
        return {"role": role, "parts": [response]}
    text = [{"type": "text", "content": message.text}] if message.text else []
    asked = getattr(message, "tool_calls", ())
    calls = [{"type": "tool_call", "id": c["id"], "name": c["name"], "arguments": c["args"]} for c in asked]
    return {"role": role, "parts": [*text, *calls]}


def by_attributes(shown: list[BaseMessage], reply: BaseMessage, number: int) -> Span:
    given = {
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "You help."}]),
        "gen_ai.input.messages": json.dumps([parts(message) for message in shown[1:]]),
        "gen_ai.output.messages": json.dumps([parts(reply)]),
    }
    return span(number, "chat", given)


def by_structured_attributes(shown: list[BaseMessage], reply: BaseMessage, number: int) -> Span:
    given = {
        "gen_ai.input.messages": [parts(message) for message in shown],
        "gen_ai.output.messages": [parts(reply)],
    }
    return span(number, "chat", given)


def openai_calls(message: BaseMessage) -> list[Span]:
    return [
        {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": json.dumps(c["args"])}}
        for c in getattr(message, "tool_calls", ())
    ]


def by_events(shown: list[BaseMessage], reply: BaseMessage, number: int) -> Span:
    events = []
    for message in shown:
        role = {"human": "user", "ai": "assistant"}.get(message.type, message.type)
        body: Span = {"content": message.text}
        if calls := openai_calls(message):
            body = {"tool_calls": json.dumps(calls)}
        if message.type == "tool":
            body["id"] = message.tool_call_id  # type: ignore[attr-defined]
        events.append((f"gen_ai.{role}.message", body))
    said = {"role": "assistant", "content": reply.text, "tool_calls": openai_calls(reply)}
    return span(number, "chat", {}, events=[*events, ("gen_ai.choice", {"index": 0, "message": json.dumps(said)})])


def by_event_content(shown: list[BaseMessage], reply: BaseMessage, number: int) -> Span:
    """As `by_events`, all of an event in one attribute (Azure's)."""
    found = by_events(shown, reply, number)
    for event in found["events"]:
        written = event["attributes"].items()
        body = {key: json.loads(value) if key in ("tool_calls", "message") else value for key, value in written}
        event["attributes"] = {"gen_ai.event.content": json.dumps(body)}
    return found


def by_langsmith(shown: list[BaseMessage], reply: BaseMessage, number: int) -> Span:
    generation = {"text": reply.text, "type": "ChatGeneration", "message": dumpd(reply)}
    given = {
        "gen_ai.prompt": json.dumps({"messages": [[dumpd(message) for message in shown]]}),
        "gen_ai.completion": json.dumps({"generations": [[generation]], "type": "LLMResult"}),
    }
    return span(number, "chat", given | {"langsmith.span.kind": "llm"})


def otlp(spans: list[Span]) -> Span:
    """The spans as an OTLP exporter writes them."""

    def value(given: Any) -> Span:
        if isinstance(given, dict):
            return {"kvlistValue": {"values": attributes(given)}}
        if isinstance(given, list):
            return {"arrayValue": {"values": [value(each) for each in given]}}
        return {"intValue": str(given)} if isinstance(given, int) else {"stringValue": given}

    def attributes(given: Span) -> list[Span]:
        return [{"key": key, "value": value(each)} for key, each in given.items()]

    written = [
        {
            "traceId": each["context"]["trace_id"],
            "spanId": each["context"]["span_id"],
            "parentSpanId": each["parent_id"] or "",
            "startTimeUnixNano": str(1_795_000_000_000_000_000 + int(each["context"]["span_id"], 16)),
            "attributes": attributes(each["attributes"]),
            "events": [{"name": event["name"], "attributes": attributes(event["attributes"])} for event in each["events"]],
        }
        for each in spans
    ]
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": written}]}]}


WAYS: list[Callable[..., Span]] = [by_attributes, by_structured_attributes, by_events, by_event_content, by_langsmith]


def model_calls(way: Callable[..., Span], played: list[BaseMessage]) -> list[Span]:
    """A span for every reply in a run."""
    replies = [position for position, message in enumerate(played) if message.type == "ai"]
    return [way([SYSTEM, *played[:position]], played[position], 2 * number) for number, position in enumerate(replies, 1)]


def tool_runs(played: list[BaseMessage], **more: Any) -> list[Span]:
    calls = {c["id"]: c for message in played for c in getattr(message, "tool_calls", ())}
    return [
        span(
            20 + number,
            "execute_tool",
            {
                "gen_ai.tool.name": message.name,
                "gen_ai.tool.call.id": message.tool_call_id,
                "gen_ai.tool.call.arguments": json.dumps(calls[message.tool_call_id]["args"]),
                "gen_ai.tool.call.result": message.content,
            },
            parent=1,
            **more,
        )
        for number, message in enumerate(message for message in played if message.type == "tool")
    ]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_recording_messages(way, played, steps, seen, write) -> None:
    spans = model_calls(way, played)
    other = span(1, "GET", {"http.method": "GET"})
    document = json.dumps(otlp(spans), indent=1)
    for path in (write(*spans[::-1], other), write(otlp(spans)), write(document), write(*(otlp([each]) for each in spans))):
        traces = load_traces(path)
        (trajectory,) = traces
        assert seen(trajectory) == steps
        assert (trajectory.task.messages, traces.rejected) == (GIVEN, ())


def test_a_missing_last_answer_comes_from_the_tools_own_span(played, steps, seen, write) -> None:
    first = model_calls(by_attributes, played)[:1]
    (trajectory,) = load_traces(write(*first, *tool_runs(played)))
    assert seen(trajectory) == steps[:2] and trajectory.steps[-1].truncated
    failed = tool_runs(played, status={"status_code": "ERROR"})
    del failed[0]["attributes"]["gen_ai.tool.call.result"]
    failed[0]["attributes"]["error.type"] = "TimeoutError"
    (trajectory,) = load_traces(write(*first, *failed))
    assert (trajectory.steps[0].next_observation, trajectory.steps[0].valid) == ("TimeoutError", False)


def test_an_agents_own_span_and_its_tools_are_enough(played, steps, seen, write) -> None:
    given = {
        "gen_ai.input.messages": json.dumps([parts(played[0])]),
        "gen_ai.output.messages": json.dumps([parts(played[-1])]),
    }
    agent = span(1, "invoke_agent", given)
    (trajectory,) = load_traces(write(*tool_runs(played), agent))
    assert seen(trajectory) == steps
    (trajectory,) = load_traces(write(*tool_runs(played), agent, *model_calls(by_attributes, played)[:1]))
    assert seen(trajectory) == steps[:2]  # its answer alone would leave out what it did
    unknown = tool_runs(played)
    del unknown[1]["attributes"]["gen_ai.tool.call.arguments"]
    with pytest.raises(ConfigurationError, match="no model call with messages"):
        load_traces(write(agent, *unknown))


def test_an_agent_inside_a_tool_is_no_act(played, steps, seen, write) -> None:
    inner = [each | {"parent_id": "0x20", "start_time": "2026-11-21T09:00:00Z"} for each in model_calls(by_events, played)]
    inner = [each | {"context": {"trace_id": "0xabc", "span_id": f"0x{70 + n}"}} for n, each in enumerate(inner)]
    spans = [*model_calls(by_attributes, played)[:1], *tool_runs(played)[:2], *inner]
    (trajectory,) = load_traces(write(*spans))
    assert seen(trajectory) == steps[:2]


def test_a_provider_that_keeps_the_history_is_sent_the_answers_alone(played, steps, seen, write) -> None:
    spans = [
        by_attributes([SYSTEM, played[0]], played[1], 1),
        by_structured_attributes(played[2:4], played[4], 2),
        by_structured_attributes(played[5:6], played[6], 3),
    ]
    (trajectory,) = load_traces(write(*spans))
    assert seen(trajectory) == steps


def test_an_evaluation_is_the_reward(played, write) -> None:
    spans = model_calls(by_attributes, played)
    for value in (1.0, 0.5):
        spans[-1]["events"].append({"name": "gen_ai.evaluation.result", "attributes": {"gen_ai.evaluation.score.value": value}})
    (trajectory,) = load_traces(write(*spans))
    assert (trajectory.reward, trajectory.success) == (0.75, True)


def as_records(spans: list[Span], *, console: bool = False) -> list[Span]:
    """The spans without their events, and these as log records: of the console's exporter, or of OTLP's."""
    records, number = list[Span](), 0
    for each in spans:
        for event in each["events"]:
            number += 1
            ids = {"trace_id": each["context"]["trace_id"], "span_id": each["context"]["span_id"]}
            body = {**event["attributes"]}
            if isinstance(body.get("message"), str):
                body["message"] = json.loads(body["message"])
            start = 1_795_000_000_000_000_000 + number
            if console:
                time = f"2026-11-21T08:00:01.{number:06}Z"
                record = {"body": json.dumps(body), "attributes": {"event.name": event["name"]}, "timestamp": time, **ids}
            else:
                ((_, inner),) = otlp([span(1, "x", {}, events=[("e", body)])]).items()
                values = inner[0]["scopeSpans"][0]["spans"][0]["events"][0]["attributes"]
                record = {"eventName": event["name"], "body": {"kvlistValue": {"values": values}}, "timeUnixNano": str(start)}
                record |= {"traceId": ids["trace_id"], "spanId": ids["span_id"], "attributes": []}
            records.append(record)
    logs = records if console else [{"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}]
    return [*({**each, "events": []} for each in spans), *logs]


@pytest.mark.parametrize("console", [True, False])
def test_events_are_read_as_log_records_too(console: bool, played, steps, seen, write) -> None:
    spans = model_calls(by_events, played)
    spans[-1]["events"].append({"name": "gen_ai.evaluation.result", "attributes": {"gen_ai.evaluation.score.value": 1}})
    own = {"body": "started", "severity_number": 9, "attributes": {}, "trace_id": "0x0", "span_id": "0x0"}
    rows = as_records(spans, console=console)
    for written in ([*rows, own], [own, *rows[::-1]], [row for row in rows if "name" not in row]):  # the last without a span
        traces = load_traces(write(*written))
        (trajectory,) = traces
        assert (seen(trajectory), traces.rejected, trajectory.success) == (steps, (), True)
    lost = {"body": {"content": "?"}, "event_name": "gen_ai.user.message", "attributes": {}}
    with pytest.warns(UserWarning, match="1 traces read, 1 rejected"):
        (rejected,) = [traces := load_traces(write(*rows, lost)), list(traces)][0].rejected
    assert "the log record 'gen_ai.user.message' has no trace id" in rejected.reason


def test_bad_spans_and_traces_are_named(played, write) -> None:
    good = model_calls(by_attributes, played)
    empty = span(1, "chat", {}) | {"context": {"trace_id": "0xdef", "span_id": "0x1"}}
    odd = span(1, "chat", {"gen_ai.input.messages": "not a list"}) | {"context": {"trace_id": "0x123", "span_id": "0x1"}}
    late = span(1, "chat", {}) | {"start_time": "soon"}
    made = span(1, "create_agent", {}) | {"context": {"trace_id": "0x456", "span_id": "0x1"}}  # no run: not even a reject
    traces = load_traces(write(*good, empty, odd, late, made, {"attributes": {}}, 5, '{"traceId": '))
    with pytest.warns(UserWarning, match="1 traces read, 6 rejected"):
        assert len(list(traces)) == 1
    first = len(good) + 1
    assert [each.line - first for each in traces.rejected] == [0, 1, 2, 4, 5, 6]
    said = ("trace 0xdef: no model call", "trace 0x123", "start time 'soon'", "not a span", "not a span", "not JSON")
    for each, reason in zip(traces.rejected, said, strict=True):
        assert reason in each.reason


@pytest.mark.slow
def test_no_mutilated_span_escapes_as_another_error(played, survives) -> None:
    calls = [model_calls(way, played) for way in WAYS]
    forms = [*calls, *([otlp(spans)] for spans in calls), [*calls[0][:1], *tool_runs(played)], *map(as_records, calls)]
    survives("otel", forms, 300)
