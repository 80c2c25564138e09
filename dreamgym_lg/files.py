"""Files and folders that are written whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dreamgym_lg.errors import writing


def write_whole(file: Path, text: str) -> None:
    """Write a file that is either whole or as it was. Raises `ConfigurationError` where nothing can be written."""
    draft = file.with_name(f"{file.name}.tmp")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(file)


@contextmanager
def whole_folder(path: Path, *errors: type[Exception]) -> Iterator[Path]:
    """Write a folder whole or not at all. What is written into the draft takes its place at the end.

    Args: `errors`, as of `writing`, which this raises.
    """
    draft, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    for left in (draft, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        with writing(path, *errors):
            draft.mkdir(parents=True)
            yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)  # what was stored meanwhile needs the space
        raise
    if path.exists():
        path.rename(old)  # a folder cannot be replaced in one step, and deleting it in place can be interrupted
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)
