"""`dreamgym canary`: the log of a canary or a shadow as a table."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from dreamgym_lg.cli.console import console, errors_shown
from dreamgym_lg.errors import CanaryLogError
from dreamgym_lg.statistics import rate

if TYPE_CHECKING:
    from dreamgym_lg.production.log import CanaryLog, Pair

Log = Annotated[Path, typer.Argument(metavar="LOG", help="The file given to canary() or shadow() as log=.")]
Name = Annotated[str | None, typer.Option(help="Of the canary; default: all in the file.")]
Stop = Annotated[bool, typer.Option("--stop", help="End it for good: production serves every thread from the next run on.")]

RATES = {
    "same_writes": "the same writing calls, with the same arguments",
    "same_calls": "the same calls",
    "same_answer": "the same final answer",
    "real_success": "success of production by verify=",
    "simulated_success": "success of the policy by verify=",
}
STATUSES = {
    "compared": "played to the end and compared",
    "unanswered": "ended at a call that nothing recorded answers",
    "interrupted": "not simulated: the real run stopped for a person",
    "resumed": "not simulated: the real run went on after it had stopped",
    "blocked": "stopped by the guard",
    "failed": "failed",
}
DIFFERENCES = {"only_real": "only production called {} so", "only_simulated": "only the policy called {} so"}
DIFFERENCES_SHOWN = 10


def canary(log: Log, name: Name = None, stop: Stop = False) -> None:
    """Show served threads, outcomes, agreement and the decision of a canary or shadow."""
    with errors_shown():
        from dreamgym_lg.production.log import CanaryLog

        if not log.exists():
            raise CanaryLogError(f"{log} does not exist; give the file that canary() or shadow() was given as log=")
        opened = CanaryLog(log)
        if stop:
            opened.stop(name=name)
        for each in [name] if name is not None else opened.names():
            console.print(canary_table(opened, each))


def canary_table(log: "CanaryLog", name: str) -> Table:
    """Served threads and the decision of a canary, or the agreement of a shadow's sides."""
    state = log.state(name)
    table = Table("", "", "", title=Text(f"{state.name}: {state.verdict}"), show_header=False, title_justify="left")
    for side, served in state.served.items() if state.share else ():
        outcome = f"success {served.success}" if served.success else "no outcome yet"
        counts = f"{served.threads} threads, {served.runs} runs, {served.errors} errors"
        table.add_row(side, f"{outcome}, {served.waiting} without", counts)
    for row in _simulated(*log.pairs(name)):
        table.add_row("simulated sides", *map(Text, row))
    return table


def _simulated(pairs: "Sequence[Pair]", dropped: int) -> Iterator[tuple[str, str]]:
    for key, words in RATES.items():
        if share := rate(value for pair in pairs if (value := getattr(pair, key)) is not None):
            yield words, f"{share} of {share.episodes}"
    statuses = Counter(pair.status for pair in pairs)
    yield from ((words, str(statuses[status])) for status, words in STATUSES.items() if statuses[status])  # type: ignore[index]
    if dropped:
        yield "not simulated: too many waited", str(dropped)
    calls = (words.format(tool) for key, words in DIFFERENCES.items() for pair in pairs for tool in pair.details.get(key, ()))
    yield from ((words, str(count)) for words, count in Counter(calls).most_common(DIFFERENCES_SHOWN))
