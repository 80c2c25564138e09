"""Every learner against its loss written out, on episodes of several segments; repeatable, and resumable."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import adapters, cut, descend, gradient, groups_of, learner_of, model_of, promptly, segment, trajectory, weights
from torch.nn.functional import logsigmoid
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.training import create_trl_learner
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.learners import LEARNERS
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.integrations.trl.ppo import PPOLearner, clipped_value_loss
from dreamgym_lg.integrations.trl.sft import save_model
from dreamgym_lg.learner import LearnerName
from dreamgym_lg.types import Segment, Trajectory

NAMES = sorted(LEARNERS)
"""Of DPO, which cannot be without."""


@pytest.fixture(name="groups")
def _groups(tokenizer: PreTrainedTokenizerFast) -> list[list[Trajectory]]:
    """Two tasks, episodes of one to three segments, sampled by another model: ratios beyond the clip region on both sides."""
    behaviour = model_of(tokenizer)
    rewards = ((0.0, 1.0, 0.25, 1.0), (1.0, 0.0, 0.5))
    return [
        [trajectory(r, *cut(segment(behaviour, 10 * g + i), 1 + i % 3), task=f"t{g}", index=i) for i, r in enumerate(row)]
        for g, row in enumerate(rewards)
    ]


def logprobs(model: Any, one: Segment) -> torch.Tensor:
    """Of the sampled tokens alone."""
    ids = torch.tensor([one.token_ids])
    every = torch.log_softmax(model(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    return every[torch.tensor(one.sampled[1:]).bool()]


def ratios(model: Any, one: Segment) -> torch.Tensor:
    return (logprobs(model, one) - torch.tensor(one.logprobs)[torch.tensor(one.sampled).bool()]).exp()


def clipped(ratio: torch.Tensor, advantage: torch.Tensor | float) -> torch.Tensor:
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def dpo(model: Any, groups: list[list[Trajectory]], *, reference: Any, beta: float = 0.5) -> torch.Tensor:
    pairs = [(groups[0][1], groups[0][0]), (groups[0][3], groups[0][2]), (groups[1][0], groups[1][1])]

    def more(one: Trajectory) -> torch.Tensor:
        return sum((logprobs(model, s) - logprobs(reference, s).detach()).sum() for s in one.segments)  # type: ignore[return-value]

    return -torch.stack([logsigmoid(beta * (more(chosen) - more(rejected))) for chosen, rejected in pairs]).mean()


def prepared(moved: Any, tokenizer: PreTrainedTokenizerFast, path: Path, kind: type[PolicyLearner], options: Any) -> Any:
    """A copy of the model, under LoRA with the adapters that a learner gives it."""
    model = deepcopy(moved)
    if options:
        learner_of(model, tokenizer, path, kind, **{"beta": 0.5}, **options)
    return model.eval()


LORA = pytest.mark.parametrize("lora", [{}, {"peft_config": adapters()}], ids=["all weights", "lora"])


@LORA
def test_one_update_has_the_gradient_of_the_loss_written_out(
    moved: Any, groups: list[list[Trajectory]], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lora: dict[str, Any]
) -> None:
    reference = deepcopy(moved) if lora else LocalChatModel.from_path(moved.config._name_or_path).model
    model = prepared(moved, tokenizer, tmp_path / "written", LEARNERS["dpo"], lora)
    loss = dpo(model, groups, reference=reference.eval())
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trainable)])
    options = {"beta": 0.5, **lora}
    found = gradient(moved, tokenizer, tmp_path, groups, kind=LEARNERS["dpo"], micro_batch_tokens=70, **options)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    metrics = torch.load(tmp_path / "training.pt")["metrics"]
    assert metrics["dpo_loss"] == pytest.approx(loss.item(), rel=1e-3)


def critic_of(learner: Any) -> None:
    """Give the critic weights: a new one expects 0 everywhere."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learner._trainer.critic.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)


def ppo(model: Any, groups: list[list[Trajectory]], gamma: float, gae_lambda: float, coef: float) -> torch.Tensor:
    """Advantages by the sum that defines them, not by its recursion; all that is given or read in evaluation is a constant."""
    raw, values, ratio = [], [], []
    for one in (one for group in groups for one in group):
        states = [model.get_decoder()(torch.tensor([s.token_ids])).last_hidden_state[0, :-1] for s in one.segments]
        expected = [
            model.value_head(h)[torch.tensor(s.sampled[1:]).bool(), 0] for h, s in zip(states, one.segments, strict=True)
        ]
        mine = torch.cat(expected)
        fixed = [*mine.tolist(), 0.0]
        rewards = [0.0] * (len(mine) - 1) + [one.reward]
        deltas = [r + gamma * fixed[t + 1] - fixed[t] for t, r in enumerate(rewards)]
        n = range(len(mine))
        raw += [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in n if k >= t) for t in n]
        values.append(mine)
        ratio += [ratios(model, s) for s in one.segments]
    advantages, expected_all = torch.tensor(raw), torch.cat(values)
    normalised = (advantages - advantages.mean()) / advantages.std(correction=0)
    returns = advantages + expected_all.detach()
    return clipped(torch.cat(ratio), normalised).mean() + coef * ((expected_all - returns) ** 2 / 2).mean()


def trunk_of(model: Any) -> torch.Tensor:
    """What is trained below the heads."""
    found = [parameter for parameter in model.get_decoder().parameters() if parameter.requires_grad]
    return torch.cat([parameter.detach().flatten().clone() for parameter in found])


def after_a_prompt(one: Segment) -> Segment:
    """The segment behind a beginning that all share, which is computed once."""
    prompt = list(range(50, 90))
    given = {"sampled": [0] * 40 + list(one.sampled), "logprobs": [0.0] * 40 + list(one.logprobs)}
    return replace(one, token_ids=prompt + list(one.token_ids), **given)


@LORA
def test_ppos_gradient_is_the_clipped_losss_and_the_critics(
    moved: Any, groups: list[list[Trajectory]], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lora: dict[str, Any]
) -> None:
    groups = [[replace(one, segments=[after_a_prompt(s) for s in one.segments]) for one in group] for group in groups]
    rate, model = 1.0, deepcopy(moved)
    options = {"gamma": 0.95, "gae_lambda": 0.9, "value_coef": 0.5, "micro_batch_tokens": 150}
    learner = learner_of(model, tokenizer, tmp_path, PPOLearner, max_grad_norm=0.0, **options, **lora)
    descend(learner, rate)
    critic_of(learner)
    head = learner._trainer.critic
    start = prepared(moved, tokenizer, tmp_path / "written", PPOLearner, lora)
    start.value_head = deepcopy(head)
    trunk = trunk_of(model)
    loss = ppo(start, groups, 0.95, 0.9, 0.5)
    loss.backward()
    metrics = learner.update(groups)
    trainable = [parameter for parameter in start.get_decoder().parameters() if parameter.requires_grad]
    gradients = [torch.cat([p.grad.flatten() for p in part]) for part in (trainable, list(start.value_head.parameters()))]
    found = (trunk - trunk_of(model)) / rate
    assert float((found - gradients[0]).norm() / gradients[0].norm()) < 1e-3
    head = (weights(start.value_head) - weights(head)) / (10 * rate)
    assert torch.allclose(head, gradients[1], rtol=1e-3, atol=1e-6)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-3) and metrics["value_loss"] > 0


def test_the_critics_loss_is_the_larger_of_the_clipped_and_the_plain_one() -> None:
    values, before, returns = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).tolist()
    expected = []
    for v, b, r in zip(values, before, returns, strict=True):
        near = min(max(v, b - 0.2), b + 0.2)
        expected.append(max((v - r) ** 2, (near - r) ** 2) / 2)
    found = clipped_value_loss(*(torch.tensor(each) for each in (values, before, returns)), 0.2)
    assert found.tolist() == pytest.approx(expected)
    far = torch.tensor([1.0], requires_grad=True)
    clipped_value_loss(far, torch.tensor([0.0]), torch.tensor([1.5]), 0.2).sum().backward()
    assert far.grad is not None and far.grad.item() == 0, "it has moved far enough"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_environment_said_has_exactly_no_gradient(
    moved: Any, groups: list[list[Trajectory]], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: LearnerName
) -> None:
    learner = learner_of(moved, tokenizer, tmp_path, LEARNERS[name], **{"beta": 0.5})
    trainer: Any = learner._trainer
    if name == "ppo":
        critic_of(learner)
    rows, _ = learner._rows(learner._parts(groups))
    batch = trainer.batch(rows)
    probes: list[torch.Tensor] = []

    def probed(_: object, __: object, output: Any) -> Any:
        probes.append(torch.zeros_like(output.last_hidden_state, requires_grad=True))
        output.last_hidden_state = output.last_hidden_state + probes[-1]
        return output

    trainer.backbone.register_forward_hook(probed)
    trainer.loss(batch)[0].backward()
    before = torch.nn.functional.pad(batch.scored[:, 1:], (0, 1))
    (probe,) = (each for each in probes if each.grad is not None)
    assert (probe.grad[~before] == 0).all() and (probe.grad[before] != 0).any(dim=-1).float().mean() > 0.3


# --- runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "ppo")])
def test_the_same_seed_gives_the_same_trajectories_and_losses(
    moved: Any,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    name: LearnerName,
    play: Callable[..., list[list[Trajectory]]],
) -> None:
    found = []
    for run in ("one", "two"):
        policy = LocalChatModel(model=deepcopy(moved), tokenizer=tokenizer, max_new_tokens=8)
        learner = create_trl_learner(policy, tmp_path / run, Settings(learner=name, learning_rate=1e-2), updates=2)
        record: list[Any] = []
        for _ in range(2):
            groups = play(policy)
            metrics = {key: value for key, value in learner.update(groups).items() if "time" not in key}
            policy.weights_changed()
            record += [[list(s.token_ids) for one in groups[0] for s in one.segments], metrics]
        found.append((record, weights(policy.model).tolist()))
    assert found[0] == found[1]
    assert found[0][0][0] != found[0][0][2], "the policy has changed, or the test would say nothing"


@LORA
@pytest.mark.parametrize("name", ["ppo", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_learner_goes_on_after_a_crash_as_if_there_had_been_none(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: LearnerName, lora: dict[str, Any]
) -> None:
    """The critic's weights and its share of the optimiser included."""
    options = {"beta": 0.5, **lora}
    save_model(model_of(tokenizer), tokenizer, tmp_path / "base")
    models = [LocalChatModel.from_path(tmp_path / "base").model for _ in range(2)]
    groups, kind = [groups_of(models[0], i) for i in range(3)], LEARNERS[name]
    whole = learner_of(models[0], tokenizer, tmp_path / "whole", kind, **options)
    losses = [whole.update(each)["loss"] for each in groups]
    killed = learner_of(models[1], tokenizer, tmp_path / "killed", kind, **options)
    killed.update(groups[0])
    counted = (tmp_path / "killed" / "training.pt").read_bytes()
    killed.update(groups[1])
    (tmp_path / "killed" / "training.pt").write_bytes(counted)  # the crash came before the second was saved
    again = LocalChatModel.from_path(tmp_path / "base").model
    resumed = learner_of(again, tokenizer, tmp_path / "killed", kind, **options)
    assert resumed.iteration == 1
    for each, loss in zip(groups[1:], losses[1:], strict=True):
        assert promptly(partial(resumed.update, each)) is None
        assert resumed.metrics["loss"] == loss
    assert torch.equal(weights(again), weights(models[0]))


def test_a_policy_that_is_saved_for_use_has_no_critic(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path / "run", PPOLearner)
    learner.update(groups_of(model, 0))
    assert learner._trainer.critic.weight.abs().max() > 0
    save_model(model, tokenizer, tmp_path / "policy")
    loaded = LocalChatModel.from_path(tmp_path / "policy").model
    assert not [name for name, _ in [*model.named_parameters(), *loaded.named_parameters()] if "critic" in name]
    assert torch.equal(weights(loaded.get_decoder()), weights(model.get_decoder()))


# --- what a learner cannot be given -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("ppo", {"gamma": 0.0}, "gamma=0.0"),
        ("ppo", {"gae_lambda": 1.5}, "gae_lambda=1.5"),
        ("ppo", {"value_clip": 0.0}, "value_clip=0.0"),
        ("ppo", {"epsilom": 0.9}, "unknown option of PPOLearner 'epsilom'.*Did you mean 'epsilon'"),
        ("ppo", {"loss_type": "dapo"}, "unknown option of PPOLearner 'loss_type'"),
        ("dpo", {"delta": 2.0}, "DPOLearner does not take delta: its loss has no ratio"),
        ("dpo", {"beta": 0.0}, "beta=0.0: DPO"),
    ],
)
def test_options_that_cannot_be_right_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: LearnerName, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        learner_of(model_of(tokenizer), tokenizer, tmp_path / "new", LEARNERS[name], **options)
    assert not (tmp_path / "new").exists(), "nothing was begun"


def test_an_unknown_learner_is_refused_with_the_list() -> None:
    unknown: Any = "pppo"
    with pytest.raises(
        ConfigurationError, match="unknown learner 'pppo'; known: dpo, grpo, ppo, rft, tinker. Did you mean 'ppo'"
    ):
        Settings(learner=unknown)
