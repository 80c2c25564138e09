"""LangSmith's run exports: the runs of `Client.list_runs`, or of a tracer, as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage

from dreamgym_lg.traces.calls import (
    ModelCall,
    Part,
    ToolRun,
    asks_tools,
    best,
    by_trace,
    mean_score,
    moment,
    rebuilt,
    with_system,
)
from dreamgym_lg.traces.messages import as_content, messages_of, recorded_tools
from dreamgym_lg.traces.rows import Conversation, Rejected, TraceRow


def conversations(rows: Iterator[TraceRow | Rejected]) -> Iterator[Conversation | Rejected]:
    """One conversation a trace: the root run's messages if they end in an answer, else put together from its calls."""
    return by_trace(rows, _runs, _conversation)


def _runs(row: TraceRow) -> Iterator[tuple[str, Part]]:
    """A run and the runs inside it."""
    top = row.value if isinstance(row.value, Mapping) else {}
    pending, trace = [(top, str(top.get("parent_run_id") or ""))], str(top.get("trace_id") or top.get("id") or "")
    while pending:
        fields, parent = pending.pop()
        if not isinstance(fields, Mapping) or not fields.get("run_type") or not fields.get("id"):
            raise ValueError("not a LangSmith run: it has no id and run_type")
        yield trace, Part(row.line, str(fields["id"]), parent, moment(fields.get("start_time")), fields["run_type"], fields)
        children = fields.get("child_runs")
        pending += [(child, str(fields["id"])) for child in children] if isinstance(children, list) else []


def _conversation(trace: str, runs: Sequence[Part]) -> Conversation:
    known = {run.id for run in runs}
    root = next((run for run in runs if run.parent not in known), runs[0])
    calls = [
        ModelCall(messages_of(run.data.get("inputs")), messages_of(run.data.get("outputs")))
        for run in runs
        if run.kind == "llm"
    ]
    tools = [_tool_run(run.data) for run in runs if run.kind == "tool"]
    whole = messages_of(root.data.get("outputs"))
    if not any(isinstance(message, HumanMessage) for message in whole):
        # A chain's output is its answer alone; a graph's is its state, the input included.
        whole = [*messages_of(root.data.get("inputs")), *whole]
    called = rebuilt(calls, tools)
    # The root may hold the question and the answer alone: that would leave out what the agent did.
    partial = asks_tools(called) and not asks_tools(whole)
    messages = best([called] if partial else [with_system(whole, called), called])
    stats = root.data.get("feedback_stats")
    averages = (each.get("avg") for each in stats.values() if isinstance(each, Mapping)) if isinstance(stats, Mapping) else ()
    fields = {"score": mean_score(averages)}
    return Conversation(root.line, messages, fields, trace, [tool for run in runs for tool in _tools(run.data)])


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that a model call was bound to, as LangChain's tracer records them."""
    extra = fields.get("extra")
    parameters = extra.get("invocation_params") if isinstance(extra, Mapping) else None
    return recorded_tools(parameters.get("tools")) if isinstance(parameters, Mapping) else []


def _tool_run(fields: Mapping[str, Any]) -> ToolRun:
    name, outputs = str(fields.get("name") or ""), fields.get("outputs")
    if fields.get("error"):
        return ToolRun(name, str(fields["error"]), error=True)
    for message in messages_of(outputs):
        if isinstance(message, ToolMessage):
            return ToolRun(message.name or name, message.content, message.tool_call_id, message.status == "error")
    result = outputs.get("output", outputs) if isinstance(outputs, Mapping) else outputs
    return ToolRun(name, as_content(result))
