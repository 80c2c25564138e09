"""The options of TRL that a user may set, and the precision of a training."""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches

import torch
from transformers import PreTrainedModel, TrainingArguments
from trl import GRPOConfig

from dreamgym_lg.errors import ConfigurationError

STEP = frozenset(
    (
        *("activation_checkpointing", "activation_checkpointing_kwargs", "torch_empty_cache_steps", "trust_remote_code"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args", "weight_decay", "max_grad_norm", "warmup_steps"),
        *("bf16", "fp16", "tf32", "cast_lm_head_to_fp32", "disable_dropout", "router_aux_loss_coef"),
        *("report_to", "run_name", "save_total_limit"),
    )
)
"""Options of `GRPOConfig` that every learner passes on."""
CLIPPING = frozenset(
    (
        *("delta", "epsilon", "epsilon_high", "use_bias_correction_kl"),
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_clip_max"),
    )
)
"""Options of `GRPOConfig` about the ratio to the probability that a token was sampled with."""

_OWN = frozenset(("beta", "learning_rate", "micro_batch_tokens", "peft_config", "save_every", "seed", "temperature", "updates"))

_POLICY = "the policy generates, not TRL: set it where the policy is made"
_PARTS = "how much is in a forward pass is `micro_batch_tokens`, the optimiser steps of an iteration `updates`"
_SCHEDULE = "how long a run will be is not known to it, so its rate is constant: after `warmup_steps`, if you give them"
_WHOLE = "it needs an episode as one sequence, and an episode may be several segments"
_ENTROPY = "it is computed over the rows of one forward pass, so that `micro_batch_tokens` would change the gradient"
_REWARDS = "rewards and advantages come with the recorded episodes (`dreamgym_lg.learner.group_credit`)"
_SAVING = "it saves all that a run needs to go on after a crash, every `save_every` iterations"

_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("gradient_accumulation_steps", "per_device_train_batch_size", "generation_batch_size"), _PARTS),
    **dict.fromkeys(("steps_per_generation", "num_iterations", "auto_find_batch_size"), _PARTS),
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs"), _POLICY),
    **dict.fromkeys(("use_vllm", "vllm_mode", "cache_implementation", "mask_truncated_completions"), _POLICY),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio"), _SCHEDULE),
    **dict.fromkeys(("importance_sampling_level", "off_policy_mask_threshold"), _WHOLE),
    **dict.fromkeys(("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy"), _ENTROPY),
    **dict.fromkeys(("scale_rewards", "reward_weights", "multi_objective_aggregation"), _REWARDS),
    **dict.fromkeys(("save_strategy", "save_steps", "save_only_model", "resume_from_checkpoint"), _SAVING),
    **dict.fromkeys(("max_steps", "num_train_epochs"), "the training graph counts `iterations`"),
    **dict.fromkeys(CLIPPING, "its loss has no ratio to the probability that a token was sampled with"),
    "max_completion_length": "the policy's own max_new_tokens limits its replies",
    "loss_type": "only learner='grpo' has several",
    "num_generations": "the rollouts have it (`Settings.num_generations`, `rollout(num_generations=)`)",
    "output_dir": "the folder of its checkpoints is `path`",
    "use_cpu": "it trains where the model is: load the model on that device",
    "gradient_checkpointing": "transformers calls it `activation_checkpointing` now (on by default on a GPU)",
    "gradient_checkpointing_kwargs": "transformers calls it `activation_checkpointing_kwargs` now",
    "sync_ref_model": "the reference is the policy that the training began with, also after a restart",
}


def check_options(
    kind: str,
    names: Collection[str],
    *,
    known: Collection[str],
    advice: Mapping[str, str],
    config: type[TrainingArguments],
) -> None:
    """Raise `ConfigurationError` for the first option that is not `known`.

    Args:
        kind: Who takes the options, for the message.
        advice: What to do instead, for options of TRL that are set already or would have no effect.
        config: TRL's own class: an option of it without advice is refused as untried, any other as unknown.
    """
    for name in sorted(set(names) - set(known)):
        if name in advice:
            raise ConfigurationError(f"{kind} does not take {name}: {advice[name]}")
        if name in {field.name for field in fields(config)}:
            raise ConfigurationError(
                f"{kind} does not take TRL's {name}: it has no effect on recorded data, or is not known to work here; leave it "
                f"out. It takes: {', '.join(sorted(known))}"
            )
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"its own are in its docstring, TRL's are those of {config.__name__}"
        raise ConfigurationError(f"{kind} has no option {name!r}; {hint}")


def check_learner(
    kind: str,
    own: Collection[str],
    updates: int,
    micro_batch_tokens: int,
    save_every: int,
    temperature: float,
    config: Mapping[str, object],
) -> None:
    """Raise `ConfigurationError` for arguments that a learner does not take.

    Args: `kind`, its class; `own`, its options besides `_OWN`.
    """
    check_options(kind, config, known={*own, *_OWN}, advice=_ADVICE, config=GRPOConfig)
    if config.get("vllm_importance_sampling_correction") and updates > 1:
        raise ConfigurationError(
            f"updates={updates} with vllm_importance_sampling_correction: its weights are of the policy before the update, "
            "from which only the first step begins; give updates=1, or leave it out: tokens are clipped by that ratio then"
        )
    for name, number in (("updates", updates), ("micro_batch_tokens", micro_batch_tokens), ("save_every", save_every)):
        if number < 1:
            raise ConfigurationError(f"{name}={number}: it has to be at least 1")
    if temperature <= 0:
        raise ConfigurationError(
            f"temperature={temperature}: a policy that always takes the most likely token cannot be trained; "
            "sample it at a temperature above 0 (policy.with_temperature(1.0))"
        )
    warmup = config.get("warmup_steps", 0)
    if isinstance(warmup, float) and warmup < 1:
        raise ConfigurationError(f"warmup_steps={warmup}: a share of a run whose length is not known; give a number of steps")


FROM_SCRATCH_MAX_PARAMETERS = 50_000_000
"""Size up to which all weights are trained, at the rates of models from scratch."""
_LARGE_PARAMETERS = 7_000_000_000
ADAPTER_RATE_FACTOR = 10
"""Default learning rate of adapters over that of whole weights in RL (Schulman 2025, "LoRA Without Regret")."""


def default_rate(model: PreTrainedModel, *, small: float, large: float) -> float:
    """The learning rate for a model of this size: `small` up to 50 M parameters, `large` from 7 B, a power law between."""
    size = min(max(model.num_parameters(), FROM_SCRATCH_MAX_PARAMETERS), _LARGE_PARAMETERS)
    share = math.log(size / FROM_SCRATCH_MAX_PARAMETERS) / math.log(_LARGE_PARAMETERS / FROM_SCRATCH_MAX_PARAMETERS)
    return float(small * (large / small) ** share)


def check_reference(model: PreTrainedModel, beta: float) -> None:
    """Raise `ConfigurationError` where the KL term (`beta` above 0) has no reference policy."""
    if beta and not model.config._name_or_path:
        raise ConfigurationError(
            f"beta={beta} needs the reference policy's weights, and this model was made in memory: save it and load it "
            "with LocalChatModel.from_path, or set beta=0"
        )


def precision(model: PreTrainedModel, options: Mapping[str, object], *, frozen: bool = False) -> dict[str, object]:
    """The arguments that train float32 weights where the model is; on a GPU with autocast and checkpointed activations.

    Raises `ConfigurationError` for trainable weights of fewer bits, to which AdamW's small steps are lost by rounding (at a
    learning rate of 1e-6, 98 % of the bf16 weights do not move in five updates), and for a GPU that is not the first visible.

    Args: `frozen`, the weights stay as they are, and what is trained are float32 adapters.
    """
    narrow = {str(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)}
    if narrow and not frozen:
        raise ConfigurationError(
            f"the model's weights are {', '.join(sorted(narrow))}, to which small optimiser steps are lost by rounding: load "
            'it with dtype="float32" (on a GPU, forward and backward passes still compute in bfloat16), or train adapters '
            "beside frozen weights (lora=True)"
        )
    device = model.device
    if device.type == "cuda" and device.index:
        raise ConfigurationError(
            f"the model is on {device}, and TRL trains on the first visible GPU: start with CUDA_VISIBLE_DEVICES={device.index}"
        )
    gpu = device.type == "cuda"
    return {"use_cpu": device.type == "cpu", "bf16": gpu and not options.get("fp16"), "activation_checkpointing": gpu}
