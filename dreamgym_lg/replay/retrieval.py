"""The k most similar transitions: `Top_k cos(phi(s_t, a_t), phi(s_i, a_i))` (paper, section 4).

The vectors of all distinct (observation, action) pairs are in memory and searched one by one. Above `EXACT_UP_TO` of them a
graph of neighbours (HNSW, extra `retrieval`) proposes candidates, which are ranked exactly.
"""

import json
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any
from uuid import uuid4

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from dreamgym_lg.replay.hashed_words import Vectors, phi, unit
from dreamgym_lg.replay.rows import STEP_COLUMNS, WITH_TASK, Rows, step_of
from dreamgym_lg.types import Step

EXACT_UP_TO = 200_000
"""Distinct (observation, action) pairs that are searched one by one, in 17 ms. A graph over more takes minutes to build."""
_GROWTH = 1.1
"""The index outgrows graph and file by so much before they take its new rows in: all writes are a few times the file."""
_CANDIDATES = 64
"""Rows that are looked at first: the graph's own scores are of 8 bits, the true neighbours are somewhere among these."""
_PAGE = 1000
"""Steps that are indexed at once: of a hosted model's answers a killed process loses few."""
_DIGEST, _SCORES_AT_ONCE = 16, 1 << 24
_NOISE = 1e-5
"""More than float32 products err by: rows this close to the last candidate are candidates, too, and ranked in float64."""
_SAME_VECTOR = 0.02
"""A hosted model's vectors of one text differ by less, those of two models by more."""

# An evaluation task would leak its answer, and a dream must not ground itself in its own inventions. A failed episode may
# be replaced by one that is played again, and what is indexed must not change.
_RETRIEVABLE = f"""
    SELECT steps.id, task_id, steps.observation, action, next_observation
    FROM {WITH_TASK} JOIN steps ON trajectory_id = trajectories.id
    WHERE steps.id > ? AND steps.id <= ? AND split = 'train' AND source IN ('offline', 'real') AND error IS NULL
    ORDER BY steps.id LIMIT ?"""
_STILL_RETRIEVABLE = f"""
    SELECT steps.id, {STEP_COLUMNS} FROM {WITH_TASK} JOIN steps ON trajectory_id = trajectories.id
    WHERE split = 'train' AND steps.id IN (SELECT value FROM json_each(?))"""


class StepIndex:
    """Vectors of distinct (observation, action) pairs, each a row, and the steps behind each row.

    Steps with the same observation, action and next observation are one outcome, which keeps its first step and the first one
    of another task: no other can be retrieved while a single task is excluded. Not thread-safe.

    Args: `embed`, makes unit vectors of (observation, action) pairs.
    """

    def __init__(self, embed: Callable[[Sequence[tuple[str, str]]], Vectors] = phi) -> None:
        self.embed = embed
        self.rows: dict[bytes, int] = {}
        """The row of each pair, by its digest."""
        self.graph: Any = None
        """A usearch index over the first rows; None: there is none."""
        self._storage: Vectors = np.zeros((0, 1), np.float32)
        self.forget_steps()

    def __len__(self) -> int:
        """Number of distinct (observation, action) pairs."""
        return len(self.rows)

    @property
    def vectors(self) -> Vectors:
        """One unit vector a row; zeros for a pair without a word."""
        return self._storage[: len(self)]

    def forget_steps(self) -> None:
        """Forget all steps, but not the vectors of their pairs."""
        self._tasks, self._outcomes = dict[str, int](), dict[bytes, int]()
        # Of a row: its first outcome, and further ones. Of an outcome: its first step, that one's task, a step of another task.
        self._first, self._further = array("q", [-1]) * len(self), dict[int, list[int]]()
        self._step, self._task, self._other = array("q"), array("q"), array("q")

    def add(self, steps: Sequence[tuple[int, str, str, str, str]]) -> None:
        """Index steps: id (rising from call to call), task, observation, action, next observation. None if `embed` raises."""
        keys = [digest(*step[2:4]) for step in steps]
        new = {key: step[2:4] for key, step in zip(keys, steps, strict=True) if key not in self.rows}
        if new:
            self.add_rows(list(new), self.embed(list(new.values())))
        for key, step in zip(keys, steps, strict=True):
            task, row, outcome = self._tasks.setdefault(step[1], len(self._tasks)), self.rows[key], len(self._step)
            if (known := self._outcomes.setdefault(digest(*step[2:]), outcome)) < outcome:
                if self._other[known] < 0 and self._task[known] != task:
                    self._other[known] = step[0]
                continue
            for column, value in ((self._step, step[0]), (self._task, task), (self._other, -1)):
                column.append(value)
            if self._first[row] < 0:
                self._first[row] = outcome
            else:
                self._further.setdefault(row, []).append(outcome)

    def add_rows(self, keys: Sequence[bytes], vectors: Vectors) -> None:
        """Add pairs without steps. Args: `keys`, their digests, all new."""
        size, needed = len(self), len(self) + len(keys)
        if needed > len(self._storage):
            grown = np.empty((max(needed, 2 * size), vectors.shape[1]), np.float32)
            grown[:size] = self.vectors
            self._storage = grown
        self._storage[size:needed] = vectors
        self.rows.update(zip(keys, range(size, needed), strict=True))
        self._first.extend([-1] * len(keys))

    def grow_graph(self, saved: bytes = b"") -> None:
        """Take all rows into the graph. Args: `saved`, a graph over most of them."""
        from usearch.index import Index

        wide = {"connectivity": 16, "expansion_add": 128, "expansion_search": 128}
        self.graph = self.graph or Index(ndim=self.vectors.shape[1], metric="ip", dtype="i8", **wide)  # type: ignore[arg-type]
        if saved:
            self.graph.load(saved)
        self.graph.add(np.arange(len(self.graph), len(self)), self.vectors[len(self.graph) :])

    def nearest(self, vectors: Vectors, k: int, *, exclude_task: str | None = None) -> list[list[int]]:
        """For each vector the ids of the `k` most similar steps, best first; equal ones by id.

        Steps with the same content are given once, by the first of them. A vector of zeros finds nothing.
        """
        if not len(self) or k < 1:
            return [[] for _ in vectors]
        excluded = None if exclude_task is None else self._tasks.get(exclude_task)
        if self.graph is not None:
            return [self._nearby(vector, k, excluded) for vector in vectors]
        nearest, rows, block = list[list[int]](), np.arange(len(self)), max(1, _SCORES_AT_ONCE // len(self))
        for start in range(0, len(vectors), block):
            part = vectors[start : start + block]
            # For one query a product over several threads waits longer for busy cores (8 ms, for 0.4) than it saves.
            products = np.vecdot(self.vectors, part)[np.newaxis] if len(part) == 1 else part @ self.vectors.T
            nearest += [self._best(rows, scores, vector, k, excluded) for scores, vector in zip(products, part, strict=True)]
        return nearest

    def _nearby(self, vector: Vectors, k: int, excluded: int | None) -> list[int]:
        """The best of the graph's candidates and of the rows that it lacks; of all rows where these have too few steps."""
        near = self.graph.search(vector, min(len(self.graph), max(_CANDIDATES, 8 * k))).keys.astype(np.int64)
        rows = np.concatenate([near, np.arange(len(self.graph), len(self))])
        steps = self._best(rows, np.vecdot(self.vectors[rows], vector), vector, k, excluded)
        return steps if len(steps) == k else self._best(np.arange(len(self)), self.vectors @ vector, vector, k, excluded)

    def _best(self, rows: NDArray[np.int64], scores: Vectors, vector: Vectors, k: int, excluded: int | None) -> list[int]:
        """The best steps of `rows`, whose scores are nearly `scores`."""
        count, steps = max(_CANDIDATES, k) if vector.any() else 0, list[int]()
        while count and len(steps) < k:
            last = scores[np.argpartition(scores, -count)[-count]] if count < len(scores) else -np.inf
            near = np.flatnonzero(scores >= last - _NOISE)
            near = rows[near[np.argsort(-scores[near], kind="stable")[: 16 * count]]]
            exact = (self.vectors[near] * vector.astype(np.float64)).sum(axis=1)
            ranked = zip((-exact).tolist(), near.tolist(), strict=True)
            steps = [step for _, step in sorted((score, step) for score, row in ranked for step in self._steps(row, excluded))]
            count = 8 * count if count < len(rows) else 0
        return steps[:k]

    def _steps(self, row: int, excluded: int | None) -> Iterator[int]:
        """The first step of each outcome that is not of the excluded task."""
        first = self._first[row]
        for outcome in (first, *self._further.get(row, ())) if first >= 0 else ():
            step = self._step[outcome] if self._task[outcome] != excluded else self._other[outcome]
            if step >= 0:
                yield step


class Retriever:
    """`StepIndex` over the tables of a replay buffer, kept up with them; for any number of threads.

    The index is built when first asked and then takes in only what was stored since, by whichever process.

    Args: `cache`, the file that keeps vectors for the next process: with `embeddings`, and above `EXACT_UP_TO` with the graph.
    """

    def __init__(self, rows: Rows, embeddings: Embeddings | None = None, cache: Path | None = None) -> None:
        self._rows, self._embeddings, self._cache = rows, embeddings, cache
        self._index, self._indexed_until, self._cached = StepIndex(self._embedded), 0, 0
        # Not the buffer's lock: a slow embedding model must not stop the writers. Taken before that one, never after.
        self._lock = RLock()

    def close(self) -> None:
        """Keep the vectors that were paid for."""
        with self._lock:
            if self._embeddings is not None and len(self._index) > self._cached:
                self._save()

    def steps(self, queries: Sequence[tuple[str, str]], k: int, exclude_task: str | None) -> list[list[Step]]:
        """The `k` most similar real steps of train tasks for each (observation, action), best first."""
        ask = self._embeddings and self._embeddings.embed_query
        vectors = unit(np.array([ask("\n".join(query)) for query in queries], np.float64)) if ask else phi(queries)
        with self._lock:
            while True:
                self._refresh()
                nearest = self._index.nearest(vectors, k, exclude_task=exclude_task)
                ids = sorted({id for each in nearest for id in each})
                steps = {id: step_of(row) for id, *row in self._rows(_STILL_RETRIEVABLE, [json.dumps(ids)])}
                if len(steps) == len(ids):
                    return [[steps[id] for id in each] for each in nearest]
                self._index.forget_steps()  # a task has been held out since, perhaps by another process
                self._indexed_until = 0

    def _embedded(self, pairs: Sequence[tuple[str, str]]) -> Vectors:
        if self._embeddings is None or not pairs:
            return phi(pairs)
        return unit(np.array(self._embeddings.embed_documents(["\n".join(pair) for pair in pairs]), np.float64))

    def _refresh(self) -> None:
        # Ids rise in the order of commits, so nothing can appear below a highest id that was seen.
        ((last,),) = self._rows("SELECT coalesce(max(id), 0) FROM steps", ())
        if self._indexed_until >= last:
            return
        if not len(self._index) and (self._embeddings is not None or last > EXACT_UP_TO):
            self._load(last)
        while self._indexed_until < last:
            steps = self._rows(_RETRIEVABLE, [self._indexed_until, last, _PAGE])
            self._index.add(steps)
            self._indexed_until = steps[-1][0] if len(steps) == _PAGE else last
            if self._embeddings is not None and len(self._index) > _GROWTH * self._cached:
                self._save()
        if len(self._index) <= EXACT_UP_TO:
            return
        if find_spec("usearch") is None:
            slow = f"more than {EXACT_UP_TO} distinct steps are searched one by one, 85 ms for a million"
            warnings.warn(f"{slow}; for 1 ms run: pip install 'dreamgym-lg[retrieval]'", stacklevel=2)
        elif self._index.graph is None or len(self._index) > _GROWTH * len(self._index.graph):
            self._index.grow_graph()
            self._save()

    def _load(self, last: int) -> None:
        """Begin with cached vectors and graph, if they are this buffer's and this embedding model's."""
        if self._cache is None or not self._cache.is_file():
            return
        pairs = [(step[2], step[3]) for step in self._rows(_RETRIEVABLE, [0, last, 3])]
        try:
            with np.load(self._cache) as file:
                keys, vectors, graph = file["keys"].tolist(), file["vectors"], file["graph"].tobytes()
            rows = [keys.index(digest(*pair)) for pair in pairs]
        except Exception:  # whatever a damaged file raises: all of it can be computed again
            return
        anew = self._embedded(pairs)
        if anew.shape == vectors[rows].shape and np.allclose(anew, vectors[rows], atol=_SAME_VECTOR):
            self._index.add_rows(keys, vectors)
            self._cached = len(keys)
            if graph and find_spec("usearch"):
                self._index.grow_graph(graph)

    def _save(self) -> None:
        if self._cache is None:
            return
        begun, index = self._cache.with_name(f"{self._cache.name}.{uuid4().hex}"), self._index
        keys = np.frombuffer(b"".join(index.rows), f"V{_DIGEST}")
        graph = np.frombuffer(index.graph.save() if index.graph is not None else b"", np.uint8)
        try:
            with begun.open("wb") as file:
                np.savez(file, keys=keys, vectors=index.vectors, graph=graph)
            begun.replace(self._cache)
            self._cached = len(index)
        except OSError as error:
            warnings.warn(f"{self._cache}: {error}; the next process makes these vectors again", stacklevel=2)
            self._cache = None
            with suppress(OSError):
                begun.unlink()


def digest(*texts: str) -> bytes:
    """The same 16 bytes in every process for the same texts."""
    return blake2b("".join(f"{len(text)}:{text}" for text in texts).encode(), digest_size=_DIGEST).digest()
