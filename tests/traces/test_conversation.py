"""How a conversation becomes steps: who answers what, where it ends, and what is no conversation."""

import json
from typing import Literal

import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from dreamgym_lg.actions import ToolCall, parse_action, render_answer, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.traces import load_traces

USER = {"role": "user", "content": "Find it."}
DONE = {"role": "assistant", "content": "Found."}


def calls(*ids: str, arguments: str = '{"q": 1}', **fields) -> dict:
    """An assistant's reply with one call of `look` for each id."""
    listed = [{"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}} for id in ids]
    return {"role": "assistant", "tool_calls": listed, **fields}


def answer(id: str, content="a page", **fields) -> dict:
    return {"role": "tool", "tool_call_id": id, "content": content, **fields}


@pytest.fixture
def read(write):
    def read(*messages, score=1):
        (trajectory,) = load_traces(write({"messages": list(messages), "score": score}))
        return trajectory

    return read


@pytest.fixture
def reason(write):
    def reason(*messages) -> str:
        with pytest.raises(ConfigurationError) as caught:
            load_traces(write({"messages": list(messages)}))
        return str(caught.value)

    return reason


def test_an_error_is_an_invalid_action(read) -> None:
    trajectory = read(USER, calls("1"), answer("1", "no such page", status="error"), DONE)
    assert [step.valid for step in trajectory.steps] == [False, True]
    assert trajectory.steps[0].next_observation == "no such page"


@pytest.mark.parametrize("arguments", [{"q": "one"}, {"q": "two"}, {}], ids=["refused", "failed", "unknown tool"])
def test_an_error_in_the_words_of_langgraph_needs_no_status(arguments, read) -> None:
    """OpenAI's form has none: a recorded success seemed to have made the calls that were refused."""

    def look(q: Literal["two", 1]) -> str:
        """Look."""
        raise KeyError("no such page")

    graph = StateGraph(MessagesState).add_node(ToolNode([look], handle_tool_errors=True)).set_entry_point("tools").compile()
    called = {"name": "look" if arguments else "find", "args": arguments, "id": "1"}
    refusal = graph.invoke({"messages": [AIMessage("", tool_calls=[called])]})["messages"][-1]
    assert refusal.status == "error"
    trajectory = read(USER, calls("1"), answer("1", refusal.text), calls("2"), answer("2", "Error: see [page 1]."), DONE)
    assert [step.valid for step in trajectory.steps] == [False, True, True]


def test_a_malformed_call_that_the_agent_ended_with_is_its_last_action(read) -> None:
    """Its text was dropped, and the episode passed for one that was cut short."""
    trajectory = read(USER, calls("1"), answer("1"), calls("2", arguments='{"q": 1'))
    last = trajectory.steps[-1]
    assert json.loads(last.action) == {"name": "look", "arguments": '{"q": 1'}
    assert last.terminated and not last.valid and not last.truncated and len(trajectory.steps) == 2
    assert len(read(USER, calls("1", arguments="{")).steps) == 1


def test_answers_in_another_order_find_their_calls(read, seen) -> None:
    reply = calls("1", "2")
    reply["tool_calls"][1]["function"]["arguments"] = '{"q": 2}'
    found = seen(read(USER, reply, answer("2", "second"), answer("1", "first"), DONE))
    assert [(parse_action(action), after) for _, action, after in found[:2]] == [
        (ToolCall("look", {"q": 1}), "first"),
        (ToolCall("look", {"q": 2}), "second"),
    ]


def test_ids_that_are_used_again_are_matched_in_order(read, seen) -> None:
    messages = [USER, calls("x", "x"), answer("x", "one"), answer("x", "two"), calls("x"), answer("x", "three"), DONE]
    assert [after for _, _, after in seen(read(*messages))] == ["one", "two", "three", ""]


def test_a_user_who_goes_on_answers_the_agents_words(read, seen) -> None:
    ask = {"role": "assistant", "content": "Which one?"}
    trajectory = read(USER, calls("1"), answer("1"), ask, {"role": "user", "content": "The red one."}, DONE)
    assert seen(trajectory)[1:] == [
        ("a page", '{"answer": "Which one?"}', "The red one."),
        ("The red one.", '{"answer": "Found."}', ""),
    ]
    assert [step.terminated for step in trajectory.steps] == [False, False, True]
    assert trajectory.task.instruction == "Find it."


def test_what_is_said_beside_a_tools_answer_is_seen_with_it(read, seen) -> None:
    note = {"role": "system", "content": "Two steps left."}
    trajectory = read(USER, USER | {"content": "Soon."}, calls("1"), note, answer("1"), DONE)
    assert trajectory.task.observation == trajectory.task.instruction == "Find it.\n\nSoon."
    assert seen(trajectory)[0][2] == "a page\n\nTwo steps left."


def test_what_a_user_says_behind_a_tools_answer_is_no_part_of_it(read, seen) -> None:
    well = USER | {"content": "Well?"}
    trajectory = read(USER, calls("1"), answer("1"), well, calls("2"), answer("2"), DONE)
    assert seen(trajectory)[:3] == [
        ("Find it.", render_call("look", {"q": 1}), "a page"),
        ("a page", render_answer("a page", tool="look"), "Well?"),
        ("Well?", render_call("look", {"q": 1}), "a page"),
    ]
    last = read(USER, calls("1"), answer("1"), well).steps[-1]  # as behind any other answer
    assert (last.action, last.next_observation, last.terminated) == (render_answer("a page", tool="look"), "Well?", True)


def test_words_that_nobody_answers_are_no_step(read, seen) -> None:
    report = {"role": "assistant", "name": "researcher", "content": "It is on page 3."}
    aside = calls("1", content="Let me look.")
    trajectory = read(USER, aside, answer("1"), report, DONE)
    assert len(seen(trajectory)) == 2 and [step.words for step in trajectory.steps] == ["Let me look.", ""]
    assert trajectory.rollout_index != read(USER, calls("1"), answer("1"), report, DONE).rollout_index


def test_a_greeting_before_the_user_is_no_step(read, seen) -> None:
    assert seen(read({"role": "assistant", "content": "Hello!"}, USER, DONE)) == [("Find it.", '{"answer": "Found."}', "")]


def test_a_run_that_stops_in_a_call_is_cut_before_it(read) -> None:
    trajectory = read(USER, calls("1"), answer("1"), calls("2", "3"), answer("3", "third"), score=0)
    assert [step.next_observation for step in trajectory.steps] == ["a page", "third"]
    assert [(step.terminated, step.truncated) for step in trajectory.steps] == [(False, False), (False, True)]
    assert not trajectory.success


def test_a_run_without_a_reward_that_stops_after_an_answer_or_a_users_words_is_truncated(read) -> None:
    trajectory = read(USER, calls("1"), answer("1"), score=None)
    assert (trajectory.steps[-1].truncated, trajectory.success, len(trajectory.steps)) == (True, False, 1)
    trajectory = read(USER, DONE, {"role": "user", "content": "No!"}, score=None)
    assert (trajectory.steps[0].next_observation, trajectory.steps[0].truncated) == ("No!", True)


def test_arguments_that_are_no_object_are_an_invalid_action(read) -> None:
    trajectory = read(USER, calls("1", arguments='{"q": '), answer("1", "not JSON", status="error"), DONE)
    assert (trajectory.steps[0].valid, len(trajectory.steps)) == (False, 2)
    with pytest.raises(ValueError, match="neither"):
        parse_action(trajectory.steps[0].action)
    assert json.loads(trajectory.steps[0].action) == {"name": "look", "arguments": '{"q": '}


def test_content_blocks_are_read_as_text(read) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    blocks = [{"type": "text", "text": "one"}, picture, {"type": "text", "text": "two"}]
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Fo"}, {"type": "text", "text": "und."}]
    trajectory = read(USER | {"content": blocks}, calls("1"), answer("1", blocks[::2]), DONE | {"content": thought})
    assert trajectory.task.instruction == "one\n[image_url]\ntwo" and trajectory.steps[0].next_observation == "one\ntwo"
    assert trajectory.steps[-1].action == '{"answer": "Found."}'


def test_anthropics_own_blocks_are_calls_and_answers(read, seen) -> None:
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {"q": 1}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a page"}], "is_error": True}
    trajectory = read(USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}, DONE)
    assert seen(trajectory)[0] == ("Find it.", '{"arguments": {"q": 1}, "name": "look"}', "a page")
    assert not trajectory.steps[0].valid


def test_odd_values_survive_the_replay_buffer(read) -> None:
    from dreamgym_lg.replay.buffer import ReplayBuffer

    call = calls("1", arguments='{"at": "2026-01-01T00:00:00Z", "x": NaN}')
    trajectory = read(USER | {"content": "half \ud83d"}, call, answer("1"), DONE)
    action = parse_action(trajectory.steps[0].action)
    assert isinstance(action, ToolCall) and action.arguments["at"] == "2026-01-01T00:00:00Z"
    with ReplayBuffer(":memory:") as buffer:
        assert buffer.extend([trajectory]) == 1


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([USER, calls("1"), DONE], "tool call '1' (look) has no answer before the next AI message"),
        ([USER, answer("1"), DONE], "answers call '1', which no AI message before it left open"),
        ([USER, calls("1"), answer("2"), DONE], "answers call '2'"),
        ([USER, calls("1"), answer("1"), answer("1"), DONE], "answers call '1'"),
        ([USER, calls("1")], "its call of 'look' was never answered"),
        ([calls("1"), answer("1"), USER, DONE], "before any human message"),
        ([{"role": "system", "content": "Work."}, DONE], "no human message"),
        ([USER | {"content": ""}, DONE], "no human message has a text"),
        (
            [USER, {"role": "function", "name": "f", "content": "1"}, DONE],
            "answers a call of 'f', which no AI message before it left open",
        ),
        ([USER, {"type": "remove", "id": "1", "content": ""}, DONE], "no role of a message is 'remove'"),
    ],
)
def test_what_no_agent_could_have_held_is_rejected_with_its_reason(messages, said, reason) -> None:
    text = reason(*messages)
    assert said in text and "line 1" in text
