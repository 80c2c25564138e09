"""A policy on Tinker: rows and losses of the local learner, a training that survives kill -9, an export that says where.

The service is a stand-in that computes its documented losses with a small model.
"""

import builtins
import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import cut, groups_of, learner_of, model_of, segment, trajectory
from gym_on_tinker import SETTINGS, World, book, gym, main, service
from langchain.agents import create_agent
from stand_in import Service, tinker
from tiny_models import SMALL_BASE, create_tokenizer
from typer.testing import CliRunner

from dreamgym_lg import DreamGym, ReplayBuffer, Settings, load_policy, with_policy
from dreamgym_lg.cli.app import app
from dreamgym_lg.errors import ConfigurationError, MissingDependency, ModelUnavailable, ServersUnavailable
from dreamgym_lg.experiment.experience_models import resolve_policy
from dreamgym_lg.integrations.tinker.learner import TinkerLearner
from dreamgym_lg.integrations.tinker.policy import TinkerChatModel
from dreamgym_lg.learner import group_credit
from dreamgym_lg.production.export import load_exported, read_manifest

SCRIPT = Path(__file__).with_name("gym_on_tinker.py")


@pytest.fixture
def tokenizer() -> Any:
    return create_tokenizer(["say a colour", "red green blue"] * 3, vocab_size=320)


@pytest.fixture
def house(tokenizer: Any, tmp_path: Path) -> Service:
    return Service(model_of(tokenizer), tokenizer, tmp_path / "tinker")


def flat(model: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("step_credit", [False, True])
def test_rows_and_losses_are_those_of_the_local_learner(
    house: Service, tokenizer: Any, tmp_path: Path, updates: int, step_credit: bool
) -> None:
    """Over three iterations, whose later ones find ratios beyond the clip region: another model sampled the episodes."""
    behaviour, options = deepcopy(house.base), {"updates": updates, "step_credit": step_credit, "epsilon_high": 0.28}
    policy = TinkerChatModel.from_path("tinker:tiny", service=house)
    there = TinkerLearner(policy, tmp_path / "there", learning_rate=1e-2, rank=8, seed=3, **options)
    here = learner_of(local := deepcopy(house.base), tokenizer, tmp_path / "here", **options)
    for seed in range(3):
        groups = groups_of(behaviour, seed)
        groups[0][1] = trajectory(0.5, *cut(segment(behaviour, seed), 2), task="t0", index=1)
        ours, theirs = here.update(groups), there.update(groups)
        for name in ("loss", "sampling/sampling_logp_difference/mean", "trainable_tokens", "learning_rate"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-6), name
        sent, rows = house.data[-updates:], group_credit(groups, by_state=step_credit)
        for number, data in enumerate(sent):
            for datum, row in zip(data, rows[number::updates], strict=True):
                ids, inputs = list(row.segment.token_ids), datum.loss_fn_inputs
                assert datum.model_input.to_ints() == ids[:-1] and inputs["target_tokens"].tolist() == ids[1:]
                assert inputs["logprobs"].tolist() == pytest.approx(list(row.segment.logprobs)[1:])
                weighted = [updates * row.weight * a * own for a, own in zip(row.advantages, row.segment.sampled, strict=True)]
                assert inputs["advantages"].tolist() == pytest.approx(weighted[1:])
    saved = torch.load(house.file(policy.engine.weights.sampler))["model"]
    trained = deepcopy(house.base)
    trained.load_state_dict(saved)
    change = (flat(trained) - flat(house.base)).norm()
    assert change > 0.1, "it was trained"
    assert (flat(trained) - flat(local)).norm() < 1e-4 * change
    assert house.created == [("tiny", 8, 3)], "one training on Tinker"


def test_a_learner_goes_on_from_the_paths_with_the_optimiser(house: Service, tokenizer: Any, tmp_path: Path) -> None:
    behaviour, losses = deepcopy(house.base), dict[str, list[float]]()
    for name, restarts in (("steady", 0), ("restarted", 3)):
        policy = TinkerChatModel.from_path("tinker:tiny", service=house)
        learner = TinkerLearner(policy, tmp_path / name, learning_rate=1e-2)
        assert learner.iteration == 0 and policy.engine.weights.state is None
        for seed in range(4):
            uniform = [[trajectory(1.0, segment(behaviour, i), index=i) for i in range(2)]]
            losses.setdefault(name, []).append(
                learner.update(uniform if seed == 2 else groups_of(behaviour, seed)).get("loss", 0)
            )
            if seed < restarts:
                policy = TinkerChatModel.from_path("tinker:tiny")
                before, learner = learner, TinkerLearner(policy, tmp_path / name, learning_rate=1e-2)
                assert (learner.iteration, learner.metrics) == (seed + 1, before.metrics)
    assert losses["steady"] == losses["restarted"] and losses["steady"][2] == 0
    assert [len(each) for each in house.created] == [3, 3, 2, 2, 2] and all(each[1] is True for each in house.created[2:])
    policy.save(tmp_path / "kept")
    again = TinkerChatModel.from_path(tmp_path / "kept")
    assert again.engine.weights == policy.engine.weights
    TinkerLearner(again, tmp_path / "more").update(groups_of(behaviour, 5))
    assert house.created[-1] == (policy.engine.weights.state, False), "another training begins with the weights alone"


def test_what_cannot_be_trained_there_is_said(house: Service, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    policy = TinkerChatModel.from_path("tinker:tiny", service=house)
    for wrong, options in (
        (policy.with_temperature(0.5), {}),
        (policy, {"beta": 0.1}),
        (policy, {"updates": 0}),
    ):
        with pytest.raises(ConfigurationError, match="at temperature 1, without a KL term: this is a TinkerChatModel"):
            TinkerLearner(wrong, tmp_path / "none", **options)
    with pytest.raises(ConfigurationError, match="unknown option of TinkerLearner 'delta'|does not take delta"):
        TinkerLearner(policy, tmp_path / "none", delta=2.0)
    for error, kind in ((tinker.TinkerError("billing"), ServersUnavailable), (refused(), ModelUnavailable)):
        monkeypatch.setattr(house, "create_sampling_client", raising(error))
        policy.weights_changed()
        with pytest.raises(kind, match="Tinker"):
            policy.invoke("say a colour")


def refused() -> Exception:
    error = tinker.BadRequestError.__new__(tinker.BadRequestError)  # the package's own wants a response
    Exception.__init__(error, "too long")
    return error


def raising(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_tinker(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tinker":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("dreamgym_lg.integrations.tinker")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_tinker)
    with pytest.raises(MissingDependency, match=r"tinker is not installed; .*\[tinker\]"):
        resolve_policy("tinker:Qwen/Qwen3-8B", None)


def test_replies_are_recorded_token_by_token(tmp_path: Path) -> None:
    """Each call goes on from the tokens that were sampled before it: an episode is one segment of one version."""
    house, lines = service(tmp_path), list[str]()
    policy = TinkerChatModel.from_path("tinker:tiny", service=house, max_new_tokens=40)
    work = gym(tmp_path, say=lines.append)
    _, (episode,) = work.evaluate(policy, run="one")
    (stored,) = work.replay_buffer.trajectories(segments=True)
    (only,) = stored.segments
    assert [step.action for step in episode.steps] and only.policy_version == "tiny" and only.temperature == 1
    assert house.sampled_from == ["tiny"] * 2
    text = house.tokenizer.decode(only.token_ids)
    assert text.count("<|assistant|>") == 2 and "A dreamed room" in text and sum(only.sampled) > 20


@pytest.mark.slow
def test_a_policy_on_tinker_is_trained_in_the_dream_and_exported(tmp_path: Path) -> None:
    house, lines = service(tmp_path), list[str]()
    (tmp_path / "my_app.py").write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\nfrom gym_on_tinker import World, book\n"
        "from langchain.agents import create_agent\ngraph = create_agent(World(), [book], system_prompt='You book rooms.')\n"
    )
    work = gym(tmp_path, graph=f"{tmp_path / 'my_app.py'}:graph", isolation="guard", say=lines.append)
    TinkerChatModel.from_path("tinker:tiny", service=house)
    trained = work.train("tinker:tiny", 2, **SETTINGS)
    assert "learner tinker: the weights of tinker:tiny are on Tinker" in lines
    models = tmp_path / "run" / "models"
    kept = {name: json.loads((models / name / "tinker.json").read_text()) for name in ("start", "trained")}
    assert kept["start"] == {"base_model": "tiny", "state": None, "sampler": None}
    assert kept["trained"]["sampler"].endswith("/sampler_weights/iteration-2") and "/weights/" in kept["trained"]["state"]
    played = [e for e in work.replay_buffer.trajectories(segments=True) if e.run.endswith("train")]
    versions = {(e.iteration, s.policy_version) for e in played for s in e.segments}
    assert sorted(versions)[0] == (0, "tiny") and sorted(versions)[1][1].endswith("/iteration-1") and len(versions) == 2
    assert not list(models.rglob("*.safetensors")), "no weights are here"
    rate, _ = work.evaluate()
    assert rate.episodes == 1 and house.sampled_from[-1] == kept["trained"]["sampler"] == trained.engine.weights.sampler
    assert work.prove()["real"]["trained"]["greedy"]["episodes"] == 1
    work.export(tmp_path / "exported")
    manifest, card = read_manifest(tmp_path / "exported"), (tmp_path / "exported" / "README.md").read_text()
    assert manifest["tinker"] == kept["trained"] and manifest["training"]["learner"] == "tinker"
    assert (
        f"adapters of `tiny` on Tinker, at `{kept['trained']['sampler']}`" in card
        and "Trained from tinker:tiny by TINKER" in card
    )
    served_here = CliRunner().invoke(app, ["serve", str(tmp_path / "exported")])
    assert served_here.exit_code and "which are on Tinker" in " ".join(served_here.output.split())
    policy = load_policy(tmp_path / "exported")
    assert isinstance(policy, TinkerChatModel) and policy.engine.weights == trained.engine.weights
    served = load_exported(tmp_path / "exported")
    for graph in (served, with_policy(create_agent(World(), [book]), policy)):
        assert graph.invoke({"messages": [("user", "Book room t.")]})["messages"][2].text == "A real room."
    assert house.sampled_from[-1] == kept["trained"]["sampler"]


@pytest.mark.slow
def test_a_killed_training_goes_on_with_the_same_command(tmp_path: Path) -> None:
    def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / name).mkdir(exist_ok=True)
        paths = os.pathsep.join(map(str, [SCRIPT.parent, SCRIPT.parents[2] / "tiny"]))
        environment = {**os.environ, "PYTHONPATH": paths}
        command = [sys.executable, SCRIPT, tmp_path / name, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)

    (tmp_path / "steady").mkdir()
    main(tmp_path / "steady")
    killed = run("killed", "KILLED")
    assert killed.returncode == -9 and not (tmp_path / "killed" / "run" / "models" / "trained").exists()
    resumed = run("killed")
    assert resumed.returncode == 0, resumed.stderr
    episodes, finals = [], []
    for name in ("steady", "killed"):
        folder = tmp_path / name
        found = ReplayBuffer(folder / "replay.db").trajectories(source="synthetic", segments=True)
        played = [e for e in found if e.run.endswith("train")]
        keys = [(e.iteration, e.task.id, e.rollout_index) for e in played]
        episodes.append(dict(zip(keys, ([list(s.token_ids) for s in e.segments] for e in played), strict=True)))
        sampler = read_manifest(folder / "exported")["tinker"]["sampler"]
        finals.append(torch.load(service(folder).file(sampler))["model"])
    assert len(episodes[0]) == 2 * 8 and episodes[0] == episodes[1], "nothing is played twice or otherwise"
    for name, value in finals[0].items():
        assert torch.equal(value, finals[1][name]), name


def test_the_policy_and_the_learner_have_to_fit(tmp_path: Path) -> None:
    house = service(tmp_path)
    TinkerChatModel.from_path("tinker:tiny", service=house)
    work: DreamGym = gym(tmp_path)
    with pytest.raises(
        ConfigurationError, match="learner='grpo' of a policy 'tinker:tiny': tinker:MODEL needs learner='tinker'"
    ):
        work.train("tinker:tiny", 1, learner="grpo", **SETTINGS)
    with pytest.raises(ConfigurationError, match="learner='tinker' of a policy '.*small_base': tinker:MODEL needs"):
        work.train(SMALL_BASE, 1, learner="tinker", **SETTINGS)
    refused = CliRunner().invoke(app, ["train", "peckingorder", "--policy", "tinker:tiny", "--learner", "grpo"])
    output = " ".join(refused.output.split())
    assert refused.exit_code == 2 and "learner='grpo' of a policy 'tinker:tiny': tinker:MODEL needs learner='tinker'" in output
    assert not house.sampled_from and not (tmp_path / "run" / "settings.json").exists(), "before anything was done"


@pytest.mark.slow
def test_a_relative_judge_rewards_the_groups_of_a_training(tmp_path: Path) -> None:
    house = service(tmp_path)
    policy = TinkerChatModel.from_path("tinker:tiny", service=house, max_new_tokens=40)
    work = gym(tmp_path, verify_dream=None, relative_judge=True, settings=Settings(max_false_success=None, real_budget=0))
    work.train(policy, 1, **SETTINGS)
    played = [e for e in work.replay_buffer.trajectories() if e.run.endswith("train") and e.error is None]
    groups = {task: [e for e in played if e.task.id == task] for task in ("a", "b")}
    for group in groups.values():
        lengths = [len(json.loads(e.steps[-1].action)["answer"]) % 11 for e in group]
        ordered = [e.reward for _, e in sorted(zip(lengths, group, strict=True), key=lambda each: each[0])]
        assert ordered == sorted(ordered) and all(e.steps[-1].judged_by == "relative" and not e.success for e in group)
    assert any(len({e.reward for e in group}) > 1 for group in groups.values())
    (row,) = work.replay_buffer.metrics(work.experiment.run_name("train"))
    assert row["judge_consistency"] == 1 and not row["skipped"] and len(house.data) == 1
