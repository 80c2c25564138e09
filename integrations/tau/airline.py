"""tau-bench's airline tools: functions of a database, whose answers and effects are the official ones."""

from collections.abc import Mapping, Sequence

from dreamgym_lg.integrations.tau.common import SHARED, Database, Record, Refused, Tool, find, writable

AIRPORTS = {
    **{"SFO": "San Francisco", "JFK": "New York", "LAX": "Los Angeles", "ORD": "Chicago", "DFW": "Dallas"},
    **{"DEN": "Denver", "SEA": "Seattle", "ATL": "Atlanta", "MIA": "Miami", "BOS": "Boston"},
    **{"PHX": "Phoenix", "IAH": "Houston", "LAS": "Las Vegas", "MCO": "Orlando", "EWR": "Newark"},
    **{"CLT": "Charlotte", "MSP": "Minneapolis", "DTW": "Detroit", "PHL": "Philadelphia", "LGA": "LaGuardia"},
}
NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
NEW_CERTIFICATES = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
"""Ids in the order in which they are given. Of reservations the last one is given again and again."""
NOW = "2024-05-15T15:00:00"
INSURANCE, BAG = 30, 50
"""Dollars for each passenger, and for each bag that is not free."""


def get_reservation_details(database: Database, reservation_id: str) -> Record:
    return find(database, "reservations", reservation_id, "user not found")  # the official words


def list_all_airports(database: Database) -> Mapping[str, str]:
    return AIRPORTS


def search_direct_flight(database: Database, origin: str, destination: str, date: str) -> list[Record]:
    flights = [each for each in database["flights"].values() if each["origin"] == origin and each["destination"] == destination]
    return [_offer(flight, date) for flight in flights if _is_available(flight, date)]


def search_onestop_flight(database: Database, origin: str, destination: str, date: str) -> list[list[Record]]:
    flights, offers = database["flights"].values(), list[list[Record]]()
    seconds = [flight for flight in flights if flight["destination"] == destination]
    for first in (flight for flight in flights if flight["origin"] == origin):
        for second in (flight for flight in seconds if flight["origin"] == first["destination"]):
            overnight = "+1" in first["scheduled_arrival_time_est"]
            next_date = f"2024-05-{int(date[-2:]) + 1}" if overnight else date
            if first["scheduled_arrival_time_est"] > second["scheduled_departure_time_est"]:
                continue  # as texts: a first flight that lands overnight meets those behind its hour of the next day
            if _is_available(first, date) and _is_available(second, next_date):
                # the official tool shows the second flight's seats and prices of the first one's date
                offers.append([{**_offer(first, date), "date": date}, {**_offer(second, date), "date": next_date}])
    return offers


def book_reservation(
    database: Database,
    user_id: str,
    origin: str,
    destination: str,
    flight_type: str,
    cabin: str,
    flights: Sequence[Record],
    passengers: Sequence[Record],
    payment_methods: Sequence[Record],
    total_baggages: int,
    nonfree_baggages: int,
    insurance: str,
) -> Record:
    find(database, "users", user_id, "user not found")
    taken = database["reservations"]
    reservation_id = next((new for new in NEW_RESERVATIONS if new not in taken), NEW_RESERVATIONS[-1])
    booked = [_book(database, flight, cabin, passengers) for flight in flights]
    price = sum(flight["price"] for flight in booked) * len(passengers)
    price += INSURANCE * len(passengers) if insurance == "yes" else 0
    price += BAG * nonfree_baggages
    _check_payments(database["users"][user_id], payment_methods, price)
    user = writable(database, "users", user_id)
    for payment in payment_methods:
        method = user["payment_methods"][payment["payment_id"]]
        if method["source"] == "gift_card":
            method["amount"] -= payment["amount"]
        elif method["source"] == "certificate":
            del user["payment_methods"][payment["payment_id"]]
    reservation = database["reservations"][reservation_id] = {
        "reservation_id": reservation_id,
        "user_id": user_id,
        "origin": origin,
        "destination": destination,
        "flight_type": flight_type,
        "cabin": cabin,
        "flights": booked,
        "passengers": passengers,
        "payment_history": payment_methods,
        "created_at": NOW,
        "total_baggages": total_baggages,
        "nonfree_baggages": nonfree_baggages,
        "insurance": insurance,
    }
    user["reservations"].append(reservation_id)
    return reservation


def cancel_reservation(database: Database, reservation_id: str) -> Record:
    find(database, "reservations", reservation_id, "reservation not found")
    reservation = writable(database, "reservations", reservation_id)
    paid = reservation["payment_history"]
    paid.extend([{"payment_id": payment["payment_id"], "amount": -payment["amount"]} for payment in paid])
    reservation["status"] = "cancelled"
    return reservation


def update_reservation_flights(
    database: Database, reservation_id: str, cabin: str, flights: Sequence[Record], payment_id: str
) -> Record:
    reservation = find(database, "reservations", reservation_id, "reservation not found")
    old, passengers, booked = reservation["flights"], reservation["passengers"], list[Record]()
    known = {(each["flight_number"], each["date"]): each for each in reversed(old) if cabin == reservation["cabin"]}
    for flight in flights:
        same = known.get((flight["flight_number"], flight["date"]))
        booked.append(_book(database, flight, cabin, passengers) if same is None else _priced(flight, same["price"], same))
    price = (sum(flight["price"] for flight in booked) - sum(flight["price"] for flight in old)) * len(passengers)
    _charge(database, reservation, payment_id, price)
    reservation = writable(database, "reservations", reservation_id)
    reservation["flights"] = booked or flights  # the cabin stays as it was: so does the official tool
    _add_payment(reservation, payment_id, price)
    return reservation


def update_reservation_baggages(
    database: Database, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
) -> Record:
    reservation = find(database, "reservations", reservation_id, "reservation not found")
    price = BAG * max(0, nonfree_baggages - reservation["nonfree_baggages"])
    _charge(database, reservation, payment_id, price)
    reservation = writable(database, "reservations", reservation_id)
    reservation["total_baggages"], reservation["nonfree_baggages"] = total_baggages, nonfree_baggages
    _add_payment(reservation, payment_id, price)
    return reservation


def update_reservation_passengers(database: Database, reservation_id: str, passengers: Sequence[Record]) -> Record:
    reservation = find(database, "reservations", reservation_id, "reservation not found")
    if len(passengers) != len(reservation["passengers"]):
        raise Refused("number of passengers does not match")
    reservation = writable(database, "reservations", reservation_id)
    reservation["passengers"] = passengers
    return reservation


def send_certificate(database: Database, user_id: str, amount: float) -> str | None:
    find(database, "users", user_id, "user not found")
    user = writable(database, "users", user_id)
    for new in NEW_CERTIFICATES:
        if new not in user["payment_methods"]:
            user["payment_methods"][new] = {"source": "certificate", "amount": amount, "id": new}
            return f"Certificate {new} added to user {user_id} with amount {amount}."
    return None


# --- Flights and payments --------------------------------------------------------------------------------------------


def _is_available(flight: Record, date: str) -> bool:
    return date in flight["dates"] and flight["dates"][date]["status"] == "available"


def _offer(flight: Record, date: str) -> Record:
    return {**{key: value for key, value in flight.items() if key != "dates"}, **flight["dates"][date]}


def _book(database: Database, flight: Record, cabin: str, passengers: Sequence[Record]) -> Record:
    """The flight with its price and places; `Refused` if it cannot be booked. No seat is taken, as in the official tools."""
    number, date = flight["flight_number"], flight["date"]
    scheduled = find(database, "flights", number, f"flight {number} not found")
    if date not in scheduled["dates"]:
        raise Refused(f"flight {number} not found on date {date}")
    if not _is_available(scheduled, date):
        raise Refused(f"flight {number} not available on date {date}")
    offered = scheduled["dates"][date]
    if offered["available_seats"][cabin] < len(passengers):
        raise Refused(f"not enough seats on flight {number}")
    return _priced(flight, offered["prices"][cabin], scheduled)


def _priced(flight: Record, price: float, places: Record) -> Record:
    return {**flight, "price": price, "origin": places["origin"], "destination": places["destination"]}


def _check_payments(user: Record, payments: Sequence[Record], price: float) -> None:
    for payment in payments:
        payment_id, amount = payment["payment_id"], payment["amount"]
        if payment_id not in user["payment_methods"]:
            raise Refused(f"payment method {payment_id} not found")
        method = user["payment_methods"][payment_id]
        if method["source"] in ("gift_card", "certificate") and method["amount"] < amount:
            raise Refused(f"not enough balance in payment method {payment_id}")
    paid = sum(payment["amount"] for payment in payments)
    if paid != price:
        raise Refused(f"payment amount does not add up, total price is {price}, but paid {paid}")


def _charge(database: Database, reservation: Record, payment_id: str, price: float) -> None:
    """Take the price of a change from its payment method. A negative price is paid back to a gift card."""
    methods = database["users"][reservation["user_id"]]["payment_methods"]
    if payment_id not in methods:
        raise Refused("payment method not found")
    if methods[payment_id]["source"] == "certificate":
        raise Refused("certificate cannot be used to update reservation")
    if methods[payment_id]["source"] == "gift_card":
        if methods[payment_id]["amount"] < price:
            raise Refused("gift card balance is not enough")
        writable(database, "users", reservation["user_id"])["payment_methods"][payment_id]["amount"] -= price


def _add_payment(reservation: Record, payment_id: str, price: float) -> None:
    if price != 0:
        reservation["payment_history"].append({"payment_id": payment_id, "amount": price})


TOOLS: Sequence[Tool] = (
    *SHARED,
    *(book_reservation, cancel_reservation, get_reservation_details, list_all_airports),
    *(search_direct_flight, search_onestop_flight, send_certificate),
    *(update_reservation_baggages, update_reservation_flights, update_reservation_passengers),
)
