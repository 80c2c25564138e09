"""The parts of a dream: responders, a user and judges.

A part may name its `version`, a text that is recorded with dreamed episodes ("" where no model decides), and the `digest` of
code or data that it reads. A figure of the part holds as long as both stay the same. A dream with a part that names no version
is measured anew each time.
"""

from collections.abc import Awaitable, Sequence
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
    """The agent's tool call or message (`dreamgym_lg.actions`). Of a text agent its text."""
    prompt: str = ""
    """The agent's system prompt, where it is known: rules to judge by."""
    own_traces: bool = True
    """False where the dream is measured. Recorded traces of this very task must then neither answer nor judge."""
    lookups: Sequence[Step] = ()
    """Look-ups that nobody made, of what the action names, by earlier responders that did not answer it (`OffersLookups`)."""

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
    """False where a later judge may decide otherwise; without one, this verdict counts."""


class Answer(NamedTuple):
    """A responder's answer to one action."""

    observation: str
    valid: bool = True
    """False if the environment refuses the action or does not understand it."""
    reasoning: str = ""
    verdict: Verdict | None = None
    """The responder's own view of the outcome (text worlds)."""

    @property
    def outcome(self) -> Verdict | None:
        """`verdict` as it counts where no judge decides: by its success alone."""
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
class OffersLookups(Protocol):
    """A responder that tells later ones the state of a call's entities."""

    def lookups(self, episode: Episode) -> "list[Step] | Awaitable[list[Step]]":
        """Look-ups with their answers as they would be now."""


class User(Protocol):
    """Talks with the agent."""

    name: str
    """Recorded as `Step.decided_by`."""

    def reply(self, episode: Episode) -> "str | None | Awaitable[str | None]":
        """The next message of the user; None ends the conversation."""


class Judge(Protocol):
    """Decides the outcome of an episode."""

    name: str
    """Recorded as `Step.judged_by`."""

    def judge(self, episode: Episode, answer: Answer | None) -> "Verdict | None | Awaitable[Verdict | None]":
        """The verdict; None if this judge does not know it.

        Args: `answer`, the responder's to a text agent's action; None where a tool agent's episode ends with a message.
        """


@runtime_checkable
class DecidesTasks(Protocol):
    """A judge that knows beforehand which tasks it always decides."""

    def decides(self, task: Task) -> bool:
        """True if this judge decides every outcome of the task."""
