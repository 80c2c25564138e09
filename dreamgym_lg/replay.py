"""The replay buffer: every task, trajectory, token segment and metric, in one SQLite file.

Its two readers are the experience model, which is grounded in similar real transitions, and training, which draws
trajectories from it. Graph state elsewhere holds ids and counters only; the payloads are here.
"""

import json
import os
import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from dreamgym_lg.errors import ConfigurationError, ReplayBufferError
from dreamgym_lg.retrieval import STEP_COLUMNS, Retriever, step_of
from dreamgym_lg.types import Origin, Segment, Source, Split, Step, Task, Trajectory

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

APPLICATION_ID = 0x4447796D
"""`DGym` in the file's header."""

_SMALLEST = 512
"""No SQLite file has fewer bytes."""
_PAGE = 500
_BUSY_SECONDS = 60.0
_TASK = "tasks.id, instruction, environment, metadata, origin, parent_id, split"
_TRAJECTORY = "run, iteration, task_id, rollout_index, source, success, error, policy_version, experience_version"
_WITH_TASK = "trajectories JOIN tasks ON tasks.id = task_id"
_COUNTED = {
    "tasks": "count(DISTINCT tasks.id) FROM tasks LEFT JOIN trajectories ON tasks.id = task_id",
    "trajectories": f"count(*) FROM {_WITH_TASK}",
    "steps": f"count(*) FROM {_WITH_TASK} JOIN steps ON trajectory_id = trajectories.id",
}


class ReplayBuffer:
    """Tasks, trajectories and metrics in one SQLite file, shared by threads and by processes.

    Threads share one instance (one connection behind one lock); each process opens the file itself. What `add` returned
    for survives a kill of the process. Args: `path_or_connection`, a file made if missing, `:memory:`, or a connection
    (`check_same_thread=False`, outside a transaction) that stays its owner's to close; `embeddings`, a LangChain model
    for `similar` in place of hashed words, whose vectors are not stored (wrap a paid one in `CacheBackedEmbeddings`).

    Raises `ReplayBufferError` for a directory and for a file that is damaged, foreign or made by a newer release, none
    of which is written to; later, wherever SQLite itself fails.
    """

    def __init__(
        self, path_or_connection: str | os.PathLike[str] | sqlite3.Connection, *, embeddings: "Embeddings | None" = None
    ) -> None:
        self._lock, self._owned = RLock(), not isinstance(path_or_connection, sqlite3.Connection)
        self._retriever = Retriever(self._rows, embeddings)
        if isinstance(path_or_connection, sqlite3.Connection):
            self._name, connection = "the given connection", path_or_connection
            if connection.in_transaction:
                raise ConfigurationError("the given connection is in a transaction: commit it or roll it back first")
        else:
            self._name = os.fspath(path_or_connection)
            connection = _connect(self._name)
        self._db = _wrapped(connection)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file (twice is fine); using the buffer afterwards raises `ReplayBufferError`."""
        if self._owned:
            with self._lock:
                self._db.close()

    def add(self, trajectory: Trajectory) -> bool:
        """Store a trajectory with its task, steps and segments, all or nothing.

        False, and nothing stored, if (run, iteration, task.id, rollout_index) is there already: after a crash the same
        rollouts may be added again. A task already stored under its id is left as it is, its split included.
        """
        return self.extend((trajectory,)) == 1

    def extend(self, trajectories: Iterable[Trajectory]) -> int:
        """`add` many, 500 in a transaction; the number newly stored. If the iterable raises, earlier ones are kept."""
        pending, stored = iter(trajectories), 0
        # Drawn before the lock is taken: the iterable may itself read this buffer.
        while chunk := list(islice(pending, _PAGE)):
            with self._transaction() as connection:
                stored += _store(connection, chunk)
        return stored

    def add_tasks(self, tasks: Iterable[Task]) -> int:
        """Store tasks; one already stored under its id is left as it is. The number newly stored."""
        tasks = list(tasks)
        with self._transaction() as connection:
            return _store_tasks(connection, tasks)

    def tasks(
        self, *, environment: str | None = None, split: Split | None = None, origin: Origin | None = None
    ) -> list[Task]:
        """The stored tasks, oldest first."""
        where, values = _where(environment=environment, split=split, origin=origin)
        return [_task_of(row) for row in self._rows(f"SELECT {_TASK} FROM tasks {where} ORDER BY position", values)]

    def trajectories(
        self,
        *,
        run: str | None = None,
        iteration: int | None = None,
        source: Source | None = None,
        split: Split | None = None,
        task_id: str | None = None,
        errors: bool = True,
        limit: int | None = None,
        segments: bool = False,
    ) -> Iterator[Trajectory]:
        """The trajectories stored when iteration begins, oldest first; the buffer may be used meanwhile.

        `errors=False` leaves out the failed ones. Without `segments` they come with none: tokens are most of a file.
        """
        failed = () if errors else ("error IS NULL",)
        where, values = _where(*failed, run=run, iteration=iteration, source=source, split=split, task_id=task_id)
        sql = f"SELECT trajectories.id FROM {_WITH_TASK} {where} ORDER BY trajectories.id LIMIT ?"
        ids = [id for (id,) in self._rows(sql, [*values, -1 if limit is None else limit])]
        for start in range(0, len(ids), _PAGE):
            yield from self._load(ids[start : start + _PAGE], segments=segments)

    def sample(
        self, n: int, *, rng: random.Random, source: Source | None = None, split: Split | None = "train"
    ) -> list[Trajectory]:
        """`n` trajectories drawn uniformly without replacement (all if there are fewer), without segments.

        Only episodes that did not fail and have a step; `ReplayBufferError` if there is none to draw from.
        """
        drawable = ("error IS NULL", "EXISTS (SELECT 1 FROM steps WHERE trajectory_id = trajectories.id)")
        where, values = _where(*drawable, source=source, split=split)
        ids = [id for (id,) in self._rows(f"SELECT trajectories.id FROM {_WITH_TASK} {where} ORDER BY 1", values)]
        if not ids:
            raise ReplayBufferError(
                f"{self._name}: nothing to sample (source={source!r}, split={split!r}); it takes a trajectory "
                "that did not fail and has a step. Add traces (`extend`, `dreamgym import`) or choose other filters."
            )
        return self._load(rng.sample(ids, min(n, len(ids))))

    def count(
        self,
        what: Literal["tasks", "trajectories", "steps"],
        *,
        run: str | None = None,
        source: Source | None = None,
        split: Split | None = None,
    ) -> int:
        """How many are stored; tasks filtered by run or source are those with such a trajectory."""
        if what not in _COUNTED:
            raise ConfigurationError.unknown("count", what, _COUNTED)
        where, values = _where(run=run, source=source, split=split)
        return int(self._rows(f"SELECT {_COUNTED[what]} {where}", values)[0][0])

    def similar(self, observation: str, action: str, *, k: int = 3, exclude_task: str | None = None) -> list[Step]:
        """The `k` stored steps whose (observation, action) has the highest cosine, best first, equal ones oldest first.

        Only steps of train tasks played offline or in the real environment. Steps with the same observation, action and
        next observation count once; `exclude_task` hides one task's. Fewer than `k` if there are fewer, none for `k=0`.
        """
        return self.similar_many([(observation, action)], k, exclude_task=exclude_task)[0]

    def similar_many(
        self, queries: Sequence[tuple[str, str]], k: int = 3, *, exclude_task: str | None = None
    ) -> list[list[Step]]:
        """`similar` for many (observation, action) pairs at once."""
        return self._retriever.steps(queries, k, exclude_task) if k > 0 and queries else [[] for _ in queries]

    def record_metrics(self, run: str, iteration: int, values: Mapping[str, float | int | str | None]) -> None:
        """Store figures of one iteration; a name recorded again replaces its value. NaN comes back as None."""
        if "iteration" in values:
            raise ConfigurationError("no metric can be named 'iteration', the key of the iteration itself; rename it")
        with self._transaction() as connection:
            connection.executemany(
                "INSERT INTO metrics (run, iteration, name, value) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (run, iteration, name) DO UPDATE SET value = excluded.value",
                [(run, iteration, name, value) for name, value in values.items()],
            )

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """One dict for each iteration that has metrics, in order: `iteration`, and its figures by name."""
        found: dict[int, dict[str, Any]] = {}
        sql = "SELECT iteration, name, value FROM metrics WHERE run = ? ORDER BY iteration, name"
        for iteration, name, value in self._rows(sql, [run]):
            found.setdefault(iteration, {"iteration": iteration})[name] = value
        return list(found.values())

    def _prepare(self) -> None:
        with self._lock, _explained(self._name):
            _check_ours(self._db, self._name)
            with suppress(sqlite3.OperationalError):
                # Locked: another process is switching this very file, and the mode is the file's, not the connection's.
                self._db.enable_wal()
            self._db.execute("PRAGMA synchronous = NORMAL")
            if _migrations.pending(self._db):
                # One transaction: a process opening the file meanwhile finds it either empty or complete.
                with self._transaction():
                    self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    _migrations.apply(self._db)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _explained(self._name):
            # IMMEDIATE: a transaction that begins as a reader cannot wait for another process once it writes.
            self._db.conn.execute("BEGIN IMMEDIATE")
            with self._db.conn as connection:
                yield connection

    def _rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lock, _explained(self._name):
            return self._db.conn.execute(sql, values).fetchall()

    def _load(self, ids: Sequence[int], *, segments: bool = False) -> list[Trajectory]:
        given, chosen = [json.dumps(ids)], "IN (SELECT value FROM json_each(?))"
        steps: dict[int, list[Step]] = defaultdict(list)
        tokens: dict[int, list[Segment]] = defaultdict(list)
        part = f"WHERE trajectory_id {chosen} ORDER BY trajectory_id, position"
        for id, *row in self._rows(f"SELECT trajectory_id, {STEP_COLUMNS} FROM steps {part}", given):
            steps[id].append(step_of(row))
        if segments:
            sql = f"SELECT trajectory_id, token_ids, sampled, logprobs FROM segments {part}"
            for id, *row in self._rows(sql, given):
                tokens[id].append(_segment_of(row))
        sql = f"SELECT trajectories.id, {_TRAJECTORY}, {_TASK} FROM {_WITH_TASK} WHERE trajectories.id {chosen}"
        found = {id: _trajectory_of(row, steps[id], tokens[id]) for id, *row in self._rows(sql, given)}
        return [found[id] for id in ids]


_migrations = Migrations("dreamgym_lg")


@_migrations(name="0001_tables")
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


def _wrapped(connection: sqlite3.Connection) -> Database:
    # Plugins of sqlite-utils are the user's own affair and could change what a query means.
    return Database(connection, execute_plugins=False, recursive_triggers=False)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise ReplayBufferError(
            f"{name}: SQLite says {str(error)!r}. A replay buffer is an undamaged SQLite file in an existing folder "
            "that this process may write to, open while it is used: give such a path, or restore the file from a copy."
        ) from error


def _connect(name: str) -> sqlite3.Connection:
    path = Path(name)
    if path.is_dir():
        raise ReplayBufferError(f"{name} is a directory; a replay buffer is one file: give e.g. {path / 'replay.db'}")
    with _explained(name):
        if name != ":memory:" and path.exists() and (size := path.stat().st_size):
            if size < _SMALLEST:
                # SQLite takes a file of one byte for an empty one and would write over it.
                raise sqlite3.DatabaseError("file is not a database")
            # Read-only first: closing an ordinary connection may fold a write-ahead log into a file that is not ours.
            address = f"{path.resolve().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS)) as probe:
                _check_ours(_wrapped(probe), name)
        return sqlite3.connect(name, timeout=_BUSY_SECONDS, check_same_thread=False)


def _check_ours(db: Database, name: str) -> None:
    """Raise `ReplayBufferError` unless the file is empty or made by this release or an earlier one; only reads."""
    ((application_id,),) = db.execute("PRAGMA application_id")
    ((objects,),) = db.execute("SELECT count(*) FROM sqlite_master")
    applied = [migration.name for migration in _migrations.applied(db)]
    if not applied and (objects or application_id not in (0, APPLICATION_ID)):
        raise ReplayBufferError(
            f"{name} is another application's SQLite file (no migration of dreamgym_lg is recorded in it) and was left "
            "as it is; give the path of a replay buffer, or one where no file exists yet"
        )
    known = {migration.name for migration in _migrations.pending(Database(memory=True, execute_plugins=False))}
    if newer := [migration for migration in applied if migration not in known]:
        raise ReplayBufferError(
            f"{name} was made by a newer dreamgym-lg (it has migration {newer[-1]!r}) and was left as it is; "
            "upgrade with: pip install -U dreamgym-lg"
        )


def _where(*conditions: str, **filters: object) -> tuple[str, list[object]]:
    """The `WHERE` clause, or nothing, for `conditions` and for those filters that are not None, and their values."""
    given = {column: value for column, value in filters.items() if value is not None}
    conditions += tuple(f"{column} = ?" for column in given)
    return ("WHERE " + " AND ".join(conditions) if conditions else ""), list(given.values())


def _store(connection: sqlite3.Connection, trajectories: Sequence[Trajectory]) -> int:
    _store_tasks(connection, [trajectory.task for trajectory in trajectories])
    steps: list[tuple[Any, ...]] = []
    segments: list[tuple[Any, ...]] = []
    stored = 0
    for each in trajectories:
        cursor = connection.execute(
            f"INSERT INTO trajectories ({_TRAJECTORY}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (run, iteration, task_id, rollout_index) DO NOTHING",
            (each.run, each.iteration, each.task.id, each.rollout_index, each.source, each.success)
            + (each.error and _text(each.error), each.policy_version, each.experience_version),
        )
        if cursor.rowcount:
            stored += 1
            steps += [(cursor.lastrowid, position, *_step_row(step)) for position, step in enumerate(each.steps)]
            segments += [(cursor.lastrowid, position, *_segment_row(one)) for position, one in enumerate(each.segments)]
    connection.executemany(
        f"INSERT INTO steps (trajectory_id, position, {STEP_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", steps
    )
    connection.executemany(
        "INSERT INTO segments (trajectory_id, position, token_ids, sampled, logprobs) VALUES (?, ?, ?, ?, ?)", segments
    )
    return stored


def _store_tasks(connection: sqlite3.Connection, tasks: Sequence[Task]) -> int:
    distinct = {task.id: task for task in reversed(tasks)}
    rows = [
        (task.id, _text(task.instruction), task.environment, json.dumps(dict(task.metadata)))
        + (task.origin, task.parent_id, task.split)
        for task in reversed(distinct.values())
    ]
    return connection.executemany(
        "INSERT INTO tasks (id, instruction, environment, metadata, origin, parent_id, split) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        rows,
    ).rowcount


def _text(text: str) -> str:
    """`text` with what UTF-8 cannot hold (half an emoji from a cut-off answer) as `?`: no reason to lose an episode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _step_row(step: Step) -> tuple[Any, ...]:
    texts = _text(step.observation), _text(step.action), _text(step.next_observation)
    return (*texts, step.reward, step.terminated, step.truncated, step.valid, _text(step.reasoning))


def _segment_row(segment: Segment) -> tuple[bytes, bytes, bytes]:
    # Little-endian whatever the machine, so that a file may be moved.
    return (
        np.asarray(segment.token_ids, "<i4").tobytes(),
        np.asarray(segment.sampled, "u1").tobytes(),
        np.asarray(segment.logprobs, "<f4").tobytes(),
    )


def _segment_of(row: Sequence[bytes]) -> Segment:
    kinds = ("<i4", "u1", "<f4")
    arrays = (np.frombuffer(blob, kind) for blob, kind in zip(row, kinds, strict=True))
    token_ids, sampled, logprobs = (tuple(array.tolist()) for array in arrays)
    return Segment(token_ids=token_ids, sampled=sampled, logprobs=logprobs)


def _task_of(row: Sequence[Any]) -> Task:
    names = ("id", "instruction", "environment", "metadata", "origin", "parent_id", "split")
    fields = dict(zip(names, row, strict=True))
    return Task(**{**fields, "metadata": json.loads(fields["metadata"])})


def _trajectory_of(row: Sequence[Any], steps: Sequence[Step], segments: Sequence[Segment]) -> Trajectory:
    run, iteration, _, rollout_index, source, success, error, policy_version, experience_version, *task = row
    return Trajectory(
        task=_task_of(task),
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
    )
