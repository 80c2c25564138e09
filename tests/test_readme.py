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

from dreamgym_lg.cli import app

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def test_readme_has_blocks_of_known_kinds_only() -> None:
    assert {kind for kind, _ in BLOCKS} == {"bash", "python"}
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists_with_these_options(command: str) -> None:
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
    import json

    from dreamgym_lg.recipe import Settings

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(finished_run)
    settings = Settings(**json.loads((finished_run / "settings.json").read_text()))
    monkeypatch.setattr("dreamgym_lg.recipe.settings_for", lambda *_, **__: settings)
    monkeypatch.chdir(tmp_path)
    answer = "valid, it completes the task\nreward 1, success\nYou take the orange."
    namespace: dict[str, Any] = {
        "model": GenericFakeChatModel(messages=iter([AIMessage(answer)] * 9)),
        "policy": GenericFakeChatModel(messages=iter([AIMessage("take orange")] * 9)),
    }
    for text in [text for kind, text in BLOCKS if kind == "python"]:
        exec(compile(text, "README.md", "exec"), namespace)
    assert namespace["state"]["success"]
    assert namespace["policy"].invoke("read").text is not None
