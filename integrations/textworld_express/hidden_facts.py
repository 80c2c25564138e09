"""What a world of TextWorld-Express asks for next: hidden in `peckingorder`, where a book says it item by item, and in the list
that a task of `simonsays` begins with."""

import re
from collections.abc import Sequence
from itertools import accumulate

from dreamgym_lg.experience.hidden_facts import draw_order
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.integrations.textworld_express.text import movable_items
from dreamgym_lg.types import Task

_ASKED = re.compile(r"The current task is to take the (.+?)\.")
_LISTED = re.compile(r"Simon says, take these actions in order: (.+)\.")
_MOVED = re.compile(r"(?:take (?P<taken>.+)|put (?P<put>.+?) in .+)")


def hidden_facts(task: Task, history: Sequence[Exchange], seed: int) -> list[str]:
    """`HiddenFacts` of TextWorld-Express: the item that the book of `peckingorder` asks for, the next action of the list of
    `simonsays`, "" in every other game.

    The order of the items is what `history` has revealed, then a draw by the seed. An item is done once it is taken, and comes
    again when it is put back and the reward for it is lost.
    """
    first = str(task.metadata.get("observation", ""))
    if listed := _LISTED.fullmatch(first):
        actions = [*listed[1].split(", "), ""]
        paid = accumulate((exchange.prediction.reward > 0 for exchange in history), initial=0)
        return [actions[min(number, len(actions) - 1)] for number in paid]
    items = movable_items(first) if task.metadata.get("game") == "peckingorder" else []
    order = _order(items, history, seed)
    facts, asked = [], set[str]()
    for exchange in history:
        facts.append(order[0] if order else "")
        item, reward = _moved(exchange), exchange.prediction.reward
        if item in items and (reward != 0 or item in asked):
            rest = [other for other in order if other != item]
            order = [item, *rest] if reward < 0 else rest
        asked.update(_ASKED.findall(exchange.prediction.observation))
    return [*facts, order[0] if order else ""]


def _order(items: Sequence[str], history: Sequence[Exchange], seed: int) -> list[str]:
    """The order of the items: first those that the book asked for or that were paid for, then the drawn ones."""
    revealed: dict[str, None] = {}
    for exchange in history:
        found = {_moved(exchange)} if exchange.prediction.reward > 0 else _ASKED.findall(exchange.prediction.observation)
        revealed.update((item, None) for item in found if item in items)
    wrong = history[-1] if history and history[-1].prediction.terminated and history[-1].prediction.reward <= 0 else None
    drawn = [item for item in draw_order(items, seed) if item not in revealed]
    # what a recorded episode failed by taking was not asked for
    return [*revealed, *sorted(drawn, key=lambda item: wrong is not None and item == _moved(wrong))]


def _moved(exchange: Exchange) -> str:
    """The item that the action takes or puts somewhere; "" for an invalid or any other action."""
    moved = _MOVED.fullmatch(" ".join(exchange.action.split())) if exchange.prediction.valid else None
    return (moved["taken"] or moved["put"]) if moved else ""
