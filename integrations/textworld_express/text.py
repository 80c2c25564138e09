"""TextWorld-Express's games and the split of their worlds, without Java."""

from collections.abc import Mapping

from dreamgym_lg.integrations.text_games.game import digest, one_line
from dreamgym_lg.types import Split

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
