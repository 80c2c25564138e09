"""A shop made of real traces: their pages, search results and rewards of purchases."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from dreamgym_lg.dream import Answer, Episode, Verdict
from dreamgym_lg.integrations.text_games.game import Score, observations
from dreamgym_lg.integrations.webshop.pages import (
    BACK,
    BUY,
    NEXT,
    PER_PAGE,
    PREVIOUS,
    SEPARATOR,
    SUB_PAGES,
    item_on,
    parse_action,
    results_on,
)
from dreamgym_lg.integrations.webshop.search import SearchIndex, load_index
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Step, Task, Trajectory

RETRIEVED = "a page made of what other recorded pages show"


class Place(NamedTuple):
    """Place of an episode in the shop, as its actions alone tell it."""

    words: str = ""
    """Of the last search; none on the first page."""
    number: int = 1
    """Of the page of results."""
    asin: str = ""
    """Of the open product, in lower case."""
    sub_page: str = ""
    chosen: tuple[str, ...] = ()
    """Values of options in the order of their last clicks. Of two values of one option the later counts."""

    @property
    def page(self) -> "Place":
        """The place without what its page does not depend on."""
        return Place(asin=self.asin, sub_page=self.sub_page) if self.asin else self._replace(chosen=())

    def after(self, action: str) -> "Place":
        """The place after a valid action other than a purchase."""
        verb, what = parse_action(action)
        if verb == "search":
            return Place(what)
        if what == BACK.lower():
            return Place()
        if what == PREVIOUS.lower() and self.asin:
            return self._replace(sub_page="") if self.sub_page else Place(self.words, self.number)
        if what in (NEXT.lower(), PREVIOUS.lower()):
            return self._replace(number=self.number + (1 if what == NEXT.lower() else -1))
        if self.asin:
            return (
                self._replace(sub_page=what)
                if what in SUB_PAGES
                else self._replace(chosen=(*(value for value in self.chosen if value != what), what))
            )
        return self._replace(asin=what)


def place_of(steps: Sequence[Step]) -> Place:
    """The place after these steps."""
    place = Place()
    for step in steps:
        if step.valid:
            place = place.after(step.action)
    return place


def _is_purchase(action: str) -> bool:
    return parse_action(action) == ("click", BUY.lower())


def purchase(episode: Episode) -> Episode | None:
    """Reduce a purchase to one step after title, price and chosen values. None for other actions."""
    item = item_on(observations(episode)[-1])
    if not _is_purchase(episode.action) or item is None:
        return None
    chosen = ", ".join(place_of(episode.steps).chosen) or "nothing"
    text = f"{' '.join(item.title.split())}\nprice: {item.price_tag}\nchosen: {chosen}"
    return replace(episode, task=replace(episode.task, observation=text), steps=())


def as_taught(trajectory: Trajectory) -> Trajectory | None:
    """The `purchase` of a recorded episode; None without one."""
    *steps, last = trajectory.steps
    reduced = purchase(Episode(task=trajectory.task, steps=steps, action=last.action))
    if reduced is None:
        return None
    step = replace(last, observation=reduced.task.observation)
    return replace(trajectory, task=reduced.task, steps=[step])


class ShopScore(Score):
    """The score of a purchase; a recorded success of the same instruction decides it."""

    def __init__(self, shop: "RecordedShop") -> None:
        self._shop = shop

    def decides(self, task: Task) -> bool:
        return self._shop.decides(task)


class RecordedShop:
    """The responder that plays the shop from real traces. Unknown purchases are left to the next one.

    Pages are shown as any trace of a training task showed them. A purchase that was recorded for the same instruction, with the
    same values in the same order, is rewarded as recorded; any other fails where a success was recorded. A new search finds, by
    BM25, products whose pages are recorded. A page that no trace opened shows its result's title and price alone.

    Args: `replay_buffer`, its trajectories of the sources `offline` and `real` and of the split `train`.
    """

    name = "recorded"

    def __init__(self, replay_buffer: ReplayBuffer) -> None:
        self._replay_buffer = replay_buffer
        self._lock = Lock()
        self._read: tuple[int, int] | None = None
        self._pages: dict[Place, dict[str, str]] = {}
        """Each page's text behind the instruction, by the task whose trace showed it."""
        self._paid: dict[tuple[str, str, tuple[str, ...]], dict[str, float]] = {}
        """Rewards of purchases by instruction, product and values; by task."""
        self._bought: dict[str, dict[str, Place]] = {}
        """Purchases of reward 1, by instruction and task."""
        self._asins: list[str] = []
        """Of the products whose pages are recorded, by their numbers in the index."""
        self._index: SearchIndex | None = None
        self._entries: dict[str, list[str]] = {}
        """The texts of a product on a page of results."""

    def refresh(self) -> None:
        """Read the buffer's trajectories again if they have changed."""
        with self._lock:
            now = self._replay_buffer.revision()
            if now != self._read:
                self._build(self._replay_buffer.real_trajectories(split="train"))
            self._read = now

    def _build(self, trajectories: Iterable[Trajectory]) -> None:
        pages, entries = dict[Place, dict[str, str]](), dict[str, list[str]]()
        paid, bought = dict[tuple[str, str, tuple[str, ...]], dict[str, float]](), dict[str, dict[str, Place]]()
        for trajectory in trajectories:
            task, place = trajectory.task, Place()
            for step in trajectory.steps:
                if step.terminated and step.valid:
                    paid.setdefault((task.instruction, place.asin, place.chosen), {})[task.id] = step.reward
                    if step.reward == 1:
                        bought.setdefault(task.instruction, {})[task.id] = place
                elif step.valid:
                    place = place.after(step.action)
                    entries |= results_on(step.next_observation)
                    pages.setdefault(place.page, {})[task.id] = step.next_observation.removeprefix(_head(task))
        self._pages, self._paid, self._bought, self._entries = pages, paid, bought, entries
        self._asins = sorted(place.asin for place in pages if place.asin and not place.sub_page and place.asin in entries)
        self._index = load_index([self._text(asin) for asin in self._asins])

    def _text(self, asin: str) -> str:
        places = (Place(asin=asin, sub_page=name) for name in ("", *SUB_PAGES))
        return "\n".join(next(iter(self._pages[place].values())) for place in places if place in self._pages)

    def respond(self, episode: Episode) -> Answer | None:
        if not episode.steps:
            self.refresh()
        task, own, place = episode.task, "" if episode.own_traces else episode.task.id, place_of(episode.steps)
        if _is_purchase(episode.action):
            return self._bought_by(place, task, own)
        screen = observations(episode)[-1]
        if not _is_clickable(episode.action, screen):
            return Answer(screen, False, "invalid, it cannot be clicked")
        goal = place.after(episode.action)
        body, source = self._page(goal, screen, own)
        text = f"{_head(task)}{body}" if goal.page != Place() else first_observation(task)
        return Answer(text, reasoning=f"valid, {source}")

    def decides(self, task: Task) -> bool:
        """True if a recorded success decides every purchase for this task."""
        self.refresh()
        return bool(self._bought.get(task.instruction))

    def _bought_by(self, place: Place, task: Task, own: str) -> Answer | None:
        known = self._paid.get((task.instruction, place.asin, place.chosen), {})
        paid = next((reward for id, reward in known.items() if id != own), None)
        if paid is not None:
            return _purchased(paid, "a recorded purchase")
        right = [each for id, each in self._bought.get(task.instruction, {}).items() if id != own]
        same = any(each.asin == place.asin and sorted(each.chosen) == sorted(place.chosen) for each in right)
        return _purchased(float(same), "a recorded success of this instruction") if right else None

    def _page(self, place: Place, screen: str, own: str) -> tuple[str, str]:
        """A page's text after the instruction, and its source. Args: `screen`, the page before it."""
        recorded = self._of_others(place.page, own)
        if recorded is not None or place.page == Place():
            return recorded or "", "a recorded page"
        if not place.asin:
            return self._results(place, own), RETRIEVED
        if place.sub_page:
            return SEPARATOR.join([BACK, PREVIOUS]), RETRIEVED
        _, title, price = results_on(screen).get(place.asin) or self._entries[place.asin]
        buttons = ["Description", "Features", "Reviews", BUY]
        return SEPARATOR.join([BACK, PREVIOUS, title, f"Price: {price}", "Rating: N.A.", *buttons]), RETRIEVED

    def _of_others(self, page: Place, own: str) -> str | None:
        return next((text for id, text in self._pages.get(page, {}).items() if id != own), None)

    def _results(self, place: Place, own: str) -> str:
        """A page of search results among the recorded products."""
        assert self._index is not None, "decide before refresh"
        known = [self._asins[number] for number in self._index.search(place.words)]
        asins = [asin for asin in known if not own or self._of_others(Place(asin=asin), own) is not None]
        on_page = asins[(place.number - 1) * PER_PAGE : place.number * PER_PAGE]
        buttons = [PREVIOUS, NEXT] if place.number > 1 else [NEXT]
        head = [BACK, f"Page {place.number} (Total results: {len(asins)})", *buttons]
        return SEPARATOR.join([*head, *(text for asin in on_page for text in self._entries[asin])])


def _head(task: Task) -> str:
    return SEPARATOR.join(["Instruction:", task.instruction, ""])


def _is_clickable(action: str, screen: str) -> bool:
    """True for an action that the page allows: `check_action` lets any of its texts through."""
    verb, what = parse_action(action)
    if verb == "search":
        return True
    item, buttons = item_on(screen), {BACK.lower(), PREVIOUS.lower(), NEXT.lower()}
    if item is not None:
        return what in {*buttons, *SUB_PAGES, *(part.lower() for part in item.choices)}
    return what in buttons or what in results_on(screen)


def _purchased(paid: float, reason: str) -> Answer:
    return Answer("", reasoning=f"valid, {reason}", verdict=Verdict(paid, paid == 1, reason))
