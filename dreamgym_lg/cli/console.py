"""Shared by all commands: options, output, errors and typed lines."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.text import Text

from dreamgym_lg.errors import DreamGymError
from dreamgym_lg.redaction import redact_environment
from dreamgym_lg.text import printable

_MAX_COLUMNS = 10_000
"""Maximum columns of an output that is no terminal."""


class _Console(Console):
    """Shows tables as wide as their content, unless a terminal or `COLUMNS` limits them."""

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        size = super().size
        return size if self.is_terminal or "COLUMNS" in os.environ else size._replace(width=_MAX_COLUMNS)


console = _Console()


@contextmanager
def errors_shown(*, resumes: bool = False) -> Iterator[None]:
    """End the command at an error of this library with its message alone.

    The exit code is 2, or 130 after Ctrl-C. Args: `resumes`, True if the same command resumes after an interruption.
    """
    try:
        yield
    except DreamGymError as error:
        console.print(f"[bold red]error:[/] {escape(redact_environment(str(error)))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here" if resumes else "stopped", style="yellow")
        raise typer.Exit(130) from None


def typed(prompt: str) -> str | None:
    """The next line typed; None at the end of the input. A backslash at its end joins the next line."""
    try:
        line = input(prompt).strip()
    except EOFError:
        console.print()
        return None
    if not sys.stdin.isatty():
        say(line)  # a terminal shows the line while it is typed
    if not line.endswith("\\"):
        return line
    rest = typed("... ")
    return None if rest is None else f"{line[:-1]}\n{rest}"


def chosen(**options: Any) -> dict[str, Any]:
    """The options that a command was given; the others keep their defaults."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value != []}


def say(text: str, style: str = "") -> None:
    """Print text as it is: without markup and line wrapping."""
    console.print(Text(printable(text), style), soft_wrap=True)


def quiet_libraries(*, offline: bool) -> None:
    """Set quiet defaults: no telemetry, progress bars or busy waiting and, if `offline`, no download."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; downloads of the hub still show a bar
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two models take turns: waiting threads must not use a core
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
