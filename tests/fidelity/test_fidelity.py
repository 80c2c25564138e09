"""How a dream judges every step that was really played."""

from collections.abc import Sequence
from typing import Any

import pytest

from dreamgym_lg.fidelity.steps import OneStep, measure_steps
from dreamgym_lg.types import Step, Task, Trajectory

Counts = tuple[int, int, int, int]


def counts(one: OneStep) -> Counts:
    """Steps, really invalid ones, those of them called invalid, wrong rewards."""
    recall, right = one.invalid_recall, one.reward_right
    invalid = (recall.steps, recall.successes) if recall else (0, 0)
    return (one.steps, *invalid, right.steps - right.successes if right else 0)


TASK = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")


def seen(action: str, outcome: str, reward: float = 0.0, **fields: Any) -> Step:
    return Step(observation="", action=action, next_observation=outcome, reward=reward, **fields)


def recorded(*steps: Step, **fields: Any) -> Trajectory:
    return Trajectory(task=TASK, steps=steps, **fields)


# What really follows in the world that conftest's `door_world` dreams without a fault.
DANCE = seen("dance", "What?", valid=False)
OPEN = seen("open door", "The door is open.", 0.5)
NORTH = seen("go north", "You are outside.", 0.5, terminated=True)


async def test_a_dream_without_a_fault_is_found_to_have_none(scripted: Any, text_dream: Any, door_world: Any) -> None:
    dream = text_dream(scripted(reply=door_world))
    episodes = [recorded(DANCE, OPEN, DANCE, NORTH, success=True), recorded(seen("jump", "Ouch.", terminated=True))]
    agreement = await measure_steps(dream, episodes)
    assert counts(agreement) == (5, 2, 2, 0)
    assert agreement.invalid_recall and agreement.invalid_recall.value == 1


async def test_each_kind_of_fault_is_counted(scripted: Any, text_dream: Any, asked_action: Any) -> None:
    replies = {
        "accepted": "valid, why not\nreward 0, continues\nFine.",
        "refused": "invalid, no\nreward 0, continues\nWhat?",
        "overpaid": "valid, why not\nreward 1, continues\nFine.",
        "garbled": "Fine!",
    }
    dream = text_dream(scripted(reply=lambda messages: replies[asked_action(messages)]), retries=0)
    really = {"valid": True, "invalid": False}
    figures = {}
    for action in replies:
        for name, valid in really.items():
            figures[action, name] = counts(await measure_steps(dream, [recorded(seen(action, "o", valid=valid))]))
    assert figures == {
        ("accepted", "valid"): (1, 0, 0, 0),
        ("accepted", "invalid"): (1, 1, 0, 0),
        ("refused", "valid"): (1, 0, 0, 0),
        ("refused", "invalid"): (1, 1, 1, 0),
        ("overpaid", "valid"): (1, 0, 0, 1),
        ("overpaid", "invalid"): (1, 1, 0, 1),
        ("garbled", "valid"): (1, 0, 0, 1),
        ("garbled", "invalid"): (1, 1, 0, 1),
    }
    both = [recorded(seen("refused", "o", valid=False)), recorded(seen("accepted", "o", valid=False))]
    assert counts(await measure_steps(dream, both))[1:3] == (2, 1)


async def test_without_an_invalid_action_there_is_nothing_to_recognise(scripted: Any, text_dream: Any, door_world: Any) -> None:
    dream = text_dream(scripted(reply=door_world))
    assert (await measure_steps(dream, [recorded(OPEN, NORTH, success=True)])).invalid_recall is None
    assert counts(await measure_steps(dream, [recorded(error="died")])) == (0, 0, 0, 0)
    assert (await measure_steps(dream, [])).invalid_recall is None


@pytest.mark.parametrize(("real", "wrong"), [(0.5, 0), (0.505, 0), (0.52, 1), (0.0, 1), (-0.5, 1)])
async def test_a_reward_may_be_off_by_a_hundredth(
    scripted: Any, text_dream: Any, door_world: Any, real: float, wrong: int
) -> None:
    dream = text_dream(scripted(reply=door_world))
    agreement = await measure_steps(dream, [recorded(seen("open door", "The door is open.", real))])
    assert counts(agreement)[3] == wrong


async def test_each_step_is_judged_behind_what_really_happened_before_it(scripted: Any, text_dream: Any) -> None:
    # This dream never opens the door; told that it really is open, it knows the rest.
    def stubborn(messages: Sequence[Any]) -> str:
        really_open = any("The door is open." in message.text for message in messages)
        return f"valid, why\nreward {0.5 if really_open else 0}, continues\nThe door is stuck."

    model = scripted(reply=stubborn)
    agreement = await measure_steps(text_dream(model), [recorded(OPEN, NORTH, success=True)])
    assert counts(agreement) == (2, 0, 0, 1)
    assert "The door is stuck." not in "".join(message.text for message in model.asked[-1])


async def test_actions_refused_before_any_world_was_asked_are_not_asked_about(
    scripted: Any, text_dream: Any, door_world: Any
) -> None:
    model = scripted(reply=door_world)
    refused = seen("xyzzy", "No such word.", valid=False, decided_by="rules")
    agreement = await measure_steps(text_dream(model), [recorded(refused, OPEN, DANCE, NORTH)])
    assert counts(agreement) == (3, 1, 1, 0)
    assert len(model.asked) == 3
