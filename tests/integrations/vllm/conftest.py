"""pytest's importlib mode puts no folder on the path, so `import vllm_server` needs this; a policy and servers of it."""

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tiny_models import create_model, create_tokenizer
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.vllm import engine as vllm_engine
from dreamgym_lg.integrations.vllm import server as vllm_client

sys.path.insert(0, str(Path(__file__).parent))
from vllm_server import VLLMServer  # noqa: E402


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits long; a server here restarts in no time, so each call asks first whether it has."""
    monkeypatch.setattr(vllm_engine, "BACKOFF", (0.01, 0.05))
    monkeypatch.setattr(vllm_client, "RESTART_SECONDS", 0.0)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer(["say a colour red green blue yellow", "a longer observation of the kitchen"] * 3, vocab_size=320)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> Any:
    return create_model(tokenizer, hidden_size=32, layers=1, max_tokens=512)


@pytest.fixture
def here(model: Any, tokenizer: PreTrainedTokenizerFast) -> LocalChatModel:
    """The policy with its replies from this process."""
    return LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=8)


@pytest.fixture
def serve(model: Any, tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., VLLMServer]]:
    """Starts servers of the policy's model, as it is now, that stop with the test."""
    running: list[VLLMServer] = []
    base = deepcopy(model)

    def start(served: Any = None, **options: Any) -> VLLMServer:
        running.append(VLLMServer(base if served is None else served, tokenizer, **options).start())
        return running[-1]

    yield start
    for server in running:
        server.stop()
