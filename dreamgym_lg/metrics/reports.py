"""Reports of a training run: stable metric names for trackers, and the cost of its hosted models."""

from collections.abc import Mapping, Sequence

from dreamgym_lg.hosted import Hosted, Usage
from dreamgym_lg.metrics.health import Row
from dreamgym_lg.types import Source

ROLLOUTS: Mapping[str, str] = {
    "success": "train_success",
    "reward": "reward_mean",
    "steps": "steps_mean",
    "invalid_actions": "invalid_action_share",
    "cut_replies": "cut_reply_share",
    "failed_episodes": "failed_episodes",
    "uniform_groups": "uniform_groups",
    "synthetic_tasks": "synthetic_share",
}
"""Of the episodes that train the policy: under `dream/` where the dream played them, under `real/` where reality did."""

METRICS: Mapping[str, str] = {
    "validation/gap": "eval_gap",
    "validation/gap_low": "eval_gap_low",
    "validation/gap_high": "eval_gap_high",
    "validation/wrong_rewards": "eval_reward_errors",
    "policy/clipped": "clip_ratio/region_mean",
    "curriculum/value": "curriculum_value",
    "curriculum/generated_tasks": "generated_tasks",
    "real/steps_spent": "real_steps",
    "seconds/update": "seconds_update_policy",
    **{
        f"policy/{name}": name
        for name in ("loss", "kl", "entropy", "grad_norm", "learning_rate", "trainable_tokens", "skipped")
    },
    **{f"seconds/{name}": f"seconds_{name}" for name in ("curriculum", "rollout", "evaluate", "refresh")},
    **{f"hosted/{name}": f"hosted_{name}" for name in ("calls", "failed", "input_tokens", "output_tokens", "cost")},
    **{f"hosted/total_{name}": f"hosted_total_{name}" for name in ("calls", "tokens", "cost")},
    **{
        f"alarm/{name}": f"alarm_{name}" for name in ("invalid", "cut", "kl", "clipped", "entropy", "noise", "split", "sampler")
    },
}
"""All others; docs/how-to/metrics.md says what each is. What an iteration does not have is not shown at its step."""

RATES: Mapping[str, str] = {"validation/dream_success": "eval_dream", "validation/real_success": "eval_real"}
"""Successes of so many episodes, by the beginning of the two names in the replay buffer."""


def reported_metrics(row: Row, source: Source) -> dict[str, float]:
    """The metrics of one iteration as trackers show them. Args: `source`, who played its training episodes."""
    place = "dream" if source == "synthetic" else "real"
    values = {f"{place}/{name}": row.get(recorded) for name, recorded in ROLLOUTS.items()}
    values |= {name: row.get(recorded) for name, recorded in METRICS.items()}
    for name, prefix in RATES.items():
        successes, episodes = row.get(f"{prefix}_successes"), row.get(f"{prefix}_episodes")
        if isinstance(successes, int | float) and isinstance(episodes, int | float) and episodes:
            values[name] = successes / episodes
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


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
