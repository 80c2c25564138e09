"""An unmodified agent in a walled worker: its policy and its world are here, all else is there."""

import asyncio
import contextlib
import io
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from worlds import TASK, Answers, names_of, played
from zoo.policy import ScriptedPolicy

from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed, PredictionFailed
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import Allow
from dreamgym_lg.simulate.wall import agent as walled_agent
from dreamgym_lg.simulate.wall import child
from dreamgym_lg.simulate.wall.agent import WalledAgent, Workers
from dreamgym_lg.simulate.wall.wall import capabilities
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder
from dreamgym_lg.types import StepResult

AGENT = Path(__file__).with_name("walled_agent.py")

pytestmark = pytest.mark.skipif(bool(capabilities().missing), reason=f"no wall here: {capabilities().missing}")


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


class Broken(Answers):
    async def astep(self, action: str) -> StepResult:
        raise PredictionFailed("no JSON")


async def test_what_ends_an_episode_is_told_and_the_next_one_is_played(tmp_path: Path) -> None:
    async with walled("agent", tmp_path) as agent:
        with TokenRecorder():
            with pytest.raises(PredictionFailed, match="^no JSON$"):
                await played(agent, Broken())
            assert (await played(agent, Answers()))["success"]


async def test_native_code_and_python_are_stopped(tmp_path: Path) -> None:
    async with walled("writes", tmp_path) as agent:
        with pytest.raises(EnvironmentFailed, match="AssertionError: the kernel said no"):
            await played(agent, Answers())
    async with walled("guarded", tmp_path) as agent:
        with pytest.raises(EnvironmentFailed, match=r"open of .*written at .*walled_agent.py:"):
            await played(agent, Answers())


async def test_the_scratch_folder_is_the_agents(tmp_path: Path) -> None:
    async with walled("writes_temporary", tmp_path) as agent:
        assert (await played(agent, Answers()))["success"]


async def test_a_worker_that_dies_is_a_failed_episode_with_its_last_words(tmp_path: Path) -> None:
    async with walled("dies", tmp_path) as agent:
        for _ in range(2):  # the second by a new worker
            (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
            assert episode.error and "status 3" in episode.error and "last words" in episode.error


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


async def test_a_worker_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walled_agent, "RENEWED_AFTER", 2)
    started = list[bytes]()
    start = walled_agent.Worker
    monkeypatch.setattr(walled_agent, "Worker", lambda *given: started.append(b"") or start(*given))
    async with walled("writes_temporary", tmp_path) as agent:
        for count in (1, 1, 2):
            await played(agent, Answers())
            assert len(started) == count


@pytest.mark.parametrize("kind", ["babbles", "babbles_json"])
async def test_what_is_no_message_ends_the_worker(kind: str, tmp_path: Path) -> None:
    async with walled(kind, tmp_path) as agent:
        with pytest.raises(EnvironmentFailed, match="status -9"):
            await played(agent, Answers())


def test_a_thread_that_outlives_its_episode_gets_no_answers() -> None:
    pipe = io.BytesIO()
    parent = child.Parent(child.Said(pipe), 7)
    waiting = parent.ask("step", "look")
    assert json.loads(pipe.getvalue()) == {"ask": "step", "episode": 7, "number": 1, "args": ["look"]}
    parent.end()
    with pytest.raises(child.ParentFailed, match="has ended"):
        waiting.result(timeout=1)
    with pytest.raises(RuntimeError, match="episode of this thread has ended"):
        parent.ask("step", "look")
    parent.answer(1, "late", None)  # it was under way: the worker lives on


async def test_a_worker_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agent = WalledAgent(Workers("a.py:b", allow=Allow(paths=[tmp_path / "nowhere"])), ScriptedPolicy())
    with pytest.raises(ConfigurationError, match="nowhere' does not exist.*create it"):
        await played(agent, Answers())
    assert not list(tmp_path.iterdir())


async def test_what_cannot_be_loaded_or_sent_is_said(tmp_path: Path) -> None:
    async with walled("missing", tmp_path) as agent:
        with pytest.raises(ConfigurationError, match="unknown name in .*missing"):
            await played(agent, Answers())
    with pytest.raises(ConfigurationError, match="verify=.*cannot be sent.*isolation='guard'"):
        Workers("a.py:b", verify=lambda task, state: True)
