"""Which tools are taken for writing ones, and by what evidence."""

from typing import Any

import pytest
from langchain_core.tools import BaseTool, StructuredTool

from dreamgym_lg.actions import render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.tool_uses import UNKNOWN, ToolUse, find_tool_uses, writing_tools
from dreamgym_lg.types import Step, Task, Trajectory


def named(name: str, **metadata: Any) -> BaseTool:
    return StructuredTool.from_function(lambda: "", name=name, description="A tool.", metadata=metadata or None)


def called(*calls: tuple[str, str]) -> list[tuple[str, str]]:
    """A trace of calls without arguments: name and answer of each."""
    return [(render_call(name, {}), answer) for name, answer in calls]


READ = [named("get_stock", readOnlyHint=True), named("get_user", writes=False), named("get_time", readOnlyHint=True)]


def test_a_tool_of_which_nothing_is_known_counts_as_writing() -> None:
    uses = find_tool_uses([named("get_order")], [called(("search", "nothing"))])
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
    assert find_tool_uses(tools, [called(("cancel", ""))], writes=["get_order", "cancel"]) == {
        "cancel": ToolUse(True, "writes= names it"),
        "get_order": ToolUse(True, "writes= names it"),
        "refund": ToolUse(False, "writes= does not name it"),
    }
    with pytest.raises(ConfigurationError, match="unknown tool in writes 'refunds'.*Did you mean 'refund'"):
        find_tool_uses(tools, writes=["refunds"])


def test_a_tool_after_which_a_reading_call_is_answered_differently_writes() -> None:
    uses = find_tool_uses(READ, [called(("get_stock", "3"), ("ship", "sent"), ("get_stock", "2"))])
    assert uses["ship"].writes and "identical call of get_stock" in uses["ship"].why
    assert not uses["get_stock"].writes


@pytest.mark.parametrize(
    "trace",
    [
        called(("get_stock", "3"), ("ship", "sent"), ("get_stock", "3")),  # the same answer
        called(("get_stock", "3"), ("ship", "sent"), ("refund", "ok"), ("get_stock", "2")),  # which of the two?
        called(("refund", "ok"), ("ship", "sent"), ("refund", "already")),  # a write need not answer alike
        called(("get_time", "9"), ("ship", "sent"), ("get_time", "10"), ("get_time", "11")),  # it changes by itself
    ],
)
def test_what_shows_nothing(trace: list[tuple[str, str]]) -> None:
    assert find_tool_uses(READ, [trace])["ship"] == UNKNOWN


def test_between_two_reads_the_tool_that_may_write_did() -> None:
    trace = called(("get_stock", "3"), ("ship", "sent"), ("get_user", "ok"), ("get_stock", "2"))
    assert "get_stock" in find_tool_uses(READ, [trace])["ship"].why


@pytest.mark.parametrize("by_user", [True, False])
def test_traces_that_contradict_a_reading_tool_are_named_and_decide_nothing(by_user: bool) -> None:
    trace = called(("get_stock", "3"), ("ship", "sent"), ("get_stock", "2"))
    ship = named("ship", readOnlyHint=None if by_user else True)
    use = find_tool_uses([*READ, ship], [trace], writes=[] if by_user else None)["ship"]
    first = "writes= does not name it" if by_user else "its metadata says readOnlyHint=True"
    assert use == (False, f"{first}, though in the traces, an identical call of get_stock was answered differently after it")


def test_the_names_alone_from_trajectories() -> None:
    acts = [("get_stock", "3", True), ("ship", "broken", True), ("get_stock", "2", True), ("refnd", "unknown", False)]
    steps = [
        Step(observation="", action=render_call(name, {}), next_observation=answer, valid=valid) for name, answer, valid in acts
    ]
    of = Trajectory(task=Task(id="t", instruction="", environment=""), steps=steps)
    assert writing_tools([*READ, named("refund")], [of]) == {"refund", "ship"}, "a refused call is no tool's"
