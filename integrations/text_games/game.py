"""Parts that text games share. Environment with valid actions, rules and score of a dream, forms of texts."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b

from dreamgym_lg.dream import Answer, Episode, Verdict
from dreamgym_lg.environment import RULES, Environment, refused
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Split, StepResult

_FULL_SCORE = 0.98
"""A score from which on it counts as 1. Three thirds may be dreamed as 0.33 each."""


def one_line(text: str) -> str:
    """The text with every run of white space made one space. Observations are kept and compared so."""
    return " ".join(text.split())


def digest(*parts: str) -> str:
    """16 hexadecimal digits that stand for `parts`, on every machine and for ever."""
    return blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()


def split_of(*parts: str) -> Split:
    """The split of what `parts` name, by their hash. 15 % are test, 10 % validation, for ever."""
    position = int(digest(*parts), 16) / 2**64
    return "test" if position < 0.15 else "validation" if position < 0.25 else "train"


class TextGame(Environment):
    """An environment with a list of valid actions, which refuses actions impossible in every state.

    Args: `max_steps`, real steps after which an episode is truncated; at least 1.
    """

    _seen: Sequence[str] = ()
    """Observations of the running episode, oldest first."""
    _steps = 0

    def __init__(self, max_steps: int) -> None:
        if max_steps < 1:
            raise ConfigurationError(f"max_steps={max_steps}; allowed: 1 or more")
        self.max_steps = max_steps

    def valid_actions(self) -> list[str]:
        """Every action that the game accepts now, sorted. Empty before the first `reset`, and where nobody can tell.

        For scripted policies and tests: a policy under evaluation must not see it.
        """
        return []

    @abstractmethod
    def play(self, action: str) -> StepResult:
        """Play an action that `check_action` lets through; `step` adds the truncation."""

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        """The answer to an action that is always invalid here. None to let it be played.

        The same check stands in the dream (`Rules`). Args: `observations`, all of this episode, oldest first.
        """
        return None

    def begin(self, observation: str) -> str:
        """The first observation of an episode; every `reset` ends with it."""
        self._seen, self._steps = [observation], 0
        return observation

    def step(self, action: str) -> StepResult:
        """Play one action. One that `check_action` refuses is no real step: its `decided_by` is "rules"."""
        if not self._seen:
            raise RuntimeError("step called before reset or after the end of the episode")
        seen, self._seen = self._seen, ()  # should the game fail now, the episode has ended
        if (answer := self.check_action(action, seen)) is not None:
            result = refused(answer)
        else:
            result = self.play(action)
            self._steps += 1
            result = result._replace(truncated=not result.terminated and self._steps >= self.max_steps)
        if not (result.terminated or result.truncated):
            self._seen = [*seen, result.observation]
        return result


def observations(episode: Episode) -> list[str]:
    """All observations of the episode, oldest first."""
    return [first_observation(episode.task), *(step.next_observation for step in episode.steps)]


class Rules:
    """The responder that refuses what the game itself would refuse, whatever the world holds.

    Args: `check`, (action, observations) -> the refusal, or None to ask the next responder.
    """

    name, version = RULES, ""

    def __init__(self, check: Callable[[str, Sequence[str]], str | None]) -> None:
        self._check = check

    def respond(self, episode: Episode) -> Answer | None:
        refusal = self._check(episode.action, observations(episode))
        return None if refusal is None else Answer(refusal, valid=False)


class Score:
    """The judge of a game with partial credit. A step earns the change of the dreamed score, which stays between 0 and 1.

    An episode is a success as soon as its score is 1, and ends, whatever the experience model says: one that has read of few
    successes seldom says that a task is completed. An action that was rewarded is not rewarded again before something is lost,
    as in every game whose score follows from the state alone: an object counts where it belongs, however often it is put.
    """

    name, version = "score", ""

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        if answer is None or (verdict := answer.verdict) is None:
            return None
        reward = 0.0 if verdict.reward > 0 and _was_rewarded(episode) else verdict.reward
        before = sum(step.reward for step in episode.steps)
        after = min(max(before + reward, 0.0), 1.0)
        if after >= _FULL_SCORE:
            return Verdict(1.0 - before, True, verdict.reason)  # a completed task earns exactly 1, as it does in reality
        success = verdict.terminated and verdict.success and after > before
        earned = reward if after == before + reward else after - before  # as it was dreamed, without rounding
        return Verdict(earned, success, verdict.reason, verdict.terminated and (success or not verdict.success))


def _was_rewarded(episode: Episode) -> bool:
    """True if the action has been rewarded since something was lost."""
    for step in reversed(episode.steps):
        if step.reward < 0:
            return False
        if step.action == episode.action and step.reward > 0:
            return True
    return False
