"""The curriculum: tasks that are hard but solvable (paper, section 4, "curriculum task generator")."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from statistics import pvariance

from dreamgym_lg.curriculum.task_generator import TaskGenerator
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Task, Trajectory, is_unanswered, lacks_answers

CheckTask = Callable[[Task], str | None]
"""generated task -> one word for the reason against training on it, or None. Refusals are counted by this word."""

_SEEDS = 8
"""The paper's m: maximum number of tasks with the highest V to vary."""
_TRIES = 4
"""Maximum attempts at a variation. Then an original task takes its place."""


def value(rewards: Sequence[float]) -> float:
    """V of a task: the population variance of its group's rewards (paper, equation for V).

    0 for a uniform group (no gradient either); at most 0.25 for rewards in [0, 1].
    """
    return float(pvariance(rewards)) if rewards else 0.0


class Curriculum:
    """Picks the tasks of an iteration: original ones and variations of high-V ones.

    Only tasks of the last iteration are varied, as in the paper. A task whose calls the dream may not answer (`lacks_answers`)
    is picked again only if too few others are left. The choice depends only on `seed`, the iteration and the values so far, so
    that a resumed run makes the same one.

    Args:
        task_generator: Writes the variations; None: there are none.
        check_task: Refuses generated tasks.
        synthetic_share: Largest share of variations in an iteration, 0 to 1: the paper's lambda.

    Raises `ConfigurationError` without a task, for an evaluation task and for a share out of range.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        task_generator: TaskGenerator | None = None,
        check_task: CheckTask = lambda task: None,
        synthetic_share: float = 0.25,
        seed: int = 0,
    ) -> None:
        if not tasks:
            raise ConfigurationError("a curriculum needs at least one task")
        if not 0 <= synthetic_share <= 1:
            raise ConfigurationError(f"synthetic_share={synthetic_share} must lie in [0, 1]")
        if evaluation := [task.id for task in tasks if task.split != "train"]:
            raise ConfigurationError(f"evaluation tasks must not be trained on: {', '.join(evaluation[:3])}")
        self._tasks, self._original = {task.id: task for task in tasks}, list(tasks)
        self._generate, self._check = task_generator, check_task
        self._share, self._seed = synthetic_share, seed
        self.values: dict[str, float] = {}
        """V of each task of the newest iteration that was trained on."""
        self._episodes: dict[str, list[Trajectory]] = {}
        self._newest, self._unanswered = -1, set[str]()
        self._counts: Counter[str] = Counter()

    def __getitem__(self, task_id: str) -> Task:
        return self._tasks[task_id]

    def restore(self, tasks: Iterable[Task], episodes: Iterable[Trajectory]) -> None:
        """Restore a run's curriculum. Args: `tasks`, original and synthetic; `episodes`, trained on so far."""
        self._tasks.update({task.id: task for task in tasks})
        groups: dict[tuple[int, str], list[Trajectory]] = {}
        for episode in sorted(episodes, key=lambda episode: episode.rollout_index):
            if episode.error is None or is_unanswered(episode.error):
                groups.setdefault((episode.iteration, episode.task.id), []).append(episode)
        for key in sorted(groups):
            self.update(groups[key])

    def update(self, group: Sequence[Trajectory]) -> float:
        """Store a group's played episodes, drop those of earlier iterations and return its V."""
        task_id, iteration = group[0].task.id, group[0].iteration
        if iteration > self._newest:
            self._newest, self.values, self._episodes = iteration, {}, {}
        if lacks_answers(group):
            self._unanswered.add(task_id)
        played = [replace(episode, segments=()) for episode in group if episode.error is None]
        variance = value([episode.reward for episode in played])
        if iteration == self._newest:
            self.values[task_id], self._episodes[task_id] = variance, played
        return variance

    def propose(self, rng: random.Random) -> Task | None:
        """A variation of one of the last iteration's tasks with the highest V. None if there is none.

        If no task had variance, solved tasks are varied: a variation may be harder.
        """
        ranked = sorted((v, task_id) for task_id, v in self.values.items() if task_id in self._tasks)
        with_variance = [task_id for v, task_id in ranked if v > 0][-_SEEDS:]
        seeds = with_variance or [task_id for _, task_id in ranked if any(each.success for each in self._episodes[task_id])]
        if self._generate is None or not seeds:
            return None
        episodes = [episode for task_id in reversed(seeds) for episode in self._episodes[task_id]]
        for _ in range(_TRIES):
            task = self._generate(self._tasks[rng.choice(seeds)], episodes, rng)
            if (reason := "not_written" if task is None else self._check(task)) is None:
                return task
            self._counts[f"refused_{reason}"] += 1
        return None

    def sample(self, n: int, *, iteration: int, real: bool = False) -> list[Task]:
        """At most n distinct tasks, up to `synthetic_share` of them variations. `real` ones are neither varied nor drawn."""
        rng = random.Random(f"{self._seed}/{iteration}")
        proposals = [self.propose(rng) for _ in range(0 if real else int(n * self._share))]
        variations = {task.id: task for task in proposals if task is not None}
        self._tasks |= variations
        self._counts["generated_tasks"] += len(variations)
        originals = [task for task in self._original if task.id not in variations and not (real and task.drawn)]
        answered = [task for task in originals if task.id not in self._unanswered]
        if len(variations) + len(answered) < n:
            answered = originals
        return [*variations.values(), *rng.sample(answered, min(n - len(variations), len(answered)))]

    def sample_more(self, n: int, *, iteration: int, used: Collection[str], real: bool = False) -> list[Task]:
        """At most n further original tasks for an iteration; `real`, none that is drawn. Args: `used`, ids of its tasks."""
        excluded = {*used, *self._unanswered}
        rest = [task for task in self._original if task.id not in excluded and not (real and task.drawn)]
        return random.Random(f"{self._seed}/{iteration}/{len(used)}").sample(rest, min(n, len(rest)))

    def pop_metrics(self) -> dict[str, int]:
        """Counts since the last call: `generated_tasks`, and `refused_<reason>` of refused ones."""
        counts, self._counts = dict(self._counts), Counter()
        return counts
