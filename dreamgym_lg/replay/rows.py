"""The rows of the replay buffer's tables: tasks, trajectories, steps and segments, stored and loaded."""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from dreamgym_lg.errors import ConfigurationError, ReplayBufferError
from dreamgym_lg.text import clean
from dreamgym_lg.types import TRACES, Act, Segment, Step, Task, Trajectory

_TASK_FIELDS = tuple(field.name for field in fields(Task))
_TASK_JSON: Mapping[str, Any] = {"metadata": dict, "goal": dict, "drawn": dict, "tools": list, "messages": list}
TASK_COLUMNS = ", ".join(f"tasks.{name}" for name in _TASK_FIELDS)
_STEP_FIELDS = tuple(field.name for field in fields(Step))
_STEP_VALUES = attrgetter(*_STEP_FIELDS)
STEP_COLUMNS = ", ".join(f"steps.{name}" for name in _STEP_FIELDS)
_ELSEWHERE = ("task", "steps", "segments", "prompt")
_TRAJECTORY_FIELDS = tuple(field.name for field in fields(Trajectory) if field.name not in _ELSEWHERE)
_SEGMENT_FIELDS = tuple(field.name for field in fields(Segment))
# Little-endian whatever the machine, so that a file may be moved.
_SEGMENT_BLOBS = {"token_ids": "<i4", "sampled": "u1", "logprobs": "<f4"}
WITH_TASK = "trajectories JOIN tasks ON tasks.id = task_id"

Rows = Callable[[str, Sequence[Any]], Iterable[tuple[Any, ...]]]
"""Runs a query with its values and gives its rows."""

_HAS_KEY = "run = ? AND iteration = ? AND task_id = ? AND rollout_index = ?"

FAILED = "/failed/"
"""Separator in the run name of a failed episode that was played again. It stands between run and id."""


def store(connection: sqlite3.Connection, trajectories: Sequence[Trajectory]) -> int:
    """Store trajectories with their tasks; the number stored.

    One that is there is kept, unless it failed. Of a trace the outcome is corrected.
    """
    tasks = [trajectory.task for trajectory in trajectories]
    store_tasks(connection, tasks)
    _hold_out(connection, tasks)
    stored = 0
    for each in trajectories:
        if (id := _store_row(connection, each)) is None and _set_failed_aside(connection, each):
            id = _store_row(connection, each)
        if id is not None:
            if each.source != "offline":  # a trace of a held-out task is held out with it
                _check_split(connection, each.task)
            _store_steps(connection, id, each)
            segments = [(id, position, *_segment_row(one)) for position, one in enumerate(each.segments)]
            connection.executemany(_insert("segments", "trajectory_id", "position", *_SEGMENT_FIELDS), segments)
            stored += 1
        elif each.run == TRACES and each.has_outcome:
            _correct_outcome(connection, each)
    return stored


def _store_steps(connection: sqlite3.Connection, id: int, each: Trajectory, start: int = 0) -> None:
    steps = [(id, position, *_step_row(step)) for position, step in enumerate(each.steps)]
    connection.executemany(_insert("steps", "trajectory_id", "position", *_STEP_FIELDS), steps[start:])


def _insert(table: str, *columns: str) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _store_row(connection: sqlite3.Connection, each: Trajectory) -> int | None:
    """The new row's id; None where there is one of this key."""
    row = {name: getattr(each, name) for name in _TRAJECTORY_FIELDS}
    row |= {"error": each.error and clean(each.error), "annotation": annotation_text(each.annotation)}
    acts = [act._asdict() for act in each.acts]
    row["acts"] = clean(json.dumps(acts, ensure_ascii=False)) if acts else None
    sql = f"{_insert('trajectories', *row, 'task_id')} ON CONFLICT (run, iteration, task_id, rollout_index) DO NOTHING"
    cursor = connection.execute(sql, (*row.values(), each.task.id))
    return cursor.lastrowid if cursor.rowcount else None


def trajectory_key(each: Trajectory) -> tuple[str, int, str, int]:
    """The run, iteration, task and rollout index that no two stored trajectories share."""
    return each.run, each.iteration, each.task.id, each.rollout_index


def stored_id(connection: sqlite3.Connection, each: Trajectory) -> int | None:
    """The row id of the stored trajectory with this key."""
    rows = connection.execute(f"SELECT id FROM trajectories WHERE {_HAS_KEY}", trajectory_key(each))
    return next((id for (id,) in rows), None)


def _set_failed_aside(connection: sqlite3.Connection, each: Trajectory) -> bool:
    """Rename the run of a failed episode of this key to `RUN/failed/ID`.

    It is not deleted, because ids of steps must never be used again (`Retriever`).
    """
    changed = connection.execute(
        f"UPDATE trajectories SET run = run || ? || id WHERE {_HAS_KEY} AND error IS NOT NULL",
        (FAILED, *trajectory_key(each)),
    )
    return changed.rowcount > 0


def _correct_outcome(connection: sqlite3.Connection, each: Trajectory) -> None:
    """Give a stored trace this outcome, if it has another. Annotations know the old one: they are written anew."""
    id = stored_id(connection, each)
    if id is None or same_outcome(connection, id, each):
        return
    connection.execute("UPDATE trajectories SET success = ?, annotation = NULL WHERE id = ?", (each.success, id))
    # Ids of steps stay (`Retriever`). A known outcome may add a step: the agent ended with a tool's answer.
    outcomes = [(step.reward, step.terminated, step.truncated, id, n) for n, step in enumerate(each.steps)]
    sql = "UPDATE steps SET reward = ?, terminated = ?, truncated = ?, reasoning = '' WHERE trajectory_id = ? AND position = ?"
    connection.executemany(sql, outcomes)
    ((steps,),) = connection.execute("SELECT count(*) FROM steps WHERE trajectory_id = ?", (id,))
    _store_steps(connection, id, each, start=steps)
    connection.execute(f"PRAGMA user_version = {corrections(connection) + 1}")


def same_outcome(connection: sqlite3.Connection, id: int, each: Trajectory) -> bool:
    """True if the stored trajectory has this one's outcome."""
    (stored,) = load_trajectories(connection.execute, [id])
    return (stored.has_outcome, stored.success, stored.reward) == (each.has_outcome, each.success, each.reward)


def corrections(connection: sqlite3.Connection) -> int:
    """Number of outcomes corrected so far."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def store_tasks(connection: sqlite3.Connection, tasks: Sequence[Task]) -> int:
    """Store the tasks whose ids are not stored yet; the number of them. Those that are stored are left as they are."""
    distinct = {task.id: task for task in reversed(tasks)}
    return connection.executemany(
        f"{_insert('tasks', *_TASK_FIELDS)} ON CONFLICT (id) DO NOTHING",
        [_task_row(task) for task in reversed(distinct.values())],
    ).rowcount


def update_tasks(connection: sqlite3.Connection, tasks: Sequence[Task]) -> None:
    """Update stored tasks; `ConfigurationError` for another environment, or a way back to train."""
    for task in tasks:
        _check_split(connection, task)
        if task.split != "train":
            _check_untrained(connection, task.id, task.split)
        environment: str = connection.execute("SELECT environment FROM tasks WHERE id = ?", (task.id,)).fetchone()[0]
        if environment != task.environment:
            raise ConfigurationError(
                f"task {task.id!r} is stored with environment {environment!r} and given with {task.environment!r}: one id "
                "stands for one world; give the new task another id"
            )
    # a goal that was written in hindsight stays where the same task is given without one
    new = {name: f"?{number}" for number, name in enumerate(_TASK_FIELDS, 1)}
    new["goal"] = f"coalesce(nullif({new['goal']}, '{{}}'), goal)"
    columns, values = ", ".join(new), ", ".join(new.values())
    connection.executemany(
        f"UPDATE tasks SET ({columns}) = ({values}) WHERE id = ?1 AND ({columns}) IS NOT ({values})",
        [_task_row(task) for task in tasks],
    )


def _hold_out(connection: sqlite3.Connection, tasks: Sequence[Task]) -> None:
    """Move stored train tasks that are given as validation or test ones to that split."""
    moved = [(task.split, task.id) for task in tasks if task.split != "train"]
    for split, task_id in moved:
        _check_untrained(connection, task_id, split)
    connection.executemany("UPDATE tasks SET split = ? WHERE id = ? AND split = 'train'", moved)


def _check_untrained(connection: sqlite3.Connection, task_id: str, split: str) -> None:
    """Raise `ConfigurationError` for a train task that a run was trained on. It cannot be held out any more.

    A training in the dream or in reality leaves episodes of the task (run `train`, of prompts `prompts/...`), the others a
    stage's metrics.
    """
    train = connection.execute("SELECT 1 FROM tasks WHERE id = ? AND split = 'train'", (task_id,)).fetchone()
    if not train:
        return
    run = connection.execute(
        "SELECT run FROM trajectories WHERE task_id = ? AND source != 'offline' AND (run = 'train' OR run LIKE '%/train'"
        " OR run LIKE 'prompts/%' OR run LIKE '%/prompts/%')"
        " UNION SELECT run FROM metrics WHERE (run LIKE '%stage/base%' OR run LIKE '%stage/experience%')"
        " AND EXISTS (SELECT 1 FROM trajectories WHERE task_id = ? AND source = 'offline')",
        (task_id, task_id),
    ).fetchone()
    if run:
        raise ConfigurationError(
            f"task {task_id!r} is given with split {split!r}, and the run {run[0]!r} of this replay buffer was trained on it: "
            "success on it is not success on an unseen task. Hold tasks out before training (held_out= at the first import, "
            "split_tasks), or use a new replay buffer and folder"
        )


def _check_split(connection: sqlite3.Connection, task: Task) -> None:
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
    row = {name: getattr(task, name) for name in _TASK_FIELDS}
    row |= {name: json.dumps(clean(kind(row[name]))) for name, kind in _TASK_JSON.items() if row[name] is not None}
    row |= {name: clean(row[name]) for name in ("instruction", "observation", "rubric")}
    return tuple(row.values())


def annotation_text(annotation: Mapping[str, str] | None) -> str | None:
    return clean(json.dumps(dict(annotation), ensure_ascii=False)) if annotation is not None else None


def _step_row(step: Step) -> tuple[Any, ...]:
    return tuple(clean(value) for value in _STEP_VALUES(step))


def _segment_row(segment: Segment) -> tuple[Any, ...]:
    blobs = {name: np.asarray(getattr(segment, name), kind).tobytes() for name, kind in _SEGMENT_BLOBS.items()}
    return tuple(blobs[name] if name in blobs else getattr(segment, name) for name in _SEGMENT_FIELDS)


def _segment_of(row: Sequence[Any]) -> Segment:
    values = dict(zip(_SEGMENT_FIELDS, row, strict=True))
    values |= {name: tuple(np.frombuffer(values[name], kind).tolist()) for name, kind in _SEGMENT_BLOBS.items()}
    return Segment(**values)


def task_of(row: Sequence[Any]) -> Task:
    values = dict(zip(_TASK_FIELDS, row, strict=True))
    values |= {name: json.loads(values[name]) for name in _TASK_JSON if values[name] is not None}
    return Task(**values | {"messages": values["messages"] or ()})


def _trajectory_of(row: Sequence[Any], steps: Sequence[Step], segments: Sequence[Segment]) -> Trajectory:
    size = len(_TRAJECTORY_FIELDS)
    values = dict(zip(_TRAJECTORY_FIELDS, row[:size], strict=True))
    annotation, acts = values["annotation"], json.loads(values["acts"] or "[]")
    values |= {"success": bool(values["success"]), "acts": tuple(Act(**act) for act in acts)}
    values["annotation"] = json.loads(annotation) if annotation is not None else None
    return Trajectory(task=task_of(row[size:]), steps=tuple(steps), segments=tuple(segments), **values)


def step_of(row: Sequence[Any]) -> Step:
    """The step that a row of `STEP_COLUMNS` records."""
    values = dict(zip(_STEP_FIELDS, row, strict=True))
    for name in ("terminated", "truncated", "valid"):
        values[name] = bool(values[name])
    return Step(**values)


def load_trajectories(rows: Rows, ids: Sequence[int], *, segments: bool = False) -> list[Trajectory]:
    """The trajectories of these row ids, all of them stored, in this order."""
    values, chosen = [json.dumps(ids)], "IN (SELECT value FROM json_each(?))"
    steps: dict[int, list[Step]] = defaultdict(list)
    tokens: dict[int, list[Segment]] = defaultdict(list)
    part = f"WHERE trajectory_id {chosen} ORDER BY trajectory_id, position"
    for id, *row in rows(f"SELECT trajectory_id, {STEP_COLUMNS} FROM steps {part}", values):
        steps[id].append(step_of(row))
    if segments:
        sql = f"SELECT trajectory_id, {', '.join(_SEGMENT_FIELDS)} FROM segments {part}"
        for id, *row in rows(sql, values):
            tokens[id].append(_segment_of(row))
    columns = ", ".join(f"trajectories.{name}" for name in ("id", *_TRAJECTORY_FIELDS))
    sql = f"SELECT {columns}, {TASK_COLUMNS} FROM {WITH_TASK} WHERE trajectories.id {chosen}"
    trajectories = {id: _trajectory_of(row, steps[id], tokens[id]) for id, *row in rows(sql, values)}
    return [trajectories[id] for id in ids]


def load_metrics(rows: Rows, run: str) -> list[dict[str, Any]]:
    """One dict for each iteration with metrics, in order. It holds `iteration`, and its figures by name."""
    iterations: dict[int, dict[str, Any]] = {}
    sql = "SELECT iteration, name, value FROM metrics WHERE run = ? ORDER BY iteration, name"
    for iteration, name, value in rows(sql, [run]):
        iterations.setdefault(iteration, {"iteration": iteration})[name] = value
    return list(iterations.values())


@contextmanager
def sqlite_errors(name: str) -> Iterator[None]:
    """Raise SQLite's errors as a `ReplayBufferError` that says what to do. Args: `name`, of the file."""
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
