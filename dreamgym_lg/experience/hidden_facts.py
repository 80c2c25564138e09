"""The hidden part of a world: what its first observation lists and only later ones pick from (which fruit the book names).

A model at temperature 0 fills it by habit: the same words first in every world, some never, one twice. A policy then learns
the habit. So the hidden part is drawn once, by the world's seed, and the experience model is told what is next; in its training
data that is what really came next.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from dreamgym_lg.experience.prompt_formats import first_observation, words, world_seed
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
    ended: bool = False


Hidden = Mapping[str, frozenset[str]]
"""The hidden words of each environment."""


def hidden_words(trajectories: Iterable[Trajectory]) -> Hidden:
    """The words that real episodes name, one at a time, from what their first observation lists.

    Only words that valid actions are made of: the others ("the", "room") come and go with the phrasing. No numbers, and
    nothing of a tool agent's world, whose answers repeat the task's words by themselves.
    """
    played: dict[str, list[tuple[frozenset[str], list[Told]]]] = {}
    acted: dict[str, set[str]] = {}
    for trajectory in trajectories:
        task, steps = trajectory.task, trajectory.steps
        if steps and not task.metadata.get("tools"):
            told = [Told(step.action, step.next_observation, 0.0, step.valid) for step in steps]
            played.setdefault(task.environment, []).append((words(first_observation(task)), told))
            used = acted.setdefault(task.environment, set())
            used.update(word for step in steps if step.valid for word in words(step.action) if word.isalpha())
    return {environment: _named_alone(episodes, acted[environment]) for environment, episodes in played.items()}


def _named_alone(episodes: Sequence[tuple[frozenset[str], Sequence[Told]]], acted: set[str]) -> frozenset[str]:
    named: Counter[str] = Counter()
    listed: Counter[str] = Counter()
    for first, told in episodes:
        listed.update(first & acted)
        named.update(singled_out(first & acted, told))
    return frozenset(word for word, n in named.items() if n >= max(_LEAST, _SHARE * listed[word]))


def next_in_line(task: Task, told: Sequence[Told], hidden: Hidden) -> list[str]:
    """For each step so far, and for the one to come: the hidden word that the world is about to single out, "" for none.

    The order is what was really singled out, then a draw by the world's seed, which nothing that an agent does can change. A
    word's turn ends with an action that is paid for, or with any valid one once the world has named it; it comes again with
    an action that loses reward.
    """
    listed = words(first_observation(task)) & hidden.get(task.environment, frozenset())
    if not listed:
        return [""] * (len(told) + 1)
    order = singled_out(listed, told)
    wrong = words(told[-1].action) if told and told[-1].ended and told[-1].reward <= 0 else set()  # so it was not next
    order += sorted(listed.difference(order), key=lambda word: (word in wrong, _drawn(task, word)))
    found, named = [], set[str]()
    for step in told:
        found.append(order[0] if order else "")
        over = words(step.action) & listed & (listed if step.reward > 0 else named) if step.valid else set[str]()
        rest = [word for word in order if word not in over]
        order = rest if step.reward >= 0 else [*sorted(over), *rest]
        named |= words(step.observation) & {found[-1]}
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
