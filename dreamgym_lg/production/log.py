"""`CanaryLog`: who served which thread, the outcomes, and the canary's end, in one SQLite file."""

import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import blake2b
from threading import RLock
from typing import Any, Literal, NamedTuple

from dreamgym_lg.errors import CanaryLogError, ConfigurationError
from dreamgym_lg.statistics import Evidence, Rate, sequential_evidence

logger = logging.getLogger(__name__)

Side = Literal["policy", "production"]
SIDES: tuple[Side, Side] = ("policy", "production")

Status = Literal["compared", "interrupted", "resumed", "unanswered", "blocked", "failed"]
"""Result of a simulated side: compared, or why not. `interrupted`, `resumed`: the real run stopped for a person, or went on
after that. `unanswered`: no record answers one of its calls. `blocked`: by the guard. `failed`: it raised, or its input could
not be copied."""

APPLICATION_ID, FORMAT = 0x44476361, 1
"""`DGca` in the file's header, and the format of the tables."""
MOST_TRIALS_IN_BLOCK, _BLOCKS_WAITING = 9, 20
_BUSY_SECONDS = 5.0

_TABLES = """
    CREATE TABLE canaries (name TEXT PRIMARY KEY, policy_version TEXT NOT NULL, share REAL NOT NULL, alpha REAL NOT NULL,
        block_policy INTEGER NOT NULL, block_production INTEGER NOT NULL, started TEXT NOT NULL, ended TEXT, reason TEXT,
        better TEXT, dropped INTEGER NOT NULL DEFAULT 0);
    CREATE TABLE threads (number INTEGER PRIMARY KEY, canary TEXT NOT NULL REFERENCES canaries(name), thread TEXT NOT NULL,
        side TEXT NOT NULL, counted INTEGER NOT NULL, taken_back INTEGER NOT NULL DEFAULT 0, runs INTEGER NOT NULL DEFAULT 0,
        errors INTEGER NOT NULL DEFAULT 0, success INTEGER, place INTEGER, tested INTEGER, UNIQUE (canary, thread));
    CREATE INDEX threads_tested ON threads (canary, side, tested, place, success);
    CREATE TABLE pairs (id INTEGER PRIMARY KEY, canary TEXT NOT NULL REFERENCES canaries(name), thread TEXT,
        chosen TEXT NOT NULL, status TEXT NOT NULL, same_calls INTEGER, same_writes INTEGER, same_answer INTEGER,
        real_success INTEGER, simulated_success INTEGER, details TEXT NOT NULL);
"""
# Of threads: `side` got the first run; `counted` 0: the canary was off then, or a part of the thread was production's, so that
# its outcome is nobody's; `place` is that of its outcome among all; `tested` is 1 in a block of the test, 0 left out.


class Pair(NamedTuple):
    """One input, played for real by one side and simulated by the other."""

    thread: str | None
    chosen: Side
    """The side whose tools were real."""
    status: Status
    same_calls: bool | None = None
    same_writes: bool | None = None
    same_answer: bool | None = None
    real_success: bool | None = None
    simulated_success: bool | None = None
    details: Mapping[str, Any] = {}
    """JSON: the names of the tools that only one side called, who answered the simulated calls, the kind of an error."""


class Served(NamedTuple):
    """One side's threads."""

    threads: int
    runs: int
    errors: int
    success: Rate | None
    """Of the threads whose outcome is known and counts; None without any. Its interval holds for one look, not for many."""


class CanaryState(NamedTuple):
    """A canary as its log has it now."""

    name: str
    policy_version: str
    share: float
    alpha: float
    started: str
    ended: str | None
    """When it was ended; production serves every thread since."""
    reason: str | None
    better: str | None
    """When the policy was first proven better."""
    served: Mapping[Side, Served]
    tested: Mapping[Side, tuple[int, int]]
    """(successes, outcomes) that the test has counted so far: whole blocks."""
    evidence: Evidence

    @property
    def verdict(self) -> str:
        """The decision, in one sentence."""
        if self.ended is not None:
            return f"ended: {self.reason}"
        if self.better is not None:
            return f"better: the policy is proven better than production (alpha {self.alpha:g})"
        return "running: nothing is proven yet" if self.share else "shadow: production serves every thread"


class CanaryLog:
    """The SQLite file that the processes of a canary share. It lasts: a canary goes on after a restart, and so does its end.

    It holds ids of threads, counts, outcomes and names of tools; neither inputs nor answers.

    Args: `path`, a file made if missing.

    Raises `CanaryLogError` for a file that is no canary log, and later wherever SQLite fails.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock, self._connections = RLock(), list[tuple[int, sqlite3.Connection]]()
        with self._transaction() as db:
            known = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            if known == [0, 0] and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT}"
                for statement in (_TABLES + pragmas).split(";"):
                    db.execute(statement)
            elif known != [APPLICATION_ID, FORMAT]:
                raise CanaryLogError(f"{self.path} is no canary log of this release: name another file")
        with suppress(sqlite3.OperationalError):  # another process does so at this moment; it lasts
            self._connected().execute("PRAGMA journal_mode = WAL")

    # --- the user's side --------------------------------------------------------------------------------------------------

    def record_outcome(self, thread_id: str, success: bool, *, name: str | None = None) -> bool:
        """Record how a thread has ended; once whole blocks of outcomes say so, this ends the canary.

        Record the outcomes of both sides by the same rule. The first outcome of a thread counts: False, and nothing changed,
        if there is one, and for a thread that began after the canary's end. Args: `name`, needed if the log holds several.

        Raises `ConfigurationError` for an unknown name, and for a thread that a running canary has not served.
        """
        with self._transaction() as db:
            name = self._name(db, name)
            row = db.execute("SELECT success FROM threads WHERE canary = ? AND thread = ?", (name, str(thread_id))).fetchone()
            if row is None and db.execute("SELECT ended FROM canaries WHERE name = ?", (name,)).fetchone() == (None,):
                raise ConfigurationError(
                    f"thread {thread_id!r} was not served by canary {name!r}: give the thread_id of the runs' configurable"
                )
            if row != (None,):
                return False
            self._set_outcome(db, name, str(thread_id), bool(success))
        return True

    def stop(self, reason: str = "stopped by hand", *, name: str | None = None) -> None:
        """End a canary for good: production serves every thread from the next run on."""
        with self._transaction() as db:
            self._end(db, self._name(db, name), reason)

    def names(self) -> list[str]:
        """Of the canaries in this log, oldest first."""
        with self._transaction() as db:
            return [name for (name,) in db.execute("SELECT name FROM canaries ORDER BY rowid")]

    def state(self, name: str | None = None) -> CanaryState:
        """A canary as it is now. Args: `name`, needed if the log holds several."""
        with self._transaction() as db:
            name = self._name(db, name)
            row = db.execute(f"SELECT {', '.join(CanaryState._fields[:8])} FROM canaries WHERE name = ?", (name,)).fetchone()
            tested = _tested(db, name)
            served = {side: _served(db, name, side) for side in SIDES}
        evidence = sequential_evidence(tested["policy"], tested["production"])
        return CanaryState._make((*row, served, tested, evidence))

    def pairs(self, name: str | None = None) -> tuple[list[Pair], int]:
        """The simulated sides, oldest first, and the number of runs without one since too many waited."""
        with self._transaction() as db:
            name = self._name(db, name)
            rows = db.execute(f"SELECT {', '.join(Pair._fields)} FROM pairs WHERE canary = ? ORDER BY id", (name,)).fetchall()
            dropped: int = db.execute("SELECT dropped FROM canaries WHERE name = ?", (name,)).fetchone()[0]
        return [_pair(row) for row in rows], dropped

    # --- the traffic router's side ----------------------------------------------------------------------------------------

    def begin(self, name: str, *, policy_version: str, share: float, alpha: float) -> None:
        """Start a canary, or go on with it; a new share counts from now on. Raises `ConfigurationError` for another alpha."""
        ratio = (1 - share) / share if 0 < share < 1 else 1.0
        larger = min(max(int(max(ratio, 1 / ratio)), 1), MOST_TRIALS_IN_BLOCK)
        block = (1, larger) if ratio >= 1 else (larger, 1)
        entry = alpha, policy_version, share > 0
        with self._transaction() as db:
            known = db.execute("SELECT alpha, policy_version, share > 0 FROM canaries WHERE name = ?", (name,)).fetchone()
            if known is None:
                columns = "name, policy_version, share, alpha, block_policy, block_production, started"
                values = (name, policy_version, share, alpha, *block, _now())
                db.execute(f"INSERT INTO canaries ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)
            elif known != entry:
                raise ConfigurationError(
                    f"{name!r} of {self.path} was begun as {_described(*known)}, and is given as {_described(*entry)}: the "
                    "outcomes of one say nothing of the other; give another name="
                )
            else:
                db.execute("UPDATE canaries SET share = ? WHERE name = ?", (share, name))

    def choose(self, name: str, thread: str, *, switched_off: bool) -> Side:
        """The side that serves the next run of a thread, which is counted. It stays at its side while the canary is on.

        Threads that begin after the canary's end are not entered.
        """
        key = (name, thread)
        with self._transaction() as db:
            share, ended = db.execute("SELECT share, ended FROM canaries WHERE name = ?", (name,)).fetchone()
            off = switched_off or ended is not None
            row = db.execute("SELECT side, taken_back FROM threads WHERE canary = ? AND thread = ?", key).fetchone()
            if row is None:
                side: Side = "policy" if not off and draw(name, thread) < share else "production"
                if ended is None:
                    sql = "INSERT INTO threads (canary, thread, side, counted, runs) VALUES (?, ?, ?, ?, 1)"
                    db.execute(sql, (*key, side, not off))
                return side
            side, taken_back = row
            if side == "policy" and off and not taken_back:  # for good: to go to and fro helps nobody
                changes = "taken_back = 1, counted = counted AND place IS NOT NULL"
                db.execute(f"UPDATE threads SET {changes} WHERE canary = ? AND thread = ?", key)
                taken_back = True
            db.execute("UPDATE threads SET runs = runs + 1 WHERE canary = ? AND thread = ?", key)
            return "production" if taken_back else side

    def add_error(self, name: str, thread: str) -> None:
        """Count a run that raised: its thread has failed, unless its outcome was recorded before."""
        with self._transaction() as db:
            db.execute("UPDATE threads SET errors = errors + 1 WHERE canary = ? AND thread = ?", (name, thread))
            self._set_outcome(db, name, thread, False)

    def add_pair(self, name: str, pair: Pair, *, dropped: int = 0) -> None:
        """Store a simulated side, and the number of runs before it that were dropped."""
        with self._transaction() as db:
            marks = ", ".join("?" * (1 + len(Pair._fields)))
            values = (name, *pair[:-1], json.dumps(pair.details))
            db.execute(f"INSERT INTO pairs (canary, {', '.join(Pair._fields)}) VALUES ({marks})", values)
            db.execute("UPDATE canaries SET dropped = dropped + ? WHERE name = ?", (dropped, name))

    # --- the test ---------------------------------------------------------------------------------------------------------

    def _set_outcome(self, db: sqlite3.Connection, name: str, thread: str, success: bool) -> None:
        place = "(SELECT coalesce(max(place), 0) + 1 FROM threads WHERE canary = ?1)"
        sql = f"UPDATE threads SET success = ?3, place = {place} WHERE canary = ?1 AND thread = ?2 AND success IS NULL"
        db.execute(sql, (name, thread, success))
        sql = "SELECT alpha, block_policy, block_production FROM canaries WHERE name = ? AND ended IS NULL"
        if (row := db.execute(sql, (name,)).fetchone()) and _take_block(db, name, dict(zip(SIDES, row[1:], strict=True))):
            self._decide(db, name, row[0])

    def _decide(self, db: sqlite3.Connection, name: str, alpha: float) -> None:
        tested = _tested(db, name)
        evidence = sequential_evidence(tested["policy"], tested["production"])
        if evidence.worse >= 1 / alpha:
            counts = ", ".join(f"{side} {successes} of {outcomes}" for side, (successes, outcomes) in tested.items())
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
        known: list[str] = [each for (each,) in db.execute("SELECT name FROM canaries ORDER BY rowid")]
        if name is None and len(known) == 1:
            return known[0]
        if name is None:
            raise ConfigurationError(f"{self.path} holds {len(known)} canaries ({', '.join(known)}): give name=")
        if name not in known:
            raise ConfigurationError.unknown("canary", name, known)
        return name


def draw(name: str, thread: str) -> float:
    """A number from 0 to 1 that is the thread's for this canary: it is drawn once, in every process alike."""
    return int.from_bytes(blake2b(f"{name}\0{thread}".encode(), digest_size=7).digest()) / 2**56


def _take_block(db: sqlite3.Connection, name: str, block: Mapping[Side, int]) -> bool:
    """Count the oldest outcomes that wait as one block; False if one side has too few of them.

    Of a side that is more than `_BLOCKS_WAITING` blocks ahead the oldest are left out: a block is of one time.
    """
    oldest = dict[Side, list[int]]()
    for side, size in block.items():
        sql = "canary = ? AND side = ? AND place IS NOT NULL AND tested IS NULL AND counted ORDER BY place DESC"
        numbers = [number for (number,) in db.execute(f"SELECT number FROM threads WHERE {sql}", (name, side))]
        _mark(db, numbers[size * _BLOCKS_WAITING :], tested=False)
        oldest[side] = numbers[: size * _BLOCKS_WAITING][-size:]
    if any(len(oldest[side]) < size for side, size in block.items()):
        return False
    for numbers in oldest.values():
        _mark(db, numbers, tested=True)
    return True


def _mark(db: sqlite3.Connection, numbers: Sequence[int], *, tested: bool) -> None:
    db.executemany("UPDATE threads SET tested = ? WHERE number = ?", [(tested, number) for number in numbers])


def _tested(db: sqlite3.Connection, name: str) -> dict[Side, tuple[int, int]]:
    sql = "SELECT coalesce(sum(success), 0), count(*) FROM threads WHERE canary = ? AND side = ? AND tested = 1"
    return {side: db.execute(sql, (name, side)).fetchone() for side in SIDES}


def _served(db: sqlite3.Connection, name: str, side: Side) -> Served:
    sql = (
        "SELECT count(*), coalesce(sum(runs), 0), coalesce(sum(errors), 0), coalesce(sum(success AND counted), 0), "
        "coalesce(sum(success IS NOT NULL AND counted), 0) FROM threads WHERE canary = ? AND side = ?"
    )
    threads, runs, errors, successes, outcomes = db.execute(sql, (name, side)).fetchone()
    rate = Rate.of(successes, outcomes) if outcomes else None
    return Served(threads, runs, errors, rate)


def _pair(row: Sequence[Any]) -> Pair:
    thread, chosen, status, *flags, details = row
    return Pair._make((thread, chosen, status, *(None if flag is None else bool(flag) for flag in flags), json.loads(details)))


def _described(alpha: float, policy_version: str, serves: bool) -> str:
    return f"{'a canary' if serves else 'a shadow'} of policy {policy_version!r} with alpha={alpha:g}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
