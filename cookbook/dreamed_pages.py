"""Train an ordinary agent on dreamed pages of MiniWoB++, and prove it in a real Chromium on held-out seeds.

Run: python cookbook/dreamed_pages.py [--seed 0] [--out runs/miniwob]      (cookbook/dreamed_pages.md says how long it takes)
Needs: pip install 'dreamgym-lg[browsergym,train]', Chromium (`playwright install chromium`; Debian: chromium-headless-shell).

The agent is LangChain's `create_agent` with BrowserGym's `click` as its tool, all that these tasks need. Killed at any moment,
the same command goes on.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.integrations.browsergym.world import BrowserGymWorld
from dreamgym_lg.statistics import wilson
from dreamgym_lg.types import Trajectory

TASKS = ("click-button", "click-dialog", "click-dialog-2", "click-link", "click-tab", "unicode-test")
"""Tasks that one click on the right element solves, and whose pages differ in nearly every seed."""
SETTINGS = Settings(
    tasks=80 * len(TASKS),  # of each 20 to prove on, 8 to validate on, 52 to train on
    episodes={"demonstration": 60, "random": 180, "fluent_wrong": 60},
    retrieved=0,  # a page of another seed says little that the training has not said
    experience_steps=40,
    experience_tokens=192,
    policy_tokens=48,
    batch_size=8,
    base_steps=150,
    iterations=20,
    num_tasks=16,
    num_generations=8,
    synthetic_share=0.0,
    stop_after_uniform=0,
    evaluate_every=10,
    evaluate_tasks=24,
    proof_tasks=20 * len(TASKS),
)


def create_experiment(out: str | Path = "runs/miniwob", seed: int = 0) -> Experiment:
    """The experiment of dreamed_pages.md, also for `dreamgym fidelity cookbook/dreamed_pages.py:create_experiment`."""
    world = BrowserGymWorld(names=TASKS, actions=("click",), max_steps=3, short=True)
    return Experiment(world, out, replace(SETTINGS, seed=seed), say=print)


def by_task(episodes: Sequence[Trajectory]) -> dict[str, str]:
    """Successes of each task with their 95 % Wilson interval."""
    found: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        found[str(episode.task.metadata["task"]).removeprefix("miniwob.")].append(episode.success)
        found["all"].append(episode.success)
    told = {}
    for name, successes in found.items():
        low, high = wilson(sum(successes), len(successes))
        told[name] = f"{sum(successes)}/{len(successes)} [{low:.2f}, {high:.2f}]"
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/miniwob"))
    arguments = parser.parse_args()
    run = create_experiment(arguments.out, arguments.seed)
    run.collect()
    run.train_experience()
    run.train_base()
    run.train()
    result = run.prove()
    for mode in ("greedy", "sampled"):
        print(f"\nreal, {mode}: base | trained in the dream")
        columns = []
        for name in ("base", "trained"):
            runs = [each for each in run.replay_buffer.trajectories(source="real") if f"proof/real/{name}/{mode}/" in each.run]
            columns.append(by_task(runs))
        for task in (*TASKS, "all"):
            print(f"{task:16} {' | '.join(column.get(task, '-') for column in columns)}")
    print(json.dumps({key: result[key] for key in ("real_steps", "seconds")}))


if __name__ == "__main__":
    main()
