"""The training graph: every part's turn comes, with what the parts before it left."""

import asyncio
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.dream import Dream
from dreamgym_lg.errors import ConfigurationError, NothingToTrain
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.graphs.training import create_training_graph, run_training
from dreamgym_lg.integrations.text_games.game import Rules, Score
from dreamgym_lg.metrics import check_trainable, describe
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder
from dreamgym_lg.types import Segment, Step, Task, Trajectory

TASK = Task(id="t0", instruction="leave the house", environment="house")

EVERY_NODE = [
    *[("curriculum", 0), ("rollout", 0), ("update_policy", 0)],
    *[("curriculum", 1), ("rollout", 1), ("update_policy", 1), ("evaluate", 1)],
    *[("curriculum", 2), ("rollout", 2), ("update_policy", 2)],
    *[("curriculum", 3), ("rollout", 3), ("update_policy", 3), ("evaluate", 3)],
]
"""Four iterations, evaluated every 2."""


# --- a run without a fault ------------------------------------------------------------------------------------------


def test_every_part_has_its_turn(steady: Any) -> None:
    assert steady.nodes == EVERY_NODE


def test_langgraph_json_names_a_graph_that_is_drawn_without_an_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/test_serving.py` runs it in `langgraph dev`."""
    monkeypatch.delenv("DREAMGYM_EXPERIMENT", raising=False)
    (named,) = json.loads((Path(__file__).parents[2] / "langgraph.json").read_text())["graphs"].values()
    module, _, name = named.partition(":")
    create = getattr(importlib.import_module(module), name)
    drawn = asyncio.run(create({})).get_graph()
    assert set(drawn.nodes) == {"__start__", "__end__", "count", *(node for node, _ in EVERY_NODE)}
    assert {(edge.source, edge.target) for edge in drawn.edges} >= {("rollout", "update_policy"), ("count", "curriculum")}
    with pytest.raises(ConfigurationError, match="DREAMGYM_EXPERIMENT names no experiment"):
        asyncio.run(create({"configurable": {"thread_id": "1"}}))


def test_each_iteration_plays_its_groups_once_and_updates_the_policy_with_them(steady: Any) -> None:
    record = steady.record()
    assert len(record) == len({(iteration, task.id, index) for iteration, task, index, *_ in record}) == 4 * 2 * 3
    assert steady.learner.iteration == 4
    for iteration, groups in enumerate(steady.learner.updates):
        assert [len(group) for group in groups] == [3, 3]
        assert all(len({task_id for task_id, *_ in group}) == 1 for group in groups)
        assert [[index for *_, index, _ in group] for group in groups] == [[0, 1, 2]] * 2
        assert {number for group in groups for _, number, *_ in group} == {iteration}
    rewards = [reward for groups in steady.learner.updates for group in groups for *_, reward in group]
    assert len(set(rewards)) > 1, "the test would say little"


def test_who_played_is_noted_with_each_episode(steady: Any) -> None:
    versions = {(iteration, policy, dream) for iteration, *_, policy, dream in steady.record()}
    assert versions == {(0, "0", "0"), (1, "1", "0"), (2, "2", "0"), (3, "3", "0")}


def test_the_curriculum_learns_from_the_groups_and_adds_variations(steady: Any) -> None:
    assert "synthetic" in {task.origin for _, task, *_ in steady.record()}
    assert steady.buffer.count("tasks", run="r") > 0
    assert len(steady.buffer.tasks(origin="synthetic")) == sum(row["synthetic_share"] * 2 for row in steady.metrics())


def test_every_iteration_has_its_metrics(steady: Any) -> None:
    rows = steady.metrics()
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3]
    assert [row["loss"] for row in rows] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [row.get("eval_finished") for row in rows] == [None, 2, None, 4]
    assert all(row["episodes"] == 6 and row["failed_episodes"] == 0 for row in rows)
    assert all(0 <= row["curriculum_value"] <= 0.25 for row in rows)
    timed = [{name for name in row if name.startswith("seconds_")} for row in steady.buffer.metrics("r")]
    assert timed == [{f"seconds_{node}" for node, number in EVERY_NODE if number == n} for n in range(4)]


def test_evaluation_may_be_left_out(process: Any, tmp_path: Path) -> None:
    one = process(tmp_path)
    one.training.evaluate = None
    one.run(tmp_path)
    assert one.nodes == [each for each in EVERY_NODE if each[0] != "evaluate"]


def test_memory_is_free_before_an_update_and_what_old_weights_gave_is_dropped_after_it(process: Any, tmp_path: Path) -> None:
    one, updates = process(tmp_path), []
    one.training.free_memory = lambda: updates.append(("before", one.learner.iteration))
    one.training.weights_changed = lambda: updates.append(("after", one.learner.iteration))
    one.run(tmp_path)
    assert updates == [(when, i + (when == "after")) for i in range(4) for when in ("before", "after")]


def test_a_server_may_run_it_asynchronously(process: Any, steady: Any, tmp_path: Path) -> None:
    one = process(tmp_path)
    asyncio.run(create_training_graph(one.training).compile().ainvoke(one.start, one.config))
    assert (one.nodes, one.record()) == (EVERY_NODE, steady.record())


def test_a_real_iteration_beside_a_dream_plays_no_drawn_task(process: Any, tmp_path: Path) -> None:
    """No real environment knows the entities of one, be it sampled first or in place of a uniform group."""
    one = process(tmp_path, lambda _: "go north", real_every=2, real_steps=99, resample=2)
    drawn = [replace(TASK, id=f"drawn{n}", observation="A closed door.", drawn={"steps": []}) for n in range(8)]
    one.training.curriculum = Curriculum([replace(drawn[0], id="t0", drawn={}), *drawn])
    one.training.reality = (None, one.dream.create_environment)
    one.run(tmp_path)
    played = [{each.task.id for each in one.buffer.trajectories(run="r", iteration=n)} for n in range(4)]
    assert played[1] == played[3] == {"t0"} and min(len(played[0]), len(played[2])) == 4


def test_an_agent_with_more_nodes_than_the_episode_graph_is_trained(process: Any, tmp_path: Path) -> None:
    """It is evaluated with at least 200 supersteps; in training it had two for each step."""
    one = process(tmp_path, lambda _: "go north")
    graph = create_episode_graph(one.policy, max_steps=4)
    for node in ("read", "plan", "check"):
        graph.add_node(node, lambda state: {})
    graph.edges -= {("policy", "environment")}
    graph.add_edge("policy", "read").add_edge("read", "plan").add_edge("plan", "check").add_edge("check", "environment")
    one.training.agent = graph.compile()
    one.run(tmp_path)
    assert {len(each.steps) for each in one.buffer.trajectories(run="r")} == {4}
    assert all(row["failed_episodes"] == 0 for row in one.metrics())


# --- what stops a run -----------------------------------------------------------------------------------------------


def test_the_graph_says_which_input_it_needs(process: Any, tmp_path: Path) -> None:
    one = process(tmp_path)
    graph = create_training_graph(one.training).compile()
    with pytest.raises(ConfigurationError, match="needs an input: {'run': name, 'iterations': n}"):
        graph.invoke({"iterations": 1}, one.config)


def test_without_one_valid_action_there_is_nothing_to_train(process: Any, tmp_path: Path) -> None:
    one = process(tmp_path, lambda _: "sing a song")
    with pytest.raises(NothingToTrain, match=r"not one action of 6 episodes was valid .*'sing a song'.*demonstrations"):
        one.run(tmp_path)
    assert one.learner.iteration == 0 and one.nodes[-1] == ("rollout", 0)


def test_when_every_episode_failed_the_causes_are_named(process: Any, tmp_path: Path) -> None:
    def reply(_: Any) -> str:
        raise TimeoutError("the server is busy")

    one = process(tmp_path, reply)
    with pytest.raises(NothingToTrain, match="all 6 episodes failed; causes: TimeoutError: the server is busy"):
        one.run(tmp_path)


def test_nothing_to_train_names_failures_apart_and_says_what_plays_again() -> None:
    task = Task(id="t", instruction="Open it.", environment="doors")
    left = Trajectory(task=task, error="PredictionFailed: the agent has left the record")
    with pytest.raises(NothingToTrain, match="left the record. Mend that; then train in a new folder"):
        check_trainable([left, left])
    step = Step(observation="", action="sing", next_observation="", valid=False)
    with pytest.raises(NothingToTrain, match=r"1 of 2 episodes failed \(Pred.*\); of the others, not one action of 1 .*'sing'"):
        check_trainable([left, Trajectory(task=task, steps=[step])])


def test_one_failed_episode_is_not_taken_for_the_cause_of_senseless_actions(process: Any, tmp_path: Path) -> None:
    told = False

    def reply(_: Any) -> str:
        nonlocal told
        if not told:
            told = True
            raise TimeoutError("the server is busy")
        return "sing a song"

    with pytest.raises(
        NothingToTrain, match="1 of 6 episodes failed .*; of the others, not one action of 5 episodes was valid .*'sing a song'"
    ):
        process(tmp_path, reply).run(tmp_path)


def test_when_most_episodes_failed_it_is_said_with_the_first_cause(process: Any, tmp_path: Path) -> None:
    def run(failing: int) -> Any:
        calls = 0

        def reply(messages: Any) -> str:
            nonlocal calls
            calls += len(messages) == 2
            if calls > 6 - failing:
                raise TimeoutError("the server is busy")
            return "open door" if len(messages) == 2 else "go north"

        (tmp_path / str(failing)).mkdir()
        one = process(tmp_path / str(failing), reply)
        one.training.say = said.append
        one.start = {"run": "r", "iterations": 1}
        one.run(tmp_path / str(failing))
        return one

    said: list[str] = []
    assert run(3).metrics()[0]["failed_episodes"] == 3 and not any("failed" in text for text in said)
    said.clear()
    assert run(4).metrics()[0]["failed_episodes"] == 4
    (failed,) = said
    assert failed.startswith(
        "4 of 6 episodes of iteration 0 failed, and the policy is trained on the others alone; "
        "the first cause: TimeoutError: the server is busy at "
    )


def test_a_run_whose_groups_are_uniform_ends_early_and_says_so(process: Any, tmp_path: Path) -> None:
    one, said = process(tmp_path, lambda _: "open door", stop_after_uniform=2), []
    one.training.say = said.append
    assert one.run(tmp_path)["iteration"] == 2 and one.learner.iteration == 2
    assert [row["stopped_early"] for row in one.metrics()] == [0, 1]
    assert one.nodes[-1] == ("evaluate", 1), "the last policy is evaluated, whatever ended the run"
    assert [text.partition(":")[0] for text in said] == ["iteration 0 taught nothing", "the run ends after 2 of 4 iterations"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_broken_policy_ends_the_run_before_its_update_and_evaluation(process: Any, tmp_path: Path, killed: bool) -> None:
    def start(iterations: int = 9) -> Any:
        one = process(tmp_path, say=said.append, evaluate_every=1, stop_after_uniform=0)
        one.policy.reply = lambda messages: "sing" if one.nodes[-1][1] == 2 else ["jump", "open door"][len(messages) % 4 // 2]
        if killed and not said:
            one.training.report = lambda iteration, metrics: die() if iteration == 2 else None
        one.sound = run_training(one.training, tmp_path / "training.db", run="r", iterations=iterations)
        return one

    def die() -> None:
        raise ZeroDivisionError

    said: list[str] = []
    if killed:
        with pytest.raises(ZeroDivisionError):
            start()
        start()
    else:
        one = start()
        assert one.nodes[-1] == ("rollout", 2) and not one.sound
    again = start()
    assert again.nodes == [] and not again.sound and again.learner.iteration == 2
    (end,) = [text for text in said if text.startswith("the run ends")]
    told = "2 of 9 iterations: the policy is broken: 100% of its episodes have no valid action (in the first iteration 0%)"
    assert told in end and "lower learning_rate" in end
    assert [row.get("stopped_early") for row in again.metrics()] == [0, 0, 1] and again.metrics()[-1]["end_cause"] in end
    more = start(10)
    assert more.nodes == [] and not more.sound and more.learner.iteration == 2, "who asks for more gets the same answer"


def test_iterations_that_teach_nothing_are_told_as_they_happen_and_at_the_end(process: Any, tmp_path: Path) -> None:
    one, said = process(tmp_path, lambda _: "open door", stop_after_uniform=0), []
    one.training.say = said.append
    one.run(tmp_path)
    cause = "all episodes of a task had the same reward (rft: no new success, or it did not improve validation)"
    assert said[0].startswith(f"iteration 0 taught nothing: {cause}. It will")
    assert [text for text in said[1:] if "invalid" not in text] == [f"4 of 4 iterations taught nothing: {cause}"]


def test_a_run_ends_early_only_if_told_to_and_while_nothing_is_learned(process: Any, steady: Any, tmp_path: Path) -> None:
    assert [row["stopped_early"] for row in steady.metrics()] == [0] * 4
    never = process(tmp_path, lambda _: "open door", stop_after_uniform=0)
    assert never.run(tmp_path)["iteration"] == 4
    (tmp_path / "turns").mkdir()
    episodes = 0

    def reply(messages: Any) -> str:
        """Every other episode of iteration 1 succeeds; no other one does."""
        nonlocal episodes
        episodes += len(messages) == 2
        leaves = "open door" if len(messages) == 2 else "go north"
        return leaves if mixed.nodes[-1][1] == 1 and episodes % 2 else "open door"

    mixed = process(tmp_path / "turns", reply, stop_after_uniform=2)
    mixed.run(tmp_path / "turns")
    assert [row["uniform_groups"] == 1 for row in mixed.metrics()] == [True, False, True, True]
    assert mixed.learner.iteration == 4, "a useful iteration begins the count anew"


@pytest.mark.parametrize(("moment", "houses"), [("never", "345"), ("never", "4"), ("rollout", "345"), ("update", "45")])
def test_groups_that_all_earn_the_same_are_sampled_again_up_to_a_budget(
    process: Any, tmp_path: Path, moment: str, houses: str
) -> None:
    class Killed(BaseException): ...

    def reply(messages: Any) -> str:
        recorder = TokenRecorder.current()
        assert recorder is not None
        recorder.record(TokenCall(None, [1], [2], [-1.0], 1.0))
        if len(messages) == 2:
            begun.append(0)
        return "go north" if messages[0].text[-1] in houses and len(messages) > 2 and len(begun) % 2 else "open door"

    def add(trajectory: Any) -> bool:
        if moment == "rollout" and one.buffer.count("trajectories", run="r") == 8:
            raise Killed
        return bool(store(trajectory))

    def die() -> None:
        raise Killed

    begun, start = list[int](), {"run": "r", "iterations": 2}
    one = process(tmp_path, reply, resample=3, stop_after_uniform=0)
    store, one.buffer.add = one.buffer.add, add
    one.training.curriculum._share, one.start = 0.0, start
    if moment != "never":
        one.training.weights_changed = die
        with pytest.raises(Killed):
            one.run(tmp_path)
        one = process(tmp_path, reply, resample=3, stop_after_uniform=0)
        one.training.curriculum._share, one.start = 0.0, start
    one.run(tmp_path)
    sizes = []
    for iteration, groups in enumerate(one.learner.updates):
        played = {each.task.id for each in one.buffer.trajectories(run="r", iteration=iteration)}
        differ = [len({reward for *_, reward in group}) > 1 for group in groups]
        assert len(groups) == 2 and differ == sorted(differ, reverse=True), "surplus uniform groups are left out"
        assert len(played) == 5 or (all(differ) and len(houses) > 1), "up to the budget"
        sizes.append(len(played))
    assert len(sizes) == 2 and 2 < max(sizes) <= 5


@pytest.mark.slow
def test_a_gap_to_reality_ends_a_run_early_and_says_so(process: Any, tmp_path: Path) -> None:
    said: list[str] = []

    def run(name: str, gap: float, low: float, max_gap: float | None = 0.3) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        one = process(tmp_path / name, max_gap=max_gap, say=lambda text: said.append(text) if "invalid" not in text else None)
        one.training.evaluate = lambda finished: {"eval_gap": gap, "eval_gap_low": low}
        run_training(one.training, tmp_path / name / "training.db", run="r", iterations=one.start["iterations"])
        return one

    lies = run("lies", 0.5, 0.1)
    assert lies.learner.iteration == 2 and [row["stopped_early"] for row in lies.metrics()] == [0, 1]
    assert lies.nodes[-1] == ("evaluate", 1) and len(said) == 1
    assert said[0].startswith("the run ends after 2 of 4 iterations: dreamed minus real success of the policy is +0.50")
    assert run("lies", 0.5, 0.1).nodes == [], "it has ended"
    on = run("lies", 0.5, 0.1, max_gap=None)
    assert on.learner.iteration == 4 and on.nodes[0] == ("curriculum", 2)
    assert run("small", 0.29, 0.2).learner.iteration == run("unsure", 0.5, -0.1).learner.iteration == 4
    assert len(said) == 1


def test_who_asks_for_more_iterations_after_a_gap_gets_them(process: Any, tmp_path: Path) -> None:
    one = process(tmp_path, max_gap=0.3)
    one.training.evaluate = lambda finished: {"eval_gap": 0.5, "eval_gap_low": 0.1}
    for iterations, finished in ((4, 2), (4, 2), (5, 4)):  # until the next evaluation
        run_training(one.training, tmp_path / "training.db", run="r", iterations=iterations)
        assert one.learner.iteration == finished


def test_real_rollouts_are_recorded_as_real_and_their_steps_counted(process: Any, steady: Any, tmp_path: Path) -> None:
    def refusal(action: str, observations: Any) -> str | None:
        return "You cannot dance." if action == "dance" else None

    one = process(tmp_path, source="real")
    one.training.dream = None
    # stands for a real world: the training is told who answers
    one.training.create_environment = Dream([Rules(refusal), one.model], judges=[Score()]).create_environment
    one.run(tmp_path)
    episodes = list(one.buffer.trajectories(run="r"))
    assert {(each.source, each.experience_version) for each in episodes} == {("real", "")}
    reached = [sum(s.action != "dance" for t in episodes if t.iteration == n for s in t.steps) for n in range(4)]
    assert [row["real_steps"] for row in one.metrics()] == reached
    assert 0 < sum(reached) < sum(len(each.steps) for each in episodes)
    assert {each.source for each in steady.buffer.trajectories(run="r")} == {"synthetic"}


# --- describing an iteration ----------------------------------------------------------------------------------------


def episode(*rewards: float, **fields: Any) -> Trajectory:
    steps = [Step(observation="", action="", next_observation="", reward=r, valid=r >= 0) for r in rewards]
    return Trajectory(**{"task": TASK, "steps": steps, **fields})


def test_failed_rollouts_are_counted_and_left_out_of_every_mean() -> None:
    token = Segment(token_ids=[1], sampled=[1], logprobs=[0.0])
    varied = replace(TASK, id="t1", origin="synthetic")
    failed = episode(0.0, 9.0, error="EnvironmentFailed: java died", segments=[token])
    mixed = [episode(0.5, 0.5, success=True, segments=[token]), episode(0.0, 0.0), failed]
    uniform = [episode(0.0, task=varied), episode(0.0, task=varied), replace(failed, task=varied)]
    assert describe([mixed, uniform]) == {
        "episodes": 6,
        "failed_episodes": 2,
        "unreadable_episodes": 0,
        "unanswered_episodes": 0,
        "user_faults": 0,
        "first_error": "EnvironmentFailed: java died",
        "reward_mean": 0.25,
        "train_success": 0.25,
        "uniform_groups": 0.5,
        "unanswered_groups": 0.0,
        "synthetic_share": 0.5,
        "invalid_action_share": 0.0,
        "cut_reply_share": 0.0,
        "no_valid_action_share": 0.0,
        "steps_mean": 1.5,
        "segments": 3,
        "rewritten_segments": 0,
        "reread_share": 0.0,
    }


def test_replies_as_long_as_the_policy_may_answer_were_cut_off() -> None:
    sampled = [0, 1, 1, 1, 0, 0, 1, 1, 0, 1]
    replies = Segment(token_ids=[5] * 10, sampled=sampled, logprobs=[0.0] * 10)
    unplayed = episode(error="x", segments=[replies])
    groups = [[episode(0.0, segments=[replies]), episode(0.0, segments=[]), unplayed]]
    assert describe(groups, max_new_tokens=3)["cut_reply_share"] == 1 / 3
    assert describe(groups, max_new_tokens=4)["cut_reply_share"] == 0
    assert describe(groups)["cut_reply_share"] == 0, "nobody knows the limit"


def test_an_unreadable_answer_is_no_success_and_in_no_other_mean() -> None:
    unreadable, failed = episode(9.0, error="PredictionFailed: no reward"), episode(9.0, error="EnvironmentFailed: java died")
    found = describe([[episode(1.0, success=True), unreadable, failed]])
    assert (found["train_success"], found["reward_mean"]) == (0.5, 1.0)
    assert (found["failed_episodes"], found["unreadable_episodes"]) == (2, 1)
    found = describe([[unreadable, episode(error="Unanswered: nothing in the dream answers get_order {}")]])
    assert (found["failed_episodes"], found["unreadable_episodes"], found["unanswered_episodes"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("share", "why"),
    [
        (0.0, "all episodes of a task had the same reward"),
        (
            0.75,
            "75% of the groups made a call that nothing in the dream answers, and are left out; of the others, all episodes",
        ),
        (1.0, "100% of the groups made a call that nothing in the dream answers, and are left out"),
    ],
)
def test_why_iterations_taught_nothing(process: Any, tmp_path: Path, share: float, why: str) -> None:
    """A dream that answers nothing was told as tasks that are too hard."""
    unanswered, played = episode(error="Unanswered: get_order {}"), episode(1.0)
    groups = [[played, unanswered], [unanswered], [unanswered, played], [played, played]]
    assert describe(groups)["unanswered_groups"] == 0.75
    training = process(tmp_path, stop_after_uniform=2).training
    cause = training.end_cause({"uniform_iterations": 2, "unanswered": share})
    assert cause.startswith(f"the last 2 taught nothing: {why}")
    assert ("experience model" in cause) is (share > 0) and ("easier tasks" in cause) is (share == 0)


def test_an_iteration_of_failures_can_be_described() -> None:
    found = describe([[episode(error="x"), episode(error="y")]])
    assert (found["episodes"], found["failed_episodes"], found["first_error"]) == (2, 2, "x")
    assert found["reward_mean"] == found["steps_mean"] == found["invalid_action_share"] == 0
