"""The k most similar transitions: `Top_k cos(phi(s_t, a_t), phi(s_i, a_i))` (paper, section 4).

Below `EXACT_UP_TO` distinct (observation, action) pairs the search is exact. Above, with the extra `retrieval`, a graph finds
candidates, which are ranked exactly.
"""

import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np

from dreamgym_lg.replay.hashed_words import Vectors
from dreamgym_lg.replay.index_folder import DamagedIndex, IndexFolder, ReplacedIndex
from dreamgym_lg.replay.neighbour_graph import NeighbourGraph, is_installed
from dreamgym_lg.replay.rows import STEP_COLUMNS, Rows, explained, step_of
from dreamgym_lg.replay.step_index import IndexedStep, StepIndex, digest
from dreamgym_lg.types import Step

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

EXACT_UP_TO = 50_000
"""Distinct (observation, action) pairs that are searched one by one (4 ms); a graph over more of them is faster."""
_NOT_IN_GRAPH = 8192
"""So many newer pairs are searched one by one (0.7 ms) before the graph takes them in."""
_IN_MEMORY_UP_TO = 10_000
"""Steps whose hashed words are computed faster (0.4 s) than a folder is worth."""

_PAGE = 4000
_PAID_PAGE = 256
"""What is lost of the answers of an embedding model if the process is killed."""
_CHECKED = 100
"""Rows that are compared with the buffer when an index is opened, among the last ones and among all."""
_PAID_CHECKED = 3
_NOISE, _PAID_TOLERANCE = 1e-6, 0.02
"""What the same text's vector may differ by: hashed words are the same everywhere, hosted models are not quite."""
# An evaluation task would leak its answer, and a dream must not ground itself in its own inventions. A failed episode may
# be replaced by one that is played again, and what is indexed must not change.
_RETRIEVABLE = """
    SELECT steps.id, task_id, steps.observation, action, next_observation
    FROM steps JOIN trajectories ON trajectories.id = trajectory_id JOIN tasks ON tasks.id = task_id
    WHERE steps.id > ? AND steps.id <= ? AND split = 'train' AND source IN ('offline', 'real') AND error IS NULL
    ORDER BY steps.id LIMIT ?"""
_STILL_RETRIEVABLE = f"""
    SELECT steps.id, {STEP_COLUMNS}
    FROM steps JOIN trajectories ON trajectories.id = trajectory_id JOIN tasks ON tasks.id = task_id
    WHERE split = 'train' AND steps.id IN (SELECT value FROM json_each(?))"""


class Retriever:
    """`StepIndex` over the tables of a replay buffer, kept up with them; for any number of threads.

    The index is built when first asked and then takes in only what was stored since, by whichever process. It is kept in
    `folder` (if given) with `embeddings`, and for many steps; otherwise in memory.
    """

    def __init__(self, rows: Rows, embeddings: "Embeddings | None" = None, folder: Path | None = None) -> None:
        self._rows, self._embeddings, self._path = rows, embeddings, folder
        self._index = StepIndex(embeddings)
        self._indexed_until = 0
        self._folder: IndexFolder | None = None
        self._page, self._warned = 0, False
        # Not the buffer's lock: a slow embedding model must not stop the writers. Taken before that one, never after.
        self._lock = RLock()

    def close(self) -> None:
        with self._lock:
            if self._folder is not None:
                self._folder.close()

    def steps(self, queries: Sequence[tuple[str, str]], k: int, exclude_task: str | None) -> list[list[Step]]:
        """For each (observation, action) the `k` most similar steps of train tasks that no dream made, best first."""
        vectors = self._index.queries(queries)
        with self._lock:
            self._refresh()
            while True:
                found = self._index.nearest(vectors, k, exclude_task=exclude_task)
                ids = sorted({id for each in found for id in each})
                steps = {id: step_of(row) for id, *row in self._rows(_STILL_RETRIEVABLE, [json.dumps(ids)])}
                if not (gone := [id for id in ids if id not in steps]):
                    return [[steps[id] for id in each] for each in found]
                self._index.hide(gone)  # their tasks have been held out since, perhaps by another process

    def _refresh(self) -> None:
        # Ids rise in the order of commits, so nothing can appear below a highest id that was seen.
        ((last,),) = self._rows("SELECT coalesce(max(id), 0) FROM steps", ())
        if self._indexed_until >= last:
            return
        with explained(str(self._path)):
            if self._folder is None and self._path is not None and (self._embeddings is not None or last > _IN_MEMORY_UP_TO):
                self._folder = IndexFolder(self._path)
                self._load(self._folder)
            try:
                self._catch_up(last)
            except DamagedIndex:
                if self._folder is None:
                    raise
                self._load(self._folder)
                self._catch_up(last)

    def _catch_up(self, last: int) -> None:
        while self._indexed_until < last:
            with self._folder.exclusive() if self._folder else nullcontext():
                if self._folder:
                    self._read(self._folder)
                self._take_in(last)
        self._grow_graph()

    def _take_in(self, last: int) -> None:
        """Index the next page of steps."""
        size = _PAGE if self._embeddings is None else _PAID_PAGE
        rows = self._rows(_RETRIEVABLE, [self._indexed_until, last, size])
        steps = [IndexedStep(*row) for row in rows]
        until = rows[-1][0] if len(rows) == size else max(last, self._indexed_until)
        if self._folder is None:
            self._index.add(steps)
        elif steps:
            page = self._index.page(steps)
            self._page, vectors = self._folder.write(page, until)
            self._index.append(page, vectors)
        self._indexed_until = until

    def _load(self, folder: IndexFolder) -> None:
        """Read the folder's index; one that is damaged, or of other steps, embeddings or another release, is made anew."""
        self._forget()
        try:
            with folder.exclusive():
                self._read(folder, check=True)
                self._check_against_buffer()
                if len(self._index) and is_installed():
                    self._index.graph = folder.graph(self._index.vectors.shape[1])
        except ReplacedIndex:
            self._forget()
        except DamagedIndex:
            self._forget()
            folder.start_anew()

    def _forget(self) -> None:
        self._index, self._indexed_until, self._page = StepIndex(self._embeddings), 0, 0

    def _read(self, folder: IndexFolder, *, check: bool = False) -> None:
        """Take in the pages that other processes have written."""
        if (found := folder.read(self._page, check=check)) is not None:
            self._page, until, page, vectors = found
            self._indexed_until = max(until, self._indexed_until)
            self._index.append(page, vectors)

    def _check_against_buffer(self) -> None:
        """Raise `DamagedIndex` unless some of the rows, the last ones among them, are what they would be if made anew."""
        if not (count := len(self._index)):
            return
        rows = sorted({*range(max(0, count - _CHECKED), count), *range(0, count, max(1, count // _CHECKED))})
        sample = self._index.sample(rows)
        sql = "SELECT id, observation, action, next_observation FROM steps WHERE id IN (SELECT value FROM json_each(?))"
        texts = {id: text for id, *text in self._rows(sql, [json.dumps([id for id, *_ in sample])])}
        for id, key, content in sample:
            if id not in texts or (key, content) != (digest(*texts[id][:2]), digest(*texts[id])):
                raise DamagedIndex(f"step {id} is not the one that was indexed")
        paid = self._embeddings is not None
        chosen = range(0, len(rows), max(1, len(rows) // _PAID_CHECKED)) if paid else range(len(rows))
        made = self._index.documents([(texts[sample[each][0]][0], texts[sample[each][0]][1]) for each in chosen])
        kept = self._index.vectors[[rows[each] for each in chosen]]
        if made.shape != kept.shape or not np.allclose(made, kept, atol=_PAID_TOLERANCE if paid else _NOISE):
            raise DamagedIndex("the vectors are of other embeddings")

    def _grow_graph(self) -> None:
        size, graph = len(self._index), self._index.graph
        if size <= EXACT_UP_TO or (graph is not None and size - graph.size <= _NOT_IN_GRAPH):
            return
        if not is_installed():
            if not self._warned:
                self._warned = True
                told = f"{size} distinct steps are searched one by one, in about {size * 85 // 10**6} ms a query"
                warnings.warn(f"{told}; for 1 ms run: pip install 'dreamgym-lg[retrieval]'", stacklevel=2)
            return
        vectors = self._index.vectors[:size]
        if self._folder is None:
            self._index.graph = _grown(graph, vectors)
            return
        with self._folder.exclusive():
            dimension = vectors.shape[1]
            saved = self._folder.graph(dimension)
            if saved is None or size - saved.size > _NOT_IN_GRAPH:
                self._folder.save_graph(_grown(self._folder.graph(dimension, writable=True), vectors))
                saved = self._folder.graph(dimension)
            self._index.graph = saved


def _grown(graph: NeighbourGraph | None, vectors: Vectors) -> NeighbourGraph:
    graph = graph or NeighbourGraph(vectors.shape[1])
    graph.add(vectors[graph.size :])
    return graph
