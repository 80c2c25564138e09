"""Further ways in which a node reaches its model, and models of further classes."""

import asyncio
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, SimpleChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField, RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime

from zoo.base import Built, World, answered, ask, kinds, react, single, threaded, toolbox
from zoo.calling import loop
from zoo.models import ProductionModel


def model_around_a_model(world: World) -> Built:
    """A class of the user's that adds something and asks the provider's."""

    class Polite(BaseChatModel):
        inner: Any

        @property
        def _llm_type(self) -> str:
            return "polite"

        def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
            return self.bind(tools=self.inner.bind_tools(tools).kwargs["tools"])

        def _generate(self, messages: list[BaseMessage], stop: Any = None, _: Any = None, **kwargs: Any) -> ChatResult:
            return ChatResult(generations=[ChatGeneration(message=self.inner.invoke(messages, stop=stop, **kwargs))])

    model = Polite(inner=world.model)
    return Built(graph=react(model, [toolbox(world)[0]]), payload=ask(), tools=["book"], expect=answered())


def async_only_model(world: World) -> Built:
    """A class that cannot be asked synchronously."""

    class Remote(ProductionModel):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            raise NotImplementedError("async only")

        async def _agenerate(self, messages: list[BaseMessage], stop: Any = None, _: Any = None, **kwargs: Any) -> ChatResult:
            return ChatResult(generations=[ChatGeneration(message=self._answer(messages, stop, kwargs))])

    graph = react(Remote(on_call=world._count), [toolbox(world)[0]])
    return Built(graph=graph, payload=ask(), tools=["book"], mode="async", expect=answered())


def text_model(world: World) -> Built:
    """A class that gives text alone: what it says is an argument of the tool, by the node's own rules."""
    book = toolbox(world)[0]

    class Texts(SimpleChatModel):
        @property
        def _llm_type(self) -> str:
            return "texts"

        def _call(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
            return world.model._answer(messages, stop, kwargs).text

    model = Texts()

    def node(state: MessagesState) -> dict[str, Any]:
        said = model.invoke(f"City: {state['messages'][-1].text}", stop=[" - done"]).text
        booked = book.invoke({"city": said.rpartition("City: ")[2], "nights": 1})
        return {"messages": [("ai", f"{said} {booked} done")]}

    def expect(result: Any) -> None:
        assert "City: a room" in result["messages"][-1].text

    return Built(graph=single(node), payload=ask("a room"), tools=["book"], expect=expect)


@dataclass
class Context:
    model: BaseChatModel
    tools: list[BaseTool]


def model_in_the_context(world: World) -> Built:
    """Neither the graph nor its nodes hold a model or a tool: both come with each run."""

    def think(state: MessagesState, runtime: Runtime[Context]) -> dict[str, Any]:
        return {"messages": [runtime.context.model.bind_tools(runtime.context.tools).invoke(state["messages"])]}

    def act(state: MessagesState, runtime: Runtime[Context]) -> dict[str, Any]:
        tools = {each.name: each for each in runtime.context.tools}
        return {"messages": [tools[call["name"]].invoke(call) for call in state["messages"][-1].tool_calls]}

    def tell(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [config["configurable"]["teller"].invoke(state["messages"])]}

    graph = StateGraph(MessagesState, context_schema=Context).add_sequence([think, act, tell]).add_edge(START, "think")
    compiled = graph.compile().with_config(configurable={"teller": world.production()})
    context = Context(world.model, [toolbox(world)[0]])
    return Built(graph=compiled, payload=ask(), tools=["book"], expect=answered(), **threaded(context=context))


def one_of_several_models(world: World) -> Built:
    """The run's config chooses which of them is asked; it listens to its start and end."""
    heard, other = list[str](), world.production()
    field = ConfigurableField(id="model")
    tools = [toolbox(world)[0]]

    class Chosen:
        """Alternatives bind their tools themselves."""

        models = {"one": world.model.bind_tools(tools), "other": other.bind_tools(tools)}

    chosen = Chosen.models["one"].configurable_alternatives(field, default_key="one", other=Chosen.models["other"])
    bound = chosen.with_listeners(on_end=lambda run: heard.append(run.name)).with_config(configurable={"model": "other"})
    graph = loop(lambda state: {"messages": [bound.invoke(state["messages"])]}, tools)
    return Built(graph=graph, payload=ask(), tools=["book"], expect=answered())


def heard_and_limited(world: World) -> Built:
    """A rate limit on the model, callbacks of the class, of the call and of the run."""

    class Heard(BaseCallbackHandler):
        def __init__(self) -> None:
            self.ended = list[str]()

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.ended.append("model")

        def on_tool_end(self, output: Any, **kwargs: Any) -> None:
            self.ended.append("tool")

    limiter = InMemoryRateLimiter(requests_per_second=1000, check_every_n_seconds=0.001, max_bucket_size=1)
    graph = react(world.production(rate_limiter=limiter, callbacks=[Heard()]), [toolbox(world)[0]])

    def invoke(graph: Any, payload: Any) -> Any:
        heard = Heard()
        result = graph.invoke(payload, {"callbacks": [heard], "tags": ["mine"], "run_name": "mine"})
        assert heard.ended == ["model", "tool", "model"], heard.ended
        return result

    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", invoke=invoke, expect=answered())


def calls_of_one_id(world: World) -> Built:
    """Small models give all calls of a reply the same id."""
    graph = react(world.scripted(per_reply=2, call_id="call_0"), list(toolbox(world)[:2]))
    return Built(graph=graph, payload=ask(), tools=["book", "pay"], expect=answered(2))


def first_of_several(world: World) -> Built:
    """Several prompts at once; whichever is ready first is taken first."""

    def node(state: dict) -> dict[str, Any]:
        return {"texts": sorted(reply.text for _, reply in world.model.batch_as_completed(state["topics"]))}

    async def anode(state: dict) -> dict[str, Any]:
        asked = [asyncio.create_task(world.model.ainvoke(topic)) for topic in state["topics"]]
        return {"texts": sorted([(await done).text for done in asyncio.as_completed(asked)])}

    def expect(result: Any) -> None:
        assert [text.split(": ")[1][:1] for text in result["texts"]] == [*"abc"]

    return Built(graph=single(node, anode, dict), payload={"topics": [*"abc"]}, expect=expect)


KINDS = kinds(
    model_around_a_model,
    async_only_model,
    text_model,
    model_in_the_context,
    one_of_several_models,
    heard_and_limited,
    calls_of_one_id,
    first_of_several,
)
