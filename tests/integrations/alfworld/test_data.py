"""Games as tasks, and what their text says: without the engine."""

import json
import lzma
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.alfworld.data import first_observation, load_tasks, walkthrough
from dreamgym_lg.types import Task

KINDS = {"pick_and_place_simple", "look_at_obj_in_light", "pick_two_obj_and_place"} | {
    f"pick_{how}_then_place_in_recep" for how in ("clean", "heat", "cool")
}


def test_tasks_tell_the_game_and_no_solution(tasks: list[Task]) -> None:
    assert len({task.id for task in tasks}) == 7 and {task.metadata["type"] for task in tasks} == KINDS
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
    others = [("train", "validation"), ("valid_seen", "test"), ("valid_train", "train")]  # and none of other rooms
    assert found == [*[("train", "train")] * 4, *others]


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
