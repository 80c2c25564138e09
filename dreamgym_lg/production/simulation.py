"""The side of a run that was not chosen: played in a dream of the very same run, and compared with what really happened."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import convert_to_messages
from langgraph.pregel import Pregel

from dreamgym_lg.actions import parse_call
from dreamgym_lg.dream import Answer, Dream, Episode, Model, Recorded, Responder
from dreamgym_lg.dream.recorded import effects_of
from dreamgym_lg.dream.trace_index import TraceIndex, unordered
from dreamgym_lg.errors import AccessBlocked, PredictionFailed
from dreamgym_lg.production.log import Pair, Side, Status
from dreamgym_lg.production.recorder import RecordedCall
from dreamgym_lg.simulate import EpisodeOptions, RealAccessBlocked, SimulatedEpisode, simulated
from dreamgym_lg.simulate.agent import final_answer
from dreamgym_lg.types import Step, Task, Trajectory

logger = logging.getLogger(__name__)

Verify = Callable[[Any, Any], bool | None]
"""(the run's input, the graph's final state) -> whether it is a success; None: not known yet."""

Attempt = tuple[str, bool]
"""A tool call as an action, and whether it was valid."""


@dataclass(kw_only=True)
class RealRun:
    """A run that is played for real, and all that is needed to play its other side."""

    thread: str | None
    payload: Any = None
    """Its input, behind the state that its thread had before: a copy."""
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """`context=`, where it was given."""
    unusable: Status | None = None
    """The reason why its other side cannot be simulated."""
    chosen: Side = "production"
    calls: Sequence[RecordedCall] = ()
    state: Any = None
    """The final one, as `calls` known once the run has ended."""
    success: bool | None = None


class Unanswered(PredictionFailed):
    """No record holds the answer to a call, and there is no experience model."""

    def __init__(self, action: str) -> None:
        super().__init__("no record answers this call of the simulated side, and there is no experience model")
        self.action = action


class NoModel:
    """The last responder where there is no experience model: it raises `Unanswered`."""

    name = "nobody"

    def respond(self, episode: Episode) -> Answer | None:
        raise Unanswered(episode.action)


class ThisRun:
    """Answers a call as it was answered in the real run after the same writing calls.

    The n-th identical call gets the n-th answer, and the last one from then on.
    """

    name = "this run"

    def __init__(self, calls: Sequence[RecordedCall], index: TraceIndex) -> None:
        self._index = index
        self._answers: dict[Any, list[RecordedCall]] = {}
        self._repeated = Counter[Any]()
        earlier = list[Attempt]()
        for call in calls:
            self._answers.setdefault(self._key(call.action, _effects(index, earlier)), []).append(call)
            earlier.append((call.action, call.valid))

    def respond(self, episode: Episode) -> Answer | None:
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
    """How the other side of a run is played. The graph is the user's own; nothing of it is touched for real."""

    graph: Pregel
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

    def _episode(self, run: RealRun) -> SimulatedEpisode:
        """The episode of the side that was not chosen: of the policy, or of production's own models."""
        self.index.refresh()
        last: Responder = self.model or NoModel()
        world = Dream([ThisRun(run.calls, self.index), Recorded(self.index), last]).create_environment()
        options = self.options if run.chosen == "production" else EpisodeOptions(**{**self.options, "route": _no_call})
        return simulated(self.graph, policy=self.policy, environment=world, task=self._task(run), **options)

    def _task(self, run: RealRun) -> Task:
        instruction = _request(run.payload) or "-"
        return Task(id=run.thread or "", instruction=instruction, environment=self.environment, tools=self.tools)

    def play(self, run: RealRun) -> Pair:
        """Play it where a run without an event loop was played: in a thread."""
        episode = self._episode(run)
        try:
            with episode:
                state = episode.invoke(run.payload, run.config, **run.arguments)  # type: ignore[arg-type]
        except (Exception, RealAccessBlocked, BaseExceptionGroup) as error:
            return self._ended(run, episode, error)
        return self._compare(run, episode, state)

    async def aplay(self, run: RealRun) -> Pair:
        """Play it in the event loop of the real run: an async client of a model belongs to one loop."""
        episode = self._episode(run)
        try:
            async with episode:
                state = await episode.ainvoke(run.payload, run.config, **run.arguments)  # type: ignore[arg-type]
        except (Exception, RealAccessBlocked, BaseExceptionGroup) as error:
            return self._ended(run, episode, error)
        return self._compare(run, episode, state)

    def _ended(self, run: RealRun, episode: SimulatedEpisode, error: BaseException) -> Pair:
        """The pair of an episode that was not played to its end."""
        if isinstance(error, Unanswered):
            call = parse_call(error.action)
            writes = call is not None and self.index.writes(call.name)
            attempts = [*attempts_of(episode, self._task(run)), (error.action, True)]
            return Pair(
                run.thread, run.chosen, "unanswered", False, False if writes else None, None, run.success, None,
                self._details(run, episode, attempts),
            )  # fmt: skip
        blocked = isinstance(error, RealAccessBlocked | AccessBlocked)
        details = {"error": type(error).__name__, "answered_by": answered_by(episode)}
        return Pair(run.thread, run.chosen, "blocked" if blocked else "failed", real_success=run.success, details=details)

    def _compare(self, run: RealRun, episode: SimulatedEpisode, state: Any) -> Pair:
        real, other = [(call.action, call.valid) for call in run.calls], attempts_of(episode, self._task(run))
        calls, effects = ([Counter(map(self._call, each)) for each in (real, other)], [*map(self._effects, (real, other))])
        answers = [" ".join(final_answer(each).casefold().split()) for each in (run.state, state)]
        simulated_success = judged(self.verify, run.payload, state)
        return Pair(
            run.thread, run.chosen, "compared", calls[0] == calls[1], effects[0] == effects[1], answers[0] == answers[1],
            run.success, simulated_success, self._details(run, episode, other),
        )  # fmt: skip

    def _call(self, attempts: Attempt) -> Any:
        return self.index.call(attempts[0])

    def _effects(self, attempts: Sequence[Attempt]) -> Any:
        return unordered(_effects(self.index, attempts))

    def _details(self, run: RealRun, episode: SimulatedEpisode, other: Sequence[Attempt]) -> dict[str, Any]:
        """Names of tools and counts alone: what users and tools say is not kept."""
        real = Counter(map(self._call, ((call.action, call.valid) for call in run.calls)))
        simulated_calls = Counter(map(self._call, other))
        only = {"only_real": real - simulated_calls, "only_simulated": simulated_calls - real}
        names = {key: sorted(call.tool for call in calls.elements() if call is not None) for key, calls in only.items()}
        return {**{key: tools for key, tools in names.items() if tools}, "answered_by": answered_by(episode)}


def attempts_of(episode: SimulatedEpisode, task: Task) -> list[Attempt]:
    """The tool calls of an episode, those that really ran in it included."""
    events = Trajectory(task=task, steps=episode.steps, acts=episode.acts).in_order
    return [
        (each.action, each.valid) if isinstance(each, Step) else (each.text, True)
        for each in events
        if isinstance(each, Step) or each.kind == "passed through"
    ]


def answered_by(episode: SimulatedEpisode) -> dict[str, int]:
    """How many calls were decided by what: "this run", or as of `Step.decided_by`."""
    return Counter(step.decided_by for step in episode.steps if step.decided_by)


def _no_call(_: object) -> bool:
    return False


def judged(verify: Verify | None, payload: Any, state: Any) -> bool | None:
    """The user's own verdict on a run; None where there is none, as where it raises."""
    try:
        success = None if verify is None else verify(payload, state)
    except Exception as error:
        logger.warning("verify raised %s: the run has no outcome of it", type(error).__name__)
        return None
    return None if success is None else bool(success)


def _request(payload: Any) -> str:
    """The user's request: the last human message, else the input as text."""
    try:
        texts = [each.text for each in convert_to_messages(payload["messages"]) if each.type == "human"]
        return texts[-1]
    except Exception:  # another kind of input
        return str(payload)
