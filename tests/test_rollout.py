"""Rollouts: every episode once, each on its own, and a broken one is data."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import (
    AccessBlocked,
    ConfigurationError,
    ContextExceeded,
    EnvironmentFailed,
    EpisodesMissing,
    PredictionFailed,
    ProcessLost,
    RunStopped,
    Unanswered,
    UserFault,
)
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import check_played, real_steps, rollout
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder
from dreamgym_lg.types import Step, StepResult, Task, Trajectory

TASKS = [Task(id=f"t{n}", instruction="count to three", environment="counting") for n in range(3)]


class Counting(Environment):
    """Ends in success with the third step. `fault` names the task whose second step breaks, and how."""

    def __init__(self, fault: tuple[str, Exception] | None = None) -> None:
        self._fault = fault

    def reset(self, task: Task) -> str:
        self._task, self._steps = task, 0
        return f"{task.id}: 0"

    def step(self, action: str) -> StepResult:
        self._steps += 1
        if self._fault and self._fault[0] == self._task.id and self._steps == 2:
            raise self._fault[1]
        last = self._steps == 3
        return StepResult(f"{self._task.id}: {self._steps}", float(last), last, False, {"success": last})

    async def areset(self, task: Task) -> str:
        return self.reset(task)

    async def astep(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        return self.step(action)


@pytest.fixture
def buffer() -> Iterator[ReplayBuffer]:
    with ReplayBuffer(":memory:") as buffer:
        yield buffer


@pytest.fixture
def policy(scripted: Any) -> Any:
    """Says its seed and reports one token for each call, as a trainable model does."""

    def reply(_: Any) -> str:
        recorder = TokenRecorder.current()
        assert recorder is not None
        seed = recorder.next_seed()
        recorder.record(TokenCall(None, [len(recorder.calls)], [7], [-0.5], 1.0))
        return f"say {seed}"

    return scripted(reply=reply)


def play(policy: Any, tasks: list[Task] = TASKS, **options: Any) -> list[Trajectory]:
    environments = options.pop("create_environment", Counting)
    graph = create_episode_graph(policy, max_steps=options.pop("max_steps", 10)).compile()
    options = {"source": "synthetic", "run": "r", **options}
    return asyncio.run(rollout(graph, tasks, environments, **options))


def actions(trajectory: Trajectory) -> list[str]:
    return [step.action for step in trajectory.steps]


def test_nothing_plays_on_behind_an_error(policy: Any) -> None:
    played: list[str] = []

    class Slow(Counting):
        async def astep(self, action: str) -> StepResult:
            await asyncio.sleep(0.01)
            played.append(self._task.id)
            return self.step(action)

    def full(trajectory: Trajectory) -> None:
        raise OSError("no space left on device")

    async def both() -> None:
        graph = create_episode_graph(policy, max_steps=10).compile()
        with pytest.raises(OSError, match="no space left"):
            await rollout(graph, TASKS, lambda: Slow(), source="real", num_generations=4, concurrency=2, on_episode=full)
        before = len(played)
        await asyncio.sleep(0.1)
        assert 3 <= before == len(played) < 9

    asyncio.run(both())


@pytest.mark.slow
def test_the_first_episodes_are_answered_while_the_last_begin(scripted: Any) -> None:
    begun: list[str] = []
    asked_after: list[int] = []

    class Noted(Counting):
        def reset(self, task: Task) -> str:
            begun.append(task.id)
            return super().reset(task)

    def reply(_: Any) -> str:
        asked_after.append(len(begun))
        return "go on"

    play(scripted(reply=reply), create_environment=Noted, num_generations=40, concurrency=120)
    assert len(begun) == 120 and asked_after[0] < 60


@pytest.mark.slow
def test_garbage_is_seldom_looked_for_while_episodes_play_and_as_before_afterwards(policy: Any) -> None:
    seen, of_conftest, before = set(), gc.get_threshold(), (700, 10, 10)
    gc.unfreeze()  # of conftest.py
    gc.set_threshold(*before)
    try:
        play(policy, on_episode=lambda _: seen.add((gc.get_freeze_count() > 0, gc.get_threshold()[0] > before[0])))
        assert seen == {(True, True)}
        assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
        gc.freeze()
        play(policy, on_episode=lambda _: seen.add(gc.get_threshold()))
        assert before in seen and gc.get_freeze_count() > 0, "what the caller has set so stays so"
    finally:
        gc.set_threshold(*of_conftest)
        gc.freeze()


def test_every_task_is_played_num_generations_times_and_stored_once(policy: Any, buffer: ReplayBuffer) -> None:
    versions = {"policy_version": "p5", "experience_version": "e1"}
    found = play(policy, num_generations=4, iteration=5, replay_buffer=buffer, **versions)
    assert [(t.task.id, t.rollout_index) for t in found] == [(task.id, n) for task in TASKS for n in range(4)]
    for each in found:
        assert each.success and each.reward == 1.0 and each.error is None and len(each.steps) == 3
        assert (each.source, each.run, each.iteration) == ("synthetic", "r", 5)
        assert (each.policy_version, each.experience_version) == ("p5", "e1")
        assert sum(segment.trainable for segment in each.segments) == 3
    stored = list(buffer.trajectories(run="r", iteration=5))
    assert sorted((t.task.id, t.rollout_index) for t in stored) == [(t.task.id, t.rollout_index) for t in found]
    assert buffer.count("trajectories") == 12


def test_a_second_call_plays_nothing_and_gives_the_same(policy: Any, buffer: ReplayBuffer) -> None:
    first = play(policy, num_generations=3, replay_buffer=buffer)
    asked = len(policy.asked)
    again = play(policy, num_generations=3, replay_buffer=buffer)
    assert len(policy.asked) == asked == 27

    def content(found: list[Trajectory]) -> list[tuple[Any, ...]]:
        return [(t.task, t.rollout_index, list(t.steps), t.success, [list(s.token_ids) for s in t.segments]) for t in found]

    assert content(again) == content(first)


def test_only_what_is_missing_is_played_and_told(policy: Any, buffer: ReplayBuffer) -> None:
    played: list[tuple[str, int]] = []

    def told(trajectory: Trajectory) -> None:
        played.append((trajectory.task.id, trajectory.rollout_index))
        assert buffer.count("trajectories") >= len(played), "stored before anyone is told"

    options: dict[str, Any] = {"replay_buffer": buffer, "on_episode": told}
    play(policy, TASKS[:2], num_generations=2, **options)
    assert sorted(played) == [("t0", 0), ("t0", 1), ("t1", 0), ("t1", 1)]
    played.clear()
    assert len(play(policy, num_generations=3, **options)) == 9
    assert sorted(played) == [("t0", 2), ("t1", 2), ("t2", 0), ("t2", 1), ("t2", 2)]
    played.clear()
    play(policy, num_generations=3, **options)
    assert played == []
    play(policy, num_generations=3, iteration=1, **options)
    play(policy, num_generations=3, run="other", **options)
    assert len(played) == 18 and buffer.count("trajectories") == 27


def test_without_a_buffer_everything_is_played_each_time(policy: Any) -> None:
    assert play(policy) == play(policy)
    assert len(policy.asked) == 18


def test_each_episode_samples_by_itself_and_the_same_when_repeated(policy: Any) -> None:
    def sampled(**options: Any) -> list[str]:
        return [action for each in play(policy, num_generations=4, **options) for action in actions(each)]

    once = sampled()
    assert len(set(once)) == 3 * 4 * 3 == len(once), "no two calls of the policy draw alike"
    assert sampled() == sampled(concurrency=1) == once
    assert not set(once) & {*sampled(seed=1), *sampled(iteration=1)}


def test_an_episode_is_the_same_whichever_others_were_played_before_a_crash(policy: Any, buffer: ReplayBuffer) -> None:
    complete = play(policy, num_generations=3)
    play(policy, TASKS[1:2], num_generations=2, replay_buffer=buffer)
    resumed = play(policy, num_generations=3, replay_buffer=buffer)
    assert [actions(t) for t in resumed] == [actions(t) for t in complete]


def test_no_text_of_an_episode_holds_a_key_of_the_environment(
    policy: Any, buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaking(Counting):
        def step(self, action: str) -> StepResult:
            result = super().step(action)
            return result._replace(observation="the-pass-word", info={**result.info, "reasoning": "made pay the-pass-word"})

    monkeypatch.setenv("SHOP_PASSWORD", "the-pass-word")
    play(policy, TASKS[:1], create_environment=Leaking, replay_buffer=buffer)
    (stored,) = buffer.trajectories(run="r")
    assert [step.reasoning for step in stored.steps] == ["made pay [key]"] * 3
    assert "the-pass-word" not in repr(stored)


@pytest.mark.parametrize("fault", [EnvironmentFailed("java died"), RuntimeError("closed"), KeyError("seed")])
def test_a_broken_environment_is_a_trajectory_with_its_cause_and_the_steps_before(
    policy: Any, buffer: ReplayBuffer, fault: Exception
) -> None:
    found = play(policy, create_environment=lambda: Counting(("t1", fault)), replay_buffer=buffer)
    broken = found[1]
    cause, _, line = str(broken.error).partition(" at ")
    assert cause == f"{type(fault).__name__}: {fault}" and not broken.success
    assert line.startswith(f"{__file__}:") != isinstance(fault, EnvironmentFailed), "this library's errors say enough"
    assert [step.next_observation for step in broken.steps] == ["t1: 1"]
    assert sum(segment.trainable for segment in broken.segments) == 2, "its tokens are known, the last call's too"
    assert all(each.success and each.error is None for each in (found[0], found[2]))
    assert [t.error for t in buffer.trajectories(task_id="t1")] == [broken.error]


@pytest.mark.parametrize("source", ["synthetic", "real"])
def test_what_failed_is_played_again_and_replaced(policy: Any, buffer: ReplayBuffer, source: Any) -> None:
    whole = play(policy, num_generations=2, source=source)
    broken = play(
        policy, create_environment=lambda: Counting(("t1", ConnectionError("401"))),
        num_generations=2, replay_buffer=buffer, source=source,
    )  # fmt: skip
    assert [each.error is None for each in broken] == [True, True, False, False, True, True]
    asked = len(policy.asked)
    again = play(policy, num_generations=2, replay_buffer=buffer, source=source)
    assert len(policy.asked) - asked == 2 * 3, "only these two"
    assert [actions(each) for each in again] == [actions(each) for each in whole]
    stored = {(each.task.id, each.rollout_index): each for each in buffer.trajectories(run="r", segments=True)}
    assert buffer.count("trajectories", run="r") == 6 == len(stored) and buffer.count("steps", run="r") == 18
    assert buffer.count("trajectories") == 8, "the failed ones are kept aside, with their causes"
    for each in again:
        kept = stored[each.task.id, each.rollout_index]
        assert (list(kept.steps), kept.error, len(kept.segments)) == (list(each.steps), None, len(each.segments))


@pytest.mark.parametrize("outcome", [PredictionFailed("two scores"), Unanswered("get_order of 7"), UserFault("another goal")])
def test_an_outcome_of_the_dream_is_not_played_until_it_is_a_better_one(
    policy: Any, buffer: ReplayBuffer, outcome: Exception
) -> None:
    first = play(policy, create_environment=lambda: Counting(("t1", outcome)), replay_buffer=buffer)
    calls = len(policy.asked)
    assert play(policy, replay_buffer=buffer)[1].error == first[1].error == f"{type(outcome).__name__}: {outcome}"
    assert len(policy.asked) == calls and buffer.count("trajectories") == 3
    again = play(policy, TASKS[1:2], replay_buffer=buffer)
    assert again[0].success, "where every episode failed there is no verdict, and they are played again"


def test_an_episode_that_outgrows_the_policy_is_cut_short_unlike_a_first_prompt(
    scripted: Any, buffer: ReplayBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    def reply(messages: Any) -> str:
        if "t1: 1" in messages[-1].text or "t2: 0" in messages[-1].text:
            raise ContextExceeded("the model takes 2048")
        return "go on"

    whole, cut, broken = play(scripted(reply=reply), replay_buffer=buffer, attempts=3)
    assert whole.success and not cut.success and cut.error is None and cut.reward == 0
    assert [step.truncated for step in cut.steps] == [True]
    assert broken.error == "ContextExceeded: the model takes 2048"
    assert "1 of 3 episodes are cut short, without success, where they outgrew the policy's context" in caplog.text
    assert check_played([whole, cut]) and buffer.count("trajectories") == 3, "neither is played again"


def test_attempts_are_rounds_within_one_call(policy: Any, buffer: ReplayBuffer) -> None:
    class Away(Counting):
        """Fails its first `failures` episodes of each task."""

        left: dict[str, int] = {}

        def reset(self, task: Task) -> str:
            self.left[task.id] = self.left.get(task.id, failures) - 1
            if self.left[task.id] >= 0:
                raise ConnectionError("away")
            return super().reset(task)

    told: list[str | None] = []
    for failures, attempts, errors in ((2, 3, 0), (3, 3, 3), (1, 1, 3)):
        Away.left.clear()
        told.clear()
        found = play(
            policy, create_environment=Away, attempts=attempts, run=f"{failures}/{attempts}", replay_buffer=buffer,
            on_episode=lambda each: told.append(each.error),
        )  # fmt: skip
        assert sum(each.error is not None for each in found) == errors
        assert len(told) == 3 * min(attempts, failures + 1)
    assert [buffer.count("trajectories", run=run) for run in ("2/3", "3/3", "1/1")] == [3, 3, 3]


def test_an_unreadable_answer_of_the_dream_is_an_outcome(policy: Any) -> None:
    told: list[Trajectory] = []
    fault = ("t1", PredictionFailed("no reward in 'hm'"))
    found = play(policy, create_environment=lambda: Counting(fault), attempts=3, on_episode=told.append)
    assert len(told) == 3, "the same model would answer the same again"
    assert check_played(found) is found and [each.success for each in found] == [True, False, True]


@pytest.mark.parametrize("kind", [AccessBlocked, ConfigurationError])
def test_what_would_end_the_same_is_played_once_and_there_is_no_verdict(policy: Any, kind: Any) -> None:
    told: list[Trajectory] = []
    fault = ("t1", kind("os.remove of orders.db"))
    found = play(policy, create_environment=lambda: Counting(fault), attempts=3, on_episode=told.append)
    assert len(told) == 3 and found[1].error == f"{kind.__name__}: os.remove of orders.db"
    with pytest.raises(EpisodesMissing, match="os.remove of orders.db. Mend that"):
        check_played(found)


def test_there_is_no_verdict_while_an_episode_is_missing() -> None:
    def episodes(*errors: str | None) -> list[Trajectory]:
        return [Trajectory(task=TASKS[0], run="proof", rollout_index=n, error=error) for n, error in enumerate(errors)]

    assert len(check_played(episodes(None, None))) == 2
    with pytest.raises(RunStopped) as caught:
        check_played(episodes(None, "ConnectionError: a", "ConnectionError: a", "KeyError: b", "PredictionFailed: c"))
    assert isinstance(caught.value, EpisodesMissing)
    assert str(caught.value) == (
        "3 of 5 episodes (run 'proof') could not be played, and there is no verdict without them; the first causes: "
        "ConnectionError: a; KeyError: b. Mend that; then the same command plays only these 3 again"
    )
    with pytest.raises(EpisodesMissing, match=r"^1 of 1 episodes could not .* then the same command plays all again$"):
        check_played([Trajectory(task=TASKS[0], error="KeyError: b")])
    with pytest.raises(EpisodesMissing, match=r"Take tasks about what the traces looked up, .*\(real=True\)"):
        check_played(episodes("Unanswered: get_order of 7", "Unanswered: get_order of 8"))
    with pytest.raises(EpisodesMissing, match=r"2 of 2 .* then evaluate\(run='x'\) plays"):
        check_played(episodes("PredictionFailed: c", "PredictionFailed: c"), again="evaluate(run='x')")


def test_a_buffer_needs_a_runs_name(policy: Any, buffer: ReplayBuffer) -> None:
    with pytest.raises(ConfigurationError, match="run='' with a replay_buffer.*give run="):
        play(policy, run="", replay_buffer=buffer)
    assert policy.asked == []


@pytest.mark.parametrize("name", ["policy_version", "experience_version", "source"])
def test_another_policys_episodes_are_never_given(policy: Any, buffer: ReplayBuffer, name: str) -> None:
    versions = {"policy_version": "base", "experience_version": "e0", "source": "synthetic"}
    other = {**versions, name: "real"}
    play(policy, TASKS[:2], replay_buffer=buffer, **versions)
    asked = len(policy.asked)
    message = f"run 'r' holds episodes of iteration 0 with {name}='{versions[name]}', and {name}='real' is given.*another run"
    with pytest.raises(ConfigurationError, match=message):
        play(policy, replay_buffer=buffer, **other)
    assert len(policy.asked) == asked
    play(policy, TASKS[2:], replay_buffer=buffer, **other)  # none of these is stored
    play(policy, replay_buffer=buffer, **{**other, "run": "s"})
    assert play(policy, TASKS[:2], replay_buffer=buffer, **versions)[0].experience_version == "e0"


def test_what_failed_may_be_played_again_with_another_model(policy: Any, buffer: ReplayBuffer) -> None:
    broken = Counting(("t0", ConnectionError("401")))
    play(policy, TASKS[:1], create_environment=lambda: broken, replay_buffer=buffer, experience_version="away")
    (found,) = play(policy, TASKS[:1], replay_buffer=buffer, experience_version="back")
    assert (found.experience_version, found.error) == ("back", None)
    assert [each.experience_version for each in buffer.trajectories(run="r")] == ["back"]


def test_a_task_given_twice_is_played_once(policy: Any) -> None:
    first, second = play(policy, [TASKS[0], TASKS[0]])
    assert first is second and len(policy.asked) == 3


def test_real_steps_are_those_that_reached_the_environment() -> None:
    deciders = {"go": "rules", "push": "", "open": ""}
    steps = [Step(observation="", action=action, next_observation="", decided_by=by) for action, by in deciders.items()]
    episode = Trajectory(task=TASKS[0], steps=steps)
    assert real_steps([episode, episode]) == 4


def test_a_world_that_cannot_be_built_is_a_trajectory_without_steps(policy: Any) -> None:
    class Ruin(Counting):
        def reset(self, task: Task) -> str:
            raise EnvironmentFailed("no such world")

    (found,) = play(policy, TASKS[:1], create_environment=lambda: Ruin())
    assert (found.error, list(found.steps), list(found.segments)) == ("EnvironmentFailed: no such world", [], [])


def test_a_broken_policy_is_recorded_too(scripted: Any) -> None:
    def reply(_: Any) -> str:
        raise TimeoutError("the server is busy")

    (found,) = play(scripted(reply=reply), TASKS[:1])
    assert found.error is not None and found.error.startswith(f"TimeoutError: the server is busy at {__file__}:")


def test_what_stops_the_run_is_no_episodes_error(scripted: Any, policy: Any, buffer: ReplayBuffer) -> None:
    def reply(_: Any) -> str:
        raise ProcessLost("killed")

    with pytest.raises(ProcessLost):
        play(scripted(reply=reply), replay_buffer=buffer)
    assert not buffer.count("trajectories") and all(each.error is None for each in play(policy, replay_buffer=buffer))


def test_an_agent_that_never_stops_is_cut_off_at_the_recursion_limit(policy: Any) -> None:
    class Endless(Counting):
        def step(self, action: str) -> StepResult:
            return StepResult("again", 0.0, False, False, {})

    (found,) = play(policy, TASKS[:1], create_environment=lambda: Endless(), max_steps=1000, recursion_limit=12)
    assert found.error is not None and found.error.startswith("GraphRecursionError: ") and "12" in found.error
    assert len(found.steps) == 5 and not found.success


@pytest.mark.parametrize("concurrency", [1, 4, 100])
def test_at_most_concurrency_environments_are_open_and_all_are_closed(policy: Any, concurrency: int) -> None:
    open_, most, times = 0, 0, 0

    class Counted(Counting):
        def __init__(self) -> None:
            super().__init__(("t1", RuntimeError("broken")))
            nonlocal open_, most, times
            open_, times = open_ + 1, times + 1
            most = max(most, open_)

        def close(self) -> None:
            nonlocal open_
            open_ -= 1

    play(policy, create_environment=Counted, num_generations=4, concurrency=concurrency)
    assert (open_, times) == (0, 12)
    assert most == min(concurrency, 12)


def test_an_episode_has_nothing_of_its_callers_context(scripted: Any) -> None:
    around = ContextVar("around", default="nothing")
    around.set("a graph that is running")
    (found,) = play(scripted(reply=lambda _: around.get()), TASKS[:1])
    assert actions(found) == ["nothing"] * 3


def test_the_callers_own_recorder_learns_nothing(policy: Any) -> None:
    with TokenRecorder(seed=1) as outer:
        (found,) = play(policy, TASKS[:1])
    assert outer.calls == [] and outer.next_seed() == TokenRecorder(seed=1).next_seed()
    assert sum(segment.trainable for segment in found.segments) == 3


@pytest.mark.parametrize("fails_at", [1, 5])
def test_what_was_stored_before_a_failing_disk_is_not_played_again(
    policy: Any, buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    add, calls = buffer.add, 0

    def failing(trajectory: Trajectory) -> bool:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError("disk full")
        return add(trajectory)

    monkeypatch.setattr(buffer, "add", failing)
    with pytest.raises(OSError, match="disk full"):
        play(policy, num_generations=3, concurrency=1, replay_buffer=buffer)
    assert buffer.count("trajectories") == fails_at - 1
    told: list[Trajectory] = []
    record: Callable[[Trajectory], None] = told.append
    assert len(play(policy, num_generations=3, replay_buffer=buffer, on_episode=record)) == 9
    assert len(told) == 9 - (fails_at - 1) and buffer.count("trajectories") == 9


@pytest.mark.parametrize("option", ["num_generations", "concurrency", "attempts"])
async def test_counts_are_at_least_one(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}=0: at least 1"):
        await rollout(object(), [], None, source="real", **{option: 0})  # type: ignore[arg-type]
