"""WebShop as the world of an experiment."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.text_games.dream import Rules, Score
from dreamgym_lg.integrations.text_games.text import digest
from dreamgym_lg.integrations.webshop.data import load_tasks
from dreamgym_lg.integrations.webshop.environment import WebShopEnvironment
from dreamgym_lg.integrations.webshop.pages import check_action, compact, first_page
from dreamgym_lg.integrations.webshop.recorded_shop import RecordedShop, ShopScore, as_taught, purchase
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
        compact: Whether to show pages in their short form (`pages.compact`): an episode of the demonstrator is 0.9 thousand
            tokens of the small base in place of 3.2, of which that model takes 4.1 at most.

    Raises `ConfigurationError` for an unknown tagger, `MissingDependency` for one that is not installed.
    """

    name = "webshop"
    settings = Settings(
        episodes={"demonstration": 100, "noisy": 200, "random": 300, "fluent_wrong": 1500},
        retrieved=0,  # the experience model is asked about purchases alone
        experience_steps=120,
        experience_tokens=48,
        base_steps=50,
        policy_tokens=128,  # a search repeats most of the instruction
        batch_size=8,
        num_tasks=4,
        num_generations=6,
        synthetic_share=0.0,
        proof_tasks=500,
    )
    assisted = True

    def __init__(
        self,
        products: str | Path | None = None,
        *,
        human: bool = False,
        nouns: Tagger = "textblob",
        max_steps: int = 15,
        compact: bool = False,
    ) -> None:
        load_tagger(nouns)  # a wrong one is said now
        self.products = products or os.environ.get("WEBSHOP_DATA") or Path("~/.cache/webshop")
        self.human, self.nouns, self.max_steps, self.compact = human, nouns, max_steps, compact
        self._recorded: RecordedShop | None = None
        self.arguments = {
            "products": str(self.products),
            "human": human,
            "nouns": nouns,
            "max_steps": max_steps,
            "compact": compact,
        }

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`, in an order that mixes products and splits. Raises `ConfigurationError` without products."""
        mixed = sorted(load_tasks(self.products, human=self.human), key=lambda task: digest("webshop", task.id))
        return [self._begun(task) for task in mixed[:limit] if task.split == split]

    def _begun(self, task: Task) -> Task:
        """The task as an episode of it begins."""
        first = first_page(task.instruction)
        return replace(task, observation=compact(first)) if self.compact else task

    def create_environment(self) -> WebShopEnvironment:
        return WebShopEnvironment(self.products, max_steps=self.max_steps, nouns=self.nouns, compact=self.compact)

    def create_dream(self, model: Model) -> Dream:
        """Pages are recorded ones (`RecordedShop`); the experience model scores the purchases that no trace made."""
        if model.replay_buffer is None:
            return Dream([Rules(self.refusal), model.viewing(purchase)], judges=[Score(completes=True)])
        self._recorded = self._recorded or RecordedShop(model.replay_buffer, compact=self.compact)
        return Dream([Rules(self.refusal), self._recorded, model.viewing(purchase)], judges=[ShopScore(self._recorded)])

    def as_taught(self, recorded: Sequence[Trajectory]) -> list[Trajectory]:
        """The purchases alone: the experience model is asked about nothing else."""
        return [reduced for each in recorded if each.steps and (reduced := as_taught(each)) is not None]

    def refusal(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        """The page again for an action that is no search and no click on it; None for any other."""
        return check_action(action, observations)

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """`episodes[kind]` trajectories of each `Kind` of scripted policy."""
        with closing(self.create_environment()) as environment:
            yield from scripted_trajectories(tasks, environment, episodes=episodes, seed=seed)
