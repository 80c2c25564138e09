"""What the learner's tests share: a tiny policy, and episodes as if it had played them."""

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tiny_models import create_model
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.learners import GRPOLearner
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.learner import TrainingRow
from dreamgym_lg.types import Segment, Step, Task, Trajectory

WORDS = ("red", "green", "blue", "yellow")
QUESTION = {"role": "user", "content": "say a colour"}


def model_of(tokenizer: PreTrainedTokenizerFast) -> Any:
    return create_model(tokenizer, hidden_size=32, layers=1, max_tokens=128)


def learner_of(
    model: Any, tokenizer: PreTrainedTokenizerFast, path: Path, kind: type[PolicyLearner] = GRPOLearner, **options: Any
) -> PolicyLearner:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "beta": 0.0, **options}
    return kind(model, tokenizer, path, **settings)


@torch.no_grad()
def segment(model: Any, seed: int) -> Segment:
    """Random tokens as if `model` had sampled some of them: a prompt, a reply, an observation, a reply, an observation."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (5,), generator=generator).tolist()
    ids = torch.randint(5, 280, (sum(lengths),), generator=generator)
    sampled = [i % 2 for i, length in enumerate(lengths) for _ in range(length)]
    truth = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    logprobs = [0.0, *truth.tolist()]
    recorded = [p * s for p, s in zip(logprobs, sampled, strict=True)]
    return Segment(token_ids=ids.tolist(), sampled=sampled, logprobs=recorded, temperature=1.0)


def cut(whole: Segment, parts: int) -> list[Segment]:
    """The same tokens as several segments, every sampled one trainable in exactly one of them."""
    places = [i for i, sampled in enumerate(whole.sampled) if sampled]
    shares = [places[len(places) * n // parts : len(places) * (n + 1) // parts] for n in range(parts)]
    assert all(shares)
    return [replace(whole, sampled=[int(i in share) for i in range(len(whole.token_ids))]) for share in shares]


def row(segment: Segment, advantage: float, episodes: int) -> TrainingRow:
    return TrainingRow(segment, [advantage] * len(segment.token_ids), 1 / (episodes * segment.trainable))


def trajectory(reward: float, *segments: Segment, task: str = "t", index: int = 0, error: str | None = None) -> Trajectory:
    step = Step(observation="o", action="a", next_observation="p", reward=reward)
    return Trajectory(
        task=Task(id=task, instruction="i", environment="e"),
        steps=(step,),
        source="synthetic",
        success=reward == 1,
        rollout_index=index,
        segments=segments,
        error=error,
    )


def groups_of(model: Any, seed: int, *, n: int = 2) -> list[list[Trajectory]]:
    return [
        [trajectory(float(i % 3 == g % 2), segment(model, 100 * seed + 10 * g + i), task=f"t{g}", index=i) for i in range(4)]
        for g in range(n)
    ]


def adapters(rank: int = 4) -> LoraConfig:
    """LoRA on every layer; its second matrices are not 0, so that the first have a gradient and the reference is another."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def trained(learner: PolicyLearner) -> torch.Tensor:
    """What the learner's optimiser changes: all weights, or the adapters."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in learner._trainer.trained.values()])


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def gradient(
    start: Any, tokenizer: PreTrainedTokenizerFast, path: Path, groups: list[list[Trajectory]], **options: Any
) -> torch.Tensor:
    """The gradient of one update, read from the step that plain gradient descent makes of it."""
    model, rate = deepcopy(start), 100.0
    learner = learner_of(model, tokenizer, path, max_grad_norm=0.0, **options)
    descend(learner, rate)
    refer_to_base(learner)
    before = trained(learner)
    learner.update(groups)
    return (before - trained(learner)) / rate


def descend(learner: PolicyLearner, rate: float) -> None:
    """Give the learner plain gradient descent in place of AdamW; a critic's rate is ten times as large."""
    trainer = learner._trainer
    groups = [{"params": list(trainer.trained.values())}, {"params": list(trainer.critic.parameters()), "lr": 10 * rate}]
    trainer.optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=rate)


def refer_to_base(learner: PolicyLearner) -> None:
    """Hold a policy that has moved already to the weights on disk; under LoRA to those without adapters."""
    if (reference := learner._trainer._reference) is None:
        return
    saved = LocalChatModel.from_path(learner.model.config._name_or_path).model
    assert saved is not None
    base = dict(saved.named_parameters())
    for name, value in reference.items():
        reference[name] = torch.zeros_like(value) if "lora_" in name else base[name].detach()


def moments(learner: PolicyLearner) -> torch.Tensor:
    """Adam's first moments."""
    states = learner._trainer.optimizer.state_dict()["state"]
    return torch.cat([states[key]["exp_avg"].flatten().clone() for key in sorted(states)])


def promptly(call: Callable[[], Any]) -> BaseException | None:
    """What `call` raised; fails instead of hanging."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert raised, "it hangs"
    return raised[0]


def some(n: int) -> Segment:
    return Segment(token_ids=[1, n, n], sampled=[0, 1, 1], logprobs=[0.0, -1.0, -1.0], temperature=1.0)
