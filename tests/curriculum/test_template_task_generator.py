"""Variations by templates: whose values they take, what has to agree, and what is refused."""

import json
import random
from dataclasses import replace

import pytest
from desk_traces import SYSTEM, Call, recorded, trace, traces

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.curriculum.template_task_generator import TemplateTaskGenerator
from dreamgym_lg.types import Task, Trajectory

TRACES = traces(120)


def calls(trajectory: Trajectory) -> list[ToolCall]:
    return [action for step in trajectory.steps if isinstance(action := parse_action(step.action), ToolCall)]


def references(task: Task) -> list[ToolCall]:
    found = [parse_action(text) for text in task.metadata["reference_calls"]]
    return [call for call in found if isinstance(call, ToolCall)]


def orders() -> dict[str, dict[str, object]]:
    """What the traces say of each order."""
    return {(record := json.loads(each.steps[0].next_observation))["order"]: record for each in TRACES}


@pytest.mark.parametrize("seed", range(60))
def test_a_variation_keeps_the_request_and_takes_every_value_from_one_other_trace(seed: int) -> None:
    parent = TRACES[seed]
    varied = TemplateTaskGenerator(TRACES)(parent.task, [], random.Random(seed))
    assert varied is not None
    asked, made = varied.metadata["observation"], references(varied)
    order = str(made[0].arguments["order_id"])
    record = orders()[order]
    assert order in asked and order != calls(parent)[0].arguments["order_id"]
    assert varied.instruction == f"{SYSTEM}\n\n{asked}" and asked not in {each.task.metadata["observation"] for each in TRACES}
    assert [call.name for call in made] == [call.name for call in calls(parent)]
    assert varied.metadata["customer"] == record["customer"], "the records of an order agree with each other"
    if made[-1].name == "refund":
        assert made[-1].arguments == {"order_id": order, "amount": record["amount"]} and record["status"] == "delivered"
    if made[-1].name == "set_address":
        assert str(made[-1].arguments["address"]) in asked and record["status"] == "shipped"


def test_a_variation_says_where_it_comes_from_and_how_it_is_judged() -> None:
    parent = trace(0, random.Random(0), kind="refund")
    generate = TemplateTaskGenerator([parent, *TRACES[1:]])
    varied = generate(parent.task, [], random.Random(0))
    assert varied is not None and varied.origin == "synthetic" and varied.parent_id == parent.task.id
    assert varied.metadata["generated"]["generator"] == "templates" and varied.metadata["generated"]["seed"] == parent.task.id
    assert f"the request of {parent.task.id} with the values of desk/" in varied.metadata["generated"]["why"]
    amount = references(varied)[-1].arguments["amount"]
    assert all(text in varied.metadata["rubric"] for text in varied.metadata["reference_calls"])
    assert f'"{amount} are refunded."' in varied.metadata["rubric"]
    again = generate(varied, [], random.Random(1))
    assert again is not None and again.parent_id == varied.id and again.id != varied.id
    assert generate(parent.task, [], random.Random(0)) == varied


def test_the_seed_tasks_own_rubric_gets_the_new_values() -> None:
    parent = trace(0, random.Random(0), kind="refund")
    amount, order = calls(parent)[-1].arguments["amount"], "A-1000"
    rubric = f"Exactly {amount} of {order} are refunded; A-10001 is another order."
    parent = replace(parent, task=replace(parent.task, metadata={**parent.task.metadata, "rubric": rubric}))
    varied = TemplateTaskGenerator([parent, *TRACES[1:]])(parent.task, [], random.Random(0))
    assert varied is not None
    made = references(varied)[-1].arguments
    assert (
        varied.metadata["rubric"] == f"Exactly {made['amount']} of {made['order_id']} are refunded; A-10001 is another order."
    )


def test_a_condition_has_to_be_the_same() -> None:
    """The only other orders are cancelled: what a refund of those does is not known."""
    parent = trace(0, random.Random(0), kind="refund")
    others = [
        recorded(
            f"w/{n}",
            f"Where is order B-{n}?",
            [("lookup_order", {"order_id": f"B-{n}"}, json.dumps({**ANSWER, "order": f"B-{n}", "status": "cancelled"}))],
            "It is cancelled.",
        )
        for n in range(20)
    ]
    assert TemplateTaskGenerator([parent, *others])(parent.task, [], random.Random(0)) is None


ANSWER = {"order": "", "status": "delivered", "customer": "C-1", "amount": 50}


def refund(order: str, amount: float, status: str = "delivered", tool: str = "refund") -> Trajectory:
    answer = {**ANSWER, "order": order, "amount": amount, "status": status}
    done = [("lookup_order", {"order_id": order}, json.dumps(answer)), (tool, {"order_id": order, "amount": amount}, "done")]
    return recorded(f"r/{order}", f"Refund {order}, order {order} is broken.", done, "Done.")


def look(order: str, amount: float) -> Trajectory:
    answer = json.dumps({**ANSWER, "order": order, "amount": amount})
    return recorded(f"l/{order}", f"Show {order}.", [("lookup_order", {"order_id": order}, answer)], "Here.")


@pytest.mark.parametrize(("amount", "possible"), [(60, True), (99, True), (300, False), (5, False)])
def test_an_amount_lies_between_those_of_the_successes_with_the_same_calls(amount: int, possible: bool) -> None:
    small = [refund(f"A-{n}", 20 + n) for n in range(80)]
    large = [refund(f"B-{n}", 500 + n, tool="escalate") for n in range(20)]
    generate = TemplateTaskGenerator([*small, *large, look("X-1", amount)])
    made = [generate(small[0].task, [], random.Random(seed)) for seed in range(40)]
    assert all(task is None or "B-" not in task.instruction for task in made)
    assert any(task is not None and "X-1" in task.instruction for task in made) == possible


def test_a_lookup_that_was_answered_in_two_ways_grounds_nothing() -> None:
    parent, changed = refund("A-1", 20), [look("A-2", 30), look("A-2", 40)]
    grounds = [refund("A-3", 50), *(refund(f"A-{n}", n) for n in range(10, 40))]
    for others, found in [(changed[:1], True), (changed, False)]:
        made = [TemplateTaskGenerator([parent, *grounds, *others])(parent.task, [], random.Random(s)) for s in range(60)]
        assert any(task is not None and "A-2," in task.instruction for task in made) == found


def test_an_argument_that_nothing_explains_is_not_made_up() -> None:
    """A write's token: from nowhere it cannot be carried over, from a lookup it can."""

    def asked(n: int, **facts: str) -> list[Call]:
        return [("lookup_order", {"order_id": f"A-{n}"}, json.dumps({**ANSWER, "order": f"A-{n}", **facts}))]

    write: list[Call] = [("refund", {"token": "t-1"}, "done")]
    for told in (True, False):
        parent, *others = (asked(n, **({"token": f"t-{n}"} if told else {})) for n in range(1, 12))
        seed = recorded("p", "Refund A-1.", [*parent, *write], "Done.")
        looked = [recorded(f"o/{n}", f"Show A-{n}.", each, "Here.") for n, each in enumerate(others, 2)]
        varied = TemplateTaskGenerator([seed, *looked])(seed.task, [], random.Random(0))
        assert (varied is not None) == told
        assert varied is None or references(varied)[1].arguments["token"] == f"t-{varied.metadata['observation'][9:-1]}"


def test_answers_in_plain_words_are_read_word_by_word() -> None:
    def booked(n: int, status: str = "open") -> Trajectory:
        answer = f"Room R-{n} is {status}, {40 + n} EUR."
        done = [("room", {"id": f"R-{n}"}, answer), ("book", {"id": f"R-{n}", "price": 40 + n}, "ok")]
        return recorded(f"b/{n}", f"Book R-{n} for me, room R-{n}.", done, f"R-{n} is booked.")

    rooms = [booked(n) for n in range(30)]
    closed = [recorded("c", "Is R-15x free?", [("room", {"id": "R-15x"}, "Room R-15x is closed, 55 EUR.")], "No.")]
    generate = TemplateTaskGenerator([*rooms, *closed])
    assert all(generate(rooms[0].task, [], random.Random(seed)) is None for seed in range(20)), "known, or of another kind"
    wanted = recorded("w", "Is R-15y free?", [("room", {"id": "R-15y"}, "Room R-15y is open, 55 EUR.")], "Yes.")
    made = [TemplateTaskGenerator([*rooms, wanted])(rooms[0].task, [], random.Random(seed)) for seed in range(20)]
    task = next(each for each in made if each is not None)
    assert task.metadata["observation"] == "Book R-15y for me, room R-15y."
    assert references(task)[-1] == ("book", {"id": "R-15y", "price": 55})


def test_no_seed_no_variation() -> None:
    failed = [replace(each, success=False) for each in TRACES]
    assert not TemplateTaskGenerator(failed).can_vary and not TemplateTaskGenerator([]).can_vary
    assert TemplateTaskGenerator(failed)(TRACES[0].task, [], random.Random(0)) is None
    assert TemplateTaskGenerator(TRACES).can_vary
    held_out = replace(TRACES[0].task, split="test")
    assert TemplateTaskGenerator(TRACES)(held_out, [], random.Random(0)) is None
    talk = [recorded(f"t/{n}", f"Hello {n}", [], "Hello.") for n in range(9)]
    assert not TemplateTaskGenerator(talk).can_vary, "an agent without tools"
