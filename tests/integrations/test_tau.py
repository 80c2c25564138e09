"""tau-bench's domains against records of the official tools; its agent and worlds."""

import json
import lzma
import tomllib
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import pytest
from langchain_core.language_models import BaseChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import ToolException

from dreamgym_lg.actions import parse_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.world import GROUP
from dreamgym_lg.integrations.tau import Domain, load_conversations, load_domain, load_tasks
from dreamgym_lg.integrations.tau.agent import ServiceDesk, TauWorld, create_agent_graph
from dreamgym_lg.integrations.tau.domain import OPENING, DomainName
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Step, Trajectory

DATA = Path(__file__).parents[3] / "shared" / "data" / "tau"
NAMES: tuple[DomainName, ...] = get_args(DomainName)


def packed(file: str) -> Any:
    with lzma.open(folder() / file) as content:
        return json.load(content)


def folder() -> Path:
    if not DATA.exists():
        pytest.skip(f"needs tau-bench's packed data in {DATA} (the folder shared/ beside the checkout)")
    return DATA


@pytest.fixture
def shop() -> Domain:
    """A shop of two products, one customer and two orders."""
    variants = {id: {"item_id": id, "options": {}, "available": id != "3", "price": 10.0 * int(id)} for id in "123"}
    user = {
        "name": {"first_name": "Ann", "last_name": "Lee"},
        "address": {"zip": "10001"},
        "email": "ann@example.com",
        "payment_methods": {"card": {"source": "credit_card", "id": "card"}, **gift(5.0)},
        "orders": ["#1", "#2"],
    }
    return Domain("retail", "Be kind.", [], {
        "users": {"ann": user},
        "products": {"p": {"name": "Pen", "product_id": "p", "variants": variants}},
        "orders": {"#1": order("pending"), "#2": order("delivered")},
    })  # fmt: skip


def gift(balance: float) -> dict[str, Any]:
    return {"gift_card_1": {"source": "gift_card", "balance": balance, "id": "gift_card_1"}}


def order(status: str) -> dict[str, Any]:
    return {
        "user_id": "ann",
        "address": {},
        "items": [{"product_id": "p", "item_id": "1", "price": 10.0, "options": {}}],
        "status": status,
        "payment_history": [{"transaction_type": "payment", "amount": 10.0, "payment_method_id": "card"}],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_recorded_walks_are_answered_to_the_letter(name: DomainName) -> None:
    domain, calls = load_domain(name, folder()), 0
    for walk in packed(f"tau_{name}_walks.json.xz"):
        database = domain.create_database()
        for step in walk["steps"]:
            given = deepcopy(step["arguments"])
            assert domain.call(database, step["name"], step["arguments"]) == step["answer"]
            assert step["arguments"] == given
            calls += 1
        assert domain.digest(database) == walk["final_state_sha256_16"]
    assert calls == {"airline": 929, "retail": 3844}[name]
    assert domain.digest(domain.create_database()) == {"airline": "9ab3635c8e275dcb", "retail": "c49125b83c32941b"}[name]


@pytest.mark.slow
def test_recorded_conversations_get_the_recorded_answers_and_rewards() -> None:
    """All but the answers of `get_user_details`, whose records have changed since."""
    domain, tasks = load_domain("airline", folder()), {task.id: task for task in load_tasks("airline", DATA)}
    answers = 0
    for talk in packed("tau_airline_conversations.json.xz"):
        database, calls, said = domain.create_database(), dict[str, Any](), list[str]()
        for message in talk["messages"]:
            calls |= {call["id"]: call["function"] for call in message.get("tool_calls") or ()}
            spoken = message["role"] == "assistant" and not message.get("tool_calls")
            said += [message["content"]] if spoken else []
            if message["role"] == "tool":
                call = calls[message["tool_call_id"]]
                answer = domain.call(database, call["name"], json.loads(call["arguments"]))
                assert answer == message["content"] or call["name"] == "get_user_details"
                answers += 1
        assert domain.reward(tasks[f"tau-airline-{talk['task']}"], database, said) == talk["reward"]
    assert answers == 895


@pytest.mark.parametrize("name", NAMES)
def test_the_right_calls_earn_1_and_each_customer_is_in_one_split(name: DomainName) -> None:
    domain, tasks = load_domain(name, folder()), load_tasks(name, DATA / f"tau_{name}_tasks.json.xz")
    for task in tasks:
        database = domain.create_database()
        for action in task.metadata["actions"]:
            domain.call(database, action["name"], action["arguments"])
        assert domain.reward(task, database, [f"It is {output}." for output in task.metadata["outputs"]]) == 1
        assert domain.reward(task, database, []) == (not task.metadata["outputs"])
    assert len({(task.metadata["user_id"], task.split) for task in tasks}) == len({task.metadata["user_id"] for task in tasks})
    assert {task.split for task in tasks} == {"train", "validation", "test"}
    assert all(task.metadata["user_scenario"] not in (task.instruction, task.observation) for task in tasks)


def test_databases_share_no_change_and_keep_the_callers_arguments(shop: Domain) -> None:
    changed, other = shop.create_database(), shop.create_database()
    before = shop.digest(other)
    arguments = {"order_id": "#1", "item_ids": ["1"], "new_item_ids": ["2"], "payment_method_id": "card"}
    assert '"status": "pending (item modified)"' in shop.call(changed, "modify_pending_order_items", arguments)
    assert shop.digest(other) == before == shop.digest(shop.create_database()) == shop.digest(deepcopy(other))
    assert shop.digest(changed) != before and shop.digest(deepcopy(changed)) == shop.digest(changed)


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("find_user_id_by_email", {"email": "ANN@example.com"}, "ann"),
        ("find_user_id_by_name_zip", {"first_name": "ann", "last_name": "LEE", "zip": "10001"}, "ann"),
        ("find_user_id_by_name_zip", {"first_name": "ann", "last_name": "LEE", "zip": "1"}, "Error: user not found"),
        ("fly", {}, "Unknown action fly"),
        ("get_order_details", {"id": "#1"}, "Error: GetOrderDetails.invoke() got an unexpected keyword argument 'id'"),
        ("think", {}, "Error: Think.invoke() missing 1 required positional argument: 'thought'"),
        ("calculate", {"expression": "2 * (3 - 1) / 3"}, "1.33"),
        ("calculate", {"expression": "9**9**9"}, "Error: (34, 'Numerical result out of range')"),
        ("calculate", {"expression": "2 ** 3"}, "8.0"),
        ("calculate", {"expression": "1 / 0"}, "Error: division by zero"),
        ("calculate", {"expression": "print(1)"}, "Error: invalid characters in expression"),
        ("modify_pending_order_payment", {"order_id": "#1", "payment_method_id": "gift_card_1"},
         "Error: insufficient gift card balance to pay for the order"),
        ("modify_pending_order_payment", {"order_id": "#1", "payment_method_id": "card"},
         "Error: the new payment method should be different from the current one"),
        ("exchange_delivered_order_items",
         {"order_id": "#2", "item_ids": ["1"], "new_item_ids": ["3"], "payment_method_id": "card"},
         "Error: new item 3 not found or available"),
        ("exchange_delivered_order_items",
         {"order_id": "#2", "item_ids": ["1"], "new_item_ids": ["2"], "payment_method_id": "gift_card_1"},
         "Error: insufficient gift card balance to pay for the price difference"),
    ],
)  # fmt: skip
def test_what_the_tools_answer(shop: Domain, name: str, arguments: dict[str, Any], answer: str) -> None:
    assert shop.call(shop.create_database(), name, arguments) == answer


def test_a_gift_card_pays_and_is_paid_back(shop: Domain) -> None:
    database = shop.create_database()
    database["users"]["ann"]["payment_methods"] |= gift(30.0)
    shop.call(database, "modify_pending_order_payment", {"order_id": "#1", "payment_method_id": "gift_card_1"})
    assert database["users"]["ann"]["payment_methods"]["gift_card_1"]["balance"] == 20
    shop.call(database, "cancel_pending_order", {"order_id": "#1", "reason": "no longer needed"})
    assert database["users"]["ann"]["payment_methods"]["gift_card_1"]["balance"] == 30
    assert [paid["transaction_type"] for paid in database["orders"]["#1"]["payment_history"]] == [
        "payment", "payment", "refund", "refund", "refund", "refund",
    ]  # fmt: skip


@pytest.mark.parametrize("flights", [{}, "", []])
def test_flights_that_are_none_are_kept_as_they_came(flights: Any) -> None:
    """As the official tool does, which a walk of random calls showed."""
    user = {"payment_methods": {"card": {"source": "credit_card", "id": "card"}}}
    old = {"flight_number": "HAT1", "date": "2024-05-20", "price": 5}
    held = {"user_id": "ann", "cabin": "economy", "flights": [old], "passengers": [1], "payment_history": []}
    domain = Domain("airline", "", [], {"users": {"ann": user}, "reservations": {"R": held}, "flights": {}})
    arguments = {"reservation_id": "R", "cabin": "economy", "flights": flights, "payment_id": "card"}
    answer = json.loads(domain.call(domain.create_database(), "update_reservation_flights", arguments))
    assert answer["flights"] == flights and answer["payment_history"] == [{"payment_id": "card", "amount": -5}]


def test_the_third_certificate_is_the_last() -> None:
    domain = Domain("airline", "", [], {"users": {"ann": {"payment_methods": {}}}})
    database = domain.create_database()
    given = [domain.call(database, "send_certificate", {"user_id": "ann", "amount": 50}) for _ in range(4)]
    assert given == [
        *(f"Certificate certificate_322132{n} added to user ann with amount 50." for n in (2, 3, 4)),
        "None",  # what the official tool returns
    ]


def test_what_is_no_data_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tau_airline.json.xz cannot be read .*give the folder of tau_airline"):
        load_domain("airline", tmp_path)
    with pytest.raises(ConfigurationError, match="unknown domain 'bank'; known: airline, retail"):
        load_tasks("bank", tmp_path)  # type: ignore[arg-type]
    file = tmp_path / "tau_retail.json.xz"
    for content, cause in (({}, "is no domain"), ({"policy": "", "database": {"users": {}}, "tools": [fly()]}, "fly")):
        file.write_bytes(lzma.compress(json.dumps(content).encode()))
        with pytest.raises(ConfigurationError, match=cause):
            load_domain("retail", file)


def fly() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "fly", "description": "", "parameters": {}}}


# --- The agent and its world -----------------------------------------------------------------------------------------


class Scripted(GenericFakeChatModel):
    """Says the given messages."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def call(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": name}])


async def test_the_agent_runs_on_a_database_of_its_episode() -> None:
    desk = ServiceDesk(load_domain("airline", folder()))
    task = next(task for task in load_tasks("airline", DATA) if not task.metadata["outputs"] and len(task.metadata["actions"]))
    says = [call(action["name"], **action["arguments"]) for action in task.metadata["actions"]]
    seen = list[float]()
    for messages in ([*says, AIMessage("Done.")], [AIMessage("No.")]):
        graph = create_agent_graph(Scripted(messages=iter(messages)), desk)
        async with desk.reset_real(task):
            state = await graph.ainvoke({"messages": [("user", OPENING)]})
            seen.append(desk.verify_real(task, state))
    assert seen == [1, 0] and len(state["messages"]) == 2
    with pytest.raises(ToolException, match="no database is open"):
        await desk.tools[4].ainvoke({"user_id": "nobody"})


def test_a_hand_over_ends_the_graph(shop: Domain) -> None:
    domain = load_domain("retail", folder())
    database = domain.create_database()
    assert {tool.name for tool in domain.tools(database)} == {tool["function"]["name"] for tool in domain.schemas}
    desk = ServiceDesk(domain)
    desk._database.set(database)
    model = Scripted(messages=iter([call("transfer_to_human_agents", summary="x")]))
    assert (
        create_agent_graph(model, desk).invoke({"messages": [("user", OPENING)]})["messages"][-1].text == "Transfer successful"
    )


def load_world(name: str, **arguments: Any) -> Any:
    """As the command line does, of the names that the package declares: an older installation has not all of them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return EntryPoint(name, project["entry-points"][GROUP][name], GROUP).load()(**arguments)


@pytest.mark.slow
def test_the_worlds_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAU_DATA", str(folder()))
    recorded = load_world("tau-airline")
    assert isinstance(recorded, TauWorld) and recorded.name == "tau-airline" and len(recorded.all_tasks) == 132
    monkeypatch.setenv("TAU_USER", "openai:gpt-5.4-mini")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for name in NAMES:
        arguments = {"data": str(DATA), "user": "openai:gpt-5.4-mini"}
        world = load_world(f"tau-{name}", **arguments)
        assert isinstance(world, TauWorld) and json.loads(json.dumps(world.arguments)) == arguments
        assert [task.id for task in world.all_tasks] == [task.id for task in load_tasks(name, DATA)]
        assert {task.environment for task in world.all_tasks} == {world.name} and world.all_tasks[0].tools
    monkeypatch.delenv("TAU_USER")
    with pytest.raises(ConfigurationError, match="tau_retail_conversations.json.xz cannot be read"):
        load_world("tau-retail")


@pytest.mark.slow
def test_the_world_collects_the_recorded_conversations_of_its_training_customers() -> None:
    world = TauWorld("airline", folder())
    collected = list(world.collect([], {"recorded": 50}, seed=0))
    assert len(collected) == 50 and {each.task.split for each in collected} == {"train"}
    everyone = load_conversations("airline", DATA)
    assert sum(each.success for each in everyone) == 40 and len({each.task.id for each in everyone}) == 132


@pytest.mark.slow
def test_a_tiny_run_of_the_command_trains_on_the_recorded_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted: Any
) -> None:
    """Imitation, conversations on the real database, and an update; of random weights nobody learns anything."""
    pytest.importorskip("trl", reason="needs trl")
    from tiny_models import create_model, create_tokenizer
    from typer.testing import CliRunner

    from dreamgym_lg.cli.app import app

    monkeypatch.setenv("TAU_DATA", str(folder()))
    monkeypatch.setenv("TAU_USER", "fake:customer")
    customer = scripted(reply=lambda messages: "END" if len(messages) > 4 else "I do not know.")
    monkeypatch.setattr("dreamgym_lg.dream.prompter.load_chat_model", lambda name: customer)
    talks = load_conversations("airline", DATA)[:12]
    texts = [load_domain("airline", DATA).policy, *(text for each in talks for step in each.steps for text in step_texts(step))]
    tokenizer = create_tokenizer(texts, vocab_size=4096)
    model = create_model(tokenizer, hidden_size=64, layers=1, max_tokens=16384)
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "model")
    small = {"base_steps": 2, "batch_size": 2, "num_tasks": 2, "num_generations": 2}
    tiny = replace(TauWorld.settings, **small, evaluate_tasks=1, real_budget=None, lora=False)
    monkeypatch.setattr(TauWorld, "settings", tiny)
    command = ["train", "tau-airline", "--iterations", "1", "--baseline", "sft"]
    command += ["--environment", "real"]  # of random weights no dream is readable
    result = CliRunner().invoke(app, [*command, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert {each.name for each in (tmp_path / "run" / "models").iterdir()} >= {"base", "trained"}
    with ReplayBuffer(tmp_path / "run" / "replay.db") as buffer:
        (row,) = buffer.metrics("train")
        played = list(buffer.trajectories(run="train"))
    assert row["iteration"] == 0 and len(played) == row["episodes"] >= 4 and row["failed_episodes"] < row["episodes"]
    assert any(step.decided_by == "user" for each in played for step in each.steps)


@pytest.mark.slow
def test_imitation_learns_all_that_the_agent_said_and_called() -> None:
    pytest.importorskip("trl", reason="needs trl")
    from tiny_models import create_tokenizer

    world = TauWorld("airline", folder())
    recorded = [each for each in world.conversations if each.success][:3]
    texts = [text for each in recorded for step in each.steps for text in step_texts(step)]
    tokenizer = create_tokenizer(texts, vocab_size=4096)
    rows = world.policy_rows(recorded, tokenizer, max_new_tokens=4096)
    assert len(rows) == len(recorded), "one segment each"
    for trajectory, row in zip(recorded, rows, strict=True):
        runs = groupby(zip(row.segment.token_ids, row.segment.sampled, strict=True), lambda pair: pair[1])
        spans = [tokenizer.decode([token for token, _ in run]) for learned, run in runs if learned]
        acts = [parse_action(step.action) for step in trajectory.steps]
        assert len(spans) == len(acts) and sum(isinstance(act, str) for act in acts) > 2
        for act, span in zip(acts, spans, strict=True):
            values = [] if isinstance(act, str) else [each for each in act.arguments.values() if isinstance(each, str)]
            texts = [act] if isinstance(act, str) else [act.name, *values]
            assert all(text[:40] in span for text in texts)


def step_texts(step: Step) -> tuple[str, str]:
    return step.action, step.next_observation


class Repeats(BaseChatModel):
    """Says again what was recorded."""

    recorded: Trajectory
    said: int = 0

    @property
    def _llm_type(self) -> str:
        return "repeats"

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        action = parse_action(self.recorded.steps[self.said].action)
        self.said += 1
        message = AIMessage(action) if isinstance(action, str) else call(action.name, **action.arguments)
        return ChatResult(generations=[ChatGeneration(message=message)])


@pytest.mark.slow
async def test_recorded_conversations_are_held_again_by_the_agent() -> None:
    """They end as recorded, with the recorded reward; the answers are, but those of `get_user_details`."""
    world, played = TauWorld("airline", folder()), 0
    for recorded in world.conversations[::8]:
        agent = world.agent(Repeats(recorded=recorded), real=True)
        (episode,) = await rollout(agent, [recorded.task], source="real")
        said, known = ([parse_action(step.action) for step in each.steps] for each in (episode, recorded))
        assert episode.error is None and said == known
        assert episode.steps[-1].terminated and episode.reward == recorded.reward and episode.success == recorded.success
        for step, then in zip(episode.steps[:-1], recorded.steps, strict=False):
            changed = getattr(parse_action(step.action), "name", "") == "get_user_details"
            assert step.next_observation == then.next_observation or changed
        played += 1
    assert played == 17
