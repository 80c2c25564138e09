"""Retrieval by several processes, above the size of a graph, and from the file of vectors: the same neighbours everywhere."""

import random
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings

from dreamgym_lg.replay import retrieval
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.hashed_words import phi
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


def made_anew(path: Path, embeddings: Embeddings | None = None, **options: str) -> list[list[Step]]:
    """What an exact index that is made anew answers."""
    with ReplayBuffer(":memory:", embeddings=embeddings) as buffer, pytest.MonkeyPatch.context() as exact:
        exact.setattr(retrieval, "EXACT_UP_TO", 10**6)
        with ReplayBuffer(path) as stored:
            buffer.extend(stored.trajectories())
        return buffer.similar_many(QUERIES, 5, **options)


def alike(found: list[list[Step]], expected: list[list[Step]]) -> bool:
    """As many neighbours, nine of ten the same: a graph built by several threads is never twice the same."""
    common = sum(step in steps for each, steps in zip(found, expected, strict=True) for step in each)
    return [len(each) for each in found] == [len(each) for each in expected] and common >= 0.9 * sum(map(len, expected))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.db"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph however few the steps, and pages of a few."""
    monkeypatch.setattr(retrieval, "EXACT_UP_TO", 100)
    monkeypatch.setattr(retrieval, "_PAGE", 64)


def graph_of(buffer: ReplayBuffer) -> Any:
    return buffer._retriever._index.graph


# --- several processes ------------------------------------------------------------------------------------------------


def test_each_process_takes_in_what_another_has_stored(path: Path) -> None:
    with ReplayBuffer(path) as first, ReplayBuffer(path) as second:
        for start in range(0, 20, 5):
            first.extend(episodes(5, first=start))
            assert answers(first) == answers(second) == made_anew(path)
    assert [file.name for file in path.parent.iterdir()] == ["replay.db"], "nothing is kept of a few hashed words"


@pytest.mark.filterwarnings("error")
def test_threads_and_processes_at_once_find_the_same(path: Path, graphs: None) -> None:
    with ReplayBuffer(path) as buffer, ReplayBuffer(path) as other:
        buffer.extend(episodes(5))

        def work(number: int) -> None:
            each = (buffer, other)[number % 2]
            each.extend(episodes(3, first=5 + 3 * number))
            assert len(answers(each)[0]) == 5

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(8)))
        assert alike(answers(buffer), made_anew(path)) and alike(answers(other), made_anew(path))


def test_a_step_is_found_in_a_process_that_only_reads(path: Path) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(20))
        found = answers(buffer)
    script = (
        "import sys; from dreamgym_lg.replay import ReplayBuffer\n"
        "buffer = ReplayBuffer(sys.argv[1])\n"
        "print([[step.action for step in each] for each in buffer.similar_many(eval(sys.argv[2]), 5)])"
    )
    command = [sys.executable, "-c", script, str(path), repr(QUERIES)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == repr([[step.action for step in each] for each in found])


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_paid_embeddings_are_asked_once_whatever_the_process(path: Path) -> None:
    letters, later = Letters(), Letters()
    with ReplayBuffer(path, embeddings=letters) as buffer:
        buffer.extend(episodes(4))
        found = answers(buffer)
        buffer.extend(episodes(4))
        assert len(letters.asked) == len(set(letters.asked))
        assert len(letters.asked) == len({(s.observation, s.action) for e in episodes(4) for s in e.steps})
    for number in range(3):
        with ReplayBuffer(path, embeddings=later) as buffer:
            assert answers(buffer) == found
            assert len(later.asked) == 3 and {*later.asked} <= {*letters.asked}, "a few, to see that the model is the same"
            buffer.extend(episodes(1, first=4 + number))  # found is of what was there before
            found, asked = answers(buffer), len(later.asked)
            assert 0 < asked - 3 <= 10 and found == made_anew(path, Letters())
            later.asked.clear()


def test_embeddings_that_fail_are_asked_again_for_what_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_PAGE", 16)
    letters = Letters()
    with ReplayBuffer(path, embeddings=letters) as buffer:
        buffer.extend(episodes(10))
        embed = letters.embed_documents

        def down(texts: list[str]) -> list[list[float]]:
            if len(letters.asked) > 40:
                raise ConnectionError("embedding service")
            return embed(texts)

        with monkeypatch.context() as outage:
            outage.setattr(letters, "embed_documents", down)
            with pytest.raises(ConnectionError):
                answers(buffer)
        killed = Path(f"{path}.embedded.npz").read_bytes()
        assert answers(buffer) == made_anew(path, Letters()) and len(letters.asked) == len(set(letters.asked))
    Path(f"{path}.embedded.npz").write_bytes(killed)  # as a process that was killed then would have left it
    with ReplayBuffer(path, embeddings=(later := Letters())) as buffer:
        assert answers(buffer) == made_anew(path, Letters())
        assert len(later.asked) < len(letters.asked) - 30


def test_other_embeddings_make_it_anew(path: Path) -> None:
    for model in (Letters(), Letters("zyxwvutsrqponmlkjihgfedcba"), Letters("aeiou"), None):
        with ReplayBuffer(path, embeddings=model) as buffer:
            buffer.extend(episodes(4))
            assert answers(buffer) == made_anew(path, model)


# --- the graph and its file -------------------------------------------------------------------------------------------


def test_the_graph_finds_what_the_exact_search_finds(path: Path, graphs: None) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(200))
        for excluded in (None, "t1"):
            expected = made_anew(path, **({"exclude_task": excluded} if excluded else {}))
            assert alike(answers(buffer, exclude_task=excluded), expected)
        graph = graph_of(buffer)
        assert graph is not None and (size := len(graph)) > 1000
        buffer.extend(episodes(5, first=200))
        assert alike(answers(buffer), made_anew(path))
        assert len(graph_of(buffer)) == size, "a few newer rows are searched one by one"
        buffer.extend(episodes(40, first=205))
        assert alike(answers(buffer), made_anew(path)) and len(graph_of(buffer)) > size


def test_a_new_process_makes_neither_vectors_nor_graph_again(path: Path, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(100))
        found = answers(buffer)
    sizes: list[int] = []
    monkeypatch.setattr(retrieval, "phi", lambda pairs: sizes.append(len(pairs)) or phi(pairs))
    with ReplayBuffer(path) as buffer:
        assert answers(buffer) == found and graph_of(buffer) is not None
        assert sizes == [len(QUERIES), 3], "three of what is stored, to see that they are the same"
        buffer.extend(episodes(3, first=100))
        answers(buffer)
        assert 0 < sum(sizes[3:]) <= 30


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "garbage"])
def test_a_damaged_file_is_made_anew(path: Path, graphs: None, damage: str) -> None:
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(50))
        answers(buffer)
    file = Path(f"{path}.hashed.npz")
    data = bytearray(whole := file.read_bytes())
    for place in range(len(data) // 3, len(data), max(1, len(data) // 50)):
        data[place] ^= 0xFF
    file.write_bytes({"flip": data, "truncate": whole[: len(data) // 2], "empty": b"", "garbage": b"x" * 5000}[damage])
    for _ in range(2):
        with ReplayBuffer(path) as buffer:
            assert alike(answers(buffer), made_anew(path))
    with np.load(file) as kept:
        assert len(kept["keys"]) == len(kept["vectors"]) > 100


def test_another_release_or_another_buffer_makes_it_anew(path: Path, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(retrieval, "phi", lambda pairs: phi([(text[::-1], action) for text, action in pairs]))
        with ReplayBuffer(path) as buffer:
            buffer.extend(episodes(30))
            answers(buffer)
    with ReplayBuffer(path) as buffer:
        assert alike(answers(buffer), made_anew(path))
    path.unlink()
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(30, first=100))
        assert alike(answers(buffer), made_anew(path))


def test_the_graph_gives_k_steps_whatever_is_excluded(path: Path, graphs: None) -> None:
    """The nearest 900 rows are of the excluded task."""
    task, other = (Task(id=id, instruction="", environment="") for id in ("own", "other"))
    near = [Step(observation=f"a red door {n}", action="open door", next_observation="") for n in range(900)]
    far = [Step(observation=f"a blue lake {n}", action="swim", next_observation="") for n in range(10)]
    with ReplayBuffer(path) as buffer:
        buffer.add(Trajectory(task=task, steps=near))
        buffer.add(Trajectory(task=other, steps=far))
        assert buffer.similar("a red door", "open door", k=3)[0] in near
        assert graph_of(buffer) is not None
        found = buffer.similar("a red door", "open door", k=5, exclude_task="own")
        assert len(found) == 5 and all(step in far for step in found)
        assert len(buffer.similar("a red door", "open door", k=1000)) == 910
        buffer.add_tasks([replace(task, split="test")])
        assert {step.action for step in buffer.similar("a red door", "open door", k=20)} == {"swim"}
        assert buffer.similar("a red door", "open door", k=5, exclude_task="other") == []
    with ReplayBuffer(path) as buffer:
        assert {step.action for step in buffer.similar("a red door", "open door", k=20)} == {"swim"}


def test_memory_and_given_connections_have_a_graph_and_no_file(
    tmp_path: Path, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ReplayBuffer(":memory:") as buffer, sqlite3.connect(":memory:") as connection:
        for each in (buffer, ReplayBuffer(connection)):
            each.extend(episodes(30))
            assert len(answers(each)[0]) == 5 and graph_of(each) is not None
    assert not list(tmp_path.iterdir())


def test_without_the_extra_the_search_is_exact_and_says_so(path: Path, graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "find_spec", lambda name: None)
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(20))
        with pytest.warns(UserWarning, match=r"dreamgym-lg\[retrieval\]"):
            found = answers(buffer)
        assert found == made_anew(path) and graph_of(buffer) is None


@pytest.mark.parametrize("embeddings", [None, Letters()])
def test_where_the_file_cannot_be_written_a_warning_says_so_once(
    path: Path, graphs: None, embeddings: Embeddings | None
) -> None:
    Path(f"{path}.{'embedded' if embeddings else 'hashed'}.npz").mkdir()  # as on a read-only file system, for root too
    with ReplayBuffer(path, embeddings=embeddings) as buffer:
        buffer.extend(episodes(20))
        with pytest.warns(UserWarning, match="makes these vectors again"):
            answers(buffer)
        buffer.extend(episodes(20, first=20))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert alike(answers(buffer), made_anew(path, embeddings))
    assert len(list(path.parent.iterdir())) == 2, "nothing half-written stays"
