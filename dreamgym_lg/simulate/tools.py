"""Tools: while an episode is active their bodies do not run; the episode's environment answers in their place.

The cut is at `_run`, behind LangChain's own validation and injection: a wrong argument gets the error of production, byte for
byte, and callbacks, artifacts and error handling stay as they are.
"""

import asyncio
import json
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt import ToolNode
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from dreamgym_lg.environment import INVALID_REWARD
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.simulate.context import Method, dispatch, subclasses
from dreamgym_lg.simulate.walk import returned_type
from dreamgym_lg.tools import render_call
from dreamgym_lg.types import StepResult

if TYPE_CHECKING:
    from dreamgym_lg.simulate.episode import Episode

BODIES, ENTRIES = ("_run", "_arun"), ("run", "arun")
FUNNELS = ("invoke", "ainvoke")

ABSENT_SECONDS = 0.2
"""How long a call waits for an earlier one of the same reply that has not begun: it may have been refused by a person."""


class _Attempt:
    """One tool call on its way: `answered` once the environment was asked or the body let through; `published` by a node."""

    def __init__(self, call_id: str | None, *, published: bool = False) -> None:
        self.call_id, self.answered, self.published = call_id, False, published


_attempt: ContextVar[_Attempt | None] = ContextVar("dreamgym_tool_call", default=None)


def install() -> None:
    """Teach every tool class known by now, and the node that calls tools."""
    for cls in subclasses(BaseTool):
        teach(cls)
    dispatch(ToolNode, "_run_one", _run_one)
    dispatch(ToolNode, "_arun_one", _arun_one)


def teach(cls: type) -> None:
    for name in BODIES:
        if name in cls.__dict__ and not getattr(cls.__dict__[name], "__isabstractmethod__", False):
            dispatch(cls, name, _abody if name == "_arun" else _body)
    for name in ENTRIES if cls is BaseTool else ():
        dispatch(cls, name, _entry(name))
    for name in (*FUNNELS, *ENTRIES):
        if name in cls.__dict__ and not cls.__module__.startswith("langchain_core."):
            dispatch(cls, name, _funnel(name))


def _funnel(name: str) -> Any:
    """A subclass's own `invoke` or `run` would do its work around the body: LangChain's stands in."""

    def simulated(episode: "Episode", original: Method, tool: BaseTool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (original if episode.passes(tool) else getattr(BaseTool, name))(tool, *args, **kwargs)

    return simulated


# --- the body ---------------------------------------------------------------------------------------------------------------


def _body(episode: "Episode", original: Method, tool: BaseTool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    attempt = _attempt.get()
    if episode.passes(tool):
        _reached(attempt)
        return original(tool, *args, **kwargs)
    _wait(episode, attempt)
    with episode.asking, episode.world():
        result = episode.environment.step(action_of(tool, args, kwargs))
        return _given(episode, tool, attempt, args, kwargs, result)


async def _abody(episode: "Episode", original: Method, tool: BaseTool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    attempt = _attempt.get()
    if episode.passes(tool):
        _reached(attempt)
        return await original(tool, *args, **kwargs)
    await _await(episode, attempt)
    while not episode.asking.acquire(blocking=False):
        await asyncio.sleep(0.001)
    try:
        with episode.world():
            result = await episode.environment.astep(action_of(tool, args, kwargs))
            return _given(episode, tool, attempt, args, kwargs, result)
    finally:
        episode.asking.release()


def _reached(attempt: _Attempt | None) -> None:
    if attempt is not None:
        attempt.answered = True


def _wait(episode: "Episode", attempt: _Attempt | None) -> None:
    """Until the earlier calls of the same reply are answered."""
    while attempt is not None and not episode.next_is(attempt.call_id):
        time.sleep(0.001)


async def _await(episode: "Episode", attempt: _Attempt | None) -> None:
    while attempt is not None and not episode.next_is(attempt.call_id):
        await asyncio.sleep(0.001)


def _given(episode: "Episode", tool: BaseTool, attempt: Any, args: Any, kwargs: Any, result: Any) -> Any:
    episode.stepped(action_of(tool, args, kwargs), result)
    _reached(attempt)
    return shaped(tool, result.observation)


def action_of(tool: BaseTool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The call as an action: the validated arguments, without what LangChain and LangGraph inject."""
    given = tool._filter_injected_args({k: v for k, v in kwargs.items() if k not in ("run_manager", "config")})
    if args:  # a tool of one text
        given = {**dict(zip(tool.args or ("__arg1",), args, strict=False)), **given}
    return render_call(tool.name, to_jsonable_python(given, fallback=str))


def shaped(tool: BaseTool, observation: str) -> Any:
    """The answer in the shape in which the tool's body returns its own.

    Raises `PredictionFailed` if the body promises a structure that the answer is not.
    """
    kind = returned_type(tool)
    value: Any = observation
    if kind is not None:
        try:
            value = TypeAdapter(kind).validate_json(observation)
        except ValidationError as error:
            raise PredictionFailed(
                f"tool {tool.name!r} returns {kind}, and its dreamed answer {observation[:120]!r} is none: {error.errors()[0]['msg']}"
            ) from error
    return (value, None) if tool.response_format == "content_and_artifact" else value


# --- around it --------------------------------------------------------------------------------------------------------------


def _entry(name: str) -> Any:
    """`run` and `arun`: what fails before the body is reached was an invalid action, and is recorded as one."""

    def simulated(episode: "Episode", original: Method, tool: BaseTool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _attempting(episode, kwargs.get("tool_call_id")) as attempt:
            try:
                result = original(tool, *args, **kwargs)
            except Exception as error:
                _refused(episode, tool, attempt, args, error)
                raise
            _came(episode, tool, attempt, args, result)
            return result

    async def asimulated(
        episode: "Episode", original: Method, tool: BaseTool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with _attempting(episode, kwargs.get("tool_call_id")) as attempt:
            try:
                result = await original(tool, *args, **kwargs)
            except Exception as error:
                _refused(episode, tool, attempt, args, error)
                raise
            _came(episode, tool, attempt, args, result)
            return result

    return asimulated if name == "arun" else simulated


@contextmanager
def _attempting(episode: "Episode", call_id: str | None) -> Any:
    """The attempt that the tool node published, or a new one for a tool that is called by hand."""
    attempt = _attempt.get()
    if attempt is not None and not attempt.answered and call_id in (None, attempt.call_id):
        yield attempt
        return
    token = _attempt.set(_Attempt(call_id))
    try:
        with episode.tool_call(call_id):
            yield _attempt.get()
    finally:
        _attempt.reset(token)


def _refused(episode: "Episode", tool: BaseTool, attempt: _Attempt, args: tuple[Any, ...], error: Exception) -> None:
    """The call ended in an error: of the arguments or, in the real environment, of the tool."""
    if attempt.answered and not episode.real or isinstance(error, GraphBubbleUp) or episode.runs_anyway(tool):
        return
    if attempt.published:
        return  # the node words the answer, and records it
    attempt.answered = True
    _record(episode, tool.name, _unvalidated(tool, args), str(error), valid=False)


def _came(episode: "Episode", tool: BaseTool, attempt: _Attempt, args: tuple[Any, ...], result: Any) -> None:
    """The call ended well, or in an error that the tool words itself. In the dream a body's answer is recorded already."""
    failed = isinstance(result, ToolMessage) and result.status == "error"
    if episode.runs_anyway(tool) or (not episode.real and (attempt.answered or not failed)):
        return
    attempt.answered = True
    _record(episode, tool.name, _unvalidated(tool, args), as_text(result), valid=not failed)


def as_text(result: Any) -> str:
    """What the policy will read of a tool's result."""
    if isinstance(result, BaseMessage):
        return result.text
    return result if isinstance(result, str) else json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)


def _unvalidated(tool: BaseTool, args: tuple[Any, ...]) -> Any:
    given = args[0] if args else {}
    return tool._filter_injected_args(given) if isinstance(given, dict) else given


def _record(episode: "Episode", name: str, arguments: Any, answer: str, *, valid: bool) -> None:
    given = arguments if isinstance(arguments, dict) else {"input": arguments}
    action = render_call(name, to_jsonable_python(given, fallback=str))
    episode.stepped(action, StepResult(answer, INVALID_REWARD, False, False, {"valid": valid}))


def _run_one(episode: "Episode", original: Method, node: ToolNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = args[0]
    with episode.tool_call(call["id"]):
        token = _attempt.set(_Attempt(call["id"], published=True))
        try:
            result = original(node, *args, **kwargs)
            if _unreached(result):
                _wait(episode, _attempt.get())
                _record(episode, call["name"], call["args"], result.text, valid=False)
            return result
        finally:
            _attempt.reset(token)


async def _arun_one(episode: "Episode", original: Method, node: ToolNode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = args[0]
    with episode.tool_call(call["id"]):
        token = _attempt.set(_Attempt(call["id"], published=True))
        try:
            result = await original(node, *args, **kwargs)
            if _unreached(result):
                await _await(episode, _attempt.get())
                _record(episode, call["name"], call["args"], result.text, valid=False)
            return result
        finally:
            _attempt.reset(token)


def _unreached(result: Any) -> bool:
    """No body ran and the node answered with an error: an unknown tool, or arguments that its schema refuses."""
    attempt = _attempt.get()
    return attempt is not None and not attempt.answered and isinstance(result, ToolMessage) and result.status == "error"
