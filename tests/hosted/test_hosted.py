"""Hosted models over HTTP: what fails is tried again, what is spent is counted, what was answered is kept."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import FAULTS, RETRY_AFTER, door, shares
from house import houses
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda

from dreamgym_lg.dream import Dream, Episode, Model
from dreamgym_lg.dream.prompts import Prediction
from dreamgym_lg.errors import BudgetExceeded, ConfigurationError, ModelUnavailable, PredictionFailed
from dreamgym_lg.hosted import Hosted, Usage, hosted_for
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import StepResult, Task

TASK = houses(1)[0]


def play(model: Model, *actions: str) -> list[StepResult]:
    environment = Dream([model]).create_environment()
    environment.reset(TASK)
    return [environment.step(action) for action in actions]


async def predict(model: Model, task: Task) -> Prediction:
    return await model.predict(Episode(task=task, action="open door"))


def first_calls(*faults: str) -> Callable[[int], str]:
    return lambda number: faults[number - 1] if number <= len(faults) else ""


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_got_over(serve: Any, chat_model: Any, fault: str) -> None:
    server, hosted = serve(fault=first_calls(fault)), Hosted()
    model = Model(chat_model(server, max_retries=1, timeout=1.0 if fault == "slow" else 30.0), hosted=hosted)
    assert [result.observation for result in play(model, "open door", "go north")] == ["It is open.", "You are outside."]
    assert len(server.requests) == 3
    calls = 3 if fault == "prose" else 2  # an answer that is not in the form is an answer, and is asked to be mended
    assert hosted.usage == Usage(calls, 0, 100 * calls, 20 * calls, 0.0)
    assert model.version == "door/experience-json-2"


@pytest.mark.parametrize("fault", ["400", "401"])
def test_a_request_at_fault_is_not_tried_again(serve: Any, chat_model: Any, fault: str) -> None:
    server, hosted = serve(fault=lambda number: fault), Hosted()
    with pytest.raises(ModelUnavailable, match=r"the hosted model 'door' at 127.0.0.1:\d+ gave no answer: .*Error: "):
        play(Model(chat_model(server, max_retries=5), hosted=hosted), "open door")
    assert len(server.requests) == 1 and hosted.usage == Usage(calls=1, failed=1)


def test_the_client_decides_how_often_and_how_long_it_waits(serve: Any, chat_model: Any, pauses: list[float]) -> None:
    server = serve(fault=first_calls("429", *["500"] * 9))
    with pytest.raises(ModelUnavailable, match="Error code: 500"):
        play(Model(chat_model(server, max_retries=3)), "open door")
    assert len(server.requests) == 4 and pauses[0] == RETRY_AFTER and all(seconds > 0.3 for seconds in pauses[1:])


def test_an_unreadable_body_is_asked_for_six_times(serve: Any, chat_model: Any) -> None:
    server = serve(fault=lambda number: "malformed")
    with pytest.raises(ModelUnavailable, match="gave no answer: JSONDecodeError: "):
        play(Model(chat_model(server)), "open door")
    assert len(server.requests) == 6


def test_a_server_that_hangs_is_given_up(serve: Any, chat_model: Any) -> None:
    model = Model(chat_model(serve(latency=60.0)), hosted=Hosted(timeout=0.2))
    with pytest.raises(ModelUnavailable, match=r"'door' at 127.0.0.1:\d+ gave no answer: nothing within 0.2 s"):
        play(model, "open door")


def test_a_lost_server_is_named_with_its_cause(serve: Any, chat_model: Any) -> None:
    model = Model(chat_model(serve(), base_url="http://me:pa55word@127.0.0.1:9/v1", profile={"structured_output": True}))
    with pytest.raises(ModelUnavailable, match=r"'door' at 127.0.0.1:9 gave no answer: .*Connection error.* \(ConnectError: "):
        play(model, "open door")


def test_a_schema_is_sent_where_the_model_takes_one(serve: Any, chat_model: Any) -> None:
    server = serve()
    play(Model(chat_model(server, profile={"structured_output": True})), "open door")
    play(Model(chat_model(server)), "open door")
    with_schema, without = server.requests
    properties = with_schema["response_format"]["json_schema"]["schema"]["properties"]
    assert list(properties) == ["reasoning", "valid", "reward", "terminated", "success", "observation"]
    assert "response_format" not in without


def test_calls_go_on_over_event_loops_and_threads(serve: Any, chat_model: Any) -> None:
    """A client's connections belong to one loop, and every training iteration begins another."""
    server, hosted = serve(), Hosted()
    chat = chat_model(server)

    async def many() -> list[Prediction]:
        model = Model(chat, hosted=hosted)  # remembers nothing of the others
        return await asyncio.gather(*(predict(model, task) for task in houses(10)))

    for _ in range(3):
        assert {prediction.observation for prediction in asyncio.run(many())} == {"It is open."}
    play(Model(chat, hosted=hosted), "open door")
    assert hosted.usage.calls == 31 and hosted.usage.failed == 0


@pytest.mark.parametrize("local", [False, True])
async def test_callbacks_of_the_agent_do_not_see_the_dreams_calls(
    serve: Any, chat_model: Any, scripted: Any, local: bool
) -> None:
    class Seen(BaseCallbackHandler):
        names: list[str | None] = []

        def on_chat_model_start(self, *_: Any, **options: Any) -> None:
            self.names.append(options.get("name"))

        on_chain_start = on_chat_model_start

    async def node(_: Any) -> str:
        chat = scripted(reply=lambda messages: door([{"role": "user", "content": messages[-1].text}]))
        return (await predict(Model(chat if local else chat_model(serve()), prompt_format="json"), TASK)).observation

    callback = Seen()
    assert await RunnableLambda(node).ainvoke(None, {"callbacks": [callback]}) == "It is open."
    assert callback.names == ["node"]


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_no_more_calls_than_allowed_are_under_way(serve: Any, chat_model: Any, concurrency: int) -> None:
    server = serve(latency=0.02)
    hosted = Hosted(concurrency=concurrency)
    models = [Model(chat_model(server), hosted=hosted) for _ in range(2)]
    await asyncio.gather(*(predict(model, task) for model in models for task in houses(8)))
    assert server.most == concurrency and len(server.requests) == 16


async def test_a_call_nobody_waits_for_any_more_gives_its_slot_back(serve: Any, chat_model: Any) -> None:
    server = serve(fault=first_calls("slow"))
    hosted = Hosted(concurrency=1)
    waiting = asyncio.create_task(hosted.aask(chat_model(server), [HumanMessage('{"action": "wait"}')]))
    while not server.requests:
        await asyncio.sleep(0.01)
    waiting.cancel()
    assert (await predict(Model(chat_model(server), hosted=hosted), TASK)).valid
    assert hosted.usage == Usage(2, 1, 100, 20, 0.0)


# --- the budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_calls": 2}, "2 of max_calls=2 are spent"),
        ({"max_tokens": 121}, "240 of max_tokens=121 are spent"),
        ({"max_cost": 0.0003, "prices": (1.0, 5.0)}, "0.0004 of max_cost=0.0003 are spent"),
    ],
)
def test_a_spent_budget_stops_the_calls_and_a_larger_one_goes_on(
    serve: Any, chat_model: Any, tmp_path: Path, limits: dict[str, Any], told: str
) -> None:
    server, path = serve(), tmp_path / "hosted.db"
    with pytest.raises(BudgetExceeded, match=told):
        play(Model(chat_model(server), hosted=Hosted(path, **limits)), "wave", "dance", "sing")
    with pytest.raises(BudgetExceeded, match=told):  # spent is spent, whoever asks
        play(Model(chat_model(server), hosted=Hosted(path, **limits)), "sing")
    assert len(server.requests) == 2
    more = {key: value if key == "prices" else 3 * value for key, value in limits.items()}
    hosted = Hosted(path, **more)
    play(Model(chat_model(server), hosted=hosted), "wave", "dance")
    assert len(server.requests) == 2 and hosted.usage.calls == 2, "what was answered is not asked again"
    play(Model(chat_model(server), hosted=hosted), "wave", "dance", "sing")
    assert hosted.usage.calls == 3


def test_without_a_count_of_the_server_tokens_are_estimated(serve: Any, chat_model: Any) -> None:
    hosted = Hosted(prices=(1e6, 0))
    play(Model(chat_model(serve(usage=False)), hosted=hosted), "open door")
    assert 400 < hosted.usage.input_tokens < 1500 and 10 < hosted.usage.output_tokens < 100
    assert hosted.usage.cost == hosted.usage.input_tokens


def test_what_was_spent_is_told_iteration_by_iteration(serve: Any, chat_model: Any) -> None:
    hosted = Hosted(prices=(1.0, 5.0))
    model = Model(chat_model(serve(fault=first_calls("500"))), hosted=hosted)
    with pytest.raises(ModelUnavailable):
        play(model, "open door")
    play(model, "open door")
    first, cost = hosted.pop_metrics(), 100e-6 + 5 * 20e-6
    expected = {"calls": 2, "failed": 1, "input_tokens": 100, "output_tokens": 20, "cost": cost}
    assert first == {f"hosted_{name}": pytest.approx(value) for name, value in expected.items()}
    play(model, "open door", "go north")
    assert hosted.pop_metrics()["hosted_calls"] == 1 and hosted.pop_metrics()["hosted_calls"] == 0


def test_a_budget_is_shared_by_all_that_use_its_file(serve: Any, chat_model: Any, tmp_path: Path) -> None:
    first, second = (Hosted(tmp_path / "hosted.db", max_calls=2) for _ in range(2))
    server = serve()
    play(Model(chat_model(server), hosted=first), "wave")
    play(Model(chat_model(server), hosted=second), "dance")
    assert first.usage == second.usage and second.pop_metrics()["hosted_calls"] == 1
    for hosted in (second, first, Hosted(tmp_path / "hosted.db", max_calls=2)):
        with pytest.raises(BudgetExceeded, match=r"2 of max_calls=2 are spent \(.*hosted.db counts them\)"):
            play(Model(chat_model(server), hosted=hosted), "sing")
    assert len(server.requests) == 2


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ConfigurationError, match="max_cost=1 needs prices"):
        Hosted(max_cost=1)
    with pytest.raises(ConfigurationError, match="at least 1"):
        Hosted(concurrency=0)


# --- answers on disk -------------------------------------------------------------------------------------------------


def test_answers_outlive_the_process_and_belong_to_model_and_prompt(serve: Any, chat_model: Any, tmp_path: Path) -> None:
    server, path = serve(), tmp_path / "hosted.db"

    def calls(instructions: str | None = None, **options: Any) -> int:
        before = len(server.requests)
        chat = chat_model(server, **options)
        play(Model(chat, hosted=Hosted(path), prompt_format="json", instructions=instructions), "open door", "go north")
        return len(server.requests) - before

    assert [calls(), calls()] == [2, 0]
    assert [calls(model="other"), calls(model="other")] == [2, 0]
    assert calls(instructions="Play the world.") == 2


@pytest.mark.parametrize("hosted", [None, Hosted()], ids=["Hosted by default", "Hosted without a file"])
def test_answers_are_kept_beside_the_replay_buffer(serve: Any, chat_model: Any, tmp_path: Path, hosted: Hosted | None) -> None:
    server = serve()
    for _ in range(2):
        with ReplayBuffer(tmp_path / "mine.db") as buffer:
            play(Model(chat_model(server), replay_buffer=buffer, hosted=hosted), "open door", "go north")
    assert len(server.requests) == 2 and (tmp_path / "mine-answers.db").exists()
    with ReplayBuffer(":memory:") as buffer:
        play(Model(chat_model(server), replay_buffer=buffer), "open door")
    assert len(server.requests) == 3 and {path.suffix for path in tmp_path.iterdir()} <= {".db", ".db-wal", ".db-shm", ".index"}


KILLED = """
import os, sys
from dreamgym_lg.hosted import Hosted
hosted = Hosted(sys.argv[1])
hosted.remember("key", "paid")
os._exit(7)
"""


@pytest.mark.slow
def test_a_kill_loses_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "hosted.db"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60, check=False).returncode == 7
    assert Hosted(path).recall("key") == "paid" and Hosted(path).recall("other") is None


def test_an_answer_that_could_not_be_read_is_not_kept(serve: Any, chat_model: Any, tmp_path: Path) -> None:
    server = serve(fault=first_calls("prose"))
    model = Model(chat_model(server), hosted=Hosted(tmp_path / "hosted.db"), retries=0)
    with pytest.raises(PredictionFailed, match="is not JSON"):
        play(model, "open door")
    assert play(model, "open door")[0].observation == "It is open." and len(server.requests) == 2


def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path) -> None:
    ReplayBuffer(tmp_path / "replay.db").close()
    (tmp_path / "text").write_text("a" * 2000)
    for name in ("replay.db", "text"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ConfigurationError, match="cannot hold the answers"):
            Hosted(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(ConfigurationError, match="cannot hold the answers"):
        Hosted(tmp_path / "no" / "folder")


# --- defaults -------------------------------------------------------------------------------------------------------


def test_a_model_that_takes_a_key_is_hosted_without_being_told(serve: Any, chat_model: Any, scripted: Any) -> None:
    assert isinstance(Model(chat_model(serve())).hosted, Hosted)
    assert hosted_for(scripted(reply=lambda _: "")) is None and Model(None).hosted is None


def test_a_share_of_faults_is_what_it_says() -> None:
    drawn = [shares(0.3)(number) for number in range(4000)]
    assert 0.27 < sum(map(bool, drawn)) / 4000 < 0.33 and set(drawn) == {"", *FAULTS}
