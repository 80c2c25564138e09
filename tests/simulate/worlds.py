"""Environments that play tools in these tests: scripted, for what is tested is the layer around them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from zoo.base import ask
from zoo.policy import ScriptedPolicy

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.simulate import RealAccessBlocked, SimulatedEpisode, simulated
from dreamgym_lg.types import Step, StepResult, Task

TASK = Task(id="t", instruction="book a room", environment="zoo", observation="book a room")


class Answers(Environment):
    """Answers every call with its number and text, or with what `answers` holds for the tool."""

    def __init__(self, answers: Mapping[str, str] | None = None, label: str = "dreamed") -> None:
        self.answers, self.label = answers or {}, label
        self.actions: list[str] = []
        self.shown: list[str] = []
        self.prompts: list[str] = []

    def reset(self, task: Task) -> str:
        self.actions = []
        return task.instruction

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.shown = [tool["function"]["name"] for tool in tools]

    def show_prompt(self, text: str) -> None:
        self.prompts.append(text)

    def step(self, action: str) -> StepResult:
        self.actions.append(action)
        parsed = parse_action(action)
        if not isinstance(parsed, ToolCall):
            return StepResult("", 1.0, True, False, {"success": True})
        answer = self.answers.get(parsed.name, f"{self.label} {len(self.actions)} of {parsed.name}")
        return StepResult(answer, 0.0, False, False, {"reasoning": "because"})

    async def astep(self, action: str) -> StepResult:
        return self.step(action)


async def played(agent: Any, environment: Environment, task: Task = TASK) -> dict[str, Any]:
    """What `rollout` would read of one episode; raises what the agent raises."""
    state: dict[str, Any] = {}
    async for values in agent.astream({"task": task}, context=EpisodeContext(environment=environment)):
        state = values
    return state


def dream(graph: Any, policy: Any, environment: Any = None, payload: Any = None, **options: Any) -> Any:
    """The episode and the graph's last state."""
    with simulated(graph, policy=policy, environment=environment or Answers(), task=TASK, **options) as episode:
        state = episode.invoke(payload or ask())
    return episode, state


def slow_unless(quick: bool, *values: Any) -> Any:
    """A pytest parameter that is marked slow unless `quick`."""
    name = "-".join(each.__name__ if callable(each) else each.name for each in values)
    return pytest.param(*values, id=name, marks=[] if quick else [pytest.mark.slow])


def names(episode: SimulatedEpisode) -> list[str]:
    """Of the tools it called."""
    return names_of(episode.steps)


def names_of(steps: Sequence[Step]) -> list[str]:
    """Of the tools that they called."""
    return [parse_action(step.action).name for step in steps]  # type: ignore[union-attr]


def node_of(act: Callable[[], Any]) -> Any:
    def node(state: dict) -> dict[str, Any]:
        return {"result": act()}

    return StateGraph(dict).add_node("node", node).add_edge(START, "node").compile()


def dreamed(act: Callable[[], Any], **options: Any) -> SimulatedEpisode:
    """An episode in which a node did that; what was raised is only what a guard raises."""
    episode = simulated(node_of(act), policy=ScriptedPolicy(), environment=Answers(), task=TASK, **options)
    try:
        with episode:
            episode.state = episode.invoke({"result": None})  # type: ignore[attr-defined]
    except RealAccessBlocked as error:
        assert set(error.blocked) <= set(episode.blocked)
    return episode
