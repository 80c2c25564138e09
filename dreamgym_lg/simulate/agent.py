"""An unmodified graph as what `rollout` plays, and as what goes back to production."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel

from dreamgym_lg.actions import render_answer
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed
from dreamgym_lg.simulate.context import active, apulled, pulled
from dreamgym_lg.simulate.episode import Call, Episode, install
from dreamgym_lg.simulate.guard.guard import RealAccessBlocked
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Step, Task

logger = logging.getLogger(__name__)

Verify = Callable[[Task, Any], float | bool]
"""(task, the graph's final state) -> the episode's reward, 0 to 1; a success if it is 1."""


def simulated(graph: Any, *, policy: BaseChatModel, environment: Environment, **options: Any) -> Episode:
    """Run `graph` in the dream: `with simulated(...) as episode: state = episode.invoke(payload)`, or `async with`.

    Inside the block every run of the graph, by `episode.invoke` or by its own methods, has its chat models answered by
    `policy`, its tool calls by `environment` (an action is `render_call`'s text), and nothing real touched: the guard raises
    `RealAccessBlocked` there, and again at the block's end if it was swallowed. What the environment raises ends the block too.
    Afterwards `episode` holds `steps`, `calls`, `blocked` and `truncated`.

    Args:
        graph: A compiled graph, or any object with `invoke` that runs one.
        policy: The chat model that is trained; tools reach it in OpenAI's form.
        environment: Plays the tools; one instance per concurrent episode.
        task: What the environment is reset to; None if it has been.
        select: Whether a `Call` is the policy's; one that is not goes to its production model. Default: all are.
        pass_through: Names of tools that really run, under the guard. State tools and sub-agents do by themselves.
        simulate_nodes: Nodes of plain code that the environment answers instead.
        allow: Hosts and paths that may be touched.
        respond: Answers interrupts; by default everything is approved.
        recursion_limit: Steps of the graph, at which the episode is truncated.
    """
    return Episode(graph, policy=policy, environment=environment, **options)


class SimulatedAgent:
    """What `rollout` plays: an unmodified graph with the policy in it, in the dream or, with `real=True`, on its own tools.

    Args:
        graph: As for `simulated`.
        policy: The chat model that is trained.
        payload: The graph's input for a task; by default its instruction as a human message.
        verify: The outcome, judged from the graph's final state. Without it the environment judges: it is asked the final
            answer as an action, and its reward and success count.
        real: Only the policy is put in; tools, checkpointer and all else are the graph's own, and no guard stands.
        options: `select`, `pass_through`, `simulate_nodes`, `allow`, `respond`, `recursion_limit` of `simulated`.
    """

    def __init__(
        self, graph: Any, policy: BaseChatModel, *, payload: Callable[[Task], Any] | None = None, verify: Verify | None = None,
        real: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if real and verify is None:
            raise ConfigurationError("real=True needs verify=: in the real environment no model judges the outcome")
        self.graph, self.policy, self.verify, self.real, self.options = graph, policy, verify, real, options
        self.payload = payload or (lambda task: {"messages": [HumanMessage(task.instruction)]})

    async def astream(
        self, given: dict[str, Any], config: RunnableConfig | None = None, *, context: Any, **_: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Play one episode of `given["task"]` in `context.environment`; yields what was played, then the outcome.

        Raises the cause if the world failed or something real would have been touched; the steps were yielded before.
        """
        task: Task = given["task"]
        world = None if self.real else context.environment
        episode = Episode(self.graph, policy=self.policy, environment=world, task=task, **self.options)
        failure: Exception | None = None
        state = None
        try:
            async with episode:
                state = await episode.ainvoke(self.payload(task), {"callbacks": (config or {}).get("callbacks")})
        except Exception as error:
            failure = error
        except (RealAccessBlocked, BaseExceptionGroup) as error:  # a failed rollout, but no reason to end the others
            failure = EnvironmentFailed(str(error))
        if (recorder := TokenRecorder.current()) is not None:
            logger.info("the episode of task %s gave %s", task.id, recorder.capture(len(episode.calls)))
        yield {"steps": episode.steps}
        if failure is not None:
            raise failure
        yield await self._outcome(episode, task, state)

    async def _outcome(self, episode: Episode, task: Task, state: Any) -> dict[str, Any]:
        answer = final_answer(state)
        result = None
        if self.verify is not None:
            reward = float(self.verify(task, state))
            if not 0 <= reward <= 1:
                raise ConfigurationError(f"verify returned {reward:g} for task {task.id}; a reward is 0 to 1, 1 a success")
            success = reward >= 1
        else:
            result = episode.last or await episode.environment.astep(render_answer(answer))
            reward, success = result.reward, bool(result.info.get("success", False))
        last = Step(
            observation=episode.steps[-1].next_observation if episode.steps else task.instruction,
            action=render_answer(answer), next_observation=result.observation if result else "", reward=reward,
            terminated=not episode.truncated, truncated=episode.truncated,
            reasoning=str(result.info.get("reasoning", "")) if result else "",
        )  # fmt: skip
        return {"steps": [*episode.steps, last], "success": success and not episode.truncated}


def final_answer(state: Any) -> str:
    """The text with which the graph ended: its last AI message, else what it returned."""
    messages = state.get("messages") if isinstance(state, dict) else getattr(state, "messages", state)
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        return next((message.text for message in reversed(messages) if isinstance(message, AIMessage)), "")
    return str(messages if messages is not None else state)


def with_policy(
    graph: Pregel, policy: BaseChatModel, *, select: Callable[[Call], bool] | None = None, pass_through: Sequence[str] = ()
) -> Any:
    """The graph for production: the same graph, tools and checkpointer, with `policy` in place of its chat models.

    Still a graph of its own class: it streams, nests, and is served as before; the original is left as it is. Models that a
    tool asks itself stay its own, as in the dream, unless the tool runs a graph or is named in `pass_through`.
    """
    if not isinstance(graph, Pregel):
        raise ConfigurationError(
            f"{type(graph).__name__} is no compiled graph; give what StateGraph.compile or create_agent returns"
        )

    def episode(served: Any) -> Episode:
        """A dream that this graph is run in goes on as a dream."""
        install()
        return active() or Episode(served, policy=policy, environment=None, select=select, pass_through=pass_through)

    kind: type[Any] = type(graph)

    class Served(kind):
        def stream(self, *args: Any, **kwargs: Any) -> Any:
            return pulled(super().stream(*args, **kwargs), episode(self))

        def astream(self, *args: Any, **kwargs: Any) -> Any:
            return apulled(super().astream(*args, **kwargs), episode(self))

    Served.__name__, Served.__qualname__, Served.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    served = object.__new__(Served)
    served.__dict__ = dict(graph.__dict__)
    return served
