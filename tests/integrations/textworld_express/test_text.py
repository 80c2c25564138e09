"""What the text tells without Java, and that the real game agrees with it."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.scripted_policies import collect_episodes
from dreamgym_lg.integrations.textworld_express import text
from dreamgym_lg.integrations.textworld_express.text import UNKNOWN_ACTION, check_action
from dreamgym_lg.types import Task

PLAYED = ("peckingorder", "twc")
ROOMS = "numLocations=3,numItemsToPutAway=4,includeDoors=1,limitInventorySize=1"
FOLDS = ("train", "dev", "test")

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


@pytest.mark.slow
def test_text_needs_nothing_installed_and_the_environment_says_what_it_needs() -> None:
    script = (
        "import sys; sys.modules.update(py4j=None, textworld_express=None)\n"
        "import dreamgym_lg.integrations.textworld_express.text\n"
        "try: import dreamgym_lg.integrations.textworld_express.environment\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert re.match(r"MissingDependency textworld-express .*pip install '\.\[textworld\]'", said)


# --- the action check -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("game", "params"), [*((game, text.GAMES[game]) for game in text.STATE_KNOWN), ("twc", ROOMS)])
def test_no_valid_action_is_refused_and_all_of_them_are_known(
    environment: Any, world: Callable[..., Task], game: str, params: str
) -> None:
    rng = Random(0)
    for seed in range(100):
        task = world(game, seed * 13 - 500, params=params, fold=FOLDS[seed % 3])
        for seen in random_play(environment, task, rng):
            valid = environment.valid_actions()
            assert [action for action in valid if check_action(game, action, seen)] == []
            room = text._follow(seen)
            assert room is not None and text._possible(game, room) == set(valid), seen


@pytest.mark.parametrize("game", [game for game in text.GAMES if game not in PLAYED])
def test_no_valid_action_of_the_other_games_is_refused(environment: Any, world: Callable[..., Task], game: str) -> None:
    rng = Random(1)
    for seed in range(25):
        for seen in random_play(environment, world(game, seed), rng):
            valid = environment.valid_actions()
            assert [action for action in valid if check_action(game, action, seen)] == []


@pytest.mark.parametrize("game", PLAYED)
@pytest.mark.parametrize("kind", ["noisy", "random"])
def test_every_invalid_action_is_refused_and_no_other(
    environment: Any, training: dict[str, list[Task]], monkeypatch: pytest.MonkeyPatch, game: str, kind: str
) -> None:
    from dreamgym_lg.integrations.textworld_express.world import create_oracle

    monkeypatch.setattr(environment, "check_action", lambda action, seen: None)  # the real game judges everything
    invalid = 0
    for trajectory in collect_episodes(create_oracle, training[game], environment, episodes={kind: 100}, seed=5):
        seen = [trajectory.steps[0].observation]
        for step in trajectory.steps:
            assert check_action(game, step.action, seen) == (None if step.valid else UNKNOWN_ACTION)
            invalid += not step.valid
            seen.append(step.next_observation)
    assert invalid > 30


@pytest.mark.parametrize("game", PLAYED)
def test_without_a_described_room_forms_and_names_are_known(game: str) -> None:
    seen = ["A brown hat, dirty gray shoes and a shelf."]
    refused = ["take brown shoes", "take shoe", "fly", "put hat", "put brown hat on shelf", "put hat in wardrobe", ""]
    assert [action for action in refused if check_action(game, action, seen) is None] == []
    for action in ("take brown hat", "take shoes", "put brown hat in shelf", "look around", " inventory "):
        assert check_action(game, action, seen) is None


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
        assert check_action("twc", valid, seen) is None, (seen, valid)
        assert check_action("twc", invalid, seen) == UNKNOWN_ACTION, (seen, invalid)


def test_what_is_not_held_or_open_is_refused_and_other_games_know_names_alone() -> None:
    for action in ("put gray cap in shelf", "put gray cap in wardrobe", "close wardrobe", "move south", "read shelf"):
        assert check_action("cookingworld", action, [HALL]) is None
        assert check_action("twc", action, [HALL]) == UNKNOWN_ACTION
    for action in ("take brown cap", "take gray", "put gray cap on shelf", "gray cap", "take", "take caps"):
        expected = None if action == "take gray" else UNKNOWN_ACTION  # part of a name is words that were seen
        assert check_action("cookingworld", action, [HALL]) == expected, action


def test_two_things_of_one_name_are_two() -> None:
    room = "You are in the hall. In one part of the room you see a shelf that has a lime, and a lime on it."
    one, both = [room, "You take the lime."], [room, "You take the lime.", "You take the lime."]
    assert check_action("peckingorder", "take lime", one) is None
    assert check_action("peckingorder", "take lime", both) == UNKNOWN_ACTION
    assert check_action("peckingorder", "put lime in shelf", both) is None


def test_unknown_game() -> None:
    with pytest.raises(ConfigurationError, match="unknown game 'twcc'.*Did you mean 'twc'"):
        check_action("twcc", "look around", [])


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_split_shares() -> None:
    splits = [text.world_split(f"world {number}") for number in range(4000)]
    assert 0.13 < splits.count("test") / 4000 < 0.17 and 0.08 < splits.count("validation") / 4000 < 0.12
    assert text.world_split("a  world\n") == text.world_split(" a world")
