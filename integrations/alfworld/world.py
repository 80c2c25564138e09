"""ALFWorld as the world of an experiment."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.alfworld.data import FAMILIES, Family, OfficialSplit, load_tasks, usual_places
from dreamgym_lg.integrations.alfworld.environment import ALFWorld
from dreamgym_lg.integrations.alfworld.hidden_facts import hidden_facts
from dreamgym_lg.integrations.alfworld.scripted_policies import scripted_trajectories
from dreamgym_lg.integrations.alfworld.text import Check, check_action
from dreamgym_lg.integrations.text_games.dream import Rules
from dreamgym_lg.types import Split, Step, Task, Trajectory

AT_ONCE, REPEATED = 30, 6
"""Games that offline trajectories take in turn, and how many are played of each, about: loading a game takes a second or more,
and the engine remembers 32 of them."""


class ALFWorldWorld(World):
    """ALFWorld's household tasks.

    Splits: `train` and `validation` are the official train games, apart by their folders' names; `test` is the official
    `valid_seen`, other games of the rooms in `train`; the panel `unseen rooms` holds the official `valid_unseen`.

    A dream of it is one world for all episodes of a task: where the wanted things lie is drawn once (`hidden_facts`).

    Args:
        games: The folder that `alfworld-download` made, or a packed file (`data.load_tasks`). Default: $ALFWORLD_DATA, else
            ~/.cache/alfworld, where `alfworld-download` puts them.
        max_steps: Actions after which an episode is cut short. The paper's 50 are too many for the context of a small local
            model; the stored solutions, which know where everything is, take at most 10.
        family: The type of task to play, one of `FAMILIES`; None for all six.
        check: How much `check_action` knows, see `text.check_action`.

    Raises `ConfigurationError` for an unknown family.
    """

    name = "alfworld"
    assisted = True
    settings = Settings(
        tasks=500,
        episodes={"demonstration": 400, "noisy": 300, "random": 200, "malformed": 100, "fluent_wrong": 300},
        retrieved=1,
        retrieved_characters=300,
        policy_tokens=32,
    )

    def __init__(
        self,
        games: str | Path | None = None,
        *,
        max_steps: int = 20,
        family: Family | None = None,
        check: Check = "state",
    ) -> None:
        if family is not None and family not in FAMILIES:
            raise ConfigurationError.unknown("family", family, FAMILIES)
        self.games = games or os.environ.get("ALFWORLD_DATA") or Path("~/.cache/alfworld")
        self.max_steps, self.family, self.check = max_steps, family, check
        self.arguments = {"games": str(self.games), "max_steps": max_steps, "family": family, "check": check}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`; those of the official `valid_unseen` are a panel. Raises `ConfigurationError` without games."""
        found = [task for task in self._load() if task.metadata["official_split"] != "valid_unseen"]
        return [task for task in found[:limit] if task.split == split]

    def _load(self, official_split: OfficialSplit | None = None) -> list[Task]:
        found = load_tasks(self.games, official_split=official_split)
        return [task for task in found if self.family in (None, task.metadata["type"])]

    def create_environment(self) -> ALFWorld:
        return ALFWorld(max_steps=self.max_steps, check=self.check)

    def create_dream(self, model: Model) -> Dream:
        """The game's own rules refuse; the experience model answers and judges."""
        return Dream([Rules(self.refusal), model])

    def refusal(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        """The game's answer to an action that is invalid whatever the world holds; None for any other."""
        return check_action(action, observations, check=self.check)

    def context(self, task: Task, steps: Sequence[Step]) -> list[str]:
        """`hidden_facts`, whose draws follow where such things lie in the train games."""
        return hidden_facts(task, steps, usual_places(self.games))

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """`episodes[kind]` trajectories of each `Kind` of scripted policy, of the first tasks: `REPEATED` or more of each."""
        tasks = tasks[: max(1, sum(episodes.values()) // (AT_ONCE * REPEATED)) * AT_ONCE]
        parts = [tasks[start : start + AT_ONCE] for start in range(0, len(tasks), AT_ONCE)]
        with closing(self.create_environment()) as environment:
            for number, part in enumerate(parts):
                share = {kind: _part(count, number, len(parts)) for kind, count in episodes.items()}
                yield from scripted_trajectories(part, environment, episodes=share, seed=seed + number)

    def panels(self, *, limit: int, seed: int = 0) -> dict[str, list[Task]]:
        return {"unseen rooms": self._load("valid_unseen")[:limit]}


def _part(count: int, number: int, parts: int) -> int:
    """How many of `count` episodes fall to part `number` of `parts`: together all of them."""
    return count * (number + 1) // parts - count * number // parts
