"""Where LangGraph people deploy and look: `dreamgym serve` over HTTP, `langgraph dev` and its Studio, each a real server."""

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
from dreamgym_lg.learner import sft_row
from dreamgym_lg.production.export import export_policy, load_policy
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Segment

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "book", "arguments": {"city": "Rome"}}\n</tool_call>'
ASKED = "Book a room in Rome."
RECORD: dict[str, Any] = {
    **{"policy_version": "ab12", "base_model": "tiny", "training": None, "experience_model": None, "evaluation": []},
    **{"data": {"trajectories": 0, "steps": 0, "sha256": ""}, "versions": {"dreamgym-lg": "0.1.0"}},
}
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
    rows = []
    for messages, reply in ((asked, CALL), (after, "It is booked.")):
        tools = [convert_to_openai_tool(book)]
        prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        given, said = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, reply))
        said = [*said, tokenizer.eos_token_id]
        own, logprobs = [*[0] * len(given), *[1] * len(said)], [0.0] * len(given + said)
        rows.append(sft_row(Segment(token_ids=given + said, sampled=own, logprobs=logprobs, temperature=1.0)))
    train_sft(model, rows * 50, steps=50, batch_size=2, learning_rate=5e-3, seed=0)
    home = tmp_path_factory.mktemp("serving")
    (home / "my_app.py").write_text(AGENT)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, temperature=0, max_new_tokens=60)
    agent = {"path": f"{home / 'my_app.py'}:graph", "route": None, "pass_through": []}
    export_policy(policy, home / "mine", provenance=RECORD, agent=agent)
    return home / "mine"


GYM = """
from pathlib import Path

from langchain_core.language_models import FakeListChatModel

from dreamgym_lg import DreamGym, LocalChatModel, ReplayBuffer, Settings, Task

here = Path(__file__).parent
SPLITS = {"a": "train", "b": "train", "t": "test"}
TASKS = [Task(id=id, instruction="Book a room in Rome.", environment="rooms", split=split) for id, split in SPLITS.items()]


def gym():
    settings = Settings(max_false_success=None, real_budget=0, num_tasks=2, num_generations=2, lora=False)
    dreamer = FakeListChatModel(responses=["valid, no progress yet\\nreward 0, continues\\nA real room."])
    check = lambda task, state: len(state["messages"][-1].text) % 2
    parts = {"experience_model": dreamer, "tasks": TASKS, "verify_dream": check, "verify_real": check, "isolation": "guard"}
    policy = LocalChatModel.from_path(here / "mine", temperature=0.1, max_new_tokens=60)
    parts |= {"policy": policy, "out": here / "run", "settings": settings}
    return DreamGym(str(here / "my_app.py:graph"), replay_buffer=ReplayBuffer(here / "replay.db"), **parts)
"""


@contextmanager
def running(*command: str, cwd: Path, port: int, health: str, **variables: str) -> Iterator[str]:
    """A server in a process of its own; the address that it listens at."""
    log, environment = cwd.parent / f"{port}.log", {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=file, env=environment)
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


def test_adapters_in_a_moved_folder_are_served_as_load_policy_samples_them(tmp_path: Path) -> None:
    """With the variables of the chat template, too."""
    import openai
    import torch

    from dreamgym_lg.integrations.trl.adapters import adapt

    tokenizer = create_tokenizer([ASKED], vocab_size=320)
    tokenizer.chat_template = "{{ tone }}" + tokenizer.chat_template
    model = create_model(tokenizer, hidden_size=64, layers=2, max_tokens=1024)
    adapt(model)
    for name, value in model.named_parameters():
        torch.nn.init.normal_(value, std=0.3) if "lora_B" in name else None
    variables = {"chat_template_kwargs": {"tone": "Kindly. " * 9}}
    policy = LocalChatModel(model=model, tokenizer=tokenizer, temperature=0, max_new_tokens=20, **variables)
    export_policy(policy, tmp_path / "mine", provenance=RECORD)
    moved, port = (tmp_path / "mine").rename(tmp_path / "moved"), free_port()
    said = load_policy(moved).invoke(ASKED)
    command = (sys.executable, "-m", "dreamgym_lg.cli.app", "serve", str(moved), "--port", str(port), "--device", "cpu")
    with running(*command, cwd=moved, port=port, health="/health") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        answer = client.chat.completions.create(
            model="moved", messages=[{"role": "user", "content": ASKED}], max_completion_tokens=20
        )
    assert answer.choices[0].message.content == said.text
    assert answer.usage is not None and answer.usage.prompt_tokens == said.usage_metadata["input_tokens"]


@contextmanager
def langgraph_dev(folder: Path, *options: str, **variables: str) -> Iterator[Any]:
    """`langgraph dev` started in a folder; a client of it."""
    pytest.importorskip("langgraph_api")
    from langgraph_sdk import get_client

    port, cli = free_port(), "from langgraph_cli.cli import cli; cli()"
    command = (sys.executable, "-c", cli, "dev", "--no-browser", "--no-reload", "--port", str(port), *options)
    with running(*command, cwd=folder, port=port, health="/ok", **variables) as address:
        yield get_client(url=address)


async def test_langgraph_dev_serves_the_agent_with_the_policy_in_it(exported: Path) -> None:
    asked: Any = {"messages": [{"role": "user", "content": ASKED}]}
    with langgraph_dev(exported) as client:
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


async def test_langgraph_dev_serves_the_agent_with_exported_prompts(tmp_path: Path) -> None:
    """Its own model reads the new system message and the new description, and the real tool runs."""
    from dreamgym_lg.production.prompts import export_prompts

    here = Path(__file__).parent / "integrations" / "gepa"
    project = tmp_path / "project"
    project.mkdir()
    path = f"import sys\n\nsys.path.insert(0, {str(here)!r})\n"
    (project / "my_desk.py").write_text(f"{path}from test_gepa import desk\n\ngraph = desk('look first', 'in cents')\n")
    system = "You are the desk of a shop. Refund the order. End with: Have a nice day."
    changes = {
        "system message of model": (system, f"{system} Look the order up first."),
        "description of refund": ("Refund an order.", "Refund an order. The amount is in cents."),
    }
    record = {"model": "clerk", "learner": "gepa", "scores": (0.0, 1.0)}
    agent = {"path": f"{project / 'my_desk.py'}:graph", "route": None, "pass_through": []}
    export_prompts(changes, project / "prompts", record, agent=agent)
    project.rename(moved := tmp_path / "moved")
    with langgraph_dev(moved / "prompts") as client:
        asked: Any = {"messages": [{"role": "user", "content": "Refund order 5."}]}
        state: Any = await client.runs.wait(None, "agent", input=asked)
        calls = [(call["name"], call["args"]) for each in state["messages"] for call in each.get("tool_calls") or ()]
        assert calls == [("look", {"order": 5}), ("refund", {"order": 5, "amount": 500})]
        assert state["messages"][-1]["content"] == "Done. Have a nice day."


async def test_studio_draws_and_runs_the_training_graph(exported: Path) -> None:
    home = exported.parent
    (home / "my_gym.py").write_text(GYM)
    named = Path(__file__).parents[1] / "langgraph.json"
    with langgraph_dev(
        home, "--allow-blocking", "--config", str(named), DREAMGYM_EXPERIMENT=str(home / "my_gym.py:gym")
    ) as client:
        (assistant,) = await client.assistants.search()
        drawn = await client.assistants.get_graph(assistant["assistant_id"])
        nodes = {"__start__", "curriculum", "rollout", "update_policy", "evaluate", "count", "__end__"}
        assert {node["id"] for node in drawn["nodes"]} == nodes
        thread = await client.threads.create()
        asked = {"run": "studio", "iterations": 2}
        state: Any = await client.runs.wait(thread["thread_id"], "training", input=asked)
        assert state["iteration"] == 2, state
    with ReplayBuffer(home / "replay.db") as buffer:
        played = list(buffer.trajectories(run="studio"))
        assert [row["iteration"] for row in buffer.metrics("studio")] == [0, 1]
    assert len(played) == 8 and all(each.error is None and each.source == "synthetic" for each in played)
    assert (home / "run" / "models" / f"studio-{thread['thread_id']}").is_dir() and not (home / "run" / "training.db").exists()
