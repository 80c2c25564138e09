"""What `LocalEngine` saves by reading long new texts ahead of a batch, and by guessing what comes next.

Eight tasks of eight episodes each. All begin with the same instructions, those of a task with the same first message; every
turn brings an observation and a reply. "Together": the episodes begin at once. "In turn": a new one begins whenever one ends,
as in an evaluation, so that first messages share batches with turns. The small base model, float32, one core; the same calls
with and without, in one process, turn and turn about.

Guesses: replies of up to 40 tokens. "Said before": the most likely tokens, and the same calls were answered once before, as a
dream's answers mostly were. "New": sampled from a model that is sure of nothing, so that next to no guess is right.

Run: OMP_NUM_THREADS=1 python tests/benchmarks/bench_engine.py
"""

import asyncio
import time
from random import Random
from statistics import median

import torch
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.integrations.transformers import engine
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.drafts import Drafts
from dreamgym_lg.integrations.transformers.small_base import SMALL_BASE

TASKS, EPISODES, TURNS, AT_ONCE, ROUNDS = 8, 8, 6, 32, 3


def text(seed: int, words: int) -> str:
    names = ["apple", "book", "chair", "door", "key", "lamp", "pear", "room", "shelf", "table"]
    return " ".join(Random(seed).choices(names, k=words))


async def play(policy: LocalChatModel, number: int, first: int) -> None:
    messages: list[BaseMessage] = [SystemMessage(text(0, 120)), HumanMessage(text(1 + number % TASKS, 60))]
    for turn in range(TURNS + number % 3):
        messages += [await policy.ainvoke(messages, seed=first + number), HumanMessage(text(100 * number + turn, 12))]


async def play_all(policy: LocalChatModel, at_once: int, first: int) -> None:
    free = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with free:
            await play(policy, number, first)

    await asyncio.gather(*(one(number) for number in range(TASKS * EPISODES)))


def seconds(policy: LocalChatModel, at_once: int, first: int = 0) -> float:
    """Of all episodes. Args: `first`, the first one's seed."""
    policy.weights_changed()
    start = time.perf_counter()
    asyncio.run(play_all(policy, at_once, first))
    return time.perf_counter() - start


def compare_guesses(policy: LocalChatModel) -> None:
    guess = Drafts.guess
    print(f"{'replies':>16}{'no guess, s':>14}{'guessed, s':>14}{'ratio':>8}{'passes, last':>16}")
    for name, temperature in (("said before", 0.0), ("new", 1.0)):
        asked = policy.with_temperature(temperature).model_copy(update={"max_new_tokens": 40})
        seconds(asked, TASKS * EPISODES)
        found: list[tuple[float, float]] = []
        passes: dict[int, int] = {}
        for number in range(ROUNDS):
            both = []
            # what is sampled is another text each time
            for way, chosen in enumerate((lambda *_: [], guess)):
                Drafts.guess = chosen  # type: ignore[method-assign, assignment]
                policy.engine.passes.clear()
                both.append(seconds(asked, TASKS * EPISODES, first=1000 * (2 * number + way + 1)))
                passes[way] = len(policy.engine.passes)
            found.append((both[0], both[1]))
        one, other = (median(each) for each in zip(*found, strict=True))
        print(f"{name:>16}{one:>14.1f}{other:>14.1f}{one / other:>8.2f}{passes[0]:>10} / {passes[1]}", flush=True)


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
    compare_guesses(policy)


if __name__ == "__main__":
    main()
