"""Evaluation tasks that training has seen."""

from typing import Any

from dreamgym_lg.fidelity.measure import share_known
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Task

DOOR = "A closed door."


def task(name: str, **fields: Any) -> Task:
    return Task(**{"id": name, "instruction": "leave", "environment": "house", "observation": DOOR} | fields)


def test_evaluation_tasks_about_something_trained_on_are_counted() -> None:
    buffer = ReplayBuffer(":memory:")
    known = task("train-1", observation="Cancel order A-17 of Anna Berg, please.")
    twin = task("test-1", split="test", observation="cancel ORDER a-17; of anna berg please")
    same = task("test-2", split="validation", observation="Where is my parcel? It is order a17.")
    other = task("test-3", split="test", observation="Where is order B-18?")
    elsewhere = task("test-4", split="test", observation=known.observation, instruction="Sing of the king.")
    buffer.add_tasks([known, twin, same, other, elsewhere])
    assert (shared := share_known(buffer)) and (shared.successes, shared.episodes) == (3, 4)
    assert share_known(ReplayBuffer(":memory:")) is None
