"""ALFWorld as the world of an experiment, and the scripted policies that collect its traces."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.alfworld.data import FAMILIES, Family, OfficialSplit, load_tasks, usual_places
from dreamgym_lg.integrations.alfworld.environment import ALFWorld
from dreamgym_lg.integrations.alfworld.text import (
    TOOLS,
    Goal,
    Known,
    check_action,
    follow,
    goal_of,
    hidden_facts,
    kind_of,
    likely_order,
)
from dreamgym_lg.integrations.text_games.game import Rules, TextGame
from dreamgym_lg.integrations.text_games.scripted_policies import Oracle, collect_episodes
from dreamgym_lg.types import Split, Step, Task, Trajectory

AT_ONCE, REPEATED = 30, 6
"""Games that offline policies play in turn, and episodes of each. Loading one takes a second, the engine remembers 32."""


class ALFWorldWorld(World):
    """ALFWorld's household tasks.

    Splits as of `data.load_tasks`; `test` has only the official `valid_seen`, the panel `unseen rooms` the `valid_unseen`.
    In a dream the places of the wanted things are drawn once for all episodes of a task (`hidden_facts`).

    Args:
        games: As `data.load_tasks`. Default: $ALFWORLD_DATA, else ~/.cache/alfworld, as `alfworld-download`.
        max_steps: Actions after which an episode is truncated (in the paper 50; the stored solutions take at most 10).
        family: The type of task to play, one of `FAMILIES`; None for all six.

    Raises `ConfigurationError` for an unknown family.
    """

    name = "alfworld"
    assisted = True
    settings = Settings(
        tasks=500,
        episodes={"demonstration": 400, "noisy": 400, "random": 500},
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
        tasks = [task for task in self._load() if task.metadata["official_split"] != "valid_unseen"]
        return [task for task in tasks[:limit] if task.split == split]

    def _load(self, official_split: OfficialSplit | None = None) -> list[Task]:
        tasks = load_tasks(self.games, official_split=official_split)
        return [task for task in tasks if self.family in (None, task.metadata["type"])]

    def create_environment(self) -> ALFWorld:
        return ALFWorld(max_steps=self.max_steps)

    def create_dream(self, model: Model) -> Dream:
        return Dream([Rules(self.refusal), model])

    def refusal(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        return check_action(action, observations)

    def context(self, task: Task, steps: Sequence[Step]) -> list[str]:
        return hidden_facts(task, steps, usual_places(self.games))

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

    def panels(self, *, limit: int, seed: int = 0) -> dict[str, list[Task]]:
        return {"unseen rooms": self._load("valid_unseen")[:limit]}


# --- Scripted policies -----------------------------------------------------------------------------------------------


def create_oracle(environment: TextGame, task: Task, rng: Random) -> Oracle:
    """The demonstrator of `task`. It searches the room as a policy has to, the usual places first, after any detour.

    Raises `ConfigurationError` for an instruction that is none of ALFWorld's.
    """
    if (goal := goal_of(task.instruction)) is None:
        raise ConfigurationError(f"task {task.id} asks {task.instruction!r}, which is no instruction of ALFWorld's")
    usual, seed = usual_places(str(task.metadata["path"])), rng.randrange(2**32)

    def right(seen: Sequence[str], valid: Sequence[str]) -> str:
        known = follow(seen)
        place, action = _next(goal, known, lambda kind: likely_order(known.places, usual.get(kind, {}), seed))
        away = [other for other in valid if other.startswith("go to ")] or ["look"]
        steps = [action, f"open {place}"] if known.here == place else [f"go to {place}"]
        return next((step for step in steps if step in valid), away[len(seen) % len(away)])

    return right


def _next(goal: Goal, known: Known, order: Callable[[str], list[str]]) -> tuple[str, str]:
    """A place and the action there; "" to look into it. Args: `order`, places to search for a kind of thing."""
    held, lamp = known.held, "lamp" in goal.place
    target = next((place for place in order("") if kind_of(place) == goal.place), "")
    if held and kind_of(held) != goal.thing:  # a thing too many: down with it, here or elsewhere
        return known.here, f"move {held} to {known.here}"
    if held and goal.treat and (goal.treat, held) not in known.treated:
        tool = next((place for kind in TOOLS[goal.treat] for place in known.places if kind_of(place) == kind), "")
        return tool, f"{goal.treat} {held} with {tool}"
    if held and not lamp:
        return target, f"move {held} to {target}"
    for place, names_there in known.contents.items():
        for name in names_there:
            if held and kind_of(name) == goal.place:
                return place, f"use {name}"
            done = place == target and not (goal.treat and (goal.treat, name) not in known.treated)
            if not held and kind_of(name) == goal.thing and not done:
                return place, f"take {name} from {place}"
    unknown = [place for place in order(goal.place if held else goal.thing) if place not in known.contents]
    return (unknown[0] if unknown else known.here), ""
