"""`Browsers`: worker processes with a browser each, as many as episodes may play at once."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dreamgym_lg import errors
from dreamgym_lg.errors import ConfigurationError, DreamGymError, EnvironmentFailed

_CHILD = Path(__file__).with_name("child.py")
_ANSWER_SECONDS = 180.0
"""After so long without an answer a page is taken to hang for ever: real sites need a minute at times."""


class Browsers:
    """The browsers of a process: no more than `count` episodes play at once, the others wait for their turn.

    Playwright is bound to one thread and BrowserGym to one browser a process, so every browser lives in a process of its own,
    about 350 MB in all with Debian's `chromium-headless-shell`. One is started when it is first needed (two seconds) and kept
    for later episodes; one that failed is replaced. All end with this object, with `close`, or when this process ends, be it
    killed.

    Args:
        count: Default: the number of processor cores.

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
        """A browser to use until `Seat.leave`; the future waits until one is free and may be cancelled until then."""
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
        """What the browser's process answers; one that fails is ended, and the next request starts another.

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
        """Give the browser back: at once or, as a cancelled episode leaves its thread behind in `ask`, when it has answered."""
        with self._lock:
            left, self._left = self._left, True
            if not left and not self._asking:
                self._browsers._give_back(self._worker)


class _Worker:
    """One process with its browser; ends with this object."""

    def __init__(self) -> None:
        self._scratch = tempfile.mkdtemp(prefix="dreamgym-browser-")
        self._said = Path(self._scratch) / "stderr.txt"
        python_path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), self._scratch],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # Ctrl-C is for the parent
                env={**os.environ, "PYTHONPATH": python_path, "PYTHONUTF8": "1"},
            )
        self.end = weakref.finalize(self, _end, self._process, self._scratch)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        requests: Any = self._process.stdin
        replies: Any = self._process.stdout
        deadline = threading.Timer(_ANSWER_SECONDS, self._process.kill)
        deadline.start()
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
            line = replies.readline()
        except OSError:
            line = b""
        finally:
            deadline.cancel()
        if not line.endswith(b"\n"):
            said = self._said.read_text(errors="replace")[-500:].strip() if self._said.exists() else ""
            raise EnvironmentFailed(
                f"the browser's process has ended (status {self._process.wait()}: -9 is a lack of memory, or no answer for "
                f"{_ANSWER_SECONDS:g} s); it said: {said or 'nothing'}"
            )
        reply: dict[str, Any] = json.loads(line)
        if "failed" in reply:
            kind: type[DreamGymError] = getattr(errors, reply["failed"])
            raise kind(reply["text"])
        return reply


def _end(process: "subprocess.Popen[bytes]", scratch: str) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()  # it ends its browser, and itself
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    shutil.rmtree(scratch, ignore_errors=True)
