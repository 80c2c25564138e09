"""A recorded conversation as the trajectory of an agent: what it saw, what it did, what came of it."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from dreamgym_lg.actions import render_answer, render_call
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
    """What an agent saw and did in a recorded conversation, read message by message."""

    system: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    acts: list[_Act] = field(default_factory=list)
    said: str | None = None
    """The agent's last words, until it is known who answers them; at the end, its final answer."""

    @classmethod
    def parse(cls, messages: Sequence[BaseMessage]) -> "ParsedConversation":
        """Read a whole conversation. Raises `ValueError` where it is none that an agent could have held."""
        parsed = cls()
        for message in messages:
            parsed._read(message)
        waiting = [act for act in parsed.acts if not act.answered]
        if waiting:
            # Stopped in the middle of a call: what is known of the turn stays, what would have come is not invented.
            parsed.acts = [act for act in parsed.acts if act.answered]
        if not any(parsed.asked):
            raise ValueError("no human message has a text: there is nothing the agent could have seen first")
        if not parsed.acts and parsed.said is None:
            lost = f"; its call of {waiting[0].tool!r} was never answered" if waiting else ""
            raise ValueError(f"the agent did nothing: no AI message after the first human one{lost}")
        return parsed

    @property
    def ended(self) -> bool:
        return self.said is not None

    def steps(self) -> list[Step]:
        """One step an act; each observation is what the step before brought, as it is in the dream."""
        steps, observation = [], "\n\n".join(self.asked)
        for act in self.acts:
            after = "\n\n".join(act.seen)
            steps.append(Step(observation=observation, action=act.action, next_observation=after, valid=act.valid))
            observation = after
        if self.said is None:
            return [*steps[:-1], replace(steps[-1], truncated=True)]
        answer = render_answer(self.said)
        return [*steps, Step(observation=observation, action=answer, next_observation="", terminated=True)]

    def _read(self, message: BaseMessage) -> None:
        if isinstance(message, AIMessage):
            self._act(message)
        elif isinstance(message, ToolMessage):
            self._answer(message)
        elif isinstance(message, SystemMessage) and not self.asked and not self.acts:
            self.system.append(shown(message))
        elif isinstance(message, HumanMessage | SystemMessage):
            self._see(shown(message))
        else:
            raise ValueError(f"a message of type {message.type!r} is neither system, human, AI nor tool")

    def _act(self, message: AIMessage) -> None:
        if unanswered := [act for act in self.acts if not act.answered]:
            call = f"{unanswered[0].call_id!r} ({unanswered[0].tool})"
            raise ValueError(f"tool call {call} has no answer before the next AI message")
        acts = [_Act(render_call(call["name"], call["args"]), call["id"] or "", call["name"]) for call in message.tool_calls]
        for bad in message.invalid_tool_calls:
            action = json.dumps({"name": bad["name"], "arguments": bad["args"]}, ensure_ascii=False)
            acts.append(_Act(action, bad["id"] or "", bad["name"] or "", valid=False))
        if not self.asked:
            if acts:
                raise ValueError("the agent called a tool before any human message: there is no first observation")
            return  # a greeting, before there is anything to do
        # Words that neither a user nor the end follows (a sub-agent's report) are no act towards the environment.
        self.said = None if acts else message.text
        self.acts += acts

    def _answer(self, message: ToolMessage) -> None:
        waiting = [act for act in self.acts if not act.answered and act.call_id == message.tool_call_id]
        if not waiting:
            raise ValueError(f"a tool message answers call {message.tool_call_id!r}, which no AI message before it left open")
        act = waiting[0]  # some models give every call of a reply the same id: answers come in order
        act.answered, act.valid = True, act.valid and message.status != "error"
        act.seen.insert(0, shown(message))

    def _see(self, text: str) -> None:
        """The user, or the application, says something."""
        if not self.acts and self.said is None:
            self.asked.append(text)
            return
        if self.said is not None:
            self.acts.append(_Act(render_answer(self.said), answered=True))
            self.said = None
        self.acts[-1].seen.append(text)


def shown(message: BaseMessage) -> str:
    """A message's text as its reader has it; `[image]` and the like for what is no text."""
    blocks = [message.content] if isinstance(message.content, str) else message.content
    lines = []
    for block in blocks:
        kind = "text" if isinstance(block, str) else str(block.get("type", "text"))
        text = block if isinstance(block, str) else block.get("text")
        lines.append(text if isinstance(text, str) else f"[{kind}]")
    return "\n".join(lines)


def verdict(conversation: Conversation) -> tuple[float, bool]:
    """The row's own reward and success; a reward above 0 counts as success where the row does not say."""
    fields = {key: value for key, value in conversation.fields.items() if value is not None}
    success = fields.get("success")
    for key in ("reward", "score", "success"):
        if key in fields:
            reward = finite(fields[key], key)
            return reward, bool(finite(success, "success") > 0) if success is not None else reward > 0
    return 0.0, False


def finite(value: object, name: str) -> float:
    """Read `value` as a float. Raises `ValueError`, which names it, unless it is a finite number or a boolean."""
    if isinstance(value, bool | int | float):
        try:
            if math.isfinite(number := float(value)):
                return number
        except OverflowError:
            pass
    raise ValueError(f"its {name} is {str(value)[:40]!r}, not a finite number")


def to_trajectory(conversation: Conversation, environment: str, reward: float, success: bool) -> Trajectory:
    """Convert a conversation to a trajectory, with the reward on its last step.

    Raises `ValueError` where it is no conversation that an agent could have held.
    """
    parsed = ParsedConversation.parse(conversation.messages)
    steps = parsed.steps()
    steps[-1] = replace(steps[-1], reward=reward)
    instruction = "\n\n".join([*parsed.system, *parsed.asked])
    task = Task(
        id=f"{environment}/{_digest(instruction)[:16]}",
        instruction=instruction,
        environment=environment,
        metadata={
            "observation": steps[0].observation,
            "tools": sorted({act.tool for act in parsed.acts if act.tool}),
        },
    )
    # The content is the key: a trace that two exports share is stored once, two of the same task are both stored.
    index = int(_digest(repr(steps))[:12], 16)
    return Trajectory(
        task=task,
        steps=steps,
        success=success and parsed.ended,
        run="traces",
        rollout_index=index,
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
