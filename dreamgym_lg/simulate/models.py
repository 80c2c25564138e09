"""Chat models: while an episode is active, the calls that it trains are answered by its policy, whatever their class."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables.config import ensure_config

from dreamgym_lg.simulate.context import ActiveEpisode, Call, aiterate_in_episode, answering, in_episode, iterate_in_episode
from dreamgym_lg.simulate.dispatch import Args, Handler, Kwargs, Method, dispatch, subclasses
from dreamgym_lg.simulate.provider_formats import normalise

Messages = list[BaseMessage]

CALLS = ("generate", "agenerate", "stream", "astream", "_chat_model_stream_v3", "_achat_model_stream_v3")
"""All else that a chat model offers ends in one of these."""

OWN = ("_generate", "_agenerate", "_stream", "_astream")
"""What a class implements for LangChain, which asks it outside of episodes: inside one, a node has called it by hand."""

ENTRY_POINTS = (
    *("invoke", "ainvoke", "generate_prompt", "agenerate_prompt"),
    *("batch", "abatch", "stream_events", "astream_events"),
)
"""Where a subclass has its own, its model would be asked: inside an episode LangChain's own stands in."""

_CONFIGURATION = ("callbacks", "tags", "metadata", "run_name", "run_id")


def patch_models() -> None:
    """Patch every chat-model class known by now; classes come later too, so each episode's start calls this anew."""
    for cls in subclasses(BaseChatModel):
        patch_model_class(cls)


def patch_model_class(cls: type[BaseChatModel]) -> None:
    if cls is not BaseChatModel and cls.__module__.startswith("langchain_core.language_models"):
        return
    for name in CALLS:
        if cls is BaseChatModel or name in cls.__dict__:
            dispatch(cls, name, _answer(name), answering)
    for name in OWN:
        if cls is not BaseChatModel and name in cls.__dict__:
            dispatch(cls, name, _by_hand(name), answering)
    for name in ENTRY_POINTS:
        if cls is not BaseChatModel and name in cls.__dict__:
            dispatch(cls, name, _entry_point(name), answering)


def _entry_point(name: str) -> Handler:
    base = getattr(BaseChatModel, name)

    def simulated(episode: ActiveEpisode, original: Method, model: BaseChatModel, args: Args, kwargs: Kwargs) -> Any:
        return (original if episode.policy is model else base)(model, *args, **kwargs)

    return simulated


def _by_hand(name: str) -> Handler:
    """LangChain's own method stands in, by which the policy is asked."""

    def generate(model: BaseChatModel, messages: Messages, **given: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=model.invoke(messages, **given))])

    async def agenerate(model: BaseChatModel, messages: Messages, **given: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=await model.ainvoke(messages, **given))])

    def stream(model: BaseChatModel, messages: Messages, **given: Any) -> Iterator[ChatGenerationChunk]:
        return (ChatGenerationChunk(message=chunk) for chunk in model.stream(messages, **given))

    def astream(model: BaseChatModel, messages: Messages, **given: Any) -> AsyncIterator[ChatGenerationChunk]:
        return (ChatGenerationChunk(message=chunk) async for chunk in model.astream(messages, **given))

    ask: Method = {"_generate": generate, "_agenerate": agenerate, "_stream": stream, "_astream": astream}[name]

    def simulated(episode: ActiveEpisode, original: Method, model: BaseChatModel, args: Args, kwargs: Kwargs) -> Any:
        given = {**dict(zip(("messages", "stop", "run_manager"), args, strict=False)), **kwargs}
        given.pop("run_manager", None)
        return ask(model, **given)

    return simulated


def _answer(name: str) -> Handler:
    method = getattr(BaseChatModel, name)
    ask = _STYLES.get(name, _generate)

    def simulated(episode: ActiveEpisode, original: Method, model: BaseChatModel, args: Args, kwargs: Kwargs) -> Any:
        call = _describe(model, name, args, kwargs)
        policy = episode.policy if episode.selects(call) else model
        if policy is model:  # the policy itself, or a model that production keeps
            return ask(episode, original, model, args, kwargs, None)
        known = {key: kwargs[key] for key in ("stop", *_CONFIGURATION, "config") if key in kwargs}
        wanted = {key: value for key, value in kwargs.items() if key not in known}
        given = normalise(wanted)
        episode.register_tools(given.get("tools", ()))
        return ask(episode, getattr(type(policy), name, method), policy, args, known | given, call)

    return simulated


def _describe(model: BaseChatModel, name: str, args: Args, kwargs: Kwargs) -> Call:
    """What a route may ask of a call: where in the graph it was made, and of which model."""
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


def _generate(episode: ActiveEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    with in_episode(None):
        result = method(model, *args, **kwargs)
    return _finish_call(episode, call, result, kwargs)


async def _agenerate(episode: ActiveEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    with in_episode(None):
        result = await method(model, *args, **kwargs)
    return _finish_call(episode, call, result, kwargs)


def _finish_call(episode: ActiveEpisode, call: Call | None, result: Any, kwargs: Any) -> Any:
    if call is not None:
        messages = [row[0].message for row in getattr(result, "generations", ()) if row]
        for message in messages:
            message.additional_kwargs |= _parsed(message, kwargs)
        episode.record_call(call, messages)
    return result


def _stream(episode: ActiveEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    chunks: list[Any] = []
    try:
        for chunk in iterate_in_episode(method(model, *args, **kwargs)):
            chunks.append(chunk)
            yield chunk
    finally:  # also if its reader stops early
        whole = _finish_stream(episode, call, chunks)
    if whole is not None and (parsed := _parsed(whole, kwargs)):
        yield AIMessageChunk(content="", id=whole.id, additional_kwargs=parsed)


async def _astream(episode: ActiveEpisode, method: Method, model: Any, args: Args, kwargs: Kwargs, call: Call | None) -> Any:
    chunks: list[Any] = []
    try:
        async for chunk in aiterate_in_episode(method(model, *args, **kwargs)):
            chunks.append(chunk)
            yield chunk
    finally:
        whole = _finish_stream(episode, call, chunks)
    if whole is not None and (parsed := _parsed(whole, kwargs)):
        yield AIMessageChunk(content="", id=whole.id, additional_kwargs=parsed)


def _finish_stream(episode: ActiveEpisode, call: Call | None, chunks: list[Any]) -> Any:
    """The whole streamed message, recorded; None if it is not the policy's."""
    if call is None or not chunks:
        return None
    whole = sum(chunks[1:], chunks[0])
    episode.record_call(call, [whole])
    return whole


def _parsed(message: AIMessage, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A structured answer's `parsed` form, which ChatOpenAI's parser reads, where the policy has not made it."""
    if "response_format" in kwargs and "parsed" not in message.additional_kwargs:
        with contextlib.suppress(ValueError):
            return {"parsed": json.loads(message.text)}
    return {}


_STYLES = {"agenerate": _agenerate, "stream": _stream, "astream": _astream, "_achat_model_stream_v3": _agenerate}
