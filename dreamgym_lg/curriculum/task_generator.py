"""Task generators (paper, section 4), and the checks of what they write."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import NamedTuple, Protocol

from dreamgym_lg.splits import common_entities, entities, words
from dreamgym_lg.tasks import described, first_observation
from dreamgym_lg.types import Task, Trajectory

NEAR = 0.8
"""Share of words in common (Jaccard index) from which two tasks that name the same ask the same."""


class TaskGenerator(Protocol):
    """Writes a variation of a task."""

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        """A variation of `task`, or None where there is none. Its origin is `synthetic`, its parent `task`.

        Args:
            trajectories: The last iteration's episodes of the tasks with the highest reward variance, the highest first.
                `task` is one of these tasks.
            rng: Decides every choice, so that a resumed run generates the same tasks.
        """


def variation(task: Task, text: str, *, rubric: str) -> Task:
    """A synthetic task that begins with `text` where `task` begins with its first observation.

    Args: `rubric`, how its success is judged. All else is as of `task`.
    """
    system = [message for message in task.messages if message["role"] == "system"]
    digest = sha256(f"{task.instruction}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return replace(
        task,
        id=f"{task.environment}/generated-{digest}",
        # a system prompt before it, or a game's instruction, stays
        instruction=task.instruction.replace(first_observation(task), text),
        observation=text if task.observation else "",
        messages=[*system, {"role": "user", "content": text}] if task.messages else (),
        rubric=rubric,
        origin="synthetic",
        parent_id=task.id,
        split="train",
    )


class TaskChecks:
    """Verifies generated tasks by what is recorded.

    Called with a task it returns the reason against training on it, None if there is none:

    * `known`: it is a known task in nearly the same words, about the same ids, amounts and names (`splits.entities`);
    * `held_out`: it shares one of these with an evaluation task, or is one in nearly the same words. What many tasks name
      (`splits.common_entities`) does not count;
    * `invented`: it names what occurs in no training trace, so that no lookup could answer for it;
    * `no_judge`: neither has it a rubric of its own, nor do recorded successes decide its outcome.

    Args:
        known: The tasks so far, generated ones included. A task that passes is added to them.
        evaluation: Tasks of the splits `validation` and `test`.
        trajectories: Real ones of training tasks. None: `invented` is not checked.
        judged: Whether something else than a rubric decides a task's outcome. Default: nothing does.
    """

    def __init__(
        self,
        known: Iterable[Task],
        *,
        evaluation: Iterable[Task],
        trajectories: Iterable[Trajectory] | None = None,
        judged: Callable[[Task], bool] = lambda task: False,
    ) -> None:
        self._known = {task.id: _Text.of(task) for task in known}
        self._evaluation, self._judged = [_Text.of(task) for task in evaluation], judged
        named = [text.entities for text in (*self._known.values(), *self._evaluation)]
        self._held_out = {entity for text in self._evaluation for entity in text.entities} - common_entities(named)
        self._recorded: set[str] | None = None
        if trajectories is not None:
            self._recorded = {word for each in trajectories for text in _texts(each) for word in words(text)}

    def __call__(self, task: Task) -> str | None:
        own = _Text.of(task)
        # a task under its own id is the same one, sampled again by a run that was killed before it was played
        if any(own.is_near(other) for id, other in self._known.items() if id != task.id):
            return "known"
        if own.entities & self._held_out or any(map(own.is_near, self._evaluation)):
            return "held_out"
        if self._recorded is not None and not self._recorded.issuperset(own.named):
            return "invented"
        if not task.rubric.strip() and not self._judged(task):
            return "no_judge"
        self._known[task.id] = own
        return None


class _Text(NamedTuple):
    """The beginning of a task."""

    words: frozenset[str]
    entities: frozenset[str]

    @classmethod
    def of(cls, task: Task) -> "_Text":
        text = first_observation(task)
        return cls(frozenset(words(text)), entities(text))

    @property
    def named(self) -> set[str]:
        """The words of the entities."""
        return {word for entity in self.entities for word in entity.split(" ")}

    def is_near(self, other: "_Text") -> bool:
        """True if few words differ, and none that names something."""
        differing = self.words ^ other.words
        return len(differing) <= (1 - NEAR) * len(self.words | other.words) and differing.isdisjoint(self.named | other.named)


def _texts(trajectory: Trajectory) -> Iterable[str]:
    steps = (text for step in trajectory.steps for text in (step.action, step.next_observation))
    return (described(trajectory.task), first_observation(trajectory.task), *steps)
