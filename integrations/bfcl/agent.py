"""An ordinary LangChain agent with BFCL's tools, and the scripted user who talks to it."""

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphRecursionError
from langgraph.graph.state import CompiledStateGraph

from dreamgym_lg.errors import MissingDependency
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
    """Say the user's turns to `graph` one after another and return all messages; ask `apis.success()` then.

    A turn of more than `recursion_limit` steps (two a tool call) ends the conversation, which then has not succeeded.
    """
    messages: list[AnyMessage] = []
    text: str | None = apis.user_turns[apis.turn]
    while text is not None:
        messages = [*messages, HumanMessage(text)]
        try:  # streamed, so that the messages of a turn without end are kept
            for values in graph.stream({"messages": messages}, _config(recursion_limit), stream_mode="values"):
                messages = values["messages"]
        except GraphRecursionError:
            apis.cut_short = True
            break
        text = apis.end_turn()
    return messages


async def arun_turns(graph: CompiledStateGraph, apis: BFCLApis, *, recursion_limit: int = 100) -> list[AnyMessage]:
    """`run_turns` on the event loop."""
    messages: list[AnyMessage] = []
    text: str | None = apis.user_turns[apis.turn]
    while text is not None:
        messages = [*messages, HumanMessage(text)]
        try:
            async for values in graph.astream({"messages": messages}, _config(recursion_limit), stream_mode="values"):
                messages = values["messages"]
        except GraphRecursionError:
            apis.cut_short = True
            break
        text = apis.end_turn()
    return messages


def _config(recursion_limit: int) -> RunnableConfig:
    # one call at a time: those of one message are played in the model's order, as BFCL does
    return {"recursion_limit": recursion_limit, "max_concurrency": 1}
