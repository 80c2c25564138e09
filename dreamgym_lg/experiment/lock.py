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
"""Locked folders, and the threads of this process that hold their locks."""


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes, which would mix their episodes and overwrite weights.

    The thread that holds the lock may enter again. The lock ends with the process, however that ends, unless a forked child
    lives on. On a file system without locks nothing is locked.

    Raises `ConfigurationError` if another process holds the lock, and if the folder cannot be written.
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
