"""One dream for every caller: the same parts, task and history give the same answers, step by step, whoever steps them."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from orders import DONE, ORDER, PAID, REFUND, REFUNDED, is_judging, order_task, trace

from dreamgym_lg import DreamGym
from dreamgym_lg.actions import ToolCall, is_answer, parse_action, render_answer, render_call, tool_schemas
from dreamgym_lg.dream import Dream, Episode, Model, ModelJudge, Recorded, References, Schemas, ScriptedUser
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.errors import EpisodesMissing, PredictionFailed
from dreamgym_lg.fidelity.judgement import INVALID, LOOKUP, MISSED, ajudge
from dreamgym_lg.fidelity.steps import answer_steps
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent
from dreamgym_lg.types import Step, StepResult, Task, Trajectory


@tool
def get_order(order_id: str) -> str:
    """Look up an order."""
    raise AssertionError("never run in a dream")


@tool
def refund(order_id: str) -> str:
    """Refund an order."""
    raise AssertionError("never run in a dream")


@tool
def cancel(order_id: str) -> str:
    """Cancel an order."""
    raise AssertionError("never run in a dream")


TOOLS = [get_order, refund, cancel]
CANCEL, CANCEL_OTHER = (render_call("cancel", {"order_id": order}) for order in ("W-204", "W-999"))
OTHER, UNREADABLE = (render_call("get_order", {"order_id": order}) for order in ("W-205", "unreadable"))
REFUND_NONE, UNKNOWN, WRONG = (
    render_call("refund", {"order_id": "none"}),
    render_call("fly", {}),
    render_call("get_order", {"id": 1}),
)
WHICH, SURE = render_answer("Which order?"), render_answer("Refund it?")

DESK = order_task("new", "Task t1.", tools=tool_schemas(TOOLS))
"""No trace is its own, so that nothing changes where a dream is measured."""
ASKS, TALK = replace(DESK, id="asks", instruction="Is it paid?"), replace(DESK, id="talk", instruction="I want my money.")
HOUSE = Task(id="door", instruction="leave the house", environment="house", observation="A closed door.")


class Case(NamedTuple):
    task: Task
    actions: Sequence[str]
    decided: Sequence[str]
    """The part that decides each answer; one fewer than the actions where the last cannot be read."""
    judged: str = ""


MODELS, TRACES = ["model"] * 3, ["recorded"] * 3
CASES = {
    "recorded answers": Case(DESK, [ORDER, REFUND, ORDER, DONE], [*TRACES, ""], "references"),
    "answers of the model": Case(DESK, [OTHER, CANCEL_OTHER, OTHER, OTHER, DONE], [*MODELS, "recorded", ""], "references"),
    "a recorded error": Case(DESK, [CANCEL, OTHER, REFUND, DONE], ["recorded", "model", "recorded", ""], "references"),
    "an error of the model": Case(DESK, [REFUND_NONE, OTHER, DONE], ["model", "model", ""], "references"),
    "an error of a schema": Case(DESK, [UNKNOWN, WRONG, OTHER, DONE], ["schema", "schema", "model", ""], "references"),
    "a message that a model judges": Case(ASKS, [ORDER, DONE], ["recorded", ""], "model"),
    "an answer that cannot be read": Case(DESK, [ORDER, UNREADABLE], ["recorded"]),
    "a verdict that cannot be read": Case(ASKS, [ORDER, render_answer("It is unreadable.")], ["recorded"]),
    "two user turns": Case(TALK, [WHICH, ORDER, SURE, REFUND, DONE], ["user", "recorded", "user", "recorded", ""], "model"),
    "a text agent's success": Case(HOUSE, ["dance", "open door", "go north"], MODELS, "model"),
    "a text agent's failure": Case(HOUSE, ["open door", "jump"], MODELS[:2], "model"),
}


@pytest.fixture
def chat(scripted: Any, door_world: Any) -> Any:
    """A language model whose every answer is a function of its prompt alone."""

    def reply(messages: list[BaseMessage]) -> str:
        text = "\n".join(message.text for message in messages)
        if "unreadable" in text:
            return "no answer in any form"
        if is_judging(messages):
            return f"it has {len(text)} characters\n{'success' if PAID in text else 'failure'}"
        if "A closed door." in text:
            return str(door_world(messages))
        if '"none"' in messages[-1].text:
            return "invalid, there is none\nreward 0, continues\nError: no such order"
        return f'valid, it is made up\nreward 0, continues\n{{"characters": {len(text)}}}'

    return scripted(reply=reply)


@pytest.fixture
def index(buffer: ReplayBuffer) -> TraceIndex:
    """Recordings of other tasks, one of them in the same words."""
    buffer.add(trace(order_task("other", DESK.instruction), (ORDER, PAID), (REFUND, "ok"), (ORDER, REFUNDED), DONE))
    buffer.add(trace(order_task("failed"), (CANCEL, "Error: it is shipped", False), DONE, success=False))
    return TraceIndex(buffer, tools=TOOLS, writes=["refund", "cancel"])


def next_message(episode: Episode) -> str | None:
    """The user's, twice."""
    turns = sum(is_answer(step.action) for step in episode.steps)
    return f"the user's reply {turns + 1}" if turns < 2 else None


def create_dream(case: Case, chat: Any, index: TraceIndex) -> Dream:
    """A new one for each caller: nothing is remembered of what another asked."""
    user = ScriptedUser(next_message) if case.task is TALK else None
    judges = [References(index, conversations=user is not None), ModelJudge(chat, references=index)]
    return Dream([Schemas(TOOLS), Recorded(index), Model(chat, replay_buffer=index.replay_buffer)], user, judges)


Answered = tuple[Any, ...]
"""Everything that a step says of the answer."""


def of_step(step: Step) -> Answered:
    return step.next_observation, step.reward, step.terminated, step.valid, step.decided_by, step.judged_by


def of_result(result: StepResult) -> Answered:
    info = result.info
    return *result[:3], info["valid"], info["decided_by"], info["judged_by"]


def of_steps(steps: Sequence[Step], error: str | None = None) -> list[Answered | None]:
    """With None at the end for an answer that could not be read."""
    assert error is None or error.startswith("PredictionFailed: ")
    return [*map(of_step, steps), *([None] if error else [])]


# --- the callers ------------------------------------------------------------------------------------------------------


class Acts(BaseChatModel):
    """A policy that acts by a list, whatever it reads: in text, or by tool calls."""

    actions: Sequence[str]
    calls_tools: bool = False

    @property
    def _llm_type(self) -> str:
        return "acts"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self.bind(tools=tool_schemas(tools))

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        number = sum(isinstance(message, AIMessage) for message in messages)
        action = self.actions[number]
        message = as_message(action, f"call-{number}") if self.calls_tools else AIMessage(action)
        return ChatResult(generations=[ChatGeneration(message=message)])


def as_message(action: str, call_id: str) -> AIMessage:
    """An action as a chat model says it that is bound to tools."""
    parsed = parse_action(action)
    if not isinstance(parsed, ToolCall):
        return AIMessage(parsed)
    return AIMessage("", tool_calls=[{"name": parsed.name, "args": dict(parsed.arguments), "id": call_id}])


def by_step(dream: Dream, case: Case) -> list[Answered | None]:
    environment = dream.create_environment()
    environment.reset(case.task)
    answered: list[Answered | None] = []
    for action in case.actions:
        try:
            answered.append(of_result(environment.step(action)))
        except PredictionFailed:
            answered.append(None)
    assert of_steps(environment.steps) == [each for each in answered if each is not None]
    return answered


def by_astep(dream: Dream, case: Case) -> list[Answered | None]:
    async def episode() -> list[Answered | None]:
        environment, answered = dream.create_environment(), list[Answered | None]()
        await environment.areset(case.task)
        for action in case.actions:
            try:
                answered.append(of_result(await environment.astep(action)))
            except PredictionFailed:
                answered.append(None)
        return answered

    return asyncio.run(episode())


def by_training(dream: Dream, case: Case) -> list[Answered | None]:
    """Three rollouts of the episode graph at once: the group of a training iteration."""
    return of_group(dream, case, create_episode_graph(Acts(actions=case.actions)).compile())


def by_training_of_an_agent(dream: Dream, case: Case) -> list[Answered | None]:
    """The same of an unmodified LangChain agent."""
    policy = Acts(actions=case.actions, calls_tools=True)
    return of_group(dream, case, SimulatedAgent(create_agent(policy, TOOLS), policy))


def by_training_of_a_threaded_agent(dream: Dream, case: Case) -> list[Answered | None]:
    """The same of one whose checkpointer keeps the conversation."""
    policy = Acts(actions=case.actions, calls_tools=True)
    return of_group(dream, case, SimulatedAgent(create_agent(policy, TOOLS, checkpointer=InMemorySaver()), policy))


def of_group(dream: Dream, case: Case, agent: Any) -> list[Answered | None]:
    playing = rollout(agent, [case.task], dream.create_environment, source="synthetic", num_generations=3)
    first, *others = (of_steps(each.steps, each.error) for each in asyncio.run(playing))
    assert others == [first, first]
    return first


def by_evaluation(dream: Dream, case: Case) -> list[Answered | None]:
    policy = Acts(actions=case.actions, calls_tools=True)
    with ReplayBuffer(":memory:") as buffer:
        gym = DreamGym(create_agent(policy, TOOLS), replay_buffer=buffer, dream=dream, tasks=[case.task], say=lambda _: None)
        with suppress(EpisodesMissing):  # where the only one ends in an unreadable answer
            gym.evaluate(policy, tasks=[case.task])
        (episode,) = buffer.trajectories(source="synthetic")
    return of_steps(episode.steps, episode.error)


def by_fidelity(dream: Dream, case: Case) -> list[Answered | None]:
    answered = asyncio.run(answer_steps(dream, recording(dream, case), asyncio.Semaphore(4)))
    return [of_result(each.answer) if each.answer is not None else None for each in answered]


def recording(dream: Dream, case: Case, **fields: Any) -> Trajectory:
    """The episode as it would have been recorded of a world that answers as the dream does."""
    environment = dream.create_environment()
    environment.reset(case.task)
    for action in case.actions[: len(case.decided)]:
        environment.step(action)
    real = [replace(step, decided_by="", judged_by="") for step in environment.steps]
    rest = [Step(observation="", action=action, next_observation="") for action in case.actions[len(case.decided) :]]
    return Trajectory(task=case.task, steps=[*real, *rest], **fields)


WITH_AN_AGENT: list[Callable[[Dream, Case], list[Answered | None]]] = [
    *(by_training_of_an_agent, by_training_of_a_threaded_agent, by_evaluation)
]
CALLERS = [by_astep, by_training, by_fidelity, *WITH_AN_AGENT]


def can_play(caller: Callable[..., Any], case: Case) -> bool:
    """An agent with tools plays no text game."""
    return caller not in WITH_AN_AGENT or case.task is not HOUSE


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_caller_gets_the_same_answers(
    case: Case, caller: Callable[..., Any], chat: Any, index: TraceIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = by_step(create_dream(case, chat, index), case)
    assert [each and each[4] for each in expected] == [*case.decided, *[None] * (len(case.actions) - len(case.decided))]
    last = expected[-1]
    assert last is None or (last[2], last[5]) == (True, case.judged)
    if can_play(caller, case):
        assert caller(create_dream(case, chat, index), case) == expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gate_measures_the_dream_that_is_trained_in(case: Case, chat: Any, index: TraceIndex) -> None:
    *_, last = by_step(create_dream(case, chat, index), case)
    rewarded, ends = last is not None and last[1] > 0, last is not None or is_answer(case.actions[-1])
    for success in (True, False):
        episode = recording(create_dream(case, chat, index), case, success=success, source="real")
        judgement = asyncio.run(ajudge(create_dream(case, chat, index), [episode], writes=["refund", "cancel"]))
        wrong = judgement.errors.get(MISSED) if success else judgement.false_success
        assert (wrong.value if wrong is not None else None) == (rewarded != success if ends else None)
        judges = [part.name for part in judgement.parts if part.role == "judge" and part.errors]
        assert judges[:1] == ([case.judged or "model"] if ends else []), "an unreadable verdict is the model's"
        again = (judgement.errors.get(INVALID), judgement.errors.get(LOOKUP))
        assert all(rate is None or rate.value == 0 for rate in again), "it refuses and looks up again as before"


def test_an_agent_without_tools_is_judged_by_the_judges(chat: Any, index: TraceIndex) -> None:
    policy = Acts(actions=["It is paid."])
    case = Case(replace(ASKS, tools=[]), [render_answer("It is paid.")], [""], "model")
    with ReplayBuffer(":memory:") as buffer:
        dream = create_dream(case, chat, index)
        gym = DreamGym(create_agent(policy), replay_buffer=buffer, dream=dream, tasks=[ASKS], say=lambda _: None)
        _, (episode,) = gym.evaluate(policy, tasks=[ASKS])
    assert of_steps(episode.steps) == by_step(create_dream(case, chat, index), case)
    assert episode.steps[-1].judged_by == "model"


async def test_where_nothing_judges_no_last_message_is_put_to_the_dream(chat: Any, index: TraceIndex) -> None:
    """A check of the user's own stands in the place of judges (`verify_dream`)."""
    recorded = trace(ASKS, (ORDER, PAID), DONE)
    (answered,) = await answer_steps(Dream([Recorded(index)]), recorded, asyncio.Semaphore(1))
    assert answered.step.action == ORDER
