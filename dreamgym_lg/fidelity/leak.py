"""The leak check: evaluation tasks that have a near-duplicate among the training tasks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.hashed_words import phi
from dreamgym_lg.statistics import Rate, normalised, rate
from dreamgym_lg.types import Task

NEAR = 0.98
"""Cosine of retrieval's own vectors (hashed words and word pairs) from which on two texts are near-duplicates."""
_LISTED = 20
_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """An evaluation task and the training task most like it."""

    evaluation: str
    training: str
    cosine: float
    exact: bool
    """The same words; a cosine of 1 may also be the same words in another order."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """What evaluation shares with what retrieval and training can see."""

    near: float
    """The threshold used."""
    evaluation_tasks: int
    training_tasks: int
    tasks_near: Rate | None
    tasks_exact: Rate | None
    twins: tuple[Twin, ...]
    """The nearest pairs at or above the threshold, most alike first; not more than 20."""


def find_leaks(buffer: ReplayBuffer | None, tasks: Iterable[Task] = ()) -> Leaks | None:
    """Search the training tasks for near-duplicates of evaluation tasks; None without a replay buffer.

    Args: `tasks`, evaluation tasks beyond the buffer's.
    """
    if buffer is None:
        return None
    training = buffer.tasks(split="train", origin="real")
    known = [*buffer.tasks(split="validation"), *buffer.tasks(split="test"), *tasks]
    held_out = list({task.id: task for task in known if task.split != "train"}.values())
    twins = _nearest(held_out, training)
    close = sorted((twin for twin in twins if twin.cosine >= NEAR), key=lambda twin: (-twin.cosine, twin.evaluation))
    return Leaks(
        near=NEAR,
        evaluation_tasks=len(held_out),
        training_tasks=len(training),
        tasks_near=rate(twin.cosine >= NEAR for twin in twins),
        tasks_exact=rate(twin.exact for twin in twins),
        twins=tuple(close[:_LISTED]),
    )


def _texts(task: Task) -> tuple[str, str]:
    return task.observation, task.instruction


def _nearest(held_out: Sequence[Task], training: Sequence[Task]) -> list[Twin]:
    """For each evaluation task the training task most like it."""
    if not held_out or not training:
        return []
    words = {tuple(map(normalised, _texts(task))): task.id for task in reversed(training)}
    twins = []
    for start in range(0, len(held_out), _ROWS):
        part = held_out[start : start + _ROWS]
        for task, row in zip(part, _alike(part, training), strict=True):
            exact = words.get(tuple(map(normalised, _texts(task))))
            best = int(np.argmax(row))
            twin, cosine = (exact, 1.0) if exact else (training[best].id, round(float(row[best]), 4))
            text = " / ".join(text for text in _texts(task) if text)
            twins.append(Twin(evaluation=task.id, training=twin, cosine=cosine, exact=exact is not None, text=text[:300]))
    return twins


def _alike(tasks: Sequence[Task], others: Sequence[Task]) -> NDArray[np.float32]:
    """The lower of two cosines, of the first observations and of the instructions: tasks of one environment share one of
    them more often than not. Two texts without words are alike."""
    lowest = np.ones((len(tasks), len(others)), np.float32)
    for half in (0, 1):
        a, b = (phi([(_texts(task)[half], "") for task in each]) for each in (tasks, others))
        wordless = ~a.any(axis=1, keepdims=True) & ~b.any(axis=1)
        lowest = np.minimum(lowest, np.where(wordless, 1, a @ b.T))
    return lowest
