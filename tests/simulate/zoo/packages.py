"""Agents of langgraph-supervisor, langgraph-swarm, deepagents, and of an MCP server in a process of its own."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from deepagents import CompiledSubAgent, create_deep_agent
from deepagents.backends import CompositeBackend, StateBackend, StoreBackend
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_mcp_adapters.client import MultiServerMCPClient
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.memory import InMemoryStore
from langgraph_supervisor import create_supervisor
from langgraph_supervisor.handoff import create_forward_message_tool
from langgraph_swarm import create_handoff_tool, create_swarm

from zoo.base import Built, World, answered, ask, kinds, react, resumed, threaded, toolbox


def supervisor_package(world: World) -> Built:
    """Two agents, handed to one after the other; they go back by themselves."""
    world.scripted(sequence=["transfer_to_booker", "book", "transfer_to_payer", "pay"])
    book, pay, _ = toolbox(world)
    workers = [create_agent(world.model, [each], name=name) for each, name in ((book, "booker"), (pay, "payer"))]
    graph = create_supervisor(workers, model=world.model, output_mode="full_history").compile()
    return Built(graph=graph, payload=ask(), tools=["book", "pay"], expect=answered(6))


def supervisors_of_supervisors(world: World) -> Built:
    """A tree of two levels, compiled with a checkpointer; only the last message goes up."""
    world.scripted(sequence=["transfer_to_travel", "transfer_to_booker", "book"])
    booker = create_agent(world.model, [toolbox(world)[0]], name="booker")
    middle = create_supervisor([booker], model=world.model, supervisor_name="chief").compile(name="travel")
    graph = create_supervisor([middle], model=world.model).compile(checkpointer=InMemorySaver())

    def expect(result: Any) -> None:
        assert "done" in result["messages"][-1].text
        assert "transfer_to_travel" in [each.name for each in result["messages"] if isinstance(each, ToolMessage)]

    return Built(graph=graph, payload=ask(), tools=["book"], expect=expect, **threaded())


def supervisor_with_own_tools(world: World) -> Built:
    """The supervisor books itself, and forwards what a worker said word for word."""
    world.scripted(sequence=["transfer_to_payer", "pay", "book"])
    book, pay, _ = toolbox(world)
    payer = react(world.model, [pay], name="payer")
    tools = [book, create_forward_message_tool("supervisor")]
    graph = create_supervisor([payer], model=world.model, tools=tools, add_handoff_back_messages=False).compile()

    def expect(result: Any) -> None:
        assert isinstance(result["messages"][-1], AIMessage) and "done" in result["messages"][-1].text

    return Built(graph=graph, payload=ask(), tools=["book", "pay"], expect=expect)


def swarm_package(world: World) -> Built:
    """The state says which agent is active; the next turn begins with it."""
    world.scripted(sequence=["transfer_to_bob", "book"])
    alice = create_agent(world.model, [create_handoff_tool(agent_name="bob")], name="alice")
    bob = create_agent(world.model, [toolbox(world)[0], create_handoff_tool(agent_name="alice")], name="bob")
    graph = create_swarm([alice, bob], default_active_agent="alice").compile(checkpointer=InMemorySaver())

    def expect(result: Any) -> None:
        answered(2)(result)
        assert result["active_agent"] == "bob"

    return Built(graph=graph, payload=ask(), tools=["book"], expect=expect, **threaded())


def deep_agent_approved(world: World) -> Built:
    """A person approves each booking of a deep agent."""
    world.scripted(sequence=("ls", "book"))
    tools = [toolbox(world)[0]]
    graph = create_deep_agent(world.model, tools, interrupt_on={"book": True}, checkpointer=InMemorySaver())
    ways = resumed({"decisions": [{"type": "approve"}]})
    return Built(graph=graph, payload=ask(), tools=["book"], passthrough=["ls"], expect=answered(2), **ways)


def deep_agent_of_own_graphs(world: World) -> Built:
    """Its sub-agents are graphs that the user has compiled."""
    world.scripted(sequence=("task", "book"))
    worker = react(world.model, [toolbox(world)[0]])
    names = [f"{label}-subagent_type" for label in ("production", "policy")]  # what a scripted model asks for
    workers = [CompiledSubAgent(name=name, description="books", runnable=worker) for name in names]
    graph = create_deep_agent(world.model, subagents=workers)
    return Built(graph=graph, payload=ask(), tools=["book"], passthrough=["task"], expect=answered())


def deep_agent_that_remembers(world: World) -> Built:
    """Some of its files are the state's, some a store's."""
    world.scripted(sequence=("write_file", "ls", "book"))
    backend = CompositeBackend(default=StateBackend(), routes={"/memories/": StoreBackend(namespace=lambda _: ("memories",))})
    graph = create_deep_agent(world.model, [toolbox(world)[0]], backend=backend, store=InMemoryStore())
    passthrough = ["write_file", "ls"]

    def expect(result: Any) -> None:
        assert [each.name for each in result["messages"] if isinstance(each, ToolMessage)] == [*passthrough, "book"]

    return Built(graph=graph, payload=ask(), tools=["book"], passthrough=passthrough, expect=expect)


def servers(world: World) -> MultiServerMCPClient:
    server = {"command": sys.executable, "args": ["-S", str(Path(__file__).with_name("mcp_server.py")), str(world.folder)]}
    return MultiServerMCPClient({"hotel": {**server, "transport": "stdio"}})


def _read_back(world: World) -> Any:
    async def ainvoke(graph: Any, payload: Any) -> Any:
        result = await graph.ainvoke(payload)
        world.effects[:] = world.disk()  # another process wrote it
        return result

    return ainvoke


def mcp_tools(world: World) -> Built:
    """Tools of a server that is started anew for every call."""
    tools = asyncio.run(servers(world).get_tools())
    return Built(
        graph=create_agent(world.model, tools),
        payload=ask(),
        tools=["book"],
        mode="async",
        ainvoke=_read_back(world),
        expect=answered(),
    )


KINDS = kinds(
    supervisor_package,
    supervisors_of_supervisors,
    supervisor_with_own_tools,
    swarm_package,
    deep_agent_approved,
    deep_agent_of_own_graphs,
    deep_agent_that_remembers,
    mcp_tools,
)
