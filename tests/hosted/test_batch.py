"""OpenAI's Batch API: submitted once, resumed wherever it was killed, within the budget, failures asked again, no key kept."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from batch_server import BatchServer
from chat_server import door
from house import CANARY, houses
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.curriculum.chat_task_generator import ChatTaskGenerator
from dreamgym_lg.errors import BudgetExceeded, ConfigurationError, ModelUnavailable
from dreamgym_lg.experience import batch_requests
from dreamgym_lg.experience.annotate import annotate
from dreamgym_lg.experience.batch_requests import ask_in_batch
from dreamgym_lg.experience.hosted import Hosted, Usage
from dreamgym_lg.experiment import supervised
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

PROMPTS = {key: [HumanMessage(json.dumps({"action": key}))] for key in ("open door", "wave", "sing", "dance")}


@pytest.fixture
def batches() -> Iterator[Callable[..., BatchServer]]:
    running: list[BatchServer] = []

    def start(**options: Any) -> BatchServer:
        running.append(BatchServer(options.pop("reply", door), **options))
        running[-1].start()
        return running[-1]

    yield start
    for server in running:
        server.stop()


def hosted(path: Path | None = None, **options: Any) -> Hosted:
    return Hosted(path, backoff=(0.0, 0.01), **options)


async def ask(model: Any, folder: Path, prompts: Any = PROMPTS, *, own: Hosted | None = None, **limits: Any) -> dict[str, str]:
    own, found = own or hosted(**limits), {}
    async for key, answer in ask_in_batch(model, prompts, folder, hosted=own, poll_seconds=0.001):
        found[key] = json.loads(answer.text)["observation"] if isinstance(answer, AIMessage) else str(answer)
    return found


ALL = {"open door": "It is open.", "wave": "What?", "sing": "What?", "dance": "What?"}


async def test_all_are_asked_in_one_batch_and_never_again(batches: Any, chat_model: Any, tmp_path: Path) -> None:
    server = batches(polls=3)
    own = hosted(prices=(1.0, 5.0))
    assert await ask(chat_model(server), tmp_path / "b", own=own) == ALL
    assert own.usage == Usage(4, 0, 400, 80, pytest.approx((400 + 5 * 80) / 1e6 / 2))
    assert await ask(chat_model(server), tmp_path / "b", own=own) == ALL
    assert len(server.batches) == 1 and len(server.requests) == 4 and own.usage.calls == 4
    more = {**PROMPTS, "wait": [HumanMessage('{"action": "wait"}')]}
    assert len(await ask(chat_model(server), tmp_path / "b", more)) == 5 and len(server.requests) == 5


class Killed(BaseException):
    """As a process is: past every `except Exception`."""


@pytest.mark.parametrize("moment", range(9))
async def test_killed_at_any_moment_it_goes_on_and_submits_nothing_twice(
    batches: Any, chat_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Killed before each file that is written and after each call that is answered, in turn."""
    server, left, write, call = batches(polls=2), [moment], batch_requests._write, batch_requests._Folder._call

    def tick() -> None:
        left[0] -= 1
        if left[0] == -1:
            raise Killed

    def writes(file: Path, text: str) -> None:
        tick()
        write(file, text)

    async def calls(self: Any, wanted: Any) -> Any:
        found = await call(self, wanted)
        tick()
        return found

    monkeypatch.setattr(batch_requests, "_write", writes)
    monkeypatch.setattr(batch_requests._Folder, "_call", calls)
    with pytest.raises(Killed):
        await ask(chat_model(server), tmp_path / "b", path=tmp_path / "hosted.db")
    own = hosted(tmp_path / "hosted.db")
    assert await ask(chat_model(server), tmp_path / "b", own=own) == ALL
    assert len(server.batches) == 1 and own.usage == Usage(4, 0, 400, 80, 0.0)


async def test_a_batch_whose_creation_was_not_confirmed_is_found(batches: Any, chat_model: Any, tmp_path: Path) -> None:
    server = batches()
    server.lost = {"POST /v1/batches": 1, "POST /v1/files": 1, "GET /v1/batches/batch-0": 1}
    assert await ask(chat_model(server), tmp_path / "b") == ALL
    assert len(server.batches) == 1 and server.calls.count("POST /v1/batches") == 1


async def test_what_failed_is_asked_again_and_what_was_refused_is_not(batches: Any, chat_model: Any, tmp_path: Path) -> None:
    server = batches(fault=lambda number: {1: "500", 2: "400", 5: "429"}.get(number, ""))
    found = await ask(chat_model(server), tmp_path / "b")
    assert found["wave"].startswith("no answer in 1 batches: no, not with") and CANARY not in found["wave"]
    assert {**found, "wave": ALL["wave"]} == ALL and len(server.batches) == 3 and len(server.requests) == 6
    hopeless = batches(fault=lambda number: "500")
    found = await ask(chat_model(hopeless), tmp_path / "c")
    assert all(text.startswith("no answer in 3 batches") for text in found.values()) and len(hopeless.batches) == 3


async def test_an_expired_batch_is_said_and_its_rest_asked_again(
    batches: Any, chat_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = batches(fate=lambda number: "expired" if number == 1 else "completed")
    assert await ask(chat_model(server), tmp_path / "b") == ALL
    assert len(server.batches) == 2 and len(server.requests) == 4
    assert "batch batch-0 is expired before all of its 4 requests were answered" in caplog.text


@pytest.mark.parametrize(("fate", "told"), [("failed", "no such model, \\[key\\]"), ("cancelled", "no cause is given")])
async def test_a_refused_batch_is_an_error_and_may_be_submitted_anew(
    batches: Any, chat_model: Any, tmp_path: Path, fate: str, told: str
) -> None:
    server = batches(fate=lambda number: fate if number == 1 else "completed")
    with pytest.raises(ModelUnavailable, match=f"batch batch-0 is {fate}: {told}"):
        await ask(chat_model(server), tmp_path / "b")
    assert await ask(chat_model(server), tmp_path / "b") == ALL and len(server.batches) == 2


async def test_no_more_is_submitted_than_the_budget_allows(batches: Any, chat_model: Any, tmp_path: Path) -> None:
    server, path = batches(), tmp_path / "hosted.db"
    with pytest.raises(BudgetExceeded, match="3 of max_calls=3"):
        await ask(chat_model(server), tmp_path / "b", path=path, max_calls=3)
    assert len(server.requests) == 3
    with pytest.raises(BudgetExceeded, match="360 of max_tokens=100"):
        await ask(chat_model(server), tmp_path / "b", path=path, max_tokens=100)
    assert await ask(chat_model(server), tmp_path / "b", path=path, max_calls=4) == ALL and len(server.requests) == 4


async def test_large_work_is_several_batches(
    batches: Any, chat_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_requests, "MOST_REQUESTS", 3)
    server = batches()
    assert await ask(chat_model(server), tmp_path / "b") == ALL
    assert [len(server.files[each["input_file_id"]].splitlines()) for each in server.batches.values()] == [3, 1]
    monkeypatch.setattr(batch_requests, "MOST_BYTES", 10)
    assert await ask(chat_model(server), tmp_path / "c") == ALL and len(server.batches) == 6


async def test_no_file_and_no_log_holds_the_key(
    batches: Any, chat_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = batches(fault=lambda number: ["echo", "500", "400", "401"][number % 4])
    found = await ask(chat_model(server), tmp_path / "b", path=tmp_path / "hosted.db")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("dreamgym_lg")]
    assert b"[key]" in written and CANARY.encode() not in written and CANARY not in f"{found} {ours}"


async def test_another_providers_model_is_refused(scripted: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ScriptedModel cannot be asked in batches"):
        await ask(scripted(reply=lambda _: ""), tmp_path / "b")


# --- what is asked so -------------------------------------------------------------------------------------------------


async def test_annotations_by_batch(batches: Any, chat_model: Any, tmp_path: Path) -> None:
    """One answer is no JSON: it is told so, and asked again in a second batch."""
    server = batches(fault=lambda number: "prose" if number == 2 else "")
    step = Step(observation="A door.", action="open door", next_observation="Open.", reward=1.0, terminated=True)
    with ReplayBuffer(":memory:") as buffer:
        for task in houses(3):
            buffer.add(Trajectory(task=replace(task, instruction=f"leave {task.id}"), steps=[step], success=True))
        model, own = chat_model(server), hosted()
        result = await annotate(buffer, model, hosted=own, batch=tmp_path / "b")
        assert result == (3, 0, {}) and len(server.batches) == 2 and own.usage.calls == 4
        assert {each.steps[0].reasoning for each in buffer.trajectories()} == {"Because of 1."}
        assert "could not be read" in server.requests[3]["messages"][-1]["content"]
        assert await annotate(buffer, model, hosted=own, batch=tmp_path / "b") == (0, 3, {}) and len(server.batches) == 2


def test_an_own_agents_traces_are_annotated_by_batch_within_a_budget(
    batches: Any, chat_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `train_experience`: stopped by the budget nothing is trained; the same call with more asks for the rest alone."""

    @tool
    def refund(order: str) -> str:
        """Pay back an order."""
        raise AssertionError("it is simulated")

    def trace(number: int) -> Trajectory:
        asked, call = f"Refund W-{number}.", render_call("refund", {"order": f"W-{number}"})
        steps = [Step(observation=asked, action=call, next_observation="ok")]
        steps += [Step(observation="ok", action=render_answer("Done."), next_observation="", terminated=True, reward=1.0)]
        task = Task(id=f"W-{number}", instruction=asked, environment="t", metadata={"observation": asked})
        return Trajectory(task=task, steps=steps, success=True, run="traces")

    trained = list[str]()
    monkeypatch.setattr(supervised, "fine_tune", lambda work, label, start, to, rows, **_: trained.extend(map(str, rows)))
    monkeypatch.setattr(supervised, "_tokenized", lambda start, conversations: conversations)
    monkeypatch.setattr(supervised, "_judging_rows", lambda work, start, shown, edited: supervised._conversations(work, shown))
    monkeypatch.setattr(supervised, "_evenly_weighed", lambda rows: rows)
    monkeypatch.setattr(supervised, "_say_cut", lambda work, rows: None)
    server, said = batches(), list[str]()
    for limit, reached in ((5, False), (100, True)):
        with ReplayBuffer(tmp_path / "replay.db") as buffer:
            buffer.extend(map(trace, range(10)))
            graph = create_agent(chat_model(server), [refund])
            gym = DreamGym(graph, replay_buffer=buffer, writes=["refund"], out=tmp_path / "gym", say=said.append)
            own = hosted(tmp_path / "hosted.db", max_calls=limit)
            by_batch = partial(annotate, model=chat_model(server), hosted=own, batch=tmp_path / "batches")
            with nullcontext() if reached else pytest.raises(BudgetExceeded, match="5 of max_calls=5"):
                gym.train_experience(annotator=by_batch)
            assert bool(trained) == reached
    asked = [json.loads(request["messages"][-1]["content"]) for request in server.requests]
    assert len(asked) == own.usage.calls == len({json.dumps(each) for each in asked}), "nothing was asked twice"
    assert sum(each["success"] for each in asked) == 10 and any(not each["success"] for each in asked), "edits too"
    assert all("Because of 1." in each and "Because of 2." in each for each in trained if "Done." in each)
    with pytest.raises(ConfigurationError, match=r"annotator=3: give a chat model, its name, or partial\(annotate"):
        supervised._annotated_by(3)


def test_variations_by_batch(batches: Any, chat_model: Any, tmp_path: Path) -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        asked = json.loads(messages[-1]["content"])
        if "variations" in asked:
            return json.dumps({"reason": "harder", "chosen": 0 if "house 1" in asked["variations"][0]["task"] else 1})
        text = asked["seed_tasks"][0]["task"]
        return json.dumps({"tasks": [{"task": f"{text} twice", "rubric": "twice", "change": "again"}]})

    tasks = [replace(task, metadata={"observation": f"The door of {task.id}."}) for task in houses(3)]
    server = batches(reply=reply)
    for _ in range(2):
        generate = ChatTaskGenerator(chat_model(server), hosted=hosted())
        assert generate.prepare(tasks, tmp_path / "b") == 2, "none was chosen for the second"
        assert len(server.batches) == 2, "two stages; the second process finds their answers"
    asked = len(server.requests)
    made = generate(tasks[0], [], Random(0))
    assert made is not None and made.metadata["rubric"] == "twice" and len(server.requests) == asked
    assert generate(tasks[0], [], Random(0)) is not None and len(server.requests) == asked + 2, "the next is asked for now"
