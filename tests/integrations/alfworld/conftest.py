"""Eight games of ALFWorld (MIT licence), one at least of each kind and split, for all tests of this folder."""

import json
from pathlib import Path

import pytest

from dreamgym_lg.integrations.alfworld.data import game_data, load_tasks
from dreamgym_lg.types import Task


@pytest.fixture(scope="package")
def packed() -> Path:
    return Path(__file__).parent / "games.jsonl.xz"


@pytest.fixture(scope="package")
def tasks(packed: Path) -> list[Task]:
    return load_tasks(packed)


@pytest.fixture(scope="package")
def folder(tasks: list[Task], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same games as `alfworld-download` leaves them, and two that ALFWorld itself does not play."""
    root = tmp_path_factory.mktemp("alfworld")
    for task in tasks:
        write_game(root, str(task.metadata["official_split"]), task.id, game_data(task))
    sliced = "pick_and_place_simple-BreadSliced-None-Fridge-1/trial_T0"
    write_game(root, "train", sliced, game_data(tasks[0]))
    write_game(root, "train", "pick_and_place_simple-Mug-None-Desk-1/trial_T0", {**game_data(tasks[0]), "solvable": False})
    return root


def write_game(root: Path, split: str, id: str, data: dict[str, object]) -> None:
    file = root / "json_2.1.1" / split / id / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(data), encoding="utf-8")
