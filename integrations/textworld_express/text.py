"""TextWorld-Express's text alone: action checks and splits."""

import re
from collections.abc import Mapping, Sequence

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
