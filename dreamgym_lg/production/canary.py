"""`canary`: a policy serves a share of the threads in production, until proven worse."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.language_models import BaseChatModel
from langgraph.pregel import Pregel

from dreamgym_lg.errors import CanaryLogError, ConfigurationError
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.production.log import CanaryLog
from dreamgym_lg.production.recorder import Graph, RealRun, observed
from dreamgym_lg.simulate import Route
from dreamgym_lg.simulate.agent import production_episodes
from dreamgym_lg.simulate.episode import AgentEpisode

logger = logging.getLogger(__name__)

Verify = Callable[[Any, Any], bool | None]
"""(the run's input, the graph's final state) -> success; None: not known yet."""


def canary(
    graph: Graph,
    policy: BaseChatModel,
    *,
    log: CanaryLog | str | os.PathLike[str],
    name: str | None = None,
    share: float = 0.05,
    alpha: float = 0.05,
    route: Route | None = None,
    pass_through: Sequence[str] = (),
    verify: Verify | None = None,
) -> Graph:
    """The graph, with the policy for a share of the threads until proven worse.

    A thread is drawn once, by its `thread_id`, and stays at its side; a run without one is a thread of its own. Both sides run
    on the real tools. `CanaryLog.record_outcome` or `verify` says how a thread ended; a run that raises has failed. Outcomes
    that prove the policy worse end the canary, as `CanaryLog.stop` does: production serves every thread from the next run on.
    Once they prove it better, log and report say so. If the log cannot be written, production serves.

    Args:
        graph: The result of `StateGraph.compile` or `create_agent`.
        policy: Any chat model, without bound tools.
        log: A file, shared by all processes.
        name: Under which the log keeps it; another policy needs another one. Default: the policy's version.
        share: Of the threads that the policy serves. It may be changed; threads of production stay there.
        alpha: The probability of ending a canary whose policy is as good as production; the same for a wrong "better".
        route, pass_through: As of `with_policy`.
        verify: (input, final state) -> success, or None if it is not known yet: the outcome of the run's thread.

    Raises `ConfigurationError` for what is no compiled graph, unknown names, shares and alphas outside their range, and a
    name that the log holds of another policy.
    """
    check_share(share)
    if not 0 < alpha < 1:
        raise ConfigurationError(f"alpha={alpha!r}: give the probability of a wrong end, between 0 and 1, e.g. 0.05")
    episodes = production_episodes(graph, policy, route=route, pass_through=pass_through)
    log = log if isinstance(log, CanaryLog) else CanaryLog(log)
    version = policy_version(policy)
    name = name or version
    log.begin(name, policy_version=version, share=share, alpha=alpha)
    return observed(graph, _Canary(episodes, log, name, verify))


def check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ConfigurationError(f"share={share!r}: give a share of the threads, e.g. 0.05")


def judged(verify: Verify | None, payload: Any, state: Any) -> bool | None:
    """The user's own verdict on a run; None without one, or if it raises."""
    try:
        success = None if verify is None else verify(payload, state)
    except Exception as error:
        logger.warning("verify raised %s: the run has no outcome of it", type(error).__name__)
        return None
    return None if success is None else bool(success)


class _Canary:
    """Sends each run of a graph to production or to the policy."""

    def __init__(self, episodes: Callable[[Pregel], AgentEpisode], log: CanaryLog, name: str, verify: Verify | None) -> None:
        self._episodes, self._log, self._name, self._verify = episodes, log, name, verify

    def begin(self, graph: Pregel, run: RealRun) -> AgentEpisode | None:
        try:
            return self._episodes(graph) if self._log.choose(self._name, run.thread) == "policy" else None
        except CanaryLogError as error:
            logger.warning("production serves this run: %s", error)
            return None

    def fail(self, run: RealRun) -> None:
        with _failures_logged():
            self._log.add_error(self._name, run.thread)

    def end(self, run: RealRun) -> None:
        if not run.recorder.ended or run.recorder.interrupted:
            return
        if (success := judged(self._verify, run.input, run.recorder.state)) is not None:
            with _failures_logged():
                self._log.record_outcome(run.thread, success, name=self._name)


@contextmanager
def _failures_logged() -> Iterator[None]:
    """A failure of the log is a warning, and no concern of the run."""
    try:
        yield
    except (CanaryLogError, ConfigurationError) as error:
        logger.warning("%s", error)
