"""Converts recorded messages of any framework to LangChain's: text, tool calls and tool answers.

Read are LangChain's forms, OpenAI's (chat, legacy functions, Responses items), Anthropic's and Bedrock's blocks, Gemini's and
OpenTelemetry's parts, the AI SDK's, Ollama's, Hugging Face's and ShareGPT's messages. What is none of these is a `ValueError`
that names its form. Thoughts, and calls that the provider itself ran, are no part of a message.
"""

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from dreamgym_lg.actions import FREE_TEXT
from dreamgym_lg.text import split_thought

_SPEAKERS: Mapping[str, str] = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "ai", "model", "gpt", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response"), "tool"),
}


def _forms(names: str) -> frozenset[str]:
    """Forms of content blocks and items, in small letters without `_` and `-`."""
    return frozenset(names.split())


_TEXT = _forms("text outputtext inputtext refusal content")
_CALL = _forms("toolcall tooluse functioncall customtoolcall")
_RESULT = _forms("toolresult toolcallresponse functionresponse functioncalloutput customtoolcalloutput")
_THOUGHT = _forms("thinking redactedthinking reasoning reasoningcontent thought")
_AT_PROVIDER = _forms(
    "servertooluse servertoolcall servertoolresult websearchtoolresult webfetchtoolresult codeexecutiontoolresult mcptooluse "
    "mcptoolresult mcpcall mcplisttools websearchcall filesearchcall codeinterpretercall executablecode codeexecutionresult "
    "cachepoint"
)
_MEDIA = _forms(
    "image imageurl inputimage audio inputaudio video videourl file inputfile document inlinedata filedata blob uri media"
)
_FORMS = _TEXT | _CALL | _RESULT | _THOUGHT | _AT_PROVIDER | _MEDIA
_MEDIA_KEYS = _forms("source image_url url base64 data file file_id input_audio image document")
"""A medium in a tool's answer has at least one of these keys. A block without any is the tool's own data."""

_HOLDERS = (
    *("messages", "contents", "conversations", "generations", "choices", "candidates", "message", "output", "input"),
    *("response", "body", "content", "prompt", "prompts", "completion"),
)
_TEXT_HOLDERS = ("input", "question", "query", "prompt", "output", "answer", "response", "result", "completion", "text")
_SYSTEM_HOLDERS = ("system", "instructions", "system_instruction", "systemInstruction", "system_prompt")


def is_message(value: object) -> bool:
    """True if `value` looks like one message, in any form."""
    if not isinstance(value, Mapping):
        return isinstance(value, BaseMessage)
    if {"from", "value"} <= value.keys() or _form(value) in _CALL | _RESULT | _THOUGHT | _AT_PROVIDER:
        return True
    keys = {"content", "contents", "parts", "data", "tool_calls", "function_call", "kwargs"}
    return _role(value) in _SPEAKERS and not keys.isdisjoint(value)


def messages_of(value: object, speaker: str = "") -> list[BaseMessage]:
    """The messages in the inputs or outputs of a call, in any framework's place. The first choice of several.

    Args: `speaker`, `user` or `assistant`, who says what is a bare text; "": bare texts are no messages.
    """
    if isinstance(value, str):
        return to_messages([{"role": speaker, "content": value}]) if speaker and value else []
    if is_message(value):
        return to_messages([value])
    if isinstance(value, Mapping):
        holders = (value.get(key) for key in _HOLDERS if not isinstance(value.get(key), str))
        texts = (value[key] for key in _TEXT_HOLDERS if isinstance(value.get(key), str))
        messages = next((held for each in (*holders, *texts) if (held := messages_of(each, speaker))), [])
        return with_system(messages, value) if any(isinstance(each, HumanMessage) for each in messages) else messages
    if not isinstance(value, Sequence) or not value:
        return []
    return to_messages(value) if is_message(value[0]) else messages_of(value[0], speaker)


def with_system(messages: list[BaseMessage], fields: Mapping[str, Any]) -> list[BaseMessage]:
    """The messages after the system message in a field of the request, if any."""
    content = next(filter(None, map(fields.get, _SYSTEM_HOLDERS)), None)
    if content is None or not messages or isinstance(messages[0], SystemMessage):
        return messages
    return [*to_messages([{"role": "system", "content": content}]), *messages]


def to_messages(values: object) -> list[BaseMessage]:
    """Recorded messages in LangChain's form. Raises `ValueError` that names the first one that cannot be read, and why."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        missing = "there is no key `messages` with" if values is None else f"the messages are {short(values)}, not"
        raise ValueError(f"{missing} a list of messages")
    messages: list[BaseMessage] = []
    in_items = False
    for position, value in enumerate(values, 1):
        try:
            new = list(_converted(value))
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RecursionError) as error:
            # A file may hold anything, and LangChain's own classes raise each of these.
            reason = str(error).splitlines()[0] if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise ValueError(f"message {position} cannot be read ({reason[:160]}): {short(value)}") from error
        is_call = isinstance(value, Mapping) and "role" not in value and _form(value) in _CALL
        if new and (is_call or in_items):  # Responses has an item a call and one for the text of the same reply
            first, last = new[0], messages[-1] if messages else None
            if isinstance(first, AIMessage) and isinstance(last, AIMessage):
                calls, invalid = last.tool_calls + first.tool_calls, last.invalid_tool_calls + first.invalid_tool_calls
                messages[-1] = AIMessage(last.text + first.text, tool_calls=calls, invalid_tool_calls=invalid)
                new = new[1:]
        messages += new
        in_items = is_call or (in_items and not new)
    return messages


def _converted(value: Any) -> Iterator[BaseMessage]:
    """Convert one recorded message. A user's may also hold tools' answers; a thought gives no message."""
    fields = _fields(value)
    if (role := fields["role"]) not in _SPEAKERS:
        raise ValueError(f"not a message: no role of a message is {role!r}")
    places = [fields[key] for key in ("parts", "content", "contents") if fields.get(key) is not None]
    recorded = next(filter(None, places), next(iter(places), None))  # parts hold what a content beside them says, and more
    speaker = _SPEAKERS[role]
    if speaker == "tool" and not _holds_results(recorded):
        yield from _tool(fields, recorded)
        return
    content = _Content.read(recorded)
    if speaker == "assistant":
        yield from _assistant(fields, content)
        return
    if content.calls or (speaker == "system" and content.media):
        raise ValueError(f"a message of the role {role!r} with a block of the form {content.media or 'tool call'!r}")
    yield from content.results
    if content.parts or content.empty:
        blocks: list[str | dict[Any, Any]] = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content.parts]
        kind = SystemMessage if speaker == "system" else HumanMessage
        yield kind(blocks if content.media or len(blocks) > 1 else content.text)
    elif not content.results:
        raise ValueError(f"a message of the role {role!r} without content")


def _fields(value: Any) -> dict[str, Any]:
    """A message's own fields, whatever is around them, and its `role`."""
    if isinstance(value, BaseMessage):
        return {**dict(value), "role": _role(dict(value))}
    if not isinstance(value, Mapping):
        raise ValueError("not a message: it is no object")
    if {"from", "value"} <= value.keys():  # ShareGPT
        if value["from"] in ("function_call", "tool_call"):
            calls = decoded(value["value"])
            return {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
        return {"role": str(value["from"]).lower(), "content": value["value"]}
    form = "" if "role" in value else _form(value)
    if form in _CALL | _RESULT | _THOUGHT | _AT_PROVIDER:
        return {"role": "tool" if form in _RESULT else "assistant", "content": [value], "is_item": True}
    inner: Any = next((value[key] for key in ("kwargs", "data") if isinstance(value.get(key), Mapping)), {})
    return {**value, **inner, "role": _role(value)}


def _role(value: Mapping[str, Any]) -> str:
    names, data = value.get("id"), value.get("data")
    if value.get("lc") == 1:
        role = names[-1] if isinstance(names, list) and names and isinstance(value.get("kwargs"), Mapping) else ""
    else:
        role = value.get("role") or (data.get("role") if isinstance(data, Mapping) else None) or value.get("type")
    return re.sub("message(chunk)?$", "", role.lower()) if isinstance(role, str) else ""


@dataclass
class _Content:
    """The texts, media, calls and answers in a message's content."""

    parts: list[str | dict[str, Any]] = field(default_factory=list)
    """Texts and media, in order."""
    calls: list[Mapping[str, Any]] = field(default_factory=list)
    results: list[ToolMessage] = field(default_factory=list)
    media: str = ""
    """The form of the first medium."""
    empty: bool = False
    """Recorded as an empty text or list."""

    @classmethod
    def read(cls, content: Any) -> "_Content":
        """Raises `ValueError` for a block of an unknown form, or without what its form has."""
        read = cls(empty=content in ("", []))
        if isinstance(content, Mapping):
            content = content["parts"] if "parts" in content else [content] if _block_form(content) else as_text(content)
        for block in content if isinstance(content, list | tuple) else [] if content is None else [content]:
            read._add(block if isinstance(block, Mapping) else {"type": "text", "text": block})
        return read

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    def _add(self, block: Mapping[str, Any]) -> None:
        form = _block_form(block)
        if form in _THOUGHT | _AT_PROVIDER or block.get("thought") is True:
            return
        if form in _CALL:
            self.calls.append(block)
        elif form in _RESULT:
            self.results.append(_result(block, form))
        elif form in _MEDIA:
            self.parts.append(_medium(_encoded(block), form))
            self.media = self.media or str(block.get("type") or form)
        elif form in _TEXT:
            self.parts.append(_text(block))
        else:
            raise ValueError(f"a content block of the unknown form {str(block.get('type') or sorted(block))[:60]!r}")


def _form(value: Mapping[str, Any]) -> str:
    """The form that `type` names; "" without one."""
    name = value.get("type")
    return re.sub("[_-]", "", name).lower() if isinstance(name, str) else ""


def _block_form(block: Mapping[str, Any]) -> str:
    """The form of a content block; "" for anything else. Gemini's and Bedrock's are known by a key."""
    if "type" in block:
        return _form(block)
    return next((form for key in block if (form := _form({"type": key})) in _FORMS), "")


def _inner(block: Mapping[str, Any], forms: frozenset[str]) -> Mapping[str, Any]:
    """The object under the key that names a block's form. A block with a `type` itself."""
    held = (value for key, value in block.items() if _form({"type": key}) in forms and isinstance(value, Mapping))
    return next(held, block) if "type" not in block else block


def _text(block: Mapping[str, Any]) -> str:
    text = first_set(block, "text", "content", "refusal")
    text = text.get("value") if isinstance(text, Mapping) else text
    if not isinstance(text, str):
        raise ValueError(f"a text block without a text, {short(text)}")
    return text


def _encoded(value: Any) -> Any:
    """A block with its bytes as base64, as JSON has them."""
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return {key: _encoded(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _medium(block: Mapping[str, Any], form: str) -> dict[str, Any]:
    """An image, a file or the like as LangChain writes it. Forms that LangChain's models read anyway stay as they are."""
    if form == "inputimage" and isinstance(block.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": block["image_url"]}}
    if form not in ("inlinedata", "filedata", "blob", "uri"):
        return dict(block)
    inner = _inner(block, _MEDIA)
    mime = str(inner.get("mimeType") or inner.get("mime_type") or "")
    url = inner.get("fileUri") or inner.get("file_uri") or inner.get("uri")
    kind = str(inner.get("modality") or mime.partition("/")[0])
    data = {"url": url} if url else {"base64": inner.get("data", inner.get("content"))}
    return {"type": kind if kind in ("image", "audio", "video") else "file", "mime_type": mime, **data}


# --- calls and answers ------------------------------------------------------------------------------------------------------


def _assistant(fields: Mapping[str, Any], content: _Content) -> Iterator[BaseMessage]:
    if content.media:
        raise ValueError(f"an answer with a block of the form {content.media!r}, which no text can hold")
    more = fields.get("additional_kwargs")
    places = [fields, more] if isinstance(more, Mapping) else [fields]
    calls_of = (decoded(place.get(key)) for key in ("tool_calls", "function_call") for place in places)
    recorded: Any = next(filter(None, (*calls_of, content.calls)), [])  # blocks repeat what `tool_calls` has
    recorded = [recorded] if isinstance(recorded, Mapping) else recorded
    audio = fields.get("audio")
    spoken = next((place["refusal"] for place in places if place.get("refusal")), None)
    spoken = spoken or (audio.get("transcript") if isinstance(audio, Mapping) else None)
    thought, text = split_thought(content.text or str(spoken or ""))
    if not recorded:
        text, recorded = _written_calls(text)
    calls, invalid = _calls(recorded)
    invalid += fields.get("invalid_tool_calls") or []
    if calls or invalid or text or (content.empty and not thought):
        yield AIMessage(text, tool_calls=calls, invalid_tool_calls=invalid)
        yield from content.results
    elif not fields.get("is_item"):  # else a thought between the items of a reply
        raise ValueError(f"an assistant's message with {'a thought alone' if thought else 'neither text nor tool call'}")


def _written_calls(text: str) -> tuple[str, list[Any]]:
    """A reply's text without its `<tool_call>` elements (Hermes, Qwen), and their calls."""
    calls = [decoded(call) for call in re.findall(r"<tool_call>\s*(.*?)\s*</tool_call>", text, re.DOTALL)]
    if unread := [call for call in calls if not isinstance(call, Mapping)]:
        raise ValueError(f"a <tool_call> that is no JSON object, {short(unread[0])}")
    return (re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL).strip() if calls else text), calls


def _calls(recorded: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Calls in LangChain's form, and those whose arguments are no JSON object."""
    calls, invalid = [], []
    for call in recorded:
        inner = next((call[key] for key in ("function", "custom") if isinstance(call.get(key), Mapping)), _inner(call, _CALL))
        name = next(filter(None, map(inner.get, ("name", "toolName", "tool_name"))), None)
        if not isinstance(name, str):
            raise ValueError(f"a tool call without a name, {short(call)}")
        ids = [each.get(key) for key in ("call_id", "toolUseId", "toolCallId", "id") for each in (call, inner)]
        named = {"name": name, "id": next((str(each) for each in ids if each), None)}
        arguments = next((inner[key] for key in ("arguments", "args", "input", "parameters") if key in inner), None)
        if "custom" in call or _form(call) == "customtoolcall":
            arguments = {FREE_TEXT: arguments}
        arguments = decoded(decoded(arguments))  # some exporters encode them twice
        if isinstance(arguments, Mapping) or arguments in (None, ""):
            calls.append({**named, "args": dict(arguments or {}), "type": "tool_call"})
        else:
            invalid.append({**named, "args": as_text(arguments), "error": "no JSON object", "type": "invalid_tool_call"})
    return calls, invalid


def _holds_results(content: Any) -> bool:
    blocks = content.get("parts") if isinstance(content, Mapping) else content
    return isinstance(blocks, list) and any(isinstance(each, Mapping) and _block_form(each) in _RESULT for each in blocks)


def _result(block: Mapping[str, Any], form: str) -> ToolMessage:
    """The tool's answer in a content block."""
    inner = _inner(block, _RESULT)
    answer = next((inner[key] for key in ("response", "result", "output", "content") if key in inner), None)
    failed = True in (inner.get("is_error"), inner.get("isError")) or inner.get("status") == "error"
    if form == "functionresponse" and isinstance(answer, Mapping) and len(answer) == 1:
        ((key, value),) = answer.items()  # Gemini's answers are objects: a plain one stands under one of these
        answer, failed = (value if key in ("result", "output", "error") else answer), failed or key == "error"
    if isinstance(answer, Mapping) and {"type", "value"} == answer.keys():  # the AI SDK's
        answer, failed = answer["value"], failed or str(answer["type"]).startswith("error")
    return _tool_message(inner, answer, "id", failed=failed)


def _tool(fields: Mapping[str, Any], content: Any) -> Iterator[ToolMessage]:
    """The tool's answers in a message of a tool, mostly one."""
    written = re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", content, re.DOTALL) if isinstance(content, str) else []
    for text in written:  # the form of Hermes and Qwen
        answer = decoded(text)
        inner = answer if isinstance(answer, Mapping) and {"name", "content"} <= answer.keys() else {"content": text}
        yield _tool_message({**fields, **inner}, inner["content"])
    if not written:
        failed = fields.get("status") == "error" or fields.get("is_error") is True
        yield _tool_message(fields, content, failed=failed)


def _tool_message(fields: Mapping[str, Any], answer: Any, *ids: str, failed: bool = False) -> ToolMessage:
    names = (fields.get(key) for key in ("name", "tool_name", "toolName"))
    known = (fields.get(key) for key in ("tool_call_id", "tool_use_id", "call_id", "toolUseId", "toolCallId", *ids))
    return ToolMessage(
        tool_text(answer),
        tool_call_id=next((str(each) for each in known if each), ""),
        name=next((each for each in names if isinstance(each, str)), None),
        status="error" if failed else "success",
    )


def tool_text(answer: Any) -> str:
    """A tool's answer as an agent reads it. Its text, the texts of its content blocks, else JSON.

    Raises `ValueError` for none, and for what no text can hold.
    """
    if answer is None:
        raise ValueError("a tool's answer without content")
    if not isinstance(answer, list) or not answer:
        return "" if answer == [] else as_text(answer)
    texts = [_answer_text(each) for each in answer]
    return as_text(answer) if None in texts else "\n".join(map(str, texts))


def _answer_text(block: Any) -> str | None:
    """The text of a tool's content block; None for what is the tool's own data."""
    if not isinstance(block, Mapping) or not ("type" in block or len(block) == 1):
        return None
    form = _block_form(block)
    if form in _MEDIA and not _MEDIA_KEYS.isdisjoint(block):
        raise ValueError(f"a tool's answer with a block of the form {form!r}, which no text can hold")
    if block.keys() == {"json"}:
        return as_text(block["json"])
    return _text(block) if form in _TEXT and "text" in block else None


def first_set(fields: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first key that is set; None without one."""
    return next((fields[key] for key in keys if fields.get(key) is not None), None)


def decoded(value: object) -> Any:
    """`value`, or what it holds if it is a text of JSON."""
    try:
        return json.loads(value, strict=False) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def unpacked(value: object) -> Any:
    """The object or list in a text of JSON; any other value as it is."""
    inner = decoded(value)
    return inner if isinstance(inner, Mapping | list) else value


def as_text(value: object) -> str:
    """A text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def short(value: object) -> str:
    """The beginning of a value, for an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
