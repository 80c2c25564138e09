"""The replay buffer: every task, trajectory, token segment and metric, in one SQLite file."""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any, Literal, Self

from langchain_core.embeddings import Embeddings

from dreamgym_lg.errors import ConfigurationError, ReplayBufferError
from dreamgym_lg.redaction import answers_beside, hide_files, show_files
from dreamgym_lg.replay.retrieval import Retriever
from dreamgym_lg.replay.rows import (
    TASK_COLUMNS,
    WITH_TASK,
    annotation_text,
    corrections,
    load_metrics,
    load_trajectories,
    same_outcome,
    sqlite_errors,
    store,
    store_tasks,
    stored_id,
    task_of,
    trajectory_key,
    update_tasks,
)
from dreamgym_lg.text import clean
from dreamgym_lg.types import Origin, Source, Split, Step, Task, Trajectory

_PAGE = 500
_REAL = "error IS NULL AND (source = 'offline' OR (source = 'real' AND split = 'train'))"
_COUNTED = {
    "tasks": "count(DISTINCT tasks.id) FROM tasks LEFT JOIN trajectories ON tasks.id = task_id",
    "trajectories": f"count(*) FROM {WITH_TASK}",
    "steps": f"count(*) FROM {WITH_TASK} JOIN steps ON trajectory_id = trajectories.id",
}


class ReplayBuffer:
    """Tasks, trajectories and metrics in one SQLite file, shared by threads and by processes.

    Threads share one instance (one connection behind one lock); each process opens the file itself. A kill of the process
    loses nothing that `add` returned for.

    Args:
        path: A file, made if missing, or `:memory:`.
        embeddings: A LangChain model for `similar` in place of hashed words. A process embeds each distinct (observation,
            action) once; LangChain's `CacheBackedEmbeddings` keep them for the next one.

    Raises `ReplayBufferError` for a directory and for a file that is damaged, foreign or made by a newer release, none
    of which is written to; later, wherever SQLite itself fails.
    """

    def __init__(self, path: str | os.PathLike[str], *, embeddings: Embeddings | None = None) -> None:
        self._lock, self._name = RLock(), os.fspath(path)
        from dreamgym_lg.replay import schema  # sqlite-utils imports pandas where that is installed: half a second

        self._connection = schema.connect(self._name)
        self.path = None if self._name in ("", ":memory:") else Path(self._name)
        """The file; None in memory."""
        self._retriever = Retriever(self._rows, embeddings)
        try:
            schema.prepare(self._connection, self._name)
        except BaseException:
            self.close()
            raise
        if self.path is not None:
            hide_files(self, self.path, answers_beside(self.path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file (twice is fine); using the buffer afterwards raises `ReplayBufferError`."""
        with self._lock:
            show_files(self)
            self._connection.close()

    def add(self, trajectory: Trajectory) -> bool:
        """Store a trajectory with its task, steps and segments, all or nothing.

        False, and nothing stored, if (run, iteration, task.id, rollout_index) is there already, so that a crashed run may add
        its rollouts again. One that is there with an `error` is replaced, and the outcome of an imported trace is corrected
        (`corrections`). A stored task is left as it is, but a train task given as a validation or test one is held out from now
        on (`add_tasks`). Raises `ConfigurationError` for a new trajectory of a held-out task that is given as a train one.
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
        """Store tasks, or update those stored already; the number newly stored.

        A train task given as a validation or test one is held out at once: `similar` no longer gives its steps, in no
        process. Raises `ConfigurationError`, and stores nothing, for a held-out task given as a train one, and for
        a stored id in another environment.
        """
        tasks = list(tasks)
        with self._transaction() as connection:
            stored = store_tasks(connection, tasks)
            update_tasks(connection, tasks)
            return stored

    def set_reasoning(
        self,
        trajectory: Trajectory,
        reasoning: Sequence[str],
        *,
        annotation: Mapping[str, str] | None = None,
        reward: float | None = None,
    ) -> None:
        """Replace the reasoning of every step of a stored trajectory, in their order.

        Nothing is stored if the outcome has been corrected meanwhile: the reasoning is about the old one.

        Args: `annotation`, of the whole episode, and `reward`, of its last step, are stored with them or, after a crash, not at
        all; None leaves what it had.
        """
        with self._transaction() as connection:
            id = stored_id(connection, trajectory)
            if id is None or len(reasoning) != len(trajectory.steps):
                raise ReplayBufferError(
                    f"{self._name}: {len(reasoning)} texts for the {len(trajectory.steps)} steps of trajectory "
                    f"{trajectory_key(trajectory)}; it is {'not stored' if id is None else 'stored'}, and takes one text a step"
                )
            if not same_outcome(connection, id, trajectory):
                return
            texts = [(clean(text), id, position) for position, text in enumerate(reasoning)]
            connection.executemany("UPDATE steps SET reasoning = ? WHERE trajectory_id = ? AND position = ?", texts)
            if reward is not None:
                sql = "UPDATE steps SET reward = ? WHERE trajectory_id = ? AND position = ?"
                connection.execute(sql, (reward, id, len(texts) - 1))
            if annotation is not None:
                sql = "UPDATE trajectories SET annotation = ? WHERE id = ?"
                connection.execute(sql, (annotation_text(annotation), id))

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
        conditions = () if errors else ("error IS NULL",)
        filters = {"run": run, "iteration": iteration, "source": source, "split": split, "task_id": task_id}
        return self._load(*conditions, segments=segments, limit=limit, **filters)

    def _load(self, *conditions: str, segments: bool, limit: int | None = None, **filters: object) -> Iterator[Trajectory]:
        where, values = _where(*conditions, **filters)
        sql = f"SELECT trajectories.id FROM {WITH_TASK} {where} ORDER BY trajectories.id LIMIT ?"
        ids = [id for (id,) in self._rows(sql, [*values, -1 if limit is None else limit])]
        for start in range(0, len(ids), _PAGE):
            yield from self._load_page(ids[start : start + _PAGE], segments=segments)

    def _load_page(self, ids: Sequence[int], *, segments: bool) -> list[Trajectory]:
        with self._lock, sqlite_errors(self._name), self._connection as connection:
            connection.execute("BEGIN")  # another process may correct an outcome between two queries
            return load_trajectories(connection.execute, ids, segments=segments)

    def count(
        self,
        what: Literal["tasks", "trajectories", "steps"],
        *,
        run: str | None = None,
        source: Source | None = None,
        split: Split | None = None,
    ) -> int:
        """Number of stored items that match. Tasks by run or source are those with such a trajectory."""
        if what not in _COUNTED:
            raise ConfigurationError.unknown("count", what, _COUNTED)
        where, values = _where(run=run, source=source, split=split)
        return int(self._rows(f"SELECT {_COUNTED[what]} {where}", values)[0][0])

    def deciders(self, run: str) -> dict[str, int]:
        """Number of a run's dreamed steps by who answered them (`Step.decided_by`), most first."""
        sql = """SELECT decided_by, count(*) FROM trajectories JOIN steps ON trajectory_id = trajectories.id
            WHERE run = ? AND source = 'synthetic' GROUP BY decided_by ORDER BY count(*) DESC, decided_by"""
        return dict(self._rows(sql, [run]))

    def corrections(self) -> int:
        """Number of outcomes of imported traces that a later import corrected, in whichever process."""
        with self._lock, sqlite_errors(self._name):
            return corrections(self._connection)

    def revision(self) -> tuple[int, int, int]:
        """Numbers that change when `real_trajectories` do, by whichever process."""
        real = f"SELECT trajectories.id FROM {WITH_TASK} WHERE {_REAL} ORDER BY trajectories.id DESC LIMIT 1"
        sql = f"SELECT coalesce(({real}), 0), (SELECT count(*) FROM tasks WHERE split != 'train')"
        newest, held_out = self._rows(sql, ())[0]
        return newest, held_out, self.corrections()

    def real_trajectories(self, *, split: Split | None = None) -> Iterator[Trajectory]:
        """Those recorded before training, and those really played on training tasks, that did not fail.

        A policy's real episodes of an evaluation task measure it: a dream that knew them would judge it by itself.
        """
        return self._load(_REAL, segments=False, split=split)

    def similar(
        self, observation: str, action: str, *, k: int = 3, environment: str | None = None, exclude_task: str | None = None
    ) -> list[Step]:
        """The `k` stored steps most similar by cosine, best first, equal ones oldest first.

        Only steps of train tasks played offline or in the real environment. Steps of one environment with the same
        observation, action and next observation count once. Fewer than `k` if there are fewer, none for `k=0`.

        Args:
            environment: Of the steps' tasks (`Task.environment`). Default: any.
            exclude_task: The id of a task whose steps are left out.
        """
        return self.similar_many([(observation, action)], k, environment=environment, exclude_task=exclude_task)[0]

    def similar_many(
        self, queries: Sequence[tuple[str, str]], k: int = 3, *, environment: str | None = None, exclude_task: str | None = None
    ) -> list[list[Step]]:
        """`similar` for many (observation, action) pairs at once."""
        return self._retriever.steps(queries, k, environment, exclude_task) if k > 0 and queries else [[] for _ in queries]

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
        """One dict for each iteration with metrics, in order. It holds `iteration`, and its figures by name."""
        return load_metrics(self._rows, run)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, sqlite_errors(self._name):
            # IMMEDIATE: a transaction that begins as a reader cannot wait for another process once it writes.
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection as connection:
                yield connection

    def _rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._lock, sqlite_errors(self._name):
            return self._connection.execute(sql, values).fetchall()


def _where(*conditions: str, **filters: object) -> tuple[str, list[object]]:
    """The `WHERE` clause for `conditions` and all filters that are not None, with its values."""
    filters = {column: value for column, value in filters.items() if value is not None}
    conditions += tuple(f"{column} = ?" for column in filters)
    return ("WHERE " + " AND ".join(conditions) if conditions else ""), list(filters.values())
