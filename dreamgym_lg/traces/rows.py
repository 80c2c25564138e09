"""Reads rows of a trace file with their lines: JSON Lines or JSON, also compressed."""

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from langchain_core.messages import BaseMessage, HumanMessage

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.text import clean
from dreamgym_lg.traces.messages import first_set, is_message, messages_of, short, to_messages, unpacked, with_system
from dreamgym_lg.traces.verdicts import FEEDBACK, feedback, own_metadata, recorded_tools, thread_of

_COMPRESSED = {b"\xfd7zXZ\0": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}
"""First bytes of a file -> function that opens it."""
_MESSAGES = ("messages", "conversations", "conversation", "contents", "traj", "trajectory")
"""Keys of a row's messages, the preferred first."""
_EXCHANGES = (("inputs", "outputs"), ("input", "output"), ("request", "response"), ("prompt", "completion"))
"""Keys of an agent's or model's input and output."""
_DECODER = json.JSONDecoder()


class Rejected(NamedTuple):
    """A row or trace that could not be read, and why."""

    line: int
    """The line in the file, from 1. For a checkpointer, the number of the thread."""
    reason: str


class TraceRow(NamedTuple):
    """One JSON value of the file, and the line on which it begins."""

    line: int
    value: Any
    place: str = ""
    """Its place among the line's values, in front of every reason to reject it."""


class Conversation(NamedTuple):
    """One recorded run of an agent, whatever the format it came in."""

    line: int
    messages: list[BaseMessage]
    fields: Mapping[str, Any] = {}
    """The row's own verdict, and its task's `metadata` and `rubric`. A verdict is `reward` or `score` (a number), `success` (a
    boolean), `feedback` (values by key). None reads as absent."""
    id: str = ""
    """A checkpointer's thread, the trace of LangSmith and OpenTelemetry, the row's own `id` (else "")."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The schemas of what the agent could call (`tool_schemas`), where they were recorded."""
    place: str = ""
    """As of `TraceRow`."""
    thread: str = ""
    """The conversation that it is, or is a part of, where that was recorded (`thread_of`)."""


def read_rows(path: Path) -> Iterator[TraceRow | Rejected]:
    """The rows of a file, in order. A list that is no conversation counts as its elements.

    JSON Lines are read a line at a time; JSON that runs over lines is held whole. Raises `ConfigurationError` for a compressed
    file that is damaged.
    """
    with path.open("rb") as plain:
        start = plain.read(6)
    opened = next((way for magic, way in _COMPRESSED.items() if start.startswith(magic)), None)
    try:
        yield from _rows(opened or open, path)
    except (lzma.LZMAError, zlib.error, OSError, EOFError) as error:
        if opened is None:
            raise
        raise ConfigurationError(f"{path} cannot be decompressed ({error}): give it undamaged, or unpacked") from error


def _rows(opened: Any, path: Path) -> Iterator[TraceRow | Rejected]:
    with opened(path, "rb") as file:
        head = next((line for line in file if line.strip()), b"")
        file.seek(0)
        rows = _of_document(file) if _runs_over_lines(head) else _of_lines(file)
        for row in rows:
            if isinstance(row, TraceRow) and isinstance(row.value, list) and row.value and not is_message(row.value[0]):
                yield from (TraceRow(row.line, value, f"element {n}: ") for n, value in enumerate(row.value, 1))
            else:
                yield row


def _runs_over_lines(head: bytes) -> bool:
    head = head.removeprefix(b"\xef\xbb\xbf").strip()
    if not head.startswith((b"{", b"[")) or not head.endswith((b"{", b"[", b",", b":")):
        return False
    return isinstance(_parsed(1, head), Rejected)


def _of_lines(file: IO[bytes]) -> Iterator[TraceRow | Rejected]:
    for number, line in enumerate(file, 1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield _parsed(number, line)


def _parsed(number: int, line: bytes) -> TraceRow | Rejected:
    try:
        return TraceRow(number, clean(json.loads(line.decode())) if b"\\u" in line else json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Rejected(number, f"not UTF-8 text: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return Rejected(number, f"not JSON: {error.msg} at character {error.pos} of {len(line)}")
    except (ValueError, RecursionError) as error:
        return Rejected(number, f"not JSON that can be read: {error}")


def _of_document(file: IO[bytes]) -> Iterator[TraceRow | Rejected]:
    """Values one by one. So are elements of an outer array: if it is cut off, only its end is lost."""
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Rejected(1, f"not UTF-8 text: {error.reason} at byte {error.start}")
        return
    at = _skip(text, 0, "")
    line, counted, inside = 1, 0, False
    while at < len(text):
        if text[at] == "[" and not inside and not _is_conversation(text, at):
            inside, at = True, _skip(text, at + 1, "")
            continue
        if text[at] == "]" and inside:
            inside, at = False, _skip(text, at + 1, "")
            continue
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = _DECODER.raw_decode(text, at)
            value = clean(value)
        except json.JSONDecodeError as error:
            yield Rejected(line, f"not JSON: {error.msg} in line {error.lineno}; nothing after it could be read")
            return
        except (ValueError, RecursionError) as error:
            yield Rejected(line, f"not JSON that can be read: {error}; nothing after it could be read")
            return
        yield TraceRow(line, value)
        at = _skip(text, at, "," if inside else "")
    if inside:
        yield Rejected(line + text.count("\n", counted), "the array is cut off: it has no closing bracket")


def _skip(text: str, at: int, more: str) -> int:
    while at < len(text) and (text[at].isspace() or text[at] in more):
        at += 1
    return at


def _is_conversation(text: str, at: int) -> bool:
    try:
        return is_message(_DECODER.raw_decode(text, _skip(text, at + 1, ""))[0])
    except (ValueError, RecursionError):
        return False


def holds_conversation(value: object) -> bool:
    """True if a row looks like one of the format `messages`."""
    pairs = [key for pair in _EXCHANGES for key in pair]
    return isinstance(value, list) or (
        isinstance(value, Mapping) and not value.keys().isdisjoint((*_MESSAGES, *pairs, "values"))
    )


def conversations(rows: Iterator[TraceRow | Rejected]) -> Iterator[Conversation | Rejected]:
    """Rows of the format `messages`, with their verdict beside them, or the bare list."""
    for row in rows:
        if isinstance(row, Rejected):
            yield row
            continue
        fields = row.value if isinstance(row.value, Mapping) else {"messages": row.value}
        if isinstance(fields.get("values"), Mapping):  # a thread of a LangGraph server
            own = {"id": fields.get("id") or fields.get("thread_id"), "metadata": own_metadata(fields.get("metadata"))}
            fields = {**fields, **own, **fields["values"]}
        try:
            tools = recorded_tools(first_set(fields, "tools", "functions"))
            scores = next((values for key in FEEDBACK if (values := feedback(fields.get(key)))), {})
            id = str(fields.get("id") or "")
            thread = thread_of(fields, fields.get("metadata"))
            yield Conversation(row.line, _messages(fields), {**fields, "feedback": scores}, id, tools, row.place, thread)
        except ValueError as error:
            yield Rejected(row.line, f"{row.place}{error}")


def _messages(fields: Mapping[str, Any]) -> list[BaseMessage]:
    """The messages of a row, with the answer that stands beside them, if any."""
    if (recorded := first_set(fields, *_MESSAGES)) is not None:
        messages = with_system(to_messages(unpacked(recorded)), fields)
        answer = next((fields[key] for _, key in _EXCHANGES if fields.get(key)), None)
        asked_last = bool(messages) and isinstance(messages[-1], HumanMessage)
        return exchange(messages, unpacked(answer)) if asked_last and answer is not None else messages
    for prompt, reply in _EXCHANGES:
        if fields.get(prompt) is not None and fields.get(reply) is not None:
            if not messages_of(unpacked(fields[reply]), "assistant"):
                raise ValueError(f"no messages are in its `{reply}`, {short(fields[reply])}")
            return exchange(with_system(messages_of(unpacked(fields[prompt]), "user"), fields), unpacked(fields[reply]))
    return to_messages(None)


def exchange(prompt: Sequence[BaseMessage], output: object) -> list[BaseMessage]:
    """A conversation from a prompt and an output. A graph's state holds both, a reply itself alone."""
    messages = messages_of(output, "assistant")
    return messages if any(isinstance(each, HumanMessage) for each in messages) else [*prompt, *messages]
