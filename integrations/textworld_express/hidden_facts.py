"""What a world of TextWorld-Express hides: in `peckingorder` the item that its book asks for next, in the list that a task of
`simonsays` begins with the next action, in `mapreader` the rooms that cannot be seen yet."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

from dreamgym_lg.experience.hidden_facts import draw_order
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.integrations.textworld_express.text import BESIDE, CONNECTED, FETCHED, ROOM, movable_items
from dreamgym_lg.types import Task

ROOMS = (
    *("alley", "attic", "backyard", "bar", "basement", "bathroom", "bedroom", "canteen", "cellar", "chamber", "closet"),
    *("cookery", "cubicle", "cupboard", "driveway", "garage", "greenhouse", "kitchen", "kitchenette", "laundromat", "library"),
    *("lounge", "office", "outside", "pantry", "parlor", "playroom", "salon", "sauna", "scullery", "shower", "street"),
    *("studio", "study", "supermarket", "vault", "washroom", "workshop"),
)
"""Names of rooms, of which those that a task does not tell are drawn."""
OPPOSITE = {"North": "South", "South": "North", "East": "West", "West": "East"}
"""The ways, in the order in which a room names them, each with the way back."""

_ASKED = re.compile(r"The current task is to take the (.+?)\.")
_LISTED = re.compile(r"Simon says, take these actions in order: (.+)\.")
_MOVED = re.compile(r"(?:take (?P<taken>.+)|put (?P<put>.+?) in .+)")


def hidden_facts(task: Task, history: Sequence[Exchange], seed: int) -> list[str]:
    """`HiddenFacts` of TextWorld-Express: the item that the book of `peckingorder` asks for, the next action of the list of
    `simonsays`, where each way leads in `mapreader` (`_ways`), "" in every other game.

    The order of the items is what `history` has revealed, then a draw by the seed. An item is done once it is taken, and comes
    again when it is put back and the reward for it is lost.
    """
    first = str(task.metadata.get("observation", ""))
    if listed := _LISTED.fullmatch(first):
        actions = [*listed[1].split(", "), ""]
        paid = accumulate((exchange.prediction.reward > 0 for exchange in history), initial=0)
        return [actions[min(number, len(actions) - 1)] for number in paid]
    if wanted := FETCHED.match(task.instruction):
        return _ways(task, wanted[1], wanted[2], [first, *(exchange.prediction.observation for exchange in history)], seed)
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


def _ways(task: Task, coin: str, box: str, observations: Sequence[str], seed: int) -> list[str]:
    """For each observation what the next move shows, by way, and the map as long as it was not read.

    Rooms that the episode has seen are what they were, at any step of it; the others are drawn.
    """
    charted = next((seen for seen in observations if seen.startswith("The map reads:")), "")
    rooms = _draw_rooms(task, coin, observations, dict(CONNECTED.findall(charted)), seed)
    if not charted:
        connected = (f"The {room} connects to the {_listed(list(exits.values()))}." for room, exits in rooms.items())
        charted = " ".join(["The map reads:", *connected])
    here, read, facts = "", False, []
    things = {coin: "a coin", box: "a box, that is empty"}
    for seen in observations:
        if found := ROOM.match(seen):
            here = found[1]
        things |= {
            "You take the coin.": {coin: ""},
            "You put the map in the box.": {box: "A box, that contains a map"},
            "You take the map.": {box: "a box, that is empty"},
        }.get(seen, {})
        read = read or seen == charted
        beside = rooms.get(here, {}).items()
        ways = [f"{way.lower()}: {_shown(room, things.get(room, ''), rooms[room])}" for way, room in beside]
        facts.append(" ".join([*ways, *([] if read else [charted])]))
    return facts


def _draw_rooms(
    task: Task, coin: str, observations: Sequence[str], charted: Mapping[str, str], seed: int
) -> dict[str, dict[str, str]]:
    """The rooms, each with the rooms beside it by way: those that were shown, the other ones behind them."""
    shown = {found[1]: dict(BESIDE.findall(seen)) for seen in observations if (found := ROOM.match(seen))}
    rooms = {room: dict(exits) for room, exits in shown.items()}
    for room, exits in shown.items():
        for way, other in exits.items():
            if other not in shown:
                rooms.setdefault(other, {})[OPPOSITE[way]] = room
    count = int(found[1]) if (found := re.search(r"numLocations=(\d+)", str(task.metadata.get("params", "")))) else len(rooms)
    names = dict.fromkeys([coin, *charted, *draw_order(ROOMS, seed)])
    for name in [name for name in names if name not in rooms][: max(0, count - len(rooms))]:
        beside = [room for room in rooms if room not in shown]
        likely = [room for room in beside if name in charted.get(room, "").replace(" and ", ", ").split(", ")]
        if not beside:
            break
        room = draw_order(likely or beside, seed)[0]
        way = next((way for way in draw_order(OPPOSITE, seed) if way not in rooms[room]), None)
        if way:
            rooms[room][way] = name
            rooms[name] = {OPPOSITE[way]: room}
    return {room: {way: exits[way] for way in OPPOSITE if way in exits} for room, exits in rooms.items()}


def _shown(room: str, thing: str, exits: Mapping[str, str]) -> str:
    inside = [f"In one part of the room you see {thing}."] if thing else []
    beside = [f"To the {way} you see the {other}." for way, other in exits.items()]
    return " ".join([f"You are in the {room}.", *inside, *beside])


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
