"""One-step fidelity (teacher-forced) and drift (teacher-free), from real steps and the dream's answers to them."""

from collections.abc import Sequence
from dataclasses import dataclass

from dreamgym_lg.fidelity.ask import Answered, Replay
from dreamgym_lg.fidelity.figures import Mean, mean, normalised, rate, token_f1
from dreamgym_lg.statistics import Rate

STATUSES = ("continues", "failure", "success")
CLOSE = 0.01
"""Rewards that differ by no more than this agree."""
BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """One row of the reliability table: steps to which the dream gave about the same reward."""

    low: float
    high: float
    predicted: float
    real: Mean


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """Teacher-forced: each real step predicted behind the real history. An unreadable answer is a wrong one."""

    steps: int
    unreadable: int
    exact: Rate | None
    """The same observation, but for whitespace around it."""
    normalised: Rate | None
    """The same words: case, whitespace and punctuation do not count."""
    token_f1: Mean | None
    terminated: Rate | None
    """Agreement whether the episode ends here."""
    success: Rate | None
    """Agreement whether the task is completed here."""
    confusion: dict[str, dict[str, int]]
    """Real status -> dreamed status (or `unreadable`) -> steps."""
    success_recalled: Rate | None
    """Of the steps that really completed the task, those that the dream, too, calls a success."""
    success_false: Rate | None
    """Of the steps that the dream calls a success, those that really were none: how a dream lies."""
    reward_right: Rate | None
    """Rewards within CLOSE of the real one."""
    reward_error: Mean | None
    """Mean |predicted - real| over readable answers: eps_R of the paper's theorem, as a mean."""
    reward_bias: Mean | None
    """Mean predicted - real: above 0 the dream overpays."""
    transition_error: Rate | None
    """Steps whose next observation (normalised) or end is another one: eps_P of the paper's theorem, as a mean."""
    invalid_recall: Rate | None
    invalid_precision: Rate | None
    reliability: tuple[Bin, ...]
    calibration_error: float | None
    """Mean |predicted - real mean| over the rows of `reliability`, weighted by their steps."""
    success_if_said: Rate | None
    """Real success where the dream says success."""
    success_if_not_said: Rate | None
    """Real success where the dream says anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """Observations right (normalised) at one step number, teacher-forced and teacher-free."""

    number: int
    forced: Rate | None
    free: Rate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Teacher-free: the recorded actions replayed in the dream, episode by episode."""

    episodes: int
    by_number: tuple[AtStep, ...]
    outcomes: dict[str, dict[str, int]]
    """Real `success` or `no success` -> dreamed -> episodes."""
    agreed: Rate | None
    success_recalled: Rate | None
    success_false: Rate | None
    """Of the episodes that succeed in the dream, those that did not in reality with the same actions."""
    return_error: Mean | None
    return_bias: Mean | None
    ended_early: Rate | None
    """Episodes that the dream ended, rightly or not, before their recorded actions were played."""
    unreadable: int


def is_right(each: Answered) -> bool:
    return each.answer is not None and normalised(each.answer.observation) == normalised(each.step.next_observation)


def one_step(answered: Sequence[Answered]) -> OneStep:
    read = [(each, each.answer) for each in answered if each.answer is not None]
    said = [each.dreamed_status == "success" for each in answered]
    called_invalid = [each.answer is not None and not each.answer.valid for each in answered]
    off = [answer.reward - each.step.reward for each, answer in read]
    bins = reliability([(answer.reward, each.step.reward) for each, answer in read])
    return OneStep(
        steps=len(answered),
        unreadable=len(answered) - len(read),
        exact=rate(each.answer is not None and each.answer.observation.strip() == each.step.next_observation.strip()
                   for each in answered),
        normalised=rate(map(is_right, answered)),
        token_f1=mean([token_f1(e.answer.observation, e.step.next_observation) if e.answer else 0.0 for e in answered], top=1),
        terminated=rate(each.answer is not None and each.answer.terminated == each.step.terminated for each in answered),
        success=rate(each.answer is not None and each.answer.success == each.success for each in answered),
        confusion=_confusion(answered),
        success_recalled=rate(yes for each, yes in zip(answered, said, strict=True) if each.success),
        success_false=rate(not each.success for each, yes in zip(answered, said, strict=True) if yes),
        reward_right=rate(each.answer is not None and abs(each.answer.reward - each.step.reward) <= CLOSE
                          for each in answered),
        reward_error=mean([abs(each) for each in off]),
        reward_bias=mean(off),
        transition_error=rate(not is_right(each) or each.answer is None or each.answer.terminated != each.step.terminated
                              for each in answered),
        invalid_recall=rate(yes for each, yes in zip(answered, called_invalid, strict=True) if not each.step.valid),
        invalid_precision=rate(not each.step.valid for each, yes in zip(answered, called_invalid, strict=True) if yes),
        reliability=bins,
        calibration_error=sum(abs(each.predicted - each.real.value) * each.real.n for each in bins) / len(read)
        if read else None,
        success_if_said=rate(each.success for each, yes in zip(answered, said, strict=True) if yes),
        success_if_not_said=rate(each.success for each, yes in zip(answered, said, strict=True) if not yes),
    )  # fmt: skip


def reliability(pairs: Sequence[tuple[float, float]]) -> tuple[Bin, ...]:
    """(predicted, real) rewards by predicted reward: a row for each value or, of more than BINS values, for each tenth."""
    ranked = sorted(pairs)
    values = sorted({round(predicted, 2) for predicted, _ in ranked})
    if len(values) <= BINS:
        groups = [[pair for pair in ranked if round(pair[0], 2) == value] for value in values]
    else:
        edges = [len(ranked) * part // BINS for part in range(BINS + 1)]
        groups = [ranked[start:end] for start, end in zip(edges, edges[1:], strict=False) if end > start]
    return tuple(_bin(group) for group in groups)


def _bin(group: Sequence[tuple[float, float]]) -> Bin:
    predicted, real = [pair[0] for pair in group], mean([pair[1] for pair in group])
    assert real is not None
    return Bin(low=predicted[0], high=predicted[-1], predicted=sum(predicted) / len(predicted), real=real)


def _confusion(answered: Sequence[Answered]) -> dict[str, dict[str, int]]:
    table = {real: dict.fromkeys((*STATUSES, "unreadable"), 0) for real in STATUSES}
    for each in answered:
        table[each.real_status][each.dreamed_status or "unreadable"] += 1
    return table


def drift(forced: Sequence[Answered], replays: Sequence[Replay]) -> Drift:
    free = [each for replay in replays for each in replay.answered]
    pairs = [(replay.real.success, replay.dreamed.success) for replay in replays]
    names = {True: "success", False: "no success"}
    outcomes = {names[a]: {names[b]: pairs.count((a, b)) for b in (True, False)} for a in (True, False)}
    off = [replay.dreamed.reward - _reached(replay) for replay in replays if replay.dreamed.error is None]
    return Drift(
        episodes=len(replays),
        by_number=tuple(
            AtStep(number=number, forced=_right_at(forced, number), free=_right_at(free, number))
            for number in sorted({each.number for each in [*forced, *free]})
        ),
        outcomes=outcomes,
        agreed=rate(real == dreamed for real, dreamed in pairs),
        success_recalled=rate(dreamed for real, dreamed in pairs if real),
        success_false=rate(not real for real, dreamed in pairs if dreamed),
        return_error=mean([abs(each) for each in off]),
        return_bias=mean(off),
        ended_early=rate(replay.dreamed.error is None and any(e.answer is None for e in replay.answered) for replay in replays),
        unreadable=sum(replay.dreamed.error is not None for replay in replays),
    )


def _right_at(answered: Sequence[Answered], number: int) -> Rate | None:
    return rate(is_right(each) for each in answered if each.number == number)


def _reached(replay: Replay) -> float:
    """What the same steps really earned: those that no check refused."""
    return float(sum(each.step.reward for each in replay.answered))
