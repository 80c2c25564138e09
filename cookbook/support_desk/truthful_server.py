"""The truthful server: answers an agent's calls as its tools do, and judges as reality does."""

import json

from agent import TOOLS, connected
from langchain_core.tools import StructuredTool
from tickets import Shop

from dreamgym_lg import Environment, StepResult, Task
from dreamgym_lg.actions import ToolCall, parse_action


class TruthfulServer(Environment):
    """The tools' own code, on a copy of the database that only this episode has.

    With `DreamGym(create_environment=...)` everything but the dream is in the loop: what does not learn here does not learn in
    a dream either.
    """

    def __init__(self, shop: Shop) -> None:
        self.shop, self.tools = shop, {tool.__name__: StructuredTool.from_function(tool) for tool in TOOLS}

    def reset(self, task: Task) -> str:
        self.task, self.database = task, self.shop.copy()
        return task.instruction

    def step(self, action: str) -> StepResult:
        call = parse_action(action)
        with connected(self.database):
            if isinstance(call, ToolCall):
                return StepResult(json.dumps(self.tools[call.name].invoke(dict(call.arguments))), 0.0, False, False, {})
            success = self.shop.solved(self.task, call)
        return StepResult("", float(success), True, False, {"success": success})
