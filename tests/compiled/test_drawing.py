"""Tasks drawn from recorded successes: about entities that no trace holds, with a reference that holds in the world."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from compiled_shop import Shop, walled

from dreamgym_lg import Dream, ReplayBuffer, Step, Task, Trajectory, Verify
from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.drawing import draw, draw_tasks
from dreamgym_lg.compiled.entities import Records
from dreamgym_lg.compiled.identifiers import Renaming
from dreamgym_lg.compiled.imputation import Imputed
from dreamgym_lg.compiled.responder import Compiled, compiled_dream
from dreamgym_lg.dream import Episode, TraceIndex
from dreamgym_lg.dream.facts import message_text
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Split

WRITES = ("refund", "move", "note")
pytestmark = walled


def _episode(number: int, split: Split = "train") -> Trajectory:
    """A request about order K<number>; every second policy refunds without a look, and is right by luck."""
    shop = Shop(Random(number), number)
    order, customer = f"K{number}", f"C{number}"
    record = shop.orders[order]
    right = record["status"] == "sent" and record["total"] <= 100
    asks = number % 3 == 0
    calls: list[tuple[str, dict[str, Any]]] = [("get_order", {"order_id": order})] if number % 2 or asks else []
    if asks:
        calls.append(("get_customer", {"customer_id": customer}))
        message = f"It is {record['status']}, for {shop.customers[customer]['city']}."
    else:
        calls.append(("refund", {"order_id": order}))
        message = f"Order {order} is paid back."
    instruction = f"Where is {order}?" if asks else f"Pay {order} back."
    steps, observation = [], instruction
    for tool, arguments in calls:
        answer = shop.call(tool, arguments)
        steps.append(Step(observation=observation, action=render_call(tool, arguments), next_observation=answer))
        observation = answer
    success = asks or right
    last = Step(observation=observation, action=render_answer(message), next_observation="", reward=success, terminated=True)
    task = Task(
        id=f"shop/{number}",
        instruction=instruction,
        environment="shop",
        messages=[{"role": "user", "content": instruction}],
        tools=[*WRITES, "get_order", "get_customer"],
        split=split,
    )
    return Trajectory(task=task, steps=[*steps, last], success=success)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TraceIndex, Compiled]]:
    replay_buffer = ReplayBuffer(":memory:")
    replay_buffer.extend(_episode(1000 + number, "test" if number >= 300 else "train") for number in range(330))
    folder = tmp_path_factory.mktemp("world")
    writes = ["refund"]
    compile_world(replay_buffer, folder, writes=writes, on_progress=lambda *_: None)
    world = Compiled(folder)
    yield TraceIndex(replay_buffer, writes=writes), world
    world.close()


def _play(index: TraceIndex, folder: Path, task: Task, *actions: str) -> Any:
    environment = compiled_dream(folder, index).create_environment()
    environment.reset(task)
    results = [environment.step(action) for action in actions]
    return results[-1]


def test_drawn_tasks_are_about_new_entities_and_their_references_hold(shop: Any) -> None:
    index, world = shop
    drawn = draw_tasks(world, index, 60, seed=1)
    assert len(drawn.tasks) == 60 and list(drawn.dropped) == ["successes that guessed where others looked first"]
    stored = index.replay_buffer.tasks()
    recorded = {task.instruction for task in stored}
    assert len({task.id for task in drawn.tasks}) == 60
    for task in drawn.tasks:
        assert (task.origin, task.split) == ("synthetic", "train") and task.instruction not in recorded
        assert task.messages[0]["content"] == task.instruction
        (order,) = (word.strip(".?") for word in task.instruction.split() if word.startswith("K"))
        (document,) = (answer for tool, _, answer in task.drawn["documents"] if tool == "get_order")
        assert json.loads(document)["id"] == order, "what the reference did not look up is there, too"
        assert _play(index, world.folder, task, *(action for action, _ in task.drawn["steps"])).info["success"]


def test_a_guess_that_was_right_is_drawn_only_where_nobody_knew(shop: Any) -> None:
    """Else all tasks would be in the states where the guess is right, and pay it."""
    index, world = shop
    assert not [task for task in draw_tasks(world, index, 60, seed=1).tasks if len(task.drawn["steps"]) == 2]
    guesses = ReplayBuffer(":memory:")
    guesses.extend(_episode(1000 + number) for number in range(300) if number % 2 == 0)
    tasks = [
        t for t in draw_tasks(world, TraceIndex(guesses, writes=["refund"]), 60, seed=1).tasks if len(t.drawn["steps"]) == 2
    ]
    assert tasks
    for task in tasks:
        order = json.loads(next(answer for tool, _, answer in task.drawn["documents"] if tool == "get_order"))
        assert order["status"] == "sent" and order["total"] <= 100
        (_, answer), _ = task.drawn["steps"]
        assert json.loads(answer) == {**order, "status": "refunded"}, "the world's answer, not that of another order"


def test_the_judge_decides_drawn_tasks_by_end_state_and_facts(shop: Any) -> None:
    index, world = shop
    tasks = draw_tasks(world, index, 60, seed=1).tasks
    asking = next(task for task in tasks if task.instruction.startswith("Where"))
    paying = next(task for task in tasks if task.instruction.startswith("Pay"))
    *looks, message = (action for action, _ in asking.drawn["steps"])
    other = next(city for city in ("Oslo", "Lund", "Bern") if city not in message)
    assert not _play(index, world.folder, asking, *looks, render_answer("Done.")).info["success"]
    assert not _play(index, world.folder, asking, *looks, message.replace('."', f', or for {other}."')).info["success"]
    *calls, message = (action for action, _ in paying.drawn["steps"])
    assert not _play(index, world.folder, paying, message).info["success"]
    customer = next(own["customer_id"] for tool, own, _ in paying.drawn["documents"] if tool == "get_customer")
    look = render_call("get_customer", {"customer_id": customer})
    assert _play(index, world.folder, paying, look, *calls, message).info["success"]
    wrong = _play(index, world.folder, paying, *calls, render_answer("Order K7 is paid back for 99.99."))
    assert "which nothing in the episode shows" in wrong.info["reasoning"]


def test_the_same_seed_draws_the_same_tasks_and_a_buffer_keeps_them(shop: Any, tmp_path: Path) -> None:
    index, world = shop
    drawn = draw_tasks(world, index, 9, seed=4).tasks
    assert drawn == draw_tasks(world, TraceIndex(index.replay_buffer, writes=["refund"]), 9, seed=4).tasks
    assert drawn != draw_tasks(world, index, 9, seed=5).tasks
    with ReplayBuffer(tmp_path / "replay.db") as replay_buffer:
        replay_buffer.add_tasks(drawn)
        stored = replay_buffer.tasks(origin="synthetic")
    assert [task.drawn for task in stored] == [json.loads(json.dumps(task.drawn)) for task in drawn]
    assert _play(index, world.folder, stored[0], *(action for action, _ in stored[0].drawn["steps"])).info["success"]


def test_what_does_not_verify_is_dropped_with_its_reason(shop: Any) -> None:
    index, world = shop
    rules = json.loads((world.folder / "rules.json").read_text())
    refused = {**rules, "admitted": {**rules["admitted"], "refund": False}}
    (world.folder / "rules.json").write_text(json.dumps(refused))
    other = Compiled(world.folder)
    drawn = draw_tasks(other, index, 60, seed=1)
    (world.folder / "rules.json").write_text(json.dumps(rules))
    other.close()
    assert "refund is not answered" in drawn.dropped and len(drawn.tasks) > 20
    assert all(task.instruction.startswith("Where") for task in drawn.tasks)
    with ReplayBuffer(":memory:") as failures, pytest.raises(ConfigurationError, match="none of the 9 .* nothing to draw"):
        failures.extend([each for each in map(_episode, range(1000, 1100)) if not each.success][:9])
        draw_tasks(world, TraceIndex(failures, writes=["refund"]), 1)


def _listed(number: int) -> Trajectory:
    """A request about an order, which is listed among its customer's, looked up, or both."""
    customer, order, status = f"C{number}", f"K{number}", ("open", "sent", "paid")[number % 7 % 3]
    listed = json.dumps({"orders": [{"id": order, "status": status, "asked": 1}]})
    document = json.dumps({"id": order, "customer": customer, "status": status, "asked": 1 + number % 5})
    look, both = (render_call("get_order", {"order_id": order}), document), number % 3 == 2
    calls = [(render_call("list_orders", {"customer_id": customer}), listed)] if both or number % 2 else [look]
    calls += [*([look] if both else []), (render_call("refund", {"order_id": order}), "ok")]
    instruction = f"Pay {order} of {customer} back." if both else f"Pay the order of {customer} back."
    instruction = instruction if both or number % 2 else f"Pay {order} back."
    observations = [instruction, *(answer for _, answer in calls)]
    steps = [
        Step(observation=before, action=call, next_observation=answer)
        for before, (call, answer) in zip(observations, calls, strict=False)
    ]
    last = Step(
        observation="ok", action=render_answer(f"{order} is paid back."), next_observation="", reward=1, terminated=True
    )
    tools = ["list_orders", "get_order", "refund"]
    task = Task(id=f"list/{number}", instruction=instruction, environment="shop", tools=tools)
    return Trajectory(task=task, steps=[*steps, last], success=True)


def test_documents_of_one_entity_agree_where_recorded_ones_do(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path / "replay.db")
    buffer.extend([_listed(number) for number in range(1000, 1060)])
    (index := TraceIndex(buffer, writes=["refund"])).refresh()
    records = Records(index, list(buffer.real_trajectories()), None)
    statuses, asked = set[str](), Counter[bool]()
    for base in (each for each in records.all if len(each.documents) == 2):  # the request, and a list or an order
        drawn = draw(records, base, Random(1))
        assert isinstance(drawn, Task)
        documents = {tool: json.loads(answer) for tool, _, answer in drawn.drawn["documents"]}
        (listed,), order = documents["list_orders"]["orders"], documents["get_order"]
        assert (order["id"], order["status"]) == (listed["id"], listed["status"])
        statuses.add(order["status"])
        asked[order["asked"] == listed["asked"]] += 1
    assert statuses == {"open", "sent", "paid"} and asked[False], "a field that differs in some recorded ones is the donor's"
    buffer.close()


def test_a_renaming_changes_whole_ids_alone_and_knows_what_it_left() -> None:
    renaming = Renaming({"K12": "K99", "Mara Lind": "Ida Kern", "Mara": "Ida", "Lind": "Kern", "345": "678"})
    assert renaming("K12, K123 and Mara Lind") == "K99, K123 and Ida Kern"
    assert renaming({"K12": [345, "Lind", True, None]}) == {"K99": [678, "Kern", True, None]}
    assert renaming.left_in("order 345 of mara") == ["345", "mara"] and not renaming.left_in("order 678 of Ida")


# --- entities that no trace looked up -------------------------------------------------------------------------------------


def _guessed(index: TraceIndex) -> list[Task]:
    """Training tasks whose trace refunded without a look."""
    recorded = index.replay_buffer.trajectories(source="offline", split="train")
    return [each.task for each in recorded if len(each.steps) == 2]


def test_an_entity_that_no_trace_looked_up_gets_a_recorded_state_of_another(shop: Any) -> None:
    index, world = shop
    imputed = Imputed(world, index, seed=1)
    dream = Dream([imputed, *compiled_dream(world.folder, index).responders], judges=[Verify(lambda task, steps: 1.0)])
    recorded = [json.loads(document) for trace in _orders(index) for document in trace]
    states = set[str]()
    for task in _guessed(index)[:40]:
        order = next(word.strip(".") for word in task.instruction.split() if word.startswith("K"))
        environment = dream.create_environment()
        environment.reset(task)
        look = environment.step(render_call("get_order", {"order_id": order}))
        document = json.loads(look.observation)
        assert look.info["decided_by"] == "imputed" and document["id"] == order
        assert {**document, "id": "", "customer": ""} in [{**each, "id": "", "customer": ""} for each in recorded]
        assert document["customer"] not in {each["customer"] for each in recorded}
        other = environment.step(render_call("get_customer", {"customer_id": document["customer"]}))
        assert json.loads(other.observation)["id"] == document["customer"], "what it names is there, too"
        refund = environment.step(render_call("refund", {"order_id": order}))
        right = document["status"] == "sent" and document["total"] <= 100
        assert (
            (json.loads(refund.observation) == {**document, "status": "refunded"}) == right
            if "{" in refund.observation
            else not right
        )
        states.add(document["status"])
        assert [tool for tool, *_ in imputed.documents(task)] == ["get_order", "get_customer"]
    assert states == {"open", "sent", "paid"}, "also those in which the recorded guess was wrong"


def test_all_episodes_of_a_task_see_the_same_imputed_state(shop: Any) -> None:
    index, world = shop
    tasks = _guessed(index)[:20]
    responders = [Imputed(world, index, seed=seed) for seed in (1, 1, 2)]
    first, again, other = ([each.documents(task) for task in tasks] for each in responders)
    assert first == again != other
    unknown = Task(id="new", instruction="Pay K4444 back.", environment="shop")
    (order, arguments, answer), *_ = Imputed(world, index).documents(unknown)
    assert (order, arguments, json.loads(answer)["id"]) == ("get_order", {"order_id": "K4444"}, "K4444")


def test_a_held_out_task_gets_no_made_up_state(shop: Any) -> None:
    index, world = shop
    call = render_call("get_order", {"order_id": "K4444"})
    for split, answered in (("train", True), ("validation", False), ("test", False)):
        task = Task(id=f"new/{split}", instruction="Pay K4444 back.", environment="shop", split=split)
        assert (Imputed(world, index).respond(Episode(task=task, steps=(), action=call)) is not None) == answered


def test_the_documented_check_is_shown_the_state_that_the_policy_saw(
    shop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, world = shop
    page = Path(__file__).parents[2] / "docs" / "how-to" / "compiled-world.md"
    namespace = dict[str, Any]()
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text().partition("## New tasks")[0], re.MULTILINE | re.DOTALL):
        exec(block, namespace)
    namespace["replay_buffer"].extend(index.replay_buffer.trajectories(source="offline"))
    shown = list[Any]()

    def check(task: Task, steps: list[Step], documents: list[Any]) -> float:
        shown.append(documents)
        return float(message_text(steps[-1].action) == json.loads(documents[0][2])["status"])

    environment = namespace["create_imputed_dream"](str(world.folder), check).create_environment()
    task = _guessed(index)[0]
    environment.reset(task)
    order = next(word.strip(".") for word in task.instruction.split() if word.startswith("K"))
    seen = environment.step(render_call("get_order", {"order_id": order}))
    end = environment.step(render_answer(json.loads(seen.observation)["status"]))
    assert end.terminated and end.reward == 1 and shown[0][0] == ["get_order", {"order_id": order}, seen.observation]
    namespace["replay_buffer"].close()


def test_what_a_trace_looked_up_is_not_imputed(shop: Any) -> None:
    index, world = shop
    recorded = index.replay_buffer.trajectories(source="offline", split="train")
    asked = next(each for each in recorded if len(each.steps) == 3 and "get_customer" in each.steps[1].action)
    documents = Imputed(world, index).documents(asked.task)
    assert [answer for *_, answer in documents] == [step.next_observation for step in asked.steps[:2]]


def _orders(index: TraceIndex) -> Iterator[list[str]]:
    for each in index.replay_buffer.trajectories(source="offline", split="train"):
        yield [step.next_observation for step in each.steps if "get_order" in step.action]
