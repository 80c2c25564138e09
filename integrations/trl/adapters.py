"""LoRA (Hu et al. 2022) by PEFT: small trainable matrices beside frozen weights.

PEFT puts them into the model's own layers, so the policy's model, which the engine generates with, is trained as it is.
"""

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.adapter_files import ADAPTER, adapter_layers, keep_adapters, loaded_adapters
from dreamgym_lg.integrations.trl.options import FROM_SCRATCH_MAX_PARAMETERS

REFERENCE = "ref"
"""TRL's name of its copy of the adapters that a training began with."""


def default_adapters() -> LoraConfig:
    """Rank 16, alpha 32, on every linear layer but the output's; no dropout, which would change probabilities in training."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def wants_adapters(model: PreTrainedModel, lora: bool | None) -> bool:
    """True if adapters are trained. Args: `lora`; None: for a policy that has some, and above 50 M parameters."""
    has_some = loaded_adapters(model) is not None
    if lora is False and has_some:
        raise ConfigurationError("lora=False, and the policy has adapters, which training goes on with: leave it out")
    return has_some or bool(model.num_parameters() > FROM_SCRATCH_MAX_PARAMETERS if lora is None else lora)


def adapt(model: PreTrainedModel) -> None:
    """Freeze the model's weights and put new adapters beside them, unless it has some."""
    if loaded_adapters(model) is None:
        keep_adapters(model, get_peft_model(model, default_adapters()))


def restart(view: PeftModel) -> None:
    """Give a policy the adapters with which an earlier learner of this process began."""
    if REFERENCE in view.peft_config:
        for name, value in view.named_parameters():
            if f".{ADAPTER}." in name:
                value.data.copy_(view.get_parameter(name.replace(f".{ADAPTER}.", f".{REFERENCE}.")))
        view.delete_adapter(REFERENCE)
        view.set_adapter(ADAPTER)


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
    if loaded_adapters(model) is not None:
        if peft_config is not None:
            raise ConfigurationError("the policy has adapters, and training goes on with them: leave out peft_config")
        return
    if peft_config is None:
        if adapter_layers(model):
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
    if earlier := adapter_layers(model):
        for name, layer in earlier.items():
            model.set_submodule(name, layer.get_base_layer())
        del model.peft_config  # by which PEFT would think that they are still there
