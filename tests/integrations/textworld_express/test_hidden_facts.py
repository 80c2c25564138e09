"""The order of `peckingorder`: what its book asks for is drawn once, by the world's seed."""

import re
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from dreamgym_lg.experience.hidden_facts import Telling, world_seed
from dreamgym_lg.experience.predictions import Exchange, in_hindsight
from dreamgym_lg.integrations.textworld_express.hidden_facts import OPPOSITE, GameFacts, hidden_facts
from dreamgym_lg.integrations.textworld_express.text import ROOM
from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld
from dreamgym_lg.types import Prediction, Task, Trajectory

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


def done(action: str, observation: str, reward: float = 0.0, *, ended: bool = False, valid: bool = True) -> Exchange:
    return Exchange(action, Prediction("", observation, reward, ended, False, valid))


def read(fruit: str) -> Exchange:
    return done(READ, f"The current task is to take the {fruit}.")


def take(fruit: str, reward: float = 0.25, **fields: Any) -> Exchange:
    return done(f"take {fruit}", f"You take the {fruit}.", reward, **fields)


def order(fruits: str) -> list[Exchange]:
    return [exchange for fruit in fruits.split() for exchange in (read(fruit), take(fruit))]


def facts(task: Task, history: list[Exchange]) -> list[str]:
    return hidden_facts(task, history, world_seed(task))


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


def test_the_book_asks_for_what_is_next_whatever_the_model_wrote() -> None:
    facts = TextWorldExpressWorld().hidden_facts
    for written in ("The current task is to take the grape.", "The current task is to take the grape. You also see a grape."):
        assert isinstance(facts, Telling)
        assert facts.tell(READ, written, "grapefruit") == "The current task is to take the grapefruit."
    for other in ("You take the grape.", START, "Unknown action: I'm not sure what you mean."):
        assert facts.tell(READ, other, "grapefruit") == other


def test_the_list_of_simonsays_is_gone_through_by_what_was_paid() -> None:
    listed = "Simon says, take these actions in order: sit down, eat peach, sit down."
    metadata = {"game": "simonsays"}
    task = Task(id="simon", instruction="obey", environment="twx", observation=listed, metadata=metadata)
    history = [done("sit down", "", 0.3), done("sit", "Unknown action.", valid=False), done("eat peach", "", 0.3)]
    assert facts(task, history) == ["sit down", "eat peach", "eat peach", "sit down"]
    assert facts(task, [*history, done("sit down", "You win!", 0.4, ended=True)])[-1] == ""


def test_the_list_of_a_real_task_of_simonsays_is_what_has_to_be_done() -> None:
    world = TextWorldExpressWorld("simonsays")
    tasks = world.tasks("train", limit=40)
    for played in world.collect(tasks, {"demonstration": 3}, seed=0):
        history = [Exchange(step.action, in_hindsight(step, success=True)) for step in played.steps]
        assert facts(played.task, history) == [*(step.action for step in played.steps), ""] and len(history) == 5


def test_other_games_and_unknown_rooms_hide_nothing() -> None:
    for task in (world(0, game="twc"), world(0, observation="A dark place."), replace(world(0), metadata={})):
        assert facts(task, [LOOK, take("peach")]) == ["", "", ""]


def test_the_real_book_asks_for_what_the_facts_of_its_episode_say(environment: Any, training: dict[str, list[Task]]) -> None:
    from dreamgym_lg.integrations.textworld_express.scripted_policies import scripted_trajectories

    asked = 0
    for trajectory in scripted_trajectories(training["peckingorder"], environment, episodes={"noisy": 12}, seed=0):
        task, steps, success = trajectory.task, trajectory.steps, trajectory.success
        history = [Exchange(step.action, in_hindsight(step, success=success)) for step in steps]
        for step, fact in zip(steps, facts(task, history), strict=False):
            if step.next_observation.startswith("The current task is to take the "):
                assert step.next_observation == f"The current task is to take the {fact}."
                asked += 1
    assert asked > 12


# --- mapreader ----------------------------------------------------------------------------------------------------------


def play_back(played: Trajectory) -> list[Exchange]:
    return [Exchange(step.action, in_hindsight(step, success=played.success)) for step in played.steps]


@pytest.fixture(scope="module")
def walks() -> list[Trajectory]:
    """Random walks through three rooms, and demonstrations."""
    world = TextWorldExpressWorld("mapreader")
    return list(world.collect(world.tasks("train", limit=200), {"demonstration": 20, "random": 40}, seed=0))


def test_of_recorded_walks_it_is_what_each_move_and_the_map_really_showed(walks: list[Trajectory]) -> None:
    shown = Counter[str]()
    for played in walks:
        for step, fact in zip(played.steps, facts(played.task, play_back(played)), strict=False):
            assert not step.valid or GameFacts().tell(step.action, step.next_observation, fact) == step.next_observation
            if step.valid and f"{step.action}: {step.next_observation}" in fact:
                shown[step.action.split()[0]] += 1
            elif step.valid and step.action.split()[0] in ("move", "look", "read"):
                assert step.action == "read map" and shown["map", played.task.id]
            shown["map", played.task.id] += step.action == "read map"
    assert shown["move"] > 100 and shown["look"] > 20 and shown["read"] > 20


def test_a_dreamed_room_is_the_drawn_one_whatever_the_model_wrote(walks: list[Trajectory]) -> None:
    """A small model mixes up rooms and ways: the way on in place of the way back, or a look that leads elsewhere."""
    for played in walks:
        history = play_back(played)
        for fact in facts(played.task, history):
            for way in ("look around", "move north", "move east", "move south", "move west", "read map"):
                told = GameFacts().tell(way, "You are in the attic. To the North you see the attic.", fact)
                assert f"{way}: {told}" in fact if f"{way}: " in fact else "attic" in told
        assert GameFacts().tell("take coin", "You take the coin.", facts(played.task, [])[0]) == "You take the coin."


def test_rooms_that_were_not_seen_are_drawn_once_whatever_is_done(walks: list[Trajectory]) -> None:
    """Each way of the first room, and a way on from there to a third room that the task does not tell."""
    for played in walks:
        task, idle = played.task, done("inventory", "Inventory: a map.")
        (first,) = facts(task, [])
        assert facts(task, [idle, done("move up", "Unknown action: I'm not sure what you mean.", valid=False)]) == [first] * 3
        exits = re.findall(r"To the (\w+) you see the ([^.]+)\.", task.observation)
        rooms = set(re.findall(r"You are in the ([^.]+)\.|you see the ([^.]+)\.", f"{task.observation} {first}"))
        assert len(rooms := {name for pair in rooms for name in pair if name}) == 3, (rooms, first)
        for way, room in exits:
            assert f"move {way.lower()}: You are in the {room}." in first
        assert first.startswith(f"look around: {task.observation}")
        assert first.count(" connects to the ") == 3 and first.count("a coin.") == 1
        (_, read) = facts(task, [done("read map", first[first.index("The map reads:") :])])
        assert read == first[: first.index(" read map: ")]


def dreamed(task: Task, rng: Random) -> list[Exchange]:
    """A random walk in a dream that answers as its facts say."""
    start = task.observation
    history, shown, held = list[Exchange](), {ROOM.findall(start)[0]: start}, True
    for _ in range(8):
        fact = facts(task, history)[-1]
        ways = dict(re.findall(r"move ([a-z]+): (You are in the .+?)(?= move [a-z]+: | read map: |$)", fact))
        actions = [*(f"move {way}" for way in ways), "look around", *(["read map", "put map in box"] if held else [])]
        match rng.choice(actions).split():
            case ["move", way]:
                history.append(done(f"move {way}", ways[way]))
                room = ROOM.findall(ways[way])[0]
                exits = re.findall("To the .*", ways[way])
                assert re.findall("To the .*", shown.setdefault(room, ways[way])) == exits, "a room comes back as it was"
            case ["read", _] if "The map reads:" in fact:
                history.append(done("read map", fact[fact.index("The map reads:") :]))
            case ["put", *_] if "a box" in shown and len(history) > 4:
                history.append(done("put map in box", "You put the map in the box."))
                held = False
            case _:
                history.append(done("inventory", "Inventory: a map."))
    return history


def test_what_an_agent_does_changes_neither_the_rooms_nor_the_past(walks: list[Trajectory]) -> None:
    for played in walks:
        maps = set()
        for number in range(6):
            history = dreamed(played.task, Random(number))
            told = [facts(played.task, history[:length]) for length in range(len(history) + 1)]
            maps |= {fact[fact.index("The map reads:") :] for each in told for fact in each if "The map reads:" in fact}
            assert told[-1] == [each[-1] for each in told], "the facts of a conversation only grow"
        assert len(maps) == 1


def test_the_first_look_at_a_room_counts(walks: list[Trajectory]) -> None:
    """A dream that shows a room otherwise later does not change its world, nor one that shows rooms where there are none."""
    for played in walks:
        (first,) = facts(played.task, [])
        room = ROOM.findall(played.task.observation)[0]
        bare = done("look around", f"You are in the {room}.")
        attics = " ".join(f"To the {way} you see the attic." for way in OPPOSITE)
        full = done("look around", f"You are in the {room}. {attics}")
        assert facts(played.task, [bare, full]) == [first] * 3
        lost = done("move up", "You are in the cave.")
        assert facts(played.task, [lost])[1] == f"look around: You are in the cave. {first[first.index('read map: ') :]}"


def test_a_map_that_was_read_names_a_room_that_was_not_visited(walks: list[Trajectory]) -> None:
    task = next(each.task for each in walks if each.task.observation.count("To the") == 1)
    box, coin = ROOM.findall(task.observation)[0], task.instruction.split("located in the ")[1].split(",")[0]
    lines = f"The {coin} connects to the {box} and tower. The {box} connects to the {coin}. The tower connects to the {coin}."
    (before, after) = facts(task, [done("read map", f"The map reads: {lines}")])
    assert "you see the tower." in after and before == f"{after} read map: The map reads: {lines}"


def test_different_worlds_have_different_third_rooms(walks: list[Trajectory]) -> None:
    """One way on in three, each as often as the others, into rooms of all names."""
    first = [facts(played.task, [])[0] for played in walks]
    drawn = {(found[1], found[2]) for fact in first for found in re.finditer(r"To the (\w+) you see the ([^.]+)", fact)}
    assert {way for way, _ in drawn} == set(OPPOSITE) and len({room for _, room in drawn}) > len(walks) / 2


def test_a_coin_that_was_taken_lies_there_no_longer(walks: list[Trajectory]) -> None:
    played = next(each for each in walks if each.success and len(each.steps) == 5)
    (*_, fetched, ended) = facts(played.task, play_back(played))
    assert "a coin" not in fetched + ended and "a box, that is empty" in facts(played.task, play_back(played))[3]
