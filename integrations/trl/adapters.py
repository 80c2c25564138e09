"""LoRA (Hu et al. 2022) by PEFT: small trainable matrices beside frozen weights.

PEFT puts them into the model's own layers, so the policy's model, which the engine generates with, is trained as it is.
"""

from copy import deepcopy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.adapter_files import keep_adapters, loaded_adapters
from dreamgym_lg.integrations.trl.options import FROM_SCRATCH_MAX_PARAMETERS


def default_adapters() -> LoraConfig:
    """Rank 16, alpha 32, on every linear layer but the output's. No dropout, which would change probabilities in training."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def wants_adapters(model: PreTrainedModel, lora: bool | None) -> bool:
    """True if adapters are trained. Args: `lora`; None: for a policy that has some, and above 50 M parameters."""
    has_some = loaded_adapters(model) is not None
    if lora is False and has_some:
        raise ConfigurationError("lora=False, and the policy has adapters, which training goes on with: leave it out")
    return has_some or bool(model.num_parameters() > FROM_SCRATCH_MAX_PARAMETERS if lora is None else lora)


def adapt(model: PreTrainedModel, config: LoraConfig | None = None, *, seed: int = 0) -> None:
    """Freeze the model's weights and put new adapters beside them, unless it has some. Args: `config`, or the default.

    Raises `ConfigurationError` for a config that trains more than adapters.
    """
    if loaded_adapters(model) is not None:
        return
    config = config or default_adapters()
    if not isinstance(config, LoraConfig):
        raise ConfigurationError(f"peft_config={config!r} is no peft.LoraConfig; give one, or lora=True for the default")
    trains_nothing_else = {"modules_to_save": None, "bias": "none", "trainable_token_indices": None}
    for name, required in trains_nothing_else.items():
        if (value := getattr(config, name)) != required:
            raise ConfigurationError(
                f"peft_config has {name}={value!r}, which trains weights of the model itself; the reference policy and the "
                "export know adapters alone: leave it out"
            )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        keep_adapters(model, get_peft_model(model, deepcopy(config)))  # PEFT writes into it which layers it has found


def check_trainable(model: PreTrainedModel) -> None:
    """Raise `ConfigurationError` for a PEFT model, and for a quantized one."""
    if isinstance(model, PeftModel):
        raise ConfigurationError(
            "the model has adapters, which would belong to the reference policy too: merge them "
            "(model.merge_and_unload()), and give lora=True to train new ones"
        )
    if getattr(model, "is_quantized", False):
        raise ConfigurationError(
            "the model is quantized: its weights cannot be trained, and adapters merged into them would be rounded to as few "
            'bits when the policy is saved; load it with dtype="bfloat16" and without quantization_config, and give lora=True'
        )
