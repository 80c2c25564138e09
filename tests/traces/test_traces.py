"""What `load_traces` makes of files of messages: the good rows go in, the bad ones are named."""

import json
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from langchain_core.load import dumpd
from langchain_core.messages import AIMessageChunk, SystemMessage, convert_to_openai_messages, messages_to_dict

from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.dream import Episode, Model, RecordedUser, usual_dream
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.environment import record_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.traces import Rejected, load_traces
from dreamgym_lg.types import Trajectory

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def rejected(path, **options) -> list[Rejected]:
    """The rejects of a file with at least one good row; the warning is checked to be there."""
    traces = load_traces(path, **options)
    with pytest.warns(UserWarning, match="rejected"):
        list(traces)
    return list(traces.rejected)


FORMS = {
    "messages_to_dict": lambda messages: {"messages": messages_to_dict(messages)},
    "bare list": messages_to_dict,
    "model_dump": lambda messages: {"messages": [message.model_dump(mode="json") for message in messages]},
    "dumpd": lambda messages: {"messages": dumpd(messages)},
    "openai": lambda messages: {"messages": convert_to_openai_messages(messages)},
    "chunks": lambda messages: {
        "messages": [
            dumpd(AIMessageChunk(content=m.content, tool_calls=m.tool_calls)) if m.type == "ai" else dumpd(m) for m in messages
        ]
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_real_run_reads_the_same_in_every_form(form, played, steps, seen, write) -> None:
    traces = load_traces(write(FORMS[form]([SystemMessage("You help."), *played])))
    (trajectory,) = traces
    assert seen(trajectory) == steps
    assert not any(step.terminated for step in trajectory.steps) and trajectory.steps[-1].truncated, "of unknown outcome"
    task = trajectory.task
    assert (task.instruction, task.environment) == ("Where to?", "traces")
    assert [(message["role"], message["content"]) for message in task.messages] == [
        ("system", "You help."),
        ("user", "Where to?"),
    ]
    assert (task.observation, task.tools, task.metadata) == ("Where to?", ["search", "weather"], {})
    assert (trajectory.source, trajectory.success, trajectory.reward, traces.rejected) == ("offline", False, 0.0, ())


def test_the_replay_buffer_takes_them_once_and_grounds_in_them(played, write, tmp_path) -> None:
    path = write({"messages": messages_to_dict(played)}, {"messages": messages_to_dict(played)}, GOOD)
    other = write({"messages": messages_to_dict(played)}, GOOD | {"score": 1})
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        assert buffer.extend(load_traces(path)) == 2
        assert buffer.extend(load_traces(path)) == 0
        assert buffer.extend(load_traces(other)) == 0  # now with an outcome
        assert (buffer.count("tasks"), buffer.count("trajectories", source="offline")) == (2, 2)
        (step,) = buffer.similar("Where to?", "search cafés", k=1)
        assert step.next_observation == "3 hits for cafés"


def test_ids_depend_on_the_instruction_and_the_environment_alone(write) -> None:
    first = [trajectory.task.id for trajectory in load_traces(write(GOOD, GOOD | {"score": 1}))]
    assert first[0] == first[1]
    (again,) = load_traces(write(GOOD))
    (elsewhere,) = load_traces(write(GOOD), environment="shop")
    assert again.task.id == first[0] != elsewhere.task.id
    assert elsewhere.task.environment == "shop"


@pytest.mark.parametrize(
    ("fields", "reward", "success"),
    [
        ({}, 0.0, False),
        ({"reward": 0.25}, 0.25, True),
        ({"success": True}, 1.0, True),
        ({"reward": 0.5, "success": False}, 0.5, False),
        ({"reward": None, "score": 0.5}, 0.5, True),
    ],
)
def test_a_rows_own_verdict_is_the_last_steps_reward(fields, reward, success, write) -> None:
    (trajectory,) = load_traces(write(GOOD | fields))
    assert (trajectory.reward, trajectory.steps[-1].reward, trajectory.success) == (reward, reward, success)


@pytest.mark.parametrize("fields", [{"reward": 50}, {"score": -1}, {"success": 2}])
def test_a_reward_outside_its_range_is_refused_by_row_and_says_what_to_give(fields, write) -> None:
    """A reward of 50 was stored as it was, and paid 50 where a dream pays 1."""
    (row,) = rejected(write(GOOD, GOOD | fields))
    assert row.line == 2 and "outside 0 to 1: give load_traces(..., reward_range=" in row.reason


def test_rewards_of_another_range_are_scaled(write) -> None:
    rows = [GOOD | {"score": score} for score in (-10, 0, 5, 10)] + [GOOD | {"success": True}, GOOD]
    found = list(load_traces(write(*rows), reward_range=(-10, 10)))
    assert [each.reward for each in found] == [0.0, 0.5, 0.75, 1.0, 1.0, 0.0]
    assert [each.success for each in found] == [False, False, True, True, True, False], "above 0 as it was recorded"
    assert [each.reward for each in load_traces(write(GOOD), reward=lambda _: 3, reward_range=(1, 5))] == [0.5]
    stars = [GOOD | {"score": score} for score in (1, 2, 5)]
    assert [each.success for each in load_traces(write(*stars), reward_range=(1, 5))] == [False, True, True], (
        "the lowest is none"
    )
    with pytest.raises(ConfigurationError, match="reward is 3, outside 0 to 1"):
        load_traces(write(GOOD), reward=lambda _: 3)
    with pytest.raises(ConfigurationError, match=r"reward_range=\(1, 1\): give the lowest and the highest"):
        load_traces(write(GOOD), reward_range=(1, 1))


def test_rewards_are_given_by_the_ids_of_rows(write) -> None:
    path = write(GOOD | {"id": "a", "score": 1}, GOOD | {"id": "b", "score": 0.5}, GOOD)
    assert [each.reward for each in load_traces(path, reward={"a": 0.25})] == [0.25, 0.5, 0.0]
    with pytest.raises(ConfigurationError, match="1 ids of no conversation in .*, e.g. 'c'"):
        load_traces(path, reward={"a": 1, "c": 1})
    path = write(GOOD | {"id": "a", "thread_id": "t"}, GOOD | {"thread_id": "u"})
    assert [each.reward for each in load_traces(path, reward={"t": 0.5, "u": 0.25, "a": 0.75})] == [0.75, 0.25]


def test_a_reward_is_asked_for_once_an_episode(played, write) -> None:
    """A model may give it, and the source is read several times."""
    asked = list[int]()
    path = write({"messages": messages_to_dict(played)}, GOOD)
    traces = load_traces(path, reward=lambda messages: float(asked.append(len(messages)) is None), held_out=0.01)
    assert [each.reward for each in traces] == [each.reward for each in traces] == [1.0, 1.0]
    assert not traces.rejected and sorted(asked) == [2, len(played)]


# --- outcomes that were corrected -------------------------------------------------------------------------------------------

BOOKED = {
    "messages": [
        {"role": "user", "content": "Book it."},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "book", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
}
"""The agent returns the tool's answer: only with a reward is that its last step."""


def stored(buffer: ReplayBuffer) -> list[tuple[bool, float, bool]]:
    return [(each.success, each.reward, each.has_outcome) for each in buffer.trajectories()]


@pytest.mark.parametrize("id", [{}, {"id": "a"}, {"thread_id": "t"}])
def test_an_imported_trace_gets_the_outcome_that_it_is_imported_with_again(id, write, tmp_path) -> None:
    """It was stored a second time, and the old success went on judging."""
    path = tmp_path / "replay.db"
    with ReplayBuffer(path) as buffer, ReplayBuffer(path) as elsewhere:
        assert buffer.extend(load_traces(write(BOOKED | id, GOOD | {"score": 1}))) == 2
        index = TraceIndex(elsewhere)
        for reward, success, number in ((1, True, 1), (0, False, 2), (0, False, 2), (0.5, True, 3)):
            (given,) = load_traces(write(BOOKED | id | {"reward": reward}))
            assert buffer.extend([given]) == 0 and buffer.corrections() == elsewhere.corrections() == number
            assert stored(buffer) == [(success, reward, True), (True, 1.0, True)]
            assert next(buffer.trajectories()) == replace(given, steps=tuple(given.steps))
            index.refresh()
            assert len(index.successes.get((given.task.id,), ())) == success
        assert buffer.extend(load_traces(write(BOOKED | id))) == 0 and buffer.corrections() == 3, "none is no other outcome"
        assert buffer.similar("Book it.", "book", k=1)[0].reward == 0
        assert buffer.similar("ok", next(buffer.trajectories()).steps[-1].action, k=1)[0].reward == 0.5


def test_an_outcome_may_come_later_in_the_same_file(write) -> None:
    with ReplayBuffer(":memory:") as buffer:
        assert buffer.extend(load_traces(write(BOOKED, BOOKED | {"reward": 1}, BOOKED))) == 1
        assert stored(buffer) == [(True, 1.0, True)] and buffer.count("steps") == 2


def test_a_correction_takes_the_annotation_of_the_old_outcome_away(write) -> None:
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(load_traces(write(GOOD | {"score": 1})))
        (trajectory,) = buffer.trajectories()
        buffer.set_reasoning(trajectory, ["it worked"], annotation={"success_mode": "greeted"})
        buffer.extend(load_traces(write(GOOD | {"score": 1})))
        assert next(buffer.trajectories()).annotation is not None, "nothing was corrected"
        buffer.extend(load_traces(write(GOOD | {"score": 0})))
        (trajectory,) = buffer.trajectories()
        assert trajectory.annotation is None and not trajectory.steps[0].reasoning


def test_reasoning_about_an_outcome_that_was_corrected_meanwhile_is_not_stored(write) -> None:
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(load_traces(write(GOOD | {"score": 1})))
        (before,) = buffer.trajectories()
        buffer.extend(load_traces(write(GOOD | {"score": 0})))
        buffer.set_reasoning(before, ["it worked"], annotation={"success_mode": "greeted"})
        (after,) = buffer.trajectories()
        assert after.annotation is None and not after.steps[0].reasoning and not after.success


def test_rows_of_one_session_are_corrected_by_their_own_id(write) -> None:
    one, other = ({**GOOD, "session_id": "s", "id": id} for id in "ab")
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(load_traces(write(one | {"score": 0}, other | {"score": 1})))
        buffer.extend(load_traces(write(one | {"score": 0}, other | {"score": 0})))
        assert [success for success, *_ in stored(buffer)] == [False, False] and buffer.corrections() == 1


@pytest.mark.parametrize("id", [{"id": "a"}, {"thread_id": "t"}])
def test_the_last_row_of_a_conversation_has_its_outcome(id, write) -> None:
    """Both were stored, and the old success went on judging."""
    rows = [GOOD | id | {"score": score} for score in (1, 0, 1, 0)]
    unscored = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "oh"}]}
    for other in (BOOKED | id | {"score": 1}, unscored | id):
        traces = load_traces(write(*rows, other, GOOD | id))
        with ReplayBuffer(":memory:") as buffer:
            for new in (2, 0):
                assert buffer.extend(traces) == new and buffer.corrections() == 0 and traces.folded == 2
            assert [success for success, *_ in stored(buffer)] == [False, "score" in other], "others of the id are kept"


def test_like_conversations_of_other_outcomes_are_two_traces(write) -> None:
    both = write(GOOD | {"id": "a", "score": 1}, GOOD | {"id": "b", "score": 0}, BOOKED | {"score": 1}, BOOKED | {"score": 0})
    corrected = write(GOOD | {"id": "a", "score": 1}, GOOD | {"id": "b", "score": 1})
    with ReplayBuffer(":memory:") as buffer:
        for new in (4, 0):
            assert buffer.extend(load_traces(both)) == new and buffer.corrections() == 0
        assert buffer.extend(load_traces(corrected)) == 0 and buffer.corrections() == 1
        assert [success for success, *_ in stored(buffer)] == [True, True, True, False]


# --- conversations turn by turn ---------------------------------------------------------------------------------------------

TURNS = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Where to?"},
    {"role": "assistant", "content": "By when?"},
    {"role": "user", "content": "Today."},
    {"role": "assistant", "content": "To Rome."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "You are welcome."},
]


def begun(length: int, **fields) -> dict:
    return {"messages": TURNS[:length], **fields}


@pytest.mark.parametrize("order", [(3, 5, 7), (7, 3, 5)])
@pytest.mark.parametrize("fields", [{}, {"thread_id": "t"}, {"metadata": {"session_id": "t"}}, {"reward": 1}])
def test_of_a_thread_turn_by_turn_the_longest_trace_is_kept(order, fields, write) -> None:
    """Every beginning was a trace, and the recorded user left after its first words."""
    traces = load_traces(write(*(begun(length, **fields) for length in order), GOOD))
    longest, other = traces
    assert traces.folded == 2 and len(longest.steps) == 3 and other.task.instruction == "hi"
    user, asked = RecordedUser([longest]), render_answer("By when?")
    assert user.reply(Episode(task=longest.task, action=asked)) == "Today."


@pytest.mark.parametrize(
    "rows",
    [
        (begun(3, thread_id="a"), begun(5, thread_id="b")),
        (begun(3, reward=1), begun(5, reward=0)),
        (begun(3, reward=1), begun(5)),
        (begun(3, thread_id="t", reward=1), begun(5, thread_id="t")),
        (begun(3, thread_id="t", reward=1), begun(5, thread_id="t", reward=1, rubric=5)),
        (begun(3), {"messages": [*TURNS[:2], {"role": "assistant", "content": "When?"}, *TURNS[3:5]]}),
        (begun(3), {"messages": TURNS[1:5]}),
        (begun(3, thread_id="a"), begun(3, thread_id="b")),
        (begun(5), {"messages": [*TURNS[:5], {"role": "tool", "tool_call_id": "x", "content": "?"}]}),
    ],
    ids=[
        "other threads",
        "other outcomes",
        "own outcome",
        "the only reward",
        "bad rubric",
        "other words",
        "other system message",
        "alike",
        "unreadable",
    ],
)
def test_conversations_that_only_begin_alike_are_kept(rows, write) -> None:
    traces = load_traces(write(*rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(list(traces)) + len(traces.rejected) == 2 and traces.folded == 0


def test_within_a_thread_the_last_turns_outcome_counts_and_the_others_are_not_asked_for(write) -> None:
    rows = [begun(length, thread_id="t", reward=reward) for length, reward in ((3, 1), (5, 0), (7, 0))]
    (longest,) = load_traces(write(*rows))
    assert longest.has_outcome and not longest.success
    asked = list[int]()
    list(load_traces(write(*rows), reward=lambda messages: float(asked.append(len(messages)) is None)))
    assert asked == [7]


def langfuse(length: int) -> dict:
    state = {"messages": TURNS[:length]}
    return {"id": f"t{length}", "sessionId": "s", "input": {"messages": TURNS[1:2]}, "output": state, "observations": []}


def langsmith(length: int) -> dict:
    fields = {"id": f"r{length}", "trace_id": f"r{length}", "run_type": "chain", "session_id": "a project"}
    return {**fields, "outputs": {"messages": TURNS[:length]}, "extra": {"metadata": {"thread_id": "s"}}}


def phoenix(length: int) -> dict:
    asked, answered = json.dumps(TURNS[: length - 1]), json.dumps(TURNS[length - 1 : length])
    attributes = {"gen_ai.input.messages": asked, "gen_ai.output.messages": answered, "gen_ai.conversation.id": "s"}
    return {"name": "chat", "context": {"trace_id": f"t{length}", "span_id": f"s{length}"}, "attributes": attributes}


@pytest.mark.parametrize("export", [langfuse, langsmith, phoenix])
def test_exports_know_the_thread_of_their_traces(export, write) -> None:
    feedback = [{"scores": [{"name": "ok", "value": value}], "feedback_stats": {"ok": {"avg": value}}} for value in (1, 0)]
    traces = load_traces(write({**export(3), **feedback[0]}, {**export(5), **feedback[1]}))
    (longest,) = traces
    assert traces.folded == 1 and len(longest.steps) == 2
    assert not longest.success, "in one thread the first turn's outcome keeps no trace of its own"


# --- what a task holds ------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "function", "function": {"name": "search", "description": "Find pages.", "parameters": {"type": "object"}}}


def test_every_task_holds_the_tools_of_the_whole_file(played, write) -> None:
    """Those that a trace called would tell what its task needs; an answer at once told that it needs none."""
    calling, silent = {"messages": messages_to_dict(played)}, GOOD
    assert [each.task.tools for each in load_traces(write(silent, calling))] == [["search", "weather"]] * 2
    both = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "search")]
    (first, second) = load_traces(write(calling | {"tools": both}, silent | {"tools": [SCHEMA]}))
    assert first.task.tools == second.task.tools == [SCHEMA, both[0]]


def test_tools_that_are_none_are_refused_by_row(write) -> None:
    reasons = [row.reason for row in rejected(write(GOOD, GOOD | {"tools": "search"}, GOOD | {"tools": [{"title": 3}]}))]
    assert "not a list of function schemas" in reasons[0] and "cannot be read" in reasons[1]


def test_a_rows_metadata_and_rubric_are_its_tasks(write) -> None:
    """The same words of two customers are two tasks, on the same side of a split."""
    rows = [GOOD | {"metadata": {"customer": id}, "rubric": "It greets."} for id in range(20)]
    found = list(load_traces(write(*rows, GOOD, GOOD | {"rubric": "It greets."}), held_out=0.5))
    task = found[3].task
    assert (task.metadata, task.rubric, task.observation, task.tools) == ({"customer": 3}, "It greets.", "hi", [])
    assert len({each.task.id for each in found}) == 22 and len({each.task.split for each in found}) == 1
    reasons = [row.reason for row in rejected(write(GOOD, GOOD | {"metadata": ["x"]}, GOOD | {"rubric": 3}))]
    assert "metadata is \"['x']\", not an object" in reasons[0] and "rubric is '3', not a text" in reasons[1]


ANSWER, VERDICT = "valid, fine\nreward 0, continues\n3 hits", "it greets\nsuccess"


def test_a_users_own_metadata_survive_and_change_nothing(write, scripted) -> None:
    """Whatever the library once kept under these keys: it reads its own fields alone."""
    own = {"observation": 3, "tools": "a hammer", "rubric": ["x"], "seed": "s", "panel": True, "generated": "2025-01-02"}
    own |= {"reference_calls": 7, "reference_answers": {}, "reference_reply": "no"}
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(load_traces(write(*(GOOD | {"tools": [SCHEMA], "metadata": metadata} for metadata in (own, {})))))
        marked, plain = buffer.tasks()
        assert replace(marked, id=plain.id, metadata={}) == plain and marked.metadata == own
        prompts, episodes = [], []
        for task in (marked, plain):
            model = scripted(reply=lambda messages: VERDICT if is_answer(messages[-1].text.splitlines()[-1][2:]) else ANSWER)
            dream = usual_dream(Model(model, replay_buffer=buffer)).create_environment()
            seen, steps = dream.reset(replace(task, id="one")), []
            for action in (render_call("search", {"query": "hi"}), render_answer("hello")):
                step, success = record_action(action, seen, dream.step(action))
                seen = step.next_observation
                steps.append(step)
            prompts.append(model.asked)
            episodes.append(Trajectory(task=task, steps=tuple(steps), success=success, source="synthetic", run="dreamed"))
        assert prompts[0] == prompts[1] and len(prompts[0]) == 2 and episodes[0].success
        buffer.extend(episodes)
        assert list(buffer.trajectories(run="dreamed")) == episodes


def test_of_few_tasks_one_at_least_is_held_out(write) -> None:
    def splits(number: int, share: float) -> list[str]:
        answer = {"role": "assistant", "content": "x"}
        rows = [{"messages": [{"role": "user", "content": f"task {n}"}, answer]} for n in range(number)]
        return [each.task.split for each in load_traces(write(*rows, rows[0]), held_out=share)][:number]

    few = splits(3, 0.01)
    assert sorted(few) == ["test", "train", "train"] and splits(3, 0) == ["train"] * 3
    assert splits(1, 0.01) == ["train"], "else there would be nothing to train on"
    assert splits(100, 0.3).count("test") > 10 and splits(100, 0.3)[:3].count("test") >= few.count("test") - 1


def test_reward_overrides_the_row(played, write) -> None:
    path = write({"messages": messages_to_dict(played), "score": float("nan")})
    (trajectory,) = load_traces(path, reward=lambda messages: 0.1 * sum(message.type == "tool" for message in messages))
    assert trajectory.reward == pytest.approx(0.3) and trajectory.success
    with pytest.raises(ConfigurationError, match="line 1.*not a finite number"):
        load_traces(path, reward=lambda messages: float("nan"))
    with pytest.raises(ZeroDivisionError):
        load_traces(path, reward=lambda messages: 1 / 0)


def test_every_bad_row_is_named_and_the_rest_goes_in(write) -> None:
    bad = {
        1: (b"\xef\xbb\xbf" + b'{"messages": 3}', "not a list"),
        3: (b"\x00\xff\xfe\x9c garbage", "UTF-8"),
        5: (b"[" * 100_000, "JSON"),
        6: ('{"reward": 1}', "no key `messages`"),
        7: ("null", "no key `messages`"),
        8: ('{"messages": []}', "no human message"),
        9: ('{"messages": [{"role": "user", "content": "hi"}]}', "did nothing"),
        10: ('{"messages": [{"role": "alien", "content": "hi"}]}', "message 1"),
        11: ('{"messages": ["hi"]}', "message 1"),
        12: (json.dumps(GOOD | {"reward": float("nan")}), "not a finite number"),
        13: (json.dumps(GOOD | {"reward": 10**400}), "not a finite number"),
        14: (json.dumps(GOOD | {"success": "yes"}), "not a finite number"),
        15: ("[]", "no human message"),
        16: ('{"messages": [{"role": "user", "content": "hi"}', "not JSON"),
    }
    rows = [bad[line][0] if line in bad else (b"  " if line == 2 else json.dumps(GOOD)) for line in range(1, 17)]
    path = write(*rows)
    assert [trajectory.steps[-1].action for trajectory in _quiet(path)] == ['{"answer": "hello"}']
    found = rejected(path, format="messages")
    assert [each.line for each in found] == sorted(bad)
    for line, reason in found:
        assert bad[line][1] in reason, (line, reason)


def _quiet(path: Path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(load_traces(path, **options))


def test_rejects_warn_once_and_are_there_without_iterating(write) -> None:
    path = write("{broken", GOOD, "[1, 2]", GOOD, "{}", "{}")
    traces = load_traces(path)
    with pytest.warns(UserWarning, match=r"2 traces read, 5 rejected \(line 1: not JSON.*; \.\.\.\)"):
        assert [each.line for each in traces.rejected] == [1, 3, 3, 5, 6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(traces)) == 2


@pytest.mark.parametrize("content", [b"", b"\n \n", b"{}\n{}", b"\x00" * 5000, b'{"messages": [', "[]".encode("utf-16")])
@pytest.mark.parametrize("format", ["auto", "messages", "langsmith", "otel"])
def test_a_file_with_nothing_in_it_raises(content, format, tmp_path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="nothing in it can be read"):
        load_traces(path, format=format)


def test_a_wrong_path_or_format_raises(tmp_path, write) -> None:
    with pytest.raises(ConfigurationError, match="not a file"):
        load_traces(tmp_path / "none.jsonl")
    with pytest.raises(ConfigurationError, match="not a file"):
        load_traces(tmp_path)
    with pytest.raises(ConfigurationError, match="did you mean 'otel'|Did you mean 'otel'"):
        load_traces(write(GOOD), format="otell")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="unknown .*None"):
        load_traces(write(GOOD), format=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_its_elements(indent, write) -> None:
    text = json.dumps([GOOD, 5, GOOD["messages"]], indent=indent)
    path = write(text)
    assert len(_quiet(path)) == 2
    assert [each.line for each in rejected(path)] == [text.split("5")[0].count("\n") + 1]


def test_an_array_that_is_cut_off_loses_its_end_only(write) -> None:
    text = json.dumps([GOOD, GOOD | {"score": 1}, GOOD], indent=2)
    cut = text[: text.rindex("assistant")]
    (reject,) = rejected(write(cut))
    assert reject.line > text[: text.index("score")].count("\n") and "not JSON" in reject.reason
    assert len(_quiet(write(cut))) == 2
    (reject,) = rejected(write(text.rstrip("]")))
    assert "cut off" in reject.reason


def test_one_conversation_over_many_lines_is_one_row(write) -> None:
    (trajectory,) = load_traces(write(json.dumps(GOOD["messages"], indent=2)))
    assert len(trajectory.steps) == 1
    assert len(list(load_traces(write(json.dumps(GOOD, indent=2))))) == 1


def test_a_byte_order_mark_and_windows_lines_are_no_matter(write) -> None:
    line = json.dumps(GOOD).encode()
    assert len(list(load_traces(write(b"\xef\xbb\xbf" + line + b"\r", line + b"\r\n")))) == 2
    document = json.dumps([GOOD], indent=1).replace("\n", "\r\n").encode()
    assert len(list(load_traces(write(b"\xef\xbb\xbf" + document)))) == 1


@pytest.mark.slow
def test_lines_are_not_held(tmp_path) -> None:
    path, row = tmp_path / "large.jsonl", json.dumps(GOOD | {"padding": "x" * 1_000_000})
    with path.open("w") as file:
        file.writelines(f"{row}\n" for _ in range(30))
    tracemalloc.start()
    assert sum(1 for _ in load_traces(path)) == 30
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12_000_000  # of 30 MB


@pytest.mark.slow
def test_a_row_of_twenty_megabytes_is_read(write) -> None:
    huge = {"messages": [GOOD["messages"][0] | {"content": "x" * 20_000_000}, GOOD["messages"][1]]}
    (trajectory,) = load_traces(write(huge))
    assert len(trajectory.steps[0].observation) == 20_000_000


@pytest.mark.slow
def test_no_mutilated_row_escapes_as_another_error(played, survives) -> None:
    survives("messages", [[form([SystemMessage("You help."), *played])] for form in FORMS.values()], 300)


def test_threads_of_a_server_are_given_rewards_by_their_id(write) -> None:
    thread = {"thread_id": "t1", "values": {"messages": GOOD["messages"]}}
    assert [each.reward for each in load_traces(write(thread), reward={"t1": 1})] == [1]
