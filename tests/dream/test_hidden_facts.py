"""Draws of a world's hidden part, and the prompts of a world that has one."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.hidden_facts import draw_order, told, world_seed
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.experience.training_data import to_conversation
from dreamgym_lg.types import Prediction, Step, Task, Trajectory

DOORS = ["east", "north", "south", "west"]


def world(number: int) -> Task:
    return Task(id=f"maze-{number}", instruction="find the way", environment="maze", observation="Four doors.")


def way(task: Task, history: Sequence[Exchange], seed: int) -> list[str]:
    """A maze of four rooms, each with one open door: those that were found open, then those of the draw."""
    found = [exchange.action for exchange in history if exchange.prediction.reward > 0]
    order, facts = [*found, *(door for door in draw_order(DOORS, seed) if door not in found), ""], list[str]()
    passed = 0
    for exchange in history:
        facts.append(order[passed])
        passed += exchange.prediction.reward > 0
    return [*facts, order[passed]]


def shown(text: str) -> str:
    return text.rsplit("next in line: ", 1)[1]


def test_a_world_has_one_seed_of_its_own() -> None:
    given = Task(id="t2", instruction="", environment="", seed=7)
    assert world_seed(Task(id="t0", instruction="", environment="")) == 1945200984
    assert world_seed(world(0)) != world_seed(world(1)) and world_seed(given) == 7


def test_a_draw_is_the_seeds_alone() -> None:
    drawn = draw_order(DOORS, 7)
    assert sorted(drawn) == DOORS and draw_order([*reversed(DOORS), "west"], 7) == drawn
    for some in combinations(DOORS, 3):
        assert draw_order(some, 7) == [door for door in drawn if door in some]
    first = Counter(draw_order(DOORS, seed)[0] for seed in range(400))
    assert first.keys() == set(DOORS) and min(first.values()) > 60  # of 100 expected; sd 8.7


def test_all_rollouts_of_a_task_face_the_same_world_whatever_they_do(scripted: Any) -> None:
    def walls(messages: Sequence[Any]) -> str:
        """Opens the door that the prompt names, and no other."""
        action = next(line[2:] for line in messages[-1].text.splitlines() if line.startswith("> "))
        right = action == shown(messages[-1].text)
        return f"valid, fine\nreward {0.25 if right else 0}, continues\n{'It opens.' if right else 'A wall.'}"

    def opened(first: Sequence[str]) -> list[str]:
        """The doors in the order in which they open, found by trying them all after what this rollout does `first`."""
        dream = DreamEnvironment(ExperienceModel(scripted(reply=walls), hidden_facts=way), rewards="score")
        dream.reset(world(3))
        found = [door for door in first if dream.step(door).reward > 0]
        while len(found) < len(DOORS):
            found += [next(door for door in DOORS if door not in found and dream.step(door).reward > 0)]
        return found

    expected = draw_order(DOORS, world_seed(world(3)))
    for first in ([], ["look"], *[[door] * 2 for door in DOORS], DOORS, DOORS[::-1]):
        assert opened(first) == expected


def test_the_prompts_of_a_dream_only_grow(scripted: Any) -> None:
    model = scripted(reply=lambda messages: f"valid, fine\nreward {0.25}, continues\nIt opens.")
    dream = DreamEnvironment(ExperienceModel(model, hidden_facts=way), rewards="score")
    dream.reset(world(5))
    for _ in DOORS:
        asked = way(world(5), dream._history, world_seed(world(5)))[-1]
        dream.step(asked)
    assert all(after[: len(before)] == before for before, after in zip(model.asked, model.asked[1:], strict=False))
    assert [shown(messages[-1].text) for messages in model.asked] == draw_order(DOORS, world_seed(world(5)))


def test_in_training_data_the_facts_are_what_the_real_episode_revealed() -> None:
    doors = draw_order(DOORS, world_seed(world(0)))[::-1]
    steps = [Step(observation="A room.", action="look", next_observation="A room.")]
    steps += [Step(observation="A room.", action=door, next_observation="It opens.", reward=0.25) for door in doors]
    messages = to_conversation(ExperienceModel(None, hidden_facts=way), Trajectory(task=world(0), steps=steps))
    assert [shown(message.text) for message in messages[1::2]] == [doors[0], *doors]


class Signposts:
    """`way`, told by a sign."""

    def __call__(self, task: Task, history: Sequence[Exchange], seed: int, /) -> list[str]:
        return way(task, history, seed)

    def tell(self, action: str, observation: str, fact: str, /) -> str:
        return f"A sign says {fact}." if action == "read" else observation


@pytest.mark.parametrize("ask", ["predict", "apredict"])
def test_a_fact_is_told_whatever_the_model_writes_in_its_place(scripted: Any, ask: str) -> None:
    right = way(world(5), [], world_seed(world(5)))[0]
    wrong = next(door for door in DOORS if door != right)
    answers = {"read": f"A sign says {wrong}. Or {right}.", "look": f"A wall, not {wrong}."}

    def says(messages: Sequence[Any]) -> str:
        action = next(line[2:] for line in messages[-1].text.splitlines() if line.startswith("> "))
        return f"valid, fine\nreward 0, continues\n{answers[action]}"

    def answered(hidden_facts: Any, action: str) -> str:
        experience = ExperienceModel(scripted(reply=says), hidden_facts=hidden_facts)
        once, again = (_result(getattr(experience, ask)(world(5), [], action)) for _ in range(2))
        assert once == again, "as it is remembered, too"
        return once.observation

    assert answered(Signposts(), "read") == f"A sign says {right}." and answered(way, "read") == answers["read"]
    assert answered(Signposts(), "look") == answers["look"]
    opened = [Exchange(right, Prediction("", "It opens.", 0.25, False, False, True))]
    coming = way(world(5), opened, world_seed(world(5)))[-1]
    later = _result(getattr(ExperienceModel(scripted(reply=says), hidden_facts=Signposts()), ask)(world(5), opened, "read"))
    assert later.observation == f"A sign says {coming}." and coming != right, "the fact of this step, not of an earlier one"
    last = Prediction("", answers["read"], 0.0, False, False, True)
    assert told(Signposts(), "read", last, "") == last, "nothing is left to tell"
    assert told(Signposts(), "read", last, coming).observation == f"A sign says {coming}."
    refused = last._replace(valid=False)
    assert told(Signposts(), "read", refused, coming) == refused, "no answer to an invalid action tells anything"


def _result(answer: Any) -> Prediction:
    return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer
