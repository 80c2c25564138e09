"""Finds, without a model, the rule by which each writing tool answers and changes documents."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, product
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.compiled.examples import (
    Binding,
    CallRecord,
    Example,
    Keys,
    equal_json,
    examples_of,
    find_ids,
    find_may_change,
    find_never_changed,
    kind_of,
    label_of,
    place_of,
    recorded_keys,
)
from dreamgym_lg.compiled.expressions import MENTIONED, Build, Expression, Ref, Scope, canonical, evaluate, refs_in
from dreamgym_lg.compiled.generalizing import generalize
from dreamgym_lg.compiled.runtime import Refusal, check_seen, with_keys
from dreamgym_lg.compiled.trees import MAX_PATH, MIXED, Condition, Tree, branching, conditions_of, decide, is_mixed, learn

MIN_EXACT = 0.99
"""Share of left-out examples that a rule must answer exactly. Else more documents are tried."""
MIN_EXAMPLES = 4
"""Examples that a rule is learned from, at least."""
FOLDS = (3, 10)
"""Folds of cross-validation; the second number is tried if no rule is found: a third may hold all rare cases."""
MIN_PROMISING = 0.9
"""Share of left-out examples answered exactly for which more folds are worth a try."""
MAX_KINDS, MAX_SINGLE = 10, 0.1
"""Most values of an enumeration, and largest share of them that occur with one entity alone."""
MAX_EXAMPLES = 400
"""Examples that a rule is learned from, at most."""
MAX_SAMPLE = 80
"""Examples, at most, that tell whether a kind of refusal can be learned."""
MAX_CASES = 30
"""Most cases of a rule; examples that need a further one are ignored."""
MAX_DOCUMENTS, MAX_SETS = 3, 12
"""Most documents that a rule reads, and most sets of each size that are tried."""


class Case(NamedTuple):
    """One outcome of a writing call: its answer and the documents that it changes."""

    answer: Expression
    effects: tuple[tuple[str, Expression], ...]
    """(binding, new document) pairs; the expression may also refer to `answer`."""
    unknown: tuple[str, ...]
    """Bindings whose documents change in a way that no expression reproduces."""
    alike: tuple[tuple[Condition, bool], ...]
    """Conditions with one outcome in all examples of the case. With another the answer is unknown."""


class Rule(NamedTuple):
    """The answers of a writing tool. The `tree` selects one of the `cases`; the other fields limit where the rule applies."""

    bindings: tuple[Binding, ...]
    tree: Tree
    cases: tuple[Case, ...]
    ids: tuple[Ref, ...]
    """Arguments that are ids of entities."""
    named: tuple[Ref, ...]
    """Ids that a known document contained in every example. Without such a document the outcome is unknown."""
    answered: tuple[Ref, ...]
    """As `named`, for ids that an earlier answer contained, even if it has changed since."""
    never_changes: tuple[str, ...]
    """Reading tools whose other documents never changed after such a call. Those of other tools become unknown."""
    may_change: tuple[str, ...]
    """Other reading tools than the bindings' whose answers it may change, without any of its ids."""
    keys: Mapping[str, Sequence[str]]
    """Binding -> keys of its document in every example. With other keys (an error, say) the outcome is unknown."""
    seen: Mapping[Ref, Sequence[str]]
    """Parts that are enumerations -> all recorded values. With another value the outcome is unknown."""
    apart: tuple[tuple[Binding, Binding], ...]
    """Bindings that were different documents in every example: a transfer to oneself was never seen."""
    alike: tuple[tuple[Condition, bool], ...]
    """As `Case.alike`, of all cases: an id that a document and an argument had in common."""

    def answer(self, scope: Scope) -> Any:
        """The answer to a call. Raises `LookupError` if it is unknown."""
        for name, keys in self.keys.items():
            with_keys(scope.documents[name], keys)
        for ref, values in self.seen.items():
            check_seen(scope.part(ref), values)
        if any(_is_bound(one, [other], scope) for one, other in self.apart):
            raise LookupError("two of its documents are the same one")
        if not all(scope.documents[MENTIONED].get(label_of(ref)) for ref in self.named):
            raise LookupError("no known document names what the call is about")
        if (label := decide(self.tree, scope)) == MIXED:
            raise LookupError("nothing tells which of several answers it is")
        if any(condition.holds(scope) is not holds for condition, holds in (*self.alike, *self.cases[label].alike)):
            raise LookupError("no example of this case was like this call")
        return evaluate(self.cases[label].answer, scope)


def find_rules(
    traces: Sequence[Sequence[CallRecord]], writes: Collection[str], *, looked_up: Collection[str] = ()
) -> dict[str, Rule | None]:
    """Writing tool -> its rule; None if no exact rule was found.

    Args: `traces`, the calls of each, in order; `looked_up`, tools whose rule must read at least one document.
    """
    keys, ids = recorded_keys(traces, writes), find_ids(traces, writes)
    examples = examples_of(traces, writes, ids)
    rules = {
        tool: _find_rule(examples.get(tool, [])[:MAX_EXAMPLES], ids[tool], keys, looked_up=tool in looked_up)
        for tool in sorted(writes)
    }
    may_change = find_may_change(traces, writes, ids)
    for tool, rule in rules.items():
        if rule is not None:
            kept = find_never_changed(examples[tool], rule.bindings, readers := may_change.get(tool, ()))
            others = tuple(reader for reader in readers if reader not in {binding.tool for binding in rule.bindings})
            rules[tool] = rule._replace(never_changes=kept, may_change=others)
    return rules


def find_unlearnable(traces: Sequence[Sequence[CallRecord]], writes: Collection[str]) -> set[tuple[str, str | None]]:
    """(tool, kind) of refusals that no rule gives beside the tool's other answers (`kind_of`).

    Such an error is seldom the backend's: a person rejected the call, or a limit was reached. All kinds are tried together,
    then one by one, the most frequent first.
    """
    keys, ids = recorded_keys(traces, writes), find_ids(traces, writes)
    unlearnable = set[tuple[str, str | None]]()
    for tool, examples in examples_of(traces, writes, ids).items():
        counts = Counter(kind for each in examples if (kind := kind_of(each.answer)) is not None)
        if not counts or _is_learnable([*counts], examples, ids[tool], keys):
            continue
        kept = list[str]()
        for kind, number in counts.most_common():
            if number >= MIN_EXAMPLES and _is_learnable([*kept, kind], examples, ids[tool], keys):
                kept.append(kind)
        unlearnable |= {(tool, kind) for kind in counts if kind not in kept}
    return unlearnable


def _is_learnable(kinds: Collection[str], examples: Sequence[Example], ids: tuple[Ref, ...], keys: Keys) -> bool:
    """True if one rule gives the refusals of these kinds and all other answers."""
    chosen = [each for each in examples if kind_of(each.answer) in (None, *kinds)]
    chosen = Random(0).sample(chosen, min(MAX_SAMPLE, len(chosen)))  # a search in all of them takes minutes
    if (rule := _find_rule(chosen, ids, keys, looked_up=False)) is None:
        return False
    for kind in kinds:
        refused = _usable([each for each in chosen if kind_of(each.answer) == kind], rule.bindings)
        exact = sum(_is_exact(rule.answer, *each) is True for each in refused)
        if not 0 < exact >= MIN_EXACT * len(refused):
            return False
    return True


Usable = Sequence[tuple[Example, Scope]]
"""Examples whose bound documents are known, with their scopes."""
Learn = Callable[[Usable], "Rule"]


def _find_rule(examples: Sequence[Example], ids: tuple[Ref, ...], keys: Keys, *, looked_up: bool) -> Rule | None:
    """The simplest rule that answers left-out examples exactly: few documents, preferably without arithmetic."""
    best: tuple[int, Rule | None] = (0, None)
    options: Iterable[tuple[Usable, Learn]] = _options(examples, ids, keys, looked_up=looked_up)
    for folds in FOLDS:
        promising = []
        for usable, learn_rule in options:
            exact, is_enough = _cross_validate(usable, learn_rule, folds)
            if is_enough:
                rule = learn_rule(usable)
                if not is_mixed(rule.tree):
                    return rule
                best = max(best, (exact, rule), key=lambda each: each[0])
            elif exact >= MIN_PROMISING * len(usable):
                promising.append((usable, learn_rule))
        options = promising
    return best[1]


def _options(
    examples: Sequence[Example], ids: tuple[Ref, ...], keys: Keys, *, looked_up: bool
) -> Iterator[tuple[Usable, Learn]]:
    """(examples, function that learns a rule from them), the simplest option first."""
    direct = list(_bindings(_usable(examples, ()), keys))  # their ids are arguments
    sets = [bindings for bindings in _binding_sets(examples, keys) if bindings or not looked_up]
    for arithmetic, bindings in product((False, True), sets):
        known = [each for each in examples if each.scope(bindings) is not None]
        # also bind documents that every such call had looked up: for one in a state never seen, the outcome is unknown
        bound_calls = {each[1:] for each in bindings}
        rest = [one for one in direct if one[1:] not in bound_calls and all(each.scope((one,)) is not None for each in known)]
        others = tuple(_distinct(one, (*bindings, *rest[:number])) for number, one in enumerate(rest))
        bound = _usable(known, (*bindings, *others))
        uniform = _with_most_common_keys(bound, bindings)
        for usable in (bound, uniform) if len(uniform) < len(bound) else (bound,):
            if len(usable) >= MIN_EXAMPLES:
                yield usable, partial(_learn_rule, bindings=bindings, others=others, ids=ids, arithmetic=arithmetic)


def _with_most_common_keys(usable: Usable, bindings: Sequence[Binding]) -> Usable:
    """The examples whose documents have the most frequent keys. An error or a changed document may have others."""
    keys = [tuple(tuple(_keys([scope.documents[each.name]])) for each in bindings) for _, scope in usable]
    most = Counter(keys).most_common(1)
    return [each for each, document_keys in zip(usable, keys, strict=True) if document_keys == most[0][0]]


def _cross_validate(usable: Usable, learn_rule: Learn, folds: int) -> tuple[int, bool]:
    """Number of left-out examples answered exactly, and True if that suffices to accept the rule."""
    outcomes = [_left_out(usable, learn_rule, folds, fold) for fold in range(folds)]
    unmixed = sum((counts for counts, is_unmixed in outcomes if is_unmixed), Counter[bool | None]())
    total = sum((counts for counts, _ in outcomes), Counter[bool | None]())
    for counts in (unmixed, total):
        answered = counts[True] + counts[False]
        if counts[True] >= MIN_EXACT * answered and 2 * answered >= len(usable):
            return counts[True], True
    return total[True], False


def _left_out(usable: Usable, learn_rule: Learn, folds: int, fold: int) -> tuple[Counter[bool | None], bool]:
    """Outcomes of one fold, and True if its rule has no `MIXED` leaf. An outcome is as of `_is_exact`."""
    fold_of = {trace: number % folds for number, trace in enumerate(sorted({example.trace for example, _ in usable}))}
    rest = [each for each in usable if fold_of[each[0].trace] != fold]
    rule = learn_rule(rest) if rest else None
    left_out = [each for each in usable if fold_of[each[0].trace] == fold]
    outcomes = Counter(_is_exact(rule.answer, *each) if rule is not None else None for each in left_out)
    return outcomes, rule is not None and not is_mixed(rule.tree)


def _is_exact(answer: Callable[[Scope], Any], example: Example, scope: Scope) -> bool | None:
    """True if the answer equals the recorded one; None if there is none."""
    try:
        return equal_json(answer(scope), example.answer)
    except (LookupError, TypeError):  # it expects another document, such as an object where this one is a text
        return None


def _usable(examples: Sequence[Example], bindings: Sequence[Binding]) -> list[tuple[Example, Scope]]:
    """The examples in which all these documents are known."""
    return [(each, scope) for each in examples if (scope := each.scope(bindings)) is not None]


def _binding_sets(examples: Sequence[Example], keys: Keys) -> Iterator[tuple[Binding, ...]]:
    """Candidate sets of bindings, the smallest first. Their ids are arguments, or in other documents of the set."""
    yield ()
    sets: list[tuple[Binding, ...]] = [()]
    seen = set[frozenset[tuple[Any, ...]]]()
    for _ in range(MAX_DOCUMENTS):
        larger = []
        for bindings in sets:
            bound = _usable(examples, bindings)
            for other in _bindings(bound, keys):
                joint = frozenset(each[1:] for each in (*bindings, other))
                if joint not in seen and not all(_is_bound(other, bindings, scope) for _, scope in bound):
                    seen.add(joint)
                    larger.append((*bindings, _distinct(other, bindings)))
        sets = larger[:MAX_SETS]
        yield from sets


def _distinct(binding: Binding, others: Sequence[Binding]) -> Binding:
    """The binding under a name that is unique, also as a variable."""
    taken = {re.sub(r"\W", "_", each.name) for each in others}
    names = (binding.name, *(f"{binding.name}_{number}" for number in range(2, len(others) + 3)))
    return binding._replace(name=next(name for name in names if re.sub(r"\W", "_", name) not in taken))


def _is_bound(binding: Binding, others: Sequence[Binding], scope: Scope) -> bool:
    """True if one of the others is the same document."""
    return place_of(binding, scope) in [place_of(each, scope) for each in others]


def _bindings(examples: Sequence[tuple[Example, Scope]], keys: Keys) -> Iterator[Binding]:
    """Bindings whose ids are parts of the scope in at least two examples."""
    for tool, arguments in keys.items():
        options = []
        for name, values in arguments.items():
            counts: Counter[Ref] = Counter()
            for _, scope in examples:
                counts.update(ref for ref, node in scope.nodes.items() if len(ref.path) < 3 and canonical(node) in values)
            options.append([(name, ref) for ref, number in counts.most_common(3) if number >= 2])
        for sources in product(*options):
            label = "_".join(str([ref.root, *ref.path][-1]) for _, ref in sources)
            yield Binding(f"{tool}_{label}" if label else tool, tool, tuple(sources))


def _learn_rule(
    usable: Usable, bindings: Sequence[Binding], others: Sequence[Binding], ids: tuple[Ref, ...], arithmetic: bool
) -> Rule:
    """The rule over the documents of `bindings`; `others` only limit where it applies."""
    names = [MENTIONED, *(binding.name for binding in bindings)]
    labels, answers = _cluster(learned := [(each, scope.only(*names)) for each, scope in usable], arithmetic)
    limits = _seen_once([scope for _, scope in learned], labels, ids)
    rest = [each for each in usable if not any(_is_outside(each[1].nodes.get(ref), limits[ref]) for ref in limits)]
    if len(usable) > len(rest) >= MIN_EXAMPLES:
        usable = rest
        labels, answers = _cluster(learned := [(each, scope.only(*names)) for each, scope in usable], arithmetic)
    tree = learn(scopes := [scope for _, scope in learned], labels, ids=ids, arithmetic=arithmetic)
    bindings = (*bindings, *others)
    groups = [[each for each, label in zip(usable, labels, strict=True) if label == number] for number in range(len(answers))]
    documents = {binding: _documents_after(binding, groups, is_limit=binding in others) for binding in bindings}
    cases = tuple(
        Case(
            answer,
            tuple((b.name, new) for b, news in documents.items() if (new := news[number]) not in (None, Ref(b.name))),
            tuple(b.name for b, news in documents.items() if news[number] is None),
            _alike(tree, number, [scope for scope, label in zip(scopes, labels, strict=True) if label == number]),
        )
        for number, answer in enumerate(answers)
    )
    keys = {each.name: shared for each in bindings if (shared := _keys([scope.documents[each.name] for _, scope in usable]))}
    named = tuple(ref for ref in ids if all(example.mentioned.get(label_of(ref)) for example, _ in usable))
    answered = tuple(ref for ref in ids if ref not in named and all(label_of(ref) in each.answered for each, _ in usable))
    shown = {ref for answer in answers for ref in refs_in(answer)}  # an answer that shows a word holds for others
    seen = _seen([scope for _, scope in usable], {each.left for each in conditions_of(tree)} - shown, ids)
    seen |= limits if usable is rest else {}
    pairs = (pair for pair in combinations(bindings, 2) if pair[0].tool == pair[1].tool)
    apart = tuple(pair for pair in pairs if not any(_is_bound(pair[0], pair[1:], scope) for _, scope in usable))
    alike = tuple((each, True) for each in _same_ids([scope for _, scope in usable], bindings, ids))
    return Rule(bindings, tree, cases, ids, named, answered, (), (), keys, seen, apart, alike)


def _seen(scopes: Sequence[Scope], tested: Collection[Ref], ids: tuple[Ref, ...]) -> dict[Ref, list[str]]:
    """Allowed words of enumerations: of arguments, and of documents where they never vary or are `tested`."""
    refs = {ref for scope in scopes for ref in scope.nodes if len(ref.path) <= MAX_PATH}
    seen: dict[Ref, list[str]] = {}
    for ref in sorted(refs, key=str):
        counts = _kinds(scopes, ref, ids)
        is_limit = ref.root == "args" or (counts.total() >= MIN_EXAMPLES and (ref in tested or len(counts) == 1))
        if counts and is_limit:
            seen[ref] = sorted(counts)
    return seen


def _kinds(scopes: Sequence[Scope], ref: Ref, ids: Collection[Ref]) -> Counter[str]:
    """Texts of an enumeration, by the number of entities that have it; empty for another part."""
    pairs = {  # (text, ids of the call)
        (node, canonical([a.nodes.get(each) for each in ids])) for a in scopes if isinstance(node := a.nodes.get(ref), str)
    }
    counts = Counter(text for text, _ in pairs)
    singles = sum(number == 1 for number in counts.values())
    is_enumeration = ref not in ids and singles <= max(1, MAX_SINGLE * len(pairs)) and len(counts) <= MAX_KINDS
    return counts if is_enumeration else Counter()


def _seen_once(scopes: Sequence[Scope], labels: Sequence[int], ids: Collection[Ref]) -> dict[Ref, list[str]]:
    """Texts of the other examples, for enumerations of which one example alone has a text and an outcome.

    One example proves no rule: what is in such a state is unknown.
    """
    limits: dict[Ref, list[str]] = {}
    for scope, label in zip(scopes, labels, strict=True):
        if labels.count(label) > 1 and label != MIXED:
            continue
        for ref, node in scope.nodes.items():
            if isinstance(node, str) and ref.root != MENTIONED and len(ref.path) <= MAX_PATH:
                counts = _kinds(scopes, ref, ids)
                if counts[node] == 1 < len(counts):
                    limits.setdefault(ref, sorted(counts)).remove(node)
    return limits


def _is_outside(node: Any, texts: Collection[str]) -> bool:
    return isinstance(node, str) and node not in texts


def _same_ids(scopes: Sequence[Scope], bindings: Sequence[Binding], ids: Collection[Ref]) -> list[Condition]:
    """Ids by which a document was found in another one, and which were an argument too in all examples.

    Nothing tells which of both finds the document.
    """
    sources = sorted({ref for binding in bindings for _, ref in binding.sources if ref.root != "args"})
    return [
        Condition("same", argument, ref)
        for ref, argument in product(sources, ids)
        if all(canonical(scope.part(ref)) == canonical(scope.part(argument)) for scope in scopes)
    ]


def _alike(tree: Tree, label: int, scopes: Sequence[Scope]) -> tuple[tuple[Condition, bool], ...]:
    """`Case.alike`: the conditions of other cases that all examples of this one meet, or all do not."""
    alike = list[tuple[Condition, bool]]()
    for condition in branching(tree, label):
        with suppress(LookupError):  # it is about a part that not all of these examples have
            outcomes = {condition.holds(scope) for scope in scopes}
            alike += [(condition, holds) for holds in outcomes if len(outcomes) == 1]
    return tuple(alike)


def _keys(documents: Sequence[Any]) -> list[str]:
    """The keys that all documents have; none where they differ."""
    first = sorted(documents[0]) if isinstance(documents[0], Mapping) else []
    return first if all(isinstance(each, Mapping) and sorted(each) == first for each in documents) else []


def _cluster(usable: Usable, arithmetic: bool) -> tuple[list[int], list[Expression]]:
    """Label of each example, and answer expression of each label."""
    members: list[list[int]] = []
    answers: list[Expression] = []
    for number, (example, scope) in enumerate(usable):
        for label, cluster in enumerate(members):
            chosen = [cluster[0], number, *cluster[1:30]]
            joint = generalize([usable[n][0].answer for n in chosen], [usable[n][1] for n in chosen], arithmetic=arithmetic)
            if joint is not None and all(_is_exact(partial(evaluate, joint), *usable[n]) for n in cluster):
                cluster.append(number)
                answers[label] = joint
                break
        else:
            if len(members) == MAX_CASES:
                continue
            members.append([number])
            alone = generalize([example.answer], [scope])
            assert alone is not None  # at least a constant
            answers.append(alone)
    # a small cluster may fit by chance: an example goes to the largest cluster whose expression fits it
    largest = sorted(range(len(members)), key=lambda label: -len(members[label]))
    labels = [
        next((label for label in largest if _is_exact(partial(evaluate, answers[label]), *each)), MIXED) for each in usable
    ]
    used = sorted({*labels} - {MIXED})
    return [used.index(label) if label != MIXED else MIXED for label in labels], [answers[label] for label in used]


def _documents_after(binding: Binding, groups: Sequence[Usable], *, is_limit: bool) -> list[Expression | None]:
    """The bound document after the call, for each case; None if it is unknown.

    If some case is known to change it, the cases without a later read are taken to change nothing.
    """
    documents = [_document_after(binding, group, is_limit=is_limit) for group in groups]
    changes = any(is_known and document != Ref(binding.name) for is_known, document in documents)
    return [document if is_known or is_limit or not changes else Ref(binding.name) for is_known, document in documents]


def _document_after(binding: Binding, group: Usable, *, is_limit: bool) -> tuple[bool, Expression | None]:
    """True if a later read or the answer shows the document; and its expression."""
    if isinstance(group[0][0].answer, Refusal):  # an error changes nothing
        return True, Ref(binding.name)
    later_reads, scopes = [], []
    for example, scope in group:
        looks, place = {**example.others_after, **example.after}, place_of(binding, scope)
        if place in looks:
            later_reads.append(looks[place])
            scopes.append(Scope(scope.args, {**scope.documents, "answer": example.answer}))
    if later_reads:
        document = generalize(later_reads, scopes, arithmetic=len(later_reads) >= MIN_EXAMPLES)
        return True, _with_own_fields(document, binding, later_reads, scopes)
    document = None if is_limit else _echo(group, binding)
    return document is not None, document


def _with_own_fields(
    document: Expression | None, binding: Binding, later_reads: Sequence[Any], scopes: Sequence[Scope]
) -> Expression | None:
    """The new document with the fields that no example changed, taken from the old one."""
    if not isinstance(document, Build) or document.keys is None:
        return document
    pairs = [(read, scope.documents[binding.name]) for read, scope in zip(later_reads, scopes, strict=True)]
    kept = {
        key
        for key in document.keys
        if all(isinstance(old, Mapping) and key in old and equal_json(new[key], old[key]) for new, old in pairs)
    }
    values = zip(document.keys, document.values, strict=True)
    return Build(document.keys, tuple(Ref(binding.name, (key,)) if key in kept else value for key, value in values))


def _echo(group: Sequence[tuple[Example, Scope]], binding: Binding) -> Expression | None:
    """The new document, if the answer contains it or some of its fields; else None."""
    pairs = [(example.answer, scope.documents[binding.name]) for example, scope in group]
    if not all(isinstance(answer, Mapping) and isinstance(document, Mapping) for answer, document in pairs):
        return None
    answer, document = pairs[0]
    if all(set(new) >= set(old) for new, old in pairs):
        return Ref("answer")
    if not (shared := [key for key in document if key in answer]) or any(list(old) != list(document) for _, old in pairs):
        return None
    return Build(tuple(document), tuple(Ref("answer" if key in shared else binding.name, (key,)) for key in document))
