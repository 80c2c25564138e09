"""How far a small local experience model can be trusted on ALFWorld, and what retrieval, history and reasoning are worth to it.

Run: python cookbook/alfworld_fidelity.py GAMES --out runs/alfworld      (about half an hour on two cores; --quick: minutes)
Needs: pip install 'dreamgym-lg[alfworld,train,report]'

GAMES is the folder that `alfworld-download` made, or a packed file of its games. The first two stages of an experiment: real
trajectories of train games go into a replay buffer; the small base (2.3 M parameters) is fine-tuned on them, grounded in
retrieved real steps. Then it is put to the transitions of games that it has never seen, once whole and once without each part.
No policy is trained here.
"""

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from dreamgym_lg import Experiment, Trajectory
from dreamgym_lg.fidelity import Fidelity, measure, write_fidelity
from dreamgym_lg.fidelity.ask import ABLATIONS
from dreamgym_lg.integrations.alfworld.scripted_policies import scripted_trajectories
from dreamgym_lg.integrations.alfworld.world import ALFWorldWorld

KINDS = {"demonstration": 4, "noisy": 3, "random": 2, "malformed": 1, "fluent_wrong": 3}
"""Shares of the offline trajectories."""
MAX_STEPS = 12
"""Longer episodes do not fit what a 1 M model reads."""

console = Console()


def held_out(run: Experiment, episodes: int) -> Iterator[Trajectory]:
    """Real trajectories of games that nothing was trained on; they are stored nowhere.

    `scripted_trajectories` takes train tasks alone, so that nobody trains on these by mistake: they pass as such here.
    """
    counts = {kind: max(1, episodes * share // sum(KINDS.values())) for kind, share in KINDS.items()}
    tasks = [replace(task, split="train") for task in run.tasks("validation")]
    with closing(run.world.create_environment()) as environment:
        yield from scripted_trajectories(tasks, environment, episodes=counts, seed=1)


def show(measured: Fidelity) -> None:
    table = Table("", "observation", "token F1", "reward", "end", "invalid recall", title="held-out games: share right")
    for variant in measured.variants:
        found = variant.groups[0].one_step
        row = (found.normalised, found.token_f1, found.reward_right, found.terminated, found.invalid_recall)
        table.add_row(f"without {variant.without}" if variant.without else "whole", *map(str, row))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="An experience model of ALFWorld, measured")
    parser.add_argument("games", help="folder or packed file of ALFWorld's games")
    parser.add_argument("--out", type=Path, help="default: runs/alfworld, or runs/alfworld-quick")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see it run")
    arguments = parser.parse_args()
    out = arguments.out or Path("runs/alfworld-quick" if arguments.quick else "runs/alfworld")
    walk_through(arguments.games, out, quick=arguments.quick)


def walk_through(games: str, out: Path, *, quick: bool) -> None:
    tasks, share, held, max_steps = (40, 2, 5, 5) if quick else (75, 100, 52, MAX_STEPS)
    steps, tokens, batch = (2, 24, 4) if quick else (300, 100, 16)
    settings = replace(
        ALFWorldWorld.settings,
        tasks=tasks,
        episodes={kind: share * n for kind, n in KINDS.items()},
        experience_steps=steps,
        experience_tokens=tokens,
        batch_size=batch,
    )
    with Progress(console=console) as progress:
        bars: dict[str, TaskID] = {}

        def report(label: str, done: int, total: int) -> None:
            stage = label.split(" (")[0]
            if stage not in bars:
                bars[stage] = progress.add_task(label, total=total)
            progress.update(bars[stage], description=label, completed=done)

        run = Experiment(ALFWorldWorld(games, max_steps=max_steps), out, settings, progress=report)
        run.collect()
        run.train_experience()
        unseen = list(held_out(run, held))
        note = (
            f"ALFWorld: {len(run.offline()):,} trajectories of train games; held out: {len(unseen):,} trajectories "
            "of other games. The model was trained with all parts and is asked without one of them."
        )
        experience = run.experience(own_process=False)
        measured = measure(experience, unseen, without=ABLATIONS, on_progress=report, notes=[note])
    show(measured)
    html, figures = write_fidelity(measured, out)
    console.print(f"report: {html}\nfigures: {figures}", soft_wrap=True)


if __name__ == "__main__":
    main()
