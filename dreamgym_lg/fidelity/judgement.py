"""A dream's verdicts on recorded episodes of known outcome, and the consistency of its answers.

Every step is predicted behind the recorded history, with the traces of its own task left out: else each would confirm itself.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from dreamgym_lg.actions import is_answer, parse_call
from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.environment import RULES
from dreamgym_lg.fidelity.replay import step_or_none, with_observation
from dreamgym_lg.statistics import Rate, clustered_interval, normalised
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Step, StepResult, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How truthful a dream is on recorded episodes; a figure without a case is None.

    Intervals take the episodes of one task, and the steps of one episode, for alike (`clustered_interval`).
    """

    version: str
    """The dream's."""
    false_success: Rate | None = None
    """Of the episodes that must not be rewarded, those that the dream rewards."""
    false_failure: Rate | None = None
    """Of the recorded successes, those whose last step the dream does not reward."""
    invalid_recall: Rate | None = None
    """Of the really invalid actions, those that the dream refuses."""
    same_lookup: Rate | None = None
    """Of the lookups asked again before anything is written, those answered alike."""
    lookup_after_write: Rate | None = None
    """Of the lookups that a write in between really changed, those whose dreamed answer shows what is new."""
    by_kind: Mapping[str, Rate] = field(default_factory=dict)
    """`false_success` by kind: `recorded failures`, `the policy's failures`, and the kinds of edits."""
    by_judge: Mapping[str, Rate] = field(default_factory=dict)
    """`false_success` by the judge that decided the episode's end (`Step.judged_by`)."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Judgement":
        """The judgement that `to_dict` wrote."""
        fields: dict[str, Any] = {name: Rate(*value) if isinstance(value, list) else value for name, value in values.items()}
        for name in ("by_kind", "by_judge"):
            fields[name] = {key: Rate(*value) for key, value in values[name].items()}
        return cls(**fields)


class _Lookup(NamedTuple):
    """A reading call of an episode that is made again."""

    position: int
    """Behind so many steps."""
    action: str
    right: str
    """The answer that it really got, or has to get."""
    before: str | None
    """Its answer before something was written; None where nothing was."""


class _Case(NamedTuple):
    """One recorded episode with the dream's answers; None where one cannot be read."""

    trajectory: Trajectory
    answers: list[tuple[Step, StepResult | None]]
    ends: bool
    """Whether the last answer is that to its end."""
    lookups: list[tuple[_Lookup, StepResult | None]]

    @property
    def succeeds(self) -> bool:
        return any(result is not None and bool(result.info.get("success")) for _, result in self.answers)

    @property
    def misses(self) -> bool:
        """Whether the dream gives its last step nothing: neither success nor, in a world with a score, a reward."""
        result = self.answers[-1][1]
        return result is None or not (result.info.get("success") or result.reward > 0)

    @property
    def judge(self) -> str:
        result = self.answers[-1][1]
        return str(result.info.get("judged_by", "")) if result is not None else ""

    @property
    def kind(self) -> str:
        if self.trajectory.run.startswith("edited/"):
            return self.trajectory.run
        return "recorded failures" if self.trajectory.source == "offline" else "the policy's failures"


async def ajudge(
    dream: Dream,
    episodes: Sequence[Trajectory],
    *,
    writes: Collection[str] = (),
    concurrency: int = 32,
    on_episode: Callable[[], None] = lambda: None,
) -> Judgement:
    """Put recorded episodes to a dream.

    It is asked about last steps and invalid actions, and about a tool agent's lookups made again; about every step of a text
    agent's failure.

    Args:
        episodes: With their true outcome: recorded ones, real ones of a policy, and edits (`edited_successes`).
        writes: A tool agent's tools that change its world; every other only reads.
        concurrency: Episodes put to it at once.

    Raises whatever the experience model's server raises. An unreadable answer rewards nothing, and shows nothing.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(trajectory: Trajectory) -> _Case:
        async with slots:
            case = await _put(dream, with_observation(trajectory), writes)
            on_episode()
            return case

    return _judged(await asyncio.gather(*map(one, episodes)), dream.version)


async def _put(dream: Dream, trajectory: Trajectory, writes: Collection[str]) -> _Case:
    steps, by_tools = trajectory.steps, is_tool_task(trajectory.task)

    async def ask(position: int, action: str) -> StepResult | None:
        return await step_or_none(dream.resume(trajectory.task, steps[:position]), action)

    answers, ends, last = list[tuple[Step, StepResult | None]](), False, len(steps) - 1
    for position, step in enumerate(steps):
        ends = position == last and (is_answer(step.action) or not by_tools)
        every = not by_tools and not trajectory.success
        if (ends or every or not step.valid) and step.decided_by != RULES:
            answers.append((step, await ask(position, step.action)))
    recorded = by_tools and not trajectory.run.startswith("edited/")
    lookups = [(lookup, await ask(lookup.position, lookup.action)) for lookup in (_lookups(steps, writes) if recorded else ())]
    return _Case(trajectory, answers, ends and bool(answers), lookups)


def _lookups(steps: Sequence[Step], writes: Collection[str]) -> Iterator[_Lookup]:
    """The first lookup, made again before anything is written or said, and those that show what was written."""
    calls = [parse_call(step.action) for step in steps]
    answers, written = dict[str, str](), False
    changes = [number for number, call in enumerate(calls) if call is None or call.name in writes]
    for number, (step, call) in enumerate(zip(steps, calls, strict=True)):
        if call is None or not step.valid:
            continue
        if call.name in writes:
            written = True
            continue
        answer, before = step.next_observation, answers.get(step.action)
        if before is not None and written and before != answer:
            yield _Lookup(number, step.action, answer, before)
        if not answers:
            end = next((change for change in changes if change > number), len(steps))
            yield _Lookup(end, step.action, answer, None)
        answers.setdefault(step.action, answer)


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


def _judged(cases: Sequence[_Case], version: str) -> Judgement:
    wrong = [each for each in cases if each.ends and not each.trajectory.success]
    right = [each for each in cases if each.ends and each.trajectory.success]
    refused = [[result is not None and not result.info["valid"] for step, result in c.answers if not step.valid] for c in cases]
    same = [[_shows(*lookup) for lookup in each.lookups if lookup[0].before is None] for each in cases]
    after = [[_shows(*lookup) for lookup in each.lookups if lookup[0].before is not None] for each in cases]
    return Judgement(
        version=version,
        false_success=_over_tasks(wrong, lambda each: each.succeeds),
        false_failure=_over_tasks(right, lambda each: each.misses),
        invalid_recall=_clustered(refused),
        same_lookup=_clustered(same),
        lookup_after_write=_clustered(after),
        by_kind=_false_success_by(wrong, lambda each: each.kind),
        by_judge=_false_success_by(wrong, lambda each: each.judge),
    )


def _false_success_by(wrong: Sequence[_Case], key: Callable[[_Case], str]) -> dict[str, Rate]:
    groups = {name: [each for each in wrong if key(each) == name] for name in sorted({key(each) for each in wrong} - {""})}
    return {name: rate for name, group in groups.items() if (rate := _over_tasks(group, lambda each: each.succeeds))}


def _over_tasks(cases: Sequence[_Case], outcome: Callable[[_Case], bool]) -> Rate | None:
    """The share of episodes, those of one task taken for alike."""
    clusters = defaultdict[str, list[bool]](list)
    for each in cases:
        clusters[each.trajectory.task.id].append(outcome(each))
    return _clustered(list(clusters.values()))


def _clustered(clusters: Sequence[Sequence[bool]]) -> Rate | None:
    outcomes = [outcome for cluster in clusters for outcome in cluster]
    interval = clustered_interval(clusters, top=1)
    return Rate(sum(outcomes), len(outcomes), *interval) if outcomes and interval is not None else None


def keys_of(episodes: Sequence[Trajectory]) -> str:
    """A digest that tells one choice of episodes from another."""
    keys = sorted(f"{each.run}/{each.iteration}/{each.task.id}/{each.rollout_index}" for each in episodes)
    return sha256("\n".join(keys).encode("utf-8", "surrogatepass")).hexdigest()[:16]
