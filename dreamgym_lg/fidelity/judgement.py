"""What a dream pays: its verdicts on recorded episodes that must or must not be paid, and whether its answers agree.

Every question is asked behind the recorded history, so that what is right is known, and as of a task that has no traces of its
own: its own recorded answers and successes decide nothing, or each would confirm itself. So a tool agent's final answers are
judged by the experience model here, also those of tasks that recorded successes judge in training (`Grounding.judges`).
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from dreamgym_lg.actions import ToolCall, is_answer, parse_action
from dreamgym_lg.environment import CheckAction, unrefused_steps
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.experience.training_data import recorded_exchanges
from dreamgym_lg.fidelity.ask import dreamable
from dreamgym_lg.fidelity.figures import normalised
from dreamgym_lg.statistics import Rate, clustered_interval
from dreamgym_lg.types import Step, StepResult, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How truthful a dream is on recorded episodes. Intervals take the episodes of one task, and steps of one episode, for
    alike (`clustered_interval`); what there was nothing to measure on is None."""

    version: str
    """The experience model's."""
    false_success: Rate | None = None
    """Of the episodes that must not be paid, those that the dream pays."""
    false_failure: Rate | None = None
    """Of the recorded successes, those that the dream does not pay."""
    invalid_recall: Rate | None = None
    """Of the really invalid actions, those that the dream refuses."""
    same_lookup: Rate | None = None
    """Of the lookups asked again before anything is written, those answered alike."""
    lookup_after_write: Rate | None = None
    """Of the lookups that a write in between really changed, those whose dreamed answer shows what is new."""
    facts_told: Rate | None = None
    """Of the hidden facts that a recorded step reveals, and that the dream has drawn otherwise, those that its answer names."""
    by_kind: Mapping[str, Rate] = field(default_factory=dict)
    """`false_success` by what must not be paid: `recorded failures`, `the policy's failures`, and the kinds of edits."""
    by_decision: Mapping[str, Rate] = field(default_factory=dict)
    """`false_success` by who decided on the episode's last step (`Step.decided_by`); never a recorded success (see above)."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Judgement":
        """What `to_dict` wrote."""
        read: dict[str, Any] = {name: Rate(*value) if isinstance(value, list) else value for name, value in given.items()}
        for name in ("by_kind", "by_decision"):
            read[name] = {key: Rate(*value) for key, value in given[name].items()}
        return cls(**read)


class _Asked(NamedTuple):
    """One step of a recorded episode as the dream answers it; None where its answer cannot be read."""

    step: Step
    last: bool
    result: StepResult | None

    @property
    def paid(self) -> bool:
        return self.result is not None and bool(self.result.info.get("success"))


class _Lookup(NamedTuple):
    """A reading call of an episode that is made again."""

    position: int
    """Behind so many steps."""
    action: str
    right: str
    """What it was or has to be answered."""
    before: str | None
    """What it was answered before something was written; None where nothing was."""


async def ajudge(
    create_dream: Callable[[], DreamEnvironment],
    episodes: Sequence[Trajectory],
    *,
    version: str,
    writes: Collection[str] = (),
    check_action: CheckAction | None = None,
    concurrency: int = 32,
    on_episode: Callable[[], None] = lambda: None,
) -> Judgement:
    """Put recorded episodes to a dream.

    It is asked about last steps and invalid actions, about steps that reveal a hidden fact, a tool agent's also about lookups
    made again; of an episode that must not be paid, any other dream is asked about every step.

    Args:
        episodes: With their true outcome: recorded ones, real ones of a policy, and edits (`edited_successes`).
        version: Of the experience model.
        writes: A tool agent's tools that change its world; every other only reads.
        check_action: The environment's own check; what it refuses reaches no dream.
        concurrency: Episodes put to it at once.

    Raises whatever the experience model's server raises. An answer that cannot be read pays nothing, and shows nothing.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(trajectory: Trajectory) -> "_Put":
        async with slots:
            put = await _put(create_dream, trajectory, writes, check_action)
            on_episode()
            return put

    found = await asyncio.gather(*map(one, episodes))
    return _judged(found, version)


class _Put(NamedTuple):
    trajectory: Trajectory
    asked: list[_Asked]
    again: list[tuple[_Lookup, StepResult | None]]
    told: list[bool]
    """For each step that reveals a hidden fact: whether the dream's answer names it."""


async def _put(
    create_dream: Callable[[], DreamEnvironment],
    trajectory: Trajectory,
    writes: Collection[str],
    check_action: CheckAction | None,
) -> _Put:
    trajectory = dreamable(trajectory)
    dream = create_dream()
    exchanges = recorded_exchanges(dream.experience, trajectory, check_action)
    steps = [step for _, step in unrefused_steps(trajectory, check_action)]
    by_tools = "tools" in trajectory.task.metadata

    async def ask(position: int, action: str) -> StepResult | None:
        dream.resume(trajectory.task, exchanges[:position])
        try:
            return await dream.astep(action)
        except PredictionFailed:
            return None

    asked = []
    for position, step in enumerate(steps):
        last = position == len(steps) - 1
        if not step.valid or (is_answer(step.action) if by_tools else last or not trajectory.success):
            asked.append(_Asked(step, last, await ask(position, step.action)))
    recorded = by_tools and not trajectory.run.startswith("edited/")
    lookups = _lookups(exchanges, writes) if recorded else ()
    again = [(lookup, await ask(lookup.position, lookup.action)) for lookup in lookups]
    told = []
    for position, fact in _drawn_facts(dream.experience, trajectory.task, exchanges):
        result = await ask(position, exchanges[position].action)
        told.append(result is not None and _names(result.observation, fact))
    return _Put(trajectory, asked, again, told)


def _drawn_facts(experience: ExperienceModel, task: Task, exchanges: Sequence[Exchange]) -> Iterator[tuple[int, str]]:
    """The steps that really revealed a hidden fact, by position, each with the fact that a dream has drawn in its place.

    Left out is a step whose recorded answer names both, or whose action names the revealed one: it can be answered without
    knowing what is hidden.
    """
    for position, (exchange, revealed) in enumerate(zip(exchanges, experience.facts(task, exchanges), strict=False)):
        drawn = experience.facts(task, exchanges[:position])[-1]
        told = exchange.prediction.observation
        if _names(told, revealed) and drawn and not _names(told, drawn) and not _names(exchange.action, revealed):
            yield position, drawn


def _names(text: str, fact: str) -> bool:
    """Whether the text holds the words of a fact as they are: a grapefruit is no grape."""
    return bool(fact) and f" {normalised(fact)} " in f" {normalised(text)} "


def _lookups(exchanges: Sequence[Exchange], writes: Collection[str]) -> Iterator[_Lookup]:
    """The first lookup, made again before anything is written or said, and those that show what was written."""
    calls = [_called(exchange) for exchange in exchanges]
    answers, written = dict[str, str](), False
    changes = [number for number, call in enumerate(calls) if call is None or call.name in writes]
    for number, (exchange, call) in enumerate(zip(exchanges, calls, strict=True)):
        told = exchange.prediction.observation
        if call is None or not exchange.prediction.valid:
            continue
        if call.name in writes:
            written = True
            continue
        if (before := answers.get(exchange.action)) is not None and written and before != told:
            yield _Lookup(number, exchange.action, told, before)
        if not answers:
            end = next((change for change in changes if change > number), len(exchanges))
            yield _Lookup(end, exchange.action, told, None)
        answers.setdefault(exchange.action, told)


def _called(exchange: Exchange) -> ToolCall | None:
    try:
        call = parse_action(exchange.action)
    except ValueError:
        return None
    return call if isinstance(call, ToolCall) else None


def _shows(lookup: _Lookup, result: StepResult | None) -> bool:
    """Whether the answer is as it has to be; after a write, whether it says all that is new."""
    if result is None:
        return False
    if lookup.before is None:
        return normalised(result.observation) == normalised(lookup.right)
    new = set(normalised(lookup.right).split()) - set(normalised(lookup.before).split())
    if not new:  # something is gone, or in another order
        return normalised(result.observation) == normalised(lookup.right)
    return new <= set(normalised(result.observation).split())


def _judged(found: Sequence[_Put], version: str) -> Judgement:
    ended = [each for each in found if any(asked.last for asked in each.asked)]
    wrong = [each for each in ended if not each.trajectory.success]
    right = [each for each in ended if each.trajectory.success]
    kinds, decisions = defaultdict[str, list[_Put]](list), defaultdict[str, list[_Put]](list)
    for each in wrong:
        kinds[_kind(each.trajectory)].append(each)
        result = each.asked[-1].result
        if decided := str(result.info.get("decided_by", "")) if result is not None else "":
            decisions[decided].append(each)
    invalid = [
        [asked.result is not None and asked.result.info.get("valid") is False for asked in each.asked if not asked.step.valid]
        for each in found
    ]
    same = [[_shows(*lookup) for lookup in each.again if lookup[0].before is None] for each in found]
    after = [[_shows(*lookup) for lookup in each.again if lookup[0].before is not None] for each in found]
    return Judgement(
        version=version,
        false_success=_over_tasks(wrong, _pays),
        false_failure=_over_tasks(right, lambda each: not each.asked[-1].paid),
        invalid_recall=_clustered(invalid),
        same_lookup=_clustered(same),
        lookup_after_write=_clustered(after),
        facts_told=_clustered(_by_task(found, lambda each: each.told)),
        by_kind={kind: rate for kind, of in sorted(kinds.items()) if (rate := _over_tasks(of, _pays))},
        by_decision={who: rate for who, of in sorted(decisions.items()) if (rate := _over_tasks(of, _pays))},
    )


def _pays(each: _Put) -> bool:
    return any(asked.paid for asked in each.asked)


def _kind(trajectory: Trajectory) -> str:
    if trajectory.run.startswith("edited/"):
        return trajectory.run
    return "recorded failures" if trajectory.source == "offline" else "the policy's failures"


def _over_tasks(given: Sequence[_Put], outcome: Callable[[_Put], bool]) -> Rate | None:
    """The share of episodes, those of one task taken for alike."""
    return _clustered(_by_task(given, lambda each: [outcome(each)]))


def _by_task(given: Sequence[_Put], outcomes: Callable[[_Put], Sequence[bool]]) -> list[list[bool]]:
    clusters = defaultdict[str, list[bool]](list)
    for each in given:
        clusters[each.trajectory.task.id] += outcomes(each)
    return [cluster for cluster in clusters.values() if cluster]


def _clustered(clusters: Sequence[Sequence[bool]]) -> Rate | None:
    outcomes = [outcome for cluster in clusters for outcome in cluster]
    interval = clustered_interval(clusters, top=1)
    return Rate(sum(outcomes), len(outcomes), *interval) if outcomes and interval is not None else None


def keys_of(episodes: Sequence[Trajectory]) -> str:
    """A digest that tells one choice of episodes from another."""
    keys = sorted(f"{each.run}/{each.iteration}/{each.task.id}/{each.rollout_index}" for each in episodes)
    return sha256("\n".join(keys).encode("utf-8", "surrogatepass")).hexdigest()[:16]
