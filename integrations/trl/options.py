"""The options of a training, their defaults by a model's size, and its precision."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Literal

import torch
from transformers import PreTrainedModel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.loading import computes_bfloat16

Loss = Literal["clipped", "cispo", "likelihood"]
"""A token's loss: PPO's clipped ratio, its log-likelihood times the capped ratio, or the log-likelihood alone."""


@dataclass(frozen=True, kw_only=True)
class ClippingOptions:
    """Options about the ratio to the probability that a token was sampled with."""

    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: as `epsilon`. With `cispo` it caps the ratio."""
    delta: float | None = None
    """Caps the unclipped ratio."""
    use_bias_correction_kl: bool = True
    vllm_importance_sampling_correction: bool = False
    """Weighs tokens by trainer / engine probability, at most the clip's maximum, in place of the ratio to the engine's."""
    vllm_importance_sampling_clip_max: float = 3.0


@dataclass(frozen=True, kw_only=True)
class StepOptions(ClippingOptions):
    """How optimiser steps are taken. Names and defaults are those of TRL's `GRPOConfig`."""

    learning_rate: float
    loss: Loss = "clipped"
    temperature: float = 1.0
    """Divides the logits."""
    beta: float = 0.0
    """Coefficient of the KL term."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """0: gradients are not clipped."""
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    bf16: bool = False
    """Passes under bfloat16 autocast. Default: on a GPU."""
    activation_checkpointing: bool = False
    """Activations are computed again in the backward pass. Default: on a GPU."""


CLIPPING = frozenset(field.name for field in fields(ClippingOptions))
STEP = frozenset(field.name for field in fields(StepOptions)) - CLIPPING - {"loss"}
"""The options that every learner takes."""


def check_options(kind: str, names: Collection[str], known: Collection[str]) -> None:
    """Raise `ConfigurationError` for the first option that is not `known`. Args: `kind`, who takes them."""
    for name in sorted(set(names) - set(known)):
        if name in CLIPPING:
            raise ConfigurationError(f"{kind} does not take {name}: its loss has no ratio to the sampling probability")
        raise ConfigurationError.unknown(f"option of {kind}", name, known)


FROM_SCRATCH_MAX_PARAMETERS = 50_000_000
"""Size up to which all weights are trained, at the rates of models from scratch."""
_LARGE_PARAMETERS = 7_000_000_000
ADAPTER_RATE_FACTOR = 10
"""Default learning rate of adapters over that of whole weights in RL (Schulman 2025, "LoRA Without Regret")."""


def default_rate(model: PreTrainedModel, *, small: float, large: float) -> float:
    """The learning rate for a model of this size.

    `small` up to 50 M parameters, `large` from 7 B, a power law between."""
    size = min(max(model.num_parameters(), FROM_SCRATCH_MAX_PARAMETERS), _LARGE_PARAMETERS)
    share = math.log(size / FROM_SCRATCH_MAX_PARAMETERS) / math.log(_LARGE_PARAMETERS / FROM_SCRATCH_MAX_PARAMETERS)
    return float(small * (large / small) ** share)


def precision(model: PreTrainedModel, *, supervised: bool = False) -> dict[str, bool]:
    """The defaults of `bf16` and `activation_checkpointing` where the model is.

    Raises `ConfigurationError` for trainable weights of fewer than 32 bits, to which AdamW's small steps are lost by rounding
    (at a learning rate of 1e-6, 98 % of the bf16 weights do not move in five updates).
    """
    narrow = {str(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)}
    if narrow:
        raise ConfigurationError(
            f"the model's weights are {', '.join(sorted(narrow))}, to which small optimiser steps are lost by rounding: load "
            'it with dtype="float32" (on a GPU, forward and backward passes still compute in bfloat16), or train adapters '
            "beside frozen weights (lora=True)"
        )
    gpu = model.device.type == "cuda"
    return {"bf16": gpu or (supervised and computes_bfloat16()), "activation_checkpointing": gpu}
