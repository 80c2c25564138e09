"""The commands that show what is stored: `dreamgym canary` and `dreamgym ui`."""

from pathlib import Path
from typing import Annotated

import typer

from dreamgym_lg.cli.console import console, errors_shown, say
from dreamgym_lg.errors import CanaryLogError, ReplayBufferError
from dreamgym_lg.report.pages import check_installed

Log = Annotated[Path, typer.Argument(metavar="LOG", help="The file given to canary() or shadow() as log=.")]
Name = Annotated[str | None, typer.Option(help="Of the canary; default: all in the file.")]
Html = Annotated[Path | None, typer.Option(help="Write a page, too. Needs one canary.")]
Stop = Annotated[bool, typer.Option("--stop", help="End it for good: production serves every thread from the next run on.")]
PATH_HELP = "A replay buffer ([b]replay.db[/b]), or the folder of an experiment."
PORT_HELP = "Where the page is served on this machine; 0 takes any free port."


def canary(log: Log, name: Name = None, html: Html = None, stop: Stop = False) -> None:
    """Show what a canary or a shadow of a policy in production showed: who served, outcomes, agreement, the decision."""
    with errors_shown():
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
            say(f"the page: {html}")


def ui(
    path: Annotated[Path, typer.Argument(metavar="PATH", help=PATH_HELP)],
    port: Annotated[int, typer.Option(min=0, max=65535, help=PORT_HELP)] = 8321,
) -> None:
    """Show runs, curves, groups and episodes of a replay buffer in the browser, while a run goes on too; it is only read."""
    with errors_shown():
        check_installed("starlette", "uvicorn", "matplotlib", "jinja2", extra="ui")
        from dreamgym_lg.report.server import serve

        file = path / "replay.db" if path.is_dir() else path
        if path.is_dir() and not file.exists():
            raise ReplayBufferError(
                f"{path} holds no replay.db; give a replay buffer (a DreamGym's is the file that its ReplayBuffer names), or "
                "the folder of an experiment that has begun"
            )
        serve(file, port, say=lambda address: say(f"{address} shows {file}; Ctrl-C ends it"))
