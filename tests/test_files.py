"""Folders that are written whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.files import whole_folder, write_new, write_whole

DEAD = 2**22 + 1
"""No process has such a number: Linux allows them up to 2^22."""


def write(folder: Path, text: str) -> None:
    with whole_folder(folder) as draft:
        for name in ("one", "two"):
            (draft / name).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_nothing_beside_the_folder_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shop.old", "shop.tmp", ".shop.draft"):
        (tmp_path / name).mkdir()
    for text in ("first", "second"):
        write(Path("shop"), text)
    os.symlink("shop", "link")
    write(Path("link"), "third")
    assert (tmp_path / "shop" / "two").read_text() == "third" and (tmp_path / "link").is_symlink()
    assert names(tmp_path) == [".shop.draft", "link", "shop", "shop.old", "shop.tmp"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "shop", "before")
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "shop") as draft:
        (draft / "one").write_text("after")
        raise KeyboardInterrupt
    with pytest.raises(ConfigurationError, match="shop cannot be written"), whole_folder(tmp_path / "shop"):
        raise OSError("disk full")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigurationError, match="file cannot be written"):
        write(tmp_path / "file", "after")
    assert (tmp_path / "shop" / "one").read_text() == "before" and (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path) == ["file", "shop"]


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a.json", "before")

    def half(self: Path, text: str) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(ConfigurationError, match="a.json cannot be written .No space left on device"):
        write_whole(tmp_path / "a.json", "after")
    assert (tmp_path / "a.json").read_text() == "before" and names(tmp_path) == ["a.json"]


def test_what_a_killed_process_left_is_put_back_and_cleared_away(tmp_path: Path) -> None:
    write(tmp_path / "shop", "before")
    (tmp_path / "shop").rename(tmp_path / f".shop.{DEAD}.abc.old")  # killed between the two steps
    (tmp_path / f".shop.{DEAD}.abc.draft").mkdir()
    (tmp_path / f".shop.{os.getpid()}.abc.draft").mkdir()  # of a process at work
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "shop"):
        raise KeyboardInterrupt
    assert (tmp_path / "shop" / "one").read_text() == "before"
    assert names(tmp_path) == [f".shop.{os.getpid()}.abc.draft", "shop"]


WRITER = """
import sys
from pathlib import Path
from dreamgym_lg.files import whole_folder, write_whole
for _ in range(50):
    with whole_folder(Path(sys.argv[1])) as draft:
        for name in ("one", "two"):
            (draft / name).write_text(sys.argv[2])
"""


def test_the_first_of_several_processes_names_the_runs(tmp_path: Path) -> None:
    """Else one would not find what the other has recorded."""
    file = tmp_path / "new" / "run"
    write_new(file, "first")
    write_new(file, "second")
    assert file.read_text() == "first" and names(file.parent) == ["run"]
    write_whole(file, "third")
    assert file.read_text() == "third" and names(file.parent) == ["run"]


def test_a_new_file_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    write_new(tmp_path / "run", "first")
    assert (tmp_path / "run").read_text() == "first" and names(tmp_path) == ["run"]


RACER = """
import sys
from pathlib import Path
from dreamgym_lg.files import write_new
write_new(Path(sys.argv[1]), sys.argv[2])
print(Path(sys.argv[1]).read_text())
"""


def test_processes_that_name_a_folder_at_once_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tmp_path / "run")]
    racers = [subprocess.Popen([*command, text], stdout=subprocess.PIPE, text=True) for text in "abcd"]
    assert len({racer.communicate(timeout=60)[0] for racer in racers}) == 1 and names(tmp_path) == ["run"]


def test_processes_that_write_one_folder_at_once_leave_it_whole(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "shop"), text]) for text in ("a", "b", "c")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    assert (tmp_path / "shop" / "one").read_text() == (tmp_path / "shop" / "two").read_text()
    assert names(tmp_path) == ["shop"]
