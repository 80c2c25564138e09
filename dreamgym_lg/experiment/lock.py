"""One process at a time in an experiment's folder."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dreamgym_lg.errors import ConfigurationError, writing

try:
    import fcntl
except ImportError:  # not POSIX: nothing keeps two processes apart there
    fcntl = None  # type: ignore[assignment]

_owners: dict[Path, int] = {}
"""Threads of this process by the folder that they have locked."""


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder. Two that train in one would mix their episodes and overwrite each other's weights.

    The thread that has the lock may enter again. It ends with the process, also where that is killed, unless a forked process
    lives on. A file system without locks has none.

    Raises `ConfigurationError` where another process has it, and where the folder cannot be written.
    """
    if fcntl is None or _owners.get(key := folder.resolve()) == threading.get_ident():
        yield
        return
    with writing(path := folder / "in-use"):
        file = path.open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigurationError(
                f"process {file.read() or '(unknown)'} is at work in {folder}: wait until it has ended, stop it, or take "
                "another folder (out=, --out)"
            ) from error
        except OSError:
            yield
            return
        try:
            with writing(path):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            _owners[key] = threading.get_ident()
            yield
        finally:
            _owners.pop(key, None)
            fcntl.flock(file, fcntl.LOCK_UN)  # closing alone leaves it to a forked process
