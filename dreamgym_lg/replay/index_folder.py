"""The index of a replay buffer on disk, so that a start neither computes nor pays for vectors again.

`pages.db` holds what the index is made of in pages, `vectors-*.f32` the vectors of its rows and `graph-*.usearch` the graph
over most of them. A transaction makes a page count: whatever a killed process left beyond the last page is written over. A
transaction on `lock.db`, which alone is never removed, keeps other processes out. Everything here can be computed again from
the replay buffer.
"""

import json
import mmap
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from uuid import uuid4
from zlib import crc32

import numpy as np

from dreamgym_lg.errors import ReplayBufferError
from dreamgym_lg.replay.hashed_words import Vectors
from dreamgym_lg.replay.neighbour_graph import NeighbourGraph
from dreamgym_lg.replay.step_index import DIGEST, Page

_FORMAT = "1"
"""Of the files; another format's are made anew."""
_BUSY_SECONDS = 3600.0
"""Another process may be building the graph of millions of steps."""
_PAGES, _LOCK = "pages.db", "lock.db"
_BLOBS = "keys, contents, rows, outcomes, steps, tasks"


_DAMAGES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY_DBMOVED)


class DamagedIndex(ReplayBufferError):
    """The files are not what was written, or were made by another release: make them anew."""


class ReplacedIndex(DamagedIndex):
    """The files are others than before, and sound: another process has made them anew. Read them from the beginning."""


class IndexFolder:
    """The files of one index. Not thread-safe; `exclusive` keeps other processes out while several calls belong together."""

    def __init__(self, path: Path) -> None:
        self.path, self._generation = path, ""
        self._open()

    def close(self) -> None:
        self._db.close()
        self._lock.close()

    def _open(self) -> None:
        self.path.mkdir(exist_ok=True)
        self._lock = self._connect(_LOCK)
        with self._locked():
            self._connect_pages()

    def _connect_pages(self) -> None:
        self._db = self._connect(_PAGES)
        (self.path / _PAGES).touch()
        self._opened = self._on_disk()

    def _on_disk(self) -> int | None:
        """Which file `pages.db` is now; None if there is none."""
        try:
            return (self.path / _PAGES).stat().st_ino
        except OSError:
            return None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            self._lock.execute("ROLLBACK")

    def _follow(self) -> None:
        """Turn to the files that another process has made anew, and raise `ReplacedIndex`."""
        if self._on_disk() != self._opened:
            self._db.close()
            self._connect_pages()
            raise ReplacedIndex(f"{self.path} was made anew by another process")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One process at a time; what was written counts if the block ends without an exception.

        Raises `DamagedIndex` for files that are no index of this format, or damaged; `ReplacedIndex` for others than before.
        """
        if not self.path.is_dir():
            self.close()
            self._open()
            raise ReplacedIndex(f"{self.path} was deleted while it was in use")
        with self._locked():
            self._follow()
            with self._transaction():
                yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            # What a loss of power damages is found when the index is opened, and made anew.
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value)")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS pages (number INTEGER PRIMARY KEY, until INTEGER, dimension INTEGER, "
                    "keys BLOB, contents BLOB, rows BLOB, outcomes BLOB, steps BLOB, tasks BLOB, names TEXT, checksum INTEGER)"
                )
                self._check_format()
                yield
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            # Anything else (a full disk, a lock) says nothing about the files.
            if getattr(error, "sqlite_errorcode", None) in _DAMAGES or not (self.path / _PAGES).exists():
                raise DamagedIndex(f"{self.path}: {error}") from error
            raise

    def start_anew(self) -> None:
        """Remove the files that were found damaged, unless another process has done so since.

        Processes that have them open keep theirs, which no new one is named like.
        """
        with self._locked():
            self._db.close()
            if self._on_disk() == self._opened:
                for file in self.path.iterdir():
                    if not file.name.startswith(_LOCK):
                        with suppress(OSError):
                            file.unlink()
            self._connect_pages()

    def read(self, after: int, *, check: bool = False) -> tuple[int, int, Page, Vectors] | None:
        """What the pages after number `after` add together: the last number, the id of the last step that was looked at, the
        page (without vectors) and the vectors of all rows, mapped from the file. None if there is no such page.

        Raises `DamagedIndex` if the vectors are too few or, with `check`, if any byte has changed.
        """
        columns = f"number, until, dimension, {_BLOBS}, names, checksum"
        found = self._db.execute(f"SELECT {columns} FROM pages WHERE number > ? ORDER BY number", [after]).fetchall()
        if not found:
            return None
        number, until, dimension, *_ = found[-1]
        ((size,),) = self._db.execute("SELECT sum(length(keys)) FROM pages")
        vectors = self._vectors(size // DIGEST, dimension)
        blobs = [[row[3 + column] for row in found] for column in range(6)]
        if check:
            start = 0
            for row in found:
                stop = start + len(row[3]) // DIGEST
                if _checksum(row[3:9], row[9], vectors[start:stop]) != row[10]:
                    raise DamagedIndex(f"page {row[0]} has changed")
                start = stop
        arrays = [np.frombuffer(b"".join(blob), "<i8") for blob in blobs[2:]]
        names = list(chain.from_iterable(json.loads(row[9]) for row in found))
        page = Page(
            keys=b"".join(blobs[0]),
            contents=b"".join(blobs[1]),
            vectors=np.zeros((0, dimension), np.float32),
            rows=arrays[0],
            outcomes=arrays[1],
            steps=arrays[2],
            tasks=arrays[3],
            names=names,
        )
        return number, until, page, vectors

    def write(self, page: Page, until: int) -> tuple[int, Vectors]:
        """Append a page; its number, and the vectors of all rows."""
        ((size, number),) = self._db.execute("SELECT coalesce(sum(length(keys)), 0), coalesce(max(number), 0) + 1 FROM pages")
        rows, dimension = size // DIGEST, page.vectors.shape[1]
        if len(page.vectors):
            try:
                self._vectors_file.touch()
                with self._vectors_file.open("r+b") as file:
                    file.seek(4 * rows * dimension)
                    file.write(page.vectors.astype("<f4").tobytes())
                    file.truncate()
            except FileNotFoundError as error:
                raise DamagedIndex(f"{self.path} was deleted while it was in use") from error
            except OSError as error:
                raise ReplayBufferError(f"{self.path}: {error}; free some space and run the same command again") from error
        arrays = [array.astype("<i8").tobytes() for array in (page.rows, page.outcomes, page.steps, page.tasks)]
        blobs, names = [page.keys, page.contents, *arrays], json.dumps(list(page.names))
        self._db.execute(
            f"INSERT INTO pages (number, until, dimension, {_BLOBS}, names, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [number, until, dimension, *blobs, names, _checksum(blobs, names, page.vectors)],
        )
        return number, self._vectors(rows + len(page.vectors), dimension)

    def graph(self, dimension: int, *, writable: bool = False) -> NeighbourGraph | None:
        """The saved graph, mapped or (`writable`) in memory; None if there is none, or its file has changed."""
        found = self._db.execute("SELECT value FROM facts WHERE name = 'graph'").fetchone()
        name, checksum = json.loads(found[0]) if found else ("", 0)
        path = self.path / name
        # Checked first: usearch trusts the file that it maps.
        if not name or not path.is_file() or _file_checksum(path) != checksum:
            return None
        return NeighbourGraph(dimension, path=path, writable=writable)

    def save_graph(self, graph: NeighbourGraph) -> None:
        """Save the graph in place of the last one."""
        name = f"graph-{self._generation}-{graph.size}.usearch"
        begun = self.path / f"{name}.{os.getpid()}"
        graph.save(begun)
        checksum = _file_checksum(begun)
        begun.replace(self.path / name)
        self._db.execute("INSERT OR REPLACE INTO facts VALUES ('graph', ?)", [json.dumps([name, checksum])])
        for old in self.path.glob("graph-*"):
            if old.name != name:
                with suppress(OSError):  # open in another process, where the system minds
                    old.unlink()

    def _check_format(self) -> None:
        facts = dict(self._db.execute("SELECT name, value FROM facts").fetchall())
        if not facts:
            facts = {"format": _FORMAT, "generation": uuid4().hex[:12]}
            self._db.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        if facts.get("format") != _FORMAT:
            raise DamagedIndex(f"{self.path} is of format {facts.get('format')}, not {_FORMAT}")
        self._generation = facts["generation"]

    @property
    def _vectors_file(self) -> Path:
        return self.path / f"vectors-{self._generation}.f32"

    def _vectors(self, rows: int, dimension: int) -> Vectors:
        if not rows:
            return np.zeros((0, dimension), np.float32)
        try:
            return np.memmap(self._vectors_file, "<f4", "r", shape=(rows, dimension))
        except (OSError, ValueError) as error:
            raise DamagedIndex(f"there are not {rows} vectors of {dimension} numbers: {error}") from error

    def _connect(self, name: str) -> sqlite3.Connection:
        return sqlite3.connect(self.path / name, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def _checksum(blobs: Sequence[bytes], names: str, vectors: Vectors) -> int:
    value = crc32(names.encode())
    for blob in blobs:
        value = crc32(blob, value)
    return crc32(np.ascontiguousarray(vectors, "<f4").data, value)


def _file_checksum(path: Path) -> int:
    if not path.stat().st_size:  # which cannot be mapped
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return crc32(data)
