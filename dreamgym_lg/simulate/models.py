"""Lets an episode's policy answer calls of chat models, whatever their class."""

import contextlib
import json
from collections.abc import Mapping
from itertools import compress
from operator import not_
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager, manager
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.runnables import RunnableBinding
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool

from dreamgym_lg.actions import tool_schemas
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.context import (
    Args,
    Handler,
    Kwargs,
    Method,
    PolicyCall,
    aiterate_in_episode,
    answering_episode,
    dispatch,
    in_episode,
    iterate_in_episode,
    policy_call,
    subclasses,
)
from dreamgym_lg.simulate.episode import AgentEpisode, Call
from dreamgym_lg.tasks import with_own_rules
from dreamgym_lg.types import Task

Handlers = list[BaseCallbackHandler]
Messages = list[BaseMessage]

CALLS = ("generate", "agenerate", "stream", "astream", "_chat_model_stream_v3", "_achat_model_stream_v3")
"""All else that a chat model offers ends in one of these."""

ENTRY_POINTS = (
    *("invoke", "ainvoke", "generate_prompt", "agenerate_prompt"),
    *("batch", "abatch", "stream_events", "astream_events"),
)
"""Methods of which LangChain's own runs inside an episode. A subclass's own would ask its model."""

_CONFIGURATION = ("callbacks", "tags", "metadata", "run_name", "run_id")


def patch_models() -> None:
    """Patch every chat-model class known by now. Classes come later too: each episode's start calls it anew."""
    for cls in subclasses(BaseChatModel):
        patch_model_class(cls)
    dispatch(manager, "handle_event", _handle_event, policy_call)
    dispatch(manager, "ahandle_event", _ahandle_event, policy_call)


def _handle_event(call: PolicyCall, original: Method, handlers: Handlers, args: Args, kwargs: Kwargs) -> None:
    """Run the agent's callbacks of a policy's reply inside the episode, where its guard stands."""
    own, of_agent = _handlers_by_owner(call, handlers)
    original(own, *args, **kwargs)
    with in_episode(call.episode):
        original(of_agent, *args, **kwargs)


async def _ahandle_event(call: PolicyCall, original: Method, handlers: Handlers, args: Args, kwargs: Kwargs) -> None:
    """As `_handle_event`."""
    own, of_agent = _handlers_by_owner(call, handlers)
    await original(own, *args, **kwargs)
    with in_episode(call.episode):
        await original(of_agent, *args, **kwargs)


def _handlers_by_owner(call: PolicyCall, handlers: Handlers) -> tuple[Handlers, Handlers]:
    """The policy's handlers, and the agent's."""
    is_own = [any(each is own for own in call.handlers) for each in handlers]
    return list(compress(handlers, is_own)), list(compress(handlers, map(not_, is_own)))


def patch_model_class(cls: type[BaseChatModel]) -> None:
    if cls is not BaseChatModel and cls.__module__.startswith("langchain_core.language_models"):
        return
    is_base = cls is BaseChatModel
    for names, handler in ((CALLS, _answer), (ENTRY_POINTS, _entry_point)):
        for name in names:
            if names is CALLS if is_base else name in cls.__dict__:
                dispatch(cls, name, handler(name), answering_episode)


def _entry_point(name: str) -> Handler:
    base = getattr(BaseChatModel, name)

    def simulated(episode: AgentEpisode, original: Method, model: BaseChatModel, args: Args, kwargs: Kwargs) -> Any:
        return (original if episode.policy is model else base)(model, *args, **kwargs)

    return simulated


def _answer(name: str) -> Handler:
    method = getattr(BaseChatModel, name)
    call_model = _STYLES.get(name, _generate)

    def simulated(episode: AgentEpisode, original: Method, model: BaseChatModel, args: Args, kwargs: Kwargs) -> Any:
        call = _describe(model, name, args, kwargs)
        policy = episode.policy if episode.selects(call) else model
        if policy is model:  # the policy itself, or a model that production keeps
            return call_model(episode, original, model, args, kwargs, None)
        kept = {key: kwargs[key] for key in ("stop", *_CONFIGURATION, "config") if key in kwargs}
        bound = normalise({key: value for key, value in kwargs.items() if key not in kept})
        episode.register_tools(bound.get("tools", ()))
        bound = _in_own_form(policy, bound)
        if episode.task is not None and args:
            args = (_prompts(episode.task, model, args[0], whole="stream" in name), *args[1:])
        prompt = _system_prompt(model, args[0] if args else kwargs.get("messages", kwargs.get("input")))
        episode.register_prompt(prompt, call.node)
        return call_model(episode, getattr(type(policy), name, method), policy, args, kept | bound, call)

    return simulated


def _prompts(task: Task, model: BaseChatModel, prompts: Any, *, whole: bool) -> Any:
    """The prompts of a call with the agent's own system messages (`with_own_rules`). Args: `whole`, one prompt of any kind."""
    if whole:
        return with_own_rules(task, model._convert_input(prompts).to_messages())
    return [with_own_rules(task, prompt) for prompt in prompts]


def _system_prompt(model: BaseChatModel, value: Any) -> str:
    """The system messages of a model's input; of several prompts, those of the first."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    try:
        messages = model._convert_input(value).to_messages()
    except Exception:  # no input of a chat model: the call itself says so
        return ""
    return "\n\n".join(message.text for message in messages if message.type == "system")


def _describe(model: BaseChatModel, name: str, args: Args, kwargs: Kwargs) -> Call:
    """The call as a route sees it."""
    config: Any = kwargs.get("config") or (args[1] if len(args) > 1 and isinstance(args[1], dict) else None)
    metadata = dict(ensure_config(config).get("metadata") or {})
    metadata |= kwargs.get("metadata") or {}
    params = model._get_ls_params()
    return Call(
        node=str(metadata.get("langgraph_node", "")),
        namespace=str(metadata.get("langgraph_checkpoint_ns", "")),
        agent=str(metadata.get("lc_agent_name", "")),
        model=str(params.get("ls_model_name", "") or ""),
        streamed="stream" in name,
    )


def _policy_call(episode: AgentEpisode, model: BaseChatModel) -> PolicyCall:
    """A call of the policy. All handlers of a model that production keeps are the agent's."""
    callbacks = model.callbacks if episode.policy is model else None
    return PolicyCall(episode, callbacks.handlers if isinstance(callbacks, BaseCallbackManager) else callbacks or ())


def _generate(episode: AgentEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    with in_episode(_policy_call(episode, model)):
        result = method(model, *args, **kwargs)
    return _finish_call(episode, call, result, kwargs)


async def _agenerate(episode: AgentEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    with in_episode(_policy_call(episode, model)):
        result = await method(model, *args, **kwargs)
    return _finish_call(episode, call, result, kwargs)


def _finish_call(episode: AgentEpisode, call: Call | None, result: Any, kwargs: Any) -> Any:
    if call is not None:
        messages = [row[0].message for row in getattr(result, "generations", ()) if row]
        for message in messages:
            message.additional_kwargs |= _parsed(message, kwargs)
        episode.record_call(call, messages)
    return result


def _stream(episode: AgentEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    chunks: list[Any] = []
    try:
        for chunk in iterate_in_episode(method(model, *args, **kwargs), _policy_call(episode, model)):
            chunks.append(chunk)
            yield chunk
    finally:  # also if its reader stops early
        whole = _finish_stream(episode, call, chunks)
    if whole is not None and (parsed := _parsed(whole, kwargs)):
        yield AIMessageChunk(content="", id=whole.id, additional_kwargs=parsed)


async def _astream(episode: AgentEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    chunks: list[Any] = []
    try:
        async for chunk in aiterate_in_episode(method(model, *args, **kwargs), _policy_call(episode, model)):
            chunks.append(chunk)
            yield chunk
    finally:
        whole = _finish_stream(episode, call, chunks)
    if whole is not None and (parsed := _parsed(whole, kwargs)):
        yield AIMessageChunk(content="", id=whole.id, additional_kwargs=parsed)


def _finish_stream(episode: AgentEpisode, call: Call | None, chunks: list[Any]) -> Any:
    """The whole streamed message, recorded; None if it is not the policy's."""
    if call is None or not chunks:
        return None
    whole = sum(chunks[1:], chunks[0])
    episode.record_call(call, [whole])
    return whole


def _parsed(message: AIMessage, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The `parsed` form of a structured answer, for ChatOpenAI's parser, where the policy gave none."""
    if "response_format" in kwargs and message.additional_kwargs.get("parsed") is None:  # ChatOpenAI may say None
        with contextlib.suppress(ValueError):
            return {"parsed": json.loads(message.text)}
    return {}


_STYLES = {"agenerate": _agenerate, "stream": _stream, "astream": _astream, "_achat_model_stream_v3": _agenerate}
"""How each of `CALLS` runs; the others return at once, as `generate` does."""


# --- what production binds, in every provider's form --------------------------------------------------------------------------


def normalise(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a production model's call, as the policy takes them. A provider's settings are dropped.

    `tools` and `response_format` are in OpenAI's form, `tool_choice` is `auto`, `none`, `required` or a tool's name.
    """
    bound: dict[str, Any] = {}
    config = kwargs.get("toolConfig") or {}
    if tools := tool_schemas(kwargs.get("tools") or kwargs.get("functions") or config.get("tools") or ()):
        bound["tools"] = tools
        choice = _tool_choice(kwargs)
        if choice is None and len(tools) == 1 and _noted(kwargs).get("method") == "function_calling":
            choice = tools[0]["function"]["name"]  # not every provider can be told so
        if choice not in (None, "auto"):
            bound["tool_choice"] = choice
    if schema := _response_schema(kwargs):
        name, body = schema
        bound["response_format"] = {"type": "json_schema", "json_schema": {"name": name, "schema": body}}
    return bound


def check_provider_tools(model: BaseChatModel) -> None:
    """Raise `ConfigurationError` for a model with tools of its own that run at its provider."""
    own = {"mcp_servers": getattr(model, "mcp_servers", None)}
    for holder in ("model_kwargs", "extra_body"):
        own |= {f"{holder}[{name!r}]": (getattr(model, holder, None) or {}).get(name) for name in ("tools", "mcp_servers")}
    for name, tools in own.items():
        if tools:
            raise ConfigurationError(
                f"{type(model).__name__} has tools in {name}: they really run at its provider, also in a dream; play a model "
                "without them, and give its tools to the agent"
            )


def _in_own_form(policy: BaseChatModel, bound: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `normalise`, with tools in the form of the policy's own class."""
    if not (tools := bound.get("tools")) or type(policy).bind_tools is BaseChatModel.bind_tools:
        return bound
    choice = bound.get("tool_choice")
    chosen = {"tool_choice": "any" if choice == "required" else choice} if choice else {}  # LangChain's word for it
    own = policy.bind_tools(tools, **chosen)
    if not isinstance(own, RunnableBinding):  # a model that takes no tools
        return bound
    return {**{key: value for key, value in bound.items() if key not in ("tools", "tool_choice")}, **own.kwargs}


def _tool_choice(kwargs: Mapping[str, Any]) -> str | None:
    config = kwargs.get("toolConfig") or {}
    choice = kwargs.get("tool_choice") or config.get("toolChoice")
    if google := kwargs.get("tool_config"):
        google = google if isinstance(google, Mapping) else google.model_dump(mode="json", exclude_none=True)
        calling = google.get("function_calling_config") or {}
        allowed = calling.get("allowed_function_names") or []
        choice = allowed[0] if len(allowed) == 1 else calling.get("mode")
    return _named(choice)


def _named(choice: Any) -> str | None:
    """`auto`, `none`, `required` or a name, from any provider's way to say so."""
    if choice is None or isinstance(choice, bool):
        return "required" if choice else None
    if isinstance(choice, str):
        return {"any": "required", "validated": "auto"}.get(choice.lower(), choice.lower() if choice.isupper() else choice)
    for key in ("function", "tool"):
        if isinstance(choice.get(key), Mapping):
            return str(choice[key]["name"])
    if "name" in choice:
        return str(choice["name"])
    kind = choice.get("type") or next(iter(choice), None)
    return _named(str(kind)) if kind else None


def _response_schema(kwargs: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Name and JSON schema of the answer that production asked for."""
    if _noted(kwargs).get("method") == "json_schema":
        return _schema(kwargs["ls_structured_output_format"]["schema"])
    formats = [kwargs.get("response_format"), (kwargs.get("output_config") or {}).get("format")]
    formats += [kwargs.get("response_json_schema"), kwargs.get("format")]
    return next((_schema(each) for each in formats if each is not None and not isinstance(each, str)), None)


def _noted(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    return (kwargs.get("ls_structured_output_format") or {}).get("kwargs") or {}


def _schema(response_format: Any) -> tuple[str, Any] | None:
    if not isinstance(response_format, Mapping) or "function" in response_format:
        function = convert_to_openai_tool(response_format)["function"]
        return str(function["name"]), function["parameters"]
    if response_format.get("type") in ("text", "json_object"):
        return None
    inner = response_format.get("json_schema") or response_format
    schema = inner.get("schema", inner)
    if not isinstance(schema, Mapping):
        return _schema(schema)
    return str(inner.get("name") or schema.get("title") or "answer"), dict(schema)
