"""cookbook/support_desk: its tickets, their check, its old policy, and the server that answers as its tools do."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dreamgym_lg import Trajectory
from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.dream import Episode, References
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.evaluation import validate
from dreamgym_lg.fidelity.steps import measure_steps
from dreamgym_lg.simulate.wall.wall import missing_for_wall

pytest.importorskip("langchain", reason="needs langchain")

FOLDER = Path(__file__).parent.parent / "cookbook" / "support_desk"
TRAIN, VALIDATION, TEST = 96, 12, 24


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The walk-through's modules, a small shop with its traces, and the gym on it."""
    out = tmp_path_factory.mktemp("desk")
    sys.path.insert(0, str(FOLDER))
    try:
        import glue
        import old_policy
        import tickets
        from truthful_server import truthful_dream
    finally:
        sys.path.remove(str(FOLDER))
    tasks = tickets.create_shop(out / "shop.db", seed=1, train=TRAIN, validation=VALIDATION, test=TEST)
    shop = tickets.Shop(out / "shop.db")
    old_policy.write_traces(out / "traces.jsonl", shop, tasks[:TRAIN], seed=1)
    gym = glue.create_gym(shop, tasks[TRAIN:], out, dream=truthful_dream(shop), settings=glue.SETTINGS)
    return SimpleNamespace(out=out, tasks=tasks, shop=shop, gym=gym, old_policy=old_policy, tickets=tickets)


@pytest.fixture(scope="module")
def talking(desk: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with the desk that talks, and customers who leave things out."""
    out = tmp_path_factory.mktemp("talking")
    tasks = desk.tickets.create_shop(out / "shop.db", seed=1, train=48, validation=6, test=18, vague=True)
    shop = desk.tickets.Shop(out / "shop.db")
    desk.old_policy.write_traces(out / "traces.jsonl", shop, tasks[:48], seed=1, talking=True)
    truthful_dream = sys.modules["truthful_server"].truthful_dream

    def create_gym(folder: str, **options: Any) -> Any:
        (out / folder).mkdir()
        (out / folder / "traces.jsonl").write_bytes((out / "traces.jsonl").read_bytes())
        glue = sys.modules["glue"]
        return glue.create_gym(shop, tasks[48:], out / folder, talking=True, settings=glue.SETTINGS, **options)

    gym = create_gym("gym", dream=truthful_dream(shop, talking=True))
    return SimpleNamespace(tasks=tasks, shop=shop, gym=gym, create_gym=create_gym)


def test_splits_share_no_id_no_name_and_no_wording(desk: Any) -> None:
    def seen(split: str) -> tuple[set[str], set[str]]:
        texts = [task.instruction for task in desk.tasks if task.split == split]
        ids = {found for text in texts for found in re.findall(r"[KC]\d{4}", text)}
        city = "|".join(desk.tickets.CITIES.split())
        names = {name for first_or_last in desk.tickets.NAMES[split] for name in first_or_last.split()}
        return ids | names, {re.sub(rf"[KC]\d{{4}}|\b({city}|{'|'.join(names)})\b", "*", text) for text in texts}

    assert Counter(task.split for task in desk.tasks) == {"train": TRAIN, "validation": VALIDATION, "test": TEST}
    for one, other in (("train", "test"), ("train", "validation"), ("validation", "test")):
        for mine, others in zip(seen(one), seen(other), strict=True):
            assert mine and others and not mine & others


def test_traces_are_read_whole_and_succeed_and_fail_in_every_kind(desk: Any) -> None:
    rows = [json.loads(line) for line in (desk.out / "traces.jsonl").read_text().splitlines()]
    assert len(rows) == TRAIN and all(len(row["tools"]) == 6 for row in rows)
    outcomes = Counter((row["metadata"]["kind"], row["success"]) for row in rows)
    assert set(outcomes) == {(kind, success) for kind in desk.tickets.KINDS for success in (True, False)}
    buffer = desk.gym.replay_buffer
    assert buffer.count("trajectories", source="offline") == TRAIN
    recorded = {task.instruction: task.rubric for task in buffer.tasks(split="train")}
    assert {recorded[task.instruction] == task.rubric for task in desk.tasks[:TRAIN]} == {True}


@pytest.mark.slow
def test_recorded_successes_judge_an_episode_as_the_real_database_does(desk: Any) -> None:
    """Every trace, and every habit of the old policy on the tickets of successes; a ticket that only asks needs a model."""
    buffer, decided = desk.gym.replay_buffer, Counter[bool]()
    references = References(TraceIndex(buffer, writes=desk.old_policy.WRITES))
    judged = [task for task in buffer.tasks(split="train") if references.decides(task)]

    def check(episode: Trajectory) -> None:
        *steps, last = episode.steps
        verdict = references.judge(Episode(task=episode.task, steps=steps, action=last.action), None)
        if verdict is not None:
            assert verdict.success is episode.success, (episode.task.instruction, [step.action for step in episode.steps])
            decided[verdict.success] += 1

    for episode in buffer.trajectories(source="offline"):
        check(episode)
    for habit in desk.old_policy.HABITS:
        for episode in desk.gym.evaluate(desk.old_policy.OldPolicy(habit=habit), real=True, tasks=judged)[1]:
            check(episode)
    assert decided == {True: 57, False: 104}


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["good", "wrong_tool", "wrong_argument", "no_lookup", "answers_at_once", "escalates_at_once"])
def test_the_truthful_server_answers_and_judges_as_the_real_database(desk: Any, habit: str) -> None:
    policy = desk.old_policy.OldPolicy(habit=habit)
    (real, played), (dreamed, simulated) = (desk.gym.evaluate(policy, real=real) for real in (True, False))
    assert real == dreamed and len(played) == TEST
    for one, other in zip(played, simulated, strict=True):
        assert [step.action for step in one.steps] == [step.action for step in other.steps]
        assert [step.next_observation for step in one.steps] == [step.next_observation for step in other.steps]
        assert one.success == other.success
    if habit == "good":
        assert real.successes == TEST
        assert {len(episode.steps) for episode in played} <= {3, 4, 5, 6}  # two to five calls, and the answer
    else:
        assert real.successes < TEST / 2


@pytest.mark.slow
def test_a_truthful_server_needs_no_experience_model_to_be_validated_against(desk: Any) -> None:
    policy = desk.old_policy.OldPolicy(habit="wrong_argument")
    figures = validate(desk.gym.experiment, policy, desk.gym.experiment.dream(), 0)
    assert 0 < figures["eval_real_successes"] == figures["eval_dream_successes"] < VALIDATION == figures["eval_real_episodes"]


def test_a_truthful_server_is_measured_on_calls_that_the_graph_refused(desk: Any) -> None:
    """The tool itself raised for them, which ended a training at its first validation."""
    _, (played, *_) = desk.gym.evaluate(desk.old_policy.OldPolicy(habit="good"), real=True, tasks=desk.tasks[TRAIN : TRAIN + 1])
    call = '{"arguments": {"order_id": "K1000", "reason": "urgent"}, "name": "escalate"}'
    refused = replace(played.steps[0], action=call, next_observation="Error invoking tool 'escalate'", valid=False)
    figures = run_lasting(measure_steps(desk.gym.experiment.dream(), [replace(played, steps=[refused, *played.steps])]))
    assert figures.invalid_recall is not None and figures.invalid_recall.value == 1.0
    assert figures.reward_right is not None and figures.reward_right.value == 1.0


def test_what_nobody_asked_for_is_no_success(desk: Any) -> None:
    agent = sys.modules["agent"]
    task = next(task for task in desk.tasks if task.metadata["kind"] == "where")
    with desk.shop.fresh():
        order = agent.get_order(task.metadata["named"][0])
        city = agent.get_customer(order["customer"])["city"]
        said = f"It is {order['status']}, for {city}."
        assert desk.shop.solved(task, said)
        assert not desk.shop.solved(task, f"It is {order['status']}.")
        assert not desk.shop.solved(task, f"{said} Or open, shipped, delivered.")
        agent.escalate(task.metadata["named"][0], "final")
        assert not desk.shop.solved(task, said)
    with desk.shop.fresh():
        assert desk.shop.solved(task, said), "an episode's copy is its own"


@pytest.mark.slow
def test_recorded_conversations_ask_confirm_and_end_well_and_badly(desk: Any, talking: Any) -> None:
    recorded = list(talking.gym.replay_buffer.trajectories(source="offline"))
    asked = [step for each in recorded for step in each.steps[:-1] if is_answer(step.action)]
    assert Counter(each.success for each in recorded) == {True: 22, False: 26} and len(asked) > 48
    assert any(step.next_observation == "Yes, please." for step in asked)
    assert any(step.next_observation.startswith("No, ") for step in asked)
    vague = [task for task in talking.tasks if not set(task.metadata["named"]) & set(re.findall(r"[KC]\d+", task.instruction))]
    assert len(vague) > len(talking.tasks) / 2


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["good", "wrong_argument", "asks_no_leave"])
def test_the_desk_that_talks_is_the_same_in_the_truthful_dream_as_on_its_database(desk: Any, talking: Any, habit: str) -> None:
    policy = desk.old_policy.OldPolicy(habit=habit, talks=True)
    (real, played), (_, simulated) = (talking.gym.evaluate(policy, real=real) for real in (True, False))
    for one, other in zip(played, simulated, strict=True):
        assert one.error is None and other.error is None
        assert [(step.action, step.next_observation) for step in one.steps] == [
            (step.action, step.next_observation) for step in other.steps
        ]
        assert one.success == other.success
    assert real.successes == 18 if habit == "good" else real.successes < 9


@pytest.mark.slow
def test_a_change_without_leave_is_no_success(desk: Any, talking: Any) -> None:
    """The rows are right, and nobody was asked."""
    policy = desk.old_policy.OldPolicy(habit="asks_no_leave", talks=True)
    changed = [task for task in talking.tasks if task.metadata["kind"] in ("return", "both", "last", "broken")][:6]
    rate, episodes = talking.gym.evaluate(policy, real=True, tasks=changed)
    assert rate.successes == 0 and all(not each.error for each in episodes)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["process", "guard"])
def test_recorded_customers_talk_in_a_dream_of_the_traces(desk: Any, talking: Any, isolation: str, scripted: Any) -> None:
    """Behind the wall and under the guard; the real customers talk in reality alone."""
    if isolation == "process" and missing_for_wall():
        pytest.skip(f"no wall here: {missing_for_wall()}")
    gym = talking.create_gym(isolation, isolation=isolation, experience_model=scripted(reply=lambda _: "as asked\nsuccess"))
    recorded = [each for each in gym.replay_buffer.trajectories(source="offline") if each.success][:4]
    for each in recorded:
        policy = desk.old_policy.OldPolicy(habit="good", talks=True)
        _, (episode,) = gym.evaluate(policy, tasks=[each.task])
        assert [(s.action, s.next_observation) for s in episode.steps] == [(s.action, s.next_observation) for s in each.steps]
        assert {s.decided_by for s in episode.steps} <= {"recorded", "user", ""}
    assert gym.evaluate(policy, tasks=[recorded[0].task], real=True)[0].value == 1


def test_glue_has_fewer_than_forty_lines() -> None:
    source = (FOLDER / "glue.py").read_text()
    texts = (
        each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
    )
    told = {number for text in texts for number in range(text.lineno, (text.end_lineno or 0) + 1)}
    code = [line for number, line in enumerate(source.splitlines(), 1) if line.strip() and number not in told]
    assert 20 < len(code) < 40, len(code)


def test_the_demo_says_what_it_will_do_before_it_loads_anything() -> None:
    """The first line is there before a library is loaded: a folder without any of them is enough to print it."""
    done = subprocess.run([sys.executable, "-S", FOLDER / "run.py", "--quick"], capture_output=True, text=True, timeout=20)
    assert done.stdout.startswith("A support desk, seed 1, in runs/desk-seed1-quick: about 3 minutes on two quiet cores.")
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason="a compiled world needs the wall")
def test_the_demo_names_the_best_row_without_a_dream(tmp_path: Path) -> None:
    model = FOLDER.parents[1] / "tests" / "tiny" / "small_base"
    command = [
        sys.executable,
        FOLDER / "run.py",
        "--quick",
        "--seed",
        "3",
        "--traces",
        "60",
        "--model",
        model,
        "--out",
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["real"]) == {"start", "base", "trained"} and not result["dream"]
    assert not any(mode["failed"] for row in result["real"].values() for mode in row.values()), "each is played to its end"
    assert (tmp_path / "report.html").exists()
    assert "iteration 1 of 1: " in done.stdout and "imitation of every success" in done.stdout
    assert "before training" in done.stdout and "after: " in done.stdout
    assert "Offline RL was left out" in done.stdout and "Against the other rows: not proven: trained − " in done.stdout
    assert "imitation is enough" not in done.stdout, "two tickets do not show that"
    assert done.stdout.rstrip().endswith("dreamgym try my_app.py:graph traces.jsonl")


@pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")
def test_a_ticket_that_nobody_looked_up_is_played_and_judged_in_an_imputed_state(desk: Any) -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        import story
    finally:
        sys.path.remove(str(FOLDER))
    dream = story.imputed_dream(desk.out, desk.shop, seed=1)
    imputed = dream.responders[1]
    outcomes = Counter[tuple[str, bool]]()
    for task in desk.gym.tasks("train"):
        if task.metadata["kind"] != "return":
            continue
        (order,) = task.metadata["named"]
        environment = dream.create_environment()
        environment.reset(task)
        look = environment.step(render_call("get_order", {"order_id": order}))
        if look.info["decided_by"] != "imputed":
            continue
        status = json.loads(look.observation)["status"]
        with desk.shop.showing(imputed.documents(task)).fresh():
            assert story.TruthfulServer(desk.shop)._call(render_call("get_order", {"order_id": order})) == look.observation
        if status in ("shipped", "final"):
            environment.step(render_call("escalate", {"order_id": order, "reason": status}))
        outcomes[status, environment.step(render_answer("Done.")).info["success"]] += 1
    left = {pair: number for pair, number in outcomes.items() if pair[0] in ("open", "delivered")}
    assert {outcome for _, outcome in outcomes - Counter(left)} == {True}, "a shipped or final order goes to a colleague"
    assert {outcome for _, outcome in left} == {False}, "nothing was done there"
