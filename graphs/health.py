"""What the figures of a training run say goes wrong: alarms of one sentence each, and when a policy has collapsed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Row = Mapping[str, float | int | str | None]
"""The metrics of an iteration, as the training graph records them."""

WINDOW = 3
"""Iterations over whose mean a figure is judged: a single one says little."""


class Alarm(NamedTuple):
    """Something that goes wrong, told when it begins."""

    name: str
    text: str


def check_health(rows: Sequence[Row]) -> list[Alarm]:
    """What is wrong at the last of these iterations, which are of one run, in order.

    Each figure is the mean of the last `WINDOW` iterations, before which there is no alarm; the entropy is held against that of
    the first `WINDOW`.
    """
    if len(rows) < WINDOW:
        return []
    invalid, kl, clipped, entropy = (
        _mean(rows[-WINDOW:], name) for name in ("invalid_action_share", "kl", "clip_ratio/region_mean", "entropy")
    )
    first, found = _mean(rows[:WINDOW], "entropy"), {}
    if invalid is not None and invalid > 0.5:
        found["invalid"] = f"{invalid:.0%} of the actions are invalid: show the policy demonstrations first (train_base)"
    if kl is not None and kl > 0.5:
        found["kl"] = f"KL of {kl:.2f} a token, the policy is far from where it began: a larger beta or a lower learning_rate"
    if clipped is not None and clipped > 0.3:
        found["clipped"] = f"{clipped:.0%} of the tokens are clipped and teach nothing: a lower learning_rate or fewer updates"
    if entropy is not None and first is not None and entropy < 0.1 * first:
        fell = f"entropy fell from {first:.3f} to {entropy:.3f}, so a task's episodes will soon be the same"
        found["entropy"] = f"{fell}: a lower learning_rate, a larger beta, or harder tasks"
    if entropy is not None and first is not None and entropy > 3 * first + 0.1:
        rose = f"entropy rose from {first:.2f} to {entropy:.2f}, so the policy becomes noise"
        found["noise"] = f"{rose}: a lower learning_rate or a larger beta"
    return [Alarm(name, text) for name, text in found.items()]


def is_collapsed(rows: Sequence[Row], window: int) -> bool:
    """Whether the mean reward of the last `window` iterations is below a quarter of the best of any `window` before them.

    Only iterations that were played where the last one was (dream or reality) are compared; a best below 0.1 says nothing.
    """
    alike = [row for row in rows if ("real_steps" in row) == ("real_steps" in rows[-1])]
    rewards = [float(row.get("reward_mean") or 0) for row in alike]
    means = [sum(rewards[end - window : end]) / window for end in range(window, len(rewards) + 1)]
    before = means[:-window]
    return bool(before) and max(before) >= 0.1 and means[-1] < max(before) / 4


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """Over the iterations that have the figure: a skipped update has none."""
    found = [float(value) for row in rows if (value := row.get(name)) is not None]
    return sum(found) / len(found) if found else None
