"""WebShop as the world of an experiment, and the scripted policies that collect its traces."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.text_games.game import Rules, Score, digest
from dreamgym_lg.integrations.text_games.scripted_policies import Oracle, collect_episodes
from dreamgym_lg.integrations.webshop.data import Goal, load_tasks
from dreamgym_lg.integrations.webshop.environment import WebShopEnvironment
from dreamgym_lg.integrations.webshop.pages import PER_PAGE, check_action
from dreamgym_lg.types import Split, Task, Trajectory


class WebShop(World):
    """The goals of WebShop by the official splits. Reward is the score of the purchase, success a score of 1.

    Args:
        products: As `data.load_tasks`. Default: $WEBSHOP_DATA, else ~/.cache/webshop.
        human: Instructions that people wrote, in place of those made from products.
        max_steps: As `WebShopEnvironment`.
    """

    name = "webshop"
    settings = Settings(
        episodes={"demonstration": 100, "noisy": 200, "random": 1800},
        retrieved=1,
        experience_tokens=1024,  # a page of results has ten products
        base_steps=50,
        policy_tokens=128,  # a search repeats most of the instruction
        batch_size=8,
        num_tasks=4,
        num_generations=6,
        synthetic_share=0.0,
        proof_tasks=500,
    )
    assisted = True

    def __init__(self, products: str | Path | None = None, *, human: bool = False, max_steps: int = 15) -> None:
        self.products = products or os.environ.get("WEBSHOP_DATA") or Path("~/.cache/webshop")
        self.human, self.max_steps = human, max_steps
        self.arguments = {"products": str(self.products), "human": human, "max_steps": max_steps}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`, in an order that mixes products and splits."""
        mixed = sorted(load_tasks(self.products, human=self.human), key=lambda task: digest("webshop", task.id))[:limit]
        return [task for task in mixed if task.split == split]

    def create_environment(self) -> WebShopEnvironment:
        return WebShopEnvironment(self.products, max_steps=self.max_steps)

    def create_dream(self, model: Model) -> Dream:
        return Dream([Rules(check_action), model], judges=[Score()])

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        with closing(self.create_environment()) as environment:
            yield from collect_episodes(create_oracle, tasks, environment, episodes=episodes, seed=seed)


# --- Scripted policies -----------------------------------------------------------------------------------------------

_LIMIT = re.compile(r", and price lower than ([\d.]+) dollars$")


def search_words(instruction: str) -> str:
    """An instruction without `Find me` and the price."""
    return _LIMIT.sub("", instruction).removeprefix("Find me ")


def create_oracle(environment: WebShopEnvironment, task: Task, rng: Random) -> Oracle:
    """The demonstrator of `task`. It finds the product of the goal, chooses its options and buys it, after any detour.

    It searches for the instruction's words, then for the title. 4 of 100 purchases earn less than 1: the official reward does
    not know some of its own options.
    """

    def right(seen: Sequence[str], valid: Sequence[str]) -> str:
        visit = environment.visit
        assert visit is not None, "the oracle is asked in an episode"
        target, open_target = visit.target, f"click[{visit.target.asin.lower()}]"
        if open_target in valid:
            return open_target
        if visit.product == target:
            chosen = visit.options.values()
            missing = [f"click[{value}]" for value in _values(visit.goal) if value not in chosen]
            action = next((click for click in missing if click in valid), "click[buy now]")
            return action if visit.kind == "item" else "click[< prev]"
        among = target in visit.results
        if visit.kind == "results" and among and visit.number <= visit.results.index(target) // PER_PAGE:
            return "click[next >]"
        return f"search[{search_words(task.instruction) if among or not visit.results else target.title}]"

    return right


def _values(goal: Goal) -> list[str]:
    return [option if isinstance(option, str) else option[1] for option in goal.options]
