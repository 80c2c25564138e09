"""Finds, without any model, the rule by which each writing tool answers and changes documents."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

from dreamgym_lg.compiled.examples import (
    Binding,
    CallRecord,
    Example,
    Keys,
    examples_of,
    find_ids,
    kept_tools,
    label_of,
    place_of,
    recorded_keys,
    same,
    spreads_of,
)
from dreamgym_lg.compiled.expressions import MENTIONED, Build, Expression, Ref, Surroundings, canonical, evaluate
from dreamgym_lg.compiled.generalizing import generalize
from dreamgym_lg.compiled.runtime import check_seen, with_keys
from dreamgym_lg.compiled.trees import MAX_PATH, MIXED, Tree, conditions_of, decide, is_mixed, learn

MIN_EXACT = 0.99
"""Share of left-out examples that a rule must answer exactly. Else a larger set of documents is tried."""
MIN_EXAMPLES = 4
FOLDS = (3, 10)
"""Parts of the traces that are left out in turn. More where no rule is found: a third may hold all of what is rare."""
MIN_PROMISING = 0.9
"""Share of left-out examples that are answered exactly, if more and smaller parts are to be tried."""
MAX_KINDS, MAX_SINGLE = 10, 0.1
"""Texts, and the share of those that occur with one entity alone, at most, where no further ones are to be expected."""
MAX_EXAMPLES = 400
"""Examples that a rule is learned from, at most."""
MAX_CASES = 30
"""Outcomes of a tool, at most. What is behind these is left out."""
MAX_DOCUMENTS, MAX_SETS = 3, 12
"""Documents that a rule joins, and sets of as many that are tried, at most."""


class Case(NamedTuple):
    """One outcome of a writing call. Its answer, and the bound documents behind it where they change."""

    answer: Expression
    effects: tuple[tuple[str, Expression], ...]
    """Binding and new document, over the surroundings and `answer`."""
    unknown: tuple[str, ...]
    """Bindings whose documents change in ways that no expression gives."""


class Rule(NamedTuple):
    """How a writing tool answers: the documents it looks at, the conditions, the cases."""

    bindings: tuple[Binding, ...]
    tree: Tree
    cases: tuple[Case, ...]
    ids: tuple[Ref, ...]
    """Arguments that name documents."""
    named: tuple[Ref, ...]
    """Those that a known document named in every example: nothing is known of others."""
    answered: tuple[Ref, ...]
    """The same of any earlier answer, whatever changed since."""
    keeps: tuple[str, ...]
    """Reading tools whose other documents stayed the same behind such a call. Those of others are forgotten."""
    spreads: tuple[str, ...]
    """Other reading tools than the bound documents', whose answers it may change without naming what they are about."""
    keys: Mapping[str, Sequence[str]]
    """By binding, the keys that its document had in every example. With others, such as an error, no rule is known."""
    seen: Mapping[Ref, Sequence[str]]
    """Texts of few kinds, with all that were seen."""
    apart: tuple[tuple[Binding, Binding], ...]
    """Pairs that were two documents in every example: nothing is known of a transfer to oneself."""

    def answer(self, around: Surroundings) -> Any:
        """Raises `LookupError` where it is not known."""
        for name, keys in self.keys.items():
            with_keys(around.documents[name], keys)
        for ref, values in self.seen.items():
            check_seen(around.part(ref), values)
        if any(_is_bound(one, [other], around) for one, other in self.apart):
            raise LookupError("two of its documents are the same one")
        if not all(around.documents[MENTIONED].get(label_of(ref)) for ref in self.named):
            raise LookupError("no known document names what the call is about")
        if (label := decide(self.tree, around)) == MIXED:
            raise LookupError("nothing tells which of several answers it is")
        return evaluate(self.cases[label].answer, around)


def find_rules(
    traces: Sequence[Sequence[CallRecord]], writes: Collection[str], *, looked_up: Collection[str] = ()
) -> dict[str, Rule | None]:
    """The rules of the writing tools; None where no small exact rule was found.

    Args: `traces`, the calls of each, in their order; `looked_up`, tools that answer only about what was read before.
    """
    keys, ids = recorded_keys(traces, writes), find_ids(traces, writes)
    examples = examples_of(traces, writes, ids)
    rules = {
        tool: _find_rule(examples.get(tool, [])[:MAX_EXAMPLES], ids[tool], keys, looked_up=tool in looked_up)
        for tool in sorted(writes)
    }
    spreads = spreads_of(traces, writes, ids)
    for tool, rule in rules.items():
        if rule is not None:
            kept = kept_tools(examples[tool], rule.bindings, own := spreads.get(tool, ()))
            others = tuple(reader for reader in own if reader not in {binding.tool for binding in rule.bindings})
            rules[tool] = rule._replace(keeps=kept, spreads=others)
    return rules


Usable = Sequence[tuple[Example, Surroundings]]
"""Examples whose bound documents are known, with these."""
Learn = Callable[[Usable], "Rule"]


def _find_rule(examples: Sequence[Example], ids: tuple[Ref, ...], keys: Keys, *, looked_up: bool) -> Rule | None:
    """The rule over the smallest set of documents that answers left-out examples.

    One without arithmetic comes first.
    """
    best: tuple[int, Rule | None] = (0, None)
    options: Iterable[tuple[Usable, Learn]] = _options(examples, ids, keys, looked_up=looked_up)
    for folds in FOLDS:
        promising = []
        for usable, learn_rule in options:
            exact, is_enough = _exact_left_out(usable, learn_rule, folds)
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
    """Examples to learn a rule from, and the way to; the plainest first."""
    direct = _direct(examples, keys)
    sets = [bindings for bindings in _binding_sets(examples, keys) if bindings or not looked_up]
    for arithmetic, bindings in product((False, True), sets):
        known = [each for each in examples if each.around(bindings) is not None]
        # documents that every such call had looked up: of one in another state than these nothing is known
        own = {each[1:] for each in bindings}
        rest = [one for one in direct if one[1:] not in own and all(each.around((one,)) is not None for each in known)]
        others = tuple(_distinct(one, (*bindings, *rest[:number])) for number, one in enumerate(rest))
        bound = [(each, around) for each in known if (around := each.around((*bindings, *others))) is not None]
        alike = _alike(bound, bindings)
        for usable in (bound, alike) if len(alike) < len(bound) else (bound,):
            if len(usable) >= MIN_EXAMPLES:
                yield usable, partial(_learn_rule, bindings=bindings, others=others, ids=ids, arithmetic=arithmetic)


def _alike(usable: Usable, bindings: Sequence[Binding]) -> Usable:
    """The examples whose documents have the most frequent keys. An error has others, and so may a changed document."""
    keys = [tuple(tuple(_keys([around.documents[each.name]])) for each in bindings) for _, around in usable]
    most = Counter(keys).most_common(1)
    return [each for each, own in zip(usable, keys, strict=True) if own == most[0][0]]


def _exact_left_out(usable: Usable, learn_rule: Learn, folds: int) -> tuple[int, bool]:
    """Counts exact answers by rules of other traces; True if they suffice."""
    outcomes = [_left_out(usable, learn_rule, folds, fold) for fold in range(folds)]
    whole = sum((counts for counts, is_whole in outcomes if is_whole), Counter[bool | None]())
    partly = sum((counts for counts, _ in outcomes), Counter[bool | None]())
    for counts in (whole, partly):
        answered = counts[True] + counts[False]
        if counts[True] >= MIN_EXACT * answered and 2 * answered >= len(usable):
            return counts[True], True
    return partly[True], False


def _left_out(usable: Usable, learn_rule: Learn, folds: int, fold: int) -> tuple[Counter[bool | None], bool]:
    """Outcomes on one part of the traces; True if the others' rule is whole."""
    parts = {trace: number % folds for number, trace in enumerate(sorted({example.trace for example, _ in usable}))}
    rest = [each for each in usable if parts[each[0].trace] != fold]
    rule = learn_rule(rest) if rest else None
    left_out = [each for each in usable if parts[each[0].trace] == fold]
    outcomes = Counter(_is_exact(rule.answer, *each) if rule is not None else None for each in left_out)
    return outcomes, rule is not None and not is_mixed(rule.tree)


def _is_exact(answer: Callable[[Surroundings], Any], example: Example, around: Surroundings) -> bool | None:
    """None where no answer is known."""
    try:
        return same(answer(around), example.answer)
    except (LookupError, TypeError):  # the expression is about other documents, such as an object where this is a text
        return None


def _direct(examples: Sequence[Example], keys: Keys) -> list[Binding]:
    """The documents that arguments name."""
    return list(_bindings([(each, around) for each in examples if (around := each.around(())) is not None], keys))


def _binding_sets(examples: Sequence[Example], keys: Keys) -> Iterator[tuple[Binding, ...]]:
    """Sets of documents that arguments, or other documents of the set, name. The smallest come first."""
    yield ()
    sets: list[tuple[Binding, ...]] = [()]
    seen = set[frozenset[tuple[Any, ...]]]()
    for _ in range(MAX_DOCUMENTS):
        larger = []
        for bindings in sets:
            bound = [(each, around) for each in examples if (around := each.around(bindings)) is not None]
            for other in _bindings(bound, keys):
                joint = frozenset(each[1:] for each in (*bindings, other))
                if joint not in seen and not all(_is_bound(other, bindings, around) for _, around in bound):
                    seen.add(joint)
                    larger.append((*bindings, _distinct(other, bindings)))
        sets = larger[:MAX_SETS]
        yield from sets


def _distinct(binding: Binding, others: Sequence[Binding]) -> Binding:
    """The binding under a name that no other has, also as a variable."""
    taken = {re.sub(r"\W", "_", each.name) for each in others}
    names = (binding.name, *(f"{binding.name}_{number}" for number in range(2, len(others) + 3)))
    return binding._replace(name=next(name for name in names if re.sub(r"\W", "_", name) not in taken))


def _is_bound(binding: Binding, others: Sequence[Binding], around: Surroundings) -> bool:
    """True if it is the same document as another's."""
    return place_of(binding, around) in [place_of(each, around) for each in others]


def _bindings(examples: Sequence[tuple[Example, Surroundings]], keys: Keys) -> Iterator[Binding]:
    """The documents that parts of the surroundings name in at least two examples."""
    for tool, own in keys.items():
        options = []
        for name, values in own.items():
            counts: Counter[Ref] = Counter()
            for _, around in examples:
                counts.update(ref for ref, node in around.nodes.items() if len(ref.path) < 3 and canonical(node) in values)
            options.append([(name, ref) for ref, number in counts.most_common(3) if number >= 2])
        for sources in product(*options):
            label = "_".join(str([ref.root, *ref.path][-1]) for _, ref in sources)
            yield Binding(f"{tool}_{label}" if label else tool, tool, tuple(sources))


def _learn_rule(
    usable: Usable, bindings: Sequence[Binding], others: Sequence[Binding], ids: tuple[Ref, ...], arithmetic: bool
) -> Rule:
    """The rule over the documents of `bindings`; `others` only limit what it knows."""
    learned = [(each, around.only(MENTIONED, *(binding.name for binding in bindings))) for each, around in usable]
    labels, answers = _cluster(learned, arithmetic)
    tree = learn([around for _, around in learned], labels, ids=ids, arithmetic=arithmetic)
    bindings = (*bindings, *others)
    groups = [[each for each, label in zip(usable, labels, strict=True) if label == number] for number in range(len(answers))]
    documents = {binding: _documents_after(binding, groups, is_limit=binding in others) for binding in bindings}
    cases = tuple(
        Case(
            answer,
            tuple((b.name, new) for b, news in documents.items() if (new := news[number]) not in (None, Ref(b.name))),
            tuple(b.name for b, news in documents.items() if news[number] is None),
        )
        for number, answer in enumerate(answers)
    )
    keys = {each.name: own for each in bindings if (own := _keys([around.documents[each.name] for _, around in usable]))}
    named = tuple(ref for ref in ids if all(example.mentioned.get(label_of(ref)) for example, _ in usable))
    answered = tuple(ref for ref in ids if ref not in named and all(label_of(ref) in each.answered for each, _ in usable))
    seen = _seen([around for _, around in usable], tree, ids)
    pairs = (pair for pair in combinations(bindings, 2) if pair[0].tool == pair[1].tool)
    apart = tuple(pair for pair in pairs if not any(_is_bound(pair[0], pair[1:], around) for _, around in usable))
    return Rule(bindings, tree, cases, ids, named, answered, (), (), keys, seen, apart)


def _seen(arounds: Sequence[Surroundings], tree: Tree, ids: tuple[Ref, ...]) -> dict[Ref, list[str]]:
    """The words of arguments, and texts that all documents share. A rule knows of no others."""
    refs = {ref for around in arounds for ref in around.nodes if len(ref.path) <= MAX_PATH}
    tested = {condition.left for condition in conditions_of(tree)}
    seen: dict[Ref, list[str]] = {}
    for ref in sorted(refs, key=str):
        named = {
            (node, canonical([a.nodes.get(each) for each in ids])) for a in arounds if isinstance(node := a.nodes.get(ref), str)
        }
        counts = Counter(text for text, _ in named)
        if ref.root == "args":
            few = ref not in ids and sum(n == 1 for n in counts.values()) <= max(1, MAX_SINGLE * len(named))
        else:
            few = ref not in tested and len(named) >= MIN_EXAMPLES and len(counts) == 1
        if few and 0 < len(counts) <= MAX_KINDS:
            seen[ref] = sorted(counts)
    return seen


def _keys(documents: Sequence[Any]) -> list[str]:
    """The keys that all documents have; none where they differ."""
    first = sorted(documents[0]) if isinstance(documents[0], Mapping) else []
    return first if all(isinstance(each, Mapping) and sorted(each) == first for each in documents) else []


def _cluster(usable: Usable, arithmetic: bool) -> tuple[list[int], list[Expression]]:
    """Examples whose answers one expression gives have one label; and those expressions."""
    members: list[list[int]] = []
    answers: list[Expression] = []
    for number, (example, around) in enumerate(usable):
        for label, own in enumerate(members):
            chosen = [own[0], number, *own[1:30]]
            joint = generalize([usable[n][0].answer for n in chosen], [usable[n][1] for n in chosen], arithmetic=arithmetic)
            if joint is not None and all(_is_exact(partial(evaluate, joint), *usable[n]) for n in own):
                own.append(number)
                answers[label] = joint
                break
        else:
            if len(members) == MAX_CASES:
                continue
            members.append([number])
            alone = generalize([example.answer], [around])
            assert alone is not None  # a constant gives any answer
            answers.append(alone)
    # a few examples may have met in an expression that fits them by chance: the largest cluster that gives one has it
    largest = sorted(range(len(members)), key=lambda label: -len(members[label]))
    labels = [
        next((label for label in largest if _is_exact(partial(evaluate, answers[label]), *each)), MIXED) for each in usable
    ]
    used = sorted({*labels} - {MIXED})
    return [used.index(label) if label != MIXED else MIXED for label in labels], [answers[label] for label in used]


def _documents_after(binding: Binding, groups: Sequence[Usable], *, is_limit: bool) -> list[Expression | None]:
    """By case, the bound document behind the call; None where it is unknown.

    A tool that writes changes something. Where one case is known to, a case of which nothing is known changes nothing.
    """
    documents = [_document_after(binding, group, is_limit=is_limit) for group in groups]
    changes = any(is_known and document != Ref(binding.name) for is_known, document in documents)
    return [document if is_known or is_limit or not changes else Ref(binding.name) for is_known, document in documents]


def _document_after(binding: Binding, group: Usable, *, is_limit: bool) -> tuple[bool, Expression | None]:
    """True if anything is known of it; and the document, if one expression gives it."""
    again, arounds = [], []
    for example, around in group:
        looks, place = {**example.others_after, **example.after}, place_of(binding, around)
        if place in looks:
            again.append(looks[place])
            arounds.append(Surroundings(around.args, {**around.documents, "answer": example.answer}))
    if again:
        return True, generalize(again, arounds, arithmetic=len(again) >= MIN_EXAMPLES)
    document = None if is_limit else _echo(group, binding)
    return document is not None, document


def _echo(group: Sequence[tuple[Example, Surroundings]], binding: Binding) -> Expression | None:
    """The new document of which the answer is a copy, or has fields; else None."""
    pairs = [(example.answer, around.documents[binding.name]) for example, around in group]
    if not all(isinstance(answer, Mapping) and isinstance(document, Mapping) for answer, document in pairs):
        return None
    answer, document = pairs[0]
    if all(set(new) >= set(old) for new, old in pairs):
        return Ref("answer")
    if not (shared := [key for key in document if key in answer]) or any(list(old) != list(document) for _, old in pairs):
        return None
    return Build(tuple(document), tuple(Ref("answer" if key in shared else binding.name, (key,)) for key in document))
