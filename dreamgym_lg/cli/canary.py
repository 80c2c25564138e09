"""`dreamgym canary`: what a canary or a shadow showed, and its end by hand."""

from pathlib import Path
from typing import Annotated

import typer

from dreamgym_lg.cli.console import console, errors_shown

Log = Annotated[Path, typer.Argument(metavar="LOG", help="The file given to canary() or shadow() as log=.")]
Name = Annotated[str | None, typer.Option(help="Of the canary; default: all in the file.")]
Html = Annotated[Path | None, typer.Option(help="Write a page, too. Needs one canary.")]
Stop = Annotated[bool, typer.Option("--stop", help="End it for good: production serves every thread from the next run on.")]


def canary(log: Log, name: Name = None, html: Html = None, stop: Stop = False) -> None:
    """Show what a canary or a shadow of a policy in production showed: who served, outcomes, agreement, the decision."""
    with errors_shown():
        from dreamgym_lg.errors import CanaryLogError
        from dreamgym_lg.production.log import CanaryLog
        from dreamgym_lg.production.report import create_report, report_table, write_page

        if not log.exists():
            raise CanaryLogError(f"{log} does not exist; give the file that canary() or shadow() was given as log=")
        opened = CanaryLog(log)
        if stop:
            opened.stop(name=name)
        for each in [name] if name is not None else opened.names():
            console.print(report_table(create_report(opened, each)))
        if html is not None:
            write_page(create_report(opened, name), html)
            console.print(f"the page: {html}", soft_wrap=True)
