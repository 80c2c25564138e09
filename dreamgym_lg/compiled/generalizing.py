"""The plainest expression that gives recorded answers."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations, zip_longest
from typing import Any

from dreamgym_lg.compiled.expressions import (
    DATE,
    Arithmetic,
    Build,
    Const,
    Expression,
    Extend,
    Fixed,
    Key,
    Later,
    Put,
    Ref,
    Sorted,
    Surroundings,
    Text,
    Value,
    canonical,
    evaluate,
    is_number,
)
from dreamgym_lg.compiled.runtime import fixed

_NUMBER = re.compile(r"(?<![\w.])-?(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?(?!\w)")
MAX_SLOTS = 5
"""Values of the call's surroundings in one text, at most."""
MAX_SPOTS = 12
"""Values of the call's surroundings of which those in one text are chosen, at most."""


def generalize(nodes: Sequence[Any], arounds: Sequence[Surroundings], *, arithmetic: bool = False) -> Expression | None:
    """The plainest expression that gives every node in its surroundings; None if there is none.

    Args: `arithmetic`, sums, differences and products too: of few examples and many numbers some fit by chance.
    """
    common = _atoms(nodes[0], arounds[0], arithmetic)
    for node, around in zip(nodes[1:], arounds[1:], strict=True):
        common = [each for each in common if _gives(each, node, around)]
    if common:
        return min(common, key=lambda each: _rank(each, len(nodes)))
    if all(isinstance(node, list) and node for node in nodes) and (extended := _extended(nodes, arounds, arithmetic)):
        return extended
    if all(isinstance(node, Mapping) for node in nodes) and (changed := _changed(nodes, arounds, arithmetic)):
        return changed
    first, again = nodes[0], partial(generalize, arounds=arounds, arithmetic=arithmetic)
    if isinstance(first, Mapping) and first and all(isinstance(node, Mapping) and list(node) == list(first) for node in nodes):
        parts = [again([node[key] for node in nodes]) for key in first]
        return None if any(part is None for part in parts) else Build(tuple(first), tuple(p for p in parts if p is not None))
    if isinstance(first, list) and first and all(isinstance(node, list) and len(node) == len(first) for node in nodes):
        parts = [again([node[number] for node in nodes]) for number in range(len(first))]
        return None if any(part is None for part in parts) else Build(None, tuple(p for p in parts if p is not None))
    return None


def _extended(nodes: Sequence[Any], arounds: Sequence[Surroundings], arithmetic: bool) -> Extend | None:
    """The lists as one list of the surroundings with as many elements more."""
    starts = [
        {
            (ref, len(node) - len(old))
            for ref, old in around.nodes.items()
            if isinstance(old, list) and old and old == node[: len(old)]
        }
        for node, around in zip(nodes, arounds, strict=True)
    ]
    for start, more in sorted(set.intersection(*starts), key=str):
        last = generalize([node[-more:] for node in nodes], arounds, arithmetic=arithmetic) if more else None
        if isinstance(last, Build):
            return Extend(start, last.values)
    return None


def _changed(nodes: Sequence[Any], arounds: Sequence[Surroundings], arithmetic: bool) -> Put | None:
    """The objects as a known one with changes at places such as `stock[item]`."""
    differing = [
        {ref: dict(_differing(ref, old, node, around)) for ref, old in around.nodes.items() if isinstance(old, Mapping)}
        for node, around in zip(nodes, arounds, strict=True)
    ]
    for start in sorted(set.intersection(*map(set, differing)), key=str):
        paths = [*differing[0][start]]
        steps = [step for path in paths for step in path[len(start.path) :]]
        if any([*own[start]] != paths for own in differing) or not any(isinstance(step, tuple) for step in steps):
            continue
        news = {path: generalize([own[start][path] for own in differing], arounds, arithmetic=arithmetic) for path in paths}
        if not any(new is None for new in news.values()):
            return Put(start, tuple((path[len(start.path) :], new) for path, new in news.items() if new is not None))
    return None


def _differing(place: Ref, old: Any, new: Any, around: Surroundings) -> Iterable[tuple[tuple[Key, ...], Any]]:
    """The places in which a document is another than before, and what is there."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and list(old) == list(new):
        for key in map(str, old):
            yield from _differing(Ref(place.root, (*place.path, around.step(place, key))), old[key], new[key], around)
    elif canonical(old) != canonical(new):
        yield place.path, new


def _gives(expression: Expression, node: Any, around: Surroundings) -> bool:
    if isinstance(expression, Const):
        return expression.json == json.dumps(node)
    if isinstance(expression, Text):  # most end here, before a value is computed
        constants = [piece for piece in expression.pieces if isinstance(piece, str)]
        if not isinstance(node, str) or not all(piece in node for piece in constants):
            return False
    try:
        value = evaluate(expression, around)
    except (LookupError, TypeError):
        return False
    return bool(value == node) and canonical(value) == canonical(node)  # 1 is neither 1.0 nor true


def _atoms(node: Any, around: Surroundings, arithmetic: bool) -> Collection[Expression]:
    """Expressions of one piece that give a node, kept for the next time."""
    place = (json.dumps(node), arithmetic)
    if place not in around.atoms:
        around.atoms[place] = _new_atoms(node, around, arithmetic)
    return around.atoms[place]


def _new_atoms(node: Any, around: Surroundings, arithmetic: bool) -> set[Expression]:
    text = canonical(node)
    atoms: set[Expression] = {Const(json.dumps(node)), *around.by_value.get(text, ())}
    if isinstance(node, list) and all(isinstance(each, str) for each in node) and node == sorted(node):
        lists = [(ref, other) for ref, other in around.nodes.items() if isinstance(other, list) and len(other) == len(node)]
        atoms |= {Sorted(ref) for ref, other in lists if sorted(other, key=str) == node}
    if isinstance(node, str):
        atoms |= set(_texts(node, around, arithmetic))
        atoms |= {moved for day, moved in around.later if day == node} if DATE.fullmatch(node) else set()
    if arithmetic and is_number(node):
        atoms |= set(around.computed(node))
    return atoms


def _texts(text: str, around: Surroundings, arithmetic: bool) -> Iterable[Text]:
    """The templates that render `text`. Every choice of up to `MAX_SLOTS` values that stand in it as words."""
    values: list[tuple[str, Value]] = [*around.texts]
    known = {value for value, _ in around.texts}
    if set(DATE.findall(text)) - known:
        values = [*around.later, *values]
    words = sorted({*_NUMBER.findall(text)})
    values = [each for word in words for each in _numbers(word, around, arithmetic and word not in known)] + values
    choices: dict[tuple[int, int], list[Value]] = {}
    for word, value in values:
        if len(word) < len(text) and (match := re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)) is not None:
            choices.setdefault(match.span(), []).append(value)
    rounds = zip_longest(*(sorted(own, key=_rank_in_text) for own in choices.values()))
    spots = [
        (start, end, value) for each in rounds for (start, end), value in zip(choices, each, strict=True) if value is not None
    ][:MAX_SPOTS]
    for number in range(1, MAX_SLOTS + 1):
        for chosen in combinations(sorted(spots, key=lambda spot: spot[:2]), number):
            if all(one[1] <= other[0] for one, other in zip(chosen, chosen[1:], strict=False)):
                pieces: list[str | Value] = []
                end = 0
                for start, stop, ref in chosen:
                    pieces += [text[end:start], ref]
                    end = stop
                yield Text(tuple(piece for piece in (*pieces, text[end:]) if piece != ""))


def _numbers(word: str, around: Surroundings, arithmetic: bool) -> Iterable[tuple[str, Value]]:
    """The values that a number in a text may be, beside those that stand there."""
    digits = len(word.partition(".")[2])
    if digits:
        yield from ((word, Fixed(ref, digits)) for ref, number in around.numbers if fixed(number, digits) == word)
    number = json.loads(word)
    for value in around.computed(number) if arithmetic else ():
        yield from [(word, Fixed(value, digits))] if digits else []
        yield from [(word, value)] if str(number) == word else []


def _rank(expression: Expression, examples: int) -> tuple[float, int, str]:
    """Plainest first: a constant that several examples share, arguments, documents, texts."""
    match expression:
        case Build() | Extend() | Put():
            return (5, 0, "")
        case Const():
            return (0 if examples > 1 else 3, 0, "")
        case Ref(root, path):
            return (1 if root == "args" else 2, len(path), str((root, path)))
        case Later() | Sorted():
            return (2.5, 0, str(expression))
        case Arithmetic(_, _, right):
            return (3.5, int(isinstance(right, Const)), str(expression))
        case Fixed():
            return (3.7, 0, str(expression))
        case Text(pieces):
            values = [_rank_in_text(piece) for piece in pieces if not isinstance(piece, str)]
            return (4, len(values), f"{sum(rank for rank, _ in values):03} {pieces}")


def _rank_in_text(value: Value) -> tuple[int, str]:
    """Plainest first: an argument, a part of a document, a value computed of them."""
    match value:
        case Ref(root, _):
            return (int(root != "args"), str(value))
        case Fixed(number, _):
            return (1 + _rank_in_text(number)[0], str(value))
        case Arithmetic(_, _, right):
            return (3 + isinstance(right, Const), str(value))
        case _:
            return (2, str(value))
