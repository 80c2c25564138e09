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
from dreamgym_lg.experiment.gate import trainable_tasks
from dreamgym_lg.experiment.rejection import RejectionLearner, new_successes
from dreamgym_lg.integrations.transformers import loading
from dreamgym_lg.integrations.trl import adapters


def played(task: str, *actions: str, success: bool = True, iteration: int = 0, source: Any = "synthetic") -> Trajectory:
    steps = [Step(observation="", action=each, next_observation="") for each in actions]
    own = Task(id=task, instruction="?", environment="e", tools=[])
    return Trajectory(task=own, steps=steps, source=source, run="train", success=success, iteration=iteration)


def test_the_most_frequent_success_of_a_task_is_imitated() -> None:
    """A guess that was right once is shorter, and says nothing of the next request."""
    tries = [
        *(played("one", "guess"), played("one", "look", success=False), played("one", "look", "act")),
        *(played("one", "look", "act"), played("two", "a"), played("two", "b"), played("three", "a", success=False)),
    ]
    new = [(each.task.id, [step.action for step in each.steps]) for each in new_successes(tries)]
    assert new == [("one", ["look", "act"]), ("two", ["a"])]
    invalid = Step(observation="", action="?", next_observation="", valid=False)
    assert not new_successes([replace(played("one"), steps=[invalid])])


class Work:
    """What a rejection learner reads and writes of a workspace. Each imitation's weight is the number of its episodes."""

    def __init__(self, folder: Path) -> None:
        self.out, self.models = folder, folder / "models"
        self.replay_buffer, self.records = ReplayBuffer(folder / "replay.db"), {"stage/base/start": {"path": "start"}}
        self.imitated, self.said, self.validation = list[list[str]](), list[str](), dict[str, int]()

    def record(self, name: str) -> dict[str, Any]:
        return {"iteration": 0, **self.records[name]} if name in self.records else {}

    def keep_record(self, name: str, figures: Any) -> None:
        self.records[name] = dict(figures)

    def run_name(self, name: str) -> str:
        return name

    def say(self, line: str) -> None:
        self.said.append(line)

    def imitate(self, work: Any, name: str, episodes: Any, start: str) -> None:
        assert start == "start", "each time from the start weights"
        self.imitated.append(sorted(each.task.id for each in episodes))
        (self.models / name).mkdir(parents=True)
        (self.models / name / "weight").write_text(str(len(episodes)))


def weights(number: float) -> Any:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, number)
    return SimpleNamespace(model=model)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    def load(folder: Path, **_: Any) -> torch.nn.Module:
        model: torch.nn.Module = weights(float((folder / "weight").read_text())).model
        return model

    def without_cut(_: Any, episodes: Any, start: str) -> list[Trajectory]:
        return [each for each in episodes if each.task.id != "cut"]

    work = Work(tmp_path)
    monkeypatch.setattr(rejection, "imitate", work.imitate)
    monkeypatch.setattr(rejection, "with_segments", without_cut)
    monkeypatch.setattr(rejection, "recorded_successes", lambda _: [played("recorded", "a", source="offline")])
    monkeypatch.setattr(rejection, "start_weights", lambda _: "start")
    monkeypatch.setattr(rejection, "start_baseline", lambda _: "base")
    monkeypatch.setattr(rejection, "validation_successes", lambda work, name: work.validation.get(name))
    monkeypatch.setattr(loading, "load_model", load)
    monkeypatch.setattr(adapters, "wants_adapters", lambda model, lora: bool(lora))
    return work


def create(work: Work, policy: Any, **settings: Any) -> RejectionLearner:
    return RejectionLearner(work, policy, Path(), Settings(**settings))  # type: ignore[arg-type]


def test_successes_of_all_iterations_are_imitated_beside_the_recorded(work: Work) -> None:
    policy = weights(0)
    learner = create(work, policy)
    assert learner.iteration == 0 and not learner.metrics
    first, second = [played("one", "a")], [played("two", "a", iteration=1), played("cut", "a", iteration=1)]
    work.replay_buffer.extend([*first, *second])
    assert learner.update([first]) == {"skipped": 0, "solved_tasks": 1}
    assert learner.update([second]) == {"skipped": 0, "solved_tasks": 2}
    assert work.imitated == [["one", "recorded"], ["one", "recorded", "two"]], "what does not fit is left out"
    assert policy.model.weight.item() == 3, "the policy has the imitation's weights"
    assert [each.name for each in work.models.iterdir()] == ["rft1"]
    restarted = weights(0)
    assert create(work, restarted).iteration == 2 and restarted.model.weight.item() == 3


def test_an_imitation_that_does_worse_on_validation_leaves_the_weights(work: Work) -> None:
    policy, (one, two, three) = weights(7), ([played(task, "a", iteration=n)] for n, task in enumerate(("one", "two", "three")))
    learner = create(work, policy)
    work.validation = {"base": 9, "rft0": 8, "rft1": 9, "rft2": 8}
    work.replay_buffer.extend(one)
    assert learner.update([one]) == {"skipped": 1, "solved_tasks": 1} and policy.model.weight.item() == 7
    assert work.said[-1] == "it wins 8 validation tasks, and the policy before it 9: the weights before it stay"
    assert not [*work.models.iterdir()] and create(work, weights(5)).iteration == 1
    work.replay_buffer.extend(two)
    assert learner.update([two])["skipped"] == 0 and policy.model.weight.item() == 3
    work.replay_buffer.extend(three)
    work.records["stage/rft1/best"] = {"validation": "real 20"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(work.records, "stage/rft2/best", {"validation": "real 60"})
        assert not learner._is_worse("rft2", than="rft1"), "other validation tasks are not compared"
    work.records["stage/rft2/best"] = {"validation": "real 20"}
    assert learner.update([three])["skipped"] == 1 and policy.model.weight.item() == 3
    assert [each.name for each in work.models.iterdir()] == ["rft1"]
    create(work, restarted := weights(0))
    assert restarted.model.weight.item() == 3


def test_an_update_killed_before_its_record_is_repeated(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    work.replay_buffer.extend(first := [played("one", "a")])
    create(work, weights(0)).update([first])
    work.replay_buffer.extend(second := [played("two", "a", iteration=1)])
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(work, "keep_record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        create(work, weights(0)).update([second])
    (restarted := weights(0)), (learner := create(work, restarted))
    assert learner.iteration == 1 and restarted.model.weight.item() == 2, "the weights of the record are still there"


def test_an_iteration_that_solves_nothing_more_trains_nothing(work: Work) -> None:
    policy = weights(7)
    learner = create(work, policy)
    work.replay_buffer.extend(lost := [played("one", "a", success=False)])
    assert learner.update([lost]) == {"skipped": 1, "solved_tasks": 0} and not work.imitated
    assert work.said[-1].endswith("none is new, and the weights stay")
    assert learner.iteration == 1 and create(work, policy).iteration == 1 and policy.model.weight.item() == 7
    work.replay_buffer.extend([played("two", "b", "c", iteration=1)])
    assert learner.update([])["skipped"] == 0
    assert learner.update([])["skipped"] == 1 and len(work.imitated) == 1
    work.replay_buffer.extend([played("two", "a", iteration=2), played("two", "a", iteration=3)])
    assert learner.update([])["skipped"] == 0 and len(work.imitated) == 2, "as many tasks, and one is solved otherwise"


def test_it_begins_where_imitation_began(work: Work) -> None:
    with pytest.raises(ConfigurationError, match="lora=True: learner='rft' needs the value that"):
        create(work, weights(0), lora=True)
    work.records.clear()
    with pytest.raises(ConfigurationError, match=r"call it first in"):
        create(work, weights(0))


def test_tasks_without_a_recorded_success_are_played() -> None:
    tasks = [played(name).task for name in ("won", "lost", "untried")]
    tasks.append(replace(tasks[0], id="drawn", drawn={"steps": []}))
    recorded, dreamed = [played("won", "a"), played("lost", "a", success=False)], list[Trajectory]()
    work: Any = SimpleNamespace(
        settings=Settings(learner="rft", environment="s2r", real_steps=9),
        tasks=lambda split: tasks,
        offline=lambda: recorded,
        replay_buffer=SimpleNamespace(trajectories=lambda **_: dreamed),
        run_name=str,
    )

    def ids(real: bool) -> list[str]:
        return [task.id for task in trainable_tasks(work, real=real)]

    assert ids(False) == ids(True) == ["lost", "untried"], "a drawn task has its reference"
    dreamed.append(played("lost", "a"))
    assert ids(False) == ["lost", "untried"] and ids(True) == ["untried"], "the dream of S2R solved the other"
    dreamed.append(played("untried", "a"))
    assert ids(True) == ["lost", "untried"], "all again, once the dream has solved all"
    recorded += [played("lost", "a"), played("untried", "a")]
    with pytest.raises(ConfigurationError, match="each of the 3 training tasks has one"):
        ids(True)
