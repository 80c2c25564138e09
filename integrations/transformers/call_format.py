"""The formats of tool calls, and how each is read.

A chat template's own, found by rendering calls, and Hermes' in plain text."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_template import ChatTemplate, Message, apply_template

# --- reading: Hermes and Qwen, Llama 3, Mistral ------------------------------------------------------------------------

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
    """The calls in a reply. Any after a marker; without one, a JSON object that names one of `names`."""
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
    return begin if text.startswith("{", begin) else length_before(text, MARKERS)


def length_before(text: str, marks: Iterable[str]) -> int:
    """The length of an unfinished text before the first of these marks. One that may begin at its end counts."""
    lengths = [len(text)]
    for mark in marks:
        begun = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
        lengths.append(at if (at := text.find(mark)) >= 0 else len(text) - begun)
    return min(lengths)


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


# --- writing, and a template's own format ------------------------------------------------------------------------------

TOOLS_HEAD = "# Tools\n\nThese functions can be called:\n<tools>\n"
TOOLS_TAIL = (
    "\n</tools>\n\nTo call one, reply with its name and arguments as a JSON object in <tool_call></tool_call> tags:\n"
    '<tool_call>\n{"name": <its name>, "arguments": <JSON object>}\n</tool_call>'
)
CALL_HEAD, CALL_MIDDLE, CALL_TAIL = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
RESULT_HEAD, RESULT_TAIL = "<tool_response>\n", "\n</tool_response>"


MARK = "dreamgymcall"
"""The name of a call that stands in the place of a sampled one."""


class CallFormat(NamedTuple):
    """How a template writes calls, and how they are read."""

    before: str
    """Text of a call without arguments up to the tool's name."""
    after: str
    """The rest of that text, without the token that ends the turn."""
    opened: str
    """The text after the name with which every call's arguments begin."""
    reader: dict[str, Any] | None = None
    """A response template of transformers; None: `parse_reply` reads it."""
    gap: str = ""
    """The space between a prompt and a reply that the template leaves out of later prompts."""


HERMES = CallFormat(CALL_HEAD, f"{CALL_MIDDLE}{{}}{CALL_TAIL}", f"{CALL_MIDDLE}{{")


def tools_section(tools: Sequence[dict[str, Any]]) -> str:
    """The tools for a system message, in Hermes' format."""
    return TOOLS_HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + TOOLS_TAIL


def call_text(function: dict[str, Any]) -> str:
    """A call in Hermes' format."""
    return f"{CALL_HEAD}{function['name']}{CALL_MIDDLE}{json.dumps(function['arguments'], ensure_ascii=False)}{CALL_TAIL}"


def rendered_call(template: ChatTemplate, function: dict[str, Any], ends: Iterable[str]) -> tuple[str, str] | None:
    """A reply with one call, as the template writes it, without its end. None if it writes none.

    Before it the space with which a prompt ends, where the template leaves that out once the reply is there.
    """
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
    call = {"type": "function", "id": "000000000", "function": function}
    question: list[Message] = [{"role": "user", "content": "?"}]
    answers: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "!", "name": function["name"], "tool_call_id": call["id"]},
    ]
    try:
        prompt = apply_template(template.tokenizer, question, [tool])
        if prompt == apply_template(template.tokenizer, question):
            return None
        rendered = apply_template(template.tokenizer, [*question, *answers], [tool], prompt=False)
    except ConfigurationError:
        return None
    gap = "" if rendered.startswith(prompt) else prompt[len(prompt.rstrip()) :]
    text = rendered.removeprefix(prompt.removesuffix(gap))
    end = min((at for end in ends if (at := text.find(end)) >= 0), default=-1)
    return (gap, text[:end]) if text != rendered and function["name"] in text[: max(end, 0)] else None


def probe(template: ChatTemplate, ends: Iterable[str]) -> CallFormat | None:
    """The format of a template's calls, found by rendering some."""
    ends, arguments = list(ends), {"place": "box"}
    bare, full = (rendered_call(template, {"name": MARK, "arguments": each}, ends) for each in ({}, arguments))
    if bare is None or full is None:
        return None
    before, _, after = bare[1].partition(MARK)
    form = CallFormat(before, after, os.path.commonprefix([after, full[1].partition(MARK)[2]]), gap=full[0])
    expected = [Call(MARK, arguments)]
    if "{}" in after and parse_reply(full[1], frozenset([MARK])).calls == expected:
        return form
    reader = _response_template(template.tokenizer)
    prompt = apply_template(template.tokenizer, [{"role": "user", "content": "?"}])
    if reader is None or read_response(template.tokenizer, reader, full[1], prompt=prompt).calls != expected:
        return None
    return form._replace(reader=reader)


def _response_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """How transformers reads a model's replies. The tokenizer's own, else TRL's for the same chat template."""
    if (own := getattr(tokenizer, "response_template", None)) is not None:
        return dict(own)
    from trl.chat_template_utils import add_response_schema  # seconds: only for templates whose calls are no JSON

    try:
        known = add_response_schema(SimpleNamespace(chat_template=tokenizer.chat_template))  # it would write into ours
    except ValueError:
        return None
    return dict(known.response_template)


def read_response(
    tokenizer: PreTrainedTokenizerBase, template: dict[str, Any], text: str, *, prompt: str, tools: list[Any] | None = None
) -> Reply:
    """The reply as a response template reads it; where it cannot, one invalid call. Args: `prompt`, how its text ends."""
    try:
        read = tokenizer.parse_response(text, schema=template, prefix=prompt, tools=tools) or {}
        calls = [to_call(call["function"]) for call in read.get("tool_calls") or ()]
    except (ValueError, TypeError, KeyError) as error:
        return Reply("", [], [InvalidCall(None, text.lstrip("{ "), str(error))])
    thought = read.get("reasoning_content") or read.get("thinking") or ""
    return Reply((read.get("content") or "").strip(), calls, list[InvalidCall](), thought.strip())
