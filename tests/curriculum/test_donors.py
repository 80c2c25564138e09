"""Whose values a variation gets: of one trace where a call ties them, else of several."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from desk_traces import WRITES, Call, recorded

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.curriculum.donors import Donors
from dreamgym_lg.curriculum.plays import Place, Play, read_play
from dreamgym_lg.curriculum.template_task_generator import TemplateTaskGenerator
from dreamgym_lg.types import Task, Trajectory


def varied(traces: Sequence[Trajectory]) -> list[Task]:
    generate = TemplateTaskGenerator(traces, writes=WRITES.__contains__)
    made = (generate(each.task, [], random.Random(n)) for n, each in enumerate(traces))
    return [each for each in made if each is not None]


def calls(task: Task) -> list[ToolCall]:
    found = map(parse_action, task.metadata["reference_calls"])
    return [call for call in found if isinstance(call, ToolCall)]


def answers(task: Task) -> dict[str, Any]:
    """What the lookups say, all in one."""
    return {key: value for text in task.metadata["reference_answers"][:2] for key, value in json.loads(text).items()}


def is_mixed(task: Task) -> bool:
    """Whether its account and its bill, which have the same digits in each trace, are of two."""
    account, bill = (str(next(iter(call.arguments.values())))[2:] for call in calls(task)[:2])
    assert (" and " in task.metadata["generated"]["why"]) == (account != bill)
    return account != bill


def bill(n: int, *, told: str = "", written: str = "bill", tier: str = "") -> Trajectory:
    """A bill is paid from an account: if there is enough on it, and always for a `gold` customer.

    Args: `told`, what else the bill's record says; `written`, the arguments of the call that pays.
    """
    account, asked, rng = f"A-{1000 + n}", f"B-{1000 + n}", random.Random(n)
    balance, total = rng.randrange(100, 900), rng.randrange(100, 900)
    record = {"holder": f"H-{2000 + n}", "balance": balance} | ({"tier": tier} if tier else {})
    note = {"note": told.format(account=account, number=account[2:], **record)} if told else {}
    made: list[Call] = [
        ("get_account", {"account": account}, json.dumps(record)),
        ("get_bill", {"bill": asked}, json.dumps({"total": total} | note)),
    ]
    if paid := balance >= total or tier == "gold":
        given = {"account": account, "bill": asked}
        made.append(("book", {name: given[name] for name in written.split()}, '"paid"'))
    words = ("Pay bill {} from account {}, please.", "Account {1} shall pay the bill {0}.")[n % 3 % 2]
    return recorded(f"bill/{n}", words.format(asked, account), made, "It is paid." if paid else "There is too little on it.")


def test_values_that_nothing_ties_come_from_different_traces_and_the_larger_amount_still_decides() -> None:
    made = varied([bill(n) for n in range(80)])
    assert len(made) > 40 and sum(map(is_mixed, made)) > len(made) / 2
    paid = [len(calls(task)) == 3 for task in made]
    assert paid == [answers(task)["balance"] >= answers(task)["total"] for task in made] and 0 < sum(paid) < len(made)


@pytest.mark.parametrize(
    "options",
    [
        {"told": "{holder}"},
        {"told": "{account}"},
        {"told": "Paid by {account}, as always."},
        {"told": "{number}"},
        {"written": "bill account"},
    ],
    ids=["a value in common", "one is in the other's answer", "as a part of it", "a part of it is", "one call has both"],
)
def test_values_that_a_call_ties_come_from_one_trace(options: dict[str, str]) -> None:
    made = varied([bill(n, **options) for n in range(80)])
    assert made and not any(map(is_mixed, made))


def test_an_account_that_a_list_holds_and_nobody_went_on_with_is_its_owners() -> None:
    def asked(n: int) -> Trajectory:
        mine, savings = f"A-{1000 + n}", f"S-{1000 + n}"
        items = [{"id": mine, "type": "checking"}, {"id": savings, "type": "savings"}]
        made: list[Call] = [
            ("list_accounts", {"customer": f"C-{1000 + n}"}, json.dumps(items if n % 2 else items[::-1])),
            ("get_account", {"account": mine}, json.dumps({"balance": 900})),
            ("book", {"to": savings}, '"done"'),
        ]
        words = ("Move 50 EUR to my savings account {}, I am {}.", "I am {1}, {0} shall get 50 EUR of mine.")[n % 3 % 2]
        return recorded(f"m/{n}", words.format(savings, f"C-{1000 + n}"), made, "It is moved.")

    made = varied([asked(n) for n in range(60)])
    assert made and all(str(calls(task)[2].arguments["to"]) in task.metadata["reference_answers"][0] for task in made)


def test_a_limit_holds_for_whom_it_was_seen_to_hold() -> None:
    """Only gold customers owe. No bill that was refused is recorded: nothing tells that the tier decides."""
    asked = [bill(n, tier="gold" if n % 4 == 0 else "plain") for n in range(240)]
    made = varied([each for each in asked if "paid" in str(each.steps[-1].action)])
    assert sum(map(is_mixed, made)) > 20
    owed = [answers(task)["tier"] for task in made if answers(task)["balance"] < answers(task)["total"]]
    assert set(owed) == {"gold"}


def test_an_amount_that_the_request_names_is_within_the_balance_too() -> None:
    def asked(n: int) -> Trajectory:
        balance, amount = sorted(random.Random(n).sample(range(100, 900), 2), reverse=True)
        made: list[Call] = [
            ("get_account", {"account": f"A-{1000 + n}"}, json.dumps({"balance": balance})),
            ("book", {"amount": amount}, '"done"'),
        ]
        words = ("Take {} EUR from account A-{}.", "I need {} EUR, please take them from A-{}.")[n % 2]
        return recorded(f"t/{n}", words.format(amount, 1000 + n), made, "You have them.")

    made = varied([asked(n) for n in range(80)])
    assert len(made) > 40 and sum(" and " in task.metadata["generated"]["why"] for task in made) > len(made) / 2
    assert all(json.loads(t.metadata["reference_answers"][0])["balance"] > calls(t)[1].arguments["amount"] for t in made)


def test_three_conditions_that_were_never_met_together_are_not_put_together() -> None:
    """An unverified customer of high risk gets no refund for a large order; none of these requests is recorded."""

    def asked(n: int, verified: bool, risk: str, size: str) -> Trajectory:
        made: list[Call] = [
            ("get_customer", {"customer": f"C-{1000 + n}"}, json.dumps({"verified": verified, "risk": risk})),
            ("get_order", {"order": f"O-{1000 + n}"}, json.dumps({"size": size})),
            ("refund", {"order": f"O-{1000 + n}"}, '"ok"'),
        ]
        words = ("I am C-{0}, refund order O-{0}.", "Please refund O-{0}, I am C-{0}.")[n % 2]
        return recorded(f"r/{n}", words.format(1000 + n), made, "It is refunded.")

    rng = random.Random(0)
    drawn = [(rng.random() < 0.5, rng.choice(("high", "low")), rng.choice(("large", "small"))) for _ in range(160)]
    made = varied([asked(n, *each) for n, each in enumerate(drawn) if each != (False, "high", "large")])
    assert sum(map(is_mixed, made)) > 20
    assert (False, "high", "large") not in {tuple(answers(task)[key] for key in ("verified", "risk", "size")) for task in made}


def test_facts_of_the_world_are_of_one_trace() -> None:
    """Every second request has metadata; what no record tells of them is the donor's."""

    def asked(n: int) -> Trajectory:
        each = bill(n)
        facts = {"profile": {"account": f"A-{1000 + n}", "cart": f"X-{n}"}, "bin": {"bill": f"B-{1000 + n}", "row": f"Y-{n}"}}
        each.task.metadata.update(facts if n % 2 else {})
        return each

    assert (made := varied([asked(n) for n in range(80)])) and not any(map(is_mixed, made))
    facts = [task.metadata["profile"] for task in made if "profile" in task.metadata]
    assert facts and all(int(each["account"][2:]) == 1000 + int(each["cart"][2:]) for each in facts)


def test_traces_with_the_same_label_are_put_together() -> None:
    """Metadata of few values: the kind of request, the customer's country."""

    def asked(n: int) -> Trajectory:
        each = bill(n)
        each.task.metadata["country"] = ("no", "se")[n % 2]
        return each

    made = varied([asked(n) for n in range(80)])
    assert len(made) > 40 and sum(map(is_mixed, made)) > len(made) / 2
    digits = [(int(str(next(iter(call.arguments.values())))[2:]) % 2, task) for task in made for call in calls(task)[:2]]
    assert all(task.metadata["country"] == ("no", "se")[odd] for odd, task in digits)


@pytest.mark.parametrize(
    ("account", "asked", "paid"),
    [
        ({"state": "open"}, {"state": "open"}, {}),
        ({"closed": None}, {"until": None}, {}),
        ({}, {}, {"account": "A-1", "bill": "B-1"}),
    ],
    ids=["a status", "nothing", "what a writing call returns"],
)
def test_what_ties_nothing(account: dict[str, Any], asked: dict[str, Any], paid: dict[str, str]) -> None:
    def play(n: int) -> Play:
        made: list[Call] = [
            ("get_account", {"account": f"A-{n}"}, json.dumps({"holder": f"H-{n}"} | account)),
            ("get_bill", {"bill": f"B-{n}"}, json.dumps({"total": n} | asked)),
            ("book", {"bill": f"B-{n}"}, json.dumps({"booked": n} | paid)),
        ]
        found = read_play(recorded(f"p/{n}", f"Pay B-{n} from A-{n}.", made, "It is paid."))
        assert found is not None
        return found

    plays = [play(n) for n in range(1, 30)]
    states: list[Place] = [("answer", tool, "state") for tool in ("get_account", "get_bill")]
    donors = Donors(plays, writes=WRITES.__contains__, categorical=states)
    slots: dict[str, list[Place]] = {"A-1": [("call", "get_account", "account")], "B-1": [("call", "get_bill", "bill")]}
    offers = list(donors.draw(slots, [(plays[0], {"A-1": "A-1", "B-1": "B-1"})], random.Random(0), label=plays[0]))
    assert len(offers) == 29 and {len(offer.traces) for offer in offers} == {2}
