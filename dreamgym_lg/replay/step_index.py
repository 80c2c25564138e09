"""The index over distinct (observation, action) pairs: exact nearest neighbours, or approximate ones from a graph."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamgym_lg.replay.hashed_words import Vectors, phi, unit
from dreamgym_lg.replay.neighbour_graph import NeighbourGraph

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

Integers = NDArray[np.int64]

DIGEST = 16
"""Bytes of a digest."""

_SCORES_AT_ONCE = 1 << 24
_NOISE = 1e-5
"""More than float32 products err by. Rows this close to the k-th are ranked again in float64, because a matrix product
may score two equal rows differently depending on where they lie."""
_RERANKED = 1024

_SEVERAL, _NONE = -1, -2

_CANDIDATES = 64
"""What the graph is asked for at first: its own scores are of 8 bits, so the true neighbours are somewhere among these."""
_MOST_CANDIDATES = 1 << 14
"""Where that many candidates leave too few steps (all of one excluded task), the search is exact."""


class IndexedStep(NamedTuple):
    """One stored transition as the index is fed with it."""

    id: int
    task_id: str
    observation: str
    action: str
    next_observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What some steps add to an index. Numbers (of rows, outcomes, tasks) go on where the index ends.

    A row is a distinct (observation, action), an outcome a distinct (observation, action, next observation), an entry the
    first step of an outcome in one task: by a further step of the same outcome and task nothing could change.
    """

    keys: bytes
    """Digests of the new rows, `DIGEST` bytes each."""
    vectors: Vectors
    """Those of the new rows."""
    contents: bytes
    """Digests of the new outcomes."""
    rows: Integers
    """The row of each new outcome."""
    outcomes: Integers
    """The outcome of each new entry."""
    steps: Integers
    """The step's id of each new entry; they rise."""
    tasks: Integers
    """The task's number of each new entry."""
    names: Sequence[str]
    """Ids of the new tasks."""


class _Column:
    """An array that can be appended to, each value copied a constant number of times on average."""

    def __init__(self, *shape: int, dtype: type = np.int64) -> None:
        self._room: NDArray = np.empty((0, *shape), dtype)
        self.values = self._room

    def append(self, values: NDArray) -> None:
        size, needed = len(self.values), len(self.values) + len(values)
        if needed > len(self._room):
            grown = np.empty((max(needed, 2 * size), *self._room.shape[1:]), self._room.dtype)
            grown[:size] = self.values
            self._room = grown
        self._room[size:needed] = values
        self.values = self._room[:needed]


def digest(*texts: str) -> bytes:
    return blake2b("".join(f"{len(text)}:{text}" for text in texts).encode(), digest_size=DIGEST).digest()


def _digests(joined: bytes) -> list[bytes]:
    return np.frombuffer(joined, f"V{DIGEST}").tolist()


def _firsts(groups: Integers, known: int) -> tuple[Integers, Iterator[tuple[int, int]]]:
    """The place of the first member of each group from `known` on, and (group, place) of all other members."""
    distinct, first = np.unique(groups, return_index=True)
    first = first[distinct >= known]
    others = np.ones(len(groups), bool)
    others[first] = False
    rest = np.flatnonzero(others)
    return first, zip(groups[rest].tolist(), rest.tolist(), strict=True)


class StepIndex:
    """Vectors of distinct (observation, action) pairs, and which stored steps stand behind each.

    Not thread-safe: whoever owns it brings the lock. `embeddings` replaces the hashed words by a LangChain model, asked
    once for each distinct pair. With a `graph` the search is approximate among the rows in it, and exact among the others.
    """

    def __init__(self, embeddings: "Embeddings | None" = None) -> None:
        self._embeddings = embeddings
        self.graph: NeighbourGraph | None = None
        self.vectors: Vectors = np.zeros((0, 0), np.float32)
        """One unit vector for each row; zeros for a pair without a word."""
        self._own_vectors: _Column | None = None
        # The only task of a row's steps, _SEVERAL, or _NONE if all are hidden: what `exclude_task` masks before ranking.
        self._sole_task = _Column()
        self._rows: dict[bytes, int] = {}
        self._contents: dict[bytes, int] = {}
        self._tasks: dict[str, int] = {}
        # Nearly every row has one outcome and every outcome one entry; the few further ones are in dicts.
        self._first_outcome, self._more_outcomes = _Column(), dict[int, list[int]]()
        self._first_entry, self._more_entries = _Column(), dict[int, list[int]]()
        self._row_of, self._outcome_of, self._step, self._task = _Column(), _Column(), _Column(), _Column()
        self._hidden: set[int] = set()

    def __len__(self) -> int:
        """Number of distinct (observation, action) pairs."""
        return len(self._rows)

    def add(self, steps: Iterable[IndexedStep]) -> None:
        """Index `steps`, whose ids have to rise from call to call. Adds none if `embeddings` raises."""
        page = self.page(steps)
        if len(page.vectors):
            self._own_vectors = self._own_vectors or _Column(page.vectors.shape[1], dtype=np.float32)
            self._own_vectors.append(page.vectors)
        self.append(page, self._own_vectors.values if self._own_vectors else self.vectors)

    def page(self, steps: Iterable[IndexedStep]) -> Page:
        """What `steps` would add; changes nothing."""
        rows: dict[bytes, int] = {}
        contents: dict[bytes, int] = {}
        tasks: dict[str, int] = {}
        pairs: list[tuple[str, str]] = []
        row_of: list[int] = []
        entries: dict[tuple[int, int], int] = {}
        for step in steps:
            key, content = digest(step.observation, step.action), digest(*step[2:])
            if (row := self._rows.get(key, rows.get(key))) is None:
                row = rows[key] = len(self) + len(rows)
                pairs.append((step.observation, step.action))
            if (outcome := self._contents.get(content, contents.get(content))) is None:
                outcome = contents[content] = len(self._contents) + len(contents)
                row_of.append(row)
            if (task := self._tasks.get(step.task_id, tasks.get(step.task_id))) is None:
                task = tasks[step.task_id] = len(self._tasks) + len(tasks)
            if outcome >= len(self._contents) or all(self._task.values[entry] != task for entry in self._entries(outcome)):
                entries.setdefault((outcome, task), step.id)
        outcomes, numbers = np.array(list(entries), np.int64).reshape(-1, 2).T
        return Page(
            keys=b"".join(rows),
            vectors=self.documents(pairs) if pairs else self.vectors[:0],
            contents=b"".join(contents),
            rows=np.array(row_of, np.int64),
            outcomes=outcomes,
            steps=np.array(list(entries.values()), np.int64),
            tasks=numbers,
            names=list(tasks),
        )

    def append(self, page: Page, vectors: Vectors) -> None:
        """Take in a page. `vectors`: those of all rows, the page's included, and any number more."""
        known = len(self._rows), len(self._contents), len(self._step.values)
        rows = np.concatenate([self._row_of.values, page.rows])[page.outcomes]
        first, rest = _firsts(rows, known[0])
        self._sole_task.append(page.tasks[first])
        sole = self._sole_task.values
        for row, place in rest:
            sole[row] = page.tasks[place] if sole[row] in (_NONE, page.tasks[place]) else _SEVERAL
        first, rest = _firsts(page.rows, known[0])
        self._first_outcome.append(known[1] + first)
        for row, place in rest:
            self._more_outcomes.setdefault(row, []).append(known[1] + place)
        first, rest = _firsts(page.outcomes, known[1])
        self._first_entry.append(known[2] + first)
        for outcome, place in rest:
            self._more_entries.setdefault(outcome, []).append(known[2] + place)
        self._row_of.append(page.rows)
        self._outcome_of.append(page.outcomes)
        self._step.append(page.steps)
        self._task.append(page.tasks)
        self._rows.update((key, row) for row, key in enumerate(_digests(page.keys), known[0]))
        self._contents.update((content, outcome) for outcome, content in enumerate(_digests(page.contents), known[1]))
        self._tasks.update((name, task) for task, name in enumerate(page.names, len(self._tasks)))
        self.vectors = vectors

    def hide(self, steps: Sequence[int]) -> None:
        """Find no steps any more of the tasks that the given (indexed) steps are of."""
        tasks = self._task.values[np.searchsorted(self._step.values, np.array(steps, np.int64))]
        self._hidden.update(tasks.tolist())
        touched = np.flatnonzero(np.isin(self._task.values, tasks))
        for row in np.unique(self._row_of.values[self._outcome_of.values[touched]]).tolist():
            entries = [entry for outcome in self._outcomes(row) for entry in self._entries(outcome)]
            seen = set(self._task.values[entries].tolist()) - self._hidden
            self._sole_task.values[row] = _NONE if not seen else _SEVERAL if len(seen) > 1 else seen.pop()

    def sample(self, rows: Sequence[int]) -> list[tuple[int, bytes, bytes]]:
        """For each row the first step behind it, and the digests of its (observation, action) and of its outcome."""
        keys, contents = list(self._rows), list(self._contents)
        outcomes = self._first_outcome.values[rows].tolist()
        steps = self._step.values[self._first_entry.values[outcomes]].tolist()
        return [(step, keys[row], contents[each]) for step, row, each in zip(steps, rows, outcomes, strict=True)]

    def documents(self, pairs: Sequence[tuple[str, str]]) -> Vectors:
        """The vectors that stored (observation, action) pairs are indexed by."""
        if self._embeddings is None or not pairs:
            return phi(pairs)
        return unit(np.array(self._embeddings.embed_documents([_document(*pair) for pair in pairs]), dtype=np.float64))

    def queries(self, pairs: Sequence[tuple[str, str]]) -> Vectors:
        """The vectors to search with; reads nothing that `add` changes, so no lock is needed around a slow model."""
        if self._embeddings is None:
            return phi(pairs)
        return unit(np.array([self._embeddings.embed_query(_document(*pair)) for pair in pairs], dtype=np.float64))

    def nearest(self, vectors: Vectors, k: int, *, exclude_task: str | None = None) -> list[list[int]]:
        """For each vector the ids of the `k` most similar steps, best first; equal ones by id.

        Steps with the same content are given once, by the first of them. A vector of zeros finds nothing.
        """
        if not len(self) or k < 1:
            return [[] for _ in vectors]
        excluded = None if exclude_task is None else self._tasks.get(exclude_task)
        if self.graph is not None:
            return [self._nearby(vector, k, excluded, self.graph) for vector in vectors]
        keys = self.vectors[: len(self)]
        found: list[list[int]] = []
        block = max(1, _SCORES_AT_ONCE // len(self))
        for start in range(0, len(vectors), block):
            part = vectors[start : start + block]
            # For one query a product over several threads waits longer for busy cores (8 ms, for 0.4) than it saves.
            products = np.vecdot(keys, part)[np.newaxis] if len(part) == 1 else part @ keys.T
            for scores, vector in zip(products, part, strict=True):
                found.append(self._best(np.arange(len(self)), scores, vector, k, excluded))
        return found

    def _nearby(self, vector: Vectors, k: int, excluded: int | None, graph: NeighbourGraph) -> list[int]:
        if not vector.any():
            return []
        newer = np.arange(min(graph.size, len(self)), len(self))
        newer_scores = np.vecdot(self.vectors[newer[0] : len(self)], vector) if len(newer) else np.zeros(0, np.float32)
        count = max(_CANDIDATES, 4 * k)
        while count <= min(_MOST_CANDIDATES, graph.size):
            near = graph.nearest(vector, count)
            near = near[near < len(self)]
            rows, scores = np.concatenate([near, newer]), np.concatenate([np.vecdot(self.vectors[near], vector), newer_scores])
            if len(found := self._best(rows, scores, vector, k, excluded)) == k:
                return found
            count *= 8
        return self._best(np.arange(len(self)), np.vecdot(self.vectors[: len(self)], vector), vector, k, excluded)

    def _best(self, rows: Integers, scores: Vectors, vector: Vectors, k: int, excluded: int | None) -> list[int]:
        """The best steps of `rows`, whose scores are nearly `scores`."""
        if not vector.any():
            return []
        if excluded is not None or self._hidden:
            sole = self._sole_task.values[rows]
            scores = np.where((sole == _NONE) | (sole == excluded if excluded is not None else False), -np.inf, scores)
        kth = scores[np.argpartition(scores, -k)[-k]] if k < len(scores) else -np.inf
        near = np.flatnonzero((scores >= kth - _NOISE) & (scores > -np.inf))
        near = rows[near[np.argsort(-scores[near], kind="stable")[: max(k, _RERANKED)]]]
        exact = (self.vectors[near] * vector.astype(np.float64)).sum(axis=1)
        ranked = [
            (-score, step)
            for row, score in zip(near.tolist(), exact.tolist(), strict=True)
            for outcome in self._outcomes(row)
            if (step := self._visible(outcome, excluded)) is not None
        ]
        return [step for _, step in sorted(ranked)[:k]]

    def _outcomes(self, row: int) -> list[int]:
        return [int(self._first_outcome.values[row]), *self._more_outcomes.get(row, ())]

    def _entries(self, outcome: int) -> list[int]:
        return [int(self._first_entry.values[outcome]), *self._more_entries.get(outcome, ())]

    def _visible(self, outcome: int, excluded: int | None) -> int | None:
        """The outcome's first step in a task that is neither excluded nor hidden."""
        for entry in self._entries(outcome):
            task = int(self._task.values[entry])
            if task != excluded and task not in self._hidden:
                return int(self._step.values[entry])
        return None


def _document(observation: str, action: str) -> str:
    return f"{observation}\n{action}"
