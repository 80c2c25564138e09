"""The order of keys that the official answers show. The packed database, sorted by key, has lost it."""

from base64 import b85decode
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

_RECORDS = (
    # both domains
    *("first_name last_name", "address1 address2 city country state zip", "source brand last_four id"),
    # airline
    "flight_number origin destination scheduled_departure_time_est scheduled_arrival_time_est dates",
    *("status available_seats prices", "basic_economy economy business", "origin destination flight_number date price"),
    "origin destination flight_number date",
    *("flight_number date", "first_name last_name dob", "payment_id amount", "source amount id"),
    "name address email dob payment_methods saved_passengers membership reservations",
    "reservation_id user_id origin destination flight_type cabin flights passengers payment_history created_at total_baggages"
    " nonfree_baggages insurance",
    # retail
    *("order_id user_id address items fulfillments status payment_history", "name product_id item_id price options"),
    *("tracking_id item_ids", "transaction_type amount payment_method_id", "name product_id variants"),
    *("item_id options available price", "name address email payment_methods orders", "source id", "source balance id"),
)
_FIELDS = {frozenset(fields.split()): tuple(fields.split()) for fields in _RECORDS}
_RANKS = {
    "9ab3635c8e275dcb": (
        "vqqq+Q!wNJ6uqs;eKbxi<XUXi6JLG{poc@nenkpk3C+QJEtJP6sxVqL8j+RbL3jD)c1qmKodJAi7V@4qQ9M&=35Qd5x`fd&jVzwuE(g3zUD0nG"
        "SmzI%;nsV(t6n86O(L8QFg-`ZE`^O3mFx}x|Ce`^vhZe!9~_#GRFmC7H_jhUV)$1RIPbycw1jE<%iDfzL0{?ga5tyqM$-th92g}}!i4%vb@P*b"
        "Gkl0b6>gO{$a("
    ),
    "c49125b83c32941b": (
        "K8uuvcO_CaAU4zk!6US1#ZIvxzBg(-P-fome2C*_pS_D$`K6??&q4l@zovlai{^%0S$@8L0Y)+F=uskFq7k}{Y>}dl75q1AKMCPZZX`iHU+Rxn"
        "txYxdrHeA{s9@4_*@LJNf_=YRV!z`4>)R$q3}<It`p>%Ef2NQqM+VviJ85qVXNK@ifIELxSl$UDF$u2E8R`}`t+b3ye&h#so%fo>!{{(zH8bi`"
        "4f^POE7+Uk6vf8*s|_%2^kFH4i8!yt;QW3rY+l|EJ_pFT_JZJJL&VDSnC!SrUlM5n;s"
    ),
}
"""Order of the keys that are no field names, by the digest of a database. These are payment methods, variants, options.

A number in base 85, of a mixed radix: for the dictionaries of `_groups`, one after the other, at which place of the keys that
are left, sorted, the next one stands. From tau-bench's data files (Sierra Research, MIT licence).
"""


def in_official_order(database: Mapping[str, dict[str, Any]], digest: str) -> dict[str, dict[str, Any]]:
    """The database with its records' keys in the order of the official data files.

    Args: `digest`, the database's; payment methods, variants and options of an unknown one stay as they are.
    """
    ordered: dict[str, dict[str, Any]] = {table: in_field_order(records) for table, records in database.items()}
    if digest in _RANKS:
        rank = int.from_bytes(b85decode(_RANKS[digest]))
        for group in _groups(ordered):
            keys, chosen = sorted(group[0][0][group[0][1]]), list[str]()
            while keys:
                rank, place = divmod(rank, len(keys))
                chosen.append(keys.pop(place))
            for record, field in group:
                record[field] = {key: record[field][key] for key in chosen}
    return ordered


def in_field_order(value: Any) -> Any:
    """A copy of a JSON value. The keys of each known record are in the official order."""
    if isinstance(value, list):
        return [in_field_order(each) for each in value]
    if isinstance(value, dict):
        return {key: in_field_order(value[key]) for key in _FIELDS.get(frozenset(value), value)}
    return value


def _groups(database: Mapping[str, dict[str, Any]]) -> Iterator[list[tuple[Any, str]]]:
    """The dictionaries without fixed fields, as record and field. Those of a group have the same keys in the same order."""
    for _, user in sorted(database["users"].items()):
        yield [(user, "payment_methods")]
    sold = defaultdict[str, list[tuple[Any, str]]](list)
    for order in database.get("orders", {}).values():
        for item in order["items"]:
            sold[item["product_id"]].append((item, "options"))
    for id, product in sorted(database.get("products", {}).items()):
        yield [(product, "variants")]
        yield [*((variant, "options") for variant in product["variants"].values()), *sold[id]]
