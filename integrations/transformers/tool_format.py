"""Tools in a conversation: their text in the prompt, forced beginnings of replies, sampled calls.

A sampled tool call is never written again from its parsed arguments: key order and spaces would differ, and the tokens with
them. The template writes a placeholder in its place, which is replaced by the sampled text.
"""

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from transformers import PreTrainedTokenizerBase

from dreamgym_lg.actions import parse_action, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.call_format import (
    HERMES,
    MARK,
    MARKERS,
    RESULT_HEAD,
    RESULT_TAIL,
    CallFormat,
    Reply,
    call_text,
    parse_reply,
    probe,
    read_response,
    rendered_call,
    tools_section,
)
from dreamgym_lg.integrations.transformers.chat_template import ChatTemplate, Message, apply_template, call_id
from dreamgym_lg.integrations.transformers.requests import Generated, Request, ResponseFormat, ToolChoice
from dreamgym_lg.integrations.transformers.structured_output import json_section, parse_json
from dreamgym_lg.text import opened_thought, split_reply

logger = logging.getLogger(__name__)
_warned: set[str] = set()

REMEMBERED = 10_000
"""Replies whose sampled text is remembered, over all conversations."""

REASONING = "reasoning_content"
"""Key of a message's `additional_kwargs` with what was thought before it, as reasoning models of OpenAI's format have it."""

OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"
_TAIL = 64
"""Tokens of a prompt's end, in which its turn is opened."""

ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "system": "system", "tool": "tool"}

Tool = dict[str, Any] | type | Callable[..., Any] | BaseTool
"""The argument of `convert_to_openai_tool`."""


def has_calls(message: BaseMessage) -> bool:
    """True for a message that needs more than its role and text to be rendered."""
    return isinstance(message, ToolMessage) or (
        isinstance(message, AIMessage)
        and bool(message.tool_calls or message.invalid_tool_calls or message.additional_kwargs.get(REASONING))
    )


class ToolDialect:
    """The tool format of one tokenizer, and the memory of what was sampled. Thread-safe.

    The chat template's own format, if it renders tools and writes calls in one that `parse_reply` reads; else Hermes' in
    plain text, its tool section in the system message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> None:
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        self._end_texts = [tokenizer.decode([end]) for end in self._ends]
        self.template = ChatTemplate(tokenizer)
        self._sampled: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def template_format(self) -> CallFormat | None:
        """The template's own format; None if it has none that is read here."""
        return probe(self.template, self._end_texts)

    @property
    def is_plain(self) -> bool:
        """True if replies without tools are their text."""
        return self._reader is None

    @property
    def _reader(self) -> dict[str, Any] | None:
        return self.template_format.reader if self.template_format is not None else None

    @cached_property
    def _skipped_ids(self) -> frozenset[int] | None:
        """The special tokens that are no part of a call; None: all of them."""
        if self._reader is not None:
            return self._ends
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
    ) -> None:
        """Write the conversation with its tools into the request.

        Raises `ConfigurationError` for a choice of no known tool, a tool that runs at its provider, and an unknown response
        format.
        """
        functions = [_to_function(tool) for tool in tools]
        names = frozenset(tool["function"]["name"] for tool in functions)
        forced = _resolve_choice(choice, names)
        sections = []
        if functions and self.template_format is None:
            _warn(self._tokenizer.chat_template, self._tokenizer.name_or_path or "this tokenizer")
            sections.append(tools_section(functions))
        elif functions:
            request.tools = functions
        if functions and forced != "none":
            request.tool_names = names
            request.forced = self._forced_beginning(forced, names)
        if (section := json_section(response_format)) is not None:
            sections.append(section)
            request.wants_json = True
            request.forced = request.forced or ("" if request.tool_names else "{")
        write = self._with_placeholders if self.template_format is not None else self._as_text
        request.conversation = self.template.fitted(_with_sections(write(request, messages), sections))
        if names or self._reader is not None:
            request.skipped_ids, request.is_read_whole = self._skipped_ids, self._reader is not None

    def read(self, request: Request, generated: Generated) -> dict[str, Any]:
        """The fields of the `AIMessage` of a sampled reply: content, tool calls, parsed JSON."""
        reply = self._parse(request, generated)
        fields: dict[str, Any] = {"content": reply.content}
        if reply.reasoning:
            fields["additional_kwargs"] = {REASONING: reply.reasoning}
        tokens = hash((*generated.prompt_ids, -1, *generated.sampled_ids))
        salt = uuid4() if request.seed is None else request.seed, tokens
        if reply.calls or reply.invalid:
            fields["tool_calls"] = [
                tool_call(name=call.name, args=call.arguments, id=_id(salt, i)) for i, call in enumerate(reply.calls)
            ]
            fields["invalid_tool_calls"] = [
                invalid_tool_call(name=invalid.name, args=invalid.text, id=_id(salt, -i), error=invalid.reason)
                for i, invalid in enumerate(reply.invalid, 1)
            ]
        elif request.wants_json and isinstance(parsed := parse_json(reply.content), dict):
            fields["additional_kwargs"] = {**fields.get("additional_kwargs", {}), "parsed": parsed}
        if has_calls(message := AIMessage(**fields)):
            self._remember(_fingerprint(message), generated.text)
        return fields

    def _parse(self, request: Request, generated: Generated) -> Reply:
        """The reply as reasoning, text and calls. A call that reasoning names is none."""
        prompt_end = self._tokenizer.decode(generated.prompt_ids[-_TAIL:])
        if self._reader is not None:
            return read_response(self._tokenizer, self._reader, generated.text, prompt=prompt_end, tools=request.tools)
        thought, text = split_reply(generated.text, prompt_end, unfinished=generated.finish_reason == "length")
        if request.tool_names is None:
            return Reply(text, [], [], _without_think_tags(thought))
        return parse_reply(text, request.tool_names)._replace(reasoning=_without_think_tags(thought))

    def reply(self, action: str) -> str:
        """The text of a reply that acts so, as the template writes it.

        Raises `ValueError` for an action that is neither a call nor a final answer.
        """
        parsed = parse_action(action)
        if isinstance(parsed, str):
            return parsed
        call = {"name": parsed.name, "arguments": dict(parsed.arguments)}
        if self.template_format is None:
            return call_text(call)
        rendered = rendered_call(self.template, call, self._end_texts)
        return rendered[1] if rendered is not None else call_text(call)

    def written(self, message: AIMessage, request: Request) -> str:
        """The text that a policy samples for this message. Remembered, or as the template writes it.

        Args: `request`, with the conversation before it.
        """
        if (sampled := self._recall(message)) is None:
            calls = [self.reply(render_call(call["name"], call["args"])) for call in message.tool_calls]
            thought = message.additional_kwargs.get(REASONING)
            sampled = "\n".join(filter(None, [message.text, *calls]))
            if thought:
                opened = opened_thought(render(self._tokenizer, request))
                sampled = f"{'' if opened else OPEN_THOUGHT}\n{thought}\n{CLOSE_THOUGHT}\n\n{sampled}".lstrip("\n")
            self._remember(_fingerprint(message), sampled)  # further prompts go on from it
        return sampled

    def _forced_beginning(self, forced: str | None, names: frozenset[str]) -> str:
        if forced is None:
            return ""
        form = self.template_format or HERMES
        if forced == "any":
            if len(names) > 1:
                return form.before
            (forced,) = names
        return form.before + forced + form.opened.rstrip("{ ")  # tokens seldom end in a space

    def _remember(self, fingerprint: str, text: str) -> None:
        with self._lock:
            self._sampled[fingerprint] = text
            if len(self._sampled) > REMEMBERED:
                self._sampled.popitem(last=False)

    def _recall(self, message: BaseMessage) -> str | None:
        if not isinstance(message, AIMessage) or not has_calls(message):
            return None
        fingerprint = _fingerprint(message)
        with self._lock:
            if fingerprint in self._sampled:
                self._sampled.move_to_end(fingerprint)  # the one longest out of use goes first
            return self._sampled.get(fingerprint)

    def _with_placeholders(self, request: Request, messages: Sequence[BaseMessage]) -> list[Message]:
        """Messages for a template with tools, with placeholders where calls were sampled."""
        assert self.template_format is not None
        written, names = [], _names_by_call_id(messages)
        request.splices = {}
        for i, message in enumerate(messages):
            entry = _entry(message, names)
            sampled = self._recall(message)
            if sampled is not None and not entry.get("tool_calls") and "sampled" not in entry:
                entry = {"role": "assistant", "content": sampled}  # reasoning: the template decides what of it stays
            elif sampled is not None:
                mark, form = f"{MARK}{i}", self.template_format
                request.splices[form.before + mark + form.after] = form.gap + sampled
                call = {"type": "function", "id": "000000000", "function": {"name": mark, "arguments": {}}}
                entry = {"role": "assistant", "content": "", "tool_calls": [call], "sampled": sampled, "parsed": entry}
            written.append(entry)
        return written

    def _as_text(self, request: Request, messages: Sequence[BaseMessage]) -> list[Message]:
        """Messages for a template without tools: roles and contents alone."""
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
    text = apply_template(tokenizer, request.conversation, request.tools, **request.template_kwargs)
    if any(text.count(placeholder) != 1 for placeholder in request.splices):  # the template writes this one otherwise
        written = [message.get("parsed", message) for message in request.conversation]
        text = apply_template(tokenizer, written, request.tools, **request.template_kwargs)
    else:
        for placeholder, sampled in request.splices.items():
            text = text.replace(placeholder, sampled)
    return text + request.forced


def _warn(template: str, name: str) -> None:
    """Warn once of each template, whatever folders it is in."""
    if template not in _warned:
        logger.warning(
            "the chat template of %s has no format of tool calls that is read here: tools are described in the system "
            "message, and calls are <tool_call> JSON </tool_call>",
            name,
        )
    _warned.add(template)


def _without_think_tags(thought: str) -> str:
    return thought.strip().removeprefix(OPEN_THOUGHT).removesuffix(CLOSE_THOUGHT).strip()


def to_entry(message: BaseMessage) -> Message:
    """A message's role and text, as chat templates take them. Raises `ConfigurationError` for a role of no template."""
    role = ROLES.get(message.type)
    if role is None:
        raise ConfigurationError(f"a {type(message).__name__} cannot be rendered; known: {', '.join(ROLES)}")
    return {"role": role, "content": message.text}


def _entry(message: BaseMessage, names: dict[str, str]) -> Message:
    """A message with its tool calls or result. `names`: the tools called, by the call's id."""
    entry = to_entry(message)
    if isinstance(message, ToolMessage):
        name = message.name or names.get(message.tool_call_id, "")
        entry |= {"tool_call_id": _template_id(message.tool_call_id), "name": name}
    elif isinstance(message, AIMessage) and has_calls(message):
        unread = (call["args"] for call in message.invalid_tool_calls)
        entry["content"] = "\n".join(filter(None, [message.text, *unread]))
        calls = [(call["id"], {"name": call["name"], "arguments": call["args"]}) for call in message.tool_calls]
        if calls:
            entry["tool_calls"] = [{"type": "function", "id": _template_id(id), "function": function} for id, function in calls]
        if reasoning := message.additional_kwargs.get(REASONING):
            entry[REASONING] = reasoning
    return entry


def _names_by_call_id(messages: Sequence[BaseMessage]) -> dict[str, str]:
    calls = (call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls)
    return {call["id"]: call["name"] for call in calls if call["id"]}


def _fingerprint(message: AIMessage) -> str:
    """Identifies a message by its content, which a copy keeps and an edit changes."""
    calls = [*message.tool_calls, *message.invalid_tool_calls]
    thought = message.additional_kwargs.get(REASONING, "")
    content = [thought, message.text, *((call["id"], call["name"], call["args"]) for call in calls)]
    return json.dumps(content, sort_keys=True, default=str)


def _id(salt: Any, number: int) -> str:
    return call_id(repr((salt, number)))


def _template_id(id: str | None) -> str:
    """An id of a call of another model in the form that every template takes."""
    return id if id and re.fullmatch("[A-Za-z0-9]{9}", id) else call_id(str(id))


def _to_function(tool: Tool) -> dict[str, Any]:
    tool = tool if isinstance(tool, dict) and "function" in tool else convert_to_openai_tool(tool)
    if "function" not in tool:
        raise ConfigurationError(f"a tool of type {tool.get('type')!r} runs at its provider; a local model takes functions")
    return dict(tool)


def _resolve_choice(choice: ToolChoice, names: frozenset[str]) -> str | None:
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
