"""The replay buffer's file: nothing lost, nothing twice, nobody else's file touched."""

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from dreamgym_lg.errors import ReplayBufferError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.schema import APPLICATION_ID
from dreamgym_lg.types import Step, Task, Trajectory

TASK = Task(id="t0", instruction="eat the apple", environment="kitchen")


def episode(index: int = 0, **fields: Any) -> Trajectory:
    steps = [Step(observation=f"room {n}", action=f"go {n}", next_observation=f"room {n + 1}") for n in range(2)]
    return Trajectory(task=TASK, steps=steps, rollout_index=index, **fields)


def python(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.db"


@pytest.fixture
def buffer(path: Path) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(path) as buffer:
        yield buffer


WRITER = """
import sys
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Segment, Step, Task, Trajectory
task = Task(id="t0", instruction="eat the apple", environment="kitchen")
steps = [Step(observation=f"room {i}", action="go", next_observation="x" * 2000) for i in range(3)]
tokens = Segment(token_ids=range(500), sampled=[1] * 500, logprobs=[-0.5] * 500)
print("ready", flush=True)
with ReplayBuffer(sys.argv[1]) as buffer:
    for index in range(int(sys.argv[3])):
        new = buffer.add(Trajectory(task=task, steps=steps, run=sys.argv[2], rollout_index=index, segments=[tokens]))
        print(index, int(new), flush=True)
"""


@pytest.mark.slow
def test_processes_that_open_the_same_new_file_share_it(path: Path) -> None:
    # "shared" is offered by both: together they store each of its rollouts once.
    writers = [python(WRITER, str(path), run, "60") for run in ("a", "b", "shared", "shared")]
    answers = [writer.communicate(timeout=60)[0].split("\n")[1:-1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0, 0]
    assert sum(line.endswith("1") for answer in answers for line in answer) == 180
    with ReplayBuffer(path) as buffer:
        found = list(buffer.trajectories())
    assert sorted({(each.run, each.rollout_index) for each in found}) == sorted(
        (run, index) for run in ("a", "b", "shared") for index in range(60)
    )
    assert len(found) == 180 and all(len(each.steps) == 3 for each in found)


def test_opening_waits_for_whoever_is_just_writing_the_file(path: Path) -> None:
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(ReplayBuffer, path)
        with pytest.raises(TimeoutError):
            opening.result(timeout=0.2)
        holder.execute("ROLLBACK")
        with opening.result(timeout=60) as buffer:
            assert buffer.add(episode())
    holder.close()


@pytest.mark.slow
def test_what_another_process_adds_is_seen_and_retrieved(path: Path, buffer: ReplayBuffer) -> None:
    buffer.add(episode())
    assert buffer.similar("room 0", "go", k=1)[0].next_observation == "room 1"
    with python(WRITER, str(path), "other", "1") as writer:
        assert writer.wait(timeout=60) == 0
    assert buffer.count("trajectories") == 2
    assert buffer.similar("room 0", "go", k=1)[0].next_observation == "x" * 2000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize("acknowledged", [1, 40])
def test_a_killed_writer_loses_nothing_it_acknowledged(path: Path, acknowledged: int) -> None:
    with python(WRITER, str(path), "r", "100000") as writer:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
        lines = [writer.stdout.readline() for _ in range(acknowledged)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    # Its last line may be cut off in the middle of being written.
    acks = [int(line.split()[0]) for line in lines if line.endswith("\n")]
    with ReplayBuffer(path) as buffer:
        found = list(buffer.trajectories(segments=True))
        assert [each.rollout_index for each in found] == list(range(len(found)))
        assert len(found) - len(acks) in (0, 1), "at most the one whose acknowledgement was under way"
        assert all(len(each.steps) == 3 and each.segments[0].trainable == 500 for each in found)
        assert not buffer.add(episode(acks[-1], run="r"))
        assert buffer.add(episode(len(found), run="r"))
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_file_is_marked_ours_in_wal_mode_and_opening_it_again_writes_nothing(path: Path) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.add(episode())
    before = path.read_bytes()
    assert int.from_bytes(before[68:72], "big") == APPLICATION_ID
    assert before[18:20] == b"\x02\x02", "write-ahead log"
    with ReplayBuffer(path) as buffer:
        assert buffer.count("trajectories") == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["with space?#%41.db", "ü.db"])
def test_any_file_name_works(tmp_path: Path, name: str) -> None:
    for opening in range(2):
        with ReplayBuffer(str(tmp_path / name)) as buffer:
            assert buffer.add(episode()) == (opening == 0)
    assert (tmp_path / name).exists()


def test_memory_leaves_no_file() -> None:
    with ReplayBuffer(":memory:") as buffer:
        assert buffer.add(episode())
    assert not Path(":memory:").exists()


def test_a_closed_buffer_says_so(path: Path) -> None:
    buffer = ReplayBuffer(path)
    buffer.close()
    buffer.close()
    for use in (buffer.tasks, lambda: buffer.add(episode()), lambda: buffer.similar("a", "b")):
        with pytest.raises(ReplayBufferError, match=r"replay\.db.*closed database"):
            use()


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayBufferError, match=r"is a directory; .* give e\.g\. .*replay\.db"):
        ReplayBuffer(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReplayBufferError, match="nowhere.*unable to open.*existing folder"):
        ReplayBuffer(tmp_path / "nowhere" / "replay.db")


@pytest.mark.parametrize("content", [b"x", b'{"task": 1}\n' * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused_unchanged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ReplayBufferError, match=r"replay\.db: SQLite says 'file is not a database'.*give such a path"):
        ReplayBuffer(path)
    assert path.read_bytes() == content


def test_damage_found_later_is_a_replay_buffer_error(path: Path) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(map(episode, range(500)))
    content = bytearray(path.read_bytes())
    content[3 * 4096 :] = b"\xff" * (len(content) - 3 * 4096)
    path.write_bytes(content)
    with pytest.raises(ReplayBufferError, match=r"replay\.db: SQLite says"), ReplayBuffer(path) as buffer:
        list(buffer.trajectories())


def foreign_wal(path: Path) -> None:
    """A foreign file whose last write is still in its log, as after a crash of its owner."""
    script = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA journal_mode=wal');"
        "c.execute('CREATE TABLE notes (text)'); c.commit(); os._exit(0)"
    )
    with python(script, str(path)) as owner:
        assert owner.wait(timeout=60) == 0


def foreign(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(";".join(statements))
    connection.close()


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TABLE notes (text)", "INSERT INTO notes VALUES ('mine')"],
        ["CREATE TABLE tasks (id)"],
        ["CREATE VIEW seven AS SELECT 7"],
        ["PRAGMA application_id = 7", "VACUUM"],
        ["CREATE TABLE _sqlite_migrations (migration_set TEXT, name TEXT, applied_at TEXT)"],
        [],
    ],
)
def test_a_foreign_file_is_refused_and_not_a_byte_of_it_changes(path: Path, statements: Sequence[str]) -> None:
    if statements:
        foreign(path, *statements)
    else:
        foreign_wal(path)
        assert Path(f"{path}-wal").stat().st_size > 0
    before = path.read_bytes()
    with pytest.raises(ReplayBufferError, match=r"replay\.db is another application's .* left as it is; give"):
        ReplayBuffer(path)
    assert path.read_bytes() == before
    if not statements:
        with sqlite3.connect(path) as connection:
            assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("notes",)]


def test_a_file_of_a_newer_release_is_refused(path: Path) -> None:
    ReplayBuffer(path).close()
    row = {"migration_set": "dreamgym_lg", "name": "0099_future", "applied_at": ""}
    with Database(path) as db:
        db["_sqlite_migrations"].insert(row)
    before = path.read_bytes()
    with pytest.raises(ReplayBufferError, match=r"replay\.db was made by a newer .*0099_future.*pip install -U"):
        ReplayBuffer(path)
    assert path.read_bytes() == before


def test_a_file_from_before_the_first_release_is_refused(path: Path) -> None:
    ReplayBuffer(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE steps DROP COLUMN words")
    with pytest.raises(ReplayBufferError, match=r"was made before the first release.*import its traces anew"):
        ReplayBuffer(path)


def test_an_empty_file_becomes_a_buffer(path: Path) -> None:
    path.touch()
    with ReplayBuffer(path) as buffer:
        assert buffer.add(episode())


def test_a_full_disk_says_what_is_safe_and_what_to_do(tmp_path: Path) -> None:
    task = Task(id="t", instruction="i", environment="e")
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        buffer.add(Trajectory(task=task, run="r"))
        connection = buffer._connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to have no room left
        steps = [Step(observation="o" * 50_000, action="a", next_observation="n")]
        with pytest.raises(ReplayBufferError, match="the disk is full. What was stored before is safe: free some space"):
            buffer.add(Trajectory(task=task, steps=steps, run="r", rollout_index=1))
        assert buffer.count("trajectories") == 1
        connection.execute("PRAGMA max_page_count = 1000000")
        assert buffer.add(Trajectory(task=task, steps=steps, run="r", rollout_index=1)), "the same call goes on"
