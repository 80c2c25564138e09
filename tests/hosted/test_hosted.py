"""Hosted models over HTTP: what fails is tried again, what is spent is counted, what was answered is kept."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import FAULTS, shares
from house import houses
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda

from dreamgym_lg.errors import BudgetExceeded, ConfigurationError, ModelUnavailable
from dreamgym_lg.event_loop import lasting_loop
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.hosted.hosted import Hosted, Usage, hosted_for
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import StepResult, Task

QUICK = (0.001, 0.01)
"""No real server's patience has to be respected here."""
TASK = houses(1)[0]


def play(experience: ExperienceModel, *actions: str, task: Task = TASK) -> list[StepResult]:
    environment = DreamEnvironment(experience)
    environment.reset(task)
    return [environment.step(action) for action in actions]


def first_calls(*faults: str) -> Callable[[int], str]:
    return lambda number: faults[number - 1] if number <= len(faults) else ""


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_got_over(serve: Any, chat_model: Any, fault: str) -> None:
    server = serve(fault=first_calls(fault))
    hosted = Hosted(attempts=2, backoff=QUICK, timeout=1.0 if fault == "slow" else 30.0)
    experience = ExperienceModel(chat_model(server), hosted=hosted)
    assert [result.observation for result in play(experience, "open door", "go north")] == ["It is open.", "You are outside."]
    failed = int(fault != "prose")  # an answer that is not in the form is an answer, and is asked to be mended
    assert hosted.usage == Usage(3, failed, 100 * (3 - failed), 20 * (3 - failed), 0.0)
    assert experience.version == "door/experience-6"


@pytest.mark.parametrize("fault", ["400", "401"])
def test_a_request_at_fault_is_not_tried_again(serve: Any, chat_model: Any, fault: str) -> None:
    server = serve(fault=lambda number: fault)
    experience = ExperienceModel(chat_model(server), hosted=Hosted(attempts=5, backoff=QUICK))
    with pytest.raises(ModelUnavailable, match="gave no answer in 1 of 5 attempts: .*Error"):
        play(experience, "open door")
    assert len(server.requests) == 1


def test_the_attempts_are_bounded_and_the_last_cause_is_told(serve: Any, chat_model: Any) -> None:
    server = serve(fault=lambda number: "500")
    experience = ExperienceModel(chat_model(server), hosted=Hosted(attempts=3, backoff=QUICK))
    with pytest.raises(ModelUnavailable, match="in 3 of 3 attempts: .*500"):
        play(experience, "open door")
    assert len(server.requests) == 3


def test_a_schema_is_sent_where_the_model_takes_one(serve: Any, chat_model: Any) -> None:
    server = serve()
    play(ExperienceModel(chat_model(server, profile={"structured_output": True})), "open door")
    play(ExperienceModel(chat_model(server)), "open door")
    with_schema, without = server.requests
    properties = with_schema["response_format"]["json_schema"]["schema"]["properties"]
    assert list(properties) == ["reasoning", "valid", "reward", "terminated", "success", "observation"]
    assert "response_format" not in without


def test_calls_go_on_over_event_loops_and_threads(serve: Any, chat_model: Any) -> None:
    """A client's connections belong to one loop, and every training iteration begins another."""
    server, hosted = serve(), Hosted(attempts=1)
    model = chat_model(server)

    async def many() -> list[Any]:
        experience = ExperienceModel(model, hosted=hosted)  # remembers nothing of the others
        return await asyncio.gather(*(experience.apredict(task, [], "open door") for task in houses(10)))

    for _ in range(3):
        assert {found.observation for found in asyncio.run(many())} == {"It is open."}
    play(ExperienceModel(model, hosted=hosted), "open door")
    assert hosted.usage.calls == 31 and hosted.usage.failed == 0


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_no_more_calls_than_allowed_are_under_way(serve: Any, chat_model: Any, concurrency: int) -> None:
    server = serve(latency=0.02)
    hosted = Hosted(concurrency=concurrency)
    models = [ExperienceModel(chat_model(server), hosted=hosted) for _ in range(2)]
    await asyncio.gather(*(model.apredict(task, [], "open door") for model in models for task in houses(8)))
    assert server.most == concurrency and len(server.requests) == 16


async def test_of_many_calls_the_first_is_sent_before_the_last_is_made_ready() -> None:
    done: list[str] = []

    async def call(_: Any) -> AIMessage:
        done.append("ready")
        await asyncio.sleep(0)
        done.append("sent")
        return AIMessage("It is open.")

    model, hosted, come = RunnableLambda(call), Hosted(concurrency=200), threading.Event()
    lasting_loop("dreamgym-hosted").call_soon_threadsafe(come.wait)  # it finds them all when it goes on
    calls = [asyncio.create_task(hosted.aask(model, [HumanMessage("open door")])) for _ in range(200)]
    await asyncio.sleep(0)
    come.set()
    await asyncio.gather(*calls)
    assert done.count("sent") == 200 and done.index("sent") < 50


async def test_a_call_nobody_waits_for_any_more_gives_its_slot_back(serve: Any, chat_model: Any) -> None:
    server = serve(fault=first_calls("slow"))
    hosted = Hosted(concurrency=1)
    waiting = asyncio.create_task(hosted.aask(chat_model(server), [HumanMessage('{"action": "wait"}')]))
    while not server.requests:
        await asyncio.sleep(0.01)
    waiting.cancel()
    assert (await ExperienceModel(chat_model(server), hosted=hosted).apredict(TASK, [], "open door")).valid
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
        play(ExperienceModel(chat_model(server), hosted=Hosted(path, **limits)), "wave", "dance", "sing")
    with pytest.raises(BudgetExceeded, match=told):  # spent is spent, whoever asks
        play(ExperienceModel(chat_model(server), hosted=Hosted(path, **limits)), "sing")
    assert len(server.requests) == 2
    more = {key: value if key == "prices" else 3 * value for key, value in limits.items()}
    hosted = Hosted(path, **more)
    play(ExperienceModel(chat_model(server), hosted=hosted), "wave", "dance")
    assert len(server.requests) == 2 and hosted.usage.calls == 2, "what was answered is not asked again"
    play(ExperienceModel(chat_model(server), hosted=hosted), "wave", "dance", "sing")
    assert hosted.usage.calls == 3


def test_without_a_count_of_the_server_tokens_are_estimated(serve: Any, chat_model: Any) -> None:
    hosted = Hosted(prices=(1e6, 0))
    play(ExperienceModel(chat_model(serve(usage=False)), hosted=hosted), "open door")
    assert 400 < hosted.usage.input_tokens < 1500 and 10 < hosted.usage.output_tokens < 100
    assert hosted.usage.cost == hosted.usage.input_tokens


def test_what_was_spent_is_told_iteration_by_iteration(serve: Any, chat_model: Any) -> None:
    hosted = Hosted(prices=(1.0, 5.0), attempts=2, backoff=QUICK)
    experience = ExperienceModel(chat_model(serve(fault=first_calls("500"))), hosted=hosted)
    play(experience, "open door")
    first, cost = hosted.pop_metrics(), 100e-6 + 5 * 20e-6
    expected = {"calls": 2, "failed": 1, "input_tokens": 100, "output_tokens": 20, "cost": cost}
    assert first == {f"hosted_{name}": pytest.approx(value) for name, value in expected.items()}
    play(experience, "open door", "go north")
    assert hosted.pop_metrics()["hosted_calls"] == 1 and hosted.pop_metrics()["hosted_calls"] == 0


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ConfigurationError, match="max_cost=1 needs prices"):
        Hosted(max_cost=1)
    with pytest.raises(ConfigurationError, match="at least 1"):
        Hosted(concurrency=0)


# --- the memory -----------------------------------------------------------------------------------------------------


def test_answers_outlive_the_process_and_belong_to_model_and_prompt(serve: Any, chat_model: Any, tmp_path: Path) -> None:
    server, path = serve(), tmp_path / "hosted.db"

    def ask(**options: Any) -> int:
        before = len(server.requests)
        instructions = options.pop("instructions", None)
        model = chat_model(server, **options)
        experience = ExperienceModel(model, hosted=Hosted(path), prompt_format="json", instructions=instructions)
        play(experience, "open door", "go north")
        return len(server.requests) - before

    assert [ask(), ask()] == [2, 0]
    assert [ask(model="other"), ask(model="other")] == [2, 0]
    assert ask(instructions="Play the world.") == 2


def test_an_answer_that_could_not_be_read_is_not_kept(serve: Any, chat_model: Any, tmp_path: Path) -> None:
    server = serve(fault=first_calls("prose"))
    for _ in range(2):
        experience = ExperienceModel(chat_model(server), hosted=Hosted(tmp_path / "hosted.db"), retries=0)
        try:
            play(experience, "open door")
        except Exception as error:
            assert "is not JSON" in str(error)
    assert len(server.requests) == 2 and play(experience, "open door")[0].observation == "It is open."


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


# --- defaults and waiting -------------------------------------------------------------------------------------------


def test_a_model_that_takes_a_key_is_hosted_without_being_told(serve: Any, chat_model: Any, scripted: Any) -> None:
    assert isinstance(ExperienceModel(chat_model(serve())).hosted, Hosted)
    assert hosted_for(scripted(reply=lambda _: "")) is None and ExperienceModel(None).hosted is None


@pytest.mark.parametrize(
    ("asked", "least", "most"), [("7", 7, 7), ("1.5", 1.5, 1.5), ("900", 60, 60), ("soon", 0, 1), ("", 0, 1)]
)
def test_a_server_that_says_when_to_come_back_is_heeded(asked: str, least: float, most: float) -> None:
    error: Any = RuntimeError("busy")
    error.response = SimpleNamespace(headers={"retry-after": asked})
    state: Any = SimpleNamespace(outcome=SimpleNamespace(exception=lambda: error), attempt_number=1)
    assert least <= Hosted(backoff=(1.0, 1.0))._pause(state) <= most


def test_a_share_of_faults_is_what_it_says() -> None:
    drawn = [shares(0.3)(number) for number in range(4000)]
    assert 0.27 < sum(map(bool, drawn)) / 4000 < 0.33 and set(drawn) == {"", *FAULTS}


def test_the_notes_of_a_world_are_one_call_a_group_and_kept_over_restarts(serve: Any, chat_model: Any, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "get_order", "parameters": {"properties": {"id": {"type": "string"}}}}}
    tasks = [Task(id=id, instruction="Where is K12?", environment="desk", tools=[tool]) for id in ("a", "b")]
    noted = {"name": "get_order", "arguments": {"id": "K12"}}

    def write(messages: list[dict[str, Any]]) -> str:
        world = json.loads(messages[0]["content"].splitlines()[-1])
        return json.dumps({"notes": [{**noted, "answer": f"it is open since {world['world_seed']}"}]})

    async def group(hosted: Hosted, task: Task) -> set[str]:
        async def play() -> str:
            environment = DreamEnvironment(ExperienceModel(chat_model(server), hosted=hosted, notes=True))
            await environment.areset(task)
            return (await environment.astep(json.dumps(noted))).observation

        return {await play(), *await asyncio.gather(*(play() for _ in range(4)))}

    server = serve(write)
    found = [asyncio.run(group(Hosted(tmp_path / "answers.db"), task)) for task in [*tasks, *tasks]]
    assert found[:2] == found[2:] and [len(each) for each in found] == [1] * 4 and found[0] != found[1]
    assert len(server.requests) == 2
    assert all("K12" in request["messages"][-1]["content"] for request in server.requests)
