"""What an update costs against one by TRL's trainer as it is, on the same rows: the ratio of the medians, in one process.

Eight episodes of one task, alike in their prompt, of several replies with longer observations between them; the small base
model, AdamW, one forward and backward pass. Theirs and ours take turns in blocks of six updates; the first of each block is
left out. Ours holds what a user's update holds but for the checkpoint (`save_every`). "Prompt shared": it is computed once for
the group. Where there is no Triton, TRL puts every token through the head, and ours those of the replies alone.

Run: OMP_NUM_THREADS=1 python tests/benchmarks/bench_update.py
"""

import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny"))

from tiny_models import SMALL_BASE  # noqa: E402

from dreamgym_lg.integrations.transformers.loading import load_model, load_tokenizer  # noqa: E402
from dreamgym_lg.integrations.trl.learners import GRPOLearner  # noqa: E402
from dreamgym_lg.learner import group_advantages  # noqa: E402
from dreamgym_lg.types import Segment, Step, Task, Trajectory  # noqa: E402

EPISODES, PROMPT, ROUNDS, BLOCK = 8, 120, 3, 6
RATE = 1e-6


def episode(index: int, *, shared: bool) -> Trajectory:
    """Eight turns: a reply of 8 tokens, an observation of 24."""
    of_prompt, of_rest = torch.Generator().manual_seed(0 if shared else index), torch.Generator().manual_seed(100 + index)
    rest = torch.randint(5, 280, (8 * 32,), generator=of_rest).tolist()
    ids = torch.randint(5, 280, (PROMPT,), generator=of_prompt).tolist() + rest
    sampled = [0] * PROMPT + [int(i % 32 < 8) for i in range(len(rest))]
    segment = Segment(token_ids=ids, sampled=sampled, logprobs=[-5.0 * each for each in sampled], temperature=1.0)
    step = Step(observation="o", action="a", next_observation="p", reward=float(index % 2))
    task = Task(id="t", instruction="i", environment="e")
    return Trajectory(task=task, steps=(step,), source="synthetic", success=False, rollout_index=index, segments=(segment,))


class Timed(TrainerCallback):
    """Notes the seconds of each optimiser step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begun)


def theirs(start: Any, tokenizer: Any, group: list[Trajectory], beta: float) -> list[float]:
    """Seconds of each update by `GRPOTrainer`, given the rows that it would make of these episodes."""
    segments = [each.segments[0] for each in group]

    def part(name: str) -> torch.Tensor:
        return torch.tensor([list(getattr(each, name))[PROMPT:] for each in segments])

    class Raw(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            prompts = [torch.tensor(each.token_ids[:PROMPT]) for each in segments]
            batch = {
                "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
                "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"),
                "completion_ids": part("token_ids"),
                "completion_mask": torch.ones_like(part("token_ids")),
                "tool_mask": part("sampled"),
                "old_per_token_logps": part("logprobs"),
                "advantages": torch.tensor(group_advantages([each.reward for each in group])),
                "num_items_in_batch": part("sampled").sum(),
            }
            if beta:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                mask = torch.ones_like(ids)
                with torch.no_grad():
                    found = self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, part("token_ids").size(1))
                batch["ref_per_token_logps"] = found[0]
            return batch

    timed = Timed()
    with tempfile.TemporaryDirectory() as folder:
        plain = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "report_to": "none", "disable_tqdm": True}
        rate = {"learning_rate": RATE, "lr_scheduler_type": "constant"}
        once = {"per_device_train_batch_size": EPISODES, "num_generations": EPISODES, "save_strategy": "no", "max_steps": BLOCK}
        Raw(
            model=deepcopy(start),
            reward_funcs=lambda **_: [0.0],
            args=GRPOConfig(output_dir=folder, seed=0, beta=beta, loss_type="grpo", logging_steps=1, **plain, **once, **rate),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": ""}] * EPISODES),
            callbacks=[timed],
        ).train()
    return timed.seconds[1:]


def ours(start: Any, tokenizer: Any, group: list[Trajectory], beta: float) -> list[float]:
    """Seconds of each `update` with the same episodes."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"loss_type": "grpo", "save_every": 1000, "micro_batch_tokens": 4096, "learning_rate": RATE}
        learner = GRPOLearner(deepcopy(start), tokenizer, Path(folder), beta=beta, **options)
        for _ in range(BLOCK):
            begun = time.perf_counter()
            learner.update([group])
            seconds.append(time.perf_counter() - begun)
        learner.close()
    return seconds[1:]


def compare(model: Any, tokenizer: Any) -> None:
    for beta in (0.0, 0.02):
        for shared in (False, True):
            group = [episode(index, shared=shared) for index in range(EPISODES)]
            raw, own = [], []
            for _ in range(ROUNDS):
                raw += theirs(model, tokenizer, group, beta)
                own += ours(model, tokenizer, group, beta)
            told = f"beta {beta:g}, prompt {'shared' if shared else 'not shared'}"
            print(f"{told:<28} TRL {median(raw):.2f} s, ours {median(own):.2f} s, ratio {median(own) / median(raw):.2f}")


def main() -> None:
    tokenizer, model = load_tokenizer(SMALL_BASE), load_model(SMALL_BASE, dtype="float32")
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, {EPISODES} rows of {PROMPT + 256} tokens")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.config._name_or_path = folder  # where their trainer loads the reference from
        compare(model, tokenizer)


if __name__ == "__main__":
    main()
