"""ALFWorld itself, against the real engine."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dreamgym_lg.environment import check_environment
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed
from dreamgym_lg.integrations.alfworld.data import load_tasks, walkthrough
from dreamgym_lg.integrations.text_games.game import one_line
from dreamgym_lg.types import StepResult, Task

pytest.importorskip("alfworld", reason="alfworld is not installed: pip install 'dreamgym-lg[alfworld]'")

from dreamgym_lg.integrations.alfworld import engine
from dreamgym_lg.integrations.alfworld import environment as module
from dreamgym_lg.integrations.alfworld.environment import ALFWorld

pytestmark = pytest.mark.slow  # the engine's process takes five seconds to start
DETOUR = ("look", "help", "inventory", "fly to the moon", "go to nowhere 1")
STOCK = """
import json, sys
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
answers = []
for path, actions in json.load(sys.stdin):
    infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
    game = textworld.start(path, request_infos=infos, wrappers=[AlfredDemangler(), AlfredInfos()])
    answers.append([game.reset()["feedback"], *(game.step(action)[0]["feedback"] for action in actions)])
print(json.dumps(answers))
"""


def play(environment: ALFWorld, task: Task, actions: list[str]) -> tuple[str, list[StepResult]]:
    return environment.reset(task), [environment.step(action) for action in actions]


def solution(task: Task) -> list[str]:
    """The walkthrough after a detour."""
    return [*DETOUR, *walkthrough(task)]


@pytest.fixture(scope="module")
def played(tasks: list[Task]) -> dict[str, tuple[str, list[StepResult]]]:
    environment = ALFWorld()
    return {task.id: play(environment, task, solution(task)) for task in tasks}


def test_walkthroughs_succeed_and_begin_where_the_task_says(tasks: list[Task], played: dict) -> None:
    for task in tasks:
        first, results = played[task.id]
        assert first == task.observation
        assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [1.0]
        assert [result.terminated for result in results] == [False] * (len(results) - 1) + [True]
        assert results[-1].info == {"success": True, "valid": True} and not any(result.truncated for result in results)


def test_what_the_game_does_not_know_is_invalid_and_changes_nothing(tasks: list[Task], played: dict) -> None:
    for task in tasks:
        results = played[task.id][1]
        assert [result.info["valid"] for result in results[: len(DETOUR)]] == [True, True, True, False, False]
        assert results[3].observation == results[4].observation == "Nothing happens."
        assert all(result.info["valid"] for result in results[len(DETOUR) :])
    environment = ALFWorld()
    environment.reset(tasks[0])
    before = environment.valid_actions()
    assert environment.step("open the bank").info["valid"] is False
    assert environment.valid_actions() == before and "look" in before


def test_the_shipped_check_passes(tasks: list[Task]) -> None:
    environment = ALFWorld()
    for task in tasks[:2]:
        check_environment(environment, task, solution(task))


def test_stock_textworld_answers_the_same_to_the_letter(folder: Path, tasks: list[Task], played: dict) -> None:
    chosen = [next(task for task in tasks if how in task.id) for how in ("light", "two", "clean")]
    where = [folder / "json_2.1.1" / str(task.metadata["official_split"]) / task.id / "game.tw-pddl" for task in chosen]
    asked = json.dumps([(str(path), solution(task)) for path, task in zip(where, chosen, strict=True)])
    stock = subprocess.run(
        [sys.executable, "-c", STOCK],
        input=asked, capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    for task, (introduction, *answers) in zip(chosen, json.loads(stock.stdout), strict=True):
        assert introduction.endswith(task.instruction)
        first, results = played[task.id]
        assert one_line(introduction.split("\n\n")[1]) == first
        assert [one_line(answer) for answer in answers] == [result.observation for result in results]


def test_a_downloaded_folder_and_the_packed_file_are_the_same_world(folder: Path, played: dict) -> None:
    environment = ALFWorld()
    for task in [task for task in load_tasks(folder) if task.split == "train"][:2]:
        assert play(environment, task, solution(task)) == played[task.id]


def test_environments_side_by_side_do_not_mix(tasks: list[Task], played: dict) -> None:
    short = sorted(tasks, key=lambda task: len(str(task.observation)))[:4]
    environments = [ALFWorld() for _ in short]
    answers = [[environment.reset(task)] for environment, task in zip(environments, short, strict=True)]
    for turn in range(max(len(solution(task)) for task in short)):  # interleaved
        for environment, task, answer in zip(environments, short, answers, strict=True):
            if turn < len(solution(task)):
                answer.append(environment.step(solution(task)[turn]))
    assert [(first, rest) for first, *rest in answers] == [played[task.id] for task in short]
    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(lambda both: play(*both, solution(both[1])), zip(environments, short, strict=True)))
    assert at_once == [played[task.id] for task in short]


def test_an_episode_is_truncated_and_needs_a_reset(tasks: list[Task]) -> None:
    environment = ALFWorld(max_steps=2)
    with pytest.raises(RuntimeError, match="before reset"):
        environment.step("look")
    _, results = play(environment, tasks[0], ["look", "look"])
    assert [(result.terminated, result.truncated) for result in results] == [(False, False), (False, True)]
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step("look")
    with pytest.raises(ConfigurationError, match="max_steps=0; allowed: 1 or more"):
        ALFWorld(max_steps=0)


def test_what_is_closed_is_over(tasks: list[Task]) -> None:
    environment = ALFWorld()
    environment.reset(tasks[0])
    environment.close()
    environment.close()
    assert not environment.valid_actions()
    with pytest.raises(RuntimeError):
        environment.step("look")


def test_the_process_of_the_games_is_renewed_and_ends_when_its_last_game_does(
    tasks: list[Task], played: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RENEWED_AFTER", 2)
    monkeypatch.setattr(engine, "_newest", None)
    environments = [ALFWorld() for _ in range(3)]
    for environment in environments:
        assert environment.reset(tasks[0]) == played[tasks[0].id][0]
    workers = [environment._game._worker for environment in environments]
    assert workers[0] is workers[1] and workers[2] is not workers[0]
    old = workers[0].child.process
    del workers
    for environment in environments[:2]:
        assert old.poll() is None
        assert [environment.step(action) for action in solution(tasks[0])] == played[tasks[0].id][1]
        environment.close()
        environment.reset(tasks[0])  # in the new one, and then in a third
    assert old.poll() is not None


def test_a_process_that_was_killed_fails_the_episodes_in_it_and_no_later_one(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_newest", None)
    environment, other = ALFWorld(), ALFWorld()
    for each in (environment, other):
        each.reset(tasks[0])
    environment._game._worker.child.process.kill()
    for each in (environment, other):
        with pytest.raises(EnvironmentFailed, match="failed in 'look': the process of ALFWorld's engine has ended .status -9"):
            each.step("look")
    other.close()
    assert environment.reset(tasks[0]) == tasks[0].observation


def test_a_game_that_the_engine_cannot_read_is_a_failed_rollout(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment, arguments = ALFWorld(), list(sys.argv)
    broken = {**module.data.game_data(tasks[0]), "pddl_problem": "(define (problem x) (:domain alfred) (:goal ())"}
    with monkeypatch.context() as patched:
        patched.setattr(module.data, "game_data", lambda task: broken)
        with pytest.raises(EnvironmentFailed, match=f"cannot build {tasks[0].id}"):
            environment.reset(tasks[0])
    with pytest.raises(RuntimeError):
        environment.step("look")
    with pytest.raises(ConfigurationError, match="take a task of load_tasks"):
        environment.reset(replace(tasks[0], metadata={}))
    assert environment.reset(tasks[0]) == tasks[0].observation
    assert sys.argv == arguments and not capsys.readouterr().out


def test_another_textworld_inside_is_played_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from textworld.envs.pddl import textgen
    from textworld.logic import Rule

    stock = Rule.parse_conjunctive_query
    monkeypatch.delattr(textgen, "copy_context")
    with pytest.warns(UserWarning, match="copy_context.*ALFWorld runs, but slowly"):
        engine.speed_up()
    assert Rule.parse_conjunctive_query == stock
