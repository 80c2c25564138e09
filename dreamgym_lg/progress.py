"""Progress on one line of a terminal, or by lines in a file."""

import sys
import time
from collections.abc import Callable

from rich.console import Console

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


_starts: dict[str, tuple[float, int]] = {}
"""Time of a stage's first progress, and the number done by then. One that goes on from a checkpoint begins there."""
_reached: dict[str, tuple[int, bool]] = {}
"""The tenth of each stage, the beginning of a label, that was shown last, and True if with the time left."""


def show_progress(label: str, done: int, total: int) -> None:
    """Show progress on one line; without a terminal, a line for each tenth.

    After ten seconds it says the time left; without a terminal, in a line of its own the first time."""
    stage, tenth = label.split(" (")[0].split(":")[0], 10 * done // max(total, 1)
    text = f"{label}: {done}/{total}{(left := _time_left(stage, done, total))}"
    if is_watched():  # what is printed next takes the line's place
        notebook, end = Console().is_jupyter, "\n" if done >= total else "\r"
        print(text.ljust(79) if notebook else f"\x1b[K{text}", end=end, file=sys.stdout if notebook else sys.stderr, flush=True)
        return
    if _reached.get(stage) != (tenth, bool(left)):
        print(text, file=sys.stderr, flush=True)
    _reached[stage] = tenth, bool(left)


def is_watched() -> bool:
    """True in a terminal or a notebook, where a line can be overwritten."""
    isatty = getattr(sys.stderr, "isatty", None)  # a service has no such stream, or one of its own
    return Console().is_jupyter or bool(isatty is not None and isatty())


def _time_left(stage: str, done: int, total: int) -> str:
    start, first = _starts.setdefault(stage, (time.monotonic(), done))
    if done <= first or first == 0:  # behind a 0 that is shown before anything is loaded, a checkpoint's steps may come
        first = done
        _starts[stage] = time.monotonic(), done
    if done >= total:  # the next one of its name begins anew
        del _starts[stage]
    if done >= total or done <= first or (passed := time.monotonic() - start) < 10:
        return ""
    return f", {passed / (done - first) * (total - done) / 60:.1f} min left"
