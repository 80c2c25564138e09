"""Finds the simplest expression that reproduces all recorded values."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
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
    Refuse,
    Scope,
    Sorted,
    Text,
    Value,
    canonical,
    evaluate,
    is_number,
)
from dreamgym_lg.compiled.runtime import Refusal, fixed

_NUMBER = re.compile(r"(?<![\w.])-?(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?(?!\w)")
MAX_SLOTS = 5
"""Most values in one text template."""
MAX_SPOTS = 12
"""Most (place in the text, value) candidates from which those values are chosen."""


def generalize(nodes: Sequence[Any], scopes: Sequence[Scope], *, arithmetic: bool = False) -> Expression | None:
    """The simplest expression whose value is `nodes[i]` in every `scopes[i]`; None without one.

    Args: `arithmetic`, also try sums, differences and products. With few examples and many numbers some fit by chance.
    """
    if errors := [node.text for node in nodes if isinstance(node, Refusal)]:
        text = generalize(errors, scopes, arithmetic=arithmetic) if len(errors) == len(nodes) else None
        return None if text is None else Refuse(text)
    candidates = _atoms(nodes[0], scopes[0], arithmetic)
    if len(nodes) == 1 and isinstance(nodes[0], dict):  # one document is no constant: its fields come from somewhere
        candidates = [each for each in candidates if not isinstance(each, Const)]
    for node, scope in zip(nodes[1:], scopes[1:], strict=True):
        candidates = [each for each in candidates if _has_value(each, node, scope)]
    if candidates:
        return min(candidates, key=lambda each: _rank(each, len(nodes)))
    if all(isinstance(node, list) and node for node in nodes) and (extended := _extended(nodes, scopes, arithmetic)):
        return extended
    if all(isinstance(node, dict) for node in nodes) and (changed := _changed(nodes, scopes, arithmetic)):
        return changed
    keys, *others = map(_keys_or_indices, nodes)
    if not keys or any(other != keys for other in others):
        return None
    parts = [generalize([node[key] for node in nodes], scopes, arithmetic=arithmetic) for key in keys]
    names = tuple(keys) if isinstance(nodes[0], dict) else None
    return None if None in parts else Build(names, tuple(part for part in parts if part is not None))


def _keys_or_indices(node: Any) -> list[Any]:
    """The keys of an object, or the indices of a list."""
    return list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []


def _extended(nodes: Sequence[Any], scopes: Sequence[Scope], arithmetic: bool) -> Extend | None:
    """The lists as one list in scope with the same number of elements appended."""
    starts = [
        {
            (ref, len(node) - len(old))
            for ref, old in scope.nodes.items()
            if isinstance(old, list) and old and old == node[: len(old)]
        }
        for node, scope in zip(nodes, scopes, strict=True)
    ]
    for start, count in sorted(set.intersection(*starts), key=str):
        appended = generalize([node[-count:] for node in nodes], scopes, arithmetic=arithmetic) if count else None
        if isinstance(appended, Build):
            return Extend(start, appended.values)
    return None


def _changed(nodes: Sequence[Any], scopes: Sequence[Scope], arithmetic: bool) -> Put | None:
    """The objects as one object in scope with changes at paths such as `stock[item]`."""
    differing = [
        {ref: dict(_differing(ref, old, node, scope)) for ref, old in scope.nodes.items() if isinstance(old, dict)}
        for node, scope in zip(nodes, scopes, strict=True)
    ]
    for start in sorted(set.intersection(*map(set, differing)), key=str):
        at_start = [changes[start] for changes in differing]
        paths = [*at_start[0]]
        steps = [step for path in paths for step in path[len(start.path) :]]
        if any([*changes] != paths for changes in at_start) or not any(isinstance(step, tuple) for step in steps):
            continue
        news = {path: generalize([changes[path] for changes in at_start], scopes, arithmetic=arithmetic) for path in paths}
        if not any(new is None for new in news.values()):
            return Put(start, tuple((path[len(start.path) :], new) for path, new in news.items() if new is not None))
    return None


def _differing(place: Ref, old: Any, new: Any, scope: Scope) -> Iterable[tuple[tuple[Key, ...], Any]]:
    """(path, new value) of each difference between two documents."""
    if isinstance(old, dict) and isinstance(new, dict) and list(old) == list(new):
        for key in map(str, old):
            yield from _differing(Ref(place.root, (*place.path, scope.step(place, key))), old[key], new[key], scope)
    elif not _equal(old, new):
        yield place.path, new


def _has_value(expression: Expression, node: Any, scope: Scope) -> bool:
    if isinstance(expression, Const):
        return expression.json == json.dumps(node)
    if isinstance(expression, Text):  # a cheap test that rules out most templates
        constants = [piece for piece in expression.pieces if isinstance(piece, str)]
        if not isinstance(node, str) or not all(piece in node for piece in constants):
            return False
    try:
        value = evaluate(expression, scope)
    except (LookupError, TypeError):
        return False
    return bool(value == node) and _equal(value, node)


def _equal(one: Any, other: Any) -> bool:
    """True for values that are equal as JSON: 1 is neither 1.0 nor true."""
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    return canonical(one) == canonical(other)


def _atoms(node: Any, scope: Scope, arithmetic: bool) -> Collection[Expression]:
    """The single-step expressions with this value, cached in the scope."""
    key = (json.dumps(node), arithmetic)
    if key not in scope.atoms:
        scope.atoms[key] = _new_atoms(node, scope, arithmetic)
    return scope.atoms[key]


def _new_atoms(node: Any, scope: Scope, arithmetic: bool) -> set[Expression]:
    text = canonical(node)
    atoms: set[Expression] = {Const(json.dumps(node)), *scope.by_value.get(text, ())}
    if isinstance(node, list) and all(isinstance(each, str) for each in node) and node == sorted(node):
        lists = [(ref, other) for ref, other in scope.nodes.items() if isinstance(other, list) and len(other) == len(node)]
        atoms |= {Sorted(ref) for ref, other in lists if sorted(other, key=str) == node}
    if isinstance(node, str):
        atoms |= set(_texts(node, scope, arithmetic))
        atoms |= {moved for day, moved in scope.later if day == node} if DATE.fullmatch(node) else set()
    if arithmetic and is_number(node):
        atoms |= set(scope.computed(node))
    return atoms


def _texts(text: str, scope: Scope, arithmetic: bool) -> Iterable[Text]:
    """Templates that render `text` from up to `MAX_SLOTS` values, each a whole word."""
    values: list[tuple[str, Value]] = [*scope.texts]
    known = {value for value, _ in scope.texts}
    if set(DATE.findall(text)) - known:
        values = [*scope.later, *values]
    words = sorted({*_NUMBER.findall(text)})
    values = [each for word in words for each in _numbers(word, scope, arithmetic and word not in known)] + values
    choices: dict[tuple[int, int], list[Value]] = {}
    for word, value in values:
        if len(word) < len(text) and (match := re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)) is not None:
            choices.setdefault(match.span(), []).append(value)
    rounds = zip_longest(*(sorted(options, key=_rank_in_text) for options in choices.values()))
    spots = [
        (start, end, value) for row in rounds for (start, end), value in zip(choices, row, strict=True) if value is not None
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


def _numbers(word: str, scope: Scope, arithmetic: bool) -> Iterable[tuple[str, Value]]:
    """Expressions with decimals or arithmetic that render as a number in a text."""
    digits = len(word.partition(".")[2])
    if digits:
        yield from ((word, Fixed(ref, digits)) for ref, number in scope.numbers if fixed(number, digits) == word)
    number = json.loads(word)
    for value in scope.computed(number) if arithmetic else ():
        yield from [(word, Fixed(value, digits))] if digits else []
        yield from [(word, value)] if str(number) == word else []


def _rank(expression: Expression, examples: int) -> tuple[float, int, str]:
    """Sort key, simplest first: a constant shared by several examples, arguments, documents, arithmetic, texts.

    A text of one example that names an argument comes before the constant: its id is not the next call's.
    """
    match expression:
        case Build() | Extend() | Put() | Refuse():
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
            names_argument = any(isinstance(piece, Ref) and piece.root == "args" for piece in pieces)
            return (
                2.9 if examples == 1 and names_argument else 4,
                len(values),
                f"{sum(rank for rank, _ in values):03} {pieces}",
            )


def _rank_in_text(value: Value) -> tuple[int, str]:
    """Sort key, simplest first: an argument, a part of a document, a computed value."""
    match value:
        case Ref(root, _):
            return (int(root != "args"), str(value))
        case Fixed(number, _):
            return (1 + _rank_in_text(number)[0], str(value))
        case Arithmetic(_, _, right):
            return (3 + isinstance(right, Const), str(value))
        case _:
            return (2, str(value))
