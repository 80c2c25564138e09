"""An exported policy where LangGraph people deploy: `dreamgym serve` over HTTP, and `langgraph dev`, each a real server."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from tiny_models import create_model, create_tokenizer

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.production.export import export_policy, load_policy
from dreamgym_lg.token_recorder import TokenRecorder

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "book", "arguments": {"city": "Rome"}}\n</tool_call>'
ASKED = "Book a room in Rome."
AGENT = '''
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def book(city: str) -> str:
    """Book a room."""
    return "A real room."


graph = create_agent(ChatOpenAI(model="nobody", api_key="none", base_url="http://127.0.0.1:9/v1"), [book])
'''


@tool
def book(city: str) -> str:
    """Book a room."""
    return "A real room."


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy that books and then says so: supervised training of two replies, until it knows them by heart."""
    from dreamgym_lg.integrations.trl.sft import train_sft

    tokenizer = create_tokenizer([ASKED, CALL, "A real room.", "It is booked."], vocab_size=320)
    model = create_model(tokenizer, hidden_size=64, layers=2, max_tokens=1024)
    function = {"name": "book", "arguments": {"city": "Rome"}}
    asked: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    after = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "1", "function": function}]},
        {"role": "tool", "content": "A real room.", "tool_call_id": "1", "name": "book"},
    ]
    rows: list[Any] = []
    for messages, reply in ((asked, CALL), (after, "It is booked.")):
        tools = [convert_to_openai_tool(book)]
        prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        given, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, reply))
        said = [*said, tokenizer.eos_token_id]
        rows.append({"input_ids": given + said, "labels": [-100] * len(given) + said})
    train_sft(model, rows * 50, steps=50, batch_size=2, learning_rate=5e-3, seed=0)
    home = tmp_path_factory.mktemp("serving")
    (home / "my_app.py").write_text(AGENT)
    record = {
        **{"policy_version": "ab12", "base_model": "tiny", "training": None, "experience_model": None, "evaluation": []},
        **{"data": {"trajectories": 0, "steps": 0, "sha256": ""}, "versions": {"dreamgym-lg": "0.1.0"}},
    }
    policy = LocalChatModel(model=model, tokenizer=tokenizer, temperature=0, max_new_tokens=60)
    agent = {"path": f"{home / 'my_app.py'}:graph", "route": None, "pass_through": []}
    export_policy(policy, home / "mine", provenance=record, agent=agent)
    return home / "mine"


@contextmanager
def running(*command: str, cwd: Path, port: int, health: str) -> Iterator[str]:
    """A server in a process of its own; the address that it listens at."""
    log = cwd.parent / f"{port}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline, f"no server: {log.read_text()[-2000:]}"
            try:
                if httpx.get(address + health, timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_tool_calls_come_back_through_both_clients(exported: Path) -> None:
    import openai
    from langchain_openai import ChatOpenAI

    port = free_port()
    command = (sys.executable, "-m", "dreamgym_lg.cli.app", "serve", str(exported), "--port", str(port), "--device", "cpu")
    with running(*command, cwd=exported, port=port, health="/health") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["mine"]
        given: Any = {
            "model": "mine",
            "messages": [{"role": "user", "content": ASKED}],
            "tools": [convert_to_openai_tool(book)],
        }
        choice = client.chat.completions.create(**given).choices[0]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("book", '{"city": "Rome"}')
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**given, stream=True) if chunk.choices]
        assert [call.function.name for delta in deltas for call in delta.tool_calls or ()] == ["book"]

        said = [*given["messages"], {"role": "assistant", "content": "Let me see.", "tool_calls": [call.model_dump()]}]
        said.append({"role": "tool", "tool_call_id": call.id, "content": "A real room."})
        usage = client.chat.completions.create(**{**given, "messages": said}).usage
        with TokenRecorder() as recorder:
            load_policy(exported).bind_tools([book]).invoke(said)
        (segment,) = recorder.segments()
        assert usage is not None and usage.prompt_tokens == segment.sampled.index(True), "the words beside a call count"

        model: Any = ChatOpenAI(model="mine", base_url=f"{address}/v1", api_key="none")  # type: ignore[arg-type]
        messages = create_agent(model, [book]).invoke({"messages": [("human", ASKED)]})["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
        assert messages[2].text == "A real room." and messages[3].text == "It is booked."


async def test_langgraph_dev_serves_the_agent_with_the_policy_in_it(exported: Path) -> None:
    pytest.importorskip("langgraph_api")
    from langgraph_sdk import get_client

    asked: Any = {"messages": [{"role": "user", "content": ASKED}]}
    port = free_port()
    cli = "from langgraph_cli.cli import cli; cli()"
    command = (sys.executable, "-c", cli, "dev", "--no-browser", "--no-reload", "--port", str(port))
    with running(*command, cwd=exported, port=port, health="/ok") as address:
        client = get_client(url=address)
        state: Any = await client.runs.wait(None, "agent", input=asked)
        assert [message["type"] for message in state["messages"]] == ["human", "ai", "tool", "ai"]
        assert state["messages"][1]["tool_calls"][0]["args"] == {"city": "Rome"}
        assert state["messages"][3]["content"] == "It is booked."
        assert state["messages"][3]["response_metadata"]["model_name"] == "mine"

        thread = await client.threads.create()
        text = ""
        modes: Any = ["messages-tuple", "updates"]
        async for chunk in client.runs.stream(thread["thread_id"], "agent", input=asked, stream_mode=modes):
            if chunk.event == "messages" and chunk.data[0]["type"] == "AIMessageChunk":
                text += chunk.data[0]["content"]
        assert text == "It is booked.", "token by token"
        kept: Any = await client.threads.get_state(thread["thread_id"])
        assert len(kept["values"]["messages"]) == 4, "the server's checkpointer has it"
