"""WebShop: steps a second on the official 1,000 products, and a search among as many synthetic products as asked for.

Run: python tests/benchmarks/bench_webshop.py [PRODUCTS]        (20,000; needs ../shared/data/webshop_small.json.xz)
"""

import re
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import psutil

from dreamgym_lg.integrations.webshop.data import load_catalogue, load_tasks
from dreamgym_lg.integrations.webshop.environment import WebShopEnvironment, load_shop
from dreamgym_lg.integrations.webshop.search import load_index

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny"))
from webshop_baselines import buy_first, play_baseline, rule_based  # noqa: E402

SMALL = Path(__file__).parents[3] / "shared" / "data" / "webshop_small.json.xz"
QUERIES = 300
EPISODES = 1000


def resident() -> float:
    """MiB of this process."""
    return float(psutil.Process().memory_info().rss) / 2**20


def random_steps(environment: WebShopEnvironment, seconds: float) -> float:
    """Steps a second of a policy that searches now and then and clicks at random."""
    tasks, rng, steps, start = load_tasks(SMALL), Random(0), 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        environment.reset(rng.choice(tasks))
        over = False
        while not over:
            result = environment.step(rng.choice(environment.valid_actions()))
            over, steps = result.terminated or result.truncated, steps + 1
    return steps / spent


def synthetic_texts(count: int) -> list[str]:
    """Texts with the lengths and words of the official ones, each word from another of them; one word in fifty is new."""
    rng = Random(0)
    texts = [product.search_text.split(" ") for product in load_catalogue(SMALL).products.values()]
    words = [word for text in texts for word in text]
    return [
        " ".join(
            rng.choice(words) if rng.random() > 0.02 else f"{rng.choice(words)}{rng.randrange(10**4)}" for _ in texts[n % 1000]
        )
        for n in range(count)
    ]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    before, start = resident(), time.perf_counter()
    load_shop(SMALL)
    print(f"1,000 products: {time.perf_counter() - start:.2f} s to open, {resident() - before:.0f} MiB")
    environment = WebShopEnvironment(SMALL)
    print(f"  random policy: {random_steps(environment, 5):,.0f} steps/s")
    for baseline in (buy_first, rule_based):
        tasks, start, steps = load_tasks(SMALL)[:EPISODES], time.perf_counter(), 0
        for task in tasks:
            steps += len(play_baseline(baseline, environment, task).steps)
        print(f"  {baseline.__name__}: {steps / (time.perf_counter() - start):,.0f} steps/s")

    texts = synthetic_texts(count)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        load_index(texts, cache=Path(folder))
        print(f"{count:,} products: {time.perf_counter() - start:.1f} s to build the index")
        start = time.perf_counter()
        index = load_index(texts, cache=Path(folder))
        spent = time.perf_counter() - start
        size = sum(each.nbytes for each in (index.starts, index.documents, index.scales, index.idf)) / 2**20
        print(f"  {spent:.2f} s to load it, {size:.0f} MiB of arrays and {len(index.terms):,} terms")
    rng, queries = Random(1), [re.sub(", and price.*", "", task.instruction).lower() for task in load_tasks(SMALL)]
    chosen = rng.sample(queries, QUERIES)
    times = []
    for query in chosen:
        start = time.perf_counter()
        index.search(query)
        times.append(1000 * (time.perf_counter() - start))
    print(f"  a search: median {sorted(times)[QUERIES // 2]:.2f} ms, mean {sum(times) / QUERIES:.2f} ms")


if __name__ == "__main__":
    main()
