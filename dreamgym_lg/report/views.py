"""What each page shows: from the reader of a replay buffer and the page's address to the values of its template."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, get_args
from urllib.parse import urlencode

from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.metrics.health import check_health
from dreamgym_lg.replay.reader import Event, Filters, Iteration, Outcome, ReplayReader, Run
from dreamgym_lg.report.curves import History, by_iteration, read_evaluations, read_number
from dreamgym_lg.statistics import Rate, wilson
from dreamgym_lg.types import DECIDERS, Source, Split, Step, Trajectory

Query = Mapping[str, str]
"""What an address says behind its `?`."""
Values = dict[str, Any]

CHOICES: Mapping[str, Sequence[str]] = {
    "source": get_args(Source),
    "split": get_args(Split),
    "outcome": get_args(Outcome),
    "happened": get_args(Event),
    "decided_by": tuple(DECIDERS),
}
"""The filters with few values."""
GROUPS_SHOWN, ROLLOUTS_SHOWN, EPISODES_SHOWN = 100, 16, 50
_LONGEST_TEXT = 200


class NotStored(DreamGymError):
    """An address names what the replay buffer does not hold."""


class Column(NamedTuple):
    """A rollout beside the others of its group."""

    id: int
    trajectory: Trajectory
    alike: int
    """So many first steps are those of the best rollout."""
    parting: str
    """What then differs; empty for that one itself and for one that is the same."""


def link(page: str, **values: object) -> str:
    """The address of a page; None leaves a value away."""
    given = {name: value for name, value in values.items() if value is not None}
    return f"{page}?{urlencode(given)}" if given else page


def success(row: Run | Iteration) -> Rate | None:
    """Of the episodes that could be played (`is_missing`); None where each ended in an error, as in `missing_episodes`."""
    played = row.episodes - row.failed
    return Rate(row.successes, played, *wilson(row.successes, played)) if row.errors < row.episodes else None


def runs(reader: ReplayReader, query: Query) -> Values:
    """Every run."""
    return {"runs": reader.runs()}


def run(reader: ReplayReader, query: Query) -> Values:
    """A run: curves, alarms, evaluations, its curriculum, and the groups of the chosen iteration."""
    name, iteration = query.get("run", ""), _number(query, "iteration")
    iterations, metrics = reader.iterations(name), reader.metrics(name)
    if not iterations and not metrics:
        raise NotStored(f"no run {name!r} is stored in this replay buffer")
    history = by_iteration(metrics)
    return {
        "name": name,
        "parts": reader.runs(name),
        "history": history,
        "drawn": _digest(metrics) if len(history) > 1 else None,
        "alarms": alarms(history),
        "evaluations": read_evaluations(history),
        "iterations": iterations,
        "iteration": iteration,
        "groups": [] if iteration is None else reader.groups(name, iteration, most=GROUPS_SHOWN),
        "most": GROUPS_SHOWN,
    }


def group(reader: ReplayReader, query: Query) -> Values:
    """The rollouts of one task in one iteration, the best first, and where each parts from it."""
    name, task_id, iteration = query.get("run", ""), query.get("task_id", ""), _number(query, "iteration") or 0
    found = reader.group(name, iteration, task_id, most=ROLLOUTS_SHOWN)
    if not found:
        raise NotStored(f"no episode of task {task_id!r} is stored in iteration {iteration} of run {name!r}")
    ranked = sorted(
        found, key=lambda each: (each[1].error is not None, -each[1].success, -each[1].reward, each[1].rollout_index)
    )
    best = ranked[0][1]
    columns = [Column(id, each, *parting(best, each)) for id, each in ranked]
    return {"name": name, "iteration": iteration, "task": best.task, "columns": columns, "most": ROLLOUTS_SHOWN}


def episodes(reader: ReplayReader, query: Query) -> Values:
    """The episodes that the filters choose, newest first."""
    filters = read_filters(query)
    page = reader.find(filters, before=_number(query, "before"), most=EPISODES_SHOWN)
    return {"filters": filters, "page": page, "runs": reader.names(), "choices": CHOICES}


def episode(reader: ReplayReader, query: Query) -> Values:
    """One episode, step by step."""
    id = _number(query, "id")
    found = None if id is None else reader.trajectory(id)
    if found is None:
        raise NotStored(f"there is no episode {query.get('id', '')!r} in this replay buffer")
    known = {name: getattr(found.task, name) for name in ("rubric", "seed", "panel", "tools", "metadata")}
    data = {name: value for name, value in known.items() if value not in (None, "", {})}
    return {"id": id, "episode": found, "data": json.dumps(data, indent=2, ensure_ascii=False) if data else ""}


def read_filters(query: Query) -> Filters:
    """What an address asks for. Raises `ConfigurationError` for an unknown filter or value."""
    given: dict[str, Any] = {name: value.strip() for name, value in query.items() if value.strip() and name != "before"}
    for name, value in given.items():
        if name not in Filters._fields:
            raise ConfigurationError.unknown("filter", name, Filters._fields)
        if name in CHOICES and value not in CHOICES[name]:
            raise ConfigurationError.unknown(name, value, CHOICES[name])
    if len(given.get("text", "")) > _LONGEST_TEXT:
        raise ConfigurationError(f"the text to search for has {len(given['text'])} characters; give {_LONGEST_TEXT} at most")
    if "iteration" in given:
        given["iteration"] = _number(query, "iteration")
    return Filters(**given)


def alarms(history: History) -> list[tuple[int, str]]:
    """What went wrong in a run: each iteration where something began, with its sentence."""
    rows, told, found = list(history.values()), set[str](), list[tuple[int, str]]()
    for end, (iteration, row) in enumerate(history.items(), 1):
        wrong = dict(check_health(rows[:end]))
        found += [(iteration, text) for name, text in wrong.items() if name not in told]
        told = set(wrong)
        failed, unreadable = (read_number(row.get(name)) or 0 for name in ("failed_episodes", "unreadable_episodes"))
        causes = [
            (failed - unreadable, "could not be played"),
            (unreadable, "ended in an unreadable answer of the experience model"),
        ]
        if counted := [f"{n:.0f} episode{'s' * (n != 1)} {cause}" for n, cause in causes if n > 0]:
            found.append((iteration, f"{' and '.join(counted)}, the first: {row.get('first_error')}"))
        if row.get("stopped_early"):
            found.append((iteration, "the run ended early"))
    return found


def parting(best: Trajectory, other: Trajectory) -> tuple[int, str]:
    """How many first steps are the same, and what then differs."""
    pairs = zip(best.steps, other.steps, strict=False)
    same = next((place for place, (one, two) in enumerate(pairs) if _played(one) != _played(two)), None)
    if same is None:
        same = min(len(best.steps), len(other.steps))
        return same, "" if len(best.steps) == len(other.steps) else f"one of the two ends after step {same}"
    one, two = best.steps[same], other.steps[same]
    if one.action != two.action:
        return same, f"acts otherwise at step {same + 1}: {two.action} instead of {one.action}"
    return same, f"is answered otherwise at step {same + 1}, by the same action"


def _played(step: Step) -> tuple[object, ...]:
    return step.action, step.next_observation, step.reward, step.terminated


def _digest(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Another one for other figures: the browser then asks for the picture again."""
    return blake2b(json.dumps(metrics).encode(), digest_size=8).hexdigest()


def _number(query: Query, name: str) -> int | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18:  # SQLite's integers have 18 digits and a bit
        raise ConfigurationError(f"{name}={text[:40]!r} is no number; give digits")
    return int(text)
