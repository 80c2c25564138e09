"""How errors end every command."""

import io
from collections.abc import Iterator

import pytest
import typer
from rich.console import Console
from rich.table import Table

from dreamgym_lg.cli import console as shared
from dreamgym_lg.cli.console import errors_shown
from dreamgym_lg.errors import ConfigurationError


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    text = io.StringIO()
    monkeypatch.setattr(shared, "console", Console(file=text, force_terminal=False, width=120))
    yield text


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigurationError("no [world] of this name"), 2, "error: no [world] of this name\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_how_a_command_ends(error: BaseException, code: int, said: str, output: io.StringIO) -> None:
    with pytest.raises(typer.Exit) as ended, errors_shown():
        raise error
    assert ended.value.exit_code == code and output.getvalue() == said


def test_only_a_command_that_resumes_says_that_it_goes_on(output: io.StringIO) -> None:
    with pytest.raises(typer.Exit), errors_shown(resumes=True):
        raise KeyboardInterrupt
    assert output.getvalue() == "stopped; the same command goes on from here\n"


def test_tables_are_as_wide_as_their_content_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dreamgym compare | cat` showed two agents as `my_app.p…` each."""
    name, table = "my_app.py:graph" * 20, Table("agent", "success")
    table.add_row(name, "1.00")

    def shown(**terminal: bool) -> str:
        console = type(shared.console)(file=io.StringIO(), **terminal)
        console.print(table)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    monkeypatch.delenv("COLUMNS", raising=False)
    assert name in shown() and name not in shown(force_terminal=True)
    monkeypatch.setenv("COLUMNS", "80")
    assert name not in shown()


def test_an_error_of_the_code_is_not_hidden(output: io.StringIO) -> None:
    with pytest.raises(ZeroDivisionError), errors_shown():
        raise ZeroDivisionError
    assert output.getvalue() == ""
