"""Games as tasks, and what their text says: without the engine."""

import json
import lzma
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.alfworld.data import load_tasks, usual_places, walkthrough
from dreamgym_lg.integrations.alfworld.text import (
    NOTHING_HAPPENS,
    Goal,
    check_action,
    first_observation,
    follow,
    goal_of,
    likely_order,
    names,
)
from dreamgym_lg.types import Task

KINDS = {"pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"} | {
    f"pick_{how}_then_place_in_recep" for how in ("clean", "heat", "cool")
}


def test_tasks_tell_the_game_and_no_solution(tasks: list[Task]) -> None:
    assert len({task.id for task in tasks}) == 8 and {task.metadata["type"] for task in tasks} == KINDS
    for task in tasks:
        assert task.instruction.startswith("Your task is to: ") and "\n" not in task.instruction
        kept = json.dumps(dict(task.metadata))
        assert json.loads(kept) == task.metadata
        assert not any(action in kept + task.instruction for action in walkthrough(task))
    spray = next(task for task in tasks if "SprayBottle" in task.id)
    assert spray.instruction == "Your task is to: put a spraybottle in toilet."
    assert walkthrough(spray)[1] == "take spraybottle 1 from sidetable 1"


def test_evaluation_games_are_test_tasks_and_never_training_tasks(tasks: list[Task]) -> None:
    found = sorted((str(task.metadata["official_split"]), task.split) for task in tasks)
    others = [("train", "validation"), ("valid_seen", "test"), ("valid_train", "train"), ("valid_unseen", "test")]
    assert found == [*[("train", "train")] * 4, *others]


def test_the_order_is_fixed_and_a_larger_limit_gives_more_of_it(packed: Path, tasks: list[Task], folder: Path) -> None:
    assert load_tasks(packed, limit=3) == tasks[:3] and load_tasks(packed, limit=99) == tasks
    assert load_tasks(packed, split="test") == [task for task in tasks if task.split == "test"]
    unseen = load_tasks(packed, official_split="valid_unseen", split="test")
    assert [task.metadata["official_split"] for task in unseen] == ["valid_unseen"]


@pytest.mark.parametrize("inside", ["", "json_2.1.1"])
def test_a_downloaded_folder_gives_the_same_tasks(folder: Path, tasks: list[Task], inside: str) -> None:
    path = str(folder / "json_2.1.1")
    assert load_tasks(folder / inside) == [replace(task, metadata={**task.metadata, "path": path}) for task in tasks]
    assert [walkthrough(task) for task in load_tasks(folder)] == [walkthrough(task) for task in tasks]


def test_what_is_no_file_of_games_is_said_to_be_none(tmp_path: Path, packed: Path, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere does not exist; name the folder"):
        load_tasks(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="holds no game"):
        load_tasks(tmp_path)
    foreign = {"plain.xz": b"plain", "other.xz": lzma.compress(b'{"a": 1}\n'), "empty.xz": lzma.compress(b"")}
    foreign["cut.xz"] = packed.read_bytes()[:15_000]
    foreign["lacks.xz"] = lzma.compress(lzma.decompress(packed.read_bytes()).split(b"\n")[0] + b'\n{"id": "a"}\n')
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigurationError, match=f"{name} is no packed file of ALFWorld games"):
            load_tasks(tmp_path / name)
    shutil.copytree(folder, tmp_path / "damaged")
    next((tmp_path / "damaged").rglob("game.tw-pddl")).write_text('{"grammar": ""}')
    with pytest.raises(ConfigurationError, match="is no game of ALFWorld.*alfworld-download"):
        load_tasks(tmp_path / "damaged")


def test_an_unknown_split_and_a_limit_of_nothing_are_refused(packed: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown split 'valid_seen'"):
        load_tasks(packed, split="valid_seen")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="unknown official split 'valid_sen'.*Did you mean 'valid_seen'"):
        load_tasks(packed, official_split="valid_sen")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="limit=0; allowed: 1 or more"):
        load_tasks(packed, limit=0)


def test_a_task_without_a_game_is_refused(tasks: list[Task]) -> None:
    bare = replace(tasks[0], metadata={})
    strange = replace(tasks[0], id="pick_and_place_simple-Mug-None-Desk-9/trial_T1")
    moved = replace(tasks[0], metadata={**tasks[0].metadata, "path": "/nowhere/games.jsonl.xz"})
    with pytest.raises(ConfigurationError, match=r"lacks metadata\['path'\]"):
        walkthrough(bare)
    with pytest.raises(ConfigurationError, match="is synthetic"):
        walkthrough(replace(tasks[0], origin="synthetic"))
    with pytest.raises(ConfigurationError, match="holds no game 'pick_and_place_simple-Mug"):
        walkthrough(strange)
    with pytest.raises(ConfigurationError, match="/nowhere/games.jsonl.xz does not exist"):
        walkthrough(moved)


def test_things_of_a_kind_are_numbered_downwards() -> None:
    places = ("Drawer_bar__minus_01", "Sink_bar__plus_02_bar_SinkBasin", "drawer_bar__plus_01", "Bed_bar__plus_00")
    problem = "".join(f"(receptacleAtLocation {place} loc_1)\n" for place in places) + "(receptacleAtLocation ?r ?l)"
    assert first_observation(problem).endswith("you see a bed 1, a drawer 2, a drawer 1, and a sinkbasin 1.")


SEEN = ["You see a bed 1, and a drawer 12.", "On the bed 1, you see a cd 3."]


@pytest.mark.parametrize(
    "action",
    ["", "go to drawer 1", "go to drawer 2", "go to bed", "go to the bed 1", "take cd 3", "take cd 1 from bed 1",
     "grab cd 3 from bed 1", "heat cd 3", "Look", "look around", "go to bed 1 and look", "take cd 3 from bed 1, bed 1"],
)  # fmt: skip
def test_a_form_or_a_name_that_is_unheard_of_is_refused(action: str) -> None:
    assert check_action(action, SEEN) == NOTHING_HAPPENS


def test_names_are_whole_words() -> None:
    assert names(SEEN) == {"bed 1", "drawer 12", "cd 3"}


ROOM = "You are in the middle of a room. Looking quickly around you, you see a bed 1, a drawer 12, and a sinkbasin 1."
AT_BED = "You arrive at bed 1. On the bed 1, you see a cd 3, and a desklamp 1."
TAKEN = "You pick up the cd 3 from the bed 1."
AT_DRAWER = "You arrive at drawer 12. The drawer 12 is closed."
OPENED = "You open the drawer 12. The drawer 12 is open. In it, you see a pen 2."


@pytest.mark.parametrize(
    ("seen", "possible", "refused"),
    [
        ([], "go to bed 1", "take cd 3 from bed 1"),
        ([AT_BED], "take cd 3 from bed 1|use desklamp 1|examine bed 1",
         "go to bed 1|take desklamp 1 from bed 1|take pen 2 from bed 1|move cd 3 to bed 1|open bed 1|go to bed 2"),
        ([AT_BED, TAKEN], "move cd 3 to bed 1|examine cd 3",
         "take cd 3 from bed 1|move cd 3 to drawer 12|clean cd 3 with bed 1"),
        ([AT_BED, TAKEN, AT_DRAWER], "open drawer 12", "move cd 3 to drawer 12|close drawer 12|use desklamp 1"),
        ([AT_BED, TAKEN, AT_DRAWER, OPENED], "move cd 3 to drawer 12|close drawer 12",
         "open drawer 12|take pen 2 from drawer 12"),
        ([AT_BED, TAKEN, AT_DRAWER, OPENED, "You move the cd 3 to the drawer 12."],
         "take cd 3 from drawer 12|take pen 2 from drawer 12", "move cd 3 to drawer 12"),
        ([AT_DRAWER, OPENED, "You close the drawer 12."], "open drawer 12", "take pen 2 from drawer 12"),
        ([AT_BED, TAKEN, "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."],
         "clean cd 3 with sinkbasin 1", "heat cd 3 with sinkbasin 1|clean pen 2 with sinkbasin 1"),
    ],
)  # fmt: skip
def test_the_state_follows_from_the_observations(seen: list[str], possible: str, refused: str) -> None:
    for action in possible.split("|"):
        assert check_action(action, [ROOM, *seen, NOTHING_HAPPENS]) is None, action
    for action in refused.split("|"):
        assert check_action(action, [ROOM, *seen]) == NOTHING_HAPPENS, action


def test_what_was_done_to_a_thing_is_known() -> None:
    known = follow([ROOM, AT_BED, TAKEN, "You clean the cd 3 using the sinkbasin 1."])
    assert known.treated == {("clean", "cd 3")} and known.held == "cd 3" and known.contents == {"bed 1": ["desklamp 1"]}


@pytest.mark.parametrize(
    ("asked", "goal"),
    [
        ("put a vase in safe.", Goal("vase", "safe", "", 1)),
        ("put some toiletpaper on toiletpaperhanger.", Goal("toiletpaper", "toiletpaperhanger", "", 1)),
        ("put two pen in drawer.", Goal("pen", "drawer", "", 2)),
        ("find two pen and put them in drawer.", Goal("pen", "drawer", "", 2)),
        ("put a hot mug in coffeemachine.", Goal("mug", "coffeemachine", "heat", 1)),
        ("cool some egg and put it in microwave.", Goal("egg", "microwave", "cool", 1)),
        ("look at cd under the desklamp.", Goal("cd", "desklamp", "", 1)),
        ("examine the cd with the desklamp.", Goal("cd", "desklamp", "", 1)),
    ],
)
def test_the_goal_follows_from_the_instruction(asked: str, goal: Goal) -> None:
    assert goal_of(f"Your task is to: {asked}") == goal and goal_of(asked) is None


def test_every_instruction_has_a_goal(tasks: list[Task]) -> None:
    for task in tasks:
        goal = goal_of(task.instruction)
        assert goal is not None and goal.thing == task.id.split("-")[1].lower()
        assert goal.wanted.count(goal.thing) == (2 if "two" in task.id else 1)


def test_likely_places_come_early_and_others_come_too() -> None:
    places = [f"shelf {n}" for n in range(1, 10)] + ["toilet 1"]
    orders = [likely_order(places, {"toilet": 9, "shelf": 1}, seed) for seed in range(200)]
    assert all(sorted(order) == sorted(places) for order in orders)
    first = sum(order[0] == "toilet 1" for order in orders)
    assert 140 < first < 190, "0.91 of 1.1"
    assert sum(order[0] == "toilet 1" for order in (likely_order(places, {}, seed) for seed in range(200))) < 45


def test_where_things_usually_lie_is_read_from_train_games_alone(packed: Path, tasks: list[Task]) -> None:
    usual = usual_places(packed)
    assert usual["spraybottle"] == {"sidetable": 1}
    found = {task.id.split("-")[1].lower() for task in tasks if task.split == "train"}
    assert set(usual) <= found
