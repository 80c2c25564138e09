"""The k most similar transitions: `Top_k cos(phi(s_t, a_t), phi(s_i, a_i))` (paper, section 4), searched exactly."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from threading import RLock
from zlib import crc32

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from dreamgym_lg.replay.rows import STEP_COLUMNS, WITH_TASK, Rows, step_of
from dreamgym_lg.types import Step

Pairs = Sequence[tuple[str, str]]
"""Observations and actions."""
Vectors = NDArray[np.float32]

# --- vectors --------------------------------------------------------------------------------------------------------------

DIMENSION = 256
ACTION_SHARE = 0.5
"""The action's share of the squared norm of `phi`. One short action weighs as much as a page of observation."""

# A run of letters and digits; Chinese and Japanese are written without spaces, so there each character is a word.
WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")
_MIX, _LOW = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFFFFFFFF)


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    # Not hash(): that differs from process to process.
    return crc32(word.encode())


def _unit(vectors: NDArray[np.floating]) -> Vectors:
    """Rows of length one; a row of zeros stays as it is, similar to nothing."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0).astype(np.float32)


def _hashed(texts: Sequence[str], salt: bytes) -> Vectors:
    """Unit vectors of the words and word bigrams in `texts`. Signed feature hashing of 1 + log(count)."""
    distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}  # pages and actions repeat; each is read once
    words = [WORD.findall(text.lower()) for text in distinct]
    lengths = np.array([len(row) for row in words], dtype=np.int64)
    unigrams = np.fromiter((_word_hash(word) for row in words for word in row), np.uint64, int(lengths.sum()))
    rows = np.repeat(np.arange(len(words), dtype=np.uint64), lengths)
    adjacent = rows[1:] == rows[:-1]
    bigrams = (unigrams[:-1] * _MIX + unigrams[1:])[adjacent]
    hashes = np.concatenate([unigrams, bigrams]) * _MIX + np.uint64(crc32(salt))
    # The high half of a multiplicative hash: CRCs of similar words share bits, features must not.
    features = (hashes ^ (hashes >> np.uint64(29))) * _MIX >> np.uint64(32)
    rows = np.concatenate([rows, rows[1:][adjacent]])
    pairs, counts = np.unique((rows << np.uint64(32)) | features, return_counts=True)
    rows, features = pairs >> np.uint64(32), pairs & _LOW
    cells = rows * np.uint64(DIMENSION) + features % np.uint64(DIMENSION)
    signs = np.where(features >> np.uint64(31), -1.0, 1.0)
    sums = np.bincount(cells.astype(np.int64), signs * (1 + np.log(counts)), minlength=len(words) * DIMENSION)
    return _unit(sums.astype(np.float64).reshape(len(words), DIMENSION))[[distinct[text] for text in texts]]


def phi(pairs: Pairs) -> Vectors:
    """One unit vector of hashed words for each (observation, action). Equal in every process.

    A pair without a single word gives zeros.
    """
    if not pairs:
        return np.zeros((0, DIMENSION), np.float32)
    observations = _hashed([observation for observation, _ in pairs], b"o:")
    actions = _hashed([action for _, action in pairs], b"a:")
    return _unit((1 - ACTION_SHARE) ** 0.5 * observations + ACTION_SHARE**0.5 * actions)


# --- search ---------------------------------------------------------------------------------------------------------------

_PAGE = 1000
"""Steps that are indexed at once."""
_CANDIDATES = 64
"""Rows that are ranked exactly first."""
_NOISE = 1e-5
"""Bound above the error of float32 products. Rows this close to the last candidate are ranked in float64, too."""
_SCORES_AT_ONCE = 1 << 24

# An evaluation task would leak its answer, and a dream must not ground itself in its own inventions. A failed episode may
# be replaced by one that is played again, and what is indexed must not change.
_RETRIEVABLE = f"""
    SELECT steps.id, environment, task_id, steps.observation, action, next_observation
    FROM {WITH_TASK} JOIN steps ON trajectory_id = trajectories.id
    WHERE steps.id > ? AND steps.id <= ? AND split = 'train' AND source IN ('offline', 'real') AND error IS NULL
    ORDER BY steps.id LIMIT ?"""
_STILL_RETRIEVABLE = f"""
    SELECT steps.id, {STEP_COLUMNS} FROM {WITH_TASK} JOIN steps ON trajectory_id = trajectories.id
    WHERE split = 'train' AND steps.id IN (SELECT value FROM json_each(?))"""


class StepIndex:
    """Vectors of distinct (observation, action) pairs, each a row, and the steps behind each row.

    Steps of one world with the same observation, action and next observation are one outcome, which keeps its first step and
    the first one of another task: no other can be retrieved while a single task is excluded. Not thread-safe.

    Args: `embed`, makes unit vectors of (observation, action) pairs.
    """

    def __init__(self, embed: Callable[[Pairs], Vectors] = phi) -> None:
        self.embed = embed
        self._rows = dict[bytes, int]()
        self._blocks = list[Vectors]()
        self.forget_steps()

    def __len__(self) -> int:
        """Number of distinct (observation, action) pairs."""
        return len(self._rows)

    def forget_steps(self) -> None:
        """Forget all steps, but not the vectors of their pairs."""
        self._outcomes = dict[bytes, list[tuple[int, str]]]()
        self._of_row = defaultdict[int, list[tuple[str, list[tuple[int, str]]]]](list)

    def add(self, steps: Sequence[tuple[int, str, str, str, str, str]]) -> None:
        """Index steps: id (rising from call to call), environment, task, observation, action, next observation.

        None of them if `embed` raises.
        """
        keys = [digest(*step[3:5]) for step in steps]
        new = {key: step[3:5] for key, step in zip(keys, steps, strict=True) if key not in self._rows}
        if new:
            self._blocks.append(self.embed(list(new.values())))
            self._rows |= {key: len(self) + number for number, key in enumerate(new)}
        for key, (id, environment, task, *content) in zip(keys, steps, strict=True):
            outcome = digest(environment, *content)
            if outcome not in self._outcomes:
                self._outcomes[outcome] = [(id, task)]
                self._of_row[self._rows[key]].append((environment, self._outcomes[outcome]))
            elif len(firsts := self._outcomes[outcome]) == 1 and firsts[0][1] != task:
                firsts.append((id, task))

    def nearest(
        self, vectors: Vectors, k: int, *, environment: str | None = None, exclude_task: str | None = None
    ) -> list[list[int]]:
        """For each vector the ids of the `k` most similar steps. Best first, equal ones by id.

        A vector of zeros finds nothing. Args: `environment`, None for all.
        """
        if not len(self) or k < 1:
            return [[] for _ in vectors]
        self._blocks = [np.concatenate(self._blocks)]
        (own,), nearest, block = self._blocks, list[list[int]](), max(1, _SCORES_AT_ONCE // len(self))
        for start in range(0, len(vectors), block):
            part = vectors[start : start + block]
            # For one query a product over several threads waits longer for busy cores (8 ms, for 0.4) than it saves.
            products = np.vecdot(own, part)[np.newaxis] if len(part) == 1 else part @ own.T
            pairs = zip(products, part, strict=True)
            nearest += [self._best(scores, vector, k, environment, exclude_task) for scores, vector in pairs]
        return nearest

    def _best(self, scores: Vectors, vector: Vectors, k: int, environment: str | None, exclude_task: str | None) -> list[int]:
        """The best steps of all rows, whose scores are nearly `scores`."""
        count, steps = max(_CANDIDATES, k) if vector.any() else 0, list[int]()
        while count and len(steps) < k:
            last = scores[np.argpartition(scores, -count)[-count]] if count < len(scores) else -np.inf
            near = np.flatnonzero(scores >= last - _NOISE)
            near = near[np.argsort(-scores[near], kind="stable")[: 16 * count]]
            exact = (self._blocks[0][near] * vector.astype(np.float64)).sum(axis=1)
            ranked = zip((-exact).tolist(), near.tolist(), strict=True)
            ids = ((score, id) for score, row in ranked for id in self._steps(row, environment, exclude_task))
            steps = [id for _, id in sorted(ids)]
            count = 8 * count if count < len(scores) else 0
        return steps[:k]

    def _steps(self, row: int, environment: str | None, exclude_task: str | None) -> Iterator[int]:
        """The first allowed step of each outcome."""
        for world, firsts in self._of_row.get(row, ()):
            if environment in (None, world):
                yield from [id for id, task in firsts if task != exclude_task][:1]


class Retriever:
    """`StepIndex` over the tables of a replay buffer, for any number of threads.

    The index is built when first used and then takes in only what was stored since, by whichever process.
    """

    def __init__(self, rows: Rows, embeddings: Embeddings | None = None) -> None:
        self._rows, self._embeddings = rows, embeddings
        self._index, self._indexed_until = StepIndex(self._embed), 0
        # Not the buffer's lock: a slow embedding model must not stop the writers. Taken before that one, never after.
        self._lock = RLock()

    def steps(self, queries: Pairs, k: int, environment: str | None, exclude_task: str | None) -> list[list[Step]]:
        """The `k` most similar real steps of train tasks for each (observation, action), best first."""
        vectors = self._embed(queries, queries=True)
        with self._lock:
            while True:
                self._refresh()
                nearest = self._index.nearest(vectors, k, environment=environment, exclude_task=exclude_task)
                ids = sorted({id for each in nearest for id in each})
                steps = {id: step_of(row) for id, *row in self._rows(_STILL_RETRIEVABLE, [json.dumps(ids)])}
                if len(steps) == len(ids):
                    return [[steps[id] for id in each] for each in nearest]
                self._index.forget_steps()  # a task has been held out since, perhaps by another process
                self._indexed_until = 0

    def _embed(self, pairs: Pairs, *, queries: bool = False) -> Vectors:
        if self._embeddings is None:
            return phi(pairs)
        texts = ["\n".join(pair) for pair in pairs]
        vectors = [*map(self._embeddings.embed_query, texts)] if queries else self._embeddings.embed_documents(texts)
        return _unit(np.array(vectors, np.float64))

    def _refresh(self) -> None:
        # Ids rise in the order of commits, so nothing can appear below a highest id that was seen.
        ((last,),) = self._rows("SELECT coalesce(max(id), 0) FROM steps", ())
        while self._indexed_until < last:
            steps = list(self._rows(_RETRIEVABLE, [self._indexed_until, last, _PAGE]))
            self._index.add(steps)
            self._indexed_until = steps[-1][0] if len(steps) == _PAGE else last


def digest(*texts: str) -> bytes:
    """The same 16 bytes in every process for the same texts."""
    return blake2b("".join(f"{len(text)}:{text}" for text in texts).encode(), digest_size=16).digest()
