"""What the rooms of ALFWorld hide: where the things lie that a task asks for."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dreamgym_lg.integrations.alfworld.text import Known, goal_of, kind_of, likely_order, names
from dreamgym_lg.tasks import first_observation, world_seed
from dreamgym_lg.types import Step, Task


def hidden_facts(task: Task, history: Sequence[Step], usual: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Where the next wanted thing lies, such as `vase at shelf 6`, at each step and the next; "" once all were seen.

    The place is the one where `history` shows it, else drawn by the seed among those not looked into.

    Args: `usual`, how often each kind of thing was found in each kind of receptacle (`data.usual_places`).
    """
    goal = goal_of(task.instruction)
    wanted = goal.wanted if goal is not None else []
    known, first, seed = Known(), first_observation(task), world_seed(task)
    known.see(first)
    seen, shown = names([first]), list[tuple[int, str, str]]()
    for number, step in enumerate(history):
        observation = step.next_observation
        known.see(observation)
        shown += [(number, kind_of(name), known.here) for name in sorted(names([observation]) - seen)]
        seen |= names([observation])
    unknown = [place for place in known.places if place not in known.contents]
    facts = []
    for number in range(len(history) + 1):
        missing = _missing(wanted, [kind for at, kind, _ in shown if at < number])
        found = [place for at, kind, place in shown if at >= number and kind == missing]
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
