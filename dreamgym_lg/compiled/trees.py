"""Decision trees over a call's scope that classify every example correctly."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple, cast

from dreamgym_lg.compiled import runtime
from dreamgym_lg.compiled.expressions import MENTIONED, Arithmetic, Ref, Scope, canonical, evaluate, is_number

MAX_DEPTH = 6
MAX_PATH = 3
"""Longest path into a document that a condition may test."""
MIN_EXAMPLES = 2
"""Examples needed on each side of a test for a constant or for existence: one example proves no rule."""
MAX_NUMBERS = 8
"""Most numbers in scope with which sums and products are tested; with more, none is."""


class Condition(NamedTuple):
    """A test of one part of a scope (`left`).

    Kinds: `exists`; `equals` a constant; `same` as another part; `named`: a document contains the argument, or all items of
    a list; `below` another part, or a limit. A limit is the largest example value below it and the smallest above; between
    them the outcome is unknown. `below` and `above` also compare with a sum or product; they raise `LookupError` if it has no
    numbers.
    """

    kind: str
    left: Ref
    right: Any = None

    def holds(self, scope: Scope) -> bool:
        if self.kind == "exists":
            return scope.part(self.left, runtime.MISSING) is not runtime.MISSING
        if self.kind in ("equals", "same"):
            one = scope.json_of(self.left)
            return one is not None and one == (self.right if self.kind == "equals" else scope.json_of(self.right))
        left = scope.part(self.left)
        right = scope.part(self.right) if isinstance(self.right, Ref) else self.right
        if isinstance(right, Arithmetic):
            pair = (evaluate(self.left, scope), evaluate(right, scope))
            return runtime.at_most(*(pair if self.kind == "below" else reversed(pair)))
        if left is None or right is None:
            return False
        if self.kind == "below":
            return runtime.at_most(left, right) if isinstance(self.right, Ref) else runtime.below(left, *self.right)
        return runtime.named(right, left)


class Branch(NamedTuple):
    condition: Condition
    yes: "Tree"
    no: "Tree"
    others: tuple[tuple[Condition, bool], ...] = ()
    """Other conditions that split the examples like `condition` (True), or the opposite way (False).

    If one disagrees on a new call, the outcome is unknown: the examples allow several explanations."""


Tree = Branch | int
"""A branch, or a leaf: the label of its examples."""
MIXED = -1
"""Label of a leaf whose examples have different labels, with no condition that separates them."""


def decide(tree: Tree, scope: Scope) -> int:
    """The label that the tree gives a call; `MIXED` if unknown."""
    while isinstance(tree, Branch):
        holds = tree.condition.holds(scope)
        if any(other.holds(scope) is not (holds is agrees) for other, agrees in tree.others):
            return MIXED
        tree = tree.yes if holds else tree.no
    return tree


def learn(
    scopes: Sequence[Scope],
    labels: Sequence[int],
    *,
    ids: Collection[Ref] = (),
    arithmetic: bool = False,
    depth: int = MAX_DEPTH,
) -> Tree:
    """Learn a small tree that gives each example its label, greedily by information gain.

    Args: `ids`, arguments that are entity ids: no condition tests for one of their values; `arithmetic`, also try sums and
    products.
    """
    if len(set(labels)) == 1:
        return labels[0]
    if not depth:
        return MIXED
    best, others = None, list[tuple[Condition, bool]]()
    for condition in _conditions(scopes, ids, arithmetic):
        holds = [condition.holds(scope) for scope in scopes]
        if min(sum(holds), len(holds) - sum(holds)) < (MIN_EXAMPLES if condition.kind in ("equals", "exists") else 1):
            continue
        if best is not None and (holds == best[2] or holds == [not value for value in best[2]]):
            others.append((condition, holds == best[2]))
            continue
        gain = _entropy(labels) - _split_entropy(labels, holds)
        if gain > 1e-9 and (best is None or gain > best[0] + 1e-9):
            best, others = (gain, condition, holds), []
    if best is None:
        return MIXED
    parts = [[number for number, value in enumerate(best[2]) if value is side] for side in (True, False)]
    if isinstance(best[1].right, tuple) and 1 in map(len, parts):
        others += [
            (condition, best[2][number]) for number in min(parts, key=len) for condition in _only_in(scopes, number, ids)
        ]
    learn_part = partial(learn, ids=ids, arithmetic=arithmetic, depth=depth - 1)
    yes, no = (learn_part([scopes[n] for n in part], [labels[n] for n in part]) for part in parts)
    return Branch(best[1], yes, no, tuple(others))


def conditions_of(tree: Tree) -> list[Condition]:
    """All conditions of a tree, the alternative ones included."""
    if not isinstance(tree, Branch):
        return []
    return [tree.condition, *(other for other, _ in tree.others), *conditions_of(tree.yes), *conditions_of(tree.no)]


def branching(tree: Tree, label: int) -> list[Condition]:
    """Conditions that do not single out this label: both sides lead there, or neither."""
    if not isinstance(tree, Branch):
        return []
    leads = [label in labels_of(part) for part in (tree.yes, tree.no)]
    own = [] if sum(leads) == 1 else [tree.condition]
    return [*own, *branching(tree.yes, label), *branching(tree.no, label)]


def labels_of(tree: Tree) -> set[int]:
    """The labels of a tree's leaves."""
    return labels_of(tree.yes) | labels_of(tree.no) if isinstance(tree, Branch) else {tree}


def is_mixed(tree: Tree) -> bool:
    """True if some leaf is `MIXED`."""
    return is_mixed(tree.yes) or is_mixed(tree.no) if isinstance(tree, Branch) else tree == MIXED


def _conditions(scopes: Sequence[Scope], ids: Collection[Ref], arithmetic: bool) -> Iterator[Condition]:
    """Candidate conditions, the simplest first."""
    scalars: dict[Ref, Counter[str]] = {}
    for scope in scopes:
        for ref, node in scope.nodes.items():
            if len(ref.path) <= MAX_PATH and not any(isinstance(step, int) for step in ref.path):
                value = "" if isinstance(node, (dict, list)) else scope.json_of(ref) or "null"
                scalars.setdefault(ref, Counter())[value] += 1
    entities = {"", *(canonical(scope.nodes.get(ref)) for scope in scopes for ref in ids)}
    # MENTIONED comes last: with few examples it fits by chance, and a backend rarely depends on earlier look-ups
    refs = sorted(scalars, key=lambda ref: (ref.root == MENTIONED, ref.root != "args", len(ref.path), str(ref.path)))
    regular = [ref for ref in refs if ref.root != MENTIONED]
    yield from (Condition("exists", ref) for ref in regular if sum(scalars[ref].values()) < len(scopes))
    for ref in refs:
        if ref in ids:
            continue
        values = [value for value, number in scalars[ref].items() if value not in entities and number >= MIN_EXAMPLES]
        yield from (Condition("equals", ref, value) for value in (values[:1] if ref.root == MENTIONED else values))  # a flag
    scalar_refs = [ref for ref in regular if any(scalars[ref])]
    for left in scalar_refs:
        yield from (Condition("same", left, right) for right in scalar_refs[scalar_refs.index(left) + 1 :])
    yield from _bounds(scopes, refs)
    documents = [Ref(root) for root, node in scopes[0].documents.items() if isinstance(node, (dict, list))]
    holders = dict.fromkeys([*documents, *(ref for ref in regular if scalars[ref][""] and ref.root != "args")])
    for name in sorted({name for scope in scopes for name in scope.args}):
        yield from (Condition("named", Ref("args", (name,)), ref) for ref in holders if ref.root != MENTIONED)
    if arithmetic:
        numbers = [ref for ref in scalar_refs if all(is_number(scope.nodes.get(ref)) for scope in scopes)]
        yield from _arithmetic_conditions([ref for ref in numbers if ref not in ids])


def _only_in(scopes: Sequence[Scope], number: int, ids: Collection[Ref]) -> Iterator[Condition]:
    """Conditions that hold for one example alone, by a text or flag of its own.

    They have to agree with a limit that separates this example: the limit may have nothing to do with it.
    """
    entities = [scopes[number].nodes.get(ref) for ref in ids]
    for ref, node in scopes[number].nodes.items():
        if ref.root == MENTIONED or len(ref.path) > MAX_PATH or not isinstance(node, (str, bool)) or node in entities:
            continue
        if [scope.nodes.get(ref) for scope in scopes].count(node) == 1:
            yield Condition("equals", ref, canonical(node))


def _arithmetic_conditions(numbers: Sequence[Ref]) -> Iterator[Condition]:
    """Compares each number with the sum and the product of two others."""
    pairs = combinations(numbers if len(numbers) <= MAX_NUMBERS else (), 2)
    for (one, other), sign, left, kind in product(pairs, "+*", numbers, ("below", "above")):
        if left not in (one, other):
            yield Condition(kind, left, Arithmetic(one, sign, other))


def _bounds(scopes: Sequence[Scope], refs: Iterable[Ref]) -> Iterator[Condition]:
    """`below` conditions: a number against a limit between two example values, or against another number."""
    nodes = {ref: [scope.part(ref) for scope in scopes] for ref in refs}
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
