"""Turns the world's answer into what a tool returns; tells the world its structure."""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import UnionType
from typing import Any, NamedTuple, NotRequired, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel
from langgraph.types import Command
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from typing_extensions import TypedDict, is_typeddict

from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.simulate.object_graph import body, reachable
from dreamgym_lg.simulate.tool_code import MESSAGES, StateUpdate, returns, returns_command, state_update

UNKNOWN_UPDATE = (
    "its code does not show what its Command does: write Command(update={...}) there, with literal keys and one goto, name it "
    "in pass_through if it touches nothing else, or set the state in a node"
)


def parse_answer(tool: BaseTool, graph: object, arguments: Mapping[str, Any], call_id: str | None, answer: str) -> Any:
    """The answer in the shape in which the tool's body returns its own.

    Args: `arguments`, of the call; `graph`, whose state a `Command` writes.

    Raises `PredictionFailed` if the body promises a structure that the answer is not.
    """
    if returns_command(tool):
        if (update := state_update(tool)) is None:
            raise ConfigurationError(f"tool {tool.name!r} cannot be simulated: {UNKNOWN_UPDATE}")
        return _command(tool, update, _known(graph).state, arguments, call_id, answer)
    structure = _structure(tool, {})
    value = answer if structure is None else _validate(tool, structure, answer)
    return (value, None) if tool.response_format == "content_and_artifact" else value


def with_returns(graph: object, tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools (in OpenAI's form) with the JSON schemas of the structures that they return."""
    schemas = _known(graph).schemas
    with_schema = []
    for tool in tools:
        function = tool["function"]
        added = {"returns": schemas[function["name"]]} if function["name"] in schemas else {}
        with_schema.append({**tool, "function": {**function, **added}})
    return with_schema


def _validate(tool: BaseTool, structure: TypeAdapter[Any], answer: str) -> Any:
    try:
        return structure.validate_json(answer)
    except ValidationError as error:
        kind = _returned_type(tool) or f"JSON of {structure.json_schema()}"
        raise PredictionFailed(
            f"tool {tool.name!r} returns {kind}; its dreamed answer {answer[:120]!r} is none: {error.errors()[0]['msg']}"
        ) from error


def _command(
    tool: BaseTool,
    update: StateUpdate,
    state: Mapping[str, Any],
    arguments: Mapping[str, Any],
    call_id: str | None,
    answer: str,
) -> Command:
    """The tool's `Command`, with the world's answer for the state. An answer without state is the message alone."""
    values = update.values(inspect.unwrap(body(tool)), arguments)
    if structure := _structure(tool, state):
        is_needed = any(update.answered.values())
        answered = _validate(tool, structure, answer) if is_needed or answer.lstrip().startswith("{") else {}
        answer = answered.pop(MESSAGES, answer)
        values |= answered
    if update.has_message:
        values[MESSAGES] = [ToolMessage(answer, tool_call_id=call_id or "", name=tool.name)]
    return Command(update=values, goto=update.goto, graph=update.graph)


# --- types --------------------------------------------------------------------------------------------------------------------

_TEXT = (str, Any, None, type(None), inspect.Signature.empty)


def _structure(tool: BaseTool, state: Mapping[str, Any]) -> TypeAdapter[Any] | None:
    """The structure of the world's answer; None for text and for what has no JSON."""
    kind = _returned_type(tool)
    if returns_command(tool):
        kind = _state_type(update, state) if (update := state_update(tool)) is not None and update.answered else None
    return None if kind is None else _adapter(kind)


def _returned_type(tool: BaseTool) -> Any:
    """The structure that a tool promises; None for text, unknown, or LangGraph's own."""
    kind = returns(tool)
    if kind in _TEXT or tool.response_format == "content_and_artifact":
        return None
    for part in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        part = get_origin(part) or part
        if part is str or (isinstance(part, type) and issubclass(part, Command | BaseMessage | BaseException)):
            return None
    return kind


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(_readable(kind))
    except Exception:  # of pydantic's or of the user's: a name that exists for type checkers only, say
        return None


def _state_type(update: StateUpdate, types: Mapping[str, Any]) -> Any:
    """The type of the state that a `Command` writes, and its message."""
    kinds = {key: types.get(key, Any) for key in update.answered}
    kinds = {key: _readable(kind) if _adapter(kind) is not None else Any for key, kind in kinds.items()}
    fields = {key: kinds[key] if in_all else NotRequired[kinds[key]] for key, in_all in update.answered.items()}
    return TypedDict("State", {**({MESSAGES: NotRequired[str]} if update.has_message else {}), **fields})  # type: ignore[operator]


def _readable(kind: Any) -> Any:
    """The type with each `TypedDict` as of `typing_extensions`: before Python 3.12 pydantic needs it."""
    if is_typeddict(kind) and type(kind).__module__ == "typing":
        fields = {name: _readable(hint) for name, hint in get_type_hints(kind).items()}
        optional = {name: NotRequired[hint] for name, hint in fields.items() if name in kind.__optional_keys__}
        return TypedDict(kind.__name__, fields | optional)  # type: ignore[operator]
    parts, origin = tuple(_readable(part) for part in get_args(kind)), get_origin(kind)
    if parts == get_args(kind) or origin is None:
        return kind
    return Union[parts] if origin in (Union, UnionType) else origin[parts]  # noqa: UP007  # made here, not written


class _Known(NamedTuple):
    """The state of a graph and the answers of its tools, by type."""

    state: Mapping[str, Any]
    """The type of each key of its state, sub-graphs included."""
    schemas: Mapping[str, dict[str, Any]]
    """The JSON schemas of what its tools return, by name, of those that return a structure."""


_graphs: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
"""Finding a graph's tools takes milliseconds."""


def _known(graph: Any) -> _Known:
    with suppress(TypeError):  # an object of the user's that is not hashed
        if graph in _graphs:
            return _graphs[graph]
    parts = list(reachable(graph))
    channels = [channel for part in parts if isinstance(part, Pregel) for channel in part.channels.items()]
    known = _Known({key: getattr(channel, "UpdateType", Any) for key, channel in channels}, schemas := {})
    for part in parts:
        if isinstance(part, BaseTool) and (structure := _structure(part, known.state)) is not None:
            with suppress(PydanticInvalidForJsonSchema):
                schemas[part.name] = structure.json_schema()
    with suppress(TypeError):  # not weakly referable
        _graphs[graph] = known
    return known
