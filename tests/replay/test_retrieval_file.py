"""Retrieval by several processes, by hashed words and by embeddings: the same neighbours everywhere."""

import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from langchain_core.embeddings import Embeddings

from dreamgym_lg.replay import retrieval
from dreamgym_lg.replay.buffer import ReplayBuffer
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
    """What an index that is made anew answers."""
    with ReplayBuffer(":memory:", embeddings=embeddings) as buffer:
        with ReplayBuffer(path) as stored:
            buffer.extend(stored.trajectories())
        return buffer.similar_many(QUERIES, 5, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.db"


# --- several processes ------------------------------------------------------------------------------------------------


def test_each_process_takes_in_what_another_has_stored(path: Path) -> None:
    with ReplayBuffer(path) as first, ReplayBuffer(path) as second:
        for start in range(0, 20, 5):
            first.extend(episodes(5, first=start))
            assert answers(first) == answers(second) == made_anew(path)
    assert [file.name for file in path.parent.iterdir()] == ["replay.db"], "nothing is kept of a few hashed words"


@pytest.mark.filterwarnings("error")
def test_threads_and_processes_at_once_find_the_same(path: Path) -> None:
    with ReplayBuffer(path) as buffer, ReplayBuffer(path) as other:
        buffer.extend(episodes(5))

        def work(number: int) -> None:
            each = (buffer, other)[number % 2]
            each.extend(episodes(3, first=5 + 3 * number))
            assert len(answers(each)[0]) == 5

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(8)))
        assert answers(buffer) == made_anew(path) == answers(other)


@pytest.mark.slow
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


def test_each_pair_is_embedded_once_in_a_process_also_after_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert answers(buffer) == made_anew(path, Letters())
        buffer.extend(episodes(4, first=10))
        assert answers(buffer) == made_anew(path, Letters())
        assert len(letters.asked) == len(set(letters.asked))
    assert [file.name for file in path.parent.iterdir()] == ["replay.db"]


def test_a_task_that_is_held_out_in_another_process_is_not_found_again(path: Path) -> None:
    task, other = (Task(id=id, instruction="", environment="") for id in ("own", "other"))
    near = [Step(observation=f"a red door {n}", action="open door", next_observation="") for n in range(900)]
    far = [Step(observation=f"a blue lake {n}", action="swim", next_observation="") for n in range(10)]
    with ReplayBuffer(path) as buffer, ReplayBuffer(path) as second:
        buffer.add(Trajectory(task=task, steps=near))
        buffer.add(Trajectory(task=other, steps=far))
        assert buffer.similar("a red door", "open door", k=3)[0] in near
        found = buffer.similar("a red door", "open door", k=5, exclude_task="own")
        assert len(found) == 5 and all(step in far for step in found)
        assert len(buffer.similar("a red door", "open door", k=1000)) == 910
        second.add_tasks([replace(task, split="test")])
        assert {step.action for step in buffer.similar("a red door", "open door", k=20)} == {"swim"}
        assert buffer.similar("a red door", "open door", k=5, exclude_task="other") == []
