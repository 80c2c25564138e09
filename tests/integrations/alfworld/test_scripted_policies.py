"""Scripted policies, against the real engine."""

from pathlib import Path

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.alfworld.data import walkthrough
from dreamgym_lg.types import Task

pytest.importorskip("alfworld", reason="alfworld is not installed: pip install 'dreamgym-lg[alfworld]'")

from dreamgym_lg.integrations.alfworld.environment import ALFWorld
from dreamgym_lg.integrations.alfworld.world import create_oracle
from dreamgym_lg.integrations.text_games.scripted_policies import KINDS, collect_episodes

pytestmark = pytest.mark.slow  # the engine's process takes five seconds to start


@pytest.fixture(scope="module")
def environment() -> ALFWorld:
    return ALFWorld(max_steps=30)


@pytest.fixture(scope="module")
def training(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.split == "train"]


def test_each_kind_is_recorded_as_it_was_really_answered(environment: ALFWorld, training: list[Task]) -> None:
    episodes = {str(kind): 4 for kind in KINDS}
    trajectories = list(collect_episodes(create_oracle, training, environment, episodes=episodes, seed=3))
    assert len({(trajectory.task.id, trajectory.rollout_index) for trajectory in trajectories}) == 4 * len(KINDS)
    for trajectory in trajectories:
        steps, seen = trajectory.steps, [environment.reset(trajectory.task)]
        assert trajectory.source == "offline" and trajectory.run == "offline" and 1 <= len(steps) <= 30
        assert trajectory.success == (trajectory.reward == 1.0) == steps[-1].terminated
        assert steps[-1].truncated != steps[-1].terminated
        for step in steps:  # played once more
            assert step.observation == seen[-1]
            result = environment.step(step.action)
            assert (result.observation, result.reward) == (step.next_observation, step.reward)
            assert result.info["valid"] == step.valid
            seen.append(step.next_observation)


def test_the_same_seed_gives_the_same_trajectories(environment: ALFWorld, training: list[Task]) -> None:
    episodes = {"noisy": 3, "random": 3}
    once = list(collect_episodes(create_oracle, training, environment, episodes=episodes, seed=1))
    assert once == list(collect_episodes(create_oracle, training, environment, episodes=episodes, seed=1))
    assert once != list(collect_episodes(create_oracle, training, environment, episodes=episodes, seed=2))


def test_kinds_do_what_they_are_named_after(environment: ALFWorld, training: list[Task]) -> None:
    played = {kind: list(collect_episodes(create_oracle, training, environment, episodes={kind: 12}, seed=9)) for kind in KINDS}
    invalid = {kind: sum(trajectory.invalid_actions for trajectory in found) for kind, found in played.items()}
    for trajectory in played["demonstration"]:
        assert [step.action for step in trajectory.steps] == walkthrough(trajectory.task) and trajectory.success
    assert sum(trajectory.success for trajectory in played["noisy"]) < 12
    assert sum(trajectory.success for trajectory in played["random"]) <= 2
    assert invalid["demonstration"] == 0 < invalid["random"]


def test_scripted_policies_never_touch_evaluation_tasks(packed: Path, environment: ALFWorld, tasks: list[Task]) -> None:
    for split in ("validation", "test"):
        chosen = [task for task in tasks if task.split == split]
        with pytest.raises(ConfigurationError, match=f"is a {split} task"):
            next(collect_episodes(create_oracle, chosen, environment, episodes={"random": 1}, seed=0))
    with pytest.raises(ConfigurationError, match="unknown kind 'noise'.*Did you mean 'noisy'"):
        train = [task for task in tasks if task.split == "train"]
        next(collect_episodes(create_oracle, train, environment, episodes={"noise": 1}, seed=0))
