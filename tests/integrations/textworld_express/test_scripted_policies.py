"""Scripted policies, against the real game."""

from random import Random

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.scripted_policies import KINDS, collect_episodes, stray
from dreamgym_lg.integrations.textworld_express.text import UNKNOWN_ACTION
from dreamgym_lg.types import Task

pytest.importorskip("textworld_express")

from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress, make_tasks
from dreamgym_lg.integrations.textworld_express.java import Interface
from dreamgym_lg.integrations.textworld_express.world import create_oracle

PLAYED = ("peckingorder", "twc")
ROOMS = "numLocations=3,numItemsToPutAway=4,includeDoors=1,limitInventorySize=1"
Worlds = dict[str, list[Task]]


@pytest.mark.parametrize("game", PLAYED)
def test_collected_trajectories_are_consistent_and_repeatable(
    environment: TextWorldExpress, training: Worlds, game: str
) -> None:
    tasks, episodes = training[game], {str(kind): 25 for kind in KINDS}
    trajectories = list(collect_episodes(create_oracle, tasks, environment, episodes=episodes, seed=3))
    assert trajectories == list(collect_episodes(create_oracle, tasks, environment, episodes=episodes, seed=3))
    assert trajectories != list(collect_episodes(create_oracle, tasks, environment, episodes=episodes, seed=4))
    assert len({(trajectory.task.id, trajectory.rollout_index) for trajectory in trajectories}) == 25 * len(KINDS)
    for trajectory in trajectories:
        steps = trajectory.steps
        assert trajectory.source == "offline" and trajectory.run == "offline" and trajectory.task.split == "train"
        assert 1 <= len(steps) <= environment.max_steps
        assert steps[0].observation == trajectory.task.observation
        assert all(a.next_observation == b.observation for a, b in zip(steps, steps[1:], strict=False))
        assert [step.terminated or step.truncated for step in steps] == [False] * (len(steps) - 1) + [True]
        assert not (steps[-1].terminated and steps[-1].truncated)
        assert trajectory.success == (trajectory.reward == pytest.approx(1.0))
        assert all(step.reward == 0 and step.next_observation == UNKNOWN_ACTION for step in steps if not step.valid)


@pytest.mark.parametrize("game", PLAYED)
def test_kinds_do_what_they_are_named_after(environment: TextWorldExpress, training: Worlds, game: str) -> None:
    tasks = training[game]
    played = {kind: list(collect_episodes(create_oracle, tasks, environment, episodes={kind: 60}, seed=9)) for kind in KINDS}
    share = {kind: sum(t.success for t in trajectories) / 60 for kind, trajectories in played.items()}
    invalid = {kind: sum(t.invalid_actions for t in trajectories) for kind, trajectories in played.items()}
    assert share["demonstration"] == 1.0 > share["noisy"] > share["random"]
    assert invalid["demonstration"] == 0 < invalid["noisy"] < invalid["random"]
    assert any(not t.success and not t.invalid_actions for t in played["random"])


def test_demonstration_follows_the_gold_path_through_several_rooms() -> None:
    environment = TextWorldExpress(max_steps=50)
    made = make_tasks("twc", range(12), environment=environment, params=ROOMS)
    tasks = [task for task in made if task.split == "train"]
    for trajectory in collect_episodes(create_oracle, tasks, environment, episodes={"demonstration": len(tasks)}, seed=0):
        assert trajectory.success and not trajectory.invalid_actions
        assert trajectory.steps[0].action != "look around"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the methods of the real game, in the order in which they were called."""
    called: list[str] = []
    call = Interface.call

    def recorded(self: Interface, method: str, *arguments: object) -> object:
        called.append(method)
        return call(self, method, *arguments)

    monkeypatch.setattr(Interface, "call", recorded)
    return called


@pytest.mark.parametrize("split", ["validation", "test"])
def test_scripted_policies_never_touch_evaluation_tasks(worlds: Worlds, training: Worlds, split: str, asked: list[str]) -> None:
    environment = TextWorldExpress()
    evaluation = [task for task in worlds["twc"] if task.split == split]
    with pytest.raises(ConfigurationError, match=f"is a {split} task"):
        next(collect_episodes(create_oracle, [*training["twc"], evaluation[0]], environment, episodes={"random": 1}, seed=0))
    assert not asked


def test_scripted_policies_reject_an_unknown_kind_and_no_tasks(environment: TextWorldExpress, training: Worlds) -> None:
    with pytest.raises(ConfigurationError, match="unknown kind 'noise'.*Did you mean 'noisy'"):
        next(collect_episodes(create_oracle, training["twc"], environment, episodes={"noise": 1}, seed=0))
    with pytest.raises(ConfigurationError, match="at least one task of the train split, got none"):
        next(collect_episodes(create_oracle, [], environment, episodes={"noisy": 1}, seed=0))


def test_strays_are_other_actions_and_some_are_broken() -> None:
    rng, valid = Random(0), ["inventory", "open wardrobe", "put gray cap in shelf", "put gray cap in wardrobe"]
    strays = [stray("put gray cap in shelf", valid, rng) for _ in range(400)]
    assert strays.count("put gray cap in shelf") < 20 and all(action == action.strip() for action in strays)
    assert 200 < sum(action in valid for action in strays) < 320
    assert strays.count("put gray cap in wardrobe") > strays.count("inventory"), "near misses"
    assert stray("look", [], rng) in ("look", "")
