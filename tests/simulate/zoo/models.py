"""A chat model with a script instead of weights; it answers as a provider's class does. It knows nothing of simulation."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.messages.tool import tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool


class ScriptedModel(BaseChatModel):
    """Calls the first tool that is bound and not yet called since the last human message, with arguments made from its
    schema; afterwards it answers in text. It honours `tool_choice`, `response_format` and `stop`."""

    label: str
    """Written into every answer and every text argument: who spoke."""
    per_reply: int = 1
    """Tool calls in one reply; more than there are tools: the same ones again."""
    rounds: int = 1
    """Replies that call tools, for each human message."""
    sequence: tuple[str, ...] = ()
    """Tools to call instead, one a reply."""
    call_id: str = ""
    """The id of every call; otherwise each has its own."""

    @property
    def _llm_type(self) -> str:
        return self.label

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"label": self.label, "per_reply": self.per_reply, "rounds": self.rounds, "sequence": self.sequence}

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Runnable[Any, AIMessage]:
        """In OpenAI's format, as most providers' classes."""
        formatted = [convert_to_openai_tool(tool) for tool in tools]
        if tool_choice in ("any", True):
            tool_choice = "required"
        elif tool_choice not in (None, "auto", "none", "required") and isinstance(tool_choice, str):
            tool_choice = {"type": "function", "function": {"name": tool_choice}}
        return self.bind(tools=formatted, **({"tool_choice": tool_choice} if tool_choice else {}), **kwargs)

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, method: str = "function_calling", **kw: Any
    ) -> Any:
        """`json_schema` reads `additional_kwargs["parsed"]`, as ChatOpenAI does."""
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kw)
        converted = convert_to_json_schema(schema)
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": converted.get("title", "output"), "schema": converted},
        }

        def parse(message: AIMessage) -> Any:
            parsed = message.additional_kwargs["parsed"]
            parsed = schema.model_validate(parsed) if isinstance(schema, type) else parsed
            return {"raw": message, "parsed": parsed, "parsing_error": None} if include_raw else parsed

        return self.bind(response_format=response_format) | RunnableLambda(parse)

    def _asked(self, messages: list[BaseMessage], kwargs: dict[str, Any]) -> None:
        """Called once for every answer, before it is given."""

    def _answer(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> AIMessage:
        self._asked(messages, {**kwargs, "stop": stop})
        tools = {f["name"]: f for f in (convert_to_openai_tool(tool)["function"] for tool in kwargs.get("tools") or [])}
        humans = [n for n, message in enumerate(messages) if isinstance(message, HumanMessage)]
        recent = messages[humans[-1] :] if humans else messages
        replies = [m.tool_calls for m in recent if isinstance(m, AIMessage)]
        called = [names for calls in replies if (names := [call["name"] for call in calls if call["name"] in tools])]
        if wanted := self._choose(list(tools), called, kwargs.get("tool_choice")):
            made = [
                tool_call(name=name, args=example(tools[name].get("parameters", {}), self.label), id=self._call_id())
                for name in wanted
            ]
            return AIMessage("", tool_calls=made)
        if (response_format := kwargs.get("response_format")) and response_format["type"] != "text":
            parsed = example(response_format.get("json_schema", {}).get("schema", {}), self.label)
            return AIMessage(json.dumps(parsed), additional_kwargs={"parsed": parsed})
        text = f"{self.label}: {recent[0].text if recent else ''} - done, {sum(map(len, called))} tool calls."
        for end in stop or []:
            text = text.split(end)[0]
        return AIMessage(text)

    def _call_id(self) -> str:
        return self.call_id or f"call_{uuid4().hex[:12]}"

    def _choose(self, names: list[str], called: list[list[str]], choice: Any) -> list[str]:
        """The tools that the next reply calls: none if it is a text."""
        match choice:
            case "none":
                return []
            case {"function": {"name": str(name)}} | {"name": str(name)}:
                return [name]
            case str(name) if name in names:
                return [name]
        before = {name for reply in called for name in reply}
        if self.sequence:
            wanted = [name for name in self.sequence if name in names and name not in before][:1]
        else:
            wanted = list(islice(cycle(names), self.per_reply)) if len(called) < self.rounds else []
        if not wanted and choice in ("required", "any", True):
            wanted = ([name for name in names if name not in before] or names)[:1]
        return wanted

    def _generate(self, messages: list[BaseMessage], stop: list[str] | None = None, _: Any = None, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._answer(messages, stop, kwargs))])

    async def _agenerate(self, messages: list[BaseMessage], stop: Any = None, _: Any = None, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(0)
        return self._generate(messages, stop, **kwargs)

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, _: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        yield from chunks(self._answer(messages, stop, kwargs))

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, _: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for chunk in chunks(self._answer(messages, stop, kwargs)):
            await asyncio.sleep(0)
            yield chunk


class ProductionModel(ScriptedModel):
    """The user's own model. `on_call` hears of every call; the first `fails` of them end in a ConnectionError."""

    label: str = "production"
    on_call: Callable[[], None]
    fails: int = 0

    def _asked(self, messages: list[BaseMessage], kwargs: dict[str, Any]) -> None:
        self.on_call()
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the provider does not answer")


def chunks(message: AIMessage) -> Iterator[ChatGenerationChunk]:
    """The message word by word, each tool call in two parts."""
    parts = [AIMessageChunk(word) for word in re.findall(r"\s*\S+", message.text)]
    for index, call in enumerate(message.tool_calls):
        text = json.dumps(call["args"])
        head = tool_call_chunk(name=call["name"], args=text[: len(text) // 2], id=call["id"], index=index)
        tail = tool_call_chunk(name=None, args=text[len(text) // 2 :], id=None, index=index)
        parts += [AIMessageChunk("", tool_call_chunks=[head]), AIMessageChunk("", tool_call_chunks=[tail])]
    parts.append(AIMessageChunk("", additional_kwargs=message.additional_kwargs, chunk_position="last"))
    yield from (ChatGenerationChunk(message=part) for part in parts)


def example(schema: dict[str, Any], label: str, name: str = "value", root: dict[str, Any] | None = None) -> Any:
    """A value that this JSON schema allows; texts are `{label}-{name}`, optional properties are left out."""
    root = schema if root is None else root
    if "$ref" in schema:
        return example(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], label, name, root)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return example(next(s for s in schema[key] if s.get("type") != "null"), label, name, root)
    match schema.get("type", "object" if "properties" in schema or schema is root else "string"):
        case "object":
            wanted = {key: schema.get("properties", {}).get(key, {}) for key in schema.get("required", ())}
            return {key: example(value, label, key, root) for key, value in wanted.items()}
        case "array":
            return [example(schema.get("items", {}), label, name, root)]
        case "integer":
            return int(schema.get("minimum", 1))
        case "number":
            return float(schema.get("minimum", 1.5))
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return f"{label}-{name}"
