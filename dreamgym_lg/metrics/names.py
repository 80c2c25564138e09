"""The names under which trackers show a training run: stable ones, whatever its metrics are called in the replay buffer."""

from collections.abc import Mapping
from typing import NamedTuple

from dreamgym_lg.metrics.health import Row
from dreamgym_lg.types import Source


class Reported(NamedTuple):
    """A metric as trackers show it."""

    recorded: str
    """Its name in the replay buffer."""
    meaning: str
    per: str = ""
    """The recorded metric that it is divided by."""


ROLLOUTS: Mapping[str, Reported] = {
    "success": Reported("train_success", "share of the training episodes that succeeded"),
    "reward": Reported("reward_mean", "their mean reward"),
    "steps": Reported("steps_mean", "their mean length"),
    "invalid_actions": Reported("invalid_action_share", "share of their actions that were invalid"),
    "cut_replies": Reported("cut_reply_share", "share of the policy's replies that were cut off at its limit of tokens"),
    "failed_episodes": Reported("failed_episodes", "episodes with an error; in no mean (an unreadable answer: no success)"),
    "uniform_groups": Reported("uniform_groups", "share of the groups whose episodes all earned the same"),
    "synthetic_tasks": Reported("synthetic_share", "share of the groups on generated tasks"),
}
"""Of the episodes that train the policy: under `dream/` where the dream played them, under `real/` where reality did."""

METRICS: Mapping[str, Reported] = {
    "validation/dream_success": Reported("eval_dream_successes", "success on validation tasks, dreamed", "eval_dream_episodes"),
    "validation/real_success": Reported("eval_real_successes", "success on validation tasks, real", "eval_real_episodes"),
    "validation/gap": Reported("eval_gap", "dreamed minus real success on the same validation tasks"),
    "validation/gap_low": Reported("eval_gap_low", "lower end of its 95 % interval"),
    "validation/gap_high": Reported("eval_gap_high", "upper end of it"),
    "validation/wrong_rewards": Reported("eval_reward_errors", "share of wrong rewards of the experience model on real steps"),
    "policy/loss": Reported("loss", "the learner's loss"),
    "policy/kl": Reported("kl", "KL divergence per token from the policy that training began with"),
    "policy/entropy": Reported("entropy", "entropy per sampled token, in nats"),
    "policy/clipped": Reported("clip_ratio/region_mean", "share of the tokens that were clipped"),
    "policy/grad_norm": Reported("grad_norm", "norm of the gradient"),
    "policy/learning_rate": Reported("learning_rate", "learning rate"),
    "policy/trainable_tokens": Reported("trainable_tokens", "sampled tokens of the iteration"),
    "policy/skipped": Reported("skipped", "1 where the episodes taught nothing and the weights stayed"),
    "curriculum/value": Reported("curriculum_value", "mean worth of the tasks to the curriculum"),
    "curriculum/generated_tasks": Reported("generated_tasks", "tasks that were generated"),
    "real/steps_spent": Reported("real_steps", "steps spent in the real environment, by rollouts or a refresh"),
    "hosted/calls": Reported("hosted_calls", "calls of the hosted experience model"),
    "hosted/failed": Reported("hosted_failed", "calls without an answer"),
    "hosted/input_tokens": Reported("hosted_input_tokens", "tokens sent to it"),
    "hosted/output_tokens": Reported("hosted_output_tokens", "tokens that it wrote"),
    "hosted/cost": Reported("hosted_cost", "what they cost, in the currency of `prices=`"),
    "hosted/total_calls": Reported("hosted_total_calls", "calls of all iterations so far"),
    "hosted/total_tokens": Reported("hosted_total_tokens", "tokens of all iterations so far"),
    "hosted/total_cost": Reported("hosted_total_cost", "cost of all iterations so far"),
    "seconds/curriculum": Reported("seconds_curriculum", "time that choosing the tasks took"),
    "seconds/rollout": Reported("seconds_rollout", "time that playing the episodes took"),
    "seconds/update": Reported("seconds_update_policy", "time that the update took"),
    "seconds/evaluate": Reported("seconds_evaluate", "time that the evaluation took"),
    "seconds/refresh": Reported("seconds_refresh", "time that the refresh of the experience model took"),
    "alarm/invalid": Reported("alarm_invalid", "1 while most actions are invalid"),
    "alarm/cut": Reported("alarm_cut", "1 while many replies are cut off"),
    "alarm/kl": Reported("alarm_kl", "1 while the policy is far from where it began"),
    "alarm/clipped": Reported("alarm_clipped", "1 while many tokens are clipped"),
    "alarm/entropy": Reported("alarm_entropy", "1 while the entropy has fallen to a tenth"),
    "alarm/noise": Reported("alarm_noise", "1 while the entropy has risen to three times"),
    "alarm/split": Reported("alarm_split", "1 while episodes are read again in parts"),
}
"""All others. What an iteration does not have, such as a validation, is not shown at its step."""


def reported_metrics(row: Row, source: Source) -> dict[str, float]:
    """The metrics of one iteration as trackers show them. Args: `source`, who played its training episodes."""
    place = "dream" if source == "synthetic" else "real"
    wanted = {f"{place}/{name}": each for name, each in ROLLOUTS.items()} | dict(METRICS)
    found = dict[str, float]()
    for name, (recorded, _, per) in wanted.items():
        value, divisor = row.get(recorded), row.get(per) if per else 1
        if isinstance(value, int | float) and isinstance(divisor, int | float) and divisor:
            found[name] = value / divisor
    return found
