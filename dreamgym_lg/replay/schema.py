"""The replay buffer's SQLite file: its tables, connections, and a check that it is one.

Imported when a file is opened: sqlite-utils imports pandas where that is installed, half a second and 67 MB.
"""

import os
import sqlite3
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from dreamgym_lg.errors import ReplayBufferError
from dreamgym_lg.replay.rows import sqlite_errors

APPLICATION_ID = 0x4447796D
"""`DGym` in the file's header."""

_SMALLEST = 512
"""No SQLite file has fewer bytes."""
_BUSY_SECONDS = 60.0
_READER_BUSY_SECONDS = 2.0
"""Short: a person waits for the page."""

migrations = Migrations("dreamgym_lg")


@migrations(name="0001_tables")
def _tables(db: Database) -> None:
    # Never edited once released, because files made by it exist: a change of the tables is a further migration.
    db.executescript("""
        CREATE TABLE tasks (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, instruction TEXT NOT NULL,
            environment TEXT NOT NULL, metadata TEXT NOT NULL, origin TEXT NOT NULL, parent_id TEXT,
            split TEXT NOT NULL, observation TEXT NOT NULL DEFAULT '', tools TEXT, rubric TEXT NOT NULL DEFAULT '',
            seed INTEGER, panel TEXT NOT NULL DEFAULT '', messages TEXT NOT NULL DEFAULT '[]');
        CREATE INDEX tasks_split ON tasks (split);
        -- acts: JSON, NULL for none. They are few, and only ever read with their trajectory.
        CREATE TABLE trajectories (id INTEGER PRIMARY KEY, run TEXT NOT NULL, iteration INTEGER NOT NULL,
            task_id TEXT NOT NULL REFERENCES tasks(id), rollout_index INTEGER NOT NULL, source TEXT NOT NULL,
            success INTEGER NOT NULL, error TEXT, policy_version TEXT NOT NULL, experience_version TEXT NOT NULL,
            annotation TEXT, acts TEXT);
        CREATE UNIQUE INDEX trajectories_key ON trajectories (run, iteration, task_id, rollout_index);
        CREATE INDEX trajectories_task ON trajectories (task_id);
        CREATE TABLE steps (id INTEGER PRIMARY KEY, trajectory_id INTEGER NOT NULL REFERENCES trajectories(id),
            position INTEGER NOT NULL, observation TEXT NOT NULL, action TEXT NOT NULL, next_observation TEXT NOT NULL,
            reward REAL NOT NULL, terminated INTEGER NOT NULL, truncated INTEGER NOT NULL, valid INTEGER NOT NULL,
            reasoning TEXT NOT NULL, decided_by TEXT NOT NULL DEFAULT '', line TEXT NOT NULL DEFAULT '',
            judged_by TEXT NOT NULL DEFAULT '', words TEXT NOT NULL DEFAULT '');
        CREATE UNIQUE INDEX steps_key ON steps (trajectory_id, position);
        -- temperature: NULL where nobody knows it
        CREATE TABLE segments (trajectory_id INTEGER NOT NULL REFERENCES trajectories(id), position INTEGER NOT NULL,
            token_ids BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL, temperature REAL,
            policy_version TEXT NOT NULL DEFAULT '', guided INTEGER NOT NULL DEFAULT 0);
        CREATE UNIQUE INDEX segments_key ON segments (trajectory_id, position);
        CREATE TABLE metrics (run TEXT NOT NULL, iteration INTEGER NOT NULL, name TEXT NOT NULL, value,
            PRIMARY KEY (run, iteration, name)) WITHOUT ROWID;
    """)


@migrations(name="0012_goal")
def _goal(db: Database) -> None:
    db.execute("ALTER TABLE tasks ADD COLUMN goal TEXT NOT NULL DEFAULT '{}'")


@migrations(name="0013_drawn")
def _drawn(db: Database) -> None:
    db.execute("ALTER TABLE tasks ADD COLUMN drawn TEXT NOT NULL DEFAULT '{}'")


def _wrapped(connection: sqlite3.Connection) -> Database:
    # Plugins of sqlite-utils are the user's own affair and could change what a query means.
    return Database(connection, execute_plugins=False, recursive_triggers=False)


def connect(name: str) -> sqlite3.Connection:
    _check_file(name)
    with sqlite_errors(name):
        if name != ":memory:" and (path := Path(name)).exists() and path.stat().st_size:
            # Read-only first: closing an ordinary connection may fold a write-ahead log into a file that is not ours.
            with closing(_open_read_only(name, _BUSY_SECONDS)) as probe:
                _check_ours(_wrapped(probe), name)
        return sqlite3.connect(name, timeout=_BUSY_SECONDS, check_same_thread=False)


def connect_read_only(name: str) -> sqlite3.Connection:
    """A connection that cannot write, to a file with this release's tables."""
    _check_file(name)
    path = Path(name)
    with sqlite_errors(name), ExitStack() as stack:  # closes the connection unless it is returned
        if path.exists() and path.stat().st_size:
            connection = stack.enter_context(closing(_open_read_only(name, _READER_BUSY_SECONDS)))
            db = _wrapped(connection)
            _check_ours(db, name)
            if migrations.applied(db):
                if pending := migrations.pending(db):
                    raise ReplayBufferError(
                        f"{name} was made by an earlier dreamgym-lg (it lacks migration {pending[0].name!r}) and is only read "
                        f'here; bring it up to date: python -c "from dreamgym_lg.replay import ReplayBuffer as B; B({name!r})"'
                    )
                stack.pop_all()
                return connection
    raise ReplayBufferError(
        f"{name} {'is empty' if path.exists() else 'does not exist'}; give the replay buffer of a run that has begun "
        "(`replay.db` in its folder), or fill one with `dreamgym import`"
    )


def _check_file(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        raise ReplayBufferError(f"{name} is a directory; a replay buffer is one file: give e.g. {path / 'replay.db'}")
    if name != ":memory:" and path.exists() and 0 < path.stat().st_size < _SMALLEST:
        # SQLite takes a file of one byte for an empty one and would write over it.
        with sqlite_errors(name):
            raise sqlite3.DatabaseError("file is not a database")


def _open_read_only(name: str, seconds: float) -> sqlite3.Connection:
    log = Path(f"{(path := Path(name).resolve())}-wal")
    # SQLite's own read-only mode makes a file beside one with a write-ahead log: on a read-only mount there is no place for it
    fixed = not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
    mode = "mode=ro&immutable=1" if fixed else "mode=ro"
    return sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, timeout=seconds, check_same_thread=False)


def prepare(connection: sqlite3.Connection, name: str) -> None:
    """Make the tables, or bring them up to this release. Raises `ReplayBufferError` as `connect` does."""
    db = _wrapped(connection)
    with sqlite_errors(name):
        _check_ours(db, name)
        with suppress(sqlite3.OperationalError):
            # Locked: another process is switching this very file, and the mode is the file's, not the connection's.
            db.enable_wal()
        db.execute("PRAGMA synchronous = NORMAL")
        if migrations.pending(db):
            # One transaction: a process opening the file meanwhile finds it either empty or complete.
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                migrations.apply(db)


def _check_ours(db: Database, name: str) -> None:
    """Raise `ReplayBufferError` for a foreign file or a newer release's; only reads."""
    ((application_id,),) = db.execute("PRAGMA application_id")
    ((objects,),) = db.execute("SELECT count(*) FROM sqlite_master")
    applied = [migration.name for migration in migrations.applied(db)]
    if not applied and (objects or application_id not in (0, APPLICATION_ID)):
        raise ReplayBufferError(
            f"{name} is another application's SQLite file (no migration of dreamgym_lg is recorded in it) and was left "
            "as it is; give the path of a replay buffer, or one where no file exists yet"
        )
    if applied and "words" not in db["steps"].columns_dict:
        raise ReplayBufferError(f"{name} was made before the first release and was left as it is: import its traces anew")
    newest = max(migration.name for migration in migrations.pending(Database(memory=True, execute_plugins=False)))
    if newer := [migration for migration in applied if migration > newest]:
        raise ReplayBufferError(
            f"{name} was made by a newer dreamgym-lg (it has migration {newer[-1]!r}) and was left as it is; "
            "upgrade with: pip install -U dreamgym-lg"
        )
