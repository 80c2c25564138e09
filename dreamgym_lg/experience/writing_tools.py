"""Which tools change the world: said by the user or by the tool itself, else found in recorded traces and in their names."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from langchain_core.tools import BaseTool

from dreamgym_lg.actions import parse_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Trajectory

_READING = re.compile(
    "get|search|list|lookup|look|find|read|fetch|query|show|view|describe|check|count|retrieve|browse|calculate|is|has"
)
_WRITING = re.compile(
    "create|update|delete|set|add|remove|send|cancel|insert|edit|mark|book|reserve|change|write|post|put|submit|in|out"
)
"""A name with one of these words is no reading tool's, whatever it begins with: `get_or_create_user`, `check_in`."""
_NOUN = re.compile("book|post")
"""Of these words, those that are a noun at the end of a name that begins with `get` and the like: `get_book`."""
_ASKING = re.compile("get|search|list|lookup|find|read|fetch|query|show|view|describe|count|retrieve|browse")


class ToolUse(NamedTuple):
    """Whether a tool changes the world, and how that is known."""

    writes: bool
    why: str


Trace = Sequence[tuple[str, str]]
"""Action and answer of each step of a recorded episode that was not refused."""


def find_tool_uses(
    tools: Iterable[BaseTool] = (), traces: Iterable[Trace] = (), *, writes: Collection[str] | None = None
) -> dict[str, ToolUse]:
    """Whether each tool of an agent and of its traces writes, by the first of these that says so:

    1. `writes`, where it is given: these tools and no others.
    2. The tool itself: `tool.metadata["writes"]`, or MCP's `readOnlyHint`, which langchain-mcp-adapters puts into the metadata.
    3. The traces: a reading call was answered differently once this tool had been called.
    4. The name: `get_order`, `search`, `order_lookup` read.
    5. Nothing: it writes. Taken for a reading one by mistake, it would let a dream pay for what was never done.

    Raises `ConfigurationError` for a name in `writes` that no tool has.
    """
    known = {tool.name: tool for tool in tools}
    called = [[(call.name, *step) for step in trace if (call := parse_call(step[0])) is not None] for trace in traces]
    names = sorted(known.keys() | {name for calls in called for name, _, _ in calls})
    if writes is not None:
        for name in sorted(set(writes) - set(names)):
            raise ConfigurationError.unknown("tool in writes", name, names)
        return {name: ToolUse(name in writes, f"writes= {'names' if name in writes else 'does not name'} it") for name in names}
    said = {name: use for name in names if (use := _said_by(known.get(name))) is not None}
    found = {name: said.get(name) or use_by_name(name) for name in names}
    changed = _changed_after(called, {name for name, use in found.items() if not use.writes})
    for name, witness in changed.items():
        if name not in said:
            found[name] = ToolUse(True, f"in the traces, an identical call of {witness} was answered differently after it")
    return found


def writing_tools(
    tools: Iterable[BaseTool] = (), trajectories: Iterable[Trajectory] = (), *, writes: Collection[str] | None = None
) -> frozenset[str]:
    """The names of the tools that write; `find_tool_uses` says why. Args: `trajectories`, real ones."""
    uses = find_tool_uses(tools, map(trace_of, trajectories), writes=writes)
    return frozenset(name for name, use in uses.items() if use.writes)


def trace_of(trajectory: Trajectory) -> Trace:
    return [(step.action, step.next_observation) for step in trajectory.steps if step.valid]


def _said_by(tool: BaseTool | None) -> ToolUse | None:
    metadata = (tool.metadata if tool is not None else None) or {}
    for key, means_writing in (("writes", True), ("readOnlyHint", False)):
        if isinstance(said := metadata.get(key), bool):
            return ToolUse(said is means_writing, f"its metadata says {key}={said}")
    return None


@lru_cache(10_000)
def use_by_name(name: str) -> ToolUse:
    """What is supposed of a tool of which nothing is known but its name."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    outer = words[:1] + words[-1:]
    nouns = words and _ASKING.fullmatch(words[0]) and not {"and", "or"} & {*words}
    told = words[:-1] if nouns and _NOUN.fullmatch(words[-1]) else words
    doubts = (word for word in told if _WRITING.fullmatch(word))
    reads, doubt = any(map(_READING.fullmatch, outer)), next(doubts, "")
    if reads and not doubt:
        return ToolUse(False, "its name is that of a reading tool")
    return ToolUse(True, f"its name has the word {doubt!r}" if reads else "nothing says that it only reads")


def _changed_after(called: Sequence[Sequence[tuple[str, str, str]]], reading: Collection[str]) -> dict[str, str]:
    """Tool -> the reading tool of which an identical call was answered differently once it, and no other suspect, was called.

    Args: `called`, the calls of each trace as (tool, action, answer).
    """
    witnesses: dict[str, Counter[str]] = {}
    fickle = set[str]()
    for calls in called:
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
    found = {}
    for name, counted in witnesses.items():
        if sure := [witness for witness, _ in counted.most_common() if witness not in fickle]:
            found[name] = sure[0]
    return found
