"""Tools in a conversation: their text in the prompt, forced beginnings of replies, sampled calls.

A sampled tool call is never written again from its parsed arguments: key order and spaces would differ, and the tokens with
them. The template writes a placeholder in its place, which is replaced by the sampled text.
"""

import base64
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from transformers import PreTrainedTokenizerBase

from dreamgym_lg.actions import parse_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.guide import Guide
from dreamgym_lg.integrations.transformers.requests import Generated, Request, ResponseFormat, ToolChoice
from dreamgym_lg.integrations.transformers.structured_output import json_section, parse_json
from dreamgym_lg.integrations.transformers.tool_parsing import MARKERS, Call, parse_reply
from dreamgym_lg.text import clean

REMEMBERED = 10_000
"""Replies whose sampled text is remembered, over all conversations."""

ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "system": "system", "tool": "tool"}

TOOLS_HEAD = "# Tools\n\nThese functions can be called:\n<tools>\n"
TOOLS_TAIL = (
    "\n</tools>\n\nTo call one, reply with its name and arguments as a JSON object in <tool_call></tool_call> tags:\n"
    '<tool_call>\n{"name": <its name>, "arguments": <JSON object>}\n</tool_call>'
)
CALL_HEAD, CALL_MIDDLE, CALL_TAIL = '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"
RESULT_HEAD, RESULT_TAIL = "<tool_response>\n", "\n</tool_response>"

Message = dict[str, Any]
Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool
"""The argument of `convert_to_openai_tool`."""


class CallFormat(NamedTuple):
    """A template's text of a call without arguments: `before`, the tool's name, `after`."""

    before: str
    after: str


HERMES = CallFormat(CALL_HEAD, f"{CALL_MIDDLE}{{}}{CALL_TAIL}")


def has_calls(message: BaseMessage) -> bool:
    """True for a message that needs more than its role and text to be rendered."""
    return isinstance(message, ToolMessage) or (
        isinstance(message, AIMessage) and bool(message.tool_calls or message.invalid_tool_calls)
    )


class ToolDialect:
    """The tool format of one tokenizer, and the memory of what was sampled. Thread-safe.

    The chat template's own format, if it renders tools and writes calls in one that `parse_reply` reads; else Hermes' in
    plain text, its tool section in the system message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> None:
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        self._sampled: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def template_format(self) -> CallFormat | None:
        """The template's own format; None if it has none that is read here."""
        return _probe(self._tokenizer, [self._tokenizer.decode([end]) for end in self._ends])

    @cached_property
    def _skipped_ids(self) -> frozenset[int] | None:
        """The special tokens that are no part of a call; None: all of them."""
        special = {id: token.content for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        skipped = frozenset(id for id, content in special.items() if content not in MARKERS)
        return None if len(skipped) == len(special) else skipped

    def prepare(
        self,
        request: Request,
        messages: Sequence[BaseMessage],
        *,
        tools: Sequence[Tool],
        choice: ToolChoice,
        response_format: ResponseFormat,
        guided: bool = False,
    ) -> None:
        """Write the conversation with its tools into the request. Args: `guided`, whether calls are held to their schemas.

        Raises `ConfigurationError` for a choice of no known tool, a tool that runs at its provider, and an unknown response
        format.
        """
        functions = [_checked(tool) for tool in tools]
        names = frozenset(tool["function"]["name"] for tool in functions)
        forced = _chosen(choice, names)
        sections = []
        if functions and self.template_format is None:
            sections.append(tools_section(functions))
        elif functions:
            request.tools = functions
        if functions and forced != "none":
            request.tool_names, request.skipped_ids = names, self._skipped_ids
            request.forced = self._beginning(forced, names)
            if guided:
                called = [each for each in functions if forced in (None, "any", each["function"]["name"])]
                request.guide = Guide.of(called, *(self.template_format or HERMES))
        if (section := json_section(response_format)) is not None:
            sections.append(section)
            request.wants_json = True
            request.forced = request.forced or ("" if request.tool_names else "{")
        write = self._placed if self.template_format is not None else self._plain
        request.conversation = _with_sections(write(request, messages), sections)

    def read(self, request: Request, generated: Generated) -> dict[str, Any]:
        """The fields of the `AIMessage` of a sampled reply: content, tool calls, parsed JSON."""
        fields: dict[str, Any] = {"content": generated.text}
        if request.tool_names is not None:
            reply = parse_reply(generated.text, request.tool_names)
            tokens = hash((*generated.prompt_ids, -1, *generated.sampled_ids))
            salt = uuid4() if request.seed is None else request.seed, tokens
            calls = [tool_call(name=call.name, args=call.arguments, id=_id(salt, i)) for i, call in enumerate(reply.calls)]
            bad = [
                invalid_tool_call(name=invalid.name, args=invalid.text, id=_id(salt, -i), error=invalid.reason)
                for i, invalid in enumerate(reply.invalid, 1)
            ]
            if calls or bad:
                fields |= {"content": reply.content, "tool_calls": calls, "invalid_tool_calls": bad}
                self._remember(_fingerprint(AIMessage(**fields)), generated.text)
                return fields
        if request.wants_json and isinstance(parsed := parse_json(generated.text), dict):
            fields["additional_kwargs"] = {"parsed": parsed}
        return fields

    def reply(self, action: str) -> str:
        """The text of a reply that acts so, as the template writes it.

        Raises `ValueError` for an action that is neither a call nor a final answer.
        """
        parsed = parse_action(action)
        if isinstance(parsed, str):
            return parsed
        before, after = self.template_format or HERMES
        return before + parsed.name + after.replace("{}", json.dumps(dict(parsed.arguments), ensure_ascii=False), 1)

    def _beginning(self, forced: str | None, names: frozenset[str]) -> str:
        if forced is None:
            return ""
        before, after = self.template_format or HERMES
        if forced == "any":
            if len(names) > 1:
                return before
            (forced,) = names
        return before + forced + after[: after.index("{}")].rstrip(" ")  # tokens seldom end in a space

    def _remember(self, fingerprint: str, text: str) -> None:
        with self._lock:
            self._sampled[fingerprint] = text
            if len(self._sampled) > REMEMBERED:
                self._sampled.popitem(last=False)

    def _recall(self, message: BaseMessage) -> str | None:
        if not isinstance(message, AIMessage) or not has_calls(message):
            return None
        with self._lock:
            return self._sampled.get(_fingerprint(message))

    def _placed(self, request: Request, messages: Sequence[BaseMessage]) -> list[Message]:
        """For a template with tools: placeholders where calls were sampled."""
        assert self.template_format is not None
        written, names = [], _called(messages)
        request.splices = {}
        for i, message in enumerate(messages):
            entry = _entry(message, names)
            if (sampled := self._recall(message)) is not None:
                mark = f"\ue000{i}"
                request.splices[self.template_format.before + mark + self.template_format.after] = sampled
                call = {"type": "function", "id": "000000000", "function": {"name": mark, "arguments": {}}}
                entry = {"role": "assistant", "content": "", "tool_calls": [call], "sampled": sampled, "parsed": entry}
            written.append(entry)
        return written

    def _plain(self, request: Request, messages: Sequence[BaseMessage]) -> list[Message]:
        """For a template without tools: roles and contents only."""
        written: list[Message] = []
        for i, message in enumerate(messages):
            entry = _entry(message, {})
            content, role = entry["content"], entry["role"]
            if (sampled := self._recall(message)) is not None:
                content = sampled
            elif calls := entry.get("tool_calls"):
                content = "\n".join(filter(None, [content, *(call_text(call["function"]) for call in calls)]))
            if isinstance(message, ToolMessage):
                content, role = f"{RESULT_HEAD}{content}{RESULT_TAIL}", "user"
                if i and isinstance(messages[i - 1], ToolMessage):  # one turn: some templates want roles to alternate
                    content = f"{written.pop()['content']}\n{content}"
            written.append({"role": role, "content": content})
        return written


def render(tokenizer: PreTrainedTokenizerBase, request: Request) -> str:
    """The conversation as the model reads it, up to the first token to sample."""
    text = _apply(tokenizer, list(request.conversation), request.tools, **request.template_kwargs)
    if any(text.count(placeholder) != 1 for placeholder in request.splices):  # the template writes this one otherwise
        written = [message.get("parsed", message) for message in request.conversation]
        text = _apply(tokenizer, written, request.tools, **request.template_kwargs)
    else:
        for placeholder, sampled in request.splices.items():
            text = text.replace(placeholder, sampled)
    return text + request.forced


def tools_section(tools: Sequence[dict[str, Any]]) -> str:
    """The tools for a system message, in Hermes' format."""
    return TOOLS_HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + TOOLS_TAIL


def call_text(function: dict[str, Any]) -> str:
    """A call in Hermes' format."""
    return f"{CALL_HEAD}{function['name']}{CALL_MIDDLE}{json.dumps(function['arguments'], ensure_ascii=False)}{CALL_TAIL}"


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[Message],
    tools: list[Any] | None,
    *,
    prompt: bool = True,
    **template: Any,
) -> str:
    text = tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False, add_generation_prompt=prompt, **template)
    return str(clean(text))  # no tokenizer reads half an emoji


def _probe(tokenizer: PreTrainedTokenizerBase, ends: Iterable[str]) -> CallFormat | None:
    """Find the text around a call's name by rendering one."""
    name, id = "\ue000", "000000000"  # Mistral's templates take ids of nine letters and digits only
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
    call = {"type": "function", "id": id, "function": {"name": name, "arguments": {}}}
    question: list[Message] = [{"role": "user", "content": "?"}]
    answers: list[Message] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "!", "name": name, "tool_call_id": id},
    ]
    try:
        begun = _apply(tokenizer, question, [tool])
        if begun == _apply(tokenizer, question, None):
            return None
        whole = _apply(tokenizer, [*question, *answers], [tool], prompt=False)
    except Exception:  # a template is a program: what it makes of roles it does not know is anything
        return None
    before, _, after = whole.removeprefix(begun).partition(name)
    after = after[: min((at for end in ends if (at := after.find(end)) >= 0), default=0)]
    known = whole.startswith(begun) and parse_reply(before + name + after, frozenset([name])).calls == [Call(name, {})]
    return CallFormat(before, after) if known and "{}" in after else None


def to_entry(message: BaseMessage) -> Message:
    """A message's role and text, as chat templates take them. Raises `ConfigurationError` for a role of no template."""
    role = ROLES.get(message.type)
    if role is None:
        raise ConfigurationError(f"a {type(message).__name__} cannot be rendered; known: {', '.join(ROLES)}")
    return {"role": role, "content": message.text}


def _entry(message: BaseMessage, names: dict[str, str]) -> Message:
    """A message with its tool calls or result; `names` are those of the tools called, by the call's id."""
    entry = to_entry(message)
    if isinstance(message, ToolMessage):
        entry |= {"tool_call_id": message.tool_call_id, "name": message.name or names.get(message.tool_call_id, "")}
    elif isinstance(message, AIMessage) and has_calls(message):
        unread = (call["args"] for call in message.invalid_tool_calls)
        entry["content"] = "\n".join(filter(None, [message.text, *unread]))
        calls = [(call["id"], {"name": call["name"], "arguments": call["args"]}) for call in message.tool_calls]
        if calls:
            entry["tool_calls"] = [{"type": "function", "id": id, "function": function} for id, function in calls]
    return entry


def _called(messages: Sequence[BaseMessage]) -> dict[str, str]:
    calls = (call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls)
    return {call["id"]: call["name"] for call in calls if call["id"]}


def _fingerprint(message: AIMessage) -> str:
    """Identifies a message by its content, which a copy keeps and an edit changes."""
    calls = [*message.tool_calls, *message.invalid_tool_calls]
    content = [message.text, *((call["id"], call["name"], call["args"]) for call in calls)]
    return json.dumps(content, sort_keys=True, default=str)


def _id(salt: Any, number: int) -> str:
    digest = hashlib.blake2b(repr((salt, number)).encode(), digest_size=10).digest()
    return base64.b32encode(digest).decode().lower()[:9]  # what Mistral's templates take


def _checked(tool: Tool) -> dict[str, Any]:
    tool = tool if isinstance(tool, dict) and "function" in tool else convert_to_openai_tool(tool)
    if "function" not in tool:
        raise ConfigurationError(f"a tool of type {tool.get('type')!r} runs at its provider; a local model takes functions")
    return dict(tool)


def _chosen(choice: ToolChoice, names: frozenset[str]) -> str | None:
    """`none`, `any`, a tool's name, or None: the model decides."""
    if isinstance(choice, dict):
        choice = choice.get("function", choice).get("name") or choice.get("type")
    if choice is None or choice is False or choice == "auto":
        return None
    if choice == "none":
        return "none"
    if choice is True or choice in ("any", "required"):
        if not names:
            raise ConfigurationError("tool_choice demands a call, but no tools are given: pass tools or leave out tool_choice")
        return "any"
    if choice not in names:
        raise ConfigurationError.unknown("tool", str(choice), names)
    return str(choice)


def _with_sections(conversation: list[Message], sections: list[str]) -> list[Message]:
    """The conversation with these sections at the end of its system message."""
    if not sections:
        return conversation
    begun = [conversation[0]["content"]] if conversation and conversation[0]["role"] == "system" else []
    system = {"role": "system", "content": "\n\n".join(filter(None, [*begun, *sections]))}
    return [system, *conversation[len(begun) :]]
