"""The default vectors of (observation, action) pairs: hashed words. No download, no key, the same in every process."""

import re
from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

DIMENSION = 256
ACTION_SHARE = 0.5
"""The action's share of the squared norm of `phi`: one short action weighs as much as a page of observation."""

# A run of letters and digits; Chinese and Japanese are written without spaces, so there each character is a word.
_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")
_MIX, _LOW = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFFFFFFFF)


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    # Not hash(): that differs from process to process.
    return crc32(word.encode())


def unit(vectors: NDArray[np.floating]) -> Vectors:
    """Rows of length one; a row of zeros stays as it is, similar to nothing."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0).astype(np.float32)


def _hashed(texts: Sequence[str], salt: bytes) -> Vectors:
    """Unit vectors of the words and word bigrams in `texts`: signed feature hashing of 1 + log(count)."""
    distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}  # pages and actions repeat; each is read once
    words = [_WORD.findall(text.lower()) for text in distinct]
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
    return unit(sums.astype(np.float64).reshape(len(words), DIMENSION))[[distinct[text] for text in texts]]


def phi(pairs: Sequence[tuple[str, str]]) -> Vectors:
    """One unit vector for each (observation, action), equal in every process and on every machine.

    A pair without a single word gives zeros.
    """
    if not pairs:
        return np.zeros((0, DIMENSION), np.float32)
    observations = _hashed([observation for observation, _ in pairs], b"o:")
    actions = _hashed([action for _, action in pairs], b"a:")
    return unit((1 - ACTION_SHARE) ** 0.5 * observations + ACTION_SHARE**0.5 * actions)
