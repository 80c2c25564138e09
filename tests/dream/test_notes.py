"""Notes: what a task leaves open is written down once, and every episode of its group reads the same."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from langchain_core.messages import BaseMessage

from dreamgym_lg.actions import ToolCall, render_answer, render_call
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experience.edits import edited_successes
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.grounding import Grounding
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.notes import (
    Note,
    in_noted_world,
    notes_in_hindsight,
    notes_of,
    read_notes,
    thorough,
    write_notes,
)
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

WRITES = {"refund", "set_city"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_order", "get_customer", "refund", "set_city")]
ORDER, CUSTOMER = render_call("get_order", {"order_id": "K12"}), render_call("get_customer", {"id": "C7"})
REFUND, DONE = render_call("refund", {"order_id": "K12"}), render_answer("Done.")
OPEN = '{"status": "open", "customer": "C7"}'
FINE = "valid, fine\nreward 0, continues\ndreamed"


def task(order: str = "K12", seed: int | None = None) -> Task:
    return Task(id=order, instruction=f"Refund {order}.", environment="desk", tools=TOOLS, seed=seed)


def episode(*acts: tuple[str, str], success: bool = True, of: Task | None = None) -> Trajectory:
    steps = [Step(observation="", action=action, next_observation=answer) for action, answer in acts]
    last = Step(observation="", action=DONE, next_observation="", terminated=True)
    return Trajectory(task=of or task(), steps=[*steps, last], success=success)


def asks_for_notes(messages: Sequence[BaseMessage]) -> bool:
    return "\n> " not in messages[-1].text


# --- in hindsight -----------------------------------------------------------------------------------------------------


def test_notes_in_hindsight_are_the_lookups_before_anything_was_changed_each_once() -> None:
    refused = Step(observation="", action=render_call("get_order", {"order": "K12"}), next_observation="Error", valid=False)
    recorded = episode((ORDER, OPEN), (CUSTOMER, "gold"), (ORDER, OPEN), (REFUND, "{}"), (ORDER, '{"status": "refunded"}'))
    recorded = replace(recorded, steps=[refused, *recorded.steps])
    assert notes_in_hindsight(recorded, WRITES) == f'get_order {{"order_id": "K12"}}: {OPEN}\nget_customer {{"id": "C7"}}: gold'
    assert notes_in_hindsight(episode((REFUND, "{}")), WRITES) == ""
    odd = episode((render_call("mcp:get/order", {}), "a"), (render_call("get order", {}), "b"))
    assert read_notes(notes_in_hindsight(odd, WRITES)) == [Note(ToolCall("mcp:get/order", {}), "a")]


@pytest.mark.parametrize(
    ("call", "answer", "noted"),
    [
        (("get_order", {"order_id": "K13"}), '{"status": "open"}', True),
        (("get_order", {"order_id": "K12"}), '{"status": "refunded"}', False),
        (("get_customer", {"id": "C7"}), '{"last": "K12"}', False),
        (("get_customer", {"id": "C7"}), '{"text": "a\\nK12"}', False),
        (("get_customer", {}), "3 customers", False),
    ],
)
def test_a_lookup_behind_a_write_counts_where_nothing_says_that_it_was_changed(call: Any, answer: str, noted: bool) -> None:
    recorded = episode((REFUND, "{}"), (render_call(*call), answer))
    assert bool(notes_in_hindsight(recorded, WRITES)) == noted


@pytest.mark.parametrize("answer", [OPEN, "", "two\nlines", "a\n  b\n\nc: {}", ': "x"', "\u2028\r", "[1]: x"])
def test_notes_are_read_as_they_were_written(answer: str) -> None:
    notes = [Note(ToolCall("get_order", {"order_id": "K: 12}\n", "n": 1.5}), answer), Note(ToolCall("ping", {}), "pong")]
    assert read_notes(write_notes(notes)) == notes
    assert read_notes("") == []


@pytest.mark.parametrize(
    "text", ["get_order K12: open", 'get_order {"a": 1} open', "get_order [1]: open", "Sure!", "ok {}: 1\n\n"]
)
def test_what_is_no_note_is_refused(text: str) -> None:
    with pytest.raises(PredictionFailed, match="is no note; expected a line of tool, arguments as JSON"):
        read_notes(text)


def test_an_edit_of_a_success_is_judged_in_the_world_of_its_original() -> None:
    recorded = [
        episode((ORDER.replace("K12", id), OPEN), (REFUND.replace("K12", id), "{}"), of=task(id)) for id in ("K12", "K13")
    ]
    noted = [in_noted_world(each, WRITES) for each in recorded]
    edits = edited_successes(noted, writes=WRITES, per_success=5)
    at_once = [each for each in edits if each.run == "edited/answered_at_once"]
    assert at_once and all(notes_of(each.task) == f'get_order {{"order_id": "{each.task.id}"}}: {OPEN}' for each in at_once)


def test_the_notes_to_learn_are_those_of_thorough_successes() -> None:
    short, long = episode((ORDER, OPEN)), episode((ORDER, OPEN), (CUSTOMER, "gold"))
    others = [episode((CUSTOMER, "plain")), episode((REFUND, "{}")), replace(long, success=False)]
    chosen = thorough([short, long, long, *others], WRITES)
    assert [len(read_notes(notes_of(each.task) or "")) for each in chosen] == [2, 2, 1]


# --- in the dream -----------------------------------------------------------------------------------------------------


def dreaming(scripted: Any, notes: str, *, grounding: Grounding | None = None) -> tuple[Any, DreamEnvironment]:
    model = scripted(reply=lambda messages: notes if asks_for_notes(messages) else FINE)
    return model, DreamEnvironment(ExperienceModel(model, notes=True, writes=WRITES), grounding=grounding)


NOTES = f'get_order {{"order_id": "K12"}}: {OPEN}\nget_customer {{"id": "C7"}}: gold'


def test_a_noted_call_is_answered_from_the_notes_until_something_is_changed(scripted: Any) -> None:
    model, dream = dreaming(scripted, NOTES)
    dream.reset(task())
    other = render_call("get_order", {"order_id": "K13"})
    results = [dream.step(action) for action in (ORDER, other, CUSTOMER, REFUND, ORDER, DONE)]
    told = [(result.observation, result.info["decided_by"]) for result in results]
    by_model = ("dreamed", "model")
    assert told == [(OPEN, "notes"), by_model, ("gold", "notes"), by_model, by_model, by_model]
    assert results[0].info["reasoning"] == "valid, it reads, order_id from the task"
    asked, *steps = model.asked
    assert asks_for_notes(asked) and OPEN not in asked[0].text
    assert all(NOTES in messages[0].text for messages in steps)
    assert all(after[: len(before)] == before for before, after in zip(steps, steps[1:], strict=False)), "it only grows"


async def test_all_episodes_of_a_group_ask_for_notes_once_and_read_the_same(scripted: Any) -> None:
    model = scripted(reply=lambda messages: NOTES if asks_for_notes(messages) else FINE)
    experience = ExperienceModel(model, notes=True, writes=WRITES)

    async def play(*actions: str) -> str:
        dream = DreamEnvironment(experience)
        await dream.areset(task())
        return [(await dream.astep(action)).observation for action in actions][-1]

    told = await asyncio.gather(*(play(*before, CUSTOMER) for before in ([], [ORDER], [ORDER, CUSTOMER])))
    assert told == ["gold"] * 3
    assert len(model.asked) == 1
    experience.refreshed("2")
    await play(CUSTOMER)
    assert len(model.asked) == 2, "other weights write notes of their own"
    assert experience.version == "2+notes"


def test_records_and_notes_are_one_world(scripted: Any) -> None:
    with ReplayBuffer(":memory:") as buffer:
        buffer.add(episode((ORDER, '{"status": "delivered"}'), of=task("K99")))
        model, dream = dreaming(scripted, NOTES, grounding=Grounding(buffer, writes=[]))
        dream.reset(task())
        told = [dream.step(action) for action in (CUSTOMER, ORDER)]
    assert [result.info["decided_by"] for result in told] == ["notes", "recorded"]
    dream.step(REFUND)
    head = model.asked[-1][0].text
    assert head.endswith('get_order {"order_id": "K12"}: {"status": "delivered"}\nget_customer {"id": "C7"}: gold')


@pytest.mark.parametrize(
    "said", ["I'd rather not.", 'refund {"order_id": "K12"}: {}', 'find {"id": 1}: x', f"{NOTES}\nand more"]
)
def test_notes_that_cannot_be_read_are_none_after_three_tries_and_a_warning(scripted: Any, said: str, caplog: Any) -> None:
    model, dream = dreaming(scripted, said)
    for _ in range(2):
        dream.reset(task())
        assert dream.step(ORDER).info["decided_by"] == "model"
    assert [asks_for_notes(messages) for messages in model.asked] == [True] * 3 + [False], "asked again for no episode"
    assert "That could not be read: " in model.asked[2][-1].text
    assert "no notes for the world of task K12" in caplog.text and len(caplog.records) == 1


def test_after_24_worlds_in_a_row_without_notes_no_more_are_asked_for_until_the_model_is_another(
    scripted: Any, caplog: Any
) -> None:
    said = "I'd rather not."
    model = scripted(reply=lambda _: said)
    experience = ExperienceModel(model, notes=True, writes=WRITES)
    for number in range(30):
        said = NOTES if number == 3 else "I'd rather not."
        assert bool(notes_of(experience.noted(task(f"K{number}")))) == (number == 3)
    assert len(model.asked) == 3 * 3 + 1 + 24 * 3
    assert caplog.records[-1].getMessage() == "no notes could be read of 24 worlds in a row: no more are asked for"
    said = NOTES
    assert notes_of(experience.noted(task("K50"))) == ""
    experience.refreshed("2")
    assert notes_of(experience.noted(task("K50"))) == NOTES


def test_notes_have_the_structure_of_recorded_answers(scripted: Any, caplog: Any) -> None:
    with ReplayBuffer(":memory:") as buffer:
        buffer.add(episode((ORDER, OPEN), of=task("K99")))
        model = scripted(reply=lambda messages: 'get_order {"order_id": "K12"}: It is open.')
        experience = ExperienceModel(model, notes=True, writes=WRITES, replay_buffer=buffer)
        assert notes_of(experience.noted(task())) == ""
    assert "is no JSON object" in caplog.text


def test_only_tool_agents_and_only_with_notes_are_asked_for_them(scripted: Any) -> None:
    model = scripted(reply=lambda _: NOTES)
    text_game = Task(id="t", instruction="leave", environment="house")
    for experience, of in ((ExperienceModel(model), task()), (ExperienceModel(model, notes=True), text_game)):
        assert experience.noted(of) is of and asyncio.run(experience.anoted(of)) is of
    assert not model.asked


# --- a local model ----------------------------------------------------------------------------------------------------


class Worlds:
    """An engine that writes one of many worlds, as sampling at the temperature and seed of the request decides."""

    ends = frozenset[int]()

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def submit(self, request: Any) -> Future[Any]:
        from dreamgym_lg.integrations.transformers.requests import Generated

        self.requests.append(request)
        days = Random(request.seed).randrange(10**6) if request.temperature > 0 else 0
        answer = FINE if "> " in request.conversation[-1]["content"] else f'get_order {{"order_id": "K12"}}: {days} days'
        future: Future[Any] = Future()
        future.set_result(Generated(answer, [], [], [], "stop"))
        return future

    def clear(self) -> None:
        pass


def test_a_local_model_has_a_world_for_each_seed_and_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
    from dreamgym_lg.integrations.transformers.tiny_models import create_tokenizer

    tokenizer = create_tokenizer(["days"], vocab_size=300)

    def notes(seed: int) -> str:
        engine = Worlds()
        model = LocalChatModel(engine=engine, tokenizer=tokenizer, temperature=0)
        dream = DreamEnvironment(ExperienceModel(model, notes=True, writes=WRITES, instructions=""))
        dream.reset(task(seed=seed))
        told = dream.step(ORDER).observation
        dream.step(REFUND)
        assert [request.temperature for request in engine.requests] == [1.0, 0], "the steps are the most likely ones"
        return told

    assert notes(1) == notes(1)
    assert len({notes(seed) for seed in range(5)}) == 5


# --- in JSON ----------------------------------------------------------------------------------------------------------


def test_notes_in_json_are_values_of_the_prompt(scripted: Any) -> None:
    said = [{"name": "get_order", "arguments": {"order_id": "K12"}, "answer": {"status": "open"}}]
    fine = dict(reasoning="", valid=True, reward=0, terminated=False, success=False, observation="dreamed")
    replies = iter([{"notes": "none"}, {"notes": said}, fine])
    model = scripted(reply=lambda _: json.dumps(next(replies)))
    with ReplayBuffer(":memory:") as buffer:
        buffer.add(episode((ORDER, OPEN), (REFUND, "{}"), of=task("K99")))
        experience = ExperienceModel(model, notes=True, writes=WRITES, prompt_format="json", replay_buffer=buffer)
        dream = DreamEnvironment(experience)
        dream.reset(task())
        assert dream.step(ORDER).observation == '{"status": "open"}'
        dream.step(REFUND)
    first, again, step = model.asked
    asked = json.loads(first[-1].text.splitlines()[-1])
    assert asked == {"observation": "Refund K12.", "seen": {"get_order": [OPEN]}}, "no answers of what writes"
    assert "'none' is no object of name, arguments and answer" in again[-1].text
    world = json.loads(step[0].text.splitlines()[-1])
    assert world["notes"] == [{**said[0], "answer": '{"status": "open"}'}]
    assert "notes" not in json.loads(first[0].text.splitlines()[-1])
