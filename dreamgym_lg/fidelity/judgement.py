"""A dream's verdicts and answers, and each part's alone, on recorded episodes of known outcome.

Each part continues recorded steps without that task's own traces, which would give it the answer.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import groupby
from statistics import fmean
from typing import Any, Literal, NamedTuple, cast

from pydantic import TypeAdapter

from dreamgym_lg.actions import is_answer, parse_call
from dreamgym_lg.dream.dream import Dream, ask
from dreamgym_lg.dream.goals import has_user_turns
from dreamgym_lg.dream.judges import ends_with_message
from dreamgym_lg.dream.parts import Answer, Episode, Verdict
from dreamgym_lg.dream.relative import RelativeJudge
from dreamgym_lg.dream.users import model_user
from dreamgym_lg.environment import RULES
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.fidelity.steps import with_observation
from dreamgym_lg.fidelity.users import user_cases
from dreamgym_lg.statistics import Rate, clustered_rate, normalised
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Trajectory

REAL_FAILURES = ("recorded failures", "the policy's failures")
"""Kinds of real episodes that must not be rewarded; the others are edits."""
MISSED = "recorded successes"
INVALID, LOOKUP, WRITTEN = "invalid actions", "repeated lookups", "lookups after a write"
_NO_FALSE_SUCCESSES = (MISSED, INVALID, LOOKUP, WRITTEN)
"""Kinds of errors that are no rewarded failures."""
_MAX_EXAMPLES = 3
_MIN_ALIKE = 5
"""Different recorded answers that expose a responder with the same answer to everything."""
_UNREADABLE = "the answer could not be read"
_OWN_JUDGE = "judge:model"
"""Key of a text world's model, which judges its own answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJudgement:
    """The errors of one responder or judge, asked alone."""

    name: str
    role: Literal["responder", "judge", "user"]
    errors: Mapping[str, Rate] = field(default_factory=dict)
    """By kind, 0 is best. Of a judge: rewarded failures (`REAL_FAILURES`, kinds of edits), unrewarded successes (`MISSED`).
    Of a responder: accepted `INVALID` actions, a `LOOKUP` answered otherwise, a write that is not shown (`WRITTEN`). Of a user:
    the kinds of `fidelity.users`."""
    examples: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By kind, at most 3 errors in words."""
    alike: bool = False
    """True of a responder that gave one answer to lookups with different recorded answers."""
    by_model: bool = False
    """True of a part that asks a language model; others are code or recorded traces."""

    def cases(self, *kinds: str) -> int:
        """Number of episodes of these kinds that the part decided."""
        return sum(self.errors[kind].episodes for kind in kinds if kind in self.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How truthful a dream is on recorded episodes; a figure without a case is None.

    Intervals take the episodes of one task for alike (`clustered_interval`).
    """

    version: str
    """The dream's."""
    parts: Sequence[PartJudgement] = ()
    """Every responder, judge and user alone."""
    errors: Mapping[str, Rate] = field(default_factory=dict)
    """Errors by kind of the whole dream, in which the first part that answers decides."""
    false_success: Rate | None = None
    """Of the episodes that must not be rewarded, those that the dream rewards."""

    @property
    def by_kind(self) -> dict[str, Rate]:
        """`false_success` by kind: `REAL_FAILURES` and the kinds of edits."""
        return {kind: rate for kind, rate in self.errors.items() if kind not in _NO_FALSE_SUCCESSES}

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Judgement":
        """The judgement that `to_dict` wrote."""
        return TypeAdapter(cls).validate_python(values)


class _Outcome(NamedTuple):
    """One case of a part; of the dream as a whole, `part` is empty."""

    part: str
    kind: str
    task: str
    wrong: bool
    example: str
    answer: tuple[str, str] = ("", "")
    """Of a lookup: the recorded answer and the part's."""


async def ajudge(
    dream: Dream,
    episodes: Sequence[Trajectory],
    *,
    writes: Collection[str] = (),
    concurrency: int = 32,
    on_episode: Callable[[], None] = lambda: None,
) -> Judgement:
    """Put recorded episodes to a dream and to each of its parts.

    Questions are last steps and invalid actions, a tool agent's lookups made again, its messages to a user (`user_cases`), and
    every step of a text agent's failure.

    Args:
        episodes: With their true outcome: recorded ones, real ones of a policy, and edits (`edited_successes`).
        writes: A tool agent's tools that change its world; every other only reads.
        concurrency: Episodes put to it at once.

    Raises whatever the experience model's server raises. An unreadable answer rewards nothing, and shows nothing.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(trajectory: Trajectory) -> list[_Outcome]:
        async with slots:
            outcomes = await _outcomes(dream, with_observation(trajectory), writes)
            on_episode()
            return outcomes

    outcomes = [each for outcomes in await asyncio.gather(*map(one, episodes)) for each in outcomes]
    return _judgement(dream, outcomes + await _relative_outcomes(dream, episodes))


async def _relative_outcomes(dream: Dream, episodes: Sequence[Trajectory]) -> list[_Outcome]:
    """The cases of a `RelativeJudge`. Of each task with both outcomes, no failure may do as well as the successes."""
    ended = sorted((each for each in episodes if ends_with_message(each)), key=lambda each: each.task.id)
    tasks = [list(map(with_observation, group)) for _, group in groupby(ended, key=lambda each: each.task.id)]
    groups, outcomes = [group for group in tasks if len({each.success for each in group}) == 2], list[_Outcome]()
    for key, judge in zip(_keys(dream.judges, "judge"), dream.judges, strict=True):
        rankings = await asyncio.gather(*map(judge.rank, groups)) if isinstance(judge, RelativeJudge) else ()
        for group, ranking in zip(groups, rankings, strict=False):
            for each, own in zip(group, ranking.rewards, strict=True):
                other = fmean(r for e, r in zip(group, ranking.rewards, strict=True) if e.success != each.success)
                text = f"task {each.task.id}, last action {each.steps[-1].action[:200]}: {own:.2f}, others {other:.2f}"
                outcomes.append(_Outcome(key, _kind(each), each.task.id, (own - other) * (each.success or -1) <= 0, text))
    return outcomes


def questions(trajectory: Trajectory, writes: Collection[str]) -> tuple[int, int, int]:
    """Number of questions of `ajudge` to each responder, to each judge and to a user."""
    positions, by_tools = list(_question_positions(trajectory)), is_tool_task(trajectory.task)
    actions = sum(not (by_tools and is_answer(trajectory.steps[position].action)) for position, _ in positions)
    turns = sum(is_answer(step.action) for step in trajectory.steps) if has_user_turns(trajectory) else 0
    return actions + len(list(_lookups(trajectory, writes))), sum(ends for _, ends in positions) if by_tools else 0, turns


def _question_positions(trajectory: Trajectory) -> Iterator[tuple[int, bool]]:
    """Positions of the steps that are asked about, and whether the outcome is."""
    by_tools, last = is_tool_task(trajectory.task), len(trajectory.steps) - 1
    for position, step in enumerate(trajectory.steps):
        ends = position == last and (is_answer(step.action) or not by_tools)
        ends = ends or (not by_tools and not trajectory.success)
        if (ends or not step.valid) and step.decided_by != RULES:
            yield position, ends


async def _outcomes(dream: Dream, trajectory: Trajectory, writes: Collection[str]) -> list[_Outcome]:
    task, steps, outcomes = trajectory.task, trajectory.steps, list[_Outcome]()
    rewarded, reasons = dict[str, bool](), dict[str, str]()
    for position, ends in _question_positions(trajectory):
        step = steps[position]
        episode = dream.resume(task, steps[:position], prompt=trajectory.prompt).episode(step.action)
        answers = {} if is_tool_task(task) and is_answer(step.action) else await _answers(dream, episode)
        if not step.valid:
            for part, answer in answers.items():
                text = f"task {task.id}: {step.action[:200]} is accepted"
                outcomes.append(_Outcome(part, INVALID, task.id, answer.valid, text))
        verdicts = await _verdicts(dream, episode, answers.get("")) if ends else {}
        for part, verdict in verdicts.items():
            if not verdict.final and not trajectory.success:
                verdict = verdicts[""]  # it rewards a failure only where the dream does
            earned = verdict.success or (trajectory.success and verdict.reward > 0)
            rewarded[part] = rewarded.get(part, False) or earned
            reasons[part] = verdict.reason
    last = steps[-1].action[:200] if steps else ""
    for part, earned in rewarded.items():
        verdict_text = f"{'rewarded' if earned else 'not rewarded'}, {reasons[part][:200] or 'no reason'}"
        text = f"task {task.id}, last action {last}: {verdict_text}"
        outcomes.append(_Outcome(part, _kind(trajectory), task.id, earned != trajectory.success, text))
    for lookup in _lookups(trajectory, writes):
        episode = dream.resume(task, steps[: lookup.position], prompt=trajectory.prompt).episode(lookup.action)
        for part, answer in (await _answers(dream, episode)).items():
            text = f"task {task.id}: {lookup.action[:200]} -> {answer.observation[:200]!r}, really {lookup.right[:200]!r}"
            kind = LOOKUP if lookup.before is None else WRITTEN
            texts = normalised(lookup.right), normalised(answer.observation)
            outcomes.append(_Outcome(part, kind, task.id, not _shows(lookup, answer.observation), text, texts))
    cases = await user_cases(dream, trajectory)
    return outcomes + [_Outcome(f"user:{each.by}", each.kind, task.id, each.wrong, each.example) for each in cases]


def _kind(trajectory: Trajectory) -> str:
    if trajectory.success:
        return MISSED
    return trajectory.run if trajectory.run.startswith("edited/") else REAL_FAILURES[trajectory.source != "offline"]


async def _answers(dream: Dream, episode: Episode) -> dict[str, Answer]:
    """Answers by responder, and under "" the first of them, which is the dream's."""
    answers = dict[str, Answer]()
    for key, responder in zip(_keys(dream.responders, "responder"), dream.responders, strict=True):
        try:
            answer = await ask(responder, "respond", Answer, episode)
        except PredictionFailed:
            answer = Answer("", verdict=Verdict(0.0, False, _UNREADABLE))
        if answer is not None and dream.accepts(responder, episode, answer):
            answers[key] = answer
        else:
            episode = await dream.with_lookups(responder, episode)
    if answers:
        answers[""] = next(iter(answers.values()))
    return answers


async def _verdicts(dream: Dream, episode: Episode, answer: Answer | None) -> dict[str, Verdict]:
    """The verdict of each judge that has one; under "" the dream's."""
    verdicts = dict[str, Verdict]()
    for key, judge in zip(_keys(dream.judges, "judge"), dream.judges, strict=True):
        if isinstance(judge, RelativeJudge):
            continue  # which is measured by `_relative_outcomes`
        try:
            verdict = await ask(judge, "judge", Verdict, episode, answer)
        except PredictionFailed:
            verdict = Verdict(0.0, False, _UNREADABLE)
        if verdict is not None:
            verdicts[key] = verdict
    if not verdicts and answer is not None and answer.outcome is not None:
        verdicts[_OWN_JUDGE] = answer.outcome
    if verdicts:
        verdicts[""] = min(verdicts.values(), key=lambda verdict: not verdict.final)  # the first final one, as `Dream.judge`
    return verdicts


def _keys(parts: Sequence[Any], role: str) -> list[str]:
    """A key for each part by its name. A second one of a name has its number too."""
    names = [part.name for part in parts]
    return [f"{role}:{name}" + (f" {number}" if name in names[:number] else "") for number, name in enumerate(names)]


class _Lookup(NamedTuple):
    """A reading call of an episode that is made again."""

    position: int
    """Behind so many steps."""
    action: str
    right: str
    """The recorded answer."""
    before: str | None
    """Its answer before something was written; None where nothing was."""


def _lookups(trajectory: Trajectory, writes: Collection[str]) -> Iterator[_Lookup]:
    """The first lookup, again before anything is written; and those that show what was written."""
    if not is_tool_task(trajectory.task) or trajectory.run.startswith("edited/"):
        return
    steps = trajectory.steps
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


def _shows(lookup: _Lookup, observation: str) -> bool:
    """True if the answer is the recorded one. Or, after a write, if it has all new words."""
    new = set(normalised(lookup.right).split()) - set(normalised(lookup.before or "").split())
    if lookup.before is None or not new:  # without a new word, something is gone or in another order
        return normalised(observation) == normalised(lookup.right)
    return new <= set(normalised(observation).split())


def _judgement(dream: Dream, outcomes: Sequence[_Outcome]) -> Judgement:
    whole, parts = [each for each in outcomes if not each.part], []
    users = [dream.user] if model_user(dream.user) is not None else []
    for role, group in (("responder", dream.responders), ("judge", dream.judges), ("user", users)):
        for key, part in zip(_keys(group, role), group, strict=True):
            parts.append(_part(key, getattr(part, "model", None) is not None, [each for each in outcomes if each.part == key]))
    if _OWN_JUDGE not in _keys(dream.judges, "judge") and (own := [each for each in outcomes if each.part == _OWN_JUDGE]):
        parts.append(_part(_OWN_JUDGE, True, own))
    return Judgement(
        version=dream.version,
        parts=parts,
        errors=_errors(whole),
        false_success=_rate(each for each in whole if each.kind not in _NO_FALSE_SUCCESSES),
    )


def _part(key: str, by_model: bool, outcomes: Sequence[_Outcome]) -> PartJudgement:
    role, _, name = key.partition(":")
    answers = [each.answer for each in outcomes if each.kind == LOOKUP]
    recorded, answered = (Counter(texts) for texts in zip(*answers, strict=True)) if answers else (Counter(), Counter())
    examples = defaultdict[str, list[str]](list)
    for each in outcomes:
        if each.wrong and len(examples[each.kind]) < _MAX_EXAMPLES:
            examples[each.kind].append(each.example)
    return PartJudgement(
        name=name,
        role=cast(Literal["responder", "judge", "user"], role),
        errors=_errors(outcomes),
        examples=dict(examples),
        alike=len(recorded) >= _MIN_ALIKE and len(answered) == 1,
        by_model=by_model,
    )


def _errors(outcomes: Iterable[_Outcome]) -> dict[str, Rate]:
    groups = defaultdict[str, list[_Outcome]](list)
    for each in outcomes:
        groups[each.kind].append(each)
    return {kind: rate for kind, cases in sorted(groups.items()) if (rate := _rate(cases)) is not None}


def _rate(cases: Iterable[_Outcome]) -> Rate | None:
    return clustered_rate((each.task, each.wrong) for each in cases)


def keys_of(episodes: Sequence[Trajectory]) -> str:
    """A digest that tells episodes from others, with their tasks' rules, rubrics and tools."""
    return sha256("\n".join(sorted(map(repr, episodes))).encode("utf-8", "surrogatepass")).hexdigest()[:16]
