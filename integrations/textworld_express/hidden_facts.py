"""The order in which the book of `peckingorder` asks for items: drawn once by the world's seed, shown to the experience model.

A model at temperature 0 fills the hidden part of a world by habit: the same things first in every world, some never. A policy
then learns the habit. In training data the order is the one that the real episode revealed.
"""

import re
from collections.abc import Sequence

from dreamgym_lg.integrations.text_games.dream import draw_order
from dreamgym_lg.integrations.textworld_express.text import movable_items
from dreamgym_lg.tasks import first_observation, world_seed
from dreamgym_lg.types import Step, Task

_REQUESTED = re.compile(r"The current task is to take the (.+?)\.")
_MOVED = re.compile(r"(?:take (?P<taken>.+)|put (?P<put>.+?) in .+)")


def hidden_facts(task: Task, history: Sequence[Step]) -> list[str]:
    """The item that the book asks for next, for each step and the step to come; "" in every other game (`World.context`).

    The order of the items is what `history` has revealed, then a draw by the seed. An item is done once it is taken, and comes
    again when it is put back and the reward for it is lost.
    """
    items = movable_items(first_observation(task)) if task.metadata.get("game") == "peckingorder" else []
    order = _order(items, history, world_seed(task))
    facts, requested = [], set[str]()
    for step in history:
        facts.append(order[0] if order else "")
        item = _moved(step)
        if item in items and (step.reward != 0 or item in requested):
            rest = [other for other in order if other != item]
            order = [item, *rest] if step.reward < 0 else rest
        requested.update(_REQUESTED.findall(step.next_observation))
    return [*facts, order[0] if order else ""]


def _order(items: Sequence[str], history: Sequence[Step], seed: int) -> list[str]:
    """The order of the items: first those that were requested or rewarded, then the drawn ones."""
    revealed: dict[str, None] = {}
    for step in history:
        names = {_moved(step)} if step.reward > 0 else _REQUESTED.findall(step.next_observation)
        revealed.update((item, None) for item in names if item in items)
    wrong = history[-1] if history and history[-1].terminated and history[-1].reward <= 0 else None
    drawn = [item for item in draw_order(items, seed) if item not in revealed]
    # what a recorded episode failed by taking was not requested
    return [*revealed, *sorted(drawn, key=lambda item: wrong is not None and item == _moved(wrong))]


def _moved(step: Step) -> str:
    """The item that the action takes or puts somewhere; "" for an invalid or any other action."""
    moved = _MOVED.fullmatch(" ".join(step.action.split())) if step.valid else None
    return (moved["taken"] or moved["put"]) if moved else ""
