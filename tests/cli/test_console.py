"""What every command shares: progress, and how errors end a command."""

import io
import re
from collections.abc import Iterator

import pytest
import typer
from rich.console import Console

from dreamgym_lg.cli import console as shared
from dreamgym_lg.cli.console import errors_shown, progress_shown
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.progress import StageBars


class Clocked(StageBars):
    """A progress display whose clock is set by the test."""

    now = 0.0
    shown: "Clocked"

    def __init__(self, console: Console) -> None:
        super().__init__(console, auto_refresh=False, get_time=lambda: Clocked.now)
        Clocked.shown = self

    def seconds(self) -> dict[str, float | None]:
        return {task.description: task.finished_time if task.finished else task.elapsed for task in self.tasks}


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    text = io.StringIO()
    monkeypatch.setattr(shared, "console", Console(file=text, force_terminal=False, width=120))
    monkeypatch.setattr(shared, "StageBars", Clocked)
    Clocked.now = 0.0
    yield text


def test_only_the_stage_reported_last_counts_seconds(output: io.StringIO) -> None:
    with progress_shown() as report:
        report("base policy (loss 3.0)", 1, 300)
        Clocked.now = 10.0
        report("train: rollout", 0, 40)  # the base policy was good enough before its last step
        Clocked.now = 100.0
        assert Clocked.shown.seconds() == {"base policy (loss 3.0)": 10.0, "train: rollout": 90.0}
        report("refresh (loss 1.0)", 1, 50)
        Clocked.now = 130.0
        report("train: update_policy", 1, 40)
        Clocked.now = 150.0
        assert Clocked.shown.seconds()["train: update_policy"] == 140.0, "training goes on after a refresh"
        assert Clocked.shown.seconds()["refresh (loss 1.0)"] == 30.0
        report("train: done", 40, 40)
        Clocked.now = 999.0
        assert Clocked.shown.seconds()["train: done"] == 140.0


def test_without_a_terminal_every_tenth_is_a_line(output: io.StringIO) -> None:
    with progress_shown() as report:
        for step in range(101):
            report(f"base policy (loss {step})", step, 100)
    lines = re.findall(r"^base policy \(loss \d+\): (\d+)/100$", output.getvalue(), re.MULTILINE)
    assert lines == [str(10 * tenth) for tenth in range(11)]


def test_a_stage_of_nothing_is_no_division_by_zero(output: io.StringIO) -> None:
    with progress_shown() as report:
        report("collect", 0, 0)
    assert "collect: 0/0" in output.getvalue()


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


def test_an_error_of_the_code_is_not_hidden(output: io.StringIO) -> None:
    with pytest.raises(ZeroDivisionError), errors_shown():
        raise ZeroDivisionError
    assert output.getvalue() == ""
