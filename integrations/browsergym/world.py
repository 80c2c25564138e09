"""MiniWoB++, WebArena and WebArena-Lite as worlds of an experiment."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.browsergym.actions import check_action
from dreamgym_lg.integrations.browsergym.browsers import Browsers
from dreamgym_lg.integrations.browsergym.data import Benchmark, load_tasks
from dreamgym_lg.integrations.browsergym.environment import BrowserGym, make_tasks
from dreamgym_lg.integrations.browsergym.scripted_policies import SOLVERS, scripted_trajectories
from dreamgym_lg.types import Split, Task, Trajectory


class BrowserGymWorld(World):
    """A benchmark of BrowserGym. Only MiniWoB++ has scripted policies to collect with; the others need recorded traces.

    WebArena-Lite is trained on the tasks of WebArena that none of its own is made from, and tested on its own 165.

    Args:
        names: Of MiniWoB++: the tasks. Default: those that `scripted_policies` solves.
        max_steps: Actions after which an episode is cut short. Default: 15, and 30 for WebArena (as its authors).
        browsers: The most browsers at a time. Default: the number of processor cores.

    Raises `ConfigurationError` for an unknown task of MiniWoB++ and names for another benchmark.
    """

    settings = Settings(
        tasks=640,
        episodes={"demonstration": 200, "noisy": 200, "random": 200, "malformed": 100},
        retrieved=1,
        retrieved_characters=600,
        policy_tokens=48,
    )

    def __init__(
        self,
        benchmark: Benchmark = "miniwob",
        *,
        names: Iterable[str] | None = None,
        max_steps: int | None = None,
        browsers: int | None = None,
    ) -> None:
        if names is not None and benchmark != "miniwob":
            raise ConfigurationError(f"names={list(names)} for {benchmark}; only tasks of miniwob are named")
        self.name = self.benchmark = benchmark
        self.names = list(SOLVERS if names is None else names)
        if benchmark == "miniwob":
            load_tasks(benchmark, names=self.names)  # an unknown one is named at once
        self.max_steps = max_steps or (15 if benchmark == "miniwob" else 30)
        self.arguments = {"max_steps": self.max_steps} | ({"names": self.names} if benchmark == "miniwob" else {})
        self._browsers = Browsers(browsers)
        self._made: dict[range, list[Task]] = {}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`. Each task of MiniWoB++ has to be opened once, with as many seeds as `limit` allows."""
        if self.benchmark == "miniwob":
            return [task for task in self._miniwob(limit or self.settings.tasks or 0, seed) if task.split == split]
        found = load_tasks(self.benchmark)
        if self.benchmark == "webarenalite":
            own = {task.metadata["webarena_id"] for task in found}
            others = [task for task in load_tasks("webarena") if int(task.metadata["task"].split(".")[1]) not in own]
            found = [task for task in others if task.split != "test"] + found
        return [task for task in found[:limit] if task.split == split]

    def create_environment(self) -> BrowserGym:
        return BrowserGym(self._browsers, max_steps=self.max_steps)

    def check_action(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        return check_action(self.benchmark, action, observations)

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """`episodes[kind]` trajectories of each `Kind` of scripted policy; `ConfigurationError` for other benchmarks."""
        if self.benchmark != "miniwob":
            super().collect(tasks, episodes, seed=seed)
        with closing(self.create_environment()) as environment:
            yield from scripted_trajectories(tasks, environment, episodes=episodes, seed=seed)

    def _miniwob(self, limit: int, seed: int) -> list[Task]:
        names = self.names[:limit]
        seeds = range(seed * 100_000, seed * 100_000 + max(1, limit // len(names)))
        if seeds not in self._made:
            with closing(self.create_environment()) as environment:
                self._made[seeds] = make_tasks(load_tasks("miniwob", names=names, seeds=seeds), environment)
        return self._made[seeds]


def webarena(**arguments: Any) -> BrowserGymWorld:
    """The world `webarena` of the command line. Args: `arguments`, of `BrowserGymWorld`."""
    return BrowserGymWorld("webarena", **arguments)


def webarenalite(**arguments: Any) -> BrowserGymWorld:
    """The world `webarenalite` of the command line. Args: `arguments`, of `BrowserGymWorld`."""
    return BrowserGymWorld("webarenalite", **arguments)
