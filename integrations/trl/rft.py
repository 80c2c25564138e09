"""RFT: supervised fine-tuning on the successes that the policy has just played."""

from dreamgym_lg.integrations.trl.options import STEP
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.integrations.trl.policy_trainer import LikelihoodTrainer
from dreamgym_lg.learner import success_credit


class RFTLearner(PolicyLearner):
    """Rejection-sampling fine-tuning: the mean negative log-likelihood of the sampled tokens of an iteration's successes.

    An iteration without a success is skipped; one whose episodes all succeed is not. What the policy was given is not learned.

    Args: As of `PolicyLearner`. `learning_rate`: default for a model of more than 50 M parameters 1e-5. `beta`: default 0.
    """

    OPTIONS = STEP
    trainer = LikelihoodTrainer
    loss = LikelihoodTrainer.LOSS
    BETA = 0.0
    LARGE_RATE = 1e-5
    _credit = staticmethod(success_credit)
