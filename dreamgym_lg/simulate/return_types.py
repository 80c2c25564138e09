"""What a tool returns: told to the world that answers in its place, and made of its answer."""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import UnionType
from typing import Any, NamedTuple, NotRequired, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel
from langgraph.types import Command
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from typing_extensions import TypedDict, is_typeddict

from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.simulate.commands import MESSAGES, StateUpdate, returns_command, state_update
from dreamgym_lg.simulate.object_graph import body, reachable, returned_type

UNKNOWN_UPDATE = (
    "its code does not show what its Command does: write Command(update={...}) there, with literal keys and one goto, name it "
    "in pass_through if it touches nothing else, or set the state in a node"
)


def parse_answer(tool: BaseTool, graph: object, given: Mapping[str, Any], call_id: str | None, answer: str) -> Any:
    """The answer in the shape in which the tool's body returns its own.

    Args: `given`, the arguments of the call; `graph`, whose state a `Command` writes.

    Raises `PredictionFailed` if the body promises a structure that the answer is not.
    """
    if returns_command(tool):
        if (update := state_update(tool)) is None:
            raise ConfigurationError(f"tool {tool.name!r} cannot be simulated: {UNKNOWN_UPDATE}")
        return _command(tool, update, _known(graph).state, given, call_id, answer)
    structure = _structure(tool, {})
    value = answer if structure is None else _read(tool, structure, answer)
    return (value, None) if tool.response_format == "content_and_artifact" else value


def with_returns(graph: object, tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools (in OpenAI's form) with the JSON schema of what they return, where the graph's own say a structure."""
    schemas, found = _known(graph).schemas, []
    for each in tools:
        function = each["function"]
        found.append(
            {**each, "function": {**function, "returns": schemas[name]}} if (name := function["name"]) in schemas else each
        )
    return found


def _read(tool: BaseTool, structure: TypeAdapter[Any], answer: str) -> Any:
    try:
        return structure.validate_json(answer)
    except ValidationError as error:
        kind = returned_type(tool) or f"JSON of {structure.json_schema()}"
        raise PredictionFailed(
            f"tool {tool.name!r} returns {kind}; its dreamed answer {answer[:120]!r} is none: {error.errors()[0]['msg']}"
        ) from error


def _command(
    tool: BaseTool, update: StateUpdate, state: Mapping[str, Any], given: Mapping[str, Any], call_id: str | None, answer: str
) -> Command:
    """The tool's `Command`, with what the world says of the state. An answer without state is the message alone."""
    values = update.values(inspect.unwrap(body(tool)), given)
    if structure := _structure(tool, state):
        needed = any(update.asked.values())
        said = _read(tool, structure, answer) if needed or answer.lstrip().startswith("{") else {}
        answer = said.pop(MESSAGES, answer)
        values |= said
    if update.answers:
        values[MESSAGES] = [ToolMessage(answer, tool_call_id=call_id or "", name=tool.name)]
    return Command(update=values, goto=update.goto, graph=update.graph)


# --- types --------------------------------------------------------------------------------------------------------------------


def _structure(tool: BaseTool, state: Mapping[str, Any]) -> TypeAdapter[Any] | None:
    """The structure that the world answers with; None for text, and for what has no JSON, as a data frame."""
    kind = returned_type(tool)
    if returns_command(tool):
        kind = _state(update, state) if (update := state_update(tool)) is not None and update.asked else None
    return None if kind is None else _adapter(kind)


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(_readable(kind))
    except Exception:  # of pydantic's or of the user's: a name that exists for type checkers only, say
        return None


def _state(update: StateUpdate, types: Mapping[str, Any]) -> Any:
    """Of a `Command`: the state that it writes, and the message, without which the whole answer is the message."""
    kinds = {key: _readable(kind) if _adapter(kind := types.get(key, Any)) is not None else Any for key in update.asked}
    fields = {key: kinds[key] if always else NotRequired[kinds[key]] for key, always in update.asked.items()}
    return TypedDict("State", {**({MESSAGES: NotRequired[str]} if update.answers else {}), **fields})  # type: ignore[operator]


def _readable(kind: Any) -> Any:
    """The type with each `typing.TypedDict` in it as one of `typing_extensions`: before Python 3.12 pydantic reads no other."""
    if is_typeddict(kind) and type(kind).__module__ == "typing":
        fields = {name: _readable(hint) for name, hint in get_type_hints(kind).items()}
        optional = {name: NotRequired[hint] for name, hint in fields.items() if name in kind.__optional_keys__}
        return TypedDict(kind.__name__, fields | optional)  # type: ignore[operator]
    parts, origin = tuple(_readable(part) for part in get_args(kind)), get_origin(kind)
    if parts == get_args(kind) or origin is None:
        return kind
    return Union[parts] if origin in (Union, UnionType) else origin[parts]  # noqa: UP007  # made here, not written


class _Known(NamedTuple):
    """What is known of a graph's tools."""

    state: Mapping[str, Any]
    """The type of each key of its state, sub-graphs included."""
    schemas: Mapping[str, dict[str, Any]]
    """The JSON schemas of what its tools return, by name, of those that return a structure."""


def _known(graph: Any) -> _Known:
    with suppress(TypeError):  # an object of the user's that is not hashed
        if graph in _graphs:
            return _graphs[graph]
    found = list(reachable(graph))
    graphs = [each for each in found if isinstance(each, Pregel)]
    channels = [channel for each in graphs for channel in each.channels.items()]
    known = _Known({key: getattr(channel, "UpdateType", Any) for key, channel in channels}, schemas := {})
    for tool in found:
        if isinstance(tool, BaseTool) and (structure := _structure(tool, known.state)) is not None:
            with suppress(PydanticInvalidForJsonSchema):
                schemas[tool.name] = structure.json_schema()
    with suppress(TypeError):  # not weakly referable
        _graphs[graph] = known
    return known


_graphs: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
"""Finding a graph's tools takes milliseconds."""
