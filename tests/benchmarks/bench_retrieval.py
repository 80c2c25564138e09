"""Retrieval from a replay buffer's file, by number of distinct steps.

Time of the first query (builds the index), of the first one after a restart, latency and memory.

Two kinds of text. `games`: 1000 steps in each world, whose pages differ in a few sentences and whose 20 actions recur, so
that most steps have some near-duplicates, as traces do. `random`: unrelated sentences, where the nearest step is hardly nearer
than any other.

Run: python tests/benchmarks/bench_retrieval.py [--kind games|random] [--out result.json] [size ...]
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import psutil

from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

QUERIES = 200
K = 5
WORDS = tuple(f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra", "so", "tu", "vi", "ze") for b in range(200))
SENTENCES = tuple(" ".join(random.Random(i).choices(WORDS, k=15)) for i in range(2000))
STEPS_A_WORLD = 1000

Texts = Callable[[random.Random], tuple[str, str]]


def unrelated(rng: random.Random) -> tuple[str, str]:
    """An observation of 60 words and an action of 4."""
    return ". ".join(rng.choices(SENTENCES, k=4)), " ".join(rng.choices(WORDS, k=4))


def games(size: int) -> Texts:
    """Worlds of 10 places, each described by 4 sentences; things in it (5 words) come and go, and a counter moves."""
    rng, worlds = random.Random(1), size // STEPS_A_WORLD
    places = [[rng.choices(SENTENCES, k=4) for _ in range(10)] for _ in range(worlds)]
    things = [[" ".join(rng.choices(WORDS, k=5)) for _ in range(12)] for _ in range(worlds)]
    actions = [[" ".join(rng.choices(WORDS, k=rng.randint(2, 4))) for _ in range(20)] for _ in range(worlds)]

    def texts(rng: random.Random) -> tuple[str, str]:
        world = rng.randrange(worlds)
        seen = rng.sample(things[world], k=rng.randint(0, 4))
        page = [*rng.choice(places[world]), *seen, f"Score {rng.randrange(20)}, {rng.randrange(100)} moves"]
        return ". ".join(page), rng.choice(actions[world])

    return texts


KINDS: dict[str, Callable[[int], Texts]] = {"games": games, "random": lambda size: unrelated}


def trajectories(size: int, texts: Texts) -> Iterator[Trajectory]:
    rng, stored = random.Random(0), set[tuple[str, str]]()
    while len(stored) < size:
        pairs = dict.fromkeys(texts(rng) for _ in range(min(100, size - len(stored))))
        new = [pair for pair in pairs if pair not in stored]
        stored.update(new)
        task = Task(id=f"task {rng.randrange(1000)}", instruction="", environment="")
        steps = [Step(observation=observation, action=action, next_observation="next") for observation, action in new]
        yield Trajectory(task=task, steps=steps, rollout_index=len(stored))


def queries(texts: Texts) -> list[tuple[str, str]]:
    rng = random.Random(-1)
    return [texts(rng) for _ in range(QUERIES)]


def fill(path: Path, size: int, kind: str) -> dict[str, float]:
    """Store `size` steps, and make the index."""
    texts = KINDS[kind](size)
    with ReplayBuffer(path) as buffer:
        episodes = trajectories(size, texts)
        while part := list(islice(episodes, 500)):
            buffer.extend(part)
        start = time.perf_counter()
        buffer.similar(*queries(texts)[0], k=K)
        return {"build_s": time.perf_counter() - start}


def ask(path: Path, size: int, kind: str) -> dict[str, float]:
    """Open the file anew, and ask."""
    asked = queries(KINDS[kind](size))
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    with ReplayBuffer(path) as buffer:
        buffer.similar(*asked[0], k=K)
        reopen, latencies = time.perf_counter() - start, []
        for query in asked:
            start = time.perf_counter()
            buffer.similar(*query, k=K)
            latencies.append(1000 * (time.perf_counter() - start))
        info = psutil.Process().memory_full_info()
        assert len(buffer._retriever._index) == size, "steps are distinct"
    p50, p95 = np.percentile(latencies, (50, 95))
    return {
        "reopen_s": reopen,
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "own_mib": (info.uss - before) / 2**20,
        "rss_mib": info.rss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--kind", choices=KINDS, default="games")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", nargs=2, help="what a process of its own does: fill or ask, and the file")
    given = parser.parse_args()
    if given.part:
        part, file = {"fill": fill, "ask": ask}[given.part[0]], Path(given.part[1])
        print(json.dumps(part(file, given.sizes[0], given.kind)))
        return
    results = []
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            result: dict[str, float] = {"steps": size}
            for part in ("fill", "ask"):
                command = [sys.executable, __file__, str(size), "--kind", given.kind, "--part", part, f"{folder}/replay.db"]
                result |= json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        results.append(result)
        print({name: round(value, 3) for name, value in result.items()}, flush=True)
    if given.out:
        given.out.write_text(json.dumps({"kind": given.kind, "k": K, "queries": QUERIES, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
