"""Every block of the README runs: its commands exist with these options, its Python does what it says."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from dreamgym_lg.cli.app import app

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def test_readme_has_blocks_of_known_kinds_only() -> None:
    assert {kind for kind, _ in BLOCKS} == {"bash", "python"}
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists_with_these_options(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("replay.db", "traces.jsonl", "my_app.py"):
        (tmp_path / name).touch()
    program, name, *arguments = shlex.split(command)
    if program == "make":
        assert subprocess.run(["make", "-n", name], cwd=README.parent, capture_output=True).returncode == 0
    else:
        assert program == "dreamgym"
        group = typer.main.get_command(app)
        group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_python_blocks_run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace; the first block finds a finished run, so that its stages have nothing left to do."""
    from dreamgym_lg.experiment.worlds import open_folder

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(finished_run)
    finished = open_folder(finished_run)
    monkeypatch.setattr("dreamgym_lg.integrations.textworld_express.world.TextWorldExpressWorld.settings", finished.settings)
    monkeypatch.chdir(tmp_path)
    answer = "valid, it completes the task\nreward 1, success\nYou take the orange."
    namespace: dict[str, Any] = {
        "model": GenericFakeChatModel(messages=iter([AIMessage(answer)] * 9)),
        "policy": GenericFakeChatModel(messages=iter([AIMessage("take orange")] * 9)),
    }
    for text in [text for kind, text in BLOCKS if kind == "python" and "my_app" not in text]:
        exec(compile(text, "README.md", "exec"), namespace)
    assert namespace["state"]["success"]
    assert namespace["policy"].invoke("read").text is not None


MY_APP = """
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel


class Production(FakeListChatModel):
    def bind_tools(self, tools, **kwargs):
        return self.bind(tools=tools, **kwargs)


def book(city: str) -> str:
    'Book a room.'
    raise AssertionError("nothing real runs in the dream")


graph = create_agent(Production(responses=["production"]), [book])
"""


@pytest.mark.slow
def test_the_five_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny policy in place of Qwen and a scripted model in place of OpenAI's; one iteration."""
    import json

    import langchain.chat_models
    from langgraph.pregel import Pregel

    from dreamgym_lg import DreamGym
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
    from dreamgym_lg.integrations.transformers.tiny_models import create_model, create_tokenizer
    from dreamgym_lg.integrations.trl.sft import save_model

    tokenizer = create_tokenizer(["Book a room in Rome. done"] * 9, vocab_size=320)
    save_model(create_model(tokenizer, hidden_size=32, layers=1), tokenizer, tmp_path / "tiny")
    tiny = LocalChatModel.from_path(tmp_path / "tiny", max_new_tokens=8)
    world = GenericFakeChatModel(messages=iter([AIMessage("valid, it ends\nreward 0, failure\n(nothing)")] * 99))
    train = DreamGym.train
    monkeypatch.setattr(langchain.chat_models, "init_chat_model", lambda *_, **__: world)
    monkeypatch.setattr(DreamGym, "train", lambda gym, *_, **__: train(gym, tiny, 1, num_tasks=1, num_generations=2))
    (tmp_path / "my_app.py").write_text(MY_APP)
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "Book a room in Rome."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "booked"},
        {"role": "assistant", "content": "done"},
    ]
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages, "reward": 1}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (block,) = (text for kind, text in BLOCKS if kind == "python" and "my_app" in text)
    namespace: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), namespace)
    assert isinstance(namespace["agent"], Pregel)
    assert LocalChatModel.from_path("policies/support-v1").invoke("hi").usage_metadata
    episode, _ = namespace["replay_buffer"].trajectories(iteration=0, segments=True, source="synthetic")
    assert episode.source == "synthetic" and episode.segments[0].trainable > 0
