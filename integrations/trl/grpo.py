"""GRPO: the clipped loss of TRL's `GRPOTrainer`, advantages within the episodes of one task."""

from functools import partial
from pathlib import Path
from typing import Any

from dreamgym_lg.errors import MissingDependency

try:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOConfig
except ImportError as error:
    raise MissingDependency.extra("trl", "train") from error

from dreamgym_lg.integrations.trl.options import CLIPPING, LOSS_TYPES, STEP, check_loss_type
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.learner import group_credit


class GRPOLearner(PolicyLearner):
    """Group-relative policy optimisation (Shao et al. 2024) by TRL's loss types.

    A reply is compared with episodes that replied when they had earned as much (`dreamgym_lg.learner.group_credit`): where all
    reward comes at the end, these are the group.

    Args:
        loss_type: One of `LOSS_TYPES`. With `dr_grpo`, `max_completion_length` is its constant.
        options: Of `PolicyLearner`, and of `GRPOConfig`: `epsilon`, `epsilon_high`, `delta`, `use_bias_correction_kl`,
            `vllm_importance_sampling_correction`, `vllm_importance_sampling_clip_max`.

    Raises `ConfigurationError` as `PolicyLearner` does, and for an unknown loss type.
    """

    OPTIONS = STEP | CLIPPING | {"loss_type", "max_completion_length"}

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str | Path,
        *,
        loss_type: str = "grpo",
        **options: Any,
    ) -> None:
        check_loss_type(loss_type, options)
        length = options.pop("max_completion_length", GRPOConfig.max_completion_length)
        # the sum over all tokens that TRL knows by the name dapo; the rows' weights make any other of it
        self.loss = {"loss_type": "cispo" if loss_type == "cispo" else "dapo"}
        self._credit = partial(group_credit, normalise=LOSS_TYPES[loss_type], length=length)
        super().__init__(model, tokenizer, path, **options)
