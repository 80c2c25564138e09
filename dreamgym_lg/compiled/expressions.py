"""Expressions that compute an answer or a document from a call's arguments and bound documents."""

import json
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations, product
from typing import Any, NamedTuple, TypeAlias, cast

from dreamgym_lg.compiled.runtime import Refusal, fixed, later, put, rounded

Key: TypeAlias = str | int | tuple[str, ...]
"""One step of a path. A key, an index, or (root, name) of a field whose value is the key, as in `stock[args["item"]]`."""
MENTIONED = "mentioned"
"""Root of flags, one per id argument: True if a known document contains that id. Only conditions read it."""
_ENCODER = json.JSONEncoder(sort_keys=True)  # `json.dumps` would create one for each value
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_NUMBER = 2**53
"""Arithmetic skips larger numbers: JSON readers disagree about them, and a float cannot hold them exactly."""
MAX_PAIRS = 400
"""Most pairs of numbers, or of a date and a number, that are combined. With more, none is."""


class Const(NamedTuple):
    """A constant, as JSON."""

    json: str


class Ref(NamedTuple):
    """A reference to a part of an argument or document."""

    root: str
    """`args`, or the name of a binding."""
    path: tuple[Key, ...] = ()


class Sorted(NamedTuple):
    """A list of texts, sorted."""

    start: Ref


class Later(NamedTuple):
    """A date, moved by a number of months or days."""

    start: Ref
    unit: str
    """`months` or `days`."""
    number: Ref


class Arithmetic(NamedTuple):
    """Sum, difference or product of two numbers; the second may be a constant."""

    left: Ref
    operator: str
    right: "Ref | Const"


class Fixed(NamedTuple):
    """A number as text with a fixed number of decimals, such as 12.50."""

    number: "Ref | Arithmetic"
    digits: int


Value: TypeAlias = Ref | Later | Arithmetic | Fixed
"""An expression that can be inserted into a `Text`."""


class Text(NamedTuple):
    """A text template: constant pieces and values, concatenated."""

    pieces: "tuple[str | Value, ...]"


class Build(NamedTuple):
    """An object or list of expressions; `keys` is None for a list."""

    keys: tuple[str, ...] | None
    values: "tuple[Expression, ...]"


class Extend(NamedTuple):
    """A list with elements appended."""

    start: Ref
    values: "tuple[Expression, ...]"


class Put(NamedTuple):
    """A copy of a document with some values replaced, by path."""

    start: Ref
    changes: "tuple[tuple[tuple[Key, ...], Expression], ...]"


class Refuse(NamedTuple):
    """A refusal: an error with this text."""

    text: "Expression"


Expression: TypeAlias = Const | Sorted | Value | Text | Build | Extend | Put | Refuse


@dataclass(frozen=True)
class Scope:
    """The values that expressions refer to: a call's arguments and its bound documents. Objects are `dict`s, as of JSON."""

    args: Mapping[str, Any]
    documents: Mapping[str, Any]
    atoms: dict[tuple[str, bool], Collection["Expression"]] = field(default_factory=dict, compare=False)
    """Cache of `generalizing`: single-step expressions, by (value in JSON, arithmetic allowed)."""
    restricted: dict[tuple[str, ...], "Scope"] = field(default_factory=dict, compare=False)
    """Cache of `only`."""
    json: dict[Ref, str | None] = field(default_factory=dict, compare=False)
    """Cache of `json_of`."""

    def only(self, *documents: str) -> "Scope":
        """The scope with these documents alone; cached, so that its own caches are shared."""
        if documents not in self.restricted:
            self.restricted[documents] = Scope(self.args, {name: self.documents[name] for name in documents})
        return self.restricted[documents]

    @cached_property
    def roots(self) -> dict[str, Any]:
        return {"args": self.args, **self.documents}

    @cached_property
    def names(self) -> dict[str, tuple[str, str]]:
        """Text -> (root, name) of the first argument or top-level field with this value."""
        names: dict[str, tuple[str, str]] = {}
        for root, value in self.roots.items():
            for name, text in value.items() if isinstance(value, dict) else ():
                if isinstance(text, str):
                    names.setdefault(text, (root, name))
        return names

    def step(self, holder: Ref, key: str) -> Key:
        """The step to a key: the argument or field with this value, else the key."""
        source = self.names.get(key)
        return key if source is None or holder.root == "args" or holder == Ref(source[0]) else source

    @cached_property
    def nodes(self) -> dict[Ref, Any]:
        """Every part of the arguments and documents, by its reference."""
        return {ref: node for root, value in self.roots.items() for ref, node in _walk(Ref(root), value, self)}

    def part(self, ref: Ref, default: Any = None) -> Any:
        """The value of a reference, or `default` if it leads nowhere."""
        try:
            return self.nodes[ref] if ref in self.nodes else evaluate(ref, self)
        except LookupError:
            return default

    def json_of(self, ref: Ref) -> str | None:
        """The value of a reference in JSON; None if it is null or leads nowhere."""
        if ref not in self.json:
            self.json[ref] = None if (node := self.part(ref)) is None else canonical(node)
        return self.json[ref]

    @cached_property
    def by_value(self) -> dict[str, list[Ref]]:
        """Value in JSON -> references to it."""
        index: dict[str, list[Ref]] = {}
        for ref in self.nodes:
            if ref.root != MENTIONED:
                index.setdefault(self.json_of(ref) or "null", []).append(ref)
        return index

    @cached_property
    def texts(self) -> list[tuple[str, Ref]]:
        """(text, reference) of each string and number, longest text first."""
        scalars = ((ref, node) for ref, node in self.nodes.items() if isinstance(node, (str, int, float)))
        texts = [(str(node), ref) for ref, node in scalars if not isinstance(node, bool) and node != ""]
        return sorted(texts, key=lambda each: (-len(each[0]), each[1].root, str(each[1].path)))

    @cached_property
    def numbers(self) -> list[tuple[Ref, int | float]]:
        """(reference, value) of each number that arithmetic may use."""
        return [(ref, node) for ref, node in self.nodes.items() if is_number(node)]

    @cached_property
    def later(self) -> list[tuple[str, Later]]:
        """(date, expression) of each date in scope moved by each whole number in scope."""
        dates = [(ref, node) for ref, node in self.nodes.items() if isinstance(node, str) and DATE.fullmatch(node)]
        numbers = [(ref, number) for ref, number in self.numbers if isinstance(number, int)]
        moved = list[tuple[str, Later]]()
        if len(dates) * len(numbers) <= MAX_PAIRS:
            for (start, day), (ref, number), unit in product(dates, numbers, ("months", "days")):
                with suppress(LookupError):  # the 31st of February, or a year after 9999
                    moved += [(later(day, **{unit: number}), Later(start, unit, ref))] if number else []
        return moved

    @cached_property
    def arithmetic(self) -> dict[str, list[Arithmetic]]:
        """Number in JSON -> operations on two numbers in scope that result in it."""
        index: dict[str, list[Arithmetic]] = {}
        if len(self.numbers) ** 2 <= MAX_PAIRS:
            for (left, one), (right, other) in permutations(self.numbers, 2):
                for sign, compute in _OPERATORS.items():
                    if sign == "-" or str(left) < str(right):  # + and * are commutative
                        index.setdefault(canonical(rounded(compute(one, other))), []).append(Arithmetic(left, sign, right))
        return index

    def computed(self, number: int | float) -> list[Arithmetic]:
        """Operations that result in this number, on two numbers or a number and a constant."""
        differences = [(ref, rounded(number - other)) for ref, other in self.numbers]
        return [
            *self.arithmetic.get(canonical(number), ()),
            *(Arithmetic(ref, "-" if rest < 0 else "+", Const(canonical(abs(rest)))) for ref, rest in differences if rest),
        ]


def is_number(node: Any) -> bool:
    return isinstance(node, (int, float)) and not isinstance(node, bool) and abs(node) < MAX_NUMBER


def _walk(ref: Ref, node: Any, scope: Scope) -> Iterable[tuple[Ref, Any]]:
    if ref.path or ref.root != "args":
        yield ref, node
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _walk(Ref(ref.root, (*ref.path, scope.step(ref, key))), value, scope)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _walk(Ref(ref.root, (*ref.path, number)), value, scope)


def canonical(node: Any) -> str:
    return _ENCODER.encode(node)


def refs_in(expression: object) -> Iterable[Ref]:
    """The references in an expression."""
    if isinstance(expression, Ref):
        yield expression
    elif isinstance(expression, tuple):
        for part in expression:
            yield from refs_in(part)


def evaluate(expression: Expression, scope: Scope) -> Any:
    """The value of an expression. Raises `LookupError` if a part of it is missing or of the wrong type."""
    match expression:
        case Const(text):
            return json.loads(text)
        case Ref(root, path):
            node = scope.roots[root]
            for step in _keys_of(path, scope):
                if not isinstance(node, (dict, list)) or isinstance(node, list) != isinstance(step, int):
                    raise KeyError(step)
                node = cast(Any, node)[step]
            return node
        case Sorted(start):
            return sorted(evaluate(start, scope))
        case Later(start, unit, number):
            return later(evaluate(start, scope), **{unit: evaluate(number, scope)})
        case Arithmetic(left, sign, right):
            try:
                return rounded(_OPERATORS[sign](evaluate(left, scope), evaluate(right, scope)))
            except (TypeError, OverflowError) as error:
                raise LookupError(f"{left} and {right} are not both numbers, or too large") from error
        case Fixed(value, digits):
            if not is_number(number := evaluate(value, scope)):
                raise LookupError(f"{value} is no number")
            return fixed(number, digits)
        case _:
            return _composed(expression, scope)


def _composed(expression: Text | Build | Extend | Put | Refuse, scope: Scope) -> Any:
    match expression:
        case Text(pieces):
            return "".join(piece if isinstance(piece, str) else str(evaluate(piece, scope)) for piece in pieces)
        case Refuse(text):
            return Refusal(evaluate(text, scope))
        case Extend(start, values):
            return [*evaluate(start, scope), *(evaluate(value, scope) for value in values)]
        case Put(start, changes):
            return put(evaluate(start, scope), [(_keys_of(path, scope), evaluate(new, scope)) for path, new in changes])
        case Build(keys, values):
            built = [evaluate(value, scope) for value in values]
            return built if keys is None else dict(zip(keys, built, strict=True))


def _keys_of(path: Iterable[Key], scope: Scope) -> list[str | int]:
    """The path with each (root, name) step replaced by the key that it stands for."""
    return [_key_of(step, scope) if isinstance(step, tuple) else step for step in path]


def _key_of(step: tuple[str, ...], scope: Scope) -> str:
    """The text at (root, name), used as a key. Raises `KeyError` if it is missing or no text."""
    root, name = step
    holder = scope.roots[root]
    key = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(key, str):
        raise KeyError(step)
    return key
