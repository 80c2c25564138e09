"""Variations by templates: whose values they take, what has to agree, and what is refused."""

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from desk_traces import SYSTEM, WRITES, Call, recorded, trace, traces

from dreamgym_lg.actions import ToolCall, parse_action, render_answer, render_call
from dreamgym_lg.curriculum.demonstrations import demonstration, told_by_calls
from dreamgym_lg.curriculum.plays import intents_problem
from dreamgym_lg.curriculum.template_task_generator import TemplateTaskGenerator
from dreamgym_lg.types import Task, Trajectory

TRACES = traces(120)


def generator(trajectories: Sequence[Trajectory]) -> TemplateTaskGenerator:
    return TemplateTaskGenerator(trajectories, writes=WRITES.__contains__)


def calls(trajectory: Trajectory) -> list[ToolCall]:
    return [action for step in trajectory.steps if isinstance(action := parse_action(step.action), ToolCall)]


def references(task: Task) -> list[ToolCall]:
    found = [parse_action(text) for text in task.metadata["reference_calls"]]
    return [call for call in found if isinstance(call, ToolCall)]


def orders() -> dict[str, dict[str, object]]:
    """What the traces say of each order."""
    return {(record := json.loads(each.steps[0].next_observation))["order"]: record for each in TRACES}


def test_a_variation_can_be_demonstrated_with_what_was_recorded() -> None:
    recorded_answers = {step.action: step.next_observation for each in TRACES for step in each.steps}
    written = Counter[str]()
    for seed in range(60):
        varied = generator(TRACES)(TRACES[seed].task, [], random.Random(seed))
        assert varied is not None and (shown := demonstration(varied)) is not None
        assert shown.task == varied and shown.success and shown.steps[-1].terminated and shown.reward == 1.0
        assert [step.action for step in shown.steps[:-1]] == varied.metadata["reference_calls"]
        assert shown.steps[0].observation == varied.metadata["observation"]
        for step in shown.steps[:-1]:
            call = parse_action(step.action)
            assert isinstance(call, ToolCall)
            written[call.name] += 1
            assert call.name in WRITES or step.next_observation == recorded_answers[step.action]
        reply, last = parse_action(shown.steps[-1].action), references(varied)[-1]
        if last.name == "refund":
            assert reply == f"{last.arguments['amount']} are refunded."
    assert written["refund"] > 5
    told = [replace(each, steps=[*each.steps[:-1], replace(each.steps[-1], action=render_answer(f"Done, Mr Poe: {7000 + n}."))])
            for n, each in enumerate(TRACES)]  # fmt: skip
    made = [generator(told)(each.task, [], random.Random(0)) for each in told[:20]]
    assert all(each is None or each.metadata["reference_reply"] == "" for each in made), "nobody knows where its number is from"
    assert told_by_calls([shown] * 3, []) == f"3 {', '.join(call.name for call in references(varied))}"
    many = [replace(shown, steps=[replace(shown.steps[0], action=render_call(f"t{n}", {}))]) for n in range(10)]
    assert told_by_calls(many[:1] * 2, many[:2]) == "2 t0; none of these recorded successes: 1 t1"
    assert told_by_calls(many, []).startswith("1 t0; 1 t1; ") and told_by_calls(many, many).endswith("; 2 of 2 other kinds")
    silent = replace(varied, metadata={**varied.metadata, "reference_reply": ""})
    assert demonstration(silent) is None and demonstration(TRACES[0].task) is None


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (lambda n: {"in_stock": n % 2 == 0}, lambda n: "Yes, it is in stock." if n % 2 == 0 else "No, it is sold out."),
        (lambda n: {"status": ("sent", "there")[n % 2]}, lambda n: "It is on its way." if n % 2 == 0 else "It has arrived."),
        (lambda n: {"age": n % 60}, lambda n: "It is too late." if n % 60 > 30 else "Send it back within 14 days."),
    ],
)
def test_a_demonstrated_answer_is_what_was_said_in_this_case(field: Any, said: Any) -> None:
    """The calls are the same in every case; the success at hand may have been in another one than the variation."""

    def question(n: int) -> Trajectory:
        order, wording = f"A-{3000 + n}", ("How is order {}, please?", "Please tell me how order {} is.")[n % 3 == 0]
        looked_up: list[Call] = [("lookup_order", {"order_id": order}, json.dumps({"order": order, **field(n)}))]
        return recorded(f"desk/{n}", wording.format(order), looked_up, said(n))

    asked = [question(n) for n in range(60)]
    generate, right = generator([*asked, *traces(60, seed=3)]), 0
    for n in range(60):
        varied = generate(asked[n].task, [], random.Random(n))
        if varied is not None and (reply := varied.metadata["reference_reply"]):
            assert reply == said(int(references(varied)[0].arguments["order_id"].removeprefix("A-")) - 3000)
            right += 1
        assert varied is None or reply or "An answer that fits" not in varied.metadata["rubric"]
    assert right > 10 or "age" in field(0), "where a number decides, nobody knows from which on"


def test_a_call_whose_value_the_request_says_in_other_words_keeps_those_words() -> None:
    def booking(n: int) -> Trajectory:
        nights, name = n % 3 + 2, f"BK-{4000 + n}"
        asked = f"Please book room {name} for {('two', 'three', 'four')[n % 3]} nights{', thanks' if n % 2 else ''}."
        calls: list[Call] = [
            ("lookup_order", {"order_id": name}, json.dumps({"room": name, "price": 100 * nights + n})),
            ("book", {"room": name, "nights": nights}, "ok"),
        ]
        return recorded(f"desk/{n}", asked, calls, f"{name} is booked.")

    generate, found = generator([*(bookings := [booking(n) for n in range(60)]), *traces(60, seed=3)]), 0
    for n in range(60):
        if (varied := generate(bookings[n].task, [], random.Random(n))) is not None:
            word = {2: "two", 3: "three", 4: "four"}[references(varied)[-1].arguments["nights"]]
            assert f"for {word} nights" in varied.metadata["observation"]
            found += 1
    assert found > 10


def test_a_request_and_its_calls_agree_on_what_has_few_values() -> None:
    """Three nights are no value of their own, as many ask for them: the words of one request came with another's nights."""

    def booking(number: int) -> Trajectory:
        name, nights, rng = f"BK-{4000 + number}", number % 4 + 1, random.Random(number)
        asked = f"Move booking {name} to 2026-03-{rng.randint(10, 28)}{f' for {nights} nights' if nights > 1 else ''}."
        calls: list[Call] = [
            ("get_order", {"order_id": name}, json.dumps({"booking": name, "guest": f"G{number}"})),
            ("set_address", {"order_id": name, "date": asked.split()[4].rstrip("."), "nights": nights}, "ok"),
        ]
        return recorded(f"desk/{number}", asked, calls, f"{name} is moved.")

    generate, found = generator([*(bookings := [booking(number) for number in range(40)]), *TRACES]), 0
    for number in range(40):
        if (varied := generate(bookings[number].task, [], random.Random(number))) is not None:
            said = re.search(r"for (\d) nights", varied.metadata["observation"])
            assert references(varied)[-1].arguments["nights"] == (int(said[1]) if said else 1)
            found += 1
    assert found > 10


@pytest.mark.parametrize("seed", range(60))
def test_a_variation_keeps_the_request_and_takes_every_value_from_one_other_trace(seed: int) -> None:
    parent = TRACES[seed]
    varied = generator(TRACES)(parent.task, [], random.Random(seed))
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
    generate = generator([parent, *TRACES[1:]])
    varied = generate(parent.task, [], random.Random(0))
    assert varied is not None and varied.origin == "synthetic" and varied.parent_id == parent.task.id
    made_from = varied.metadata["generated"]
    assert made_from["generator"] == "templates" and made_from["seed"] in {each.task.id for each in [parent, *TRACES]}
    assert re.search(r"the request of desk/\d+ with the values of desk/\d+, whose answers are recorded", made_from["why"])
    amount = references(varied)[-1].arguments["amount"]
    assert all(text in varied.metadata["rubric"] for text in varied.metadata["reference_calls"])
    assert f'"{amount} are refunded."' in varied.metadata["rubric"]
    again = generate(varied, [], random.Random(1))
    assert again is not None and again.parent_id == varied.id and again.id != varied.id
    assert generate(parent.task, [], random.Random(0)) == varied


def test_the_rubric_of_the_success_that_is_carried_over_gets_the_new_values() -> None:
    def with_rubric(success: Trajectory) -> Trajectory:
        order, amount = calls(success)[-1].arguments["order_id"], calls(success)[-1].arguments["amount"]
        rubric = f"Exactly {amount} of {order} are refunded; A-10001 is another order."
        return replace(success, task=replace(success.task, metadata={**success.task.metadata, "rubric": rubric}))

    parent = trace(0, random.Random(0), kind="refund")
    varied = generator([with_rubric(each) if calls(each)[-1].name == "refund" else each for each in [parent, *TRACES[1:]]])(
        parent.task, [], random.Random(0)
    )
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
    assert generator([parent, *others])(parent.task, [], random.Random(0)) is None


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
    generate = generator([*small, *large, look("X-1", amount)])
    made = [generate(small[0].task, [], random.Random(seed)) for seed in range(40)]
    assert all(task is None or "B-" not in task.instruction for task in made)
    assert any(task is not None and "X-1" in task.instruction for task in made) == possible


def test_a_lookup_that_was_answered_in_two_ways_grounds_nothing() -> None:
    parent, changed = refund("A-1", 20), [look("A-2", 30), look("A-2", 40)]
    grounds = [refund("A-3", 50), *(refund(f"A-{n}", n) for n in range(10, 40))]
    for others, found in [(changed[:1], True), (changed, False)]:
        made = [generator([parent, *grounds, *others])(parent.task, [], random.Random(s)) for s in range(60)]
        assert any(task is not None and "A-2," in task.instruction for task in made) == found


def test_an_argument_that_nothing_explains_is_not_made_up() -> None:
    """A write's token: from nowhere it cannot be carried over, from a lookup it can."""

    def asked(n: int, **facts: str) -> list[Call]:
        return [("lookup_order", {"order_id": f"A-{n}"}, json.dumps({**ANSWER, "order": f"A-{n}", **facts}))]

    for told in (True, False):
        facts = {n: {"token": f"t-{n}"} if told else {} for n in range(20)}
        write = {n: ("refund", {"token": f"t-{n}"}, "done") for n in range(6)}
        seeds = [recorded(f"s/{n}", f"Refund A-{n}.", [*asked(n, **facts[n]), write[n]], "Done.") for n in range(6)]
        looked = [recorded(f"o/{n}", f"Show A-{n}.", asked(n, **facts[n]), "Here.") for n in range(6, 20)]
        varied = generator([*seeds, *looked])(seeds[0].task, [], random.Random(0))
        assert (varied is not None) == told
        assert varied is None or references(varied)[1].arguments["token"] == f"t-{varied.metadata['observation'][9:-1]}"


@pytest.mark.parametrize(("fees", "expected"), [([25] * 6, {25}), ([25] * 5 + [30], set()), ([25] * 2, set())])
def test_a_fee_that_no_answer_tells_is_a_fixed_one_if_it_was_always_the_same(fees: list[int], expected: set[int]) -> None:
    def late(n: int, fee: int) -> Trajectory:
        order = f"A-{5000 + n}"
        record = {"order": order, "status": "delivered", "customer": f"C-{n}", "amount": 10 + 35 * n}
        calls: list[Call] = [
            ("lookup_order", {"order_id": order}, json.dumps(record)),
            ("refund", {"order_id": order, "amount": fee}, "done"),
        ]
        return recorded(f"late/{n}", f"My parcel {order} came three days late.", calls, "You get something back for that.")

    some = [late(n, fee) for n, fee in enumerate(fees)]
    made = [generator([*TRACES, *some])(each.task, [], random.Random(seed)) for each in some for seed in range(5)]
    assert {call.arguments["amount"] for each in made if each for call in references(each)[1:]} == expected


def test_a_success_that_looked_up_less_than_most_is_no_seed() -> None:
    lucky = recorded(
        "lucky", "Refund A-0, order A-0 is broken.", [("refund", {"order_id": "A-0", "amount": 30}, "done")], "Done."
    )
    careful = [refund(f"A-{n}", 20 + n) for n in range(1, 20)]
    assert generator([lucky, *careful])(lucky.task, [], random.Random(0)) is None
    assert generator([lucky, *careful])(careful[0].task, [], random.Random(0)) is None, "every other request is known"
    assert generator([lucky, *careful, look("X-1", 30)])(careful[0].task, [], random.Random(0)) is not None
    own = [replace(each.task, id=f"mine-{each.task.id}") for each in (lucky, careful[0])]
    assert [generator([lucky, *careful]).by_luck(task) for task in own] == [True, False], "by the words, whatever the id"


def test_a_value_that_no_call_or_answer_holds_is_exchanged_for_one_that_is_written_alike() -> None:
    """The book that somebody with an expired card asks for is never looked up; a loan's id is no book's."""

    def asked(n: int, letter: str, words: str) -> Trajectory:
        subject, answer = f"{letter}{1000 + n}", json.dumps({"name": f"n{n}", "card": "expired"})
        done: list[Call] = [("get_member", {"member_id": f"M{n + 2000}"}, answer)]
        said = f"{words} {subject}, I am M{n + 2000}."
        return recorded(f"{letter}/{n}", said, done, "Your card is expired.", metadata={"subject": subject})

    books = [asked(n, "B", "I want to have book") for n in range(10)]
    for letter in ("B", "L"):
        others = [asked(n, letter, "Please waive what is to be paid for loan") for n in range(10, 40)]
        varied = generator([*books, *others])(books[0].task, [], random.Random(0))
        assert (varied is not None) == (letter == "B")
        assert varied is None or re.fullmatch(r"I want to have book B10\d\d, I am M20\d\d\.", varied.metadata["observation"])


def returned(n: int, status: str, tool: str, who: str = "Ada Berg") -> Trajectory:
    answer = json.dumps({**ANSWER, "order": f"A-{n}", "status": status})
    done: list[Call] = [("lookup_order", {"order_id": f"A-{n}"}, answer), (tool, {"order_id": f"A-{n}"}, "done")]
    return recorded(f"b/{n}", f"{who} here, I want my money back for order A-{n}.", done, "Done.")


def test_the_same_words_by_the_same_customer_come_with_other_outcomes() -> None:
    """A policy that knows by the name what has to be done gets along with a request's own calls alone."""
    people = [f"{first} Berg" for first in ("Ada", "Ben", "Cleo", "Dan", "Eva", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo")]
    done = {"open": "cancel", "delivered": "refund", "shipped": "escalate"}
    traces = [returned(n, list(done)[n % 3], done[list(done)[n % 3]], people[n % 11]) for n in range(90)]
    generate, made = generator(traces), set[tuple[str, str]]()
    for seed in range(60):
        varied = generate(traces[0].task, [], random.Random(seed))
        assert varied is not None
        order, (_, write) = str(references(varied)[0].arguments["order_id"]), references(varied)
        assert write.name == done[list(done)[int(order[2:]) % 3]], "as the new order's status asks"
        made.add((varied.metadata["observation"].partition(" ")[0], write.name))
    assert len(made) > 20, "of 11 customers, in 3 cases"


def test_a_case_in_which_successes_differ_is_not_varied() -> None:
    """Something that no lookup tells decides: who else gets it is not known."""
    agreed = [returned(n, "open", "refund") for n in range(20)]
    assert generator([*agreed, look("X-1", 30)]).can_vary
    new = [recorded(f"n/{n}", f"Show B-{n}.", calls_of(n), "Here.") for n in range(20)]
    contested = [returned(n, "open", "escalate") for n in range(20, 40)]
    assert generator([*agreed, *new])(agreed[0].task, [], random.Random(0)) is not None
    assert generator([*agreed, *new, *contested])(agreed[0].task, [], random.Random(0)) is None


def calls_of(n: int) -> list[Call]:
    return [("lookup_order", {"order_id": f"B-{n}"}, json.dumps({**ANSWER, "order": f"B-{n}", "status": "open"}))]


def test_the_second_of_two_orders_makes_a_case_of_its_own() -> None:
    def both(n: int, first: str, second: str) -> Trajectory:
        done = list[Call]()
        for order, status in ((f"A-{n}", first), (f"B-{n}", second)):
            done.append(("lookup_order", {"order_id": order}, json.dumps({"order": order, "status": status})))
            done.append(({"open": "cancel", "delivered": "refund"}[status], {"order_id": order}, "done"))
        return recorded(f"b/{n}", f"Take back A-{n} and B-{n}.", done, "Done.")

    cases = [("open", "delivered"), ("delivered", "open"), ("open", "open")]
    traces = [both(n, *cases[n % 3]) for n in range(60)]
    others = [replace(both(n, *cases[n % 3]), success=False) for n in range(60, 90)]
    others = [replace(each, task=replace(each.task, metadata={"observation": f"Show {each.task.id}."})) for each in others]
    generate = generator([*traces, *others])
    found = [references(task) for seed in range(40) if (task := generate(traces[0].task, [], random.Random(seed))) is not None]
    assert len(found) > 20
    for calls_made in found:
        orders_asked = [str(call.arguments["order_id"]) for call in calls_made[::2]]
        wanted = tuple(cases[int(order[2:]) % 3][order[0] == "B"] for order in orders_asked)
        assert wanted in cases, "two delivered ones have not been seen"
        assert [call.name for call in calls_made[1::2]] == [{"open": "cancel", "delivered": "refund"}[each] for each in wanted]


def test_what_is_dear_to_one_tier_and_not_to_another() -> None:
    """The tier comes with the first answer, the amount with the second: together they make the case."""

    def paid(n: int, tier: str, amount: int, tool: str = "refund") -> Trajectory:
        calls: list[Call] = [
            ("customer", {"id": f"C-{n}"}, json.dumps({"tier": tier, "order": f"A-{n}"})),
            ("lookup_order", {"order_id": f"A-{n}"}, json.dumps({"amount": amount, "order": f"A-{n}"})),
        ]
        if tool:
            calls.append((tool, {"order_id": f"A-{n}"}, "done"))
        return recorded(f"p/{n}", f"Refund C-{n}." if tool else f"Hello from C-{n}.", calls, "Done.")

    known = [*(paid(n, "plain", n) for n in range(30)), *(paid(n, "gold", n) for n in range(30, 90))]
    for tier, amount, possible in [("plain", 20, True), ("gold", 60, True), ("plain", 60, False), ("gold", 20, False)]:
        new = [paid(n, tier, amount, tool="") for n in range(100, 140)]
        assert (generator([*known, *new])(known[0].task, [], random.Random(0)) is not None) == possible


def test_answers_in_plain_words_are_read_word_by_word() -> None:
    def booked(n: int, status: str = "open") -> Trajectory:
        answer = f"Room R-{n} is {status}, {40 + n} EUR."
        done = [("room", {"id": f"R-{n}"}, answer), ("book", {"id": f"R-{n}", "price": 40 + n}, "ok")]
        return recorded(f"b/{n}", f"Book R-{n} for me, room R-{n}.", done, f"R-{n} is booked.")

    rooms = [booked(n) for n in range(30)]
    closed = [recorded("c", "Is R-15x free?", [("room", {"id": "R-15x"}, "Room R-15x is closed, 55 EUR.")], "No.")]
    generate = generator([*rooms, *closed])
    assert all(generate(rooms[0].task, [], random.Random(seed)) is None for seed in range(20)), "known, or of another kind"
    wanted = recorded("w", "Is R-15y free?", [("room", {"id": "R-15y"}, "Room R-15y is open, 55 EUR.")], "Yes.")
    made = [generator([*rooms, wanted])(rooms[0].task, [], random.Random(seed)) for seed in range(20)]
    task = next(each for each in made if each is not None)
    assert task.metadata["observation"] == "Book R-15y for me, room R-15y."
    assert references(task)[-1] == ("book", {"id": "R-15y", "price": 55})


def cancelled(n: int, statuses: tuple[str, ...], *, says: str = "") -> Trajectory:
    """A customer's reserved rental is cancelled, whichever in the list it is."""
    customer, rentals = f"C-{1000 + n}", [{"id": f"R-{2000 + 10 * n + k}", "status": each} for k, each in enumerate(statuses)]
    rental = next(each["id"] for each in rentals if each["status"] == "reserved")
    calls: list[Call] = [
        ("list", {"customer": customer}, json.dumps(rentals)),
        ("escalate", {"rental": rental}, json.dumps({"cancelled": rental, "at": "cancelled desk"})),
    ]
    words = (f"Please cancel for {customer}.", f"{customer} here, I want to cancel my car.")[n // 6 % 2]
    return recorded(f"r/{n}", words, calls, f"{says or rental} is cancelled.")


def test_what_was_taken_from_a_list_depends_on_what_the_list_says() -> None:
    every = list(permutations(("reserved", "active", "cancelled"), 2))
    check_picked([cancelled(n, every[n % 6]) for n in range(60) if "reserved" in every[n % 6]])


def test_the_same_item_is_taken_from_lists_of_other_lengths() -> None:
    statuses = [("reserved",), ("active", "reserved"), ("cancelled", "active", "reserved")]
    generate, lengths = check_picked([cancelled(n, statuses[n % 3]) for n in range(60)]), set[tuple[int, int]]()
    for seed in range(60):
        if varied := generate(cancelled(seed, statuses[seed % 3]).task, [], random.Random(seed)):
            lengths.add((seed % 3 + 1, len(json.loads(varied.metadata["reference_answers"][0]))))
    assert any(before != after for before, after in lengths)


def test_a_list_with_two_such_items_is_a_case_of_its_own() -> None:
    known = [cancelled(n, ("active", "reserved")) for n in range(20)]
    twice = [replace(cancelled(n, ("reserved", "reserved")), success=False) for n in range(20, 40)]
    made = [generator([*known, *twice])(known[n].task, [], random.Random(n)) for n in range(20)]
    lists = [json.loads(each.metadata["reference_answers"][0]) for each in made if each]
    assert lists and all([rental["status"] for rental in each] == ["active", "reserved"] for each in lists)


def test_what_only_items_of_one_have_does_not_say_which_of_two_is_taken() -> None:
    """The customer names the class of the car; that it is new is true of nearly all that stand alone."""

    def asked(n: int) -> Trajectory:
        customer, several = f"C-{1000 + n}", n % 12 == 0
        rentals = [{"id": f"R-{2000 + 2 * n}", "new": "no" if several else "yes"}]
        rentals += [{"id": f"R-{2001 + 2 * n}", "new": "yes"}] if several else []
        calls: list[Call] = [
            ("list", {"customer": customer}, json.dumps(rentals)),
            ("escalate", {"rental": rentals[0]["id"]}, "done"),
        ]
        words = (f"Cancel the old car of {customer}, please.", f"{customer} here, please cancel the old car.")[n // 24 % 2]
        return recorded(f"r/{n}", words, calls, "It is cancelled.")

    known = [asked(n) for n in range(72)]
    generate, found = generator(known), 0
    for n in range(72):
        if varied := generate(known[n].task, [], random.Random(n)):
            rentals, taken = json.loads(varied.metadata["reference_answers"][0]), references(varied)[-1].arguments["rental"]
            assert taken == rentals[0]["id"]
            found += 1
    assert found > 20


def test_nothing_was_found_and_nothing_was_done() -> None:
    """Whoever was found a rental did something else, which says nothing of those who were found none."""

    def asked(n: int) -> Trajectory:
        customer, rental = f"C-{1000 + n}", f"R-{2000 + n}"
        calls: list[Call] = [("get", {"customer": customer}, json.dumps({"tier": ("gold", "plain")[n // 2 % 2]}))]
        if some := n % 2:
            calls.append(("find", {"customer": customer}, json.dumps({"id": rental, "status": "open"})))
            calls.append(("escalate", {"rental": rental}, "done"))
        else:
            calls.append(("find", {"customer": customer}, "No rentals found"))
        words = (f"Please cancel for {customer}.", f"{customer} here, I want to cancel my car.")[n // 4 % 2]
        return recorded(f"r/{n}", words, calls, f"{rental} is cancelled." if some else "You have none.")

    known, said = [asked(n) for n in range(60)], Counter[str]()
    for n in range(60):
        if varied := generator(known)(known[n].task, [], random.Random(n)):
            said[varied.metadata["reference_reply"][:1]] += 1
    assert min(said["Y"], said["R"]) > 5


def test_what_the_request_chose_belongs_to_the_case() -> None:
    """Full insurance is sold to gold customers, basic to plain ones; what a plain one gets who asks for full was never seen."""

    def insured(n: int) -> Trajectory:
        tier, plan = (("gold", "full"), ("plain", "basic"))[n % 2]
        rental, failed = f"R-{1000 + n}", n % 5 == 4
        wanted = {"full": "basic", "basic": "full"}[plan] if failed else plan
        calls: list[Call] = [
            ("get", {"rental": rental}, json.dumps({"tier": tier})),
            ("book", {"rental": rental, "plan": wanted}, "done"),
        ]
        words = (f"Add {wanted} insurance to {rental}.", f"I want {wanted} insurance, rental {rental}.")[n // 2 % 2]
        return recorded(f"i/{n}", words, calls, "It is done.", success=not failed)

    known, found = [insured(n) for n in range(60)], 0
    for n in range(60):
        if varied := generator(known)(known[n].task, [], random.Random(n)):
            tier = json.loads(varied.metadata["reference_answers"][0])["tier"]
            assert references(varied)[-1].arguments["plan"] == {"gold": "full", "plain": "basic"}[tier]
            found += 1
    assert found > 10


def test_a_word_that_all_say_is_no_value() -> None:
    """What became of the order before is no matter; that it is cancelled now all say, and the tool's own field is called so."""

    def closed(n: int) -> Trajectory:
        order = f"K-{1000 + n}"
        calls: list[Call] = [
            ("get", {"order": order}, json.dumps({"order": order, "before": ("cancelled", "sent", "paid")[n % 3]})),
            ("book", {"order": order}, json.dumps({"cancelled": order, "state": "cancelled now"})),
        ]
        words = (f"Cancel {order} please.", f"Please, order {order}: cancel it.")[n // 3 % 2]
        return recorded(f"k/{n}", words, calls, f"{order} is cancelled.")

    known, found = [closed(n) for n in range(60)], 0
    for n in range(60):
        if varied := generator(known)(known[n].task, [], random.Random(n)):
            order = references(varied)[0].arguments["order"]
            assert json.loads(varied.metadata["reference_answers"][1]) == {"cancelled": order, "state": "cancelled now"}
            assert varied.metadata["reference_reply"] == f"{order} is cancelled."
            found += 1
    assert found > 20


def test_an_answer_with_the_value_of_another_field_is_not_repeated() -> None:
    def told(n: int, *, right: bool) -> Trajectory:
        order, record = f"K-{1000 + n}", {"from": f"A-{2000 + n}", "to": f"B-{3000 + n}"}
        words = (f"Where does {order} go?", f"{order}: where does it go, please?")[n % 2]
        calls: list[Call] = [("get", {"order": order}, json.dumps(record))]
        return recorded(f"k/{n}", words, calls, f"To {record['to' if right else 'from']}.")

    known = [told(n, right=n % 10 > 0) for n in range(40)]
    for shown, some in ((known, False), ([each for n, each in enumerate(known) if n % 10], True)):
        made = [generator(shown)(shown[0].task, [], random.Random(seed)) for seed in range(10)]
        assert any(made) and any(each.metadata["reference_reply"] for each in made if each) == some


def test_an_amount_that_two_asked_for_is_no_answer_to_who_asks_for_another() -> None:
    def added(n: int, amount: int, *, forgotten: bool = False) -> Trajectory:
        member = f"M-{1000 + n}"
        calls: list[Call] = [("get", {"member": member}, json.dumps({"member": member, "name": f"Q-{2000 + n}"}))]
        if amount <= 400 and not forgotten:
            calls.append(("book", {"member": member, "credits": amount}, "ok"))
        said = "Done." if amount <= 400 else f"I cannot add {amount}, the most is 400."
        words = f"Please add {amount} credits to {member}, thank you."
        return recorded(f"m/{n}", words, calls, said, success=not forgotten)

    known = [added(n, 20 * n + 20 if n < 18 else 520, forgotten=n % 2 == 0 and n < 18) for n in range(20)]
    made = [task for n in range(200) if (task := generator(known)(known[n % 20].task, [], random.Random(n)))]
    refused = [task for task in made if len(references(task)) == 1]
    assert refused and not all("520" in task.instruction for task in refused)
    assert all("520" in task.instruction for task in refused if task.metadata["reference_reply"])


def test_a_name_beside_an_id_is_that_of_its_record_also_in_the_words_of_who_did_not_look_it_up() -> None:
    names = [f"{first} {last}" for first in ("Ada", "Bo", "Cora", "Dirk") for last in ("Berg", "Lind", "Noll", "Oss", "Paul")]
    known = list[Trajectory]()
    for n, name in enumerate(names):
        member, looked_up = f"M-{1000 + n}", n % 6 != 2
        calls: list[Call] = [("get", {"member": member}, json.dumps({"member": member, "name": name}))] if looked_up else []
        calls.append(("refund", {"member": member}, "ok"))
        asked = (f"{name} here, {member}: pay my money back please.", f"{member}: pay my money back please.")[n % 2]
        known.append(recorded(f"m/{n}", asked, calls, "Done.", success=looked_up, metadata={"intent": "pay"}))

    made = [task for n in range(80) if (task := generator(known)(known[n % 20].task, [], random.Random(n)))]
    greeted = [task for task in made if " here, " in task.instruction]
    assert len({task.instruction for task in greeted}) > 3
    for task in greeted:
        assert names[int(references(task)[0].arguments["member"][2:]) - 1000] in task.instruction


def test_requests_with_one_intent_ask_for_the_same_whatever_their_words() -> None:
    asked = ("What is the price of {}?", "{}: how much?", "Tell me the cost, room {}.", "I think of {}, what would that be?")

    def told(n: int, **metadata: str) -> Trajectory:
        record = {
            "room": f"R-{1000 + n}",
            "hub": ("north", "south")[n % 2],
            "open": n % 5 > 0,
            "price": 10 + 7 * n % 90,
        }
        calls: list[Call] = [("get", {"room": record["room"]}, json.dumps(record))]
        return recorded(f"r/{n}", asked[n % 4].format(record["room"]), calls, f"{record['price']} a day.", metadata=metadata)

    def made(known: list[Trajectory]) -> list[Task]:
        generate = generator(known)
        return [task for n in range(60) if (task := generate(known[n % len(known)].task, [], random.Random(n)))]

    empty = [told(n, intent="") for n in range(8)]
    assert {task.instruction for task in made(empty)} == {task.instruction for task in made([told(n) for n in range(8)])}
    told_apart, together = made([told(n) for n in range(8)]), made([told(n, intent="price") for n in range(8)])
    assert len({task.instruction for task in told_apart}) < len({task.instruction for task in together})
    for task in together:
        record = json.loads(task.metadata["reference_answers"][0])
        assert record["room"] in task.instruction and task.metadata["reference_reply"] == f"{record['price']} a day."
        assert task.metadata["intent"] == "price"


@pytest.mark.parametrize(
    ("intents", "problem"),
    [
        (["", ""], None),
        (["cancel", "move", "cancel", "move"], None),
        (["cancel"], None),
        (["cancel", "", "cancel"], "1 of 3 training traces have no"),
        (["T-1", "T-2", "T-3", "T-3"], "3 values in 4 training traces, hardly two share one"),
    ],
)
def test_intents_that_tell_little_are_told(intents: list[str], problem: str | None) -> None:
    tasks = [recorded(f"t/{n}", "Hello.", [], "Hi.", metadata={"intent": each}).task for n, each in enumerate(intents)]
    found = intents_problem(tasks)
    assert (problem or "") in (found or "") and (found is None) == (problem is None)


def test_requests_with_different_intents_do_not_ask_for_the_same_in_the_same_words() -> None:
    def closed(n: int, *, intent: bool) -> Trajectory:
        order, tool = f"K-{1000 + n}", ("refund", "escalate")[n % 2]
        calls: list[Call] = [
            ("get", {"order": order}, json.dumps({"order": order, "owner": f"C-{n}"})),
            (tool, {"order": order}, "ok"),
        ]
        metadata = {"intent": tool} if intent else {}
        words = (f"Please stop order {order}.", f"Please, stop it, order {order}.")[n // 2 % 2]
        return recorded(f"k/{n}", words, calls, "Done.", metadata=metadata)

    def made(*, intent: bool) -> list[Task]:
        known = [closed(n, intent=intent) for n in range(20)]
        generate = generator(known)
        return [task for n in range(40) if (task := generate(known[n % 20].task, [], random.Random(n)))]

    assert made(intent=False) == []  # in one case both were done
    assert all(references(task)[1].name == task.metadata["intent"] for task in made(intent=True))
    assert {task.metadata["intent"] for task in made(intent=True)} == {"refund", "escalate"}


def check_picked(known: list[Trajectory]) -> TemplateTaskGenerator:
    generate, picked = generator(known), Counter[int]()
    for seed in range(80):
        if (varied := generate(known[seed % len(known)].task, [], random.Random(seed))) is None:
            continue
        rentals, done = map(json.loads, varied.metadata["reference_answers"])
        (at,) = (k for k, each in enumerate(rentals) if each["status"] == "reserved")
        rental = references(varied)[-1].arguments["rental"]
        assert rental == rentals[at]["id"] and done == {"cancelled": rental, "at": "cancelled desk"}
        assert varied.metadata["reference_reply"] == f"{rental} is cancelled."
        picked[at] += 1
    assert min(picked[0], picked[1]) > 5
    return generate


def test_an_answer_that_names_another_record_than_the_others_did_is_not_repeated() -> None:
    known = [cancelled(n, ("reserved", "active")) for n in range(20)]
    lucky = [cancelled(n, ("reserved", "active"), says=f"R-{2001 + 10 * n}") for n in range(20, 23)]
    made = [generator([*known, *lucky])(lucky[0].task, [], random.Random(seed)) for seed in range(20)]
    assert any(made) and not any(each.metadata["reference_reply"] for each in made if each)


def test_a_free_car_is_taken_and_none_is_not() -> None:
    def swapped(n: int, nothing: str = "N/A") -> Trajectory:
        """Requests about five classes, in other words each: what was done says that they ask for the same."""
        rental, car = f"R-{3000 + n}", f"V-{4000 + n}" if n % 2 else nothing
        words = ("Change {} to a van.", "Is a van free for {}?", "We are more people now: a van for {} please.")[n % 3]
        calls: list[Call] = [
            ("get", {"rental": rental}, json.dumps({"class": "abcde"[n % 5], "insured": n % 7 < 3})),
            ("search", {"rental": rental}, json.dumps({"car": car})),
        ]
        if car != nothing:
            calls.append(("book", {"car": car, "rental": rental}, "done"))
        said = f"{rental} has {car}." if car != nothing else "No van is free."
        return recorded(f"s/{n}", words.format(rental), calls, said)

    known = [swapped(n) for n in range(60)]
    generate, made = generator(known), Counter[bool]()
    for seed in range(60):
        if (varied := generate(known[seed].task, [], random.Random(seed))) is not None:
            free = "N/A" not in varied.metadata["reference_answers"][1]
            assert [call.name for call in references(varied)] == ["get", "search", *(["book"] if free else [])]
            assert varied.metadata["reference_reply"].startswith("R-3" if free else "No van")
            made[free] += 1
    assert min(made[True], made[False]) > 10


def test_no_seed_no_variation() -> None:
    failed = [replace(each, success=False) for each in TRACES]
    assert not generator(failed).can_vary and not generator([]).can_vary
    assert generator(failed)(TRACES[0].task, [], random.Random(0)) is None
    assert generator(TRACES).can_vary
    held_out = replace(TRACES[0].task, split="test")
    assert generator(TRACES)(held_out, [], random.Random(0)) is None
    talk = [recorded(f"t/{n}", f"Hello {n}", [], "Hello.") for n in range(9)]
    assert not generator(talk).can_vary, "an agent without tools"
