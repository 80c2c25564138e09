"""Variations in small worlds whose rules are known: what is done in each of them has to be what the rules ask for."""

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from desk_traces import Call, recorded

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.curriculum.template_task_generator import TemplateTaskGenerator
from dreamgym_lg.experience.prompt_formats import first_observation
from dreamgym_lg.types import Task, Trajectory

Record = dict[str, Any]
Deed = tuple[str, int | None]
"""A writing call: its tool and, if it has one, its amount."""
Done = tuple[list[Deed], str]
"""What is done for a request behind the lookup of its record: the writing calls, and the final answer."""


class World(NamedTuple):
    wordings: dict[str, tuple[str, ...]]
    """What may be asked, each in some ways."""
    record: Callable[[str, random.Random], Record]
    right: Callable[[str, Record], Done]
    old: Callable[[str, Record, random.Random], Done]
    """What the recorded policy did, mostly right."""
    number: int = 120
    """How many traces there are."""

    def traces(self, seed: int) -> tuple[list[Trajectory], dict[str, Record]]:
        rng, found, records = random.Random(seed), list[Trajectory](), dict[str, Record]()
        for n in range(self.number):
            kind, id = rng.choice([*self.wordings]), f"Z-{1000 + n}"
            records[id] = self.record(kind, rng) | {"owner": f"C-{2000 + n}"}
            deeds, said = done = self.old(kind, records[id], rng)
            calls: list[Call] = [("get", {"id": id}, json.dumps(records[id]))]
            calls += [(tool, {"id": id} | ({"amount": amount} if amount else {}), "ok") for tool, amount in deeds]
            asked = rng.choice(self.wordings[kind]).format(id)
            found.append(recorded(f"t/{n}", asked, calls, said, success=done == self.right(kind, records[id])))
        return found, records

    def is_right(self, task: Task, records: dict[str, Record]) -> bool:
        asked = first_observation(task)
        id = re.findall(r"Z-\d+", asked)[0]
        kind = next(kind for kind, ways in self.wordings.items() if asked in [way.format(id) for way in ways])
        calls = [call for text in task.metadata["reference_calls"][1:] if isinstance(call := parse_action(text), ToolCall)]
        made = [(call.name, call.arguments.get("amount")) for call in calls if call.arguments["id"] == id]
        deeds, said = self.right(kind, records[id])
        return made == deeds and task.metadata["reference_reply"] in (said, "")  # "": not known, and not demonstrated


def refunds(kind: str, record: Record) -> Done:
    at_once = record["amount"] <= (500 if record["tier"] == "gold" else 200)
    return [("refund" if at_once else "escalate", None)], "Done."


LIMIT_OF_A_TIER = World(
    {"refund": ("Please refund order {}, it arrived broken.", "I want my money back for {}.")},
    lambda kind, rng: {"tier": rng.choice(["gold", "plain"]), "amount": rng.randrange(20, 800)},
    refunds,
    lambda kind, record, rng: ([("refund" if record["amount"] <= 300 else "escalate", None)], "Done."),
)
"""The old policy has one limit for both tiers."""


def payments(kind: str, record: Record) -> Done:
    posted = "dispute" if kind == "dispute" else "credit"
    return [({"pending": "note", "reversed": "close", "posted": posted}[record["status"]], None)], "Done."


DISPUTE_OR_FEE = World(
    {
        "dispute": ("I did not make payment {}, please dispute it.", "Somebody used my card for {}, I never bought this."),
        "fee": ("Please waive the fee {}.", "I was charged {} for nothing, it should be free for students."),
    },
    lambda kind, rng: {
        "status": rng.choice(["pending", "reversed", "posted"]),
        "amount": rng.randrange(40, 900) if kind == "dispute" else rng.randrange(5, 36),
    },
    payments,
    lambda kind, record, rng: payments(kind, record) if rng.random() < 0.85 else ([("note", None)], "Done."),
)
"""Two requests with two outcomes in common, whose amounts are apart by nature."""


def contracts(kind: str, record: Record) -> Done:
    return ([("cancel", None)], "It is cancelled.") if kind == "end" else ([], f"It is {record[kind]}.")


SAME_SENTENCE = World(
    {
        "plan": ("Which plan am I on with {}?", "Tell me the plan of contract {}."),
        "currency": ("In what currency do I pay for {}?", "What money is {} charged in?"),
        "end": ("Please cancel {}.", "I want to stop {} at once."),
    },
    lambda kind, rng: {"plan": rng.choice(["basic", "family", "student"]), "currency": rng.choice(["EUR", "NOK", "SEK"])},
    contracts,
    lambda kind, record, rng: contracts(kind, record) if rng.random() < 0.9 else ([], "I do not know."),
)
"""Two questions that are answered in the same words, with another value."""


def rooms(kind: str, record: Record) -> Done:
    if kind == "book":
        return [("book", None)], "It is booked."
    return [], "Yes, that is no problem." if record[kind] else "No, I am sorry."


ALWAYS_YES = World(
    {
        "breakfast": ("Can I have breakfast at {}?", "Is there something to eat in the morning at hotel {}?"),
        "pets": ("May my dog come along to {}?", "Are pets allowed in {}, we have a terrier?"),
        "book": ("Please book {} for us.", "We want a room in {} tonight."),
    },
    lambda kind, rng: {"breakfast": rng.random() < 0.7, "pets": rng.random() < 0.7, "city": rng.choice("ABCD")},
    rooms,
    lambda kind, record, rng: rooms(kind, {**record, "breakfast": True, "pets": True}),
)
"""Two questions of which only the one answer was right that both have in common."""


def bookings(kind: str, record: Record) -> Done:
    if kind == "bag":
        return [("charge", record["bag_price"])], "Done."
    fee = 60 if record["route"] == "international" and record["season"] == "peak" else 25
    return [("rebook", None), ("charge", fee)], "Done."


SURCHARGE = World(
    {
        "rebook": ("Please rebook {} to the next day.", "I cannot fly tomorrow with {}, move me one day on."),
        "bag": ("I need to add a bag to {}.", "Add one more suitcase for booking {}, please."),
    },
    lambda kind, rng: {
        "route": rng.choice(["domestic", "domestic", "international"]),
        "season": rng.choice(["low", "low", "peak"]),
        "bag_price": rng.randrange(20, 90),
    },
    bookings,
    lambda kind, record, rng: bookings(kind, {**record, "season": "low"}),
)
"""A fee that was right only where there is no surcharge."""

def parcels(kind: str, record: Record) -> Done:
    if kind == "where":
        return [], f"It is {record['status']}."
    if record["hold"]:
        return [("escalate", None)], "I have passed it on."
    status, tool, early = PARCELS[kind]
    return ([(tool, None)], f"Done: {tool}.") if record["status"] == status else ([], early)


PARCELS = {
    "refund": ("delivered", "refund", "It has to arrive first."),
    "return": ("delivered", "label", "It has to arrive first."),
    "cancel": ("open", "cancel", "It has left already."),
    "hurry": ("open", "upgrade", "It has left already."),
}
"""Of each request: with which status something is done for it, what, and what is said with any other status."""
SHARED_OUTCOMES = World(
    {
        "refund": ("Please refund {}.", "I want my money back for {}.", "{} is broken, pay me back.", "Credit {} to my card!"),
        "return": ("I would like to send {} back to you.", "How do I ship {} to your house?", "Pick up parcel {} at my home."),
        "cancel": ("Please cancel {}.", "Stop order {} before it leaves.", "I changed my mind about {}.", "Annul {} for us."),
        "hurry": ("Please make {} faster.", "Express shipping for {}, I beg you.", "Can {} come tomorrow already?"),
        "where": ("Where is {}?", "What is the state of {}?", "Has {} left the house?", "I wait for {} since weeks."),
    },
    lambda kind, rng: {
        "status": rng.choice(["open", "shipped", "delivered"]),
        "tier": rng.choice(["gold", "plain"]),
        "hold": rng.random() < 0.3,
        "shop": rng.choice("ABC"),
        "gift": rng.random() < 0.2,
    },
    parcels,
    lambda kind, record, rng: parcels(kind if rng.random() < 0.7 else rng.choice([*PARCELS]), record),
    number=240,
)
"""Requests in many words, of which two each have two of three outcomes in common."""

WORLDS = {
    "a limit of a tier": LIMIT_OF_A_TIER,
    "amounts that are apart by nature": DISPUTE_OR_FEE,
    "the same sentence": SAME_SENTENCE,
    "always yes": ALWAYS_YES,
    "a surcharge": SURCHARGE,
    "shared outcomes": SHARED_OUTCOMES,
}


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_done_is_what_the_rules_ask_for(name: str) -> None:
    made = list[bool]()
    for seed in range(5):
        traces, records = WORLDS[name].traces(seed)
        assert 0.6 < sum(bool(each.success) for each in traces) / len(traces) < 1
        generate = TemplateTaskGenerator(traces, writes=lambda tool: tool != "get")
        varied = (generate(each.task, [], random.Random(number)) for number, each in enumerate(traces))
        made += [WORLDS[name].is_right(task, records) for task in varied if task is not None]
    assert len(made) > 40 and all(made), f"{made.count(False)} of {len(made)} are wrong"
