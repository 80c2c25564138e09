"""The hidden part of a world: what its first observation lists and only later ones pick from (which fruit the book names).

A model at temperature 0 fills it by habit: the same words first in every world, some never, one twice. A policy then learns
the habit. So the hidden part is drawn once, by the world's seed, and the experience model is told what is next; in its training
data that is what really came next.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from dreamgym_lg.form import first_observation, words, world_seed
from dreamgym_lg.types import Task, Trajectory

_LEAST, _SHARE = 10, 0.2
"""How often, and in which share of the episodes that list it, a word has to be named alone to count as hidden."""


class Told(NamedTuple):
    """One step, as far as it tells of the hidden part."""

    action: str
    observation: str
    """What followed."""
    reward: float
    valid: bool


def hidden_words(trajectories: Iterable[Trajectory]) -> frozenset[str]:
    """The words that real episodes name, one at a time, from what their first observation lists.

    Only words that valid actions are made of: the others ("the", "room") come and go with the phrasing.
    """
    played = [trajectory for trajectory in trajectories if trajectory.steps]
    acted = {word for t in played for step in t.steps if step.valid for word in words(step.action)}
    named: Counter[str] = Counter()
    listed: Counter[str] = Counter()
    for trajectory in played:
        first = words(first_observation(trajectory.task)) & acted
        listed.update(first)
        named.update(singled_out(first, [Told(s.action, s.next_observation, 0.0, s.valid) for s in trajectory.steps]))
    return frozenset(word for word, n in named.items() if n >= max(_LEAST, _SHARE * listed[word]))


def next_in_line(task: Task, told: Sequence[Told], hidden: frozenset[str]) -> list[str]:
    """For each step so far, and for the one to come: the hidden word that the world is about to single out, "" for none.

    The order is what was really singled out, then a draw by the world's seed. A word's turn ends with a valid action on it
    and comes again with one that loses reward.
    """
    listed = words(first_observation(task)) & hidden
    order = singled_out(listed, told)
    ever = {word for step in told if step.valid for word in words(step.action)}  # but not singled out, so not next
    order += sorted(listed.difference(order), key=lambda word: (word in ever, _drawn(task, word)))
    found = []
    for step in told:
        found.append(order[0] if order else "")
        used = words(step.action) & listed if step.valid else set[str]()
        rest = [word for word in order if word not in used]
        order = rest if step.reward >= 0 else [*sorted(used), *rest]
    return [*found, order[0] if order else ""]


def singled_out(listed: frozenset[str], told: Sequence[Told]) -> list[str]:
    """The listed words that the world singled out, in their order: it named this one alone, or paid for an action on it."""
    seen: set[str] = set()
    order: list[str] = []
    for step in told:
        acted, named = words(step.action), words(step.observation)
        new = ((acted if step.reward > 0 else named - acted) & listed) - seen
        if len(new) == 1:  # an observation that names several lists them once more
            order += new
        seen.update(acted if step.valid else (), order)
    return order


def _drawn(task: Task, word: str) -> bytes:
    return blake2b(f"{world_seed(task)}/{word}".encode()).digest()
