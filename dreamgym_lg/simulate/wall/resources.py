"""Limits a walled worker's processes and scratch folder while it runs, and removes them afterwards."""

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
from pathlib import Path

MAX_PROCESSES, MAX_FILES = 500, 100_000
"""Most processes of a worker, and most files and folders in scratch, which may also use half of the free disk."""
WATCHED_EVERY = 0.5
"""Seconds between two checks of a worker's resources; more if a check takes long."""

_SCRATCH = "dreamgym-scratch-"
_locks: dict[str, int] = {}
"""Path -> descriptor of this process's scratch folders, which it keeps locked."""


class ResourceUse:
    """The resources that a worker uses, and their limits."""

    def __init__(self, worker: int, scratch: str) -> None:
        disk = os.statvfs(scratch)
        self._worker, self._scratch, self._max_bytes = worker, scratch, disk.f_frsize * disk.f_bavail // 2
        self._tasks = _count_tasks()

    def excess(self) -> str:
        """The resource over its limit, in words; else "".

        The worker's processes are only counted if the machine has many new tasks."""
        tasks = _count_tasks()
        self._tasks = min(self._tasks, tasks)
        if tasks - self._tasks > MAX_PROCESSES:
            self._tasks = tasks
            if len(_family(self._scratch, self._worker)) > MAX_PROCESSES:
                return f"it had more than {MAX_PROCESSES} processes"
        size, count, folders = 0, 0, [self._scratch]
        while folders and count <= MAX_FILES:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    with contextlib.suppress(FileNotFoundError):
                        size += 512 * entry.stat(follow_symlinks=False).st_blocks
                        folders += [entry.path] if entry.is_dir(follow_symlinks=False) else []
        if count > MAX_FILES:
            return f"it had more than {MAX_FILES:,} files in its scratch folder"
        return "its scratch folder had more than half of the free disk" if size > self._max_bytes else ""


def _count_tasks() -> int:
    """Number of processes and threads on the machine."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def _family(scratch: str, worker: int | None = None) -> list[int]:
    """Ids of processes with this scratch folder in their environment, or in group `worker`."""
    mark, family = f"TMPDIR={scratch}\0".encode(), list[int]()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            number = int(environment.parent.name)
            if mark in environment.read_bytes() or os.getpgid(number) == worker:
                family.append(number)
    return family


def kill_family(scratch: str) -> None:
    """Kill processes that the worker started in other sessions, until none is left."""
    for _ in range(100):
        for number in (family := _family(scratch)):
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)
        if not family:
            return


def create_scratch() -> str:
    """Create a folder with this process's id in its name, and lock it."""
    folder = tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-")
    _locks[folder] = os.open(folder, os.O_RDONLY)
    fcntl.flock(_locks[folder], fcntl.LOCK_EX)
    return folder


def remove_scratch(folder: str | Path) -> None:
    """Remove a scratch folder by `rm`, since it may be deeper than Python's recursion limit."""
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)
    if (lock := _locks.pop(str(folder), None)) is not None:
        os.close(lock)


def remove_stale_scratch() -> None:
    """Remove scratch folders of dead processes. A lock shows that one in another container is alive."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        if not Path(f"/proc/{folder.name.removeprefix(_SCRATCH).partition('-')[0]}").exists():
            with contextlib.suppress(OSError):  # locked, another user's, or gone
                number = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_scratch(folder)
                finally:
                    os.close(number)
