"""What an episode's gradient amounts to: TRL's own for one segment, and the same however it is cut, batched or filled up."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from grpo_parts import adapters, cut, descend, gradient, learner_of, model_of, segment, trajectory, weights
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    ModernBertDecoderConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import _ChunkedLogProbFunction, pad, use_adapter

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.learners import LEARNERS, LOSS_TYPES
from dreamgym_lg.integrations.trl.token_trainer import split_passes
from dreamgym_lg.learner import LearnerName, group_advantages
from dreamgym_lg.types import Trajectory

REWARDS = (0.0, 1.0, 0.25, 1.0)


@pytest.fixture(name="group")
def _group(tokenizer: PreTrainedTokenizerFast) -> list[Trajectory]:
    """Four episodes of different lengths, sampled by another model: ratios beyond the clip region on both sides."""
    behaviour = model_of(tokenizer)
    return [trajectory(reward, segment(behaviour, 40 + i), index=i) for i, reward in enumerate(REWARDS)]


def raw_gradient(
    start: Any,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    group: list[Trajectory],
    *,
    peft_config: LoraConfig | None = None,
    **options: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of one update by TRL's trainer as it is, of rows such as it makes itself, and what it logs of it."""
    segments = [one.segments[0] for one in group]
    starts = [list(one.sampled).index(1) for one in segments]
    prompts = [torch.tensor(one.token_ids[:n]) for one, n in zip(segments, starts, strict=True)]
    completions = [torch.tensor(one.token_ids[n:]) for one, n in zip(segments, starts, strict=True)]
    masks = pad([torch.tensor(one.sampled[n:]) for one, n in zip(segments, starts, strict=True)], padding_value=0)
    logprobs = [torch.tensor(one.logprobs[n:]) for one, n in zip(segments, starts, strict=True)]

    class Raw(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            batch = {
                "prompt_ids": pad(prompts, padding_value=0, padding_side="left"),
                "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"),
                "completion_ids": pad(completions, padding_value=0),
                "completion_mask": pad([torch.ones_like(ids) for ids in completions], padding_value=0),
                "tool_mask": masks,
                "old_per_token_logps": pad(logprobs, padding_value=0.0),
                "advantages": torch.tensor(group_advantages([one.reward for one in group])),
                "num_items_in_batch": masks.sum(),
            }
            if self.beta:
                ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
                mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
                with torch.no_grad(), use_adapter(self.model, None) if peft_config else nullcontext():
                    reference = self.ref_model or self.model
                    found = self._get_per_token_logps_and_entropies(reference, ids, mask, masks.size(1))
                batch["ref_per_token_logps"] = found[0]
            return batch

    model, rate = deepcopy(start), 100.0
    plain = {"use_cpu": True, "bf16": False, "activation_checkpointing": False, "report_to": "none", "disable_tqdm": True}
    step = {"optim": "sgd", "learning_rate": rate, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0}
    once = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 4, "save_strategy": "no", "logging_steps": 1}
    args = GRPOConfig(output_dir=str(path), seed=0, **plain, **step, **once, **options)
    trainer = Raw(
        model=model,
        reward_funcs=lambda **_: [0.0],
        args=args,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": ""}] * 4),
        peft_config=peft_config,
    )
    changed = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    before = torch.cat([parameter.detach().flatten().clone() for parameter in changed])
    trainer.train()
    return (before - torch.cat([parameter.detach().flatten() for parameter in changed])) / rate, trainer.state.log_history[0]


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("loss_type", "beta", "lora"),
    [*((name, 0.5, False) for name in LOSS_TYPES), ("grpo", 0.0, False), ("dapo", 0.5, True), ("grpo", 0.0, True)],
)
def test_one_update_is_raw_trls(
    moved: Any,
    group: list[Trajectory],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    loss_type: str,
    beta: float,
    lora: bool,
) -> None:
    options = {"loss_type": loss_type, "beta": beta}
    options |= {"peft_config": adapters()} if lora else {}
    expected, logged = raw_gradient(moved, tokenizer, tmp_path / "raw", group, **options)
    # TRL logs a mean over tokens whatever the loss is; ours weighs them as the loss does
    names = ["loss", "grad_norm", *(["kl"] if beta and LOSS_TYPES[loss_type] != "episodes" else [])]
    for tokens in (1, 1000):
        path = tmp_path / str(tokens)
        assert off(gradient(moved, tokenizer, path, [group], micro_batch_tokens=tokens, **options), expected) < 1e-4
        metrics = torch.load(path / "training.pt")["metrics"]
        assert {name: metrics[name] for name in names} == pytest.approx({name: logged[name] for name in names}, rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_episode_weighs_the_same_however_it_is_cut(
    moved: Any, group: list[Trajectory], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, loss_type: str
) -> None:
    """Of the KL term too, which is half of this gradient."""
    options = {"loss_type": loss_type, "beta": 0.5}
    expected = gradient(moved, tokenizer, tmp_path / "1", [group], **options)
    most = min(one.segments[0].trainable for one in group)
    for parts in (2, most):
        segments = cut(group[1].segments[0], parts)
        divided = [group[0], trajectory(REWARDS[1], *segments, index=1), *group[2:]]
        assert off(gradient(moved, tokenizer, tmp_path / str(parts), [divided], **options), expected) < 1e-4


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_number_of_passes_does_not_matter(
    moved: Any, group: list[Trajectory], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, beta: float
) -> None:
    """Five rows, in five passes to one; neither for the gradient nor for what is measured."""
    five = [[*group, trajectory(0.5, segment(model_of(tokenizer), 77), index=4)]]
    lengths = [len(one.segments[0].token_ids) for one in five[0]]
    sizes = (1, 60, 100, 1000)
    assert [len(split_passes(lengths, size)) for size in sizes] == [5, 3, 2, 1]
    found = {n: gradient(moved, tokenizer, tmp_path / str(n), five, micro_batch_tokens=n, beta=beta) for n in sizes}
    assert found[1].norm() > 1e-3
    assert max(off(each, found[1]) for each in found.values()) < 1e-6
    metrics = [torch.load(tmp_path / str(n) / "training.pt")["metrics"] for n in sizes]
    for name in ("loss", "grad_norm", "entropy", "clip_ratio/region_mean", *(["kl"] if beta else [])):
        assert [each[name] for each in metrics] == pytest.approx([metrics[0][name]] * 4, rel=1e-5), name


def test_tokens_of_another_engine_are_weighed_by_truncated_ratios(
    moved: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """One in which each sampled token was less probable than for the trainer, by a factor of e."""
    own = [segment(moved, 40 + i) for i in range(4)]
    other = [replace(each, logprobs=[p - s for p, s in zip(each.logprobs, each.sampled, strict=True)]) for each in own]
    same, less = ([trajectory(REWARDS[i], each, index=i) for i, each in enumerate(each)] for each in (own, other))
    correction = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 2.0}
    expected = gradient(moved, tokenizer, tmp_path / "plain", [same])
    for name, group, factor, differs in (("same", same, 1.0, 0.0), ("less", less, 2.0, 1.0)):
        found = gradient(moved, tokenizer, tmp_path / name, [group], micro_batch_tokens=60, **correction)
        assert off(found, factor * expected) < 1e-4
        metrics = torch.load(tmp_path / name / "training.pt")["metrics"]
        assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(factor, rel=1e-4)
        assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(differs, abs=1e-4)
    assert "sampling/importance_sampling_ratio/mean" not in torch.load(tmp_path / "plain" / "training.pt")["metrics"]


def test_more_updates_than_rows_make_no_empty_steps(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A step without a row would still move the weights, by Adam's momentum."""
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path, updates=8)
    groups = [[trajectory(float(i), segment(model, i), index=i) for i in range(2)]]
    learner.update(groups)
    learner.update(groups)
    assert learner._trainer.steps == 4


def test_several_updates_share_the_rows_of_an_iteration(
    moved: Any, group: list[Trajectory], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """With a rate so small that the first step does not change the second, their mean is the whole gradient."""
    whole = gradient(moved, tokenizer, tmp_path / "1", [group])
    model, rate = deepcopy(moved), 1e-2
    learner = learner_of(model, tokenizer, tmp_path / "2", updates=2, max_grad_norm=0.0)
    descend(learner, rate)
    learner.update([group])
    assert off((weights(moved) - weights(model)) / rate / 2, whole) < 0.05


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
OTHERS = {
    "its get_decoder() is the head": ModernBertDecoderConfig(**SMALL, layer_types=["full_attention"], bos_token_id=1),
    "a mixture of experts": Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("learner", ["grpo", "ppo"])
def test_other_architectures_learn(
    config: PretrainedConfig, learner: LearnerName, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Rows that begin alike, for longer than is computed with every row (`shared_prefix`)."""
    config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config)
    behaviour, before, episodes = model_of(tokenizer), weights(model), []
    for index, reward in enumerate(REWARDS):
        one, none = segment(behaviour, 40 + index), [0] * 40
        fields = {"token_ids": [*range(5, 45), *one.token_ids], "sampled": [*none, *one.sampled]}
        episodes.append(trajectory(reward, replace(one, **fields, logprobs=[*none, *one.logprobs]), index=index))
    if learner == "grpo":
        expected, _ = raw_gradient(model, tokenizer, tmp_path / "raw", episodes, beta=0.0, loss_type="dapo")
        found = gradient(model, tokenizer, tmp_path / "own", [episodes], loss_type="dapo")
        assert off(found, expected) < 1e-3
    trained = learner_of(model, tokenizer, tmp_path, LEARNERS[learner])
    trained.update([episodes])
    assert not torch.equal(weights(model), before)


def test_only_what_is_before_a_trained_token_reaches_the_head(
    moved: Any, group: list[Trajectory], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(moved, tokenizer, tmp_path)
    batch = learner._trainer.batch(learner._credit([group]))
    with torch.no_grad():
        logits = moved(batch.ids).logits[:, :-1]
    every = torch.log_softmax(logits, dim=-1).gather(2, batch.ids[:, 1:, None])[..., 0][batch.scored[:, 1:]]
    monkeypatch.setattr(_ChunkedLogProbFunction, "apply", head := Mock(wraps=_ChunkedLogProbFunction.apply))
    found = learner._trainer.log_probs(batch)
    assert len(head.call_args.args[0]) == batch.scored.sum() < batch.scored.numel()
    assert found == pytest.approx(every, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_an_update_every_ratio_is_one(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, temperature: float, play: Callable[..., list[list[Trajectory]]]
) -> None:
    model = model_of(tokenizer)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, temperature=temperature, max_new_tokens=12)
    groups = play(policy)
    learner = learner_of(model, tokenizer, tmp_path, temperature=policy.temperature)
    rows = learner._credit(groups)
    batch = learner._trainer.batch(rows)
    assert batch.scored.sum() > 20
    assert (learner._trainer.log_probs(batch) - batch.logprobs).exp() == pytest.approx(1, abs=1e-3)
    assert learner.update(groups)["clip_ratio/region_mean"] == 0
