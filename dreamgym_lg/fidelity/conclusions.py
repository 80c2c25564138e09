"""What a fidelity report says first: plain sentences, each with its figure, made only from what was measured."""

from collections.abc import Iterator

from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.fidelity.policies import Comparison, DreamToReal
from dreamgym_lg.fidelity.records import Conclusion, Fidelity, Group, Level
from dreamgym_lg.statistics import FEW_EPISODES, Rate, StepRate

_ORDER: tuple[Level, ...] = ("bad", "watch", "good")
UNGROUNDED = (
    "This dream is ungrounded: there is no real trajectory to measure it against. Nothing here says how far it can be "
    "trusted; record real episodes (`dreamgym import`) before a training run relies on it."
)
UNSHOWN = "No real transition is retrieved for the experience model: what it knows of this environment it brought with it."


def draw_conclusions(fidelity: Fidelity) -> tuple[Conclusion, ...]:
    """Sum up a measurement in sentences, the worst first."""
    found = [] if fidelity.grounded else [Conclusion("bad", UNGROUNDED)]
    if not fidelity.retrieves:
        found.append(Conclusion("watch", UNSHOWN))
    if fidelity.judgement is not None:
        found += _of_judgement(fidelity.judgement)
    for group in fidelity.groups:
        found += _of_group(group)
    found += [*_of_comparisons(fidelity.comparisons), *_of_replays(fidelity.dream_to_real), *_of_leaks(fidelity)]
    return tuple(sorted(found, key=lambda conclusion: _ORDER.index(conclusion.level)))


def _level(rate: Rate | StepRate, *, good: float = 0.9, bad: float = 0.5) -> Level:
    """Few episodes are never called good, and bad only where their whole interval is."""
    if rate.high < bad or (rate.value < bad and rate.episodes >= FEW_EPISODES):
        return "bad"
    return "good" if rate.value >= good and rate.episodes >= FEW_EPISODES else "watch"


def _level_of_errors(rate: Rate | StepRate) -> Level:
    """Of a rate that should be 0."""
    if rate.value >= 0.1:
        return "bad"
    return "watch" if rate.successes or rate.episodes < FEW_EPISODES else "good"


def _of_judgement(judged: Judgement) -> Iterator[Conclusion]:
    if false := judged.false_success:
        kinds = ", ".join(f"{kind} {_of(rate)}" for kind, rate in judged.by_kind.items())
        said = f"The dream rewards {_of(false)} recorded and edited episodes that must not be rewarded ({kinds})."
        yield Conclusion("bad" if false.value > 0.05 else _level_of_errors(false), said)
    if missed := judged.false_failure:
        yield Conclusion(_level_of_errors(missed), f"The dream does not reward {_of(missed)} recorded successes.")
    if same := judged.same_lookup:
        yield Conclusion(_level(same), f"Asked again before anything is written, {_of(same)} lookups are answered alike.")
    if shown := judged.lookup_after_write:
        yield Conclusion(_level(shown), f"{_of(shown)} lookups that a write really changed show in the dream what is new.")


def _of_group(group: Group) -> Iterator[Conclusion]:
    one, where = group.one_step, f"On {group.name}"
    if completed := one.success_recalled:
        said = f"the dream recognised {_of(completed)} steps that really completed the task."
        if not completed.successes:
            said = (
                "the dream never says that the task is completed: it recognised 0 of "
                f"{completed.steps} steps that really completed it."
            )
        yield Conclusion(_level(completed), f"{where} {said}")
    if false := one.success_false:
        said = f"{_of(false)} successes that the dream called, step by step, were none in reality."
        yield Conclusion(_level_of_errors(false), f"{where} {said}")
    if untrue := group.drift.success_false:
        said = f"{_of(untrue)} episodes that succeeded there had not succeeded in reality with the same actions."
        yield Conclusion(_level_of_errors(untrue), f"{where}, replayed in the dream, {said}")
    if recall := one.invalid_recall:
        yield Conclusion(_level(recall), f"{where} the dream recognised {_of(recall)} really invalid actions.")
    if group.rewarded and (right := one.reward_right):
        yield Conclusion(_level(right, bad=0.7), f"{where} {_of(right)} predicted rewards were right.")
    if told := one.normalised:
        yield Conclusion(_level(told, bad=0.3), f"{where} {_of(told)} next observations had the right words.")


def _of_comparisons(rows: tuple[Comparison, ...]) -> Iterator[Conclusion]:
    if not rows:
        return
    worst = max(rows, key=lambda row: abs(row.gap))
    widest = (
        f"widest gap {worst.gap:+.2f} ({worst.policy}, iteration {worst.iteration}: dreamed {_over(worst.dream)}, "
        f"real {_over(worst.real)})"
    )
    for word, sign in (("flatters", 1), ("understates", -1)):
        if count := sum(row.apart and row.gap * sign > 0 for row in rows):
            where = f"in {count} of {len(rows)} comparisons with reality on the same tasks"
            yield Conclusion("bad", f"The dream {word} the policy {where}; {widest}.")
    if not any(row.apart for row in rows):
        few = max(row.real.episodes for row in rows) < FEW_EPISODES
        said = f"Dreamed and real success of the same policy are nowhere provably apart ({len(rows)} comparisons)"
        yield Conclusion("watch" if few else "good", f"{said}; {widest}.")


def _of_replays(moved: DreamToReal | None) -> Iterator[Conclusion]:
    if not moved or not moved.succeeded:
        return
    kept = f"{_of(moved.succeeded)} dreamed successes, their actions replayed, really succeed"
    if moved.means_little:
        hidden, of = moved.partings["hidden"], sum(moved.partings.values())
        why = (
            f"in {hidden} of {of} replays dream and reality first part in what was observed and not in a verdict, a part "
            "of the world that the dream chose (or worded otherwise)"
        )
        yield Conclusion("watch", f"{kept}; this means little here: {why}.")
    else:
        yield Conclusion(_level(moved.succeeded), f"{kept}.")


def _of_leaks(fidelity: Fidelity) -> Iterator[Conclusion]:
    if (leaks := fidelity.leaks) and leaks.tasks_near and leaks.tasks_near.successes:
        exact = leaks.tasks_exact.successes if leaks.tasks_exact else 0
        near = f"{_of(leaks.tasks_near)} evaluation tasks are near-duplicates of a training task"
        words = f"(cosine {leaks.near:g} or more), {exact} the very same words"
        yield Conclusion("watch", f"{near} {words}: where they are no other tasks, scores on them are memory.")


def _of(rate: Rate | StepRate) -> str:
    return f"{rate.successes} of {rate.steps if isinstance(rate, StepRate) else rate.episodes}"


def _over(rate: Rate) -> str:
    return f"{rate.successes}/{rate.episodes}"
