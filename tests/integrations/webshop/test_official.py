"""The engine against records of the official one: pages, searches, goals, prices and rewards."""

import json
import lzma
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rapidfuzz", reason="WebShop needs: pip install 'dreamgym-lg[webshop]'")

from webshop_baselines import buy_first, play_baseline, rule_based

from dreamgym_lg.integrations.webshop.data import load_catalogue, load_tasks
from dreamgym_lg.integrations.webshop.environment import WebShopEnvironment
from dreamgym_lg.integrations.webshop.reward import COLORS, reward

Read = Callable[[str], Path]


def packed(file: Path) -> Any:
    with lzma.open(file) as content:
        return json.load(content)


def test_recorded_episodes_are_played_to_the_letter(small: Path, official: Read) -> None:
    """And `check_action` refuses only what changes nothing."""
    episodes = packed(official("webshop_walks.json.xz"))["episodes"]
    tasks, environment = load_tasks(small), WebShopEnvironment(small, max_steps=1000)
    played = refused = 0
    for episode in episodes:
        seen = [environment.reset(tasks[episode["goal"]])]
        assert seen[0] == episode["observation"]
        for step in episode["steps"]:
            answer = environment.check_action(step["action"], seen)
            result = environment.play(step["action"])  # the engine itself, behind its rules
            assert result.observation == step["observation"], step["action"]
            assert result.info["clickables"] == step["clickables"], step["action"]
            assert result.reward == pytest.approx(step["reward"], abs=1e-12), step["action"]
            assert result.terminated == step["done"] and not result.truncated
            assert answer is None or (answer == result.observation and not result.info["valid"])
            seen.append(result.observation)
            played, refused = played + 1, refused + (answer is not None)
    assert len(episodes) == 160 and played > 1600 and refused > 10


def test_goals_and_prices_are_the_official_ones(small: Path, official: Read) -> None:
    known, catalogue = packed(official("webshop_goals.json.xz")), load_catalogue(small)
    found = [[goal.asin, goal.price_limit, sha256(goal.instruction.encode()).hexdigest()[:16]] for goal in catalogue.goals]
    assert found == known["goals"] and len(found) == 6910
    assert {asin: product.price for asin, product in catalogue.products.items()} == known["prices"]
    splits = [task.split for task in load_tasks(small)]
    assert splits == ["test"] * 500 + ["validation"] * 1000 + ["train"] * 5410


def test_rewards_are_the_official_ones(small: Path, official: Read) -> None:
    known, catalogue = packed(official("webshop_goals.json.xz")), load_catalogue(small)
    assert list(COLORS) == known["colors"] and len(known["rewards"]) == 3000
    for index, asin, options, expected in known["rewards"]:
        goal = catalogue.goals[index]
        paid = reward(catalogue.products[asin], options, goal, catalogue.products[goal.asin])
        assert paid == pytest.approx(expected, abs=1e-12), (index, asin, options)


def test_the_baselines_reach_what_was_measured_on_the_official_engine(small: Path) -> None:
    """Of "buy the first": mean reward 0.531 and 2 % success on the 500 test goals."""
    environment, tasks = WebShopEnvironment(small), load_tasks(small)[:500]
    first = [play_baseline(buy_first, environment, task) for task in tasks]
    assert sum(episode.reward for episode in first) / 500 == pytest.approx(0.531, abs=5e-4)
    assert sum(episode.success for episode in first) == 10
    ruled = [play_baseline(rule_based, environment, task) for task in tasks[:50]]
    assert 20 <= sum(episode.success for episode in ruled) <= 40
