"""Lets an episode's policy answer the calls of chat models of any class."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager, manager
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.runnables import RunnableBinding
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool

from dreamgym_lg.actions import tool_schemas
from dreamgym_lg.errors import ConfigurationError, RunStopped
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
"""Every other method of a chat model calls one of these."""

ENTRY_POINTS = (
    *("invoke", "ainvoke", "generate_prompt", "agenerate_prompt"),
    *("batch", "abatch", "stream_events", "astream_events"),
)
"""Methods whose base version runs in an episode, since a subclass's version might call its model directly."""

_CONFIGURATION = ("callbacks", "tags", "metadata", "run_name", "run_id")


def patch_models() -> None:
    """Patch every chat-model class that exists now. Each episode's start repeats it for later ones."""
    for cls in subclasses(BaseChatModel):
        patch_model_class(cls)
    dispatch(manager, "handle_event", _handle_event, policy_call)
    dispatch(manager, "ahandle_event", _ahandle_event, policy_call)


def _handle_event(call: PolicyCall, original: Method, handlers: Handlers, args: Args, kwargs: Kwargs) -> None:
    """Run the agent's callbacks for a policy's reply inside the episode, under its guard."""
    of_policy, of_agent = _handlers_by_owner(call, handlers)
    original(of_policy, *args, **kwargs)
    with in_episode(call.episode):
        original(of_agent, *args, **kwargs)


async def _ahandle_event(call: PolicyCall, original: Method, handlers: Handlers, args: Args, kwargs: Kwargs) -> None:
    """As `_handle_event`."""
    of_policy, of_agent = _handlers_by_owner(call, handlers)
    await original(of_policy, *args, **kwargs)
    with in_episode(call.episode):
        await original(of_agent, *args, **kwargs)


def _handlers_by_owner(call: PolicyCall, handlers: Handlers) -> tuple[Handlers, Handlers]:
    """(handlers of the policy, handlers of the agent)."""
    of_policy = [each for each in handlers if any(each is handler for handler in call.handlers)]
    return of_policy, [each for each in handlers if not any(each is handler for handler in of_policy)]


def patch_model_class(cls: type[BaseChatModel]) -> None:
    """Patch the methods that this class itself defines; of `BaseChatModel`, only `CALLS`."""
    is_base = cls is BaseChatModel
    if not is_base and cls.__module__.startswith("langchain_core.language_models"):
        return
    for name in CALLS if is_base else (*CALLS, *ENTRY_POINTS):
        if is_base or name in cls.__dict__:
            handler = _answer(name) if name in CALLS else _entry_point(name)
            dispatch(cls, name, handler, answering_episode)


def _entry_point(name: str) -> Handler:
    base = getattr(BaseChatModel, name)

    def simulated(episode: AgentEpisode, original: Method, model: BaseChatModel, args: Args, kwargs: Kwargs) -> Any:
        return (original if episode.is_policy(model) else base)(model, *args, **kwargs)

    return simulated


def _answer(name: str) -> Handler:
    method = getattr(BaseChatModel, name)
    call_model = _STYLES.get(name, _generate)

    def simulated(episode: AgentEpisode, original: Method, model: BaseChatModel, args: Args, kwargs: Kwargs) -> Any:
        call = _describe(model, name, args, kwargs)
        policy = episode.policy_for(call) or model
        if policy is model:  # the policy itself, or a model that production keeps
            return call_model(episode, original, model, args, kwargs, None)
        kept = {key: kwargs[key] for key in ("stop", *_CONFIGURATION, "config") if key in kwargs}
        bound = normalise({key: value for key, value in kwargs.items() if key not in kept})
        episode.register_tools(bound.get("tools", ()))
        bound = bind_to(policy, bound)
        if episode.task is not None and args:
            args = (_prompts(episode.task, model, args[0], whole="stream" in name), *args[1:])
        prompt = _system_prompt(model, args[0] if args else kwargs.get("messages", kwargs.get("input")))
        episode.register_prompt(prompt, call.node)
        return call_model(episode, getattr(type(policy), name, method), policy, args, kept | bound, call)

    return simulated


def _prompts(task: Task, model: BaseChatModel, prompts: Any, *, whole: bool) -> Any:
    """The prompts of a call by `with_own_rules`. Args: `whole`, `prompts` is a single prompt of any type."""
    if whole:
        return with_own_rules(task, model._convert_input(prompts).to_messages())
    return [with_own_rules(task, prompt) for prompt in prompts]


def _system_prompt(model: BaseChatModel, value: Any) -> str:
    """The text of the system messages in a model's input (of several, the first)."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    try:
        messages = model._convert_input(value).to_messages()
    except Exception:  # no valid input: the call itself raises
        return ""
    return "\n\n".join(message.text for message in messages if message.type == "system")


def _describe(model: BaseChatModel, name: str, args: Args, kwargs: Kwargs) -> Call:
    """Describe a call for a `Route`."""
    config: Any = kwargs.get("config") or (args[1] if len(args) > 1 and isinstance(args[1], dict) else None)
    metadata = {**(ensure_config(config).get("metadata") or {}), **(kwargs.get("metadata") or {})}
    return Call(
        node=str(metadata.get("langgraph_node", "")),
        namespace=str(metadata.get("langgraph_checkpoint_ns", "")),
        agent=str(metadata.get("lc_agent_name", "")),
        model=str(model._get_ls_params().get("ls_model_name") or ""),
        streamed="stream" in name,
    )


def _policy_call(episode: AgentEpisode, model: BaseChatModel) -> PolicyCall:
    """The `PolicyCall` of a model. All handlers of a model other than the policy are the agent's."""
    callbacks = model.callbacks if episode.is_policy(model) else None
    return PolicyCall(episode, callbacks.handlers if isinstance(callbacks, BaseCallbackManager) else callbacks or ())


@contextlib.contextmanager
def _ending_on_outage(episode: AgentEpisode, call: Call | None) -> Iterator[None]:
    """A `RunStopped` of the policy ends the episode, even if the agent catches it."""
    try:
        yield
    except RunStopped as error:
        if call is not None:
            episode.stop(error)
        raise


def _generate(episode: AgentEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    with _ending_on_outage(episode, call), in_episode(_policy_call(episode, model)):
        result = method(model, *args, **kwargs)
    return _finish_call(episode, call, result, kwargs)


async def _agenerate(episode: AgentEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    with _ending_on_outage(episode, call), in_episode(_policy_call(episode, model)):
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
        with _ending_on_outage(episode, call):
            for chunk in iterate_in_episode(method(model, *args, **kwargs), _policy_call(episode, model)):
                chunks.append(chunk)
                yield chunk
    finally:  # also if the reader stops early
        last = _finish_stream(episode, call, chunks, kwargs)
    if last is not None:
        yield last


async def _astream(episode: AgentEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    chunks: list[Any] = []
    try:
        with _ending_on_outage(episode, call):
            async for chunk in aiterate_in_episode(method(model, *args, **kwargs), _policy_call(episode, model)):
                chunks.append(chunk)
                yield chunk
    finally:
        last = _finish_stream(episode, call, chunks, kwargs)
    if last is not None:
        yield last


def _finish_stream(episode: AgentEpisode, call: Call | None, chunks: list[Any], kwargs: Kwargs) -> AIMessageChunk | None:
    """Record the policy's streamed message. Returns a further chunk if a structured answer has to be added."""
    if call is None or not chunks:
        return None
    whole = sum(chunks[1:], chunks[0])
    episode.record_call(call, [whole])
    parsed = _parsed(whole, kwargs)
    return AIMessageChunk(content="", id=whole.id, additional_kwargs=parsed) if parsed else None


def _parsed(message: AIMessage, kwargs: dict[str, Any]) -> dict[str, Any]:
    """{"parsed": object} for ChatOpenAI's parser, if a structured answer lacks it; else {}."""
    if "response_format" in kwargs and message.additional_kwargs.get("parsed") is None:  # ChatOpenAI may set None
        with contextlib.suppress(ValueError):
            return {"parsed": json.loads(message.text)}
    return {}


_STYLES = {"agenerate": _agenerate, "stream": _stream, "astream": _astream, "_achat_model_stream_v3": _agenerate}
"""Method of `CALLS` -> how it is run; the others run like `generate`."""


# --- tools and response formats, in every provider's form ---------------------------------------------------------------------


def normalise(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments of a production model's call for the policy; other settings are dropped.

    `tools` and `response_format` get OpenAI's form; `tool_choice` becomes `none`, `required` or a tool's name.
    """
    bound: dict[str, Any] = {}
    config = kwargs.get("toolConfig") or {}
    if tools := tool_schemas(kwargs.get("tools") or kwargs.get("functions") or config.get("tools") or ()):
        bound["tools"] = tools
        choice = _tool_choice(kwargs)
        if choice is None and len(tools) == 1 and _structured_output_options(kwargs).get("method") == "function_calling":
            choice = tools[0]["function"]["name"]  # some providers cannot be told so
        if choice not in (None, "auto"):
            bound["tool_choice"] = choice
    if schema := _response_schema(kwargs):
        name, body = schema
        bound["response_format"] = {"type": "json_schema", "json_schema": {"name": name, "schema": body}}
    return bound


def check_provider_tools(model: BaseChatModel) -> None:
    """Raise `ConfigurationError` for a model with tools that run at its provider."""
    fields = {"mcp_servers": getattr(model, "mcp_servers", None)}
    for holder in ("model_kwargs", "extra_body"):
        fields |= {f"{holder}[{name!r}]": (getattr(model, holder, None) or {}).get(name) for name in ("tools", "mcp_servers")}
    for name, tools in fields.items():
        if tools:
            raise ConfigurationError(
                f"{type(model).__name__} has tools in {name}: they really run at its provider, also in a dream; play a model "
                "without them, and give its tools to the agent"
            )


def bind_to(policy: BaseChatModel, bound: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `normalise` with tools in the form that the policy's `bind_tools` gives."""
    if not (tools := bound.get("tools")) or type(policy).bind_tools is BaseChatModel.bind_tools:
        return bound
    choice = bound.get("tool_choice")
    chosen = {"tool_choice": "any" if choice == "required" else choice} if choice else {}  # LangChain's word for it
    binding = policy.bind_tools(tools, **chosen)
    if not isinstance(binding, RunnableBinding):  # a model that takes no tools
        return bound
    return {**{key: value for key, value in bound.items() if key not in ("tools", "tool_choice")}, **binding.kwargs}


def _tool_choice(kwargs: Mapping[str, Any]) -> str | None:
    config = kwargs.get("toolConfig") or {}
    choice = kwargs.get("tool_choice") or config.get("toolChoice")
    if google := kwargs.get("tool_config"):
        google = google if isinstance(google, Mapping) else google.model_dump(mode="json", exclude_none=True)
        calling = google.get("function_calling_config") or {}
        allowed = calling.get("allowed_function_names") or []
        choice = allowed[0] if len(allowed) == 1 else calling.get("mode")
    return _normalise_choice(choice)


def _normalise_choice(choice: Any) -> str | None:
    """`auto`, `none`, `required` or a tool's name, from any provider's form."""
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
    return _normalise_choice(str(kind)) if kind else None


def _response_schema(kwargs: Mapping[str, Any]) -> tuple[str, Any] | None:
    """(name, JSON schema) of the requested structured answer; None without one."""
    if _structured_output_options(kwargs).get("method") == "json_schema":
        return _schema(kwargs["ls_structured_output_format"]["schema"])
    formats = [kwargs.get("response_format"), (kwargs.get("output_config") or {}).get("format")]
    formats += [kwargs.get("response_json_schema"), kwargs.get("format")]
    return next((_schema(each) for each in formats if each is not None and not isinstance(each, str)), None)


def _structured_output_options(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of `with_structured_output`, which LangChain passes along for tracing."""
    return (kwargs.get("ls_structured_output_format") or {}).get("kwargs") or {}


def _schema(response_format: Any) -> tuple[str, Any] | None:
    """(name, JSON schema) of a response format in any provider's form; None without schema."""
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
