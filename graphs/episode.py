"""The episode graph: `policy -> environment -> policy ... -> END`, in a dream or in reality."""

import operator
from typing import Annotated, Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from dreamgym_lg.environment import Environment, EpisodeContext, record_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Step, Task


class EpisodeState(TypedDict, total=False):
    """The state of an episode. Input: `task` alone."""

    task: Task
    messages: Annotated[list[AnyMessage], operator.add]
    """The policy's conversation: it only grows, so that a whole episode is one training row."""
    steps: Annotated[list[Step], operator.add]
    success: bool


def read_action(text: str) -> str:
    """The action in a policy's reply: its first line. An empty reply is the empty action, which no environment knows."""
    return text.strip().split("\n", 1)[0].strip()


class _Nodes(NamedTuple):
    """The nodes of one episode graph."""

    policy: BaseChatModel
    environment: Environment | None
    max_steps: int

    def world(self, runtime: Runtime[EpisodeContext]) -> Environment:
        if self.environment is not None:
            return self.environment
        if runtime.context is None or runtime.context.environment is None:
            raise ConfigurationError("this episode has no environment: give one to create_episode_graph or in EpisodeContext")
        return runtime.context.environment

    async def reset(self, state: EpisodeState, runtime: Runtime[EpisodeContext]) -> dict[str, Any]:
        task = state["task"]
        task = task if isinstance(task, Task) else Task(**task)  # a server passes JSON
        observation = await self.world(runtime).areset(task)
        return {"task": task, "messages": [SystemMessage(task.instruction), HumanMessage(observation)], "success": False}

    async def act(self, state: EpisodeState) -> dict[str, Any]:
        return {"messages": [await self.policy.ainvoke(state["messages"])]}

    async def answer(self, state: EpisodeState, runtime: Runtime[EpisodeContext]) -> dict[str, Any]:
        *_, observation, reply = state["messages"]
        last = len(state.get("steps", ())) + 1 >= self.max_steps
        result = await self.world(runtime).astep(action := read_action(reply.text))
        step, success = record_action(action, observation.text, result, last=last)
        return {"messages": [HumanMessage(step.next_observation)], "steps": [step], "success": success}

    async def after(self, state: EpisodeState) -> str:  # async, as LangGraph would run a plain function in a thread
        last = state["steps"][-1]
        return END if last.terminated or last.truncated else "policy"


def create_episode_graph(
    policy: BaseChatModel, environment: Environment | None = None, *, max_steps: int = 10
) -> StateGraph[EpisodeState, EpisodeContext, EpisodeState, EpisodeState]:
    """Build the uncompiled episode graph.

    Args:
        policy: Any chat model; it reads the instruction and observations and answers with an action.
        environment: Plays the world; None takes it from the run's `EpisodeContext`, one instance per concurrent episode.
        max_steps: The episode is truncated after this many actions, refused ones included.
    """
    nodes = _Nodes(policy, environment, max_steps)
    builder = StateGraph(EpisodeState, context_schema=EpisodeContext)
    builder.add_node("reset", nodes.reset)
    builder.add_node("policy", nodes.act)
    builder.add_node("environment", nodes.answer)
    builder.add_edge(START, "reset")
    builder.add_edge("reset", "policy")
    builder.add_edge("policy", "environment")
    builder.add_conditional_edges("environment", nodes.after, ["policy", END])
    return builder
