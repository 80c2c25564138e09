"""How far a dream can be trusted: the same policy in dream and reality, and the dream's verdict on that policy's actions."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from dreamgym_lg.environment import CheckAction, unrefused_steps
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.training_data import recorded_exchanges
from dreamgym_lg.statistics import wilson
from dreamgym_lg.types import Prediction, Trajectory


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, int | float | list[float]]:
    """Successes with their Wilson 95 % interval, invalid-action share and failed rollouts (which count as no success)."""
    successes, episodes = sum(trajectory.success for trajectory in trajectories), len(trajectories)
    steps = sum(len(trajectory.steps) for trajectory in trajectories)
    return {
        "successes": successes,
        "episodes": episodes,
        "interval": list(wilson(successes, episodes)),
        "invalid_action_share": sum(trajectory.invalid_actions for trajectory in trajectories) / max(steps, 1),
        "reward_mean": sum(trajectory.reward for trajectory in trajectories) / max(episodes, 1),
        "failed": sum(trajectory.error is not None for trajectory in trajectories),
    }


class Verdicts(NamedTuple):
    """The experience model's judgement of real steps, teacher-forced: each is predicted from the real history."""

    invalid: int
    """Steps that the real environment did not understand (those refused by `check_action` are not asked)."""
    invalid_recognised: int
    valid: int
    valid_refused: int
    reward_errors: int
    """Steps whose predicted reward differs from the real one by more than 0.01."""

    @property
    def invalid_recall(self) -> float | None:
        """Share of really invalid actions called invalid; None if there were none to recognise."""
        return self.invalid_recognised / self.invalid if self.invalid else None


async def measure_verdicts(
    experience: ExperienceModel,
    trajectories: Sequence[Trajectory],
    *,
    check_action: CheckAction | None = None,
    invalid_only: bool = False,
) -> Verdicts:
    """Count how often an experience model recognises real invalid actions and rewards.

    It is asked about every step of the real `trajectories` that it is there for (`invalid_only`: about the invalid ones of
    them), each given the real history before it; an answer that cannot be read is a wrong one. Whatever else the model's
    server raises is raised.
    """
    if invalid_only:  # of all others no demonstrations need be looked up
        asked = (each for each in trajectories if not all(step.valid for _, step in unrefused_steps(each, check_action)))
        trajectories = list(asked)
    experience.retrieve(trajectories)
    found = await asyncio.gather(
        *(_judged(experience, each, check_action, invalid_only) for each in trajectories), return_exceptions=True
    )
    judged: list[tuple[Prediction, Prediction | None]] = []
    for episode in found:
        if isinstance(episode, BaseException):
            raise episode  # a server that is down says nothing about the model's judgement
        judged += episode
    invalid = recognised = valid = refused = wrong = 0
    for real, answer in judged:
        said_valid = None if answer is None else answer.valid
        invalid += not real.valid
        recognised += not real.valid and said_valid is False
        valid += real.valid
        refused += real.valid and said_valid is not True
        wrong += answer is None or abs(answer.reward - real.reward) > 0.01
    return Verdicts(invalid, recognised, valid, refused, wrong)


async def _judged(
    experience: ExperienceModel, trajectory: Trajectory, check_action: CheckAction | None, invalid_only: bool
) -> list[tuple[Prediction, Prediction | None]]:
    """Each real step and the answer, None if it cannot be read. In their order: the model has read what came before."""
    exchanges = recorded_exchanges(experience, trajectory, check_action)
    judged: list[tuple[Prediction, Prediction | None]] = []
    for position, exchange in enumerate(exchanges):
        history, right = exchanges[:position], exchange.prediction
        if invalid_only and right.valid or not experience.asked(trajectory.task, history, exchange.action):
            continue
        try:
            answer = await experience.apredict(trajectory.task, history, exchange.action, exchange.demonstrations)
        except PredictionFailed:
            answer = None
        judged.append((right, answer))
    return judged
