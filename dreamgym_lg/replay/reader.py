"""`ReplayReader`: a replay buffer's runs, groups and episodes, read without ever writing to the file."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from dreamgym_lg.errors import ReplayBufferError
from dreamgym_lg.replay.rows import WITH_TASK, load_metrics, load_trajectories, sqlite_errors
from dreamgym_lg.types import Origin, Source, Split, Trajectory, is_missing

Outcome = Literal["success", "no success", "failed"]
Event = Literal["invalid action", "blocked", "passed through", "raised"]
"""Kind of a special event in an episode. A refused action, or one of `ActKind`."""

_SUCCESS = "(error IS NULL AND success)"
_FAILED = "(CASE WHEN error IS NULL THEN 0 ELSE is_missing(error) END)"
_OUTCOMES: Mapping[Outcome, str] = {"success": _SUCCESS, "no success": f"NOT {_SUCCESS} AND NOT {_FAILED}", "failed": _FAILED}
_COUNTS = f"count(*) AS episodes, sum({_SUCCESS}) AS successes, sum({_FAILED}) AS failed, count(error) AS errors"
_OF_ITS_STEPS = "SELECT 1 FROM steps WHERE trajectory_id = trajectories.id AND"
_EPISODE = "trajectories.id, run, iteration, rollout_index, source, success, error, task_id, instruction, origin, split"


class Run(NamedTuple):
    """All episodes that one run stored from one source."""

    name: str
    source: Source
    episodes: int
    """Those that failed to be played included."""
    successes: int
    failed: int
    """Those that could not be played (`is_missing`)."""
    errors: int
    """Those, and episodes that ended for want of a readable answer of the dream: no successes."""
    last_iteration: int
    newest: int
    """Id of its newest episode."""


class Iteration(NamedTuple):
    """The episodes of one iteration of a run, all from one source."""

    number: int
    source: Source
    groups: int
    varied: int
    """Groups of tasks that the curriculum varied."""
    episodes: int
    successes: int
    failed: int
    errors: int


class Episode(NamedTuple):
    """A line of a list of episodes."""

    id: int
    run: str
    iteration: int
    rollout_index: int
    source: Source
    success: bool
    error: str | None
    task_id: str
    instruction: str
    origin: Origin
    split: Split
    steps: int
    reward: float
    invalid: int
    """Actions that were refused."""


class Filters(NamedTuple):
    """Conditions on episodes; None is any."""

    run: str | None = None
    iteration: int | None = None
    source: Source | None = None
    split: Split | None = None
    outcome: Outcome | None = None
    happened: Event | None = None
    decided_by: str | None = None
    """A part of the dream that decided one of its steps, as `Step.decided_by`."""
    task_id: str | None = None
    text: str | None = None
    """Text in an episode: its instruction, error, observations, actions or reasoning. ASCII letters match in any case."""


class Page(NamedTuple):
    """A page of matching episodes, newest first."""

    episodes: Sequence[Episode]
    older: int | None
    """Give it as `before` to go on; None at the end."""


class ReplayReader:
    """Reads a replay buffer's file as it was when opened, and never writes to it.

    A run may go on writing meanwhile: the next reader sees it. Opening takes a millisecond; one is not for several threads at
    once. Raises `ReplayBufferError` for a file that is missing, empty, foreign, damaged, locked, or made by
    another release.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name = os.fspath(path)
        from dreamgym_lg.replay import schema

        self._connection = schema.connect_read_only(self._name)
        with sqlite_errors(self._name):
            self._connection.create_function("is_missing", 1, is_missing, deterministic=True)
            self._connection.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()

    def runs(self) -> list[Run]:
        """All runs by source, the newest episode's first."""
        columns = f"run, source, {_COUNTS}, max(iteration), max(id) AS newest"
        rows = self._rows(f"SELECT {columns} FROM trajectories GROUP BY run, source ORDER BY newest DESC", ())
        return [Run(*row) for row in rows]

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """As `ReplayBuffer.metrics`."""
        return load_metrics(self._rows, run)

    def iterations(self, run: str) -> list[Iteration]:
        """The run's iterations that have episodes, in order."""
        groups = (
            f"SELECT iteration, task_id, min(source) AS source, {_COUNTS} "
            "FROM trajectories WHERE run = ? GROUP BY iteration, task_id"
        )
        rows = self._rows(
            "SELECT iteration, min(source), count(*), sum(origin = 'synthetic'), sum(episodes), sum(successes), sum(failed), "
            f"sum(errors) FROM ({groups}) JOIN tasks ON tasks.id = task_id GROUP BY iteration",
            [run],
        )
        return [Iteration(*row) for row in rows]

    def groups(self, run: str, iteration: int, *, most: int) -> list[list[Episode]]:
        """The first `most` groups of an iteration, each the rollouts of one task in order."""
        where = "run = ?1 AND iteration = ?2"
        first = f"SELECT DISTINCT task_id FROM trajectories WHERE {where} ORDER BY task_id LIMIT ?3"
        sql = f"SELECT {_EPISODE} FROM {WITH_TASK} WHERE {where} AND task_id IN ({first}) ORDER BY task_id, rollout_index"
        groups: dict[str, list[Episode]] = {}
        for episode in self._episodes(self._rows(sql, [run, iteration, most])):
            groups.setdefault(episode.task_id, []).append(episode)
        return list(groups.values())

    def group(self, run: str, iteration: int, task_id: str, *, most: int) -> list[tuple[int, Trajectory]]:
        """The first `most` rollouts of a group, each with its id."""
        sql = "SELECT id FROM trajectories WHERE run = ? AND iteration = ? AND task_id = ? ORDER BY rollout_index LIMIT ?"
        ids = [id for (id,) in self._rows(sql, [run, iteration, task_id, most])]
        return list(zip(ids, load_trajectories(self._rows, ids), strict=True))

    def trajectory(self, id: int) -> Trajectory | None:
        """The episode of this id, without its tokens; None where there is none."""
        stored = self._rows("SELECT 1 FROM trajectories WHERE id = ?", [id])
        return load_trajectories(self._rows, [id])[0] if stored else None

    def find(self, filters: Filters, *, before: int | None = None, most: int = 50) -> Page:
        """Up to `most` episodes with an id below `before`, newest first."""
        where, values = _conditions(filters)
        values |= {"before": before, "most": most}
        where = f"WHERE (:before IS NULL OR trajectories.id < :before){where}"
        rows = self._rows(f"SELECT {_EPISODE} FROM {WITH_TASK} {where} ORDER BY trajectories.id DESC LIMIT :most", values)
        return Page(self._episodes(rows), int(rows[-1][0]) if len(rows) == most else None)

    def _episodes(self, rows: Sequence[tuple[Any, ...]]) -> list[Episode]:
        sql = (
            "SELECT trajectory_id, count(*), sum(reward), sum(NOT valid) FROM steps "
            f"WHERE trajectory_id IN ({','.join(str(int(row[0])) for row in rows)}) GROUP BY trajectory_id"
        )
        sums = {id: figures for id, *figures in self._rows(sql, ())}
        return [Episode._make((*row[:5], bool(row[5]), *row[6:], *sums.get(row[0], (0, 0.0, 0)))) for row in rows]

    def _rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
        with sqlite_errors(self._name):
            return self._connection.execute(sql, values).fetchall()


def stamp(path: str | os.PathLike[str]) -> str:
    """A text that changes with the file, made in microseconds.

    Raises `ReplayBufferError` where the file is missing.
    """
    name = os.path.realpath(path)  # beside which SQLite writes
    parts = []
    for each in (name, f"{name}-wal"):
        try:
            status = os.stat(each)
            parts.append(f"{status.st_mtime_ns:x}.{status.st_size:x}")
        except FileNotFoundError:
            parts.append("")
    if not parts[0]:
        raise ReplayBufferError(f"{name} does not exist any more; put it back, or end this and name another one")
    return "-".join(parts)


def _conditions(filters: Filters) -> tuple[str, dict[str, Any]]:
    """The further conditions of a query, and their values."""
    values = {name: value for name, value in filters._asdict().items() if value is not None}
    parts = [f"{name} = :{name}" for name in ("run", "iteration", "source", "split", "task_id") if name in values]
    if filters.outcome is not None:
        parts.append(_OUTCOMES[filters.outcome])
    if filters.happened == "invalid action":
        parts.append(f"EXISTS ({_OF_ITS_STEPS} NOT valid)")
    elif filters.happened is not None:
        parts.append("EXISTS (SELECT 1 FROM json_each(acts) WHERE json_extract(value, '$.kind') = :happened)")
    if filters.decided_by is not None:
        parts.append(f"EXISTS ({_OF_ITS_STEPS} decided_by = :decided_by)")
    if filters.text is not None:
        values["text"] = "%" + "".join(f"\\{each}" if each in "\\%_" else each for each in filters.text) + "%"
        of_step = ("action", "next_observation", "reasoning", "position = 0 AND observation")
        texts = " OR ".join(f"{column} LIKE :text ESCAPE '\\'" for column in of_step)
        own = " OR ".join(f"{column} LIKE :text ESCAPE '\\'" for column in ("instruction", "error", "acts"))
        parts.append(f"({own} OR EXISTS ({_OF_ITS_STEPS} ({texts})))")
    return "".join(f" AND {part}" for part in parts), values
