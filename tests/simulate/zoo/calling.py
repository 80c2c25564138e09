"""The many ways in which a node calls its model."""

from typing import Any, TypedDict

from langchain_core.caches import InMemoryCache as LLMCache
from langchain_core.globals import get_llm_cache, set_llm_cache
from langchain_core.messages import AIMessage, BaseMessageChunk, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.cache.memory import InMemoryCache as NodeCache
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import CachePolicy
from pydantic import BaseModel

from zoo.base import Built, World, answered, ask, kinds, react, toolbox
from zoo.models import ProductionModel

MODEL: Any = None
"""The model that `module_global` uses, as scripts do."""


class Trip(BaseModel):
    """A trip."""

    city: str
    days: list[int]


class Topic(TypedDict, total=False):
    topic: str
    text: str
    done: str


def loop(node: Any, tools: list[BaseTool], anode: Any = None) -> Any:
    """The usual loop around this model node."""
    graph = StateGraph(MessagesState)
    graph.add_node("model", RunnableLambda(node, anode) if anode else node)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def one(node: Any, anode: Any = None, schema: type = dict) -> Any:
    """A graph of this single node."""
    graph = StateGraph(schema)
    graph.add_node("only", RunnableLambda(node, anode) if anode else node)
    graph.add_edge(START, "only")
    return graph.compile()


def module_global(world: World) -> Built:
    global MODEL
    MODEL, tools = world.model, [toolbox(world)[0]]

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [MODEL.bind_tools(tools).invoke(state["messages"])]}

    return Built(graph=loop(node, tools), payload=ask(), tools=["book"], expect=answered())


def fresh_model(world: World) -> Built:
    """A model is made on every call, of a class that is made there too and overrides invoke."""
    tools = [toolbox(world)[0]]

    def node(state: MessagesState) -> dict[str, Any]:
        class Fresh(ProductionModel):
            def invoke(self, *args: Any, **kwargs: Any) -> AIMessage:
                return super().invoke(*args, **kwargs)

        return {"messages": [Fresh(on_call=world._count).bind_tools(tools).invoke(state["messages"])]}

    return Built(graph=loop(node, tools), payload=ask(), tools=["book"], expect=answered())


def overrides_invoke(world: World) -> Built:
    """A provider's class that never reaches BaseChatModel.generate."""

    class Direct(ProductionModel):
        def invoke(self, messages: Any, config: Any = None, *, stop: Any = None, **kwargs: Any) -> AIMessage:
            return self._answer(messages, stop, kwargs)

        async def ainvoke(self, messages: Any, config: Any = None, *, stop: Any = None, **kwargs: Any) -> AIMessage:
            return self._answer(messages, stop, kwargs)

    world.model = Direct(on_call=world._count)
    return Built(graph=react(world.model, [toolbox(world)[0]]), payload=ask(), tools=["book"], expect=answered())


def streams_model(world: World) -> Built:
    tools = [toolbox(world)[0]]
    bound = world.model.bind_tools(tools)

    def node(state: MessagesState) -> dict[str, Any]:
        whole: BaseMessageChunk | None = None
        for chunk in bound.stream(state["messages"]):
            whole = chunk if whole is None else whole + chunk
        return {"messages": [whole]}

    async def anode(state: MessagesState) -> dict[str, Any]:
        parts = [chunk async for chunk in bound.astream(state["messages"])]
        return {"messages": [sum(parts[1:], parts[0])]}

    return Built(graph=loop(node, tools, anode), payload=ask(), tools=["book"], expect=answered())


def streams_events_v2(world: World) -> Built:
    tools = [toolbox(world)[0]]
    bound = world.model.bind_tools(tools)

    async def node(state: MessagesState) -> dict[str, Any]:
        events = [event async for event in bound.astream_events(state["messages"], version="v2")]
        assert any(event["event"] == "on_chat_model_stream" for event in events)
        return {"messages": [events[-1]["data"]["output"]]}

    return Built(graph=loop(node, tools), payload=ask(), tools=["book"], mode="async", expect=answered())


def streams_events_v3(world: World) -> Built:
    tools = [toolbox(world)[0]]
    bound = world.model.bind_tools(tools)

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.stream_events(state["messages"], version="v3").output]}

    async def anode(state: MessagesState) -> dict[str, Any]:
        stream = await bound.astream_events(state["messages"], version="v3")
        return {"messages": [await stream.output]}

    return Built(graph=loop(node, tools, anode), payload=ask(), tools=["book"], expect=answered())


def calls_generate(world: World) -> Built:
    """Neither invoke nor stream: the method below both, with bound arguments given by hand."""
    tools = [toolbox(world)[0]]
    given = world.model.bind_tools(tools).kwargs

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [world.model.generate([state["messages"]], **given).generations[0][0].message]}

    async def anode(state: MessagesState) -> dict[str, Any]:
        result = await world.model.agenerate([state["messages"]], **given)
        return {"messages": [result.generations[0][0].message]}

    return Built(graph=loop(node, tools, anode), payload=ask(), tools=["book"], expect=answered())


def batches_model(world: World) -> Built:
    """Three prompts at once."""

    def prompts(state: dict) -> list[str]:
        return [f"write about {topic}" for topic in state["topics"]]

    def node(state: dict) -> dict[str, Any]:
        return {"texts": [reply.text for reply in world.model.batch(prompts(state))]}

    async def anode(state: dict) -> dict[str, Any]:
        return {"texts": [reply.text for reply in await world.model.abatch(prompts(state))]}

    def expect(result: Any) -> None:
        assert [topic for topic, text in zip("abc", result["texts"], strict=True) if f"about {topic}" in text] == [*"abc"]

    return Built(graph=one(node, anode), payload={"topics": [*"abc"]}, expect=expect)


def lcel_retry_fallback(world: World) -> Built:
    """A chain as node: the first model never answers, the second at its second try."""
    tools = [toolbox(world)[0]]
    prompt = ChatPromptTemplate.from_messages([("system", "You book rooms."), ("placeholder", "{messages}")])
    broken, flaky = world.production(fails=10**6), world.production(fails=1)
    first, second = (
        model.bind_tools(tools).with_retry(stop_after_attempt=2, wait_exponential_jitter=False) for model in (broken, flaky)
    )
    chain = prompt | first.with_fallbacks([second]) | (lambda message: {"messages": [message]})
    return Built(graph=loop(chain, tools), payload=ask(), tools=["book"], expect=answered())


def lcel_parser(world: World) -> Built:
    chain = (
        ChatPromptTemplate.from_template("write about {topic}")
        | world.model
        | StrOutputParser()
        | (lambda text: {"text": text})
    )

    def expect(result: Any) -> None:
        assert "write about rooms" in result["text"]

    return Built(graph=one(chain), payload={"topic": "rooms"}, expect=expect)


def configurable_model(world: World) -> Built:
    """Every call makes a copy of the model with fields from the run's config."""
    field = ConfigurableField(id="rounds")
    model, tools = world.scripted(rounds=2).configurable_fields(rounds=field), [toolbox(world)[0]]

    def node(state: MessagesState) -> dict[str, Any]:
        configured = model.with_config(configurable={"rounds": 2}).bind_tools(tools)
        return {"messages": [configured.invoke(state["messages"])]}

    return Built(graph=loop(node, tools), payload=ask(), tools=["book"], expect=answered(2))


def structured_output(world: World) -> Built:
    """Three schemas and methods in one node: a class, JSON schema natively, and the raw message beside it."""
    schema = Trip.model_json_schema()
    models = [
        world.model.with_structured_output(Trip),
        world.model.with_structured_output(schema, method="json_schema"),
        world.model.with_structured_output(Trip, method="json_schema", include_raw=True),
    ]

    def node(state: dict) -> dict[str, Any]:
        return {"found": [model.invoke(state["text"]) for model in models]}

    async def anode(state: dict) -> dict[str, Any]:
        return {"found": [await model.ainvoke(state["text"]) for model in models]}

    def expect(result: Any) -> None:
        by_tool, native, raw = result["found"]
        assert isinstance(by_tool, Trip) and Trip.model_validate(native).days and raw["parsed"] == Trip.model_validate(native)
        assert isinstance(raw["raw"], AIMessage)

    return Built(graph=one(node, anode), payload={"text": "a trip"}, expect=expect)


def forced_tool(world: World) -> Built:
    """The first call must take the second tool, the last must take none."""
    tools = list(toolbox(world)[:2])
    forced, free = (world.model.bind_tools(tools, tool_choice=choice) for choice in ("pay", "none"))

    def node(state: MessagesState) -> dict[str, Any]:
        model = forced if isinstance(state["messages"][-1], HumanMessage) else free
        return {"messages": [model.invoke(state["messages"])]}

    return Built(graph=loop(node, tools), payload=ask(), tools=["pay"], expect=answered())


def llm_cache(world: World) -> Built:
    """The process-wide cache of model answers is on while it runs."""
    cache = LLMCache()

    def invoke(graph: Any, payload: Any) -> Any:
        before = get_llm_cache()
        set_llm_cache(cache)
        try:
            return graph.invoke(payload)
        finally:
            set_llm_cache(before)

    graph = react(world.model, [toolbox(world)[0]])
    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", invoke=invoke, expect=answered(), cached=True)


def node_cache(world: World) -> Built:
    """Both nodes are cached: the model's by its input, the tool's too."""
    book = toolbox(world)[0]

    def write(state: Topic) -> dict[str, Any]:
        return {"text": world.model.invoke(state["topic"]).text}

    def act(state: Topic) -> dict[str, Any]:
        return {"done": book.invoke({"city": state["topic"], "nights": 1})}

    graph = StateGraph(Topic)
    graph.add_node("write", write, cache_policy=CachePolicy())
    graph.add_node("act", act, cache_policy=CachePolicy())
    graph.add_edge(START, "write")
    graph.add_edge("write", "act")
    compiled = graph.compile(cache=NodeCache())

    def expect(result: Any) -> None:
        assert "rooms" in result["text"] and result["done"], result

    return Built(graph=compiled, payload={"topic": "rooms"}, tools=["book"], expect=expect, cached=True)


KINDS = kinds(
    module_global,
    fresh_model,
    overrides_invoke,
    streams_model,
    streams_events_v2,
    streams_events_v3,
    calls_generate,
    batches_model,
    lcel_retry_fallback,
    lcel_parser,
    configurable_model,
    structured_output,
    forced_tool,
    llm_cache,
    node_cache,
)
