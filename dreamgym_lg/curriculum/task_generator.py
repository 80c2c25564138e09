"""Task generation: variations of the tasks with the highest reward variance (paper, section 4), and what is checked of them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import fsum, log
from random import Random
from typing import Any, NamedTuple, Protocol

from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Task, Trajectory

NEAR_KNOWN = 0.9
"""`Overlap` from which a generated task is one that is known already."""
NEAR_EVALUATION = 0.6
"""`Overlap` from which it is too near to an evaluation task: two tasks about the same order, say, in two wordings."""


class TaskGenerator(Protocol):
    """Writes a variation of a task."""

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        """A variation of `task`, or None where there is none. Its origin is `synthetic`, its parent `task`.

        Args:
            trajectories: The last iteration's episodes of the tasks with the highest reward variance, the highest first.
                `task` is one of these tasks.
            rng: Decides every choice, so that a resumed run generates the same tasks.
        """


def variation(
    task: Task, text: str, *, rubric: str, generated: Mapping[str, str], metadata: Mapping[str, Any] | None = None
) -> Task:
    """A synthetic task that begins with `text` where `task` begins with its first observation.

    Args:
        rubric: How its success is judged.
        generated: What wrote it (`generator`) and why it was taken (`why`), stored in its metadata.
        metadata: What the environment needs to build its world. Default: the seed task's.
    """
    words = first_observation(task)
    kept = {**(task.metadata if metadata is None else metadata), "rubric": rubric, "generated": dict(generated)}
    instruction = task.instruction.replace(words, text)  # a system prompt before it, or a game's instruction, stays
    if "observation" in task.metadata:
        kept["observation"] = text
    digest = sha256(f"{task.instruction}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Task(
        id=f"{task.environment}/generated-{digest}",
        instruction=instruction,
        environment=task.environment,
        metadata=kept,
        origin="synthetic",
        parent_id=task.id,
    )


# --- checks -----------------------------------------------------------------------------------------------------------------


class Overlap:
    """How much two texts share: the Jaccard index of their words, each weighted by its rarity among `texts`; 0 to 1.

    An id or a name counts for much, the words of a recurring phrase for little: two requests in the same words about two
    orders are far from each other, two about the same order in other words are near.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        found = [words(text) for text in texts]
        counts = Counter(word for each in found for word in each)
        self._unknown = log(1 + len(found))
        self._weights = {word: log((1 + len(found)) / (1 + n)) for word, n in counts.items()}

    def __call__(self, one: frozenset[str], other: frozenset[str]) -> float:
        if one == other:
            return 1.0
        shared = self._weight(one & other)
        return shared / (shared + self._weight(one ^ other)) if shared else 0.0

    def _weight(self, chosen: Iterable[str]) -> float:
        return fsum(self._weights.get(word, self._unknown) for word in chosen)  # the same whatever the order of a set


class TaskChecks:
    """Refuses generated tasks that are not new, near an evaluation task, beyond the traces, or without a rubric.

    Called with a task it returns why it is refused, None if it is not:

    * `known`: equal or nearly equal (`NEAR_KNOWN`) to a known task,
    * `near_evaluation`: near (`NEAR_EVALUATION`) to an evaluation task,
    * `unknown_values`: it names an id, number, date or name that occurs in no trace, so that no tool could answer for it,
    * `no_rubric`: without `metadata["rubric"]` its outcome would be judged by a general one.

    Two tasks that both name something (an id, a date, a name) and nothing in common are never near: the same words of another
    customer. Ids have their digits in common, however they are written (`A-17`, `a17`); a customer who is named by her address
    here and by her number there is not recognised.

    Args:
        known: The tasks so far, generated ones included. A task that is refused for nothing is added to them.
        evaluation: Tasks of the splits `validation` and `test`.
        trajectories: Real ones of training tasks: what they name is what there is. None: values are not checked.
    """

    def __init__(
        self, known: Iterable[Task], *, evaluation: Iterable[Task], trajectories: Iterable[Trajectory] | None = None
    ) -> None:
        self._known = {task.id: _Text.of(task) for task in known}
        self._evaluation = [_Text.of(task) for task in evaluation]
        self._overlap = Overlap(" ".join(each.words) for each in (*self._known.values(), *self._evaluation))
        self._named: set[str] | None = None
        if trajectories is not None:
            self._named = {word for trajectory in trajectories for text in _texts(trajectory) for word in words(text)}

    def __call__(self, task: Task) -> str | None:
        own = _Text.of(task)
        # a task under its own id is the same one, sampled again by a run that was killed before it was played
        if any(self._near(own, other, NEAR_KNOWN) for id, other in self._known.items() if id != task.id):
            return "known"
        if any(self._near(own, other, NEAR_EVALUATION) for other in self._evaluation):
            return "near_evaluation"
        if self._named is not None and not self._named.issuperset(own.named):
            return "unknown_values"
        if not str(task.metadata.get("rubric") or "").strip():
            return "no_rubric"
        self._known[task.id] = own
        return None

    def _near(self, one: "_Text", other: "_Text", least: float) -> bool:
        about_others = one.about and other.about and one.about.isdisjoint(other.about)
        return not about_others and self._overlap(one.words, other.words) >= least


class _Text(NamedTuple):
    """What a task begins with."""

    words: frozenset[str]
    named: frozenset[str]
    """`named_values`."""
    about: frozenset[str]
    """The digits of those that have some, and the others."""

    @classmethod
    def of(cls, task: Task) -> "_Text":
        text = first_observation(task)
        named = named_values(text)
        return cls(words(text), named, frozenset(re.sub(r"\D", "", word) or word for word in named))


def words(text: str) -> frozenset[str]:
    """The words of a text in lower case; an id, date, amount or address is one word."""
    return frozenset(re.findall(r"\w(?:[\w.@#/:+-]*\w)?", text.lower()))


def named_values(text: str) -> frozenset[str]:
    """Those of `words` that stand for something in particular: with a digit or an @, or capitalised within a sentence."""
    names = re.findall(r"(?<=[\w,;] )[A-Z]\w+", text)
    return frozenset(word for word in words(text) if re.search(r"[\d@]", word)) | words(" ".join(names))


def _texts(trajectory: Trajectory) -> Iterable[str]:
    yield trajectory.task.instruction
    yield first_observation(trajectory.task)
    for step in trajectory.steps:
        yield step.action
        yield step.next_observation
