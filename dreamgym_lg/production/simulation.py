"""The policy in a dream of a real run, compared with production."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import convert_to_messages
from langgraph.pregel import Pregel

from dreamgym_lg.actions import parse_call
from dreamgym_lg.dream import Answer, Dream, Episode, Model, Recorded
from dreamgym_lg.dream.recorded import effects_of
from dreamgym_lg.dream.trace_index import TraceIndex, unordered
from dreamgym_lg.errors import AccessBlocked, PredictionFailed
from dreamgym_lg.production.canary import Verify, judged
from dreamgym_lg.production.log import Pair, Status
from dreamgym_lg.production.recorder import RecordedCall
from dreamgym_lg.simulate import EpisodeOptions, RealAccessBlocked, SimulatedEpisode, simulated
from dreamgym_lg.simulate.agent import run_graph
from dreamgym_lg.simulate.conversation import final_answer
from dreamgym_lg.types import Step, Task, Trajectory

Attempt = tuple[str, bool]
"""A tool call as an action, and True if it was valid."""


@dataclass(kw_only=True)
class ShadowedRun:
    """A run of production, as the policy plays it again."""

    thread: str
    payload: Any = None
    """Its input, behind the state that its thread had before: a copy."""
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """`context=`, where it was given."""
    unusable: Status | None = None
    """The reason why it cannot be simulated."""
    calls: Sequence[RecordedCall] = ()
    state: Any = None
    """The final one, as `calls` known once the run has ended."""


class ThisRun:
    """Answers a call as the real run answered it after the same writing calls.

    The n-th identical call gets the n-th answer, and the last one from then on.
    """

    name = "this run"
    last_action = ""

    def __init__(self, calls: Sequence[RecordedCall], index: TraceIndex) -> None:
        self._index = index
        self._answers: dict[Any, list[RecordedCall]] = {}
        self._repeated = Counter[Any]()
        earlier = list[Attempt]()
        for call in calls:
            self._answers.setdefault(self._key(call.action, _effects(index, earlier)), []).append(call)
            earlier.append((call.action, call.valid))

    def respond(self, episode: Episode) -> Answer | None:
        self.last_action = episode.action
        key = self._key(episode.action, effects_of(self._index, episode))
        if not (answers := self._answers.get(key)):
            return None
        call = answers[min(self._repeated[key], len(answers) - 1)]
        self._repeated[key] += 1
        return Answer(call.answer, call.valid)

    def _key(self, action: str, effects: Any) -> Any:
        return self._index.call(action), effects


def _effects(index: TraceIndex, calls: Sequence[Attempt]) -> Any:
    return index.effects((index.call(action), valid) for action, valid in calls)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Settings of the simulated sides. The graph is the user's own; nothing of it is touched for real."""

    graph: Pregel
    is_sync: bool
    """As of `run_graph`."""
    policy: BaseChatModel
    index: TraceIndex
    """Of the traces that answer what this run does not."""
    model: Model | None
    environment: str
    """The name under which the traces are stored."""
    tools: Sequence[Mapping[str, Any]]
    """Schemas of the agent's tools, as its tasks have them in training."""
    options: EpisodeOptions
    verify: Verify | None

    async def play(self, run: ShadowedRun) -> Pair:
        """Play a run in the dream and compare both sides."""
        if run.unusable is not None:
            return Pair(run.thread, run.unusable)
        answers = ThisRun(run.calls, self.index)
        episode = self._episode(run, answers)
        try:
            async with episode:
                config: Any = run.config
                state = await run_graph(episode, run.payload, config, is_sync=self.is_sync, **run.arguments)
        except (Exception, RealAccessBlocked, BaseExceptionGroup) as error:
            return self._ended(run, answers, episode, error)
        return self._compare(run, episode, state)

    def _episode(self, run: ShadowedRun, answers: ThisRun) -> SimulatedEpisode:
        self.index.refresh()
        world = Dream([answers, Recorded(self.index), *([self.model] if self.model else [])]).create_environment()
        return simulated(self.graph, policy=self.policy, environment=world, task=self._task(run), **self.options)

    def _task(self, run: ShadowedRun) -> Task:
        return Task(id=run.thread, instruction=_request(run.payload) or "-", environment=self.environment, tools=self.tools)

    def _ended(self, run: ShadowedRun, answers: ThisRun, episode: SimulatedEpisode, error: BaseException) -> Pair:
        """The pair of an episode that was not played to its end."""
        if isinstance(error, PredictionFailed) and self.model is None:
            call = parse_call(answers.last_action)
            same_writes = False if call is not None and self.index.writes(call.name) else None
            details = self._details(run, episode, [*self._attempts(run, episode), (answers.last_action, True)])
            return Pair(run.thread, "unanswered", same_calls=False, same_writes=same_writes, details=details)
        status: Status = "blocked" if isinstance(error, RealAccessBlocked | AccessBlocked) else "failed"
        return Pair(run.thread, status, details={"error": type(error).__name__, "answered_by": _answered_by(episode)})

    def _compare(self, run: ShadowedRun, episode: SimulatedEpisode, state: Any) -> Pair:
        real, other = [(call.action, call.valid) for call in run.calls], self._attempts(run, episode)
        calls = [Counter(self.index.call(action) for action, _ in each) for each in (real, other)]
        effects = [unordered(_effects(self.index, each)) for each in (real, other)]
        answers = [" ".join(final_answer(each).casefold().split()) for each in (run.state, state)]
        return Pair(
            run.thread,
            "compared",
            same_calls=calls[0] == calls[1],
            same_writes=effects[0] == effects[1],
            same_answer=answers[0] == answers[1],
            real_success=judged(self.verify, run.payload, run.state),
            simulated_success=judged(self.verify, run.payload, state),
            details=self._details(run, episode, other),
        )

    def _attempts(self, run: ShadowedRun, episode: SimulatedEpisode) -> list[Attempt]:
        """The tool calls of an episode, those that really ran in it included."""
        events = Trajectory(task=self._task(run), steps=episode.steps, acts=episode.acts).in_order
        return [
            (each.action, each.valid) if isinstance(each, Step) else (each.text, True)
            for each in events
            if isinstance(each, Step) or each.kind == "passed through"
        ]

    def _details(self, run: ShadowedRun, episode: SimulatedEpisode, other: Sequence[Attempt]) -> dict[str, Any]:
        """Names of tools and counts alone: what users and tools say is not kept."""
        real = Counter(self.index.call(call.action) for call in run.calls)
        simulated_calls = Counter(self.index.call(action) for action, _ in other)
        only = {"only_real": real - simulated_calls, "only_simulated": simulated_calls - real}
        names = {key: sorted(call.tool for call in calls.elements() if call is not None) for key, calls in only.items()}
        return {**{key: tools for key, tools in names.items() if tools}, "answered_by": _answered_by(episode)}


def _answered_by(episode: SimulatedEpisode) -> dict[str, int]:
    """Number of calls that each decided: "this run", or as of `Step.decided_by`."""
    return Counter(step.decided_by for step in episode.steps if step.decided_by)


def _request(payload: Any) -> str:
    """The user's request: the last human message, else the input as text."""
    try:
        texts = [each.text for each in convert_to_messages(payload["messages"]) if each.type == "human"]
        return texts[-1]
    except Exception:  # another kind of input
        return str(payload)
