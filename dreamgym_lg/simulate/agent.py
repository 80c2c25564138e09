"""Plays episodes of an unmodified graph for `rollout`; puts a policy into production graphs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel
from typing_extensions import TypedDict

from dreamgym_lg.dream import User
from dreamgym_lg.environment import EpisodeContext
from dreamgym_lg.errors import AccessBlocked, ConfigurationError, EnvironmentFailed
from dreamgym_lg.simulate.context import (
    THREADS,
    RealAccessBlocked,
    aiterate_in_episode,
    guarded_episode,
    in_episode,
    iterate_in_episode,
)
from dreamgym_lg.simulate.conversation import RealUser, final_action, malformed_call
from dreamgym_lg.simulate.episode import AgentEpisode, EpisodeOptions, Route, check_context, check_names
from dreamgym_lg.simulate.object_graph import has_synchronous_middleware, nodes_with_own_threads, simulated_tools
from dreamgym_lg.simulate.simulated import Invocable, SimulatedEpisode, install_answering
from dreamgym_lg.tasks import agent_input, first_observation
from dreamgym_lg.types import Act, Step, Task

logger = logging.getLogger(__name__)

Graph = TypeVar("Graph", bound=Pregel)

Verify = Callable[[Task, Any], float | bool]
"""(task, the graph's final state) -> the episode's reward, 0 to 1; 1 is a success."""

ResetReal = Callable[[Task], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
"""Task -> context manager that resets the real environment. The episode is played and verified inside of it.

The graph, its tools and `Verify` see context variables that it sets. Episodes with a synchronous context manager are played
one after the other; an asynchronous one has to isolate concurrent episodes itself, or take a lock.
"""


class AgentInput(TypedDict):
    """The input of an agent in `rollout`."""

    task: Task


class AgentState(TypedDict, total=False):
    """An agent's steps and acts so far, its system prompts by node, its outcome."""

    steps: list[Step]
    acts: list[Act]
    prompts: dict[str, str]
    success: bool


class SimulatedAgent:
    """Plays an unmodified graph with the policy, in the dream or on its own tools.

    The last step's reward is the episode's outcome, 0 to 1. A truncated episode (recursion limit, the environment's step limit,
    endless interrupts) has reward 0 and is not judged.

    Args:
        graph: As for `simulated`.
        policy: The chat model that is trained.
        payload: Task -> the graph's input. Default: `agent_input`, its messages, or its instruction as a human message.
        verify: Judges the graph's final state. Without it the environment judges the final answer.
        real: Replace only the models; tools, checkpointer and all else are the graph's own, without a guard.
        reset_real: With `real`, resets the environment around each episode.
        user: With `real`, replies to the agent's messages. None: the first message ends the episode.
        options: As of `simulated` (`EpisodeOptions`).
    """

    def __init__(
        self,
        graph: Invocable,
        policy: BaseChatModel,
        *,
        payload: Callable[[Task], Any] | None = None,
        verify: Verify | None = None,
        real: bool = False,
        reset_real: ResetReal | None = None,
        user: User | None = None,
        **options: Unpack[EpisodeOptions],
    ) -> None:
        if real and verify is None:
            raise ConfigurationError(
                "real=True needs verify= (of a DreamGym: verify_real=): in the real environment no model judges the outcome"
            )
        if not real and (reset_real is not None or user is not None):
            raise ConfigurationError(
                "reset_real= or user= with real=False: a dream has no real world to reset; give it Dream(user=...)"
            )
        check_names(graph, options.get("route"), options.get("pass_through", ()))
        check_context(graph, options.get("context"))
        self.user = user
        self._pass_through = () if user is None else simulated_tools(graph, options.get("pass_through", ()))[1]
        self.graph, self.policy, self.verify, self.real, self.options = graph, policy, verify, real, options
        self.reset_real, self._reset_lock = reset_real, asyncio.Lock()
        self._is_sync = has_synchronous_middleware(graph)
        self.payload = payload or agent_input

    async def astream(
        self,
        state: AgentInput,
        config: RunnableConfig | None = None,
        *,
        context: EpisodeContext,
        stream_mode: Literal["values"] = "values",
    ) -> AsyncIterator[AgentState]:
        """Play one episode of `state["task"]` in `context.environment`. Yields the steps, then the outcome.

        If the environment failed or a real access was stopped, raises that error after yielding the steps.
        """
        task = state["task"]
        if context.environment is None and not self.real:
            raise ConfigurationError(
                "this agent is simulated, so rollout needs create_environment=; with real=True and verify= its own tools run"
            )
        environment = None if self.real else context.environment
        episode = SimulatedEpisode(self.graph, policy=self.policy, environment=environment, task=task, **self.options)
        if self.user is not None:
            episode.listener = RealUser(self.user, task, lambda: episode.steps, self._pass_through)
        failure: Exception | None = None
        final: Any = None
        async with self._reset(task):
            try:
                async with episode:
                    own: RunnableConfig = {"callbacks": (config or {}).get("callbacks")}
                    final = await run_graph(episode, self.payload(task), own, is_sync=self._is_sync)
            except Exception as error:
                failure = error
            except RealAccessBlocked as error:  # no `Exception`, and must not end the other rollouts
                failure = AccessBlocked(str(error))
            except BaseExceptionGroup as error:
                failure = EnvironmentFailed(str(error))
            yield {"steps": episode.steps, "acts": episode.acts, "prompts": episode.prompts}
            if failure is None:
                yield await self._outcome(episode, task, final)
        if failure is not None:  # outside of the user's context manager, which could swallow it
            raise failure

    @asynccontextmanager
    async def _reset(self, task: Task) -> AsyncIterator[None]:
        """The context of one episode: that of `reset_real`, if given."""
        context = self.reset_real(task) if self.reset_real is not None else nullcontext()
        if isinstance(context, AbstractAsyncContextManager):  # as is `nullcontext`
            async with context:
                yield
        elif isinstance(context, AbstractContextManager):
            async with self._reset_lock:
                with context:
                    yield
        else:
            raise ConfigurationError(
                f"reset_real returned {context!r} for task {task.id}; give a context manager, e.g. a generator function with "
                "one `yield` under @contextlib.contextmanager"
            )

    async def _outcome(self, episode: SimulatedEpisode, task: Task, final: Any) -> AgentState:
        """The steps, with the final answer or an unreadable call as rewarded last one."""
        malformed = malformed_call(final)
        read = final_action if episode.truncated else episode.read_action  # a truncated state may be incomplete
        answer = malformed or episode.last_action or read(final)
        result, reward, success = episode.last, 0.0, False
        decided_by, judged_by = "schema" if malformed and not self.real else "", ""
        if not episode.truncated and self.verify is not None:
            result, reward, judged_by = None, _verified(self.verify, task, final), "verify"
            success = reward >= 1
        elif not episode.truncated and (result or not malformed):
            result = result or await episode.environment.astep(answer)
            reward, success = result.reward, bool(result.info.get("success", False))
            decided_by, judged_by = (str(result.info.get(key, "")) for key in ("decided_by", "judged_by"))
        steps = episode.steps
        last = Step(
            observation=steps[-1].next_observation if steps else first_observation(task),
            action=answer,
            next_observation=result.observation if result else "",
            reward=reward,
            terminated=not episode.truncated,
            truncated=episode.truncated,
            valid=not malformed,
            reasoning=str(result.info.get("reasoning", "")) if result else "",
            decided_by=decided_by,
            judged_by=judged_by,
        )
        return {"steps": [*steps, last], "acts": episode.acts, "prompts": episode.prompts, "success": success}


async def run_graph(episode: SimulatedEpisode, payload: Any, config: RunnableConfig, *, is_sync: bool) -> Any:
    """Run the graph and return its last state. Args: `is_sync`, run it in a thread, for synchronous middleware."""
    if not is_sync:
        return await episode.ainvoke(payload, config)
    run = partial(copy_context().run, episode.invoke, payload, config)
    with in_episode(None):  # so that the thread is not patched as one of the agent's
        running = asyncio.get_running_loop().run_in_executor(THREADS, run)
    return await running


def _verified(verify: Verify, task: Task, final: Any) -> float:
    reward = float(verify(task, final))
    if not 0 <= reward <= 1:
        raise ConfigurationError(f"verify returned {reward:g} for task {task.id}; a reward is 0 to 1, 1 a success")
    return reward


# --- production ---------------------------------------------------------------------------------------------------------------


def with_policy(graph: Graph, policy: BaseChatModel, *, route: Route | None = None, pass_through: Sequence[str] = ()) -> Graph:
    """The same graph for production, with `policy` in place of its chat models.

    It streams, nests and is served as before; the original is unchanged. Models that a tool calls itself are not replaced,
    unless the tool runs a graph or is named in `pass_through`. Of nested graphs with policies, the inner one's policy answers
    first.

    Args:
        graph: What `StateGraph.compile` or `create_agent` returns.
        policy: Any chat model, without bound tools; an exported one by `load_policy`.
        route: The nodes whose models it answers for; the others keep their own. Default: all.
        pass_through: Tools whose own models it also replaces.

    Raises `ConfigurationError` for another kind of graph or model, and for unknown names.

    No guard is installed, and threads are not patched: a node that calls its model in a thread or pool of its own keeps the
    production model there, and a warning names it. Submit `contextvars.copy_context().run` with the call to change that.
    """
    episode = production_episodes(graph, policy, route=route, pass_through=pass_through)

    def stream(served: Pregel, run: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from iterate_in_episode(run(*args, **kwargs), episode(served))

    async def astream(served: Pregel, run: Callable[..., AsyncIterator[Any]], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(cast(Any, aiterate_in_episode(run(*args, **kwargs), episode(served)))) as chunks:
            async for chunk in chunks:
                yield chunk

    return derive(graph, stream, astream)


def production_episodes(
    graph: Pregel, policy: BaseChatModel, *, route: Route | None = None, pass_through: Sequence[str] = ()
) -> Callable[[Pregel], AgentEpisode]:
    """A function that creates the episode of a production run. In a played episode it returns that."""
    if not isinstance(graph, Pregel):
        raise ConfigurationError(
            f"{type(graph).__name__} is no compiled graph; give what StateGraph.compile or create_agent returns"
        )
    if not isinstance(policy, BaseChatModel):
        raise ConfigurationError(
            f"policy={policy!r} is no chat model: give one without bound tools; load_policy(folder) reads an exported policy"
        )
    check_names(graph, route, pass_through)
    if threaded := nodes_with_own_threads(graph):
        logger.warning(
            "%s start threads of their own, which carry no context: a model asked there is not the policy; "
            "submit contextvars.copy_context().run with the call",
            ", ".join(threaded),
        )

    def episode(served: Pregel) -> AgentEpisode:
        if isinstance(around := guarded_episode(), SimulatedEpisode):
            return around
        parent = around if isinstance(around, AgentEpisode) else None
        install_answering()
        return AgentEpisode(served, policy=policy, environment=None, route=route, pass_through=pass_through, parent=parent)

    return episode


def derive(graph: Graph, on_stream: Callable[..., Iterator[Any]], on_astream: Callable[..., AsyncIterator[Any]]) -> Graph:
    """A copy of `graph` whose runs go through two functions.

    They get the new graph, the original method and its arguments. In a dream (`guarded_episode()`) they must not interfere.
    """
    kind: type[Any] = type(graph)

    class Derived(kind):
        def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
            return on_stream(self, super().stream, *args, **kwargs)

        def astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            return on_astream(self, super().astream, *args, **kwargs)

    Derived.__name__, Derived.__qualname__, Derived.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    derived = object.__new__(Derived)
    derived.__dict__ = dict(graph.__dict__)
    return derived
