"""TextWorld-Express's text alone: action checks, splits and hidden facts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.game import digest, draw_order, one_line
from dreamgym_lg.tasks import first_observation, world_seed
from dreamgym_lg.types import Split, Step, Task

GAMES: Mapping[str, str] = {
    "peckingorder": "",
    "twc": "numLocations=1,numItemsToPutAway=2,includeDoors=0,limitInventorySize=0",
    "cookingworld": "",
    "coin": "numLocations=7,includeDoors=0,numDistractorItems=0",
    "mapreader": "numLocations=3,maxDistanceApart=1,maxDistractorItemsPerLocation=0,includeDoors=0,limitInventorySize=0",
    "arithmetic": "",
    "sorting": "",
    "simonsays": "memorization=1",  # else it begins in sixty different ways only
}
"""Each game with its default parameters."""

UNKNOWN_ACTION = "Unknown action: I'm not sure what you mean."
"""The environment's answer to every invalid action."""

STATE_KNOWN = ("peckingorder", "twc")
"""Games whose observations say all that is in sight, held and open."""

FIXED = frozenset({"stove", "oven", "barbeque", "toilet", "bath mat", "instructions book"})
"""Things that rooms show like an item although nobody can take them."""


# --- The room in the observations -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Room:
    """State of the world as an episode's observations show it."""

    places: dict[str, str] = field(default_factory=dict)
    """Containers: `closed`, `open` (and can be closed) or `surface`."""
    items: list[tuple[str, str]] = field(default_factory=list)
    """Things with their place, or "" for the floor; some worlds show one name twice."""
    held: list[str] = field(default_factory=list)
    fixed: set[str] = field(default_factory=set)
    exits: set[str] = field(default_factory=set)
    doors: set[str] = field(default_factory=set)


_SENTENCE = re.compile(r"(?:In (?:one|another) part of the room you see|There is also|You also see) (.+?)\.(?= |$)")
_THING = re.compile(
    r"(?:an?|some) (?P<open>open )?(?P<name>.+?)"
    r"(?P<place>,? that (?:(?P<shut>is closed)|is empty|has nothing on it|has (?P<on>.+) on it|contains (?P<of>.+)))?",
    re.IGNORECASE,
)
_EXIT = re.compile(r"(Through an open [^.]+, )?to the (north|south|east|west) you see (a closed )?", re.IGNORECASE)
_TAKEN = re.compile(r"You take the (.+)\.")
_PUT = re.compile(r"You put the (.+?) in the (.+)\.")
_OPENED = re.compile(r"You open the (.+?)\.(?: The .+? contains (.+)\.)?.*")
_CLOSED = re.compile(r"You close the (.+)\.")


def _names(listed: str | None) -> list[str]:
    """The names in `a grape, some flour, and an apple`."""
    return [re.sub(r"^(?:an?|some) ", "", item) for item in re.split(r", (?:and )?", listed)] if listed else []


@lru_cache(maxsize=4096)
def _look(observation: str) -> _Room | None:
    """The room that an observation describes (shared: copy before changing it). None if it describes none."""
    if not observation.startswith("You are in the "):
        return None
    room = _Room()
    for sentence in _SENTENCE.findall(observation):
        thing = _THING.fullmatch(sentence)
        if thing is None:
            return None
        name = thing["name"]
        if thing["place"]:
            room.places[name] = "closed" if thing["shut"] else "open" if thing["open"] else "surface"
            room.items += [(item, name) for item in _names(thing["on"] or thing["of"])]
        elif name in FIXED:
            room.fixed.add(name)
        else:
            room.items.append((name, ""))
    for opened, direction, closed in _EXIT.findall(observation):
        room.exits.add(direction.lower())
        if opened or closed:
            room.doors.add(direction.lower())
    return room


def _drop(things: list[Any], matching: list[Any]) -> None:
    """Take the first of `matching` out of `things`. Nothing happens when a dream takes a thing that was never there."""
    if matching:
        things.remove(matching[0])


def _follow(observations: Sequence[str]) -> _Room | None:
    """The world after these observations; None unless they describe a room."""
    room: _Room | None = None
    for observation in observations:
        if (seen := _look(observation)) is not None:
            held = room.held if room else []
            room = _Room(dict(seen.places), list(seen.items), held, seen.fixed, seen.exits, seen.doors)
        elif room is None:
            continue
        elif taken := _TAKEN.fullmatch(observation):
            _drop(room.items, [item for item in room.items if item[0] == taken[1]])
            room.held.append(taken[1])
        elif put := _PUT.fullmatch(observation):
            _drop(room.held, [item for item in room.held if item == put[1]])
            room.items.append((put[1], put[2]))
        elif (opened := _OPENED.fullmatch(observation)) and opened[1] in room.places:
            room.places[opened[1]] = "open"
            room.items += [(item, opened[1]) for item in _names(opened[2])]
        elif (closed := _CLOSED.fullmatch(observation)) and closed[1] in room.places:
            room.places[closed[1]] = "closed"
            room.items = [item for item in room.items if item[1] != closed[1]]
    return room


# --- Judging an action -----------------------------------------------------------------------------------------------


def _possible(game: str, room: _Room) -> set[str]:
    """Every valid action of the games of `STATE_KNOWN`: in these the observations leave nothing open."""
    actions = {"look around", "inventory", *(f"move {way}" for way in room.exits)}
    actions |= {f"{verb} door to {way}" for way in room.doors for verb in ("open", "close")}
    actions |= {f"take {item}" for item, _ in room.items}
    actions |= {f"put {item} in {place}" for item in room.held for place, how in room.places.items() if how != "closed"}
    if game == "peckingorder":
        return actions | {f"read {name}" for name in room.fixed if name.endswith("book")}
    switch = {"closed": "open", "open": "close"}
    return actions | {f"{switch[how]} {place}" for place, how in room.places.items() if how in switch}


_FORMS = re.compile(
    r"look around|inventory|task|prepare meal|(?:move|(?:open|close) door to) (?:north|south|east|west)"
    r"|(?:take|read|open|close|examine|eat|chop|slice|dice) (?P<one>\S.*)"
    r"|(?:put|cook) (?P<what>\S.*) in (?P<where>\S.*)"
)


def check_action(game: str, action: str, observations: Sequence[str]) -> str | None:
    """`UNKNOWN_ACTION` for an action that the real game would refuse whatever it hides, else None.

    In the games of `STATE_KNOWN` possible actions are those with the things in sight, held and open, so that nothing invalid
    passes. In others it is a known verb form whose names have all been observed, as whole words. `simonsays` is not checked: it
    never shows its valid actions.
    """
    if game not in GAMES:
        raise ConfigurationError.unknown("game", game, GAMES)
    action = action.strip()
    if game == "simonsays":
        return None
    if game in STATE_KNOWN and (room := _follow(observations)) is not None:
        return None if action in _possible(game, room) else UNKNOWN_ACTION
    form = _FORMS.fullmatch(action)
    if form is None:
        return UNKNOWN_ACTION
    seen = "\n".join(observations).lower()
    for name in filter(None, form.group("one", "what", "where")):
        # The map is carried from the start and the meal appears unannounced: both are used without having been shown.
        if name not in ("map", "meal") and not re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", seen):
            return UNKNOWN_ACTION
    return None


# --- Tasks -----------------------------------------------------------------------------------------------------------


def world_split(observation: str) -> Split:
    """The split of the world that begins with `observation`. By its hash: the same for ever."""
    position = int(digest(one_line(observation)), 16) / 2**64
    return "test" if position < 0.15 else "validation" if position < 0.25 else "train"


def movable_items(observation: str) -> list[str]:
    """The things to take in the room that `observation` describes. Empty if it describes none."""
    room = _look(observation)
    return [item for item, _ in room.items] if room else []


# --- Hidden facts ----------------------------------------------------------------------------------------------------

_REQUESTED = re.compile(r"The current task is to take the (.+?)\.")
_MOVED = re.compile(r"(?:take (?P<taken>.+)|put (?P<put>.+?) in .+)")


def hidden_facts(task: Task, history: Sequence[Step]) -> list[str]:
    """The next item that `peckingorder`'s book requests, at each step and the next (`World.context`). "" in every other game.

    The order is the one that `history` has revealed, then a draw by the seed: a model at temperature 0 would order all worlds
    alike. An item is done once it is taken, and comes again when it is put back.
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
    """The order of the items. First those that were requested or rewarded, then the drawn ones."""
    revealed: dict[str, None] = {}
    for step in history:
        names = {_moved(step)} if step.reward > 0 else _REQUESTED.findall(step.next_observation)
        revealed.update((item, None) for item in names if item in items)
    wrong = history[-1] if history and history[-1].terminated and history[-1].reward <= 0 else None
    drawn = [item for item in draw_order(items, seed) if item not in revealed]
    # what a recorded episode failed by taking was not requested
    return [*revealed, *sorted(drawn, key=lambda item: wrong is not None and item == _moved(wrong))]


def _moved(step: Step) -> str:
    """The item that the action takes or puts somewhere. "" for an invalid or any other action."""
    moved = _MOVED.fullmatch(" ".join(step.action.split())) if step.valid else None
    return (moved["taken"] or moved["put"]) if moved else ""
