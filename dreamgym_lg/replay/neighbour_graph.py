"""Approximate nearest neighbours among many vectors: a navigable graph (HNSW) by `usearch`, in memory or in a file."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dreamgym_lg.replay.hashed_words import Vectors

_EXPANSION = 128
"""How many nodes a search keeps in sight: more find better and take longer."""
_AT_ONCE = 1 << 16
_THREADS = 0
"""That build a graph; 0: one a core. Several of them build another graph each time, with one the same rows give the same."""


def is_installed() -> bool:
    """Whether the extra `retrieval` is there."""
    return find_spec("usearch") is not None


class NeighbourGraph:
    """A graph over rows 0, 1, ... of unit vectors, which it holds in 8 bits a dimension: rank what it finds again."""

    def __init__(self, dimension: int, *, path: Path | None = None, writable: bool = True) -> None:
        """An empty graph or, with `path`, a saved one: in memory if `writable`, else mapped, shared with other processes."""
        from usearch.index import Index

        self._index = Index(
            ndim=dimension, metric="ip", dtype="i8", connectivity=16, expansion_add=_EXPANSION, expansion_search=_EXPANSION
        )
        if path is not None:
            (self._index.load if writable else self._index.view)(str(path))
        self.size = len(self._index)

    def add(self, vectors: Vectors) -> None:
        """Add the next rows."""
        for start in range(0, len(vectors), _AT_ONCE):
            part = np.ascontiguousarray(vectors[start : start + _AT_ONCE])
            self._index.add(np.arange(self.size, self.size + len(part)), part, threads=_THREADS)
            self.size += len(part)

    def nearest(self, vector: Vectors, count: int) -> NDArray[np.int64]:
        """About `count` rows near to `vector`."""
        return self._index.search(vector, count, threads=1).keys.astype(np.int64)

    def save(self, path: Path) -> None:
        self._index.save(str(path))
