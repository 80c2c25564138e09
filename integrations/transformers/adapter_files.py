"""A model as base weights with LoRA adapters beside them, which are never merged. Bfloat16 would round most of them away.

A folder of such a model is one of PEFT's: the adapters, and the base that they name, here in its subfolder `base`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from dreamgym_lg.files import whole_folder
from dreamgym_lg.progress import is_watched
from dreamgym_lg.token_recorder import SAMPLING_FILE

BASE = "base"
"""Subfolder of the base model."""
ADAPTER = "default"
"""PEFT's name of the adapters that are trained."""
_BESIDE = f"./{BASE}"
"""Its path as the adapters name it: from their own folder, so that this can be moved."""
_CONFIG = "adapter_config.json"


def adapter_layers(model: torch.nn.Module) -> dict[str, BaseTunerLayer]:
    """The layers with adapters, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def loaded_adapters(model: torch.nn.Module) -> PeftModel | None:
    """PEFT's view of a model whose adapters are part of the policy; else None."""
    return vars(model).get("_adapted")


def keep_adapters(model: PreTrainedModel, view: PeftModel) -> None:
    """Make the adapters in the model's layers a part of the policy. Args: `view`, PEFT's model of it."""
    object.__setattr__(model, "_adapted", view)  # as a submodule, the model would contain itself


def base_of(folder: str | Path) -> str | None:
    """The folder or hub name of the base of a folder's adapters. None for a folder without adapters."""
    config = Path(folder) / _CONFIG
    if not config.is_file():
        return None
    named, beside = str(json.loads(config.read_text())["base_model_name_or_path"]), Path(folder) / BASE
    return str(beside) if named == _BESIDE or beside.is_dir() else named


def add_adapters(model: PreTrainedModel, folder: str | Path) -> None:
    """Put the adapters of a folder into the model's layers."""
    config = PeftConfig.from_pretrained(str(folder))
    config.base_model_name_or_path, config.inference_mode = base_of(folder), False  # the folder may have been moved
    keep_adapters(model, PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=True))


@contextmanager
def bars_if_watched() -> Iterator[None]:
    """Without transformers' progress bars where nobody watches, as in a log file."""
    if is_watched() or not is_progress_bar_enabled():
        yield
        return
    disable_progress_bar()
    try:
        yield
    finally:
        enable_progress_bar()


@bars_if_watched()
def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's weights; adapters in float32 beside their base."""
    if not adapter_layers(model):
        model.save_pretrained(folder)
        return
    named = model.state_dict().items()
    base = {name.replace(".base_layer.", "."): value for name, value in named if ".lora_" not in name}
    model.save_pretrained(folder / BASE, state_dict=base)
    write_adapters(model, folder)
    config = json.loads((folder / _CONFIG).read_text())
    (folder / _CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": _BESIDE}, indent=2))


def write_adapters(model: Any, folder: Path) -> None:
    """Write the model's adapters alone, as PEFT does."""
    model.peft_config[ADAPTER].save_pretrained(folder)
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."
    named = {f"{prefix}{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, sampling: Mapping[str, Any] | None = None
) -> None:
    """Write a model folder with tokenizer and chat template (`whole_folder`). Args: `sampling`, a policy's."""
    with whole_folder(path, SafetensorError) as draft:
        write_model(model, draft)
        write_beside_weights(draft, tokenizer, sampling)


def write_beside_weights(folder: Path, tokenizer: PreTrainedTokenizerBase, sampling: Mapping[str, Any] | None) -> None:
    """Write tokenizer, sampling settings and `version`, which is another one each time weights are written."""
    tokenizer.save_pretrained(folder)
    if sampling is not None:
        (folder / SAMPLING_FILE).write_text(json.dumps(sampling, indent=2) + "\n")
    (folder / "version").write_text(uuid4().hex[:8])
