"""Which tools are taken for writing ones, and by what evidence."""

from typing import Any

import pytest
from langchain_core.tools import BaseTool, StructuredTool

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.tasks import UNKNOWN, ToolUse, find_tool_uses


def named(name: str, **metadata: Any) -> BaseTool:
    return StructuredTool.from_function(lambda: "", name=name, description="A tool.", metadata=metadata or None)


def test_a_tool_of_which_nothing_is_known_counts_as_writing() -> None:
    uses = find_tool_uses([named("get_order")], ["search"])
    assert uses == {"get_order": UNKNOWN, "search": UNKNOWN} and UNKNOWN.writes


def test_metadata_says_what_a_tool_does() -> None:
    tools = [
        named("get_token", writes=True),
        named("refund", writes=False),
        named("fetch", title=None, readOnlyHint=False),  # as langchain-mcp-adapters dumps MCP's annotations
        named("transfer", readOnlyHint=True),
        named("get_order", readOnlyHint=None),
        named("cancel", writes="yes"),
    ]
    uses = find_tool_uses(tools)
    assert {name for name, use in uses.items() if not use.writes} == {"refund", "transfer"}
    assert uses["fetch"].why == "its metadata says readOnlyHint=False" and uses["get_order"] == uses["cancel"] == UNKNOWN


def test_what_the_user_says_comes_before_everything() -> None:
    tools = [named("refund", writes=True), named("get_order")]
    assert find_tool_uses(tools, ["cancel"], writes=["get_order", "cancel"]) == {
        "cancel": ToolUse(True, "writes= names it"),
        "get_order": ToolUse(True, "writes= names it"),
        "refund": ToolUse(False, "writes= does not name it"),
    }
    with pytest.raises(ConfigurationError, match="unknown tool in writes 'refunds'.*Did you mean 'refund'"):
        find_tool_uses(tools, writes=["refunds"])
    with pytest.raises(ConfigurationError, match="tool 'refund' in writes really runs in a dream"):
        find_tool_uses(tools, writes=["get_order", "refund"], pass_through=["refund"])
