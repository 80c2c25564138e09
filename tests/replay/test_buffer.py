"""What the replay buffer gives back: everything as it was added, once, and the right steps to be grounded in."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.errors import ConfigurationError, ReplayBufferError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Segment, Source, Split, Step, Task, Trajectory

TASK = Task(id="t0", instruction="eat the apple", environment="kitchen")
SEGMENT = Segment(token_ids=(1, 151_643, 7), sampled=(0, 1, 1), logprobs=(0.0, -0.5, -2.25), temperature=0.7)


def step(number: int = 0) -> Step:
    return Step(observation=f"room {number}", action=f"go {number}", next_observation=f"room {number + 1}")


def episode(index: int = 0, *, task: Task = TASK, steps: int = 2, **fields: Any) -> Trajectory:
    return Trajectory(task=task, steps=tuple(map(step, range(steps))), rollout_index=index, **fields)


def keys(buffer: ReplayBuffer) -> list[tuple[str, int]]:
    return [(each.run, each.rollout_index) for each in buffer.trajectories()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.db"


@pytest.fixture
def buffer(path: Path) -> Iterator[ReplayBuffer]:
    with ReplayBuffer(path) as buffer:
        yield buffer


def test_everything_comes_back_as_it_was_after_reopening(path: Path) -> None:
    task = Task(
        id="t/1",
        instruction="cook – 料理",
        environment="textworld_express/cookingworld",
        observation="a kitchen",
        tools=["look", {"type": "function", "function": {"name": "wait"}}],
        rubric="cooked – 料理",
        seed=3,
        metadata={"params": {"doors": [True, None, 0.5]}, "seed": "mine", "tools": 3, "generated": "2025-01-02"},
        origin="synthetic",
        parent_id="t0",
        split="validation",
    )
    steps = (
        Step(observation="a", action="look", next_observation="", reward=0.25, valid=False, reasoning="nothing\0there"),
        Step(observation="", action="wait", next_observation="b", decided_by="recorded", judged_by="references"),
        Step(observation="", action="", next_observation="z" * 100_000, reward=-1.0, terminated=True),
        Step(observation="b", action="wait", next_observation="c", truncated=True),
    )
    complete = Trajectory(
        task=task,
        steps=steps,
        source="synthetic",
        success=True,
        run="run",
        iteration=4,
        rollout_index=7,
        policy_version="p1",
        experience_version="e2",
        segments=(SEGMENT, Segment(token_ids=(), sampled=(), logprobs=())),
        annotation={"overall_plan": "cook – 料理", "success_mode": "heat", "failure_mode": "none"},
    )
    failed = Trajectory(task=TASK, source="real", error="EnvironmentFailed: java died", run="run")
    with ReplayBuffer(path) as buffer:
        assert buffer.extend([complete, failed]) == 2
    with ReplayBuffer(path) as buffer:
        assert list(buffer.trajectories(segments=True)) == [complete, failed]
        without_tokens = next(buffer.trajectories())
    assert without_tokens.segments == () and without_tokens.steps == steps


@pytest.mark.parametrize("together", [False, True])
def test_a_failed_episode_gives_way_to_a_played_one_and_is_set_aside(buffer: ReplayBuffer, together: bool) -> None:
    failed = episode(0, steps=1, source="real", error="ConnectionError: away", segments=(SEGMENT,))
    played = episode(0, steps=2, source="real", success=True, segments=(SEGMENT, SEGMENT))
    if together:
        assert buffer.extend([failed, played]) == 2
    else:
        assert buffer.add(failed) and buffer.add(played)
    assert not buffer.add(failed) and not buffer.add(episode(0, steps=3, source="real"))
    run = played.run
    assert list(buffer.trajectories(run=run, segments=True)) == [played] and buffer.count("steps", run=run) == 2
    other = episode(1, steps=1, error="java died")
    assert buffer.add(other) and buffer.add(episode(1, steps=0, error="java died again"))
    assert [each.error for each in buffer.trajectories(run=run)] == [None, "java died again"]
    aside = [each for each in buffer.trajectories() if each.run != run]
    assert [(each.error, len(each.steps)) for each in aside] == [("ConnectionError: away", 1), ("java died", 1)]
    assert all(each.run.startswith(f"{run}/failed/") for each in aside)


def test_steps_of_an_episode_that_was_set_aside_stand_for_no_others(buffer: ReplayBuffer) -> None:
    """Retrieval remembers steps by their ids: what it has seen must neither vanish nor become another step."""
    before, after = step(1), step(2)
    buffer.add(Trajectory(task=TASK, steps=[before], source="real", error="ConnectionError: away"))
    assert buffer.similar(before.observation, before.action) == []
    buffer.add(Trajectory(task=TASK, steps=[after], source="real"))
    assert buffer.similar(before.observation, before.action) == [after]
    buffer.add(Trajectory(task=TASK, steps=[], source="real", error="x", rollout_index=1))
    assert buffer.similar(after.observation, after.action) == [after]


def test_text_that_utf8_cannot_hold_does_not_cost_the_episode(buffer: ReplayBuffer) -> None:
    half_an_emoji = "ok \ud83d"
    broken = Step(observation=half_an_emoji, action="a", next_observation="b")
    assert buffer.add(Trajectory(task=TASK, steps=[broken], error=half_an_emoji))
    (found,) = buffer.trajectories()
    assert (found.steps[0].observation, found.error) == ("ok ?", "ok ?")


def test_the_same_rollout_is_stored_once_and_the_first_stays(buffer: ReplayBuffer) -> None:
    assert buffer.add(episode(run="r"))
    assert not buffer.add(episode(run="r", steps=5, success=True))
    assert buffer.extend([episode(1, run="r"), episode(1, run="r"), episode(run="r")]) == 1
    assert keys(buffer) == [("r", 0), ("r", 1)]
    assert buffer.count("steps") == 4


@pytest.mark.parametrize(
    "other", [{"run": "s"}, {"iteration": 1}, {"index": 1}, {"task": Task(id="t1", instruction="", environment="")}]
)
def test_each_part_of_the_key_tells_rollouts_apart(buffer: ReplayBuffer, other: dict[str, Any]) -> None:
    assert buffer.add(episode(run="r"))
    assert buffer.add(episode(**{"run": "r", **other}))


def test_a_trajectory_that_cannot_be_stored_leaves_nothing_behind(buffer: ReplayBuffer) -> None:
    # NaN has no representation in SQLite; the failure comes after task and trajectory were written.
    bad = Trajectory(task=TASK, steps=[Step(observation="a", action="b", next_observation="c", reward=float("nan"))])
    with pytest.raises(ReplayBufferError, match=r"steps\.reward"):
        buffer.add(bad)
    assert [buffer.count(what) for what in ("tasks", "trajectories", "steps")] == [0, 0, 0]
    assert buffer.add(episode())


def test_a_trajectory_leaves_the_stored_task_as_it_is(buffer: ReplayBuffer) -> None:
    assert buffer.add_tasks([TASK, replace(TASK, instruction="other")]) == 1
    buffer.add_tasks([TASK])
    assert buffer.add(episode(task=Task(id="t0", instruction="changed", environment="elsewhere")))
    assert buffer.tasks() == [TASK]
    assert next(buffer.trajectories()).task == TASK


def test_add_tasks_gives_a_stored_task_its_new_fields(buffer: ReplayBuffer) -> None:
    buffer.add_tasks([TASK])
    changed = replace(TASK, instruction="eat it", rubric="eaten", origin="synthetic", parent_id="t")
    assert buffer.add_tasks([changed]) == 0
    assert buffer.tasks() == [changed]
    with pytest.raises(ConfigurationError, match="'t0' is stored with environment 'kitchen' and given with 'cellar'"):
        buffer.add_tasks([Task(id="new", instruction="", environment=""), replace(TASK, environment="cellar")])
    assert buffer.tasks() == [changed]


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("by", ["add_tasks", "add", "add, known"])
def test_a_task_that_is_held_out_later_is_not_retrieved(path: Path, split: Split, by: str) -> None:
    other = Task(id="t1", instruction="", environment="kitchen")
    same, own = step(0), step(1)
    held_out = replace(TASK, split=split)
    with ReplayBuffer(path) as buffer, ReplayBuffer(path) as second:
        buffer.add(Trajectory(task=TASK, steps=[same, own]))
        buffer.add(Trajectory(task=other, steps=[replace(same, reward=1.0)], rollout_index=1))
        for each in (buffer, second):
            assert each.similar("room 0", "go 0", k=5) == [same, own]
        if by == "add_tasks":
            assert buffer.add_tasks([held_out]) == 0
        else:
            assert buffer.add(Trajectory(task=held_out, rollout_index=0 if "known" in by else 2)) is ("known" not in by)
        for each in (buffer, second):
            assert each.similar("room 0", "go 0", k=5) == [replace(same, reward=1.0)], "the same step of another task stays"
            assert each.similar("room 0", "go 0", k=5, exclude_task="t1") == []
    with ReplayBuffer(path) as reopened:
        assert reopened.similar("room 0", "go 0", k=5) == [replace(same, reward=1.0)]
        assert reopened.tasks(split=split) == [held_out]


def test_a_held_out_task_does_not_become_a_training_task(buffer: ReplayBuffer) -> None:
    held_out = replace(TASK, split="test")
    buffer.add(episode(task=held_out))
    refused = r"task 't0' is stored with split 'test' and given with split 'train'.*replace\(task, split='test'\)"
    for add in (lambda: buffer.add_tasks([TASK]), lambda: buffer.add(episode(1, source="real"))):
        with pytest.raises(ConfigurationError, match=refused):
            add()
    assert buffer.add(episode()) is False, "the script that stored it first may run again"
    assert buffer.tasks() == [held_out] and buffer.count("trajectories") == 1
    assert buffer.add(episode(1)), "a new trace of the same request"
    assert buffer.tasks() == [held_out] and list(buffer.trajectories(split="train")) == []
    buffer.add_tasks([replace(TASK, split="validation")])
    assert [task.split for task in buffer.tasks()] == ["validation"]


@pytest.mark.parametrize("by", ["dream", "imitation"])
def test_a_task_that_was_trained_on_is_not_held_out_afterwards(buffer: ReplayBuffer, by: str) -> None:
    buffer.add(episode())
    if by == "dream":
        buffer.add(episode(1, source="synthetic", run="mine-1/train"))
    else:
        buffer.record_metrics("mine-1/stage/base", 0, {"seconds": 1.0})
    named = "mine-1/train" if by == "dream" else "mine-1/stage/base"
    held_out = replace(TASK, split="test")
    for add in (lambda: buffer.add_tasks([held_out]), lambda: buffer.add(episode(2, task=held_out))):
        with pytest.raises(ConfigurationError, match=f"'t0' is given with split 'test', and the run '{named}'.*held_out="):
            add()
    assert [task.split for task in buffer.tasks()] == ["train"]
    new = replace(held_out, id="new")
    assert buffer.add_tasks([new]) == 1, "another task may still be held out"


def test_tasks_by_filter_in_order_of_insertion(buffer: ReplayBuffer) -> None:
    tasks = [
        Task(id="b", instruction="", environment="x"),
        Task(id="a", instruction="", environment="y", split="test"),
        Task(id="c", instruction="", environment="x", origin="synthetic", parent_id="b"),
    ]
    assert buffer.add_tasks(tasks) == 3
    assert buffer.tasks() == tasks
    assert [task.id for task in buffer.tasks(environment="x")] == ["b", "c"]
    assert [task.id for task in buffer.tasks(split="train", origin="real")] == ["b"]


def test_trajectories_and_counts_by_filter(buffer: ReplayBuffer) -> None:
    test = Task(id="held out", instruction="", environment="", split="test")
    unplayed = Task(id="unplayed", instruction="", environment="")
    buffer.add_tasks([unplayed])
    buffer.extend([episode(0, run="r"), episode(1, run="r", iteration=2, source="real")])
    buffer.extend([episode(2, run="s", steps=0, error="x"), episode(3, run="s", task=test, source="synthetic")])

    def found(**filters: Any) -> list[int]:
        return [each.rollout_index for each in buffer.trajectories(**filters)]

    assert found() == [0, 1, 2, 3]
    assert found(run="r") == [0, 1]
    assert found(run="r", iteration=0) == [0]
    assert found(source="real") == [1]
    assert found(split="test") == [3]
    assert found(task_id="t0", errors=False) == [0, 1]
    assert found(limit=2) == [0, 1]
    assert found(limit=0) == []
    assert buffer.count("tasks") == 3
    assert buffer.count("tasks", split="train") == 2
    assert buffer.count("tasks", run="r") == 1
    assert buffer.count("trajectories", source="offline") == 2
    assert buffer.count("steps", run="s") == 2
    with pytest.raises(ConfigurationError, match="Did you mean 'steps'"):
        buffer.count("step")  # type: ignore[arg-type]


def test_the_buffer_may_be_written_while_it_is_read(buffer: ReplayBuffer) -> None:
    buffer.extend(episode(index) for index in range(600))
    with ThreadPoolExecutor(1) as pool:
        for each in buffer.trajectories():
            assert pool.submit(buffer.add, episode(each.rollout_index, run="copy")).result(timeout=60)
    assert buffer.extend(buffer.trajectories(run="copy")) == 0
    assert buffer.count("trajectories") == 1200


def test_extend_stores_many_keeping_order_and_skipping_known_ones(buffer: ReplayBuffer) -> None:
    buffer.add(episode(1234, run="r"))
    assert buffer.extend(episode(index, run="r", segments=[SEGMENT]) for index in range(2000)) == 1999
    found = list(buffer.trajectories(segments=True))
    assert [each.rollout_index for each in found] == [1234, *(index for index in range(2000) if index != 1234)]
    assert all(len(each.steps) == 2 for each in found)
    assert found[0].segments == () and all(each.segments == (SEGMENT,) for each in found[1:])


def test_extend_keeps_what_came_before_its_iterable_broke(buffer: ReplayBuffer) -> None:
    def broken() -> Iterator[Trajectory]:
        yield from map(episode, range(700))
        raise OSError("the trace file ends here")

    with pytest.raises(OSError, match="ends here"):
        buffer.extend(broken())
    assert buffer.count("trajectories") == 500
    assert buffer.extend(map(episode, range(700))) == 200


def test_metrics_are_replaced_by_name_and_given_by_iteration(buffer: ReplayBuffer) -> None:
    buffer.record_metrics("r", 2, {"loss": 0.5, "tokens": 12, "checkpoint": "p2", "kl": None})
    buffer.record_metrics("r", 1, {"loss": float("nan")})
    buffer.record_metrics("r", 2, {"loss": 0.25, "success": 1.0})
    buffer.record_metrics("other", 1, {"loss": 9.0})
    two = {"iteration": 2, "loss": 0.25, "tokens": 12, "checkpoint": "p2", "kl": None, "success": 1.0}
    assert buffer.metrics("r") == [{"iteration": 1, "loss": None}, two]
    assert isinstance(buffer.metrics("r")[1]["tokens"], int)
    assert buffer.metrics("unknown") == []
    with pytest.raises(ConfigurationError, match="iteration"):
        buffer.record_metrics("r", 3, {"iteration": 3})


def test_sixteen_threads_add_and_read_one_buffer(buffer: ReplayBuffer) -> None:
    def work(thread: int) -> int:
        stored = 0
        for index in range(25):
            # Each rollout is offered by two threads; one of them must win.
            stored += buffer.add(episode(index, run=f"r{thread // 2}"))
            complete = list(buffer.trajectories(run=f"r{thread // 2}"))
            assert len(complete) > index and all(len(each.steps) == 2 for each in complete)
            assert buffer.similar(f"room {index % 2}", "go", k=1)
            buffer.record_metrics("r", index, {f"thread {thread}": index})
        return stored

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(work, range(16))) == 8 * 25
    assert len(set(keys(buffer))) == buffer.count("trajectories") == 200
    assert [len(row) for row in buffer.metrics("r")] == [17] * 25


@pytest.mark.parametrize("source", ["offline", "real", "synthetic"])
def test_only_train_steps_that_no_dream_made_are_retrieved(buffer: ReplayBuffer, source: Source) -> None:
    for split in ("train", "validation", "test"):
        task = Task(id=split, instruction="", environment="", split=split)
        seen = Step(observation="a red door", action="open door", next_observation=f"{split} {source}")
        buffer.add(Trajectory(task=task, steps=[seen], source=source))
    found = [each.next_observation for each in buffer.similar("a red door", "open door", k=10)]
    assert found == ([] if source == "synthetic" else [f"train {source}"])


def test_retrieval_grows_with_the_buffer_and_survives_reopening(path: Path) -> None:
    rng = random.Random(0)
    words = ["key", "door", "lamp", "table", "apple", "knife", "north", "south", "open", "closed"]

    def text(n: int) -> str:
        return " ".join(rng.choices(words, k=n))

    queries = [(text(8), text(2)) for _ in range(20)]
    with ReplayBuffer(path) as buffer:
        assert buffer.similar(*queries[0]) == [], "nothing is stored"
        for index in range(60):
            seen = [Step(observation=text(8), action=text(2), next_observation=text(8)) for _ in range(3)]
            source: Source = "real" if index % 2 else "synthetic"
            buffer.add(Trajectory(task=TASK, steps=seen, rollout_index=index, source=source))
            grown = buffer.similar_many(queries, 5)
    with ReplayBuffer(path) as buffer:
        assert buffer.similar_many(queries, 5) == grown == [buffer.similar(*query, k=5) for query in queries]
        assert buffer.similar(*queries[0], k=0) == [] and buffer.similar_many([], 5) == []
        assert len(buffer.similar(*queries[0], k=1000)) == 90


def test_a_step_comes_back_whole_and_the_asking_task_can_be_left_out(buffer: ReplayBuffer) -> None:
    seen = Step(observation="a", action="b", next_observation="c", reward=0.5, terminated=True, reasoning="r")
    buffer.add(Trajectory(task=TASK, steps=[seen, seen]))
    assert buffer.similar("a", "b") == [seen]
    assert buffer.similar("a", "b", exclude_task="t0") == []
    assert buffer.similar("a", "b", exclude_task="unknown") == [seen]
    buffer.add(Trajectory(task=Task(id="t1", instruction="", environment=""), steps=[seen]))
    assert buffer.similar("a", "b", exclude_task="t0") == [seen]


def test_real_trajectories_and_their_revision_leave_out_what_was_dreamed_or_failed_or_measures_a_policy(path: Path) -> None:
    task = Task(id="t", instruction="i", environment="e")
    step = Step(observation="a", action="look", next_observation="b", valid=False, reasoning="r")
    with ReplayBuffer(path) as buffer:
        assert buffer.revision() == (0, 0, 0) and not list(buffer.real_trajectories())
        buffer.add(Trajectory(task=task, steps=[step, step], success=True))
        buffer.add(Trajectory(task=task, steps=[step], source="synthetic", rollout_index=1))
        buffer.add(Trajectory(task=task, steps=[step], source="real", rollout_index=2, error="OSError: away"))
        assert buffer.revision() == (1, 0, 0)
        buffer.add(Trajectory(task=task, source="real", rollout_index=3))
        assert buffer.revision() == (4, 0, 0)
        buffer.add_tasks([replace(task, split="test")])
        assert buffer.revision() == (1, 1, 0), "what a policy played of an evaluation task is no record"
        assert [(len(each.steps), each.source) for each in buffer.real_trajectories()] == [(2, "offline")]
        assert not list(buffer.real_trajectories(split="train"))
