"""Progress bars, one for each stage, and progress without a terminal."""

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

OnProgress = Callable[[str, int, int], None]
"""(label, number done, total)."""


def counter(report: OnProgress, label: str, total: int) -> Callable[[], None]:
    """A function that reports one more done each time it is called."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        report(label, done, total)

    return count


class StageBars(Progress):
    """A bar for each stage, the beginning of a label.

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
    """Tells when a stage reaches another tenth."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}

    def reached(self, label: str, done: int, total: int) -> bool:
        """True the first time that the stage is in this tenth."""
        tenth = 10 * done // max(total, 1)
        before, self._reached[_stage(label)] = self._reached.get(_stage(label)), tenth
        return before != tenth


def _stage(label: str) -> str:
    return label.split(" (")[0].split(":")[0]


_tenths = Tenths()


def show_progress(label: str, done: int, total: int) -> None:
    """Show progress on one line, or by lines for each tenth without a terminal."""
    if (notebook := Console().is_jupyter) or sys.stderr.isatty():  # what is printed next takes the line's place
        text, end = f"{label}: {done}/{total}", "\n" if done >= total else "\r"
        print(text.ljust(79) if notebook else f"\x1b[K{text}", end=end, file=sys.stdout if notebook else sys.stderr, flush=True)
    elif _tenths.reached(label, done, total):
        print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)
