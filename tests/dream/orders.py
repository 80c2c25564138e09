"""A support desk: its calls, its tasks, its recorded episodes, and a language model that plays and judges it."""

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage

from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.types import Step, Task, Trajectory

ORDER = render_call("get_order", {"order_id": "W-204"})
REFUND = render_call("refund", {"order_id": "W-204"})
NOTE = render_call("add_note", {"order_id": "W-204", "text": "asked for a refund"})
CANCEL = render_call("cancel", {"order_id": "W-204"})
DONE = render_answer("Done.")
PAID, REFUNDED = '{"id": "W-204", "status": "paid"}', '{"id":"W-204",  "status":"refunded"}'
WRITES = ("refund", "add_note", "cancel")


def tool(name: str, **function: Any) -> dict[str, Any]:
    """A tool's schema in OpenAI's form."""
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool(name) for name in ("get_order", *WRITES)]


def order_task(id: str = "t1", instruction: str = "", **fields: Any) -> Task:
    defaults = {"instruction": instruction or f"Task {id}.", "environment": "desk", "tools": TOOLS}
    return Task(**{"id": id, **defaults, **fields})


def trace(of: Task, *acts: str | tuple[str, str] | tuple[str, str, bool], index: int = 0, **fields: Any) -> Trajectory:
    """A real episode of these actions, each with its answer and whether it was valid; a success by default."""
    steps, observation = [], of.instruction
    for act in acts:
        action, answer, valid = ((act, "", True) if isinstance(act, str) else (*act, True))[:3]
        ends = is_answer(action) and act is acts[-1]
        steps.append(Step(observation=observation, action=action, next_observation=answer, valid=valid, terminated=ends))
        observation = answer
    return Trajectory(task=of, steps=steps, **{"success": True, "run": "traces", "rollout_index": index, **fields})


class Index(TraceIndex):
    """An index of traces with `writes=`, but for tools that no trace holds yet."""

    def writes(self, tool: str) -> bool:
        return tool not in {"get_order", "get_user", *self.pass_through}


def is_judging(messages: Sequence[BaseMessage]) -> bool:
    """Whether a prompt is the judge's."""
    return messages[0].text.startswith("You judge")


def plays_and_judges(scripted: Any, *, success: bool = True) -> Any:
    """A language model that answers call n with `dreamed n`, and judges every episode alike."""

    def reply(messages: list[BaseMessage]) -> str:
        if is_judging(messages):
            return f"so it seems\n{'success' if success else 'failure'}"
        return f"valid, no progress yet\nreward 0, continues\ndreamed {sum(not is_judging(each) for each in model.asked)}"

    model = scripted(reply=reply)
    return model


class Says:
    """A part of every role that says the same each time; None leaves it to the next one."""

    def __init__(self, value: Any = None, name: str = "says") -> None:
        self.value, self.name = value, name
        self.episodes: list[Any] = []

    def respond(self, episode: Any) -> Any:
        self.episodes.append(episode)
        return self.value

    reply = respond

    def judge(self, episode: Any, answer: Any) -> Any:
        return self.respond((episode, answer))


class SaysLater(Says):
    """The same, asynchronously."""

    async def respond(self, episode: Any) -> Any:
        return super().respond(episode)

    reply = respond

    async def judge(self, episode: Any, answer: Any) -> Any:
        return await self.respond((episode, answer))


def play(environment: Any, of: Task, *actions: str) -> list[Any]:
    """The results of an episode's actions."""
    environment.reset(of)
    return [environment.step(action) for action in actions]
