"""Counts how exactly a world answers recorded calls, and decides which tools are admitted."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dreamgym_lg.compiled.examples import find_ids, id_arguments
from dreamgym_lg.compiled.expressions import canonical
from dreamgym_lg.compiled.recordings import Recordings, Trace
from dreamgym_lg.statistics import wilson

MIN_EXACT = 0.99
"""Share of a tool's answers that must be exact for it to be admitted."""

PAGE = """# Replay of left-out traces

Each trace was replayed on a world made from traces that share no entity with it. *Refused* calls are left to the next
responder. *Not knowable* are those among them about an entity that the trace had not looked up before; the others lack a rule.
A reading tool knows what the other traces looked up, seldom what a left-out trace asks for: it is admitted unless it is wrong.

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
    admitted: bool = False

    @property
    def lower(self) -> float:
        """Lower bound of the 95 % interval of the share of answers that are exact."""
        return wilson(self.exact, self.exact + self.wrong)[0] if self.exact + self.wrong else 0.0

    def admit(self, min_lower: float) -> None:
        """Admit the tool if `MIN_EXACT` of its answers are exact. A writing one needs `min_lower` too."""
        exact = self.exact >= MIN_EXACT * (self.exact + self.wrong)
        self.admitted = exact and (not self.writes or self.lower >= min_lower)

    @property
    def refusal(self) -> str:
        """The reason why the tool is not admitted; "" for an admitted one."""
        if self.admitted:
            return ""
        if self.wrong:
            return f"{self.wrong} of {self.exact + self.wrong} answers to left-out traces were wrong"
        if not self.exact:
            return f"no rule answers any of its {self.refused} calls in left-out traces"
        return f"it answered {self.exact} calls of left-out traces exactly, too few to be sure of a tool that writes"


class Replay:
    """Counts exact, refused and wrong answers of each tool. Args: `recordings`, of all folds."""

    def __init__(self, recordings: Recordings) -> None:
        self.writes = recordings.writes
        self.ids = find_ids(recordings.records, self.writes)
        self.tools: dict[str, ToolReplay] = {}

    def add(self, trace: Trace, answers: Sequence[str | None]) -> None:
        """Count a world's answers to the calls of a trace; None is a refusal."""
        looked_up = set[str]()
        for (tool, arguments, recorded), answer in zip(trace.calls, answers, strict=True):
            call_key = {canonical([tool, dict(arguments)])}
            named = {*id_arguments(arguments, self.ids[tool]).values()} if tool in self.writes else call_key
            each = self.tools.setdefault(tool, ToolReplay(tool, tool in self.writes))
            each.exact += answer == recorded
            each.refused += answer is None
            each.unknowable += answer is None and not named <= looked_up
            each.wrong += answer not in (None, recorded)
            if answer not in (None, recorded) and not each.difference:
                call = f"{tool} {json.dumps(dict(arguments), ensure_ascii=False)}"
                each.difference = f"{call}: the world answers {answer!r}, and the trace {recorded!r}"
            if tool not in self.writes:
                looked_up |= {*call_key, *map(canonical, arguments.values())}

    def report(self, min_lower: float) -> list[ToolReplay]:
        """The tools, reading ones first, each admitted or not."""
        for each in self.tools.values():
            each.admit(min_lower)
        return sorted(self.tools.values(), key=lambda each: (each.writes, each.tool))


def replay_page(report: Sequence[ToolReplay]) -> str:
    """The figures as a page of Markdown."""
    rows = [
        f"| `{each.tool}` | {'writes' if each.writes else 'reads'} | {each.exact} | {each.refused} | {each.unknowable} "
        f"| {each.wrong} | {each.lower:.2f} | {'yes' if each.admitted else 'no'} |"
        for each in report
    ]
    differences = [f"* {each.difference}" for each in report if each.difference]
    return PAGE + "\n".join([*rows, *(["", "First differences:", "", *differences] if differences else []), ""])
