"""LangGraph's own suite for checkpointers, on the one that a wrapped graph writes to, in production and in a dream."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hotel import PAYLOAD, TASK, Hotel, Model, build
from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

from dreamgym_lg.simulate import simulated, with_policy

THREAD: Any = {"configurable": {"thread_id": "t"}}


async def check_conformance(saver: Any) -> None:
    @checkpointer_test(name="wrapped")
    async def given() -> AsyncIterator[BaseCheckpointSaver[Any]]:
        yield saver

    report = await validate(given)
    assert report.passed_all_base() and len(report.results) > 4, report.to_dict()


async def test_a_graph_with_a_policy_keeps_its_checkpointer(tmp_path: Path) -> None:
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.db")) as saver:
        served = with_policy(build("production", [], checkpointer=saver), Model(label="policy"))
        await served.ainvoke(PAYLOAD, THREAD)
        assert served.checkpointer is saver and len([each async for each in saver.alist(THREAD)]) > 3
        await check_conformance(served.checkpointer)


async def test_a_dream_has_a_checkpointer_of_its_own() -> None:
    graph = build("production", [], checkpointer=InMemorySaver())
    async with simulated(graph, policy=Model(label="policy"), environment=Hotel(), task=TASK) as episode:
        await graph.ainvoke(PAYLOAD, THREAD)
        dreamed = episode.twin(graph).checkpointer
        assert dreamed is not graph.checkpointer and dreamed.get(THREAD) is not None and graph.checkpointer.get(THREAD) is None
        await check_conformance(dreamed)


class Basket:
    """What LangGraph writes by pickle alone."""

    def __init__(self, items: list[str]) -> None:
        self.items = items


async def test_a_dream_writes_what_the_agents_own_checkpointer_can_write(tmp_path: Path) -> None:
    class State(MessagesState):
        basket: Basket

    def fill(state: State) -> Any:
        return {"basket": Basket(["bread"])}

    def read(state: State) -> Any:
        return {"messages": [AIMessage(", ".join(state["basket"].items))]}

    saver = InMemorySaver(serde=JsonPlusSerializer(pickle_fallback=True))
    graph = StateGraph(State).add_sequence([fill, read]).add_edge(START, "fill").compile(checkpointer=saver)
    async with simulated(graph, policy=Model(label="policy"), environment=Hotel(), task=TASK) as episode:
        state = await graph.ainvoke(PAYLOAD, THREAD)
        kept = episode.twin(graph).checkpointer.get(THREAD)
    assert state["messages"][-1].text == "bread" and kept["channel_values"]["basket"].items == ["bread"]
