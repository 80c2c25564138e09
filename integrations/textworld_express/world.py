"""TextWorld-Express as the world of an experiment."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import Any

from dreamgym_lg.curriculum.task_generator import TaskGenerator
from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.text_games.dream import Rules, Score
from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress, make_tasks
from dreamgym_lg.integrations.textworld_express.hidden_facts import hidden_facts
from dreamgym_lg.integrations.textworld_express.scripted_policies import scripted_trajectories
from dreamgym_lg.integrations.textworld_express.text import (
    GAMES,
    STATE_KNOWN,
    VARIED,
    Check,
    check_action,
    failed_on,
    vary_task,
)
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Split, Task, Trajectory

EPISODES = {"demonstration": 1, "random": 400, "unfinished": 1500}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "peckingorder": {  # the demo's: what about eight minutes on two cores are enough for
        "policy_tokens": 16,
        "experience_steps": 130,
        "iterations": 8,
        "evaluate_every": 8,
        "proof_tasks": 64,
        "panel_tasks": 32,
    },
    "twc": {
        "tasks": 5000,
        "episodes": {"demonstration": 60, "unfinished": 750, "unfinished_wrong": 750},  # most places are wrong for an object
        "experience_steps": 300,
    },
}
"""Settings in which a game differs from `TextWorldExpressWorld.settings`."""


class TextWorldExpressWorld(World):
    """One game: its worlds of the train fold, split by a hash of their first observation.

    The panel `unseen objects` holds worlds of the game's own test fold, which shares no object with the train fold.

    Args:
        game: One of `text.GAMES`.
        check: How much `check_action` knows, see `text.check_action`. Default: `state` for the games
            of `STATE_KNOWN`, else `names`.
        max_steps: Actions after which an episode is cut short.

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
        synthetic_share=0.5,
        stop_after_uniform=0,  # groups that all fail alike are not done: later ones of other worlds differ again
    )
    assisted = True
    context = staticmethod(hidden_facts)

    def __init__(self, game: str = "peckingorder", *, check: Check | None = None, max_steps: int = 10) -> None:
        if game not in GAMES:
            raise ConfigurationError.unknown("game", game, GAMES)
        self.game, self.max_steps = game, max_steps
        self.name = f"textworld_express/{game}"
        self.settings = replace(self.settings, **_OWN.get(game, {}))
        self.check: Check = check or ("state" if game in STATE_KNOWN else "names")
        self.arguments = {"check": self.check, "max_steps": max_steps}
        self._made: dict[range, list[Task]] = {}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`: those with different first observations among `limit` worlds (None: those of `settings`)."""
        seeds = _seeds(limit or self.settings.tasks or 0, seed)
        if seeds not in self._made:
            self._made[seeds] = self._make(seeds, "train")
        return [task for task in self._made[seeds] if task.split == split]

    def create_environment(self) -> TextWorldExpress:
        return TextWorldExpress(max_steps=self.max_steps, check=self.check)

    def create_dream(self, model: Model) -> Dream:
        """The game's own rules refuse, the experience model answers, and the game's score judges."""
        return Dream([Rules(self.refusal), model], judges=[Score(completes=True, once=True)])

    def refusal(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        """The game's answer to an action that is invalid whatever the world holds; None for any other."""
        return check_action(self.game, action, observations, check=self.check)

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """`episodes[kind]` trajectories of each `Kind` of scripted policy."""
        with closing(self.create_environment()) as environment:
            yield from scripted_trajectories(tasks, environment, episodes=episodes, seed=seed)

    def panels(self, *, limit: int, seed: int = 0) -> dict[str, list[Task]]:
        return {"unseen objects": self._make(_seeds(limit, seed), "test")}

    def task_generator(self, tasks: Sequence[Task], replay_buffer: ReplayBuffer) -> TaskGenerator | None:
        """Exchanges items of a task for those of other training tasks, but for those that its episodes failed on
        (`peckingorder` and `twc`)."""
        if self.game not in VARIED:
            return None
        seen = [task.observation for task in tasks]

        def vary(task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
            return vary_task(task, rng, seen, keep=failed_on(task, trajectories))

        return vary

    def _make(self, seeds: range, fold: str) -> list[Task]:
        with closing(self.create_environment()) as environment:
            return make_tasks(self.game, seeds, environment=environment, fold=fold)


def _seeds(count: int, seed: int) -> range:
    return range(seed * 100_000, seed * 100_000 + count)


def twc(**arguments: Any) -> TextWorldExpressWorld:
    """The world `twc` of the command line; `peckingorder` is the class itself. Args: `arguments`, of the class."""
    return TextWorldExpressWorld("twc", **arguments)
