"""Users that talk with an agent: a function, a language model, recorded ones."""

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from pydantic import BaseModel, StrictBool, StrictStr

from dreamgym_lg.actions import is_answer, parse_call
from dreamgym_lg.dream.facts import facts, message_text
from dreamgym_lg.dream.parts import Episode, User
from dreamgym_lg.dream.prompter import ChatModelPart, Prompter, add_to_cache, fail_if_prompt_too_long
from dreamgym_lg.dream.prompts import encoded, json_prompt, load_prompt, read_form
from dreamgym_lg.dream.trace_index import Call, comparable_call
from dreamgym_lg.errors import ConfigurationError, PredictionFailed, UserFault
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.retrieval import Vectors, phi
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.text import split_thought
from dreamgym_lg.types import Step, Task, Trajectory

PROMPT, JUDGE_PROMPT = "user-2", "user-judge-1"
END = "END"
"""The line with which a language model ends its conversation."""
EXAMPLE = 300
"""Maximum characters of another user's reply in a prompt."""


class ScriptedUser:
    """A user that is a function.

    Args: `reply`, (episode) -> the next message, None to end the conversation; may be asynchronous. The agent's message is
    `episode.action`.
    """

    name = "user"

    def __init__(self, reply: Callable[[Episode], "str | None | Awaitable[str | None]"]) -> None:
        self.reply = reply


class _WrappingUser:
    """A user that may leave the reply to another one (`inner`)."""

    name = "user"
    inner: User | None

    @property
    def model(self) -> BaseChatModel | None:
        """The chat model of the inner user."""
        return getattr(self.inner, "model", None)

    @property
    def hosted(self) -> Hosted | None:
        return getattr(self.inner, "hosted", None)

    @property
    def version(self) -> str | None:
        return "" if self.inner is None else getattr(self.inner, "version", None)


class UntilHandOver(_WrappingUser):
    """A user that leaves once the agent hands them over by a tool.

    Args: `user`, replies until then; `tools`, names of such tools.
    """

    def __init__(self, user: User, tools: Collection[str]) -> None:
        self.inner: User = user
        self.tools = frozenset(tools)

    def reply(self, episode: Episode) -> "str | None | Awaitable[str | None]":
        calls = (parse_call(step.action) for step in episode.steps if step.valid)
        return None if any(call is not None and call.name in self.tools for call in calls) else self.inner.reply(episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The side of a task that its user alone knows."""

    goal: str
    """The user's wish, and what they would accept instead."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Private facts, such as an order number: told when asked for."""
    persona: str = ""
    """Manner of speaking."""

    @property
    def side(self) -> dict[str, Any]:
        """Its fields that are not empty, as JSON."""
        side = {"goal": self.goal, "facts": dict(self.facts), "persona": self.persona}
        return {name: value for name, value in side.items() if value}


def goal_of(task: Task) -> Goal:
    """The task's goal. Else that of a user who knows nothing but what they have said."""
    return Goal(**task.goal) if task.goal else Goal(goal=first_observation(task))


class ModelUser(ChatModelPart):
    """A user that a language model plays, with a hidden goal.

    The same conversation gets the same reply, in all episodes of a group. It reads the agent's messages alone, no tool call.
    A reply that tells what the user cannot know is asked for again, and then ends the episode as the user's fault.

    Args:
        model: A chat model that answers at temperature 0, or its name. None: the local one that `train_user` trains.
        goal: (task) -> what its user wants and knows; a text is a goal without facts. Default: `Task.goal`.
        judge: A chat model, or its name, that reads each reply and finds those that contradict the goal.
        replay_buffer: Recorded conversations: above each message of the agent stands the reply of another user to one like it
            (`Turns`). Default: those of the experiment, if any. Beside its file, a hosted model's answers are kept.
        hosted, retries: As of `Model`.
    """

    name = "user"

    def __init__(
        self,
        model: BaseChatModel | str | None,
        *,
        goal: Callable[[Task], Goal | str] = goal_of,
        judge: BaseChatModel | str | None = None,
        replay_buffer: ReplayBuffer | None = None,
        hosted: Hosted | None = None,
        retries: int = 1,
    ) -> None:
        self.prompter = Prompter(model, hosted=hosted, replay_buffer=replay_buffer, retries=retries)
        self.judge = Prompter(judge, hosted=hosted, replay_buffer=replay_buffer) if judge is not None else None
        self._goal, self.has_own_goal = goal, goal is not goal_of
        self.turns: Turns | None = None
        self.show_turns(replay_buffer)

    @property
    def version(self) -> str:
        """Names the models and prompts behind the replies."""
        judged = f"+{self.judge.version}/{JUDGE_PROMPT}" if self.judge is not None else ""
        return f"{self.prompter.version}/{PROMPT}{judged}"

    def goal(self, task: Task) -> Goal:
        """The goal of the task's user."""
        goal = self._goal(task)
        return Goal(goal=goal) if isinstance(goal, str) else goal

    def show_turns(self, replay_buffer: ReplayBuffer | None) -> None:
        """Show the model recorded turns of this buffer from now on; None: no longer."""
        if self.turns is None or self.turns.replay_buffer is not replay_buffer:
            self.turns = Turns(replay_buffer, self.goal) if replay_buffer is not None else None

    async def reply(self, episode: Episode) -> str | None:
        """The next message; None ends the conversation. Raises `UserFault`, and as `Model.respond`."""
        read = partial(read_reply, known_values(self.goal(episode.task), episode))
        with fail_if_prompt_too_long(episode):
            reply = await self.prompter.ask(self.messages(episode), read, prompt=PROMPT)
        if self.judge is not None and reply is not None and (verdict := await self.verdict(episode, reply)).contradicts:
            raise UserFault(f"the user's reply contradicts its goal: {verdict.reason[:500]}", verdict)
        return reply

    async def verdict(self, episode: Episode, reply: str) -> "ReplyVerdict":
        """The judge's verdict on one reply. Raises what `Prompter.ask` raises."""
        assert self.judge is not None
        content = {**self.goal(episode.task).side, "conversation": episode_transcript(episode), "reply": reply}
        read = partial(read_form, form=ReplyVerdict)
        return await self.judge.ask(json_prompt(JUDGE_PROMPT, content), read, prompt=JUDGE_PROMPT)

    def messages(self, episode: Episode) -> list[BaseMessage]:
        """The prompt: the goal, and the conversation from the user's side."""
        head = f"{load_prompt(PROMPT)}\n\n{encoded(self.goal(episode.task).side)}"
        turns: list[BaseMessage] = [SystemMessage(head), HumanMessage("(The conversation begins.)")]
        texts = episode_transcript(episode)
        for number, text in enumerate(texts):
            example = self.turns.example(episode.task, texts[number - 1], text) if number % 2 and self.turns else ""
            above = f"(Another user, to such a message: {encoded(example)})\n" if example else ""
            turns.append(HumanMessage(above + (text or "(nothing)")) if number % 2 else AIMessage(text))
        return turns

    def conversation(self, trajectory: Trajectory) -> list[BaseMessage]:
        """A recorded conversation as the model should have played its user, for its training."""
        *steps, last = trajectory.steps
        messages = self.messages(Episode(task=trajectory.task, steps=steps, action=last.action))
        return [*messages, AIMessage(END)] if is_answer(last.action) else messages[:-1]


class Turns:
    """Turns of recorded users of training tasks, as examples of a language model's user.

    Never of a user who has the same goal, or an id, amount or address of the task's own.

    Args: `replay_buffer`, read once, at the first example; `goal`, (task) -> what its user wants and knows.
    """

    def __init__(self, replay_buffer: ReplayBuffer, goal: Callable[[Task], Goal]) -> None:
        self.replay_buffer, self._goal = replay_buffer, goal
        self._recorded: tuple[Sequence[_Turn], Vectors] | None = None
        self._examples: dict[tuple[str, str, str], str] = {}

    def example(self, task: Task, before: str, message: str) -> str:
        """The reply to the message most like this one, or `END`; "" without one. Args: `before`, the user's last words."""
        if (key := (task.id, before, message)) not in self._examples:
            turns, vectors = self._recorded = self._recorded or self._read()
            goal = self._goal(task).side
            own = values(encoded(goal), first_observation(task))
            nearest = (turns[row] for row in (-vectors @ phi([key[1:]])[0]).argsort(kind="stable"))
            others = (turn for turn in nearest if turn.environment == task.environment and turn.goal != goal)
            reply = next((turn.reply for turn in others if not turn.values & own), "")
            add_to_cache(self._examples, key, reply[:EXAMPLE], 20_000)
        return self._examples[key]

    def _read(self) -> tuple[Sequence["_Turn"], Vectors]:
        turns, pairs = list[_Turn](), list[tuple[str, str]]()
        for each in self.replay_buffer.trajectories(source="offline", split="train", errors=False):
            if not each.steps or any(step.decided_by for step in each.steps):
                continue  # a model's user talked, maybe
            texts, goal = transcript(each.task, each.steps), self._goal(each.task).side
            if is_answer(each.steps[-1].action):
                texts[-1] = END  # as `conversation` trains it
            own = values(encoded(goal), *texts[::2])
            turns += [_Turn(each.task.environment, goal, own, reply) for reply in texts[2::2]]
            pairs += zip(texts[::2], texts[1::2], strict=False)
        return turns, phi(pairs)


class _Turn(NamedTuple):
    environment: str
    goal: Mapping[str, Any]
    values: frozenset[str]
    reply: str


def read_reply(known: Collection[str], text: str) -> str | None:
    """The message in a model's answer; None where it ends the conversation.

    Args: `known`, the values that the user can tell.

    Raises `PredictionFailed` for nothing, `UserFault` for a value that the user cannot know.
    """
    message = split_thought(text)[1].strip()
    if not message:
        raise PredictionFailed(f"the user's reply is empty; expected a message, or a line with {END} alone")
    if message.splitlines()[-1].strip().strip(".*`") == END:
        return None
    if invented := values(message) - set(known):
        raise UserFault(f"the user tells {', '.join(sorted(invented))}, which neither its goal nor the conversation holds")
    return message


def known_values(goal: Goal, episode: Episode) -> frozenset[str]:
    """The values in a user's goal and conversation, parts of numbers included."""
    texts = [encoded(goal.side), *episode_transcript(episode)]
    return values(*texts).union(*(re.findall(r"\d+", text) for text in texts))


def transcript(task: Task, steps: Iterable[Step]) -> list[str]:
    """The words of user and agent in turn, the user's first message first."""
    turns = ((message_text(step.action), step.next_observation) for step in steps if is_answer(step.action))
    return [first_observation(task), *(text for turn in turns for text in turn)]


def episode_transcript(episode: Episode) -> list[str]:
    """The words of user and agent so far; the agent's present message is the last."""
    return [*transcript(episode.task, episode.steps), message_text(episode.action)]


def values(*texts: str) -> frozenset[str]:
    """Ids, amounts and addresses in texts that are no common words. Of five signs, or three digits."""
    ids = (each.lstrip("0") for each in facts(*texts))
    return frozenset(each for each in ids if "@" in each or len(each) > 4 or sum(map(str.isdigit, each)) > 2)


class ReplyVerdict(BaseModel, extra="forbid", title="verdict"):
    """The verdict on a user's reply."""

    reason: StrictStr
    contradicts: StrictBool
    """It says or grants what the goal does not hold, or against it."""
    answers: StrictBool
    """It answers what the assistant asked, as far as the goal says."""


class RecordedUser(_WrappingUser):
    """The user of recorded conversations, as long as the agent keeps to one of them.

    It keeps to one whose tool calls and messages come in the same order, with the same arguments; the wording of messages does
    not count, nor do refused calls and those of tools that really run in a dream. The last recorded message ends the
    conversation.

    Args:
        conversations: Recorded episodes, or a replay buffer with real ones; those of the episode's own task count.
        otherwise: Replies once the agent has left the record. None: the episode ends as failed (`PredictionFailed`).

    Raises `ConfigurationError` for anything else, such as a path.
    """

    def __init__(self, conversations: Iterable[Trajectory] | ReplayBuffer, *, otherwise: User | None = None) -> None:
        if isinstance(conversations, ReplayBuffer):
            conversations = conversations.real_trajectories()
        self.inner = otherwise
        self._recorded: dict[str, list[list[tuple[Call | None, Step]]]] = {}
        for each in [conversations] if isinstance(conversations, str | Path) else conversations:
            if not isinstance(each, Trajectory):
                raise ConfigurationError(f"conversations= holds {each!r}; give ReplayBuffer(path), or episodes of load_traces")
            self._recorded.setdefault(each.task.id, []).append(_moves(each.steps))

    def reply(self, episode: Episode) -> "str | None | Awaitable[str | None]":
        """The recorded user's next message; None at the end of the record."""
        moves, leaves = [move for move, _ in _moves(episode.steps)], False
        for recorded in self._recorded.get(episode.task.id, ()) if episode.own_traces else ():
            conversation = [each for each in recorded if each[0] is None or each[0].tool not in episode.pass_through]
            if [move for move, _ in conversation[: len(moves)]] != moves or len(conversation) == len(moves):
                continue
            if is_answer((step := conversation[len(moves)][1]).action):
                if len(conversation) > len(moves) + 1:
                    return step.next_observation
                leaves = True  # unless another recorded user went on
        if leaves:
            return None
        if self.inner is not None:
            return self.inner.reply(episode)
        raise PredictionFailed(f"the agent has left the record of task {episode.task.id!r}, whose user is a recorded one")


def recorded_user(replay_buffer: ReplayBuffer, model: BaseChatModel | str | None = None) -> RecordedUser | None:
    """The user of the recorded conversations; None where no user replied.

    Args: `model`, a chat model or its name that replies once the agent has left the record. None: such an episode fails.
    """
    recorded = replay_buffer.real_trajectories()
    if not any(is_answer(step.action) for each in recorded for step in each.steps[:-1]):
        return None
    return RecordedUser(replay_buffer, otherwise=None if model is None else ModelUser(model))


def model_user(user: object) -> ModelUser | None:
    """The language model's part of a user, if it has one."""
    while user is not None and not isinstance(user, ModelUser):
        user = getattr(user, "inner", None)
    return user


def _moves(steps: Sequence[Step]) -> list[tuple[Call | None, Step]]:
    """Steps that were not refused, each with its call in comparable form. None for a message."""
    return [(comparable_call(step.action, {}), step) for step in steps if step.valid or is_answer(step.action)]
