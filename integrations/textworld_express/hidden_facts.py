"""What a world of TextWorld-Express reveals next: of `peckingorder` the item that its book asks for, of `simonsays` the next
action of its list, of `mapreader` the rooms beside the one where the agent is."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

from dreamgym_lg.integrations.text_games.dream import draw_order
from dreamgym_lg.integrations.textworld_express.text import BESIDE, CONNECTED, FETCHED, GAMES, ROOM, movable_items
from dreamgym_lg.tasks import first_observation, world_seed
from dreamgym_lg.types import Step, Task

ROOMS = (
    *("alley", "attic", "backyard", "bar", "basement", "bathroom", "bedchamber", "bedroom", "canteen", "cellar", "chamber"),
    *("closet", "cookery", "cookhouse", "cubicle", "cupboard", "driveway", "garage", "greenhouse", "kitchen", "kitchenette"),
    *("launderette", "laundromat", "laundry place", "library", "living room", "lounge", "office", "outside", "pantry"),
    *("parlor", "playroom", "recreation zone", "salon", "sauna", "scullery", "shower", "side yard", "spare room"),
    *("steam room", "storage room", "street", "studio", "study", "supermarket", "vault", "washroom", "workshop"),
)
"""The names that the game has for rooms."""
OPPOSITE = {"North": "South", "South": "North", "East": "West", "West": "East"}
"""The ways, in the order in which a room names them, each with the way back."""

_ASKED = re.compile(r"The current task is to take the (.+?)\.")
_LISTED = re.compile(r"Simon says, take these actions in order: (.+)\.")
_MOVED = re.compile(r"(?:take (?P<taken>.+)|put (?P<put>.+?) in .+)")


def hidden_facts(task: Task, history: Sequence[Step]) -> list[str]:
    """One text for each step and the next: what the world reveals then, drawn once by its seed (`World.context`).

    That is the item that the book of `peckingorder` asks for, the next action of the list of `simonsays`, what a look, each
    move and the map show in `mapreader` (`_ways`), "" in every other game.

    The order of the items is what `history` has revealed, then a draw by the seed. An item is done once it is taken, and comes
    again when it is put back and the reward for it is lost.
    """
    first, seed = first_observation(task), world_seed(task)
    if listed := _LISTED.fullmatch(first):
        actions = [*listed[1].split(", "), ""]
        paid = accumulate((step.reward > 0 for step in history), initial=0)
        return [actions[min(number, len(actions) - 1)] for number in paid]
    if (wanted := FETCHED.match(task.instruction)) and task.metadata.get("params") == GAMES["mapreader"]:
        return _ways(wanted[1], wanted[2], [first, *(step.next_observation for step in history)], seed)
    items = movable_items(first) if task.metadata.get("game") == "peckingorder" else []
    order = _order(items, history, seed)
    facts, asked = [], set[str]()
    for step in history:
        facts.append(order[0] if order else "")
        item, reward = _moved(step), step.reward
        if item in items and (reward != 0 or item in asked):
            rest = [other for other in order if other != item]
            order = [item, *rest] if reward < 0 else rest
        asked.update(_ASKED.findall(step.next_observation))
    return [*facts, order[0] if order else ""]


def _order(items: Sequence[str], history: Sequence[Step], seed: int) -> list[str]:
    """The order of the items: first those that the book asked for or that were paid for, then the drawn ones."""
    revealed: dict[str, None] = {}
    for step in history:
        found = {_moved(step)} if step.reward > 0 else _ASKED.findall(step.next_observation)
        revealed.update((item, None) for item in found if item in items)
    wrong = history[-1] if history and history[-1].terminated and history[-1].reward <= 0 else None
    drawn = [item for item in draw_order(items, seed) if item not in revealed]
    # what a recorded episode failed by taking was not asked for
    return [*revealed, *sorted(drawn, key=lambda item: wrong is not None and item == _moved(wrong))]


def _moved(step: Step) -> str:
    """The item that the action takes or puts somewhere; "" for an invalid or any other action."""
    moved = _MOVED.fullmatch(" ".join(step.action.split())) if step.valid else None
    return (moved["taken"] or moved["put"]) if moved else ""


def _ways(coin: str, box: str, observations: Sequence[str], seed: int) -> list[str]:
    """For each observation what a look, a move by each way and the map show, the map as long as it was not read.

    Rooms that the episode shows, at any step of it, are as they were shown first; the others are drawn.
    """
    charted = next((seen for seen in observations if seen.startswith("The map reads:")), "")
    rooms = _three_rooms(observations, [room for room, _ in CONNECTED.findall(charted)], seed)
    if not charted:
        known = {room: list(rooms[room].values()) for room in draw_order(rooms, seed)}
        lines = (f"The {room} connects to the {_enumerated(others)}." for room, others in known.items() if others)
        charted = " ".join(["The map reads:", *lines])
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
        led = {"look around": here} | {f"move {way.lower()}": room for way, room in rooms.get(here, {}).items()}
        shown = {action: _shown(room, things.get(room, ""), rooms[room]) for action, room in led.items() if room in rooms}
        shown |= {} if read else {"read map": charted}
        facts.append(" ".join(f"{action}: {text}" for action, text in shown.items()))
    return facts


def _three_rooms(observations: Sequence[str], charted: Sequence[str], seed: int) -> dict[str, dict[str, str]]:
    """The rooms, each with those beside it by way: those shown, those seen from there, behind one of these a third."""
    # the first look at a room counts: should the dream show it otherwise later, the world is still the same
    shown = {found[1]: dict(BESIDE.findall(seen)) for seen in reversed(observations) if (found := ROOM.match(seen))}
    rooms = {room: dict(exits) for room, exits in shown.items()}
    for room, exits in shown.items():
        for way, other in exits.items():
            if other not in shown:
                rooms.setdefault(other, {})[OPPOSITE[way]] = room
    unseen = [room for room in rooms if room not in shown]
    if unseen and sum(map(bool, rooms.values())) < 3:
        third = next(name for name in [*charted, *draw_order(ROOMS, seed)] if name not in rooms)
        way = next(way for way in draw_order(OPPOSITE, seed) if way not in rooms[unseen[0]])
        rooms[unseen[0]][way], rooms[third] = third, {OPPOSITE[way]: unseen[0]}
    return {room: {way: exits[way] for way in OPPOSITE if way in exits} for room, exits in rooms.items()}


def _shown(room: str, thing: str, exits: Mapping[str, str]) -> str:
    inside = [f"In one part of the room you see {thing}."] if thing else []
    beside = [f"To the {way} you see the {other}." for way, other in exits.items()]
    return " ".join([f"You are in the {room}.", *inside, *beside])


def _enumerated(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
