"""`dreamgym ui` as a user has it: the command in a process of its own, its pages in a real Chromium."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.types import Task, Trajectory

pytest.importorskip("starlette")
playwright = pytest.importorskip("playwright.sync_api")

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture
def address(database: Path) -> Iterator[str]:
    """Where the command says that it serves; it is ended as a user ends it."""
    command = [sys.executable, "-m", "dreamgym_lg.cli.app", "ui", str(database), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield re.findall(r"http://127\.0\.0\.1:\d+", process.stdout.readline())[0]
        process.send_signal(2)
        assert process.wait(20) == 130 and "stopped" in process.stdout.read()


@pytest.fixture
def page() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        own = started.chromium.executable_path
        path = own if Path(own).exists() else next((found for each in BROWSERS if (found := shutil.which(each))), None)
        if path is None:
            pytest.skip("there is no Chromium: run `playwright install chromium`")
        browser = started.chromium.launch(executable_path=path, args=["--disable-gpu", "--disable-dev-shm-usage"])
        yield browser.new_page()
        browser.close()


@pytest.mark.slow
def test_open_filter_open_an_episode_see_its_reasoning_live(page: Any, address: str, database: Path) -> None:
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))

    page.goto(address)
    page.get_by_role("link", name="Episodes").click()
    page.get_by_label("outcome").select_option("success")
    page.get_by_label("played in").select_option("synthetic")
    page.get_by_role("button", name="Filter").click()
    assert "outcome=success" in page.url and "source=synthetic" in page.url
    assert page.locator("td:first-child").all_inner_texts() == ["5", "3"]

    shared = page.url
    page.get_by_role("link", name="3", exact=True).click()
    assert page.locator(".reasoning").all_inner_texts() == ["The key fits, so it opens.", "It was so before."]
    page.get_by_role("link", name="side by side with its group").click()
    page.get_by_text("answer (recorded)").click()
    assert page.get_by_text("It was so before.").is_visible()

    page.goto(f"{address}/run?run=train&iteration=0")
    assert page.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 2000
    page.goto(f"{address}/episode?id=7")
    assert page.title() == "Episode 7 · replay.db", "what a trace holds is not run"

    page.goto(shared)
    page.locator(".live", has_text="live").wait_for()
    with ReplayBuffer(database) as buffer:
        task = Task(id="new", instruction="Stored meanwhile.", environment="e")
        buffer.add(Trajectory(task=task, source="synthetic", success=True, run="train", iteration=2))
    page.get_by_text("Stored meanwhile.").wait_for(timeout=10_000)
    assert page.locator("td:first-child").all_inner_texts() == ["8", "5", "3"], "still as it was filtered"
    assert said == [], "no script failed, and the policy had nothing to stop"
