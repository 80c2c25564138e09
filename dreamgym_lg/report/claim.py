"""The claim of a proof: what the dream adds to the best policy that the same data give without it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dreamgym_lg.report.curves import read_number, read_rate
from dreamgym_lg.statistics import Rate, difference_of_rates, paired_interval

LABELS = {
    **{"start": "start, untrained", "base": "imitation of every success"},
    **{"filtered": "filtered imitation, no dream", "trained": "trained"},
}
"""The stages of a proof, in their order; those before the last need no dream."""
ENOUGH = "imitation of your traces is enough"


class Claim(NamedTuple):
    """The trained policy against the best baseline, in one mode."""

    word: str
    """`proven`, `not proven` or `worse`: by a 95 % interval of the difference that excludes 0."""
    why: str
    baseline: str = ""
    """The best baseline: `base` or `filtered`; empty where it is not known."""
    enough: bool = False
    """True where the trained policy is no better than this baseline even without its interval."""

    @property
    def verdict(self) -> str:
        return f"{self.word}: {self.why}" + (f"; {ENOUGH}" if self.enough else "")


def read_claim(result: Mapping[str, Any], mode: str = "sampled", place: str = "real") -> Claim:
    """The claim of a result (`Experiment.prove`). Args: `mode`, how actions were chosen; `place`, `real` or a panel's name.

    The difference is paired where the same tasks were played; for results without outcomes it is that of two rates.
    """
    records = _records(result, mode, place)
    rates = {policy: rate for policy, record in records.items() if (rate := read_rate(record))}
    if "base" not in rates or "trained" not in rates:
        return Claim("not proven", "imitation of your traces and the trained policy were not both played")
    imitated = read_number(result.get("filtered"))
    if imitated is None or (imitated and "filtered" not in rates):
        return Claim("not proven", "filtered imitation of the same data was not played")
    best = max((policy for policy in ("base", "filtered") if policy in rates), key=lambda policy: rates[policy].value)
    gain, low, high, how = _difference(records["trained"], records[best], rates["trained"], rates[best])
    word = "proven" if low > 0 else "worse" if high < 0 else "not proven"
    why = f"trained − {LABELS[best]} {gain:+.2f} [{low:+.2f}, {high:+.2f}], {how}"
    return Claim(word, why, best, enough=gain <= 0)


def stages(result: Mapping[str, Any], mode: str = "sampled", place: str = "real") -> dict[str, Rate]:
    """Real success after each stage, by its label. Args: as of `read_claim`."""
    rates = {LABELS[policy]: read_rate(record) for policy, record in _records(result, mode, place).items()}
    return {label: rate for label, rate in rates.items() if rate}


def _records(result: Mapping[str, Any], mode: str, place: str) -> dict[str, Mapping[str, Any]]:
    within = result.get("real") if place == "real" else (result.get("panels") or {}).get(place)
    return {policy: ((within or {}).get(policy) or {}).get(mode) or {} for policy in LABELS}


def _difference(
    first: Mapping[str, Any], second: Mapping[str, Any], rate: Rate, other: Rate
) -> tuple[float, float, float, str]:
    """First minus second success, its 95 % interval, and how it was compared."""
    ours, theirs = first.get("outcomes") or {}, second.get("outcomes") or {}
    if pairs := [(bool(ours[task]), bool(theirs[task])) for task in ours if task in theirs]:
        gain = sum(one - another for one, another in pairs) / len(pairs)
        return gain, *paired_interval(pairs), f"paired on {len(pairs)} tasks"
    return rate.value - other.value, *difference_of_rates(rate, other), "unpaired"
