"""Decision trees over the arguments and documents around a call, exact on their examples."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple, cast

from dreamgym_lg.compiled import runtime
from dreamgym_lg.compiled.expressions import MENTIONED, Arithmetic, Ref, Surroundings, canonical, evaluate, is_number

MAX_DEPTH = 6
MAX_PATH = 3
"""Steps into a document that a condition may look."""
MIN_EXAMPLES = 2
"""Examples on each side of a condition on a constant: one example proves no rule."""
MAX_NUMBERS = 8
"""Numbers around a call of which two are computed with and compared to a third, at most."""


class Condition(NamedTuple):
    """A test of the surroundings. `exists`, `equals` a constant, `same` as another part, `below` a part or a limit.

    `named` is true of an argument where a document holds it, or each of its list. A limit is two numbers, the last that was
    seen below it and the first above: nothing is known of a value between them. `below` and `above` also compare with a sum or
    product, and raise `LookupError` where it has no numbers.
    """

    kind: str
    left: Ref
    right: Any = None

    def holds(self, around: Surroundings) -> bool:
        if self.kind == "exists":
            return around.part(self.left, runtime.MISSING) is not runtime.MISSING
        left = around.part(self.left)
        right = around.part(self.right) if isinstance(self.right, Ref) else self.right
        if isinstance(right, Arithmetic):
            pair = (evaluate(self.left, around), evaluate(right, around))
            return runtime.at_most(*(pair if self.kind == "below" else reversed(pair)))
        if left is None or right is None:
            return False
        if self.kind in ("equals", "same"):
            return canonical(left) == (self.right if self.kind == "equals" else canonical(right))
        if self.kind == "below":
            return runtime.at_most(left, right) if isinstance(self.right, Ref) else runtime.below(left, *self.right)
        return runtime.named(right, left)


class Branch(NamedTuple):
    condition: Condition
    yes: "Tree"
    no: "Tree"
    others: tuple[tuple[Condition, bool], ...] = ()
    """Other single conditions that part the examples as `condition` does, or (False) the other way round.

    Nothing is known where one of them disagrees: few examples fit several explanations."""


Tree = Branch | int
"""A branch, or the label of all examples that come here."""
MIXED = -1
"""The label of examples with different labels that no condition tells apart."""


def decide(tree: Tree, around: Surroundings) -> int:
    while isinstance(tree, Branch):
        holds = tree.condition.holds(around)
        if any(other.holds(around) is not (holds is alike) for other, alike in tree.others):
            return MIXED
        tree = tree.yes if holds else tree.no
    return tree


def learn(
    arounds: Sequence[Surroundings],
    labels: Sequence[int],
    *,
    ids: Collection[Ref] = (),
    arithmetic: bool = False,
    depth: int = MAX_DEPTH,
) -> Tree:
    """A small tree that gives every example its label or `MIXED`.

    Args: `ids`, arguments that name entities: no condition is about one of their values; `arithmetic`, conditions about a sum
    or product too.
    """
    if len(set(labels)) == 1:
        return labels[0]
    if not depth:
        return MIXED
    best, others = None, list[tuple[Condition, bool]]()
    for condition in _conditions(arounds, ids, arithmetic):
        holds = [condition.holds(around) for around in arounds]
        if min(sum(holds), len(holds) - sum(holds)) < (MIN_EXAMPLES if condition.kind in ("equals", "exists") else 1):
            continue
        if best is not None and (holds == best[2] or holds == [not each for each in best[2]]):
            others.append((condition, holds == best[2]))
            continue
        gain = _entropy(labels) - _split_entropy(labels, holds)
        if gain > 1e-9 and (best is None or gain > best[0] + 1e-9):
            best, others = (gain, condition, holds), []
    if best is None:
        return MIXED
    parts = [[number for number, value in enumerate(best[2]) if value is side] for side in (True, False)]
    again = partial(learn, ids=ids, arithmetic=arithmetic, depth=depth - 1)
    yes, no = (again([arounds[n] for n in part], [labels[n] for n in part]) for part in parts)
    return Branch(best[1], yes, no, tuple(others))


def conditions_of(tree: Tree) -> list[Condition]:
    if not isinstance(tree, Branch):
        return []
    return [tree.condition, *(each for each, _ in tree.others), *conditions_of(tree.yes), *conditions_of(tree.no)]


def is_mixed(tree: Tree) -> bool:
    """True if a tree leaves some examples without a label."""
    return is_mixed(tree.yes) or is_mixed(tree.no) if isinstance(tree, Branch) else tree == MIXED


def _conditions(arounds: Sequence[Surroundings], ids: Collection[Ref], arithmetic: bool) -> Iterator[Condition]:
    """Conditions that the examples suggest, the plainest first."""
    scalars: dict[Ref, Counter[str]] = {}
    for around in arounds:
        for ref, node in around.nodes.items():
            if len(ref.path) <= MAX_PATH and not any(isinstance(step, int) for step in ref.path):
                scalars.setdefault(ref, Counter())[canonical(node) if not isinstance(node, (Mapping, list)) else ""] += 1
    entities = {"", *(canonical(around.nodes.get(ref)) for around in arounds for ref in ids)}
    # what was looked up before comes last: few examples may fit it too, and a backend seldom asks
    refs = sorted(scalars, key=lambda ref: (ref.root == MENTIONED, ref.root != "args", len(ref.path), str(ref.path)))
    own = [ref for ref in refs if ref.root != MENTIONED]
    yield from (Condition("exists", ref) for ref in own if sum(scalars[ref].values()) < len(arounds))
    for ref in refs:
        if ref in ids:
            continue
        values = [value for value, number in scalars[ref].items() if value not in entities and number >= MIN_EXAMPLES]
        yield from (Condition("equals", ref, value) for value in (values[:1] if ref.root == MENTIONED else values))  # a flag
    plain = [ref for ref in own if any(scalars[ref])]
    for left in plain:
        yield from (Condition("same", left, right) for right in plain[plain.index(left) + 1 :])
    yield from _bounds(arounds, refs)
    documents = [Ref(root) for root, node in arounds[0].documents.items() if isinstance(node, (Mapping, list))]
    holders = dict.fromkeys([*documents, *(ref for ref in own if scalars[ref][""] and ref.root != "args")])
    for name in sorted({name for around in arounds for name in around.args}):
        yield from (Condition("named", Ref("args", (name,)), ref) for ref in holders if ref.root != MENTIONED)
    if arithmetic:
        numbers = [ref for ref in plain if all(is_number(around.nodes.get(ref)) for around in arounds)]
        yield from _computed([ref for ref in numbers if ref not in ids])


def _computed(numbers: Sequence[Ref]) -> Iterator[Condition]:
    """Each number against the sum and the product of two others."""
    pairs = combinations(numbers if len(numbers) <= MAX_NUMBERS else (), 2)
    for (one, other), sign, left, kind in product(pairs, "+*", numbers, ("below", "above")):
        if left not in (one, other):
            yield Condition(kind, left, Arithmetic(one, sign, other))


def _bounds(arounds: Sequence[Surroundings], refs: Iterable[Ref]) -> Iterator[Condition]:
    nodes = {ref: [around.part(ref) for around in arounds] for ref in refs}
    numbers = {ref: [cast(float, each) for each in values if runtime.at_most(each, each)] for ref, values in nodes.items()}
    numbers = {ref: values for ref, values in numbers.items() if values}
    for ref, values in numbers.items():
        ordered = sorted(set(values))
        yield from (Condition("below", ref, limit) for limit in zip(ordered, ordered[1:], strict=False))
        yield from (Condition("below", ref, other) for other in numbers if other != ref)


def _entropy(labels: Sequence[int]) -> float:
    return -sum(n / len(labels) * math.log2(n / len(labels)) for n in Counter(labels).values())


def _split_entropy(labels: Sequence[int], holds: Sequence[bool]) -> float:
    sides = [[label for label, value in zip(labels, holds, strict=True) if value is side] for side in (True, False)]
    return sum(len(side) / len(labels) * _entropy(side) for side in sides if side)
