"""TextWorld-Express as the world of an experiment, and the scripted policies that collect its traces."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import Any

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.text_games.game import Rules, Score
from dreamgym_lg.integrations.text_games.scripted_policies import Oracle, collect_episodes
from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress, make_tasks
from dreamgym_lg.integrations.textworld_express.text import GAMES, check_action, hidden_facts
from dreamgym_lg.types import Split, Task, Trajectory

EPISODES = {"demonstration": 4, "random": 400, "unfinished": 1500}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "peckingorder": {  # the demo's: what about eight minutes on two cores are enough for
        "policy_tokens": 16,
        "experience_steps": 130,
        "iterations": 8,
        "evaluate_every": 8,
        "proof_tasks": 64,
        "panel_tasks": 32,
    },
    "twc": {"tasks": 5000, "episodes": {"demonstration": 60, "unfinished": 1500}, "experience_steps": 300},
}
"""Settings in which a game differs from `TextWorldExpressWorld.settings`."""


class TextWorldExpressWorld(World):
    """One game. Its worlds of the train fold, split by a hash of their first observation.

    The panel `unseen objects` holds worlds of the game's own test fold, which shares no object with the train fold.

    Args:
        game: One of `text.GAMES`.
        max_steps: Actions after which an episode is truncated.

    Raises `ConfigurationError` for an unknown game.
    """

    settings = Settings(
        tasks=2500,
        episodes=EPISODES,
        retrieved=1,
        retrieved_characters=80,
        experience_steps=200,
        experience_tokens=400,
        policy_tokens=32,
        iterations=20,
        batch_size=4,
        stop_after_uniform=0,  # groups that all fail alike are not done: later ones of other worlds differ again
    )
    assisted = True
    context = staticmethod(hidden_facts)

    def __init__(self, game: str = "peckingorder", *, max_steps: int = 10) -> None:
        if game not in GAMES:
            raise ConfigurationError.unknown("game", game, GAMES)
        self.game, self.max_steps = game, max_steps
        self.name = f"textworld_express/{game}"
        self.settings = replace(self.settings, **_OWN.get(game, {}))
        self.arguments = {"max_steps": max_steps}
        self._made: dict[range, list[Task]] = {}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`: those with different first observations among `limit` worlds (None: those of `settings`)."""
        seeds = _seeds(limit or self.settings.tasks or 0, seed)
        if seeds not in self._made:
            self._made[seeds] = self._make(seeds, "train")
        return [task for task in self._made[seeds] if task.split == split]

    def create_environment(self) -> TextWorldExpress:
        return TextWorldExpress(max_steps=self.max_steps)

    def create_dream(self, model: Model) -> Dream:
        return Dream([Rules(self.refusal), model], judges=[Score()])

    def refusal(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        return check_action(self.game, action, observations)

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        with closing(self.create_environment()) as environment:
            yield from collect_episodes(create_oracle, tasks, environment, episodes=episodes, seed=seed)

    def panels(self, *, limit: int, seed: int = 0) -> dict[str, list[Task]]:
        return {"unseen objects": self._make(_seeds(limit, seed), "test")}

    def _make(self, seeds: range, fold: str) -> list[Task]:
        with closing(self.create_environment()) as environment:
            return make_tasks(self.game, seeds, environment=environment, fold=fold)


def _seeds(count: int, seed: int) -> range:
    return range(seed * 100_000, seed * 100_000 + count)


def twc(**arguments: Any) -> TextWorldExpressWorld:
    """The world `twc` of the command line."""
    return TextWorldExpressWorld("twc", **arguments)


# --- Scripted policies -----------------------------------------------------------------------------------------------

_PUT = re.compile(r"You put the (.+) in the (.+)\.")


def _told(seen: Sequence[str], valid: Sequence[str]) -> str:
    """The next right action of `peckingorder`. Do the book's last request, or read it if something moved since."""
    for observation in reversed(seen):
        if request := re.fullmatch(r"The current task is to (.+)\.", observation):
            return request[1].replace("take the ", "take ")
        if observation.startswith(("You take ", "You put ")):
            break
    return next((action for action in valid if action.startswith("read ")), "look around")


def _tidied(goals: Mapping[str, str], seen: Sequence[str], valid: Sequence[str]) -> str:
    """The next right action of `twc` in one room, at any state. Bring the first item that is out of place."""
    now: dict[str, str] = {}
    for observation in seen:
        if put := _PUT.fullmatch(observation):
            now[put[1]] = put[2]
        elif observation.startswith("You take the "):
            now.pop(observation[13:-1], None)
    for item, place in goals.items():
        if now.get(item) != place:
            for action in (f"put {item} in {place}", f"take {item}", f"open {place}"):
                if action in valid:
                    return action
    return "look around"


def create_oracle(environment: TextWorldExpress, task: Task, rng: Random) -> Oracle:
    """The demonstrator of `task`. The book of `peckingorder`, the places of `twc` in one room, else the gold path.

    The first two find back from any detour; it may break a gold path.
    """
    if task.metadata["game"] == "peckingorder":
        return _told
    path = environment.gold_path(task)
    if task.metadata["game"] == "twc" and not any(action.startswith("move ") for action in path):
        goals = [(put[1], put[2]) for action in path if (put := re.fullmatch(r"put (.+) in (.+)", action))]
        order = dict(rng.sample(goals, len(goals)))
        return lambda seen, valid: _tidied(order, seen, valid)
    rest = iter(path)
    return lambda seen, valid: next((action for action in rest if action in valid), "look around")
