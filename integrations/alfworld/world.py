"""ALFWorld as the world of an experiment."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.alfworld.data import load_tasks
from dreamgym_lg.integrations.alfworld.environment import ALFWorld
from dreamgym_lg.integrations.alfworld.scripted_policies import scripted_trajectories
from dreamgym_lg.integrations.alfworld.text import check_action
from dreamgym_lg.types import Split, Task, Trajectory

AT_ONCE = 30
"""Games that offline trajectories take in turn: loading one takes a second, and the engine remembers 32 of them."""


class ALFWorldWorld(World):
    """ALFWorld's household tasks. The panel `unseen rooms` holds tasks of the official split `valid_unseen`.

    Args:
        games: The folder that `alfworld-download` made, or a packed file (`data.load_tasks`). Default: $ALFWORLD_DATA, else
            ~/.cache/alfworld, where `alfworld-download` puts them.
        max_steps: Actions after which an episode is cut short. The paper's 50 are too many for the context of a small local
            model; the stored solutions take at most 10.
    """

    name = "alfworld"
    settings = Settings(
        tasks=500,
        episodes={"demonstration": 400, "noisy": 300, "random": 200, "malformed": 100, "fluent_wrong": 300},
        retrieved=1,
        retrieved_characters=300,
        policy_tokens=32,
    )

    def __init__(self, games: str | Path | None = None, *, max_steps: int = 20) -> None:
        self.games = games or os.environ.get("ALFWORLD_DATA") or Path("~/.cache/alfworld")
        self.max_steps = max_steps
        self.arguments = {"games": str(self.games), "max_steps": max_steps}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`; those of the official `valid_unseen` are a panel. Raises `ConfigurationError` without games."""
        found = [task for task in load_tasks(self.games) if task.metadata["official_split"] != "valid_unseen"]
        return [task for task in found[:limit] if task.split == split]

    def create_environment(self) -> ALFWorld:
        return ALFWorld(max_steps=self.max_steps)

    def check_action(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        return check_action(action, observations)

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """`episodes[kind]` trajectories of each `Kind` of scripted policy, `AT_ONCE` games at a time."""
        parts = [tasks[start : start + AT_ONCE] for start in range(0, len(tasks), AT_ONCE)]
        with closing(self.create_environment()) as environment:
            for number, part in enumerate(parts):
                share = {kind: _part(count, number, len(parts)) for kind, count in episodes.items()}
                yield from scripted_trajectories(part, environment, episodes=share, seed=seed + number)

    def panels(self, *, limit: int, seed: int = 0) -> dict[str, list[Task]]:
        return {"unseen rooms": load_tasks(self.games, official_split="valid_unseen", limit=limit)}


def _part(count: int, number: int, parts: int) -> int:
    """How many of `count` episodes fall to part `number` of `parts`: together all of them."""
    return count * (number + 1) // parts - count * number // parts
