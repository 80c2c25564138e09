"""Answers as expressions over a call's arguments and the documents around it."""

import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, permutations, product
from typing import Any, NamedTuple, TypeAlias, cast

from dreamgym_lg.compiled.runtime import later, rounded

Key: TypeAlias = str | int | tuple[str, ...]
"""A step into a document. A key, an index, or the argument (a path of names) whose value is the key."""
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_NUMBER = re.compile(r"(?<![\w.])(?:0|[1-9]\d{0,14})(?:\.\d{1,15})?(?!\w)")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_NUMBER = 2**53
"""Larger numbers are not computed with: JSON readers disagree about them, and a float cannot hold them."""
MAX_PAIRS = 400
"""Pairs of two numbers, or of a date and a number, from which new values are made, at most."""
MAX_SLOTS = 3
"""Values of the call's surroundings in one text, at most."""


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


Value: TypeAlias = Ref | Later | Arithmetic
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


Expression: TypeAlias = Const | Sorted | Value | Text | Build | Extend


@dataclass(frozen=True)
class Surroundings:
    """The arguments and bound documents that a call's answer may be made of."""

    args: Mapping[str, Any]
    documents: Mapping[str, Any]

    @cached_property
    def roots(self) -> dict[str, Any]:
        return {"args": self.args, **self.documents}

    @cached_property
    def nodes(self) -> dict[Ref, Any]:
        """Every part of the arguments and documents, by its reference."""
        names = {value: ("args", name) for name, value in self.args.items() if isinstance(value, str)}
        return {ref: node for root, value in self.roots.items() for ref, node in _walk(Ref(root), value, names)}

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


def _walk(ref: Ref, node: Any, names: Mapping[str, tuple[str, ...]]) -> Iterable[tuple[Ref, Any]]:
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
            for step in path:
                step = around.args[step[1]] if isinstance(step, tuple) else step
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
        case Text(pieces):
            return "".join(piece if isinstance(piece, str) else str(evaluate(piece, around)) for piece in pieces)
        case Extend(start, values):
            return [*evaluate(start, around), *(evaluate(value, around) for value in values)]
        case Build(keys, values):
            built = [evaluate(value, around) for value in values]
            return built if keys is None else dict(zip(keys, built, strict=True))


def generalize(nodes: Sequence[Any], arounds: Sequence[Surroundings], *, arithmetic: bool = False) -> Expression | None:
    """The plainest expression that gives every node in its surroundings; None if there is none.

    Args: `arithmetic`, sums, differences and products too: of few examples and many numbers some fit by chance.
    """
    common: set[Expression] = set()
    for number, (node, around) in enumerate(zip(nodes, arounds, strict=True)):
        own = _atoms(node, around, arithmetic)
        common = own if not number else common & own
        if not common:
            break
    if common:
        return min(common, key=lambda each: _rank(each, len(nodes)))
    if all(isinstance(node, list) and node for node in nodes) and (extended := _extended(nodes, arounds, arithmetic)):
        return extended
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


def _atoms(node: Any, around: Surroundings, arithmetic: bool) -> set[Expression]:
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
    if arithmetic:
        numbers = {number: json.loads(number) for number in sorted({*_NUMBER.findall(text)} - known)}
        values = [(word, new) for word, n in numbers.items() if str(n) == word for new in around.computed(n)] + values
    spots = [
        (match.start(), match.end(), ref)
        for value, ref in values
        if len(value) < len(text)
        for match in [re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text)]
        if match is not None
    ][:12]
    for number in range(1, MAX_SLOTS + 1):
        for chosen in combinations(sorted(spots, key=lambda spot: spot[:2]), number):
            if all(one[1] <= other[0] for one, other in zip(chosen, chosen[1:], strict=False)):
                pieces: list[str | Value] = []
                end = 0
                for start, stop, ref in chosen:
                    pieces += [text[end:start], ref]
                    end = stop
                yield Text(tuple(piece for piece in (*pieces, text[end:]) if piece != ""))


def _rank(expression: Expression, examples: int) -> tuple[float, int, str]:
    """Plainest first: a constant that several examples share, arguments, documents, texts."""
    match expression:
        case Build() | Extend():
            return (5, 0, "")
        case Const():
            return (0 if examples > 1 else 3, 0, "")
        case Ref(root, path):
            return (1 if root == "args" else 2, len(path), str((root, path)))
        case Later() | Sorted():
            return (2.5, 0, str(expression))
        case Arithmetic(_, _, right):
            return (3.5, int(isinstance(right, Const)), str(expression))
        case Text(pieces):
            refs = [piece for piece in pieces if not isinstance(piece, str)]
            return (4, len(refs), str((sum(not isinstance(ref, Ref) or ref.root != "args" for ref in refs), pieces)))
