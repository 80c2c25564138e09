"""An unmodified agent in a walled worker: its policy and its world are here, all else is there."""

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage, message_to_dict
from test_wall import _server
from worlds import TASK, Answers, names_of, played
from zoo.policy import ScriptedPolicy

from dreamgym_lg.errors import AccessBlocked, ConfigurationError, EnvironmentFailed, PredictionFailed, ServersUnavailable
from dreamgym_lg.hosted import Hosted, hosted_for
from dreamgym_lg.redaction import hidden_files
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import Allow, SimulatedAgent
from dreamgym_lg.simulate.remote_episode import Parent, ParentFailed, RemoteEpisode
from dreamgym_lg.simulate.remote_messages import read_message
from dreamgym_lg.simulate.wall import agent as walled_agent
from dreamgym_lg.simulate.wall import resources, worker
from dreamgym_lg.simulate.wall.agent import WalledAgent, Workers
from dreamgym_lg.simulate.wall.wall import missing_for_wall
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder
from dreamgym_lg.types import StepResult, Task

AGENT = Path(__file__).with_name("walled_agent.py")

pytestmark = pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")


class Recorded(ScriptedPolicy):
    """Reports a token for each call, as a policy that can be trained does."""

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        recorder = TokenRecorder.current()
        assert recorder is not None, "asked outside of the episode"
        recorder.record(TokenCall(None, [len(recorder.calls)] * 3, [7], [-0.5], 1.0))
        return super()._generate(messages, stop, run_manager, **kwargs)


@contextlib.asynccontextmanager
async def walled(name: str, outside: Path, policy: Any = None, **options: Any) -> AsyncIterator[WalledAgent]:
    os.environ["WALLED_OUTSIDE"] = str(outside)
    workers = Workers(f"{AGENT}:{name}", **{"count": 1, **options})
    try:
        yield WalledAgent(workers, policy or Recorded())
    finally:
        workers.close()
        assert list(outside.iterdir()) == [], "the real world was touched"


async def test_an_agent_with_tools_is_played_as_in_process(tmp_path: Path) -> None:
    policy, worlds = Recorded(sequence=("search", "book")), list[Answers]()

    def create() -> Answers:
        worlds.append(Answers())
        return worlds[-1]

    async with walled("agent", tmp_path, policy) as agent:
        first, second = await rollout(agent, [TASK], create, source="synthetic", num_generations=2, concurrency=1)
    for episode, world in zip((first, second), worlds, strict=True):
        assert episode.error is None and episode.success
        assert names_of(episode.steps[:-1]) == ["search", "book"] and sorted(world.shown) == ["book", "search"]
        assert [step.next_observation for step in episode.steps[:2]] == ["dreamed 1 of search", "dreamed 2 of book"]
        assert episode.steps[0].reasoning == "because" and episode.steps[-1].reward == 1
        assert sum(segment.trainable for segment in episode.segments) == 3, "every call of the policy is recorded here"
    assert policy.calls == 6
    assert [tool["function"]["name"] for tool in policy.asked[0][1]["tools"]] == ["search", "book"]
    (first_read, _), _, (last_read, _) = policy.asked[:3]
    assert [message.type for message in last_read] == ["human", "ai", "tool", "ai", "tool"]
    assert last_read[0] is first_read[0], "a message is told once"
    assert last_read[4].text == "dreamed 2 of book" and policy.asked[3][0][0] is not first_read[0]


@pytest.mark.slow
async def test_the_world_is_told_its_system_prompt(tmp_path: Path) -> None:
    world = Answers()
    async with walled("prompted", tmp_path, Recorded(sequence=("search",))) as agent:
        (episode,) = await rollout(agent, [TASK], lambda: world, source="synthetic")
    assert episode.error is None and world.prompts == ["You book rooms."]


class Long(Answers):
    """More than a pipe holds, and no text that UTF-8 can write."""

    def step(self, action: str) -> StepResult:
        return super().step(action)._replace(observation="x" * 2**20 + "\ud83d")


class Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.heard = list[str]()

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.heard.append(messages[0][-1].text)


@pytest.mark.slow
async def test_long_answers_cross_the_wall_and_the_policys_own_callbacks_are_called(tmp_path: Path) -> None:
    listener = Listener()
    async with walled("agent", tmp_path, Recorded(sequence=("search",), callbacks=[listener])) as agent:
        (episode,) = await rollout(agent, [TASK], Long, source="synthetic")
    assert episode.error is None and episode.steps[0].next_observation == "x" * 2**20 + "?", "half an emoji"
    assert listener.heard == [TASK.instruction, episode.steps[0].next_observation]


@pytest.mark.slow
async def test_an_agent_that_streams_its_models_events_has_them_behind_the_wall_too(tmp_path: Path) -> None:
    """As many events as where it is played in this process."""
    with_both = []
    for name in ("streams", "streams_synchronously"):
        here = SimulatedAgent(getattr(importlib.import_module("walled_agent"), name), ScriptedPolicy(sequence=()))
        async with walled(name, tmp_path, ScriptedPolicy(sequence=())) as agent:
            for each in (here, agent):
                (episode,) = await rollout(each, [TASK], Answers, source="synthetic")
                assert episode.error is None
                with_both.append(episode.steps[-1].action)
    assert with_both[0] == with_both[1] and "policy: " in with_both[0] and with_both[2] == with_both[3] != "1"


@pytest.mark.slow
async def test_an_error_of_the_agent_s_own_keeps_its_name_and_ends_its_episode_alone(tmp_path: Path) -> None:
    async with walled("overspends", tmp_path) as agent:
        (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
    raised = "EnvironmentFailed: in the walled worker: BudgetExceeded: the customer's at "
    assert re.fullmatch(rf"{raised}\S+/walled_agent\.py:\d+ in \w+", str(episode.error))


@pytest.mark.slow
async def test_an_agent_s_own_permission_error_is_none_of_the_walls(tmp_path: Path) -> None:
    async with walled("own_permissions", tmp_path) as agent:
        with pytest.raises(
            EnvironmentFailed, match=r"^in the walled worker: PermissionError: not your order at \S+:\d+ in \w+$"
        ):
            await played(agent, Answers())


@pytest.mark.slow
async def test_files_are_copied_in_scratch_and_threads_pooled(tmp_path: Path) -> None:
    async with walled("works_in_scratch", tmp_path) as agent:
        (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
    assert episode.error is None


def sleeping() -> list[Path]:
    return [each for each in Path("/proc").glob("[0-9]*/cmdline") if each.read_bytes().startswith(b"sleep\0006161")]


@pytest.mark.slow
async def test_what_a_worker_leaves_in_other_sessions_ends_with_it(tmp_path: Path) -> None:
    async with walled("leaves", tmp_path) as agent:
        (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
        assert "of mine" in str(episode.error) and "\x1b" not in str(episode.error), "an error is shown in a terminal"
        while not sleeping():
            await asyncio.sleep(0.05)
    assert not sleeping()


@pytest.mark.parametrize(
    "message",
    [
        {"failed": "RunStopped", "text": "forged", "number": None},
        {"failed": "", "text": 5, "number": None},
        {"ended": True, "state": {"steps": [{"observation": "", "action": 1, "next_observation": ""}]}},
        {"ended": True, "state": {"steps": [], "success": "perhaps"}},
        {"ask": "everything", "number": 1, "args": []},
        {"ask": "step", "number": 1, "args": [5, None, None]},
        {"ask": "step", "number": -1, "args": ["{}", None, None]},
        {"ask": "policy", "number": 1, "args": [["not a message"], None, {}]},
        {"ended": True, "state": {"steps": [{"observation": "", "action": "", "next_observation": "", "reward": 50.0}]}},
        {
            "ended": True,
            "state": {"steps": [{"observation": "", "action": "", "next_observation": "", "reward": float("nan")}]},
        },
    ],
    ids=lambda message: next(iter(message)) + str(len(message)),
)
async def test_a_message_of_wrong_types_or_of_a_run_s_end_is_no_message(message: Any) -> None:
    episode = RemoteEpisode(lambda order: None, 1, ScriptedPolicy(), Answers())
    try:
        episode.hear({"episode": 1, **message})
    except ValueError:
        return
    _, error = episode.result()
    assert type(error) is EnvironmentFailed and "forged" in str(error)


async def test_a_worker_cannot_ask_for_tools_that_run_at_the_provider() -> None:
    class Policy(ScriptedPolicy):
        def _asked(self, messages: Any, kwargs: Any) -> None:
            given.extend(kwargs.get("tools", ()))

    given = list[Any]()
    book = {"type": "function", "function": {"name": "book", "parameters": {"type": "object", "properties": {}}}}
    mcp = {"type": "mcp", "server_label": "x", "server_url": "https://attacker.example/mcp", "title": "like a schema"}
    episode = RemoteEpisode(lambda order: None, 1, Policy(), Answers())
    message = json.dumps({"message": message_to_dict(HumanMessage("Hello"))})
    episode.hear({"episode": 1, "ask": "policy", "number": 1, "args": [[[0, message]], None, {"tools": [book, mcp]}]})
    while episode.unanswered:
        await asyncio.sleep(0)
    assert given == [book]


async def test_a_policy_gets_tools_in_its_own_form_behind_the_wall_too() -> None:
    class Policy(ScriptedPolicy):
        def bind_tools(self, tools: Any, *, tool_choice: Any = None, **_: Any) -> Any:
            return self.bind(tools=[{"name": each["function"]["name"]} for each in tools], tool_choice={"type": tool_choice})

        def _asked(self, messages: Any, kwargs: Any) -> None:
            given.update(kwargs)

    given = dict[str, Any]()
    book = {"type": "function", "function": {"name": "book", "parameters": {"type": "object", "properties": {}}}}
    episode = RemoteEpisode(lambda order: None, 1, Policy(), Answers())
    message = json.dumps({"message": message_to_dict(HumanMessage("Hello"))})
    options = {"tools": [book], "tool_choice": "required"}
    episode.hear({"episode": 1, "ask": "policy", "number": 1, "args": [[[0, message]], None, options]})
    while episode.unanswered:
        await asyncio.sleep(0)
    assert (given["tools"], given["tool_choice"]) == ([{"name": "book"}], {"type": "any"})


async def test_an_outage_that_the_agent_caught_ends_its_episode() -> None:
    class Away(ScriptedPolicy):
        def _asked(self, messages: Any, kwargs: Any) -> None:
            raise ServersUnavailable("nobody answers")

    episode = RemoteEpisode(lambda order: None, 1, Away(), Answers())
    message = json.dumps({"message": message_to_dict(HumanMessage("Hello"))})
    episode.hear({"episode": 1, "ask": "policy", "number": 1, "args": [[[0, message]], None, {}]})
    while episode.unanswered:
        await asyncio.sleep(0)
    episode.hear({"episode": 1, "ended": True, "state": {"steps": [], "success": False}})
    assert isinstance(episode.result()[1], ServersUnavailable)


async def test_an_outcome_that_the_world_has_not_given_is_a_failed_episode() -> None:
    answer = {"observation": "", "action": '{"answer": "Done."}', "next_observation": "", "reward": 1.0, "terminated": True}
    episode = RemoteEpisode(lambda order: None, 1, ScriptedPolicy(), Answers())
    episode.hear({"episode": 1, "ended": True, "state": {"steps": [answer], "success": True}})
    state, error = episode.result()
    assert state is not None and state["success"] and error is None
    told = "claims (reward, success) (1.0, True), and its world gave (0.0, False)"
    assert told in str(episode.contradiction(state, verified=False))
    assert episode.contradiction(state, verified=True) is None, "`verify_dream` judges there"


async def test_a_call_that_the_world_was_never_asked_contradicts_even_a_verified_outcome() -> None:
    step = {"observation": "", "next_observation": "booked", "decided_by": "recorded"}
    call = '{"name": "book", "arguments": {"room": "1"}}'
    episode = RemoteEpisode(lambda order: None, 1, ScriptedPolicy(), Answers())
    episode.hear({"episode": 1, "ask": "step", "number": 1, "args": [call, None, None]})
    await asyncio.sleep(0)
    for calls, contradicted in (([call], False), ([call, call], True)):
        message = read_message({"episode": 1, "ended": True, "state": {"steps": [{**step, "action": each} for each in calls]}})
        error = episode.contradiction(message["state"], verified=True)
        assert (error is not None) == contradicted and (error is None or "had no such one" in str(error))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kill_family", "remove_scratch"])
async def test_whatever_cannot_be_cleared_away_no_episode_waits_for_ever(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(f"dreamgym_lg.simulate.wall.worker.{part}", fails)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    async with walled("dies", tmp_path) as agent:
        with pytest.raises(EnvironmentFailed, match="status 3"):
            await asyncio.wait_for(played(agent, Answers()), 60)


@pytest.mark.slow
async def test_dreams_in_workers_do_not_mix(tmp_path: Path) -> None:
    """64 at once, of two policies, in two processes, each in a world of its own."""
    numbers = itertools.count()
    policies = [Recorded(label=f"policy{n}", sequence=("search", "book")) for n in range(2)]
    async with walled("agent", tmp_path, policies[0], count=2) as agent:
        agents = [agent, WalledAgent(agent._workers, policies[1])]
        playing = [
            rollout(each, [TASK], lambda: Answers(label=f"world{next(numbers)}"), source="synthetic", num_generations=32)
            for each in agents
        ]
        played = await asyncio.gather(*playing)
        assert len(agent._workers._workers) == 2
    worlds = set[str]()
    for policy, episodes in zip(policies, played, strict=True):
        for each in episodes:
            assert each.error is None and policy.label in each.steps[-1].action
            (world,) = {step.next_observation.partition(" ")[0] for step in each.steps[:2]}
            worlds.add(world)
    assert worlds == {f"world{number}" for number in range(64)}


@pytest.mark.slow
async def test_an_allowed_host_is_reached_through_the_wall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received = list[bytes]()
    with _server(received) as server:
        port = server.server_address[1]
        monkeypatch.setenv("WALLED_PORT", str(port))
        for allow in (None, Allow(hosts=[f"127.0.0.1:{port}"])):
            async with walled("posts", tmp_path, allow=allow) as agent:
                (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
            assert (episode.error is None, received) == ((True, [b"connected"]) if allow else (False, []))


class Broken(Answers):
    async def astep(self, action: str) -> StepResult:
        raise PredictionFailed("no JSON")


class Unbuilt(Answers):
    async def areset(self, task: Task) -> str:
        raise PredictionFailed("no world")


class Blind(Answers):
    def show_tools(self, tools: Any) -> None:
        raise PredictionFailed("no tools")


@pytest.mark.slow
async def test_what_ends_an_episode_is_told_and_the_next_one_is_played(tmp_path: Path) -> None:
    async with walled("agent", tmp_path) as agent:
        with TokenRecorder():
            for world, cause in ((Broken(), "no JSON"), (Unbuilt(), "no world"), (Blind(), "no tools")):
                with pytest.raises(PredictionFailed, match=f"^{cause}$"):
                    await played(agent, world)
            assert (await played(agent, Answers()))["success"]


@pytest.mark.slow
async def test_native_code_and_python_are_stopped(tmp_path: Path) -> None:
    async with walled("writes", tmp_path) as agent:
        with pytest.raises(AccessBlocked, match="wall stopped RuntimeError: creat: Permission denied; allow it with allow="):
            await played(agent, Answers())
    async with walled("guarded", tmp_path) as agent:
        with pytest.raises(AccessBlocked, match=r"open of .*written at .*walled_agent.py:"):
            await played(agent, Answers())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fails"), [("swallows_pythons", True), ("swallows_natives", False)])
async def test_what_is_stopped_and_swallowed_has_no_effect_and_fails_where_python_was_asked(
    kind: str, fails: bool, tmp_path: Path
) -> None:
    """The page says which of both succeeds all the same."""
    async with walled(kind, tmp_path) as agent:
        (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
    assert not list(tmp_path.iterdir()) and str(episode.error).startswith("AccessBlocked: ") == fails
    page = Path(__file__).parents[2].joinpath("docs/concepts/wall.md").read_text()
    assert "ignores the kernel's refusal, nobody sees it" in page and "can falsify what `verify_dream=` is shown" in page


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rounds"), [("writes", 1), pytest.param("dies", 3, marks=pytest.mark.slow)])
async def test_what_was_stopped_is_not_played_again_and_a_worker_that_died_is(kind: str, rounds: int, tmp_path: Path) -> None:
    told = list[str]()
    options: Any = {"source": "synthetic", "attempts": 3, "on_episode": lambda each: told.append(each.error)}
    async with walled(kind, tmp_path) as agent:
        (episode,) = await rollout(agent, [TASK], Answers, **options)
    assert len(told) == rounds and set(told) == {episode.error}
    assert str(episode.error).startswith("AccessBlocked: " if rounds == 1 else "EnvironmentFailed: ")


@pytest.mark.slow
async def test_the_scratch_folder_is_the_agents(tmp_path: Path) -> None:
    async with walled("writes_temporary", tmp_path) as agent:
        assert (await played(agent, Answers()))["success"]


@pytest.mark.slow
async def test_the_replay_buffer_is_read_by_no_agent_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies beside the agent's modules. One that is opened later is hidden too, by a new worker."""
    (outside := tmp_path / "outside").mkdir()
    shutil.copy(AGENT, tmp_path)
    shutil.copytree(AGENT.with_name("zoo"), tmp_path / "zoo")
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        buffer.add_tasks([replace(TASK, id="held-out", split="test")])
        (tmp_path / "replay-answers.db").write_text("what a hosted judge said")
        before = {each: each.read_bytes() for each in tmp_path.glob("replay.db*")}
        assert len(before) == 3, "a database, its log and the log's index"
        monkeypatch.setitem(globals(), "AGENT", tmp_path / "walled_agent.py")
        monkeypatch.setenv("WALLED_BUFFER", str(buffer.path))
        async with walled("reads_what_is_hidden", outside) as agent:
            (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
            assert str(episode.error).startswith("EnvironmentFailed: in the walled worker: RuntimeError: refused 18 of 18")
            (first,) = agent._workers._workers
            with ReplayBuffer(tmp_path / "later.db") as later:
                monkeypatch.setenv("WALLED_BUFFER", str(later.path))
                (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
                assert "refused 18 of 18" in str(episode.error) and first.failure
        assert {each: each.read_bytes() for each in tmp_path.glob("replay.db*")} == before
        async with walled("agent", outside) as agent:
            (episode,) = await rollout(agent, [TASK], Answers, source="synthetic", run="r", replay_buffer=buffer)
        assert episode.success and buffer.tasks(split="test")
        with pytest.raises(ConfigurationError, match="holds .*replay.*, which no agent may read: allow a folder beside it"):
            async with walled("agent", outside, allow=Allow(paths=[tmp_path])) as agent:
                await played(agent, Answers())


def test_a_closed_buffers_file_may_be_read_and_answers_elsewhere_never(tmp_path: Path) -> None:
    own = {tmp_path / name for name in ("replay.db", "replay-answers.db", "hosted.db")}
    agents, hosted = Hosted(tmp_path / "agents.db"), Hosted(tmp_path / "hosted.db")
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        assert hosted_for(None, hosted, buffer) is hosted, "a model of the dream"
        assert own <= hidden_files()
    assert (own | {tmp_path / "agents.db"}) & hidden_files() == {tmp_path / "hosted.db"} and agents.path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("forks", "more than 20 processes"),
        ("forks_in_sessions", "more than 20 processes"),
        ("writes_many", "more than 100 files in its scratch folder"),
        ("writes_much", "more than half of the free disk"),
    ],
)
async def test_a_worker_that_takes_too_much_is_ended_and_the_next_one_plays(
    kind: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "MAX_PROCESSES", 20)
    monkeypatch.setattr(resources, "MAX_FILES", 100)
    monkeypatch.setattr(resources, "WATCHED_EVERY", 0.05)
    if kind == "writes_much":
        monkeypatch.setattr(resources.os, "statvfs", lambda _: SimpleNamespace(f_frsize=1, f_bavail=2**21))
    for folder in ("tmp", "outside"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    async with walled("takes_by_turns", tmp_path / "outside") as agent:
        with pytest.raises(EnvironmentFailed, match=f"status -9: it.* had {cause}"):
            await played(agent, Answers(), replace(TASK, instruction=kind))
        deadline = time.monotonic() + 10
        while sleeping() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert not sleeping() and not list((tmp_path / "tmp").iterdir())
        assert (await played(agent, Answers()))["success"]


QUEUE_FED = ["queue_worker_born_before", "queue_worker_born_lazily", "task_born_lazily"]


async def by_policy(agent: WalledAgent, number: int) -> str | None:
    """The error of an episode with a policy and a world of its own."""
    policy, world = ScriptedPolicy(label=f"policy{number}", sequence=("book",)), Answers(label=f"world{number}")
    (episode,) = await rollout(WalledAgent(agent._workers, policy), [TASK], lambda: world, source="synthetic")
    if episode.error is None:
        assert episode.success and policy.calls == 2 and f"policy{number}" in episode.steps[-1].action
        assert [step.next_observation for step in episode.steps[:-1]] == [f"world{number} 1 of book"]
    return episode.error


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUEUE_FED)
async def test_a_worker_that_a_queue_feeds_serves_the_only_episode_in_flight(kind: str, tmp_path: Path) -> None:
    async with walled(kind, tmp_path) as agent:
        for number in range(3):
            assert await by_policy(agent, number) is None


@pytest.mark.slow
async def test_of_several_episodes_in_flight_none_is_served_and_one_in_each_worker_is(tmp_path: Path) -> None:
    async with walled("task_born_lazily", tmp_path, count=2) as agent:
        assert await asyncio.gather(*(by_policy(agent, number) for number in range(2))) == [None] * 2
        errors = await asyncio.gather(*(by_policy(agent, number) for number in range(12)))
        refused = [error for error in errors if error is not None]
        assert refused and all("gives work to a queue of another run" in error for error in refused)
        assert all("(Settings(concurrency=), at most" in error for error in refused)
        assert await by_policy(agent, 20) is None


@pytest.mark.slow
async def test_a_worker_that_dies_is_a_failed_episode_with_its_last_words(tmp_path: Path) -> None:
    async with walled("dies", tmp_path) as agent:
        for _ in range(2):  # the second by a new worker
            (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
            assert episode.error and "status 3" in episode.error and "last words" in episode.error


@pytest.mark.slow
async def test_a_worker_that_is_killed_or_cancelled_is_replaced(tmp_path: Path) -> None:
    asked = asyncio.Event()

    class Slow(Answers):
        async def astep(self, action: str) -> StepResult:
            asked.set()
            await asyncio.sleep(60)
            raise AssertionError

    async with walled("agent", tmp_path) as agent:
        with TokenRecorder():
            playing = asyncio.create_task(played(agent, Slow()))
            await asked.wait()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            assert (await played(agent, Answers()))["success"]


@pytest.mark.slow
async def test_a_worker_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walled_agent, "RENEWED_AFTER", 2)
    started = list[bytes]()
    start = walled_agent.Worker
    monkeypatch.setattr(walled_agent, "Worker", lambda *given: started.append(b"") or start(*given))
    async with walled("writes_temporary", tmp_path) as agent:
        for count in (1, 1, 2):
            await played(agent, Answers())
            assert len(started) == count


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["babbles", "babbles_json"])
async def test_what_is_no_message_ends_the_worker(kind: str, tmp_path: Path) -> None:
    async with walled(kind, tmp_path) as agent:
        with pytest.raises(EnvironmentFailed, match="status -9"):
            await played(agent, Answers())


def test_a_thread_that_outlives_its_episode_gets_no_answers() -> None:
    lines = list[bytes]()
    parent = Parent(lines.append, 7)
    waiting = parent.ask("step", "look")
    assert json.loads(lines[0]) == {"ask": "step", "episode": 7, "number": 1, "args": ["look"]}
    parent.end()
    with pytest.raises(ParentFailed, match="has ended"):
        waiting.result(timeout=1)
    with pytest.raises(RuntimeError, match="episode of this thread has ended"):
        parent.ask("step", "look")
    parent.answer(1, "late", None)  # it was under way: the worker lives on


async def test_a_worker_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (nowhere := tmp_path / "nowhere").mkdir()
    agent = WalledAgent(Workers("a.py:b", allow=Allow(paths=[nowhere])), ScriptedPolicy())
    nowhere.rmdir()
    with pytest.raises(ConfigurationError, match="nowhere' does not exist.*create it"):
        await played(agent, Answers())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
async def test_what_cannot_be_loaded_or_sent_is_said(tmp_path: Path) -> None:
    async with walled("missing", tmp_path) as agent:
        with pytest.raises(ConfigurationError, match="unknown name in .*missing"):
            await played(agent, Answers())
    async with walled("logs", tmp_path) as agent:
        refused = (
            "logs could not be loaded: PermissionError: .*; behind the wall nothing .*allow= of DreamGym.*--isolation guard "
        )
        with pytest.raises(ConfigurationError, match=refused):
            await played(agent, Answers())
    with pytest.raises(ConfigurationError, match="verify=.*cannot be sent.*isolation='guard'"):
        Workers("a.py:b", verify=lambda task, state: True)


@pytest.mark.slow
async def test_a_worker_that_hangs_is_ended_and_one_that_waits_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Answers):
        async def astep(self, action: str) -> StepResult:
            await asyncio.sleep(1.2)
            return self.step(action)

    async with walled("agent", tmp_path, ScriptedPolicy(sequence=())) as agent:
        assert (await played(agent, Answers()))["success"]
        monkeypatch.setattr(worker, "SILENCE", 1.0)
        assert (await played(agent, Slow()))["success"]
        (process,) = agent._workers._workers
        os.kill(process.pid, signal.SIGSTOP)  # it reads nothing either
        with pytest.raises(EnvironmentFailed, match="status -9: it hung: no sign for 1 s"):
            await played(agent, Answers(), replace(TASK, metadata={"long": "x" * 2**20}))


@pytest.mark.slow
async def test_a_line_has_a_longest_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LONGEST_LINE", 150)
    async with walled("agent", tmp_path) as agent:
        with pytest.raises(EnvironmentFailed, match="no message .*longer than 150 bytes"):
            await played(agent, Answers())


@pytest.mark.slow
async def test_no_episode_is_lost_or_doubled_by_killed_workers(tmp_path: Path) -> None:
    """At 6 random moments, of an episode's or of a worker's beginning too."""
    rng, killed, outside = random.Random(13), list[int](), tmp_path / "outside"
    outside.mkdir()
    moments = iter(sorted(rng.sample(range(90), 6)))  # 30 episodes have three moments each if none is killed
    due, seen = next(moments), itertools.count()

    async with walled("agent", outside, Recorded(sequence=("search", "book")), count=2) as agent:

        def happens() -> None:
            nonlocal due
            alive = [each.pid for each in agent._workers._workers if not each.failure and each.pid not in killed]
            if next(seen) >= due and alive:  # both may just have been killed
                due = next(moments, 1 << 30)
                killed.append(rng.choice(alive))
                os.kill(killed[-1], signal.SIGKILL)

        class Killing(Answers):
            def show_tools(self, tools: Any) -> None:
                super().show_tools(tools)
                happens()

            async def astep(self, action: str) -> StepResult:
                happens()
                return self.step(action)

        tasks = [replace(TASK, id=f"t{number}") for number in range(10)]
        with ReplayBuffer(tmp_path / "replay.db") as buffer:
            given: Any = {"source": "synthetic", "run": "kills", "replay_buffer": buffer}
            episodes = await rollout(agent, tasks, Killing, num_generations=3, concurrency=6, attempts=30, **given)
            stored = list(buffer.trajectories(run="kills", segments=True))
    assert len(killed) == len(set(killed)) == 6
    assert sorted((each.task.id, each.rollout_index) for each in stored) == sorted(
        itertools.product((t.id for t in tasks), range(3))
    )
    for each in (*episodes, *stored):
        assert each.error is None and each.success and names_of(each.steps[:-1]) == ["search", "book"]
        assert [step.next_observation for step in each.steps[:2]] == ["dreamed 1 of search", "dreamed 2 of book"]
        assert sum(segment.trainable for segment in each.segments) == 3, "a call of the policy is there twice, or not at all"


def test_scratch_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is deeper than Python can recurse."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    killed, alive = (tmp_path / f"dreamgym-scratch-{number}-x" for number in (ended.pid, os.getpid()))
    alive.mkdir()
    killed.mkdir()
    number = os.open(killed, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("deeper", dir_fd=number)
        before, number = number, os.open("deeper", os.O_RDONLY, dir_fd=number)
        os.close(before)
    os.close(number)
    (tmp_path / "dreamgym-scratch-link").symlink_to(tmp_path)
    resources.remove_stale_scratch()
    assert not killed.exists() and alive.exists()


def test_a_scratch_folder_of_another_container_s_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process's number is none here; its lock tells that it runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    monkeypatch.setattr(os, "getpid", lambda: ended.pid)
    folder = resources.create_scratch()
    resources.remove_stale_scratch()
    assert os.path.exists(folder)
    os.close(resources._locks.pop(folder))
    resources.remove_stale_scratch()
    assert not os.path.exists(folder)


def test_what_ended_an_episode_is_told_also_where_two_errors_are_each_others_context() -> None:
    one, other = ValueError("one"), KeyError("other")
    one.__context__, other.__context__ = other, one
    assert worker._failure(one) == {"failed": "", "text": "ValueError: one", "number": None}
    other.__context__ = ParentFailed(7, "the world's")
    assert worker._failure(one)["number"] == 7


def test_what_cannot_be_allowed_is_said_before_the_first_episode(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist, and the kernel allows only what does"):
        Workers("my_app.py:graph", allow=Allow(paths=[tmp_path / "missing"]))
    with pytest.raises(ConfigurationError, match="'web' is no port"):
        Workers("my_app.py:graph", allow=Allow(hosts=["localhost:web"]))
