"""Run by torchrun: each case of `CASES` by two processes, or by one; rank 0 writes the weights and metrics that come of it.

Usage: torchrun --nproc-per-node 2 shared_training.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from grpo_parts import WORDS, adapters, cut, groups_of, learner_of, model_of, trained, trajectory
from tiny_models import create_tokenizer

from dreamgym_lg.integrations.trl.learners import DPOLearner
from dreamgym_lg.integrations.trl.ppo import PPOLearner
from dreamgym_lg.types import Trajectory

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "micro_batch_tokens": 64},
    "dapo": {"loss_type": "dapo", "updates": 12},
    "cispo": {"loss_type": "cispo", "vllm_importance_sampling_correction": True, "micro_batch_tokens": 1},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 64},
    "lora": {"peft_config": adapters(), "micro_batch_tokens": 64, "beta": 0.1},
    "ppo": {"kind": PPOLearner, "micro_batch_tokens": 64},
    "dpo": {"kind": DPOLearner, "peft_config": adapters(), "beta": 0.1},
}


def episodes(model: Any, seed: int) -> list[list[Trajectory]]:
    """Three groups of four, of which every second episode is two segments; with an odd number of rows."""
    groups = groups_of(model, seed, n=3)
    return [
        [
            trajectory(each.reward, *cut(each.segments[0], 1 + i % 2 - (i == 3)), task=each.task.id, index=i)
            for i, each in enumerate(g)
        ]
        for g in groups
    ]


def main(folder: Path) -> None:
    tokenizer = create_tokenizer([*WORDS * 3, "say a colour"], vocab_size=320)
    for name, options in CASES.items():
        torch.manual_seed(0)
        model = model_of(tokenizer)
        groups = [episodes(model, i) for i in range(2)]
        # by Adam's usual epsilon, what is rounding alone moves weights as much as a gradient does
        learner = learner_of(model, tokenizer, folder / name, adam_epsilon=1e-6, **options)
        if learner.is_worker:
            learner.run_worker_rank()
            continue
        before = trained(learner)
        metrics = [learner.update(each) for each in groups]
        learner.close()
        torch.save({"moved": trained(learner) - before, "metrics": metrics}, folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
