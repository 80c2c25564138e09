"""What a learner cannot be given is refused by name, with what to do instead."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import groups_of, learner_of, model_of, promptly
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.training import create_trl_learner
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.options import precision
from dreamgym_lg.integrations.trl.sft import save_model, train_sft
from dreamgym_lg.types import Trajectory


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lerning_rate": 1e-3}, "no option 'lerning_rate'; did you mean 'learning_rate'"),
        ({"epsilonn_high": 0.3}, "no option 'epsilonn_high'; did you mean 'epsilon_high'"),
        ({"xyzzy": 1}, "no option 'xyzzy'; .*GRPOConfig"),
        ({"gradient_accumulation_steps": 8}, "does not take gradient_accumulation_steps: .*`micro_batch_tokens`"),
        ({"per_device_train_batch_size": 8}, "`micro_batch_tokens`"),
        ({"num_iterations": 3}, "does not take num_iterations: .*`updates`"),
        ({"steps_per_generation": 8}, "does not take steps_per_generation: .*`updates`"),
        ({"num_generations": 8}, "does not take num_generations: the rollouts"),
        ({"gradient_checkpointing": True}, "does not take gradient_checkpointing: .*`activation_checkpointing`"),
        ({"lr_scheduler_type": "cosine"}, "does not take lr_scheduler_type: .*constant"),
        ({"warmup_steps": 0.1}, "warmup_steps=0.1: .*number of steps"),
        ({"top_p": 0.9}, "does not take top_p: the policy generates"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level: .*several segments"),
        ({"entropy_coef": 0.1}, "entropy_coef: .*`micro_batch_tokens`"),
        ({"eval_steps": 2}, "does not take TRL's eval_steps: .*leave it out"),
        ({"loss_type": "sapo"}, "unknown loss_type 'sapo'; known: bnpo, cispo, dapo, dr_grpo, grpo"),
        ({"loss_type": "drgrpo"}, "unknown loss_type 'drgrpo'.*Did you mean 'dr_grpo'"),
        ({"max_completion_length": 64}, "max_completion_length .*'dr_grpo'.*max_new_tokens"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0"),
        ({"updates": 0}, "updates=0"),
        ({"save_every": 0}, "save_every=0"),
        ({"updates": 2, "vllm_importance_sampling_correction": True}, "updates=2 with vllm_importance_sampling_correction"),
        ({"save_steps": 5}, "does not take save_steps: .*`save_every`"),
        ({"temperature": 0}, r"temperature=0: .*with_temperature\(1.0\)"),
    ],
)
def test_options_that_cannot_be_right_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        learner_of(model_of(tokenizer), tokenizer, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists(), "nothing was begun"


def test_a_reference_that_cannot_be_had_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    with pytest.raises(ConfigurationError, match="beta=0.1 .*made in memory.*beta=0"):
        learner_of(model, tokenizer, tmp_path, beta=0.1)


@pytest.mark.parametrize("revision", [None, "5b8e4e4"])
def test_the_reference_is_of_the_policys_revision(
    moved: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, revision: str | None
) -> None:
    options = {"revision": revision} if revision else {}
    policy = LocalChatModel.from_path(moved.config._name_or_path, **options)
    found = learner_of(policy.model, tokenizer, tmp_path / "run", beta=0.1)._trainer.args.model_init_kwargs
    assert found == (options or None)
    save_model(policy.model, tokenizer, tmp_path / "saved")
    assert "5b8e4e4" not in (tmp_path / "saved" / "config.json").read_text()


def test_an_experiment_with_groups_of_one_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    policy = LocalChatModel(model=model_of(tokenizer), tokenizer=tokenizer)
    with pytest.raises(ConfigurationError, match="num_generations=1: .* at least 2"):
        create_trl_learner(policy, tmp_path, Settings(num_generations=1, beta=0))


def test_an_experiment_hands_the_policys_temperature_on(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    policy = LocalChatModel(model=model_of(tokenizer), tokenizer=tokenizer, temperature=0.7)
    learner: Any = create_trl_learner(policy, tmp_path, Settings(beta=0))
    assert learner.temperature == learner._trainer.temperature == 0.7


def test_what_remains_is_trls(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    options = {"epsilon": 0.1, "epsilon_high": 0.3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2, "delta": 2.0}
    learner = learner_of(model, tokenizer, tmp_path, **options)
    args = learner._trainer.args
    assert {name: getattr(args, name) for name in options} == options
    assert learner._trainer.epsilon_high == 0.3
    first = learner.update(groups_of(model, 0))["learning_rate"]
    assert [first, *(learner.update(groups_of(model, i))["learning_rate"] for i in (1, 2))] == [0.0, 0.005, 0.01]
    learner.close()


# --- temperature ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 0.0, None])
def test_tokens_of_another_temperature_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, temperature: float | None
) -> None:
    model = model_of(tokenizer)
    groups = groups_of(model, 0)
    one = groups[1][2]
    groups[1][2] = replace(one, segments=[replace(one.segments[0], temperature=temperature)])
    learner = learner_of(model, tokenizer, tmp_path)
    found = "an unknown one" if temperature is None else str(temperature)
    told = rf"sampled at temperature {found}, and the learner .* at 1.0: .*temperature=policy.temperature.*new folder"
    with pytest.raises(ConfigurationError, match=told):
        learner.update(groups)
    assert learner.iteration == 0
    assert promptly(lambda: learner.update(groups_of(model, 1))) is None, "it can go on"
    learner.close()


def test_a_model_bound_to_another_temperature_is_found_out(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, play: Callable[..., list[list[Trajectory]]]
) -> None:
    model = model_of(tokenizer)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=12)
    with pytest.raises(ConfigurationError, match="at temperature 0.5, .* at 1.0"):
        learner_of(model, tokenizer, tmp_path).update(play(policy, temperature=0.5))


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, dtype: torch.dtype) -> None:
    model = model_of(tokenizer).to(dtype)
    with pytest.raises(ConfigurationError, match=f'{dtype}.*load it with dtype="float32"'):
        learner_of(model, tokenizer, tmp_path)
    with pytest.raises(ConfigurationError, match=f'{dtype}.*load it with dtype="float32"'):
        train_sft(model, tokenizer, [{"input_ids": [5, 6], "labels": [5, 6]}], steps=1)


class OnGPU:
    """As much of a model as the choice of precision looks at."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.zeros(1))]


def test_a_model_on_a_gpu_is_trained_under_autocast() -> None:
    first: Any = OnGPU(0)
    assert precision(first, {}) == {"use_cpu": False, "bf16": True, "activation_checkpointing": True}
    assert precision(first, {"fp16": True})["bf16"] is False
    second: Any = OnGPU(1)
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES=1"):
        precision(second, {})


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("lerning_rate", "train_sft has no option 'lerning_rate'; did you mean 'learning_rate'"),
        ("max_steps", "does not take max_steps: give `steps`"),
    ],
)
def test_options_of_supervised_training(tokenizer: PreTrainedTokenizerFast, option: str, told: str) -> None:
    given: dict[str, Any] = {option: 1}
    with pytest.raises(ConfigurationError, match=told):
        train_sft(model_of(tokenizer), tokenizer, [{"input_ids": [5, 6], "labels": [5, 6]}], steps=1, **given)
