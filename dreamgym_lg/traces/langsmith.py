"""LangSmith's run exports: the runs of `Client.list_runs`, or of a tracer, as JSON."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from langchain_core.messages import HumanMessage, ToolMessage

from dreamgym_lg.traces.calls import ModelCall, ToolRun, asks_tools, best, moment, rebuilt, with_system
from dreamgym_lg.traces.conversation import finite
from dreamgym_lg.traces.messages import as_content, messages_of, recorded_tools
from dreamgym_lg.traces.rows import Conversation, Rejected, TraceRow


class _Run(NamedTuple):
    line: int
    id: str
    parent: str
    start: float
    fields: Mapping[str, Any]


def conversations(rows: Iterator[TraceRow | Rejected]) -> Iterator[Conversation | Rejected]:
    """One conversation a trace: the root run's messages if they end in an answer, else put together from its calls."""
    traces: dict[str, list[_Run]] = {}
    for row in rows:
        if isinstance(row, Rejected):
            yield row
            continue
        try:
            _file_runs(row, traces)
        except ValueError as error:
            yield Rejected(row.line, str(error))
    while traces:
        trace = next(iter(traces))
        runs = traces.pop(trace)
        try:
            yield _conversation(trace, sorted(runs, key=lambda run: run.start))
        except ValueError as error:
            yield Rejected(runs[0].line, f"trace {trace}: {error}")


def _file_runs(row: TraceRow, traces: dict[str, list[_Run]]) -> None:
    """File a run, and the runs inside it, under its trace."""
    top = row.value if isinstance(row.value, Mapping) else {}
    pending, found = [(top, str(top.get("parent_run_id") or ""))], []
    trace = str(top.get("trace_id") or top.get("id") or "")
    while pending:
        fields, parent = pending.pop()
        if not isinstance(fields, Mapping) or not fields.get("run_type") or not fields.get("id"):
            raise ValueError("not a LangSmith run: it has no id and run_type")
        found.append(_Run(row.line, str(fields["id"]), parent, moment(fields.get("start_time")), fields))
        children = fields.get("child_runs")
        pending += [(child, str(fields["id"])) for child in children] if isinstance(children, list) else []
    traces.setdefault(trace, []).extend(found)


def _conversation(trace: str, runs: list[_Run]) -> Conversation:
    known = {run.id: run for run in runs}
    root = next((run for run in runs if run.parent not in known), runs[0])
    outer = [run for run in runs if not _inside_tool(run, known)]
    calls = [
        ModelCall(messages_of(run.fields.get("inputs")), messages_of(run.fields.get("outputs")))
        for run in outer
        if run.fields["run_type"] == "llm"
    ]
    tools = [_tool_run(run.fields) for run in outer if run.fields["run_type"] == "tool"]
    whole = messages_of(root.fields.get("outputs"))
    if not any(isinstance(message, HumanMessage) for message in whole):
        # A chain's output is its answer alone; a graph's is its state, the input included.
        whole = [*messages_of(root.fields.get("inputs")), *whole]
    called = rebuilt(calls, tools)
    # The root may hold the question and the answer alone: that would leave out what the agent did.
    partial = asks_tools(called) and not asks_tools(whole)
    messages = best([called] if partial else [with_system(whole, called), called])
    fields = {"score": _score(root.fields.get("feedback_stats"))}
    return Conversation(root.line, messages, fields, trace, [tool for run in outer for tool in _tools(run.fields)])


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a model call was bound to, as LangChain's tracer records it."""
    extra = fields.get("extra")
    given = extra.get("invocation_params") if isinstance(extra, Mapping) else None
    return recorded_tools(given.get("tools")) if isinstance(given, Mapping) else []


def _inside_tool(run: _Run, known: Mapping[str, _Run]) -> bool:
    """Whether a tool made this call (an agent used as a tool): then it is no act of the agent."""
    passed = {run.id}
    while (parent := known.get(run.parent)) and parent.id not in passed:
        if parent.fields["run_type"] == "tool":
            return True
        passed.add(parent.id)
        run = parent
    return False


def _tool_run(fields: Mapping[str, Any]) -> ToolRun:
    name, outputs = str(fields.get("name") or ""), fields.get("outputs")
    if fields.get("error"):
        return ToolRun(name, str(fields["error"]), error=True)
    for message in messages_of(outputs):
        if isinstance(message, ToolMessage):
            return ToolRun(message.name or name, message.content, message.tool_call_id, message.status == "error")
    result = outputs.get("output", outputs) if isinstance(outputs, Mapping) else outputs
    return ToolRun(name, as_content(result))


def _score(stats: object) -> float | None:
    """The mean of the averages of all feedback that has a number."""
    stats = stats.values() if isinstance(stats, Mapping) else ()
    averages = [each.get("avg") for each in stats if isinstance(each, Mapping)]
    numbers = [finite(average, "feedback score") for average in averages if average is not None]
    return sum(numbers) / len(numbers) if numbers else None
