"""Examines an agent (`dreamgym doctor`): what a dream simulates of it and what not."""

import io
import json
import sqlite3
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from langchain_core.caches import BaseCache
from langchain_core.embeddings import Embeddings
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel
from langgraph.types import interrupt

from dreamgym_lg.actions import parse_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.episode import check_names
from dreamgym_lg.simulate.object_graph import body, codes, function_references, makes_tools, reachable, run_by
from dreamgym_lg.simulate.return_types import UNKNOWN_UPDATE
from dreamgym_lg.simulate.static_analysis import leaves_episode, touched, unclear
from dreamgym_lg.simulate.tool_code import returns_command, runs_in_dream, state_update
from dreamgym_lg.simulate.user_code import users
from dreamgym_lg.simulate.wall.wall import Isolation
from dreamgym_lg.tasks import UNKNOWN, ToolUse, find_tool_uses
from dreamgym_lg.types import Trajectory

Handling = Literal["simulated", "passes through", "replaced", "answered", "unknown", "stopped", "could leak", "not simulated"]
"""`stopped`: it is refused there and the episode fails; `could leak`: nothing would stop it, under the guard alone; `not
simulated`: it really runs where the policy or the world should answer, or fails there; `unknown`: it really runs, and nothing
tells what it does: to the real world nothing behind the wall, under the guard whatever it does below Python."""

_PROBLEMS = ("stopped", "could leak", "not simulated")
_NEEDED = ("client", "sub-graph", "backend", "middleware")
"""Kinds of parts without which no episode comes to its end."""


class Part(NamedTuple):
    """One part of an agent and its fate in a dream."""

    kind: str
    name: str
    handling: Handling
    advice: str = ""
    """Empty where nothing need be done."""
    use: str = ""
    """Of a simulated tool: it reads or it writes, and how that is known."""


@dataclass(frozen=True)
class Examination:
    """The parts of an agent; `problems` are those that cannot be simulated as they are."""

    parts: Sequence[Part] = field(default_factory=list)
    tools: Sequence[BaseTool] = ()
    """The agent's tools, those of its sub-agents included, without those that exist only while it runs."""

    @property
    def problems(self) -> list[Part]:
        return [part for part in self.parts if part.handling in _PROBLEMS]

    @property
    def refused(self) -> list[Part]:
        """The problems with which no episode can be right: leaks, parts not simulated, needed parts."""
        return [part for part in self.problems if part.handling != "stopped" or part.kind in _NEEDED]

    @property
    def writes_line(self) -> str:
        """The `writes=[...]` to paste, where nothing is known of some tools; else ""."""
        unknown = [each.name for each in self.parts if each.use == _COUNTS_AS_WRITING]
        if not unknown:
            return ""
        writing = sorted(each.name for each in self.parts if each.use and not each.use.startswith("reads"))
        return (
            f"Nothing tells if these only read: {', '.join(unknown)}. Paste into DreamGym(...), without the tools that do:\n"
            f"writes={json.dumps(writing)}"
        )

    def __str__(self) -> str:
        """A line for each part (kind, name, handling, use, advice), then `writes_line`."""
        lines = ((f"{part.kind} {part.name}: {part.handling}", part.use, part.advice) for part in self.parts)
        return "\n".join(filter(None, [*("; ".join(filter(None, line)) for line in lines), self.writes_line]))


def examine(
    graph: Any,
    *,
    pass_through: Sequence[str] = (),
    simulate_nodes: Sequence[str] = (),
    writes: Collection[str] | None = None,
    trajectories: Iterable[Trajectory] = (),
    isolation: Isolation = "guard",
) -> Examination:
    """Find an agent's models, tools, graphs, caches, checkpointers, interrupts and plain code; nothing is run.

    Args: `writes`, the tools that change the world; `trajectories`, real ones, in which they are found otherwise
    (`find_tool_uses`); `isolation`, what keeps its dream from the real world: the wall stops what could leak past the guard.

    Raises `ConfigurationError` if `graph` holds no graph at all, or a name given is none of its nodes or tools.
    """
    objects = list(reachable(graph))
    graphs = [each for each in objects if isinstance(each, Pregel)]
    if not graphs:
        raise ConfigurationError(
            f"{type(graph).__name__} holds no compiled graph; give what StateGraph.compile or create_agent returns"
        )
    nodes = {name for each in graphs for name in each.nodes}
    if unknown := set(simulate_nodes) - nodes:
        raise ConfigurationError.unknown("node", sorted(unknown)[0], nodes - {"__start__"})
    check_names(graph, pass_through=pass_through)
    tools = {tool.name: tool for tool in objects if isinstance(tool, BaseTool)}
    calls = (parse_call(step.action) for each in trajectories for step in each.steps if step.valid)
    uses = find_tool_uses(tools.values(), {call.name for call in calls if call is not None}, writes=writes)
    parts = [part for each in objects if (part := _object(each)) is not None]
    for name, tool in tools.items():
        parts += _tool(tool, pass_through, uses[name])
    parts += _graphs(graphs)
    for place, roots in _places(graph, graphs, simulate_nodes):
        parts += [Part("node", place, "simulated")] if roots is None else _plain_code(place, roots)
    if isinstance(get_llm_cache(), BaseCache):
        parts.append(Part("cache", "the global LLM cache", "replaced"))
    if isolation == "process":  # the wall stops it; its advice begins with what no guard sees
        leaks = [part for part in parts if part.handling == "could leak"]
        stopped = {part: part._replace(handling="stopped", advice=part.advice.partition(": ")[2]) for part in leaks}
        parts = [stopped.get(part, part) for part in parts]
    return Examination(list(dict.fromkeys(parts)), list(tools.values()))


_VIRTUAL = ("StateBackend", "StoreBackend", "CompositeBackend")
"""deepagents' file tools, which really run, keep files there in the graph's state or store."""


def _object(each: Any) -> Part | None:
    """A part that counts wherever the agent holds it."""
    module, name = type(each).__module__, type(each).__name__
    if isinstance(each, BaseChatModel):
        return Part("model", f"{name} {each._get_ls_params().get('ls_model_name') or ''}".strip(), "simulated")
    if name == "OpenAIModerationMiddleware":
        advice = "it asks OpenAI around each model call: allow that host, or build the agent without it to train it"
        return Part("middleware", name, "stopped", advice)
    if module.startswith("deepagents.backends") and name.endswith(("Backend", "Sandbox")) and name not in _VIRTUAL:
        return Part("backend", name, "stopped", "its files are real: build the agent with StateBackend to train it")
    return None


_COUNTS_AS_WRITING = "counts as writing; name the tools that write in writes=[...]"


def _tool(tool: BaseTool, pass_through: Sequence[str], use: ToolUse) -> Iterator[Part]:
    kind = ""
    if tool.name not in pass_through and not (kind := runs_in_dream(tool)):
        use_text = _COUNTS_AS_WRITING if use == UNKNOWN else f"{'writes' if use.writes else 'reads'}: {use.why}"
        update = state_update(tool) if returns_command(tool) else None
        if returns_command(tool) and update is None:
            yield Part("tool", tool.name, "not simulated", UNKNOWN_UPDATE, use_text)
            return
        keys = ", ".join(update.answered) if update is not None else ""
        advice = f"the dream also answers the state that it writes: {keys}" if keys else ""
        yield Part("tool", tool.name, "simulated", advice, use_text)
        return
    yield Part("tool", f"{tool.name} ({kind})" if kind else tool.name, "passes through")
    root = body(tool)
    root = types.MethodType(root, tool) if root is type(tool)._run else root
    yield from (part for part in _plain_code(f"tool {tool.name}", [root]) if part.handling != "passes through")


def _graphs(graphs: Sequence[Pregel]) -> Iterator[Part]:
    for i, each in enumerate(graphs):
        name = each.get_name()
        if i:
            yield Part("sub-graph", name, "simulated")
        for kind in ("cache", "checkpointer", "store"):
            if (kept := getattr(each, kind)) is not None and not isinstance(kept, bool):
                yield Part(kind, f"{type(kept).__name__} of {name}", "replaced")
        for when in ("before", "after"):
            if nodes := getattr(each, f"interrupt_{when}_nodes", ()):
                yield Part("interrupt", f"{when} {nodes if isinstance(nodes, str) else ', '.join(nodes)}", "answered")


def _places(graph: Any, graphs: Sequence[Pregel], simulated: Sequence[str]) -> Iterator[tuple[str, list[Any] | None]]:
    """Places of plain code with what is called there. None: the environment answers the node."""
    for each in graphs:
        for name, node in each.nodes.items():
            place = f"{name} of {each.get_name()}" if len(graphs) > 1 else name
            yield place, None if name in simulated else [node.bound, *node.writers]
    if not isinstance(graph, Pregel):
        called = [getattr(graph, name, None) for name in ("invoke", "ainvoke")]
        yield f"{type(graph).__name__}.invoke", [each for each in called if each is not None]


def _plain_code(place: str, roots: Sequence[Any]) -> Iterator[Part]:
    objects = list(run_by(roots))
    functions = [each for each in objects if users(each)]
    problems = [problem for each in objects if (problem := _problem(each, place)) is not None]
    if names := sorted({name for function in functions for name in touched(function)}):
        problems.insert(0, Part("node", place, "stopped", f"its code uses {', '.join(names)}: {_fix(place)}"))
    for function in functions:
        problems += _called_past_its_class(function, place)
        yield from _created_there(function, place)
        if any(each is interrupt for each in function_references(function)):  # == of a data frame is no truth
            yield Part("interrupt", f"in {place}", "answered")
    if names := sorted({name for function in functions for name in unclear(function)}):  # it may run before what is stopped
        who = "let the tool be simulated" if place.startswith("tool ") else "name the node in simulate_nodes"
        advice = f"it really runs, and uses {', '.join(names)}: if that acts on the world, decorate it as a tool, or {who}"
        problems.append(Part("code", place, "unknown", advice))
    yield from problems or [Part("code", place, "passes through")] * bool(functions)


_DRIVERS = ("asyncpg", "pymongo", "redis", "pymysql")
_DRIVERS_IN_C = ("psycopg", "psycopg2", "duckdb", "_duckdb", "grpc")
_POOLS = ("Engine", "AsyncEngine", "Connection", "Session", "scoped_session", "sessionmaker")


def _fix(place: str) -> str:
    if place.startswith("tool "):
        return "let the tool be simulated, or allow its hosts and paths"
    return "move it into a tool, or name the node in simulate_nodes"


def _problem(each: Any, place: str) -> Part | None:
    """The problem of an object by which plain code asks past the patched classes."""
    name, package = type(each).__name__, type(each).__module__.partition(".")[0]
    here, qualified, fix = f"{name} in {place}", f"{package}.{name} in {place}", _fix(place)
    if isinstance(each, BaseLLM):
        advice = "a text-completion model has no messages, so that no policy answers for it: use its chat-model class"
        return Part("model", here, "not simulated", advice)
    if isinstance(each, BaseRetriever):
        return Part("retriever", here, _of_search(each), fix)
    if isinstance(each, Embeddings) and package != "langchain_core":  # those are fakes, which ask nobody
        return Part("embeddings", here, _of_search(each), fix)
    if package in ("openai", "anthropic") and hasattr(each, "base_url"):
        return Part("client", qualified, "stopped", "call the model through its LangChain class")
    if name == "RemoteGraph" and package == "langgraph":
        return Part("sub-graph", here, "stopped", "it runs on a server: use the graph itself instead")
    if package in _DRIVERS:
        return Part("connection", qualified, "stopped", fix)
    if _is_open_file(each):
        file = f"{getattr(each, 'name', name)} open in {place}"
        return Part("file", file, "could leak", f"no guard sees what is written to an open file: {fix}")
    if package == "mcp" and name == "ClientSession":
        advice = f"no guard sees what is sent in an open session: {fix}"
        return Part("connection", f"MCP session in {place}", "could leak", advice)
    if _is_open_database(each) or package in _DRIVERS_IN_C or (package == "sqlalchemy" and name in _POOLS):
        return Part("connection", qualified, "could leak", f"no guard sees what is sent on an open connection: {fix}")
    return None


_HOSTED = tuple(f"langchain_{name}" for name in ("openai", "google", "mistralai", "aws", "ollama", "cohere", "voyageai"))


def _of_search(each: Any) -> Handling:
    """A provider's embeddings need the network; of others nothing tells what they do."""
    modules = [type(part).__module__ for part in reachable(each) if isinstance(part, Embeddings)]
    return "stopped" if any(module.startswith(_HOSTED) for module in modules) else "unknown"


def _is_open_file(each: Any) -> bool:
    """Tells if it is a file on disk that is open for writing."""
    if not isinstance(each, io.IOBase) or each is sys.stdout or each is sys.stderr or each.closed or not each.writable():
        return False
    try:
        return each.fileno() >= 0
    except OSError:
        return False


def _is_open_database(each: Any) -> bool:
    """Tells if it is an open SQLite database in a file."""
    if not isinstance(each, sqlite3.Connection):
        return False
    try:
        return any(file for _, _, file in each.execute("PRAGMA database_list"))
    except sqlite3.ProgrammingError as error:  # it is closed, or of another thread
        return "closed" not in str(error)


def _called_past_its_class(function: types.FunctionType, place: str) -> Iterator[Part]:
    """Ways by which models and tools are called and no class is asked."""
    names = {name for code in codes(function) for name in code.co_names}
    for name in sorted(names & {"func", "coroutine"}):
        if any(isinstance(each, BaseTool) for each in _referred_objects(function)):
            call = "await tool.ainvoke(...)" if name == "coroutine" else "tool.invoke(...)"
            advice = f"it calls tool.{name}(...), which really runs the tool's own code: use {call}"
            yield Part("node", place, "not simulated", advice)
    for name in leaves_episode(function):
        what = "starts a thread below Python's" if "thread" in name else "runs code in an empty context"
        instead = "threading.Thread" if "thread" in name else "contextvars.copy_context()"
        yield Part("node", place, "not simulated", f"it {what} ({name}), where no episode is known: use {instead}")


def _referred_objects(function: types.FunctionType) -> Iterator[Any]:
    """The objects that a function refers to, those in lists and dictionaries included."""
    for each in function_references(function):
        yield each
        if isinstance(each, list | tuple | dict):
            yield from each.values() if isinstance(each, dict) else each


def _created_there(function: types.FunctionType, place: str) -> Iterator[Part]:
    """Models and tools that exist only while the graph runs; their classes are patched too."""
    if makes_tools(function):
        yield Part("tool", f"made in {place}", "simulated")
    for each in function_references(function):
        if isinstance(each, type) and issubclass(each, BaseChatModel):
            yield Part("model", f"{each.__name__} made in {place}", "simulated")
        elif getattr(each, "__name__", "") == "init_chat_model":
            yield Part("model", f"made in {place}", "simulated")
