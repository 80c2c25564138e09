"""Evaluations against a dream: one policy's success in dream and reality, and evaluation tasks known from training."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.splits import common_entities, entities
from dreamgym_lg.statistics import Rate, intervals_apart, normalised, rate
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Trajectory

_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy at one moment, on the same tasks in dream and reality."""

    policy: str
    iteration: int
    real: Rate
    dream: Rate

    @property
    def gap(self) -> float:
        """Dream minus real success."""
        return self.dream.value - self.real.value

    @property
    def apart(self) -> bool:
        return intervals_apart((self.real.low, self.real.high), (self.dream.low, self.dream.high))


def compare_success_rates(trajectories: Sequence[Trajectory]) -> tuple[Comparison, ...]:
    """Compare success rates of policies recorded both in the dream and in reality.

    Runs belong together that have the same name but for a part `real` or `dream`, the same iteration and policy version.
    Only tasks that were played in both count; a failed rollout counts as no success.
    """
    policies: dict[tuple[str, int, str], dict[bool, list[Trajectory]]] = defaultdict(lambda: {True: [], False: []})
    for each in trajectories:
        if each.source != "offline":
            policy = "/".join(part for part in each.run.split("/") if part.partition("@")[0] not in ("real", "dream"))
            policies[policy, each.iteration, each.policy_version][each.source == "real"].append(each)
    rows = []
    for (policy, iteration, version), episodes in policies.items():
        shared = {each.task.id for each in episodes[True]} & {each.task.id for each in episodes[False]}
        real, dream = (rate(e.success for e in episodes[place] if e.task.id in shared) for place in (True, False))
        if real and dream:
            name = " ".join(part for part in (policy, version) if part)
            rows.append(Comparison(policy=name, iteration=iteration, real=real, dream=dream))
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """An evaluation task and a training task about the same."""

    evaluation: str
    training: str
    shared: str
    """An entity that both name, or their words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """Evaluation tasks that share an entity (`splits.entities`) or their words with a training task."""

    evaluation_tasks: int
    training_tasks: int
    tasks_shared: Rate | None
    overlaps: tuple[Overlap, ...]
    """At most 20."""


def find_leaks(buffer: ReplayBuffer | None) -> Leaks | None:
    """Search a buffer's training tasks for what its evaluation tasks name. None without one.

    An entity that many tasks name (`splits.common_entities`) is no leak.
    """
    if buffer is None:
        return None
    training = buffer.tasks(split="train", origin="real")
    held_out = [*buffer.tasks(split="validation"), *buffer.tasks(split="test")]
    named = {task.id: entities(first_observation(task)) for task in (*training, *held_out)}
    common, owners = common_entities(list(named.values())), dict[str, str]()
    for task in training:
        owners |= dict.fromkeys((*(named[task.id] - common), _words(task.instruction, task.observation)), task.id)
    overlaps = []
    for task in held_out:
        keys = (_words(task.instruction, task.observation), *sorted(named[task.id] - common))
        if (key := next((key for key in keys if key in owners), None)) is not None:
            overlaps.append(Overlap(evaluation=task.id, training=owners[key], shared=key[:300]))
    return Leaks(
        evaluation_tasks=len(held_out),
        training_tasks=len(training),
        tasks_shared=rate(task.id in {each.evaluation for each in overlaps} for task in held_out) if training else None,
        overlaps=tuple(overlaps[:_LISTED]),
    )


def _words(instruction: str, observation: str) -> str:
    return f"{normalised(instruction)} / {normalised(observation)}"
