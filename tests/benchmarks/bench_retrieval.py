"""Latency of retrieval and time to build its index, by number of distinct steps.

Run: python tests/benchmarks/bench_retrieval.py [result.json]
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from dreamgym_lg.replay.retrieval import IndexedStep, StepIndex

SIZES = (10_000, 100_000, 1_000_000)
QUERIES = 100
K = 3
PAGE = 4000
WORDS = tuple(f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra", "so", "tu", "vi", "ze") for b in range(200))
SENTENCES = tuple(" ".join(random.Random(i).choices(WORDS, k=15)) for i in range(2000))


def texts(rng: random.Random) -> tuple[str, str]:
    """An observation of 60 words and an action of 4."""
    return ". ".join(rng.choices(SENTENCES, k=4)), " ".join(rng.choices(WORDS, k=4))


def pages(size: int, rng: random.Random) -> Iterator[list[IndexedStep]]:
    for start in range(0, size, PAGE):
        ids = range(start, min(start + PAGE, size))
        yield [IndexedStep(id, f"task {id % 1000}", *texts(rng), "next") for id in ids]


def measure(size: int) -> dict[str, float]:
    """Times exclude the making of the texts. Queries are made of the same words, so that nothing is trivially far."""
    rng = random.Random(0)
    index, build = StepIndex(), 0.0
    for page in pages(size, rng):
        start = time.perf_counter()
        index.add(page)
        build += time.perf_counter() - start
    assert len(index) == size, "steps are distinct"
    latencies = []
    for query in [texts(rng) for _ in range(QUERIES)]:
        start = time.perf_counter()
        found = index.nearest(index.queries([query]), K)
        latencies.append(1000 * (time.perf_counter() - start))
        assert len(found[0]) == K
    p50, p95 = np.percentile(latencies, (50, 95))
    memory = psutil.Process().memory_info().rss / 2**20
    return {"steps": size, "build_s": build, "p50_ms": float(p50), "p95_ms": float(p95), "rss_mib": memory}


def main() -> None:
    print(f"{'steps':>10} {'build s':>9} {'p50 ms':>8} {'p95 ms':>8} {'RSS MiB':>8}")
    results = []
    for size in SIZES:
        results.append(measure(size))
        row = results[-1]
        print(
            f"{size:>10,} {row['build_s']:>9.2f} {row['p50_ms']:>8.2f} {row['p95_ms']:>8.2f} {row['rss_mib']:>8.0f}",
            flush=True,
        )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"k": K, "queries": QUERIES, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
