"""WebShop as the world of an experiment, and its scripted policies."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rapidfuzz", reason="WebShop needs: pip install 'dreamgym-lg[webshop]'")

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.world import load_world
from dreamgym_lg.integrations.text_games.scripted_policies import KINDS
from dreamgym_lg.integrations.webshop.data import load_tasks
from dreamgym_lg.integrations.webshop.world import WebShop
from dreamgym_lg.types import Trajectory


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
    assert succeeded["random"] <= 4
    assert any(0 < each.reward < 1 for each in played) and any(each.invalid_actions for each in played)
    for step in (step for each in played for step in each.steps):
        assert step.valid or (step.next_observation == step.observation and step.reward == 0)
    with pytest.raises(ConfigurationError, match="is a test task: offline trajectories of it would leak it"):
        list(WebShop(small).collect(load_tasks(small)[:1], {}, seed=0))


def test_the_dream_refuses_what_the_shop_refuses(small: Path, scripted: Any) -> None:
    world = WebShop(small)
    task = world.tasks("train", limit=50)[0]
    model = scripted(reply=lambda _: "valid, a page\nreward 0, continues\nLamps")
    dream: Dream = world.create_dream(Model(model))
    episode = dream.create_environment()
    first = episode.reset(task)
    assert first == world.create_environment().reset(task)
    refused = episode.step("click[buy now]")
    assert (refused.observation, refused.info["valid"], refused.info["decided_by"]) == (first, False, "rules")
    assert not model.asked
    found = episode.step("search[lamp]")
    assert (found.observation, found.info["decided_by"]) == ("Lamps", "model")
