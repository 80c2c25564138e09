"""The threads of real checkpointers, as real agents left them."""

import sqlite3
from pathlib import Path

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.traces import load_traces

WELCOME = ("Thanks!", '{"answer": "You are welcome."}', "")


def play(agent, thread: str, *said: str | list) -> None:
    for text in said:
        agent.invoke({"messages": [("user", text)]}, {"configurable": {"thread_id": thread}})


@pytest.fixture
def saved(make_agent, tmp_path) -> Path:
    path = tmp_path / "checkpoints.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        agent = make_agent(checkpointer=saver)
        play(agent, "b", "Where to?", "Thanks!")
        play(agent, "a", "Where to?")
    return path


def test_the_newest_state_of_every_thread(saved, steps, seen) -> None:
    before = saved.read_bytes()
    traces = load_traces(saved)
    first, second = traces
    assert seen(second) == steps
    assert seen(first) == [*steps[:3], (*steps[3][:2], "Thanks!"), WELCOME]
    assert first.task == second.task and traces.rejected == ()
    assert saved.read_bytes() == before


def test_a_copy_that_is_in_no_wal_mode(saved, tmp_path, steps, seen) -> None:
    with sqlite3.connect(saved) as connection:
        connection.execute("VACUUM INTO ?", [str(tmp_path / "copy.sqlite")])
    assert [seen(each) for each in load_traces(tmp_path / "copy.sqlite")][1] == steps


def test_the_threads_of_a_file_are_given_rewards(saved) -> None:
    assert [each.reward for each in load_traces(saved, reward={"a": 1, "b": 0.5})] == [0.5, 1.0]
    with pytest.raises(ConfigurationError, match="1 ids of no conversation in .*, e.g. 'c'"):
        load_traces(saved, reward={"c": 1})


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_a_checkpointer_itself(kind, make_agent, steps, seen, tmp_path) -> None:
    with SqliteSaver.from_conn_string(str(tmp_path / "live.sqlite")) as sqlite:
        saver = sqlite if kind == "sqlite" else InMemorySaver()
        play(make_agent(checkpointer=saver), "1", "Where to?")
        (trajectory,) = load_traces(saver, reward=lambda messages: 1.0)
        assert seen(trajectory) == steps and trajectory.success
        if kind == "sqlite":  # while the application has it open
            assert [seen(each) for each in load_traces(tmp_path / "live.sqlite")] == [steps]


def test_an_image_held_as_bytes_is_read_and_stored(make_agent) -> None:
    blocks = [
        {"type": "image", "mime_type": "image/png", "base64": b"\0\1\2"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b"\0\1\2"}},
        {"inline_data": {"mime_type": "image/png", "data": b"\0\1\2"}},
    ]
    saver = InMemorySaver()
    play(make_agent(checkpointer=saver), "1", [{"type": "text", "text": "Where to?"}, *blocks])
    (trajectory,) = load_traces(saver)
    _, first, second, third = trajectory.task.messages[0]["content"]
    assert first == third == {"type": "image", "mime_type": "image/png", "base64": "AAEC"}
    assert second["source"]["data"] == "AAEC"
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend([trajectory])


def test_an_agent_whose_messages_are_stored_as_what_each_step_added(make_deep_agent, steps, seen) -> None:
    saver = InMemorySaver()
    play(make_deep_agent(checkpointer=saver), "1", "Where to?", "Thanks!")
    found = saver.get_tuple({"configurable": {"thread_id": "1"}})
    assert found is not None and not isinstance(found.checkpoint["channel_values"].get("messages"), list)
    (trajectory,) = load_traces(saver)
    assert seen(trajectory) == [*steps[:3], (*steps[3][:2], "Thanks!"), WELCOME]


def test_a_thread_that_waits_for_a_human_is_truncated(make_agent, seen, steps) -> None:
    saver = InMemorySaver()
    play(make_agent(checkpointer=saver, interrupt_before=["tools"]), "1", "Where to?")
    agent = make_agent(checkpointer=saver)
    play(agent, "2", "Where to?")
    traces = load_traces(saver)
    with pytest.warns(UserWarning, match="1 traces read, 1 rejected"):
        assert [seen(each) for each in traces] == [steps]
    (reject,) = traces.rejected
    assert reject.line == 1 and "never answered" in reject.reason


def test_threads_that_cannot_be_read_are_named(saved, steps) -> None:
    from langgraph.graph import StateGraph

    with SqliteSaver.from_conn_string(str(saved)) as saver:
        builder = StateGraph(dict)
        builder.add_node("count", lambda state: {"n": 1})
        builder.set_entry_point("count")
        builder.compile(checkpointer=saver).invoke({"n": 0}, {"configurable": {"thread_id": "numbers"}})
    with sqlite3.connect(saved) as connection:
        connection.execute("UPDATE checkpoints SET checkpoint = x'00ff' WHERE thread_id = 'a'")
    connection.close()
    traces = load_traces(saved)
    with pytest.warns(UserWarning, match="1 traces read, 2 rejected"):
        assert len(list(traces)) == 1
    assert [each.line for each in traces.rejected] == [2, 3]
    assert "thread 'a'" in traces.rejected[0].reason
    assert "'numbers'" in traces.rejected[1].reason and "no 'messages' channel" in traces.rejected[1].reason


def test_other_sqlite_files_are_refused(saved, tmp_path) -> None:
    with ReplayBuffer(tmp_path / "replay.db"):
        pass
    with pytest.raises(ConfigurationError, match="without checkpoints"):
        load_traces(tmp_path / "replay.db")
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(saved.read_bytes()[:100] + b"\xff" * 8000)
    with pytest.raises(ConfigurationError, match="SQLite says"):
        load_traces(damaged)
    with pytest.raises(ConfigurationError, match="nothing in it can be read"):
        load_traces(InMemorySaver())
