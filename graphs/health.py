"""What the figures of a training run say goes wrong: alarms of one sentence each, and when a policy has collapsed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dreamgym_lg.types import Segment, Trajectory

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

    Each figure is the mean of the last `WINDOW` iterations, before which there is no alarm but for split episodes; the entropy
    is held against that of the first `WINDOW`.
    """
    found = _splits(rows[-1:])
    if len(rows) < WINDOW:
        return found
    invalid, kl, clipped, entropy = (
        _mean(rows[-WINDOW:], name) for name in ("invalid_action_share", "kl", "clip_ratio/region_mean", "entropy")
    )
    first, told = _mean(rows[:WINDOW], "entropy"), {}
    if invalid is not None and invalid > 0.5:
        told["invalid"] = f"{invalid:.0%} of the actions are invalid: show the policy demonstrations first (train_base)"
    if kl is not None and kl > 0.5:
        told["kl"] = f"KL of {kl:.2f} a token, the policy is far from where it began: a larger beta or a lower learning_rate"
    if clipped is not None and clipped > 0.3:
        told["clipped"] = f"{clipped:.0%} of the tokens are clipped and teach nothing: a lower learning_rate or fewer updates"
    if entropy is not None and first is not None and entropy < 0.1 * first:
        fell = f"entropy fell from {first:.3f} to {entropy:.3f}, so a task's episodes will soon be the same"
        told["entropy"] = f"{fell}: a lower learning_rate, a larger beta, or harder tasks"
    if entropy is not None and first is not None and entropy > 3 * first + 0.1:
        rose = f"entropy rose from {first:.2f} to {entropy:.2f}, so the policy becomes noise"
        told["noise"] = f"{rose}: a lower learning_rate or a larger beta"
    differs = _mean(rows[-WINDOW:], "sampling/sampling_logp_difference/mean")
    if differs is not None and differs > 0.1:
        told["sampler"] = (
            f"the trainer's log-probabilities differ by {differs:.2f} a token from those that were sampled with: the engine "
            "has other weights, or other arithmetic (vllm_importance_sampling_correction=True weighs tokens for that)"
        )
    return found + [Alarm(name, text) for name, text in told.items()]


def _splits(rows: Sequence[Row]) -> list[Alarm]:
    """Said at the first iteration already: further ones cost as much."""
    names = ("rewritten_segments", "segments", "episodes", "reread_share")
    rewritten, segments, episodes, share = (_mean(rows, name) or 0 for name in names)
    if rewritten < max(episodes, 1):
        return []
    text = (
        f"{rewritten:.0f} of the {segments:.0f} segments of {episodes:.0f} episodes read again what an earlier one holds: "
        f"{share:.0%} of all tokens. The chat template (or the agent) writes earlier replies in another way than they were "
        "sampled, as Qwen3's leaves out earlier thinking. The gradient is right, at that price: a template that keeps replies, "
        "or a policy that does not think (chat_template_kwargs), costs less"
    )
    return [Alarm("split", text)]


def rewritten_segments(episode: Trajectory) -> list[Segment]:
    """Segments that begin as an earlier one up to its first reply, and then tell it in other tokens than were sampled."""
    found, segments = list[Segment](), [segment for segment in episode.segments if segment.trainable]
    for i, segment in enumerate(segments):
        for earlier in segments[:i]:
            # the tokens before a reply may be encoded in another way where the whole conversation is
            begun = max(_prompt_length(earlier) - 2, 1)
            told_more = _prompt_length(segment) > begun + 4
            if told_more and list(segment.token_ids[:begun]) == list(earlier.token_ids[:begun]):
                found.append(segment)
                break
    return found


def _prompt_length(segment: Segment) -> int:
    """Tokens before the first sampled one."""
    return list(segment.sampled).index(1)


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
