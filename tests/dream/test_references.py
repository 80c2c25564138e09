"""Recorded successes as judges: the same writing calls, whatever else was done; the rest is left to the next judge."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from langchain_core.tools import tool
from orders import (
    CANCEL,
    DONE,
    NOTE,
    ORDER,
    PAID,
    REFUND,
    TOOLS,
    Index,
    Says,
    is_judging,
    order_task,
    play,
    plays_and_judges,
    trace,
)
from orders import tool as schema
from pydantic import BaseModel

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.dream import Answer, Dream, Episode, Model, ModelJudge, Recorded, References, ScriptedUser, Verify
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task


class Desk:
    """A dream of recorded answers and successes, and of a language model that judges the rest."""

    def __init__(self, scripted: Any, index: TraceIndex, *, success: bool = True) -> None:
        self.chat = plays_and_judges(scripted, success=success)
        self.references = References(index)
        model = Model(self.chat)
        self.dream = Dream([Recorded(index), model], judges=[self.references, ModelJudge(model)])

    def judged(self, of: Task, *actions: str) -> tuple[float, str]:
        """Reward of the last step, and the judge that decided it."""
        last = play(self.dream.create_environment(), of, *actions)[-1]
        assert last.terminated and last.info["success"] == (last.reward == 1)
        return last.reward, last.info["judged_by"]


@pytest.fixture
def desk(scripted: Any, buffer: ReplayBuffer) -> Desk:
    return Desk(scripted, Index(buffer))


# --- writing calls ----------------------------------------------------------------------------------------------------


def test_a_success_needs_the_writing_calls_of_a_recorded_one_and_no_others(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), (REFUND, "ok"), (NOTE, "ok"), DONE))
    wrong, same = render_call("refund", {"order_id": "W-205"}), order_task("another id", order_task().instruction)
    assert desk.judged(order_task(), REFUND, NOTE, DONE) == (1, "references"), "what is only read does not count"
    assert desk.judged(order_task(), NOTE, ORDER, REFUND, DONE) == (1, "references"), "nor the order of different tools"
    assert desk.judged(same, REFUND, NOTE, DONE) == (1, "references"), "the same instruction"
    for actions in ([], [REFUND], [wrong, NOTE], [REFUND, REFUND, NOTE], [REFUND, NOTE, CANCEL], [REFUND, NOTE, wrong]):
        assert desk.judged(order_task(), *actions, DONE) == (0, "references"), actions
    assert not any(map(is_judging, desk.chat.asked))
    reason = play(desk.dream.create_environment(), order_task(), REFUND, DONE)[-1].info["reasoning"]
    assert 'add_note {"order_id": "W-204"' in reason and "this episode made refund" in reason
    assert desk.judged(order_task("t2"), DONE) == (1, "model"), "nothing is recorded of it"


def test_calls_of_one_tool_have_to_come_in_their_order(buffer: ReplayBuffer) -> None:
    first, second = (render_call("set_status", {"to": to}) for to in ("open", "closed"))
    buffer.add(trace(order_task(), (first, "ok"), (second, "ok"), DONE))
    of = order_task(tools=[*TOOLS, schema("set_status")])
    dream = Dream([Says(Answer("ok"))], judges=[References(buffer)])
    rewards = [play(dream.create_environment(), of, *each, DONE)[-1].reward for each in ((first, second), (second, first))]
    assert rewards == [1, 0]


def test_where_a_success_wrote_nothing_the_next_judge_reads_the_message(
    buffer: ReplayBuffer, scripted: Any, desk: Desk
) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), DONE))
    assert desk.judged(order_task(), ORDER, DONE) == (1, "model")
    assert Desk(scripted, Index(buffer), success=False).judged(order_task(), ORDER, DONE) == (0, "model")
    assert desk.judged(order_task(), ORDER, REFUND, DONE) == (0, "references")


def test_any_of_several_recorded_successes_will_do_and_a_failure_is_none(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (REFUND, "ok"), DONE))
    buffer.add(trace(order_task(), (CANCEL, "ok"), DONE, index=1))
    buffer.add(trace(order_task(), (NOTE, "ok"), DONE, index=2, success=False))
    assert [desk.judged(order_task(), act, DONE)[0] for act in (REFUND, CANCEL, NOTE)] == [1, 1, 0]
    buffer.add(trace(order_task("t2"), (NOTE, "ok"), DONE, success=False))
    assert desk.judged(order_task("t2"), CANCEL, DONE) == (1, "model")


def test_refused_writes_are_no_writes(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (CANCEL, "Error: shipped", False), (REFUND, "ok"), DONE))
    assert desk.judged(order_task(), REFUND, DONE) == (1, "references")
    assert desk.judged(order_task(), CANCEL, REFUND, DONE) == (1, "references"), "the dream refuses it too, as recorded"


def test_text_agents_and_calls_are_not_judged(buffer: ReplayBuffer) -> None:
    buffer.add(trace(order_task(), (REFUND, "ok"), DONE))
    references = References(buffer)
    for action, answer in ((DONE, Answer("So.")), (REFUND, None), ("go north", None), ("", None)):
        assert references.judge(Episode(task=order_task(), action=action), answer) is None


# --- which successes --------------------------------------------------------------------------------------------------


def test_an_evaluation_task_is_judged_by_its_own_successes_which_judge_no_other(buffer: ReplayBuffer, desk: Desk) -> None:
    held_out = order_task("held out", "Refund W-204.", split="test")
    buffer.add(trace(held_out, (REFUND, "ok"), DONE))
    assert desk.judged(held_out, DONE) == (0, "references") and desk.judged(held_out, REFUND, DONE) == (1, "references")
    assert desk.judged(order_task("t2", "Refund W-204."), DONE) == (1, "model"), "a training task of the same words"


def test_a_success_of_the_same_words_in_another_world_is_no_reference(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (REFUND, "ok"), DONE))
    elsewhere = order_task("t2", order_task().instruction, environment="another")
    assert desk.judged(elsewhere, DONE) == (1, "model")


def test_a_success_that_the_agent_has_no_tools_for_is_no_reference(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (render_call("issue_refund", {}), "ok"), DONE))
    assert desk.judged(order_task(), DONE) == (1, "model")
    anything = order_task(tools=[])
    assert References(buffer).references(anything), "a trace that came without schemas"


def test_successes_of_several_turns_judge_a_dream_with_a_user_alone(buffer: ReplayBuffer, desk: Desk) -> None:
    which = render_answer("Which order?")
    buffer.add(trace(order_task(), (which, "W-204"), (REFUND, "ok"), DONE))
    assert desk.judged(order_task(), DONE) == (1, "model"), "its first message ends an episode"
    user = ScriptedUser(lambda episode: "W-204" if episode.action == which else None)
    dream = Dream([Says(Answer("ok"))], user, [References(Index(buffer), conversations=True)])
    for actions, reward in (((which, REFUND, DONE), 1), ((which, DONE), 0), ((REFUND, DONE), 1)):
        assert play(dream.create_environment(), order_task(), *actions)[-1].reward == reward
    another = order_task("t2", order_task().instruction)  # its customer may have named another order
    assert not dream.judges[0].references(another) and dream.judges[0].references(order_task())  # type: ignore[attr-defined]


def test_measured_on_its_traces_a_task_is_judged_by_those_of_the_same_words_alone(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (REFUND, "ok"), DONE))

    def judged() -> tuple[float, str]:
        result = desk.dream.resume(order_task()).step(DONE)
        return result.reward, result.info["judged_by"]

    assert judged() == (1, "model") and desk.judged(order_task(), DONE) == (0, "references")
    buffer.add(trace(order_task("t2"), (REFUND, "ok"), DONE))
    assert judged() == (1, "model"), "another task"
    buffer.add(trace(order_task("t3", order_task().instruction), (REFUND, "ok"), DONE))
    assert judged() == (0, "references"), "the same task under another id, as for a task without traces"
    same = [Step(observation="", action=REFUND, next_observation="ok")]
    assert desk.dream.resume(order_task(), same).step(DONE).reward == 1


def test_a_task_is_decided_if_every_recorded_success_wrote_something(buffer: ReplayBuffer) -> None:
    asks, failed = order_task("asks"), order_task("failed")
    buffer.add(trace(order_task(), (ORDER, PAID), (REFUND, "ok"), DONE))
    buffer.add(trace(asks, (ORDER, PAID), DONE))
    buffer.add(trace(failed, (REFUND, "ok"), DONE, success=False))
    references = References(Index(buffer))
    house = Task(id="t1", instruction="leave", environment="desk")
    assert [references.decides(each) for each in (order_task(), asks, failed, house)] == [True, False, False, False]
    buffer.add(trace(order_task(), (ORDER, PAID), DONE, index=1))
    assert not references.decides(order_task()), "an episode that writes nothing is judged by its message"


# --- calls by what they mean ------------------------------------------------------------------------------------------


def test_numbers_and_defaults_are_compared_by_what_they_mean(buffer: ReplayBuffer, scripted: Any) -> None:
    @tool
    def refund(order_id: str, amount: float = 20, tags: list[str] | None = None) -> str:
        """Refund."""
        raise AssertionError("never run")

    buffer.add(trace(order_task(), (render_call("refund", {"order_id": "W-1", "amount": 20.0}), "ok"), DONE))
    desk = Desk(scripted, TraceIndex(buffer, tools=[refund]))
    for arguments, reward in (({}, 1), ({"amount": 20}, 1), ({"amount": 21}, 0), ({"tags": ["a"]}, 0), ({"tags": None}, 1)):
        call = render_call("refund", {"order_id": "W-1", **arguments})
        assert desk.judged(order_task(), call, DONE)[0] == reward, arguments


def test_of_free_text_only_that_it_is_there_counts_and_what_was_copied_has_to_be_right(
    buffer: ReplayBuffer, desk: Desk
) -> None:
    def note(text: str) -> str:
        return render_call("add_note", {"text": text})

    def cancel(address: str) -> str:
        return render_call("cancel", {"address": address})

    for n in range(3):
        street = f"{n} Old Mill Road, Springfield"
        of = order_task(f"t{n}", f"Send it to {street}, please.")
        buffer.add(trace(of, (note(f"The customer number {n} was angry"), "ok"), (cancel(street), "ok"), DONE))
    first, right = order_task("t0", "Send it to 0 Old Mill Road, Springfield, please."), "0 Old Mill Road, Springfield"
    own_words = note("He would like it sent elsewhere")
    assert desk.judged(first, own_words, cancel(right), DONE)[0] == 1
    assert desk.judged(first, note(" "), cancel(right), DONE)[0] == 0
    assert desk.judged(first, own_words, cancel("0 Old Mill Street, Springfield"), DONE)[0] == 0


def test_tools_that_really_run_are_no_effects(buffer: ReplayBuffer, scripted: Any, desk: Desk) -> None:
    buffer.add(trace(order_task(), (NOTE, "ok"), (REFUND, "ok"), DONE))
    assert desk.judged(order_task(), REFUND, DONE)[0] == 0
    assert Desk(scripted, Index(buffer, pass_through=["add_note"])).judged(order_task(), REFUND, DONE)[0] == 1


def test_which_tools_write_is_said_or_found_in_the_traces(buffer: ReplayBuffer) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), (REFUND, "ok"), (ORDER, "refunded"), DONE))
    index = TraceIndex(buffer, writes=["refund"])
    index.refresh()
    assert {name for name, use in index.uses.items() if use.writes} == {"refund"}
    assert index.writes("refund") and not index.writes("get_order") and not index.writes("unheard_of")
    unsaid = TraceIndex(buffer)
    unsaid.refresh()
    assert unsaid.writes("unheard_of") and unsaid.writes("refund")


# --- the last message -------------------------------------------------------------------------------------------------

K12 = render_call("refund", {"order_id": "K12"})
CHARGED = '{"id": "K12", "paid": 125.0, "card": "VISA 4411", "items": 2, "date": "2024-05-03"}'


@pytest.mark.parametrize(
    ("message", "reward", "reason"),
    [
        ("K12 is refunded: 125 EUR to your card 4411.", 1, "writing calls and facts"),
        ("Done! 125.00 EUR of K12 are on their way to 4411, order 7.", 1, "writing calls and facts"),
        ("K12 of 3 May 2024 is refunded: 125 EUR to your card 4411.", 1, "writing calls and facts"),
        ("K12 of 3 May 2023 is refunded: 125 EUR to your card 4411.", 0, "tells 2023"),
        ("I will NOT refund K12. Your card was charged another 900 EUR.", 0, "no message has 125, 4411"),
        ("K12 is refunded: 125 EUR to your card 4411, and 900 EUR as a present.", 0, "tells 900"),
        ("K12 is refunded.", 0, "no message has 125, 4411"),
        ("", 0, "is empty"),
    ],
)
def test_the_same_writes_with_another_answer_are_no_success(
    buffer: ReplayBuffer, message: str, reward: float, reason: str
) -> None:
    of = order_task("k", "Refund order K12, please.")
    lookup = render_call("get_order", {"order_id": "K12"})
    ok = '{"receipt": "R-8812"}'
    told = render_answer("I refunded K12: 125 EUR to the card 4411 (receipt R-8812).")
    buffer.add(trace(of, (lookup, CHARGED), (K12, ok), told))
    buffer.add(trace(of, (lookup, CHARGED), (K12, ok), render_answer("125 EUR of K12 go back to 4411."), index=1))
    dream = Dream([Recorded(Index(buffer))], judges=[References(Index(buffer))])
    last = play(dream.create_environment(), of, lookup, K12, render_answer(message))[-1]
    assert (last.reward, last.info["success"]) == (reward, reward == 1) and reason in last.info["reasoning"]


def test_a_check_of_the_users_own_decides_on_numbers_that_the_episode_does_not_show(buffer: ReplayBuffer) -> None:
    of = order_task("k", "Refund order K12, please.")
    lookup = render_call("get_order", {"order_id": "K12"})
    buffer.add(trace(of, (lookup, CHARGED), (K12, "ok"), render_answer("125 EUR go to the card 4411.")))
    references = References(Index(buffer))

    def judged(reward: float | None, *calls: str) -> tuple[float, str]:
        dream = Dream([Recorded(Index(buffer))], judges=[references, Verify(lambda task, steps: reward)])
        message = render_answer("125 EUR, 62.50 for each of the two, go to the card 4411.")
        last = play(dream.create_environment(), of, *calls, message)[-1]
        return last.reward, last.info["judged_by"]

    assert judged(1, lookup, K12) == (1, "verify") and judged(None, lookup, K12) == (0, "references")
    assert judged(1, lookup) == (0, "references"), "the wrong calls are final"


def test_a_listed_value_is_no_free_text_and_free_text_needs_the_ids_of_the_record(buffer: ReplayBuffer) -> None:
    @tool
    def ship_back(
        order_id: str, reason: Literal["it arrived damaged or broken", "the mind has been changed"] | None = None
    ) -> str:
        """Ship an order back."""
        raise AssertionError

    def shipped(reason: str, order: str = "K12") -> str:
        return render_call("ship_back", {"order_id": order, "reason": reason})

    def run(statement: str) -> str:
        return render_call("execute", {"sql": statement})

    tasks = order_task("b", "The lamp of K12 is cracked."), order_task("s", "Please cancel order K12.")
    (back, sql), done = (replace(task, tools=None) for task in tasks), render_answer("It is done.")
    buffer.add(trace(back, (shipped("it arrived damaged or broken"), "ok"), done))
    buffer.add(trace(sql, (run("UPDATE orders SET status = 'cancelled' WHERE id = 'K12'"), "ok"), done))
    judge = References(TraceIndex(buffer, tools=[ship_back], writes=["ship_back", "execute"]))

    def verdict(task: Task, call: str) -> tuple[float, bool]:
        steps = [Step(observation="", action=call, next_observation="ok")]
        result = judge.judge(Episode(task=task, steps=steps, action=done), None)
        assert result is not None
        return result.reward, result.final

    assert verdict(back, shipped("it arrived damaged or broken")) == (1, True)
    assert verdict(back, shipped("the mind has been changed")) == (0, True)
    assert verdict(sql, run("UPDATE orders SET status = 'cancelled' WHERE id = 'K12'")) == (1, True)
    assert verdict(sql, run("UPDATE orders SET state = 'cancelled' WHERE id = 'K12'")) == (1, False), "another judge reads it"
    assert verdict(sql, run("DELETE FROM customers WHERE 1 = 1")) == (0, False)


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        True,
        {"properties": None},
        {"properties": {"order_id": False}},
        {"properties": {"order_id": {"anyOf": None}}},
        {"properties": {"order_id": {"anyOf": [True]}}},
    ],
)
def test_a_recorded_schema_may_hold_anything(buffer: ReplayBuffer, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "refund", "parameters": parameters}}]
    task = replace(order_task("k", "Refund order K12, please."), tools=tools)
    buffer.add(trace(task, (K12, "ok"), DONE))
    verdict = References(Index(buffer)).judge(
        Episode(task=task, steps=[Step(observation="", action=K12, next_observation="ok")], action=DONE), None
    )
    assert verdict is not None and verdict.success


def test_in_a_conversation_the_agent_may_tell_a_fact_before_its_last_message(buffer: ReplayBuffer) -> None:
    task = order_task("c", "Hello, please refund an order.")
    ask, lookup = render_answer("Which order?"), render_call("get_order", {"order_id": "K12"})
    told = render_answer("K12 is refunded: 125 EUR go to the card 4411.")
    buffer.add(trace(task, (ask, "K12"), (lookup, CHARGED), (K12, "ok"), told))
    judge = References(Index(buffer), conversations=True)

    def reward(*moves: tuple[str, str], last: str) -> float:
        steps = [Step(observation="", action=action, next_observation=answer) for action, answer in moves]
        result = judge.judge(Episode(task=task, steps=steps, action=render_answer(last)), None)
        assert result is not None
        return result.reward

    calls = (ask, "K12"), (lookup, CHARGED), (K12, "ok")
    assert reward(*calls, last="125 EUR go to the card 4411.") == 1, "the user named K12"
    assert reward(*calls, (told, "Thank you!"), last="You are welcome.") == 1
    assert reward(*calls, last="You are welcome.") == 0


def test_what_a_write_made_need_not_be_told_and_a_message_without_facts_may_be_any(buffer: ReplayBuffer) -> None:
    of = order_task("k", "Refund order K12, please.")
    buffer.add(trace(of, (K12, '{"receipt": "R-8812"}'), render_answer("Done, receipt R-8812.")))
    dream = Dream([Recorded(Index(buffer))], judges=[References(Index(buffer))])
    rewards = [
        play(dream.create_environment(), of, K12, render_answer(text))[-1].reward
        for text in ("It is refunded.", "Receipt R-8812.", "Receipt R-9999.", " ")
    ]
    assert rewards == [1, 1, 0, 0]


def test_a_small_number_of_a_look_up_has_to_be_told(buffer: ReplayBuffer) -> None:
    of = order_task("k", "Refund order K12 and 2 more, please.")
    lookup, paid = render_call("get_order", {"order_id": "K12"}), '{"id": "K12", "price": 88, "pieces": 3, "more": 2}'
    buffer.add(trace(of, (lookup, paid), (K12, "ok"), render_answer("K12 and 2 more: you get 88 euros, for 1 lamp.")))
    dream = Dream([Recorded(Index(buffer))], judges=[References(Index(buffer))])
    rewards = [
        play(dream.create_environment(), of, lookup, K12, render_answer(text))[-1].reward
        for text in ("88 euros go back to you.", "You get EUR 88.00.", "It is refunded.", "You get 89 euros, for 1 lamp.")
    ]
    assert rewards == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("weight", "recorded", "same", "other"),
    [
        (
            "5kg",
            "You get 5kg of tea.",
            ["You get 5 kg of tea.", "It is 5kg."],
            ["You get 6 kg.", "It is 56 kg.", "Tea."],
        ),
        ("5 kg", "You get 5 kg of tea.", ["You get 5kg of tea.", "5 kilograms"], ["You get 6kg.", "You get 5kg, order Z-999."]),
        ("5kg", "You get tea.", ["You get 2x tea, 5kg each.", "2 of them"], ["You get 3x tea.", "You get 500g of tea."]),
        ("5kg", "You get 2x tea.", ["You get two teas."], ["You get 3x tea."]),
    ],
)
def test_a_number_is_the_same_with_its_unit_attached(
    buffer: ReplayBuffer, weight: str, recorded: str, same: list[str], other: list[str]
) -> None:
    of = order_task("k", "Refund 2 teas of order K12, please.")
    lookup = render_call("get_order", {"order_id": "K12"})
    buffer.add(trace(of, (lookup, f"2 pieces, {weight}"), (K12, "ok"), render_answer(recorded)))
    dream = Dream([Recorded(Index(buffer))], judges=[References(Index(buffer))])
    for text in (*same, *other):
        reward = play(dream.create_environment(), of, lookup, K12, render_answer(text))[-1].reward
        assert reward == (text in same), text


REFUSAL = render_answer("I will NOT refund K12.")


@pytest.mark.parametrize(("message", "by"), [("K12 is  refunded.", "references"), ("I will NOT refund K12.", "model")])
@pytest.mark.parametrize("success", [True, False])
def test_the_words_of_a_message_are_the_next_judges_unless_a_success_said_them(
    buffer: ReplayBuffer, scripted: Any, message: str, by: str, success: bool
) -> None:
    of = order_task("k", "Refund order K12, please.")
    buffer.add(trace(of, (K12, "ok"), render_answer("K12 is refunded.")))
    desk = Desk(scripted, Index(buffer), success=success)
    expected = (1, by) if by == "references" or success else (0, by)
    assert desk.judged(of, K12, render_answer(message)) == expected
    assert desk.judged(of, render_answer(message)) == (0, "references"), "without its call nobody else is asked"
    assert len(desk.chat.asked) == (by == "model")


def test_without_another_judge_the_verdict_says_that_nobody_read_the_words(buffer: ReplayBuffer, scripted: Any) -> None:
    of = order_task("k", "Refund order K12, please.")
    buffer.add(trace(of, (K12, "ok"), render_answer("K12 is refunded.")))
    desk = Desk(scripted, Index(buffer), success=False)
    last = play(desk.dream.judged_by_traces().create_environment(), of, K12, REFUSAL)[-1]
    assert (last.reward, last.info["judged_by"]) == (1, "references") and "no judge read the words" in last.info["reasoning"]
    assert not desk.chat.asked


# --- the same call ----------------------------------------------------------------------------------------------------


class Line(BaseModel):
    sku: str
    quantity: int = 1
    gift: bool = False


@tool
def place_order(customer: int, lines: list[Line], express: bool = False) -> str:
    """Place an order."""
    raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ({"customer": "7", "lines": [{"sku": "X1", "quantity": 2}]}, True),
        ({"customer": 7, "lines": [{"sku": "X1", "quantity": 2.0}]}, True),
        ({"customer": 7.0, "lines": [{"sku": "X1", "quantity": 2, "gift": False}], "express": False}, True),
        ({"customer": 7, "lines": [{"sku": "X1", "quantity": 2}], "note": "ignored"}, True),
        ({"customer": 7, "lines": [{"sku": "X1", "quantity": 2, "gift": True}]}, False),
        ({"customer": 7, "lines": [{"sku": "X1"}]}, False),
        ({"customer": 8, "lines": [{"sku": "X1", "quantity": 2}]}, False),
    ],
)
def test_calls_are_compared_as_the_tool_receives_them(buffer: ReplayBuffer, arguments: dict[str, Any], same: bool) -> None:
    of = Task(id="o", instruction="Customer 7 wants two X1.", environment="shop", tools=["place_order"])
    recorded = render_call("place_order", {"customer": 7, "lines": [{"sku": "X1", "quantity": 2}]})
    buffer.add(trace(of, (recorded, "placed"), render_answer("Ordered.")))
    index = TraceIndex(buffer, tools=[place_order])
    dream = Dream([Recorded(index), Says(Answer("placed"))], judges=[References(index)])
    result = play(dream.create_environment(), of, render_call("place_order", arguments), render_answer("Ordered."))
    assert result[-1].reward == same
    assert (result[0].info["decided_by"] == "recorded") == same


def test_a_policys_own_real_successes_on_an_evaluation_task_judge_nothing(buffer: ReplayBuffer) -> None:
    """Real and dreamed validation play at once: else a verdict would depend on which ends first."""
    for number, split in enumerate(("train", "validation")):
        played = order_task(f"t{number}", split=split)
        buffer.add(trace(played, (REFUND, "ok"), DONE, source="real", run="run/validate/real"))
    references = References(Index(buffer))
    ended = Episode(task=order_task("t1", split="validation"), action=DONE)
    assert references.judge(ended, None) is None
    assert references.decides(order_task("t0")), "a real training's episodes of training tasks are records"
