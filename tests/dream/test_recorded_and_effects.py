"""What real traces decide in a dream: recorded answers, reference effects, facts of answers; none is more than it is."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langchain_core.tools import tool

from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.grounding import Grounding
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.notes import with_notes
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, StepResult, Task, Trajectory

ORDER = render_call("get_order", {"order_id": "W-204"})
REFUND = render_call("refund", {"order_id": "W-204"})
NOTE = render_call("add_note", {"order_id": "W-204", "text": "asked for a refund"})
CANCEL = render_call("cancel", {"order_id": "W-204"})
DONE = render_answer("Done.")
PAID, REFUNDED = '{"id": "W-204", "status": "paid"}', '{"id":"W-204",  "status":"refunded"}'
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_order", "refund", "add_note", "cancel")]


def task(id: str = "t1", instruction: str = "", **fields: Any) -> Task:
    return Task(**{"id": id, "instruction": instruction or f"Task {id}.", "environment": "desk", **fields})


def trace(of: Task, *acts: str | tuple[str, str] | tuple[str, str, bool], index: int = 0, **fields: Any) -> Trajectory:
    """A real episode of these actions, each with its answer and whether it was valid."""
    steps, seen = [], of.instruction
    for act in acts:
        action, answer, valid = ((act, "", True) if isinstance(act, str) else (*act, True))[:3]  # type: ignore[misc]
        ends = is_answer(action) and act is acts[-1]
        steps.append(Step(observation=seen, action=action, next_observation=answer, valid=valid, terminated=ends))
        seen = answer
    given = {"success": True, "run": "traces", "rollout_index": index, **fields}
    return Trajectory(task=of, steps=steps, **given)


@pytest.fixture
def buffer() -> Iterator[ReplayBuffer]:
    with ReplayBuffer(":memory:") as buffer:
        yield buffer


def asks_for_verdict(prompt: Sequence[BaseMessage]) -> bool:
    """Whether an experience model's prompt asks about a final answer."""
    return '> {"answer":' in prompt[-1].text


class Dream:
    """A dream of which the experience model pays every answer, and answers every call with a number of its own."""

    def __init__(self, scripted: Any, buffer: ReplayBuffer, *, pays: bool = True, **options: Any) -> None:
        self.model = scripted(reply=self.reply)
        self.pays = pays
        self.environment = DreamEnvironment(ExperienceModel(self.model), grounding=Grounding(buffer, **options))

    def reply(self, messages: Any) -> str:
        if asks_for_verdict(messages):
            return f"valid, so it ends\nreward 1, {'success' if self.pays else 'failure'}\n(nothing)"
        return f"valid, no progress yet\nreward 0, continues\ndreamed {len(self.model.asked)}"

    @property
    def asked(self) -> int:
        return len(self.model.asked)

    def play(self, of: Task, *actions: str) -> list[StepResult]:
        self.environment.reset(of)
        self.environment.show_tools(TOOLS)
        return [self.environment.step(action) for action in actions]

    def decided(self, of: Task, *actions: str) -> list[tuple[str, str]]:
        """Observation of each step, and which part decided it."""
        return [(result.observation, result.info["decided_by"]) for result in self.play(of, *actions)]

    def paid(self, of: Task, *actions: str) -> tuple[float, str]:
        """Reward of the last step, and which part decided it."""
        last = self.play(of, *actions)[-1]
        assert last.terminated and last.info["success"] == (last.reward == 1)
        return last.reward, last.info["decided_by"]


@pytest.fixture
def dream(scripted: Any, buffer: ReplayBuffer) -> Any:
    return lambda **options: Dream(scripted, buffer, **options)


# --- recorded answers -------------------------------------------------------------------------------------------------


def test_a_recorded_call_is_answered_byte_for_byte_and_the_model_fills_only_the_rest(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (ORDER, PAID), (REFUND, "ok"), (ORDER, REFUNDED), DONE))
    played = dream()
    other = task("t2")
    assert played.decided(other, ORDER, REFUND, ORDER) == [(PAID, "recorded"), ("ok", "recorded"), (REFUNDED, "recorded")]
    assert played.asked == 0
    assert played.decided(other, CANCEL, ORDER) == [("dreamed 1", "model"), ("dreamed 2", "model")], "after another write"
    spaced = '{"name": "get_order", "arguments": {"order_id":"W-204"}}'
    assert played.decided(other, spaced) == [(PAID, "recorded")], "one call in another spelling"
    assert played.decided(replace(other, environment="another"), ORDER)[0][1] == "model"


@pytest.mark.parametrize("noted", [False, True])
def test_a_text_where_the_tool_returns_a_structure_answers_nothing(noted: bool, buffer: ReplayBuffer, scripted: Any) -> None:
    """LangChain writes an object of pydantic's so: it can be read by a policy, and by nothing that wants the object."""
    told = "id='W-204' status='paid'"
    if not noted:
        buffer.add(trace(task(), (ORDER, told), (REFUND, told), DONE))
    model = scripted(reply=lambda _: f"valid, no progress yet\nreward 0, continues\n{PAID}")
    environment = DreamEnvironment(ExperienceModel(model), grounding=Grounding(buffer))
    status = {"type": "string", "enum": ["paid", "refunded"]}
    returns = {"type": "object", "required": ["status"], "properties": {"status": status}}
    get_order = {"type": "function", "function": {"name": "get_order", "returns": returns}}
    other = task("t2", tools=[get_order, *TOOLS[1:]])
    environment.reset(with_notes(other, f'get_order {{"order_id": "W-204"}}: {told}') if noted else other)
    result = environment.step(ORDER)
    assert (result.observation, result.info["decided_by"]) == (PAID, "model")
    assert environment.step(REFUND).info["decided_by"] == ("model" if noted else "recorded"), "a tool of text returns a text"


def test_an_error_is_recorded_as_the_error_that_it_was(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (REFUND, "Error: try later", False), (ORDER, PAID), DONE))
    played = dream()
    failed, after = played.play(task("t2"), REFUND, ORDER)
    assert (failed.observation, failed.info["valid"]) == ("Error: try later", False)
    assert after.observation == PAID, "a refused call has written nothing"


def test_traces_that_contradict_each_other_answer_by_their_majority_or_not_at_all(buffer: ReplayBuffer, dream: Any) -> None:
    tasks = [task(f"t{n}") for n in range(4)]
    played = dream()
    new, got = task("new"), []
    for each, answer in zip(tasks, ["a", "b", "b", "a"], strict=True):
        buffer.add(trace(each, (ORDER, answer), DONE))
        got.append(played.decided(new, ORDER)[0])
    assert [each for _, each in got] == ["recorded", "model", "recorded", "model"]
    assert [each for each, _ in got[::2]] == ["a", "b"]
    assert [played.decided(each, ORDER)[0][0] for each in tasks] == ["a", "b", "b", "a"], "a task's own traces come first"


@pytest.mark.parametrize("split", ["validation", "test"])
def test_what_a_trace_of_an_evaluation_task_holds_answers_nothing(buffer: ReplayBuffer, dream: Any, split: Any) -> None:
    held_out = task("held out", split=split)
    buffer.add(trace(held_out, (ORDER, PAID), DONE))
    played = dream()
    for each in (task("t2"), held_out, task("t3", split=split)):
        assert played.decided(each, ORDER)[0][1] == "model"


def test_a_task_that_is_held_out_answers_nothing_from_then_on(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (ORDER, PAID), DONE))
    played = dream()
    assert played.decided(task("t2"), ORDER) == [(PAID, "recorded")]
    buffer.add_tasks([task(split="test")])
    assert played.decided(task("t2"), ORDER)[0][1] == "model"


def test_failed_and_dreamed_episodes_are_no_recordings_and_new_real_ones_are(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (ORDER, "dreamed"), DONE, source="synthetic"))
    buffer.add(trace(task(), (ORDER, "broken"), DONE, index=1, error="OSError: away"))
    played = dream()
    assert played.decided(task("t2"), ORDER)[0][1] == "model"
    buffer.add(trace(task(), (ORDER, PAID), DONE, index=2, source="real"))
    assert played.decided(task("t2"), ORDER) == [(PAID, "recorded")]


def test_a_buffer_is_read_again_only_where_real_trajectories_were_added(buffer: ReplayBuffer, monkeypatch: Any) -> None:
    reads, records = [], buffer.records
    monkeypatch.setattr(buffer, "records", lambda: reads.append(1) or records())
    grounding = Grounding(buffer)
    for index, source in enumerate(["offline", "synthetic", "synthetic", "real"]):
        buffer.add(trace(task(), (ORDER, PAID), DONE, index=index, source=source))
        grounding.refresh()
        grounding.refresh()
    assert len(reads) == 2


def test_an_episode_does_not_contradict_itself(buffer: ReplayBuffer, dream: Any) -> None:
    played = dream()
    first, again, written, after, again_after = played.play(task(), ORDER, ORDER, REFUND, ORDER, ORDER)
    assert first.observation == again.observation == "dreamed 1" and again.info["decided_by"] == "recorded"
    assert after.observation == again_after.observation != first.observation
    assert played.asked == 3
    twice = [each for each, _ in dream().decided(task(), REFUND, REFUND)]
    assert twice[0] != twice[1], "the second refund is another act"


def test_the_experience_model_reads_recorded_answers_as_its_own(buffer: ReplayBuffer, dream: Any) -> None:
    """So the prompt behind them is one that it was trained on."""
    buffer.add(trace(task(), (ORDER, PAID), DONE))
    played = dream()
    played.play(task("t2"), ORDER, REFUND)
    (prompt,) = played.model.asked
    assert prompt[2].text == f"valid, order_id from nowhere\nreward 0, continues\n{PAID}"


def test_an_annotation_goes_with_its_answer_and_splits_no_vote(buffer: ReplayBuffer, dream: Any) -> None:
    for n, reasoning in enumerate(["It is paid.", "The money is there.", "No."]):
        episode = trace(task(f"t{n}"), (ORDER, "other" if n == 2 else PAID), DONE)
        buffer.add(replace(episode, steps=[replace(episode.steps[0], reasoning=reasoning), episode.steps[1]]))
    (result,) = dream().play(task("new"), ORDER)
    assert (result.observation, result.info["reasoning"]) == (PAID, "It is paid.")


def test_recorded_answers_are_those_of_a_search_through_all_traces(buffer: ReplayBuffer) -> None:
    """Random traces and questions against the definition, written down without an index."""
    rng = random.Random(0)
    calls = [render_call(name, {"id": id}) for name in ("get_order", "get_user", "refund", "cancel") for id in (1, 2)]
    written = [trace(task(f"t{n % 5}"), *_random_acts(rng, calls), index=n) for n in range(40)]
    buffer.extend(written)
    grounding = Grounding(buffer, checks=["recorded"], writes=["refund", "cancel"])
    grounding.refresh()
    environment = DreamEnvironment(ExperienceModel(None), grounding=grounding)
    answered = 0
    for _ in range(300):
        asked, before = task(f"t{rng.randrange(8)}"), [call for call in rng.choices(calls, k=rng.randrange(4))]
        environment.reset(asked)
        history: list[Any] = []
        for call in before:
            known = environment._known(call)
            if known is None:
                break
            environment._advance(call, (), *known)
            history.append((call, known.prediction.observation))
        call = rng.choice(calls)
        known = environment._known(call)
        expected = _by_definition(written, asked, history, call)
        assert (known.prediction.observation if known else None) == expected
        answered += known is not None
    assert 50 < answered < 250, "both cases were seen"


def _random_acts(rng: random.Random, calls: Sequence[str]) -> list[tuple[str, str]]:
    return [(call, f"{json.loads(call)['name']} {rng.choice('aaab')}") for call in rng.choices(calls, k=4)]


def _writes(calls: Sequence[str]) -> list[str]:
    return [call for call in calls if "refund" in call or "cancel" in call]


def _by_definition(traces: Sequence[Trajectory], of: Task, history: Sequence[tuple[str, str]], call: str) -> str | None:
    since = len(history)
    while since and not _writes([history[since - 1][0]]):
        since -= 1
    before = [answer for earlier, answer in history[since:] if earlier == call]
    if before and not _writes([call]):
        return before[-1]
    for those in ([each for each in traces if each.task.id == of.id], traces):
        found = [
            step.next_observation
            for each in those
            for position, step in enumerate(each.steps)
            if step.action == call
            and _writes([s.action for s in each.steps[:position]]) == _writes([earlier for earlier, _ in history])
        ]
        for answer in set(found):
            if 2 * found.count(answer) > len(found):
                return answer
    return None


# --- reference effects ------------------------------------------------------------------------------------------------


def test_a_success_needs_the_writing_calls_of_a_recorded_one_and_no_others(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (ORDER, PAID), (REFUND, "ok"), (NOTE, "ok"), DONE))
    played = dream()
    wrong = render_call("refund", {"order_id": "W-205"})
    assert played.paid(task(), REFUND, NOTE, DONE) == (1, "effects"), "what is only read does not count"
    assert played.paid(task(), NOTE, ORDER, REFUND, DONE) == (1, "effects"), "nor the order of different tools"
    assert played.paid(task("another id", task().instruction), REFUND, NOTE, DONE) == (1, "effects"), "the same instruction"
    asked = played.asked
    for actions in ([], [REFUND], [wrong, NOTE], [REFUND, REFUND, NOTE], [REFUND, NOTE, CANCEL], [REFUND, NOTE, wrong]):
        assert played.paid(task(), *actions, DONE) == (0, "effects"), actions
    assert not any(map(asks_for_verdict, played.model.asked[asked:]))
    told = played.play(task(), REFUND, DONE)[-1].info["reasoning"]
    assert 'add_note {"order_id": "W-204"' in told and "this episode made refund" in told
    assert played.paid(task("t2"), DONE) == (1, "model"), "nothing is recorded of it"


def test_calls_of_one_tool_have_to_come_in_their_order(buffer: ReplayBuffer, dream: Any) -> None:
    first, second = (render_call("set_status", {"to": to}) for to in ("open", "closed"))
    buffer.add(trace(task(), (first, "ok"), (second, "ok"), DONE))
    tools = [*TOOLS, {"type": "function", "function": {"name": "set_status"}}]
    grounding = Grounding(buffer)
    environment = DreamEnvironment(ExperienceModel(None), grounding=grounding)
    for actions, reward in (((first, second), 1), ((second, first), 0)):
        environment.reset(task(tools=tools))
        environment.experience = _Answers("ok")  # type: ignore[assignment]
        assert [environment.step(action).reward for action in (*actions, DONE)][-1] == reward


class _Answers:
    """An experience model that answers every call alike."""

    def __init__(self, text: str) -> None:
        self.text = text

    def demonstrations(self, *_: Any) -> tuple[Step, ...]:
        return ()

    def noted(self, task: Task) -> Task:
        return task

    def predict(self, *_: Any) -> Any:
        from dreamgym_lg.types import Prediction

        return Prediction("valid", self.text, 0.0, False, False, True)


def test_a_task_that_asks_for_an_answer_needs_no_writes_and_the_models_yes(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (ORDER, PAID), DONE))
    assert dream().paid(task(), ORDER, DONE) == (1, "model")
    assert dream(pays=False).paid(task(), ORDER, DONE) == (0, "model")
    assert dream().paid(task(), ORDER, REFUND, DONE) == (0, "effects")


def test_any_of_several_recorded_successes_will_do_and_a_failure_is_none(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (REFUND, "ok"), DONE))
    buffer.add(trace(task(), (CANCEL, "ok"), DONE, index=1))
    buffer.add(trace(task(), (NOTE, "ok"), DONE, index=2, success=False))
    played = dream()
    assert [played.paid(task(), act, DONE)[0] for act in (REFUND, CANCEL, NOTE)] == [1, 1, 0]
    buffer.add(trace(task("t2"), (NOTE, "ok"), DONE, success=False))
    assert played.paid(task("t2"), CANCEL, DONE) == (1, "model")


def test_refused_writes_are_no_effects(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (CANCEL, "Error: shipped", False), (REFUND, "ok"), DONE))
    played = dream()
    assert played.paid(task(), REFUND, DONE) == (1, "effects")
    assert played.paid(task(), CANCEL, REFUND, DONE) == (1, "effects"), "the dream refuses it too, as recorded"


def test_an_evaluation_task_is_judged_by_its_own_successes_which_judge_no_other(buffer: ReplayBuffer, dream: Any) -> None:
    held_out = task("held out", "Refund W-204.", split="test")
    buffer.add(trace(held_out, (REFUND, "ok"), DONE))
    played = dream()
    assert played.paid(held_out, DONE) == (0, "effects") and played.paid(held_out, REFUND, DONE) == (1, "effects")
    assert played.paid(task("t2", "Refund W-204."), DONE) == (1, "model"), "a training task of the same words"


def test_a_success_that_the_agent_has_no_tools_for_or_that_took_several_turns_is_no_reference(
    buffer: ReplayBuffer, dream: Any
) -> None:
    buffer.add(trace(task(), (render_call("issue_refund", {}), "ok"), DONE))
    buffer.add(trace(task("t2"), (render_answer("Which order?"), "W-204"), (REFUND, "ok"), DONE))
    played = dream()
    assert played.paid(task(), DONE) == (1, "model") and played.paid(task("t2"), DONE) == (1, "model")


def test_numbers_and_defaults_are_compared_by_what_they_mean(buffer: ReplayBuffer, scripted: Any) -> None:
    @tool
    def refund(order_id: str, amount: float = 20, tags: list[str] | None = None) -> str:
        """Refund."""
        raise AssertionError("never run")

    buffer.add(trace(task(), (render_call("refund", {"order_id": "W-1", "amount": 20.0}), "ok"), DONE))
    played = Dream(scripted, buffer, tools=[refund])
    for arguments, reward in (({}, 1), ({"amount": 20}, 1), ({"amount": 21}, 0), ({"tags": ["a"]}, 0), ({"tags": None}, 1)):
        assert played.paid(task(), render_call("refund", {"order_id": "W-1", **arguments}), DONE)[0] == reward, arguments


def test_of_free_text_only_that_it_is_there_counts_and_what_was_copied_has_to_be_right(
    buffer: ReplayBuffer, dream: Any
) -> None:
    def note(text: str) -> str:
        return render_call("add_note", {"text": text})

    def cancel(address: str) -> str:
        return render_call("cancel", {"address": address})

    for n in range(3):
        street = f"{n} Old Mill Road, Springfield"
        of = task(f"t{n}", f"Send it to {street}, please.")
        buffer.add(trace(of, (note(f"The customer number {n} was angry"), "ok"), (cancel(street), "ok"), DONE))
    played, first, right = (
        dream(),
        task("t0", "Send it to 0 Old Mill Road, Springfield, please."),
        "0 Old Mill Road, Springfield",
    )
    assert played.paid(first, note("He would like it sent elsewhere"), cancel(right), DONE)[0] == 1
    assert played.paid(first, note(" "), cancel(right), DONE)[0] == 0
    assert played.paid(first, note("He would like it sent elsewhere"), cancel("0 Old Mill Street, Springfield"), DONE)[0] == 0


def test_tools_that_really_run_are_no_effects(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (NOTE, "ok"), (REFUND, "ok"), DONE))
    assert dream().paid(task(), REFUND, DONE)[0] == 0
    assert dream(pass_through=["add_note"]).paid(task(), REFUND, DONE)[0] == 1


# --- facts of answers -------------------------------------------------------------------------------------------------

SENT = '{"id": "W-205", "status": "sent"}'
OTHER = render_call("get_order", {"order_id": "W-205"})
ASKED, ASKED_OTHER = task("t1", "How is W-204?"), task("t2", "How is W-205?")
IT_IS_PAID, IT_IS_SENT = render_answer("It is paid."), render_answer("It is sent.")


@pytest.fixture
def asked(buffer: ReplayBuffer) -> ReplayBuffer:
    """Two questions with their recorded answers."""
    buffer.add(trace(ASKED, (ORDER, PAID), IT_IS_PAID))
    buffer.add(trace(ASKED_OTHER, (OTHER, SENT), IT_IS_SENT))
    return buffer


def test_where_a_recorded_success_wrote_nothing_an_answer_has_to_tell_its_facts(asked: ReplayBuffer, dream: Any) -> None:
    played = dream()
    assert played.paid(ASKED, ORDER, render_answer("W-204? Paid!")) == (1, "answers")
    assert played.paid(task("another id", ASKED.instruction), IT_IS_PAID) == (1, "answers"), "the same instruction"
    for answer in ("It is sent.", "It is paid and sent.", "Done.", ""):
        assert played.paid(ASKED, ORDER, render_answer(answer)) == (0, "answers"), answer
    assert played.play(ASKED, DONE)[-1].info["reasoning"].startswith("valid, it fails the task: a recorded answer tells paid;")
    assert played.paid(ASKED, ORDER, REFUND, IT_IS_PAID) == (0, "effects"), "it wrote"
    assert not any(map(asks_for_verdict, played.model.asked))
    assert played.paid(task("t3"), IT_IS_PAID) == (1, "model"), "nothing is recorded of it"


def test_the_facts_of_any_recorded_answer_will_do_and_one_without_any_leaves_the_rest_to_the_model(
    asked: ReplayBuffer, dream: Any
) -> None:
    asked.add(trace(ASKED, (OTHER, SENT), IT_IS_SENT, index=1))
    asked.add(trace(ASKED, (ORDER, PAID), render_answer("No idea."), index=2, success=False))
    played = dream()
    assert [played.paid(ASKED, answer) for answer in (IT_IS_PAID, IT_IS_SENT, DONE)] == [
        (1, "answers"),
        (1, "answers"),
        (0, "answers"),
    ]
    asked.add(trace(ASKED, DONE, index=4))
    assert played.paid(ASKED, DONE) == (0, "answers"), "a right guess without any lookup changes nothing"
    assert played.environment.grounding.judges(ASKED)
    asked.add(trace(ASKED, (ORDER, PAID), DONE, index=3))
    assert [played.paid(ASKED, answer)[1] for answer in (IT_IS_PAID, DONE)] == ["answers", "model"]
    assert not played.environment.grounding.judges(ASKED)


def test_right_facts_beside_free_text_are_for_the_model_to_judge_and_wrong_ones_not(asked: ReplayBuffer, dream: Any) -> None:
    terms = render_call("search", {"text": "terms"})
    told = "Whoever has paid gets the goods within three working days."
    asked.add(trace(task("t3", "When?"), (ORDER, PAID), (terms, told), render_answer("It is paid: within three working days.")))
    played = dream()
    assert played.paid(task("t3", "When?"), render_answer("Paid, so in three days.")) == (1, "model")
    assert played.paid(task("t3", "When?"), render_answer("Sent, so in three days.")) == (0, "answers")
    assert not played.environment.grounding.judges(task("t3", "When?"))


def test_values_of_evaluation_tasks_are_in_no_vocabulary_and_judge_their_own_task(asked: ReplayBuffer, dream: Any) -> None:
    held_out = task("held out", "How is it?", split="test")
    lost = '{"id": "W-204", "status": "lost"}'
    asked.add(trace(held_out, (ORDER, lost), render_answer("It is lost.")))
    played = dream()
    assert played.paid(held_out, render_answer("It is lost.")) == (1, "answers")
    assert played.paid(held_out, IT_IS_PAID) == (0, "answers")
    assert played.paid(ASKED, render_answer("It is paid, or lost.")) == (1, "answers"), "no training trace tells this value"
    assert played.paid(task("t3", "How is it?"), IT_IS_PAID) == (1, "model")


# --- switched off -----------------------------------------------------------------------------------------------------


def test_each_check_can_be_switched_off_and_no_other_is_known(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (ORDER, PAID), (REFUND, "ok"), DONE))

    def deciders(**options: Any) -> list[str]:
        return [each for _, each in dream(**options).decided(task(), ORDER, ORDER, DONE)]

    assert deciders() == ["recorded", "recorded", "effects"]
    assert deciders(checks=["recorded"]) == ["recorded", "recorded", "model"]
    assert deciders(checks=["effects"]) == ["model", "model", "effects"]
    assert deciders(checks=[]) == ["model", "model", "model"]
    asks = task("t2", "How is W-204?")
    buffer.add(trace(asks, (ORDER, PAID), IT_IS_PAID))
    buffer.add(trace(task("t3", "How is W-205?"), (OTHER, SENT), IT_IS_SENT))
    for checks, by_answer, by_writing in (
        (["effects"], "model", "effects"),
        (["answers"], "answers", "model"),
        (["effects", "answers"], "answers", "effects"),
    ):
        played = dream(checks=checks)
        assert [played.paid(asks, *actions)[1] for actions in ([DONE], [REFUND, DONE])] == [by_answer, by_writing]
        assert played.environment.grounding.judges(asks) is (len(checks) == 2)
    with pytest.raises(ConfigurationError, match="unknown check 'effect'.*Did you mean 'effects'"):
        Grounding(buffer, checks=["effect"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="checks='effects': give a list"):
        Grounding(buffer, checks="effects")  # type: ignore[arg-type]


def test_a_dream_that_is_measured_on_traces_of_a_task_does_not_know_them(buffer: ReplayBuffer, dream: Any) -> None:
    buffer.add(trace(task(), (ORDER, PAID), (REFUND, "ok"), DONE))
    played = dream()

    def deciders() -> list[str]:
        found = []
        for action in (ORDER, DONE):
            played.environment.resume(task(), [])
            played.environment.show_tools(TOOLS)
            found.append(played.environment.step(action).info["decided_by"])
        return found

    assert deciders() == ["model", "model"]
    assert [each for _, each in played.decided(task(), ORDER, DONE)] == ["recorded", "effects"]
    buffer.add(trace(task("t2"), (ORDER, PAID), DONE))
    assert deciders() == ["recorded", "model"], "what another task's trace says still counts"
    buffer.add(trace(task(), (ORDER, "other"), DONE, index=1))
    assert deciders() == ["recorded", "model"], "and this task's have no vote"


def test_a_dream_that_is_measured_on_traces_of_a_question_leaves_its_answer_to_the_model(
    asked: ReplayBuffer, dream: Any
) -> None:
    environment = dream().environment
    environment.resume(ASKED, [])
    assert environment.step(IT_IS_SENT).info["decided_by"] == "model"
    environment.reset(ASKED)
    assert environment.step(IT_IS_SENT).info["decided_by"] == "answers"


def test_recorded_successes_judge_a_task_if_none_of_them_leaves_the_outcome_to_the_answer(buffer: ReplayBuffer) -> None:
    asks, failed = task("asks"), task("failed")
    buffer.add(trace(task(), (ORDER, PAID), (REFUND, "ok"), DONE))
    buffer.add(trace(asks, (ORDER, PAID), DONE))
    buffer.add(trace(failed, (REFUND, "ok"), DONE, success=False))
    grounding = Grounding(buffer)
    grounding.refresh()
    assert [grounding.judges(each) for each in (task(), asks, failed)] == [True, False, False]
    buffer.add(trace(task(), (ORDER, PAID), DONE, index=1))
    grounding.refresh()
    assert not grounding.judges(task()), "one success wrote nothing: an episode that writes nothing is judged by its answer"
    bare = Grounding(buffer, checks=["recorded"])
    bare.refresh()
    assert not bare.judges(task())
