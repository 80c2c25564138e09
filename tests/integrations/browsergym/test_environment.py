"""MiniWoB++ in a real, headless Chromium."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("browsergym", reason="browsergym is not installed: pip install 'dreamgym-lg[browsergym]'")

from browser_parts import elements, miniwob

from dreamgym_lg.environment import check_environment, record_action
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed
from dreamgym_lg.integrations.browsergym.actions import render
from dreamgym_lg.integrations.browsergym.browsers import Browsers
from dreamgym_lg.integrations.browsergym.environment import OVER, BrowserGym, make_tasks
from dreamgym_lg.integrations.browsergym.world import SHORT_TASKS
from dreamgym_lg.types import Step, Task

PLANS: dict[str, list[tuple[str, ...]]] = {
    "choose-list": [("select_option", "combobox", "", "{from}"), ("click", "button", "Submit")],
    "click-button": [("click", "button", "{quoted}")],
    "enter-text": [("fill", "textbox", "", "{quoted}"), ("click", "button", "Submit")],
    "focus-text": [("click", "textbox", "")],
}
"""Actions that solve a task: what is done to the first element of this role and name, with words of the goal."""


def solve(environment: BrowserGym, task: Task) -> tuple[list[Step], bool]:
    seen, steps, success = [environment.reset(task)], list[Step](), False
    words = {"quoted": r'"([^"]*)"', "from": r"Select (.*) from the list"}
    for verb, role, name, *values in PLANS[str(task.metadata["task"]).removeprefix("miniwob.")]:
        name, *values = (
            re.search(words[part[1:-1]], environment.goal)[1] if part.startswith("{") else part  # type: ignore[index]
            for part in (name, *values)
        )
        bid = next(each.bid for each in elements(seen[-1]) if each.role == role and each.name.startswith(name))
        keys = {"fill": ["value"], "select_option": ["options"]}.get(verb, [])
        action = render(verb, {"bid": bid} | dict(zip(keys, values, strict=True)))
        step, success = record_action(action, seen[-1], environment.step(action))
        steps.append(step)
        seen.append(step.next_observation)
    return steps, success


def test_the_contract(browsers: Browsers) -> None:
    with closing(BrowserGym(browsers)) as environment:
        check_environment(environment, miniwob("click-test-2"), ["click('13')"])


def test_the_contract_from_a_pool_and_from_asyncio(browsers: Browsers) -> None:
    """More episodes than browsers: they take turns, and no thread is bound to anything."""

    def play() -> bool:
        with closing(BrowserGym(browsers)) as environment:
            check_environment(environment, miniwob("click-test-2"), ["click('13')"])
            return True

    async def aplay() -> float:
        with closing(BrowserGym(browsers)) as environment:
            await environment.areset(miniwob("click-test-2"))
            return (await environment.astep("click('13')")).reward

    async def all_at_once() -> list[float]:
        cancelled = asyncio.create_task(aplay())
        others = [asyncio.create_task(aplay()) for _ in range(3)]
        waiting = asyncio.create_task(aplay())
        await asyncio.sleep(0.05)
        cancelled.cancel()  # in its reset, which goes on in its thread
        waiting.cancel()  # before it has a browser
        return await asyncio.gather(*others)

    with ThreadPoolExecutor(2) as pool:
        assert all(future.result() for future in [pool.submit(play) for _ in range(2)])
    assert asyncio.run(all_at_once()) == [1.0, 1.0, 1.0]
    assert solve_one(browsers), "the cancelled ones have given the browser back"


def solve_one(browsers: Browsers) -> bool:
    with closing(BrowserGym(browsers)) as environment:
        return solve(environment, miniwob("focus-text"))[1]


@pytest.mark.parametrize("name", sorted(PLANS))
def test_a_demonstration_earns_the_real_reward(browsers: Browsers, name: str) -> None:
    with closing(BrowserGym(browsers)) as environment:
        steps, success = solve(environment, miniwob(name, 5))
    assert success and sum(step.reward for step in steps) == 1
    assert all(step.valid for step in steps) and steps[-1].next_observation == OVER and name in SHORT_TASKS


def test_mistakes_are_answered_and_are_no_successes(browsers: Browsers) -> None:
    with closing(BrowserGym(browsers, max_steps=3)) as environment:
        first = environment.reset(miniwob("enter-text"))
        goal, page = first.split("\n", 1)
        assert goal == f"Goal: {environment.goal}" and page.startswith("RootWebArea 'Enter Text Task'")
        results = [environment.step(action) for action in ("click('99')", "press('14', 'Nonsense')", "click('14')")]
        assert [result.info["valid"] for result in results] == [False, False, True]
        assert results[0].observation.startswith("Error: ") and "99" in results[0].observation.split("\n")[0]
        error, page = results[1].observation.split("\n", 1)
        assert error.startswith("Error: ") and page.startswith("RootWebArea")
        assert [result.truncated for result in results] == [False, False, True]
        with pytest.raises(RuntimeError):
            environment.step("click('14')")
        environment.reset(miniwob("click-test-2"))
        wrong = environment.step("click('14')")
        assert wrong.terminated and wrong.reward == 0 and not wrong.info["success"]


def test_made_tasks_know_their_goal(browsers: Browsers) -> None:
    with closing(BrowserGym(browsers)) as environment:
        tasks = make_tasks([miniwob("click-test", seed) for seed in range(2)] + [miniwob("click-option")], environment)
        assert [task.metadata["task"] for task in tasks] == ["miniwob.click-test", "miniwob.click-option"], "one page, one task"
        option = tasks[1]
        assert option.instruction == environment.goal and environment.reset(option) == option.observation


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metadata": {"task": "miniwob.click-test"}}, "seed=None"),
        ({"metadata": {"task": "click-test"}, "seed": 1}, "needs a name such as 'miniwob.login-user'"),
        ({"metadata": {"task": "webarena.4"}, "seed": 0}, "7 of 7 addresses are missing: set WA_SHOPPING, "),
        ({"metadata": {"task": "webarenalite.4"}, "seed": 0}, "addresses are missing"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused(fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = BrowserGym(Browsers(1))  # no browser is started
    with pytest.raises(ConfigurationError, match=message):
        environment.reset(Task(id="t", instruction="x", environment="miniwob", **fields))
    with pytest.raises(RuntimeError):
        environment.step("click('1')")


def test_an_unknown_task_fails_with_its_cause(browsers: Browsers) -> None:
    task = Task(id="t", instruction="x", environment="miniwob", metadata={"task": "miniwob.no-such"}, seed=0)
    with closing(BrowserGym(browsers)) as environment, pytest.raises(EnvironmentFailed, match="no-such"):
        environment.reset(task)
