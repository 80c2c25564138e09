"""What is said of single steps, against figures worked out by hand."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.dream import Answer, Dream, Episode, Model, Recorded, Verify
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.errors import EnvironmentFailed
from dreamgym_lg.fidelity import measure, report
from dreamgym_lg.fidelity.report import Group
from dreamgym_lg.fidelity.steps import measure_steps
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.statistics import StepRate, normalised, step_rate, wilson
from dreamgym_lg.types import Step, Task, Trajectory

TASK = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")
DANCE = Step(observation="A closed door.", action="dance", next_observation="What?", valid=False)
OPEN = Step(observation="A closed door.", action="open door", next_observation="The door is open.", reward=0.5)
NORTH = Step(
    observation="The door is open.", action="go north", next_observation="You are outside.", reward=0.5, terminated=True
)


def recorded(*steps: Step, **fields: Any) -> Trajectory:
    return Trajectory(task=TASK, steps=steps, **fields)


@pytest.fixture
def answering(scripted: Any, asked_action: Any, text_dream: Any) -> Any:
    """A dream that answers each action alike, whatever came before."""
    return lambda answers: text_dream(scripted(reply=lambda messages: answers[asked_action(messages)]), retries=0)


def only(dream: Dream, *trajectories: Trajectory, **options: Any) -> Group:
    (group,) = measure(dream, trajectories, **options).groups
    return group


def test_figures_know_their_samples_and_none_comes_from_none() -> None:
    assert step_rate([]) is None and step_rate([[], []]) is None
    steps = step_rate([[True, True], [], [False, True]])
    assert steps and (*steps[:3], steps.value) == (3, 4, 2, 0.75)


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        ("You take the apple.", "you  take, the APPLE", True),
        ("You take the pear.", "You take the apple.", False),
        ("", "", True),
        ("!", "?", False),
        ("猫がいる", "猫が寝る", False),
    ],
)
def test_words_alone_are_compared(answer: str, right: str, same: bool) -> None:
    assert (normalised(answer) == normalised(right)) == same


def test_a_faultless_dream_has_faultless_figures(scripted: Any, text_dream: Any, door_world: Any) -> None:
    group = only(text_dream(scripted(reply=door_world)), recorded(DANCE, OPEN, NORTH, success=True, source="real"))
    one = group.one_step
    for each in (one.normalised, one.success_recalled, one.reward_right, one.invalid_recall):
        assert each and each.value == 1
    assert one.normalised and (one.normalised.low, one.normalised.high) == wilson(
        1, 1
    )  # three steps of one episode: one sample
    assert one.success_false and one.success_false.successes == 0
    assert one.unreadable == 0
    assert group.name == "the policy's own actions" and (group.episodes, group.of) == (1, 1)


def test_every_known_fault_is_in_its_figure(answering: Any) -> None:
    """Four steps: an invalid one paid as a success, other words, a completion missed, an answer without form."""
    dream = answering(
        {
            "dance": "valid, it completes the task\nreward 1, success\nYou dance out.",
            "open door": "valid, it brings progress\nreward 0.25, continues\nthe door IS open",
            "go north": "invalid, no\nreward 0, continues\nYou are inside.",
            "jump": "Ouch!",
        },
    )
    jump = Step(observation="The door is open.", action="jump", next_observation="Ouch.", terminated=True)
    group = only(dream, recorded(DANCE, OPEN, NORTH, success=True), recorded(jump))
    one = group.one_step
    shares = (getattr(one, field.name) for field in fields(one))
    names = [field.name for field in fields(one)]
    found = {name: each for name, each in zip(names, shares, strict=True) if isinstance(each, StepRate)}
    counts = {name: (each.successes, each.steps) for name, each in found.items()}
    assert counts == {
        "normalised": (1, 4),  # open door
        "success_recalled": (0, 1),
        "success_false": (1, 1),
        "reward_right": (0, 4),
        "invalid_recall": (0, 1),
    }
    assert (one.unreadable, one.steps, one.episodes) == (1, 4, 2)


def test_the_recall_of_invalid_actions(answering: Any) -> None:
    no, yes = "invalid, no\nreward 0, continues\nWhat?", "valid, yes\nreward 0, continues\nFine."
    really = {"a": False, "b": True, "c": True, "d": False, "e": True}
    dream = answering({"a": no, "b": no, "c": no, "d": yes, "e": yes})
    steps = [Step(observation="", action=action, next_observation="o", valid=valid) for action, valid in really.items()]
    one = only(dream, recorded(*steps)).one_step
    assert one.invalid_recall and (one.invalid_recall.successes, one.invalid_recall.steps) == (1, 2)  # a, not d


def test_what_another_part_answers_the_model_is_never_asked(scripted: Any, door_world: Any, asked_action: Any) -> None:
    class NoDancing:
        name = "rules"

        def respond(self, episode: Episode) -> Answer | None:
            return Answer("What?", valid=False) if episode.action == "dance" else None

    model = scripted(reply=door_world)
    dream = Dream([NoDancing(), Model(model, prompt_format="lines")])
    group = only(dream, recorded(DANCE, OPEN, NORTH, success=True))
    assert group.one_step.steps == 3 and group.one_step.invalid_recall and group.one_step.invalid_recall.value == 1
    assert "dance" not in map(asked_action, model.asked)


def test_offline_data_and_the_policys_own_actions_are_apart(answering: Any) -> None:
    """The dream that closed_loop.md warns of: perfect on offline data, worthless on what the policy does."""
    dream = answering(
        {
            "open door": "valid, it brings progress\nreward 0.5, continues\nThe door is open.",
            "dance": "valid, it completes the task\nreward 0.5, success\nYou are outside.",
        },
    )
    found = measure(dream, [recorded(OPEN), recorded(DANCE, source="real")])
    by_name = {group.name: group.one_step for group in found.groups}
    assert by_name["offline data"].normalised and by_name["offline data"].normalised.value == 1
    policy = by_name["the policy's own actions"]
    assert policy.normalised and policy.normalised.value == 0 and policy.invalid_recall and policy.invalid_recall.value == 0
    assert policy.success_false and policy.success_false.value == 1


def test_where_nothing_was_earned_no_reward_is_praised(answering: Any) -> None:
    answers = {"open door": "valid, no progress\nreward 0, continues\nThe door is open."}
    unpaid = Step(observation="A closed door.", action="open door", next_observation="The door is open.")
    for step, rewarded in ((unpaid, False), (OPEN, True)):
        found = measure(answering(answers), [recorded(step)])
        assert found.groups[0].rewarded is rewarded
        assert any("predicted rewards" in each.sentence for each in found.conclusions) is rewarded


def test_many_steps_of_few_episodes_make_nobody_sure(answering: Any) -> None:
    """With each step as a trial of its own, twenty right ones of two episodes would give [0.84, 1.00] and be called good."""
    answers = {"open door": "valid, it brings progress\nreward 0.5, continues\nThe door is open."}
    found = measure(answering(answers), [recorded(*[OPEN] * 10), recorded(*[OPEN] * 10)])
    right = found.groups[0].one_step.normalised
    assert right and (right.successes, right.steps, right.episodes) == (20, 20, 2)
    assert (right.low, right.high) == wilson(2, 2)
    assert all(each.level != "good" for each in found.conclusions)


def test_a_server_that_is_down_is_not_the_models_fault(scripted: Any, text_dream: Any) -> None:
    def down(messages: Sequence[Any]) -> str:
        raise ConnectionError("refused")

    with pytest.raises(EnvironmentFailed, match="raised ConnectionError: refused at "):
        measure(text_dream(scripted(reply=down)), [recorded(OPEN)])


def test_the_limit_draws_alike_every_time(scripted: Any, text_dream: Any, door_world: Any) -> None:
    heard: list[tuple[str, int, int]] = []
    dream = text_dream(scripted(reply=door_world))
    found = measure(dream, nine(), limit=4, on_progress=lambda *each: heard.append(each))
    again = measure(text_dream(scripted(reply=door_world)), nine(), limit=4)
    assert found.to_dict() == again.to_dict()
    assert (found.groups[0].episodes, found.groups[0].of) == (4, 9)
    assert heard == [("offline data", done, 4) for done in range(1, 5)]


async def test_no_more_is_asked_at_once_than_allowed(scripted: Any, door_world: Any, monkeypatch: Any) -> None:
    class Counting(Model):
        asking = most = 0

        async def respond(self, episode: Episode) -> Answer | None:
            self.asking += 1
            self.most = max(self.most, self.asking)
            try:
                return await super().respond(episode)
            finally:
                self.asking -= 1

    for allowed in (1, 3):
        model = Counting(scripted(reply=door_world))
        monkeypatch.setattr("dreamgym_lg.fidelity.steps._CONCURRENCY", allowed)
        await measure_steps(Dream([model]), nine())
        assert model.most == allowed


def nine() -> list[Trajectory]:
    tasks = [Task(id=f"t{n}", instruction=f"{n}", environment="house", observation=TASK.observation) for n in range(9)]
    return [Trajectory(task=task, steps=[OPEN], rollout_index=n) for n, task in enumerate(tasks)]


def test_right_answers_and_verdicts_are_split_by_which_part_decided(scripted: Any) -> None:
    def episode(name: str, *tools: str) -> Trajectory:
        steps = [Step(observation="", action=render_call(tool, {}), next_observation=f"{tool} of all") for tool in tools]
        steps.append(Step(observation="", action=render_answer("Done."), next_observation="", reward=1.0, terminated=True))
        task = Task(id=name, instruction="look", environment="e", tools=["get_a", "get_b"])
        return Trajectory(task=task, steps=steps, success=True)

    model = Model(scripted(reply=lambda _: "valid, fine\nreward 1, continues\nWell."))
    judge = Verify(lambda task, steps: 0)
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend([episode("t1", "get_a"), measured := episode("t2", "get_a", "get_b")])
        dream = Dream([Recorded(TraceIndex(buffer, writes=[])), model], judges=[judge])
        one = only(dream, measured).one_step
        assert one.reward_right and one.reward_right[:2] == (0, 1), "calls earn nothing on either side: they hide no verdict"
        by_part = one.right_by_part
        right = {part: (rate.successes, rate.steps) for part, rate in by_part.items()}
        assert right == {"recorded": (1, 1), "model": (0, 1), "verify": (0, 1)}
        rows = [row[0] for row in report._table(measure(dream, [measured]))]
        assert rows[-3:] == ["right, decided by model", "right, decided by recorded", "right, decided by verify"]
    by_part = only(Dream([model], judges=[judge]), measured).one_step.right_by_part
    right = {part: (rate.successes, rate.steps) for part, rate in by_part.items()}
    assert right == {"model": (0, 2), "verify": (0, 1)}
