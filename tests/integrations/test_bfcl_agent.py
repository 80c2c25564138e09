"""BFCL played: through a real `create_agent` graph, through the environment, and as offline trajectories."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from dreamgym_lg.actions import ToolCall, parse_action, render_answer, render_call
from dreamgym_lg.environment import check_environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Task, Trajectory

pytest.importorskip("bfcl_eval", reason="no bfcl_eval; run: pip install --no-deps bfcl-eval")
pytest.importorskip("mpmath", reason="no mpmath; run: pip install 'dreamgym-lg[bfcl]'")
pytest.importorskip("langchain", reason="no langchain; run: pip install 'dreamgym-lg[bfcl]'")

from dreamgym_lg.integrations.bfcl import (
    CATEGORIES,
    BFCLApis,
    BFCLEnvironment,
    arun_turns,
    check_call,
    create_agent_graph,
    ground_truth,
    load_tasks,
    offline_trajectories,
    run_turns,
)
from dreamgym_lg.integrations.bfcl.apis import OVER

Turns = Sequence[Sequence[ToolCall]]


class Scripted(BaseChatModel):
    """Replies with these messages one after another; then it repeats the last."""

    replies: list[AIMessage]
    bound: list[str] = Field(default_factory=list)
    asked: list[list[BaseMessage]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> "Scripted":
        if len(self.bound) != len(tools):  # LangChain binds them again for each reply
            self.bound[:] = [convert_to_openai_tool(tool)["function"]["name"] for tool in tools]
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        reply = self.replies[min(len(self.asked), len(self.replies) - 1)]
        self.asked.append(list(messages))
        return ChatResult(generations=[ChatGeneration(message=reply.model_copy(update={"id": None}))])


def calling(*calls: ToolCall) -> AIMessage:
    """A message that calls these tools at once."""
    named = enumerate(calls)
    return AIMessage("", tool_calls=[{"name": call.name, "args": dict(call.arguments), "id": f"c{i}"} for i, call in named])


def scripted(turns: Turns, *, at_once: bool = False) -> Scripted:
    """A model that makes these calls, one a message or all of a turn at once, and ends each turn with an answer."""
    replies: list[AIMessage] = []
    for calls in turns:
        replies += [calling(*calls)] * bool(calls) if at_once else [calling(call) for call in calls]
        replies.append(AIMessage("Done."))
    return Scripted(replies=replies)


def actions(turns: Turns) -> list[str]:
    played = [[*(render_call(*call) for call in calls), render_answer("Done.")] for calls in turns]
    return [action for turn in played for action in turn]


def task_of(number: int, category: str = "multi_turn_base") -> Task:
    return next(task for task in load_tasks(category) if task.id == f"{category}_{number}")


REFUSED = [  # arguments in the order in which the action text, and so its refusal, has them
    (0, "fly", {}),
    (0, "cat", {}),
    (0, "cat", {"file_name": "a", "force": True}),
    (0, "cat", {"file_name": 7}),
    (0, "ls", {"a": "yes"}),
    (50, "lockDoors", {"door": ["driver", "roof"], "unlock": True}),
    (50, "startEngine", {"ignitionMode": "start"}),
    (50, "fillFuelTank", {"fuelAmount": "10"}),
]


def vehicle_task() -> Task:
    return next(task for task in load_tasks() if "VehicleControlAPI" in task.metadata["involved_classes"])


@pytest.mark.parametrize(("number", "name", "arguments"), REFUSED)
def test_check_call_says_what_the_real_graph_says(number: int, name: str, arguments: dict[str, Any]) -> None:
    task = vehicle_task() if number else task_of(number)
    apis = BFCLApis(task)
    model = Scripted(replies=[calling(ToolCall(name, arguments)), AIMessage("Done.")])
    messages = create_agent_graph(model, apis).invoke({"messages": [HumanMessage("Go.")]})["messages"]
    answers = [message for message in messages if isinstance(message, ToolMessage)]
    assert [answer.content for answer in answers] == [check_call(task, render_call(name, arguments))]
    assert answers[0].status == "error" and apis.answers == []


def test_the_real_graph_answers_as_the_environment_does() -> None:
    tasks = [task for task in load_tasks(split="train") if "GorillaFileSystem" in task.metadata["involved_classes"]]
    tasks += [task for task in load_tasks("multi_turn_miss_func", split="train") if task not in tasks]
    for trajectory in offline_trajectories(tasks[::12], failures=1, answers=True):
        model, apis = Scripted(replies=[]), BFCLApis(trajectory.task)
        for step in trajectory.steps:
            action = parse_action(step.action)
            model.replies.append(calling(action) if isinstance(action, ToolCall) else AIMessage(action))
        messages = run_turns(create_agent_graph(model, apis), apis)
        answered = [message.content for message in messages if isinstance(message, ToolMessage)]
        assert answered == [step.next_observation for step in trajectory.steps if "answer" not in step.action[:9]]
        assert apis.success() == trajectory.success
        assert model.bound == [tool.name for tool in apis.tools]


def test_arguments_of_a_tool_without_parameters_are_ignored_everywhere() -> None:
    task, environment, call = task_of(0), BFCLEnvironment(), ToolCall("pwd", {"anything": 1})
    apis = BFCLApis(task)
    graph = create_agent_graph(Scripted(replies=[calling(call), AIMessage("Done.")]), apis)
    graph.invoke({"messages": [HumanMessage("Go.")]})
    environment.reset(task)
    assert apis.answers == [environment.step(render_call(*call)).observation]
    assert check_call(task, render_call(*call)) is None


# --- the graph ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("at_once", [False, True])
def test_ground_truth_through_an_ordinary_agent_graph(category: str, at_once: bool) -> None:
    for task in load_tasks(category)[::20]:
        apis, turns = BFCLApis(task), ground_truth(task)
        messages = run_turns(create_agent_graph(scripted(turns, at_once=at_once), apis), apis)
        assert apis.success(), task.id
        said = [message.text for message in messages if isinstance(message, HumanMessage)]
        assert said == apis.user_turns
        assert apis.answers == [message.content for message in messages if isinstance(message, ToolMessage)]
        assert apis.answers == apis.reference.answers


async def test_concurrent_conversations_stay_apart() -> None:
    tasks = load_tasks()[5:200:15]
    worlds = [BFCLApis(task) for task in tasks]
    graphs = [create_agent_graph(scripted(ground_truth(apis.task), at_once=True), apis) for apis in worlds]
    await asyncio.gather(*(arun_turns(graph, apis) for graph, apis in zip(graphs, worlds, strict=True)))
    assert all(apis.success() for apis in worlds)


async def test_an_agent_that_never_stops_is_cut_short() -> None:
    apis = BFCLApis(task_of(0))
    graph = create_agent_graph(Scripted(replies=[calling(ToolCall("pwd", {}))]), apis)
    for messages in (run_turns(graph, apis, recursion_limit=9), await arun_turns(graph, apis, recursion_limit=9)):
        assert apis.cut_short and apis.turn == 0 and not apis.success()
        assert sum(isinstance(message, ToolMessage) for message in messages) == 4


# --- the environment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("category", CATEGORIES)
def test_environment_keeps_the_contract(category: str) -> None:
    for task in load_tasks(category)[::50]:
        check_environment(BFCLEnvironment(), task, actions(ground_truth(task)))


def test_environment_speaks_the_user_and_pays_at_the_end() -> None:
    task, environment = task_of(0), BFCLEnvironment()
    assert environment.reset(task) == task.observation == task.metadata["user_turns"][0]
    results = [environment.step(action) for action in actions(ground_truth(task))]
    assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [1.0]
    assert results[-1].info["success"] and results[-1].observation == OVER
    assert [result.observation for result in results if result.observation in task.metadata["user_turns"]] == list(
        task.metadata["user_turns"][1:]
    )
    environment.reset(task)
    idle = [environment.step(render_answer("Done.")) for _ in task.metadata["user_turns"]]
    assert sum(result.reward for result in idle) == 0.0 and idle[-1].terminated and not idle[-1].info["success"]


def test_environment_refuses_as_production_does_and_truncates() -> None:
    task, environment = task_of(0), BFCLEnvironment(max_calls=3)
    with pytest.raises(RuntimeError, match="reset"):
        environment.step(render_answer("Done."))
    environment.reset(task)
    action = render_call("cat", {"file_name": 7})
    refused = environment.step(action)
    assert refused.observation == check_call(task, action) and not refused.info["valid"]
    assert not environment.step("cat final_report.pdf").info["valid"]
    assert environment.step(render_call("pwd", {})).truncated is False
    assert environment.step(render_call("pwd", {})).truncated is True
    with pytest.raises(RuntimeError, match="reset"):
        environment.step(render_call("pwd", {}))
    with pytest.raises(ConfigurationError, match="max_calls=0"):
        BFCLEnvironment(max_calls=0)


# --- offline trajectories -------------------------------------------------------------------------------------------


def collected(category: str = "multi_turn_base", count: int = 40, **options: Any) -> list[Trajectory]:
    return list(offline_trajectories(load_tasks(category, split="train")[:count], **options))


@pytest.mark.parametrize("category", CATEGORIES)
def test_demonstrations_are_the_ground_truth_with_real_answers(category: str) -> None:
    for trajectory in collected(category, failures=0):
        turns, apis = ground_truth(trajectory.task), BFCLApis(trajectory.task)
        assert [parse_action(step.action) for step in trajectory.steps] == [call for turn in turns for call in turn]
        assert trajectory.success and trajectory.reward == 1.0 and trajectory.source == "offline"
        assert [step.terminated for step in trajectory.steps] == [False] * (len(trajectory.steps) - 1) + [True]
        assert all(step.valid for step in trajectory.steps)
        told = "\n".join(step.observation for step in trajectory.steps)
        assert all(text in told for text in apis.user_turns)
        for before, step in zip(trajectory.steps, trajectory.steps[1:], strict=False):
            assert step.observation.startswith(before.next_observation)


def test_failing_episodes_show_every_kind_of_error() -> None:
    failed = [trajectory for trajectory in collected(count=60, failures=3) if not trajectory.success]
    assert len(failed) > 170 and all(trajectory.reward == 0.0 for trajectory in failed)
    invalid = [step for trajectory in failed for step in trajectory.steps if not step.valid]
    told = "\n".join(step.next_observation for step in invalid)
    for text in ("is not a valid tool", "Field required", "Extra inputs are not permitted", "Input should be", '{"error": "'):
        assert text in told, text
    assert sum(trajectory.invalid_actions == 0 for trajectory in failed) > 5  # plausible calls that only fail the user


def test_steps_with_answers_are_those_of_the_environment() -> None:
    environment = BFCLEnvironment()
    for trajectory in collected("multi_turn_miss_param", 10, failures=1, answers=True):
        observation = environment.reset(trajectory.task)
        for step in trajectory.steps:
            assert step.observation == observation
            result = environment.step(step.action)
            observation = result.observation
            assert (observation, result.reward, result.terminated) == (step.next_observation, step.reward, step.terminated)
        assert trajectory.success == result.info["success"]


def test_trajectories_follow_from_the_seed() -> None:
    first = collected(count=5, failures=2)
    assert first == collected(count=5, failures=2) and first != collected(count=5, failures=2, seed=1)
    assert len({(trajectory.task.id, trajectory.rollout_index) for trajectory in first}) == len(first)


def test_evaluation_tasks_are_not_collected_on() -> None:
    with pytest.raises(ConfigurationError, match="leak"):
        offline_trajectories(load_tasks(split="test"))
