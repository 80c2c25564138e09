"""One GPU and a model of Qwen2.5-7B's shape, with random weights and LoRA: rollouts, an update, the memory of both.

Episodes are conversations of several turns, played all at once by `LocalChatModel`; then their groups update the adapters.
`tests/test_gpu.py` runs the same (`pytest -m gpu`), and a tiny shape on the CPU in every run of the tests.

Run: python tests/benchmarks/bench_gpu.py [--shape tiny|half|seven] [--out gpu.json]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from transformers import AutoModelForCausalLM, Qwen2Config

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.engine import LocalEngine
from dreamgym_lg.integrations.trl.adapters import default_adapters
from dreamgym_lg.integrations.trl.learners import GRPOLearner
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Step, Task, Trajectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny"))
from tiny_models import create_tokenizer  # noqa: E402

TEXT = "The room is small. On the table there are an apple, a pear and a plum; the door to the north is closed."


@dataclass(frozen=True)
class Shape:
    """A model's size, and how much it plays."""

    model: Qwen2Config
    episodes: int
    turns: int
    reply: int
    """Tokens of each reply."""
    micro_batch_tokens: int


def qwen(hidden: int, layers: int, heads: int, wide: int, words: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=words, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 7, 1), tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


SHAPES = {
    "tiny": Shape(qwen(56, 2, 7, 112, 300), episodes=4, turns=2, reply=6, micro_batch_tokens=256),
    "half": Shape(qwen(896, 24, 14, 4864, 151_936), episodes=64, turns=4, reply=64, micro_batch_tokens=16_384),
    "seven": Shape(qwen(3584, 28, 28, 18_944, 152_064), episodes=64, turns=4, reply=128, micro_batch_tokens=16_384),
}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Bytes, seconds, and tokens a second."""

    device: str
    parameters: int
    rollout_tokens: int
    """Sampled ones."""
    rollout_seconds: float
    tokens_per_second: float
    share_outside_passes: float
    """Of the rollout's time: all but forward passes and the sampling that follows them."""
    update_tokens: int
    """Of the rows, what was only read included."""
    update_seconds: float
    measured_update: int | None
    """Peak of allocated memory while it trained; None on the CPU."""
    measured_rollout: int | None


async def play(policy: LocalChatModel, shape: Shape, index: int) -> Trajectory:
    """An episode: the policy replies, and is told more, `turns` times."""
    messages: list[BaseMessage] = [HumanMessage(f"{TEXT} {index % 8}")]
    with TokenRecorder(seed=index) as recorder:
        for turn in range(shape.turns):
            reply = await policy.ainvoke(messages)
            messages += [AIMessage(reply.text), HumanMessage(f"{TEXT} {turn}")]
    step = Step(observation="o", action="a", next_observation="p", reward=float(index % 2))
    task = Task(id=str(index // 8), instruction="i", environment="e")
    segments = tuple(recorder.segments())
    return Trajectory(task=task, steps=(step,), source="synthetic", success=False, rollout_index=index, segments=segments)


async def play_all(policy: LocalChatModel, shape: Shape) -> list[Trajectory]:
    return list(await asyncio.gather(*(play(policy, shape, index) for index in range(shape.episodes))))


class Passes:
    """Seconds between the begin and the end of the model's forward passes, the device's work included."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.seconds, self._device = 0.0, device
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _begin(self, *_: Any) -> None:
        self._begun = self._now()

    def _end(self, *_: Any) -> None:
        self.seconds += self._now() - self._begun

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def create(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A model of this shape with random weights, and a small tokenizer."""
    tokenizer = create_tokenizer([TEXT] * 20, vocab_size=290)
    config = Qwen2Config(**{**shape.model.to_dict(), "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer


def measure(shape: Shape, device: torch.device, *, dtype: torch.dtype) -> Figures:
    """Play and update."""
    on_gpu = device.type == "cuda"
    model, tokenizer = create(shape, device, dtype)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, engine=LocalEngine(model, tokenizer), max_new_tokens=shape.reply)
    asyncio.run(play_all(policy, replace(shape, episodes=2, turns=1)))  # kernels are chosen, memory is reserved

    def peak() -> int | None:
        return torch.cuda.max_memory_allocated(device) if on_gpu else None

    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    passes, begun = Passes(model, device), time.perf_counter()
    episodes = asyncio.run(play_all(policy, shape))
    played, forward, of_rollout = time.perf_counter() - begun, passes.seconds, peak()
    passes.close()
    policy.free_memory()
    groups = [[each for each in episodes if each.task.id == task] for task in sorted({each.task.id for each in episodes})]
    segments = [segment for each in episodes for segment in each.segments]
    with tempfile.TemporaryDirectory() as folder:
        options = {"micro_batch_tokens": shape.micro_batch_tokens, "save_every": 1000, "peft_config": default_adapters()}
        learner = GRPOLearner(model, tokenizer, Path(folder), beta=0.02, learning_rate=1e-5, **options)  # type: ignore[arg-type]
        learner.update(groups)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        begun = time.perf_counter()
        learner.update(groups)
        updated, of_update = time.perf_counter() - begun, peak()
    sampled = sum(segment.trainable for segment in segments)
    return Figures(
        device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        parameters=sum(each.numel() for name, each in model.named_parameters() if ".lora_" not in name),
        rollout_tokens=sampled,
        rollout_seconds=played,
        tokens_per_second=sampled / played,
        share_outside_passes=1 - forward / played,
        update_tokens=sum(len(segment.token_ids) for segment in segments),
        update_seconds=updated,
        measured_update=of_update,
        measured_rollout=of_rollout,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="default: seven on a GPU, else tiny")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = given.shape or ("seven" if device.type == "cuda" else "tiny")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = asdict(measure(SHAPES[name], device, dtype=dtype))
    text = json.dumps({"shape": name, **found}, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
