"""The tables of a replay buffer's SQLite file, and connections to it."""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from dreamgym_lg.errors import ReplayBufferError
from dreamgym_lg.replay.rows import explained

APPLICATION_ID = 0x4447796D
"""`DGym` in the file's header."""

_SMALLEST = 512
"""No SQLite file has fewer bytes."""
_BUSY_SECONDS = 60.0
_READER_BUSY_SECONDS = 2.0
"""Somebody waits for the page."""

MIGRATIONS = (
    """
    CREATE TABLE tasks (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, instruction TEXT NOT NULL,
        environment TEXT NOT NULL, messages TEXT NOT NULL, observation TEXT NOT NULL, tools TEXT, rubric TEXT NOT NULL,
        seed INTEGER, panel TEXT NOT NULL, metadata TEXT NOT NULL, origin TEXT NOT NULL, parent_id TEXT, split TEXT NOT NULL);
    CREATE INDEX tasks_split ON tasks (split);
    CREATE TABLE trajectories (id INTEGER PRIMARY KEY, run TEXT NOT NULL, iteration INTEGER NOT NULL,
        task_id TEXT NOT NULL REFERENCES tasks(id), rollout_index INTEGER NOT NULL, source TEXT NOT NULL,
        success INTEGER NOT NULL, error TEXT, policy_version TEXT NOT NULL, experience_version TEXT NOT NULL,
        annotation TEXT, acts TEXT);
    CREATE UNIQUE INDEX trajectories_key ON trajectories (run, iteration, task_id, rollout_index);
    CREATE INDEX trajectories_task ON trajectories (task_id);
    CREATE TABLE steps (id INTEGER PRIMARY KEY, trajectory_id INTEGER NOT NULL REFERENCES trajectories(id),
        position INTEGER NOT NULL, observation TEXT NOT NULL, action TEXT NOT NULL, next_observation TEXT NOT NULL,
        reward REAL NOT NULL, terminated INTEGER NOT NULL, truncated INTEGER NOT NULL, valid INTEGER NOT NULL,
        reasoning TEXT NOT NULL, decided_by TEXT NOT NULL, judged_by TEXT NOT NULL, line TEXT NOT NULL);
    CREATE UNIQUE INDEX steps_key ON steps (trajectory_id, position);
    CREATE TABLE segments (trajectory_id INTEGER NOT NULL REFERENCES trajectories(id), position INTEGER NOT NULL,
        token_ids BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL, temperature REAL,
        policy_version TEXT NOT NULL, guided INTEGER NOT NULL);
    CREATE UNIQUE INDEX segments_key ON segments (trajectory_id, position);
    CREATE TABLE metrics (run TEXT NOT NULL, iteration INTEGER NOT NULL, name TEXT NOT NULL, value,
        PRIMARY KEY (run, iteration, name)) WITHOUT ROWID
    """,
)
"""Scripts that every file has run in order, counted by `PRAGMA user_version`.

Never edited once released, because files made by them exist: a change of the tables is a further script.
"""


def connect(name: str) -> sqlite3.Connection:
    """A connection to the file, made if missing. Raises `ReplayBufferError` for a file that is not ours."""
    _check_file(name)
    with explained(name):
        if name != ":memory:" and (path := Path(name)).exists() and path.stat().st_size:
            # Read-only first: closing an ordinary connection may fold a write-ahead log into a file that is not ours.
            with closing(_open_read_only(name, _BUSY_SECONDS)) as probe:
                _check_ours(probe, name)
        return sqlite3.connect(name, timeout=_BUSY_SECONDS, check_same_thread=False)


def connect_read_only(name: str) -> sqlite3.Connection:
    """A connection that cannot write, to a file with tables."""
    _check_file(name)
    path, connection = Path(name), None
    with explained(name):
        try:
            if path.exists() and path.stat().st_size:
                connection = _open_read_only(name, _READER_BUSY_SECONDS)
                if _check_ours(connection, name):
                    return connection
        except BaseException:
            if connection is not None:
                connection.close()
            raise
    raise ReplayBufferError(
        f"{name} {'is empty' if path.exists() else 'does not exist'}; give the replay buffer of a run that has begun "
        "(`replay.db` in its folder), or fill one with `dreamgym import`"
    )


def prepare(connection: sqlite3.Connection, name: str) -> None:
    """Make the tables, or bring them up to this release. Raises `ReplayBufferError` as `connect` does."""
    with explained(name):
        version = _check_ours(connection, name)
        with suppress(sqlite3.OperationalError):
            # Locked: another process is switching this very file, and the mode is the file's, not the connection's.
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if version == len(MIGRATIONS):
            return
        # One transaction: a process opening the file meanwhile finds it either empty or complete.
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            for script in MIGRATIONS[_check_ours(connection, name) :]:
                for statement in script.split(";"):
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _check_file(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        raise ReplayBufferError(f"{name} is a directory; a replay buffer is one file: give e.g. {path / 'replay.db'}")
    if name != ":memory:" and path.exists() and 0 < path.stat().st_size < _SMALLEST:
        # SQLite takes a file of one byte for an empty one and would write over it.
        with explained(name):
            raise sqlite3.DatabaseError("file is not a database")


def _open_read_only(name: str, seconds: float) -> sqlite3.Connection:
    path, log = Path(name).resolve(), Path(f"{name}-wal")
    # SQLite's own read-only mode makes a file beside one with a write-ahead log: on a read-only mount there is no place for it
    fixed = not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
    mode = "mode=ro&immutable=1" if fixed else "mode=ro"
    return sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=seconds, check_same_thread=False)


def _check_ours(connection: sqlite3.Connection, name: str) -> int:
    """The number of migrations in the file. Raises `ReplayBufferError` for a foreign or newer one; only reads."""
    pragmas = (connection.execute(f"PRAGMA {each}").fetchone()[0] for each in ("application_id", "user_version"))
    (application_id, version), (objects,) = pragmas, connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    ours = application_id == APPLICATION_ID and version
    if not ours and (objects or application_id not in (0, APPLICATION_ID)):
        raise ReplayBufferError(
            f"{name} is another application's SQLite file, or an unreleased version's, and was left as it is; give the path "
            "of a replay buffer, or one where no file exists yet"
        )
    if version > len(MIGRATIONS):
        raise ReplayBufferError(
            f"{name} was made by a newer dreamgym-lg (format {version}, here {len(MIGRATIONS)}) and was left as it is; "
            "upgrade with: pip install -U dreamgym-lg"
        )
    return int(version) if ours else 0
