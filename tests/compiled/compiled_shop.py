"""A small shop whose rules the tests know."""

import json
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from dreamgym_lg.simulate.wall.wall import missing_for_wall

walled = pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")


class Shop:
    """A backend with rules that a test knows."""

    def __init__(self, rng: Random, number: int) -> None:
        customer, order = f"C{number}", f"K{number}"
        self.orders: dict[str, dict[str, Any]] = {
            order: {
                "id": order,
                "status": rng.choice(["open", "sent", "paid"]),
                "customer": customer,
                "total": rng.randint(5, 200),
            }
        }
        self.customers: dict[str, dict[str, Any]] = {
            customer: {"id": customer, "city": rng.choice(["Oslo", "Lund", "Bern"]), "gold": rng.random() < 0.5}
        }

    def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        answer = getattr(self, tool)(**arguments)
        return answer if isinstance(answer, str) else json.dumps(answer)

    def get_order(self, order_id: str) -> Any:
        return self.orders.get(order_id, f"Error: no order {order_id}")

    def get_customer(self, customer_id: str) -> Any:
        return self.customers[customer_id]

    def refund(self, order_id: str) -> Any:
        order = self.orders[order_id]
        if order["status"] != "sent":
            return f"Error: the order is {order['status']}"
        if order["total"] > 100:
            return {"error": "too much", "limit": 100}
        order["status"] = "refunded"
        return order

    def move(self, customer_id: str, city: str) -> Any:
        self.customers[customer_id]["city"] = city
        return {"city": city}

    def note(self, text: str) -> Any:
        return "noted"
