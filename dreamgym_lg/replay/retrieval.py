"""The k most similar transitions: `Top_k cos(phi(s_t, a_t), phi(s_i, a_i))` (paper, section 4).

By default `phi` is hashed words: no download, no key, and the same vectors in every process. The index lives in memory,
is rebuilt from the replay buffer's tables and only ever reads them.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dreamgym_lg.types import Step

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

Vectors = NDArray[np.float32]
Rows = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
"""Runs a query with its values and gives all its rows."""

STEP_COLUMNS = "observation, action, next_observation, reward, terminated, truncated, valid, reasoning"

DIMENSION = 256
ACTION_SHARE = 0.5
"""The action's share of the squared norm of `phi`: one short action weighs as much as a page of observation."""

# A run of letters and digits; Chinese and Japanese are written without spaces, so there each character is a word.
_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")
_OBSERVATION, _ACTION = np.uint64(crc32(b"o:")), np.uint64(crc32(b"a:"))
_MIX, _LOW = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFFFFFFFF)

_SCORES_AT_ONCE = 1 << 24
_NOISE = 1e-5
"""More than float32 products err by. Rows this close to the k-th are ranked again in float64, because a matrix product
may score two equal rows differently depending on where they lie."""
_RERANKED = 1024

_PAGE = 4000
# An evaluation task would leak its answer, and a dream must not ground itself in its own inventions. A failed episode may
# be replaced by one that is played again, and what is indexed must not change.
_RETRIEVABLE = """
    SELECT steps.id, task_id, observation, action, next_observation
    FROM steps JOIN trajectories ON trajectories.id = trajectory_id JOIN tasks ON tasks.id = task_id
    WHERE steps.id > ? AND steps.id <= ? AND split = 'train' AND source IN ('offline', 'real') AND error IS NULL
    ORDER BY steps.id LIMIT ?"""


class IndexedStep(NamedTuple):
    """One stored transition as the index is fed with it."""

    id: int
    task_id: str
    observation: str
    action: str
    next_observation: str


class _Outcome:
    """One distinct (observation, action, next_observation): its first step, and its first step in any other task.

    Two are enough, because a query excludes one task at most.
    """

    __slots__ = ("other", "step", "task")

    def __init__(self, step: int, task: int) -> None:
        self.step, self.task = step, task
        self.other: int | None = None

    def outside(self, task: int | None) -> int | None:
        return self.other if self.task == task else self.step


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    # Not hash(): that differs from process to process.
    return crc32(word.encode())


def _scrambled(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The high 32 bits of a multiplicative hash: CRCs of similar words share bits, features must not."""
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _MIX
    return hashes >> np.uint64(32)


def _unit(vectors: NDArray[np.floating]) -> Vectors:
    """Rows of length one; a row of zeros stays as it is, similar to nothing."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0).astype(np.float32)


def _hashed(texts: Sequence[str], salt: np.uint64, dimension: int) -> Vectors:
    """Unit vectors of the words and word bigrams in `texts`: signed feature hashing of 1 + log(count)."""
    words = [_WORD.findall(text.lower()) for text in texts]
    lengths = np.array([len(row) for row in words], dtype=np.int64)
    unigrams = np.fromiter((_word_hash(word) for row in words for word in row), np.uint64, int(lengths.sum()))
    rows = np.repeat(np.arange(len(texts), dtype=np.uint64), lengths)
    adjacent = rows[1:] == rows[:-1]
    bigrams = (unigrams[:-1] * _MIX + unigrams[1:])[adjacent]
    features = _scrambled(np.concatenate([unigrams, bigrams]) * _MIX + salt)
    rows = np.concatenate([rows, rows[1:][adjacent]])
    pairs, counts = np.unique((rows << np.uint64(32)) | features, return_counts=True)
    rows, features = pairs >> np.uint64(32), pairs & _LOW
    cells = rows * np.uint64(dimension) + features % np.uint64(dimension)
    signs = np.where(features >> np.uint64(31), -1.0, 1.0)
    sums = np.bincount(cells.astype(np.int64), signs * (1 + np.log(counts)), minlength=len(texts) * dimension)
    return _unit(sums.astype(np.float64).reshape(len(texts), dimension))


def phi(pairs: Sequence[tuple[str, str]], *, dimension: int = DIMENSION) -> Vectors:
    """One unit vector for each (observation, action), equal in every process and on every machine.

    A pair without a single word gives zeros.
    """

    def half(texts: list[str], salt: np.uint64) -> Vectors:
        # Pages and actions repeat; each distinct text is read once.
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        return _hashed(list(distinct), salt, dimension)[[distinct[text] for text in texts]]

    if not pairs:
        return np.zeros((0, dimension), np.float32)
    observations = half([observation for observation, _ in pairs], _OBSERVATION)
    actions = half([action for _, action in pairs], _ACTION)
    return _unit((1 - ACTION_SHARE) ** 0.5 * observations + ACTION_SHARE**0.5 * actions)


def _digest(*texts: str) -> bytes:
    return blake2b("".join(f"{len(text)}:{text}" for text in texts).encode(), digest_size=16).digest()


class StepIndex:
    """Vectors of distinct (observation, action) keys, and which stored steps stand behind each.

    Not thread-safe: whoever owns it brings the lock. `embeddings` replaces the hashed words by a LangChain model, asked
    once for each distinct key.
    """

    def __init__(self, embeddings: "Embeddings | None" = None) -> None:
        self._embeddings = embeddings
        self._vectors: Vectors = np.zeros((0, 0), np.float32)
        # The only task of a key's steps, or -1 where there are several: what `exclude_task` hides before ranking.
        self._sole_task = np.zeros(0, np.int64)
        self._rows: dict[bytes, int] = {}
        self._outcomes: list[list[_Outcome]] = []
        self._by_content: dict[bytes, _Outcome] = {}
        self._tasks: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of distinct (observation, action) keys."""
        return len(self._outcomes)

    def add(self, steps: Iterable[IndexedStep]) -> None:
        """Index `steps`, whose ids have to rise from call to call. Adds none if `embeddings` raises."""
        steps = list(steps)
        keys = [_digest(step.observation, step.action) for step in steps]
        new = {key: step for key, step in zip(keys, steps, strict=True) if key not in self._rows}
        if new:
            self._append(self._documents([(step.observation, step.action) for step in new.values()]))
        for row, key in enumerate(new, start=len(self)):
            self._rows[key] = row
            self._outcomes.append([])
        for key, step in zip(keys, steps, strict=True):
            self._record(self._rows[key], step)

    def queries(self, pairs: Sequence[tuple[str, str]]) -> Vectors:
        """The vectors to search with; reads nothing that `add` changes, so no lock is needed around a slow model."""
        if self._embeddings is None:
            return phi(pairs)
        return _unit(np.array([self._embeddings.embed_query(_document(*pair)) for pair in pairs], dtype=np.float64))

    def nearest(self, vectors: Vectors, k: int, *, exclude_task: str | None = None) -> list[list[int]]:
        """For each vector the ids of the `k` most similar steps, best first; equal ones by id.

        Steps with the same content are given once, by the first of them. A vector of zeros finds nothing.
        """
        if not len(self) or k < 1:
            return [[] for _ in vectors]
        excluded = None if exclude_task is None else self._tasks.get(exclude_task)
        keys = self._vectors[: len(self)]
        found: list[list[int]] = []
        block = max(1, _SCORES_AT_ONCE // len(self))
        for start in range(0, len(vectors), block):
            part = vectors[start : start + block]
            # For one query a product over several threads waits longer for busy cores (8 ms, for 0.4) than it saves.
            products = np.vecdot(keys, part)[np.newaxis] if len(part) == 1 else part @ keys.T
            for scores, vector in zip(products, part, strict=True):
                found.append(self._best(scores, vector, k, excluded))
        return found

    def _best(self, scores: Vectors, vector: Vectors, k: int, excluded: int | None) -> list[int]:
        if not vector.any():
            return []
        if excluded is not None:
            scores = np.where(self._sole_task[: len(self)] == excluded, -np.inf, scores)
        kth = scores[np.argpartition(scores, -k)[-k]] if k < len(scores) else -np.inf
        near = np.flatnonzero((scores >= kth - _NOISE) & (scores > -np.inf))
        near = near[np.argsort(-scores[near], kind="stable")[: max(k, _RERANKED)]]
        exact = (self._vectors[near] * vector.astype(np.float64)).sum(axis=1)
        ranked = [
            (-score, step)
            for row, score in zip(near.tolist(), exact.tolist(), strict=True)
            for outcome in self._outcomes[row]
            if (step := outcome.outside(excluded)) is not None
        ]
        return [step for _, step in sorted(ranked)[:k]]

    def _documents(self, pairs: list[tuple[str, str]]) -> Vectors:
        if self._embeddings is None:
            return phi(pairs)
        return _unit(np.array(self._embeddings.embed_documents([_document(*pair) for pair in pairs]), dtype=np.float64))

    def _append(self, vectors: Vectors) -> None:
        size, needed = len(self), len(self) + len(vectors)
        if needed > len(self._vectors):
            # Doubling: a row is copied a constant number of times on average, however the buffer grows.
            room = max(needed, 2 * len(self._vectors))
            grown = np.empty((room, vectors.shape[1]), np.float32)
            grown[:size] = self._vectors[:size].reshape(size, vectors.shape[1])
            self._vectors = grown
            self._sole_task = np.concatenate([self._sole_task[:size], np.full(room - size, -1)])
        self._vectors[size:needed] = vectors

    def _record(self, row: int, step: IndexedStep) -> None:
        task = self._tasks.setdefault(step.task_id, len(self._tasks))
        outcomes = self._outcomes[row]
        if not outcomes:
            self._sole_task[row] = task
        elif self._sole_task[row] != task:
            self._sole_task[row] = -1
        content = _digest(step.observation, step.action, step.next_observation)
        outcome = self._by_content.get(content)
        if outcome is None:
            outcomes.append(self._by_content.setdefault(content, _Outcome(step.id, task)))
        elif outcome.other is None and outcome.task != task:
            outcome.other = step.id


def _document(observation: str, action: str) -> str:
    return f"{observation}\n{action}"


class Retriever:
    """`StepIndex` over the tables of a replay buffer, kept up with them; for any number of threads.

    The index is built when first asked and then reads only what was stored since, by whichever process.
    """

    def __init__(self, rows: Rows, embeddings: "Embeddings | None" = None) -> None:
        self._rows = rows
        self._index = StepIndex(embeddings)
        self._indexed_until = 0
        # Not the buffer's lock: a slow embedding model must not stop the writers. Taken before that one, never after.
        self._lock = RLock()

    def steps(self, queries: Sequence[tuple[str, str]], k: int, exclude_task: str | None) -> list[list[Step]]:
        """For each (observation, action) the `k` most similar steps of train tasks that no dream made, best first."""
        vectors = self._index.queries(queries)
        with self._lock:
            self._refresh()
            found = self._index.nearest(vectors, k, exclude_task=exclude_task)
        ids = json.dumps(list({id for each in found for id in each}))
        sql = f"SELECT id, {STEP_COLUMNS} FROM steps WHERE id IN (SELECT value FROM json_each(?))"
        steps = {id: step_of(row) for id, *row in self._rows(sql, [ids])}
        return [[steps[id] for id in each] for each in found]

    def _refresh(self) -> None:
        # Ids rise in the order of commits, so nothing can appear below a highest id that was seen.
        ((last,),) = self._rows("SELECT coalesce(max(id), 0) FROM steps", ())
        while self._indexed_until < last:
            page = self._rows(_RETRIEVABLE, [self._indexed_until, last, _PAGE])
            self._index.add(IndexedStep(*row) for row in page)
            self._indexed_until = page[-1][0] if len(page) == _PAGE else last


def step_of(row: Sequence[Any]) -> Step:
    """The step that a row of `STEP_COLUMNS` records."""
    observation, action, next_observation, reward, terminated, truncated, valid, reasoning = row
    return Step(
        observation=observation,
        action=action,
        next_observation=next_observation,
        reward=reward,
        terminated=bool(terminated),
        truncated=bool(truncated),
        valid=bool(valid),
        reasoning=reasoning,
    )
