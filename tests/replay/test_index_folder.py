"""The index on disk: the same neighbours as without it, never computed twice, and made anew whenever it cannot be right."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings

from dreamgym_lg.replay import neighbour_graph, retrieval
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.hashed_words import phi
from dreamgym_lg.replay.index_folder import IndexFolder
from dreamgym_lg.replay.step_index import StepIndex
from dreamgym_lg.types import Step, Task, Trajectory

WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu") for b in range(30)]
QUERIES = [(f"room with {WORDS[n]} and {WORDS[n + 1]}", f"take {WORDS[n]}") for n in range(0, 100, 9)]


class Letters(Embeddings):
    """How often each letter occurs; remembers what it was asked."""

    def __init__(self, scale: str = "abcdefghijklmnopqrstuvwxyz") -> None:
        self.scale = scale
        self.asked: list[str] = []

    def embed_query(self, text: str) -> list[float]:
        return [text.count(letter) + 0.1 for letter in self.scale]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked += texts
        return [self.embed_query(text) for text in texts]


def episodes(count: int, *, first: int = 0, tasks: int = 7, steps: int = 10) -> Iterator[Trajectory]:
    """Rooms that differ by a few words, some of them equal, and some steps of equal content in several tasks."""
    for number in range(first, first + count):
        rng = random.Random(number)
        task = Task(id=f"t{number % tasks}", instruction="", environment="house")
        words = [rng.choices(WORDS, k=3) for _ in range(steps)]
        played = [
            Step(observation=f"room with {a} and {b}", action=f"take {rng.choice((a, b))}", next_observation=rng.choice("xy"))
            for a, b, _ in words
        ]
        yield Trajectory(task=task, steps=played, rollout_index=number)


def answers(buffer: ReplayBuffer, *, exclude_task: str | None = None) -> list[list[Step]]:
    return buffer.similar_many(QUERIES, 5, exclude_task=exclude_task)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.db"


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder however few the steps, and pages of a few."""
    monkeypatch.setattr(retrieval, "_IN_MEMORY_UP_TO", 0)
    monkeypatch.setattr(neighbour_graph, "_THREADS", 1)
    monkeypatch.setattr(retrieval, "_PAGE", 64)


@pytest.fixture
def graphs(on_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph however few the steps."""
    monkeypatch.setattr(retrieval, "EXACT_UP_TO", 100)
    monkeypatch.setattr(retrieval, "_NOT_IN_GRAPH", 20)


def in_memory(path: Path, **options: str) -> list[list[Step]]:
    """What an exact index made anew answers."""
    with ReplayBuffer(":memory:") as buffer, pytest.MonkeyPatch.context() as exact:
        exact.setattr(retrieval, "EXACT_UP_TO", 10**6)
        with ReplayBuffer(path) as stored:
            buffer.extend(stored.trajectories())
        return buffer.similar_many(QUERIES, 5, **options)


def alike(found: list[list[Step]], expected: list[list[Step]]) -> bool:
    """As many neighbours, nine of ten the same: a graph built by several threads is never twice the same."""
    common = sum(step in steps for each, steps in zip(found, expected, strict=True) for step in each)
    return [len(each) for each in found] == [len(each) for each in expected] and common >= 0.9 * sum(map(len, expected))


def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all pages that are indexed from now on."""
    sizes: list[int] = []
    page = StepIndex.page
    monkeypatch.setattr(StepIndex, "page", lambda self, steps: sizes.append(len(steps)) or page(self, steps))
    return sizes


def test_few_steps_have_no_folder_and_memory_has_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(3))
        assert answers(buffer)[0]
    monkeypatch.setattr(retrieval, "_IN_MEMORY_UP_TO", 0)
    monkeypatch.setattr(neighbour_graph, "_THREADS", 1)
    monkeypatch.chdir(path.parent)
    with ReplayBuffer(":memory:") as buffer, sqlite3.connect(":memory:") as connection:
        for each in (buffer, ReplayBuffer(connection)):
            each.extend(episodes(3))
            assert answers(each)[0]
    assert [file.name for file in path.parent.iterdir()] == ["replay.db"]


def test_a_buffer_that_grows_gets_a_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_IN_MEMORY_UP_TO", 40)
    with ReplayBuffer(path) as buffer:
        for first in range(0, 8, 2):
            buffer.extend(episodes(2, first=first))
            assert answers(buffer) == in_memory(path)
            assert Path(f"{path}.index").exists() is (first >= 4)


def test_a_reopened_index_computes_only_what_is_new(path: Path, on_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(20))
        assert answers(buffer) == in_memory(path)
    sizes = computed(monkeypatch)
    with ReplayBuffer(path) as buffer:
        for excluded in (None, "t1", "t2"):
            expected = in_memory(path, **({"exclude_task": excluded} if excluded else {}))
            sizes.clear()
            assert answers(buffer, exclude_task=excluded) == expected
            assert sizes == []
        buffer.extend(episodes(3, first=20))
        answers(buffer)
        assert sizes == [30]
        assert answers(buffer) == in_memory(path)


def test_two_processes_share_the_work(path: Path, on_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(path) as first, ReplayBuffer(path) as second:
        sizes = computed(monkeypatch)
        for start in range(0, 20, 5):
            first.extend(episodes(5, first=start))
            one, other = (first, second) if start % 2 else (second, first)
            assert answers(one) == answers(other)
        assert sum(sizes) == 200
        assert answers(first) == answers(second) == in_memory(path)


def test_threads_and_processes_at_once_make_one_index(path: Path, on_disk: None) -> None:
    with ReplayBuffer(path) as buffer, ReplayBuffer(path) as other:
        buffer.extend(episodes(5))

        def work(number: int) -> None:
            each = (buffer, other)[number % 2]
            each.extend(episodes(3, first=5 + 3 * number))
            assert len(answers(each)[0]) == 5

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(8)))
        assert answers(buffer) == answers(other) == in_memory(path)


def test_paid_embeddings_are_asked_once_whatever_the_process(path: Path) -> None:
    letters, later = Letters(), Letters()
    with ReplayBuffer(path, embeddings=letters) as buffer:
        buffer.extend(episodes(4))
        found = answers(buffer)
        asked = set(letters.asked)
        assert len(letters.asked) == len(asked) == len({(s.observation, s.action) for e in episodes(4) for s in e.steps})
    with ReplayBuffer(path, embeddings=later) as buffer:
        assert answers(buffer) == found
        assert len(later.asked) <= 4 and set(later.asked) <= asked, "a few, to see that the model is the same"


def test_other_embeddings_make_it_anew(path: Path, on_disk: None) -> None:
    expected = {}
    for name, model in {"a": Letters(), "b": Letters("zyxwvutsrqponmlkjihgfedcba"), "c": Letters("aeiou"), "d": None}.items():
        with ReplayBuffer(path, embeddings=model) as buffer:
            buffer.extend(episodes(4))
            expected[name] = answers(buffer)
            with ReplayBuffer(":memory:", embeddings=model) as fresh:
                fresh.extend(episodes(4))
                assert answers(fresh) == expected[name]


@pytest.mark.parametrize("file", ["pages.db", "vectors-*.f32", "graph-*.usearch"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "garbage"])
def test_a_damaged_index_is_made_anew(path: Path, graphs: None, file: str, damage: str) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(20))
        found = answers(buffer)
        assert buffer._retriever._index.graph is not None
    [damaged] = Path(f"{path}.index").glob(file)
    data = bytearray(damaged.read_bytes())
    for place in range(len(data) // 3, len(data), max(1, len(data) // 50)):
        data[place] ^= 0xFF
    if damage == "remove":
        damaged.unlink()
    else:
        changed = {"flip": data, "truncate": damaged.read_bytes()[: len(data) // 2], "empty": b"", "garbage": b"x" * 5000}
        damaged.write_bytes(changed[damage])
    with ReplayBuffer(path) as buffer:
        assert alike(answers(buffer), found)
    with ReplayBuffer(path) as buffer:
        assert alike(answers(buffer), in_memory(path))


def test_another_release_or_another_buffer_makes_it_anew(path: Path, on_disk: None) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(4))
        answers(buffer)
    with sqlite3.connect(Path(f"{path}.index") / "pages.db") as connection:
        connection.execute("UPDATE facts SET value = '0' WHERE name = 'format'")
    connection.close()
    with ReplayBuffer(path) as buffer:
        assert answers(buffer) == in_memory(path)
    path.unlink()
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(5, first=100))
        assert answers(buffer) == in_memory(path)


def test_hashed_words_of_another_release_make_it_anew(path: Path, on_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr("dreamgym_lg.replay.step_index.phi", lambda pairs: phi([(text[::-1], action) for text, action in pairs]))
        with ReplayBuffer(path) as buffer:
            buffer.extend(episodes(4))
            answers(buffer)
    with ReplayBuffer(path) as buffer:
        assert answers(buffer) == in_memory(path)


def test_a_folder_that_is_deleted_meanwhile_is_made_anew(path: Path, on_disk: None) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(4))
        answers(buffer)
        for file in Path(f"{path}.index").iterdir():
            file.unlink()
        Path(f"{path}.index").rmdir()
        buffer.extend(episodes(4, first=4))
        assert answers(buffer) == in_memory(path)


def test_a_process_notices_that_another_has_made_it_anew(path: Path, on_disk: None) -> None:
    with ReplayBuffer(path) as buffer, ReplayBuffer(path, embeddings=Letters()) as other:
        for first in range(0, 16, 4):
            buffer.extend(episodes(4, first=first))
            assert answers(buffer) == in_memory(path)
            with ReplayBuffer(":memory:", embeddings=Letters()) as fresh:
                fresh.extend(buffer.trajectories())
                assert answers(other) == answers(fresh)


@pytest.mark.slow
def test_a_kill_while_it_is_written_costs_nothing(path: Path, graphs: None) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(150))
    script = """
import sys
from dreamgym_lg.replay import retrieval
from dreamgym_lg.replay.buffer import ReplayBuffer
retrieval._IN_MEMORY_UP_TO, retrieval._PAGE, retrieval.EXACT_UP_TO, retrieval._NOT_IN_GRAPH = 0, 16, 100, 20
buffer = ReplayBuffer(sys.argv[1])
print("begun", flush=True)
buffer.similar("room", "take")
"""
    for delay in (0.0, 0.02, 0.05):
        worker = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        assert worker.stdout and worker.stdout.readline() == b"begun\n"
        time.sleep(delay)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    with ReplayBuffer(path) as buffer:
        assert alike(answers(buffer), in_memory(path))


def test_the_graph_finds_what_the_exact_search_finds(path: Path, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(200))
        found = answers(buffer)
        graph = buffer._retriever._index.graph
        assert graph is not None and graph.size > 1000
        assert alike(found, in_memory(path))
        buffer.extend(episodes(1, first=200))
        assert alike(answers(buffer), in_memory(path))
        assert buffer._retriever._index.graph is graph, "a few newer rows are searched one by one"
        buffer.extend(episodes(10, first=201))
        assert alike(answers(buffer), in_memory(path))
        grown = buffer._retriever._index.graph
        assert grown is not None and grown.size > graph.size
    assert len(list(Path(f"{path}.index").glob("graph-*"))) == 1
    monkeypatch.setattr(neighbour_graph.NeighbourGraph, "add", None)
    with ReplayBuffer(path) as buffer:
        assert alike(answers(buffer), in_memory(path))
        assert buffer._retriever._index.graph is not None, "neither is the graph made again"


def test_the_graph_gives_k_steps_whatever_is_excluded(path: Path, graphs: None) -> None:
    """The nearest 900 rows are of the excluded task."""
    task, other = (Task(id=id, instruction="", environment="") for id in ("own", "other"))
    near = [Step(observation=f"a red door {n}", action="open door", next_observation="") for n in range(900)]
    far = [Step(observation=f"a blue lake {n}", action="swim", next_observation="") for n in range(10)]
    with ReplayBuffer(path) as buffer:
        buffer.add(Trajectory(task=task, steps=near))
        buffer.add(Trajectory(task=other, steps=far))
        assert buffer.similar("a red door", "open door", k=3)[0] in near
        assert buffer._retriever._index.graph is not None
        found = buffer.similar("a red door", "open door", k=5, exclude_task="own")
        assert len(found) == 5 and all(step in far for step in found)
        assert len(buffer.similar("a red door", "open door", k=1000)) == 910
        buffer.add_tasks([replace(task, split="test")])
        assert {step.action for step in buffer.similar("a red door", "open door", k=20)} == {"swim"}
        assert buffer.similar("a red door", "open door", k=5, exclude_task="other") == []
    with ReplayBuffer(path) as buffer:
        assert {step.action for step in buffer.similar("a red door", "open door", k=20)} == {"swim"}


def test_memory_has_a_graph_too(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(":memory:") as buffer, ReplayBuffer(":memory:") as exact:
        for each in (buffer, exact):
            each.extend(episodes(60))
        found = answers(buffer)
        assert buffer._retriever._index.graph is not None
        monkeypatch.setattr(retrieval, "EXACT_UP_TO", 10**6)
        assert alike(found, answers(exact))


def test_without_the_extra_the_search_is_exact_and_says_so(path: Path, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "is_installed", lambda: False)
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(20))
        with pytest.warns(UserWarning, match=r"dreamgym-lg\[retrieval\]"):
            found = answers(buffer)
        assert found == in_memory(path)
        buffer.extend(episodes(3, first=20))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answers(buffer)


def test_a_full_disk_is_explained(path: Path, on_disk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from dreamgym_lg.errors import ReplayBufferError

    def full(self: Path, mode: str) -> None:
        raise OSError(28, "No space left on device")

    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(4))
        with monkeypatch.context() as now:
            now.setattr(Path, "open", full)
            with pytest.raises(ReplayBufferError, match="No space left on device.*run the same command again"):
                answers(buffer)
        assert answers(buffer) == in_memory(path)


def test_equal_pages_make_equal_indexes_however_they_are_cut(tmp_path: Path, on_disk: None) -> None:
    """Read at once or page by page."""
    path = tmp_path / "replay.db"
    with ReplayBuffer(path) as buffer:
        for first in range(0, 20, 2):
            buffer.extend(episodes(2, first=first))
            answers(buffer)
    folder = IndexFolder(Path(f"{path}.index"))
    whole, cut = StepIndex(), StepIndex()
    with folder.exclusive():
        read = folder.read(0, check=True)
        assert read is not None
        number, _, page, vectors = read
        whole.append(page, vectors)
        ((most,),) = folder._db.execute("SELECT max(number) FROM pages")
        assert number == most > 5
    folder.close()
    with ReplayBuffer(path) as buffer:
        stored = [(id, *texts) for id, *texts in buffer._rows(retrieval._RETRIEVABLE, [0, 10**6, 10**6])]
    from dreamgym_lg.replay.step_index import IndexedStep

    cut.add(IndexedStep(*row) for row in stored)
    for query in phi(QUERIES):
        for excluded in (None, "t1"):
            expected = cut.nearest(query[np.newaxis], 50, exclude_task=excluded)
            assert whole.nearest(query[np.newaxis], 50, exclude_task=excluded) == expected
