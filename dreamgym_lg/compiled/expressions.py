"""Answers as expressions over a call's arguments and the documents around it."""

import json
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations, product
from typing import Any, NamedTuple, TypeAlias, cast

from dreamgym_lg.compiled.runtime import fixed, later, put, rounded

Key: TypeAlias = str | int | tuple[str, ...]
"""A step into a document. A key, an index, or the root and name of the part whose value is the key."""
MENTIONED = "mentioned"
"""The document of the flags that tell which argument ids a known document names. Conditions alone are about it."""
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_NUMBER = 2**53
"""Larger numbers are not computed with: JSON readers disagree about them, and a float cannot hold them."""
MAX_PAIRS = 400
"""Pairs of two numbers, or of a date and a number, from which new values are made, at most."""


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
    def names(self) -> dict[str, tuple[str, str]]:
        """By text, the root and name of the first argument or field with it."""
        names: dict[str, tuple[str, str]] = {}
        for root, value in self.roots.items():
            for name, key in value.items() if isinstance(value, Mapping) else ():
                if isinstance(key, str):
                    names.setdefault(key, (root, name))
        return names

    def step(self, holder: Ref, key: str) -> Key:
        """The step to a key: an argument or field that holds it, or itself."""
        name = self.names.get(key)
        return key if name is None or holder.root == "args" or holder == Ref(name[0]) else name

    @cached_property
    def nodes(self) -> dict[Ref, Any]:
        """Every part of the arguments and documents, by its reference."""
        return {ref: node for root, value in self.roots.items() for ref, node in _walk(Ref(root), value, self)}

    def part(self, ref: Ref, default: Any = None) -> Any:
        """The value there, by whichever name it has in `nodes`; else the default."""
        try:
            return self.nodes[ref] if ref in self.nodes else evaluate(ref, self)
        except LookupError:
            return default

    @cached_property
    def by_value(self) -> dict[str, list[Ref]]:
        """The references to each value, which is in JSON."""
        index: dict[str, list[Ref]] = {}
        for ref, node in self.nodes.items():
            if ref.root != MENTIONED:
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


def _walk(ref: Ref, node: Any, around: Surroundings) -> Iterable[tuple[Ref, Any]]:
    if ref.path or ref.root != "args":
        yield ref, node
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _walk(Ref(ref.root, (*ref.path, around.step(ref, key))), value, around)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _walk(Ref(ref.root, (*ref.path, number)), value, around)


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
    return [_value_of(step, around) if isinstance(step, tuple) else step for step in path]


def _value_of(step: tuple[str, ...], around: Surroundings) -> str:
    """The key that a value is; `KeyError` where it is not there, or no text."""
    root, name = step
    holder = around.roots[root]
    key = holder.get(name) if isinstance(holder, Mapping) else None
    if not isinstance(key, str):
        raise KeyError(step)
    return key
