"""How far a small local experience model can be trusted on ALFWorld, and what retrieval, history and reasoning are worth to it.

Run: python cookbook/alfworld_fidelity.py GAMES --out runs/alfworld      (about half an hour on two cores; --quick: minutes)
Needs: pip install 'dreamgym-lg[alfworld,train,report]'

GAMES is the folder that `alfworld-download` made, or a packed file of its games. Real trajectories of train games go into a
replay buffer; a model of 1 M parameters is trained from scratch on them, grounded in retrieved real steps; then it is put to
the transitions of games that it has never seen, once whole and once without each part. No policy is trained here.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from dreamgym_lg import ReplayBuffer, Task, Trajectory
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.training_data import to_conversation
from dreamgym_lg.fidelity import Fidelity, measure, write_fidelity
from dreamgym_lg.fidelity.ask import ABLATIONS
from dreamgym_lg.integrations.alfworld.data import load_tasks
from dreamgym_lg.integrations.alfworld.environment import ALFWorld
from dreamgym_lg.integrations.alfworld.scripted_policies import scripted_trajectories
from dreamgym_lg.integrations.transformers import LocalChatModel
from dreamgym_lg.integrations.transformers.tiny_models import create_model, create_tokenizer
from dreamgym_lg.integrations.trl.sft import fine_tune, save_model

KINDS = {"demonstration": 4, "noisy": 3, "random": 2, "malformed": 1, "fluent_wrong": 3}
"""Shares of the offline trajectories."""
AT_ONCE = 30
"""Games played in turn: a game is translated for a second, and the engine remembers 32 of them."""
MAX_STEPS = 12
"""A 1 M model reads two thousand tokens: longer episodes are left out of what it learns, not cut."""
MAX_TOKENS = 4096

console = Console()


def play(tasks: Sequence[Task], episodes: int, environment: ALFWorld, progress: Progress, label: str) -> list[Trajectory]:
    """Real trajectories in the shares of KINDS.

    `scripted_trajectories` takes train tasks alone, so held-out ones pass as such here and are stored nowhere.
    """
    parts = [tasks[start : start + AT_ONCE] for start in range(0, len(tasks), AT_ONCE)]
    counts = {kind: max(1, episodes * share // sum(KINDS.values()) // len(parts)) for kind, share in KINDS.items()}
    played = (
        trajectory
        for number, part in enumerate(parts)
        for trajectory in scripted_trajectories(
            [replace(task, split="train") for task in part], environment, episodes=counts, seed=number
        )
    )
    return list(progress.track(played, total=len(parts) * sum(counts.values()), description=label))


def train(out: Path, buffer: ReplayBuffer, shown: Sequence[Trajectory], steps: int, progress: Progress) -> Path:
    """The experience model, from scratch, on what it should have answered."""
    asked = ExperienceModel(None, replay_buffer=buffer, demonstrations=1, demonstration_characters=300, instructions="")
    asked.retrieve(shown)
    roles = {"human": "user", "ai": "assistant"}
    conversations = [
        [{"role": roles.get(m.type, m.type), "content": m.text} for m in to_conversation(asked, trajectory)]
        for trajectory in progress.track(shown, description="prompts")
    ]
    tokenizer = create_tokenizer(m["content"] for conversation in conversations for m in conversation)
    save_model(create_model(tokenizer, max_tokens=MAX_TOKENS), tokenizer, out / "scratch")
    bar = progress.add_task("experience model", total=steps)
    fine_tune(
        out / "scratch",
        out / "experience",
        conversations * -(-16 * steps // len(conversations)),
        steps=steps,
        batch_size=16,
        learning_rate=2e-3,
        first_lines_weight=2.0,
        on_step=lambda step, loss: progress.update(bar, completed=step, description=f"experience model (loss {loss:.2f})"),
    )
    return out / "experience"


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
    tasks, episodes, held, steps = (4, 26, 5, 2) if quick else (60, 1300, 52, 300)
    out.mkdir(parents=True, exist_ok=True)
    with Progress(console=console) as progress, ReplayBuffer(out / "replay.db") as buffer:
        environment = ALFWorld(max_steps=MAX_STEPS)
        if not buffer.count("trajectories"):
            buffer.extend(play(load_tasks(games, split="train", limit=tasks), episodes, environment, progress, "train games"))
        unseen = play(load_tasks(games, split="validation", limit=tasks // 4), held, environment, progress, "held-out games")
        environment.close()
        offline = list(buffer.trajectories())
        path = out / "experience"
        if not path.exists():
            train(out, buffer, offline, steps, progress)
        model = LocalChatModel.from_path(path, temperature=0, max_new_tokens=40 if quick else 100)
        experience = ExperienceModel(
            model, replay_buffer=buffer, demonstrations=1, demonstration_characters=300, instructions="", retries=0
        )
        bars: dict[str, TaskID] = {}

        def report(label: str, done: int, total: int) -> None:
            if label not in bars:
                bars[label] = progress.add_task(label, total=total)
            progress.update(bars[label], completed=done)

        note = (
            f"ALFWorld: {len(offline):,} trajectories of train games in the buffer; held out: {len(unseen):,} trajectories of "
            "games of other rooms or other tasks. The model was trained with all parts and is asked without one of them."
        )
        measured = measure(experience, unseen, without=ABLATIONS, on_progress=report, notes=[note])
    show(measured)
    html, figures = write_fidelity(measured, out)
    console.print(f"report: {html}\nfigures: {figures}", soft_wrap=True)


if __name__ == "__main__":
    main()
