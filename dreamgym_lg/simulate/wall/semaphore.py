"""Locks and semaphores of `multiprocessing` behind the wall."""

import contextlib
import os
import select
import threading
import time
import weakref
from pathlib import Path
from typing import Any


class Semaphore:
    """Replaces `_multiprocessing.SemLock`, which needs a file in /dev/shm, by an eventfd."""

    SEM_VALUE_MAX = 2**31 - 1

    def __init__(self, kind: int, value: int, maxvalue: int, *_: Any) -> None:
        self.kind, self.maxvalue, self.name = kind, maxvalue, None
        self.handle = os.eventfd(value, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._held, self._owner = 0, 0
        weakref.finalize(self, os.close, self.handle)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if self.kind == 0 and self._is_mine():  # an RLock
            self._held += 1
            return True
        until = None if timeout is None else time.monotonic() + max(timeout, 0)
        while True:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.handle)
                self._held, self._owner = self._held + 1, threading.get_ident()
                return True
            left = None if until is None else until - time.monotonic()
            if not block or (left is not None and left <= 0):
                return False
            poll = select.poll()
            poll.register(self.handle, select.POLLIN)
            poll.poll(None if left is None else 1000 * left)

    def release(self) -> None:
        if self.kind == 0 and not self._is_mine():
            raise AssertionError("attempt to release recursive lock not owned by thread")
        if self.kind and self._get_value() >= self.maxvalue:
            raise ValueError("semaphore or lock released too many times")
        self._held -= 1
        if self.kind or not self._held:
            os.eventfd_write(self.handle, 1)

    def _get_value(self) -> int:
        lines = Path(f"/proc/self/fdinfo/{self.handle}").read_text().splitlines()
        return next(int(line.split()[1], 16) for line in lines if line.startswith("eventfd-count"))

    def _count(self) -> int:
        return self._held

    def _is_mine(self) -> bool:
        return self._held > 0 and self._owner == threading.get_ident()

    def _is_zero(self) -> bool:
        return not self._get_value()

    def _after_fork(self) -> None:
        self._held = 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
