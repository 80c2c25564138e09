"""Limits of a rule: the states in which recorded calls say nothing."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from dreamgym_lg.compiled.examples import Binding
from dreamgym_lg.compiled.expressions import Ref, Scope, canonical
from dreamgym_lg.compiled.trees import MAX_PATH, MIXED, Condition, Tree, branching

MIN_EXAMPLES = 4
"""Examples that a rule is learned from, at least."""
MAX_KINDS, MAX_SINGLE = 10, 0.1
"""Most values of an enumeration, and largest share of them that occur with one entity alone."""


def shared_keys(documents: Sequence[Any]) -> list[str]:
    """The keys that all documents have; none where they differ."""
    first = sorted(documents[0]) if isinstance(documents[0], Mapping) else []
    return first if all(isinstance(each, Mapping) and sorted(each) == first for each in documents) else []


def seen_words(scopes: Sequence[Scope], tested: Collection[Ref], ids: tuple[Ref, ...]) -> dict[Ref, list[str | None]]:
    """The allowed words of each enumeration.

    In documents only if it never varies, or is among the `tested` ones.
    """
    refs = {ref for scope in scopes for ref in scope.nodes if len(ref.path) <= MAX_PATH}
    seen: dict[Ref, list[str | None]] = {}
    for ref in sorted(refs, key=str):
        counts = _kinds(scopes, ref, ids)
        is_limit = ref.root == "args" or (counts.total() >= MIN_EXAMPLES and (ref in tested or len(counts) == 1))
        if counts and is_limit:
            seen[ref] = _allowed(counts, scopes, ref)
    return seen


def words_seen_once(scopes: Sequence[Scope], labels: Sequence[int], ids: Collection[Ref]) -> dict[Ref, list[str | None]]:
    """Enumerations with a word and an outcome of one example alone; their other words.

    One example proves no rule: what is in such a state is unknown.
    """
    numbers = Counter(labels)
    single = [scope for scope, label in zip(scopes, labels, strict=True) if label == MIXED or numbers[label] == 1]
    refs = {ref for scope in single for ref, node in scope.nodes.items() if isinstance(node, str) and len(ref.path) <= MAX_PATH}
    limits: dict[Ref, list[str | None]] = {}
    for ref in sorted(refs, key=str):
        counts = _kinds(scopes, ref, ids)
        once = {text for text in counts if counts[text] == 1 and any(scope.nodes.get(ref) == text for scope in single)}
        if once and len(counts) > 1:
            limits[ref] = _allowed(counts.keys() - once, scopes, ref)
    return limits


def _allowed(texts: Collection[str], scopes: Sequence[Scope], ref: Ref) -> list[str | None]:
    """These texts, and None if some example has nothing there."""
    return [*sorted(texts), *([None] if any(scope.part(ref) is None for scope in scopes) else [])]


def _kinds(scopes: Sequence[Scope], ref: Ref, ids: Collection[Ref]) -> Counter[str]:
    """Number of entities with each text of an enumeration; empty for another part."""
    pairs = {  # (text, ids of the call)
        (node, canonical([a.nodes.get(each) for each in ids])) for a in scopes if isinstance(node := a.nodes.get(ref), str)
    }
    if any(not isinstance(a.nodes.get(ref), str | None) for a in scopes):
        return Counter()
    counts = Counter(text for text, _ in pairs)
    singles = sum(number == 1 for number in counts.values())
    is_enumeration = ref not in ids and singles <= max(1, MAX_SINGLE * len(pairs)) and len(counts) <= MAX_KINDS
    return counts if is_enumeration else Counter()


def same_ids(scopes: Sequence[Scope], bindings: Sequence[Binding], ids: Collection[Ref]) -> list[Condition]:
    """Conditions that an id in a document equals an argument, as in all examples.

    A binding looks up another document by it, and nothing tells which of both is meant.
    """
    sources = sorted({ref for binding in bindings for _, ref in binding.sources if ref.root != "args"}, key=str)
    return [
        Condition("same", argument, ref)
        for ref, argument in product(sources, ids)
        if all(
            scope.part(ref) is not None and canonical(scope.part(ref)) == canonical(scope.part(argument)) for scope in scopes
        )
    ]


def alike_conditions(tree: Tree, label: int, scopes: Sequence[Scope]) -> tuple[tuple[Condition, bool], ...]:
    """The conditions of other cases with one outcome in all `scopes` (`Case.alike`)."""
    alike = list[tuple[Condition, bool]]()
    for condition in branching(tree, label):
        with suppress(LookupError):  # it is about a part that not all of these examples have
            outcomes = {condition.holds(scope) for scope in scopes}
            alike += [(condition, holds) for holds in outcomes if len(outcomes) == 1]
    return tuple(alike)
