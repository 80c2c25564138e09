"""What `LocalChatModel.from_path` is told it does or refuses; where a model is loaded, and how it computes there."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, HumanMessage
from tiny_models import create_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as bars

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers import adapter_files, loading
from dreamgym_lg.integrations.transformers.batch import Decoder
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.engine import LocalEngine
from dreamgym_lg.integrations.transformers.loading import resolve_device
from dreamgym_lg.integrations.transformers.requests import Engine, Generated, Request
from dreamgym_lg.token_recorder import TokenRecorder, TrainablePolicy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create_model(tokenizer, hidden_size=32, layers=1).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What `from_pretrained` of the model and of the tokenizer are given; they load without it."""
    given: dict[str, dict[str, Any]] = {}
    for name, auto in {"model": AutoModelForCausalLM, "tokenizer": AutoTokenizer}.items():

        def load(path: Any, *, name: str = name, original: Any = auto.from_pretrained, **options: Any) -> Any:
            given[name] = options
            return original(path)

        monkeypatch.setattr(auto, "from_pretrained", load)
    return given


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine that says it has a GPU; where models are moved to."""
    moved: list[str] = []

    def to(model: PreTrainedModel, device: str) -> PreTrainedModel:
        moved.append(device)
        return model

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(PreTrainedModel, "to", to)
    return moved


@pytest.mark.parametrize("watched", [True, False])
def test_a_log_file_gets_no_bars_of_loaded_weights(
    folder: Path, tmp_path: Path, watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adapter_files, "is_watched", lambda: watched)
    adapter_files.write_model(loading.load_model(folder), tmp_path)
    shown = capsys.readouterr().err
    assert ("Loading weights" in shown, "Writing model shards" in shown) == (watched, watched)
    assert bars.is_progress_bar_enabled(), "the bars of others stay"


REFUSED = {
    "torch_dtype": "its name is dtype",
    "max_tokens": "its name is max_new_tokens",
    "top_p": "known: ",
    "temprature": "Did you mean 'temperature'",
    "attn_implementatoin": "Did you mean 'attn_implementation'",
    "model": "known: ",
    "engine": "known: ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_option_is_refused_with_its_cure(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.*{REFUSED[name]}"):
        LocalChatModel.from_path(tmp_path / "nothing is loaded for it", **{name: 1})


@pytest.mark.parametrize(
    ("name", "cure"),
    {
        "max_tokens": "its name is max_new_tokens",
        "temprature": "Did you mean 'temperature'",
        "device": "known: ",
    }.items(),
)
def test_an_unknown_field_is_refused_with_its_cure(name: str, cure: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}.*{cure}"):
        LocalChatModel(tokenizer=tokenizer, **{name: 1})


def test_loading_options_reach_the_model_and_its_tokenizer(folder: Path, loaded: dict[str, dict[str, Any]]) -> None:
    own = {"attn_implementation": "eager", "device_map": {"": "cpu"}, "quantization_config": object()}
    LocalChatModel.from_path(folder, revision="v1", token="secret", trust_remote_code=False, **own)
    hub = {"revision": "v1", "token": "secret", "trust_remote_code": False}
    assert loaded == {"tokenizer": hub, "model": {**hub, **own, "dtype": "auto"}}


def test_loading_options_do_what_they_say(folder: Path) -> None:
    model: Any = LocalChatModel.from_path(folder, attn_implementation="eager", device_map="cpu", name_or_path="mine")
    assert model.model.config._attn_implementation == "eager" and model.name_or_path == "mine"
    with pytest.raises(ConfigurationError, match="no model with a tokenizer could be loaded.*nonsense"):
        LocalChatModel.from_path(folder, attn_implementation="nonsense")


@pytest.mark.parametrize(
    ("dtype", "computes", "expected"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("float32", True, "float32"),
        (torch.float32, True, "float32"),
        ("bfloat16", False, "bfloat16"),
    ],
)
def test_a_checkpoint_keeps_its_dtype_unless_another_is_asked_for_or_the_cpu_lacks_it(
    folder: Path, dtype: Any, computes: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "computes_bfloat16", lambda: computes)
    model: Any = LocalChatModel.from_path(folder, dtype=dtype).model
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, expected)}


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown dtype 'float23'.*Did you mean 'float32'"):
        LocalChatModel.from_path(folder, dtype="float23")


def test_a_model_is_loaded_onto_the_gpu_if_there_is_one(folder: Path, gpu: list[str]) -> None:
    LocalChatModel.from_path(folder)
    LocalChatModel.from_path(folder, device="cuda:1")
    LocalChatModel.from_path(folder, device="cpu")
    LocalChatModel.from_path(folder, device_map="cpu")
    assert gpu == ["cuda", "cuda:1", "cpu"]


def test_quantized_weights_are_loaded_where_they_shall_be(
    folder: Path, gpu: list[str], loaded: dict[str, dict[str, Any]]
) -> None:
    LocalChatModel.from_path(folder, quantization_config=object())
    assert loaded["model"]["device_map"] == {"": "cuda"} and gpu == [], "they cannot be moved"


def test_a_device_that_is_not_there_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigurationError, match="device='cuda', but PyTorch finds no GPU here"):
        LocalChatModel.from_path(folder, device="cuda")
    with pytest.raises(ConfigurationError, match="device='gpu' is no device"):
        LocalChatModel.from_path(folder, device="gpu")
    with pytest.raises(ConfigurationError, match="both place the model"):
        LocalChatModel.from_path(folder, device="cpu", device_map="cpu")


def test_a_model_over_several_devices_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = create_model(tokenizer, hidden_size=32, layers=2)
    model.model.layers[1].to("meta")
    with pytest.raises(ConfigurationError, match="spread over cpu, meta"):
        LocalEngine(model, tokenizer)


def test_float32_weights_compute_in_bfloat16_on_a_gpu_alone(
    policy: LocalChatModel, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    decoder = Decoder(policy.model, tokenizer)
    assert decoder.compute_dtype == torch.float32
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))
    assert decoder.compute_dtype == torch.bfloat16
    halved = create_model(tokenizer, hidden_size=32, layers=1).to(torch.float16)
    assert Decoder(halved, tokenizer).compute_dtype == torch.float16


async def test_autocast_records_what_it_sampled_from(
    policy: LocalChatModel,
    monkeypatch: pytest.MonkeyPatch,
    opening: Callable[[int], list[BaseMessage]],
    forward_error: Callable[..., float],
) -> None:
    monkeypatch.setattr(Decoder, "compute_dtype", torch.bfloat16)  # the CPU has autocast too
    with TokenRecorder(seed=1) as recorder:
        messages = opening(3)
        for _ in range(3):
            messages += [await policy.ainvoke(messages), HumanMessage("hm")]
    (segment,) = recorder.segments()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = forward_error(policy, segment)
    assert same < 0.03 and 1e-4 < forward_error(policy, segment) < 0.3, "those of autocast, not of float32"
    engine: Any = policy.engine
    (prefix,) = engine.prefixes.prefixes.values()
    assert prefix.cached.buffer.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}  # type: ignore[union-attr]


class Parrot:
    """An engine of no model: it repeats what was said last."""

    ends = frozenset({1})

    def __init__(self) -> None:
        self.cleared = 0

    def submit(self, request: Request) -> "Future[Generated]":
        future: Future[Generated] = Future()
        text = request.conversation[-1]["content"]
        if request.on_text is not None:
            request.on_text(text)
        future.set_result(Generated(text, [5, 6], [7, 1], [-0.5, -0.25], "stop"))
        return future

    def clear(self) -> None:
        self.cleared += 1


async def test_any_engine_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    parrot = Parrot()
    assert isinstance(parrot, Engine)
    policy = LocalChatModel(engine=parrot, tokenizer=tokenizer)
    with TokenRecorder() as recorder:
        assert (await policy.ainvoke("apple")).text == policy.invoke("apple").text == "apple"
    assert recorder.calls[0][1:5] == ([5, 6], [7, 1], [-0.5, -0.25], 1.0)
    assert [chunk.text async for chunk in policy.astream("apple")][0] == "apple"
    policy.with_temperature(0.5).weights_changed()
    assert parrot.cleared == 1
    assert policy.model is None and isinstance(policy, TrainablePolicy)


def test_without_a_model_or_an_engine_nothing_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigurationError, match="give model=, engine="):
        LocalChatModel(tokenizer=tokenizer)


def test_an_engine_has_room_for_a_call(policy: LocalChatModel, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigurationError, match="max_batch_size=0"):
        LocalEngine(policy.model, tokenizer, max_batch_size=0)


def test_stop_strings_of_the_model_and_of_a_call(policy: LocalChatModel, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = policy.invoke("apple", seed=3).text
    first, second = whole[4:6], whole[2:4]
    stopping = LocalChatModel(model=policy.model, tokenizer=tokenizer, max_new_tokens=12, stop=[first])
    assert stopping.invoke("apple", seed=3).text == whole[: whole.index(first)]
    assert stopping.invoke("apple", seed=3, stop=[second]).text == whole[: whole.index(second)]


def test_streaming_tells_callbacks_as_invoke_goes(
    policy: LocalChatModel, tokenizer: PreTrainedTokenizerFast, opening: Callable[[int], list[BaseMessage]]
) -> None:
    class Listener(BaseCallbackHandler):
        heard = 0

        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            self.heard += 1

    silent, told = Listener(), Listener()
    policy.invoke(opening(2), {"callbacks": [silent]})
    streaming = LocalChatModel(model=policy.model, tokenizer=tokenizer, max_new_tokens=12, streaming=True)
    streaming.invoke(opening(2), {"callbacks": [told]})
    assert silent.heard == 0 and told.heard > 1
