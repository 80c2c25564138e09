"""The shop's pages as text, their clickables, and checks of actions against a page's text."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

PER_PAGE = 10
"""Products on a page of results."""
SEPARATOR = " [SEP] "
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
_ACTION = re.compile(r"(.+)\[(.+)\]")


class Product(NamedTuple):
    """Everything that the shop stores of a product."""

    asin: str
    title: str
    description: str
    features: Sequence[str]
    price_tag: str
    """One price, or the two ends of a range."""
    price: float
    """In dollars, as a purchase costs; drawn from the range where there is one."""
    options: Mapping[str, Sequence[str]]
    """Values that can be chosen, by the option's name."""
    attributes: Sequence[str]
    category: str
    query: str
    """The search by which the product was once found on Amazon."""
    product_category: str

    @property
    def search_text(self) -> str:
        """The indexed text: of the features only the first, as in the official index."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, self.features[0] if self.features else "", options]).lower()


class Page(NamedTuple):
    """A page as a policy sees it."""

    text: str
    clickables: Sequence[str]
    """Arguments that `click[...]` takes here, in lower case. On the first page also `search`, which takes none."""


def parse_action(action: str) -> tuple[str, str]:
    """Verb and lower-case argument of `verb[argument]`, as officially; ("", "") for any other text."""
    match = _ACTION.match(action)
    return (match[1], match[2].lower()) if match else ("", "")


def check_action(action: str, observations: Sequence[str]) -> str | None:
    """The last page for an action that is no search and no click on it. Else None.

    Only the shop itself can tell a button from the words beside it.
    """
    verb, argument = parse_action(action)
    if verb == "search" and argument:
        return None
    page = observations[-1] if observations else ""
    texts = {part.strip().lower() for part in page.split(SEPARATOR)} - {"search"}
    return None if verb == "click" and argument.strip() in texts else page


# --- The pages -------------------------------------------------------------------------------------------------------


def search_page(instruction: str) -> Page:
    return Page(_join("WebShop", "Instruction:", instruction, "Search"), ["search"])


def results_page(instruction: str, products: Sequence[Product], number: int) -> Page:
    """Page `number`, from 1, of what a search products; empty behind the last."""
    buttons = [BACK, PREVIOUS, NEXT] if number > 1 else [BACK, NEXT]
    on_page = products[(number - 1) * PER_PAGE : number * PER_PAGE]
    lines = (text for product in on_page for text in (product.asin, product.title, product.price_tag))
    head = (BACK, f"Page {number} (Total results: {len(products)})", *buttons[1:])
    return Page(_with_instruction(instruction, *head, *lines), _clickables(*buttons, *(product.asin for product in on_page)))


def item_page(instruction: str, product: Product) -> Page:
    """A product with its options. Which ones are chosen is not shown."""
    options = (text for name, values in product.options.items() for text in (name, *values))
    facts = (product.title, f"Price: {product.price_tag}", "Rating: N.A.")
    buttons = ("Description", "Features", "Reviews", BUY)
    values = (value for values in product.options.values() for value in values)
    clickables = dict.fromkeys([*_clickables(BACK, PREVIOUS, *buttons), *values])
    return Page(_with_instruction(instruction, BACK, PREVIOUS, *options, *facts, *buttons), list(clickables))


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """A product's `description`, `features` or `reviews` (there are none)."""
    texts: Mapping[str, Iterable[str]] = {
        "description": [product.description],
        "features": [f" {feature}" for feature in product.features],
        "reviews": [],
    }
    return Page(_with_instruction(instruction, BACK, PREVIOUS, *texts[name]), _clickables(BACK, PREVIOUS))


SUB_PAGES = ("description", "features", "reviews")


def _with_instruction(instruction: str, *texts: str) -> str:
    return _join("Instruction:", instruction, *texts)


def _join(*texts: str) -> str:
    """Join texts as the official HTML parser does. White space without a line break counts as a text."""
    return SEPARATOR.join(text.strip() for text in texts if text and (text.strip(" \t\n\f\r") or "\n" not in text))


def _clickables(*texts: str) -> list[str]:
    return list(dict.fromkeys(text.lower() for text in texts))
