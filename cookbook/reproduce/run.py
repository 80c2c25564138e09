"""The rows of an honest proof, cell by cell: one command, which goes on where it was.

Run: python cookbook/reproduce/run.py --list                            (every cell in its order, and what is done)
     python cookbook/reproduce/run.py --minutes 60                      (run cells; start no new one after an hour)
     python cookbook/reproduce/run.py --only 'library.rft.*' --seeds 4  (by pattern; --only may be given several times)
     python cookbook/reproduce/run.py --worlds clinic                   (another desk by somebody else)
     python cookbook/reproduce/run.py --worlds twc                      (a text game, trained by GRPO)
     python cookbook/reproduce/run.py --quick --only library.rft.dream.seed3   (minutes, in folders of its own; proves nothing)

A cell is a world, a learner, the place of its training and a seed. Its folders are under --runs, its figures in
results/CELL.json, from which results/RESULTS.md is made anew after each. README.md says what is compared and how.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from tables import write_tables

from dreamgym_lg import Experiment, ReplayBuffer, Task, load_traces
from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.experiment.evaluation import play_policies
from dreamgym_lg.experiment.settings import WITH_REAL_PART, Place, Settings
from dreamgym_lg.learner import LearnerName

HERE = Path(__file__).parent
LEARNERS: Mapping[str, tuple[LearnerName, ...]] = {
    **dict.fromkeys(("desk", "library", "clinic", "parking"), ("rft", "grpo")),
    **dict.fromkeys(("twc", "peckingorder", "alfworld"), ("grpo",)),
}
"""By world."""
CellPlace = Place | Literal["model"]
PLACES: Mapping[str, tuple[CellPlace, ...]] = {
    "rft": ("dream", "model", "s2r", "real"),
    "grpo": ("dream", "s2r", "dream+real", "real"),
}
"""By learner. `model`: the usual dream, of recorded answers and the experience model, which judges too. One iteration of
second tries leaves nothing to alternate."""
REAL_STEPS = 800
"""Of the real part of `s2r` and `dream+real`, which ends in the iteration that reaches them."""
EPISODES = {"desk": 200, "library": 100, "clinic": 100, "parking": 100}
"""Recorded ones, of which a quarter to a half succeed."""
REQUESTS = 200
"""Further training requests of a desk, of which nothing is recorded but what is right."""
SECOND_TRIES: Mapping[str, Any] = {"num_generations": 4, "base_steps": 200}
"""On a desk, beside its own settings. Every imitation, the baselines' too, takes as many steps."""
GRPO: Mapping[str, Any] = {"learner": "grpo", "iterations": 12, "num_tasks": 16, "evaluate_every": 4}
"""On a desk, of all recorded tickets, judged by the desk's own check."""
QUICK: Mapping[str, Any] = {
    "tasks": 120, "batch_size": 4, "experience_steps": 4, "base_steps": 8, "evaluate_tasks": 2, "proof_tasks": 2,
    "iterations": 1, "num_tasks": 2, "num_generations": 2,
}  # fmt: skip


class Cell(NamedTuple):
    """A policy trained by a learner in one place, with all baselines of its data."""

    world: str
    learner: LearnerName
    place: CellPlace
    seed: int

    def __str__(self) -> str:
        return f"{self.world}.{self.learner}.{self.place}.seed{self.seed}"


def matching(worlds: Sequence[str], seeds: Sequence[int], patterns: Sequence[str]) -> list[Cell]:
    """The cells whose names fit one of the patterns, or all; one seed after the other.

    Raises `ConfigurationError` for a pattern that fits none.
    """
    kinds = [(world, learner, place) for world in worlds for learner in LEARNERS[world] for place in PLACES[learner]]
    cells = [Cell(*kind, seed) for seed, kind in product(seeds, kinds)]
    for pattern in patterns:
        if not any(fnmatch(str(cell), pattern) for cell in cells):
            raise ConfigurationError(f"--only {pattern!r} fits none of the {len(cells)} cells; --list shows their names")
    return [cell for cell in cells if not patterns or any(fnmatch(str(cell), pattern) for pattern in patterns)]


def open_experiment(cell: Cell, folder: Path, own: Mapping[str, Any]) -> Experiment:
    """The experiment in a folder of this cell. Args: `own`, settings in place of the world's.

    No training ends early and no dream is refused: that it lies is a result here.
    """
    settings = {
        **{"seed": cell.seed, "environment": "dream" if cell.place == "model" else cell.place},
        **{"real_steps": REAL_STEPS if cell.place in WITH_REAL_PART else None},
        **{"max_false_success": None, "max_gap": None, "stop_after_uniform": 0, **own},
    }
    if cell.world in EPISODES:
        rft = {"num_tasks": EPISODES[cell.world] + REQUESTS, **SECOND_TRIES}
        settings = {**rft, **(GRPO if cell.learner == "grpo" else {}), **settings}
        compiled = cell.place != "model"
        if cell.world == "desk":
            return _open_desk(folder, settings, compiled=compiled)
        return _open_outsiders_desk(cell.world, folder, settings, compiled=compiled)
    if cell.world == "alfworld":
        from dreamgym_lg.integrations.alfworld.world import ALFWorldWorld

        world: Any = ALFWorldWorld(family="pick_and_place_simple", max_steps=12)
    else:
        from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld

        world = TextWorldExpressWorld(cell.world)
    return Experiment(world, folder, replace(world.settings, **settings))


def _training_tasks(buffer: ReplayBuffer, tasks: Iterable[Task], seed: int) -> list[Task]:
    """The recorded tasks, and `REQUESTS` others of these."""
    recorded = {each.task.instruction: each.task for each in buffer.trajectories(source="offline")}
    others = [task for task in tasks if task.split == "train" and task.instruction not in recorded]
    return [*recorded.values(), *Random(seed).sample(others, REQUESTS)]


def _open_desk(folder: Path, settings: Mapping[str, Any], *, compiled: bool) -> Experiment:
    sys.path.insert(0, str(HERE.parent / "support_desk"))
    from glue import SETTINGS, create_gym
    from old_policy import write_traces
    from story import MANY_HELD_OUT, imputed_dream
    from story import SECOND_TRIES as OWN
    from tickets import Shop, create_shop

    folder.mkdir(parents=True, exist_ok=True)
    seed, episodes = settings["seed"], EPISODES["desk"]
    tasks = create_shop(folder / "shop.db", seed=seed, train=episodes + REQUESTS, **MANY_HELD_OUT)
    shop = Shop(folder / "shop.db")
    if not (folder / "traces.jsonl").exists():
        write_traces(folder / "traces.jsonl", shop, tasks[:episodes], seed=seed)
    replay_buffer = ReplayBuffer(folder / "replay.db")
    replay_buffer.extend(load_traces(folder / "traces.jsonl", environment="desk"))
    dream = imputed_dream(folder, shop, seed) if compiled else None
    training = _training_tasks(replay_buffer, tasks, seed)
    chosen: Settings = replace(SETTINGS, **{**OWN, **settings})
    held_out = [task for task in tasks if task.split != "train"]
    return create_gym(shop, [*training, *held_out], folder, dream=dream, settings=chosen).experiment


def _open_outsiders_desk(name: str, folder: Path, settings: Mapping[str, Any], *, compiled: bool) -> Experiment:
    sys.path.insert(0, str(HERE.parent / "desks"))
    from glue import SECOND_TRIES as OWN
    from glue import Desk, compile_dream, read_logs

    seed = settings["seed"]
    desk = Desk(name, folder, seed=seed)
    buffer = read_logs(desk, EPISODES[name], seed)
    dream = compile_dream(desk, buffer) if compiled else None
    if dream and name == "library":  # of the others nobody knows what is right in another state
        from library_states import imputed_dream

        dream = imputed_dream(desk, dream, buffer, seed)
    training = _training_tasks(buffer, desk.tasks("train"), seed)
    return desk.create_gym(buffer, dream, training, settings=Settings(**{**OWN, **settings})).experiment


def run_cell(cell: Cell, runs: Path, results: Path, own: Mapping[str, Any]) -> None:
    """Everything of a cell that is not done yet; writes `results/CELL.json`. Killed at any moment, the same call goes on.

    Data, experience model and baselines are those of all cells of a world and a seed.
    """
    shared, folder = (runs / f"{cell.world}-seed{cell.seed}" / name for name in ("shared", f"{cell.learner}-{cell.place}"))
    if not folder.exists():
        first = open_experiment(cell._replace(learner=LEARNERS[cell.world][0], place="dream"), shared, own)
        first.prepare()
        play_policies(first)  # of which no cell's folder plays one again
        first.replay_buffer.close()
        draft = folder.with_name(f"{folder.name}.draft")  # made whole or not at all
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(shared, draft, ignore=shutil.ignore_patterns("settings.json"))
        draft.rename(folder)
    run = open_experiment(cell, folder, own)
    if cell.place == "model":
        run.train_experience()  # which the dream of the shared folder does not need
    run.advise()
    run.train()
    figures = {"cell": str(cell), **cell._asdict(), **run.prove(), "world": cell.world}
    run.replay_buffer.close()
    results.mkdir(parents=True, exist_ok=True)
    (draft := results / f"{cell}.draft").write_text(json.dumps(figures, indent=1) + "\n")
    draft.rename(results / f"{cell}.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that are not done yet; returns the exit status, 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the cells in their order, and which are done")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cells by name, like 'desk.*'")
    parser.add_argument("--minutes", type=float, help="start no new cell after so many minutes")
    parser.add_argument("--worlds", nargs="+", default=["desk", "library"], choices=LEARNERS, help="default: desk library")
    seeds = "default: 3 4 5; the recipes were found on 1 and 2"
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4, 5], metavar="SEED", help=seeds)
    parser.add_argument("--model", default=Settings.model, help="start of policy and experience model")
    parser.add_argument("--runs", type=Path, default=Path("runs/reproduce"), help="where folders are")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where figures go")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.results = options.runs / "quick", options.runs / "quick" / "results"
    own = {"model": options.model, **(QUICK if options.quick else {})}
    try:
        cells = matching(options.worlds, options.seeds, options.only)
    except DreamGymError as error:
        print(f"error: {error}")
        return 2
    if options.cell:
        return _run_one(next(cell for cell in cells if str(cell) == options.cell), options, own)
    todo = [cell for cell in cells if not (options.results / f"{cell}.json").exists()]
    if options.list:
        print(*(f"{'' if cell in todo else 'done':5}{cell}" for cell in cells), sep="\n")
    print(f"{len(cells) - len(todo)} of {len(cells)} cells are done", flush=True)
    return 0 if options.list else _run(todo, options.minutes, sys.argv[1:] if arguments is None else arguments)


def _run(todo: Sequence[Cell], at_most: float | None, arguments: Sequence[str]) -> int:
    """Each in a process of its own: the desks have modules of the same names."""
    begun, failed = time.monotonic(), 0
    for number, cell in enumerate(todo):
        minutes = (time.monotonic() - begun) / 60
        if at_most is not None and minutes >= at_most:
            print(f"{minutes:.0f} minutes are over: {len(todo) - number} cells are left, and the same command goes on")
            break
        print(f"{number + 1} of {len(todo)}: {cell}, after {minutes:.0f} minutes", flush=True)
        failed |= subprocess.run([sys.executable, __file__, *arguments, "--cell", str(cell)]).returncode != 0
    return int(failed)


def _run_one(cell: Cell, options: argparse.Namespace, own: Mapping[str, Any]) -> int:
    try:
        run_cell(cell, options.runs, options.results, own)
        write_tables(options.results)
    except DreamGymError as error:
        print(f"{cell} failed, and the next command tries it again: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
