"""Costs of a training run's hosted models: an estimate of the rest, and the total so far."""

from collections.abc import Sequence

from dreamgym_lg.hosted import Hosted, Usage
from dreamgym_lg.metrics.health import Row


def estimate_rest(hosted: Hosted, spent: Usage, *, played: int, left: int) -> str:
    """A sentence with the estimated cost of the episodes left. Args: `spent`, on the `played` ones."""
    rest = {name: value * left / played for name, value in spent.limited.items()}
    ends = [
        f"max_{name}={limit:g}"
        for name, limit in hosted.limits.items()
        if limit is not None and hosted.usage.limited[name] + rest[name] > limit
    ]
    money = f"cost {rest['cost']:,.2f}" if any(hosted.prices) else "what that costs is told with Hosted(prices=(input, output))"
    return (
        f"{played} episodes took {spent.calls:,} calls of the hosted experience model; the {left:,} that are left, evaluations "
        f"included, will take about {rest['calls']:,.0f} calls and {rest['tokens']:,.0f} tokens, and {money}"
        + (f". The run will reach {' and '.join(ends)} before its end" if ends else "")
    )


def add_totals(earlier: Sequence[Row], now: Row) -> dict[str, float]:
    """The totals of a run: over the recorded metrics of `earlier` iterations and those of this one."""

    def total(*names: str) -> float:
        return sum(float(row.get(name) or 0) for row in (*earlier, now) for name in names)

    return {
        "hosted_total_calls": total("hosted_calls"),
        "hosted_total_tokens": total("hosted_input_tokens", "hosted_output_tokens"),
        "hosted_total_cost": total("hosted_cost"),
    }
