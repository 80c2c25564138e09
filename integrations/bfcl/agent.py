"""An ordinary LangChain agent with BFCL's tools, and the scripted user who talks to it."""

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphRecursionError
from langgraph.graph.state import CompiledStateGraph

from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.integrations.bfcl.apis import BFCLApis
from dreamgym_lg.integrations.bfcl.data import SYSTEM_PROMPT

try:
    from langchain.agents import create_agent
except ImportError as error:
    raise MissingDependency.extra("langchain", "bfcl") from error


def create_agent_graph(model: str | BaseChatModel, apis: BFCLApis) -> CompiledStateGraph:
    """`langchain.agents.create_agent` with the tools of `apis`, to which the graph is bound."""
    return create_agent(model, apis.tools, system_prompt=SYSTEM_PROMPT)


def run_turns(graph: CompiledStateGraph, apis: BFCLApis, *, recursion_limit: int = 100) -> list[AnyMessage]:
    """`arun_turns` outside an event loop."""
    return run_lasting(arun_turns(graph, apis, recursion_limit=recursion_limit))


async def arun_turns(graph: CompiledStateGraph, apis: BFCLApis, *, recursion_limit: int = 100) -> list[AnyMessage]:
    """Send the user's turns to `graph` one after another and return all messages; `apis.success()` is the outcome.

    A turn of more than `recursion_limit` steps (two a tool call) ends the conversation without success.
    """
    messages: list[AnyMessage] = []
    text: str | None = apis.user_turns[apis.turn]
    while text is not None:
        messages = [*messages, HumanMessage(text)]
        # one call at a time: those of one message are played in the model's order, as BFCL does
        config: RunnableConfig = {"recursion_limit": recursion_limit, "max_concurrency": 1}
        try:  # streamed, so that the messages of a turn without end are kept
            async for values in graph.astream({"messages": messages}, config, stream_mode="values"):
                messages = values["messages"]
        except GraphRecursionError:
            apis.cut_short = True
            break
        text = apis.end_turn()
    return messages
