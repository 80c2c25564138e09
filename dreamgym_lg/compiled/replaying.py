"""Counts how exactly a world answers recorded calls, and decides which tools are admitted."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dreamgym_lg.compiled.examples import find_ids, id_arguments, kind_of
from dreamgym_lg.compiled.expressions import canonical
from dreamgym_lg.compiled.recordings import Kind, Recordings, Trace
from dreamgym_lg.compiled.runtime import Refusal
from dreamgym_lg.statistics import wilson

MIN_EXACT = 0.99
"""Share of a tool's answers that must be exact for it to be admitted."""

PAGE = """# Replay of left-out traces

Each trace was replayed on a world made from traces that share no entity with it. *Refused* calls are left to the next
responder. *Not knowable* are those among them about an entity that the trace had not looked up before; the others lack a rule.

A tool is *admitted* if at least {exact:.0%} of its answers are exact. For one that writes, the 95 % interval must also begin at
{lower:g} or above (*lower bound*). A reading tool returns what was recorded, but knows only what the other traces looked up,
seldom what a left-out trace asks for. Without an exact or wrong answer it is admitted, but *not measured*.

| tool | use | exact | refused | not knowable | wrong | lower bound | admitted |
|---|---|---|---|---|---|---|---|
"""


@dataclass
class ToolReplay:
    """Replay figures of one tool of a compiled world, on left-out traces."""

    tool: str
    writes: bool
    exact: int = 0
    """Answers equal to the recorded ones, byte for byte."""
    refused: int = 0
    """Calls that the world leaves to the next responder: an unknown entity, or no rule."""
    unknowable: int = 0
    """Refused calls about an entity that the trace had not looked up before: no rule could answer them."""
    wrong: int = 0
    difference: str = ""
    """The first wrong answer, and the recorded one."""
    gap: str = ""
    """The first refused call that is not unknowable, and its recorded answer."""
    admitted: bool = False
    lacks_rule: bool = False
    """True if rules were found in parts of the traces, and none in all of them."""
    errors: int = 0
    """Recorded calls that ended in an error, of the kinds that replay; the other figures count them like any call."""
    left_out: int = 0
    """Recorded calls that ended in another error. They count nowhere else, and the world did not learn them."""
    left_out_text: str = ""
    """The first of these errors."""
    answered: int = 0
    """Calls among those left out that the world answers without an error."""

    @property
    def lacking(self) -> int:
        """Refused calls that a rule could answer."""
        return self.refused - self.unknowable

    def add(self, other: "ToolReplay", *, learned: bool) -> None:
        """Add the figures of one kind of answer. Args: `learned`, False for an error that does not replay."""
        if learned:
            for name in ("exact", "refused", "unknowable", "wrong", "errors"):
                setattr(self, name, getattr(self, name) + getattr(other, name))
            self.difference = self.difference or other.difference
        else:
            self.left_out += other.errors
            self.answered += other.answered
            self.left_out_text = self.left_out_text or other.left_out_text

    @property
    def lower(self) -> float:
        """Lower bound of the 95 % interval of the share of answers that are exact."""
        return wilson(self.exact, self.exact + self.wrong)[0] if self.exact + self.wrong else 0.0

    def admit(self, min_lower: float) -> None:
        """Admit the tool if `MIN_EXACT` of its answers are exact. A writing one needs `min_lower` too."""
        exact = self.exact >= MIN_EXACT * (self.exact + self.wrong)
        self.admitted = exact and not self.lacks_rule and (not self.writes or self.lower >= min_lower)

    @property
    def admission(self) -> str:
        """`yes`, `no`, or `yes, not measured` for a tool without an answer."""
        return "no" if not self.admitted else "yes" if self.exact else "yes, not measured"

    @property
    def refusal(self) -> str:
        """The reason why the tool is not admitted; "" for an admitted one."""
        if self.admitted:
            return ""
        if self.wrong:
            return f"{self.wrong} of {self.exact + self.wrong} answers to left-out traces were wrong"
        if not self.exact:
            return f"no rule answers any of its {self.refused} calls in left-out traces"
        if self.lacks_rule:
            return f"rules from parts of the traces answered {self.exact} left-out calls exactly, but none fits all traces"
        return f"it answered {self.exact} calls of left-out traces exactly, too few to be sure of a tool that writes"


class Replay:
    """Counts exact, refused and wrong answers of each tool. Args: `recordings`, of all folds."""

    def __init__(self, recordings: Recordings) -> None:
        self.writes = recordings.writes
        self.ids = find_ids(recordings.records, self.writes)
        self.kinds: dict[Kind, ToolReplay] = {}
        """Figures by tool and kind of the recorded answer."""
        self.without_rule: Collection[str] = ()
        """Writing tools without a rule in the module that was made from all traces."""

    def add(self, trace: Trace, answers: Sequence[str | Refusal | None]) -> None:
        """Count a world's answers to the calls of a trace; None is a refusal."""
        looked_up = set[str]()
        for (tool, arguments, recorded), answer in zip(trace.calls, answers, strict=True):
            call_key = {canonical([tool, dict(arguments)])}
            named = {*id_arguments(arguments, self.ids[tool]).values()} if tool in self.writes else call_key
            each = self.kinds.setdefault((tool, kind_of(recorded)), ToolReplay(tool, tool in self.writes))
            each.exact += answer == recorded
            each.refused += answer is None
            each.unknowable += answer is None and not named <= looked_up
            each.wrong += answer not in (None, recorded)
            call = f"{tool} {json.dumps(dict(arguments), ensure_ascii=False)}"
            if answer not in (None, recorded):
                each.difference = each.difference or f"{call}: the world answers {answer!r}, and the trace {recorded!r}"
            elif answer is None and named <= looked_up:
                each.gap = each.gap or f"{call}: the world knows no answer, and the trace answers {recorded!r}"
            if isinstance(recorded, Refusal):
                each.errors += 1
                each.answered += isinstance(answer, str)
                each.left_out_text = each.left_out_text or recorded.text
            if tool not in self.writes:
                looked_up |= {*call_key, *map(canonical, arguments.values())}

    @property
    def unlearned(self) -> set[Kind]:
        """The kinds of refusals that do not replay: too few of their answers are exact."""
        return {
            (tool, kind)
            for (tool, kind), each in self.kinds.items()
            if kind is not None and not 0 < each.exact >= MIN_EXACT * (each.exact + each.wrong)
        }

    def report(self, min_lower: float) -> list[ToolReplay]:
        """The tools, reading ones first, each admitted or not."""
        unlearned, tools = self.unlearned, dict[str, ToolReplay]()
        for (tool, kind), each in sorted(self.kinds.items(), key=lambda pair: pair[0][1] is not None):
            tools.setdefault(tool, ToolReplay(tool, each.writes)).add(each, learned=(tool, kind) not in unlearned)
        for each in tools.values():
            each.lacks_rule = each.tool in self.without_rule
            each.admit(min_lower)
        return sorted(tools.values(), key=lambda each: (each.writes, each.tool))


def replay_page(report: Sequence[ToolReplay], min_lower: float) -> str:
    """The figures as a page of Markdown. Args: `min_lower`, as of `ToolReplay.admit`."""
    rows = [
        f"| `{each.tool}` | {'writes' if each.writes else 'reads'} | {each.exact} | {each.refused} | {each.unknowable} "
        f"| {each.wrong} | {each.lower:.2f} | {each.admission} |"
        for each in report
    ]
    parts = {
        "Calls that ended in an error:": [_errors(each) for each in report if each.errors or each.left_out],
        "First differences:": [f"* {each.difference}" for each in report if each.difference],
    }
    lines = [line for head, points in parts.items() if points for line in ("", head, "", *points)]
    return PAGE.format(exact=MIN_EXACT, lower=min_lower) + "\n".join([*rows, *lines, ""])


def _errors(each: ToolReplay) -> str:
    """A line on the errors of one tool."""
    line = f"* `{each.tool}`: {each.errors} are learned, {each.left_out} left out"
    if not each.left_out:
        return line
    return (
        f"{line}, the first with {each.left_out_text[:200]!r}; to {each.answered} of these the world answers without an error"
    )
