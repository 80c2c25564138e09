"""How far the same actions lead to the same world: the luck that an environment adds to a policy's score."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import fmean, pstdev
from typing import NamedTuple

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Task


class ReplayVariance(NamedTuple):
    """The spread over replays of the same actions."""

    replays: int
    reward_mean: float
    """Mean of the episodes' scores."""
    reward_sd: float
    """Standard deviation of the scores over the replays (not an estimate for more of them); 0 is one world."""
    successes: int
    worlds: int
    """Different episodes: 1 if every observation, reward and outcome was the same each time."""
    first_difference: int | None
    """The earliest step, from 0 for the first observation, at which two replays differ; None if none do."""


async def replay_variance(
    environments: Callable[[], AbstractContextManager[Environment]], task: Task, actions: Sequence[str], n: int = 8
) -> ReplayVariance:
    """Play `actions` `n` times, one after the other, each in an environment of its own, until each episode's end.

    An `ExperienceModel` remembers its answers: to measure the model and not its memory, let `environments` make a new one
    each time, without a `Hosted` file: `lambda: nullcontext(DreamEnvironment(ExperienceModel(model)))`.
    """
    if n < 2:
        raise ConfigurationError(f"n={n}: a spread takes at least 2 replays")
    replays = [await _replay(environments, task, actions) for _ in range(n)]
    scores = [sum(reward for _, reward, _, _ in replay) for replay in replays]
    longest = max(len(replay) for replay in replays)
    moments = [{replay[i : i + 1] for replay in replays} for i in range(longest)]
    return ReplayVariance(
        replays=n,
        reward_mean=fmean(scores),
        reward_sd=pstdev(scores),
        successes=sum(replay[-1][3] for replay in replays),
        worlds=len(set(replays)),
        first_difference=next((i for i, seen in enumerate(moments) if len(seen) > 1), None),
    )


async def _replay(
    environments: Callable[[], AbstractContextManager[Environment]], task: Task, actions: Sequence[str]
) -> tuple[tuple[str, float, bool, bool], ...]:
    """(observation, reward, ended, success) of the start and of every step played."""
    with environments() as environment:
        seen = [(await environment.areset(task), 0.0, False, False)]
        for action in actions:
            result = await environment.astep(action)
            ended = result.terminated or result.truncated
            seen.append((result.observation, result.reward, ended, bool(result.info.get("success", False))))
            if ended:
                break
    return tuple(seen)
