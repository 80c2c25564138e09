"""One real environment and its worlds for all tests of this folder; a test that needs neither runs without Java."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dreamgym_lg.integrations.textworld_express.text import GAMES
from dreamgym_lg.types import Task


@pytest.fixture(scope="package")
def environment() -> Iterator[Any]:
    pytest.importorskip("textworld_express")
    from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress

    environment = TextWorldExpress()
    yield environment
    environment.close()


@pytest.fixture(scope="package")
def worlds(environment: Any) -> dict[str, list[Task]]:
    """The tasks of 200 seeds, of every split."""
    from dreamgym_lg.integrations.textworld_express.environment import make_tasks

    return {game: make_tasks(game, range(200), environment=environment) for game in ("peckingorder", "twc")}


@pytest.fixture(scope="package")
def training(worlds: dict[str, list[Task]]) -> dict[str, list[Task]]:
    return {game: [task for task in tasks if task.split == "train"] for game, tasks in worlds.items()}


@pytest.fixture(scope="package")
def world() -> Callable[..., Task]:
    """`world(game, seed=1, params=None, fold="train")`: a task that names this world."""

    def create(game: str, seed: int = 1, *, params: str | None = None, fold: str = "train") -> Task:
        metadata = {"game": game, "params": GAMES[game] if params is None else params, "fold": fold}
        return Task(id=f"{game}-{seed}", instruction="", environment=f"textworld_express/{game}", seed=seed, metadata=metadata)

    return create
