"""Environments that play tools in these tests: scripted, for what is tested is the layer around them."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from dreamgym_lg.environment import Environment
from dreamgym_lg.tools import ToolCall, parse_action
from dreamgym_lg.types import StepResult, Task

TASK = Task(id="t", instruction="book a room", environment="zoo", metadata={"observation": "book a room"})


class Answers(Environment):
    """Answers every call with its number and text, or with what `answers` holds for the tool."""

    def __init__(self, answers: Mapping[str, str] | None = None, label: str = "dreamed") -> None:
        self.answers, self.label = answers or {}, label
        self.actions: list[str] = []
        self.shown: list[str] = []

    def reset(self, task: Task) -> str:
        self.actions = []
        return task.instruction

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.shown = [tool["function"]["name"] for tool in tools]

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
    async for values in agent.astream({"task": task}, context=SimpleNamespace(environment=environment)):
        state = values
    return state
