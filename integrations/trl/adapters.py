"""LoRA (Hu et al. 2022) by PEFT: small trainable matrices beside frozen weights.

PEFT puts them into the model's own layers, so the policy's model, which the engine generates with, is trained as it is.
"""

from copy import deepcopy

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from dreamgym_lg.errors import ConfigurationError

ADAPTER_RATE_FACTOR = 10
"""Default learning rate of adapters over that of whole weights (Schulman 2025, "LoRA Without Regret")."""


def default_adapters() -> LoraConfig:
    """Rank 16, alpha 32, on every linear layer but the output's; no dropout, which would change probabilities in training."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def check_adapters(model: PreTrainedModel, peft_config: LoraConfig | None) -> None:
    """Raise `ConfigurationError` where the model cannot get these adapters, or has others already.

    Those that an earlier learner of this process left are taken out if new ones are given: those of the checkpoint follow.
    """
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
    if peft_config is None:
        if _layers(model):
            raise ConfigurationError(
                "the model has the adapters of an earlier training: give lora=True (or peft_config=) again, or load it anew"
            )
        return
    if not isinstance(peft_config, LoraConfig):
        raise ConfigurationError(f"peft_config={peft_config!r} is no peft.LoraConfig; give one, or lora=True for the default")
    whole = {"modules_to_save": None, "bias": "none", "trainable_token_indices": None}
    for name, harmless in whole.items():
        if (value := getattr(peft_config, name)) != harmless:
            raise ConfigurationError(
                f"peft_config has {name}={value!r}, which trains weights of the model itself; the reference policy and the "
                "export know adapters alone: leave it out"
            )
    if earlier := _layers(model):
        for name, layer in earlier.items():
            model.set_submodule(name, layer.get_base_layer())
        del model.peft_config  # by which PEFT would think that they are still there


def merged_weights(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """The state dict with adapters added to the weights, in their dtype; None without adapters.

    The model stays as it is. One layer at a time is copied before it is changed.
    """
    if not (adapted := _layers(model)):
        return None
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(tuple(f"{n}." for n in adapted))}
    for name, layer in adapted.items():
        merged = deepcopy(layer)
        merged.merge()
        state |= {f"{name}.{key}": value for key, value in merged.get_base_layer().state_dict().items()}
    return state


def _layers(model: PreTrainedModel) -> dict[str, BaseTunerLayer]:
    """The layers with adapters, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
