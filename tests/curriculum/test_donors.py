"""Whose values a variation gets: of one trace where a lookup ties them, of several where nothing does."""

import json
import random
from typing import Any

import pytest
from desk_traces import WRITES, Call, recorded

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.curriculum.template_task_generator import TemplateTaskGenerator
from dreamgym_lg.types import Task, Trajectory

NUMBER = 80


def bill(n: int, shown: dict[str, Any] | None = None) -> Trajectory:
    """A bill is paid from an account if there is enough on it. Args: `shown`, what else the bill's record says."""
    rng = random.Random(n)
    balance, total = rng.randrange(100, 900), rng.randrange(100, 900)
    calls: list[Call] = [
        ("get_account", {"account": f"A-{1000 + n}"}, json.dumps({"holder": f"H-{2000 + n}", "balance": balance})),
        ("get_bill", {"bill": f"B-{3000 + n}"}, json.dumps({"total": total, **(shown or {})})),
    ]
    if balance >= total:
        calls.append(("book", {"bill": f"B-{3000 + n}", "account": f"A-{1000 + n}"}, '"paid"'))
    words = ("Pay bill B-{} from account A-{}, please.", "Account A-{1} shall pay the bill B-{0}.")[n % 2]
    said = "It is paid." if balance >= total else "There is too little on it."
    return recorded(f"bill/{n}", words.format(3000 + n, 1000 + n), calls, said)


def varied(traces: list[Trajectory]) -> list[Task]:
    generate = TemplateTaskGenerator(traces, writes=WRITES.__contains__)
    made = (generate(each.task, [], random.Random(n)) for n, each in enumerate(traces))
    return [each for each in made if each is not None]


def numbers(task: Task) -> tuple[int, int]:
    """Of the account and of the bill, as the lookups name them."""
    calls = [parse_action(text) for text in task.metadata["reference_calls"][:2]]
    account, bill = (next(iter(call.arguments.values())) for call in calls if isinstance(call, ToolCall))
    return int(account[2:]) - 1000, int(bill[2:]) - 3000


def test_values_that_no_lookup_ties_come_from_different_traces_and_the_larger_amount_still_decides() -> None:
    made = varied([bill(n) for n in range(NUMBER)])
    assert len(made) > NUMBER / 2
    mixed = paid = 0
    for task in made:
        account, other = numbers(task)
        balance, total = (
            json.loads(answer)[name]
            for answer, name in zip(task.metadata["reference_answers"], ("balance", "total"), strict=False)
        )
        assert (len(task.metadata["reference_calls"]) == 3) == (balance >= total), "what was seen of amounts so far apart"
        mixed += account != other
        paid += balance >= total
        assert (" and " in task.metadata["generated"]["why"]) == (account != other)
    assert mixed > len(made) / 2 and 0 < paid < len(made)


@pytest.mark.parametrize("shown", ["holder", "account"])
def test_values_with_a_lookup_in_common_come_from_one_trace(shown: str) -> None:
    """The bill's record names the account's holder, or the account itself."""
    own = {"holder": "H-{}", "account": "A-{}"}[shown]
    made = varied([bill(n, {shown: own.format({"holder": 2000, "account": 1000}[shown] + n)}) for n in range(NUMBER)])
    assert made and all(account == other for account, other in map(numbers, made))


def test_who_is_told_by_one_lookup_what_to_look_up_next_has_one_trace() -> None:
    def asked(n: int) -> Trajectory:
        calls: list[Call] = [
            ("find", {"email": f"u{n}@mail.com"}, json.dumps({"customer": f"C-{n + 100}"})),
            ("last_order", {"customer": f"C-{n + 100}", "shop": f"S-{n + 500}"}, json.dumps({"order": f"O-{n + 300}"})),
            ("escalate", {"order": f"O-{n + 300}"}, '"done"'),
        ]
        return recorded(
            f"t/{n}", f"Help me with my order, u{n}@mail.com at shop S-{n + 500}.", calls, "A colleague sees to it."
        )

    known = [asked(n) for n in range(30)]
    generate = TemplateTaskGenerator(known, writes=WRITES.__contains__)
    tied = generate._donors.draw(
        generate._successes[0].play,
        {"u0@mail.com": [("call", "find", "email")], "S-500": [("call", "last_order", "shop")]},
        random.Random(0),
    )
    offers = list(tied)
    assert len(offers) == 30 and all(len(offer.traces) == 1 for offer in offers)
