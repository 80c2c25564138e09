"""Replays recorded episodes of an agent in its current graph.

Policy and environment repeat the recording. That shows the prompts, the tools, and which calls reach the environment.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.outputs import ChatGeneration, ChatResult

from dreamgym_lg.actions import ToolCall, is_answer, is_returned, parse_action, parse_call, reply_text
from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.rollout import Agent
from dreamgym_lg.simulate.context import set_var
from dreamgym_lg.tasks import with_tools
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Segment, Step, StepResult, Task, Trajectory

logger = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """The result of replaying a recorded episode in the current graph."""

    actions: Mapping[int, str]
    """Step number from 0 -> action that reached the environment. A call that the graph refuses is missing."""
    tools: Sequence[Mapping[str, Any]]
    """The tools that the graph offered its policy, in OpenAI's form."""
    segments: Sequence[Segment]
    """The policy's tokens, if it reports any."""
    misfit: str | None
    """The first difference that keeps the graph from replaying the episode, in words; None if it replays to its end."""
    reworded: str | None
    """The first tool answer that the graph shows the policy in other words than recorded, in words; None without one."""
    prompt: str = ""
    """The system prompt that the graph gave its policy."""


_NO_TOOLS = (
    ": the graph gives its model no tools, so that no reply is read as a call; does the bind_tools() of its own model return "
    "something without them?"
)
_OTHER_MODELS = " (if several models act in the graph, such as a supervisor, traces have to hold the replies of each)"
_playing: ContextVar["Script"] = ContextVar("dreamgym_script")


class Script(Environment):
    """A recorded episode during its replay: the policy's replies, and the environment that answers them."""

    @staticmethod
    def current() -> "Script":
        """The script of the running replay. Raises `LookupError` outside of one."""
        return _playing.get()

    def __init__(self, trajectory: Trajectory, say: Callable[[str], str] = str) -> None:
        self.steps, self.say = trajectory.steps, say
        self.has_user = any(is_answer(step.action) and not step.terminated for step in self.steps[:-1])
        self.position = 0
        """Number of actions that the policy has replayed."""
        self.actions: dict[int, str] = {}
        self.tools: list[Mapping[str, Any]] = []
        self.prompt = ""
        self.misfit: str | None = None
        self.reworded: str | None = None
        self.ended = False
        """True once the graph calls its policy after the tool answer with which the recorded episode ended."""

    def next_action(self) -> str:
        """The policy's next reply: one call or a final answer. Parallel calls come one by one."""
        if self.position == len(self.steps):
            if not self.steps[-1].truncated:
                self.misfit = self.misfit or f"the graph asks its policy again after the {self.position} recorded actions"
            return '{"answer": ""}'
        if is_returned(self.steps[self.position].action):
            self.ended = self.position == len(self.steps) - 1
            raise RuntimeError("the graph asks its policy again after a tool's answer that the user read")
        self.position += 1
        return self.say(reply_text(self.steps[self.position - 1].action))

    def compare(self, messages: Sequence[BaseMessage]) -> None:
        """Compare the last tool answer in the policy's prompt with the recorded one."""
        number, last = self.position - 1, messages[-1] if messages else None
        if isinstance(last, ToolMessage) and number in self.actions and self.reworded is None:
            recorded, read = self.steps[number].next_observation, last.text
            if read != recorded:
                call = self.actions[number][:80]
                self.reworded = f"{call!r} is answered by {recorded[:80]!r} in the traces, and by {read[:80]!r} here"

    @property
    def words(self) -> str:
        """The text that accompanies the policy's last action."""
        return self.steps[self.position - 1].words

    def reset(self, task: Task) -> str:
        return self.steps[0].observation

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tools = list(tools)

    def show_prompt(self, text: str) -> None:
        self.prompt = text

    async def astep(self, action: str) -> StepResult:
        return self.step(action)

    def step(self, action: str) -> StepResult:
        """The recorded answer of the environment to an action."""
        is_returned_directly = self.position - 1 in self.actions and is_answer(action) and self.position < len(self.steps)
        if is_returned_directly and is_answer(self.steps[self.position].action):
            self.position += 1  # a tool answer ends the graph (`return_direct`): the policy is not called again
        number = self.position - 1
        step = self.steps[number]
        if number in self.actions or not _is_same_action(step.action, action):
            misfit = f"the graph asks the environment {action[:80]!r} where {step.action[:80]!r} is recorded"
            is_unread_call = is_answer(action) and parse_call(step.action) is not None
            self.misfit = self.misfit or misfit + (_NO_TOOLS if is_unread_call and not self.tools else "")
        self.actions.setdefault(number, action)
        is_last = step.terminated or number == len(self.steps) - 1  # a user replies to any other message
        ended = is_last and (is_answer(action) or (step.terminated and parse_call(action) is None))  # tool calls do not end it
        return StepResult(step.next_observation, 0.0, ended, False, {"valid": step.valid, "decided_by": "recorded"})


class RecordedPolicy(BaseChatModel):
    """A chat model that repeats the recorded replies of the running `Script`."""

    @property
    def _llm_type(self) -> str:
        return "recorded"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        script = Script.current()
        script.compare(messages)
        action = parse_action(script.next_action())
        message = AIMessage(action if isinstance(action, str) else script.words)
        if isinstance(action, ToolCall):
            message.tool_calls = [tool_call(name=action.name, args=dict(action.arguments), id=f"call-{script.position}")]
        return ChatResult(generations=[ChatGeneration(message=message)])


async def replay(agent: Agent, trajectory: Trajectory, *, say: Callable[[str], str] = str) -> Replayed:
    """Replay a recorded episode in an agent.

    Args: `agent`, with a `RecordedPolicy`, or a `LocalChatModel` whose `RecordedEngine` reports the tokens; `say`, converts a
    recorded action to the policy's reply. Default: unchanged.
    """
    script = Script(trajectory, say)
    context = EpisodeContext(environment=script)
    with TokenRecorder(seed=0) as recorder, set_var(_playing, script):
        try:
            async for _ in agent.astream({"task": trajectory.task}, None, context=context, stream_mode="values"):
                pass
        except Exception as error:
            if not script.ended:
                script.misfit = script.misfit or f"{type(error).__name__}: {str(error)[:200]}{_OTHER_MODELS}"
    if script.misfit is None and not script.ended and script.position < len(script.steps):
        script.misfit = f"the graph ends after {script.position} of the {len(script.steps)} recorded actions"
    return Replayed(script.actions, script.tools, recorder.segments(), script.misfit, script.reworded, script.prompt)


def warn_of(replayed: Sequence[Replayed]) -> None:
    """Log warnings for recorded episodes that the current graph replays otherwise or not at all."""
    if misfits := [each.misfit for each in replayed if each.misfit is not None]:
        text = "%d of %d recorded episodes do not replay in the graph as it is now, and are taken as they are; the first: %s"
        logger.warning(text, len(misfits), len(replayed), misfits[0])
    if reworded := [each.reworded for each in replayed if each.reworded is not None]:
        text = (
            "in %d of %d recorded episodes the graph's own code changes a recorded answer, maybe a second time: %s; "
            "record what the tools return, and annotate tools whose results the graph writes as JSON (-> dict)"
        )
        logger.warning(text, len(reworded), len(replayed), reworded[0])


def as_dreamed(trajectory: Trajectory, replayed: Replayed) -> Trajectory:
    """A recorded episode as a dream records it: with tools, prompt, outcome as only reward.

    Calls that did not reach the environment are left out; if the episode does not replay, the invalid ones.
    """
    actions = replayed.actions
    if replayed.misfit is not None:
        actions = {number: step.action for number, step in enumerate(trajectory.steps) if step.valid}
    steps: list[Step] = []
    observation = trajectory.steps[0].observation
    for number, step in enumerate(trajectory.steps):
        if number in actions or (step.terminated and is_answer(step.action)):
            reward = float(step.terminated and trajectory.success)
            steps.append(replace(step, observation=observation, action=actions.get(number, step.action), reward=reward))
            observation = step.next_observation
    return replace(trajectory, task=with_tools(trajectory.task, replayed.tools), steps=steps, prompt=replayed.prompt)


def _is_same_action(recorded: str, action: str) -> bool:
    try:
        one, other = parse_action(recorded), parse_action(action)
    except ValueError:
        return recorded == action
    return one == other or not (isinstance(one, ToolCall) or isinstance(other, ToolCall))
