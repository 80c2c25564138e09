"""Exported runs as JSON. LangSmith's, of `Client.list_runs` or of a tracer, and Langfuse's traces and observations."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, ToolMessage

from dreamgym_lg.traces.calls import ModelCall, Part, ToolRun, add_system, best, by_trace, has_calls, join_calls, timestamp
from dreamgym_lg.traces.messages import decoded, first_set, messages_of, tool_text, unpacked
from dreamgym_lg.traces.rows import Conversation, Rejected, TraceRow, exchange
from dreamgym_lg.traces.verdicts import FEEDBACK, FIELDS, feedback, own_metadata, recorded_tools, thread_of, without_schemas

_LANGFUSE = {"GENERATION": "llm", "TOOL": "tool", "AGENT": "chain", "CHAIN": "chain", "SPAN": "chain", "EVENT": "chain"}
"""Kinds of Langfuse's observations, as LangSmith calls them."""


def is_run(value: object) -> bool:
    """True if a JSON value is a run."""
    return isinstance(value, Mapping) and ("run_type" in value or _is_langfuse(value))


def _is_langfuse(value: Mapping[str, Any]) -> bool:
    return "observations" in value or (str(value.get("type")) in _LANGFUSE and ("traceId" in value or "trace_id" in value))


def conversations(rows: Iterator[TraceRow | Rejected]) -> Iterator[Conversation | Rejected]:
    """One conversation a trace. The root run's messages if they end in an answer, else put together from its calls."""
    return by_trace(rows, _runs, _conversation)


def _runs(row: TraceRow) -> Iterator[tuple[str, Part]]:
    """A run and the runs inside it."""
    top = _as_langsmith(row.value) if isinstance(row.value, Mapping) else {}
    pending, trace = [(top, str(top.get("parent_run_id") or ""))], str(top.get("trace_id") or top.get("id") or "")
    while pending:
        fields, parent = pending.pop()
        fields = _as_langsmith(fields) if isinstance(fields, Mapping) else {}
        parent = str(fields.get("parent_run_id") or parent)  # Langfuse's observations stand beside each other
        if not fields.get("run_type") or not fields.get("id"):
            raise ValueError("not a run: it has no id and run_type")
        yield trace, Part(row.line, str(fields["id"]), parent, timestamp(fields.get("start_time")), fields["run_type"], fields)
        children = fields.get("child_runs")
        pending += [(child, str(fields["id"])) for child in children] if isinstance(children, list) else []


def _as_langsmith(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run under LangSmith's keys."""
    if "run_type" in fields or not _is_langfuse(fields):
        return fields

    session = first_set(fields, "sessionId", "session_id")
    inputs, schemas = without_schemas(fields.get("input"))
    return {
        **fields,
        "run_type": _LANGFUSE.get(str(fields.get("type")), "chain"),
        "trace_id": first_set(fields, "traceId", "trace_id", "id"),
        "parent_run_id": first_set(fields, "parentObservationId", "parent_observation_id"),
        "start_time": first_set(fields, "startTime", "start_time", "timestamp"),
        "inputs": inputs,
        "outputs": fields.get("output"),
        "error": fields.get("statusMessage") or "error" if fields.get("level") == "ERROR" else None,
        "extra": {
            "metadata": decoded(fields.get("metadata")),
            "session": {"session_id": session},
            "invocation_params": {"tools": schemas},
        },
        "metadata": None,  # holds the tracer's own keys, too
        "child_runs": fields.get("observations"),
    }


def _conversation(trace: str, runs: Sequence[Part]) -> Conversation:
    known = {run.id for run in runs}
    root = next((run for run in runs if run.parent not in known), runs[0])
    models = [run for run in runs if run.kind == "llm"]
    calls = [ModelCall(_prompt(run), messages_of(unpacked(run.data.get("outputs")), "assistant")) for run in models]
    tools = [_tool_run(run.data) for run in runs if run.kind == "tool"]
    whole = exchange(_prompt(root), unpacked(root.data.get("outputs")))
    called = join_calls(calls, tools)
    # The root may hold the question and the answer alone: that would leave out what the agent did.
    partial = has_calls(called) and not has_calls(whole)
    messages = best([called] if partial else [add_system(whole, called), called])
    defined = [tool for run in runs for tool in _tools(run.data)]
    # Beside the run itself, LangSmith's session is the project.
    extra = [run.data["extra"] for run in (root, *runs) if isinstance(run.data.get("extra"), Mapping)]
    thread = thread_of(*(each.get(key) for each in extra for key in ("metadata", "session")))
    return Conversation(root.line, messages, _fields([root.data, *(run.data for run in runs)]), trace, defined, thread=thread)


def _prompt(run: Part) -> list[BaseMessage]:
    return messages_of(unpacked(run.data.get("inputs")), "user")


def _fields(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The verdict and metadata of a trace. Its root's, else those of the first run that has some."""
    fields = {key: next((run[key] for run in runs if run.get(key) is not None), None) for key in FIELDS}
    extra = (run.get("extra") for run in runs)
    metadata = next((own for each in extra if isinstance(each, Mapping) and (own := own_metadata(each.get("metadata")))), None)
    recorded = (run.get(key) for run in runs for key in FEEDBACK)
    return {**fields, "metadata": fields["metadata"] or metadata, "feedback": next(filter(None, map(feedback, recorded)), {})}


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of a model call, as LangChain's tracer or a wrapped client records them."""
    extra, inputs = fields.get("extra"), fields.get("inputs")
    parameters = extra.get("invocation_params") if isinstance(extra, Mapping) else None
    places = [parameters, inputs] if fields.get("run_type") == "llm" else [parameters]
    recorded = (recorded_tools(place.get("tools")) for place in places if isinstance(place, Mapping))
    return next(filter(None, recorded), [])


def _tool_run(fields: Mapping[str, Any]) -> ToolRun:
    name, outputs = str(fields.get("name") or ""), fields.get("outputs")
    if fields.get("error"):
        return ToolRun(name, str(fields["error"]), error=True)
    for message in messages_of(unpacked(outputs)):
        if isinstance(message, ToolMessage):
            return ToolRun(message.name or name, message.text, message.tool_call_id, message.status == "error")
    result = outputs.get("output", outputs) if isinstance(outputs, Mapping) else outputs
    return ToolRun(name, None if result is None else tool_text(result))
