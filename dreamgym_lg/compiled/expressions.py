"""Answers as expressions over a call's arguments and the documents around it."""

import json
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, permutations, product, zip_longest
from typing import Any, NamedTuple, TypeAlias, cast

from dreamgym_lg.compiled.runtime import fixed, later, put, rounded

Key: TypeAlias = str | int | tuple[str, ...]
"""A step into a document. A key, an index, or the root and name of the part whose value is the key."""
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_NUMBER = re.compile(r"(?<![\w.])-?(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?(?!\w)")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_NUMBER = 2**53
"""Larger numbers are not computed with: JSON readers disagree about them, and a float cannot hold them."""
MAX_PAIRS = 400
"""Pairs of two numbers, or of a date and a number, from which new values are made, at most."""
MAX_SLOTS = 5
"""Values of the call's surroundings in one text, at most."""
MAX_SPOTS = 16
"""Values of the call's surroundings of which those in one text are chosen, at most."""


class Const(NamedTuple):
    """A value that is always the same, as JSON."""

    json: str


class Ref(NamedTuple):
    """A part of an argument or of a document."""

    root: str
    """`args`, or the name of a binding."""
    path: tuple[Key, ...] = ()


class Sorted(NamedTuple):
    """A list of texts in their order."""

    start: Ref


class Later(NamedTuple):
    """A date of the surroundings, so many months or days later."""

    start: Ref
    unit: str
    """Argument of `runtime.later`."""
    number: Ref


class Arithmetic(NamedTuple):
    """Two numbers of the surroundings, or one and a constant, added, subtracted or multiplied."""

    left: Ref
    operator: str
    right: "Ref | Const"


class Fixed(NamedTuple):
    """A number with so many digits behind its point, such as 12.50."""

    number: "Ref | Arithmetic"
    digits: int


Value: TypeAlias = Ref | Later | Arithmetic | Fixed
"""What a text may hold."""


class Text(NamedTuple):
    """A text with values in it: constant pieces and values in turn."""

    pieces: "tuple[str | Value, ...]"


class Build(NamedTuple):
    """An object or a list made of expressions; `keys` is None for a list."""

    keys: tuple[str, ...] | None
    values: "tuple[Expression, ...]"


class Extend(NamedTuple):
    """A list with more elements at its end."""

    start: Ref
    values: "tuple[Expression, ...]"


class Put(NamedTuple):
    """A document with other values in some places."""

    start: Ref
    changes: "tuple[tuple[tuple[Key, ...], Expression], ...]"


Expression: TypeAlias = Const | Sorted | Value | Text | Build | Extend | Put


@dataclass(frozen=True)
class Surroundings:
    """The arguments and bound documents that a call's answer may be made of."""

    args: Mapping[str, Any]
    documents: Mapping[str, Any]
    atoms: dict[tuple[str, bool], Collection["Expression"]] = field(default_factory=dict, compare=False)
    """Expressions of one piece, by the node that they give and whether they compute."""
    parts: dict[tuple[str, ...], "Surroundings"] = field(default_factory=dict, compare=False)

    def only(self, *documents: str) -> "Surroundings":
        """The arguments with these documents alone; the same object each time."""
        if documents not in self.parts:
            self.parts[documents] = Surroundings(self.args, {name: self.documents[name] for name in documents})
        return self.parts[documents]

    @cached_property
    def roots(self) -> dict[str, Any]:
        return {"args": self.args, **self.documents}

    @cached_property
    def names(self) -> dict[str, Key]:
        """By text, the root and name of the first argument or field with it."""
        names: dict[str, Key] = {}
        for root, value in self.roots.items():
            for name, key in value.items() if isinstance(value, Mapping) else ():
                if isinstance(key, str):
                    names.setdefault(key, (root, name))
        return names

    @cached_property
    def nodes(self) -> dict[Ref, Any]:
        """Every part of the arguments and documents, by its reference."""
        return {ref: node for root, value in self.roots.items() for ref, node in _walk(Ref(root), value, self.names)}

    @cached_property
    def by_value(self) -> dict[str, list[Ref]]:
        """The references to each value, which is in JSON."""
        index: dict[str, list[Ref]] = {}
        for ref, node in self.nodes.items():
            index.setdefault(canonical(node), []).append(ref)
        return index

    @cached_property
    def texts(self) -> list[tuple[str, Ref]]:
        """Scalars as they stand in a text, longest first."""
        scalars = [(str(node), ref) for ref, node in self.nodes.items() if isinstance(node, (str, int, float)) and str(node)]
        return sorted(
            ((text, ref) for text, ref in scalars if not isinstance(self.nodes[ref], bool)),
            key=lambda e: (-len(e[0]), e[1].root, str(e[1].path)),
        )

    @cached_property
    def numbers(self) -> list[tuple[Ref, int | float]]:
        """The parts that are computed with."""
        return [(ref, node) for ref, node in self.nodes.items() if is_number(node)]

    @cached_property
    def later(self) -> list[tuple[str, Later]]:
        """The dates that those of the surroundings give with a number of theirs."""
        dates = [(ref, node) for ref, node in self.nodes.items() if isinstance(node, str) and DATE.fullmatch(node)]
        numbers = [(ref, number) for ref, number in self.numbers if isinstance(number, int)]
        moved = list[tuple[str, Later]]()
        if len(dates) * len(numbers) <= MAX_PAIRS:
            for (start, day), (ref, number), unit in product(dates, numbers, ("months", "days")):
                with suppress(LookupError):  # the 31st of February, or a year behind the last one
                    moved += [(later(day, **{unit: number}), Later(start, unit, ref))] if number else []
        return moved

    @cached_property
    def arithmetic(self) -> dict[str, list[Arithmetic]]:
        """By number in JSON, the pairs of numbers that give it."""
        index: dict[str, list[Arithmetic]] = {}
        if len(self.numbers) ** 2 <= MAX_PAIRS:
            for (left, one), (right, other) in permutations(self.numbers, 2):
                for sign, compute in _OPERATORS.items():
                    if sign == "-" or str(left) < str(right):  # the others have no order
                        index.setdefault(canonical(rounded(compute(one, other))), []).append(Arithmetic(left, sign, right))
        return index

    def computed(self, number: int | float) -> list[Arithmetic]:
        """The pairs of numbers that give this one. Of each number also the constant that it lacks."""
        lacking = [(ref, rounded(number - own)) for ref, own in self.numbers]
        return [
            *self.arithmetic.get(canonical(number), ()),
            *(Arithmetic(ref, "-" if rest < 0 else "+", Const(canonical(abs(rest)))) for ref, rest in lacking if rest),
        ]


def is_number(node: Any) -> bool:
    return isinstance(node, (int, float)) and not isinstance(node, bool) and abs(node) < MAX_NUMBER


def _walk(ref: Ref, node: Any, names: Mapping[str, Key]) -> Iterable[tuple[Ref, Any]]:
    if ref.path or ref.root != "args":
        yield ref, node
    if isinstance(node, Mapping):
        for key, value in node.items():
            step: Key = names.get(key, key) if ref.root != "args" else key
            yield from _walk(Ref(ref.root, (*ref.path, step)), value, names)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _walk(Ref(ref.root, (*ref.path, number)), value, names)


def canonical(node: Any) -> str:
    return json.dumps(node, sort_keys=True)


def evaluate(expression: Expression, around: Surroundings) -> Any:
    """The value of an expression. Raises `LookupError` where it has none."""
    match expression:
        case Const(text):
            return json.loads(text)
        case Ref(root, path):
            node = around.roots[root]
            for step in _plain(path, around):
                if not isinstance(node, (Mapping, list)) or isinstance(node, list) != isinstance(step, int):
                    raise KeyError(step)
                node = cast(Any, node)[step]
            return node
        case Sorted(start):
            return sorted(evaluate(start, around))
        case Later(start, unit, number):
            return later(evaluate(start, around), **{unit: evaluate(number, around)})
        case Arithmetic(left, sign, right):
            try:
                return rounded(_OPERATORS[sign](evaluate(left, around), evaluate(right, around)))
            except (TypeError, OverflowError) as error:
                raise LookupError(f"{left} and {right} are not both numbers, or too large") from error
        case Fixed(value, digits):
            if not is_number(number := evaluate(value, around)):
                raise LookupError(f"{value} is no number")
            return fixed(number, digits)
        case _:
            return _composed(expression, around)


def _composed(expression: Text | Build | Extend | Put, around: Surroundings) -> Any:
    match expression:
        case Text(pieces):
            return "".join(piece if isinstance(piece, str) else str(evaluate(piece, around)) for piece in pieces)
        case Extend(start, values):
            return [*evaluate(start, around), *(evaluate(value, around) for value in values)]
        case Put(start, changes):
            return put(evaluate(start, around), [(_plain(path, around), evaluate(new, around)) for path, new in changes])
        case Build(keys, values):
            built = [evaluate(value, around) for value in values]
            return built if keys is None else dict(zip(keys, built, strict=True))


def _plain(path: Iterable[Key], around: Surroundings) -> list[str | int]:
    return [around.roots[step[0]][step[1]] if isinstance(step, tuple) else step for step in path]


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
        {ref: dict(_differing(old, node, around)) for ref, old in around.nodes.items() if isinstance(old, Mapping)}
        for node, around in zip(nodes, arounds, strict=True)
    ]
    for start in sorted(set.intersection(*map(set, differing)), key=str):
        paths = [*differing[0][start]]
        steps = [step for path in paths for step in path]
        if any([*own[start]] != paths for own in differing) or not any(isinstance(step, tuple) for step in steps):
            continue
        news = {path: generalize([own[start][path] for own in differing], arounds, arithmetic=arithmetic) for path in paths}
        if not any(new is None for new in news.values()):
            return Put(start, tuple((path, new) for path, new in news.items() if new is not None))
    return None


def _differing(old: Any, new: Any, around: Surroundings, path: tuple[Key, ...] = ()) -> Iterable[tuple[tuple[Key, ...], Any]]:
    """The places in which a document is another than before, and what is there."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and list(old) == list(new):
        for key in map(str, old):
            yield from _differing(old[key], new[key], around, (*path, around.names.get(key, key)))
    elif canonical(old) != canonical(new):
        yield path, new


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
            return (4, len(values), str((sum(rank for rank, _ in values), pieces)))


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
