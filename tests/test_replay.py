"""The replay buffer's promises: nothing lost, nothing twice, nobody else's file touched."""

import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from dreamgym_lg.errors import ConfigurationError, ReplayBufferError
from dreamgym_lg.replay import APPLICATION_ID, ReplayBuffer
from dreamgym_lg.types import Segment, Source, Step, Task, Trajectory

TASK = Task(id="t0", instruction="eat the apple", environment="kitchen")
SEGMENT = Segment(token_ids=(1, 151_643, 7), sampled=(0, 1, 1), logprobs=(0.0, -0.5, -2.25))


def step(number: int = 0) -> Step:
    return Step(observation=f"room {number}", action=f"go {number}", next_observation=f"room {number + 1}")


def episode(index: int = 0, *, task: Task = TASK, steps: int = 2, **fields: Any) -> Trajectory:
    return Trajectory(task=task, steps=tuple(map(step, range(steps))), rollout_index=index, **fields)


def python(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True)


def keys(buffer: ReplayBuffer) -> list[tuple[str, int]]:
    return [(each.run, each.rollout_index) for each in buffer.trajectories()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.db"


@pytest.fixture
def buffer(path: Path) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(path) as buffer:
        yield buffer


def test_everything_comes_back_as_it_was_after_reopening(path: Path) -> None:
    task = Task(
        id="t/1",
        instruction="cook – 料理",
        environment="textworld_express/cookingworld",
        metadata={"seed": 3, "observation": "a kitchen", "params": {"doors": [True, None, 0.5]}},
        origin="synthetic",
        parent_id="t0",
        split="validation",
    )
    steps = (
        Step(observation="a", action="look", next_observation="", reward=0.25, valid=False, reasoning="nothing\0there"),
        Step(observation="", action="", next_observation="z" * 100_000, reward=-1.0, terminated=True),
        Step(observation="b", action="wait", next_observation="c", truncated=True),
    )
    complete = Trajectory(
        task=task,
        steps=steps,
        source="synthetic",
        success=True,
        run="run",
        iteration=4,
        rollout_index=7,
        policy_version="p1",
        experience_version="e2",
        segments=(SEGMENT, Segment(token_ids=(), sampled=(), logprobs=())),
    )
    failed = Trajectory(task=TASK, source="real", error="EnvironmentFailed: java died", run="run")
    with ReplayBuffer(path) as buffer:
        assert buffer.extend([complete, failed]) == 2
    with ReplayBuffer(path) as buffer:
        assert list(buffer.trajectories(segments=True)) == [complete, failed]
        without_tokens = next(buffer.trajectories())
    assert without_tokens.segments == () and without_tokens.steps == steps


def test_text_that_utf8_cannot_hold_does_not_cost_the_episode(buffer: ReplayBuffer) -> None:
    half_an_emoji = "ok \ud83d"
    broken = Step(observation=half_an_emoji, action="a", next_observation="b")
    assert buffer.add(Trajectory(task=TASK, steps=[broken], error=half_an_emoji))
    (found,) = buffer.trajectories()
    assert (found.steps[0].observation, found.error) == ("ok ?", "ok ?")


def test_the_same_rollout_is_stored_once_and_the_first_stays(buffer: ReplayBuffer) -> None:
    assert buffer.add(episode(run="r"))
    assert not buffer.add(episode(run="r", steps=5, success=True))
    assert buffer.extend([episode(1, run="r"), episode(1, run="r"), episode(run="r")]) == 1
    assert keys(buffer) == [("r", 0), ("r", 1)]
    assert buffer.count("steps") == 4


@pytest.mark.parametrize(
    "other", [{"run": "s"}, {"iteration": 1}, {"index": 1}, {"task": Task(id="t1", instruction="", environment="")}]
)
def test_each_part_of_the_key_tells_rollouts_apart(buffer: ReplayBuffer, other: dict[str, Any]) -> None:
    assert buffer.add(episode(run="r"))
    assert buffer.add(episode(**{"run": "r", **other}))


def test_a_trajectory_that_cannot_be_stored_leaves_nothing_behind(buffer: ReplayBuffer) -> None:
    # NaN has no representation in SQLite; the failure comes after task and trajectory were written.
    bad = Trajectory(task=TASK, steps=[Step(observation="a", action="b", next_observation="c", reward=float("nan"))])
    with pytest.raises(ReplayBufferError, match=r"steps\.reward"):
        buffer.add(bad)
    assert [buffer.count(what) for what in ("tasks", "trajectories", "steps")] == [0, 0, 0]
    assert buffer.add(episode())


def test_a_stored_task_is_left_as_it_is(buffer: ReplayBuffer) -> None:
    assert buffer.add_tasks([TASK, Task(id="t0", instruction="other", environment="other")]) == 1
    changed = Task(id="t0", instruction="changed", environment="elsewhere", split="test")
    assert buffer.add_tasks([changed]) == 0
    buffer.add(episode(task=changed))
    assert buffer.tasks() == [TASK]
    assert next(buffer.trajectories()).task == TASK


def test_tasks_by_filter_in_order_of_insertion(buffer: ReplayBuffer) -> None:
    tasks = [
        Task(id="b", instruction="", environment="x"),
        Task(id="a", instruction="", environment="y", split="test"),
        Task(id="c", instruction="", environment="x", origin="synthetic", parent_id="b"),
    ]
    assert buffer.add_tasks(tasks) == 3
    assert buffer.tasks() == tasks
    assert [task.id for task in buffer.tasks(environment="x")] == ["b", "c"]
    assert [task.id for task in buffer.tasks(split="train", origin="real")] == ["b"]


def test_trajectories_and_counts_by_filter(buffer: ReplayBuffer) -> None:
    test = Task(id="held out", instruction="", environment="", split="test")
    unplayed = Task(id="unplayed", instruction="", environment="")
    buffer.add_tasks([unplayed])
    buffer.extend([episode(0, run="r"), episode(1, run="r", iteration=2, source="real")])
    buffer.extend([episode(2, run="s", steps=0, error="x"), episode(3, run="s", task=test, source="synthetic")])

    def found(**filters: Any) -> list[int]:
        return [each.rollout_index for each in buffer.trajectories(**filters)]

    assert found() == [0, 1, 2, 3]
    assert found(run="r") == [0, 1]
    assert found(run="r", iteration=0) == [0]
    assert found(source="real") == [1]
    assert found(split="test") == [3]
    assert found(task_id="t0", errors=False) == [0, 1]
    assert found(limit=2) == [0, 1]
    assert found(limit=0) == []
    assert buffer.count("tasks") == 3
    assert buffer.count("tasks", split="train") == 2
    assert buffer.count("tasks", run="r") == 1
    assert buffer.count("trajectories", source="offline") == 2
    assert buffer.count("steps", run="s") == 2
    with pytest.raises(ConfigurationError, match="Did you mean 'steps'"):
        buffer.count("step")  # type: ignore[arg-type]


def test_the_buffer_may_be_written_while_it_is_read(buffer: ReplayBuffer) -> None:
    buffer.extend(episode(index) for index in range(600))
    with ThreadPoolExecutor(1) as pool:
        for each in buffer.trajectories():
            assert pool.submit(buffer.add, episode(each.rollout_index, run="copy")).result(timeout=60)
    assert buffer.extend(buffer.trajectories(run="copy")) == 0
    assert buffer.count("trajectories") == 1200


def test_extend_stores_many_keeping_order_and_skipping_known_ones(buffer: ReplayBuffer) -> None:
    buffer.add(episode(1234, run="r"))
    assert buffer.extend(episode(index, run="r", segments=[SEGMENT]) for index in range(2000)) == 1999
    found = list(buffer.trajectories(segments=True))
    assert [each.rollout_index for each in found] == [1234, *(index for index in range(2000) if index != 1234)]
    assert all(len(each.steps) == 2 for each in found)
    assert found[0].segments == () and all(each.segments == (SEGMENT,) for each in found[1:])


def test_extend_keeps_what_came_before_its_iterable_broke(buffer: ReplayBuffer) -> None:
    def broken() -> Iterator[Trajectory]:
        yield from map(episode, range(700))
        raise OSError("the trace file ends here")

    with pytest.raises(OSError, match="ends here"):
        buffer.extend(broken())
    assert buffer.count("trajectories") == 500
    assert buffer.extend(map(episode, range(700))) == 200


def test_sample_is_uniform_without_replacement_and_repeatable(buffer: ReplayBuffer) -> None:
    buffer.extend(map(episode, range(20)))
    buffer.extend([episode(50, error="broke"), episode(51, steps=0), episode(52, source="real")])
    buffer.add(episode(53, task=Task(id="t1", instruction="", environment="", split="test")))

    def drawn(n: int, seed: int = 0, **filters: Any) -> list[int]:
        return [each.rollout_index for each in buffer.sample(n, rng=random.Random(seed), **filters)]

    assert drawn(5) == drawn(5) != drawn(5, seed=1)
    assert sorted(drawn(100)) == [*range(20), 52]
    assert drawn(3, source="real") == [52]
    assert drawn(3, split="test") == [53]
    assert len(set(drawn(22, split=None))) == 22
    assert {index for seed in range(200) for index in drawn(1, seed)} == {*range(20), 52}
    with pytest.raises(ReplayBufferError, match=r"replay\.db: nothing to sample \(source='synthetic'.*Add traces"):
        drawn(1, source="synthetic")


def test_metrics_are_replaced_by_name_and_given_by_iteration(buffer: ReplayBuffer) -> None:
    buffer.record_metrics("r", 2, {"loss": 0.5, "tokens": 12, "checkpoint": "p2", "kl": None})
    buffer.record_metrics("r", 1, {"loss": float("nan")})
    buffer.record_metrics("r", 2, {"loss": 0.25, "success": 1.0})
    buffer.record_metrics("other", 1, {"loss": 9.0})
    two = {"iteration": 2, "loss": 0.25, "tokens": 12, "checkpoint": "p2", "kl": None, "success": 1.0}
    assert buffer.metrics("r") == [{"iteration": 1, "loss": None}, two]
    assert isinstance(buffer.metrics("r")[1]["tokens"], int)
    assert buffer.metrics("unknown") == []
    with pytest.raises(ConfigurationError, match="iteration"):
        buffer.record_metrics("r", 3, {"iteration": 3})


def test_sixteen_threads_add_and_read_one_buffer(buffer: ReplayBuffer) -> None:
    def work(thread: int) -> int:
        stored = 0
        for index in range(25):
            # Each rollout is offered by two threads; one of them must win.
            stored += buffer.add(episode(index, run=f"r{thread // 2}"))
            complete = list(buffer.trajectories(run=f"r{thread // 2}"))
            assert len(complete) > index and all(len(each.steps) == 2 for each in complete)
            assert buffer.similar(f"room {index % 2}", "go", k=1)
            buffer.record_metrics("r", index, {f"thread {thread}": index})
        return stored

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(work, range(16))) == 8 * 25
    assert len(set(keys(buffer))) == buffer.count("trajectories") == 200
    assert [len(row) for row in buffer.metrics("r")] == [17] * 25


WRITER = """
import sys
from dreamgym_lg.replay import ReplayBuffer
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


def test_what_another_process_adds_is_seen_and_retrieved(path: Path, buffer: ReplayBuffer) -> None:
    buffer.add(episode())
    assert buffer.similar("room 0", "go", k=1)[0].next_observation == "room 1"
    with python(WRITER, str(path), "other", "1") as writer:
        assert writer.wait(timeout=60) == 0
    assert buffer.count("trajectories") == 2
    assert buffer.similar("room 0", "go", k=1)[0].next_observation == "x" * 2000


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


def test_memory_and_a_given_connection() -> None:
    with ReplayBuffer(":memory:") as buffer:
        assert buffer.add(episode())
    assert not Path(":memory:").exists()
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    for new in (True, False):
        with ReplayBuffer(connection) as buffer:
            assert buffer.add(episode()) is new
    # Still open: it is the caller's to close, and so are its transactions.
    assert connection.execute("SELECT count(*) FROM steps").fetchone() == (2,)
    connection.execute("INSERT INTO metrics VALUES ('r', 0, 'mine', 1)")
    with pytest.raises(ReplayBufferError, match="the given connection: .*within a transaction"):
        buffer.add(episode(1))
    with pytest.raises(ConfigurationError, match="commit it or roll it back"):
        ReplayBuffer(connection)
    assert connection.in_transaction


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


def test_a_foreign_connection_is_refused() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE notes (text)")
    with pytest.raises(ReplayBufferError, match="the given connection is another application's"):
        ReplayBuffer(connection)
    assert Database(connection).table_names() == ["notes"]


def test_a_file_of_a_newer_release_is_refused(path: Path) -> None:
    ReplayBuffer(path).close()
    row = {"migration_set": "dreamgym_lg", "name": "0099_future", "applied_at": ""}
    with Database(path) as db:
        db["_sqlite_migrations"].insert(row)
    before = path.read_bytes()
    with pytest.raises(ReplayBufferError, match=r"replay\.db was made by a newer .*0099_future.*pip install -U"):
        ReplayBuffer(path)
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_buffer(path: Path) -> None:
    path.touch()
    with ReplayBuffer(path) as buffer:
        assert buffer.add(episode())


@pytest.mark.parametrize("source", ["offline", "real", "synthetic"])
def test_only_train_steps_that_no_dream_made_are_retrieved(buffer: ReplayBuffer, source: Source) -> None:
    for split in ("train", "validation", "test"):
        task = Task(id=split, instruction="", environment="", split=split)
        seen = Step(observation="a red door", action="open door", next_observation=f"{split} {source}")
        buffer.add(Trajectory(task=task, steps=[seen], source=source))
    found = [each.next_observation for each in buffer.similar("a red door", "open door", k=10)]
    assert found == ([] if source == "synthetic" else [f"train {source}"])


def test_retrieval_grows_with_the_buffer_and_survives_reopening(path: Path) -> None:
    rng = random.Random(0)
    words = ["key", "door", "lamp", "table", "apple", "knife", "north", "south", "open", "closed"]

    def text(n: int) -> str:
        return " ".join(rng.choices(words, k=n))

    queries = [(text(8), text(2)) for _ in range(20)]
    with ReplayBuffer(path) as buffer:
        assert buffer.similar(*queries[0]) == [], "nothing is stored"
        for index in range(60):
            seen = [Step(observation=text(8), action=text(2), next_observation=text(8)) for _ in range(3)]
            source: Source = "real" if index % 2 else "synthetic"
            buffer.add(Trajectory(task=TASK, steps=seen, rollout_index=index, source=source))
            grown = buffer.similar_many(queries, 5)
    with ReplayBuffer(path) as buffer:
        assert buffer.similar_many(queries, 5) == grown == [buffer.similar(*query, k=5) for query in queries]
        assert buffer.similar(*queries[0], k=0) == [] and buffer.similar_many([], 5) == []
        assert len(buffer.similar(*queries[0], k=1000)) == 90


def test_a_step_comes_back_whole_and_the_asking_task_can_be_left_out(buffer: ReplayBuffer) -> None:
    seen = Step(observation="a", action="b", next_observation="c", reward=0.5, terminated=True, reasoning="r")
    buffer.add(Trajectory(task=TASK, steps=[seen, seen]))
    assert buffer.similar("a", "b") == [seen]
    assert buffer.similar("a", "b", exclude_task="t0") == []
    assert buffer.similar("a", "b", exclude_task="unknown") == [seen]
    buffer.add(Trajectory(task=Task(id="t1", instruction="", environment=""), steps=[seen]))
    assert buffer.similar("a", "b", exclude_task="t0") == [seen]
