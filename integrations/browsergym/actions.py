"""BrowserGym's actions as text, `click('16')`. A benchmark's allowed ones, and those refused without asking a browser."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from langchain_core.tools import create_schema_from_function
from pydantic import BaseModel, ValidationError, create_model

from dreamgym_lg.actions import render_call
from dreamgym_lg.errors import MissingDependency

try:
    from browsergym.core.action import functions
    from browsergym.core.action.highlevel import ACTION_SUBSETS
except ImportError as error:
    raise MissingDependency.extra("browsergym-core", "browsergym") from error

_SUBSETS: Mapping[str, Sequence[str]] = {"miniwob": ("bid",), "webarena": ("webarena",), "webarenalite": ("webarena",)}
"""BrowserGym's own sets. Of `miniwob` those that name an element: in text nobody sees where on the screen something is."""
_FILES = ("upload_file", "mouse_upload_file")
"""Actions left out everywhere. With them a policy could send any file of this machine to a site."""


@cache
def allowed_actions(benchmark: str) -> tuple[str, ...]:
    """Names of a benchmark's actions without those that send files. Of an unknown one BrowserGym's default set."""
    subsets = _SUBSETS.get(benchmark, ("chat", "infeas", "bid", "nav", "tab"))
    names = [function.__name__ for subset in subsets for function in ACTION_SUBSETS[subset]]
    return tuple(name for name in dict.fromkeys(names) if name not in _FILES)


def describe_action(name: str) -> str:
    """BrowserGym's own description, without its examples."""
    text = str(getattr(functions, name).__doc__).partition("Examples:")[0]
    return " ".join(text.split())


@cache
def arguments_schema(name: str) -> type[BaseModel]:
    """The arguments of an action as a pydantic model."""
    function: Callable[..., Any] = getattr(functions, name)
    return cast(type[BaseModel], create_schema_from_function(name, function))


@cache
def tool_schema(name: str) -> type[BaseModel]:
    """The required arguments of an action. Those with a default, such as modifier keys, are half of a tool's text."""
    fields = arguments_schema(name).model_fields
    required: dict[str, Any] = {key: (field.annotation, ...) for key, field in fields.items() if field.is_required()}
    return create_model(name, **required)


def render(name: str, arguments: Mapping[str, Any]) -> str:
    """The text of an action: `fill('19', 'text')`. Arguments that have their default value are left out."""
    required = tool_schema(name).model_fields
    values = _without_defaults(name, arguments).items()
    return f"{name}({', '.join(repr(value) if key in required else f'{key}={value!r}' for key, value in values)})"


def _without_defaults(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that have their default value, in the signature's order."""
    fields = {key: field for key, field in arguments_schema(name).model_fields.items() if key in arguments}
    return {key: arguments[key] for key, field in fields.items() if field.is_required() or arguments[key] != field.default}


class _InvalidAction(Exception):
    """Why a text is no action."""


def check_action(benchmark: str, action: str) -> str | None:
    """An error text for what is no action on any page; else None."""
    try:
        name, arguments = _parse(benchmark, action)
    except _InvalidAction as wrong:
        return f"Error: {wrong}"
    if name == "goto" and not re.match(r"https?://", str(arguments["url"])):  # not the files of this machine
        return f"Error: goto takes an address that begins with http:// or https://, got {arguments['url']!r}."
    return None


def as_call(benchmark: str, action: str) -> str:
    """The action as a tool call, default values left out. Any other text as it is."""
    try:
        name, arguments = _parse(benchmark, action)
    except _InvalidAction:
        return action
    return render_call(name, _without_defaults(name, arguments))


def normalized(benchmark: str, action: str) -> str:
    """The action as it is sent to BrowserGym, after `check_action` has let it pass."""
    return render(*_parse(benchmark, action))


def _parse(benchmark: str, action: str) -> tuple[str, dict[str, Any]]:
    allowed = allowed_actions(benchmark)
    try:
        call = ast.parse(action.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in allowed:
            raise ValueError
        name, fields = call.func.id, list(arguments_schema(call.func.id).model_fields)
        positional = [ast.literal_eval(value) for value in call.args]
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise _InvalidAction(f"{action.strip()[:80]!r} is no action; the actions are {', '.join(allowed)}.") from None
    arguments = dict(zip(fields, positional, strict=False)) | named
    if len(positional) > len(fields) or len(arguments) < len(positional) + len(named) or not arguments.keys() <= set(fields):
        raise _InvalidAction(f"{name} takes the arguments {', '.join(fields) or '(none)'}.")
    try:
        return name, arguments_schema(name).model_validate(arguments, strict=True).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        raise _InvalidAction(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
