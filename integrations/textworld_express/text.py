"""TextWorld-Express's text alone: action checks, splits and hidden facts."""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from dreamgym_lg.integrations.text_games.game import digest, one_line
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


def world_split(observation: str) -> Split:
    """The split of the world that begins with `observation`. By its hash: the same for ever."""
    position = int(digest(one_line(observation)), 16) / 2**64
    return "test" if position < 0.15 else "validation" if position < 0.25 else "train"


# --- Judging an action -----------------------------------------------------------------------------------------------

_FORMS = re.compile(
    r"look around|inventory|task|prepare meal|(?:move|(?:open|close) door to) (?:north|south|east|west)"
    r"|(?:take|read|open|close|examine|eat|chop|slice|dice) (?P<one>\S.*)"
    r"|(?:put|cook) (?P<what>\S.*) in (?P<where>\S.*)"
)


def check_action(game: str, action: str, observations: Sequence[str]) -> str | None:
    """`UNKNOWN_ACTION` for an action that the real game would refuse whatever it hides, else None.

    An action is a known verb form whose names have all been observed, as whole words. `simonsays` never shows its valid
    actions, and is not checked.
    """
    if game == "simonsays":
        return None
    if (form := _FORMS.fullmatch(action.strip())) is None:
        return UNKNOWN_ACTION
    seen = "\n".join(observations).lower()
    for name in filter(None, form.group("one", "what", "where")):
        # The map is carried from the start and the meal appears unannounced: both are used without having been shown.
        if name not in ("map", "meal") and not re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", seen):
            return UNKNOWN_ACTION
    return None


# --- Hidden facts ----------------------------------------------------------------------------------------------------

_FIXED = frozenset({"stove", "oven", "barbeque", "toilet", "bath mat", "instructions book"})
"""Things that rooms show like an item although nobody can take them."""
_SENTENCE = re.compile(r"(?:In (?:one|another) part of the room you see|There is also|You also see) (.+?)\.(?= |$)")
_THING = re.compile(
    r"(?:an?|some) (?:open )?(?P<name>.+?)"
    r"(?P<place>,? that (?:is closed|is empty|has nothing on it|has (?P<on>.+) on it|contains (?P<of>.+)))?",
    re.IGNORECASE,
)
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


def movable_items(observation: str) -> list[str]:
    """The things to take in the room that `observation` describes."""
    items = list[str]()
    for thing in filter(None, map(_THING.fullmatch, _SENTENCE.findall(observation))):
        if not thing["place"]:
            items += [] if thing["name"] in _FIXED else [thing["name"]]
        elif listed := thing["on"] or thing["of"]:
            items += [re.sub(r"^(?:an?|some) ", "", each) for each in re.split(r", (?:and )?", listed)]
    return items


def _order(items: Sequence[str], history: Sequence[Step], seed: int) -> list[str]:
    """The order of the items. First those that were requested or rewarded, then the drawn ones."""
    revealed: dict[str, None] = {}
    for step in history:
        names = {_moved(step)} if step.reward > 0 else _REQUESTED.findall(step.next_observation)
        revealed.update((item, None) for item in names if item in items)
    wrong = history[-1] if history and history[-1].terminated and history[-1].reward <= 0 else None
    drawn = sorted({*items} - revealed.keys(), key=lambda name: blake2b(f"{seed}/{name}".encode()).digest())
    # what a recorded episode failed by taking was not requested
    return [*revealed, *sorted(drawn, key=lambda item: wrong is not None and item == _moved(wrong))]


def _moved(step: Step) -> str:
    """The item that the action takes or puts somewhere. "" for an invalid or any other action."""
    moved = _MOVED.fullmatch(" ".join(step.action.split())) if step.valid else None
    return (moved["taken"] or moved["put"]) if moved else ""
