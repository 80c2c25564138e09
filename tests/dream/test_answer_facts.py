"""Which words of an answer are facts: those that tools tell, and no words that any answer may have."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dreamgym_lg.experience.answer_facts import Answered, Facts, Vocabulary

CITIES = ["Oslo", "New York", "York", "Lund"]
STATUSES = ["open", "in_transit", "delivered", "open"]
FOUND = [
    {"id": f"K{n}", "status": status, "city": city, "items": n + 2, "currency": "EUR"}
    for n, (status, city) in enumerate(zip(STATUSES, CITIES, strict=True))
]
ORDERS = [("get_order", json.dumps(found)) for found in FOUND]
OSLO, NEW_YORK = ORDERS[:2]
QUESTION = "Where is order K0?"


def recorded(answer: str, *told: tuple[str, str], request: str = QUESTION) -> Answered:
    return Answered(request, told or (OSLO,), answer)


def facts_of(answer: Answered, *others: Answered, told: Sequence[tuple[str, str]] = ORDERS, **options: Any) -> Facts:
    found = Vocabulary(told, [answer, *others], **options).facts(answer)
    assert found is not None
    return found


def agrees(answer: Answered, dreamed: str, *others: Answered, told: Sequence[tuple[str, str]] = ORDERS) -> bool:
    vocabulary = Vocabulary(told, [answer, *others])
    facts = vocabulary.facts(answer)
    assert facts is not None
    return vocabulary.agrees(dreamed, facts)


@pytest.mark.parametrize(
    ("dreamed", "right"),
    [
        ("It's OPEN, and for Oslo!", True),
        ("oslo; open.", True),
        ("Order K0 (2 items) is open, for Oslo.", True),  # told of it in another place
        ("Order K0 is open.", False),
        ("Order K0 is for Oslo.", False),
        ("Order K0 is delivered, for Oslo.", False),
        ("Order K0 is open, for Lund.", False),
        ("Order K0 is open or delivered, for Oslo or Lund.", False),
        ("Order K0 is opened, for Oslo.", False),
        ("It is open, for Oslo; status, city, id, price, EUR.", True),  # keys, and what always is the same
        ("", False),
    ],
)
def test_an_answer_in_any_wording_tells_all_values_and_no_other_of_the_same_places(dreamed: str, right: bool) -> None:
    assert agrees(recorded("Order K0 is open, for Oslo."), dreamed) is right


def test_values_of_several_words_are_whole_and_enumerations_may_be_spelled_out() -> None:
    answer = recorded("K1 is in transit to New York.", NEW_YORK, request="Where is K1?")
    assert str(facts_of(answer)) == "in transit, new york" and facts_of(answer).complete
    assert agrees(answer, "in_transit, New York")
    assert not agrees(answer, "In transit, for York.") and not agrees(answer, "In transit, from York to New York.")


@pytest.mark.parametrize(
    ("told", "said", "same"),
    [
        (20.0, "20", True),
        (20, "20.00 EUR", True),
        (20, "$20.", True),
        (20, "20kg", True),
        (20, "200", False),
        (20, "K20", False),
        (1234.5, "1,234.50", True),
        (-5, "5", False),
        (0.25, "0.25", True),
        ("W-204", "w-204", True),
        ("00123", "123", False),
        ("2026-05-01", "on 2026-05-01", True),
        ("2026-05-01T10:00:00", "2026-05-01 10:00:00", True),
    ],
)
def test_numbers_and_ids_are_compared_by_what_they_mean(told: Any, said: str, same: bool) -> None:
    spelled = f"{told:.2f}" if isinstance(told, float) else str(told)
    price, other = (("get_price", json.dumps({"price": each})) for each in (told, 77 if told != 77 else 78))
    assert agrees(recorded(f"It is {spelled}.", price), f"That would be {said}", told=[price, other]) is same


def test_what_the_request_said_is_no_fact_and_a_contradiction_unless_the_recorded_answer_says_it() -> None:
    moved = "I moved to Lund, send order K0 there."
    plain, repeats = (recorded(text, request=moved) for text in ("It went to Oslo.", "Not to Lund, it went to Oslo."))
    assert str(facts_of(plain)) == str(facts_of(repeats)) == "oslo"
    assert not agrees(plain, "Not to Lund, to Oslo.") and agrees(repeats, "Not to Lund, to Oslo.")
    assert Vocabulary(ORDERS, ()).facts(recorded("Yes, it is for Oslo.", request="Is K0 for Oslo?")) is None


def test_an_answer_without_a_value_tells_no_fact() -> None:
    for text in ("Done.", "", "It is K0, paid in EUR."):
        assert Vocabulary(ORDERS, ()).facts(recorded(text)) is None
    assert Vocabulary(ORDERS[:1], ()).facts(recorded("It is open, for Oslo.")) is None, "nothing else was ever told there"


def test_a_word_that_answers_mostly_say_untold_contradicts_nothing_and_makes_no_sure_fact() -> None:
    answer = recorded("It is delivered, for New York.", ("get_order", '{"status": "delivered", "city": "New York"}'))
    opened = recorded("I could open it: Lund.", ("get_order", '{"city": "Lund"}'), request="What is it?")
    assert not agrees(answer, "I did open it: delivered, New York.")
    assert agrees(answer, "I did open it: delivered, New York.", opened, opened)
    assert facts_of(recorded("It is open, for Oslo."), opened, opened).complete is False
    guess = Answered("What is it?", (), "It is open.")
    assert not agrees(answer, "I did open it: delivered, New York.", guess, guess), "nothing was looked up"


def test_what_no_tool_had_told_makes_a_success_no_sure_reference() -> None:
    assert facts_of(recorded("It is open, for Oslo.")).complete
    guessed = recorded("It is delivered, for Oslo.", ("get_customer", '{"city": "Oslo"}'))
    told = [*ORDERS, ("get_customer", '{"city": "Oslo"}'), ("get_customer", '{"city": "Lund"}')]
    others = [recorded("It is delivered.", ORDERS[2])] * 3
    assert str(facts_of(guessed, *others, told=told)) == "oslo" and not facts_of(guessed, *others, told=told).complete


def test_a_plain_text_is_a_value_where_it_is_short_and_a_sentence_where_most_of_its_words_never_change() -> None:
    weather = [("weather", text) for text in ("sunny", "rain", "Sunny spells")]
    answer = recorded("Take sunglasses, sunny spells.", weather[2], request="What to wear?")
    assert agrees(answer, "There will be SUNNY SPELLS.", told=weather) and not agrees(answer, "Sunny.", told=weather)
    places = [("open", "Oslo"), ("shipped", "Lund"), ("open", "Bonn"), ("final", "Oslo")]
    orders = [("find", f"Order K{n} is {status}, for {city}.") for n, (status, city) in enumerate(places)]
    answer = recorded("It is open and on its way to Oslo.", orders[0])
    assert str(facts_of(answer, told=orders)) == "open, oslo" and facts_of(answer, told=orders).complete
    assert agrees(answer, "It's open - to Oslo", told=orders) and not agrees(answer, "Order K0 is open, for Bonn.", told=orders)


def test_a_paraphrase_of_a_document_is_right_by_its_numbers_and_for_the_model_to_judge() -> None:
    returns = ("search", "Goods may be sent back within 30 days of delivery if they are unused; we pay for the parcel.")
    others = [("search", "A warranty of 24 months holds for all lamps. Please keep the bill."), ("search", "We close at 18.")]
    answer = recorded("You can send it back within 30 days.", returns, request="How long can I give it back?")
    facts = facts_of(answer, told=[returns, *others])
    assert str(facts) == "30" and not facts.complete
    assert agrees(answer, "For 30 days after delivery we take lamps back, please keep it unused.", told=[returns, *others])
    assert not agrees(answer, "Within 24 days.", told=[returns, *others])
    assert Vocabulary([returns, *others], ()).facts(recorded("Unused goods: yes.", returns)) is None


def test_answers_of_tools_that_really_run_are_no_facts() -> None:
    clock = [("clock", "10:15"), ("clock", "10:16")]
    answer = recorded("It is 10:15, and open, for Oslo.", OSLO, clock[0])
    assert "10 15" in str(facts_of(answer, told=[*ORDERS, *clock])) and facts_of(answer, told=[*ORDERS, *clock]).complete
    facts = facts_of(answer, told=[*ORDERS, *clock], opaque=["clock"])
    assert str(facts) == "open, oslo" and not facts.complete


def test_facts_carry_over_to_what_the_tools_told_in_the_same_places() -> None:
    answer, request = recorded("Order K0 is open, for Oslo."), "Where is order K1?"
    vocabulary, facts = Vocabulary(ORDERS, [answer]), facts_of(answer)
    carried = vocabulary.carried_over(facts, request, [NEW_YORK])
    assert carried is not None and str(carried) == "in transit, new york" and carried.complete
    assert vocabulary.agrees("In transit: New York", carried) and not vocabulary.agrees("Open, for Oslo.", carried)
    assert vocabulary.carried_over(facts, request, ORDERS[:2]) is None, "two values, of which the seed tells one"
    assert vocabulary.carried_over(facts, request, [("get_order", '{"status": "open"}')]) is None
    assert vocabulary.carried_over(facts, "Where in York is K2?", [ORDERS[2]]) is None
