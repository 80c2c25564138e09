"""The stateful APIs of one BFCL entry: as LangChain tools, as an `Environment`, and success by final state and answers."""

import copy
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NamedTuple

from langchain_core.tools import BaseTool, StructuredTool
from langgraph.prebuilt.tool_node import INVALID_TOOL_NAME_ERROR_TEMPLATE, ToolInvocationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, create_model
from typing_extensions import TypedDict

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.environment import Environment, refused
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.bfcl.data import (
    STATELESS_CLASSES,
    api,
    documents,
    ground_truth,
    response_checker,
    state_checker,
)
from dreamgym_lg.types import StepResult, Task

_ONE_CALL = threading.Lock()
"""Held during a call: the maths API sets the precision of the whole process, and parallel calls of one entry share state."""


class Answer(NamedTuple):
    """Answer of a tool."""

    text: str
    valid: bool
    """False if the text reports an error."""


class BFCLApis:
    """The APIs of `task` in the entry's initial state. Instances share nothing.

    The player calls `tools` (or `call` below them) and ends each user turn (`end_turn`).
    Raises `ConfigurationError` for a task that is not one of `load_tasks`.
    """

    def __init__(self, task: Task) -> None:
        missing = [key for key in ("entry_id", "involved_classes", "initial_config") if key not in task.metadata]
        if missing or task.origin == "synthetic":
            why = f"lacks metadata[{missing[0]!r}]" if missing else "is synthetic: its world exists in the dream only"
            raise ConfigurationError(f"task {task.id} {why}; take a task of load_tasks")
        self.task = task
        self.turn = 0
        """Number of user turns that have ended."""
        self.cut_short = False
        """True for a conversation that was given up: no success."""
        self.answers: list[str] = []
        """Every answer of a tool, in order."""
        self._apis = {name: _instance(task, name) for name in task.metadata["involved_classes"]}
        self._methods = {name: getattr(self._apis[owner], name) for name, owner in _owners(task).items()}

    @property
    def user_turns(self) -> Sequence[str]:
        """Messages of the user, turn by turn."""
        return list(self.task.metadata["user_turns"])

    @cached_property
    def tools(self) -> list[BaseTool]:
        """Every method of the APIs. A tool that the entry withholds until a later turn is unknown until then."""
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
        """True if every API's state is the ground truth's final one (BFCL's `state_checker`)."""
        return bool(state_checker(self._apis, self.reference._apis)["valid"])

    def success(self) -> bool:
        """True if the final state and the tools' answers match the ground truth (BFCL's checkers).

        11 of 200 entries only ask for information. Judged once, at the end; BFCL's leaderboard judges after every turn and is
        a little stricter.
        """
        if self.cut_short or not self.state_matches():
            return False
        return bool(response_checker(self.answers, self.reference.answers, self.turn)["valid"])

    def reward(self) -> float:
        """1.0 for success, else 0.0."""
        return float(self.success())


def check_call(task: Task, action: str, *, turn: int | None = None) -> str | None:
    """ToolNode's answer to a call that `task` never accepts (unknown tool, wrong arguments); None for any other action.

    It quotes the arguments in the action's order. Args: `turn`, user turns ended: tools withheld until later are refused.
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
    first = result[0] if isinstance(result, list) and result else result
    return "error" in first if isinstance(first, dict) else isinstance(first, str) and first.startswith("Error")


# --- Arguments ------------------------------------------------------------------------------------------------------

_STRICT = ConfigDict(extra="forbid", strict=True)
_LARGEST = {("MathAPI", "exponent"): 1000, ("MathAPI", "precision"): 1000}
"""Python computes with any number of digits: without a limit, one absurd argument would stop a run for hours."""


def _unchanged(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    check(value)
    return value


_Number = Annotated[float, WrapValidator(_unchanged)]
"""A float that leaves an integer an integer: BFCL compares answers as text, and 2 + 2 must not become 4.0."""

_dictionary: Any = TypedDict  # made from data, which no type checker follows; a nested model would not reach the API as a dict


def allowed_values(parameter: Mapping[str, Any]) -> tuple[str, ...]:
    """Allowed values, from BFCL's description (`[Enum]: ["on", "off"]`); () for any value of its type."""
    listed = re.search(r"\[Enum\]:\s*(\[[^]]*\]|[^.\[\]]+)", parameter.get("description", ""))
    return tuple(value for part in listed[1].strip("[] ").split(",") if (value := part.strip(" \"'"))) if listed else ()


def is_optional(parameter: Mapping[str, Any]) -> bool:
    """True if None is allowed: BFCL writes it as the default `"None"`."""
    return parameter.get("default") == "None"


@cache
def arguments_schema(class_name: str, name: str) -> type[BaseModel]:
    """The strict pydantic model of a method's arguments."""
    parameters = documents(class_name)[name]["parameters"]
    fields: dict[str, Any] = {}
    for key, parameter in parameters["properties"].items():
        kind = _type(key, parameter) | None if is_optional(parameter) else _type(key, parameter)
        default = ... if key in parameters["required"] else None if is_optional(parameter) else parameter["default"]
        limit = _LARGEST.get((class_name, key))
        fields[key] = (kind, Field(default, description=parameter["description"].strip(), le=limit))
    return create_model(name, __config__=_STRICT, **fields)


def _type(name: str, parameter: Mapping[str, Any]) -> Any:
    allowed = allowed_values(parameter)
    match parameter["type"]:
        case "string":
            return Literal[allowed] if allowed else str
        case "integer":
            return int
        case "float":
            return _Number
        case "boolean":
            return bool
        case "array":
            return list[_type(name, {"description": parameter["description"], **parameter["items"]})]  # type: ignore[misc]
        case "dict":
            fields = {key: _type(key, field) for key, field in parameter["properties"].items()}
            nested = _dictionary(name, fields, total=False)
            nested.__pydantic_config__ = _STRICT
            return nested
    raise NotImplementedError(f"BFCL gives {name} the unknown type {parameter['type']!r}")


# --- As an environment -----------------------------------------------------------------------------------------------

OVER = "The user has no further request."


class BFCLEnvironment(Environment):
    """Actions are those of `dreamgym_lg.actions`: `render_call` calls a tool, `render_answer` ends the user turn.

    What follows an answer is the user's next request; the last answer ends the episode, with reward 1 for success.
    A user turn of more than `max_calls` actions (the ground truth needs up to 34) truncates the episode.
    """

    def __init__(self, *, max_calls: int = 40) -> None:
        if max_calls < 1:
            raise ConfigurationError(f"max_calls={max_calls}; allowed: 1 or more")
        self.max_calls = max_calls
        self._apis: BFCLApis | None = None
        self._calls = 0

    def reset(self, task: Task) -> str:
        """Raises `ConfigurationError` for a task that is not one of `load_tasks`."""
        self._apis, self._calls = BFCLApis(task), 0
        return self._apis.user_turns[0]

    def step(self, action: str) -> StepResult:
        apis = self._playing()
        refusal = check_call(apis.task, action, turn=apis.turn)
        call = parse_action(action) if refusal is None else None
        if isinstance(call, str):
            return self._answered(apis)
        self._calls += 1
        truncated = self._calls > self.max_calls
        if truncated:
            self._apis = None
        if not isinstance(call, ToolCall):
            return refused(refusal or "")._replace(truncated=truncated)
        answer = apis.call(call.name, call.arguments)
        return StepResult(answer.text, 0.0, False, truncated, {"success": False, "valid": answer.valid})

    def _answered(self, apis: BFCLApis) -> StepResult:
        self._calls, request = 0, apis.end_turn()
        if request is not None:
            return StepResult(request, 0.0, False, False, {"success": False, "valid": True})
        self._apis = None
        return StepResult(OVER, apis.reward(), True, False, {"success": apis.success(), "valid": True})

    def _playing(self) -> BFCLApis:
        if self._apis is None:
            raise RuntimeError("no episode is under way: call reset first")
        return self._apis
