"""Lets an episode's environment answer tool calls in place of the tools' functions.

`_run` is patched, which LangChain calls after validation: wrong arguments get the same error as in production.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt import ToolNode
from langgraph.prebuilt.tool_node import msg_content_output
from langgraph.types import Command
from pydantic_core import to_jsonable_python

from dreamgym_lg.actions import render_call
from dreamgym_lg.simulate.context import (
    Args,
    Handler,
    Kwargs,
    Method,
    answering_episode,
    dispatch,
    in_episode,
    set_var,
    subclasses,
)
from dreamgym_lg.simulate.episode import AgentEpisode, PendingStep
from dreamgym_lg.simulate.object_graph import body
from dreamgym_lg.simulate.return_types import parse_answer
from dreamgym_lg.user_code import first_line, user_line

ENTRY_POINTS = ("invoke", "ainvoke", "run", "arun")


def patch_tools() -> None:
    """Patch every tool class that exists now, and LangGraph's `ToolNode`."""
    for cls in subclasses(BaseTool):
        patch_tool_class(cls)
    if (shells := sys.modules.get("langchain.agents.middleware.shell_tool")) is not None:
        dispatch(shells.ShellToolMiddleware, "_get_or_create_resources", _start_shell)
    for name in ("_run_one", "_arun_one"):
        dispatch(ToolNode, name, _recording(name, _node_recorder), answering_episode)


def patch_tool_class(cls: type[BaseTool]) -> None:
    """Patch the methods that this class itself defines."""
    for name, handler in (("_run", _body), ("_arun", _abody)):
        if name in cls.__dict__ and not getattr(cls.__dict__[name], "__isabstractmethod__", False):
            dispatch(cls, name, handler, answering_episode)
    if cls is BaseTool:
        for name in ("run", "arun"):
            dispatch(cls, name, _recording(name, _tool_recorder), answering_episode)
    for name in ENTRY_POINTS:
        if name in cls.__dict__ and not cls.__module__.startswith("langchain_core."):
            dispatch(cls, name, _entry_point(name), answering_episode)
    if cls in (StructuredTool, Tool):
        dispatch(cls, "ainvoke", _ainvoke, answering_episode)


def _start_shell(episode: AgentEpisode, original: Method, middleware: Any, args: Args, kwargs: Kwargs) -> Any:
    """Start no shell if the environment answers its tool."""
    return original(middleware, *args, **kwargs) if all(map(episode.passes, middleware.tools)) else None


def _ainvoke(episode: AgentEpisode, original: Method, tool: BaseTool, args: Args, kwargs: Kwargs) -> Any:
    """Answer on the event loop; LangChain would use a thread for a synchronous function."""
    return (original if episode.passes(tool) else BaseTool.ainvoke)(tool, *args, **kwargs)


def _entry_point(name: str) -> Handler:
    """LangChain's base method in place of a subclass's version, unless the tool really runs."""

    @contextmanager
    def recorder(episode: AgentEpisode, tool: BaseTool, args: Args, kwargs: Kwargs) -> Iterator[Any]:
        with _tool_recorder(episode, tool, args, kwargs) as record, in_episode(episode.owner_of_body(tool)):
            yield record

    run_recorded = _recording(name, recorder)

    def simulated(episode: AgentEpisode, original: Method, tool: BaseTool, args: Args, kwargs: Kwargs) -> Any:
        if not episode.passes(tool):
            return getattr(BaseTool, name)(tool, *args, **kwargs)
        return run_recorded(episode, original, tool, args, kwargs)

    return simulated


def _recording(name: str, recorder: Callable[..., AbstractContextManager[Any]]) -> Handler:
    """A handler that runs the method inside `recorder`, whose value takes the result. It is async if `name` is."""

    def run(episode: AgentEpisode, original: Method, owner: Any, args: Args, kwargs: Kwargs) -> Any:
        with recorder(episode, owner, args, kwargs) as record:
            return record(original(owner, *args, **kwargs))

    async def arun(episode: AgentEpisode, original: Method, owner: Any, args: Args, kwargs: Kwargs) -> Any:
        with recorder(episode, owner, args, kwargs) as record:
            return record(await original(owner, *args, **kwargs))

    return arun if name.lstrip("_").startswith("a") else run


# --- one call -----------------------------------------------------------------------------------------------------------------


@dataclass
class _Attempt:
    """A tool call in progress."""

    call_id: str | None
    by_node: bool = False
    """Called by a tool node, which writes the messages of the tool's errors."""
    line: str = ""
    tool: BaseTool | None = None
    action: str = ""
    ran: bool = False
    """True once the call passed validation: the tool's function runs, or the environment answers."""
    step: PendingStep | None = None
    error: str | None = None
    """Of a tool that raised, where a middleware may still word the answer."""

    def begin(self, tool: BaseTool, arguments: Any) -> None:
        """Set tool, action and line: the tool's first, or the one that calls it."""
        self.tool, self.action = tool, action_of(tool, arguments)
        self.line = self.line or (first_line(body(tool)) if self.by_node else user_line())


_attempt: ContextVar[_Attempt | None] = ContextVar("dreamgym_tool_call", default=None)


def action_of(tool: BaseTool, arguments: Any) -> str:
    """The call as an action, with the policy's arguments and without injected ones."""
    if not isinstance(arguments, dict):
        arguments = {next(iter(tool.args), "input"): arguments}  # a tool with a single text argument
    return render_call(tool.name, to_jsonable_python(tool._filter_injected_args(arguments), fallback=str))


def _body(episode: AgentEpisode, original: Method, tool: BaseTool, args: Args, kwargs: Kwargs) -> Any:
    attempt = _attempt_at_body(tool, args, kwargs)
    if not episode.passes(tool):
        read = partial(parse_answer, tool, episode.graph, kwargs, attempt.call_id)
        attempt.step, answer = episode.play(attempt.action, attempt.call_id, read, line=attempt.line)
        return answer
    with in_episode(episode.owner_of_body(tool)):
        return original(tool, *args, **kwargs)


async def _abody(episode: AgentEpisode, original: Method, tool: BaseTool, args: Args, kwargs: Kwargs) -> Any:
    attempt = _attempt_at_body(tool, args, kwargs)
    if not episode.passes(tool):
        read = partial(parse_answer, tool, episode.graph, kwargs, attempt.call_id)
        attempt.step, answer = await episode.aplay(attempt.action, attempt.call_id, read, line=attempt.line)
        return answer
    with in_episode(episode.owner_of_body(tool)):
        return await original(tool, *args, **kwargs)


def _attempt_at_body(tool: BaseTool, args: Args, kwargs: Kwargs) -> _Attempt:
    """The current attempt at this tool, or a new one for calls past `run`."""
    attempt = _attempt.get()
    if attempt is None or attempt.tool is not tool:
        attempt = _Attempt(None)
        arguments = {key: value for key, value in kwargs.items() if key not in ("run_manager", "config")}
        attempt.begin(tool, arguments if arguments or not args else args[0])
    attempt.ran = True
    return attempt


@contextmanager
def _tool_recorder(episode: AgentEpisode, tool: BaseTool, args: Args, kwargs: Kwargs) -> Iterator[Any]:
    """Record a call of `run` or of a subclass's `invoke`. An error before the tool's function is an invalid action."""
    arguments = args[0] if args else kwargs.get("tool_input", kwargs.get("input"))
    call_id = kwargs.get("tool_call_id")
    if isinstance(arguments, dict) and arguments.get("type") == "tool_call":
        arguments, call_id = arguments["args"], arguments["id"]
    with _current_attempt(episode, tool, call_id) as attempt:
        attempt.begin(tool, arguments)
        if attempt.step is None and episode.runs_anyway(tool):  # before the acts inside of it
            attempt.step = episode.add_act("passed through", attempt.action, attempt.call_id, line=attempt.line)

        def record(result: Any) -> Any:
            if attempt.step is not None:
                attempt.step.answer = as_text(result)
            else:
                refused = not attempt.ran and tool.handle_validation_error  # its text is the result of a call by code
                _add_step(episode, attempt, as_text(result), valid=not refused and not _is_error(result))
            return result

        try:
            yield record
        except GraphBubbleUp:
            raise
        except Exception as error:
            if attempt.step is None and attempt.by_node:
                attempt.error = str(error)
            elif attempt.step is None:
                _add_step(episode, attempt, str(error), valid=False)
            elif attempt.step is not None and episode.runs_anyway(tool):
                attempt.step.answer = f"{type(error).__name__}: {error}"
            raise


def _add_step(episode: AgentEpisode, attempt: _Attempt, answer: str, *, valid: bool) -> None:
    attempt.step = episode.add_step(attempt.action, answer, attempt.call_id, valid=valid, line=attempt.line)


def _is_error(result: Any) -> bool:
    return isinstance(result, ToolMessage) and result.status == "error"


@contextmanager
def _current_attempt(episode: AgentEpisode, tool: BaseTool, call_id: str | None) -> Iterator[_Attempt]:
    """The attempt that a tool node began, or a new one for other calls."""
    attempt = _attempt.get()
    is_begun = attempt is not None and (attempt.by_node or attempt.tool is tool) and not attempt.ran
    if attempt is not None and is_begun and call_id in (None, attempt.call_id):
        yield attempt
        return
    if attempt is None or attempt.tool is not tool or attempt.call_id != call_id:
        attempt = _Attempt(call_id)
        with set_var(_attempt, attempt), episode.call_order.running(call_id):
            yield attempt
        return
    retry = _Attempt(call_id, by_node=attempt.by_node, line=attempt.line)  # by a middleware, say
    try:
        with set_var(_attempt, retry), episode.call_order.running(call_id):
            yield retry
    finally:
        attempt.step, attempt.error = retry.step or attempt.step, retry.error


@contextmanager
def _node_recorder(episode: AgentEpisode, node: ToolNode, args: Args, kwargs: Kwargs) -> Iterator[Callable[[Any], Any]]:
    """Record a tool node's call if the node itself answers it with an error."""
    call, runtime = args[0], args[2]
    episode.call_order.refuse(_refused(node, runtime.state))
    attempt = _Attempt(call["id"], by_node=True)

    def record(result: Any) -> Any:
        tool = node.tools_by_name.get(call["name"])
        failed = _is_error(result) or attempt.error is not None
        if failed and attempt.step is None and not (tool and episode.runs_anyway(tool)):
            attempt.action = attempt.action or render_call(call["name"], call["args"])
            _add_step(episode, attempt, as_text(result), valid=False)
        return result

    with set_var(_attempt, attempt), episode.call_order.running(attempt.call_id):
        try:
            yield record
        except GraphBubbleUp:
            raise
        except Exception:
            if attempt.error is not None:  # the call ran, and perhaps acted
                record(attempt.error)
            raise


def _refused(node: ToolNode, state: Any) -> Iterator[str]:
    """Ids of the last reply's calls that human-in-the-loop middleware answered before any began."""
    key = node._messages_key
    messages = state if isinstance(state, list) else state.get(key) if isinstance(state, dict) else getattr(state, key, ())
    for message in reversed(messages or ()):
        if isinstance(message, AIMessage):
            return
        if isinstance(message, ToolMessage):
            yield message.tool_call_id


def as_text(result: Any) -> str:
    """A tool's result as the text that the policy reads, as LangChain writes it."""
    if isinstance(result, Command):
        messages = result.update.get("messages", ()) if isinstance(result.update, dict) else ()
        return next((as_text(message) for message in messages if isinstance(message, ToolMessage)), "")
    if isinstance(result, BaseMessage):
        text = msg_content_output(result.content)  # a tool node writes a list of texts as JSON
        return text if isinstance(text, str) else result.text
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except Exception:
        return str(result)
