"""Converts the environment's answers to the return types of tools, and describes these by schemas.

Of a tool that returns a `Command`, the code is analysed: which state keys the environment answers, which the arguments give.
"""

import ast
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, Union, get_args, get_origin, get_type_hints
from uuid import UUID
from weakref import WeakKeyDictionary

from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.constants import END
from langgraph.prebuilt.tool_node import msg_content_output
from langgraph.pregel import Pregel
from langgraph.types import Command
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from typing_extensions import TypedDict, is_typeddict

from dreamgym_lg.dream.schemas import STATE_UPDATE
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.simulate.object_graph import body, code_names, reachable

UNKNOWN_UPDATE = (
    "its code does not show what its Command does: write Command(update={...}) there, with literal keys and one goto, and "
    "literal texts where it returns one instead, name it in pass_through if it touches nothing else, or set the state in a node"
)


def parse_answer(
    tool: BaseTool,
    graph: object,
    arguments: Mapping[str, Any],
    call_id: str | None,
    answer: str,
    exact: bool = False,
    valid: bool = True,
) -> Any:
    """Convert the environment's answer to the tool's return value, or to its `ToolMessage`.

    Args: `graph`, whose state a `Command` writes; `call_id`, None for a call by the agent's code; `exact`, the answer is
    recorded or an error, so that the policy must read it byte for byte; `valid`, False for an error, which gets that status.
    Raises `PredictionFailed` for an answer of another structure than the annotated one.
    """
    update = state_update(tool) if (is_command := returns_command(tool)) else None
    if is_command and update is None:
        raise ConfigurationError(f"tool {tool.name!r} cannot be simulated: {UNKNOWN_UPDATE}")
    if call_id is not None and not valid:
        error = ToolMessage(answer, tool_call_id=call_id, name=tool.name, status="error")
        return (error, None) if tool.response_format == "content_and_artifact" else error
    if update is not None and not update.is_text(answer):
        return _command(tool, update, _types_of(graph).state, arguments, call_id, answer)
    structure = _structure(tool, {}) if update is None else None
    if structure is None:
        answer = _unquote(answer) if call_id is None else answer
        return (answer, None) if tool.response_format == "content_and_artifact" else answer
    try:
        value = _validate(tool, structure, answer)
    except PredictionFailed:
        if call_id is None or not (exact or not _is_json(_returned_type(tool))):
            raise
    else:
        if call_id is None or not exact or msg_content_output(value) == answer:
            return value
    return ToolMessage(answer, tool_call_id=call_id, name=tool.name)


def _unquote(answer: str) -> str:
    """The text in an answer that is a JSON string; any other answer unchanged."""
    with suppress(ValueError):
        return value if isinstance(value := json.loads(answer), str) else answer
    return answer


def with_returns(graph: object, tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `returns`, the JSON schema of the return type, to tools in OpenAI's form."""
    returns = {name: {"returns": schema} for name, schema in _types_of(graph).schemas.items()}
    return [{**tool, "function": {**tool["function"], **returns.get(tool["function"]["name"], {})}} for tool in tools]


def _validate(tool: BaseTool, structure: TypeAdapter[Any], answer: str) -> Any:
    with suppress(ValidationError):  # plain text: a date, a literal, a decimal number with trailing zeros
        return structure.validate_strings(answer)
    try:
        return structure.validate_json(answer)
    except ValidationError as error:
        kind = _returned_type(tool) or f"JSON of {structure.json_schema()}"
        raise PredictionFailed(
            f"tool {tool.name!r} returns {kind}; its dreamed answer {answer[:120]!r} is none: {error.errors()[0]['msg']}"
        ) from error


# --- types --------------------------------------------------------------------------------------------------------------------

_TEXT = (str, Any, None, type(None), inspect.Signature.empty)


def _returns(tool: BaseTool) -> Any:
    """The annotated return type of a tool, `Command` for `Command[...]`; None if unknown."""
    try:
        kind = get_type_hints(inspect.unwrap(body(tool))).get("return")
    except Exception:  # a name that exists for type checkers only
        return None
    return Command if get_origin(kind) is Command else kind


def _structure(tool: BaseTool, state: Mapping[str, Any]) -> TypeAdapter[Any] | None:
    """The type to which the answer is converted; None for text and types without JSON."""
    kind = _returned_type(tool)
    if returns_command(tool):
        kind = _state_type(update, state) if (update := state_update(tool)) is not None and update.answered else None
    return None if kind is None else _adapter(kind)


def _returned_type(tool: BaseTool) -> Any:
    """The annotated return type; None for text, for LangGraph's types and if unknown."""
    kind = _returns(tool)
    custom = (tool.metadata or {}).get("type") == "custom_tool"  # OpenAI's: traces hold the text in the block that it returns
    if custom or kind in _TEXT or tool.response_format == "content_and_artifact":
        return None
    for part in get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,):
        part = get_origin(part) or part
        if part is str or (isinstance(part, type) and issubclass(part, Command | BaseMessage | BaseException)):
            return None
    return kind


def _is_json(kind: Any) -> bool:
    """True if a tool node writes the type as JSON. It writes an Enum, model, dataclass or set by `str`."""
    if is_typeddict(kind):
        return all(map(_is_json, get_type_hints(kind).values()))
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return True
    if origin in (Union, UnionType, list, dict, tuple, Sequence, Mapping, Annotated, Required, NotRequired):
        return all(_is_json(part) for part in (parts[:1] if origin is Annotated else parts) if part is not Ellipsis)
    return origin in (str, int, float, bool, None, type(None), Any, date, datetime, time, UUID, Decimal)


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    try:
        return TypeAdapter(_readable(kind))
    except Exception:  # of pydantic or the user, such as a name for type checkers only
        return None


def _readable(kind: Any) -> Any:
    """The type with each `TypedDict` replaced by one of `typing_extensions`, for pydantic before Python 3.12."""
    if is_typeddict(kind) and type(kind).__module__ == "typing":
        fields = {name: _readable(hint) for name, hint in get_type_hints(kind).items()}
        optional = {name: NotRequired[hint] for name, hint in fields.items() if name in kind.__optional_keys__}
        return TypedDict(kind.__name__, fields | optional)  # type: ignore[operator]
    parts, origin = tuple(_readable(part) for part in get_args(kind)), get_origin(kind)
    if parts == get_args(kind) or origin is None:
        return kind
    return Union[parts] if origin in (Union, UnionType) else origin[parts]  # noqa: UP007  # made here, not written


class _GraphTypes(NamedTuple):
    """Types of a graph's state and of its tools' return values."""

    state: Mapping[str, Any]
    """State key -> type, sub-graphs included."""
    schemas: Mapping[str, dict[str, Any]]
    """Tool name -> JSON schema of what it returns."""


_graphs: WeakKeyDictionary[Any, _GraphTypes] = WeakKeyDictionary()
"""Cache of `_types_of`, which takes milliseconds."""


def _types_of(graph: Any) -> _GraphTypes:
    with suppress(TypeError):  # an unhashable object of the user's
        if graph in _graphs:
            return _graphs[graph]
    parts = list(reachable(graph))
    channels = [channel for part in parts if isinstance(part, Pregel) for channel in part.channels.items()]
    graph_types = _GraphTypes({key: getattr(channel, "UpdateType", Any) for key, channel in channels}, schemas := {})
    for part in parts:
        if isinstance(part, BaseTool) and (structure := _structure(part, graph_types.state)) is not None:
            with suppress(PydanticInvalidForJsonSchema):
                schema = structure.json_schema()
                update = state_update(part) if returns_command(part) else None
                if update.texts if update else not _is_json(_returned_type(part)):  # a tool node writes it as text
                    defined = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
                    schema = {"anyOf": [schema, {"type": "string"}], **defined}
                schemas[part.name] = schema
    with suppress(TypeError):  # it allows no weak references
        _graphs[graph] = graph_types
    return graph_types


# --- Commands -----------------------------------------------------------------------------------------------------------------

MESSAGES = "messages"


class StateUpdate(NamedTuple):
    """The effect of a tool's `Command` on the graph that calls it."""

    answered: Mapping[str, bool]
    """Keys whose values the environment answers -> True if all Commands of the tool write it."""
    computed: Mapping[str, types.CodeType]
    """Keys whose values the call's arguments determine -> expression, compiled."""
    has_message: bool
    """True if it writes a message, which is the tool's answer."""
    goto: str | tuple[()]
    graph: str | None
    texts: tuple[re.Pattern[str], ...]
    """Answers that the tool returns without a Command."""

    def is_text(self, answer: str) -> bool:
        return any(text.fullmatch(answer) for text in self.texts)

    def values(self, function: types.FunctionType, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the `computed` keys for one call. Args: `arguments`, by name."""
        parameters = inspect.signature(function).parameters.values()
        names = {each.name: each.default for each in parameters if each.default is not each.empty} | dict(arguments)
        return {key: eval(code, {"__builtins__": {}}, names) for key, code in self.computed.items()}


def _command(
    tool: BaseTool,
    update: StateUpdate,
    state: Mapping[str, Any],
    arguments: Mapping[str, Any],
    call_id: str | None,
    answer: str,
) -> Command:
    """The tool's `Command` with the environment's answer. An answer that is no object becomes the message alone."""
    values = update.values(_function(tool), arguments)
    if structure := _structure(tool, state):
        is_needed = any(update.answered.values())
        answered = _validate(tool, structure, answer) if is_needed or answer.lstrip().startswith("{") else {}
        answer = answered.pop(MESSAGES, answer)
        values |= answered
    if update.has_message:
        values[MESSAGES] = [ToolMessage(answer, tool_call_id=call_id or "", name=tool.name)]
    return Command(update=values, goto=update.goto, graph=update.graph)


def _state_type(update: StateUpdate, types: Mapping[str, Any]) -> Any:
    """The type of the environment's answer for a `Command`: the answered keys, and its message."""
    kinds = {key: types.get(key, Any) for key in update.answered}
    kinds = {key: _readable(kind) if _adapter(kind) is not None else Any for key, kind in kinds.items()}
    fields = {key: kinds[key] if in_all else NotRequired[kinds[key]] for key, in_all in update.answered.items()}
    return TypedDict(STATE_UPDATE, {**({MESSAGES: NotRequired[str]} if update.has_message else {}), **fields})  # type: ignore[operator]


def returns_command(tool: BaseTool) -> bool:
    """True if a tool returns a `Command`, or its code names that class."""
    kinds = [kind := _returns(tool), *get_args(kind)]
    if any(kind is Command or get_origin(kind) is Command for kind in kinds):
        return True
    function = _function(tool)
    return isinstance(function, types.FunctionType) and "Command" in code_names(function) | {*function.__code__.co_freevars}


def _function(tool: BaseTool) -> Any:
    """The function that a tool calls, without decorators and binding."""
    function = inspect.unwrap(body(tool))
    return function.__func__ if isinstance(function, types.MethodType) else function


def state_update(tool: BaseTool) -> StateUpdate | None:
    """The effect of a tool's Commands; None if its code does not show it."""
    function = _function(tool)
    return _analyse(function) if isinstance(function, types.FunctionType) else None


@lru_cache(500)
def _analyse(function: types.FunctionType) -> StateUpdate | None:
    try:
        tree = _parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # entered in an interpreter
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "Command"]
    commands = [command for call in calls if (command := _read_command(call)) is not None]
    targets, texts = {command[1:] for command in commands}, _returned_texts(tree)
    if len(targets) != 1 or len(commands) < len(calls) or _makes_list_of_commands(tree) or None in texts:
        return None
    updates, (goto, graph) = [command[0] for command in commands], commands[0][1:]
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    unchanged = set(inspect.signature(function).parameters) - assigned
    answered, computed = dict[str, bool](), dict[str, types.CodeType]()
    for key in dict.fromkeys(key for update in updates for key in update if key != MESSAGES):
        values = [update[key] for update in updates if key in update]
        in_all = len(values) == len(updates)
        if in_all and len(set(map(ast.dump, values))) == 1 and _is_computable(values[0], unchanged):
            computed[key] = compile(ast.Expression(values[0]), f"<{key} of {function.__name__}>", "eval")
        else:
            answered[key] = in_all
    has_message = any(MESSAGES in update for update in updates)
    return StateUpdate(answered, computed, has_message, goto, graph, tuple(filter(None, texts)))


def _returned_texts(tree: ast.Module) -> list[re.Pattern[str] | None]:
    """The texts that a function returns in place of a Command; None for unclear ones."""
    assigning = (node for node in ast.walk(tree) if _is_command(getattr(node, "value", None)))
    parts = (part for node in assigning for part in ast.walk(node) if isinstance(part, ast.Name))
    names = {part.id for part in parts if isinstance(part.ctx, ast.Store)}
    pending, texts = list[ast.AST](getattr(tree.body[0], "body", ())), list[re.Pattern[str] | None]()
    for node in pending:  # grows meanwhile
        if isinstance(node, ast.Return):
            texts += [_pattern(value) for value in _branches(node.value) if not (_is_command(value) or _name(value) in names)]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
    return texts


def _is_command(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and _name(value.func) == "Command"


def _branches(value: ast.expr | None) -> list[ast.expr]:
    """The values of a conditional expression; any other value alone."""
    if isinstance(value, ast.IfExp):
        return [*_branches(value.body), *_branches(value.orelse)]
    return [value or ast.Constant(None)]


def _pattern(value: ast.expr) -> re.Pattern[str] | None:
    """The texts that a string in code may be. None without a word of its own."""
    parts = value.values if isinstance(value, ast.JoinedStr) else [value]
    literals = [each.value if isinstance(each, ast.Constant) else None for each in parts]
    if not any(isinstance(each, str) and each.strip() for each in literals):
        return None
    return re.compile("".join(".*" if each is None else re.escape(str(each)) for each in literals), re.DOTALL)


def _makes_list_of_commands(tree: ast.Module) -> bool:
    """True if code makes Commands in a list. A tool node expects the message beside them."""
    lists = (node for node in ast.walk(tree) if isinstance(node, ast.List | ast.ListComp))
    parts = (part for each in lists for part in ast.walk(each))
    return any(isinstance(part, ast.Call) and _name(part.func) == "Command" for part in parts)


def _parse(source: str) -> ast.Module:
    """`ast.parse`, repeated if another thread disturbed it, which happens before Python 3.12."""
    for _ in range(20):  # "AST constructor recursion depth mismatch", https://github.com/python/cpython/issues/106905
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def _read_command(call: ast.Call) -> tuple[dict[str, ast.expr], str | tuple[()], str | None] | None:
    """Update, goto and graph of a `Command(...)` in code; None if not literal."""
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    update = arguments.pop("update", ast.Dict([], []))
    goto, graph = arguments.pop("goto", None), arguments.pop("graph", None)
    if arguments or call.args or not isinstance(update, ast.Dict) or (graph is not None and _name(graph) != "PARENT"):
        return None
    keys = [key.value for key in update.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    target: Any = ()
    if goto is not None:
        target = goto.value if isinstance(goto, ast.Constant) else END if _name(goto) == "END" else None
    if len(keys) < len(update.keys) or not isinstance(target, str | tuple):
        return None
    return dict(zip(keys, update.values, strict=True)), target, Command.PARENT if graph is not None else None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


_CONSTRUCTIONS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.Load)


def _is_computable(value: ast.expr, unchanged: set[str]) -> bool:
    """True if an expression consists of constants and `unchanged` arguments, which the code never assigns."""
    return all(
        isinstance(node, _CONSTRUCTIONS) or (isinstance(node, ast.Name) and node.id in unchanged) for node in ast.walk(value)
    )
