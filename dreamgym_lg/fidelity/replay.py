"""Real episodes put to a dream: step by step behind the real history (forced), and whole behind its own answers (free)."""

import asyncio
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from dreamgym_lg.actions import is_answer
from dreamgym_lg.dream.dream import Dream, DreamEnvironment
from dreamgym_lg.environment import RULES
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.statistics import normalised
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Step, StepResult, Trajectory

Status = Literal["continues", "failure", "success"]
CLOSE = 0.01
"""Rewards that differ by no more than this agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A real step, and the dream's answer to its action."""

    number: int
    """Position in the episode, from 1."""
    step: Step
    success: bool
    """Whether this step really completed the task."""
    answer: StepResult | None
    """None if it could not be read or, played freely, the dream was over before this step."""

    @property
    def decided_by(self) -> str:
        """The part of the dream that answered, or judged the end; "model" if unreadable."""
        if self.answer is None:
            return "model"
        return str(self.answer.info.get("decided_by") or self.answer.info.get("judged_by") or "")

    @property
    def real_status(self) -> Status:
        return "success" if self.success else "failure" if self.step.terminated else "continues"

    @property
    def dreamed_status(self) -> Status | None:
        if self.answer is None:
            return None
        return "success" if self.answer.info["success"] else "failure" if self.answer.terminated else "continues"

    @property
    def called_invalid(self) -> bool:
        return self.answer is not None and not self.answer.info["valid"]

    @property
    def words_are_right(self) -> bool:
        """Case, whitespace and punctuation do not count."""
        return self.answer is not None and normalised(self.answer.observation) == normalised(self.step.next_observation)

    @property
    def end_is_right(self) -> bool:
        return self.answer is not None and self.answer.terminated == self.step.terminated

    @property
    def reward_is_right(self) -> bool:
        return self.answer is not None and abs(self.answer.reward - self.step.reward) <= CLOSE


class Replay(NamedTuple):
    """The actions of a real episode, played again in the dream."""

    real: Trajectory
    dreamed: Trajectory
    """Up to the dream's own end; `error` if an answer could not be read."""
    answered: list[Answered]
    """Every step put to the dream, those after its end without an answer."""


async def answer_forced(
    dream: Dream, trajectory: Trajectory, slots: asyncio.Semaphore, *, only_invalid: bool = False
) -> list[Answered]:
    """Ask about every step behind the real history, the traces of its task left out.

    Args: `slots`, bounds the questions at once; `only_invalid`, ask about really invalid actions alone.
    """
    trajectory = with_observation(trajectory)

    async def one(number: int, step: Step) -> Answered:
        environment = dream.resume(trajectory.task, trajectory.steps[: number - 1])
        async with slots:
            return _answered(trajectory, number, step, await step_or_none(environment, step.action))

    numbered = _askable(dream, trajectory)
    return await asyncio.gather(*(one(number, step) for number, step in numbered if not (only_invalid and step.valid)))


async def replay_free(dream: Dream, trajectory: Trajectory, slots: asyncio.Semaphore) -> Replay:
    """Play the recorded actions again, each behind the dream's own answers: how an episode drifts."""
    trajectory = with_observation(trajectory)
    environment, answered = dream.resume(trajectory.task), list[Answered]()
    success, over, error = False, False, None
    for number, step in _askable(dream, trajectory):
        result = None
        if not over:
            async with slots:
                result = await step_or_none(environment, step.action)
            error = "PredictionFailed: the answer could not be read" if result is None else None
            over = result is None or result.terminated
            success = result is not None and bool(result.info["success"])
        answered.append(_answered(trajectory, number, step, result))
    dreamed = replace(trajectory, steps=environment.steps, source="synthetic", success=success, error=error, segments=())
    return Replay(trajectory, dreamed, answered)


async def step_or_none(environment: DreamEnvironment, action: str) -> StepResult | None:
    """The dream's answer, None if it cannot be read. Anything else is raised: a server that is down says nothing."""
    try:
        return await environment.astep(action)
    except PredictionFailed:
        return None


def with_observation(trajectory: Trajectory) -> Trajectory:
    """The trajectory with its first observation in its task. Imported traces may lack it."""
    if trajectory.task.observation or not trajectory.steps:
        return trajectory
    return replace(trajectory, task=replace(trajectory.task, observation=trajectory.steps[0].observation))


def _askable(dream: Dream, trajectory: Trajectory) -> list[tuple[int, Step]]:
    """Steps, numbered from 1, that reached the real world. Without messages that no user hears.

    The last message is for its judges, if it has any: a world's own check may stand in their place.
    """
    no_user, last = is_tool_task(trajectory.task) and dream.user is None, len(trajectory.steps) if dream.judges else None
    numbered = enumerate(trajectory.steps, start=1)
    reached = ((number, step) for number, step in numbered if step.decided_by != RULES)
    return [(number, step) for number, step in reached if not (no_user and number != last and is_answer(step.action))]


def _answered(trajectory: Trajectory, number: int, step: Step, answer: StepResult | None) -> Answered:
    return Answered(number=number, step=step, success=step.terminated and trajectory.success, answer=answer)
