"""`dreamgym ui`: a local page over a replay buffer."""

from pathlib import Path
from typing import Annotated

import typer

from dreamgym_lg.cli.console import console, errors_shown
from dreamgym_lg.errors import ReplayBufferError
from dreamgym_lg.report.pages import check_installed

Database = Annotated[
    Path, typer.Argument(metavar="PATH", help="A replay buffer ([b]replay.db[/b]), or the folder of an experiment.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Where the page is served on this machine; 0 takes any free port.")]


def ui(path: Database, port: Port = 8321) -> None:
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
        serve(file, port, say=lambda address: console.print(f"{address} shows {file}; Ctrl-C ends it", soft_wrap=True))
