"""The values of each page's template, from a replay buffer and the page's query."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, get_args
from urllib.parse import urlencode

from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.metrics import check_health
from dreamgym_lg.replay.reader import Event, Filters, Iteration, Outcome, ReplayReader, Run
from dreamgym_lg.report.curves import History, by_iteration, read_evaluations, read_number
from dreamgym_lg.types import DECIDERS, Source, Split

Query = Mapping[str, str]
"""The query parameters of an address."""
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
_MAX_TEXT_LENGTH = 200


class NotStored(DreamGymError):
    """An address names what the replay buffer does not hold."""


def link(page: str, **values: object) -> str:
    """The address of a page with query parameters; None leaves one out."""
    query = urlencode({name: value for name, value in values.items() if value is not None}, errors="replace")
    return f"{page}?{query}" if query else page


def success(row: Run | Iteration) -> str | None:
    """Success rate of the playable episodes; None if all ended in an error.

    It has no interval, as a group's episodes are of one task and not independent.
    """
    played = row.episodes - row.failed
    return f"{row.successes / played:.2f}" if row.errors < row.episodes else None


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
        "parts": [each for each in reader.runs() if each.name == name],
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
    """The rollouts of one task in one iteration side by side, the best first."""
    name, task_id, iteration = query.get("run", ""), query.get("task_id", ""), _number(query, "iteration") or 0
    rollouts = reader.group(name, iteration, task_id, most=ROLLOUTS_SHOWN)
    if not rollouts:
        raise NotStored(f"no episode of task {task_id!r} is stored in iteration {iteration} of run {name!r}")
    ranked = sorted(rollouts, key=lambda each: (bool(each[1].error), -each[1].success, -each[1].reward, each[1].rollout_index))
    return {"name": name, "iteration": iteration, "task": ranked[0][1].task, "rollouts": ranked, "most": ROLLOUTS_SHOWN}


def episodes(reader: ReplayReader, query: Query) -> Values:
    """The episodes that the filters choose, newest first."""
    filters = read_filters(query)
    page = reader.find(filters, before=_number(query, "before"), most=EPISODES_SHOWN)
    return {"filters": filters, "page": page, "runs": sorted({run.name for run in reader.runs()}), "choices": CHOICES}


def episode(reader: ReplayReader, query: Query) -> Values:
    """One episode, step by step."""
    id = _number(query, "id")
    episode = None if id is None else reader.trajectory(id)
    if episode is None:
        raise NotStored(f"there is no episode {query.get('id', '')!r} in this replay buffer")
    fields = {name: getattr(episode.task, name) for name in ("rubric", "seed", "tools", "metadata")}
    data = {name: value for name, value in fields.items() if value not in (None, "", {})}
    return {"id": id, "episode": episode, "data": json.dumps(data, indent=2, ensure_ascii=False) if data else ""}


def read_filters(query: Query) -> Filters:
    """The filters of an address. Raises `ConfigurationError` for an unknown filter or value."""
    values: dict[str, Any] = {name: text.strip() for name, text in query.items() if text.strip() and name != "before"}
    for name, value in values.items():
        if name not in Filters._fields:
            raise ConfigurationError.unknown("filter", name, Filters._fields)
        if name in CHOICES and value not in CHOICES[name]:
            raise ConfigurationError.unknown(name, value, CHOICES[name])
    if len(values.get("text", "")) > _MAX_TEXT_LENGTH:
        raise ConfigurationError(
            f"the text to search for has {len(values['text'])} characters; give {_MAX_TEXT_LENGTH} at most"
        )
    if "iteration" in values:
        values["iteration"] = _number(query, "iteration")
    return Filters(**values)


def alarms(history: History) -> list[tuple[int, str]]:
    """(iteration, sentence) for every new alarm, failed episodes and an early end of a run."""
    rows, before, sentences = list(history.values()), dict[str, str](), list[tuple[int, str]]()
    for end, (iteration, row) in enumerate(history.items(), 1):
        current = dict(check_health(rows[:end]))
        sentences += [(iteration, text) for name, text in current.items() if name not in before]
        before = current
        names = ("failed_episodes", "unreadable_episodes", "unanswered_episodes", "user_faults")
        failed, unreadable, unanswered, faults = (read_number(row.get(name)) or 0 for name in names)
        causes = {"could not be played": failed - unreadable - unanswered - faults}
        causes["ended in an unreadable answer of the experience model"] = unreadable
        causes["ended at a call that nothing in the dream answers"] = unanswered
        causes["ended by the dreamed user's fault, and taught nothing,"] = faults
        if counted := [f"{n:.0f} episode{'s' * (n != 1)} {cause}" for cause, n in causes.items() if n > 0]:
            sentences.append((iteration, f"{' and '.join(counted)}, the first: {row.get('first_error')}"))
        if row.get("stopped_early"):
            sentences.append((iteration, f"the run ended early: {row.get('end_cause', 'its cause was not recorded')}"))
    return sentences


def _digest(metrics: Sequence[Mapping[str, Any]]) -> str:
    """A digest of the metrics: when it changes, the browser loads the picture again."""
    return blake2b(json.dumps(metrics).encode(), digest_size=8).hexdigest()


def _number(query: Query, name: str) -> int | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18:  # SQLite's integers have 18 digits and a bit
        raise ConfigurationError(f"{name}={text[:40]!r} is no number; give digits")
    return int(text)
