"""The result of measuring a dream: groups of real trajectories, comparisons and conclusions."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple

from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.fidelity.leak import Leaks
from dreamgym_lg.fidelity.policies import Comparison
from dreamgym_lg.fidelity.rubric import Rubric
from dreamgym_lg.fidelity.steps import Drift, OneStep
from dreamgym_lg.statistics import Mean, Rate, StepRate

Level = Literal["bad", "watch", "good"]


class Conclusion(NamedTuple):
    """One sentence of a fidelity report, with how good or bad its news are."""

    level: Level
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One kind of real trajectories, as the dream answers them."""

    name: str
    episodes: int
    of: int
    """Episodes of this kind there were; `episodes` of them were drawn."""
    rewarded: bool
    """Whether any of these steps really had a reward other than 0. If none had, always predicting 0 is right without merit."""
    one_step: OneStep
    drift: Drift


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How far a dream can be trusted; a figure that was not measured is None or empty, never a number."""

    experience_model: str
    version: str
    retrieved: int
    """Demonstrations shown with every step."""
    retrieves: bool
    """Whether there is a real transition of a train task to retrieve."""
    left_out: int
    """Real trajectories that failed to be played or have no step."""
    groups: tuple[Group, ...]
    """One for each kind of real trajectories; empty without one."""
    comparisons: tuple[Comparison, ...]
    judgement: Judgement | None
    """The dream's verdicts on recorded episodes."""
    rubric: Rubric | None
    leaks: Leaks | None
    notes: tuple[str, ...]
    conclusions: tuple[Conclusion, ...] = ()
    """What to read first, worst first; `measure` draws them from all the rest."""

    @property
    def grounded(self) -> bool:
        """Whether there was a real trajectory to measure against."""
        return bool(self.groups)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable: a rate as successes, n, value, low and high (and of how many episodes, where n are steps); None
        for what was not measured."""
        return {"grounded": self.grounded, **_plain(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Rate):
        return {"successes": value.successes, "n": value.episodes, "value": value.value, "low": value.low, "high": value.high}
    if isinstance(value, StepRate):
        counts = {"successes": value.successes, "n": value.steps, "episodes": value.episodes}
        return {**counts, "value": value.value, "low": value.low, "high": value.high}
    if isinstance(value, (Mean, Conclusion)):
        return value._asdict()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
