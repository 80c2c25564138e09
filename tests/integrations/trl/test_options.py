"""What a learner cannot be given is refused by name, with what to do instead."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import groups_of, learner_of, model_of, promptly
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.training import create_trl_learner
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.options import StepOptions, precision
from dreamgym_lg.integrations.trl.sft import train_sft
from dreamgym_lg.learner import sft_row
from dreamgym_lg.types import Segment, Trajectory


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lerning_rate": 1e-3}, "unknown option of GRPOLearner 'lerning_rate'.*Did you mean 'learning_rate'"),
        ({"epsilonn_high": 0.3}, "unknown option of GRPOLearner 'epsilonn_high'.*Did you mean 'epsilon_high'"),
        ({"loss_type": "sapo"}, "unknown loss_type 'sapo'; known: bnpo, cispo, dapo, grpo"),
        ({"loss_type": "bnp"}, "unknown loss_type 'bnp'.*Did you mean 'bnpo'"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0"),
        ({"updates": 0}, "updates=0"),
        ({"save_every": 0}, "save_every=0"),
        ({"updates": 2, "vllm_importance_sampling_correction": True}, "updates=2 with vllm_importance_sampling_correction"),
        ({"temperature": 0}, r"temperature=0: .*with_temperature\(1.0\)"),
    ],
)
def test_options_that_cannot_be_right_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        learner_of(model_of(tokenizer), tokenizer, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists(), "nothing was begun"


def test_an_experiment_with_groups_of_one_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    policy = LocalChatModel(model=model_of(tokenizer), tokenizer=tokenizer)
    with pytest.raises(ConfigurationError, match="num_generations=1: .* at least 2"):
        create_trl_learner(policy, tmp_path, Settings(num_generations=1, beta=0))


def test_an_experiment_hands_the_policys_temperature_on(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    policy = LocalChatModel(model=model_of(tokenizer), tokenizer=tokenizer, temperature=0.7)
    learner: Any = create_trl_learner(policy, tmp_path, Settings(beta=0))
    assert learner.temperature == learner._trainer.options.temperature == 0.7


def test_options_have_trls_names_and_defaults(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    defaults = {field.name: field.default for field in fields(GRPOConfig)}
    own = {"learning_rate", "loss", "bf16", "activation_checkpointing", "vllm_importance_sampling_correction"}
    others = [field for field in fields(StepOptions) if field.name not in own]
    assert {field.name: field.default for field in others} == {field.name: defaults[field.name] for field in others}
    model = model_of(tokenizer)
    options = {"epsilon": 0.1, "epsilon_high": 0.3, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2, "delta": 2.0}
    learner = learner_of(model, tokenizer, tmp_path, **options)
    assert {name: getattr(learner._trainer.options, name) for name in options} == options
    first = learner.update(groups_of(model, 0))["learning_rate"]
    assert [first, *(learner.update(groups_of(model, i))["learning_rate"] for i in (1, 2))] == [0.0, 0.005, 0.01]


def test_arguments_of_training_on_the_page_are_taken(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "gpu.md").read_text()
    table = page[page.index("| argument of `gym.train` |") : page.index("## The engine's probabilities")]
    given = dict[str, Any]()
    for arguments in re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE):
        given |= eval(f"dict({arguments})")
        options = given.pop("learner_options", {})
        learner_of(model_of(tokenizer), tokenizer, tmp_path / str(len(options)), **options)
    assert given == {"beta": 0} and Settings(**given)


def test_options_given_to_a_resumed_training_hold(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    learner_of(model, tokenizer, tmp_path, learning_rate=0.1).update(groups_of(model, 0))
    model = model_of(tokenizer)
    again = learner_of(model, tokenizer, tmp_path, learning_rate=0.01, adam_beta1=0.5)
    assert again.iteration == 1 and again.update(groups_of(model, 1))["learning_rate"] == 0.01
    assert {(group["lr"], group["betas"][0]) for group in again._trainer.optimizer.param_groups} == {(0.01, 0.5)}


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
        train_sft(model, [sft_row(Segment(token_ids=[5, 6], sampled=[0, 1], logprobs=[0.0] * 2, temperature=1.0))], steps=1)


class OnGPU:
    """As much of a model as the choice of precision looks at."""

    device = torch.device("cuda", 1)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.zeros(1))]


def test_a_model_on_a_gpu_is_trained_under_autocast() -> None:
    on_gpu: Any = OnGPU()
    assert precision(on_gpu) == {"bf16": True, "activation_checkpointing": True}
