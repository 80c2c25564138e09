"""WebShop as the world of an experiment, its scripted policies, and the shop as tools of an ordinary agent."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

pytest.importorskip("rapidfuzz", reason="WebShop needs: pip install 'dreamgym-lg[webshop]'")

from dreamgym_lg.actions import is_answer, parse_call
from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.experiment.world import load_world
from dreamgym_lg.integrations.text_games.scripted_policies import KINDS
from dreamgym_lg.integrations.webshop.agent import BOUGHT, ShopTools, as_tool_agent, create_agent_graph
from dreamgym_lg.integrations.webshop.data import load_tasks
from dreamgym_lg.integrations.webshop.world import WebShop
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate.agent import SimulatedAgent
from dreamgym_lg.types import Task, Trajectory


@pytest.fixture(scope="module")
def played(small: Path) -> list[Trajectory]:
    tasks = WebShop(small).tasks("train", limit=200)
    return list(WebShop(small).collect(tasks, dict.fromkeys(KINDS, 20), seed=0))


def test_it_is_found_by_name_and_made_again_with_its_arguments(small: Path) -> None:
    world = load_world("webshop", products=str(small), max_steps=9)
    assert isinstance(world, WebShop) and world.create_environment().max_steps == 9
    assert json.loads(json.dumps(world.arguments)) == {"products": str(small), "human": False, "max_steps": 9}


def test_without_products_it_says_where_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="none does not exist; name the folder that WebShop's setup.sh fills"):
        WebShop().tasks("train")


def test_a_limit_takes_of_every_split_and_more_of_it_takes_the_same(small: Path) -> None:
    world = WebShop(small)
    found = {split: world.tasks(split, limit=1000) for split in ("train", "validation", "test")}
    assert {split: len(tasks) for split, tasks in found.items()} == {"train": 796, "validation": 132, "test": 72}
    assert world.tasks("test", limit=2000)[:72] == found["test"]
    assert {task.environment for tasks in found.values() for task in tasks} == {world.name}


def test_collected_episodes_show_success_and_each_way_to_fail(small: Path, played: list[Trajectory]) -> None:
    succeeded = Counter(KINDS[number // 20] for number, each in enumerate(played) if each.success)
    assert len(played) == 20 * len(KINDS) and succeeded["demonstration"] >= 18 and succeeded["noisy"] >= 12
    assert succeeded["random"] <= 4 and succeeded["unfinished"] == 0
    assert any(0 < each.reward < 1 for each in played) and any(each.invalid_actions for each in played)
    for step in (step for each in played for step in each.steps):
        assert step.valid or (step.next_observation == step.observation and step.reward == 0)
    with pytest.raises(ConfigurationError, match="is a test task: offline trajectories of it would leak it"):
        list(WebShop(small).collect(load_tasks(small, limit=1), {}, seed=0))


def test_the_dream_refuses_what_the_shop_refuses(small: Path, scripted: Any) -> None:
    world = WebShop(small)
    task = world.tasks("train", limit=50)[0]
    dream: Dream = world.create_dream(Model(scripted(reply=lambda _: "valid, bought\nreward 0.5, failure\n(nothing)")))
    episode = dream.create_environment()
    first = episode.reset(task)
    assert first == world.create_environment().reset(task)
    refused = episode.step("click[buy now]")
    assert (refused.observation, refused.info["valid"], refused.info["decided_by"]) == (first, False, "rules")
    with pytest.raises(PredictionFailed, match="no responder of the dream"):
        episode.step("search[lamp]")  # without traces nobody knows the shop


# --- As tools --------------------------------------------------------------------------------------------------------


class Recorded(BaseChatModel):
    """Says the recorded calls one after the other, then the answer."""

    actions: Sequence[str]

    @property
    def _llm_type(self) -> str:
        return "recorded"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        action = self.actions[sum(message.type == "ai" for message in messages)]
        call = parse_call(action)
        said = AIMessage(json.loads(action)["answer"]) if call is None else AIMessage("", tool_calls=[tool_call(call)])
        return ChatResult(generations=[ChatGeneration(message=said)])


def tool_call(call: Any) -> Any:
    return {"name": call.name, "args": dict(call.arguments), "id": "1"}


async def test_an_agent_with_tools_plays_the_same_episodes(small: Path, played: list[Trajectory]) -> None:
    shop = ShopTools(small)
    for recorded in [each for each in played if each.steps[-1].terminated][::15]:
        expected = as_tool_agent(recorded)
        model = Recorded(actions=[step.action for step in expected.steps])
        agent = SimulatedAgent(
            create_agent_graph(model, shop), model, verify=shop.verify_real, real=True, reset_real=shop.reset_real
        )
        (real,) = await rollout(agent, [expected.task], source="real")
        assert real.error is None and (real.success, real.reward) == (recorded.success, pytest.approx(recorded.reward))
        assert [step.action for step in real.steps] == [step.action for step in expected.steps]
        assert [step.next_observation for step in real.steps] == [step.next_observation for step in expected.steps]
        assert is_answer(real.steps[-1].action) and real.steps[-2].next_observation == BOUGHT


async def test_each_episode_of_an_agent_has_a_shop_of_its_own(shop: Path, tasks: list[Task]) -> None:
    tools = ShopTools(shop)
    search, click = tools.tools
    with pytest.raises(Exception, match="no shop is open: run the agent inside"):
        search.invoke({"words": "shirt"})
    async with tools.reset_real(tasks[0]):
        assert "Linen Shirt" in search.invoke({"words": "shirts"}) and "Price: $20.0" in click.invoke({"what": "B000000002"})
        assert click.invoke({"what": "buy now"}) == BOUGHT and 0 <= tools.verify_real(tasks[0], None) < 1
        assert click.invoke({"what": "buy now"}).startswith("The shop is closed")
        async with tools.reset_real(tasks[1]):
            assert "Linen Shirt" in search.invoke({"words": "shirts"}) and tools.verify_real(tasks[1], None) == 0
