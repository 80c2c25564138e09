"""A recorded conversation as an agent's trajectory: observations, actions and outcome."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.prebuilt import tool_node

from dreamgym_lg.actions import STRUCTURED_RESPONSE, render_answer, render_call, render_malformed
from dreamgym_lg.traces.rows import Conversation
from dreamgym_lg.traces.verdicts import Verdict
from dreamgym_lg.types import TRACES, Step, Task, Trajectory

_ROLES = {"human": "user", "ai": "assistant", "system": "system"}
_TEMPLATES = (
    tool_node.INVALID_TOOL_NAME_ERROR_TEMPLATE,
    tool_node.TOOL_CALL_ERROR_TEMPLATE,
    tool_node.TOOL_EXECUTION_ERROR_TEMPLATE,
    tool_node.TOOL_INVOCATION_ERROR_TEMPLATE,
)
_ERRORS = [re.split(r"{\w+}", template) for template in _TEMPLATES]
"""Words of LangGraph's tool node. Most formats of traces lose the `status` beside them."""


@dataclass
class _Act:
    """A tool call, or something said to the user, with what came back."""

    action: str
    call_id: str = ""
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    valid: bool = True
    answered: bool = False
    words: str = ""
    seen: list[str] = field(default_factory=list)


@dataclass
class ParsedConversation:
    """Observations and actions of an agent in a recorded conversation, read message by message."""

    prompt: list[BaseMessage] = field(default_factory=list)
    """The messages before its first act: system messages, greetings, the user's first messages."""
    acts: list[_Act] = field(default_factory=list)
    reply: str | None = None
    """The agent's last words, until somebody answers them. At the end, the action that is its final answer."""
    malformed: _Act | None = None
    """An unreadable tool call with which the agent ended, in place of `reply`."""
    unanswered: str = ""
    """The tool of a last call that has no answer. What came after it was not recorded."""

    @classmethod
    def parse(cls, messages: Sequence[BaseMessage]) -> "ParsedConversation":
        """Read a whole conversation. Raises `ValueError` if no agent could have held it."""
        parsed = cls()
        for message in linked(messages):
            parsed._read(message)
        parsed._end()
        if not any(parsed.requests):
            raise ValueError("no human message has a text: there is nothing the agent could have seen first")
        if not parsed.acts and not parsed.ended:
            lost = f"; its call of {parsed.unanswered!r} was never answered" if parsed.unanswered else ""
            raise ValueError(f"the agent did nothing: no AI message after the first human one{lost}")
        return parsed

    @property
    def requests(self) -> list[str]:
        """The user's messages before the agent first did something."""
        return [text_of(message) for message in self.prompt if isinstance(message, HumanMessage)]

    @property
    def ended(self) -> bool:
        """True if it ends with the agent's answer."""
        return self.reply is not None or self.malformed is not None

    def steps(self, verdict: Verdict | None) -> list[Step]:
        """One step for each act. Each observation is the answer to the step before, as in the dream.

        Where the user speaks behind a tool's answer, that was the agent's answer. A conversation with a verdict is over: so it
        is where a tool's answer is the last, and a user's last words change nothing. Without one the last step is truncated:
        its outcome is unknown.

        Raises `ValueError` for a success in which what came of a call was not recorded.
        """
        if verdict is not None and verdict.success and self.unanswered:
            raise ValueError(f"its last call, of {self.unanswered!r}, has no answer, and its reward says that it was a success")
        steps, observation = [], "\n\n".join(self.requests)
        for act in self.acts:
            after = "\n\n".join(act.seen)
            step = Step(observation=observation, action=act.action, next_observation=after, valid=act.valid, words=act.words)
            steps.append(step)
            observation = after
        over = verdict is not None
        final = self.malformed.action if self.malformed is not None else self.reply
        if final is None and verdict is not None and not self.unanswered and self.acts[-1].tool:
            final = render_answer(self.acts[-1].seen[0], tool=self.acts[-1].tool)
        if final is not None:
            steps.append(Step(observation=observation, action=final, next_observation="", valid=self.malformed is None))
        elif self.unanswered:
            over = False
        steps[-1] = replace(steps[-1], terminated=over, truncated=not over)
        return steps

    def _read(self, message: BaseMessage) -> None:
        if isinstance(message, AIMessage):
            self._act(message)
        elif isinstance(message, ToolMessage):
            self._answer(message)
        elif isinstance(message, HumanMessage | SystemMessage):
            self._see(message)
        else:
            raise ValueError(f"a message of type {message.type!r} is neither system, human, AI nor tool")

    def _act(self, message: AIMessage) -> None:
        if unanswered := [act for act in self.acts if not act.answered]:
            call = f"{unanswered[0].call_id!r} ({unanswered[0].tool})"
            raise ValueError(f"tool call {call} has no answer before the next AI message")
        acts = [_Act(render_call(c["name"], c["args"]), c["id"] or "", c["name"], c["args"]) for c in message.tool_calls]
        for bad in message.invalid_tool_calls:
            acts.append(_Act(render_malformed([bad]), bad["id"] or "", bad["name"] or "", valid=False))
        if not self.requests:
            if acts:
                raise ValueError("the agent called a tool before any human message: there is no first observation")
            self.prompt.append(message)  # a greeting, before there is anything to do
            return
        # Words that neither a user nor the end follows (a sub-agent's report) are no act towards the environment.
        self.reply = None if acts else render_answer(message.text)
        if acts:
            acts[0].words = message.text
        self.acts += acts

    def _answer(self, message: ToolMessage) -> None:
        waiting = [act for act in self.acts if not act.answered and act.call_id == message.tool_call_id]
        if not waiting:
            call = f"call {message.tool_call_id!r}" if message.tool_call_id else f"a call of {message.name!r}"
            raise ValueError(f"a tool message answers {call}, which no AI message before it left open")
        act = waiting[0]
        if message.text.startswith(STRUCTURED_RESPONSE):  # no tool ran: the call is the agent's answer, in the form asked for
            self.acts.remove(act)
            self.reply = render_answer(json.dumps(act.arguments, ensure_ascii=False, default=str), call=act.tool)
            return
        text = text_of(message)
        act.answered, act.valid = True, act.valid and message.status != "error" and not _is_error(text)
        act.seen.insert(0, text)

    def _see(self, message: HumanMessage | SystemMessage) -> None:
        """The user, or the application, says something."""
        if not self.acts and self.reply is None:
            self.prompt.append(message)
            return
        if not isinstance(message.content, str):
            kinds = [str(block.get("type")) for block in message.content if isinstance(block, dict)]
            if media := [kind for kind in kinds if kind != "text"]:
                raise ValueError(f"a later message of the user with a block of the form {media[0]!r}, which no text can hold")
        if self.reply is None and isinstance(message, HumanMessage) and (last := self.acts[-1]).tool and last.answered:
            self.reply = render_answer(last.seen[0], tool=last.tool)  # the user's words are no part of the tool's answer
        if self.reply is not None:
            self.acts.append(_Act(self.reply, answered=True))
            self.reply = None
        self.acts[-1].seen.append(text_of(message))

    def _end(self) -> None:
        waiting = [act for act in self.acts if not act.answered]
        if not waiting:
            return
        self.acts = [act for act in self.acts if act.answered]
        if any(act.valid for act in waiting):
            # Stopped in the middle of a call: what is known of the turn stays, what would have come is not invented.
            self.unanswered = next(act.tool for act in waiting if act.valid)
        else:
            self.malformed = waiting[-1]  # no tool could be asked, so the agent ended here


def _is_error(text: str) -> bool:
    """True for the words of LangGraph's tool node after a refused or failed call."""
    parts = ((text.startswith(first) and text.endswith(last), inner) for first, *inner, last in _ERRORS)
    return any(fits and all(part in text for part in inner) for fits, inner in parts)


def linked(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The messages with unique call ids, which the answers share.

    An answer belongs to the call of its id; of several, or without ids, to that of its tool's name; else to the first that is
    open.
    """
    result: list[BaseMessage] = []
    waiting: list[tuple[str, str, str]] = []
    known: set[str] = set()
    for message in messages:
        if isinstance(message, AIMessage):
            renamed: dict[str, list[Any]] = {"tool_calls": [], "invalid_tool_calls": []}
            for key, calls in renamed.items():
                for call in getattr(message, key):
                    own = call["id"] if call["id"] and call["id"] not in known else f"call-{len(known) + 1}"
                    known.add(own)
                    waiting.append((call["id"] or "", call["name"] or "", own))
                    calls.append({**call, "id": own})
            message = message.model_copy(update=renamed)
        elif isinstance(message, ToolMessage) and (call_of := _answered(message, waiting)) is not None:
            waiting.remove(call_of)
            message = message.model_copy(update={"tool_call_id": call_of[2]})
        result.append(message)
    return result


def _answered(answer: ToolMessage, waiting: Sequence[tuple[str, str, str]]) -> tuple[str, str, str] | None:
    """The open call, as (recorded id, name, own id), that an answer belongs to."""
    id = answer.tool_call_id
    open_calls = [call for call in waiting if id in (call[0], call[2])] if id else list(waiting)
    open_calls = open_calls or [call for call in waiting if not call[0]]
    named = [call for call in open_calls if call[1] == answer.name]
    if not named and answer.name and not id:
        return None
    return next(iter(named or open_calls), None)


def called_tools(messages: Sequence[BaseMessage]) -> set[str]:
    """The names of the tools that were called."""
    structured = {m.tool_call_id for m in messages if isinstance(m, ToolMessage) and m.text.startswith(STRUCTURED_RESPONSE)}
    calls = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    return {call["name"] for call in calls if not call["id"] or call["id"] not in structured}


def text_of(message: BaseMessage) -> str:
    """A message's text as its reader has it. Other contents are `[image]` and the like."""
    blocks = [message.content] if isinstance(message.content, str) else message.content
    lines = []
    for block in blocks:
        kind = "text" if isinstance(block, str) else str(block.get("type", "text"))
        text = block if isinstance(block, str) else block.get("text")
        lines.append(text if isinstance(text, str) else f"[{kind}]")
    return "\n".join(lines)


def to_trajectory(
    source: Conversation,
    parsed: ParsedConversation,
    environment: str,
    verdict: Verdict | None,
    tools: Sequence[Mapping[str, Any] | str],
) -> Trajectory:
    """Convert a conversation to a trajectory, with the reward on its last step.

    Args: `parsed`, the messages of `source`; `tools`, all that the agent could call: those that it called in this trace alone
    would tell what the task needs.

    Raises `ValueError` for metadata that is no object, a rubric that is no text, and as `ParsedConversation.steps`.
    """
    steps = parsed.steps(verdict)
    steps[-1] = replace(steps[-1], reward=verdict.reward if verdict is not None else 0.0)
    metadata, rubric = (_checked(source.fields, name, kind) for name, kind in (("metadata", Mapping), ("rubric", str)))
    # The same words with another system message or other metadata are another task: another customer, another order.
    words = "\n\n".join([*(text_of(each) for each in parsed.prompt if isinstance(each, SystemMessage)), *parsed.requests])
    blocks = [block for each in parsed.prompt if isinstance(each.content, list) for block in each.content]
    media = [block for block in blocks if isinstance(block, dict) and block.get("type") != "text"]
    about = "".join(f"\n{json.dumps(part, sort_keys=True)}" for part in (metadata, rubric, media) if part)
    task = Task(
        id=f"{environment}/{_digest(words + about)[:16]}",
        instruction=steps[0].observation,
        environment=environment,
        messages=[{"role": _ROLES[each.type], "content": each.content} for each in parsed.prompt],
        observation=steps[0].observation,
        tools=list(tools),
        rubric=rubric or "",
        metadata=metadata or {},
    )
    # Content and id are the key, without the outcome, which may be corrected: two traces of the same task are both stored.
    content = parsed.steps(None)
    index = int(_digest(repr(content) + "".join(step.words for step in content) + (source.id or source.thread))[:12], 16)
    success = verdict is not None and verdict.success and steps[-1].terminated
    return Trajectory(task=task, steps=steps, success=success, run=TRACES, rollout_index=index)


def _checked(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    if (value := fields.get(name)) is not None and not isinstance(value, kind):
        raise ValueError(f"its {name} is {str(value)[:40]!r}, not {'a text' if kind is str else 'an object'}")
    return value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
