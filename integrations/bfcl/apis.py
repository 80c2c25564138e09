"""The stateful APIs of one BFCL entry, their methods as LangChain tools, and whether the user got what was asked."""

import copy
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from langchain_core.tools import BaseTool, StructuredTool
from langgraph.prebuilt.tool_node import INVALID_TOOL_NAME_ERROR_TEMPLATE, ToolInvocationError
from pydantic import ValidationError

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.bfcl.data import (
    STATELESS_CLASSES,
    api,
    documents,
    ground_truth,
    response_checker,
    state_checker,
)
from dreamgym_lg.integrations.bfcl.schema import arguments_schema
from dreamgym_lg.types import Task

_ONE_CALL = threading.Lock()
"""Held during a call: the maths API sets the precision of the whole process, and parallel calls of one entry share state."""


class Answer(NamedTuple):
    """What a tool answered."""

    text: str
    valid: bool
    """False if the text reports an error."""


class BFCLApis:
    """The APIs of `task`, as the entry says they begin. Instances share nothing; calls of several threads do not mix.

    Whoever plays it calls tools (`tools`, or `call` below them) and says when a user turn ends (`end_turn`).
    Raises `ConfigurationError` for a task that is not one of `load_tasks`.
    """

    def __init__(self, task: Task) -> None:
        missing = [key for key in ("entry_id", "involved_classes", "initial_config") if key not in task.metadata]
        if missing or task.origin == "synthetic":
            why = f"lacks metadata[{missing[0]!r}]" if missing else "is synthetic: its world exists in the dream only"
            raise ConfigurationError(f"task {task.id} {why}; take a task of load_tasks")
        self.task = task
        self.turn = 0
        """How many user turns have ended."""
        self.cut_short = False
        """Set by whoever gives up on the conversation: it then cannot have succeeded."""
        self.answers: list[str] = []
        """Every answer of a tool, in order."""
        self._apis = {name: _instance(task, name) for name in task.metadata["involved_classes"]}
        self._methods = {name: getattr(self._apis[owner], name) for name, owner in _owners(task).items()}

    @property
    def user_turns(self) -> Sequence[str]:
        """What the user says, turn by turn."""
        return list(self.task.metadata["user_turns"])

    @cached_property
    def tools(self) -> list[BaseTool]:
        """Every method of the APIs. A tool that the entry withholds until a later turn answers until then as one that
        does not exist; what else a wrong call is answered is LangChain's matter and stands in `check_call`."""
        return [self._tool(name, owner) for name, owner in _owners(self.task).items()]

    def _tool(self, name: str, owner: str) -> BaseTool:
        def call(**arguments: Any) -> str:
            return self.call(name, arguments).text

        async def acall(**arguments: Any) -> str:  # on the loop: parallel calls stay in the model's order, and it is quicker
            return call(**arguments)

        schema, description = arguments_schema(owner, name), documents(owner)[name]["description"]
        return StructuredTool(name=name, description=description, args_schema=schema, func=call, coroutine=acall)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """Call a tool, its arguments unchecked. Text and errors are those of BFCL's own execution."""
        if name not in self._methods:
            raise ConfigurationError.unknown("tool", name, self._methods)
        if self.turn < self.task.metadata["withheld"].get(name, 0):
            return Answer(_unknown(name, self.task, self.turn), False)
        method = self._methods[name]
        with _ONE_CALL:
            answer = _execute(method, arguments if inspect.signature(method).parameters else {})  # as LangChain does
            self.answers.append(answer.text)
        return answer

    def end_turn(self) -> str | None:
        """The agent has answered the user: what the user says next, None if that was the last turn."""
        self.turn += 1
        return self.user_turns[self.turn] if self.turn < len(self.user_turns) else None

    @cached_property
    def reference(self) -> "BFCLApis":
        """The APIs after the ground truth."""
        apis = BFCLApis(self.task)
        for calls in ground_truth(self.task):
            for call in calls:
                apis.call(call.name, call.arguments)
            apis.end_turn()
        return apis

    def state_matches(self) -> bool:
        """Whether every API now is in the state in which the ground truth leaves it (BFCL's `state_checker`)."""
        return bool(state_checker(self._apis, self.reference._apis)["valid"])

    def success(self) -> bool:
        """Whether the state matches and every answer that the ground truth gets was got (BFCL's `response_checker`).

        The answers count because 11 of 200 entries only ask for information: to do nothing would solve them. It is judged
        once, at the end; BFCL's leaderboard judges after every turn, so success here is a little more common.
        """
        if self.cut_short or not self.state_matches():
            return False
        return bool(response_checker(self.answers, self.reference.answers, self.turn)["valid"])

    def reward(self) -> float:
        """1.0 for success, else 0.0."""
        return float(self.success())


def check_call(task: Task, action: str, *, turn: int | None = None) -> str | None:
    """What production answers to an action that `task` never accepts; None for a call to be played or an answer.

    It is ToolNode's text for an unknown tool and for arguments that are missing, unknown, of a wrong type or not among
    the allowed values; it quotes the arguments in the action's order, which `render_call` makes alphabetical.
    Args: `turn`, how many user turns have ended; with it, tools withheld until later are refused.
    """
    try:
        call = parse_action(action)
    except ValueError:
        return "Error: this is neither a tool call nor an answer."
    if not isinstance(call, ToolCall):
        return None
    owner = _owners(task).get(call.name)
    if owner is None:
        return _unknown(call.name, task)
    schema, arguments = arguments_schema(owner, call.name), dict(call.arguments)
    if schema.model_fields:  # LangChain ignores whatever is passed to a tool without parameters
        try:
            schema.model_validate(arguments)
        except ValidationError as error:
            return ToolInvocationError(call.name, error, arguments, error.errors()).message
    if turn is not None and turn < task.metadata["withheld"].get(call.name, 0):
        return _unknown(call.name, task, turn)
    return None


def _owners(task: Task) -> dict[str, str]:
    """Tool -> the class it belongs to; no two classes of an entry share a name."""
    return {name: owner for owner in task.metadata["involved_classes"] for name in documents(owner)}


def _unknown(name: str, task: Task, turn: int | None = None) -> str:
    withheld = task.metadata["withheld"]
    known = [tool for tool in _owners(task) if turn is None or turn >= withheld.get(tool, 0)]
    return INVALID_TOOL_NAME_ERROR_TEMPLATE.format(requested_tool=name, available_tools=", ".join(known))


def _instance(task: Task, class_name: str) -> Any:
    instance = api(class_name)()
    if class_name not in STATELESS_CLASSES:
        scenario = copy.deepcopy(task.metadata["initial_config"].get(class_name, {}))
        instance._load_scenario(scenario, long_context="long_context" in task.metadata["entry_id"])
    return instance


def _execute(method: Callable[..., Any], arguments: Mapping[str, Any]) -> Answer:
    """BFCL's own rendering of a result, without its `eval`."""
    try:
        bound = inspect.signature(method).bind(**arguments)
        bound.apply_defaults()
        # copies: the methods keep what they are given in their state, their own mutable defaults included, which would
        # carry the mentions of one episode's post into the next episode's
        result = method(**copy.deepcopy(bound.arguments))
        return Answer(_render(result), not _is_error(result))
    except Exception as error:
        return Answer(f"Error during execution: {error}", False)


def _render(result: Any) -> str:
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):  # BFCL: some functions return what JSON cannot hold
            pass
    return str(result)


def _is_error(result: Any) -> bool:
    found = result[0] if isinstance(result, list) and result else result
    return "error" in found if isinstance(found, dict) else isinstance(found, str) and found.startswith("Error")
