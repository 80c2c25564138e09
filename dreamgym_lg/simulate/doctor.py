"""`dreamgym doctor`: what an agent is made of, what a dream will simulate of it, what it cannot, and what to do about that."""

import sqlite3
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from langchain_core.caches import BaseCache
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel
from langgraph.types import interrupt

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.episode import STATE_TOOLS
from dreamgym_lg.simulate.walk import body, function_references, reachable, runs_an_agent, users

Fate = Literal["simulated", "passes through", "replaced", "answered", "stopped", "could leak"]
"""`stopped`: the guard raises there and the episode fails; `could leak`: nothing would stop it."""


class Finding(NamedTuple):
    """One part of the agent."""

    kind: str
    name: str
    fate: Fate
    advice: str = ""
    """Empty where nothing need be done."""


@dataclass(frozen=True)
class Examination:
    """All that was found; `problems` are the parts that cannot be simulated as they are."""

    findings: Sequence[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.fate in ("stopped", "could leak")]


TOUCHING = {
    "socket", "http", "urllib", "requests", "httpx", "aiohttp", "websockets", "subprocess", "shutil", "smtplib", "ftplib", "boto3",
    "psycopg", "psycopg2", "asyncpg", "pymysql", "pymongo", "redis", "sqlalchemy", "sqlite3", "paramiko", "openai", "anthropic",
}  # fmt: skip
"""Modules that plain code reaches the world with; the guard sees all of them open files and connections."""

_WRITERS = {"open", "write_text", "write_bytes", "unlink", "remove", "rmtree", "system", "mkdir", "rename"}


def examine(graph: Any, *, pass_through: Sequence[str] = (), simulate_nodes: Sequence[str] = ()) -> Examination:
    """Find an agent's models, tools, graphs, caches, checkpointers, interrupts and plain code; nothing is run.

    Raises `ConfigurationError` if `graph` holds no graph at all, or a name given is none of its nodes or tools.
    """
    found = list(reachable(graph))
    graphs = [each for each in found if isinstance(each, Pregel)]
    if not graphs:
        raise ConfigurationError(
            f"{type(graph).__name__} holds no compiled graph; give what StateGraph.compile or create_agent returns"
        )
    nodes = {name for each in graphs for name in each.nodes}
    if unknown := set(simulate_nodes) - nodes:
        raise ConfigurationError.unknown("node", sorted(unknown)[0], nodes - {"__start__"})
    tools = {tool.name: tool for tool in found if isinstance(tool, BaseTool)}
    if unknown := set(pass_through) - set(tools):
        raise ConfigurationError.unknown("tool", sorted(unknown)[0], tools)
    findings = [*_models(found), *(_tool(tool, pass_through) for tool in tools.values()), *_graphs(graphs), *_open(found)]
    findings += [finding for each in graphs for finding in _nodes(each, simulate_nodes)]
    if isinstance(get_llm_cache(), BaseCache):
        findings.append(Finding("cache", "the global LLM cache", "replaced"))
    return Examination(list(dict.fromkeys(findings)))


def _models(found: Sequence[Any]) -> Iterator[Finding]:
    for each in found:
        name = type(each).__name__
        if isinstance(each, BaseChatModel):
            yield Finding("model", f"{name} {each._get_ls_params().get('ls_model_name') or ''}".strip(), "simulated")
        elif isinstance(each, BaseLLM):
            yield Finding("model", name, "stopped", "a text-completion model has no messages: use its chat-model class")
        elif isinstance(each, BaseRetriever):
            yield Finding(
                "retriever", name, "stopped", "make it a tool (create_retriever_tool), or name its node in simulate_nodes"
            )
        elif type(each).__module__.split(".")[0] in ("openai", "anthropic") and hasattr(each, "base_url"):
            yield Finding("client", f"{type(each).__module__}.{name}", "stopped", "call the model through its LangChain class")


def _tool(tool: BaseTool, pass_through: Sequence[str]) -> Finding:
    module = str(getattr(body(tool), "__module__", ""))
    if tool.name in pass_through:
        return Finding("tool", tool.name, "passes through")
    if runs_an_agent(tool):
        return Finding("tool", f"{tool.name} (a sub-agent)", "passes through")
    if module.startswith(STATE_TOOLS):
        return Finding("tool", f"{tool.name} (state only)", "passes through")
    return Finding("tool", tool.name, "simulated")


def _graphs(graphs: Sequence[Pregel]) -> Iterator[Finding]:
    for i, each in enumerate(graphs):
        name = each.get_name()
        if i:
            yield Finding("sub-graph", name, "simulated")
        if each.cache is not None:
            yield Finding("cache", f"{type(each.cache).__name__} of {name}", "replaced")
        if isinstance(each.checkpointer, BaseCheckpointSaver):
            yield Finding("checkpointer", f"{type(each.checkpointer).__name__} of {name}", "replaced")
        if each.store is not None:
            yield Finding("store", f"{type(each.store).__name__} of {name}", "replaced")
        for when in ("before", "after"):
            if nodes := getattr(each, f"interrupt_{when}_nodes", ()):
                yield Finding("interrupt", f"{when} {nodes if isinstance(nodes, str) else ', '.join(nodes)}", "answered")


def _open(found: Sequence[Any]) -> Iterator[Finding]:
    for each in found:
        if isinstance(each, sqlite3.Connection):
            advice = "an open connection writes without any event: open it inside a tool, or pass it in through a tool"
            yield Finding("connection", "sqlite3.Connection", "could leak", advice)
        elif type(each).__module__.split(".")[0] in ("psycopg", "psycopg2", "asyncpg", "pymongo", "redis"):
            advice = "a driver written in C sends on an open connection without any event: reach it through a tool"
            yield Finding("connection", f"{type(each).__module__}.{type(each).__name__}", "could leak", advice)


def _nodes(graph: Pregel, simulate_nodes: Sequence[str]) -> Iterator[Finding]:
    for name, node in graph.nodes.items():
        if name in simulate_nodes:
            yield Finding("node", name, "simulated")
            continue
        for function in _plain_functions(node.bound):
            if interrupt in function_references(function):
                yield Finding("interrupt", f"in node {name}", "answered")
            if touched := _touched(function):
                advice = f"its code uses {', '.join(touched)}: move it into a tool, or name the node in simulate_nodes"
                yield Finding("node", name, "stopped", advice)
            if "func" in function.__code__.co_names and any(isinstance(o, BaseTool) for o in function_references(function)):
                yield Finding(
                    "node", name, "stopped", "it calls tool.func(...), which no class is asked about: use tool.invoke(...)"
                )


def _plain_functions(bound: Any) -> Iterator[types.FunctionType]:
    """The user's own functions that a node runs, without the bodies of tools and without nested graphs."""
    seen: set[int] = set()
    waiting = [bound]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, Pregel | BaseTool | BaseChatModel | types.ModuleType | type):
            continue
        seen.add(id(each))
        if users(each):
            yield each
        if isinstance(each, types.FunctionType):
            waiting += [o for o in function_references(each) if isinstance(o, types.FunctionType | types.MethodType)]
            continue
        if isinstance(each, types.MethodType):
            waiting.append(each.__func__)
            continue
        for attribute in ("func", "afunc", "bound", "steps", "first", "middle", "last", "runnable", "fallbacks", "steps__"):
            part = getattr(each, attribute, None)
            waiting += (
                part if isinstance(part, list) else list(part.values()) if isinstance(part, dict) else [part] if part else []
            )


def _touched(function: types.FunctionType) -> list[str]:
    """Modules and functions of the world that a function's code names."""
    names = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    modules = {
        name for name in names if name in TOUCHING
        or getattr(function.__globals__.get(name), "__name__", "").split(".")[0] in TOUCHING
        and isinstance(function.__globals__.get(name), types.ModuleType)
    }  # fmt: skip
    return sorted(modules | (names & _WRITERS))
