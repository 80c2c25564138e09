"""The share of real steps that a dream answers right, behind the real history."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dreamgym_lg.actions import is_answer, parse_call
from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.environment import RULES
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.statistics import StepRate, normalised, step_rate
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Step, StepResult, Trajectory

_CONCURRENCY = 32
"""Steps predicted at once."""
MAX_REWARD_ERROR = 0.01
"""Rewards that differ by no more than this agree."""


class AnsweredStep(NamedTuple):
    """A real step, and the dream's answer to its action."""

    step: Step
    success: bool
    """True if this step really completed the task."""
    answer: StepResult | None
    """None if it could not be read."""

    @property
    def decided_by(self) -> str:
        """The part of the dream that answered, or judged the end; "model" if unreadable."""
        if self.answer is None:
            return "model"
        return str(self.answer.info.get("decided_by") or self.answer.info.get("judged_by") or "")

    @property
    def called_success(self) -> bool:
        return self.answer is not None and bool(self.answer.info["success"])

    @property
    def words_are_right(self) -> bool:
        """Case, whitespace and punctuation do not count."""
        return self.answer is not None and normalised(self.answer.observation) == normalised(self.step.next_observation)

    @property
    def reward_is_right(self) -> bool:
        return self.answer is not None and abs(self.answer.reward - self.step.reward) <= MAX_REWARD_ERROR

    @property
    def all_is_right(self) -> bool:
        """Words, end and reward."""
        ends = self.answer is not None and self.answer.terminated == self.step.terminated
        return ends and self.words_are_right and self.reward_is_right


_Predicate = Callable[[AnsweredStep], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """Real steps, each predicted behind the real history. An unreadable answer is a wrong one."""

    steps: int
    episodes: int
    """Number of episodes that the steps are from."""
    unreadable: int
    normalised: StepRate | None
    """The same words: case, whitespace and punctuation do not count."""
    success_recalled: StepRate | None
    """Share of the real successes' last steps that the dream, too, calls a success."""
    success_false: StepRate | None
    """Of the steps that the dream calls a success, those that really were none."""
    reward_right: StepRate | None
    """Rewards that differ from the real one by no more than 0.01. Of a tool agent, those of last steps."""
    invalid_recall: StepRate | None
    """Of the really invalid actions, those that the dream refuses."""
    right_by_part: dict[str, StepRate]
    """Steps right in words, end and reward, by the responder or judge that decided them."""


async def measure_steps(
    dream: Dream,
    trajectories: Sequence[Trajectory],
    *,
    on_episode: Callable[[], None] = lambda: None,
) -> OneStep:
    """Predict the steps of real episodes behind their history. The traces of their own task are left out.

    Args: `on_episode`, called as soon as an episode's steps are answered.

    Raises whatever the model's server raises. An answer that cannot be read is a wrong answer, no error.
    """
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(trajectory: Trajectory) -> list[AnsweredStep]:
        answered = await answer_steps(dream, trajectory, slots)
        on_episode()
        # no reply of a user has to be word for word: `fidelity.users` measures it
        return [each for each in answered if each.step.terminated or not is_answer(each.step.action)]

    return _figures(await asyncio.gather(*map(one, trajectories)))


async def answer_steps(dream: Dream, trajectory: Trajectory, slots: asyncio.Semaphore) -> list[AnsweredStep]:
    """Ask about every step behind the real history. Args: `slots`, bounds the questions at once."""
    trajectory = with_observation(trajectory)

    async def one(position: int, step: Step) -> AnsweredStep:
        environment = dream.resume(trajectory.task, trajectory.steps[:position], prompt=trajectory.prompt)
        async with slots:
            try:
                answer = await environment.astep(step.action)
            except PredictionFailed:
                answer = None
        return AnsweredStep(step, step.terminated and trajectory.success, answer)

    return await asyncio.gather(*(one(position, step) for position, step in _answerable(dream, trajectory)))


def with_observation(trajectory: Trajectory) -> Trajectory:
    """The trajectory with its first observation in its task. Imported traces may lack it."""
    if trajectory.task.observation or not trajectory.steps:
        return trajectory
    return replace(trajectory, task=replace(trajectory.task, observation=trajectory.steps[0].observation))


def _answerable(dream: Dream, trajectory: Trajectory) -> list[tuple[int, Step]]:
    """Steps and their positions, as far as they reached the real world. Without messages that no user hears.

    The last message is for its judges, if it has any: a world's own check may stand in their place.
    """
    no_user, last = is_tool_task(trajectory.task) and dream.user is None, len(trajectory.steps) - 1 if dream.judges else None
    reached = ((position, step) for position, step in enumerate(trajectory.steps) if step.decided_by != RULES)
    return [(position, step) for position, step in reached if not (no_user and position != last and is_answer(step.action))]


def _figures(episodes: Sequence[Sequence[AnsweredStep]]) -> OneStep:
    """The figures of all steps. Intervals allow for correlated steps of an episode."""

    def share(right: _Predicate, among: _Predicate = lambda each: True) -> StepRate | None:
        return step_rate([[right(each) for each in episode if among(each)] for episode in episodes])

    answered = [each for episode in episodes for each in episode]
    by_part = {
        part: share(lambda each: each.all_is_right, among=lambda each, part=part: each.decided_by == part)  # type: ignore[misc]
        for part in sorted({each.decided_by for each in answered})
    }
    return OneStep(
        steps=len(answered),
        episodes=sum(bool(episode) for episode in episodes),
        unreadable=sum(each.answer is None for each in answered),
        normalised=share(lambda each: each.words_are_right),
        success_recalled=share(lambda each: each.called_success, among=lambda each: each.success),
        success_false=share(lambda each: not each.success, among=lambda each: each.called_success),
        # a tool's call earns nothing on either side: it would hide wrong verdicts
        reward_right=share(
            lambda each: each.reward_is_right,
            among=lambda each: each.step.terminated or parse_call(each.step.action) is None,
        ),
        invalid_recall=share(
            lambda each: each.answer is not None and not each.answer.info["valid"], among=lambda each: not each.step.valid
        ),
        right_by_part={part: rate for part, rate in by_part.items() if rate is not None},
    )
