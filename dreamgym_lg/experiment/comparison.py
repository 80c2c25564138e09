"""A change test: two versions of an agent, compared on the same tasks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from langchain_core.callbacks import get_usage_metadata_callback

from dreamgym_lg.environment import CreateEnvironment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.rollout import Agent, check_played, rollout
from dreamgym_lg.statistics import Rate, clustered_rate, mean_interval
from dreamgym_lg.types import Task

_CONCURRENCY = 16
CONFIDENCE = 0.98
"""Confidence of a difference's interval. Of comparisons without a difference, one in fifty claims one."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """How one version of an agent did."""

    name: str
    success: Rate
    """With its 95 % interval; episodes of one task count as alike."""
    rewards: tuple[float, ...]
    """Mean reward of each task, 0 to 1."""
    actions: float
    """Mean number of actions of an episode."""
    seconds: float
    """Mean seconds of an episode, others playing beside it."""
    tokens: int
    """Of the agent's chat models over all episodes, where these report them."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The second version minus the first, in mean reward."""

    before: Version
    after: Version

    @property
    def difference(self) -> float:
        return mean(self._differences)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of `difference` at `CONFIDENCE`, over tasks."""
        return mean_interval(self._differences, CONFIDENCE)

    @property
    def differs(self) -> bool:
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def _differences(self) -> list[float]:
        return [b - a for a, b in zip(self.before.rewards, self.after.rewards, strict=True)]

    def __str__(self) -> str:
        low, high = self.interval
        claim = "no difference is shown" if not self.differs else "better" if low > 0 else "worse"
        return f"{claim}: {self.difference:+.3f} [{low:+.3f}, {high:+.3f}] over {len(self.before.rewards)} tasks"


async def play_version(
    name: str,
    agent: Agent,
    tasks: Sequence[Task],
    create_environment: CreateEnvironment,
    *,
    num_generations: int,
    seed: int = 0,
    on_episode: Callable[[], None] = lambda: None,
) -> Version:
    """Play every task `num_generations` times. Raises `EpisodesMissing` for episodes that could not be played."""
    if not tasks:
        raise ConfigurationError("there is no task to compare on: import traces first")
    start = time.perf_counter()
    with get_usage_metadata_callback() as usage:
        episodes = await rollout(
            agent,
            tasks,
            create_environment,
            source="synthetic",
            num_generations=num_generations,
            seed=seed,
            concurrency=_CONCURRENCY,
            attempts=3,
            on_episode=lambda _: on_episode(),
        )
    check_played(episodes, again="dreamgym compare")
    success = clustered_rate((episode.task.id, episode.success) for episode in episodes)
    assert success is not None  # there is a task
    groups = [episodes[i : i + num_generations] for i in range(0, len(episodes), num_generations)]
    return Version(
        name=name,
        success=success,
        rewards=tuple(mean(episode.reward for episode in group) for group in groups),
        actions=mean(len(episode.steps) for episode in episodes),
        seconds=(time.perf_counter() - start) * min(_CONCURRENCY, len(episodes)) / len(episodes),
        tokens=sum(each["total_tokens"] for each in usage.usage_metadata.values()),
    )
