"""ALFWorld's games as tasks, from the folder of `alfworld-download` or one packed file."""

import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.game import digest
from dreamgym_lg.types import Split, Task

OFFICIAL_SPLITS = ("train", "valid_train", "valid_seen")
"""3,553, 200 and 140 games. `valid_seen` has rooms of `train`; `valid_unseen`, in other rooms, is not played."""
Family = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
"""The six types of task: `metadata["type"]`."""
FAMILIES: tuple[Family, ...] = get_args(Family)

_TASK_LINE = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)("(?:[^"\\]|\\.)*")')
_FIX = "name the folder that `alfworld-download` made ($ALFWORLD_DATA) or a packed alfworld_games.jsonl.xz"


class _Game(NamedTuple):
    id: str
    official_split: str
    instruction: str
    data: Mapping[str, Any]
    """Contents of a `game.tw-pddl`, in a packed game without domain and grammar."""


def load_tasks(path: str | Path) -> list[Task]:
    """The tasks of all splits, in a fixed order that mixes the kinds. No engine is needed.

    Official `valid_seen` games are test tasks, a tenth of the other games validation tasks, by a hash of the folder's name,
    which several games share. No solution is part of a task.

    Args:
        path: The folder of `alfworld-download`, or a packed file: one JSON object a line, xz-compressed, the first with
            the shared `pddl_domain` and `grammar`, the others `{split, id, task, walkthrough, pddl_problem}`.

    Raises `ConfigurationError` for a file or folder without games.
    """
    where = _resolve(path)
    tasks = [_task(game, where) for game in _games(where) if game.official_split in OFFICIAL_SPLITS]
    return sorted(tasks, key=lambda task: digest("alfworld", task.id))


def walkthrough(task: Task) -> list[str]:
    """The stored solution, mostly the shortest: it knows where everything is. Errors: see `game_data`."""
    return [str(action) for action in game_data(task)["walkthrough"]]


def game_data(task: Task) -> dict[str, Any]:
    """Contents of the task's `game.tw-pddl`. `ConfigurationError` if `task` is none of `load_tasks` or its file is gone."""
    missing = [key for key in ("path", "official_split") if key not in task.metadata]
    if missing or task.origin == "synthetic":
        why = f"lacks metadata[{missing[0]!r}]" if missing else "is synthetic: its world exists in the dream only"
        raise ConfigurationError(f"task {task.id} {why}; take a task of load_tasks")
    where = _resolve(str(task.metadata["path"]))
    if where.is_dir():
        return dict(_read_game(where / str(task.metadata["official_split"]) / task.id / "game.tw-pddl"))
    shared, lines = _read_packed(where)
    if task.id not in lines:
        raise ConfigurationError(f"{where} holds no game {task.id!r}; {_FIX}")
    game = json.loads(zlib.decompress(lines[task.id]))
    grammar = _TASK_LINE.sub(lambda match: match[1] + json.dumps(game["task"]), shared["grammar"])
    return {
        "pddl_domain": shared["pddl_domain"],
        "grammar": grammar,
        "pddl_problem": game["pddl_problem"],
        "solvable": True,
        "walkthrough": game["walkthrough"],
    }


# --- Reading ---------------------------------------------------------------------------------------------------------


def _resolve(path: str | Path) -> Path:
    """Absolute path of the packed file, or of the folder of the official splits."""
    where = Path(path).expanduser().resolve()
    if not where.exists():
        raise ConfigurationError(f"{where} does not exist; {_FIX}")
    return where / "json_2.1.1" if (where / "json_2.1.1").is_dir() else where


def _games(where: Path) -> Iterator[_Game]:
    if not where.is_dir():
        for line in _read_packed(where)[1].values():
            game = json.loads(zlib.decompress(line))
            yield _Game(game["id"], game["split"], game["task"], game)
        return
    files = [(name, file) for name in OFFICIAL_SPLITS for file in sorted((where / name).glob("*/trial_*/game.tw-pddl"))]
    if not files:
        raise ConfigurationError(f"{where} holds no game (<split>/<task>/trial_*/game.tw-pddl); {_FIX}")
    for official_split, file in files:
        # ALFWorld itself leaves these out
        if "movable" in file.parts[-3] or "Sliced" in file.parts[-3] or not (data := _read_game(file)).get("solvable"):
            continue
        instruction = json.loads(_TASK_LINE.search(data["grammar"])[2])  # type: ignore[index] # _read_game has looked
        yield _Game(f"{file.parts[-3]}/{file.parts[-2]}", official_split, instruction, data)


def _read_game(file: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        known = {"pddl_domain", "pddl_problem", "walkthrough"} <= data.keys() and _TASK_LINE.search(data["grammar"])
    except FileNotFoundError as error:
        raise ConfigurationError(f"{file} does not exist; {_FIX}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{file} is no game of ALFWorld ({error}); run `alfworld-download` again") from error
    if not known:
        raise ConfigurationError(f"{file} is no game of ALFWorld: keys are missing; run `alfworld-download` again")
    return data


@lru_cache(maxsize=4)
def _read_packed(file: Path) -> tuple[Mapping[str, str], Mapping[str, bytes]]:
    """The shared part of a packed file, and each game's compressed line by its id. 27 MB instead of 217."""
    try:
        with lzma.open(file) as lines:
            shared = json.loads(next(lines))
            if not _TASK_LINE.search(shared["grammar"]) or "pddl_domain" not in shared:
                raise ValueError("its first line lacks the grammar or the domain")
            games = {_packed_id(line): zlib.compress(line, 1) for line in lines}
    except (EOFError, KeyError, StopIteration, TypeError, ValueError, lzma.LZMAError) as error:
        raise ConfigurationError(f"{file} is no packed file of ALFWorld games ({error!r}); {_FIX}") from error
    if not games:
        raise ConfigurationError(f"{file} holds no game; {_FIX}")
    return shared, games


def _packed_id(line: bytes) -> str:
    game = json.loads(line)
    if missing := {"id", "split", "task", "walkthrough", "pddl_problem"} - game.keys():
        raise ValueError(f"a game lacks {sorted(missing)[0]!r}")
    return str(game["id"])


# --- Tasks -----------------------------------------------------------------------------------------------------------


def _task(game: _Game, where: Path) -> Task:
    return Task(
        id=game.id,
        instruction=game.instruction,
        environment="alfworld",
        observation=first_observation(game.data["pddl_problem"]),
        metadata={"type": game.id.split("-")[0], "official_split": game.official_split, "path": str(where)},
        split=_split(game),
    )


def first_observation(problem: str) -> str:
    """The engine's first observation, to the letter, from a PDDL problem: all receptacles."""
    identifiers = sorted({name.lower() for name in re.findall(r"\(receptacleAtLocation ([^?\s]\S*) ", problem)})
    kinds = [name.split("_bar_")[0] + ("basin" if "basin" in name else "") for name in identifiers]
    remaining = Counter(kinds)
    phrases = []
    for kind in kinds:  # ALFWorld numbers things of a kind downwards
        phrases.append(f"a {kind} {remaining[kind]}")
        remaining[kind] -= 1
    enumeration = ", ".join([*phrases[:-1], f"and {phrases[-1]}" if phrases[:-1] else phrases[-1]]) if phrases else "nothing"
    return f"You are in the middle of a room. Looking quickly around you, you see {enumeration}."


def _split(game: _Game) -> Split:
    if game.official_split == "valid_seen":
        return "test"
    # by the folder, for its games, of `train` and `valid_train` alike, ask for the same in the same room
    return "validation" if int(digest("alfworld", game.id.split("/")[0]), 16) % 10 == 0 else "train"
