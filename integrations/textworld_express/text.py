"""What follows from the text of TextWorld-Express alone: action checks, splits and varied tasks."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, Literal, get_args

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.text import digest, one_line
from dreamgym_lg.types import Split, Task, Trajectory

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

Check = Literal["names", "state"]
"""How much `check_action` knows."""

STATE_KNOWN = ("peckingorder", "twc")
"""Games whose observations say all that is in sight, held and open."""

VARIED = ("peckingorder", "twc")
"""Games of which `vary_task` makes other tasks."""

FIXED = frozenset({"stove", "oven", "barbeque", "toilet", "bath mat", "instructions book"})
"""What rooms show like an item although nobody can take it."""


# --- The room in the observations -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Room:
    """What the observations of one episode say about the world."""

    places: dict[str, str] = field(default_factory=dict)
    """What things can be put in: `closed`, `open` (and can be closed) or `surface`."""
    items: list[tuple[str, str]] = field(default_factory=list)
    """What lies about, with its place or "" for the floor; a list, because some worlds show one name twice."""
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
    """The room that an observation describes (shared: copy before changing it); None if it describes none."""
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


def _drop(things: list[Any], found: list[Any]) -> None:
    """Take the first of `found` out of `things`; nothing happens when a dream takes what was never there."""
    if found:
        things.remove(found[0])


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


def check_action(game: str, action: str, observations: Sequence[str], *, check: Check = "names") -> str | None:
    """`UNKNOWN_ACTION` for an action that the real game would refuse whatever it hides, else None.

    Pure and without Java, so that a dream can hold it (`functools.partial(check_action, "twc")`). `names`: a known verb
    form whose names have all been observed, as whole words, which is what a tool's argument schema gives an agent.
    `state`, for the games of `STATE_KNOWN`: also what is in sight, held and open as it follows from the observations, so
    that nothing invalid passes, no second `put` either. `simonsays` is not checked: it never shows what is valid.
    """
    if game not in GAMES:
        raise ConfigurationError.unknown("game", game, GAMES)
    if check not in get_args(Check):
        raise ConfigurationError.unknown("check", check, get_args(Check))
    action = action.strip()
    if game == "simonsays":
        return None
    if check == "state" and game in STATE_KNOWN and (room := _follow(observations)) is not None:
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


def world_split(observation: str, *, test_share: float = 0.15, validation_share: float = 0.1) -> Split:
    """The split of the world that begins with `observation`, by its hash: the same for ever."""
    position = int(digest(one_line(observation)), 16) / 2**64
    return "test" if position < test_share else "validation" if position < test_share + validation_share else "train"


@lru_cache(maxsize=4096)
def _mentions(observation: str) -> tuple[re.Pattern[str], list[str]] | None:
    """A pattern for the movable items with their articles, and what it finds; None where there is nothing to find."""
    room = _look(observation)
    if room is None or not room.items:
        return None
    names = "|".join(re.escape(item) for item, _ in room.items)
    pattern = re.compile(rf"\b(?:an?|some) (?:{names})(?=,|\.| on it)")
    return pattern, pattern.findall(observation)


def movable_items(observation: str) -> list[str]:
    """The names of what can be taken in the room that `observation` describes; empty if it describes none."""
    room = _look(observation)
    return [item for item, _ in room.items] if room else []


def failed_on(task: Task, trajectories: Iterable[Trajectory]) -> set[str]:
    """The items that the failed ones of a task's episodes named after their last reward, e.g. the one that was asked for and
    the one that was taken in its place."""
    items = movable_items(task.observation)
    # not what a list or the name of a place holds: "the cushion." but not "in the cushion cover", "some cushions"
    name = re.compile(rf"\b(?:the|take|put) ({'|'.join(map(re.escape, items))})(?= in |\.|$)", re.MULTILINE)
    found: set[str] = set()
    for each in trajectories if items else ():
        if each.task.id == task.id and not each.success:
            paid = max((number for number, step in enumerate(each.steps, start=1) if step.reward > 0), default=0)
            found.update(*(name.findall(f"{step.action}\n{step.next_observation}") for step in each.steps[paid:]))
    return found


def vary_task(task: Task, rng: Random, observations: Sequence[str], *, keep: Collection[str] = ()) -> Task | None:
    """A synthetic `peckingorder` or `twc` task that begins like `task`, up to half of its items exchanged for other known ones.

    What makes a task hard is often one of its items, or two that are easily mistaken for each other. So the items `keep` stay,
    unless these are all there are; of the others, those stay that chance leaves. New ones come from `observations`: first
    observations of other training worlds, for `twc` those of the same room, so that it has a place for them. Text only, no real
    environment. None if there are too few other items, for another game than these two, or if the new world falls in an
    evaluation split. Raises `ConfigurationError` if `task` itself does.
    """
    if task.split != "train":
        raise ConfigurationError(f"task {task.id} is a {task.split} task: varying it would leak the evaluation")
    game, before = task.metadata.get("game"), task.observation
    found = _mentions(before)
    if game not in VARIED or found is None:
        return None
    pattern, own = found
    room = before.split(". ")[0] if game == "twc" else ""
    others = [_mentions(text) for text in observations if text.startswith(room)]
    new = sorted(set[str]().union(*(other[1] for other in others if other is not None)) - set(own))
    free = [number for number, name in enumerate(own) if name.split(" ", 1)[1] not in keep] or range(len(own))
    exchanged = rng.sample(free, min(len(free), -(-len(own) // 2)))
    if len(new) < len(exchanged):
        return None
    names = list(own)
    for number, name in zip(exchanged, rng.sample(new, len(exchanged)), strict=True):
        names[number] = name
    chosen = iter(names)
    after = pattern.sub(lambda _: next(chosen), before)
    if world_split(after) != "train":
        return None
    return Task(
        id=f"{game}-{digest('synthetic', str(game), after)[:12]}",
        instruction=task.instruction,
        environment=task.environment,
        observation=after,
        metadata={"game": game, "params": task.metadata.get("params", "")},
        origin="synthetic",
        parent_id=task.id,
    )
