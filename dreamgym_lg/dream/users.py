"""Users that talk with an agent: a function, a language model, recorded ones."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.actions import is_answer, parse_call
from dreamgym_lg.dream.parts import Episode, User
from dreamgym_lg.dream.prompter import Prompter, outgrown
from dreamgym_lg.dream.prompts import encoded, load_prompt
from dreamgym_lg.dream.trace_index import Call, comparable_call, message_text
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.text import split_thought
from dreamgym_lg.types import Step, Task, Trajectory

PROMPT = "user-1"
END = "END"
"""The line with which a language model ends its conversation."""


class ScriptedUser:
    """A user that is a function.

    Args: `reply`, (episode) -> the next message, None to end the conversation; may be asynchronous. The agent's message is
    `episode.action`.
    """

    name = "user"

    def __init__(self, reply: Callable[[Episode], "str | None | Awaitable[str | None]"]) -> None:
        self.reply = reply


class UntilHandOver:
    """A user that leaves once the agent hands them over by a tool.

    Args: `user`, replies until then; `tools`, names of such tools.
    """

    name = "user"

    def __init__(self, user: User, tools: Collection[str]) -> None:
        self.user, self.tools = user, frozenset(tools)
        for key in ("model", "hosted", "version"):
            setattr(self, key, getattr(user, key, None))

    def reply(self, episode: Episode) -> "str | None | Awaitable[str | None]":
        calls = (parse_call(step.action) for step in episode.steps if step.valid)
        return None if any(call is not None and call.name in self.tools for call in calls) else self.user.reply(episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The side of a task that its user alone knows."""

    goal: str
    """What the user wants, and what they would accept instead."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Private facts, such as an order number: told when asked for."""
    persona: str = ""
    """Manner of speaking."""


def told_goal(task: Task) -> Goal:
    """The goal of a user who knows nothing but what they have said."""
    return Goal(goal=first_observation(task))


class ModelUser:
    """A user that a language model plays, with a hidden goal.

    The same conversation gets the same reply, in all episodes of a group. It reads the agent's messages alone, no tool call.

    Args:
        model: A chat model that answers at temperature 0, or its name.
        goal: (task) -> what its user wants and knows; a text is a goal without facts.
        max_turns: Messages of the agent after which the conversation ends.
        replay_buffer: Beside its file, a hosted model's answers are kept.
        hosted, retries: As of `Model`.
    """

    name = "user"

    def __init__(
        self,
        model: BaseChatModel | str,
        *,
        goal: Callable[[Task], Goal | str] = told_goal,
        max_turns: int = 30,
        replay_buffer: ReplayBuffer | None = None,
        hosted: Hosted | None = None,
        retries: int = 1,
    ) -> None:
        self.prompter = Prompter(model, hosted=hosted, replay_buffer=replay_buffer, retries=retries)
        self.goal, self.max_turns = goal, max_turns

    @property
    def model(self) -> BaseChatModel | None:
        """The chat model that plays the user."""
        return self.prompter.model

    @property
    def hosted(self) -> Hosted | None:
        return self.prompter.hosted

    @property
    def version(self) -> str:
        """Names the model and prompt behind the replies."""
        return f"{self.prompter.version}/{PROMPT}"

    async def reply(self, episode: Episode) -> str | None:
        """The next message; None ends the conversation. Raises as `Model.respond`."""
        if sum(is_answer(step.action) for step in episode.steps) + 1 >= self.max_turns:
            return None
        with outgrown(episode):
            return await self.prompter.ask(self.messages(episode), read_reply, prompt=PROMPT)

    def messages(self, episode: Episode) -> list[BaseMessage]:
        """The prompt: the goal, and the conversation from the user's side."""
        goal = self.goal(episode.task)
        known = Goal(goal=goal) if isinstance(goal, str) else goal
        side = {"goal": known.goal, "facts": dict(known.facts), "persona": known.persona}
        head = f"{load_prompt(PROMPT)}\n\n{encoded({name: text for name, text in side.items() if text})}"
        turns: list[BaseMessage] = [HumanMessage("(The conversation begins.)"), AIMessage(first_observation(episode.task))]
        for step in episode.steps:
            if is_answer(step.action):
                turns += [HumanMessage(message_text(step.action) or "(nothing)"), AIMessage(step.next_observation)]
        turns.append(HumanMessage(message_text(episode.action) or "(nothing)"))
        return [SystemMessage(head), *turns]


def read_reply(text: str) -> str | None:
    """The message in a model's answer; None where it ends the conversation. Raises `PredictionFailed` for nothing."""
    message = split_thought(text)[1].strip()
    if not message:
        raise PredictionFailed(f"the user's reply is empty; expected a message, or a line with {END} alone")
    return None if message.splitlines()[-1].strip().strip(".*`") == END else message


class RecordedUser:
    """The user of recorded conversations, as long as the agent keeps to one of them.

    It keeps to one whose tool calls and messages come in the same order, with the same arguments; the wording of messages does
    not count, nor do refused calls. The last recorded message ends the conversation.

    Args:
        conversations: Recorded episodes, or a replay buffer with real ones; those of the episode's own task count.
        otherwise: Replies once the agent has left the record. None: the episode ends as failed (`PredictionFailed`).
    """

    name = "user"

    def __init__(self, conversations: Iterable[Trajectory] | ReplayBuffer, *, otherwise: User | None = None) -> None:
        if isinstance(conversations, ReplayBuffer):
            conversations = conversations.real_trajectories()
        self.otherwise = otherwise
        self._recorded: dict[str, list[list[tuple[Call | None, Step]]]] = {}
        for each in conversations:
            self._recorded.setdefault(each.task.id, []).append([(_move(step), step) for step in _accepted(each.steps)])

    @property
    def model(self) -> BaseChatModel | None:
        """The chat model of the user that takes over."""
        return getattr(self.otherwise, "model", None)

    @property
    def hosted(self) -> Hosted | None:
        return getattr(self.otherwise, "hosted", None)

    def reply(self, episode: Episode) -> "str | None | Awaitable[str | None]":
        """The recorded user's next message; None at the end of the record."""
        moves = [_move(step) for step in _accepted(episode.steps)]
        for conversation in self._recorded.get(episode.task.id, ()):
            if [move for move, _ in conversation[: len(moves)]] != moves or len(conversation) == len(moves):
                continue
            if is_answer((step := conversation[len(moves)][1]).action):
                return None if len(conversation) == len(moves) + 1 else step.next_observation
        if self.otherwise is not None:
            return self.otherwise.reply(episode)
        raise PredictionFailed(f"the agent has left the record of task {episode.task.id!r}, whose user is a recorded one")


def _accepted(steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if step.valid or is_answer(step.action)]


def _move(step: Step) -> Call | None:
    """A step's call in comparable form; None for a message."""
    return comparable_call(step.action, {})
