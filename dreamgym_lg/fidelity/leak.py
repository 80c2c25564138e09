"""The leak check: evaluation tasks and steps that have a near-duplicate among what retrieval can show."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.hashed_words import phi
from dreamgym_lg.statistics import Rate, StepRate, normalised, rate, step_rate
from dreamgym_lg.types import Step, Task

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
    """What evaluation shares with what retrieval (and training) can see."""

    near: float
    """The threshold used."""
    evaluation_tasks: int
    training_tasks: int
    tasks_near: Rate | None
    tasks_exact: Rate | None
    twins: tuple[Twin, ...]
    """The nearest pairs at or above the threshold, most alike first; not more than 20."""
    steps_near: StepRate | None
    """Measured steps whose nearest retrievable step, of another task, is a near-duplicate in observation and action."""
    steps_answered: StepRate | None
    """Measured steps whose nearest retrievable step shows the very next observation: copying it would be right."""


def find_leaks(
    buffer: ReplayBuffer | None,
    evaluated: Sequence[tuple[Task, Sequence[Step]]],
    tasks: Sequence[Task] = (),
    *,
    near: float = NEAR,
) -> Leaks | None:
    """Search the replay buffer for near-duplicates of evaluation tasks and steps; None without a replay buffer.

    Args:
        evaluated: For each measured episode its task and those of its steps that the experience model was asked about.
        tasks: Evaluation tasks beyond those and the buffer's.
        near: Cosine, up to 1, from which on two texts are near-duplicates.
    """
    if buffer is None:
        return None
    training = buffer.tasks(split="train", origin="real")
    given = [*buffer.tasks(split="validation"), *buffer.tasks(split="test"), *tasks, *(task for task, _ in evaluated)]
    held_out = list({task.id: task for task in given if task.split != "train"}.values())
    twins = _nearest(held_out, training)
    close = sorted((twin for twin in twins if twin.cosine >= near), key=lambda twin: (-twin.cosine, twin.evaluation))
    searched = evaluated if buffer.count("steps") else ()
    shared = [[_retrievable(buffer, task, step, near) for step in steps] for task, steps in searched]
    return Leaks(
        near=near,
        evaluation_tasks=len(held_out),
        training_tasks=len(training),
        tasks_near=rate(twin.cosine >= near for twin in twins),
        tasks_exact=rate(twin.exact for twin in twins),
        twins=tuple(close[:_LISTED]),
        steps_near=step_rate([same for same, _ in episode] for episode in shared),
        steps_answered=step_rate([answer for _, answer in episode] for episode in shared),
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


def _retrievable(buffer: ReplayBuffer, task: Task, step: Step, near: float) -> tuple[bool, bool]:
    """Whether the nearest step of another task is a near-duplicate, and whether it shows what really followed."""
    found = buffer.similar(step.observation, step.action, k=1, exclude_task=task.id)
    if not found:
        return False, False
    a, b = phi([(step.observation, step.action), (found[0].observation, found[0].action)])
    return float(a @ b) >= near, normalised(found[0].next_observation) == normalised(step.next_observation)
