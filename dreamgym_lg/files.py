"""Files and folders that are written whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from uuid import uuid4

from dreamgym_lg.errors import writing


def write_whole(file: Path, text: str) -> None:
    """Write a file that is either whole or as it was. Raises `ConfigurationError` where nothing can be written."""
    with _draft(file, text) as draft:
        draft.replace(file)


def write_new(file: Path, text: str) -> None:
    """As `write_whole`, but a file that another process has written meanwhile stays."""
    with _draft(file, text) as draft:
        try:
            os.link(draft, file)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            draft.replace(file)


@contextmanager
def _draft(file: Path, text: str) -> Iterator[Path]:
    """A file beside this one, of this process alone, for the block."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text)
            yield draft
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Write a folder whole or not at all. What is written into the draft takes its place at the end.

    Of several processes that write it at once, the last one's stays. Args: `errors`, as of `writing`, which this raises.
    """
    path = Path(os.path.realpath(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}.{uuid4().hex[:8]}.draft")
    try:
        with writing(path, *errors):
            _clear_leftovers(path)
            draft.mkdir(parents=True)
            yield draft
            _replace_folder(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # what was stored meanwhile needs the space


def _replace_folder(draft: Path, path: Path) -> None:
    """Let the draft take the folder's place. It takes two steps: a folder cannot be replaced in one."""
    old, tries = draft.with_suffix(".old"), 10  # another process may put its own there in between
    for left in reversed(range(tries)):
        try:
            if path.is_dir():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            draft.rename(path)
            break
        except OSError:
            with suppress(OSError):
                old.rename(path)  # unless another one is there by now
            if not left or path.is_file():
                raise
    shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(path: Path) -> None:
    """Remove what killed processes left. A folder that one was about to replace is put back."""
    for left in path.parent.glob(f".{escape(path.name)}.*.*.*"):
        pid, _, kind = left.name.rsplit(".", 3)[1:]
        if kind in ("draft", "old") and pid.isdigit() and not _is_alive(int(pid)):
            if kind == "old" and not path.exists():
                left.rename(path)
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
