"""`dreamgym ui` over a replay buffer of 100,000 generated episodes (a million steps): the time of each page.

The server is a process of its own, as with the command; each page is asked for once, and then five times. The searches are
for a word of every episode, of one in a thousand, and of none, which reads until its time is over.

Run: python tests/benchmarks/bench_ui.py [--episodes 100000] [--keep replay.db] [--out result.json]
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.replay.reader import ReplayReader
from dreamgym_lg.report.views import link
from dreamgym_lg.types import Step, Task, Trajectory

STEPS, GROUP, TASKS = 10, 8, 32
REPEATED = 5
WORDS = tuple(f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra", "so", "tu", "vi", "ze") for b in range(200))


def episodes(number: int, rng: random.Random) -> Iterator[Trajectory]:
    """Training iterations of 32 groups of 8; every tenth group's task is varied, every hundredth episode failed."""
    for index in range(number):
        group, rollout = divmod(index, GROUP)
        iteration, place = divmod(group, TASKS)
        varied = place % 10 == 9
        task = Task(
            id=f"varied/{iteration}/{place}" if varied else f"task/{(iteration * 7 + place) % 500}",
            instruction=" ".join(rng.choices(WORDS, k=20)),
            environment="bench",
            origin="synthetic" if varied else "real",
        )
        success = rng.random() < 0.5
        rare = " needle" if index % 1000 == 0 else ""
        steps = [
            Step(
                observation=" ".join(rng.choices(WORDS, k=60)),
                action=" ".join(rng.choices(WORDS, k=4)),
                next_observation=" ".join(rng.choices(WORDS, k=60)) + rare,
                reward=float(success and at == STEPS - 1),
                terminated=at == STEPS - 1,
                valid=rng.random() > 0.05,
                reasoning=" ".join(rng.choices(WORDS, k=20)) + " always",
                decided_by="model",
            )
            for at in range(STEPS)
        ]
        error = "ModelUnavailable: no answer" if index % 100 == 99 else None
        yield Trajectory(
            task=task, steps=steps, source="synthetic", success=success, error=error, run="train", iteration=iteration,
            rollout_index=rollout,
        )  # fmt: skip


def create(path: Path, number: int) -> None:
    rng = random.Random(1)
    with ReplayBuffer(path) as buffer:
        buffer.extend(episodes(number, rng))
        for iteration in range(number // (GROUP * TASKS)):
            names = (
                "train_success",
                "reward_mean",
                "uniform_groups",
                "curriculum_value",
                "invalid_action_share",
                "entropy",
                "kl",
            )
            buffer.record_metrics("train", iteration, {name: rng.random() / 5 for name in names})


def addresses(path: Path) -> dict[str, str]:
    with ReplayReader(path) as reader:
        iteration = reader.runs()[0].last_iteration // 2
        group = reader.groups("train", iteration, most=1)[0]
    return {
        "runs": "/",
        "run": "/run?run=train",
        "run, an iteration": link("/run", run="train", iteration=iteration),
        "group": link("/group", run="train", iteration=iteration, task_id=group[0].task_id),
        "episode": link("/episode", id=group[0].id),
        "episodes": "/episodes",
        "episodes, failed": link("/episodes", outcome="failed"),
        "episodes, old iteration": link("/episodes", run="train", iteration=1),
        "episodes, blocked (none)": link("/episodes", happened="blocked"),
        "search, in all": link("/episodes", text="always"),
        "search, in 1 of 1000": link("/episodes", text="needle"),
        "search, in none": link("/episodes", text="nowhere"),
        "stamp": "/stamp",
    }


def measure(path: Path) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "dreamgym_lg.cli.app", "ui", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        base = process.stdout.readline().split()[0]

        def ask(address: str) -> float:
            start = time.perf_counter()
            with urllib.request.urlopen(base + address) as answer:
                answer.read()
            return time.perf_counter() - start

        found = {"curves, first": {"median": ask("/curves.png?run=train"), "most": float("nan")}}
        for name, address in addresses(path).items():
            ask(address)
            seconds = [ask(address) for _ in range(REPEATED)]
            found[name] = {"median": statistics.median(seconds), "most": max(seconds)}
        process.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="a replay buffer made here before, or to be made and kept")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.keep or Path(folder) / "replay.db"
        if not path.exists():
            start = time.perf_counter()
            create(path, given.episodes)
            print(f"made in {time.perf_counter() - start:.0f} s, {path.stat().st_size / 2**20:.0f} MB")
        found = measure(path)
    for name, row in found.items():
        print(f"{name:<28}{row['median'] * 1000:8.0f} ms  (most {row['most'] * 1000:.0f})")
    if given.out:
        given.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
