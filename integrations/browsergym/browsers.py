"""`Browsers`: worker processes with a browser each, as many as episodes may play at once."""

import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dreamgym_lg.child_process import Child
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed, ProcessLost

_CHILD = Path(__file__).with_name("child.py")
_ANSWER_SECONDS = 180.0
"""Seconds without an answer after which a page is taken to hang. Real sites may need a minute."""


class Browsers:
    """The browsers of a process: at most `count` episodes play at once, others wait.

    Playwright is bound to one thread and BrowserGym to one browser a process, so each browser lives in a process of its own
    (350 MB, two seconds to start) and is kept for later episodes; a failed one is replaced. All end with this object, with
    `close`, or with this process, even if it is killed. Args: `count`, default: the number of processor cores.

    Raises `ConfigurationError` for a count below 1.
    """

    def __init__(self, count: int | None = None) -> None:
        count = count if count is not None else os.cpu_count() or 1
        if count < 1:
            raise ConfigurationError(f"count={count}; allowed: 1 or more")
        self._free: list[_Worker | None] = [None] * count  # None: one that is not started yet
        self._waiting = deque[Future["Seat"]]()
        self._lock = threading.Lock()

    def take(self) -> "Future[Seat]":
        """A browser to use until `Seat.leave`. The future waits until one is free and may be cancelled until then."""
        future: Future[Seat] = Future()
        with self._lock:
            if self._free:
                future.set_result(Seat(self, self._free.pop()))
            else:
                self._waiting.append(future)
        return future

    def close(self) -> None:
        """End the browsers that no episode uses. They can be used again, and are then started anew."""
        with self._lock:
            workers, self._free = self._free, [None] * len(self._free)
        for worker in workers:
            if worker is not None:
                worker.end()

    def _give_back(self, worker: "_Worker | None") -> None:
        with self._lock:
            while self._waiting:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():  # else who waited has gone
                    future.set_result(Seat(self, worker))
                    return
            self._free.append(worker)


class Seat:
    """The right to one browser."""

    def __init__(self, browsers: Browsers, worker: "_Worker | None") -> None:
        self._browsers, self._worker = browsers, worker
        self._lock = threading.Lock()
        self._asking = self._left = False

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of the browser's process. One that fails is ended, and the next request starts another.

        Raises `MissingDependency` if there is no browser or the benchmark's package is missing, else `EnvironmentFailed`.
        """
        with self._lock:
            if self._left:
                raise RuntimeError("the browser was given back")
            self._asking = True
        try:
            self._worker = self._worker or _Worker()
            return self._worker.ask(request)
        except BaseException:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.end()
            raise
        finally:
            with self._lock:
                self._asking = False
                if self._left:
                    self._browsers._give_back(self._worker)

    def leave(self) -> None:
        """Give the browser back: at once, or once `ask` in another thread has returned."""
        with self._lock:
            left, self._left = self._left, True
            if not left and not self._asking:
                self._browsers._give_back(self._worker)


class _Worker:
    """One process with its browser; ends with this object."""

    def __init__(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="dreamgym-browser-")
        self._stderr = Path(self._scratch) / "stderr.txt"
        with self._stderr.open("wb") as stderr:
            self._child = Child(
                _CHILD,
                name="the browser's process",
                environment={"DREAMGYM_BROWSER_SCRATCH": self._scratch},
                patience=10,  # it ends its browser
                stderr=stderr,
            )
        self.end = weakref.finalize(self, _end, self._child, self._scratch)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._child.ask(request, timeout=_ANSWER_SECONDS)
        except ProcessLost as error:
            last = self._stderr.read_text(errors="replace")[-500:].strip() if self._stderr.exists() else ""
            raise EnvironmentFailed(
                f"{error}, or no answer for {_ANSWER_SECONDS:g} s; its last words: {last or 'none'}"
            ) from error


def _end(child: Child, scratch: str) -> None:
    child.kill()
    shutil.rmtree(scratch, ignore_errors=True)
