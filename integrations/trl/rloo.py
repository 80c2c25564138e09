"""RLOO: REINFORCE whose baseline is the mean reward of the task's other episodes."""

from functools import partial

from dreamgym_lg.integrations.trl.options import CLIPPING, STEP
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.learner import group_credit, leave_one_out_advantages


class RLOOLearner(PolicyLearner):
    """REINFORCE leave-one-out (Ahmadian et al. 2024): rewards are not divided by the group's deviation.

    Each of an episode's tokens weighs the same however long it is, so that with one optimiser step an iteration, and where all
    reward comes at the end, the gradient is the policy gradient of the reward itself. TRL's own `RLOOTrainer` has one ratio per
    sequence, and an episode may be several: here it is clipped per token, as in GRPO, and the KL term is in the loss, not in
    the reward.

    Args: As of `PolicyLearner`, and of `GRPOConfig`: `epsilon`, `epsilon_high`, `delta`, `use_bias_correction_kl`,
        `vllm_importance_sampling_correction`, `vllm_importance_sampling_clip_max`.
    """

    OPTIONS = STEP | CLIPPING
    _credit = staticmethod(partial(group_credit, advantages=leave_one_out_advantages, normalise="length"))
