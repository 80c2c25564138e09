"""The order of `peckingorder`: what its book asks for is drawn once, by the world's seed."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dreamgym_lg.integrations.textworld_express.text import hidden_facts
from dreamgym_lg.types import Step, Task

START = (
    "You are in the kitchen. In one part of the room you see a counter that has a banana, a peach, and a strawberry on it. "
    "There is also a dining chair that has a papaya on it. You also see a fridge that is closed. In another part of the room "
    "you see an instructions book."
)
FRUITS = ["banana", "papaya", "peach", "strawberry"]
READ = "read instructions book"


def world(number: int, game: str = "peckingorder", **fields: Any) -> Task:
    own = {"observation": START, "metadata": {"game": game}, **fields}
    return Task(id=f"kitchen-{number}", instruction="obey the book", environment="twx", **own)


def done(action: str, observation: str, reward: float = 0.0, *, ended: bool = False, valid: bool = True) -> Step:
    return Step(observation="", action=action, next_observation=observation, reward=reward, terminated=ended, valid=valid)


def read(fruit: str) -> Step:
    return done(READ, f"The current task is to take the {fruit}.")


def take(fruit: str, reward: float = 0.25, **fields: Any) -> Step:
    return done(f"take {fruit}", f"You take the {fruit}.", reward, **fields)


def order(fruits: str) -> list[Step]:
    return [step for fruit in fruits.split() for step in (read(fruit), take(fruit))]


def facts(task: Task, history: list[Step]) -> list[str]:
    return hidden_facts(task, history)


LOOK = done("look around", START)


def test_of_the_past_it_is_what_the_book_really_asked_for() -> None:
    history = [LOOK, *order("peach banana"), read("papaya")]
    assert facts(world(0), history) == ["peach", "peach", "peach", "banana", "banana", "papaya", "papaya"]


@pytest.mark.parametrize("number", range(8))
def test_what_is_to_come_is_drawn_once_and_is_never_what_was(number: int) -> None:
    drawn: list[str] = []
    for _ in FRUITS:
        so_far = order(" ".join(drawn))
        drawn.append(facts(world(number), so_far)[-1])
        assert facts(world(number), [*so_far, LOOK])[-1] == drawn[-1]
    assert sorted(drawn) == FRUITS
    assert facts(world(number), order(" ".join(drawn)))[-1] == ""


def test_every_item_comes_first_in_some_worlds() -> None:
    first = Counter(facts(world(number), [])[0] for number in range(400))
    assert sorted(first) == FRUITS and min(first.values()) > 60  # of 100 expected; sd 8.7


def test_the_draw_is_that_of_the_published_runs() -> None:
    """Another draw would make other dreams of the same seeds."""
    assert [facts(world(0, seed=seed), [])[0] for seed in range(6)] == ["papaya", "peach", "peach", "banana", "peach", "peach"]


@pytest.mark.parametrize("number", range(8))
def test_two_rollouts_of_a_task_see_the_same_draw_whatever_is_done(number: int) -> None:
    (first,) = facts(world(number), [])
    for tried in [*FRUITS, "instructions book"]:
        idle = [done("inventory", "Inventory: empty."), LOOK, done(f"take {tried}", "What?", valid=False), done(READ, "Hm.")]
        assert facts(world(number), idle) == [first] * 5
    path = [facts(world(number), order(" ".join([first])))[-1]]
    detour = [LOOK, read(first), done(f"take the {first}", "What?", valid=False), take(first), LOOK, LOOK]
    assert facts(world(number), detour)[-1] == path[0]


def test_an_item_that_is_paid_for_unasked_was_next_and_one_that_fails_the_episode_was_not() -> None:
    assert facts(world(0), [take("peach"), read("banana")]) == ["peach", "banana", "banana"]
    for number in range(20):
        assert facts(world(number), [take("peach", reward=0.0, ended=True)])[0] != "peach"


def test_an_item_comes_again_when_it_is_put_back() -> None:
    back = done("put peach in fridge", "You put the peach in the fridge.", -0.25)
    (*_, after) = facts(world(0), order("peach"))
    assert facts(world(0), [*order("peach"), back, read("peach")])[2:] == [after, "peach", "peach"]


def test_other_games_and_unknown_rooms_hide_nothing() -> None:
    for task in (world(0, game="twc"), world(0, observation="A dark place."), replace(world(0), metadata={})):
        assert facts(task, [LOOK, take("peach")]) == ["", "", ""]


def test_the_real_book_asks_for_what_the_facts_of_its_episode_say(environment: Any, training: dict[str, list[Task]]) -> None:
    from dreamgym_lg.integrations.text_games.scripted_policies import collect_episodes
    from dreamgym_lg.integrations.textworld_express.world import create_oracle

    asked = 0
    for trajectory in collect_episodes(create_oracle, training["peckingorder"], environment, episodes={"noisy": 12}, seed=0):
        for step, fact in zip(trajectory.steps, facts(trajectory.task, list(trajectory.steps)), strict=False):
            if step.next_observation.startswith("The current task is to take the "):
                assert step.next_observation == f"The current task is to take the {fact}."
                asked += 1
    assert asked > 12
