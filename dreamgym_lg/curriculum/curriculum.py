"""The curriculum: tasks that are hard but solvable (paper, section 4, "curriculum task generator")."""

import random
from collections.abc import Callable, Iterable, Sequence

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Task, Trajectory

VaryTask = Callable[[Task, random.Random], Task | None]
"""Writes a variation of a task, or None where it cannot. The result's origin is `synthetic`."""


def value(rewards: Sequence[float]) -> float:
    """V of a task: the population variance of its group's rewards, `(1/n) sum (r_i - mean)^2` (paper, equation for V).

    0 for a uniform group (no gradient either); at most 0.25 for rewards in [0, 1].
    """
    if not rewards:
        return 0.0
    mean = sum(rewards) / len(rewards)
    return sum((reward - mean) ** 2 for reward in rewards) / len(rewards)


class Curriculum:
    """Picks the tasks of an iteration: original ones, and up to a share of variations of those with the highest V.

    Varied are tasks of the last iteration, as in the paper: what was hard for the policy many iterations ago says little
    about what is hard for it now. What it picks depends on `seed`, the iteration and the values known by then, so that a
    resumed run goes on as it was.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        vary_task: VaryTask | None = None,
        synthetic_share: float = 0.25,
        num_seeds: int = 8,
        seed: int = 0,
    ) -> None:
        """Args: `synthetic_share`, the paper's lambda in [0, 1]; `num_seeds`, its m: how many high-V tasks are varied."""
        if not tasks:
            raise ConfigurationError("a curriculum needs at least one task")
        if not 0 <= synthetic_share <= 1:
            raise ConfigurationError(f"synthetic_share={synthetic_share} must lie in [0, 1]")
        if evaluation := [task.id for task in tasks if task.split != "train"]:
            raise ConfigurationError(f"evaluation tasks must not be trained on: {', '.join(evaluation[:3])}")
        self._tasks = {task.id: task for task in tasks}
        self._original = list(tasks)
        self._vary_task, self._share, self._num_seeds, self._seed = vary_task, synthetic_share, num_seeds, seed
        self.values: dict[str, float] = {}
        """V of each task of the newest iteration that was trained on."""
        self._newest = -1

    def __getitem__(self, task_id: str) -> Task:
        return self._tasks[task_id]

    def restore(self, tasks: Iterable[Task], episodes: Iterable[Trajectory]) -> None:
        """Take up a run where it was: with the synthetic tasks made so far, and with the episodes trained on so far."""
        self._tasks.update({task.id: task for task in tasks})
        groups: dict[tuple[int, str], list[float]] = {}
        for episode in episodes:
            if episode.error is None:
                groups.setdefault((episode.iteration, episode.task.id), []).append(episode.reward)
        for iteration, task_id in sorted(groups):
            self.update(task_id, groups[iteration, task_id], iteration=iteration)

    def update(self, task_id: str, rewards: Sequence[float], *, iteration: int) -> float:
        """Note the rewards of a task's group, and forget the values of earlier iterations; returns its V."""
        if iteration > self._newest:
            self._newest = iteration
            self.values.clear()
        found = value(rewards)
        if iteration == self._newest:
            self.values[task_id] = found
        return found

    def propose(self, rng: random.Random) -> Task | None:
        """A variation of one of the last iteration's `num_seeds` tasks with the highest V; None if none had variance."""
        ranked = sorted((v, task_id) for task_id, v in self.values.items() if v > 0 and task_id in self._tasks)
        if self._vary_task is None or not ranked:
            return None
        _, task_id = rng.choice(ranked[-self._num_seeds :])
        return self._vary_task(self._tasks[task_id], rng)

    def sample(self, n: int, *, iteration: int) -> list[Task]:
        """n distinct tasks, at most `synthetic_share` of them synthetic (fewer while nothing can be varied)."""
        rng = random.Random(f"{self._seed}/{iteration}")
        chosen: dict[str, Task] = {}
        for _ in range(int(n * self._share)):
            if (task := self.propose(rng)) is not None:
                chosen[task.id] = task
                self._tasks[task.id] = task
        rest = [task for task in self._original if task.id not in chosen]
        for task in rng.sample(rest, min(n - len(chosen), len(rest))):
            chosen[task.id] = task
        return list(chosen.values())
