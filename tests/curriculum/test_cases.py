"""Whether the answers of lookups make a case that recorded successes have been in."""

from collections.abc import Callable
from itertools import product
from random import Random

import pytest

from dreamgym_lg.curriculum.cases import Cases, Deed, Done, Success, telling_apart
from dreamgym_lg.curriculum.plays import Place, Play, Scalar, text_of
from dreamgym_lg.types import Task

FLAGS: tuple[Place, ...] = (("answer", "get", "reserved"), ("answer", "get", "renewed"), ("answer", "get", "overdue"))
AGE: Place = ("answer", "get", "age")
CASES = Cases({**dict.fromkeys(FLAGS, {"yes": 90, "no": 90}), AGE: {str(age): 2 for age in range(90)}})
PLAY = Play(Task(id="t", instruction="", environment="desk"), True, (), (), (), "")


def found(*values: Scalar, age: int = 10) -> dict[Place, Scalar]:
    return dict(zip(FLAGS, values, strict=False)) | {AGE: age}


def success(*values: Scalar, age: int = 10) -> Success:
    texts = {place: {text_of(value): value} for place, value in found(*values, age=age).items()}
    return Success(PLAY, frozenset(), (), (), texts)


def successes(*cases: str, age: int = 10) -> list[Success]:
    return [success(*case.split(), age=age) for case in cases]


def deeds(known: list[Success], decide: Callable[[Success], str]) -> list[Deed]:
    return [(((decide(each),),), "") for each in known]


def renewed_if_free(known: Success) -> str:
    return "renew" if known.has(FLAGS[0], "no") else "refuse"


def test_a_condition_that_decided_nothing_need_not_be_seen_with_the_others() -> None:
    known = successes("no no no", "no yes no", "no no no", "no yes no", "no no yes", "yes no no", "yes no no", "yes no no")
    renewed, case = known[:5], found("no", "yes", "yes")
    assert not CASES.among(known).seen(renewed, case), "overdue is not seen with what has been renewed before"
    cases = CASES.among(known, [deeds(known, renewed_if_free)])
    assert not cases.seen(renewed, case), "two successes that were renewed before are too few to tell"
    known += successes("no yes no")
    cases = CASES.among(known, [deeds(known, renewed_if_free)])
    assert cases.seen(renewed, case) and not cases.seen(known[5:8], found("yes", "yes", "no")), "nothing that was refused"


def test_a_condition_that_others_explain_as_well_decides() -> None:
    known = [*successes("no no no", "no no no", "yes yes no", "yes yes no"), *successes("no no yes", "yes yes yes")]
    cases = CASES.among(known, [deeds(known, renewed_if_free)])
    assert not cases.seen(known, found("no", "yes", "no")), "whether it is reserved or was renewed decides"


def test_where_no_conditions_explain_what_was_done_all_decide() -> None:
    known = [*successes(*["no no no", "no yes no"] * 4, age=10), *successes("no no no", age=90)]
    cases = CASES.among(known, [deeds(known, lambda each: "refuse" if each.has(AGE, "90") else "renew")])
    assert not cases.seen(successes("no no no"), found("no", "yes", "no"))


def test_where_records_are_too_long_to_try_all_conditions_decide() -> None:
    """Hundreds of fields with few values: trying every three of them would take hours."""
    rng = Random(0)
    places: list[Place] = [("answer", "list", str(number)) for number in range(100)]
    done = [Done({place: rng.choice("ab") for place in places}, ((("do", str(n % 2)),), ""), success("no")) for n in range(60)]
    assert telling_apart(done) == []
    assert telling_apart([each._replace(told={**each.told, places[7]: each.deed[0][0][1]}) for each in done]) == [{places[7]}]


def test_a_condition_with_a_limit_of_its_own_decides() -> None:
    known = [*(success("no", "no", age=age) for age in range(5)), *(success("no", "yes", age=age) for age in range(10, 16))]
    cases = CASES.among(known, [deeds(known, renewed_if_free)])
    assert not cases.seen(known, found("no", "no", age=12)), "only what was renewed before may be as old"


def test_whether_something_was_found_is_a_condition() -> None:
    car: Place = ("answer", "search", "car")
    cases = Cases({car: {**{f"V{number}": 1 for number in range(20)}, "N/A": 9}})
    some, none = (Success(PLAY, frozenset(), (), (), {car: {text: text}}) for text in ("V1", "N/A"))
    for text, own, other in (("V7", some, none), ("", none, some), ("n/a", none, some)):
        assert cases.seen([own], {car: text}) and not cases.seen([other], {car: text})


def test_two_conditions_have_to_be_seen_together() -> None:
    seen = [success("no", "no"), success("yes", "yes"), success("yes", "no")]
    assert CASES.seen(seen, found("yes", "no")) and not CASES.seen(seen, found("no", "yes"))


def test_of_three_conditions_every_two_have_to_be_seen_together() -> None:
    seen = successes("no no yes", "no yes no", "yes no no")
    assert CASES.seen(seen, found("no", "no", "no")), "not seen as a whole, every two of its values are"
    assert not CASES.seen(seen, found("yes", "yes", "no")), "nothing was reserved and renewed"
    assert not CASES.seen(seen[:2], found("yes", "no", "no")), "nothing reserved was seen at all"


@pytest.mark.parametrize("age", [9, 21])
def test_a_number_is_between_those_of_the_same_conditions(age: int) -> None:
    whole = [*successes("no no no", age=10), *successes("no no no", age=20), *successes("yes no no", age=90)]
    assert CASES.seen(whole, found("no", "no", "no", age=15)) and not CASES.seen(whole, found("no", "no", "no", age=age))
    pairs = [each for age in (10, 12, 18, 20) for each in successes("no no yes", "no yes no", "yes no no", age=age)]
    assert CASES.seen(pairs, found("no", "no", "no", age=15)) and not CASES.seen(pairs, found("no", "no", "no", age=age))


def test_a_rule_of_two_conditions_is_never_carried_over_wrongly() -> None:
    """Renewed unless reserved or overdue: whatever six of the eight combinations the successes of either were in."""
    every = [" ".join(case) for case in product(("yes", "no"), repeat=3)]

    def right(case: str) -> bool:
        return case.split()[0] == "no" and case.split()[2] == "no"

    for left_out in product(every, repeat=2):
        renewed = successes(*(case for case in every if right(case) and case not in left_out))
        refused = successes(*(case for case in every if not right(case) and case not in left_out))
        for case in every:
            assert not CASES.seen(refused if right(case) else renewed, found(*case.split()))


def test_a_rule_of_three_conditions_is_contested_by_who_did_otherwise() -> None:
    refused, renewed = successes("no yes yes", "yes yes no", "no no yes", "yes no no", "yes yes yes"), successes("no no no")
    contested = found("no", "no", "no")
    assert CASES.seen(renewed, contested), "who renewed has been there"
    assert CASES.alike(renewed, contested) == renewed and CASES.alike(refused, contested) == refused


def test_who_looked_less_far_but_did_otherwise_contests_a_case() -> None:
    place = FLAGS[0]
    own, other = success("yes", "no"), Success(PLAY, frozenset(), (), (), {place: {"yes": "yes"}})
    assert CASES.contested(found("yes", "no"), [own], [other]), "what it knew of the case is so here"
    assert not CASES.contested(found("no", "no"), [own], [other])
    assert not CASES.contested(found("yes", "no"), [own], [success("yes", "yes")]), "it knew that it was another"


def test_a_limit_tells_those_apart_who_did_otherwise() -> None:
    small, large = ([success("yes", "no", age=age) for age in ages] for ages in ((2, 5, 7, 9), (12, 14, 25, 30)))
    assert not CASES.contested(found("yes", "no", age=7), small, large)
    assert CASES.contested(found("yes", "no", age=7), [*small, success("yes", "no", age=20)], large), "the age does not decide"
    assert CASES.contested(found("yes", "no", age=7), small[:2], large[:2]), "two and two may lie apart by chance"


def test_numbers_that_lie_apart_by_chance_show_no_limit() -> None:
    few, many = (2, 5, 7), (12, 14, 25)  # 1 of 10 ways to draw three of six: may be chance
    repeated = ([success("yes", "no", age=age) for age in (*ages, *ages)] for ages in (few, many))
    assert CASES.contested(found("yes", "no", age=7), *repeated), "one record looked up twice is one record"
    one, other = ([success("yes", "no", age=age) for age in ages] for ages in ((2, 5, 7, 9), (12, 14, 25, 30)))
    assert not CASES.contested(found("yes", "no", age=7), one, other), "1 of 35 ways"
    sizes = {("answer", "get", name): 5 for name in ("size", "weight")}
    assert CASES.contested(found("yes", "no", age=7) | sizes, one, other), "of three numbers one lies apart more easily"


def test_an_empty_field_is_a_value_and_tells_cases_apart() -> None:
    place = FLAGS[0]
    blank = Success(PLAY, frozenset(), (), (), {place: {"": None}, FLAGS[1]: {"no": "no"}})
    assert not CASES.contested(found("yes", "no"), [success("yes", "no")], [blank]), "it looked, and nothing was there"
    assert CASES.seen([blank], {place: None, FLAGS[1]: "no"}) and not CASES.seen([blank], {place: "yes", FLAGS[1]: "no"})


def together(cases: Cases, known: list[Success], first: dict[Place, Scalar], second: dict[Place, Scalar]) -> bool:
    """Whether the values of two traces may stand in one request."""
    traces = [{place: {text_of(value): value} for place, value in each.items()} for each in (first, second)]
    return cases.met_together(known, first | second, traces)


def test_what_decides_nothing_was_seen_with_each_condition_of_another_trace() -> None:
    """Renewed before or not decides nothing; reserved does, and here it is always the other trace that says it."""
    known = successes("no no", "no yes", "no no", "no yes", "no no", "no yes", "yes no", "yes no", "yes no")
    free, cases = known[:6], CASES.among(known, [deeds(known, renewed_if_free)])
    assert together(cases, free, {FLAGS[0]: "no"}, {FLAGS[1]: "yes"})
    refused = known[6:]
    assert not together(cases, refused, {FLAGS[0]: "yes"}, {FLAGS[1]: "yes"}), "no success had both"
    assert together(cases, refused, {FLAGS[0]: "yes", FLAGS[1]: "yes"}, {}), "one trace has both"
    alone = CASES.among(free, [deeds(free, renewed_if_free)])
    assert not together(alone, successes("no no no", "no yes yes"), found("no", "no"), {FLAGS[2]: "yes"}), "all did the same"


def test_of_many_conditions_only_those_that_decide_were_met_at_once() -> None:
    known = successes("no no no", "no yes no", "no no yes", "no yes no", "no no yes", "no no no", "yes no no", "yes no yes")
    known += successes("yes yes no", "no no yes", "no yes no")
    cases = CASES.among(known, [deeds(known, renewed_if_free)])
    free = [each for each in known if each.has(FLAGS[0], "no")]
    assert not together(cases, free, {FLAGS[0]: "no", FLAGS[1]: "yes"}, {FLAGS[2]: "yes"}), "no success had the last two"
    assert together(cases, [*free, *successes("yes yes yes")], {FLAGS[0]: "no", FLAGS[1]: "yes"}, {FLAGS[2]: "yes"})


def test_numbers_of_different_traces_differ_as_those_of_successes_did(monkeypatch: pytest.MonkeyPatch) -> None:
    price: Place = ("answer", "item", "price")
    cases = Cases({AGE: {str(age): 2 for age in range(90)}, price: {str(each): 2 for each in range(90)}})
    known = [
        each._replace(values={**each.values, price: {str(20 + n): 20 + n}})
        for n, each in enumerate(successes("no no", "no no", age=10))
    ]
    assert together(cases, known, {AGE: 30}, {price: 40}) and together(cases, known, {AGE: 30}, {price: 41})
    assert not together(cases, known, {AGE: 30}, {price: 42}) and not together(cases, known, {AGE: 30}, {price: 39})
    assert together(cases, known, {AGE: 30, price: 99}, {}), "what one trace has is recorded"
    monkeypatch.setattr("dreamgym_lg.curriculum.cases._PAIRS", 0)
    assert not together(cases, known, {AGE: 30}, {price: 40}), "too many to compare"
