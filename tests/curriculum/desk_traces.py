"""A support desk of recorded traces: what the tests and the benchmark of task generation vary."""

import json
import random
from typing import Any

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.types import Split, Step, Task, Trajectory

Call = tuple[str, dict[str, Any], str]
"""A tool's name, its arguments, its answer."""
SYSTEM = "You are the support desk of a shop."
WRITES = ("refund", "set_address", "escalate", "book")
STATUSES = ("delivered", "shipped", "cancelled")
KINDS = ("refund", "where", "address")
REQUESTS = {
    "refund": ("Please refund order {order}, it arrived broken.", "I want my money back for {order}."),
    "where": ("Where is order {order}?", "Order {order} has not come yet, what is going on?"),
    "address": ("Send order {order} to {address} please.", "My order {order} should go to {address} instead."),
}


def trace(number: int, rng: random.Random, *, split: Split = "train", kind: str | None = None) -> Trajectory:
    """A success: the order is looked up, then what its status allows is done."""
    kind = kind or rng.choice(KINDS)
    status = {"refund": "delivered", "address": "shipped"}.get(kind) or rng.choice(STATUSES)
    order, amount = f"A-{1000 + number}", 5 + rng.randrange(200)
    facts = {"order": order, "address": f"{rng.randint(1, 99)} Elm Street {number}"}
    record = {"order": order, "status": status, "customer": f"C-{number % 40}", "amount": amount}
    calls: list[Call] = [("lookup_order", {"order_id": order}, json.dumps(record))]
    if kind == "refund":
        calls.append(("refund", {"order_id": order, "amount": amount}, json.dumps({"refunded": amount})))
    elif kind == "address":
        calls.append(("set_address", {"order_id": order, "address": facts["address"]}, json.dumps({"ok": True})))
    said = {"refund": f"{amount} are refunded.", "where": f"It is {status}.", "address": "It is changed."}[kind]
    asked = rng.choice(REQUESTS[kind]).format(**facts)
    return recorded(f"desk/{number}", asked, calls, said, split=split, metadata={"customer": record["customer"]})


def recorded(
    id: str,
    asked: str,
    calls: list[Call],
    said: str,
    *,
    success: bool = True,
    split: Split = "train",
    metadata: dict[str, Any] | None = None,
) -> Trajectory:
    """An episode as `load_traces` reads it."""  # fmt: skip
    steps, seen = [], asked
    for name, arguments, answer in calls:
        steps.append(Step(observation=seen, action=render_call(name, arguments), next_observation=answer))
        seen = answer
    reward = float(success)
    last = Step(observation=seen, action=render_answer(said), next_observation="", reward=reward, terminated=True)
    task = Task(
        id=id,
        instruction=f"{SYSTEM}\n\n{asked}",
        environment="desk",
        metadata={"observation": asked, **(metadata or {})},
        split=split,
    )
    return Trajectory(task=task, steps=[*steps, last], success=success, run="traces")


def traces(number: int, seed: int = 0) -> list[Trajectory]:
    rng = random.Random(seed)
    return [trace(n, rng) for n in range(number)]
