"""Compiles recorded traces into a world: a module that answers calls, admitted where it replays them."""

import json
import shutil
import sqlite3
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from langchain_core.tools import BaseTool

from dreamgym_lg.actions import parse_call
from dreamgym_lg.compiled import runtime
from dreamgym_lg.compiled.enumerate_rules import CallRecord, find_rules
from dreamgym_lg.compiled.expressions import canonical
from dreamgym_lg.compiled.runtime import State, follow, key_of, parsed
from dreamgym_lg.compiled.source import write_source
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.progress import OnProgress, counter, show_progress
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.splits import _groups, common_entities
from dreamgym_lg.statistics import wilson
from dreamgym_lg.tool_uses import find_tool_uses

FOLDS = 5
STYLES: Sequence[Mapping[str, Any]] = (
    {},
    {"ensure_ascii": False},
    {"separators": (",", ":")},
    {"separators": (",", ":"), "ensure_ascii": False},
    {"indent": 2},
    {"indent": 2, "ensure_ascii": False},
)
"""Ways to write JSON that tools use, as arguments of `json.dumps`."""


@dataclass
class ToolReplay:
    """How a tool of a compiled world answers the calls of traces that it was not made from."""

    tool: str
    writes: bool
    exact: int = 0
    """Answers that are the recorded ones, byte for byte."""
    refused: int = 0
    """Calls that the world leaves to the next responder: an unknown entity, or no rule."""
    wrong: int = 0
    difference: str = ""
    """The first wrong answer beside the recorded one."""
    admitted: bool = False

    @property
    def lower(self) -> float:
        """Lower bound of the 95 % interval of the share of answers that are exact."""
        return wilson(self.exact, self.exact + self.wrong)[0] if self.exact + self.wrong else 0.0


def compile_world(
    replay_buffer: ReplayBuffer,
    out: str | Path,
    *,
    tools: Sequence[BaseTool] = (),
    writes: Collection[str] | None = None,
    environment: str | None = None,
    min_exact: float = 0.99,
    min_lower: float = 0.7,
    on_progress: OnProgress = show_progress,
) -> list[ToolReplay]:
    """Write a world that answers tool calls as the recorded backend does, and say how exactly.

    The folder holds `world.py` (readable, yours to change), `world.db` (the first documents of each task), `rules.json` (the
    admitted tools) and `REPLAY.md` (the table that is returned).

    Args:
        out: The folder; an existing world there is replaced.
        tools, writes: As of `find_tool_uses`.
        environment: Whose traces; by default all of the buffer's.
        min_exact: Least share of a tool's answers to left-out traces that must be exact for it to be admitted.
        min_lower: Least lower bound of that share's 95 % interval.

    Raises `ConfigurationError` where no trace holds a tool call.
    """
    records = [each for each in replay_buffer.records() if each.split == "train" and environment in (None, each.environment)]
    uses = find_tool_uses(tools, [[step[:2] for step in each.steps if step[2]] for each in records], writes=writes)
    written = frozenset(tool for tool, use in uses.items() if use.writes)
    texts = [
        (
            each.task_id,
            [
                (call.name, call.arguments, answer)
                for action, answer, valid, _ in each.steps
                if valid and (call := parse_call(action))
            ],
        )
        for each in records
    ]
    if not any(calls for _, calls in texts):
        raise ConfigurationError(
            f"none of {len(texts)} recorded episodes holds a tool call: a world is compiled from calls and their answers"
        )
    report = _replay(texts, written, min_exact=min_exact, min_lower=min_lower, on_progress=on_progress)
    _write_folder(Path(out), texts, written, report)
    return report


Trace = tuple[str, Sequence[tuple[str, Mapping[str, Any], str]]]
"""The task, and its calls: tool, arguments, answer."""
Documents = dict[tuple[str, str], str]


def _source(traces: Sequence[Trace], writes: Collection[str], *, title: str = "A world.") -> str:
    styles = _styles(traces)
    reads: dict[str, dict[str, None]] = {}
    for tool, arguments, _ in (call for _, calls in traces for call in calls):
        if tool not in writes:
            reads.setdefault(tool, {}).update(dict.fromkeys(arguments))
    used = {tool for _, calls in traces for tool, _, _ in calls if tool in writes}
    records = [
        [CallRecord(tool, arguments, parsed(answer, styles[tool])) for tool, arguments, answer in calls] for _, calls in traces
    ]
    return write_source(find_rules(records, used), {tool: list(names) for tool, names in reads.items()}, styles, title=title)


def _styles(traces: Sequence[Trace]) -> dict[str, Mapping[str, Any]]:
    """Of each tool the style in which most of its answers are JSON."""
    answers: dict[str, list[str]] = {}
    for tool, _, answer in (call for _, calls in traces for call in calls):
        answers.setdefault(tool, []).append(answer)
    return {
        tool: max(STYLES, key=lambda style: sum(not isinstance(parsed(text, style), str) for text in texts))
        for tool, texts in answers.items()
    }


def _first_known(calls: Sequence[tuple[str, Mapping[str, Any], str]], source: ModuleType) -> Documents:
    """Documents of the beginning: read before a writing call that names one of their values."""
    documents, named = Documents(), set[str]()
    for tool, arguments, answer in calls:
        place = (tool, key_of(arguments))
        values = {json.dumps(value) for value in runtime.values_in(dict(arguments)) if isinstance(value, str) and value}
        if tool not in source.READS:
            named |= values
        elif place not in documents and not any(name in place[1] or name in json.dumps(answer) for name in named):
            documents[place] = json.dumps(parsed(answer, source.JSON.get(tool, {})))
    return documents


def _replay(
    traces: Sequence[Trace], writes: Collection[str], *, min_exact: float, min_lower: float, on_progress: OnProgress
) -> list[ToolReplay]:
    """Replay each trace on a world that was made from traces without its entities."""
    report: dict[str, ToolReplay] = {}
    folds = list(_folds(traces, writes))
    advance = counter(on_progress, "compile: replay", len(folds))
    for held_out in folds:
        rest = [trace for number, trace in enumerate(traces) if number not in held_out]
        source = _module(_source(rest, writes))
        documents = {place: text for _, calls in rest for place, text in _first_known(calls, source).items()}
        for number in held_out:
            _replay_trace(traces[number][1], source, documents, report, writes)
        advance()
    for each in report.values():
        answered = each.exact + each.wrong
        each.admitted = (
            answered > 0 and each.exact >= min_exact * answered and each.lower >= min_lower
            if each.writes
            else each.exact >= min_exact * answered
        )
    return sorted(report.values(), key=lambda each: (each.writes, each.tool))


def _replay_trace(
    calls: Sequence[tuple[str, Mapping[str, Any], str]],
    source: ModuleType,
    documents: Documents,
    report: dict[str, ToolReplay],
    writes: Collection[str],
) -> None:
    state = State(documents)
    for tool, arguments, answer in calls:
        each = report.setdefault(tool, ToolReplay(tool, tool in writes))
        own = follow(source, state, tool, arguments, answer)
        each.exact += own == answer
        each.refused += own is None
        if own is not None and own != answer:
            each.wrong += 1
            each.difference = (
                each.difference or f"{tool} {json.dumps(dict(arguments), ensure_ascii=False)}: {own!r} instead of {answer!r}"
            )


def _folds(traces: Sequence[Trace], writes: Collection[str]) -> Iterator[set[int]]:
    """Numbers of traces, in `FOLDS` parts that share no entity but those that more than a tenth of the traces name."""
    keys = [
        frozenset(
            canonical(value)
            for tool, arguments, _ in calls
            if tool not in writes
            for value in runtime.values_in(dict(arguments))
        )
        for _, calls in traces
    ]
    common = common_entities(keys)
    groups = _groups([(own - common) | {("task", task)} for own, (task, _) in zip(keys, traces, strict=True)])
    parts: list[set[int]] = [set() for _ in range(FOLDS)]
    for group in sorted(groups, key=len, reverse=True):
        min(parts, key=len).update(group)
    yield from (part for part in parts if part)


def _module(text: str) -> ModuleType:
    """A module of a text that `write_source` wrote: no code of anybody else."""
    module = ModuleType("compiled_world")
    sys.modules.setdefault("runtime", runtime)
    exec(compile(text, "world.py", "exec"), vars(module))
    return module


def _write_folder(folder: Path, traces: Sequence[Trace], writes: Collection[str], report: Sequence[ToolReplay]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = _source(traces, writes, title=f"The backend of {len(traces)} recorded episodes.")
    source = _module(text)
    (folder / "world.py").write_text(text)
    shutil.copyfile(runtime.__file__, folder / "runtime.py")
    (folder / "world.db").unlink(missing_ok=True)
    with closing(sqlite3.connect(folder / "world.db")) as connection:
        connection.execute(
            "CREATE TABLE documents (id INTEGER PRIMARY KEY, task TEXT, tool TEXT, arguments TEXT, document TEXT)"
        )
        rows = [(task, *place, stored) for task, calls in traces for place, stored in _first_known(calls, source).items()]
        connection.executemany("INSERT INTO documents (task, tool, arguments, document) VALUES (?, ?, ?, ?)", rows)
        connection.commit()
    figures = {each.tool: {"exact": each.exact, "refused": each.refused, "wrong": each.wrong} for each in report}
    admitted = {each.tool: each.admitted for each in report}
    (folder / "rules.json").write_text(json.dumps({"admitted": admitted, "replay": figures}, indent=2) + "\n")
    (folder / "REPLAY.md").write_text(replay_table(report))


REPLAY_PAGE = """# Replay of left-out traces

Each trace was replayed on a world made from traces that share no entity with it. *Refused* calls are left to the next
responder: most are first looks at an entity that no other trace names.

| tool | use | exact | refused | wrong | lower bound | admitted |
|---|---|---|---|---|---|---|
"""


def replay_table(report: Sequence[ToolReplay]) -> str:
    """The figures of `compile_world` as a page of Markdown."""
    rows = [
        f"| `{each.tool}` | {'writes' if each.writes else 'reads'} | {each.exact} | {each.refused} | {each.wrong} "
        f"| {each.lower:.2f} | {'yes' if each.admitted else 'no'} |"
        for each in report
    ]
    differences = [f"* {each.difference}" for each in report if each.difference]
    return REPLAY_PAGE + "\n".join([*rows, *(["", "First differences:", "", *differences] if differences else []), ""])
