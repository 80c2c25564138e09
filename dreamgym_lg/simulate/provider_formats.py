"""What production binds to its models, in every provider's form, as the one form that policies know: OpenAI's."""

from collections.abc import Mapping
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from dreamgym_lg.actions import tool_schemas


def normalise(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a production model's call, as the policy takes them.

    What says how to answer is kept: `tools` (OpenAI's form), `tool_choice` (`auto`, `none`, `required` or a tool's name) and
    `response_format` (OpenAI's json_schema form). Provider settings, which mean nothing to the policy, are dropped.
    """
    given: dict[str, Any] = {}
    if tools := _tools(kwargs):
        given["tools"] = tools
        choice = _tool_choice(kwargs)
        if choice is None and len(tools) == 1 and _noted(kwargs).get("method") == "function_calling":
            choice = tools[0]["function"]["name"]  # not every provider can be told so
        if choice not in (None, "auto"):
            given["tool_choice"] = choice
    if schema := _response_schema(kwargs):
        name, body = schema
        given["response_format"] = {"type": "json_schema", "json_schema": {"name": name, "schema": body}}
    return given


def _tools(kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    config = kwargs.get("toolConfig") or {}
    bound = kwargs.get("tools") or kwargs.get("functions") or config.get("tools") or ()
    return tool_schemas(bound)


def _tool_choice(kwargs: Mapping[str, Any]) -> str | None:
    config = kwargs.get("toolConfig") or {}
    choice = kwargs.get("tool_choice") or config.get("toolChoice")
    if google := kwargs.get("tool_config"):
        google = google if isinstance(google, Mapping) else google.model_dump(mode="json", exclude_none=True)
        calling = google.get("function_calling_config") or {}
        allowed = calling.get("allowed_function_names") or []
        choice = allowed[0] if len(allowed) == 1 else calling.get("mode")
    return _named(choice)


def _named(choice: Any) -> str | None:
    """`auto`, `none`, `required` or a name, from any provider's way to say so."""
    if choice is None or isinstance(choice, bool):
        return "required" if choice else None
    if isinstance(choice, str):
        return {"any": "required", "validated": "auto"}.get(choice.lower(), choice.lower() if choice.isupper() else choice)
    for key in ("function", "tool"):
        if isinstance(choice.get(key), Mapping):
            return str(choice[key]["name"])
    if "name" in choice:
        return str(choice["name"])
    kind = choice.get("type") or next(iter(choice), None)
    return _named(str(kind)) if kind else None


def _response_schema(kwargs: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Name and JSON schema of the answer that production asked for.

    LangChain's own note of it comes first: `with_structured_output` leaves it with every provider.
    """
    if _noted(kwargs).get("method") == "json_schema":
        return _schema(kwargs["ls_structured_output_format"]["schema"])
    output = kwargs.get("output_config") or {}
    for wanted in (
        kwargs.get("response_format"),
        output.get("format"),
        kwargs.get("response_json_schema"),
        kwargs.get("format"),
    ):
        if wanted is not None and not isinstance(wanted, str):
            return _schema(wanted)
    return None


def _noted(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    return (kwargs.get("ls_structured_output_format") or {}).get("kwargs") or {}


def _schema(wanted: Any) -> tuple[str, Any] | None:
    if not isinstance(wanted, Mapping) or "function" in wanted:
        function = convert_to_openai_tool(wanted)["function"]
        return str(function["name"]), function["parameters"]
    if wanted.get("type") in ("text", "json_object"):
        return None
    inner = wanted.get("json_schema") or wanted
    schema = inner.get("schema", inner)
    return (
        (str(inner.get("name") or schema.get("title") or "answer"), dict(schema))
        if isinstance(schema, Mapping)
        else _schema(schema)
    )
