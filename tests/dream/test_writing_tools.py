"""Which tools are taken for writing ones, and by what evidence."""

from typing import Any

import pytest
from langchain_core.tools import BaseTool, StructuredTool

from dreamgym_lg.actions import render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.writing_tools import ToolUse, find_tool_uses, use_by_name, writing_tools
from dreamgym_lg.types import Step, Task, Trajectory


def named(name: str, **metadata: Any) -> BaseTool:
    return StructuredTool.from_function(lambda: "", name=name, description="A tool.", metadata=metadata or None)


def called(*calls: tuple[str, str]) -> list[tuple[str, str]]:
    """A trace of calls without arguments: name and answer of each."""
    return [(render_call(name, {}), answer) for name, answer in calls]


@pytest.mark.parametrize(
    "name",
    ["get_order", "search", "list-files", "order_lookup", "findUser", "lookup", "isOpen", "check_order_status", "crm_get"]
    + ["get_book", "find_book", "searchPost"],
)
def test_names_that_read(name: str) -> None:
    assert not use_by_name(name).writes and "name" in use_by_name(name).why


@pytest.mark.parametrize(
    "name",
    ["refund", "get_or_create_user", "check_in", "checkOut", "set_list", "getter", "", "forget_search_history_of"]
    + [
        "find_and_book",
        "searchBookFlight",
        "find_book_table",
        "list_set_default",
        "get_change",
        "book_search",
        "get_cancel",
        "check_book",
    ],
)
def test_names_that_do_not(name: str) -> None:
    assert use_by_name(name).writes


def test_a_word_that_makes_a_reading_name_doubtful_is_named() -> None:
    assert use_by_name("check_book") == (True, "its name has the word 'book'")


def test_what_a_tool_says_of_itself_comes_before_its_name() -> None:
    tools = [
        named("get_token", writes=True),
        named("refund", writes=False),
        named("fetch", title=None, readOnlyHint=False),  # as langchain-mcp-adapters dumps MCP's annotations
        named("transfer", readOnlyHint=True),
        named("get_order", readOnlyHint=None),
        named("cancel", writes="yes"),
    ]
    uses = find_tool_uses(tools)
    assert {name for name, use in uses.items() if use.writes} == {"get_token", "fetch", "cancel"}
    assert uses["fetch"].why == "its metadata says readOnlyHint=False" and "name" in uses["get_order"].why


def test_what_the_user_says_comes_before_everything() -> None:
    tools = [named("refund", writes=True), named("get_order")]
    assert find_tool_uses(tools, [called(("cancel", ""))], writes=["get_order", "cancel"]) == {
        "cancel": ToolUse(True, "writes= names it"),
        "get_order": ToolUse(True, "writes= names it"),
        "refund": ToolUse(False, "writes= does not name it"),
    }
    with pytest.raises(ConfigurationError, match="unknown tool in writes 'refunds'.*Did you mean 'refund'"):
        find_tool_uses(tools, writes=["refunds"])


def test_a_tool_after_which_a_reading_call_is_answered_differently_writes() -> None:
    uses = find_tool_uses([], [called(("get_stock", "3"), ("get_parcel", "sent"), ("get_stock", "2"))])
    assert uses["get_parcel"].writes and "identical call of get_stock" in uses["get_parcel"].why
    assert not uses["get_stock"].writes


@pytest.mark.parametrize(
    "trace",
    [
        called(("get_stock", "3"), ("get_parcel", "sent"), ("get_stock", "3")),  # the same answer
        called(("get_stock", "3"), ("get_parcel", "sent"), ("refund", "ok"), ("get_stock", "2")),  # a likelier one
        called(("get_stock", "3"), ("get_parcel", "sent"), ("get_user", "ok"), ("get_stock", "2")),  # which of the two?
        called(("refund", "ok"), ("get_parcel", "sent"), ("refund", "already")),  # a write need not answer alike
        called(("get_time", "9"), ("get_parcel", "sent"), ("get_time", "10"), ("get_time", "11")),  # it changes by itself
    ],
)
def test_what_shows_nothing(trace: list[tuple[str, str]]) -> None:
    assert not find_tool_uses([], [trace])["get_parcel"].writes


def test_a_tools_own_word_outweighs_the_traces() -> None:
    trace = called(("get_stock", "3"), ("get_parcel", "sent"), ("get_stock", "2"))
    assert not find_tool_uses([named("get_parcel", readOnlyHint=True)], [trace])["get_parcel"].writes


def test_the_names_alone_from_trajectories() -> None:
    acts = [("get_stock", "3", True), ("get_parcel", "broken", True), ("get_stock", "2", True), ("refnd", "unknown", False)]
    steps = [
        Step(observation="", action=render_call(name, {}), next_observation=answer, valid=valid) for name, answer, valid in acts
    ]
    of = Trajectory(task=Task(id="t", instruction="", environment=""), steps=steps)
    assert writing_tools([named("refund")], [of]) == {"refund", "get_parcel"}, "a refused call is no tool's"
