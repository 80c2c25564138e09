"""Metrics of training iterations, alarms about them, and their names for trackers."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from typing import NamedTuple

from dreamgym_lg.errors import NothingToTrain
from dreamgym_lg.hosted import Hosted, Usage
from dreamgym_lg.learner import is_uniform, trainable_segments
from dreamgym_lg.types import Segment, Source, Trajectory, is_missing, is_unanswered, is_user_fault, lacks_answers

Row = Mapping[str, float | int | str | None]
"""The metrics of an iteration, as the training graph records them."""

WINDOW = 3
"""Number of iterations whose mean an alarm looks at, as a single iteration is noisy."""


def describe(
    groups: Sequence[Sequence[Trajectory]], *, max_new_tokens: int | None = None
) -> dict[str, float | int | str | None]:
    """The metrics of an iteration's episodes. Failed rollouts are counted, and left out of every mean.

    Args: `max_new_tokens`, length at which the policy's replies are cut off; None if unknown.
    """
    episodes = [trajectory for group in groups for trajectory in group]
    played = [trajectory for trajectory in episodes if trajectory.error is None]
    missing = sum(is_missing(trajectory.error) for trajectory in episodes)
    user_faults = sum(is_user_fault(trajectory.error) for trajectory in episodes)
    unanswered = sum(is_unanswered(trajectory.error) for trajectory in episodes)
    steps = sum(len(trajectory.steps) for trajectory in played)
    synthetic = sum(group[0].task.origin == "synthetic" for group in groups)
    segments = [segment for trajectory in episodes for segment in trajectory.segments]
    rewritten = [segment for trajectory in episodes for segment in rewritten_segments(trajectory)]
    runs = (run for trajectory in played for segment in trajectory.segments for run in groupby(segment.sampled))
    reply_lengths = [len(list(tokens)) for is_reply, tokens in runs if is_reply]
    cut = sum(length >= max_new_tokens for length in reply_lengths) if max_new_tokens else 0
    return {
        "episodes": len(episodes),
        "failed_episodes": len(episodes) - len(played),
        "unreadable_episodes": len(episodes) - len(played) - missing - user_faults - unanswered,
        "unanswered_episodes": unanswered,
        "user_faults": user_faults,
        "first_error": next((t.error for t in episodes if t.error), None),
        "reward_mean": sum(trajectory.reward for trajectory in played) / max(len(played), 1),
        "train_success": sum(trajectory.success for trajectory in played) / max(len(episodes) - missing - user_faults, 1),
        "uniform_groups": sum(is_uniform(group) for group in groups) / max(len(groups), 1),
        "unanswered_groups": sum(map(lacks_answers, groups)) / max(len(groups), 1),
        "synthetic_share": synthetic / max(len(groups), 1),
        "invalid_action_share": sum(trajectory.invalid_actions for trajectory in played) / max(steps, 1),
        "cut_reply_share": cut / max(len(reply_lengths), 1),
        "no_valid_action_share": sum(not any(step.valid for step in t.steps) for t in played) / max(len(played), 1),
        "steps_mean": steps / max(len(played), 1),
        "segments": len(segments),
        "rewritten_segments": len(rewritten),
        "reread_share": sum(map(_prompt_length, rewritten)) / max(sum(len(each.token_ids) for each in segments), 1),
    }


def mostly_failed(episodes: Sequence[Trajectory]) -> bool:
    return 2 * sum(episode.error is not None for episode in episodes) > len(episodes)


def check_trainable(episodes: Sequence[Trajectory]) -> None:
    """Raise `NothingToTrain` if every episode failed, or no action of the others was valid."""
    if any(step.valid for episode in episodes if episode.error is None for step in episode.steps):
        return
    errors = sorted({episode.error for episode in episodes if episode.error})
    if all(episode.error for episode in episodes):
        again = "the same call plays them again"
        if not any(is_missing(error) for error in errors):  # outcomes of the dream, which are kept
            again = "train in a new folder, because these episodes are kept"
        raise NothingToTrain(f"all {len(episodes)} episodes failed; causes: {'; '.join(errors[:3])}. Mend that; then {again}")
    played = [episode for episode in episodes if episode.error is None]
    actions = [step.action for episode in played for step in episode.steps][:3]
    failed = (
        f"{len(episodes) - len(played)} of {len(episodes)} episodes failed ({errors[0]}); of the others, " if errors else ""
    )
    raise NothingToTrain(
        f"{failed}not one action of {len(played)} episodes was valid (the first: {actions!r}), so no reward can be earned. "
        "Fine-tune the policy on a few demonstrations first, and check that its prompt says which actions exist"
    )


class Alarm(NamedTuple):
    name: str
    text: str


SAMPLER = (
    "the trainer's log-probabilities differ by {:.2f} a token from those that were sampled with: the engine has other weights, "
    "or other arithmetic (vllm_importance_sampling_correction=True weighs tokens for that)"
)
LIMITS = (
    ("invalid", "invalid_action_share", 0.5, "{:.0%} of the actions are invalid: show the policy demonstrations (train_base)"),
    ("cut", "cut_reply_share", 0.1, "{:.0%} of the policy's replies are cut off: raise policy_tokens, or teach it to be brief"),
    ("kl", "kl", 0.5, "KL of {:.2f} a token, the policy is far from where it began: a larger beta or a lower learning_rate"),
    ("clipped", "clip_ratio/region_mean", 0.3, "{:.0%} of the tokens are clipped: a lower learning_rate or fewer updates"),
    ("sampler", "sampling/sampling_logp_difference/mean", 0.1, SAMPLER),
)
"""Alarms for metrics above a limit: name, metric, limit, text."""


BROKEN = (
    ("cut_reply_share", "{:.0%} of the policy's replies are cut off at its limit of tokens"),
    ("no_valid_action_share", "{:.0%} of its episodes have no valid action"),
)
"""Metrics of a broken policy, which are above a half and twice those of the first iteration: name, text."""


def find_breakage(earlier: Sequence[Row], now: Row) -> str:
    """The figure that shows that training broke a policy; "" if none does.

    One iteration is enough: a sound policy does not come to this by chance, and each further rollout takes its longest. It is
    compared with the first of the `earlier` ones in the same place (dream or reality).
    """
    first = next((row for row in earlier if ("real_steps" in row) == ("real_steps" in now)), now)
    for name, text in BROKEN:
        share, before = (float(row.get(name) or 0) for row in (now, first if name in first else now))
        if share > max(0.5, 2 * before):
            return f"{text.format(share)} (in the first iteration {before:.0%})"
    return ""


def check_health(rows: Sequence[Row]) -> list[Alarm]:
    """The alarms at the last of these iterations, which are of one run, in order.

    They look at means of the last `WINDOW` iterations, so there are none before; only split episodes raise one at once. The
    entropy is compared with that of the first `WINDOW` iterations.
    """
    alarms = _splits(rows[-1:])
    if len(rows) < WINDOW:
        return alarms
    for name, metric, limit, text in LIMITS:
        if (value := _mean(rows[-WINDOW:], metric)) is not None and value > limit:
            alarms.append(Alarm(name, text.format(value)))
    first, entropy = _mean(rows[:WINDOW], "entropy"), _mean(rows[-WINDOW:], "entropy")
    if first is not None and entropy is not None and entropy < 0.1 * first:
        fell = f"entropy fell from {first:.3f} to {entropy:.3f}, so a task's episodes will soon be the same"
        alarms.append(Alarm("entropy", f"{fell}: a lower learning_rate, a larger beta, or harder tasks"))
    if is_collapsed(rows):
        fell = f"the mean reward over {WINDOW} iterations is below a quarter of the best before"
        alarms.append(Alarm("collapsed", f"{fell}: train in a new folder with a lower learning_rate or a larger beta"))
    if first is not None and entropy is not None and entropy > 3 * first + 0.1:
        rose = f"entropy rose from {first:.2f} to {entropy:.2f}, so the policy becomes noise"
        alarms.append(Alarm("noise", f"{rose}: a lower learning_rate or a larger beta"))
    return alarms


def _splits(rows: Sequence[Row]) -> list[Alarm]:
    """An alarm if segments repeat tokens of earlier ones. Raised in the first iteration already."""
    rewritten, segments, episodes, share = (
        _mean(rows, name) or 0 for name in ("rewritten_segments", "segments", "episodes", "reread_share")
    )
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
    """Segments that repeat an earlier segment's text in other tokens than were sampled."""

    def repeats(segment: Segment, earlier: Segment) -> bool:
        # the last prompt tokens before a reply may differ when the whole conversation is encoded again
        shared = max(_prompt_length(earlier) - 2, 1)
        longer = _prompt_length(segment) > shared + 4
        return longer and list(segment.token_ids[:shared]) == list(earlier.token_ids[:shared])

    segments = trainable_segments(episode)
    return [each for i, each in enumerate(segments) if any(repeats(each, earlier) for earlier in segments[:i])]


def _prompt_length(segment: Segment) -> int:
    """Number of tokens before the first sampled one."""
    return list(segment.sampled).index(1)


def is_collapsed(rows: Sequence[Row]) -> bool:
    """True if the last `WINDOW` iterations' mean reward dropped below a quarter of the best.

    Compares only iterations of the same place as the last one (dream or reality). False for a best below 0.1.
    """
    same_place = [row for row in rows if ("real_steps" in row) == ("real_steps" in rows[-1])]
    rewards = [float(row.get("reward_mean") or 0) for row in same_place]
    means = [sum(rewards[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(rewards) + 1)]
    before = means[:-WINDOW]
    return bool(before) and max(before) >= 0.1 and means[-1] < max(before) / 4


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """The mean over the iterations that have this metric; a skipped update lacks some. None without any."""
    values = [float(value) for row in rows if (value := row.get(name)) is not None]
    return sum(values) / len(values) if values else None


# --- names for trackers, and costs -------------------------------------------------------------------------------------------


ROLLOUTS: Mapping[str, str] = {
    "success": "train_success",
    "reward": "reward_mean",
    "steps": "steps_mean",
    "invalid_actions": "invalid_action_share",
    "cut_replies": "cut_reply_share",
    "no_valid_action": "no_valid_action_share",
    "failed_episodes": "failed_episodes",
    "user_faults": "user_faults",
    "uniform_groups": "uniform_groups",
    "unanswered_groups": "unanswered_groups",
    "synthetic_tasks": "synthetic_share",
}
"""Metrics of the episodes that train the policy. Dreamed ones stand under `dream/`, real ones under `real/`."""

METRICS: Mapping[str, str] = {
    "dream/judge_consistency": "judge_consistency",
    "validation/gap": "eval_gap",
    "validation/gap_low": "eval_gap_low",
    "validation/gap_high": "eval_gap_high",
    "policy/clipped": "clip_ratio/region_mean",
    "curriculum/value": "curriculum_value",
    "curriculum/generated_tasks": "generated_tasks",
    "real/steps_spent": "real_steps",
    "seconds/update": "seconds_update_policy",
    **{f"policy/{name}": name for name in ("loss", "kl", "entropy", "grad_norm", "learning_rate")},
    **{f"policy/{name}": name for name in ("trainable_tokens", "skipped", "solved_tasks")},
    **{f"seconds/{name}": f"seconds_{name}" for name in ("curriculum", "rollout", "evaluate")},
    **{f"hosted/{name}": f"hosted_{name}" for name in ("calls", "failed", "input_tokens", "output_tokens", "cost")},
    **{f"hosted/total_{name}": f"hosted_total_{name}" for name in ("calls", "tokens", "cost")},
    **{
        f"alarm/{name}": f"alarm_{name}"
        for name in ("invalid", "cut", "kl", "clipped", "entropy", "noise", "collapsed", "split", "sampler")
    },
}
"""All other metrics (docs/how-to/metrics.md). One that an iteration lacks is not reported at its step."""

RATES: Mapping[str, str] = {"validation/dream_success": "eval_dream", "validation/real_success": "eval_real"}
"""Success rates; the prefix of their counts in the replay buffer, `PREFIX_successes` and `PREFIX_episodes`."""


def reported_metrics(row: Row, source: Source) -> dict[str, float]:
    """The metrics of one iteration by their names in trackers. Args: `source`, of its training episodes."""
    place = "dream" if source == "synthetic" else "real"
    values = {f"{place}/{name}": row.get(recorded) for name, recorded in ROLLOUTS.items()}
    values |= {name: row.get(recorded) for name, recorded in METRICS.items()}
    for name, prefix in RATES.items():
        successes, episodes = row.get(f"{prefix}_successes"), row.get(f"{prefix}_episodes")
        if isinstance(successes, int | float) and isinstance(episodes, int | float) and episodes:
            values[name] = successes / episodes
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def iteration_line(metrics: Mapping[str, float], iteration: int, total: int) -> str:
    """One iteration in a sentence: success, uniform groups and the time left. Args: `metrics`, of `reported_metrics`."""
    parts = []
    for place in ("dream", "real"):
        if (rate := metrics.get(f"{place}/success")) is not None:
            parts.append(f"{place} success {rate:.2f}")
        if uniform := metrics.get(f"{place}/uniform_groups"):
            parts.append(f"{uniform:.0%} of the groups are uniform")
    seconds = sum(value for name, value in metrics.items() if name.startswith("seconds/"))
    left = timedelta(seconds=round(seconds * (total - iteration - 1)))
    line = f"iteration {iteration + 1} of {total}: {', '.join(parts)}; {seconds:.0f} s"
    return f"{line}, about {left} left" if left else line


def estimate_rest(hosted: Hosted, spent: Usage, *, played: int, left: int) -> str:
    """A sentence that estimates the cost of the `left` episodes. Args: `spent`, usage of the `played` ones."""
    rest = {name: value * left / played for name, value in spent.limited.items()}
    exceeded = [
        f"max_{name}={limit:g}"
        for name, limit in hosted.limits.items()
        if limit is not None and hosted.usage.limited[name] + rest[name] > limit
    ]
    money = hosted.price(spent.input_tokens * left / played, spent.output_tokens * left / played)
    return (
        f"{played} episodes took {spent.calls:,} calls of the hosted experience model; the {left:,} that are left, evaluations "
        f"included, will take about {rest['calls']:,.0f} calls and {rest['tokens']:,.0f} tokens, and {money}"
        + (f". The run will reach {' and '.join(exceeded)} before its end" if exceeded else "")
    )


def add_totals(earlier: Sequence[Row], now: Row) -> dict[str, float]:
    """The run's totals: sums over the `earlier` iterations and this one."""

    def total(*names: str) -> float:
        return sum(float(row.get(name) or 0) for row in (*earlier, now) for name in names)

    return {
        "hosted_total_calls": total("hosted_calls"),
        "hosted_total_tokens": total("hosted_input_tokens", "hosted_output_tokens"),
        "hosted_total_cost": total("hosted_cost"),
    }
