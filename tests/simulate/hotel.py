"""A hotel's ordinary agent, its dream and a policy for it, without the zoo, which needs newer versions than this library."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool

from dreamgym_lg.environment import Environment
from dreamgym_lg.types import StepResult, Task

TASK = Task(id="t", instruction="Book a room in Rome.", environment="hotel")
PAYLOAD: Any = {"messages": [("user", TASK.instruction)]}


class Model(BaseChatModel):
    """Books once, then answers; each reply says whose it is."""

    label: str

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        booked = any(message.type == "tool" for message in messages)
        call = {"name": "book", "args": {"city": "Rome"}, "id": "call-1"}
        reply = AIMessage(f"{self.label} done") if booked else AIMessage(f"{self.label} books", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=reply)])


class Hotel(Environment):
    def reset(self, task: Task) -> str:
        return task.instruction

    def step(self, action: str) -> StepResult:
        if "book" in action:
            return StepResult("A dreamed room.", 0.0, False, False, {"valid": True})
        return StepResult("", 1.0, True, False, {"success": True})


def build(label: str, booked: list[str], **options: Any) -> Any:
    @tool
    def book(city: str) -> str:
        """Book a room."""
        booked.append(city)
        return "A real room."

    return create_agent(Model(label=label), [book], **options)
