"""Tells tools that change the world from tools that only read, and why."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from langchain_core.tools import BaseTool

from dreamgym_lg.actions import parse_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Trajectory


class ToolUse(NamedTuple):
    """Says if a tool changes the world, and by what this is known."""

    writes: bool
    why: str


UNKNOWN = ToolUse(True, "nothing says that it only reads")
"""A tool counts as writing. Taken for a reading one by mistake, it would let a dream reward what was never done."""

Trace = Sequence[tuple[str, str]]
"""Action and answer of each step of a recorded episode that was not refused."""


def find_tool_uses(
    tools: Iterable[BaseTool] = (), traces: Iterable[Trace] = (), *, writes: Collection[str] | None = None
) -> dict[str, ToolUse]:
    """The use of each tool of an agent and of its traces, by name.

    From the first of these that tells it:

    1. `writes`, where it is given: these tools write and no others.
    2. The tool itself: `tool.metadata["writes"]`, or MCP's `readOnlyHint`, which langchain-mcp-adapters puts into the metadata.
    3. The traces: a reading call was answered differently once this tool had been called.
    4. Nothing: `UNKNOWN`, it counts as writing.

    Of a tool that 1 or 2 take for a reading one, the reason also says where the traces show otherwise.

    Raises `ConfigurationError` for a name in `writes` that no tool has.
    """
    by_name = {tool.name: tool for tool in tools}
    calls = [[(call.name, *step) for step in trace if (call := parse_call(step[0])) is not None] for trace in traces]
    names = sorted(by_name.keys() | {name for trace in calls for name, _, _ in trace})
    for name in sorted(set(writes or ()) - set(names)):
        raise ConfigurationError.unknown("tool in writes", name, names)
    uses = {name: _declared_use(name, by_name.get(name), writes) or UNKNOWN for name in names}
    for name, witness in _changed_after(calls, {name for name, use in uses.items() if not use.writes}).items():
        evidence = f"in the traces, an identical call of {witness} was answered differently after it"
        if uses[name] is UNKNOWN:
            uses[name] = ToolUse(True, evidence)
        elif not uses[name].writes:
            uses[name] = ToolUse(False, f"{uses[name].why}, though {evidence}")
    return uses


def writing_tools(
    tools: Iterable[BaseTool] = (), trajectories: Iterable[Trajectory] = (), *, writes: Collection[str] | None = None
) -> frozenset[str]:
    """The names of the tools that write; `find_tool_uses` says why. Args: `trajectories`, real ones."""
    uses = find_tool_uses(tools, map(trace_of, trajectories), writes=writes)
    return frozenset(name for name, use in uses.items() if use.writes)


def trace_of(trajectory: Trajectory) -> Trace:
    return [(step.action, step.next_observation) for step in trajectory.steps if step.valid]


def _declared_use(name: str, tool: BaseTool | None, writes: Collection[str] | None) -> ToolUse | None:
    if writes is not None:
        return ToolUse(name in writes, f"writes= {'names' if name in writes else 'does not name'} it")
    metadata = (tool.metadata if tool is not None else None) or {}
    for key, means_writing in (("writes", True), ("readOnlyHint", False)):
        if isinstance(value := metadata.get(key), bool):
            return ToolUse(value is means_writing, f"its metadata says {key}={value}")
    return None


def _changed_after(traces: Sequence[Sequence[tuple[str, str, str]]], reading: Collection[str]) -> dict[str, str]:
    """Tools that change a reading tool's answer to an identical call, each with that tool.

    Args: `traces`, the calls of each as (tool, action, answer).
    """
    witnesses: dict[str, Counter[str]] = {}
    fickle = set[str]()
    for calls in traces:
        last: dict[str, int] = {}
        for position, (name, action, answer) in enumerate(calls):
            before, last[action] = last.get(action), position
            if before is None or calls[before][2] == answer or name not in reading:
                continue
            between = {other for other, _, _ in calls[before + 1 : position]} - {name}
            if not between:
                fickle.add(name)  # the time, a random number: its answers change by themselves
            elif len(suspects := between - set(reading) or between) == 1:
                witnesses.setdefault(suspects.pop(), Counter())[name] += 1
    sure = {
        name: [witness for witness, _ in counts.most_common() if witness not in fickle] for name, counts in witnesses.items()
    }
    return {name: each[0] for name, each in sure.items() if each}
