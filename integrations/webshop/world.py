"""WebShop as the world of an experiment."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.text_games.text import digest
from dreamgym_lg.integrations.webshop.data import load_tasks
from dreamgym_lg.integrations.webshop.environment import WebShopEnvironment
from dreamgym_lg.integrations.webshop.pages import check_action
from dreamgym_lg.integrations.webshop.reward import Tagger, load_tagger
from dreamgym_lg.integrations.webshop.scripted_policies import scripted_trajectories
from dreamgym_lg.types import Split, Task, Trajectory


class WebShop(World):
    """The goals of WebShop, by the official splits. An episode pays the score of its purchase; a success is a score of 1.

    Args:
        products: The folder that the official `setup.sh` fills, or a packed file (`data.load_tasks`). Default: $WEBSHOP_DATA,
            else ~/.cache/webshop.
        human: The instructions that people wrote, in place of those made from products.
        nouns: The reward's noun tagger. It is recorded with the experiment, for it moves some rewards.
        max_steps: Actions after which an episode is cut short.

    Raises `ConfigurationError` for an unknown tagger, `MissingDependency` for one that is not installed.
    """

    name = "webshop"
    settings = Settings(
        tasks=2500,
        episodes={"demonstration": 400, "noisy": 300, "random": 200, "malformed": 100, "fluent_wrong": 400},
        retrieved=2,
        retrieved_characters=1500,
        experience_tokens=1024,
        policy_tokens=96,
    )
    rewards = "score"
    full_score_completes = True

    def __init__(
        self, products: str | Path | None = None, *, human: bool = False, nouns: Tagger = "textblob", max_steps: int = 15
    ) -> None:
        load_tagger(nouns)  # a wrong one is said now
        self.products = products or os.environ.get("WEBSHOP_DATA") or Path("~/.cache/webshop")
        self.human, self.nouns, self.max_steps = human, nouns, max_steps
        self.arguments = {"products": str(self.products), "human": human, "nouns": nouns, "max_steps": max_steps}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`, in an order that mixes products and splits. Raises `ConfigurationError` without products."""
        mixed = sorted(load_tasks(self.products, human=self.human), key=lambda task: digest("webshop", task.id))
        return [task for task in mixed[:limit] if task.split == split]

    def create_environment(self) -> WebShopEnvironment:
        return WebShopEnvironment(self.products, max_steps=self.max_steps, nouns=self.nouns)

    def check_action(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        return check_action(action, observations)

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """`episodes[kind]` trajectories of each `Kind` of scripted policy."""
        with closing(self.create_environment()) as environment:
            yield from scripted_trajectories(tasks, environment, episodes=episodes, seed=seed)
