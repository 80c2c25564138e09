"""Finds, without a model, the rule by which each writing tool answers and changes documents."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.compiled.effects import Usable, documents_after
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
from dreamgym_lg.compiled.expressions import MENTIONED, Expression, Ref, Scope, evaluate, refs_in
from dreamgym_lg.compiled.generalizing import generalize
from dreamgym_lg.compiled.limits import (
    MIN_EXAMPLES,
    alike_conditions,
    same_ids,
    seen_words,
    shared_keys,
    words_seen_once,
)
from dreamgym_lg.compiled.runtime import check_seen, with_keys
from dreamgym_lg.compiled.trees import MIXED, Condition, Tree, conditions_of, decide, is_mixed, learn

MIN_EXACT = 0.99
"""Share of left-out examples that a rule must answer exactly. Else more documents are tried."""
FOLDS = (3, 10)
"""Folds of cross-validation; the second number is tried if no rule is found: a third may hold all rare cases."""
MIN_PROMISING = 0.9
"""Share of left-out examples answered exactly for which more folds are worth a try."""
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
    """Conditions of other cases, with their one outcome in all examples of this one. With another the answer is unknown."""


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
    seen: Mapping[Ref, Sequence[str | None]]
    """Parts that are enumerations -> all recorded values, None for nothing. With another one the outcome is unknown."""
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
    keys = [tuple(tuple(shared_keys([scope.documents[each.name]])) for each in bindings) for _, scope in usable]
    most = Counter(keys).most_common(1)
    return [each for each, document_keys in zip(usable, keys, strict=True) if document_keys == most[0][0]]


def _cross_validate(usable: Usable, learn_rule: Learn, folds: int) -> tuple[int, bool]:
    """Number of left-out examples answered exactly, and True if that suffices to accept the rule."""
    unmixed, total = Counter[bool | None](), Counter[bool | None]()
    for fold in range(folds):
        counts, is_unmixed = _left_out(usable, learn_rule, folds, fold)
        total += counts
        unmixed += counts if is_unmixed else Counter()
        rest = len(usable) - total.total()
        passes = any(_suffices(each, len(usable), rest) for each in (unmixed, total))
        if not passes and total[True] + rest < MIN_PROMISING * len(usable):
            break  # neither accepted nor promising, whatever the other folds say
    accepted = next((each for each in (unmixed, total) if _suffices(each, len(usable))), None)
    return (total[True], False) if accepted is None else (accepted[True], True)


def _suffices(outcomes: Counter[bool | None], examples: int, rest: int = 0) -> bool:
    """True if a rule with these outcomes is accepted. Args: `rest`, examples still to play, taken as answered exactly."""
    exact = outcomes[True] + rest
    answered = exact + outcomes[False]
    return exact >= MIN_EXACT * answered and 2 * answered >= examples


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
                counts.update(ref for ref in scope.nodes if len(ref.path) < 3 and (scope.json_of(ref) or "null") in values)
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
    limits = words_seen_once([scope for _, scope in learned], labels, ids)
    rest = [each for each in usable if all(each[1].part(ref) in limits[ref] for ref in limits)]
    if len(usable) > len(rest) >= MIN_EXAMPLES:
        usable = rest
        labels, answers = _cluster(learned := [(each, scope.only(*names)) for each, scope in usable], arithmetic)
    tree = learn(scopes := [scope for _, scope in learned], labels, ids=ids, arithmetic=arithmetic)
    bindings = (*bindings, *others)
    groups = [[each for each, label in zip(usable, labels, strict=True) if label == number] for number in range(len(answers))]
    documents = {binding: documents_after(binding, groups, is_limit=binding in others) for binding in bindings}
    cases = tuple(
        Case(
            answer,
            tuple((b.name, new) for b, news in documents.items() if (new := news[number]) not in (None, Ref(b.name))),
            tuple(b.name for b, news in documents.items() if news[number] is None),
            alike_conditions(tree, number, [scope for scope, label in zip(scopes, labels, strict=True) if label == number]),
        )
        for number, answer in enumerate(answers)
    )
    whole = [scope for _, scope in usable]
    keys = {each.name: same for each in bindings if (same := shared_keys([scope.documents[each.name] for scope in whole]))}
    named = tuple(ref for ref in ids if all(example.mentioned.get(label_of(ref)) for example, _ in usable))
    answered = tuple(ref for ref in ids if ref not in named and all(label_of(ref) in each.answered for each, _ in usable))
    shown = {ref for answer in answers for ref in refs_in(answer)}  # an answer that shows a word holds for others
    seen = seen_words(whole, {each.left for each in conditions_of(tree) if each.kind == "equals"} - shown, ids)
    seen = limits | seen if usable is rest else seen
    pairs = (pair for pair in combinations(bindings, 2) if pair[0].tool == pair[1].tool)
    apart = tuple(pair for pair in pairs if not any(_is_bound(pair[0], pair[1:], scope) for scope in whole))
    alike = tuple((each, True) for each in same_ids(whole, bindings, ids))
    return Rule(bindings, tree, cases, ids, named, answered, (), (), keys, seen, apart, alike)


def _cluster(usable: Usable, arithmetic: bool) -> tuple[list[int], list[Expression]]:
    """Label of each example, and answer expression of each label."""
    members: list[list[int]] = []
    answers: list[Expression] = []
    for number, (example, scope) in enumerate(usable):
        for label, cluster in enumerate(members):
            chosen = [cluster[0], number, *cluster[1:30]]
            joint = generalize([usable[n][0].answer for n in chosen], [usable[n][1] for n in chosen], arithmetic=arithmetic)
            if joint is not None and (  # the present expression gives all of the cluster's answers
                joint == answers[label] or all(_is_exact(partial(evaluate, joint), *usable[n]) for n in cluster)
            ):
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
