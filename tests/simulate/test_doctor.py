"""What `examine` finds in the zoo, in agents that would harm, and in what users hold beside their graphs."""

import json
import sqlite3
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import FakeListLLM
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from test_zoo_dreamed import RACING, dream, the_graph
from worlds import TASK, Answers
from zoo import KINDS, Kind, World
from zoo.base import ask, react, toolbox
from zoo.policy import policy_for

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate import examine, simulated
from dreamgym_lg.simulate.doctor import Examination, Part

MADE_AT_RUN_TIME = {
    "tool_made_in_node": {"made in only"},
    "made_with_the_first_call": {"made in only"},
    "nodes_of_every_callable": {"made in method"},
    "model_in_the_context": set[str](),  # given with each run, so that the graph does not show them
}
HANDS_OVER = {"swarm": ["transfer_to_bob"]}
"""Tools that must really run, and that only their user can name."""
FILES = {"sqlite_checkpoints": {"checkpoints.db"}, "sqlite_store": {"store.db"}}
"""What production has opened."""


def names(found: Examination, kind: str, handling: str) -> set[str]:
    return {part.name.split(" (")[0] for part in found.parts if part.kind == kind and part.handling == handling}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_verdict_on_an_agent_is_what_happens(kind: Kind, tmp_path: Path) -> None:
    """What is called simulated is answered, what passes through runs, and nothing else happens."""
    world = World(folder=tmp_path)
    built = kind.build(world)
    found = examine(built.graph, pass_through=HANDS_OVER.get(kind.name, ()))
    made, passing = names(found, "tool", "simulated"), names(found, "tool", "passes through")
    late = MADE_AT_RUN_TIME.get(kind.name)
    answered = {*built.tools, *built.reads}
    assert made >= (answered if late is None else late)
    assert passing >= set(built.passthrough) and not passing & made
    assert found.problems == [] and {path.name for path in tmp_path.iterdir()} == FILES.get(kind.name, set())

    environment = Answers({"book": "booked"} if kind.name in RACING else built.answers)
    options: Any = {"pass_through": HANDS_OVER.get(kind.name, ())}
    episode = simulated(built.graph, policy=policy_for(world), environment=environment, task=TASK, **options)
    dream(built, "async" if built.mode == "async" else "sync", episode, the_graph)
    called = {json.loads(step.action)["name"] for step in episode.steps if step.valid}
    assert called == answered and called <= made | (called if late is not None else set())
    assert set(world.passed) <= passing and episode.blocked == [] and world.effects == [] and world.model_calls == 0


def test_an_object_whose_equality_is_no_truth_is_no_problem() -> None:
    """A data frame or an array that a node refers to: `==` with it cannot be asked for a truth value."""

    class Frame:
        def __eq__(self, other: object) -> Any:
            return self

        def __bool__(self) -> bool:
            raise ValueError("the truth value is ambiguous")

    frame = Frame()
    assert examine(node_graph(lambda state: {"frame": frame})).problems == []


def test_a_tool_that_makes_a_command_passes_through_unless_it_may_act(tmp_path: Path) -> None:
    kinds = {kind.name: kind for kind in KINDS}
    found = examine(kinds["supervisor_package"].build(World(folder=tmp_path)).graph)
    assert names(found, "tool", "passes through") == {"transfer_to_booker", "transfer_to_payer"}
    found = examine(kinds["returns_command"].build(World(folder=tmp_path)).graph)
    (part,) = [part for part in found.parts if part.kind == "tool"]
    assert (part.handling, part.advice) == ("simulated", ""), "what it writes to the state follows from its arguments"


def test_an_examination_is_printed_a_part_a_line() -> None:
    parts = [
        Part("model", "m", "simulated"),
        Part("tool", "pay", "simulated", use="writes"),
        Part("node", "n", "stopped", "name it"),
    ]
    assert str(Examination(parts)).splitlines() == [
        "model m: simulated",
        "tool pay: simulated; writes",
        "node n: stopped; name it",
    ]


def test_tools_of_which_nothing_is_known_are_named_with_a_line_to_paste(tmp_path: Path) -> None:
    @tool
    def get_order(id: str) -> str:
        """Look an order up."""
        return id

    @tool
    def pay(id: str) -> str:
        """Pay."""
        return id

    @tool
    def drop(id: str) -> str:
        """Drop an order."""
        return id

    pay.metadata, drop.metadata = {"writes": False}, {"writes": True}
    graph = react(World(folder=tmp_path).model, [get_order, pay, drop])
    found = examine(graph)
    assert {part.name: part.use for part in found.parts if part.use} == {
        "get_order": "counts as writing; name the tools that write in writes=[...]",
        "pay": "reads: its metadata says writes=False",
        "drop": "writes: its metadata says writes=True",
    }
    *_, names_them, line = str(found).splitlines()
    assert "only read: get_order. Paste" in names_them and line == 'writes=["drop", "get_order"]'
    assert not examine(graph, writes=["drop"]).writes_line


def test_sub_graphs_are_named(tmp_path: Path) -> None:
    kinds = {kind.name: kind for kind in KINDS}
    found = examine(kinds["nested_subgraphs"].build(World(folder=tmp_path)).graph)
    assert names(found, "sub-graph", "simulated")


def node_graph(node: Any) -> Any:
    return StateGraph(dict).add_node("act", node).add_edge(START, "act").compile()


def handled(graph: Any, **options: Any) -> list[tuple[str, str]]:
    return [(part.kind, part.handling) for part in examine(graph, **options).problems]


def test_an_open_connection_leaks_from_a_node_and_not_from_a_simulated_tool(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "orders.db")

    @tool
    def query(sql: str) -> str:
        """Ask the database."""
        return str(connection.execute(sql).fetchall())

    def node(state: dict) -> dict:
        connection.execute("DELETE FROM orders")
        return {}

    agent = react(World(folder=tmp_path).model, [query])
    assert handled(agent) == []
    assert handled(agent, pass_through=["query"]) == [("connection", "could leak")]
    assert handled(node_graph(node)) == [("connection", "could leak")]


class Service:
    def __init__(self, folder: Path) -> None:
        self.log, self.never = (folder / "log").open("w"), (folder / "never").open("w")

    def node(self, state: dict) -> dict:
        self._save("state")
        return {}

    def _save(self, text: str) -> None:
        self.log.write(text)

    def never_called(self) -> None:
        self.never.write("x")

    def close(self) -> None:
        self.log.close()
        self.never.close()


def test_a_node_is_followed_into_the_methods_that_it_calls(tmp_path: Path) -> None:
    service = Service(tmp_path)
    (problem,) = examine(node_graph(service.node)).problems
    assert problem.name == f"{tmp_path}/log open in act"
    assert handled(node_graph(lambda state: service.node(state))) == [("file", "could leak")]
    service.close()
    assert handled(node_graph(service.node)) == []


def test_a_tool_of_an_object_that_holds_a_graph_is_no_sub_agent(tmp_path: Path) -> None:
    """It would really run, unseen by any guard where it changes nothing but memory."""

    class Desk:
        def __init__(self) -> None:
            self.booked: list[str] = []

            @tool
            def book(city: str) -> str:
                """Book a room."""
                self.booked.append(city)
                return "booked"

            @tool
            def delegate(question: str) -> str:
                """Let the other agent do it."""
                return self.worker.invoke(ask(question))["messages"][-1].text

            self.worker = react(World(folder=tmp_path).model, [book])
            self.graph = react(World(folder=tmp_path).model, [book, delegate])

    found = examine(Desk().graph)
    assert names(found, "tool", "simulated") == {"book"} and names(found, "tool", "passes through") == {"delegate"}


def test_what_no_class_is_asked_about(tmp_path: Path) -> None:
    book, *_ = toolbox(World(folder=tmp_path))
    assert "tool.invoke" in examine(node_graph(lambda state: book.func("Rome", 2))).problems[0].advice

    llm = FakeListLLM(responses=["x"])
    assert handled(node_graph(lambda state: llm.invoke("x"))) == [("model", "not simulated")]


def test_code_that_holds_the_functions_of_tools_is_refused(tmp_path: Path) -> None:
    """As CodeAct agents do: what they run is the real tool."""
    book, *_ = toolbox(World(folder=tmp_path))
    names = {book.name: book.func}
    agent = node_graph(lambda state: {"prompt": book.description, "ran": eval("book('Rome')", names)})
    (problem,) = examine(agent).problems
    assert problem.handling == "not simulated" and "the function of tool book" in problem.advice
    assert examine(agent, pass_through=["book"]).problems == []


def test_a_model_class_that_holds_a_client_is_no_problem() -> None:
    openai = pytest.importorskip("langchain_openai")
    model = openai.ChatOpenAI(model="gpt-x", api_key="none")
    found = examine(react(model, []))
    assert names(found, "model", "simulated") == {"ChatOpenAI gpt-x"} and found.problems == []
    client = model.root_client
    assert handled(node_graph(lambda state: client.responses.create(input="x"))) == [("client", "stopped")]


def test_unknown_names_and_things_without_a_graph_are_refused(tmp_path: Path) -> None:
    graph = react(World(folder=tmp_path).model, toolbox(World(folder=tmp_path)))
    with pytest.raises(ConfigurationError, match="Did you mean 'book'"):
        examine(graph, pass_through=["boook"])
    with pytest.raises(ConfigurationError, match="holds no compiled graph"):
        examine({"graph": 1})


def test_an_open_file_could_leak(tmp_path: Path) -> None:
    """What is written to a file that is open already is no event that a guard could see."""
    with (tmp_path / "log").open("a") as log:

        def note(state: dict) -> dict:
            log.write("hello")
            return state

        graph = StateGraph(dict).add_node("note", note).add_edge(START, "note").compile()
        (problem,) = examine(graph).problems
    assert (problem.kind, problem.handling) == ("file", "could leak") and "move it into a tool" in problem.advice


def test_a_node_that_sets_a_context_variable_of_its_own_is_no_problem() -> None:
    own = ContextVar("own", default=0)

    def count(state: dict[str, Any]) -> dict[str, Any]:
        token = own.set(own.get() + 1)
        copy_context().run(own.set, 5)
        own.reset(token)
        return {}

    graph = StateGraph(dict).add_node("count", count).add_edge(START, "count").compile()
    found = examine(graph)
    assert found.refused == [] and [part.handling for part in found.parts] == ["passes through"], found.parts
