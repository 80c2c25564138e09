"""SmolLM2 on this machine against plain transformers and PEFT, on the same texts in one process: ratios of processor time.

EPISODES conversations share a system prompt of some 500 tokens, as a support desk's do; each has two turns. "Generate": the
engine against `model.generate` on padded batches, which reads every prompt whole. "After an update": the engine again, with the
adapters that a GRPO update has moved. "SFT", "GRPO": one optimiser step against a forward and backward pass over the padded
rows. "Attention by products": the SFT step against the same with PyTorch's own attention. "Freed memory kept": against the
same with memory given back to the system, as glibc does by itself. Processor time, because other processes do not change it;
run it on a quiet machine for seconds.

Run: OMP_NUM_THREADS=1 python tests/benchmarks/bench_smollm.py [EPISODES]      (default: 8, three minutes)
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.integrations.transformers import loading
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.machine import reuse_freed_memory
from dreamgym_lg.integrations.trl import token_trainer
from dreamgym_lg.integrations.trl.adapters import adapt
from dreamgym_lg.integrations.trl.learners import GRPOLearner
from dreamgym_lg.integrations.trl.sft import train_sft
from dreamgym_lg.learner import sft_row
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Segment, Step, Task, Trajectory

WORDS = ["order", "refund", "parcel", "late", "address", "change", "cancel", "invoice", "return", "box"]
TURNS, REPLY = 2, 24


def words(seed: int, count: int) -> str:
    return " ".join(Random(seed).choices(WORDS, k=count))


async def episode(policy: LocalChatModel, number: int) -> Segment:
    messages: list[BaseMessage] = [SystemMessage(words(0, 400)), HumanMessage(words(number + 1, 30))]
    with TokenRecorder(seed=number) as recorder:
        for turn in range(TURNS):
            messages += [await policy.ainvoke(messages), HumanMessage(words(100 * turn + number, 40))]
    return max(recorder.segments(), key=lambda each: len(each.token_ids))


def play(policy: LocalChatModel, episodes: int) -> list[Segment]:
    async def all_of_them() -> list[Segment]:
        return await asyncio.gather(*(episode(policy, number) for number in range(episodes)))

    policy.weights_changed()
    return asyncio.run(all_of_them())


@torch.inference_mode()
def generate(policy: LocalChatModel, segments: list[Segment]) -> None:
    """The same replies by `generate`: each turn reads its padded prompts from the beginning."""
    pad = policy.tokenizer.pad_token_id
    for turn in range(TURNS):
        prompts = [_prompt(segment, turn) for segment in segments]
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
        policy.model.generate(  # type: ignore[union-attr, operator]
            input_ids=ids, attention_mask=mask, max_new_tokens=REPLY, min_new_tokens=REPLY, do_sample=True, pad_token_id=pad
        )


def _prompt(segment: Segment, turn: int) -> list[int]:
    begins = [i for i, own in enumerate(segment.sampled) if own and not segment.sampled[i - 1]]
    return list(segment.token_ids[: begins[min(turn, len(begins) - 1)]])


def plain_step(model: Any, rows: list[Segment], pad: int) -> None:
    """A forward and backward pass over the padded rows, all logits and the shared beginning of every row included."""
    longest = max(len(row.token_ids) for row in rows)
    padding = [longest - len(row.token_ids) for row in rows]
    ids = torch.tensor([[*row.token_ids, *[pad] * more] for row, more in zip(rows, padding, strict=True)])
    own = torch.tensor([[*row.sampled, *[0] * more] for row, more in zip(rows, padding, strict=True)])
    labels = ids.where(own == 1, -100)
    mask = torch.tensor([[1] * (longest - more) + [0] * more for more in padding])
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    model.zero_grad()


def cost(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def show(name: str, ours: float, theirs: float) -> None:
    print(f"{name:28} {ours:7.1f} s, plain {theirs:7.1f} s: {theirs / ours:.2f} times as fast", flush=True)


def main() -> None:
    episodes = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with patch.object(loading, "reuse_freed_memory"):
        policy: Any = LocalChatModel.from_path("smollm2-135m", max_new_tokens=REPLY)
    model, tokenizer = policy.model, policy.tokenizer
    played = play(policy, episodes)
    before = cost(lambda: play(policy, episodes))
    show("generate", before, cost(lambda: generate(policy, played)))

    adapt(model)
    rows = [sft_row(segment) for segment in played]
    plain = cost(lambda: plain_step(model, played, tokenizer.pad_token_id))
    steps = 2

    def supervised() -> float:
        return cost(lambda: train_sft(model, rows, steps=steps, batch_size=episodes)) / steps

    show("SFT step", given_back := supervised(), plain)
    reuse_freed_memory()
    supervised()  # it fills the memory that is kept
    show("freed memory kept", supervised(), given_back)
    with patch.object(token_trainer, "products", lambda _: nullcontext()):
        fused = supervised()
    show("attention by products", supervised(), fused)

    step = Step(observation="o", action="a", next_observation="p", reward=1.0)
    task = Task(id="t", instruction="i", environment="e")
    with tempfile.TemporaryDirectory() as folder:
        learner = GRPOLearner(model, tokenizer, Path(folder), beta=0.02, save_every=1000)
        group = [
            Trajectory(task=task, steps=(replace(step, reward=i % 2),), source="synthetic", rollout_index=i, segments=[segment])
            for i, segment in enumerate(played)
        ]
        learner.update([group])
        show("GRPO update, with KL term", cost(lambda: learner.update([group])), plain)
    after = cost(lambda: play(policy, episodes))
    print(f"{'generate after an update':28} {after:7.1f} s: {after / before:.2f} of before")


if __name__ == "__main__":
    main()
