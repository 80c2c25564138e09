"""How the replay buffer lies in its SQLite file: whose file it is, the tables, and the rows of each record."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from dreamgym_lg.errors import ConfigurationError, ReplayBufferError
from dreamgym_lg.types import Act, Segment, Step, Task, Trajectory

APPLICATION_ID = 0x4447796D
"""`DGym` in the file's header."""

TASK_COLUMNS = "tasks.id, instruction, environment, metadata, origin, parent_id, split"
STEP_COLUMNS = "observation, action, next_observation, reward, terminated, truncated, valid, reasoning, decided_by, line"
TRAJECTORY_COLUMNS = (
    "run, iteration, task_id, rollout_index, source, success, error, policy_version, experience_version, annotation, acts"
)
SEGMENT_COLUMNS = "token_ids, sampled, logprobs, temperature, policy_version, guided"
WITH_TASK = "trajectories JOIN tasks ON tasks.id = task_id"

Rows = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
"""Asks the file: SQL and its values to rows."""

FAILED = "/failed/"
"""Stands between the run and the id in the run name of a failed episode that was played again."""

_SMALLEST = 512
"""No SQLite file has fewer bytes."""
_BUSY_SECONDS = 60.0
_READER_BUSY_SECONDS = 2.0
"""Somebody waits for the page."""

migrations = Migrations("dreamgym_lg")


@migrations(name="0001_tables")
def _tables(db: Database) -> None:
    # Never edited once released, because files made by it exist: a change of the tables is a further migration.
    db.executescript("""
        CREATE TABLE tasks (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, instruction TEXT NOT NULL,
            environment TEXT NOT NULL, metadata TEXT NOT NULL, origin TEXT NOT NULL, parent_id TEXT,
            split TEXT NOT NULL);
        CREATE TABLE trajectories (id INTEGER PRIMARY KEY, run TEXT NOT NULL, iteration INTEGER NOT NULL,
            task_id TEXT NOT NULL REFERENCES tasks(id), rollout_index INTEGER NOT NULL, source TEXT NOT NULL,
            success INTEGER NOT NULL, error TEXT, policy_version TEXT NOT NULL, experience_version TEXT NOT NULL);
        CREATE UNIQUE INDEX trajectories_key ON trajectories (run, iteration, task_id, rollout_index);
        CREATE INDEX trajectories_task ON trajectories (task_id);
        CREATE TABLE steps (id INTEGER PRIMARY KEY, trajectory_id INTEGER NOT NULL REFERENCES trajectories(id),
            position INTEGER NOT NULL, observation TEXT NOT NULL, action TEXT NOT NULL, next_observation TEXT NOT NULL,
            reward REAL NOT NULL, terminated INTEGER NOT NULL, truncated INTEGER NOT NULL, valid INTEGER NOT NULL,
            reasoning TEXT NOT NULL);
        CREATE UNIQUE INDEX steps_key ON steps (trajectory_id, position);
        CREATE TABLE segments (trajectory_id INTEGER NOT NULL REFERENCES trajectories(id), position INTEGER NOT NULL,
            token_ids BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL);
        CREATE UNIQUE INDEX segments_key ON segments (trajectory_id, position);
        CREATE TABLE metrics (run TEXT NOT NULL, iteration INTEGER NOT NULL, name TEXT NOT NULL, value,
            PRIMARY KEY (run, iteration, name)) WITHOUT ROWID;
    """)


@migrations(name="0002_annotation")
def _annotation(db: Database) -> None:
    db.execute("ALTER TABLE trajectories ADD COLUMN annotation TEXT")


@migrations(name="0003_temperature")
def _temperature(db: Database) -> None:
    # NULL for what was recorded before: nobody knows at which temperature.
    db.execute("ALTER TABLE segments ADD COLUMN temperature REAL")


@migrations(name="0004_decided_by")
def _decided_by(db: Database) -> None:
    db.execute("ALTER TABLE steps ADD COLUMN decided_by TEXT NOT NULL DEFAULT ''")
    db.execute("CREATE INDEX tasks_split ON tasks (split)")


@migrations(name="0005_acts")
def _acts(db: Database) -> None:
    db.execute("ALTER TABLE steps ADD COLUMN line TEXT NOT NULL DEFAULT ''")
    # JSON: they are few, and only ever read with their trajectory. NULL for none.
    db.execute("ALTER TABLE trajectories ADD COLUMN acts TEXT")


@migrations(name="0006_policy_version")
def _policy_version(db: Database) -> None:
    db.execute("ALTER TABLE segments ADD COLUMN policy_version TEXT NOT NULL DEFAULT ''")


@migrations(name="0007_guided")
def _guided(db: Database) -> None:
    db.execute("ALTER TABLE segments ADD COLUMN guided INTEGER NOT NULL DEFAULT 0")


def wrapped(connection: sqlite3.Connection) -> Database:
    # Plugins of sqlite-utils are the user's own affair and could change what a query means.
    return Database(connection, execute_plugins=False, recursive_triggers=False)


@contextmanager
def explained(name: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise ReplayBufferError(
                f"{name}: the disk is full. What was stored before is safe: free some space and run the same command again."
            ) from error
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise ReplayBufferError(
                f"{name} is locked: another process keeps it to itself. Wait until that one has finished, or end it; a process "
                "of this library holds the lock for less than a second at a time."
            ) from error
        raise ReplayBufferError(
            f"{name}: SQLite says {str(error)!r}. A replay buffer is an undamaged SQLite file in an existing folder "
            "that this process may write to, open while it is used: give such a path, or restore the file from a copy."
        ) from error


def connect(name: str) -> sqlite3.Connection:
    _check_file(name)
    with explained(name):
        if name != ":memory:" and (path := Path(name)).exists() and path.stat().st_size:
            # Read-only first: closing an ordinary connection may fold a write-ahead log into a file that is not ours.
            with closing(_open_read_only(name, _BUSY_SECONDS)) as probe:
                check_ours(wrapped(probe), name)
        return sqlite3.connect(name, timeout=_BUSY_SECONDS, check_same_thread=False)


def connect_read_only(name: str) -> sqlite3.Connection:
    """A connection that cannot write, to a file that is there, has something in it and is of this release's format."""
    _check_file(name)
    path = Path(name)
    if not path.exists() or not path.stat().st_size:
        raise ReplayBufferError(
            f"{name} {'is empty' if path.exists() else 'does not exist'}; give the replay buffer of a run that has begun "
            "(`replay.db` in its folder), or fill one with `dreamgym import`"
        )
    with explained(name):
        connection = _open_read_only(name, _READER_BUSY_SECONDS)
        try:
            db = wrapped(connection)
            check_ours(db, name)
            if pending := migrations.pending(db):
                raise ReplayBufferError(
                    f"{name} was made by an earlier dreamgym-lg (it lacks migration {pending[0].name!r}) and is only read "
                    f'here; bring it up to date: python -c "from dreamgym_lg.replay import ReplayBuffer as B; B({name!r})"'
                )
        except BaseException:
            connection.close()
            raise
        return connection


def _check_file(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        raise ReplayBufferError(f"{name} is a directory; a replay buffer is one file: give e.g. {path / 'replay.db'}")
    if name != ":memory:" and path.exists() and 0 < path.stat().st_size < _SMALLEST:
        # SQLite takes a file of one byte for an empty one and would write over it.
        with explained(name):
            raise sqlite3.DatabaseError("file is not a database")


def _open_read_only(name: str, seconds: float) -> sqlite3.Connection:
    return sqlite3.connect(f"{Path(name).resolve().as_uri()}?mode=ro", uri=True, timeout=seconds, check_same_thread=False)


def check_ours(db: Database, name: str) -> None:
    """Raise `ReplayBufferError` unless the file is empty or made by this release or an earlier one; only reads."""
    ((application_id,),) = db.execute("PRAGMA application_id")
    ((objects,),) = db.execute("SELECT count(*) FROM sqlite_master")
    applied = [migration.name for migration in migrations.applied(db)]
    if not applied and (objects or application_id not in (0, APPLICATION_ID)):
        raise ReplayBufferError(
            f"{name} is another application's SQLite file (no migration of dreamgym_lg is recorded in it) and was left "
            "as it is; give the path of a replay buffer, or one where no file exists yet"
        )
    known = {migration.name for migration in migrations.pending(Database(memory=True, execute_plugins=False))}
    if newer := [migration for migration in applied if migration not in known]:
        raise ReplayBufferError(
            f"{name} was made by a newer dreamgym-lg (it has migration {newer[-1]!r}) and was left as it is; "
            "upgrade with: pip install -U dreamgym-lg"
        )


def store(connection: sqlite3.Connection, trajectories: Sequence[Trajectory]) -> int:
    """Store trajectories, their tasks included, and return how many were stored.

    One that is there already under its key is kept, unless it failed: then the new one takes its place, and the failed one is
    set aside.
    """
    tasks = [trajectory.task for trajectory in trajectories]
    store_tasks(connection, tasks)
    hold_out(connection, tasks)
    stored: dict[int, Trajectory] = {}
    for each in trajectories:
        if (id := _store_row(connection, each)) is None and _set_failed_aside(connection, each):
            id = _store_row(connection, each)
        if id is not None:
            check_split(connection, each.task)
            stored[id] = each
    connection.executemany(
        f"INSERT INTO steps (trajectory_id, position, {STEP_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(id, position, *_step_row(step)) for id, each in stored.items() for position, step in enumerate(each.steps)],
    )
    connection.executemany(
        f"INSERT INTO segments (trajectory_id, position, {SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [(id, position, *_segment_row(one)) for id, each in stored.items() for position, one in enumerate(each.segments)],
    )
    return len(stored)


def _store_row(connection: sqlite3.Connection, each: Trajectory) -> int | None:
    """The new row's id; None where there is one of this key."""
    cursor = connection.execute(
        f"INSERT INTO trajectories ({TRAJECTORY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (run, iteration, task_id, rollout_index) DO NOTHING",
        (each.run, each.iteration, each.task.id, each.rollout_index, each.source, each.success)
        + (each.error and as_text(each.error), each.policy_version, each.experience_version)
        + (annotation_text(each.annotation), _acts_text(each.acts)),
    )
    return cursor.lastrowid if cursor.rowcount else None


def _set_failed_aside(connection: sqlite3.Connection, each: Trajectory) -> bool:
    """Whether the row of this trajectory's key recorded a failed episode: it is kept, as run `RUN/failed/ID`.

    Kept and not deleted, because a failed rollout is data, and because ids of steps must never be used again (`Retriever`).
    """
    changed = connection.execute(
        "UPDATE trajectories SET run = run || ? || id "
        "WHERE run = ? AND iteration = ? AND task_id = ? AND rollout_index = ? AND error IS NOT NULL",
        (FAILED, each.run, each.iteration, each.task.id, each.rollout_index),
    )
    return changed.rowcount > 0


def store_tasks(connection: sqlite3.Connection, tasks: Sequence[Task]) -> int:
    """Store the tasks whose ids are not stored yet; the number of them. Those that are stored are left as they are."""
    distinct = {task.id: task for task in reversed(tasks)}
    return connection.executemany(
        "INSERT INTO tasks (id, instruction, environment, metadata, origin, parent_id, split) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        [_task_row(task) for task in reversed(distinct.values())],
    ).rowcount


def update_tasks(connection: sqlite3.Connection, tasks: Sequence[Task]) -> None:
    """Give the stored tasks the fields of `tasks`; `ConfigurationError` for another environment, or a way back to train."""
    for task in tasks:
        check_split(connection, task)
        environment: str = connection.execute("SELECT environment FROM tasks WHERE id = ?", (task.id,)).fetchone()[0]
        if environment != task.environment:
            raise ConfigurationError(
                f"task {task.id!r} is stored with environment {environment!r} and given with {task.environment!r}: one id "
                "stands for one world; give the new task another id"
            )
    connection.executemany(
        "UPDATE tasks SET instruction = ?2, metadata = ?4, origin = ?5, parent_id = ?6, split = ?7 WHERE id = ?1 AND "
        "(instruction, metadata, origin, parent_id, split) IS NOT (?2, ?4, ?5, ?6, ?7)",
        [_task_row(task) for task in tasks],
    )


def hold_out(connection: sqlite3.Connection, tasks: Sequence[Task]) -> None:
    """Move stored train tasks that are given as validation or test ones to that split."""
    moved = [(task.split, task.id) for task in tasks if task.split != "train"]
    connection.executemany("UPDATE tasks SET split = ? WHERE id = ? AND split = 'train'", moved)


def check_split(connection: sqlite3.Connection, task: Task) -> None:
    """Raise `ConfigurationError` if `task` is given for training and stored as held out for evaluation."""
    if task.split != "train":
        return
    split: str = connection.execute("SELECT split FROM tasks WHERE id = ?", (task.id,)).fetchone()[0]
    if split != "train":
        raise ConfigurationError(
            f"task {task.id!r} is stored with split {split!r} and given with split 'train': a task that was held out for "
            f"evaluation is not trained on later. Give dataclasses.replace(task, split={split!r}), or a task of another id, "
            "or use a new replay buffer"
        )


def _task_row(task: Task) -> tuple[Any, ...]:
    written = task.id, as_text(task.instruction), task.environment, json.dumps(dict(task.metadata))
    return (*written, task.origin, task.parent_id, task.split)


def as_text(text: str) -> str:
    """`text` with what UTF-8 cannot hold (half an emoji from a cut-off answer) as `?`: no reason to lose an episode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def annotation_text(annotation: Mapping[str, str] | None) -> str | None:
    return as_text(json.dumps(dict(annotation), ensure_ascii=False)) if annotation is not None else None


def _acts_text(acts: Sequence[Act]) -> str | None:
    return as_text(json.dumps([act._asdict() for act in acts], ensure_ascii=False)) if acts else None


def _step_row(step: Step) -> tuple[Any, ...]:
    texts = as_text(step.observation), as_text(step.action), as_text(step.next_observation)
    judged = step.reward, step.terminated, step.truncated, step.valid, as_text(step.reasoning), step.decided_by
    return (*texts, *judged, as_text(step.line))


def _segment_row(segment: Segment) -> tuple[bytes, bytes, bytes, float | None, str, bool]:
    # Little-endian whatever the machine, so that a file may be moved.
    return (
        np.asarray(segment.token_ids, "<i4").tobytes(),
        np.asarray(segment.sampled, "u1").tobytes(),
        np.asarray(segment.logprobs, "<f4").tobytes(),
        segment.temperature,
        segment.policy_version,
        segment.guided,
    )


def segment_of(row: Sequence[Any]) -> Segment:
    *blobs, temperature, version, guided = row
    arrays = (np.frombuffer(blob, kind) for blob, kind in zip(blobs, ("<i4", "u1", "<f4"), strict=True))
    token_ids, sampled, logprobs = (tuple(array.tolist()) for array in arrays)
    return Segment(
        token_ids=token_ids,
        sampled=sampled,
        logprobs=logprobs,
        temperature=temperature,
        policy_version=version,
        guided=bool(guided),
    )


def task_of(row: Sequence[Any]) -> Task:
    names = ("id", "instruction", "environment", "metadata", "origin", "parent_id", "split")
    fields = dict(zip(names, row, strict=True))
    return Task(**{**fields, "metadata": json.loads(fields["metadata"])})


def trajectory_of(row: Sequence[Any], steps: Sequence[Step], segments: Sequence[Segment]) -> Trajectory:
    run, iteration, _, rollout_index, source, success, error, policy_version, experience_version, *more = row
    annotation, acts, *task = more
    return Trajectory(
        task=task_of(task),
        steps=tuple(steps),
        source=source,
        success=bool(success),
        error=error,
        run=run,
        iteration=iteration,
        rollout_index=rollout_index,
        policy_version=policy_version,
        experience_version=experience_version,
        segments=tuple(segments),
        annotation=json.loads(annotation) if annotation is not None else None,
        acts=tuple(Act(**act) for act in json.loads(acts or "[]")),
    )


def step_of(row: Sequence[Any]) -> Step:
    """The step that a row of `STEP_COLUMNS` records."""
    observation, action, next_observation, reward, terminated, truncated, valid, reasoning, decided_by, line = row
    return Step(
        observation=observation,
        action=action,
        next_observation=next_observation,
        reward=reward,
        terminated=bool(terminated),
        truncated=bool(truncated),
        valid=bool(valid),
        reasoning=reasoning,
        decided_by=decided_by,
        line=line,
    )


def load_trajectories(rows: Rows, ids: Sequence[int], *, segments: bool = False) -> list[Trajectory]:
    """The trajectories of these row ids, all of them stored, in this order."""
    given, chosen = [json.dumps(ids)], "IN (SELECT value FROM json_each(?))"
    steps: dict[int, list[Step]] = defaultdict(list)
    tokens: dict[int, list[Segment]] = defaultdict(list)
    part = f"WHERE trajectory_id {chosen} ORDER BY trajectory_id, position"
    for id, *row in rows(f"SELECT trajectory_id, {STEP_COLUMNS} FROM steps {part}", given):
        steps[id].append(step_of(row))
    if segments:
        sql = f"SELECT trajectory_id, {SEGMENT_COLUMNS} FROM segments {part}"
        for id, *row in rows(sql, given):
            tokens[id].append(segment_of(row))
    columns = f"trajectories.id, {TRAJECTORY_COLUMNS}, {TASK_COLUMNS}"
    sql = f"SELECT {columns} FROM {WITH_TASK} WHERE trajectories.id {chosen}"
    found = {id: trajectory_of(row, steps[id], tokens[id]) for id, *row in rows(sql, given)}
    return [found[id] for id in ids]


def load_metrics(rows: Rows, run: str) -> list[dict[str, Any]]:
    """One dict for each iteration that has metrics, in order: `iteration`, and its figures by name."""
    found: dict[int, dict[str, Any]] = {}
    sql = "SELECT iteration, name, value FROM metrics WHERE run = ? ORDER BY iteration, name"
    for iteration, name, value in rows(sql, [run]):
        found.setdefault(iteration, {"iteration": iteration})[name] = value
    return list(found.values())
