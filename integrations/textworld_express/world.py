"""TextWorld-Express as the world of an experiment, and the scripted policies that collect its traces."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.text_games.game import Rules, Score
from dreamgym_lg.integrations.text_games.scripted_policies import Oracle, collect_episodes
from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress, make_tasks
from dreamgym_lg.integrations.textworld_express.text import GAMES, check_action
from dreamgym_lg.types import Split, Task, Trajectory

EPISODES = {"noisy": 150, "random": 450}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "peckingorder": {  # the demo's: what about eight minutes on two cores are enough for
        "policy_tokens": 16,
        "experience_steps": 130,
        "iterations": 8,
        "evaluate_every": 8,
        "proof_tasks": 64,
    },
    "twc": {"tasks": 5000, "episodes": {"noisy": 600, "random": 600}, "experience_steps": 300},
}
"""Settings in which a game differs from `TextWorldExpressWorld.settings`."""


class TextWorldExpressWorld(World):
    """One game. Its worlds of the train fold, split by a hash of their first observation.

    Args:
        game: One of `text.GAMES`.
        max_steps: Actions after which an episode is truncated.
        rules: False for a dream that is not `assisted`: the experience model, not the game's rules, says which actions are
            possible. `Score` judges in both.

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

    def __init__(self, game: str = "peckingorder", *, max_steps: int = 10, rules: bool = True) -> None:
        if game not in GAMES:
            raise ConfigurationError.unknown("game", game, GAMES)
        self.game, self.max_steps, self.assisted = game, max_steps, rules
        self.name = f"textworld_express/{game}"
        self.settings = replace(self.settings, **_OWN.get(game, {}))
        self.arguments = {"max_steps": max_steps} | ({} if rules else {"rules": False})  # as older folders name none
        self._made: dict[range, list[Task]] = {}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`: those with different first observations among `limit` worlds (None: those of `settings`)."""
        seeds = range(seed * 100_000, seed * 100_000 + (limit or self.settings.tasks or 0))
        if seeds not in self._made:
            with closing(self.create_environment()) as environment:
                self._made[seeds] = make_tasks(self.game, seeds, environment=environment)
        return [task for task in self._made[seeds] if task.split == split]

    def create_environment(self) -> TextWorldExpress:
        return TextWorldExpress(max_steps=self.max_steps)

    def create_dream(self, model: Model) -> Dream:
        rules = [Rules(partial(check_action, self.game))] if self.assisted else []
        return Dream([*rules, model], judges=[Score()])

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        with closing(self.create_environment()) as environment:
            yield from collect_episodes(create_oracle, tasks, environment, episodes=episodes, seed=seed)


twc = partial(TextWorldExpressWorld, "twc")
"""The world of this name of the command line."""


def create_oracle(environment: TextWorldExpress, task: Task, rng: Random) -> Oracle:
    """The demonstrator of `task`: the game's own solution, whose next possible action it takes."""
    rest = iter(environment.gold_path(task))
    return lambda seen, valid: next((action for action in rest if action in valid), "look around")
