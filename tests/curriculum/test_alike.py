"""Which recorded requests ask for the same, and which successes among them were right by luck."""

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from desk_traces import Call, recorded

from dreamgym_lg.actions import parse_call
from dreamgym_lg.curriculum.plays import by_place, read_play
from dreamgym_lg.curriculum.template_task_generator import TemplateTaskGenerator
from dreamgym_lg.experience.prompt_formats import first_observation
from dreamgym_lg.types import Trajectory

WRITES = {"open": "set_city", "shipped": "escalate"}
"""What is done of an order with this status; of a delivered one it is told who has it."""


def generator(traces: Sequence[Trajectory]) -> TemplateTaskGenerator:
    return TemplateTaskGenerator(traces, writes=[*WRITES.values()].__contains__)


def moved(n: int, words: str, status: str, *, done: str | None = None) -> Trajectory:
    """A request to send an order elsewhere: the customer is looked up where it has been delivered."""
    order, customer = f"K-{1000 + n}", f"C-{2000 + n}"
    calls: list[Call] = [("get_order", {"order": order}, json.dumps({"status": status, "customer": customer}))]
    if write := done or WRITES.get(status):
        calls.append((write, {"order": order}, "done"))
        return recorded(f"t/{n}", words.format(order=order), calls, "It is done.")
    calls.append(("get_customer", {"customer": customer}, json.dumps({"name": f"n{n}"})))
    return recorded(f"t/{n}", words.format(order=order), calls, f"n{n} has it.")


def group(first: int, words: str, number: int = 12, **options: str) -> list[Trajectory]:
    statuses = ["open", "shipped", "delivered"]
    return [moved(n, words, statuses[n % 3], **options) for n in range(first, first + number)]


SEND, MOVED = "Please send {order} elsewhere.", "I live at another address now, mind this with {order}!"


def requests_of(traces: Sequence[Trajectory], seed: Trajectory) -> set[str]:
    """The words of the variations of a task, its order aside."""
    generate = generator(traces)
    made = (generate(seed.task, [], random.Random(number)) for number in range(20))
    return {first_observation(each).replace(first_observation(each)[first_observation(each).index("K-") :][:6], "{order}")
            for each in made if each}  # fmt: skip


def test_requests_in_other_words_ask_for_the_same_where_the_same_was_done() -> None:
    traces = [*group(0, SEND), *group(20, MOVED)]
    assert requests_of(traces, traces[0]) == {SEND, MOVED}


def test_the_same_was_done_whatever_else_the_lookups_told() -> None:
    """No two orders are alike in colour and shop, of which nothing depends."""

    def with_more(trace: Trajectory, n: int) -> Trajectory:
        first, *others = trace.steps
        record = {**json.loads(first.next_observation), "colour": "abcde"[n % 5], "shop": "vwxyz"[n // 5 % 5]}
        return replace(trace, steps=[replace(first, next_observation=json.dumps(record)), *others])

    traces = [with_more(trace, n) for n, trace in enumerate([*group(0, SEND, 12), *group(20, MOVED, 12)])]
    assert requests_of(traces, traces[0]) == {SEND, MOVED}


def test_requests_that_are_known_to_ask_for_something_else_forbid_nothing() -> None:
    """In similar words one asks to send an order elsewhere, the other whatever its status to see to it."""
    ask, other = "Please send {order} on at once elsewhere.", "Please send {order} on at once back."
    traces = [*group(0, ask, 30), *group(40, other, 30, done="escalate"), *group(80, MOVED, 30, done="escalate")]
    generate, done = generator(traces), Counter[str]()
    overlap = generate._alike._overlap(*(generate._seeds[each.task.id] for each in (traces[0], traces[30])))
    assert 0.4 <= overlap < 0.6, "near enough to forbid, were nothing known"
    for number, trace in enumerate(traces[:30]):
        if varied := generate(trace.task, [], random.Random(number)):
            calls = [parse_call(call) for call in varied.metadata["reference_calls"]]
            done.update(call.name for call in calls if call)
    assert min(done["set_city"], done["escalate"]) > 2


@pytest.mark.parametrize(
    "others",
    [
        [*group(20, MOVED)[:-1], moved(31, MOVED, "open", done="escalate")],
        [moved(n, MOVED, "open") for n in range(20, 32)],
    ],
    ids=["in one case something else was done", "one deed in common is too little"],
)
def test_requests_in_other_words_do_not(others: list[Trajectory]) -> None:
    traces = [*group(0, SEND), *others]
    assert requests_of(traces, traces[0]) == {SEND}


def test_what_is_rarely_done_is_shown_as_often_as_what_is_done_every_day() -> None:
    traces = [*(moved(n, SEND, "shipped") for n in range(40)), *(moved(n, SEND, "open") for n in range(40, 44))]
    others = [moved(n, MOVED, ["open", "shipped"][n % 2], done="escalate") for n in range(50, 70)]  # whose orders are taken
    generate, done = generator([*traces, *others]), Counter[str]()
    for seed in range(60):
        if (varied := generate(traces[seed % 44].task, [], random.Random(seed))) is not None:
            call = parse_call(varied.metadata["reference_calls"][-1])
            assert call is not None
            done[call.name] += 1
    assert min(done["set_city"], done["escalate"]) > 15


def test_who_looked_up_less_was_lucky_only_if_others_who_were_told_the_same_looked_further() -> None:
    traces = group(0, SEND, 30)
    generate = generator([*traces, guess := moved(50, SEND, "delivered", done="escalate")])
    assert not generate.by_luck(traces[0].task), "an open order needs no customer, though most look one up"
    assert generate.by_luck(guess.task), "of a delivered one all others looked it up"


def test_who_looked_up_one_of_two_orders_was_lucky_if_others_looked_up_both() -> None:
    def compared(n: int, *looked_up: int) -> Trajectory:
        calls: list[Call] = [("get_order", {"order": f"K-{order}"}, '{"status": "open"}') for order in looked_up]
        return recorded(f"t/{n}", f"Are K-{n} and K-{n + 1} open?", calls, "Both are open.")

    traces = [compared(n, n, n + 1) for n in range(1000, 1040, 2)]
    generate = generator([*traces, guess := compared(2000, 2000)])
    assert generate.by_luck(guess.task) and not generate.by_luck(traces[0].task)


@pytest.mark.parametrize("failed", [0, 2])
def test_calls_that_also_failed_in_the_same_case_were_luck(failed: int) -> None:
    """Half of them send an order elsewhere without asking whether the customer has paid for that; some have not."""

    def sent(n: int, *, asked: bool, success: bool = True) -> Trajectory:
        calls: list[Call] = [("get_order", {"order": f"K-{n}"}, json.dumps({"status": "open", "customer": f"C-{n}"}))]
        calls += [("get_customer", {"customer": f"C-{n}"}, json.dumps({"name": f"n{n}"}))] if asked else []
        calls.append(("set_city", {"order": f"K-{n}"}, "done"))
        return recorded(f"t/{n}", f"Send K-{n} elsewhere.", calls, "It is done.", success=success)

    traces = [sent(n, asked=n % 2 == 0) for n in range(1000, 1020)]
    generate = generator([*traces, *(sent(n, asked=False, success=False) for n in range(1020, 1020 + failed))])
    assert not generate.by_luck(traces[0].task) and generate.by_luck(traces[1].task) == (failed > 0)


@pytest.mark.parametrize(("gold", "lucky"), [(6, False), (3, True)])
def test_a_lookup_that_a_gold_customer_never_needed_is_no_luck_to_leave_out(gold: int, lucky: bool) -> None:
    def sent(n: int, tier: str) -> Trajectory:
        calls: list[Call] = [("get_customer", {"customer": f"C-{n}"}, json.dumps({"tier": tier, "order": f"K-{n}"}))]
        calls += [("get_order", {"order": f"K-{n}"}, json.dumps({"weight": n}))] if tier == "plain" else []
        calls.append(("set_city", {"order": f"K-{n}"}, "done"))
        return recorded(f"t/{n}", f"I am C-{n}, send it elsewhere.", calls, "Done.")

    traces = [sent(1000 + n, "gold" if n < gold else "plain") for n in range(30)]
    assert generator(traces).by_luck(traces[0].task) == lucky and not generator(traces).by_luck(traces[-1].task)


def told(n: int, words: str, said: str = "{customer} has it.") -> Trajectory:
    order, customer = f"K-{1000 + n}", f"C-{2000 + n}"
    calls: list[Call] = [("get_order", {"order": order}, json.dumps({"status": "open", "customer": customer}))]
    return recorded(f"t/{n}", words.format(order=order), calls, said.format(customer=customer))


OTHERS = [told(100 + n, f"{'abcdefghij'[n] * 5} {{order}}", f"It is {n}.") for n in range(10)]
"""Requests in ten other ways, with ten other answers."""


@pytest.mark.parametrize(
    ("own", "others", "same"),
    [
        ([told(n, SEND) for n in range(6)], [told(n, MOVED) for n in range(20, 26)], True),
        ([moved(n, SEND, "open") for n in range(6)], [moved(n, MOVED, "open") for n in range(20, 26)], True),
        ([told(n, SEND) for n in range(6)], [told(n, MOVED) for n in range(20, 22)], False),
        ([told(n, SEND) for n in range(6)], [told(n, MOVED, f"Ask {n % 2}.") for n in range(20, 26)], False),
    ],
    ids=["one answer", "one call that writes", "too few", "other answers"],
)
def test_what_is_done_for_these_requests_alone_tells_them_to_be_alike(
    own: list[Trajectory], others: list[Trajectory], same: bool
) -> None:
    assert requests_of([*own, *others, *OTHERS], own[0]) == ({SEND, MOVED} if same else {SEND})
    assert requests_of([*own, *others], own[0]) == {SEND}, "where nothing else is ever done, it tells nothing"


def looked_up(n: int, words: str, **arguments: str) -> Trajectory:
    """A change of an order, after a look at its customer as well."""
    order, customer = f"K-{1000 + n}", f"C-{2000 + n}"
    calls: list[Call] = [
        ("get_order", {"order": order}, json.dumps({"status": "shipped", "customer": customer})),
        ("get_customer", {"customer": customer}, json.dumps({"name": f"n{n}"})),
        ("escalate", {"order": order, **arguments}, "done"),
    ]
    return recorded(f"t/{n}", words.format(order=order, **arguments), calls, "It is done.")


def test_what_may_be_luck_does_not_tell_requests_to_be_alike() -> None:
    """Both escalate at once; whether that is what they ask for is not known where others look at the customer before."""
    own, others = ([moved(n, words, "shipped") for n in range(first, first + 9)] for first, words in ((0, SEND), (20, MOVED)))
    assert requests_of([*own, *others, *OTHERS], own[0]) == {SEND, MOVED}
    after_a_look = [looked_up(n, "See to {order} somehow.") for n in range(40, 43)]
    assert requests_of([*own, *others, *OTHERS, *after_a_look], own[0]) == {SEND}


def test_a_call_with_another_argument_is_another_deed() -> None:
    def changed(n: int, words: str, argument: str) -> Trajectory:
        calls: list[Call] = [("get_order", {"order": f"K-{1000 + n}"}, json.dumps({"status": "open"}))]
        value = f"V-{3000 + n}"
        calls.append(("set_city", {"order": f"K-{1000 + n}", argument: value}, "done"))
        return recorded(f"t/{n}", words.format(order=f"K-{1000 + n}", value=value), calls, "It is done.")

    city, shop = "Please send {order} to {value} now.", "Let me fetch {order}, my place is {value}!"
    own = [changed(n, city, "city") for n in range(6)]
    for argument, ways in (("city", {"Please", "Let"}), ("shop", set[str]())):  # none of them has another city
        traces = [*own, *(changed(n, shop, argument) for n in range(20, 26)), *OTHERS]
        made = (generator(traces)(own[0].task, [], random.Random(number)) for number in range(20))
        assert {first_observation(each).split()[0] for each in made if each} == ways


def test_the_same_sentence_with_another_value_is_another_answer() -> None:
    def answered(n: int, words: str, value: str) -> Trajectory:
        record = {"plan": "basic", "currency": "NOK", "customer": f"C-{2000 + n}"}
        calls: list[Call] = [("get_order", {"order": f"K-{1000 + n}"}, json.dumps(record))]
        return recorded(f"t/{n}", words.format(order=f"K-{1000 + n}"), calls, f"It is {value}.")

    own = [answered(n, SEND, "basic") for n in range(6)]
    for value, ways in (("basic", {SEND, MOVED}), ("NOK", {SEND})):
        assert requests_of([*own, *(answered(n, MOVED, value) for n in range(20, 26)), *OTHERS], own[0]) == ways


@pytest.mark.parametrize(("number", "failed", "lucky"), [(1, 0, True), (5, 0, False), (5, 5, True)])
def test_who_did_not_look_before_writing_was_lucky_unless_enough_did_so(number: int, failed: int, lucky: bool) -> None:
    """Three of a plain customer's requests were looked into, and none of a gold one's."""

    def escalated(n: int, tier: str, *, success: bool = True) -> Trajectory:
        calls: list[Call] = [("get_customer", {"customer": f"C-{n}"}, json.dumps({"tier": tier, "last": f"K-{n}"}))]
        calls += [("get_order", {"order": f"K-{n}"}, '{"status": "shipped"}')] if tier == "plain" else []
        calls.append(("escalate", {"order": f"K-{n}", "reason": "shipped"}, "done"))
        return recorded(f"t/{n}", f"I am C-{n}, cancel my last order.", calls, "It is done.", success=success)

    gold = [escalated(1000 + n, "gold" if n % 2 else "silver") for n in range(number)]
    traces = [*gold, *(escalated(1100 + n, "plain") for n in range(3))]
    traces += [escalated(1200 + n, ["silver", "gold"][n % 2], success=False) for n in range(failed)]
    assert generator(traces).by_luck(gold[0].task) == lucky


@pytest.mark.parametrize("limit", [True, False])
def test_a_limit_does_not_make_requests_differ(limit: bool) -> None:
    """Who owes more than 50 has nothing sent; where there is no limit, chance decides."""

    def sent(n: int, words: str) -> Trajectory:
        order, owes = f"K-{1000 + n}", n * 37 % 100
        calls: list[Call] = [("get_order", {"order": order}, json.dumps({"status": "open", "owes": owes}))]
        if owes > 50 if limit else n % 3 == 0:
            return recorded(f"t/{n}", words.format(order=order), calls, "Pay first.")
        calls.append(("set_city", {"order": order}, "done"))
        return recorded(f"t/{n}", words.format(order=order), calls, "It is done.")

    traces = [*(sent(n, SEND) for n in range(20)), *(sent(n, MOVED) for n in range(20, 40))]
    assert requests_of(traces, traces[1]) == ({SEND, MOVED} if limit else set())


def test_a_null_that_was_returned_is_kept() -> None:
    play = read_play(recorded("t", "Show K-1.", [("get", {"order": "K-1"}, '{"hold": null}')], "Done."))
    assert play is not None and by_place(play)["answer", "get", "hold"] == {"": None}


def test_beyond_the_grouped_requests_nobody_is_lucky_for_his_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamgym_lg.curriculum.alike._GROUPED", 2)
    traces = [moved(n, f"Please send {{order}} elsewhere, w{'abcdef'[n]} friend.", "delivered") for n in range(6)]
    assert not any(generator(traces).by_luck(each.task) for each in traces)


def test_beyond_the_grouped_requests_words_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamgym_lg.curriculum.alike._GROUPED", 1)
    wordings = [f"I live at another address now, mind this with {{order}}, {name} friend!" for name in ("dear", "good")]
    traces = [*group(0, SEND, 42), *group(50, wordings[0]), *group(70, wordings[1])]
    assert requests_of(traces, traces[42]) == {*wordings}
    assert requests_of(traces, traces[0]) == {SEND}


ASKS = [
    (f"I would like you to {verb} {{order}}, thanks.", f"Please {verb} item {{order}} for me.")
    for verb in ("cancel", "return", "move", "check")
]
"""Requests that differ in one word, and ask for different things."""
RULES = [
    {"open": "refund", "shipped": "", "delivered": "hold"},
    {"open": "hold", "shipped": "refund", "delivered": ""},
    {"open": "", "shipped": "hold", "delivered": "refund"},
    {"open": "hold", "shipped": "", "delivered": "refund"},
]
"""Of each: what is done of an order with this status."""


def asked(n: int, rng: random.Random) -> Trajectory:
    """A request whose rule looks at the status alone; a third of the traces fail."""
    order, ask, fields = f"K-{1000 + n}", rng.randrange(len(ASKS)), {"tier": "abc", "paid": "yn", "size": "sml"}
    record = {"order": order, "status": rng.choice([*RULES[ask]]), **{key: rng.choice(texts) for key, texts in fields.items()}}
    right = RULES[ask][record["status"]]
    write = right if rng.random() < 0.7 else rng.choice(["refund", "hold", ""])
    calls: list[Call] = [("get_order", {"order": order}, json.dumps(record))]
    if write:
        calls.append((write, {"order": order}, "done"))
    said = f"{write or 'Nothing'} is done."
    return recorded(f"t/{n}", rng.choice(ASKS[ask]).format(order=order), calls, said, success=write == right)


def test_requests_that_differ_in_one_word_are_not_exchanged() -> None:
    rng = random.Random(0)
    traces = [asked(n, rng) for n in range(200)]
    status = {each.task.id: json.loads(each.steps[0].next_observation)["status"] for each in traces}
    generate = TemplateTaskGenerator(traces, writes=["refund", "hold"].__contains__)
    right, wrong = 0, list[str]()
    for number, trace in enumerate(each for each in traces if each.success):
        if (varied := generate(trace.task, [], random.Random(number))) is None:
            continue
        order = re.findall(r"K-\d+", first_observation(varied))[0]
        words = first_observation(varied).replace(order, "{order}")
        rule = next(rule for rule, asks in zip(RULES, ASKS, strict=True) if words in asks)
        calls = [parse_call(call) for call in varied.metadata["reference_calls"]]
        done = "".join(call.name for call in calls if call and call.name != "get_order")
        if done == rule[status[f"t/{int(order[2:]) - 1000}"]]:
            right += 1
        else:
            wrong.append(f"{words} {order}: {done}")
    assert right > 40 and not wrong, wrong


@pytest.mark.parametrize("nothing", [None, "", "none"])
def test_an_answer_that_names_nothing_is_not_exchanged_with_one_that_names_something(nothing: str | None) -> None:
    def asked(n: int) -> Trajectory:
        """A free slot is booked; none is, and it is handed over; none is, and the episode stopped there, a failure."""
        order, slot, days = f"K-{1000 + n}", f"S-{5000 + n}" if n % 3 == 2 else nothing, n + (100 if n % 3 == 0 else 0)
        done: list[Call] = [[("escalate", {"order": order}, "done")], [], [("book", {"slot": slot}, "done")]][n % 3]
        calls: list[Call] = [("find_slot", {"order": order}, json.dumps({"slot": slot, "days": days})), *done]
        words = [f"Please find another day for {order}.", f"Another day please: {order}."][n // 3 % 2]  # else none is new
        return recorded(f"t/{n}", words, calls, "It is done.", success=n % 3 != 1)

    traces = [asked(n) for n in range(60)]
    generate = TemplateTaskGenerator(traces, writes=["book", "escalate"].__contains__)
    made = [varied for n in range(300) if (varied := generate(traces[n % 60].task, [], random.Random(n)))]
    booked = [call for each in made for call in map(str, each.metadata["reference_calls"]) if "book" in call]
    assert len(booked) >= 10 and all("S-5" in call for call in booked)
