"""The processes and the scratch folder of a walled worker. Limited while it runs, cleared away after it."""

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
from pathlib import Path

MAX_PROCESSES, MAX_FILES = 500, 100_000
"""Processes of a worker; files and folders in its scratch folder, which may also take half of the free disk."""
WATCHED_EVERY = 0.5
"""Seconds between two looks at what a worker uses; more where a look takes long."""

_SCRATCH = "dreamgym-scratch-"
_locks: dict[str, int] = {}
"""The open, locked scratch folders of this process, by path."""


class Use:
    """Resources of the machine that a worker uses."""

    def __init__(self, worker: int, scratch: str) -> None:
        disk = os.statvfs(scratch)
        self._worker, self._scratch, self._max_bytes = worker, scratch, disk.f_frsize * disk.f_bavail // 2
        self._tasks = _count_tasks()

    def excess(self) -> str:
        """The resource that is over its limit, in words; else "".

        Its processes are counted where the machine has many new ones."""
        tasks = _count_tasks()
        self._tasks = min(self._tasks, tasks)
        if tasks - self._tasks > MAX_PROCESSES:
            self._tasks = tasks
            if len(_family(self._scratch, self._worker)) > MAX_PROCESSES:
                return f"it had more than {MAX_PROCESSES} processes"
        size, number, folders = 0, 0, [self._scratch]
        while folders and number <= MAX_FILES:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    number += 1
                    with contextlib.suppress(FileNotFoundError):
                        size += 512 * entry.stat(follow_symlinks=False).st_blocks
                        folders += [entry.path] if entry.is_dir(follow_symlinks=False) else []
        if number > MAX_FILES:
            return f"it had more than {MAX_FILES:,} files in its scratch folder"
        return "its scratch folder had more than half of the free disk" if size > self._max_bytes else ""


def _count_tasks() -> int:
    """Processes and threads of the whole machine."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def _family(scratch: str, worker: int | None = None) -> list[int]:
    """Processes whose environment names the scratch folder, or of the group of `worker`."""
    mark, family = f"TMPDIR={scratch}\0".encode(), list[int]()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            number = int(environment.parent.name)
            if mark in environment.read_bytes() or os.getpgid(number) == worker:
                family.append(number)
    return family


def kill_family(scratch: str) -> None:
    """Kill processes that the worker started in other sessions, and those that they start meanwhile."""
    for _ in range(100):
        for number in (family := _family(scratch)):
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        if not family:
            return


def create_scratch() -> str:
    """A folder whose name holds this process's number, locked by it."""
    folder = tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-")
    _locks[folder] = os.open(folder, os.O_RDONLY)
    fcntl.flock(_locks[folder], fcntl.LOCK_EX)
    return folder


def remove_scratch(folder: str | Path) -> None:
    """By `rm`, which does not recurse: it may be deeper than Python's stack."""
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)
    if (lock := _locks.pop(str(folder), None)) is not None:
        os.close(lock)


def remove_stale_scratch() -> None:
    """Remove the folders of processes that were killed. The lock of one in another container tells that it runs."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        if not Path(f"/proc/{folder.name.removeprefix(_SCRATCH).partition('-')[0]}").exists():
            with contextlib.suppress(OSError):  # locked, another user's, or gone
                number = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_scratch(folder)
                finally:
                    os.close(number)
