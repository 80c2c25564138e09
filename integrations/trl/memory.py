"""The memory that a training needs, estimated from the model's configuration."""

import os
from copy import deepcopy
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dreamgym_lg.errors import ConfigurationError

_HEAD_TILE = (4096, 32768)
"""Tokens and words whose logits TRL has in memory at once."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device that is trained on; fragmentation, kernels and the runtime itself come to them."""

    weights: int
    """The policy's, with adapters."""
    copies: int
    """Autocast's bfloat16 copies of float32 matrices; of frozen ones those that the backward pass needs."""
    reference: int
    """Of the KL term's own copy of the weights; adapters need none."""
    gradients: int
    optimizer: int
    """Two float32 numbers for each trainable one (AdamW)."""
    activations: int
    """Of one forward and backward pass, the output's logits included."""
    cache: int
    """Keys and values of the conversations that are generated at once. They are given back before an update."""

    @property
    def update(self) -> int:
        """Peak while the policy is trained."""
        return self.weights + self.copies + self.reference + self.gradients + self.optimizer + self.activations

    @property
    def rollout(self) -> int:
        """Peak while the policy plays."""
        return self.weights + self.copies + self.reference + self.optimizer + self.cache

    @property
    def peak(self) -> int:
        return max(self.update, self.rollout)

    def __str__(self) -> str:
        parts = ("weights", "copies", "reference", "gradients", "optimizer", "activations", "cache")
        return f"{_gb(self.peak)}: {', '.join(f'{name} {_gb(getattr(self, name))}' for name in parts if getattr(self, name))}"


def estimate_memory(
    model: PreTrainedConfig | PreTrainedModel,
    *,
    dtype: torch.dtype = torch.float32,
    peft_config: LoraConfig | None = None,
    tokens: int = 8192,
    cached_tokens: int = 0,
    reference: bool = True,
    autocast: bool = True,
    checkpointing: bool = True,
) -> MemoryEstimate:
    """Estimate the memory to train a dense decoder (Llama, Qwen, Mistral, Gemma); loads no weights.

    Args:
        model: Its configuration (`AutoConfig.from_pretrained(name)`), or the model itself.
        dtype: Of the weights.
        peft_config: As of the learner: adapters are trained, and the weights are frozen.
        tokens: The learner's `micro_batch_tokens`, or the longest episode where that is longer.
        cached_tokens: Of all conversations generated at once, replies included.
        reference: Whether there is a KL term (`beta` above 0).
        autocast, checkpointing: Passes in bfloat16, and activations computed again in the backward pass: both as the learners
            do on a GPU, and not on the CPU.
    """
    config = model if isinstance(model, PreTrainedConfig) else model.config
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config, dtype=dtype) if model is config else type(model)(config).to(dtype)
    weights = sum(_bytes(each) for each in bare.parameters())
    vocabulary = [each.weight for each in (bare.get_input_embeddings(), bare.get_output_embeddings()) if each is not None]
    inner = [p for p in bare.parameters() if p.ndim == 2 and not any(p is other for other in vocabulary)]
    matrices = sum(2 * each.numel() for each in inner)
    whole, lora = (bare, False) if peft_config is None else (get_peft_model(bare, deepcopy(peft_config)), True)
    trained = [each for each in whole.parameters() if each.requires_grad]
    copied = autocast and dtype == torch.float32
    text = config.get_text_config()
    heads, head_size = _heads(text)
    width = 2 if autocast else dtype.itemsize
    return MemoryEstimate(
        weights=sum(_bytes(each) for each in whole.parameters()),
        copies=(matrices // text.num_hidden_layers if lora and checkpointing else matrices) if copied else 0,
        reference=weights if reference and not lora else 0,
        gradients=sum(_bytes(each) for each in trained),
        optimizer=2 * 4 * sum(each.numel() for each in trained),
        activations=_activations(whole, text, dtype, tokens, width=width, checkpointing=checkpointing, lora=lora),
        cache=cached_tokens * text.num_hidden_layers * 2 * heads * head_size * width,
    )


def _activations(
    model: torch.nn.Module,
    text: PreTrainedConfig,
    dtype: torch.dtype,
    tokens: int,
    *,
    width: int,
    checkpointing: bool,
    lora: bool,
) -> int:
    """Bytes that autograd keeps of a pass; counts are numbers a token and layer, as PyTorch's hooks show them."""
    heads, head_size = _heads(text)
    layers, hidden = text.num_hidden_layers, text.hidden_size
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    queries, keys = text.num_attention_heads * head_size, heads * head_size
    ranks = sum(p.shape[0] for name, p in model.named_parameters() if ".lora_A." in name) // layers
    norms = 2 if lora else 4  # their inputs in float32; with trainable scales what they normalised too
    copies = 5 if width == 2 else 2  # of their outputs: in half precision one for each matrix that reads them
    attention = 2 * queries + 2 * keys + (queries if lora and width == 2 else 0)
    layer = 4 * norms * hidden + width * (copies * hidden + attention + 4 * wide + ranks)
    kept = layers * hidden * dtype.itemsize + layer if checkpointing else layers * layer
    tile = min(tokens, _HEAD_TILE[0]) * min(text.vocab_size, _HEAD_TILE[1]) * width
    head = tokens * 4 * 4 * hidden + tile + (0 if lora else 4 * text.vocab_size * hidden)
    return tokens * (kept + layer) + head  # one layer's gradients come to it


def check_memory(estimate: MemoryEstimate, device: torch.device, *, micro_batch_tokens: int, lora: bool) -> None:
    """Raise `ConfigurationError` where an update cannot fit on the device, with advice."""
    room = _room(device)
    if estimate.update <= room:
        return
    advice = []
    if not lora:
        saved = estimate.gradients + estimate.optimizer + estimate.reference
        advice.append(f"lora=True, which needs next to none of {_gb(saved)} of gradients, optimizer state and reference")
        if estimate.reference:
            advice.append(f"beta=0, which needs no reference ({_gb(estimate.reference)})")
    elif estimate.weights > room / 2:
        advice.append('dtype="bfloat16" for the frozen weights, if they are wider')
    if estimate.activations > room / 8:
        advice.append(f"fewer micro_batch_tokens than {micro_batch_tokens}, for the same gradient")
    advice.append("a smaller model, or a device with more memory")
    raise ConfigurationError(f"an update needs {estimate}; {device} has {_gb(room)}. What helps: {'; '.join(advice)}")


def _room(device: torch.device) -> int:
    """Bytes that this process can have on the device, its present ones included."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _heads(text: PreTrainedConfig) -> tuple[int, int]:
    """Heads with keys and values, and how wide each is."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
