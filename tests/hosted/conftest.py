"""pytest's importlib mode puts no folder on the path, so `import chat_server` needs this; the world that the server plays."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from chat_server import ChatServer
from house import CANARY
from langchain_core.messages import BaseMessage
from tenacity import wait_none


@pytest.fixture
def serve() -> Iterator[Callable[..., ChatServer]]:
    """Starts servers that stop with the test."""
    running: list[ChatServer] = []

    def start(*args: Any, **kwargs: Any) -> ChatServer:
        running.append(ChatServer(*args, **kwargs))
        return running[-1].start()

    yield start
    for server in running:
        server.stop()


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client and LangChain would have waited before another try: no real server has to be spared here."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("anyio.sleep", sleep)
    monkeypatch.setattr("langchain_core.runnables.retry.wait_exponential_jitter", lambda **_: wait_none())
    return waited


@pytest.fixture(scope="session")
def chat_model() -> Callable[..., Any]:
    from langchain_openai import ChatOpenAI

    def make(server: ChatServer, **options: Any) -> Any:
        given = {"model": "door", "base_url": server.url, "api_key": CANARY, "max_retries": 0, "temperature": 0}
        return ChatOpenAI(**{**given, **options})

    return make


@pytest.fixture(scope="session")
def walker(scripted: Any) -> Any:
    """A policy that opens the door and leaves."""

    def act(messages: Sequence[BaseMessage]) -> str:
        return ["open door", "go north"][sum(message.type == "ai" for message in messages) % 2]

    return scripted(reply=act)
