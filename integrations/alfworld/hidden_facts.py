"""What the rooms of ALFWorld hide: where the things lie that a task asks for."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.integrations.alfworld.text import Known, goal_of, kind_of, likely_order, names
from dreamgym_lg.types import Task


def hidden_facts(task: Task, history: Sequence[Exchange], seed: int, usual: Mapping[str, Mapping[str, int]]) -> list[str]:
    """`HiddenFacts` of ALFWorld: where the next wanted thing lies, such as `vase at shelf 6`; "" once all were seen.

    The place is the one where `history` shows it, else drawn by the seed among those not looked into.

    Args: `usual`, how often each kind of thing was found in each kind of receptacle (`data.usual_places`).
    """
    goal = goal_of(task.instruction)
    wanted = goal.wanted if goal is not None else []
    known, first = Known(), str(task.metadata.get("observation", ""))
    known.see(first)
    seen, shown = names([first]), list[tuple[int, str, str]]()
    for step, exchange in enumerate(history):
        observation = exchange.prediction.observation
        known.see(observation)
        shown += [(step, kind_of(name), known.here) for name in sorted(names([observation]) - seen)]
        seen |= names([observation])
    unknown = [place for place in known.places if place not in known.contents]
    facts = []
    for step in range(len(history) + 1):
        missing = _missing(wanted, [kind for at, kind, _ in shown if at < step])
        found = [place for at, kind, place in shown if at >= step and kind == missing]
        places = found or likely_order(unknown, usual.get(missing, {}), seed)
        facts.append(f"{missing} at {places[0]}" if missing and places else "")
    return facts


def _missing(wanted: Sequence[str], kinds: Iterable[str]) -> str:
    """The first of the wanted kinds that is not among these; "" if none is missing."""
    left = Counter(kinds)
    for kind in wanted:
        if not left[kind]:
            return kind
        left[kind] -= 1
    return ""
