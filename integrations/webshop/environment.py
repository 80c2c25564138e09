"""WebShop (Yao et al., 2022) as an `Environment`. Search a shop, choose a product with its options, buy it."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import Literal, NamedTuple

from dreamgym_lg.integrations.text_games.game import TextGame
from dreamgym_lg.integrations.webshop.data import Catalogue, Goal, goal_of, load_catalogue
from dreamgym_lg.integrations.webshop.pages import (
    BACK,
    BUY,
    NEXT,
    PREVIOUS,
    SUB_PAGES,
    Product,
    check_action,
    item_page,
    parse_action,
    results_page,
    search_page,
    sub_page,
)
from dreamgym_lg.integrations.webshop.reward import reward
from dreamgym_lg.integrations.webshop.search import SearchIndex, load_index
from dreamgym_lg.types import StepResult, Task

_LOADING = RLock()  # threads that start at once build an index once


class Shop(NamedTuple):
    """Products, goals and search index, shared by all episodes of a process."""

    catalogue: Catalogue
    ordered: Sequence[Product]
    """Products sorted by asin; the index's document numbers are positions here."""
    search_index: SearchIndex

    def search(self, words: str) -> Sequence[Product]:
        """The best products for these words. All of one category for `<c> garden`, of one Amazon query for `<q> sofas`."""
        kind, _, rest = words.partition(" ")
        if kind == "<c>" and rest.strip():
            category = rest.split(" ")[0].strip()
            return [product for product in self.catalogue.products.values() if product.category == category]
        if kind == "<q>":
            return [product for product in self.catalogue.products.values() if product.query == rest.strip()]
        return [self.ordered[number] for number in self.search_index.search(words)]


def load_shop(path: str | Path, *, human: bool = False) -> Shop:
    """The shop of these products. Its index is built once a machine: 1,000 products take a second, a million 20 minutes.

    Args and errors: as `data.load_tasks`.
    """
    where = Path(path).expanduser().resolve()
    with _LOADING:
        return _shop(where, human)


@lru_cache(maxsize=4)
def _shop(where: Path, human: bool) -> Shop:
    catalogue = load_catalogue(where, human=human)
    ordered = sorted(catalogue.products.values(), key=lambda product: product.asin)
    return Shop(catalogue, ordered, load_index([product.search_text for product in ordered]))


class Visit:
    """State of one episode."""

    def __init__(self, goal: Goal, target: Product) -> None:
        self.goal = goal
        self.target = target
        """The product that the instruction was written for."""
        self.page = search_page(goal.instruction)
        self.kind: Literal["search", "results", "item", "sub page"] = "search"
        self.results: Sequence[Product] = ()
        self.number = 1
        """Number of the page of results, from 1."""
        self.product: Product | None = None
        self.options: dict[str, str] = {}


class WebShopEnvironment(TextGame):
    """One episode at a time of any task of `data.load_tasks`. Pages are the official engine's, to the letter.

    Actions are `search[words]`, from every page, and `click[what]`, of `info["clickables"]`. An invalid one shows the page
    again. `click[buy now]` ends the episode with `reward.reward`, 0 to 1; 1 is success. Its page is empty: the official one
    shows the goal and the score. An episode is truncated after `max_steps` actions.

    Args:
        path: As `data.load_tasks`.
    """

    def __init__(self, path: str | Path, *, max_steps: int = 15) -> None:
        super().__init__(max_steps)
        self.path = path
        self._shop: Shop | None = None
        self.visit: Visit | None = None
        """For scripted policies and tests: a policy under evaluation must not see it. None after a purchase."""

    def reset(self, task: Task) -> str:
        """Begin an episode. Raises `ConfigurationError` for a task not of this data's `load_tasks`, and as `load_shop` does."""
        self.visit, self._seen = None, ()
        self._shop = load_shop(self.path, human=bool(task.metadata.get("human", False)))
        goal = goal_of(task, self._shop.catalogue)
        self.visit = Visit(goal, self._shop.catalogue.products[goal.asin])
        return self.begin(self.visit.page.text)

    def play(self, action: str) -> StepResult:
        visit, shop = self.visit, self._shop
        assert visit is not None and shop is not None, "play outside an episode"
        verb, argument = parse_action(action)
        if verb == "click" and argument == BUY.lower() and argument in visit.page.clickables:
            self.visit = None
            assert visit.product is not None
            paid = reward(visit.product, visit.options, visit.goal, visit.target)
            return StepResult("", paid, True, False, {"success": paid == 1, "valid": True, "clickables": []})
        valid = True
        if verb == "search" and argument:
            _search(visit, shop.search(argument))
        elif verb == "click" and argument in visit.page.clickables and argument != "search":
            _click(visit, shop, argument)
        else:
            valid = False
        info = {"success": False, "valid": valid, "clickables": list(visit.page.clickables)}
        return StepResult(visit.page.text, 0.0, False, False, info)

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return check_action(action, observations)

    def valid_actions(self) -> list[str]:
        """Every click; of searches, which are without number, the one for the whole instruction."""
        if self.visit is None:
            return []
        clicks = [f"click[{what}]" for what in self.visit.page.clickables if what != "search"]
        written = [click for click in clicks if parse_action(click) == ("click", click[6:-1])]  # not with a bracket in it
        return sorted([*written, f"search[{self.visit.goal.instruction}]"])

    def close(self) -> None:
        self.visit, self._seen = None, ()


def _search(visit: Visit, products: Sequence[Product], number: int = 1) -> None:
    """Show a page of results and forget the open product with its options."""
    visit.results, visit.number, visit.product, visit.options = products, number, None, {}
    visit.kind, visit.page = "results", results_page(visit.goal.instruction, products, number)


def _click(visit: Visit, shop: Shop, what: str) -> None:
    instruction, product = visit.goal.instruction, visit.product
    if what == BACK.lower():
        visit.kind, visit.page = "search", search_page(instruction)
        visit.product, visit.options = None, {}
    elif visit.kind == "results" and what in (NEXT.lower(), PREVIOUS.lower()):
        _search(visit, visit.results, visit.number + (1 if what == NEXT.lower() else -1))
    elif visit.kind == "item" and what == PREVIOUS.lower():
        _search(visit, visit.results, visit.number)
    elif what in SUB_PAGES and product is not None:
        visit.kind, visit.page = "sub page", sub_page(instruction, product, what)
    else:
        if product is None:
            product = visit.product = shop.catalogue.products[what.upper()]
        elif visit.kind == "item":
            # the same value under two options chooses the last one
            visit.options[[name for name, values in product.options.items() if what in values][-1]] = what
        visit.kind, visit.page = "item", item_page(instruction, product)
