"""A model in a process of its own says what it says in this one, and ends when it should."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.tools import tool
from tiny_models import create_model
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.errors import ConfigurationError, ProcessLost
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

pytestmark = pytest.mark.slow

PARENT = """
import sys, time
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
model = LocalChatModel.from_path(sys.argv[1], own_process=True)
print(model.engine._child.process.pid, flush=True)
time.sleep(600)
"""


@tool
def look(place: str) -> str:
    """Look at a place."""
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create_model(tokenizer, hidden_size=64, layers=2, max_tokens=512).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def beside(folder: Path) -> Iterator[LocalChatModel]:
    model = LocalChatModel.from_path(folder, max_new_tokens=12, own_process=True)
    child = model.engine._child.process
    yield model
    assert child.poll() is None, "it outlived all that was asked of it"
    model.engine = None  # type: ignore[assignment]
    gc.collect()  # errors that tests caught may refer to it in circles
    assert child.poll() is not None, "it ends with its user"


async def test_it_says_what_it_would_say_here(
    folder: Path, beside: LocalChatModel, converse_all: Callable[..., Any], opening: Callable[[int], list[BaseMessage]]
) -> None:
    here = LocalChatModel.from_path(folder, max_new_tokens=12)
    ours, theirs = [await converse_all(model, 12, turns=3) for model in (here, beside)]
    for mine, other in zip(ours, theirs, strict=True):
        assert [call.sampled_ids for call in mine.calls] == [call.sampled_ids for call in other.calls]
        (segment,), (same,) = mine.segments(), other.segments()
        assert segment.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    streamed = [chunk.text async for chunk in beside.astream(opening(1), seed=5)]
    assert len(streamed) > 2 and "".join(streamed) == (await here.ainvoke(opening(1), seed=5)).text
    calls = [model.bind_tools([look], tool_choice="look").invoke("Where?", seed=1) for model in (here, beside)]
    assert calls[0].content == calls[1].content and calls[0].tool_calls == calls[1].tool_calls
    now = time.perf_counter()
    assert beside.engine.passes and all(now - 600 < start < end < now for start, end in beside.engine.passes)


async def test_an_error_there_is_an_error_here(beside: LocalChatModel, opening: Callable[[int], list[BaseMessage]]) -> None:
    with pytest.raises(ConfigurationError, match=r"the model takes 512"):
        await beside.ainvoke("long " * 600)
    unsendable = beside.bind_tools([{"type": "function", "function": {"name": "look", "strict": lambda: None}}])
    with pytest.raises(Exception, match="pickle"):
        await unsendable.ainvoke("Where?")
    assert (await beside.ainvoke(opening(1))).usage_metadata


async def test_a_call_that_nobody_waits_for_does_not_harm_the_others(
    beside: LocalChatModel, opening: Callable[[int], list[BaseMessage]]
) -> None:
    pid = beside.engine._child.process.pid
    os.kill(pid, signal.SIGSTOP)  # so that it answers after the call was given up
    calls = [asyncio.ensure_future(beside.ainvoke(opening(i))) for i in range(4)]
    while len(beside.engine._waiting) < 4:
        await asyncio.sleep(0.01)
    calls[0].cancel()
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGCONT)
    gone, *answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError) and all(isinstance(answer, AIMessage) for answer in answers)
    assert (await beside.ainvoke(opening(5))).usage_metadata


def test_a_killed_process_says_so(folder: Path) -> None:
    model = LocalChatModel.from_path(folder, max_new_tokens=12, own_process=True)
    child = model.engine._child.process
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ProcessLost, match="status -9"):
        asyncio.run(_killed_meanwhile(model, child.pid))
    with pytest.raises(ProcessLost, match="load it again"):
        model.invoke("Anybody there?")


async def _killed_meanwhile(model: LocalChatModel, pid: int) -> None:
    asyncio.get_running_loop().call_later(0.2, os.kill, pid, signal.SIGKILL)
    await model.ainvoke("Wait for me.")


def test_it_does_not_outlive_a_killed_parent(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_what_is_no_model_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="no model with a tokenizer could be loaded"):
        LocalChatModel.from_path(tmp_path, own_process=True)
