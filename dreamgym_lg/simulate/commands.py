"""Tools that return a `Command`: what of the graph's state they write, read off their code and never run."""

import ast
import inspect
import textwrap
import types
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, get_args, get_origin

from langchain_core.tools import BaseTool
from langgraph.constants import END
from langgraph.types import Command

from dreamgym_lg.simulate.object_graph import body, codes, returns

MESSAGES = "messages"


class StateUpdate(NamedTuple):
    """What a tool's `Command` does to the graph that calls it."""

    asked: Mapping[str, bool]
    """The keys whose values the world is asked for, and whether each of the tool's Commands writes them."""
    computed: Mapping[str, types.CodeType]
    """The keys whose values follow from the call's arguments alone."""
    answers: bool
    """It writes a message, the tool's answer."""
    goto: str | tuple[()]
    graph: str | None

    def values(self, function: types.FunctionType, given: Mapping[str, Any]) -> dict[str, Any]:
        """The computed values of one call. Args: `given`, its arguments by name."""
        parameters = inspect.signature(function).parameters.values()
        known = {each.name: each.default for each in parameters if each.default is not each.empty} | dict(given)
        return {key: eval(code, {"__builtins__": {}}, known) for key, code in self.computed.items()}


def returns_command(tool: BaseTool) -> bool:
    """Whether a tool returns, or makes, a `Command`."""
    kinds = [returns(tool), *get_args(returns(tool))]
    if any(kind is Command or get_origin(kind) is Command for kind in kinds):
        return True
    function = _function(tool)
    return function is not None and any(
        "Command" in (*code.co_names, *code.co_freevars, *code.co_varnames) for code in codes(function)
    )


def state_update(tool: BaseTool) -> StateUpdate | None:
    """What the Commands of a tool do; None if its code does not show it: an update that is no dict of literal keys, say."""
    function = _function(tool)
    return None if function is None else _read(function)


def _function(tool: BaseTool) -> types.FunctionType | None:
    function = inspect.unwrap(body(tool))
    return function if isinstance(function, types.FunctionType) else None


@lru_cache(500)
def _read(function: types.FunctionType) -> StateUpdate | None:
    try:
        tree = _parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # no file: typed into an interpreter
        return None
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "Command"]
    commands = [_command(call) for call in made]
    known = [each for each in commands if each is not None]
    if not known or len(known) < len(commands) or len({(each.goto, each.graph) for each in known}) > 1:
        return None
    fixed = _fixed_names(function, tree)
    asked, computed = dict[str, bool](), dict[str, types.CodeType]()
    for key in dict.fromkeys(key for each in known for key in each.update if key != MESSAGES):
        values = [each.update[key] for each in known if key in each.update]
        if len(values) == len(known) and len(set(map(ast.dump, values))) == 1 and _follows(values[0], fixed):
            computed[key] = compile(ast.Expression(values[0]), f"<{key} of {function.__name__}>", "eval")
        else:
            asked[key] = len(values) == len(known)
    answers = any(MESSAGES in each.update for each in known)
    return StateUpdate(asked, computed, answers, known[0].goto, known[0].graph)


def _parse(source: str) -> ast.Module:
    """`ast.parse`, again where another thread disturbed it: before Python 3.12 threads share its count of the depth."""
    for _ in range(20):
        with suppress(
            SystemError
        ):  # "AST constructor recursion depth mismatch", https://github.com/python/cpython/issues/106905
            return ast.parse(source)
    return ast.parse(source)


class _Made(NamedTuple):
    """One `Command(...)` of the code."""

    update: Mapping[str, ast.expr]
    goto: str | tuple[()]
    graph: str | None


def _command(call: ast.Call) -> _Made | None:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    update, goto, graph = given.pop("update", ast.Dict([], [])), given.pop("goto", None), given.pop("graph", None)
    if given or call.args or not isinstance(update, ast.Dict):
        return None
    keys = [key.value for key in update.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    target: Any = (
        () if goto is None else goto.value if isinstance(goto, ast.Constant) else END if _name(goto) == "END" else None
    )
    if len(keys) < len(update.keys) or not isinstance(target, str | tuple) or (graph is not None and _name(graph) != "PARENT"):
        return None
    return _Made(dict(zip(keys, update.values, strict=True)), target, Command.PARENT if graph is not None else None)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _fixed_names(function: types.FunctionType, tree: ast.Module) -> set[str]:
    """The function's arguments that its code does not set anew."""
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return set(inspect.signature(function).parameters) - stored


_PLAIN = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.Load)


def _follows(value: ast.expr, fixed: set[str]) -> bool:
    """Whether a value is made of constants and arguments alone."""
    return all(isinstance(node, _PLAIN) or (isinstance(node, ast.Name) and node.id in fixed) for node in ast.walk(value))
