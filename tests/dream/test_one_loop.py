"""One dream for every caller: rollouts, `play`, the served episode and `fidelity` step the same object."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from langchain_core.messages import AIMessage, BaseMessage
from orders import CANCEL, DONE, NOTE, ORDER, PAID, REFUND, is_judging, order_task, trace

from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.cli.play_session import Session
from dreamgym_lg.dream import Dream, Episode, Model, ModelJudge, Recorded, References, Schemas, ScriptedUser
from dreamgym_lg.dream.parts import Responder
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experiment.served import _InThread
from dreamgym_lg.fidelity.replay import answer_forced, replay_free
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Step, Task, Trajectory
from graphs.episode import create_episode_graph

UNREADABLE, UNKNOWN = render_call("get_order", {"order_id": "W-13"}), render_call("fly", {})
HOUSE = Task(id="door", instruction="leave the house", environment="house", observation="A closed door.")


class Case(NamedTuple):
    task: Task
    actions: list[str]
    decided: list[str]
    """Who decides each answer; shorter than the actions where one cannot be answered."""
    judged: str


CASES = {
    "recorded answers": Case(order_task(), [ORDER, REFUND, DONE], ["recorded", "recorded", ""], "references"),
    "answers of the model": Case(order_task(), [NOTE, CANCEL, ORDER, DONE], ["model", "model", "recorded", ""], "references"),
    "a tool that is none": Case(order_task(), [UNKNOWN, ORDER, DONE], ["schema", "recorded", ""], "references"),
    "an answer that cannot be read": Case(order_task(), [ORDER, UNREADABLE, DONE], ["recorded"], ""),
    "a conversation of two user turns": Case(
        order_task("talk"),
        [render_answer("Which order?"), ORDER, render_answer("Refund it?"), REFUND, DONE],
        ["user", "recorded", "user", "recorded", ""],
        "model",
    ),
    "a text agent": Case(HOUSE, ["dance", "open door", "go north"], ["model", "model", "model"], "model"),
}


def _user(episode: Episode) -> str | None:
    """In a conversation, two replies; silent elsewhere."""
    turns = sum(is_answer(step.action) for step in episode.steps)
    return f"the user's reply {turns + 1}" if episode.task.id == "talk" and turns < 2 else None


@pytest.fixture
def dream(scripted: Any, door_world: Any, buffer: ReplayBuffer) -> Dream:
    """Every part is a function of the history alone, and the traces are those of another task."""

    def reply(messages: list[BaseMessage]) -> str:
        prompt = "\n".join(message.text for message in messages)
        if is_judging(messages):
            return "it is what the user wants\nsuccess"
        if "A closed door." in prompt:
            return str(door_world(messages))
        if "W-13" in prompt:
            return "no answer in any form"
        return f"valid, it is done\nreward 0, continues\nnote {len(prompt) % 97}"

    buffer.add(trace(order_task("other"), (ORDER, PAID), (REFUND, "ok"), DONE))
    buffer.add(trace(order_task("t1"), (ORDER, PAID), (REFUND, "ok"), DONE))
    chat, index = scripted(reply=reply), TraceIndex(buffer, writes=["refund"])
    responders: list[Responder] = [Schemas(), Recorded(index), Model(chat)]
    return Dream(responders, ScriptedUser(_user), [References(index), ModelJudge(chat)])


class _Actor(NamedTuple):
    """What a policy that acts by a list replies, by the number of its earlier replies."""

    actions: Sequence[str]

    def __call__(self, messages: list[BaseMessage]) -> str:
        return self.actions[sum(isinstance(message, AIMessage) for message in messages)]


def _of_rollout(dream: Dream, case: Case, scripted: Any, concurrency: int) -> list[Step]:
    """As training, evaluation and the gate play: the episode graph in the event loop, several episodes at once."""
    graph = create_episode_graph(scripted(reply=_Actor(case.actions))).compile()
    played = asyncio.run(
        rollout(
            graph,
            [case.task],
            dream.create_environment,
            source="synthetic",
            num_generations=concurrency,
            run="training",
        )
    )
    assert all(each.steps == played[0].steps and each.error == played[0].error for each in played), played[0].error
    return list(played[0].steps)


def _of_play(dream: Dream, case: Case, wrap: Callable[[Any], Any] = lambda environment: environment) -> list[Step]:
    """As a person plays, and as a server steps it in a thread."""
    session = Session(wrap(dream.create_environment()), case.task)
    for action in case.actions:
        try:
            session.act(action)
        except PredictionFailed:
            break
    return session.steps


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_caller_gets_the_same_answers_for_the_same_history(case: Case, dream: Dream, scripted: Any) -> None:
    steps = _of_rollout(dream, case, scripted, 3)
    assert [step.decided_by for step in steps] == case.decided
    whole = len(steps) == len(case.actions)
    assert steps[-1].terminated == whole and steps[-1].judged_by == case.judged
    assert _of_rollout(dream, case, scripted, 1) == steps == _of_play(dream, case) == _of_play(dream, case, _InThread)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fidelity_and_the_gate_measure_the_dream_that_is_trained_in(case: Case, dream: Dream, scripted: Any) -> None:
    """Behind a history and played freely; they leave out traces of the own task, so the same is asked of a task without."""
    task = replace(case.task, id=case.task.id if case.task.id == "talk" else "new")
    case = case._replace(task=task)
    steps = _of_rollout(dream, case, scripted, 1)
    asked = [*steps, *(Step(observation="", action=action, next_observation="") for action in case.actions[len(steps) :][:1])]
    recorded = Trajectory(task=task, steps=asked, success=steps[-1].reward > 0)
    slots = asyncio.Semaphore(4)
    forced = asyncio.run(answer_forced(dream, recorded, slots))
    free = asyncio.run(replay_free(dream, recorded, slots))
    assert list(free.dreamed.steps) == steps
    assert (free.dreamed.error is None) == (len(steps) == len(case.actions))
    for answered in (forced, free.answered):
        assert [each.answer and _fields(each.answer) for each in answered] == [
            *map(_of_step, steps),
            *[None] * (len(asked) - len(steps)),
        ]


def _of_step(step: Step) -> tuple[Any, ...]:
    return (step.next_observation, step.reward, step.terminated, step.valid, step.reasoning, step.decided_by, step.judged_by)


def _fields(answer: Any) -> tuple[Any, ...]:
    info = answer.info
    return (*answer[:3], info["valid"], info["reasoning"], info["decided_by"], info["judged_by"])
