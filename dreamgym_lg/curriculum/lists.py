"""Which item of a list successes went on with: the reserved one, wherever in the list it stands."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dreamgym_lg.curriculum.plays import Play, leaves, text_of, whole
from dreamgym_lg.experience.prompt_formats import first_observation

_SHOWN = 3
"""Successes that chose among several items, below which nothing is said of how."""
_AGREED = 0.9
"""Share of a tool's successes that have to have taken the item that a rule would take: some are right by luck."""

Rule = frozenset[tuple[str, str]]
"""The fields, with their values, that the item has which is taken, and no other of its list."""


def with_taken_items(plays: Sequence[Play]) -> list[Play]:
    """The plays, with what successes go on with in place of the lists that their tools return.

    A list of objects becomes `{"taken": OBJECT}` where the tool's successes show that they take the only one with some value in
    a field. So lists of other lengths and in another order are the same case. Others stay as they are.
    """
    chosen: dict[str, list[tuple[Rule, bool]]] = defaultdict(list)
    for play in plays:
        for number, call in enumerate(play.calls if play.success else ()):
            if (found := _taken(play, number)) is not None:
                chosen[call.name].append(found)
    rules = {tool: _rule(found) for tool, found in chosen.items()}
    return [
        play._replace(
            answers=tuple(
                _shortened(answer, rules.get(tool, Rule())) for tool, answer in zip(play.tools, play.answers, strict=True)
            )
        )
        for play in plays
    ]


def _rule(chosen: Sequence[tuple[Rule, bool]]) -> Rule:
    """What nearly all items that were taken have, and the others in their lists have not; empty if nothing is."""
    from_several = [told for told, several in chosen if several]
    if len(from_several) < _SHOWN:
        return Rule()
    every, counts = (Counter(pair for told in some for pair in told) for some in ([told for told, _ in chosen], from_several))
    # the only item of a list has all its fields to itself, which says nothing of how one is chosen
    return Rule(
        pair
        for pair, number in counts.items()
        if number >= _AGREED * len(from_several) and every[pair] >= _AGREED * len(chosen)
    )


def _taken(play: Play, number: int) -> tuple[Rule, bool] | None:
    """What tells the one item that was gone on with from the others of its list, and whether there were any; else None."""
    items = _items(play.answers[number])
    if not items:
        return None
    request, own = first_observation(play.task), [{text_of(value) for _, value in leaves(item)} for item in items]
    given = {text_of(value) for call in play.calls[number + 1 :] for _, value in leaves(call.arguments)}
    taken = list[int]()
    for at, texts in enumerate(own):
        texts = texts - set[str]().union(*own[:at], *own[at + 1 :])
        if any(text and not whole(text).search(request) for text in texts & given):
            taken.append(at)
    if len(taken) != 1:
        return None
    others = [_fields(item) for at, item in enumerate(items) if at != taken[0]]
    return Rule(_fields(items[taken[0]]).difference(*others)), bool(others)


def _shortened(answer: Any, rule: Rule) -> Any:
    fitting = [item for item in _items(answer) if rule and rule <= _fields(item)]
    return {"taken": fitting[0]} if len(fitting) == 1 else answer


def _items(answer: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; none if it is no list of objects."""
    return answer if isinstance(answer, list) and all(isinstance(item, Mapping) for item in answer) else []


def _fields(item: Mapping[str, Any]) -> Rule:
    return Rule((str(key), text_of(value)) for key, value in item.items() if not isinstance(value, Mapping | list))
