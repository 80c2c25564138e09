"""What a report says first: plain sentences, each with its figure, made only from what was measured."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from dreamgym_lg.statistics import Rate

if TYPE_CHECKING:
    from dreamgym_lg.fidelity.measure import Fidelity, Group

Level = Literal["bad", "watch", "good"]
_ORDER: tuple[Level, ...] = ("bad", "watch", "good")
UNGROUNDED = (
    "This dream is ungrounded: there is no real trajectory to measure it against. Nothing here says how far it can be "
    "trusted; record real episodes (`dreamgym import`) before a training run relies on it."
)
UNSHOWN = "No real transition is retrieved for the experience model: what it knows of this world it brought with it."
FEW = 10
"""Below so many samples nothing is called good."""


class Finding(NamedTuple):
    level: Level
    sentence: str


def findings(fidelity: "Fidelity") -> tuple[Finding, ...]:
    found = [] if fidelity.grounded else [Finding("bad", UNGROUNDED)]
    if not fidelity.retrieves:
        found.append(Finding("watch", UNSHOWN))
    for group in fidelity.groups:
        found += _of_group(group)
    found += [*_of_policies(fidelity), *_of_leaks(fidelity)]
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.level)))


def _level(rate: Rate, *, good: float = 0.9, bad: float = 0.5) -> Level:
    """Few samples look neither well nor, unless even their interval does, badly."""
    if rate.high < bad or (rate.value < bad and rate.episodes >= FEW):
        return "bad"
    return "good" if rate.value >= good and rate.episodes >= FEW else "watch"


def _of_group(group: "Group") -> Iterator[Finding]:
    one, where = group.one_step, f"On {group.name}"
    if completed := one.success_recalled:
        if not completed.successes:
            yield Finding(_level(completed), f"{where} the dream never says that the task is completed: it recognised 0 of "
                                 f"{completed.episodes} steps that really completed it.")  # fmt: skip
        else:
            yield Finding(_level(completed), f"{where} the dream recognised {_of(completed)} steps that really completed the "
                                             "task.")  # fmt: skip
    if lies := one.success_false:
        level: Level = "bad" if lies.value >= 0.1 else "watch" if lies.successes or lies.episodes < FEW else "good"
        yield Finding(level, f"{where} {_of(lies)} successes that the dream called, step by step, were none in reality.")
    if lies := group.drift.success_false:
        level = "bad" if lies.value >= 0.1 else "watch" if lies.successes or lies.episodes < FEW else "good"
        yield Finding(level, f"{where}, replayed in the dream, {_of(lies)} episodes that succeeded there had not succeeded in "
                             "reality with the same actions.")  # fmt: skip
    if recall := one.invalid_recall:
        yield Finding(_level(recall), f"{where} the dream recognised {_of(recall)} really invalid actions.")
    if group.theorem and (right := one.reward_right):  # where nothing was ever earned, 0 is right without any merit
        yield Finding(_level(right, bad=0.7), f"{where} {_of(right)} predicted rewards were right.")
    if told := one.normalised:
        yield Finding(_level(told, bad=0.3), f"{where} {_of(told)} next observations had the right words.")


def _of_policies(fidelity: "Fidelity") -> Iterator[Finding]:
    rows = fidelity.comparisons
    if rows:
        worst = max(rows, key=lambda row: abs(row.gap))
        widest = (
            f"widest gap {worst.gap:+.2f} ({worst.policy}, iteration {worst.iteration}: dreamed "
            f"{worst.dream.successes}/{worst.dream.episodes}, real {worst.real.successes}/{worst.real.episodes})"
        )
        for word, sign in (("flatters", 1), ("understates", -1)):
            if count := sum(row.apart and row.gap * sign > 0 for row in rows):
                yield Finding("bad", f"The dream {word} the policy in {count} of {len(rows)} comparisons with reality on the "
                                     f"same tasks; {widest}.")  # fmt: skip
        if not any(row.apart for row in rows):
            few = max(row.real.episodes for row in rows) < FEW
            yield Finding("watch" if few else "good", f"Dreamed and real success of the same policy are nowhere provably "
                                                      f"apart ({len(rows)} comparisons); {widest}.")  # fmt: skip
    if (moved := fidelity.dream_to_real) and moved.succeeded:
        kept = f"{_of(moved.succeeded)} dreamed successes, their actions replayed, really succeed"
        if moved.means_little:
            hidden, of = moved.partings["hidden"], sum(moved.partings.values())
            yield Finding("watch", f"{kept}; this means little here: in {hidden} of {of} replays dream and reality first part "
                                   "in what was observed and not in a verdict, a part of the world that the dream chose "
                                   "(or worded otherwise).")  # fmt: skip
        else:
            yield Finding(_level(moved.succeeded), f"{kept}.")


def _of_leaks(fidelity: "Fidelity") -> Iterator[Finding]:
    if (leaks := fidelity.leaks) and leaks.tasks_near and leaks.tasks_near.successes:
        exact = leaks.tasks_exact.successes if leaks.tasks_exact else 0
        yield Finding("watch", f"{_of(leaks.tasks_near)} evaluation tasks are near-duplicates of a training task (cosine "
                               f"{leaks.near:g} or more), {exact} the very same words: where they are no other "
                               "tasks, scores on them are memory.")  # fmt: skip


def _of(rate: Rate) -> str:
    return f"{rate.successes} of {rate.episodes}"
