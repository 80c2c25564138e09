"""The two errors that the paper's theorem 1 asks for, and what its bound makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from dreamgym_lg.fidelity.figures import Mean
from dreamgym_lg.fidelity.steps import OneStep
from dreamgym_lg.statistics import Rate

GAMMA = 0.99
CAVEAT = (
    "The theorem takes the largest error over all observations and actions; a sample can only give the mean over those it "
    "holds, so the bound below holds for no policy. A next observation that differs in one word counts as a transition "
    "missed (the total variation of two certain outcomes is 0 or 1), and where the world's hidden part decides, no model can "
    "do better. Use the two errors as advice - the reward error says whether the dream pays for what deserves it - and not "
    "as a certificate."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theorem:
    """Mean reward and transition error on real steps, and the penalty that theorem 1 would subtract for them."""

    reward_error: Mean
    """eps_R: mean |predicted - real| reward."""
    transition_error: Rate
    """eps_P: mean total variation between the real next observation and the dreamed one, both certain: 0 or 1 a step."""
    gamma: float
    largest_reward: float
    """R_max: the largest real reward (absolute) among the steps."""
    penalty: float
    """2 (eps_R / (1 - g) + 2 g R_max eps_P / (1 - g)^2)."""
    largest_return: float
    """R_max / (1 - g)."""

    @property
    def vacuous(self) -> bool:
        """A penalty above the largest possible return guarantees nothing."""
        return self.penalty >= self.largest_return


def theorem(figures: OneStep, rewards: Sequence[float]) -> Theorem | None:
    """None without a readable answer, or where no real step earned or cost anything (there is no R_max)."""
    largest = max(map(abs, rewards), default=0.0)
    if figures.reward_error is None or figures.transition_error is None or not largest:
        return None
    left = 1 - GAMMA
    missed = 2 * GAMMA * largest * figures.transition_error.value / left**2
    return Theorem(
        reward_error=figures.reward_error,
        transition_error=figures.transition_error,
        gamma=GAMMA,
        largest_reward=largest,
        penalty=2 * (figures.reward_error.value / left + missed),
        largest_return=largest / left,
    )
