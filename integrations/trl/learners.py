"""The learners by the names that `Settings.learner` and `dreamgym train --learner` take."""

from collections.abc import Mapping

from dreamgym_lg.integrations.trl.dpo import DPOLearner
from dreamgym_lg.integrations.trl.grpo import GRPOLearner
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.integrations.trl.ppo import PPOLearner
from dreamgym_lg.integrations.trl.rft import RFTLearner
from dreamgym_lg.integrations.trl.rloo import RLOOLearner
from dreamgym_lg.learner import LearnerName

LEARNERS: Mapping[LearnerName, type[PolicyLearner]] = {
    "grpo": GRPOLearner,
    "rloo": RLOOLearner,
    "ppo": PPOLearner,
    "rft": RFTLearner,
    "dpo": DPOLearner,
}
