"""tau-bench: calls, fresh databases and digests a second, on the recorded walks.

Run: python tests/benchmarks/bench_tau.py        (needs ../shared/data/tau)
"""

import json
import lzma
import time
from collections.abc import Callable
from pathlib import Path

from dreamgym_lg.integrations.tau import load_domain
from dreamgym_lg.integrations.tau.domain import DomainName

DATA = Path(__file__).parents[3] / "shared" / "data" / "tau"
LEAST = 3000
"""Calls a second on one core."""


def rate(count: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def measure(name: DomainName) -> None:
    domain = load_domain(name, DATA)
    with lzma.open(DATA / f"tau_{name}_walks.json.xz") as packed:
        walks = [walk["steps"] for walk in json.load(packed)]

    def play() -> None:
        for steps in walks:
            database = domain.create_database()
            for step in steps:
                domain.call(database, step["name"], step["arguments"])

    calls = rate(sum(map(len, walks)), play)
    databases = rate(1000, lambda: [domain.create_database() for _ in range(1000)])
    digests = rate(20, lambda: [domain.digest(domain.create_database()) for _ in range(20)])
    print(f"{name}: {calls:,.0f} calls/s, {databases:,.0f} fresh databases/s, {digests:,.0f} digests/s")
    assert calls >= LEAST, f"{name}: {calls:,.0f} calls a second; at least {LEAST:,}"


if __name__ == "__main__":
    measure("airline")
    measure("retail")
