"""Tool calls in sampled text: Hermes and Qwen, Llama 3, Mistral."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTRAL, LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
MARKERS = (OPEN, MISTRAL, LLAMA)

_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
_BARE = re.compile(r"\s*\{\s*" + _NAME.pattern)


class Call(NamedTuple):
    """A tool's name and its arguments."""

    name: str
    arguments: dict[str, Any]


class InvalidCall(NamedTuple):
    """A malformed tool call."""

    name: str | None
    """The tool's name, where it is readable."""
    text: str
    """As it was sampled, with its marker. It never begins like JSON: merging a stream's chunks, LangChain would complete a
    broken object and make a call of it. Llama's calls have no marker and lack their first brace here."""
    reason: str


class Reply(NamedTuple):
    """A sampled reply as text and tool calls."""

    content: str
    """The text before the first call, as it was sampled; what follows a call is in no message."""
    calls: list[Call]
    invalid: list[InvalidCall]
    reasoning: str = ""


def parse_reply(text: str, names: frozenset[str]) -> Reply:
    """The calls in a reply: any after a marker; without one, a JSON object that names one of `names`."""
    start, marker = min(((at, marker) for marker in MARKERS if (at := text.find(marker)) >= 0), default=(-1, ""))
    if not marker:
        bare = _BARE.match(text)
        if bare is None or bare[1] not in names:
            return Reply(text, [], [])
        start = text.index("{")
    read = {OPEN: _hermes, MISTRAL: _mistral, LLAMA: _llama, "": _llama}[marker]
    reply = Reply(text[:start], [], [])
    for raw, value in read(text[start:]):
        try:
            reply.calls.append(to_call(value))
        except ValueError as error:
            name = _NAME.search(raw)
            reply.invalid.append(InvalidCall(name and name[1], raw.removeprefix("{"), str(error)))
    return reply


def safe_length(text: str) -> int:
    """The length of an unfinished reply's text that cannot be the beginning of a call."""
    begin = len(text) - len(text.lstrip())
    if text.startswith("{", begin):
        return begin
    first = min((at for marker in MARKERS if (at := text.find(marker)) >= 0), default=-1)
    if first >= 0:
        return first
    return len(text) - max((n for marker in MARKERS for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0)


def _hermes(text: str) -> Iterator[tuple[str, Any]]:
    """`<tool_call>` JSON `</tool_call>`, one after the other; the last one may lack its end."""
    start = 0
    while start >= 0:
        value, end = _decode(text, start + len(OPEN))
        stop = min((at for tag in (OPEN, CLOSE) if (at := text.find(tag, end)) >= 0), default=len(text))
        if not isinstance(value, ValueError) and text[end:stop].strip():
            value = ValueError(f"{text[end:stop].strip()[:40]!r} follows the JSON object")
        yield text[start:stop], value
        start = text.find(OPEN, stop)


def _mistral(text: str) -> Iterator[tuple[str, Any]]:
    """`[TOOL_CALLS]` and a JSON list of calls."""
    calls, _ = _decode(text, len(MISTRAL))
    if not isinstance(calls, list) or not calls:
        yield text, calls
        return
    for call in calls:
        yield MISTRAL + json.dumps(call, ensure_ascii=False), call


def _llama(text: str) -> Iterator[tuple[str, Any]]:
    """JSON objects, separated by semicolons, after `<|python_tag|>` or without it."""
    start, marked = 0, text.startswith(LLAMA)
    while True:
        value, end = _decode(text, start + (len(LLAMA) if marked else 0))
        yield text[start:] if isinstance(value, ValueError) else text[start:end], value
        rest = text[end:].lstrip(" \n;")
        start, marked = len(text) - len(rest), rest.startswith(LLAMA)
        if isinstance(value, ValueError) or not rest.startswith((LLAMA, "{")):
            return


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at this place, or a `ValueError` in its place, and its end."""
    begin = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        return _decoder.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON: {error.msg} at character {error.pos - begin}"), at
    except (ValueError, RecursionError) as error:
        return ValueError(str(error)), at


def to_call(value: Any) -> Call:
    """The call that a JSON value is. Raises `ValueError` for any other."""
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('no JSON object with a "name"')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON inside JSON, as OpenAI has it
        arguments, _ = _decode(arguments, 0)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f'the "arguments" are no JSON object: {str(arguments)[:40]}')
    return Call(value["name"], arguments)


def _refuse(constant: str) -> Any:
    raise ValueError(f"not JSON: {constant}")


_decoder = json.JSONDecoder(parse_constant=_refuse)
