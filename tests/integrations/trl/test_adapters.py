"""LoRA: what is trained, what is saved, and what a policy with merged adapters says."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import adapters, gradient, groups_of, learner_of, model_of, trained, weights
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.training import create_trl_learner
from dreamgym_lg.integrations.transformers import loading
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.loading import load_model
from dreamgym_lg.integrations.trl.adapters import adapt, wants_adapters
from dreamgym_lg.integrations.trl.learners import LEARNERS
from dreamgym_lg.integrations.trl.options import default_rate
from dreamgym_lg.integrations.trl.sft import save_model
from dreamgym_lg.learner import LearnerName
from dreamgym_lg.production.export import export_policy, load_policy
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Trajectory

RECORD: dict[str, Any] = {
    **{"policy_version": "v1", "base_model": "tiny", "training": None, "experience_model": None, "evaluation": []},
    **{"data": {"trajectories": 0, "steps": 0, "sha256": ""}, "versions": {"dreamgym-lg": "0.1.0"}},
}


def greedy(policy: LocalChatModel) -> list[list[int]]:
    """The tokens that the policy says to some questions."""
    found = []
    for words in ("say a colour", "the kitchen", "a longer observation"):
        with TokenRecorder() as recorder:
            policy.with_temperature(0).invoke(words)
        found += [list(call.sampled_ids) for call in recorder.calls]
    return found


@torch.no_grad()
def log_probs(model: Any) -> torch.Tensor:
    return torch.log_softmax(model.eval()(torch.arange(2, 42)[None]).logits.float(), dim=-1)


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights keep this dtype on any CPU, as on one with instructions for it."""
    monkeypatch.setattr(loading, "computes_bfloat16", lambda: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_saved_and_an_exported_policy_are_bit_for_bit_the_trained_one(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    name: LearnerName,
    dtype: torch.dtype,
    play: Callable[..., list[list[Trajectory]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters stand beside their base: merged into bfloat16, most of an update would be rounded away."""
    save_model(model_of(tokenizer), tokenizer, tmp_path / "begun")  # a model cast in memory has cast rotary frequencies, too
    model = load_model(tmp_path / "begun", dtype=dtype)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=12)
    before, base = greedy(policy), weights(model)
    learner = create_trl_learner(policy, tmp_path / "run", Settings(learner=name, lora=True, learning_rate=5e-2))
    for _ in range(3):
        learner.update(play(policy))
        policy.weights_changed()
    adapted = weights(model)
    save_model(model, tokenizer, tmp_path / "policy")
    export_policy(policy, tmp_path / "exported", provenance=RECORD)
    assert torch.equal(weights(model), adapted), "saving changes nothing"
    assert greedy(policy) != before
    for loaded in (LocalChatModel.from_path(tmp_path / "policy", max_new_tokens=12), load_policy(tmp_path / "exported")):
        assert torch.equal(log_probs(loaded.model), log_probs(model))
        assert greedy(loaded) == greedy(policy)
    # started in the folder, other readers find the base; transformers' own rounds adapters to the precision of the base
    monkeypatch.chdir((tmp_path / "exported").rename(tmp_path / "moved"))
    other = AutoModelForCausalLM.from_pretrained(".")
    assert (log_probs(other) - log_probs(model)).abs().mean() < (1e-6 if dtype == torch.float32 else 0.05)
    assert torch.equal(weights(load_model(tmp_path / "policy" / "base")), base)


def test_a_policy_with_adapters_is_trained_on_and_its_reference_is_where_it_began(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """As GRPO goes on from supervised training; a second learner of the process begins there too."""
    save_model(model_of(tokenizer), tokenizer, tmp_path / "begun")
    model = load_model(tmp_path / "begun", dtype="bfloat16")
    adapt(model)
    for number, (name, value) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.05, generator=torch.Generator().manual_seed(number))
    save_model(model, tokenizer, tmp_path / "start")
    start, groups = log_probs(model), [groups_of(model, i) for i in range(3)]
    whole = load_model(tmp_path / "start")
    assert torch.equal(log_probs(whole), start)
    learner = learner_of(whole, tokenizer, tmp_path / "whole", beta=0.5, learning_rate=1e-2)
    kl = [learner.update(each)["kl"] for each in groups]
    assert abs(kl[0]) < 1e-6 < kl[1] < kl[2], "the reference has the adapters that training began with"
    assert not torch.equal(log_probs(whole), start)

    parts, found = load_model(tmp_path / "start"), list[float]()
    for part in (groups[:1], groups[1:]):
        learner = learner_of(parts, tokenizer, tmp_path / "parts", beta=0.5, learning_rate=1e-2)
        found += [learner.update(each)["kl"] for each in part]
    assert found == kl and torch.equal(log_probs(parts), log_probs(whole))
    with pytest.raises(ConfigurationError, match="policy has adapters.*leave out peft_config"):
        learner_of(parts, tokenizer, tmp_path / "other", peft_config=adapters())
    with pytest.raises(ConfigurationError, match="lora=False, and the policy has adapters"):
        wants_adapters(parts, False)


@pytest.mark.parametrize(("parameters", "lora"), [(50_000_000, False), (60_000_000, True)])
def test_adapters_are_the_default_above_fifty_million_parameters(
    tokenizer: PreTrainedTokenizerFast, parameters: int, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tokenizer)
    monkeypatch.setattr(type(model), "num_parameters", lambda *_: parameters)
    assert wants_adapters(model, None) == lora and not wants_adapters(model, False) and wants_adapters(model, True)
    assert 1e-4 < default_rate(model, small=2e-4, large=1e-6) <= 2e-4, "no step at the limit"
    monkeypatch.setattr(type(model), "num_parameters", lambda *_: 7_000_000_000)
    assert default_rate(model, small=2e-4, large=1e-6) == pytest.approx(1e-6)


def test_adapters_alone_are_trained_and_saved(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path, peft_config=adapters(), beta=0.5)
    frozen = {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}
    before = trained(learner)
    learner.update(groups_of(model_of(tokenizer), 0))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in frozen.items())
    assert not torch.equal(trained(learner), before)
    (size,) = (file.stat().st_size for file in tmp_path.iterdir())
    assert 12 * len(before) < size < 12 * len(before) + 65536, "each parameter, of which Adam keeps two numbers"


def test_a_new_learner_takes_the_place_of_one_in_the_same_process(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """As the real part of a training does after the dreamed one: adapters are not put on adapters."""
    options: Any = {"peft_config": adapters(), "beta": 0.5}
    groups = [groups_of(model_of(tokenizer), i) for i in range(3)]
    models = [model_of(tokenizer), model_of(tokenizer)]
    whole = learner_of(models[0], tokenizer, tmp_path / "whole", **options)
    losses = [whole.update(each)["loss"] for each in groups]
    found = []
    for part in (groups[:1], groups[1:]):
        learner = learner_of(models[1], tokenizer, tmp_path / "parts", **options)
        found += [learner.update(each)["loss"] for each in part]
    assert found == losses
    assert models[1].state_dict().keys() == models[0].state_dict().keys()


@pytest.mark.parametrize("name", LEARNERS)
def test_bfloat16_weights_are_trained_by_float32_adapters(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: LearnerName
) -> None:
    model = model_of(tokenizer).to(torch.bfloat16)
    learner = learner_of(model, tokenizer, tmp_path, LEARNERS[name], peft_config=adapters(), beta=0.1)
    before = trained(learner)
    assert before.dtype == torch.float32
    metrics = learner.update(groups_of(model_of(tokenizer), 0))
    assert (trained(learner) != before).float().mean() > 0.9 and metrics["loss"] == metrics["loss"]
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_checkpointed_activations_give_the_same_gradient(
    moved: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    groups = groups_of(model_of(tokenizer), 0)
    options: Any = {"peft_config": adapters(), "beta": 0.5}
    expected = gradient(moved, tokenizer, tmp_path / "kept", groups, **options)
    found = gradient(moved, tokenizer, tmp_path / "again", groups, activation_checkpointing=True, **options)
    assert expected.norm() > 1e-3 and (found - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize(("parameters", "factor"), [(7_000_000_000, 10), (134_515_008, 1.46), (1_000_000, 0.5)])
def test_the_default_rate_of_adapters_is_ten_times_that_of_whole_weights_and_1e_4_at_most(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, parameters: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    for lora in (False, True):
        policy = LocalChatModel(model=model_of(tokenizer), tokenizer=tokenizer)
        monkeypatch.setattr(type(policy.model), "num_parameters", lambda *_: parameters)
        learner: Any = create_trl_learner(policy, tmp_path / str(lora), Settings(lora=lora, beta=0))
        rates.append(learner._trainer.options.learning_rate)
    assert rates[1] == pytest.approx(factor * rates[0], rel=0.02) and rates[1] <= 1e-4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"r": 8}, r"peft_config=\{'r': 8\} is no peft.LoraConfig.*lora=True"),
        (LoraConfig(bias="all"), "peft_config has bias='all', .*leave it out"),
        (LoraConfig(modules_to_save=["embed_tokens"]), "peft_config has modules_to_save="),
    ],
)
def test_what_is_more_than_adapters_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, given: Any, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        learner_of(model_of(tokenizer), tokenizer, tmp_path / "new", peft_config=given)
    assert not (tmp_path / "new").exists(), "nothing was begun"


def test_a_model_that_cannot_have_new_adapters_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    with pytest.raises(ConfigurationError, match=r"has adapters.*merge_and_unload\(\).*lora=True"):
        learner_of(get_peft_model(deepcopy(model), adapters()), tokenizer, tmp_path, peft_config=adapters())
    quantized = model_of(tokenizer)
    quantized.is_quantized = True
    with pytest.raises(ConfigurationError, match='quantized.*dtype="bfloat16".*lora=True'):
        learner_of(quantized, tokenizer, tmp_path, peft_config=adapters())
