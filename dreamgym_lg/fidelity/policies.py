"""The same policy in dream and reality: how much a dream flatters."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dreamgym_lg.statistics import Rate, intervals_apart, rate
from dreamgym_lg.types import Trajectory

_SIDES = {"real", "dream"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy at one moment, on the same tasks in dream and reality."""

    policy: str
    iteration: int
    real: Rate
    dream: Rate

    @property
    def gap(self) -> float:
        """Dream minus real: how much the dream flatters."""
        return self.dream.value - self.real.value

    @property
    def apart(self) -> bool:
        return intervals_apart((self.real.low, self.real.high), (self.dream.low, self.dream.high))


def compare_success_rates(trajectories: Sequence[Trajectory]) -> tuple[Comparison, ...]:
    """Compare the success rates of policies that were recorded both in the dream and in the real environment.

    Runs belong together that have the same name but for a part `real` or `dream`, the same iteration and policy version.
    Only tasks that were played in both count; a failed rollout counts as no success.
    """
    policies: dict[tuple[str, int, str], dict[bool, list[Trajectory]]] = defaultdict(lambda: {True: [], False: []})
    for each in trajectories:
        if each.source != "offline":
            key = _policy(each.run), each.iteration, each.policy_version
            policies[key][each.source == "real"].append(each)
    rows = []
    for (policy, iteration, version), worlds in policies.items():
        shared = {each.task.id for each in worlds[True]} & {each.task.id for each in worlds[False]}
        real, dream = (rate(e.success for e in worlds[world] if e.task.id in shared) for world in (True, False))
        if real and dream:
            name = " ".join(part for part in (policy, version) if part)
            rows.append(Comparison(policy=name, iteration=iteration, real=real, dream=dream))
    return tuple(rows)


def _policy(run: str) -> str:
    return "/".join(part for part in run.split("/") if part.partition("@")[0] not in _SIDES)
