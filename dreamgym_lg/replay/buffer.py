"""The replay buffer: every task, trajectory, token segment and metric, in one SQLite file.

Its two readers are the experience model, which is grounded in similar real transitions, and training, which draws
trajectories from it. Graph state elsewhere holds ids and counters only; the payloads are here.
"""

import json
import os
import random
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any, Literal, NamedTuple, Self

from langchain_core.embeddings import Embeddings

from dreamgym_lg.errors import ConfigurationError, ReplayBufferError
from dreamgym_lg.replay.retrieval import Retriever
from dreamgym_lg.replay.rows import (
    TASK_COLUMNS,
    WITH_TASK,
    annotation_text,
    explained,
    load_metrics,
    load_trajectories,
    store,
    store_tasks,
    task_of,
    update_tasks,
)
from dreamgym_lg.text import clean
from dreamgym_lg.types import Origin, Source, Split, Step, Task, Trajectory

_PAGE = 500
_COUNTED = {
    "tasks": "count(DISTINCT tasks.id) FROM tasks LEFT JOIN trajectories ON tasks.id = task_id",
    "trajectories": f"count(*) FROM {WITH_TASK}",
    "steps": f"count(*) FROM {WITH_TASK} JOIN steps ON trajectory_id = trajectories.id",
}


class Changes(NamedTuple):
    """Tells a reader whether the real trajectories are still those that it has read."""

    newest: int
    """Number of the newest trajectory of all; the next question's `after`."""
    real: int
    """Real or offline trajectories that did not fail, stored since."""
    held_out: int
    """Evaluation tasks in the buffer: it rises when a train task is held out."""


class Record(NamedTuple):
    """A real trajectory, as little of it as an index over all of them needs."""

    task_id: str
    environment: str
    instruction: str
    split: Split
    request: str
    """The first observation."""
    success: bool
    steps: Sequence[tuple[str, str, bool, str]]
    """Action, next observation, valid and reasoning of each."""


class ReplayBuffer:
    """Tasks, trajectories and metrics in one SQLite file, shared by threads and by processes.

    Threads share one instance (one connection behind one lock); each process opens the file itself. What `add` returned
    for survives a kill of the process. Args: `path_or_connection`, a file made if missing, `:memory:`, or a connection
    (`check_same_thread=False`, outside a transaction) that stays its owner's to close; `embeddings`, a LangChain model
    for `similar` in place of hashed words.

    The vectors of `embeddings` are kept in `<path>.embedded.npz` beside the file, so that each distinct (observation,
    action) is paid once, and three of them at each start, to see that the model is the same: another one's are made anew.
    (Processes that embed new ones at the same time each pay.) Hashed words are made at each start in 60 µs a step, and kept
    in `<path>.hashed.npz` above 200,000 steps. Both files may be deleted at any time; where they cannot be written, a
    warning says so.

    Raises `ReplayBufferError` for a directory and for a file that is damaged, foreign or made by a newer release, none
    of which is written to; later, wherever SQLite itself fails.
    """

    def __init__(
        self, path_or_connection: str | os.PathLike[str] | sqlite3.Connection, *, embeddings: Embeddings | None = None
    ) -> None:
        from dreamgym_lg.replay import schema

        self._lock, self._owned = RLock(), not isinstance(path_or_connection, sqlite3.Connection)
        self.path: Path | None = None
        """The file; None in memory, and for a given connection."""
        if isinstance(path_or_connection, sqlite3.Connection):
            self._name, self._connection = "the given connection", path_or_connection
            if self._connection.in_transaction:
                raise ConfigurationError("the given connection is in a transaction: commit it or roll it back first")
        else:
            self._name = os.fspath(path_or_connection)
            self._connection = schema.connect(self._name)
            self.path = None if self._name in ("", ":memory:") else Path(self._name)
        vectors = None if self.path is None else Path(f"{self.path}.{'hashed' if embeddings is None else 'embedded'}.npz")
        self._retriever = Retriever(self._rows, embeddings, vectors)
        try:
            schema.prepare(self._connection, self._name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file (twice is fine); using the buffer afterwards raises `ReplayBufferError`."""
        self._retriever.close()
        if self._owned:
            with self._lock:
                self._connection.close()

    def add(self, trajectory: Trajectory) -> bool:
        """Store a trajectory with its task, steps and segments, all or nothing.

        False, and nothing stored, if (run, iteration, task.id, rollout_index) is there already: after a crash the same
        rollouts may be added again. One that is there with an `error` is replaced: it was played again.
        A task stored under its id is left as it is, but that a train task which is given as a validation or test one is
        held out from now on (see `add_tasks`). Raises `ConfigurationError` for a new trajectory whose task is given as a
        train one and stored as held out.
        """
        return self.extend((trajectory,)) == 1

    def extend(self, trajectories: Iterable[Trajectory]) -> int:
        """`add` many, 500 in a transaction; the number newly stored. If the iterable raises, earlier ones are kept."""
        pending, stored = iter(trajectories), 0
        # Drawn before the lock is taken: the iterable may itself read this buffer.
        while chunk := list(islice(pending, _PAGE)):
            with self._transaction() as connection:
                stored += store(connection, chunk)
        return stored

    def add_tasks(self, tasks: Iterable[Task]) -> int:
        """Store tasks, and give those stored already the fields given now; the number newly stored.

        A train task given as a validation or test one is held out at once: `similar` and `sample` no longer give its
        steps, in no process. Raises `ConfigurationError`, and stores nothing, for a held-out task given as a train one
        (its results would no longer be those of an unseen task), and for a stored id in another environment.
        """
        tasks = list(tasks)
        with self._transaction() as connection:
            stored = store_tasks(connection, tasks)
            update_tasks(connection, tasks)
            return stored

    def set_reasoning(
        self, trajectory: Trajectory, reasoning: Sequence[str], *, annotation: Mapping[str, str] | None = None
    ) -> None:
        """Replace the reasoning of every step of a stored trajectory, in their order.

        Args: `annotation`, of the episode as a whole, stored with them or, after a crash, not at all; None leaves what it had.
        """
        key = (trajectory.run, trajectory.iteration, trajectory.task.id, trajectory.rollout_index)
        sql = "SELECT id FROM trajectories WHERE run = ? AND iteration = ? AND task_id = ? AND rollout_index = ?"
        ids = self._rows(sql, key)
        if not ids or len(reasoning) != len(trajectory.steps):
            raise ReplayBufferError(
                f"{self._name}: {len(reasoning)} texts for the {len(trajectory.steps)} steps of trajectory {key}; "
                f"it is {'stored' if ids else 'not stored'}, and takes one text a step"
            )
        rows = [(clean(text), ids[0][0], position) for position, text in enumerate(reasoning)]
        with self._transaction() as connection:
            connection.executemany("UPDATE steps SET reasoning = ? WHERE trajectory_id = ? AND position = ?", rows)
            if annotation is not None:
                sql = "UPDATE trajectories SET annotation = ? WHERE id = ?"
                connection.execute(sql, (annotation_text(annotation), ids[0][0]))

    def tasks(self, *, environment: str | None = None, split: Split | None = None, origin: Origin | None = None) -> list[Task]:
        """The stored tasks, oldest first."""
        where, values = _where(environment=environment, split=split, origin=origin)
        rows = self._rows(f"SELECT {TASK_COLUMNS} FROM tasks {where} ORDER BY position", values)
        return [task_of(row) for row in rows]

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
        sql = f"SELECT trajectories.id FROM {WITH_TASK} {where} ORDER BY trajectories.id LIMIT ?"
        ids = [id for (id,) in self._rows(sql, [*values, -1 if limit is None else limit])]
        for start in range(0, len(ids), _PAGE):
            yield from load_trajectories(self._rows, ids[start : start + _PAGE], segments=segments)

    def sample(
        self, n: int, *, rng: random.Random, source: Source | None = None, split: Split | None = "train"
    ) -> list[Trajectory]:
        """`n` trajectories drawn uniformly without replacement (all if there are fewer), without segments.

        Only episodes that did not fail and have a step; `ReplayBufferError` if there is none to draw from.
        """
        drawable = ("error IS NULL", "EXISTS (SELECT 1 FROM steps WHERE trajectory_id = trajectories.id)")
        where, values = _where(*drawable, source=source, split=split)
        ids = [id for (id,) in self._rows(f"SELECT trajectories.id FROM {WITH_TASK} {where} ORDER BY 1", values)]
        if not ids:
            raise ReplayBufferError(
                f"{self._name}: nothing to sample (source={source!r}, split={split!r}); it takes a trajectory "
                "that did not fail and has a step. Add traces (`extend`, `dreamgym import`) or choose other filters."
            )
        return load_trajectories(self._rows, rng.sample(ids, min(n, len(ids))))

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

    def changes(self, after: int = 0) -> Changes:
        """Count the real trajectories stored behind number `after`, by whichever process."""
        sql = (
            "SELECT coalesce(max(id), ?), coalesce(sum(source != 'synthetic' AND error IS NULL), 0), "
            "(SELECT count(*) FROM tasks WHERE split IN ('validation', 'test')) FROM trajectories WHERE id > ?"
        )
        return Changes(*self._rows(sql, [after, after])[0])

    def records(self) -> list[Record]:
        """Every real or offline trajectory that did not fail, oldest first: ten times as fast as `trajectories`."""
        where = f"FROM {WITH_TASK} WHERE source != 'synthetic' AND error IS NULL ORDER BY trajectories.id"
        first = "(SELECT observation FROM steps WHERE trajectory_id = trajectories.id AND position = 0)"
        columns = f"trajectories.id, task_id, environment, instruction, split, coalesce({first}, ''), success"
        trajectories = self._rows(f"SELECT {columns} {where}", ())
        sql = (
            "SELECT trajectory_id, action, next_observation, valid, reasoning FROM steps WHERE trajectory_id IN "
            "(SELECT id FROM trajectories WHERE source != 'synthetic' AND error IS NULL) ORDER BY trajectory_id, position"
        )
        steps: dict[int, list[tuple[str, str, bool, str]]] = {id: [] for id, *_ in trajectories}
        for id, *step in self._rows(sql, ()):
            if id in steps:  # else stored since
                steps[id].append((step[0], step[1], bool(step[2]), step[3]))
        return [Record._make((*row, bool(success), steps[id])) for id, *row, success in trajectories]

    def answers(self, tool: str) -> list[str]:
        """The different recorded answers of a tool to valid calls, of train tasks."""
        called = json.dumps(tool, ensure_ascii=False)
        sql = (
            f"SELECT DISTINCT next_observation FROM {WITH_TASK} JOIN steps ON trajectory_id = trajectories.id "
            "WHERE valid AND split = 'train' AND source != 'synthetic' AND substr(action, -length(?1)) = ?1"
        )
        return [answer for (answer,) in self._rows(sql, [f', "name": {called}}}'])]

    def similar(self, observation: str, action: str, *, k: int = 3, exclude_task: str | None = None) -> list[Step]:
        """The `k` stored steps most similar by cosine, best first, equal ones oldest first.

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
        return load_metrics(self._rows, run)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, explained(self._name):
            # IMMEDIATE: a transaction that begins as a reader cannot wait for another process once it writes.
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection as connection:
                yield connection

    def _rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lock, explained(self._name):
            return self._connection.execute(sql, values).fetchall()


def _where(*conditions: str, **filters: object) -> tuple[str, list[object]]:
    """The `WHERE` clause for `conditions` and all filters that are not None, with its values."""
    filters = {column: value for column, value in filters.items() if value is not None}
    conditions += tuple(f"{column} = ?" for column in filters)
    return ("WHERE " + " AND ".join(conditions) if conditions else ""), list(filters.values())
