"""Chat models: while an episode is active, the calls that it trains are answered by its policy, whatever their class."""

import contextlib
import json
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables.config import ensure_config

from dreamgym_lg.simulate.context import Method, apulled, dispatch, entered, pulled, subclasses
from dreamgym_lg.simulate.episode import Call, Episode
from dreamgym_lg.simulate.provider_formats import normalise

CALLS = ("generate", "agenerate", "stream", "astream", "_chat_model_stream_v3", "_achat_model_stream_v3")
"""All else that a chat model offers ends in one of these."""

FUNNELS = ("invoke", "ainvoke", "generate_prompt", "agenerate_prompt", "batch", "abatch", "stream_events", "astream_events")
"""Where a subclass has its own, its model would be asked: inside an episode LangChain's own stands in."""

_CONFIGURATION = ("callbacks", "tags", "metadata", "run_name", "run_id")


def install() -> None:
    """Teach every chat-model class known by now; classes come later too, so each episode's start calls this anew."""
    for cls in subclasses(BaseChatModel):
        teach(cls)


def teach(cls: type) -> None:
    if cls is not BaseChatModel and cls.__module__.startswith("langchain_core.language_models"):
        return
    for name in CALLS:
        if cls is BaseChatModel or name in cls.__dict__:
            dispatch(cls, name, _answer(name))
    for name in FUNNELS:
        if cls is not BaseChatModel and name in cls.__dict__:
            dispatch(cls, name, _funnel(name))


def _funnel(name: str) -> Any:
    base = getattr(BaseChatModel, name)

    def simulated(
        episode: Episode, original: Method, model: BaseChatModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return (original if episode.policy is model else base)(model, *args, **kwargs)

    return simulated


def _answer(name: str) -> Any:
    method = getattr(BaseChatModel, name)
    ask = _STYLES.get(name, _plain)

    def simulated(
        episode: Episode, original: Method, model: BaseChatModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = _describe(model, name, args, kwargs)
        policy = episode.policy if episode.selects(call) else model
        if policy is model:  # the policy itself, or a model that production keeps
            return ask(episode, original, model, args, kwargs, None)
        known = {key: kwargs[key] for key in ("stop", *_CONFIGURATION, "config") if key in kwargs}
        wanted = {key: value for key, value in kwargs.items() if key not in known}
        given = normalise(wanted)
        episode.told_tools(given.get("tools", ()))
        return ask(episode, getattr(type(policy), name, method), policy, args, known | given, call)

    return simulated


def _describe(model: BaseChatModel, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """What a selector may ask of a call: where in the graph it was made, and of which model."""
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


def _plain(episode: Episode, method: Method, model: Any, args: Any, kwargs: Any, call: Call | None) -> Any:
    with entered(None):
        result = method(model, *args, **kwargs)
    return _answered(episode, call, result, kwargs)


async def _aplain(episode: Episode, method: Method, model: Any, args: Any, kwargs: Any, call: Call | None) -> Any:
    with entered(None):
        result = await method(model, *args, **kwargs)
    return _answered(episode, call, result, kwargs)


def _answered(episode: Episode, call: Call | None, result: Any, kwargs: Any) -> Any:
    if call is not None:
        messages = [row[0].message for row in getattr(result, "generations", ()) if row]
        for message in messages:
            message.additional_kwargs |= _parsed(message, kwargs)
        episode.answered(call, messages)
    return result


def _streamed(episode: Episode, method: Method, model: Any, args: Any, kwargs: Any, call: Call | None) -> Any:
    chunks: list[Any] = []
    try:
        for chunk in pulled(method(model, *args, **kwargs)):
            chunks.append(chunk)
            yield chunk
    finally:  # also if its reader stops early
        whole = _whole(episode, call, chunks)
    if whole is not None and (parsed := _parsed(whole, kwargs)):
        yield AIMessageChunk(content="", id=whole.id, additional_kwargs=parsed)


async def _astreamed(episode: Episode, method: Method, model: Any, args: Any, kwargs: Any, call: Call | None) -> Any:
    chunks: list[Any] = []
    try:
        async for chunk in apulled(method(model, *args, **kwargs)):
            chunks.append(chunk)
            yield chunk
    finally:
        whole = _whole(episode, call, chunks)
    if whole is not None and (parsed := _parsed(whole, kwargs)):
        yield AIMessageChunk(content="", id=whole.id, additional_kwargs=parsed)


def _whole(episode: Episode, call: Call | None, chunks: list[Any]) -> Any:
    """The streamed message, noted; None if it is not the policy's."""
    if call is None or not chunks:
        return None
    whole = sum(chunks[1:], chunks[0])
    episode.answered(call, [whole])
    return whole


def _parsed(message: AIMessage, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A structured answer's `parsed` form, which ChatOpenAI's parser reads, where the policy has not made it."""
    if "response_format" in kwargs and "parsed" not in message.additional_kwargs:
        with contextlib.suppress(ValueError):
            return {"parsed": json.loads(message.text)}
    return {}


_STYLES = {"agenerate": _aplain, "stream": _streamed, "astream": _astreamed, "_achat_model_stream_v3": _aplain}
