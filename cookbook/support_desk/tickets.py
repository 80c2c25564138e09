"""The shop's staging database, its tickets, and the check of what became of a ticket.

A ticket's kind is what the customer wants; what has to be done depends on what only the database says: the order's status, the
customer's tier.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from agent import RULES, cancel, connected, connection_in_use, escalate, refund, set_city

from dreamgym_lg import Task
from dreamgym_lg.types import Split

SCHEMA = """
CREATE TABLE customers (id TEXT PRIMARY KEY, name TEXT, tier TEXT, city TEXT);
CREATE TABLE orders (id TEXT PRIMARY KEY, customer TEXT, item TEXT, status TEXT, days INTEGER);
CREATE TABLE cases (order_id TEXT, reason TEXT);
"""
KINDS = {"where": "where", "return": "money", "both": "money", "last": "money", "move": "address", "broken": "broken"}
"""What a customer may want, and the rule of the shop that says what is done then."""
REQUESTS = {
    "where": ["Where is order {order}?", "I wait for order {order}, where is it?", "Tell me where order {order} is."],
    "return": ["I want my money back for order {order}.", "Please refund order {order}.", "I no longer want order {order}."],
    "both": [
        "I want my money back for orders {order} and {other}.",
        "Please refund orders {order} and {other}.",
        "I no longer want orders {order} and {other}.",
    ],
    "last": [
        "I am customer {customer} and want my money back for my last order.",
        "Please refund my last order, I am customer {customer}.",
        "I no longer want my last order. Customer {customer}.",
    ],
    "move": [
        "Send order {order} to {city}.",
        "I moved to {city}, send order {order} there.",
        "Order {order} has to go to {city}.",
    ],
    "broken": ["Order {order} came broken.", "I got order {order} and it is broken.", "Everything in order {order} is broken."],
}
VAGUE = {
    "where": ["Where is my order?", "I wait for my order, where is it?", "Tell me where my order is."],
    "return": ["I want my money back for my order.", "Please refund my order.", "I no longer want my order."],
    "both": ["I want my money back for my two orders.", "Please refund my two orders.", "I no longer want my two orders."],
    "last": ["I want my money back for my last order.", "Please refund my last order.", "I no longer want my last order."],
    "move": ["My order has to go to another city.", "I moved, send my order to my new city.", "Send my order to another city."],
    "broken": ["My order came broken.", "I got my order and it is broken.", "Everything in my order is broken."],
}
"""Requests of customers who leave out what the desk has to ask for."""
OPENINGS = ["", "Hello. ", "{name} here. ", "Good morning, this is {name}. "]
CLOSINGS = ["", " Thanks!", " It is urgent."]
DAYS = {"open": (1, 9), "shipped": (3, 19), "delivered": (10, 30), "final": (31, 90)}
"""How old orders of a status are; a delivered one can be given back, a final one cannot."""
ITEMS = "lamp chair desk shelf clock kettle radio carpet mirror sofa stool vase"
CITIES = (
    "Oslo Lund Bonn Turin Porto Lyon Graz Bern Ghent Delft Riga Split Cork Leeds Bath Nice Siena Trier Ulm Kiel Basel Brno "
    "Gdansk Krakow Varna Sofia Faro Vigo Cadiz Metz"
)
NAMES: dict[Split, tuple[str, str]] = {
    "train": ("Ada Ben Cleo Dan Eva Finn Gus Hal Ida Jon Kim Leo Mia Ned Ora", "Berg Cole Dahl Eng Falk Gray Holt Juul Kern"),
    "validation": ("Pia Quin Ruth Sven", "Lang Moor Nash Okon"),
    "test": ("Tess Ugo Vera Wim Xenia Yann Zoe Anouk Bo Carla", "Pohl Quist Rask Stein Thal Urban Voss Wolf"),
}
"""First and last names; nobody of one split is in another."""


def create_shop(
    database: Path, *, seed: int, train: int, validation: int = 48, test: int = 150, vague: bool = False
) -> list[Task]:
    """Write the staging database, and return the tickets of all splits: no order, customer or wording is in two of them.

    Args: `vague`, three of four customers leave things out.
    """
    requests = {kind: [*VAGUE[kind], *REQUESTS[kind][:1]] for kind in KINDS} if vague else REQUESTS
    rng = Random(seed)
    ids = iter(rng.sample(range(1000, 10000), 4 * (train + validation + test)))
    database.parent.mkdir(parents=True, exist_ok=True)
    database.unlink(missing_ok=True)
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(SCHEMA)
        counts: list[tuple[Split, int]] = [("train", train), ("validation", validation), ("test", test)]
        kinds = list(KINDS)
        tickets = [
            _ticket(connection, kinds[number % len(kinds)], split, ids, rng, requests)
            for split, count in counts
            for number in range(count)
        ]
        connection.commit()
    return tickets


def _ticket(
    connection: sqlite3.Connection, kind: str, split: Split, ids: Iterator[int], rng: Random, requests: Mapping[str, list[str]]
) -> Task:
    """A ticket of a new customer, whose orders go into the database."""
    customer, order, other = f"C{next(ids)}", f"K{next(ids)}", f"K{next(ids)}"
    first, last = NAMES[split]
    name = f"{rng.choice(first.split())} {rng.choice(last.split())}"
    home, city = rng.sample(CITIES.split(), 2)
    connection.execute("INSERT INTO customers VALUES (?, ?, ?, ?)", [customer, name, rng.choice(("gold", "plain")), home])
    status = "delivered" if kind == "broken" else rng.choice([*DAYS])
    days = rng.randint(*DAYS[status])
    connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", [order, customer, rng.choice(ITEMS.split()), status, days])
    # an older order, so that the last one is not the only one
    status = rng.choice([*DAYS])
    row = [other, customer, rng.choice(ITEMS.split()), status, max(rng.randint(*DAYS[status]), days + 1)]
    connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", row)
    values = {"order": order, "other": other, "customer": customer, "name": name, "city": city}
    text = rng.choice(_wordings(kind, split, requests)).format(**values)
    named = {"return": [order], "both": [order, other], "last": [customer]}.get(kind, [order])
    metadata = {"kind": kind, "named": named, "city": city if kind == "move" else ""}
    rubric = RULES[KINDS[kind]]
    return Task(id=f"desk/{order}", instruction=text, environment="desk", rubric=rubric, metadata=metadata, split=split)


def _wordings(kind: str, split: Split, requests: Mapping[str, list[str]]) -> list[str]:
    """The ways to ask for this in this split: half of all combinations for training, a quarter for each evaluation.

    Which ones is drawn: any rule over their numbers keeps some request from ever meeting some closing in training.
    """
    combinations = [o + r + c for o, r, c in product(OPENINGS, requests[kind], CLOSINGS)]
    Random(kind).shuffle(combinations)
    first, step = {"train": (0, 2), "validation": (1, 4), "test": (3, 4)}[split]
    return combinations[first::step]


class Shop:
    """The staging database, of which every episode gets a copy, and the check of what an episode did to its copy."""

    def __init__(self, database: Path) -> None:
        self._image = database.read_bytes()

    def copy(self) -> sqlite3.Connection:
        """A copy of the database of its own, in memory."""
        copy = sqlite3.connect(":memory:", check_same_thread=False)  # a graph runs its tools in threads
        copy.deserialize(self._image)
        return copy

    def showing(self, documents: Sequence[Sequence[Any]]) -> "Shop":
        """The shop in which these look-ups (tool, arguments, answer) return what they say."""
        looked_up = [(tool, *arguments.values(), json.loads(answer)) for tool, arguments, answer in documents]
        customers = {id: row for tool, id, row in looked_up if tool == "get_customer" and "error" not in row}
        orders = {id: row for tool, id, row in looked_up if tool == "get_order" and "error" not in row}
        last = {row["last_order"] for row in customers.values()}
        strangers = {row["customer"] for row in orders.values()} - {*customers}  # whom nobody has to look up
        with closing(self.copy()) as copy:
            rows = [(id, "", row["tier"], row["city"]) for id, row in customers.items()]
            copy.executemany("INSERT OR REPLACE INTO customers VALUES (?, ?, ?, ?)", rows)
            copy.executemany("INSERT OR IGNORE INTO customers VALUES (?, '', 'plain', 'Oslo')", [(id,) for id in strangers])
            rows = [(id, row["customer"], row["item"], row["status"], int(id not in last)) for id, row in orders.items()]
            copy.executemany("INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?, ?)", rows)
            copy.commit()
            other = Shop.__new__(Shop)
            other._image = copy.serialize()
        return other

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """The block is one episode: the agent's tools work on a copy of its own."""
        with closing(self.copy()) as copy, connected(copy):
            yield

    def solved(self, task: Task, answer: str) -> bool:
        """Whether the database that the tools work on is as it should be after this ticket, and the answer says what was asked.

        Every row is compared. A question's answer has to name the status or the city, and no other one.
        """
        after = _rows()
        with self.fresh():
            facts = _deal_with(task)
            expected = _rows()
        said = set("".join(letter if letter.isalnum() else " " for letter in answer.casefold()).split())
        told = {word for words in (DAYS, CITIES.casefold().split()) if facts & {*words} for word in words}
        return after == expected and said & told == facts


def _deal_with(task: Task) -> set[str]:
    """Do what is right, by the tools; returns what the answer has to name."""
    connection, kind, named = connection_in_use(), task.metadata["kind"], list(task.metadata["named"])
    if kind == "last":
        found = connection.execute("SELECT id FROM orders WHERE customer = ? ORDER BY days LIMIT 1", named).fetchone()
        named = list(found)
    facts = set[str]()
    for order in named:
        row = "SELECT o.status, c.id, c.tier, c.city FROM orders o JOIN customers c ON c.id = o.customer WHERE o.id = ?"
        status, customer, tier, city = connection.execute(row, [order]).fetchone()
        match KINDS[kind], status:
            case "where", _:
                facts |= {status, city.casefold()}
            case "address", "open":
                set_city(customer, task.metadata["city"])
            case "address", "delivered" | "final":
                facts.add(city.casefold())
            case "broken", _:
                refund(order) if tier == "gold" else escalate(order, "broken")
            case "money", "open":
                cancel(order)
            case "money", "delivered":
                refund(order)
            case _:
                escalate(order, status)
    return facts


def _rows() -> list[list[Any]]:
    """Every row of every table of the database that the tools work on."""
    tables = ("customers", "orders", "cases")
    return [sorted(connection_in_use().execute(f"SELECT * FROM {table}").fetchall()) for table in tables]
