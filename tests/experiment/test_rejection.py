"""Rejection sampling: which successes are imitated, from where, and what a restart finds."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dreamgym_lg import ReplayBuffer, Settings, Step, Task, Trajectory
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import rejection
from dreamgym_lg.experiment.rejection import RejectionLearner, new_successes
from dreamgym_lg.experiment.training import create_curriculum


def played(task: str, *actions: str, success: bool = True, iteration: int = 0, source: Any = "synthetic") -> Trajectory:
    steps = [Step(observation="", action=each, next_observation="") for each in actions]
    own = Task(id=task, instruction="?", environment="e", tools=[])
    return Trajectory(task=own, steps=steps, source=source, run="train", success=success, iteration=iteration)


def test_the_shortest_different_successes_of_a_task_are_imitated() -> None:
    tries = [
        *(played("one", "a", "b", "c"), played("one", "x", success=False), played("one", "a")),
        *(played("one", "a", "b"), played("one", "a"), played("two", "a")),
    ]
    new = [(each.task.id, [step.action for step in each.steps]) for each in new_successes(tries)]
    assert sorted(new) == [("one", ["a"]), ("one", ["a", "b"]), ("two", ["a"])]
    invalid = Step(observation="", action="?", next_observation="", valid=False)
    assert not new_successes([replace(played("one"), steps=[invalid])])


class Work:
    """What a rejection learner reads and writes of a workspace. Each imitation's weight is the number of its episodes."""

    def __init__(self, folder: Path) -> None:
        self.replay_buffer, self.records = ReplayBuffer(folder / "replay.db"), {"stage/base/start": {"path": "start"}}
        self.imitated, self.said = list[list[str]](), list[str]()

    def policy(self, name: str) -> Any:
        assert name == "rft"
        return weights(len(self.imitated[-1]))

    def record(self, name: str) -> dict[str, Any]:
        return {"iteration": 0, **self.records[name]} if name in self.records else {}

    def keep_record(self, name: str, figures: Any) -> None:
        self.records[name] = dict(figures)

    def run_name(self, name: str) -> str:
        return name

    def say(self, line: str) -> None:
        self.said.append(line)

    def imitate(self, work: Any, name: str, episodes: Any, start: str) -> None:
        assert (name, start) == ("rft", "start"), "each time from the start weights"
        self.imitated.append(sorted(each.task.id for each in episodes))


def weights(number: float) -> Any:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, number)
    return SimpleNamespace(model=model)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work(tmp_path)
    monkeypatch.setattr(rejection, "imitate", work.imitate)
    monkeypatch.setattr(rejection, "recorded_successes", lambda _: [played("recorded", "a", source="offline")])
    monkeypatch.setattr(rejection, "start_weights", lambda _: "start")
    return work


def create(work: Work, policy: Any, **options: Any) -> RejectionLearner:
    return RejectionLearner(work, policy, Path(), Settings(), **options)  # type: ignore[arg-type]


def test_successes_of_all_iterations_are_imitated_beside_the_recorded(work: Work) -> None:
    policy = weights(0)
    learner = create(work, policy)
    assert learner.iteration == 0 and not learner.metrics
    first, second = [played("one", "a")], [played("two", "a", iteration=1), played("lost", success=False, iteration=1)]
    work.replay_buffer.extend([*first, *second])
    assert learner.update([first]) == {"new_successes": 1, "solved_tasks": 1}
    assert learner.update([second]) == {"new_successes": 2, "solved_tasks": 2}
    assert work.imitated == [["one", "recorded"], ["one", "recorded", "two"]]
    assert policy.model.weight.item() == 3, "the policy has the imitation's weights"
    restarted = weights(0)
    assert create(work, restarted).iteration == 2 and restarted.model.weight.item() == 3


def test_an_iteration_that_solves_nothing_more_trains_nothing(work: Work) -> None:
    policy = weights(7)
    learner = create(work, policy)
    work.replay_buffer.extend(lost := [played("one", "a", success=False)])
    assert learner.update([lost])["new_successes"] == 0 and not work.imitated
    assert work.said[-1].endswith("none is new, and the weights stay")
    assert learner.iteration == 1 and create(work, policy).iteration == 1 and policy.model.weight.item() == 7


def test_it_begins_with_imitation_and_takes_no_option(work: Work) -> None:
    with pytest.raises(ConfigurationError, match="learner='rft' has no option 'updates'"):
        create(work, weights(0), updates=2)
    work.records["stage/train/from"] = {"policy": "mine"}
    with pytest.raises(ConfigurationError, match=r"leave out policy="):
        create(work, weights(0))
    work.records.clear()
    with pytest.raises(ConfigurationError, match=r"train_base\(\)"):
        create(work, weights(0))


def test_tasks_without_a_recorded_success_are_played() -> None:
    tasks = [played(name).task for name in ("won", "lost", "untried")]
    recorded, dreamed = [played("won", "a"), played("lost", "a", success=False)], list[Trajectory]()
    work = SimpleNamespace(
        settings=Settings(learner="rft", environment="real"),
        tasks=lambda split: tasks,
        offline=lambda: recorded,
        replay_buffer=SimpleNamespace(tasks=lambda **_: [], trajectories=lambda **_: dreamed),
        run_name=str,
        world=SimpleNamespace(check_task=None),
    )
    curriculum = create_curriculum(work, real=True)  # type: ignore[arg-type]
    assert {task.id for task in curriculum.sample(3, iteration=0)} == {"lost", "untried"}
    dreamed.append(played("lost", "a"))
    curriculum = create_curriculum(work, real=True)  # type: ignore[arg-type]
    assert [task.id for task in curriculum.sample(3, iteration=1)] == ["untried"], "the dream of S2R solved the other"
    recorded += [played("lost", "a"), played("untried", "a")]
    with pytest.raises(ConfigurationError, match="each of the 3 to train on has one"):
        create_curriculum(work, real=True)  # type: ignore[arg-type]
