"""A recorded conversation as the trajectory of an agent: what it saw, what it did, what came of it."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from dreamgym_lg.actions import render_answer, render_call, render_malformed
from dreamgym_lg.traces.rows import Conversation
from dreamgym_lg.types import Step, Task, Trajectory


@dataclass
class _Act:
    """A tool call, or something said to the user, with what came back."""

    action: str
    call_id: str = ""
    tool: str = ""
    valid: bool = True
    answered: bool = False
    seen: list[str] = field(default_factory=list)


@dataclass
class ParsedConversation:
    """Observations and actions of an agent in a recorded conversation, read message by message."""

    system: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    acts: list[_Act] = field(default_factory=list)
    reply: str | None = None
    """The agent's last words, until it is known who answers them; at the end, its final answer."""
    malformed: _Act | None = None
    """In its place: a tool call that could not be read, with which the agent ended."""

    @classmethod
    def parse(cls, messages: Sequence[BaseMessage]) -> "ParsedConversation":
        """Read a whole conversation. Raises `ValueError` where it is none that an agent could have held."""
        parsed = cls()
        for message in messages:
            parsed._read(message)
        waiting = [act for act in parsed.acts if not act.answered]
        if waiting and not any(act.valid for act in waiting):
            parsed.malformed = waiting[-1]  # no tool could be asked, so the agent ended here
        if waiting:
            # Stopped in the middle of a call: what is known of the turn stays, what would have come is not invented.
            parsed.acts = [act for act in parsed.acts if act.answered]
        if not any(parsed.requests):
            raise ValueError("no human message has a text: there is nothing the agent could have seen first")
        if not parsed.acts and not parsed.ended:
            lost = f"; its call of {waiting[0].tool!r} was never answered" if waiting else ""
            raise ValueError(f"the agent did nothing: no AI message after the first human one{lost}")
        return parsed

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.malformed is not None

    def steps(self) -> list[Step]:
        """One step an act; each observation is what the step before brought, as it is in the dream."""
        steps, observation = [], "\n\n".join(self.requests)
        for act in self.acts:
            after = "\n\n".join(act.seen)
            steps.append(Step(observation=observation, action=act.action, next_observation=after, valid=act.valid))
            observation = after
        if self.malformed is not None:
            last = self.malformed.action
        elif self.reply is not None:
            last = render_answer(self.reply)
        else:
            return [*steps[:-1], replace(steps[-1], truncated=True)]
        valid = self.malformed is None
        return [*steps, Step(observation=observation, action=last, next_observation="", terminated=True, valid=valid)]

    def _read(self, message: BaseMessage) -> None:
        if isinstance(message, AIMessage):
            self._act(message)
        elif isinstance(message, ToolMessage):
            self._answer(message)
        elif isinstance(message, SystemMessage) and not self.requests and not self.acts:
            self.system.append(text_of(message))
        elif isinstance(message, HumanMessage | SystemMessage):
            self._see(text_of(message))
        else:
            raise ValueError(f"a message of type {message.type!r} is neither system, human, AI nor tool")

    def _act(self, message: AIMessage) -> None:
        if unanswered := [act for act in self.acts if not act.answered]:
            call = f"{unanswered[0].call_id!r} ({unanswered[0].tool})"
            raise ValueError(f"tool call {call} has no answer before the next AI message")
        acts = [_Act(render_call(call["name"], call["args"]), call["id"] or "", call["name"]) for call in message.tool_calls]
        for bad in message.invalid_tool_calls:
            acts.append(_Act(render_malformed([bad]), bad["id"] or "", bad["name"] or "", valid=False))
        if not self.requests:
            if acts:
                raise ValueError("the agent called a tool before any human message: there is no first observation")
            return  # a greeting, before there is anything to do
        # Words that neither a user nor the end follows (a sub-agent's report) are no act towards the environment.
        self.reply = None if acts else message.text
        self.acts += acts

    def _answer(self, message: ToolMessage) -> None:
        waiting = [act for act in self.acts if not act.answered and act.call_id == message.tool_call_id]
        if not waiting:
            raise ValueError(f"a tool message answers call {message.tool_call_id!r}, which no AI message before it left open")
        act = waiting[0]  # some models give every call of a reply the same id: answers come in order
        act.answered, act.valid = True, act.valid and message.status != "error"
        act.seen.insert(0, text_of(message))

    def _see(self, text: str) -> None:
        """The user, or the application, says something."""
        if not self.acts and self.reply is None:
            self.requests.append(text)
            return
        if self.reply is not None:
            self.acts.append(_Act(render_answer(self.reply), answered=True))
            self.reply = None
        self.acts[-1].seen.append(text)


def called_tools(messages: Sequence[BaseMessage]) -> set[str]:
    """The names of the tools that were called."""
    return {call["name"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls}


def text_of(message: BaseMessage) -> str:
    """A message's text as its reader has it; `[image]` and the like for what is no text."""
    blocks = [message.content] if isinstance(message.content, str) else message.content
    lines = []
    for block in blocks:
        kind = "text" if isinstance(block, str) else str(block.get("type", "text"))
        text = block if isinstance(block, str) else block.get("text")
        lines.append(text if isinstance(text, str) else f"[{kind}]")
    return "\n".join(lines)


Range = tuple[float, float]
"""The lowest and the highest reward of a source."""


def verdict(conversation: Conversation, reward_range: Range) -> tuple[float, bool]:
    """The row's own reward, 0 to 1, and success; a recorded reward above 0 counts as success where the row does not say."""
    fields = {key: value for key, value in conversation.fields.items() if value is not None}
    success = fields.get("success")
    for key in ("reward", "score"):
        if key in fields:
            reward = finite(fields[key], key)
            succeeded = finite(success, "success") > 0 if success is not None else reward > 0
            return scaled(reward, key, reward_range), succeeded
    if success is None:
        return 0.0, False
    return scaled(finite(success, "success"), "success", (0, 1)), finite(success, "success") > 0


def scaled(reward: float, name: str, reward_range: Range) -> float:
    """The reward on a scale from 0 to 1. Raises `ValueError`, which names it, outside of `reward_range`."""
    low, high = reward_range
    if not low <= reward <= high:
        raise ValueError(
            f"its {name} is {reward:g}, outside {low:g} to {high:g}: give load_traces(..., reward_range=(lowest, highest)), or "
            "`dreamgym import --reward-range LOWEST HIGHEST`, and all are scaled to 0 to 1"
        )
    return (reward - low) / (high - low)


def finite(value: object, name: str) -> float:
    """Read `value` as a float. Raises `ValueError`, which names it, unless it is a finite number or a boolean."""
    if isinstance(value, bool | int | float):
        try:
            if math.isfinite(number := float(value)):
                return number
        except OverflowError:
            pass
    raise ValueError(f"its {name} is {str(value)[:40]!r}, not a finite number")


def to_trajectory(
    parsed: ParsedConversation,
    fields: Mapping[str, Any],
    environment: str,
    reward: float,
    success: bool,
    tools: Sequence[Mapping[str, Any] | str],
) -> Trajectory:
    """Convert a conversation to a trajectory, with the reward on its last step.

    Args: `fields`, of the row, whose `metadata` and `rubric` are the task's; `tools`, all that the agent could call: those
    that it called in this trace alone would tell what the task needs.

    Raises `ValueError` for metadata that is no object, and a rubric that is no text.
    """
    steps = parsed.steps()
    steps[-1] = replace(steps[-1], reward=reward)
    instruction = "\n\n".join([*parsed.system, *parsed.requests])
    metadata, rubric = (_checked(fields, name, kind) for name, kind in (("metadata", Mapping), ("rubric", str)))
    # The same words with other metadata are another task: another customer, another order.
    about = "".join(f"\n{json.dumps(part, sort_keys=True)}" for part in (metadata, rubric) if part)
    task = Task(
        id=f"{environment}/{_digest(instruction + about)[:16]}",
        instruction=instruction,
        environment=environment,
        observation=steps[0].observation,
        tools=list(tools),
        rubric=rubric or "",
        metadata=metadata or {},
    )
    # The content is the key: a trace that two exports share is stored once, two of the same task are both stored.
    index = int(_digest(repr(steps))[:12], 16)
    return Trajectory(task=task, steps=steps, success=success and parsed.ended, run="traces", rollout_index=index)


def _checked(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    if (value := fields.get(name)) is not None and not isinstance(value, kind):
        raise ValueError(f"its {name} is {str(value)[:40]!r}, not {'a text' if kind is str else 'an object'}")
    return value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
