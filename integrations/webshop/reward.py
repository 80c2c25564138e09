"""Reward of a purchase: match of type, attributes, options and price with the goal."""

import re
from collections.abc import Mapping
from functools import lru_cache

from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.integrations.webshop.data import Goal
from dreamgym_lg.integrations.webshop.pages import Product

try:
    from rapidfuzz.fuzz import token_set_ratio
    from textblob.en import tag
except ImportError as error:
    raise MissingDependency.extra("rapidfuzz or textblob", "webshop") from error

_MATCH = 85
"""Texts match above this similarity, 0 to 100."""
_LATIN_1 = dict.fromkeys(range(128, 256))
COLORS = tuple(
    (  # noqa: SIM905 (a list would take a line a word)
        "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
        "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal "
        "dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory "
        "ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom "
        "mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire "
        "seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white "
        "wine yellow"
    ).split()
)
"""Words that an option collapses to: the first one, in this order."""


def reward(bought: Product, chosen: Mapping[str, str], goal: Goal, target: Product) -> float:
    """The reward, 0 to 1; 1 is success. Then the type is right, and every attribute, every option and the price limit is met.

    Args:
        chosen: The options of the purchase, by name.
        target: The product of the goal.
    """
    attributes = sum(_has_attribute(bought, goal_value) for goal_value in goal.attributes)
    have = [_color_in(value) for value in chosen.values()]
    options = sum(any(_similar(value, goal_value) for value in have) for goal_value in map(_color_in, goal.options))
    met = attributes + options + (bought.price <= goal.price_limit)
    return met / (len(goal.attributes) + len(goal.options) + 1) * _type_reward(bought, target)


def _has_attribute(bought: Product, goal_value: str) -> bool:
    texts = (bought.title, " ".join(bought.features), bought.description)
    return any(_similar(one, goal_value) for one in bought.attributes) or any(goal_value in text.lower() for text in texts)


def _color_in(option: str | tuple[str, str]) -> str:
    """The first colour word in it, else the option itself. A pair holds only what is its whole name or value."""
    return next((color for color in COLORS if color in option), str(option))


def _type_reward(bought: Product, target: Product) -> float:
    nouns_of_target = nouns(target.title)
    overlap = len(set(nouns_of_target) & set(nouns(bought.title))) / len(nouns_of_target) if nouns_of_target else 0.2
    if overlap < 0.1:
        return 0.1 if overlap else 0.0
    alike = bought.query == target.query or len(_categories(bought) & _categories(target)) >= 2 or overlap > 0.2
    return 1.0 if alike else 0.5


def _categories(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}


def _similar(one: str, other: str) -> bool:
    return round(token_set_ratio(_plain(one), _plain(other))) > _MATCH


@lru_cache(100_000)
def _plain(text: str) -> str:
    """Letters, digits and `_`; the others are spaces, except that those of Latin-1 vanish."""
    return re.sub(r"\W", " ", text.translate(_LATIN_1)).lower().strip()


@lru_cache(100_000)
def nouns(title: str) -> tuple[str, ...]:
    """The nouns of a title in lower case and in its order, by TextBlob's rules.

    The published rewards were computed with spaCy's model; 6 to 10 % of those of wrong products differ.
    """
    return tuple(word.lower() for word, kind in tag(title) if kind.startswith("NN"))
