"""What `examine` finds in the zoo, in agents that would harm, and in what users hold beside their graphs."""

import asyncio
import json
import sqlite3
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from langchain_core.language_models import FakeListLLM
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite import SqliteStore
from pydantic import BaseModel, Field
from test_zoo_dreamed import dream, the_graph
from worlds import TASK, Answers, slow_unless
from zoo import KINDS, RACING, Kind, World
from zoo.base import ask, react, toolbox
from zoo.hostile import HOSTILE, PLAIN, Hostile, hostile_agent, hostile_node, scene
from zoo.policy import policy_for

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.simulate import SimulatedAgent, doctor, examine, simulated
from dreamgym_lg.simulate.doctor import Examination, Part
from dreamgym_lg.simulate.trial import TrialPolicy, example, try_out

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
    found = examine(built.graph, pass_through=HANDS_OVER.get(kind.name, ()), simulate_nodes=built.nodes)
    made, passing = names(found, "tool", "simulated"), names(found, "tool", "passes through")
    late = MADE_AT_RUN_TIME.get(kind.name)
    answered = {*built.tools, *built.reads}
    assert made | names(found, "node", "simulated") >= (answered if late is None else late)
    assert passing >= set(built.passthrough) and not passing & made
    assert found.problems == [] and {path.name for path in tmp_path.iterdir()} == FILES.get(kind.name, set())

    environment = Answers({"book": "booked"} if kind.name in RACING else built.answers)
    options: Any = {"pass_through": HANDS_OVER.get(kind.name, ()), "simulate_nodes": built.nodes}
    episode = simulated(built.graph, policy=policy_for(world), environment=environment, task=TASK, **options)
    dream(built, "async" if built.mode == "async" else "sync", episode, the_graph)
    called = {json.loads(step.action)["name"].removeprefix("node:") for step in episode.steps if step.valid}
    assert called == answered and called <= made | names(found, "node", "simulated") | (called if late is not None else set())
    assert set(world.passed) <= passing and episode.blocked == [] and world.effects == [] and world.model_calls == 0


@pytest.mark.parametrize("hostile", [slow_unless(hostile in PLAIN, hostile) for hostile in HOSTILE])
def test_what_would_harm_is_told_by_one_tried_episode(hostile: Hostile, tmp_path: Path) -> None:
    with scene(tmp_path) as world:
        node, agent = hostile_node(hostile, world).graph, hostile_agent(hostile, world).graph
        tried = try_node(node)
        assert tried and {part.handling for part in tried} == {"stopped"} and "simulate_nodes" in tried[0].advice
        assert try_node(node, simulate_nodes=["node"]) == []
        assert try_node(agent) == [], "its tool is simulated, so that nothing of it runs"
        assert {part.handling for part in try_node(agent, pass_through=["harm"])} == {"stopped"}
        assert not hostile.happened(world)


def try_node(graph: Any, **options: Any) -> list[Part]:
    return asyncio.run(try_out(SimulatedAgent(graph, TrialPolicy(), **options)))[0]


def test_a_node_that_asks_a_person_is_shown_with_who_answers(tmp_path: Path) -> None:
    built = next(each for each in KINDS if each.name == "raw_interrupt").build(World(folder=tmp_path))
    (part,) = (each for each in examine(built.graph).parts if each.kind == "interrupt")
    assert part.handling == "answered" and "a user hears any other" in part.advice


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("sqlite_checkpoints", "SqliteSaver"),
        ("memory_and_store", "InMemoryStore"),
        ("node_cache", "InMemoryCache"),
        ("human_approves_tools", "InMemorySaver"),
    ],
)
def test_what_production_keeps_is_replaced(kind: str, part: str, tmp_path: Path) -> None:
    built = next(each for each in KINDS if each.name == kind).build(World(folder=tmp_path))
    assert part in {part.name.split()[0] for part in examine(built.graph).parts if part.handling == "replaced"}


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
        "get_order": "unknown: counts as writing",
        "pay": "reads: its metadata says writes=False",
        "drop": "writes: its metadata says writes=True",
    }
    *_, names_them, line = str(found).splitlines()
    assert "only read: get_order. Leave those out" in names_them and line == 'writes=["drop", "get_order"]'
    assert not examine(graph, writes=["drop"]).writes_line
    with pytest.raises(ConfigurationError, match="tool 'drop' in writes really runs in a dream"):
        examine(graph, writes=["drop"], pass_through=["drop"])


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


def test_a_store_that_code_holds_leaks_and_that_of_a_graph_is_replaced(tmp_path: Path) -> None:
    """Only a graph's own is replaced: the code of a node goes on with the store that it closes over."""
    connection = sqlite3.connect(tmp_path / "memory.db")
    store, saver, in_memory = SqliteStore(connection), SqliteSaver(connection), InMemoryStore()

    def node(state: dict) -> dict:
        store.put(("memories",), "key", {"text": "harm"})
        return {}

    assert handled(node_graph(node)) == [("connection", "could leak")]
    assert handled(node_graph(lambda state: {"checkpoints": list(saver.list(None))})) == [("connection", "could leak")]
    assert handled(node_graph(lambda state: {"items": in_memory.search(("memories",))})) == []
    built = StateGraph(dict).add_node("act", lambda state: {}).add_edge(START, "act")
    assert handled(built.compile(store=store, checkpointer=saver)) == []


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


REFUNDED: list[str] = []


def refund(order_id: str) -> str:
    """Refund an order."""
    REFUNDED.append(order_id)
    return "refunded"


FUNCTIONS = {"refund": refund}


def called_by_name(state: dict) -> dict:
    return {"answers": [FUNCTIONS[call["name"]](**call["args"]) for call in state["calls"]]}


@pytest.mark.parametrize("bound_in", ["module", "node"])
def test_a_plain_function_that_a_model_may_call_and_a_node_calls_by_name_is_refused(bound_in: str, tmp_path: Path) -> None:
    model = World(folder=tmp_path).model
    bound = model.bind_tools([convert_to_openai_tool(refund)])
    binds = lambda state: {"calls": model.bind_tools(list(FUNCTIONS.values())).invoke("x").tool_calls}  # noqa: E731
    thinks = {"module": lambda state: {"calls": bound.invoke("x").tool_calls}, "node": binds}[bound_in]

    def agent(act: Any) -> Any:
        builder = StateGraph(dict).add_node("think", thinks).add_node("act", act)
        return builder.add_edge(START, "think").add_edge("think", "act").compile()

    (problem,) = examine(agent(called_by_name)).problems
    assert problem == ("tool", "refund", "not simulated", f"act {doctor._BY_NAME}", "")
    with pytest.raises(ConfigurationError, match="tool refund .not simulated.*make it a @tool"):
        AgentWorld(agent(called_by_name))
    assert examine(agent(lambda state: {})).problems == [], "a schema alone, as of a route, runs nothing"


def test_a_model_class_that_holds_a_client_is_no_problem() -> None:
    openai = pytest.importorskip("langchain_openai")
    model = openai.ChatOpenAI(model="gpt-x", api_key="none")
    found = examine(react(model, []))
    assert names(found, "model", "simulated") == {"ChatOpenAI gpt-x"} and found.problems == []
    client = model.root_client
    assert handled(node_graph(lambda state: client.responses.create(input="x"))) == [("client", "stopped")]


def test_a_deep_agent_on_real_files_is_told_to_use_virtual_ones(tmp_path: Path) -> None:
    deepagents = pytest.importorskip("deepagents")
    backends = pytest.importorskip("deepagents.backends")
    model = World(folder=tmp_path / "world").model
    real = deepagents.create_deep_agent(model, [], backend=backends.FilesystemBackend(root_dir=tmp_path))
    assert handled(real) == [("backend", "stopped")] and handled(deepagents.create_deep_agent(model, [])) == []


def test_code_around_a_graph_counts_too(tmp_path: Path) -> None:
    graph = react(World(folder=tmp_path).model, toolbox(World(folder=tmp_path)))

    class Agent:
        def invoke(self, payload: Any) -> Any:
            state = graph.invoke(payload)
            (tmp_path / "log.txt").write_text(str(state))
            return state

    (part,) = try_node(Agent())
    assert part.handling == "stopped" and "log.txt" in part.advice and "test_doctor.py" in part.name
    assert not (tmp_path / "log.txt").exists()


def test_an_error_of_the_agent_s_own_is_no_problem_of_the_dream() -> None:
    """The doctor has no real task to give it."""
    (part,) = try_node(node_graph(lambda state: {"total": state["order"]["total"]}))
    assert part.handling == "raised" and "KeyError: 'order'" in part.advice and "test_doctor.py" in part.name
    assert Examination([part]).problems == []


def test_an_example_of_a_schema_is_valid() -> None:
    class Item(BaseModel):
        name: str
        kind: Literal["new", "old"]
        count: Annotated[int, Field(ge=3)]
        note: str | None = None

    class Order(BaseModel):
        items: Annotated[list[Item], Field(min_length=2)]
        total: float
        paid: bool
        by: Item | None

    assert Order.model_validate(example(Order.model_json_schema())).items[1].count == 3


def test_an_example_of_a_tree_ends() -> None:
    class Leaf(BaseModel):
        name: str

    class Node(BaseModel):
        children: list["Node"]
        parent: "Node | None"
        first: "Node | Leaf"
        owner: Leaf | None
        some: Annotated[list["Node | Leaf"], Field(min_length=1)]

    one = Node.model_validate(example(Node.model_json_schema()))
    leaf = Leaf(name="example")
    assert one == Node(children=[], parent=None, first=leaf, owner=leaf, some=[leaf])
    assert example({"type": ["string", "null"]}) == "example"
    assert example({"$defs": {"A": {"const": 3}}, "allOf": [{"$ref": "#/$defs/A"}, {"description": "a"}]}) == 3


def test_unknown_names_and_things_without_a_graph_are_refused(tmp_path: Path) -> None:
    graph = react(World(folder=tmp_path).model, toolbox(World(folder=tmp_path)))
    with pytest.raises(ConfigurationError, match="Did you mean 'book'"):
        examine(graph, pass_through=["boook"])
    with pytest.raises(ConfigurationError, match="Did you mean 'model'"):
        examine(graph, simulate_nodes=["modle"])
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
    assert (problem.kind, problem.handling) == ("file", "could leak") and "simulate_nodes" in problem.advice


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
