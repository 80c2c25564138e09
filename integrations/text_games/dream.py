"""The parts with which text games assist a dream: their rules respond, their score judges, their seed draws."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from dreamgym_lg.dream import Answer, Episode, Verdict
from dreamgym_lg.environment import RULES
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Task

_FULL = 0.98
"""A score from which on it counts as 1: three thirds may be dreamed as 0.33 each."""


class Rules:
    """The responder that refuses what the game itself would refuse, whatever the world holds.

    Args: `check`, (task, action, observations) -> the refusal, or None to ask the next responder.
    """

    name = RULES

    def __init__(self, check: Callable[[Task, str, Sequence[str]], str | None]) -> None:
        self._check = check

    def respond(self, episode: Episode) -> Answer | None:
        seen = [first_observation(episode.task), *(step.next_observation for step in episode.steps)]
        refusal = self._check(episode.task, episode.action, seen)
        return None if refusal is None else Answer(refusal, valid=False)


class Score:
    """The judge of a game with partial credit: a step earns the change of the dreamed score, which stays between 0 and 1.

    Args:
        completes: An episode is a success as soon as its score is 1, and ends, whatever the experience model says. One that
            has read of few successes seldom says that a task is completed.
        once: An action that was rewarded is not rewarded again before something is lost. So is every score that follows from
            the state alone (an object counts where it belongs, however often it is put there).
    """

    name = "score"

    def __init__(self, *, completes: bool = False, once: bool = False) -> None:
        self.completes, self.once = completes, once

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        if answer is None or (verdict := answer.verdict) is None:
            return None
        reward = 0.0 if self.once and verdict.reward > 0 and _is_rewarded(episode) else verdict.reward
        before = sum(step.reward for step in episode.steps)
        after = min(max(before + reward, 0.0), 1.0)
        success = verdict.terminated and verdict.success and (after > before or after >= _FULL)
        terminated = verdict.terminated and (success or not verdict.success)
        if self.completes and after >= _FULL:
            terminated = success = True
        earned = reward if after == before + reward else after - before  # as it was dreamed, without rounding
        return Verdict(earned, success, verdict.reason, terminated)


def _is_rewarded(episode: Episode) -> bool:
    """Whether the action has been rewarded since something was lost."""
    for step in reversed(episode.steps):
        if step.reward < 0:
            return False
        if step.action == episode.action and step.reward > 0:
            return True
    return False


def draw_order(names: Iterable[str], seed: int) -> list[str]:
    """The different names in an order drawn by `seed`. Leaving one name out does not change the order of the others."""
    return sorted(set(names), key=lambda name: blake2b(f"{seed}/{name}".encode()).digest())
