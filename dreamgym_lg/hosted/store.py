"""What hosted models have cost and answered, in one SQLite file."""

import sqlite3
from contextlib import closing
from typing import NamedTuple

from langgraph.cache.sqlite import SqliteCache

from dreamgym_lg.errors import ConfigurationError


class Usage(NamedTuple):
    """Calls of hosted models, and what they took."""

    calls: int = 0
    failed: int = 0
    """Calls without an answer: refused, lost, or too slow."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """In the currency of the prices; 0 without prices."""

    @property
    def limited(self) -> dict[str, float]:
        """The sums that a budget limits: calls, tokens and cost."""
        return {"calls": self.calls, "tokens": self.input_tokens + self.output_tokens, "cost": self.cost}

    def plus(self, other: "Usage") -> "Usage":
        return Usage(**{name: value + getattr(other, name) for name, value in self._asdict().items()})

    def minus(self, other: "Usage") -> "Usage":
        return Usage(**{name: value - getattr(other, name) for name, value in self._asdict().items()})


class Store(SqliteCache[str]):
    """LangGraph's cache of answers, and the sum of what was spent, shared by threads and processes.

    Raises `ConfigurationError` for a file that cannot be made, or that holds anything else.
    """

    def __init__(self, path: str) -> None:
        try:
            with closing(sqlite3.connect(path)) as connection:
                tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables - {"cache", "spent"}:
                raise sqlite3.DatabaseError("it is another application's file")
            super().__init__(path=path)
            # By default each answer waits for the disk, 5 ms; so only a loss of power can lose the last ones.
            self._conn.executescript("""
                PRAGMA synchronous = NORMAL; PRAGMA busy_timeout = 60000;
                CREATE TABLE IF NOT EXISTS spent (calls INTEGER, failed INTEGER, input_tokens INTEGER,
                    output_tokens INTEGER, cost REAL);
                INSERT INTO spent SELECT 0, 0, 0, 0, 0.0 WHERE NOT EXISTS (SELECT 1 FROM spent);
            """)
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"{path} cannot hold the answers of a hosted model ({error}): give the path of such a file, or one where no "
                "file exists yet; the replay buffer is a file of its own"
            ) from error

    def usage(self) -> Usage:
        """The sum of all that was spent."""
        with self._lock:
            return Usage(*self._conn.execute(f"SELECT {', '.join(Usage._fields)} FROM spent").fetchone())

    def spend(self, usage: Usage) -> None:
        with self._lock, self._conn:
            self._conn.execute(f"UPDATE spent SET {', '.join(f'{name} = {name} + ?' for name in Usage._fields)}", usage)

    def recall(self, key: str) -> str | None:
        """The answer under this key."""
        return self.get([(("answers",), key)]).get((("answers",), key))

    def remember(self, key: str, text: str) -> None:
        self.set({(("answers",), key): (text, None)})
