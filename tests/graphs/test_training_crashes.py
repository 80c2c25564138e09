"""The training graph after a crash: at whatever moment it comes, it costs nothing but the time."""

import gc
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from dreamgym_lg.errors import NothingToTrain
from dreamgym_lg.graphs.training import create_training_graph, run_training
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Trajectory


class Crash(Exception):
    """What kills a process, as far as it can be played within one."""


@contextmanager
def crashing(process: Any, node: str, iteration: int, moment: str) -> Iterator[None]:
    """Let it die in a node: `before` it does anything, `amid` its work, or `after` it with nothing of that noted."""
    training, buffer = process.training, process.buffer
    add, record = buffer.add, buffer.record_metrics
    stored = 0

    def die(*_: Any) -> None:
        raise Crash

    def on_node(name: str, number: int) -> None:
        process.nodes.append((name, number))
        if (name, number) == (node, iteration) and moment == "before":
            raise Crash
        if (name, number, moment) == ("update_policy", iteration, "amid"):
            training.weights_changed = die

    def failing_add(trajectory: Trajectory) -> bool:
        nonlocal stored
        stored += trajectory.iteration == iteration
        if node == "rollout" and moment == "amid" and stored == 4:
            raise Crash
        return add(trajectory)

    def failing_record(run: str, number: int, values: Any) -> None:
        if moment == "after" and number == iteration and f"seconds_{node}" in values:
            raise Crash
        record(run, number, values)

    training.on_node = on_node
    buffer.add, buffer.record_metrics = failing_add, failing_record
    with pytest.raises(Crash):
        yield
    buffer.close()


FAULTS = [
    *[("curriculum", 2, "before"), ("rollout", 2, "before"), ("update_policy", 2, "before")],
    *[("curriculum", 2, "after"), ("rollout", 2, "after"), ("update_policy", 2, "after")],
    *[("evaluate", 1, "before"), ("evaluate", 1, "after"), ("evaluate", 3, "after")],
    *[("curriculum", 0, "before"), ("curriculum", 0, "after"), ("update_policy", 0, "after")],
    *[("rollout", 1, "amid"), ("update_policy", 1, "amid")],
]


@pytest.mark.parametrize(("node", "iteration", "moment"), FAULTS)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    process: Any, steady: Any, tmp_path: Path, node: str, iteration: int, moment: str
) -> None:
    killed = process(tmp_path)
    with crashing(killed, node, iteration, moment):
        killed.run(tmp_path)
    resumed = process(tmp_path)
    assert resumed.run(tmp_path)["iteration"] == 4
    at = steady.nodes.index((node, iteration))
    assert (killed.nodes, resumed.nodes) == (steady.nodes[: at + 1], steady.nodes[at:]), "only the fatal node is repeated"
    assert resumed.record() == steady.record()
    assert resumed.learner.updates == steady.learner.updates, "once per iteration, with the same groups"
    assert resumed.metrics() == steady.metrics()
    asked = len(killed.policy.asked) + len(resumed.policy.asked) - len(steady.policy.asked)
    assert asked == (0 if moment != "amid" or node != "rollout" else len(steady.record()[6 + 3][3]))


@pytest.mark.parametrize(("node", "iteration", "finished"), [("rollout", 2, 2), ("update_policy", 2, 2), ("evaluate", 1, 2)])
def test_updates_that_the_learner_had_not_saved_are_repeated(
    process: Any, steady: Any, tmp_path: Path, node: str, iteration: int, finished: int
) -> None:
    """It saves every third, say, and the crash came before."""
    killed = process(tmp_path)
    with crashing(killed, node, iteration, "before"):
        run_training(killed.training, tmp_path / "training.db", run="r", iterations=4)
    saved = tmp_path / "updates"
    assert len(saved.read_text().splitlines()) == finished
    saved.write_text("".join(saved.read_text().splitlines(keepends=True)[: finished - 2]))
    said: list[str] = []
    resumed = process(tmp_path, say=said.append)
    run_training(resumed.training, tmp_path / "training.db", run="r", iterations=4)
    assert resumed.nodes == steady.nodes[steady.nodes.index((node, iteration)) :], "no episode is played again"
    assert resumed.record() == steady.record()
    assert resumed.learner.updates == steady.learner.updates, "with the same groups, in the same order"
    assert said[0] == "iterations 0 to 1 are trained again: their updates were not saved"


@pytest.mark.slow
def test_a_crash_between_a_node_s_end_and_its_checkpoint_loses_nothing(
    process: Any, steady: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node returned is stored a moment before the checkpoint that follows it."""
    put, began = SqliteSaver.put, list[int]()

    def failing_put(self: SqliteSaver, *args: Any) -> Any:
        began.append(len(began))
        if len(began) == died:
            raise Crash
        return put(self, *args)

    like_earlier = {("curriculum", 3), ("rollout", 1), ("rollout", 3), ("update_policy", 3)}
    for died, node in enumerate(steady.nodes, start=3):  # the first two are those of the input and of the start
        if node in like_earlier:
            continue
        folder = tmp_path / str(died)
        folder.mkdir()
        killed = process(folder)
        with monkeypatch.context() as patch:
            patch.setattr(SqliteSaver, "put", failing_put)
            began.clear()
            with pytest.raises(Crash):
                run_training(killed.training, folder / "training.db", run="r", iterations=4)
        killed.buffer.close()
        resumed = process(folder)
        run_training(resumed.training, folder / "training.db", run="r", iterations=4)
        assert [*killed.nodes, *resumed.nodes] == steady.nodes, "no node is repeated"
        assert resumed.record() == steady.record() and resumed.learner.updates == steady.learner.updates


def test_a_run_that_is_over_is_not_begun_again(process: Any, tmp_path: Path) -> None:
    process(tmp_path).run(tmp_path)
    again = process(tmp_path)
    assert again.run(tmp_path)["iteration"] == 4
    assert again.nodes == [] and again.learner.iteration == 4


def test_a_run_that_is_over_may_be_given_more_iterations(process: Any, tmp_path: Path) -> None:
    one = process(tmp_path)
    graph = create_training_graph(one.training).compile(checkpointer=InMemorySaver())
    graph.invoke({"run": "r", "iterations": 2}, one.config)
    graph.invoke({"run": "r", "iterations": 3}, one.config)
    assert [number for node, number in one.nodes if node == "rollout"] == [0, 1, 2]
    assert one.learner.iteration == 3


def test_the_same_process_may_go_on_after_a_fault(process: Any, steady: Any, tmp_path: Path) -> None:
    one, failed = process(tmp_path), False

    def evaluate(finished: int) -> dict[str, int]:
        nonlocal failed
        if not failed:
            failed = True
            raise TimeoutError("the environment is busy")
        return {"eval_finished": finished}

    one.training.evaluate = evaluate
    graph = create_training_graph(one.training).compile(checkpointer=InMemorySaver())
    with pytest.raises(TimeoutError):
        graph.invoke(one.start, one.config, durability="sync")
    graph.invoke(None, one.config, durability="sync")
    assert (one.record(), one.metrics()) == (steady.record(), steady.metrics())


def test_ctrl_c_ends_a_run_between_two_nodes(process: Any, steady: Any, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with Ctrl-C ignored
    one = process(tmp_path)
    learn = one.learner.update

    def update(groups: Any) -> Any:
        if one.learner.iteration == 1:
            signal.raise_signal(signal.SIGINT)
        return learn(groups)

    one.learner.update = update
    with pytest.raises(KeyboardInterrupt):
        run_training(one.training, tmp_path / "training.db", run="r", iterations=4)
    assert one.nodes[-1] == ("update_policy", 1) and one.learner.iteration == 2, "the node at work has finished"
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    resumed = process(tmp_path)
    run_training(resumed.training, tmp_path / "training.db", run="r", iterations=4)
    assert one.nodes + resumed.nodes == steady.nodes
    assert resumed.record() == steady.record() and resumed.metrics() == steady.metrics()


def test_garbage_collection_is_left_alone(process: Any, tmp_path: Path) -> None:
    one, seen, before = process(tmp_path), list[int](), (gc.isenabled(), gc.get_threshold())
    one.training.on_node = lambda *_: (seen.append(gc.get_freeze_count()), assert_same())

    def assert_same() -> None:
        assert (gc.isenabled(), gc.get_threshold()) == before and before[0]

    run_training(one.training, tmp_path / "training.db", run="r", iterations=1)
    assert seen and max(seen) <= seen[0], "what is frozen may die, and nothing joins it"


# --- outages --------------------------------------------------------------------------------------------------------


class Outage:
    """A policy's server that is away from one call on, until `over`."""

    def __init__(self, first: int) -> None:
        self.first, self.calls, self.over = first, 0, False

    def __call__(self, _: Any) -> str:
        self.calls += 1
        recorder = TokenRecorder.current()
        assert recorder is not None
        if not self.over and self.calls >= self.first:
            raise ConnectionError("401: the key has expired")
        return random.Random(recorder.next_seed()).choice(["open door", "go north", "dance"])


def test_after_an_outage_the_same_call_goes_on_as_if_nothing_had_happened(process: Any, steady: Any, tmp_path: Path) -> None:
    outage = Outage(first=1)
    away = process(tmp_path, outage)
    for _ in range(2):
        with pytest.raises(NothingToTrain, match="all 6 episodes failed; causes: ConnectionError: 401.*plays them again"):
            run_training(away.training, tmp_path / "training.db", run="r", iterations=4)
    (cause,) = {str(each.error) for each in away.buffer.trajectories()}
    assert cause.startswith("ConnectionError: 401: the key has expired at ")
    outage.over = True
    back = process(tmp_path, outage)
    run_training(back.training, tmp_path / "training.db", run="r", iterations=4)
    assert back.nodes[0] == ("rollout", 0) and back.record() == steady.record()
    assert back.learner.updates == steady.learner.updates and back.metrics() == steady.metrics()


def test_what_failed_before_a_kill_is_played_again_before_it_is_trained_on(process: Any, steady: Any, tmp_path: Path) -> None:
    """Also where the checkpoint is past the rollouts, as long as the weights are not."""
    outage = Outage(first=8)
    killed = process(tmp_path, outage)
    with crashing(killed, "update_policy", 0, "before"):
        run_training(killed.training, tmp_path / "training.db", run="r", iterations=4)
    failed = [each for each in process(tmp_path).buffer.trajectories() if each.error]
    assert 0 < len(failed) < 6, "the test would say nothing"
    outage.over = True
    back = process(tmp_path, outage)
    run_training(back.training, tmp_path / "training.db", run="r", iterations=4)
    assert back.nodes[0] == ("rollout", 0) and back.record() == steady.record()
    assert back.learner.updates == steady.learner.updates


def test_what_was_trained_on_is_not_played_again(process: Any, tmp_path: Path) -> None:
    outage = Outage(first=8)
    killed = process(tmp_path, outage)
    with crashing(killed, "update_policy", 0, "amid"):
        run_training(killed.training, tmp_path / "training.db", run="r", iterations=1)
    outage.over = True
    back = process(tmp_path, outage)
    run_training(back.training, tmp_path / "training.db", run="r", iterations=1)
    assert back.nodes[0] == ("update_policy", 0) and back.learner.iteration == 1
    assert back.metrics()[0]["failed_episodes"] > 0, "the record of what the weights have learned from stays true"


# --- another target -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("node", "iteration"), [("curriculum", 0), ("rollout", 1), ("update_policy", 1), ("evaluate", 1)])
@pytest.mark.parametrize("iterations", [2, 4])
def test_a_killed_run_takes_the_iterations_of_the_call_that_resumes_it(
    process: Any, steady: Any, tmp_path: Path, node: str, iteration: int, iterations: int
) -> None:
    killed = process(tmp_path)
    with crashing(killed, node, iteration, "before"):
        run_training(killed.training, tmp_path / "training.db", run="r", iterations=6 - iterations)
    resumed = process(tmp_path)
    run_training(resumed.training, tmp_path / "training.db", run="r", iterations=iterations)
    assert resumed.learner.iteration == iterations and resumed.record() == steady.record()[: 6 * iterations]


def test_the_count_of_uniform_iterations_outlives_the_process(process: Any, tmp_path: Path) -> None:
    killed = process(tmp_path, lambda _: "open door", stop_after_uniform=3)
    with crashing(killed, "update_policy", 2, "after"):
        run_training(killed.training, tmp_path / "training.db", run="r", iterations=9)
    for nodes in ([("update_policy", 2), ("evaluate", 2)], []):
        resumed = process(tmp_path, lambda _: "open door", stop_after_uniform=3)
        run_training(resumed.training, tmp_path / "training.db", run="r", iterations=9)
        assert resumed.nodes == nodes and resumed.learner.iteration == 3
    more = process(tmp_path, lambda _: "open door", stop_after_uniform=3)
    for _ in range(2):
        run_training(more.training, tmp_path / "training.db", run="r", iterations=10)
        assert more.learner.iteration == 6, "who asks for more iterations gets them"


def test_no_iterations_are_none(process: Any, tmp_path: Path) -> None:
    one = process(tmp_path)
    run_training(one.training, tmp_path / "training.db", run="r", iterations=0)
    assert one.nodes == [] and one.learner.iteration == 0
