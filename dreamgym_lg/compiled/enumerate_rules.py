"""Finds, without any model, the rule by which each writing tool answers and changes documents."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from dreamgym_lg.compiled.expressions import Build, Expression, Ref, Surroundings, canonical, evaluate, generalize
from dreamgym_lg.compiled.runtime import key_of, values_in, with_keys
from dreamgym_lg.compiled.trees import Tree, decide, learn

MIN_EXACT = 0.99
"""Share of left-out examples that a rule must answer exactly. Else a larger set of documents is tried."""
MIN_EXAMPLES = 4
FOLDS = 3
MENTIONED = "mentioned"
"""Key of the flags that tell which argument ids a known document names."""
MAX_EXAMPLES = 400
"""Examples that a rule is learned from, at most."""


class CallRecord(NamedTuple):
    """A recorded call: its arguments and its answer, parsed where it is JSON."""

    tool: str
    arguments: Mapping[str, Any]
    answer: Any


class Binding(NamedTuple):
    """A document that a call is about. It has a reading tool, and the place of each of its arguments."""

    name: str
    tool: str
    sources: tuple[tuple[str, Ref], ...]


@dataclass
class Example:
    """A writing call with the documents known before it, and those read again behind it."""

    trace: int
    arguments: Mapping[str, Any]
    answer: Any
    known: Mapping[tuple[str, str], Any]
    mentioned: Mapping[str, bool]
    """By argument that names an entity, whether a known document names it too."""
    after: dict[tuple[str, str], Any] = field(default_factory=dict)

    def around(self, bindings: Sequence[Binding]) -> Surroundings | None:
        """The arguments and bound documents; None where one of them is not known."""
        around = Surroundings(self.arguments, {MENTIONED: self.mentioned})
        for binding in bindings:
            if (place := place_of(binding, around)) is None or place not in self.known:
                return None
            around = Surroundings(self.arguments, {**around.documents, binding.name: self.known[place]})
        return around


def place_of(binding: Binding, around: Surroundings) -> tuple[str, str] | None:
    """The reading call whose answer the binding is; None where its arguments are not there."""
    try:
        return binding.tool, key_of({name: evaluate(ref, around) for name, ref in binding.sources})
    except LookupError:
        return None


class Case(NamedTuple):
    """One outcome of a writing call. Its answer, and the bound documents behind it where they change."""

    answer: Expression
    effects: tuple[tuple[str, Expression], ...]
    """Binding and new document, over the surroundings and `answer`."""
    unknown: tuple[str, ...]
    """Reading tools whose bound documents change in ways that no expression gives."""


class Rule(NamedTuple):
    """How a writing tool answers: the documents it looks at, the conditions, the cases."""

    bindings: tuple[Binding, ...]
    tree: Tree
    cases: tuple[Case, ...]
    ids: tuple[str, ...]
    """Arguments that name documents."""
    keeps: tuple[str, ...]
    """Reading tools whose other documents stayed the same behind such a call. Those of others are forgotten."""
    keys: Mapping[str, Sequence[str]]
    """By binding, the keys that its document had in every example. With others, such as an error, no rule is known."""

    def answer(self, around: Surroundings) -> Any:
        """Raises `LookupError` where it is not known."""
        for name, keys in self.keys.items():
            with_keys(around.documents[name], keys)
        return evaluate(self.cases[decide(self.tree, around)].answer, around)


class TraceRules(NamedTuple):
    """The rules of the writing tools, and how far their changes spread."""

    rules: Mapping[str, Rule | None]
    """None where no small exact rule was found."""
    spreads: Mapping[str, Sequence[str]]
    """Reading tools whose answers changed behind a writing call that names nothing of theirs."""


def find_rules(
    traces: Sequence[Sequence[CallRecord]], writes: Collection[str], *, looked_up: Collection[str] = ()
) -> TraceRules:
    """The rules of the writing tools.

    Args: `traces`, the calls of each, in their order; `looked_up`, tools that answer only about what was read before.
    """
    keys = _recorded_keys(traces, writes)
    ids = {tool: _id_arguments(tool, traces, keys) for tool in sorted(writes)}
    examples = _examples(traces, writes, ids)
    rules = {
        tool: _find_rule(examples.get(tool, [])[:MAX_EXAMPLES], ids[tool], keys, looked_up=tool in looked_up)
        for tool in sorted(writes)
    }
    return TraceRules(rules, _spreads(traces, writes, ids))


def _spreads(
    traces: Iterable[Sequence[CallRecord]], writes: Collection[str], ids: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    spreads: dict[str, set[str]] = {}
    for trace in traces:
        known = dict[tuple[str, str], tuple[Any, list[CallRecord]]]()
        for call in trace:
            place = (call.tool, key_of(call.arguments))
            if call.tool in writes:
                for _, behind in known.values():
                    behind.append(call)
                continue
            before, behind = known.get(place, (call.answer, []))
            if not _same(before, call.answer):
                for each in behind:
                    named = {canonical(each.arguments[name]) for name in ids[each.tool] if name in each.arguments}
                    spreads.setdefault(each.tool, set()).update(() if named & _values(place, before) else (call.tool,))
            known[place] = (call.answer, [])
    return {tool: sorted(readers) for tool, readers in sorted(spreads.items()) if readers}


Keys = Mapping[str, Mapping[str, Collection[str]]]
"""By reading tool and argument, the values with which it was called, in JSON."""


def _recorded_keys(traces: Iterable[Iterable[CallRecord]], writes: Collection[str]) -> Keys:
    keys: dict[str, dict[str, set[str]]] = {}
    for call in (call for trace in traces for call in trace if call.tool not in writes):
        own = keys.setdefault(call.tool, {})
        for name, value in call.arguments.items():
            own.setdefault(name, set()).add(canonical(value))
    return keys


def _id_arguments(tool: str, traces: Iterable[Iterable[CallRecord]], keys: Keys) -> tuple[str, ...]:
    """The arguments of a writing tool with which reading tools were called, too."""
    known = {value for own in keys.values() for values in own.values() for value in values if len(values) > 1}
    calls = [call for trace in traces for call in trace if call.tool == tool]
    counts = Counter(name for call in calls for name, value in call.arguments.items() if canonical(value) in known)
    return tuple(sorted(name for name, number in counts.items() if number >= 2))


def _examples(
    traces: Sequence[Sequence[CallRecord]], writes: Collection[str], ids: Mapping[str, Sequence[str]]
) -> dict[str, list[Example]]:
    examples: dict[str, list[Example]] = {}
    for number, trace in enumerate(traces):
        known, pending = dict[tuple[str, str], Any](), dict[tuple[str, str], Example]()
        for call in trace:
            place = (call.tool, key_of(call.arguments))
            if call.tool not in writes:
                if (example := pending.pop(place, None)) is not None:
                    example.after[place] = call.answer
                known[place] = call.answer
                continue
            values = {value for place, document in known.items() for value in _values(place, document, with_key=False)}
            mentioned = {name: canonical(call.arguments[name]) in values for name in ids[call.tool] if name in call.arguments}
            example = Example(number, call.arguments, call.answer, dict(known), mentioned)
            examples.setdefault(call.tool, []).append(example)
            named = {canonical(call.arguments[name]) for name in ids[call.tool] if name in call.arguments}
            for place in [place for place, document in known.items() if named & _values(place, document)]:
                del known[place]
                pending[place] = example
            for place in [
                place
                for place, earlier in pending.items()
                if earlier is not example and named & _values(place, earlier.known[place])
            ]:
                del pending[place]
    return examples


def _values(place: tuple[str, str], document: Any, *, with_key: bool = True) -> set[str]:
    """The values of a document and of the arguments of its reading call, in JSON."""
    key = json.loads(place[1]).values() if with_key else ()
    return {canonical(value) for value in (*values_in(document), *key)}


def _find_rule(examples: Sequence[Example], ids: tuple[str, ...], keys: Keys, *, looked_up: bool) -> Rule | None:
    """The rule over the smallest set of documents that answers left-out examples."""
    for bindings in _binding_sets(examples, keys):
        usable = [(each, around) for each in examples if (around := each.around(bindings)) is not None]
        if len(usable) < MIN_EXAMPLES or (looked_up and not bindings) or not _holds_left_out(usable, bindings, ids):
            continue
        if (rule := _learn_rule(usable, bindings, ids)) is not None:
            return rule
    return None


def _holds_left_out(usable: Sequence[tuple[Example, Surroundings]], bindings: Sequence[Binding], ids: tuple[str, ...]) -> bool:
    """True if rules learned from other traces answer examples exactly, at least half of them."""
    traces = sorted({example.trace for example, _ in usable})
    folds = {trace: number % FOLDS for number, trace in enumerate(traces)}
    outcomes: Counter[bool | None] = Counter()
    for fold in range(FOLDS):
        rest = [each for each in usable if folds[each[0].trace] != fold]
        rule = _learn_rule(rest, bindings, ids) if rest else None
        outcomes.update(_is_exact(rule, *each) for each in usable if folds[each[0].trace] == fold)
    answered = outcomes[True] + outcomes[False]
    return outcomes[True] >= MIN_EXACT * answered and 2 * answered >= len(usable)


def _is_exact(rule: Rule | None, example: Example, around: Surroundings) -> bool | None:
    try:
        return _same(rule.answer(around), example.answer) if rule is not None else None
    except LookupError:
        return None


def _same(one: Any, other: Any) -> bool:
    return canonical(one) == canonical(other)


def _binding_sets(examples: Sequence[Example], keys: Keys) -> Iterator[tuple[Binding, ...]]:
    """Sets of documents, the smallest first. None, those that arguments name, and those that these name."""
    yield ()
    direct = list(_bindings([(each, around) for each in examples if (around := each.around(())) is not None], keys))
    yield from ((one,) for one in direct)
    pairs = [(one, other) for one in direct for other in direct if one < other]
    for one in direct:
        bound = [(each, around) for each in examples if (around := each.around((one,))) is not None]
        pairs += [(one, other) for other in _bindings(bound, keys) if other not in direct and other != one]
    yield from pairs[:12]


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
            label = "_".join(str(ref.path[-1]) for _, ref in sources)
            yield Binding(f"{tool}_{label}" if label else tool, tool, tuple(sources))


def _learn_rule(
    usable: Sequence[tuple[Example, Surroundings]], bindings: Sequence[Binding], ids: tuple[str, ...]
) -> Rule | None:
    labels, answers = _cluster(usable)
    tree = learn([around for _, around in usable], labels, ids=ids)
    if tree is None:
        return None
    groups = [[each for each, label in zip(usable, labels, strict=True) if label == number] for number in range(len(answers))]
    cases = tuple(_case(answer, group, bindings) for answer, group in zip(answers, groups, strict=True))
    keys = {each.name: own for each in bindings if (own := _keys([around.documents[each.name] for _, around in usable]))}
    return Rule(tuple(bindings), tree, cases, ids, _kept([example for example, _ in usable], bindings), keys)


def _keys(documents: Sequence[Any]) -> list[str]:
    """The keys that all documents have; none where they differ."""
    first = sorted(documents[0]) if isinstance(documents[0], Mapping) else []
    return first if all(isinstance(each, Mapping) and sorted(each) == first for each in documents) else []


def _cluster(usable: Sequence[tuple[Example, Surroundings]]) -> tuple[list[int], list[Expression]]:
    """Examples whose answers one expression gives have one label; and those expressions."""
    members: list[list[int]] = []
    answers: list[Expression] = []
    for number, (example, around) in enumerate(usable):
        for label, own in enumerate(members):
            chosen = [*own[:30], number]
            joint = generalize([usable[n][0].answer for n in chosen], [usable[n][1] for n in chosen])
            if joint is not None and all(_gives(joint, *usable[n]) for n in own):
                own.append(number)
                answers[label] = joint
                break
        else:
            members.append([number])
            alone = generalize([example.answer], [around])
            assert alone is not None  # a constant gives any answer
            answers.append(alone)
    labels = {number: label for label, own in enumerate(members) for number in own}
    return [labels[number] for number in range(len(usable))], answers


def _gives(expression: Expression, example: Example, around: Surroundings) -> bool:
    try:
        return _same(evaluate(expression, around), example.answer)
    except LookupError:
        return False


def _case(answer: Expression, group: Sequence[tuple[Example, Surroundings]], bindings: Sequence[Binding]) -> Case:
    effects, unknown = [], []
    for binding in bindings:
        again, arounds = [], []
        for example, around in group:
            place = place_of(binding, around)
            if place in example.after:
                again.append(example.after[place])
                arounds.append(_with_answer(example, around))
        new = generalize(again, arounds) if again else _echo(group, binding)
        if new is None:
            unknown.append(binding.tool)
        elif new != Ref(binding.name):
            effects.append((binding.name, new))
    return Case(answer, tuple(effects), tuple(unknown))


def _with_answer(example: Example, around: Surroundings) -> Surroundings:
    return Surroundings(around.args, {**around.documents, "answer": example.answer})


def _echo(group: Sequence[tuple[Example, Surroundings]], binding: Binding) -> Expression:
    """A cheap guess at the outcome. The answer is the new document, holds its new fields, or nothing changes."""
    pairs = [(example.answer, around.documents[binding.name]) for example, around in group]
    if not all(isinstance(answer, Mapping) and isinstance(document, Mapping) for answer, document in pairs):
        return Ref(binding.name)
    answer, document = pairs[0]
    if all(set(new) >= set(old) for new, old in pairs):
        return Ref("answer")
    if not (shared := [key for key in document if key in answer]) or any(list(old) != list(document) for _, old in pairs):
        return Ref(binding.name)
    return Build(tuple(document), tuple(Ref("answer" if key in shared else binding.name, (key,)) for key in document))


def _kept(examples: Sequence[Example], bindings: Sequence[Binding]) -> tuple[str, ...]:
    """Reading tools whose other documents never changed. These name the call's ids, and were read three times again."""
    unchanged: Counter[str] = Counter()
    changed = set()
    for example in examples:
        around = example.around(bindings)
        bound = {place_of(binding, around) for binding in bindings} if around is not None else set()
        for place, document in example.after.items():
            if place not in bound:
                unchanged[place[0]] += 1
                changed |= set() if _same(document, example.known[place]) else {place[0]}
    return tuple(sorted(tool for tool, number in unchanged.items() if number >= 3 and tool not in changed))
