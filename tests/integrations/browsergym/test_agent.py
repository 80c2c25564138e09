"""An ordinary agent with a tool per action, in the real browser; the worlds; the cookbook."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("browsergym", reason="browsergym is not installed: pip install 'dreamgym-lg[browsergym]'")

from browser_parts import ToolPolicy, elements, miniwob, needs_webarena
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from dreamgym_lg.actions import tool_schemas
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.integrations.browsergym.actions import render
from dreamgym_lg.integrations.browsergym.agent import BrowserTools, create_agent_graph
from dreamgym_lg.integrations.browsergym.browsers import Browsers
from dreamgym_lg.integrations.browsergym.environment import OVER, BrowserGym
from dreamgym_lg.integrations.browsergym.world import BrowserGymWorld, webarena, webarenalite
from dreamgym_lg.rollout import rollout

COOKBOOK = Path(__file__).parents[3] / "cookbook" / "webarena.py"


def log_in(messages: list[BaseMessage]) -> AIMessage:
    """A scripted policy that reads the page and fills in the form, then sends and, once it has ended, says so."""
    told = [message.text for message in messages if message.type in ("human", "tool")]
    page = elements(next(text for text in reversed(told) if "RootWebArea" in text) if told[-1] != OVER else "")
    boxes = [element for element in page if element.role == "textbox"]
    if told[-1] == OVER:
        return AIMessage("Done.")
    if len(told) == 1:
        calls = [("fill", {"bid": boxes[0].bid, "value": "cierra"}), ("fill", {"bid": boxes[1].bid, "value": "11L"})]
    else:
        calls = [("click", {"bid": next(e.bid for e in page if e.name == "Login")})] * 2
    return AIMessage(
        "", tool_calls=[{"name": name, "args": args, "id": f"{len(told)}{n}"} for n, (name, args) in enumerate(calls)]
    )


async def test_an_agent_logs_in(browsers: Browsers) -> None:
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel

    class Policy(GenericFakeChatModel):
        def bind_tools(self, tools: object, **kwargs: object) -> "Policy":
            return self

        def _generate(self, messages: list[BaseMessage], *args: object, **kwargs: object):  # type: ignore[no-untyped-def, override]
            self.messages = iter([log_in(messages)])
            return super()._generate(messages)

    with closing(BrowserGym(browsers)) as environment:
        page = BrowserTools(environment, miniwob("login-user"))
        graph = create_agent_graph(Policy(messages=iter([])), page)
        state = await graph.ainvoke({"messages": await page.start()}, {"max_concurrency": 1})
    assert page.success and page.reward == 1 and page.over
    answers = [message.text for message in state["messages"] if isinstance(message, ToolMessage)]
    assert answers[-2:] == [OVER, OVER], "a call after the end changes nothing"
    assert state["messages"][-1].text == "Done."
    click = next(schema["function"] for schema in tool_schemas(page.tools) if schema["function"]["name"] == "click")
    assert click["parameters"]["required"] == ["bid"] and "Click an element" in click["description"]


def test_the_world_of_miniwob(browsers: Browsers, monkeypatch: pytest.MonkeyPatch) -> None:
    world = BrowserGymWorld(names=["click-test-2", "focus-text-2"])
    monkeypatch.setattr(world, "_browsers", browsers)
    found = {split: world.tasks(split, limit=8) for split in ("train", "validation", "test")}
    ids = [task.id for tasks in found.values() for task in tasks]
    assert 3 <= len(ids) == len(set(ids)) and all(task.split == split for split, tasks in found.items() for task in tasks)
    assert all(task.observation.startswith("RootWebArea") for task in found["train"])
    task = next(task for task in found["train"] if task.metadata["task"] == "miniwob.click-test-2")
    right = render("click", {"bid": next(each.bid for each in elements(task.observation) if each.name == "ONE")})
    agent = world.agent(ToolPolicy(calls=["click('99')", right]), real=True)
    (real,) = run_lasting(rollout(agent, [task], world.create_environment, source="real"))
    assert real.success and [step.valid for step in real.steps] == [False, True], "the agent of the dream plays real pages"
    again = BrowserGymWorld(**world.arguments)  # type: ignore[arg-type]
    assert (again.names, again.max_steps, again.name) == (world.names, world.max_steps, "miniwob")


def test_the_worlds_of_webarena() -> None:
    needs_webarena()
    lite, whole = webarenalite(), webarena(max_steps=20)
    assert len(lite.tasks("test")) == 165 and (whole.max_steps, lite.max_steps) == (20, 30)
    trained = {task.metadata["task"] for split in ("train", "validation") for task in lite.tasks(split)}
    assert len(trained) > 300 and not trained & {f"webarena.{task.metadata['webarena_id']}" for task in lite.tasks("test")}
    assert sum(len(whole.tasks(split)) for split in ("train", "validation", "test")) == 812
    with pytest.raises(ConfigurationError, match="no scripted policies"):
        list(lite.collect(lite.tasks("train"), {"demonstration": 1}, seed=0))
    with pytest.raises(ConfigurationError, match="only tasks of miniwob are named"):
        webarena(names=["login-user"])


@pytest.mark.slow
def test_the_cookbook_up_to_the_first_missing_site() -> None:
    needs_webarena()
    others = {name: value for name, value in os.environ.items() if not name.startswith("WA_")}
    environment = {**others, "WA_REDDIT": "http://localhost:9999"}
    done = subprocess.run(
        [sys.executable, COOKBOOK, "--model", "openai:none"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 1 and "webarenalite: 165 tasks" in done.stdout
    assert "6 of 7 addresses are missing: set WA_SHOPPING, WA_SHOPPING_ADMIN, WA_GITLAB" in done.stderr
    assert "WA_REDDIT" not in done.stderr and "Traceback" not in done.stderr
