"""Beyond single steps: the same policy in both worlds, and evaluation tasks that training has seen."""

from typing import Any

import pytest

from dreamgym_lg.fidelity import measure
from dreamgym_lg.fidelity.measure import compare_success_rates, share_known
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Task, Trajectory

DOOR = "A closed door."


def task(name: str, **fields: Any) -> Task:
    return Task(**{"id": name, "instruction": "leave", "environment": "house", "observation": DOOR} | fields)


# --- the same policy in both worlds ------------------------------------------------------------------------------------


def played(run: str, source: Any, name: str, success: bool, **fields: Any) -> Trajectory:
    return Trajectory(task=task(name), run=run, source=source, success=success, **fields)


def test_a_policy_is_compared_on_the_tasks_that_it_played_in_both_worlds() -> None:
    real = [played("validate/real", "real", f"t{n}", n < 3, iteration=10) for n in range(4)]
    dream = [played("validate/dream", "synthetic", f"t{n}", True, iteration=10) for n in range(1, 6)]
    others = [
        played("validate/real", "real", "t1", True, iteration=20),  # never dreamed
        played("train", "synthetic", "t1", True, iteration=10),  # never real
        played("offline", "offline", "t1", True),
        played("proof/real/base", "real", "t1", False),
        played("proof/dream@experience-0/base", "synthetic", "t1", True),
    ]
    first, second = compare_success_rates([*real, *dream, *others])
    assert (first.policy, first.iteration) == ("validate", 10)
    assert (first.real.successes, first.real.episodes) == (2, 3) and (first.dream.successes, first.dream.episodes) == (3, 3)
    assert first.gap == pytest.approx(1 / 3) and not first.apart
    assert (second.policy, second.real.successes, second.dream.successes) == ("proof/base", 0, 1)


def test_worlds_that_are_provably_apart_are_said_to_be(scripted: Any, text_dream: Any) -> None:
    real = [played("eval/real", "real", f"t{n}", True) for n in range(32)]
    dream = [played("eval/dream", "synthetic", f"t{n}", False) for n in range(32)]
    found = measure(text_dream(scripted(reply=str)), [*real, *dream])
    assert found.comparisons[0].apart
    (said,) = [each for each in found.conclusions if "understates" in each.sentence]
    assert said.level == "bad" and "0/32" in said.sentence and "32/32" in said.sentence


# --- the leak check ----------------------------------------------------------------------------------------------------


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
