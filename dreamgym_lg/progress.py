"""Progress bars, one for each stage: in the terminal of the command line, and in the output of a notebook's cell."""

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

OnProgress = Callable[[str, int, int], None]
"""(label, how many are done, of how many)."""


def counter(report: OnProgress, label: str, total: int) -> Callable[[], None]:
    """A function that reports one more done each time it is called."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        report(label, done, total)

    return count


class StageBars(Progress):
    """A bar for each stage, which is what a label begins with, up to a colon or a bracket.

    Only the clock of the stage reported last runs.
    """

    def __init__(self, console: Console, **options: Any) -> None:
        columns = TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console, **options)
        self._stages: dict[str, TaskID] = {}

    def report(self, label: str, done: int, total: int) -> None:
        """Show how much of a stage is done."""
        stage = _stage(label)
        if stage not in self._stages:
            self._stages[stage] = self.add_task(label, total=total)
        for task in self.tasks:
            if task.id != self._stages[stage] and task.stop_time is None:
                self.stop_task(task.id)  # a stage that is over must not go on counting seconds
            elif task.id == self._stages[stage]:
                task.stop_time = None  # one that goes on after another, as training does after a refresh, counts on
        self.update(self._stages[stage], description=label, completed=done, total=total)


class Tenths:
    """Says when a stage has got another tenth further: where no terminal shows it, a line is written then."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def reached(self, label: str, done: int, total: int) -> bool:
        """True the first time that the stage is in this tenth."""
        tenth = 10 * done // max(total, 1)
        before, self._told[_stage(label)] = self._told.get(_stage(label)), tenth
        return before != tenth


def _stage(label: str) -> str:
    return label.split(" (")[0].split(":")[0]


_cell: dict[int, tuple[StageBars, Any]] = {}
"""The bars of the notebook's cell that runs, by its number, and the handle by which they are shown anew."""
_tenths = Tenths()


def show_progress(label: str, done: int, total: int) -> None:
    """Show progress as bars in a notebook, on one line of a terminal, else on standard error by a line for each tenth."""
    if Console().is_jupyter:
        _show_in_notebook(label, done, total)
    elif sys.stderr.isatty():  # what is printed next takes the line's place, unless it is the stage's last
        print(f"\x1b[K{label}: {done}/{total}", end="\n" if done >= total else "\r", file=sys.stderr, flush=True)
    elif _tenths.reached(label, done, total):
        print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)


def _show_in_notebook(label: str, done: int, total: int) -> None:
    """By IPython's own display: rich's live display needs ipywidgets there."""
    from IPython import get_ipython
    from IPython.display import display

    number = get_ipython().execution_count
    if number not in _cell:
        _cell.clear()
        bars = StageBars(Console(force_jupyter=True))
        bars.report(label, done, total)
        _cell[number] = bars, display(bars, display_id=True)
    bars, handle = _cell[number]
    bars.report(label, done, total)
    handle.update(bars)
