"""ALFWorld as the world of an experiment, and the scripted policies that collect its traces."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.alfworld.data import FAMILIES, Family, load_tasks, walkthrough
from dreamgym_lg.integrations.alfworld.environment import ALFWorld
from dreamgym_lg.integrations.text_games.game import TextGame
from dreamgym_lg.integrations.text_games.scripted_policies import Oracle, collect_episodes
from dreamgym_lg.types import Split, Task, Trajectory

AT_ONCE, REPEATED = 30, 6
"""Games that offline policies play in turn, and episodes of each. Loading one takes a second, the engine remembers 32."""


class ALFWorldWorld(World):
    """ALFWorld's household tasks.

    Splits as of `data.load_tasks`; `test` has only the official `valid_seen`.
    Its dream is the experience model's alone, without rules of the game. Offline episodes are stored solutions and random play.

    Args:
        games: As `data.load_tasks`. Default: $ALFWORLD_DATA, else ~/.cache/alfworld, as `alfworld-download`.
        max_steps: Actions after which an episode is truncated (in the paper 50; the stored solutions take at most 10).
        family: The type of task to play, one of `FAMILIES`; None for all six.

    Raises `ConfigurationError` for an unknown family.
    """

    name = "alfworld"
    settings = Settings(
        tasks=500,
        episodes={"demonstration": 400, "random": 900},
        retrieved=1,
        retrieved_characters=300,
        policy_tokens=32,
    )

    def __init__(self, games: str | Path | None = None, *, max_steps: int = 20, family: Family | None = None) -> None:
        if family is not None and family not in FAMILIES:
            raise ConfigurationError.unknown("family", family, FAMILIES)
        self.games = games or os.environ.get("ALFWORLD_DATA") or Path("~/.cache/alfworld")
        self.max_steps, self.family = max_steps, family
        self.arguments = {"games": str(self.games), "max_steps": max_steps, "family": family}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        tasks = [task for task in load_tasks(self.games) if self.family in (None, task.metadata["type"])]
        return [task for task in tasks[:limit] if task.split == split]

    def create_environment(self) -> ALFWorld:
        return ALFWorld(max_steps=self.max_steps)

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """As `World.collect`, from the first tasks alone: `REPEATED` or more episodes of each."""
        tasks = tasks[: max(1, sum(episodes.values()) // (AT_ONCE * REPEATED)) * AT_ONCE]
        parts = [tasks[start : start + AT_ONCE] for start in range(0, len(tasks), AT_ONCE)]
        with closing(self.create_environment()) as environment:
            for number, part in enumerate(parts):
                share = {
                    kind: count * (number + 1) // len(parts) - count * number // len(parts) for kind, count in episodes.items()
                }
                yield from collect_episodes(create_oracle, part, environment, episodes=share, seed=seed + number)


def create_oracle(environment: TextGame, task: Task, rng: Random) -> Oracle:
    """The game's stored solution; astray, any action that the game accepts."""
    stored = walkthrough(task)

    def right(seen: Sequence[str], valid: Sequence[str]) -> str:
        action = stored[min(len(seen), len(stored)) - 1]
        return action if action in valid else rng.choice(list(valid) or ["look"])

    return right
