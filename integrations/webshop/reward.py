"""Reward of a purchase: match of type, attributes, options and price with the goal."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Literal, get_args

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.integrations.webshop.data import Goal
from dreamgym_lg.integrations.webshop.pages import Product

try:
    from rapidfuzz.fuzz import token_set_ratio
except ImportError as error:
    raise MissingDependency.extra("rapidfuzz", "webshop") from error

Nouns = Callable[[str], Sequence[str]]
"""A noun tagger: a title -> its nouns, in lower case and in its order, repetitions included."""
Tagger = Literal["textblob", "spacy"]
"""`textblob`: TextBlob's rules.  `spacy`: `en_core_web_sm`, as for the published rewards: 6 to 10 % of those of wrong products
differ."""

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


def reward(bought: Product, chosen: Mapping[str, str], goal: Goal, target: Product, nouns: Nouns) -> float:
    """0 to 1; 1 is success: the type is right, and every attribute, every option and the price limit is met.

    Args:
        chosen: The options of the purchase, by name.
        target: The product of the goal.
    """
    attributes = sum(_has_attribute(bought, goal_value) for goal_value in goal.attributes)
    have = [_color_in(value) for value in chosen.values()]
    options = sum(any(_similar(value, goal_value) for value in have) for goal_value in map(_color_in, goal.options))
    met = attributes + options + (bought.price <= goal.price_limit)
    return met / (len(goal.attributes) + len(goal.options) + 1) * _type_reward(bought, target, nouns)


def _has_attribute(bought: Product, goal_value: str) -> bool:
    texts = (bought.title, " ".join(bought.features), bought.description)
    return any(_similar(one, goal_value) for one in bought.attributes) or any(goal_value in text.lower() for text in texts)


def _color_in(option: str | tuple[str, str]) -> str:
    """The first colour word in it, else the option itself. A pair holds only what is its whole name or value."""
    return next((color for color in COLORS if color in option), str(option))


def _type_reward(bought: Product, target: Product, nouns: Nouns) -> float:
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


# --- Noun taggers ----------------------------------------------------------------------------------------------------


@cache
def load_tagger(name: str) -> Nouns:
    """The noun tagger of this name, which remembers what it has tagged. Errors: an unknown name, or its package is missing."""
    if name == "textblob":
        return lru_cache(100_000)(_textblob())
    if name == "spacy":
        return lru_cache(100_000)(_spacy())
    raise ConfigurationError.unknown("noun tagger", name, get_args(Tagger))


def _textblob() -> Nouns:
    try:
        from textblob.en import tag
    except ImportError as error:
        raise MissingDependency.extra("textblob", "webshop") from error
    return lambda title: [word.lower() for word, kind in tag(title) if kind.startswith("NN")]


def _spacy() -> Nouns:
    try:
        import spacy

        tag = spacy.load("en_core_web_sm")
    except (ImportError, OSError) as error:  # OSError: the model is missing
        raise MissingDependency(
            "the noun tagger 'spacy' needs spaCy and its model: pip install spacy && python -m spacy download en_core_web_sm"
        ) from error
    return lambda title: [token.text.lower() for token in tag(title) if token.pos_ in ("NOUN", "PROPN")]
