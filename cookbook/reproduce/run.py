"""The rows of an honest proof, cell by cell: one command, which goes on where it was.

Run: python cookbook/reproduce/run.py --list                        (every cell in its order, and what is done)
     python cookbook/reproduce/run.py --minutes 60                  (run cells; start no new one after an hour)
     python cookbook/reproduce/run.py --only 'twc.*' --seeds 0 1 2  (by pattern; --only may be given several times)
     python cookbook/reproduce/run.py --quick --only twc.real.seed0 (minutes, in folders of its own; proves nothing)

A cell is a world, the place of its training and a seed. Its folders are under --runs, its figures in results/CELL.json, from
which results/RESULTS.md is made anew after each. README.md says what is compared and how.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tables import write_tables

from dreamgym_lg import Experiment
from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.experiment.settings import Place, Settings

HERE = Path(__file__).parent
WORLDS = ("desk", "twc", "peckingorder", "alfworld")
PLACES: tuple[Place, ...] = ("dream", "s2r", "real")
REAL_STEPS = 800
"""Of the real part of S2R, which ends in the iteration that reaches them."""
TRACES = 500
"""Of the support desk."""
QUICK: Mapping[str, Any] = {
    "tasks": 120, "batch_size": 4, "experience_steps": 4, "base_steps": 12, "evaluate_tasks": 2, "proof_tasks": 4,
    "iterations": 1, "num_tasks": 2, "num_generations": 2,
}  # fmt: skip


class Cell(NamedTuple):
    """A policy trained in one place, with all baselines of its data."""

    world: str
    place: Place
    seed: int

    def __str__(self) -> str:
        return f"{self.world}.{self.place}.seed{self.seed}"


def matching(worlds: Sequence[str], seeds: Sequence[int], patterns: Sequence[str]) -> list[Cell]:
    """The cells whose names fit one of the patterns, or all; one seed after the other.

    Raises `ConfigurationError` for a pattern that fits none.
    """
    cells = [Cell(world, place, seed) for seed, world, place in product(seeds, worlds, PLACES)]
    for pattern in patterns:
        if not any(fnmatch(str(cell), pattern) for cell in cells):
            raise ConfigurationError(f"--only {pattern!r} fits none of the {len(cells)} cells; --list shows their names")
    return [cell for cell in cells if not patterns or any(fnmatch(str(cell), pattern) for pattern in patterns)]


def open_experiment(cell: Cell, folder: Path, own: Mapping[str, Any]) -> Experiment:
    """The experiment in a folder of this cell. Args: `own`, settings in place of the world's.

    No training ends early and no dream is refused: that it lies is a result here.
    """
    settings = {
        **{"seed": cell.seed, "environment": cell.place, "real_steps": REAL_STEPS if cell.place == "s2r" else None},
        **{"max_false_success": None, "max_gap": None, "stop_after_uniform": 0, **own},
    }
    if cell.world == "desk":
        return _open_desk(cell, folder, settings)
    if cell.world == "alfworld":
        from dreamgym_lg.integrations.alfworld.world import ALFWorldWorld

        world: Any = ALFWorldWorld(family="pick_and_place_simple", max_steps=12)
    else:
        from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld

        world = TextWorldExpressWorld(cell.world)
    return Experiment(world, folder, replace(world.settings, **settings))


def _open_desk(cell: Cell, folder: Path, settings: Mapping[str, Any]) -> Experiment:
    sys.path.insert(0, str(HERE.parent / "support_desk"))
    from glue import SETTINGS, create_gym
    from old_policy import write_traces
    from tickets import Shop, create_shop

    folder.mkdir(parents=True, exist_ok=True)
    tasks = create_shop(folder / "shop.db", seed=cell.seed, train=TRACES)
    shop = Shop(folder / "shop.db")
    if not (folder / "traces.jsonl").exists():
        write_traces(folder / "traces.jsonl", shop, [task for task in tasks if task.split == "train"], seed=cell.seed)
    # recorded successes judge: as a judge its experience model is refused
    chosen: Settings = replace(SETTINGS, references_only=cell.place != "real", **settings)
    return create_gym(shop, [task for task in tasks if task.split != "train"], folder, settings=chosen).experiment


def run_cell(cell: Cell, runs: Path, results: Path, own: Mapping[str, Any]) -> None:
    """Everything of a cell that is not done yet; writes `results/CELL.json`. Killed at any moment, the same call goes on.

    Data, experience model and baselines are those of all places of a world and a seed.
    """
    shared, folder = (runs / f"{cell.world}-seed{cell.seed}" / name for name in ("shared", cell.place))
    if not folder.exists():
        first = open_experiment(cell._replace(place="dream"), shared, own)
        first.prepare()
        first.replay_buffer.close()
        draft = folder.with_name(f"{folder.name}.draft")  # made whole or not at all
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(shared, draft, ignore=shutil.ignore_patterns("settings.json"))
        draft.rename(folder)
    run = open_experiment(cell, folder, own)
    run.train()
    figures = {"cell": str(cell), "place": cell.place, **run.prove()}
    run.replay_buffer.close()
    results.mkdir(parents=True, exist_ok=True)
    (draft := results / f"{cell}.draft").write_text(json.dumps(figures, indent=1) + "\n")
    draft.rename(results / f"{cell}.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that are not done yet; returns the exit status, 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the cells in their order, and which are done")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cells by name, like 'twc.*'")
    parser.add_argument("--minutes", type=float, help="start no new cell after so many minutes")
    parser.add_argument("--worlds", nargs="+", default=WORLDS[:-1], choices=WORLDS, help="default: all but alfworld")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED", help="default: 0 1 2")
    parser.add_argument("--model", default=Settings.model, help="start of policy and experience model")
    parser.add_argument("--runs", type=Path, default=Path("runs/reproduce"), help="where folders are")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where figures go")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.results = options.runs / "quick", options.runs / "quick" / "results"
    own = {"model": options.model, **(QUICK if options.quick else {})}
    try:
        cells = matching(options.worlds, options.seeds, options.only)
    except DreamGymError as error:
        print(f"error: {error}")
        return 2
    todo = [cell for cell in cells if not (options.results / f"{cell}.json").exists()]
    if options.list:
        print(*(f"{'' if cell in todo else 'done':5}{cell}" for cell in cells), sep="\n")
    print(f"{len(cells) - len(todo)} of {len(cells)} cells are done")
    return 0 if options.list else _run(todo, options, own)


def _run(todo: Sequence[Cell], options: argparse.Namespace, own: Mapping[str, Any]) -> int:
    begun, failed = time.monotonic(), 0
    for number, cell in enumerate(todo):
        minutes = (time.monotonic() - begun) / 60
        if options.minutes is not None and minutes >= options.minutes:
            print(f"{minutes:.0f} minutes are over: {len(todo) - number} cells are left, and the same command goes on")
            break
        print(f"{number + 1} of {len(todo)}: {cell}, after {minutes:.0f} minutes", flush=True)
        try:
            run_cell(cell, options.runs, options.results, own)
            write_tables(options.results)
        except DreamGymError as error:
            print(f"{cell} failed, and the next command tries it again: {error}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
