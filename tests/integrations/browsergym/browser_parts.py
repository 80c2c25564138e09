"""What the tests of BrowserGym share."""

import ast
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from dreamgym_lg.actions import parse_call
from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.integrations.browsergym.actions import as_call
from dreamgym_lg.integrations.browsergym.data import load_tasks
from dreamgym_lg.types import Task


def miniwob(name: str, seed: int = 0) -> Task:
    return load_tasks("miniwob", names=[name], seeds=[seed])[0]


class Element(NamedTuple):
    bid: str
    role: str
    name: str


def elements(page: str) -> list[Element]:
    """What a page shows that an action can name, from top to bottom."""
    found = re.findall(r"""^\t*\[(\w+)\] ([\w-]+) ?('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")?""", page, re.MULTILINE)
    return [Element(bid, role, ast.literal_eval(name) if name else "") for bid, role, name in found]


def needs_webarena() -> None:
    try:
        load_tasks("webarenalite")
    except MissingDependency as missing:
        pytest.skip(str(missing))


def change(pages: Path, name: str, before: str, after: str) -> None:
    file = pages / f"{name}.html"
    text = file.read_text()
    assert before in text
    file.unlink()
    file.write_text(text.replace(before, after))


def descendants(pid: int | None = None) -> list[psutil.Process]:
    return psutil.Process(pid or os.getpid()).children(recursive=True)


def is_browser(process: psutil.Process) -> bool:
    """Its main process: not the script that starts it, nor one for a part of it."""
    command = process.cmdline()
    return "--remote-debugging-pipe" in command and "chrom" in command[0] and not any("--type=" in part for part in command)


def has_ended(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != "zombie" for process in processes)


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


class ToolPolicy(BaseChatModel):
    """Calls these actions one after the other, then answers."""

    calls: list[str]
    told: list[str] = []

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> "ToolPolicy":
        self.told = [tool.name for tool in tools]
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        said = sum(message.type == "ai" for message in messages)
        if said >= len(self.calls):
            return ChatResult(generations=[ChatGeneration(message=AIMessage("Done."))])
        # bid=0 is no text: LangChain refuses it
        name, args = parse_call(as_call("miniwob", self.calls[said])) or ("click", {"bid": 0})
        call = {"name": name, "args": args, "id": f"call-{said}"}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=[call]))])
