"""The paper's comparison, filled cell by cell: one command, which goes on where it was.

Run: python cookbook/reproduce/run.py --list                              (every cell in its order, and what is done)
     python cookbook/reproduce/run.py --minutes 60                        (run cells; start no new one after an hour)
     python cookbook/reproduce/run.py --only peckingorder --seeds 0 1 2   (one world)
     python cookbook/reproduce/run.py --only 'twc.dream-*'                (by pattern; --only may be given several times)
     python cookbook/reproduce/run.py --worlds alfworld                   (needs dreamgym-lg[alfworld] and its games)
     python cookbook/reproduce/run.py --iterations 40                     (a larger budget: other cells, other tables)
     python cookbook/reproduce/run.py --quick --only dream-grpo           (minutes, in folders of its own; proves nothing)

A cell is a method on a world with a seed and a budget. Its folders are under --runs, its figures in results/CELL.json, and
results/RESULTS.md, results.csv and results.png are made anew after each. README.md says what is compared and how.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cells import DEFAULT_WORLDS, METHODS, WORLDS, Cell, all_cells, matching
from rich.table import Table

from dreamgym_lg.cli.console import console, quiet_libraries
from dreamgym_lg.errors import DreamGymError
from dreamgym_lg.progress import show_progress

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that are not done yet, each in a process of its own; returns the exit status, 1 if one failed."""
    given = _parser().parse_args(arguments)
    try:
        cells = matching(all_cells(given.worlds, given.seeds, given.iterations), given.only)
    except DreamGymError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        return 2
    if given.quick and not given.one:
        given.runs, given.results = given.runs / "quick", given.runs / "quick" / "results"
    if given.list:
        _show(cells, given.results)
        return 0
    if given.one:
        return _run_here(cells, given)
    begun, failed, todo = time.monotonic(), 0, [cell for cell in cells if not _is_done(cell, given.results)]
    console.print(f"{len(cells) - len(todo)} of {len(cells)} cells are done")
    for number, cell in enumerate(todo, start=1):
        minutes = (time.monotonic() - begun) / 60
        if given.minutes is not None and minutes >= given.minutes:
            console.print(
                f"{minutes:.0f} minutes are over: {len(todo) - number + 1} cells are left, and the same command goes on"
            )
            break
        console.rule(f"{number} of {len(todo)}: {cell}, after {minutes:.0f} minutes")
        try:
            failed += _run_apart(cell, given)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on from here", style="yellow")
            return 130
    return min(failed, 1)


def _run_apart(cell: Cell, given: argparse.Namespace) -> bool:
    """Run one cell in a process of its own, so that what it leaves in memory, or a crash, is its own; True if it failed."""
    command = [sys.executable, __file__, "--one", "--only", str(cell), "--worlds", cell.world, "--seeds", str(cell.seed)]
    command += ["--iterations", str(given.iterations), "--runs", str(given.runs), "--results", str(given.results)]
    done = subprocess.run([*command, *(["--quick"] if given.quick else [])])
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        console.print(f"[bold red]{cell} failed[/]; the next command tries it again")
    return done.returncode != 0


def _run_here(cells: Sequence[Cell], given: argparse.Namespace) -> int:
    quiet_libraries(offline=True)
    from play import TINY, Scale, run_cell
    from tables import write_tables

    try:
        for cell in cells:
            scale = TINY if given.quick else Scale()
            run_cell(cell, given.runs, given.results, scale, progress=show_progress, say=console.print)
            write_tables(given.results)
    except KeyboardInterrupt:
        return 130
    except DreamGymError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        return 2
    return 0


def _is_done(cell: Cell, results: Path) -> bool:
    return (results / f"{cell}.json").exists()


def _show(cells: Sequence[Cell], results: Path) -> None:
    table = Table("", "cell", "method", title=f"{sum(_is_done(c, results) for c in cells)} of {len(cells)} cells are done")
    for cell in cells:
        table.add_row("done" if _is_done(cell, results) else "", str(cell), METHODS[cell.method].title)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the cells in their order, and which are done")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cells by name, method or world")
    parser.add_argument("--minutes", type=float, help="start no new cell after so many minutes")
    shown = f"{', '.join(WORLDS)}; default: all but alfworld"
    parser.add_argument("--worlds", nargs="+", default=list(DEFAULT_WORLDS), choices=WORLDS, metavar="WORLD", help=shown)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED", help="default: 0 1 2")
    parser.add_argument("--iterations", type=int, default=20, help="the budget, each 64 episodes; default: 20")
    parser.add_argument("--runs", type=Path, default=Path("runs/reproduce"), help="where folders are; default: runs/reproduce")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where figures go; default: beside this file")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
