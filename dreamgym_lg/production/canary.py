"""`shadow` and `canary`: graphs for production that show how a policy does there."""

import os
from collections.abc import Sequence
from typing import Any, TypeVar, Unpack
from weakref import WeakKeyDictionary

from langchain_core.language_models import BaseChatModel
from langgraph.pregel import Pregel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.workspace import policy_version
from dreamgym_lg.production.log import CanaryLog
from dreamgym_lg.production.simulation import Verify
from dreamgym_lg.production.traffic_router import KillSwitch, SimulationOptions, TrafficRouter
from dreamgym_lg.simulate import Route
from dreamgym_lg.simulate.agent import derive

Graph = TypeVar("Graph", bound=Pregel)

_routers: WeakKeyDictionary[type, TrafficRouter] = WeakKeyDictionary()


def shadow(
    graph: Graph,
    policy: BaseChatModel,
    *,
    log: CanaryLog | str | os.PathLike[str],
    name: str | None = None,
    share: float = 1.0,
    route: Route | None = None,
    pass_through: Sequence[str] = (),
    verify: Verify | None = None,
    **simulation: Unpack[SimulationOptions],
) -> Graph:
    """The graph as it is, in production; beside it the policy plays the same inputs, with all its tool calls simulated.

    Production answers, with its own models and tools. After each run the policy plays it again under the guard of dreams: a
    call is answered as this very run was answered, else by a recorded answer of `replay_buffer`, else by `experience_model`.
    The log keeps whether both made the same calls, the same writing calls, and gave the same answer. Nothing that goes wrong
    there reaches production. A run that stops for a person, or that goes on after that, has no simulated side.

    Args:
        graph: What `StateGraph.compile` or `create_agent` returns.
        policy: Any chat model, without bound tools.
        log: A file, shared by all processes.
        name: Under which the log keeps it. Default: `shadow of ` and the policy's version.
        share: Of the threads (`thread_id`; without one, of the runs) that the policy plays too.
        route: As of `with_policy`.
        pass_through: Tools that really run in the simulated side too, under the guard.
        verify: (input, final state) -> success, or None if it is not known yet: judges both sides.
        simulation: `SimulationOptions`.

    Raises `ConfigurationError` as `AgentWorld` does, since the graph has to be one that a dream can play, and for one whose
    nodes hand work to threads of their own.
    """
    _check_share("share", share)
    name = name or f"shadow of {policy_version(policy)}"
    router = TrafficRouter(graph, policy, log=log, name=name, verify=verify, route=route, pass_through=pass_through)
    return _routed(graph, router, share, simulation)


def canary(
    graph: Graph,
    policy: BaseChatModel,
    *,
    log: CanaryLog | str | os.PathLike[str],
    name: str | None = None,
    share: float = 0.05,
    kill_switch: KillSwitch | None = None,
    alpha: float = 0.05,
    route: Route | None = None,
    pass_through: Sequence[str] = (),
    verify: Verify | None = None,
    shadow: float = 0.0,
    **simulation: Unpack[SimulationOptions],
) -> Graph:
    """The graph in production, with the policy in its place for a share of the threads, until the outcomes speak against it.

    A thread is drawn once, by its `thread_id`, and stays at its side; a run without one is a thread of its own. Both sides run
    on the real tools and the graph's own checkpointer. `CanaryLog.record_outcome` says how a thread ended, or `verify` does;
    a run that raises has failed. From these outcomes `sequential_evidence` decides, at any time: once the policy is proven
    worse, the canary ends by itself and production serves every thread, from the next run on and after restarts. Once it is
    proven better, log and report say so, and the canary goes on. If the log cannot be written, production serves.

    Args:
        graph, policy, log, route, pass_through: As of `shadow`.
        name: Under which the log keeps it; another policy needs another one. Default: the policy's version.
        share: Of the threads that the policy serves. It may be changed; threads of production stay there.
        kill_switch: Turns the canary off from the next run on; threads of the policy go back to production for good.
        alpha: The probability of ending a canary whose policy is as good as production; the same for a wrong "better".
        verify: (input, final state) -> success, or None if it is not known yet: the outcome of the run's thread.
        shadow: Share of the threads whose other side is simulated too, as `shadow` does.
        simulation: `SimulationOptions`.

    Raises `ConfigurationError` for what is no compiled graph, unknown names, shares and alphas outside their range, and a
    name that the log holds of another policy.
    """
    _check_share("share", share)
    _check_share("shadow", shadow, least=True)
    if not 0 < alpha < 1:
        raise ConfigurationError(f"alpha={alpha!r}: give the probability of a wrong end, between 0 and 1, e.g. 0.05")
    if simulation and not shadow:
        raise ConfigurationError(f"{', '.join(simulation)} is of the simulated sides, and shadow=0 simulates none")
    options: dict[str, Any] = {"share": share, "alpha": alpha, "kill_switch": kill_switch, "verify": verify}
    router = TrafficRouter(graph, policy, log=log, name=name, route=route, pass_through=pass_through, **options)
    return _routed(graph, router, shadow, simulation)


def wait_for_shadows(graph: Pregel, timeout: float | None = None) -> bool:
    """Wait until no simulated side of this process's runs of a `shadow` or `canary` graph waits; False if time is up.

    Where the graph runs asynchronously: `await asyncio.to_thread(wait_for_shadows, graph)`.
    """
    router = _routers.get(type(graph))
    if router is None:
        raise ConfigurationError(f"{type(graph).__name__} is no graph that shadow() or canary() returned")
    return router.shadows is None or router.shadows.wait(timeout)


def _routed(graph: Graph, router: TrafficRouter, simulated: float, simulation: SimulationOptions) -> Graph:
    if simulated:
        router.simulate(simulated, simulation)
    router.begin()
    derived = derive(graph, router.stream, router.astream)
    _routers[type(derived)] = router
    return derived


def _check_share(name: str, share: float, *, least: bool = False) -> None:
    if not 0 <= share <= 1 or not (share or least):
        raise ConfigurationError(f"{name}={share!r}: give a share of the threads, e.g. 0.05")
