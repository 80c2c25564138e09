"""What the text tells without Java, and that the real game agrees with it."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.textworld_express import text
from dreamgym_lg.integrations.textworld_express.text import UNKNOWN_ACTION, Check, check_action
from dreamgym_lg.types import Step, Task, Trajectory

PLAYED = ("peckingorder", "twc")
ROOMS = "numLocations=3,numItemsToPutAway=4,includeDoors=1,limitInventorySize=1"
FOLDS = ("train", "dev", "test")
CHECKS: tuple[Check, ...] = ("names", "state")

HALL = (
    "You are in the hall. In one part of the room you see a shelf, that has nothing on it. There is also a wardrobe "
    "that is closed. You also see a gray cap. To the North you see a closed wood door."
)


def random_play(environment: Any, task: Task, rng: Random) -> Iterator[list[str]]:
    """The observations so far, before each step of a random valid episode."""
    seen = [environment.reset(task)]
    over = False
    while not over:
        yield seen
        result = environment.step(rng.choice(environment.valid_actions()))
        seen.append(result.observation)
        over = result.terminated or result.truncated


def test_text_needs_nothing_installed_and_the_environment_says_what_it_needs() -> None:
    script = (
        "import sys; sys.modules.update(py4j=None, textworld_express=None)\n"
        "import dreamgym_lg.integrations.textworld_express.text\n"
        "try: import dreamgym_lg.integrations.textworld_express.environment\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert re.match(r"MissingDependency textworld-express .*pip install 'dreamgym-lg\[textworld\]'", said)


# --- the action check -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("game", "params"), [*((game, text.GAMES[game]) for game in text.STATE_KNOWN), ("twc", ROOMS)])
def test_no_check_rejects_a_valid_action_and_state_knows_all_of_them(
    environment: Any, world: Callable[..., Task], game: str, params: str
) -> None:
    rng = Random(0)
    for seed in range(100):
        task = world(game, seed * 13 - 500, params=params, fold=FOLDS[seed % 3])
        for seen in random_play(environment, task, rng):
            valid = environment.valid_actions()
            assert [pair for pair in product(valid, CHECKS) if check_action(game, pair[0], seen, check=pair[1])] == []
            room = text._follow(seen)
            assert room is not None and text._possible(game, room) == set(valid), seen


@pytest.mark.parametrize("game", [game for game in text.GAMES if game not in PLAYED])
def test_no_check_rejects_a_valid_action_of_the_other_games(environment: Any, world: Callable[..., Task], game: str) -> None:
    rng = Random(1)
    for seed in range(25):
        for seen in random_play(environment, world(game, seed), rng):
            valid = environment.valid_actions()
            assert [pair for pair in product(valid, CHECKS) if check_action(game, pair[0], seen, check=pair[1])] == []


@pytest.mark.parametrize("game", PLAYED)
@pytest.mark.parametrize(("kind", "share"), [("noisy", 0.75), ("malformed", 0.9), ("fluent_wrong", 0.35), ("mixture", 0.8)])
def test_names_catches_most_invalid_actions_and_state_all(
    environment: Any,
    training: dict[str, list[Task]],
    monkeypatch: pytest.MonkeyPatch,
    game: str,
    kind: str,
    share: float,
) -> None:
    """`share` is a little less than what was measured on these very episodes."""
    from dreamgym_lg.integrations.textworld_express.world import POLICIES

    monkeypatch.setattr(environment, "check_action", lambda action, seen: None)  # the real game judges everything
    refused: dict[str, list[bool]] = {"names": [], "state": []}
    for trajectory in POLICIES.trajectories(training[game], environment, episodes={kind: 100}, seed=5):
        seen = [trajectory.steps[0].observation]
        for step in trajectory.steps:
            answers = {check: check_action(game, step.action, seen, check=check) for check in CHECKS}
            if step.valid:
                assert answers == {"names": None, "state": None}
            else:
                for check, answer in answers.items():
                    refused[check].append(answer == step.next_observation == UNKNOWN_ACTION)
            seen.append(step.next_observation)
    assert len(refused["names"]) > 50 and all(refused["state"])
    assert share <= sum(refused["names"]) / len(refused["names"]) < 1


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("game", PLAYED)
def test_without_a_described_room_forms_and_names_are_known(game: str, check: Check) -> None:
    seen = ["A brown hat, dirty gray shoes and a shelf."]
    refused = ["take brown shoes", "take shoe", "fly", "put hat", "put brown hat on shelf", "put hat in wardrobe", ""]
    assert [action for action in refused if check_action(game, action, seen, check=check) is None] == []
    for action in ("take brown hat", "take shoes", "put brown hat in shelf", "look around", " inventory "):
        assert check_action(game, action, seen, check=check) is None


def test_state_follows_what_is_held_and_open() -> None:
    story = [
        (HALL, "take gray cap", "put gray cap in shelf"),
        ("You take the gray cap.", "put gray cap in shelf", "take gray cap"),
        ("You open the wardrobe. It's empty inside.", "put gray cap in wardrobe", "open wardrobe"),
        ("You put the gray cap in the wardrobe.", "take gray cap", "put gray cap in wardrobe"),
        ("You close the wardrobe.", "open wardrobe", "take gray cap"),
        ("You open the wardrobe. The wardrobe contains a gray cap.", "take gray cap", "take brown cap"),
        (UNKNOWN_ACTION, "open door to north", "move south"),
        ("You take the brown cap.", "put brown cap in shelf", "put brown cap on shelf"),  # a dream may say so
        ("What nobody ever wrote.", "take gray cap", "read shelf"),
    ]
    seen: list[str] = []
    for observation, valid, invalid in story:
        seen.append(observation)
        assert [check_action("twc", valid, seen, check=check) for check in CHECKS] == [None, None], (seen, valid)
        assert check_action("twc", invalid, seen, check="state") == UNKNOWN_ACTION, (seen, invalid)


def test_names_leaves_what_is_held_and_open_to_the_game() -> None:
    for action in ("put gray cap in shelf", "put gray cap in wardrobe", "close wardrobe", "move south", "read shelf"):
        assert check_action("twc", action, [HALL]) is None
        assert check_action("twc", action, [HALL], check="state") == UNKNOWN_ACTION
    for action in ("take brown cap", "take gray", "put gray cap on shelf", "gray cap", "take", "take caps"):
        expected = None if action == "take gray" else UNKNOWN_ACTION  # part of a name is words that were seen
        assert check_action("twc", action, [HALL]) == expected, action


def test_two_things_of_one_name_are_two() -> None:
    room = "You are in the hall. In one part of the room you see a shelf that has a lime, and a lime on it."
    one, both = [room, "You take the lime."], [room, "You take the lime.", "You take the lime."]
    assert check_action("peckingorder", "take lime", one, check="state") is None
    assert check_action("peckingorder", "take lime", both, check="state") == UNKNOWN_ACTION
    assert check_action("peckingorder", "put lime in shelf", both, check="state") is None


def test_unknown_game_and_unknown_check() -> None:
    with pytest.raises(ConfigurationError, match="unknown game 'twcc'.*Did you mean 'twc'"):
        check_action("twcc", "look around", [])
    with pytest.raises(ConfigurationError, match="unknown check 'stat'.*Did you mean 'state'"):
        check_action("twc", "look around", [], check="stat")  # type: ignore[arg-type]


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_split_shares() -> None:
    splits = [text.world_split(f"world {number}") for number in range(4000)]
    assert 0.13 < splits.count("test") / 4000 < 0.17 and 0.08 < splits.count("validation") / 4000 < 0.12
    assert text.world_split("a  world\n") == text.world_split(" a world")
    assert text.world_split("any", test_share=1.0) == "test"
    assert text.world_split("any", test_share=0.0, validation_share=0.0) == "train"


@pytest.mark.parametrize("game", PLAYED)
def test_varied_tasks_are_training_worlds_with_known_items(training: dict[str, list[Task]], game: str) -> None:
    parents = {task.id: task for task in training[game]}
    observations = [task.observation for task in parents.values()]
    known = {item for observation in observations for item in text.movable_items(observation)}
    varied = [text.vary_task(task, Random(seed), observations) for seed, task in enumerate(parents.values())]
    found = [task for task in varied if task is not None]
    assert len(found) > len(parents) / 2
    for task in found:
        assert task.parent_id is not None
        before, after = parents[task.parent_id].observation, task.observation
        items = text.movable_items(after)
        assert (task.split, task.origin, text.world_split(after)) == ("train", "synthetic", "train")
        assert task.seed is None and task.id not in parents
        own = text.movable_items(before)
        assert len(items) == len(set(items)) == len(own)
        assert set(items) <= known and len(set(items) & set(own)) == len(own) // 2
        assert all(check_action(game, f"take {item}", [after], check="state") is None for item in items)
    assert len({task.id for task in found}) == len({task.observation for task in found})


def test_a_variation_keeps_what_the_task_failed_on() -> None:
    shown = "You are in the hall. In one part of the room you see a shelf that has {} on it. You also see an instructions book."
    own, other = "a grape, a grapefruit, a pear, and an apple", "a fig, a plum, a lime, and a kiwi"
    metadata, seen = {"game": "peckingorder", "params": ""}, shown.format(own)
    task = Task(id="t", instruction="", environment="textworld_express/peckingorder", observation=seen, metadata=metadata)
    asked, refused = "The current task is to take the grapefruit.", UNKNOWN_ACTION
    steps = (
        Step(observation=shown.format(own), action="take pear", next_observation="You take the pear.", reward=0.25),
        Step(observation="You take the pear.", action="read instructions book", next_observation=asked),
        Step(observation=asked, action="look around", next_observation=shown.format(own)),
        Step(observation=shown.format(own), action="take grape", next_observation=refused, valid=False, truncated=True),
    )
    failed = Trajectory(task=task, steps=steps, success=False, source="synthetic")
    elsewhere = replace(failed, task=replace(task, id="another"))
    assert text.failed_on(task, [failed]) == {"grape", "grapefruit"}
    assert text.failed_on(task, [replace(failed, success=True), elsewhere]) == set()
    everything = text.movable_items(shown.format(own))
    back = Step(observation=asked, action="put pear in shelf", next_observation="You put the pear in the shelf.", reward=-0.25)
    assert text.failed_on(task, [replace(failed, steps=[steps[0], back])]) == {"pear"}
    three = [text.vary_task(task, Random(seed), [shown.format(other)], keep=everything[:3]) for seed in range(20)]
    assert {3} == {len(set(everything) & set(text.movable_items(each.observation))) for each in three if each}
    for keep, kept in ((text.failed_on(task, [failed]), {"grape", "grapefruit"}), (everything, set())):
        varied = (text.vary_task(task, Random(seed), [shown.format(other)], keep=keep) for seed in range(20))
        items = [set(text.movable_items(each.observation)) for each in varied if each is not None]
        assert len(items) > 5 and all(kept <= found and len(found & {"fig", "plum", "lime", "kiwi"}) == 2 for found in items)


def test_nothing_to_vary() -> None:
    metadata = {"game": "twc", "params": ""}
    task = Task(id="t", instruction="", environment="textworld_express/twc", observation=HALL, metadata=metadata)
    changes = {"observation": "You are in the hall."}, {"observation": "Nothing."}, {"metadata": {"game": "coin"}}
    for change in changes:
        assert text.vary_task(replace(task, **change), Random(0), [HALL]) is None
    assert text.vary_task(task, Random(0), [HALL]) is None
    with pytest.raises(ConfigurationError, match="would leak the evaluation"):
        text.vary_task(replace(task, split="test"), Random(0), [HALL])
