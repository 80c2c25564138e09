"""Threads of a LangGraph checkpointer, or of a `SqliteSaver`'s file. The newest state of each."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph.message import add_messages

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.traces.messages import to_messages
from dreamgym_lg.traces.rows import Conversation, Rejected


def is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def of_file(path: Path) -> Iterator[Conversation | Rejected]:
    """The threads in a `SqliteSaver`'s file, which is only read."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, check_same_thread=False)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'checkpoints'").fetchone():
                raise ConfigurationError(
                    f"{path} is an SQLite file without checkpoints; give the file of a LangGraph SqliteSaver, or JSON Lines"
                )
            saver = SqliteSaver(connection)
            # its setup looks for a column that old files lack, and writes the mode of a file that has another one
            saver.is_setup = connection.execute("PRAGMA journal_mode").fetchone() != ("wal",)
            yield from conversations(saver)
    except sqlite3.Error as error:
        raise ConfigurationError(f"{path}: SQLite says {str(error)!r}; give an undamaged SqliteSaver file") from error


def conversations(checkpointer: BaseCheckpointSaver[Any]) -> Iterator[Conversation | Rejected]:
    """One conversation a thread that has a `messages` channel."""
    for number, thread in enumerate(_threads(checkpointer), 1):
        try:
            yield Conversation(number, _newest(checkpointer, thread), id=thread, thread=thread)
        except Exception as error:
            # A stored state is decoded by whatever serialiser the application chose, which may raise anything.
            yield Rejected(number, f"thread {thread!r}: {type(error).__name__}: {error}")


def _threads(checkpointer: BaseCheckpointSaver[Any]) -> list[str]:
    if isinstance(checkpointer, SqliteSaver):
        # `list` would decode every state of every thread only to tell their names.
        with checkpointer.cursor(transaction=False) as cursor:
            cursor.execute("SELECT thread_id FROM checkpoints GROUP BY thread_id ORDER BY min(rowid)")
            return [str(thread) for (thread,) in cursor.fetchall()]
    return list(dict.fromkeys(str(state.config["configurable"]["thread_id"]) for state in checkpointer.list(None)))


def _newest(checkpointer: BaseCheckpointSaver[Any], thread: str) -> list[BaseMessage]:
    state = checkpointer.get_tuple({"configurable": {"thread_id": thread, "checkpoint_ns": ""}})
    if state is None:
        raise ValueError("it holds only states of sub-graphs")
    stored = state.checkpoint["channel_values"].get("messages")
    added: list[Any] = []
    if stored is None:
        # A DeltaChannel (deepagents keeps its messages in one) stores what each step added, and seldom the whole.
        history = checkpointer.get_delta_channel_history(config=state.config, channels=["messages"])["messages"]
        stored, added = history.get("seed"), history["writes"]
        if stored is None and not added:
            raise ValueError("its state has no 'messages' channel")
    channel = DeltaChannel(_add_writes, list).from_checkpoint([] if stored is None else stored)
    channel.replay_writes(added)
    return to_messages(channel.get())


def _add_writes(messages: Any, writes: Sequence[Any]) -> Any:
    for write in writes:
        messages = add_messages(messages or [], write)
    return messages or []
