"""`CanaryLog`: sides and outcomes of a canary's threads, and its end, in one SQLite file."""

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import blake2b
from threading import RLock
from typing import NamedTuple

from dreamgym_lg.errors import CanaryLogError, ConfigurationError
from dreamgym_lg.production.evidence import SIDES, Evidence, Side, block_sizes, canary_evidence, in_blocks
from dreamgym_lg.statistics import Rate

logger = logging.getLogger(__name__)

APPLICATION_ID, FORMAT = 0x44476361, 3
"""`DGca` in the file's header, and the format of the tables."""
_BUSY_SECONDS = 5.0
_DECISIONS_PER_DOUBLING = 100
"""Computations of the test while the number of outcomes doubles. Each reads all threads."""

_TABLES = """
    CREATE TABLE canaries (name TEXT PRIMARY KEY, policy_version TEXT NOT NULL, share REAL NOT NULL, alpha REAL NOT NULL,
        block_policy INTEGER NOT NULL, block_production INTEGER NOT NULL, started TEXT NOT NULL, ended TEXT, reason TEXT,
        better TEXT, outcomes INTEGER NOT NULL DEFAULT 0);
    CREATE TABLE threads (number INTEGER PRIMARY KEY, canary TEXT NOT NULL REFERENCES canaries(name), thread TEXT NOT NULL,
        side TEXT NOT NULL, counted INTEGER NOT NULL DEFAULT 1, runs INTEGER NOT NULL DEFAULT 0,
        errors INTEGER NOT NULL DEFAULT 0, success INTEGER, UNIQUE (canary, thread));
"""
# Of threads: `number` is the order of their starts; `counted` 0: left out, since it will never have an outcome.


class Served(NamedTuple):
    """One side's threads."""

    threads: int
    runs: int
    errors: int
    success: Rate | None
    """Of the counted threads with an outcome; None without any. Its interval holds for one look, not for many."""
    waiting: int
    """Counted threads without an outcome."""


class CanaryState(NamedTuple):
    """A canary as its log has it now."""

    name: str
    policy_version: str
    share: float
    alpha: float
    started: str
    ended: str | None
    """Time of its end; production serves every thread since."""
    reason: str | None
    better: str | None
    """Time at which the policy was first proven better."""
    served: Mapping[Side, Served]
    evidence: Evidence

    @property
    def verdict(self) -> str:
        """The decision, in one sentence."""
        if self.ended is not None:
            return f"ended: {self.reason}"
        if self.better is not None:
            return f"better: the policy is proven better than production (alpha {self.alpha:g})"
        return "running: nothing is proven yet"


class CanaryLog:
    """The SQLite file that the processes of a canary share. It lasts: a canary goes on after a restart, and so does its end.

    It holds ids of threads, counts and outcomes; neither inputs nor answers.

    Args: `path`, a file made if missing.

    Raises `CanaryLogError` for a file that is no canary log, and later wherever SQLite fails.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock, self._connections = RLock(), list[tuple[int, sqlite3.Connection]]()
        with self._transaction() as db:
            header = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            if header == [0, 0] and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}"
                for statement in (_TABLES + pragmas).split(";"):
                    db.execute(statement)
            elif header != [APPLICATION_ID, FORMAT]:
                raise CanaryLogError(f"{self.path} is no canary log of this release: name another file")
        with suppress(sqlite3.OperationalError):  # another process does so at this moment; it lasts
            self._connected().execute("PRAGMA journal_mode = WAL")

    # --- the user's side --------------------------------------------------------------------------------------------------

    def record_outcome(self, thread_id: str, success: bool | None, *, name: str | None = None) -> bool:
        """Record how a thread has ended. Once the outcomes prove the policy worse, this ends the canary.

        The first outcome of a thread counts: False, and nothing changed, if there is one, and for a thread that began after
        the canary's end. Outcomes may come in any order and after any delay: until then a thread counts against a decision.
        Use one rule for both sides.

        Args: `success`, None for a thread that will never have an outcome: it is left out. `name`, needed if the log holds
        several canaries.

        Raises `ConfigurationError` for an unknown name, and for a thread that a running canary has not served.
        """
        with self._transaction() as db:
            name = self._name(db, name)
            known = db.execute("SELECT 1 FROM threads WHERE canary = ? AND thread = ?", (name, str(thread_id))).fetchone()
            if known is None and db.execute("SELECT ended FROM canaries WHERE name = ?", (name,)).fetchone() == (None,):
                raise ConfigurationError(
                    f"thread {thread_id!r} was not served by canary {name!r}: give the thread_id of the runs' configurable"
                )
            return self._set_outcome(db, name, str(thread_id), success)

    def stop(self, *, name: str | None = None) -> None:
        """End a canary for good: production serves every thread from the next run on."""
        with self._transaction() as db:
            self._end(db, self._name(db, name), "stopped by hand")

    def names(self) -> list[str]:
        """Names of the canaries in this log, oldest first."""
        with self._transaction() as db:
            return [name for (name,) in db.execute("SELECT name FROM canaries ORDER BY rowid")]

    def state(self, name: str | None = None) -> CanaryState:
        """A canary as it is now. Args: `name`, needed if the log holds several."""
        with self._transaction() as db:
            name = self._name(db, name)
            row = db.execute(f"SELECT {', '.join(CanaryState._fields[:8])} FROM canaries WHERE name = ?", (name,)).fetchone()
            served = {side: _served(db, name, side) for side in SIDES}
            return CanaryState._make((*row, served, _evidence(db, name)))

    # --- the side of the graphs -------------------------------------------------------------------------------------------

    def begin(self, name: str, *, policy_version: str, share: float, alpha: float) -> None:
        """Start a canary, or go on with it; a new share counts from now on. Raises `ConfigurationError` for another alpha."""
        entry = alpha, policy_version
        with self._transaction() as db:
            stored = db.execute("SELECT alpha, policy_version FROM canaries WHERE name = ?", (name,)).fetchone()
            if stored is None:
                columns = "name, policy_version, share, alpha, block_policy, block_production, started"
                values = (name, policy_version, share, alpha, *block_sizes(share), _now())
                db.execute(f"INSERT INTO canaries ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            elif stored != entry:
                raise ConfigurationError(
                    f"{name!r} of {self.path} was begun as {_described(*stored)}, and is given as {_described(*entry)}: the "
                    "outcomes of one say nothing of the other; give another name="
                )
            else:
                db.execute("UPDATE canaries SET share = ? WHERE name = ?", (share, name))

    def choose(self, name: str, thread: str) -> Side:
        """The side that serves the next run of a thread, which is counted. It stays at its side until the canary's end.

        Threads that begin after the end are not entered.
        """
        with self._transaction() as db:
            share, ended = db.execute("SELECT share, ended FROM canaries WHERE name = ?", (name,)).fetchone()
            if ended is None:
                side = "policy" if draw(name, thread) < share else "production"
                sql = "INSERT INTO threads (canary, thread, side) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
                db.execute(sql, (name, thread, side))
            sql = "UPDATE threads SET runs = runs + 1 WHERE canary = ? AND thread = ? RETURNING side"
            row = db.execute(sql, (name, thread)).fetchone()
            return "production" if ended is not None or row is None else row[0]

    def add_error(self, name: str, thread: str) -> None:
        """Count a run that raised: its thread has failed, unless its outcome was recorded before."""
        with self._transaction() as db:
            db.execute("UPDATE threads SET errors = errors + 1 WHERE canary = ? AND thread = ?", (name, thread))
            self._set_outcome(db, name, thread, False)

    # --- the test ---------------------------------------------------------------------------------------------------------

    def _set_outcome(self, db: sqlite3.Connection, name: str, thread: str, success: bool | None) -> bool:
        """False for a thread that has an outcome, or gets none."""
        column, value = ("counted", 0) if success is None else ("success", int(success))
        where = "canary = ? AND thread = ? AND success IS NULL AND counted"
        if not db.execute(f"UPDATE threads SET {column} = ? WHERE {where}", (value, name, thread)).rowcount:
            return False
        sql = "UPDATE canaries SET outcomes = outcomes + 1 WHERE name = ? RETURNING outcomes, alpha, ended"
        outcomes, alpha, ended = db.execute(sql, (name,)).fetchone()
        if ended is None and outcomes % max(1, outcomes // _DECISIONS_PER_DOUBLING) == 0:
            self._decide(db, name, alpha)
        return True

    def _decide(self, db: sqlite3.Connection, name: str, alpha: float) -> None:
        evidence = _evidence(db, name)
        if evidence.worse >= 1 / alpha:
            rates = ((side, _served(db, name, side).success) for side in SIDES)
            counts = ", ".join(f"{side} {rate.successes} of {rate.episodes}" for side, rate in rates if rate)
            self._end(db, name, f"the policy is proven worse than production (alpha {alpha:g}): {counts} succeeded")
            return
        sql = "UPDATE canaries SET better = ? WHERE name = ? AND better IS NULL"
        if evidence.better >= 1 / alpha and db.execute(sql, (_now(), name)).rowcount:
            logger.warning("canary %s: the policy is proven better than production (alpha %g)", name, alpha)

    def _end(self, db: sqlite3.Connection, name: str, reason: str) -> None:
        sql = "UPDATE canaries SET ended = ?, reason = ? WHERE name = ? AND ended IS NULL"
        if db.execute(sql, (_now(), reason, name)).rowcount:
            logger.warning("canary %s has ended, production serves every thread: %s", name, reason)

    # --- the file ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One writer at a time, in all processes together."""
        try:
            with self._lock:
                db = self._connected()
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
        except sqlite3.Error as error:
            raise CanaryLogError(
                f"{self.path}: SQLite says {str(error)!r}; a canary log is a file on a local disk, in a folder that this "
                "process may write to"
            ) from error

    def _connected(self) -> sqlite3.Connection:
        """The connection of this process. A fork must not use its parent's, nor close it."""
        if self._connections and self._connections[-1][0] == os.getpid():
            return self._connections[-1][1]
        db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._connections.append((os.getpid(), db))
        db.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the last moments, and nothing else
        return db

    def _name(self, db: sqlite3.Connection, name: str | None) -> str:
        names: list[str] = [each for (each,) in db.execute("SELECT name FROM canaries ORDER BY rowid")]
        if name is None and len(names) == 1:
            return names[0]
        if name is None:
            raise ConfigurationError(f"{self.path} holds {len(names)} canaries ({', '.join(names)}): give name=")
        if name not in names:
            raise ConfigurationError.unknown("canary", name, names)
        return name


def draw(name: str, thread: str) -> float:
    """The thread's own number in [0, 1) for this canary, the same in every process."""
    return int.from_bytes(blake2b(f"{name}\0{thread}".encode(), digest_size=7).digest()) / 2**56


def _evidence(db: sqlite3.Connection, name: str) -> Evidence:
    sql = "SELECT block_policy, block_production FROM canaries WHERE name = ?"
    sizes = db.execute(sql, (name,)).fetchone()
    sql = "SELECT side, success FROM threads WHERE canary = ? AND counted ORDER BY number"
    threads = db.execute(sql, (name,)).fetchall()
    outcomes = [float("nan") if success is None else success for _, success in threads]
    return canary_evidence(outcomes, in_blocks([side for side, _ in threads], sizes))


def _served(db: sqlite3.Connection, name: str, side: Side) -> Served:
    sql = (
        "SELECT count(*), coalesce(sum(runs), 0), coalesce(sum(errors), 0), coalesce(sum(success AND counted), 0), "
        "coalesce(sum(success IS NOT NULL AND counted), 0), coalesce(sum(success IS NULL AND counted), 0) "
        "FROM threads WHERE canary = ? AND side = ?"
    )
    threads, runs, errors, successes, outcomes, waiting = db.execute(sql, (name, side)).fetchone()
    return Served(threads, runs, errors, Rate.of(successes, outcomes) if outcomes else None, waiting)


def _described(alpha: float, policy_version: str) -> str:
    return f"a canary of policy {policy_version!r} with alpha={alpha:g}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
