"""Conversations with a user: the agent's messages, the user's replies, the graph's next input."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import Interrupt

from dreamgym_lg.actions import STRUCTURED_RESPONSE, render_answer, render_malformed
from dreamgym_lg.dream import Episode, User
from dreamgym_lg.dream.dream import ask
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import wait_in_loop
from dreamgym_lg.text import split_thought
from dreamgym_lg.types import Step, StepResult, Task

NextPayload = Callable[[Any, str], Any]
"""(the graph's last state, the user's reply) -> its next input on the same thread."""

MAX_TURNS = 30
"""Replies of the user after which an episode is truncated, unless `max_turns` says otherwise."""


class RealUser(Environment):
    """The user of a real episode, as an environment that only replies.

    Args: `steps`, returns the steps so far; `pass_through`, names of tools whose calls are none.
    """

    has_user = True

    def __init__(self, user: User, task: Task, steps: Callable[[], Sequence[Step]], pass_through: Collection[str]) -> None:
        self._user, self._task, self._steps, self._pass_through = user, task, steps, pass_through

    def reset(self, task: Task) -> str:
        raise RuntimeError("a real user belongs to one episode")

    def step(self, action: str) -> StepResult:
        return wait_in_loop("dreamgym-user", self.astep(action))

    async def astep(self, action: str) -> StepResult:
        episode = Episode(task=self._task, steps=self._steps(), action=action, pass_through=self._pass_through)
        text = await ask(self._user, "reply", str, episode)
        return StepResult(text or "", 0.0, text is None, False, {"decided_by": self._user.name})


def next_input(graph: Any, payload: Any, state: Any, reply: str) -> Any:
    """The graph's input after a reply, with the whole state if no checkpointer keeps it.

    Args: `payload`, the episode's first input. Raises `ConfigurationError` for a graph whose input or state has no messages.
    """
    has_messages = isinstance(payload, Mapping) and "messages" in payload
    if has_messages and isinstance(getattr(graph, "checkpointer", None), BaseCheckpointSaver):
        return {"messages": [HumanMessage(reply)]}
    if has_messages and isinstance(state, Mapping) and "messages" in state:
        return {**state, "messages": [*state["messages"], HumanMessage(reply)]}
    raise ConfigurationError(
        "the user replies, and the graph's input or state has no `messages`: give next_payload=, a function of the last state "
        "and the reply that returns the graph's next input"
    )


def final_answer(state: Any) -> str:
    """The text of a state's last AI message; without messages, the state as text.

    A human message with a name counts too: so workers answer their supervisor.
    """
    messages = _messages(state)
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        last = (
            each for each in reversed(messages) if isinstance(each, AIMessage) or (isinstance(each, HumanMessage) and each.name)
        )
        return next((message.text for message in last), "")
    return str(messages if messages is not None else state)


def final_action(state: Any) -> str:
    """The action that ended the graph: an answer (without thought), structured response, or `return_direct`."""
    messages = _messages(state)
    last = messages[-1] if isinstance(messages, Sequence) and not isinstance(messages, str) and messages else None
    if not isinstance(last, ToolMessage):
        return render_answer(split_thought(final_answer(state))[1])
    calls = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    is_structured = isinstance(state, dict) and state.get("structured_response") is not None
    if is_structured or last.text.startswith(STRUCTURED_RESPONSE):
        for call in reversed(calls):
            if call["id"] == last.tool_call_id:
                return render_answer(json.dumps(call["args"], ensure_ascii=False, default=str), call=call["name"])
    return render_answer(last.text, tool=last.name or "tool")


def malformed_call(state: Any) -> str:
    """The action of a graph that ended with an unreadable tool call; else ""."""
    messages = _messages(state)
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    if not isinstance(last, AIMessage) or last.tool_calls or not last.invalid_tool_calls:
        return ""
    return render_malformed(last.invalid_tool_calls)


def _messages(state: Any) -> Any:
    if isinstance(state, BaseMessage):  # what an `@entrypoint` returns
        return [state]
    return state.get("messages") if isinstance(state, dict) else getattr(state, "messages", state)


def approval(interrupt: Interrupt) -> Any:
    """The answer that approves every action of LangChain's human-in-the-loop middleware; None for other interrupts.

    Raises `ConfigurationError` for an action that must not be approved.
    """
    value = interrupt.value
    if isinstance(value, Mapping) and "action_requests" in value:
        for review in value.get("review_configs", ()):
            if "approve" not in (allowed := review.get("allowed_decisions", ["approve"])):
                raise ConfigurationError(
                    f"action {review.get('action_name')!r} may be answered by {' or '.join(allowed)} alone: give respond=, a "
                    "function of the interrupt that returns the decisions"
                )
        return {"decisions": [{"type": "approve"} for _ in value["action_requests"]]}
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "action_request" in part for part in value):
        return [{"type": "accept"} for _ in value]
    return None


def approve(interrupt: Interrupt) -> Any:
    """Approve every action of LangChain's human-in-the-loop middleware; answer anything else with "yes"."""
    return approval(interrupt) or "yes"


def question(interrupt: Interrupt) -> str:
    """An interrupt as a message to the user: its value as text or JSON."""
    return render_answer(interrupt.value if isinstance(interrupt.value, str) else json.dumps(interrupt.value, default=str))
