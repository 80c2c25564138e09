"""The parts of a dream: responders, a user and judges.

A part may have a `version`, a text that is recorded with dreamed episodes ("" if no model decides), and a `digest` of the
code or data that it reads. Measurements of a part are reused while both stay the same. A dream with a part that has no
version is measured anew each time.
"""

from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Step, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A dreamed episode as its parts see it."""

    task: Task
    steps: Sequence[Step] = ()
    """Oldest first."""
    action: str = ""
    """The agent's tool call or message (`dreamgym_lg.actions`); a text agent's text."""
    prompt: str = ""
    """The agent's system prompt if it is known, with rules to judge by."""
    own_traces: bool = True
    """False while the dream is measured: recorded traces of the same task must then neither answer nor judge."""
    pass_through: Collection[str] = ()
    """Names of tools that really run; `steps` has none of their calls."""
    lookups: Sequence[Step] = ()
    """Hypothetical look-ups of the action's entities, from earlier responders that did not answer it (`SupportsLookups`)."""

    @property
    def observation(self) -> str:
        """The text that the agent saw last."""
        return self.steps[-1].next_observation if self.steps else first_observation(self.task)


class Verdict(NamedTuple):
    """The outcome of an episode or, in a text world, of one step."""

    reward: float
    """0 to 1 at the end of an episode. In a world with a score, the change of the score."""
    success: bool
    reason: str = ""
    terminated: bool = True
    final: bool = True
    """False if a later judge may decide otherwise. If none does, this verdict counts."""


class Answer(NamedTuple):
    """A responder's answer to one action."""

    observation: str
    valid: bool = True
    """False if the environment refuses the action or does not understand it."""
    reasoning: str = ""
    verdict: Verdict | None = None
    """The responder's own verdict (text worlds)."""

    @property
    def outcome(self) -> Verdict | None:
        """`verdict` for use where no judge decides. The reward is 1 for a success, else 0."""
        if self.verdict is None:
            return None
        success = self.verdict.terminated and self.verdict.success
        return self.verdict._replace(reward=float(success), success=success)


class Responder(Protocol):
    """Answers tool calls, and the actions of text agents."""

    name: str
    """Recorded as `Step.decided_by`."""

    def respond(self, episode: Episode) -> "Answer | None | Awaitable[Answer | None]":
        """The environment's answer to `episode.action`; None if this responder does not know it."""


@runtime_checkable
class SupportsLookups(Protocol):
    """A responder that shows later ones the state of a call's entities."""

    def lookups(self, episode: Episode) -> "list[Step] | Awaitable[list[Step]]":
        """Look-ups of these entities, with the answers that they would get now."""


class User(Protocol):
    """Replies to the agent's messages."""

    name: str
    """Recorded as `Step.decided_by`."""

    def reply(self, episode: Episode) -> "str | None | Awaitable[str | None]":
        """The next message of the user; None ends the conversation."""


class Judge(Protocol):
    """Decides the outcome of an episode."""

    name: str
    """Recorded as `Step.judged_by`."""

    def judge(self, episode: Episode, answer: Answer | None) -> "Verdict | None | Awaitable[Verdict | None]":
        """The verdict; None if this judge cannot decide.

        Args: `answer`, the responder's answer to a text agent's action; None at the end of a tool agent's episode.
        """


@runtime_checkable
class DecidesTasks(Protocol):
    """A judge that can tell beforehand if it decides a task."""

    def decides(self, task: Task) -> bool:
        """True if this judge decides every outcome of the task."""
