"""What it saves that long new texts are read ahead of a batch, and what conversations begin with once: `LocalEngine`.

Eight tasks of eight episodes each. All begin with the same instructions, those of a task with the same first message; every
turn brings an observation and a reply. "Together": the episodes begin at once. "In turn": a new one begins whenever one ends,
as in an evaluation, so that first messages share batches with turns. The small base model, float32, one core; the same calls
with and without, in one process, turn and turn about.

Run: OMP_NUM_THREADS=1 python tests/benchmarks/bench_engine.py
"""

import asyncio
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

import torch
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny"))

from tiny_models import SMALL_BASE  # noqa: E402

from dreamgym_lg.integrations.transformers import engine  # noqa: E402
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel  # noqa: E402

TASKS, EPISODES, TURNS, AT_ONCE, ROUNDS = 8, 8, 6, 32, 3


def text(seed: int, words: int) -> str:
    names = ["apple", "book", "chair", "door", "key", "lamp", "pear", "room", "shelf", "table"]
    return " ".join(Random(seed).choices(names, k=words))


async def play(policy: LocalChatModel, number: int) -> None:
    messages: list[BaseMessage] = [SystemMessage(text(0, 120)), HumanMessage(text(1 + number % TASKS, 60))]
    for turn in range(TURNS + number % 3):
        messages += [await policy.ainvoke(messages, seed=number), HumanMessage(text(100 * number + turn, 12))]


async def play_all(policy: LocalChatModel, at_once: int) -> None:
    free = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with free:
            await play(policy, number)

    await asyncio.gather(*(one(number) for number in range(TASKS * EPISODES)))


def seconds(policy: LocalChatModel, at_once: int) -> float:
    policy.weights_changed()
    start = time.perf_counter()
    asyncio.run(play_all(policy, at_once))
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    policy = LocalChatModel.from_path(SMALL_BASE, dtype="float32", max_new_tokens=8)
    read_ahead = engine.read_ahead
    print(f"{'episodes begin':>16}{'padded, s':>12}{'read ahead, s':>16}{'ratio':>8}")
    for name, at_once in (("together", TASKS * EPISODES), ("in turn", AT_ONCE)):
        seconds(policy, at_once)
        found: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            engine.read_ahead = lambda *_: 0
            padded = seconds(policy, at_once)
            engine.read_ahead = read_ahead
            found.append((padded, seconds(policy, at_once)))
        one, other = (median(each) for each in zip(*found, strict=True))
        print(f"{name:>16}{one:>12.1f}{other:>16.1f}{one / other:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
