"""tau-bench's retail tools: functions of a database, whose answers and effects are the official ones."""

from collections.abc import Mapping, Sequence

from dreamgym_lg.integrations.tau.common import SHARED, Database, Record, Refused, Tool, find, writable

REASONS = ("no longer needed", "ordered by mistake")


def get_order_details(database: Database, order_id: str) -> Record:
    return find(database, "orders", order_id, "order not found")


def get_product_details(database: Database, product_id: str) -> Record:
    return find(database, "products", product_id, "product not found")


def list_all_product_types(database: Database) -> Mapping[str, str]:
    return dict(sorted((product["name"], product["product_id"]) for product in database["products"].values()))


def find_user_id_by_email(database: Database, email: str) -> str:
    for user_id, user in database["users"].items():
        if user["email"].lower() == email.lower():
            return str(user_id)
    raise Refused("user not found")


def find_user_id_by_name_zip(database: Database, first_name: str, last_name: str, zip: str) -> str:
    for user_id, user in database["users"].items():
        name = user["name"]
        if (
            name["first_name"].lower() == first_name.lower()
            and name["last_name"].lower() == last_name.lower()
            and user["address"]["zip"] == zip
        ):
            return str(user_id)
    raise Refused("user not found")


def modify_user_address(
    database: Database, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> Record:
    find(database, "users", user_id, "user not found")
    user = writable(database, "users", user_id)
    user["address"] = _address(address1, address2, city, state, country, zip)
    return user


def modify_pending_order_address(
    database: Database, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> Record:
    _find_order(database, order_id, "pending", "modified")
    order = writable(database, "orders", order_id)
    order["address"] = _address(address1, address2, city, state, country, zip)
    return order


def cancel_pending_order(database: Database, order_id: str, reason: str) -> Record:
    _find_order(database, order_id, "pending", "cancelled")
    if reason not in REASONS:
        raise Refused("invalid reason")
    order = writable(database, "orders", order_id)
    refunds = [_payment("refund", paid["amount"], paid["payment_method_id"]) for paid in order["payment_history"]]
    for refund in refunds:
        if "gift_card" in refund["payment_method_id"]:
            _add_balance(database, order, refund["payment_method_id"], refund["amount"])
    order["status"], order["cancel_reason"] = "cancelled", reason
    order["payment_history"].extend(refunds)
    return order


def modify_pending_order_payment(database: Database, order_id: str, payment_method_id: str) -> Record:
    order = _find_order(database, order_id, "pending", "modified")
    method = _find_method(database, order, payment_method_id)
    first = order["payment_history"][0]
    if len(order["payment_history"]) > 1 or first["transaction_type"] != "payment":
        raise Refused("there should be exactly one payment for a pending order")
    if first["payment_method_id"] == payment_method_id:
        raise Refused("the new payment method should be different from the current one")
    amount, old = first["amount"], first["payment_method_id"]
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise Refused("insufficient gift card balance to pay for the order")
    order = writable(database, "orders", order_id)
    order["payment_history"] += [_payment("payment", amount, payment_method_id), _payment("refund", amount, old)]
    if method["source"] == "gift_card":
        _add_balance(database, order, payment_method_id, -amount)
    if "gift_card" in old:
        _add_balance(database, order, old, amount)
    return order


def modify_pending_order_items(
    database: Database, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Record:
    order = _find_order(database, order_id, "pending", "modified")
    difference = _exchange_price(database, order, item_ids, new_item_ids)
    method = _find_method(database, order, payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise Refused("insufficient gift card balance to pay for the new item")
    order = writable(database, "orders", order_id)
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(_payment(kind, abs(difference), payment_method_id))
    if method["source"] == "gift_card":
        _add_balance(database, order, payment_method_id, -difference)
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = _item(order, item_id)
        variant = database["products"][item["product_id"]]["variants"][new_item_id]
        item |= {"item_id": new_item_id, "price": variant["price"], "options": variant["options"]}
    order["status"] = "pending (item modified)"
    return order


def exchange_delivered_order_items(
    database: Database, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Record:
    order = _find_order(database, order_id, "delivered", "exchanged")
    difference = round(_exchange_price(database, order, item_ids, new_item_ids), 2)
    method = _find_method(database, order, payment_method_id)
    if method["source"] == "gift_card" and method["balance"] < difference:
        raise Refused("insufficient gift card balance to pay for the price difference")
    order = writable(database, "orders", order_id)
    order["status"] = "exchange requested"
    order["exchange_items"], order["exchange_new_items"] = sorted(item_ids), sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = difference
    return order


def return_delivered_order_items(database: Database, order_id: str, item_ids: list[str], payment_method_id: str) -> Record:
    order = _find_order(database, order_id, "delivered", "returned")
    _find_method(database, order, payment_method_id)
    if "gift_card" not in payment_method_id and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise Refused("payment method should be either the original payment method or a gift card")
    if any(_is_short_of(order, item_ids, item_id) for item_id in item_ids):
        raise Refused("some item not found")
    order = writable(database, "orders", order_id)
    order["status"] = "return requested"
    order["return_items"], order["return_payment_method_id"] = sorted(item_ids), payment_method_id
    return order


# --- Orders and payments ---------------------------------------------------------------------------------------------


def _find_order(database: Database, order_id: str, status: str, done: str) -> Record:
    order = find(database, "orders", order_id, "order not found")
    if order["status"] != status:
        raise Refused(f"non-{status} order cannot be {done}")
    return order


def _find_method(database: Database, order: Record, payment_method_id: str) -> Record:
    methods = database["users"][order["user_id"]]["payment_methods"]
    if payment_method_id not in methods:
        raise Refused("payment method not found")
    return methods[payment_method_id]


def _is_short_of(order: Record, item_ids: list[str], item_id: str) -> bool:
    return item_ids.count(item_id) > sum(item["item_id"] == item_id for item in order["items"])


def _item(order: Record, item_id: str) -> Record:
    return [item for item in order["items"] if item["item_id"] == item_id][0]  # its IndexError is the answer


def _exchange_price(database: Database, order: Record, item_ids: list[str], new_item_ids: list[str]) -> float:
    """How many dollars the new items cost more than the old ones. Raises `Refused` for items that cannot be exchanged."""
    for item_id in item_ids:
        if _is_short_of(order, item_ids, item_id):
            raise Refused(f"{item_id} not found")
    if len(item_ids) != len(new_item_ids):
        raise Refused("the number of items to be exchanged should match")
    difference: float = 0  # a whole number if nothing is exchanged
    for item_id, new_item_id in zip(item_ids, new_item_ids, strict=True):
        item = _item(order, item_id)
        variants = database["products"][item["product_id"]]["variants"]
        if not (new_item_id in variants and variants[new_item_id]["available"]):
            raise Refused(f"new item {new_item_id} not found or available")
        difference += variants[new_item_id]["price"] - item["price"]
    return difference


def _payment(kind: str, amount: float, payment_method_id: str) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": payment_method_id}


def _add_balance(database: Database, order: Record, payment_method_id: str, amount: float) -> None:
    method = writable(database, "users", order["user_id"])["payment_methods"][payment_method_id]
    method["balance"] = round(method["balance"] + amount, 2)


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Record:
    return {"address1": address1, "address2": address2, "city": city, "state": state, "country": country, "zip": zip}


TOOLS: Sequence[Tool] = (
    *SHARED,
    *(cancel_pending_order, exchange_delivered_order_items, find_user_id_by_email, find_user_id_by_name_zip),
    *(get_order_details, get_product_details, list_all_product_types, modify_pending_order_address),
    *(modify_pending_order_items, modify_pending_order_payment, modify_user_address, return_delivered_order_items),
)
