"""`dreamgym canary`: the log of a canary as a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from dreamgym_lg.cli.console import console, errors_shown
from dreamgym_lg.errors import CanaryLogError

if TYPE_CHECKING:
    from dreamgym_lg.production.log import CanaryLog

Log = Annotated[Path, typer.Argument(metavar="LOG", help="The file given to canary() as log=.")]
Name = Annotated[str | None, typer.Option(help="Name of the canary. Default: all in the file.")]
Stop = Annotated[bool, typer.Option("--stop", help="End it for good: production serves every thread from the next run on.")]


def canary(log: Log, name: Name = None, stop: Stop = False) -> None:
    """Show served threads, outcomes and the decision of a canary."""
    with errors_shown():
        from dreamgym_lg.production.log import CanaryLog

        if not log.exists():
            raise CanaryLogError(f"{log} does not exist; give the file that canary() was given as log=")
        opened = CanaryLog(log)
        if stop:
            opened.stop(name=name)
        for each in [name] if name is not None else opened.names():
            console.print(canary_table(opened, each))


def canary_table(log: "CanaryLog", name: str) -> Table:
    """Served threads and the decision of a canary."""
    state = log.state(name)
    table = Table("", "", "", title=Text(f"{state.name}: {state.verdict}"), show_header=False, title_justify="left")
    for side, served in state.served.items():
        outcome = f"success {served.success}" if served.success else "no outcome yet"
        counts = f"{served.threads} threads, {served.runs} runs, {served.errors} errors"
        table.add_row(side, f"{outcome}, {served.waiting} without", counts)
    return table
