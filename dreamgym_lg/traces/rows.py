"""A file of traces as rows with their lines: JSON Lines, or JSON that runs over lines. What is no JSON is rejected."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from langchain_core.messages import BaseMessage

from dreamgym_lg.traces.messages import is_message, recorded_tools, to_messages

_DECODER = json.JSONDecoder()


class Rejected(NamedTuple):
    """A row or trace that could not be read, and why."""

    line: int
    """Counted from 1: the line in the file; for a checkpointer, the number of the thread."""
    reason: str


class TraceRow(NamedTuple):
    """One JSON value of the file, and the line on which it begins."""

    line: int
    value: Any


class Conversation(NamedTuple):
    """One recorded run of an agent, whatever the format it came in."""

    line: int
    messages: list[BaseMessage]
    fields: Mapping[str, Any] = {}
    """The row's own verdict: `reward` or `score` (a number), `success` (a boolean); and its task's `metadata` and
    `rubric`. None reads as absent."""
    id: str = ""
    """The thread of a checkpointer, the trace of LangSmith and OpenTelemetry, the row's own `id` (else "")."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The schemas of what the agent could call (`tool_schemas`), where they were recorded."""


def read_rows(path: Path) -> Iterator[TraceRow | Rejected]:
    """The rows of a file, in order. A list that is no conversation counts as its elements.

    JSON Lines are read a line at a time; JSON that runs over lines is held whole.
    """
    with path.open("rb") as file:
        head = next((line for line in file if line.strip()), b"")
        file.seek(0)
        rows = _of_document(file) if _runs_over_lines(head) else _of_lines(file)
        for row in rows:
            if isinstance(row, TraceRow) and isinstance(row.value, list) and row.value and not is_message(row.value[0]):
                yield from (TraceRow(row.line, value) for value in row.value)
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
        return TraceRow(number, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Rejected(number, f"not UTF-8 text: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return Rejected(number, f"not JSON: {error.msg} at character {error.pos} of {len(line)}")
    except (ValueError, RecursionError) as error:
        return Rejected(number, f"not JSON that can be read: {error}")


def _of_document(file: IO[bytes]) -> Iterator[TraceRow | Rejected]:
    """Values one after the other; the elements of an outer array one by one, so that a cut-off one loses only its end."""
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


def conversations(rows: Iterator[TraceRow | Rejected]) -> Iterator[Conversation | Rejected]:
    """The format `messages`: `{"messages": [...]}`, with the row's verdict beside it, or the bare list."""
    for row in rows:
        if isinstance(row, Rejected):
            yield row
            continue
        fields = row.value if isinstance(row.value, Mapping) else {"messages": row.value}
        try:
            named, tools = str(fields.get("id") or ""), recorded_tools(fields.get("tools"))
            yield Conversation(row.line, to_messages(fields.get("messages")), fields, named, tools)
        except ValueError as error:
            yield Rejected(row.line, str(error))
