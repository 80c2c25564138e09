"""The report of a canary or a shadow: the same figures for the terminal and as a page."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dreamgym_lg.production.log import SIDES, CanaryLog, CanaryState, Pair, Side
from dreamgym_lg.report.pages import check_installed, create_templates, text
from dreamgym_lg.statistics import Rate, rate

if TYPE_CHECKING:
    from rich.table import Table

AGREEMENTS = {
    "same_writes": "the same writing calls, with the same arguments",
    "same_calls": "the same calls",
    "same_answer": "the same final answer",
}
STATUSES = {
    "compared": "played to the end and compared",
    "unanswered": "ended at a call that nothing recorded answers",
    "interrupted": "not simulated: the real run stopped for a person",
    "resumed": "not simulated: the real run went on after it had stopped",
    "blocked": "stopped by the guard",
    "failed": "failed",
}
_DIFFERENCES_SHOWN = 10


class Report(NamedTuple):
    """One canary."""

    state: CanaryState
    statuses: dict[str, int]
    """Of the simulated sides, by what came of them, in words."""
    agreement: dict[str, Rate]
    outcomes: dict[str, Rate]
    """By the user's own check, of the runs whose two sides it judged."""
    differences: list[tuple[str, int]]
    """Calls that only one side made, the most frequent first."""

    @property
    def sides(self) -> list[tuple[Side, int, int, int, Rate | None]]:
        """Side, threads, runs, errors and success, of a canary; none of a shadow, where production serves."""
        return [(side, *self.state.served[side]) for side in SIDES] if self.state.share else []


def create_report(log: CanaryLog, name: str | None = None) -> Report:
    """Read a canary's report from its log. Args: `name`, needed if it holds several."""
    state = log.state(name)
    pairs, dropped = log.pairs(state.name)
    counts = Counter(pair.status for pair in pairs)
    statuses = {words: counts[status] for status, words in STATUSES.items() if counts[status]}  # type: ignore[index]
    if dropped:
        statuses["not simulated: too many waited"] = dropped
    judged = [(each.real_success, each.simulated_success) for each in pairs]
    judged = [both for both in judged if None not in both]
    agreement = {words: [getattr(each, key) for each in pairs] for key, words in AGREEMENTS.items()}
    outcomes = {words: [both[side] for both in judged] for side, words in enumerate(("real side", "simulated side"))}
    return Report(state, statuses, _rates(agreement), _rates(outcomes), _differences(pairs))


def report_table(report: Report) -> "Table":
    """The report for the terminal."""
    from rich.table import Table
    from rich.text import Text

    state = report.state
    table = Table("", "", "", title=Text(f"{state.name}: {state.verdict}"), show_header=False, title_justify="left")
    for side, threads, runs, errors, success in report.sides:
        outcome = f"success {text(success)}" if success else "no outcome yet"
        table.add_row(side, outcome, f"{threads} threads, {runs} runs, {errors} errors")
    for title, rows in (("the same in both sides", report.agreement), ("own check", report.outcomes)):
        for words, share in rows.items():
            table.add_row(Text(title), Text(words), f"{share} of {share.episodes}")
    for words, count in [*report.statuses.items(), *report.differences]:
        table.add_row("simulated sides", Text(words), str(count))
    return table


def write_page(report: Report, path: Path) -> None:
    """Write the report as a page that stands alone. Without jinja2: `MissingDependency`."""
    check_installed("jinja2", extra="report")
    page = create_templates().get_template("canary.html.j2").render(report=report, state=report.state)
    path.write_text(page, encoding="utf-8", errors="replace")


def _rates(outcomes: Mapping[str, Iterable[bool | None]]) -> dict[str, Rate]:
    """The rates of the known outcomes; those without any are left out."""
    rates = {words: rate(value for value in values if value is not None) for words, values in outcomes.items()}
    return {words: each for words, each in rates.items() if each is not None}


def _differences(pairs: Sequence[Pair]) -> list[tuple[str, int]]:
    counts = Counter[str]()
    for pair in pairs:
        other = "policy" if pair.chosen == "production" else "production"
        for key, side in (("only_real", pair.chosen), ("only_simulated", other)):
            counts.update({f"only {side} called {tool} so" for tool in pair.details.get(key, ())})
    return counts.most_common(_DIFFERENCES_SHOWN)
