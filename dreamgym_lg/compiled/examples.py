"""Writing calls of traces, with the documents known before and read again behind them."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dreamgym_lg.compiled.expressions import DATE, MENTIONED, Ref, Surroundings, canonical, evaluate
from dreamgym_lg.compiled.runtime import MISSING, at, key_of, values_in

MIN_KEPT = 10
"""Documents of a reading tool that were the same behind a writing call, if those that no rule is about are to be kept."""


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
    answered: frozenset[str]
    """Those of these arguments that an earlier answer of the trace names, known or changed since."""
    after: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Documents that name what the call is about, as they were read again behind it."""
    others_after: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Others, read again behind this writing call and no further one."""

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


Keys = Mapping[str, Mapping[str, Collection[str]]]
"""By reading tool and argument, the values with which it was called, in JSON."""


def recorded_keys(traces: Iterable[Iterable[CallRecord]], writes: Collection[str]) -> Keys:
    """By reading tool and argument, the values of the recorded calls."""
    keys: dict[str, dict[str, set[str]]] = {}
    for call in (call for trace in traces for call in trace if call.tool not in writes):
        own = keys.setdefault(call.tool, {})
        for name, value in call.arguments.items():
            own.setdefault(name, set()).add(canonical(value))
    return keys


def find_ids(traces: Sequence[Sequence[CallRecord]], writes: Collection[str]) -> dict[str, tuple[Ref, ...]]:
    """By writing tool, the arguments that name entities, of objects also their parts.

    Reading tools are called with their values, or most values are texts that an answer gave before, and few calls share one.
    """
    own = recorded_keys(traces, writes).values()
    known = {value for values in (each for keys in own for each in keys.values()) if len(values) > 1 for value in values}
    values: dict[tuple[str, Ref], list[tuple[str, bool]]] = {}
    for trace in traces:
        answered = set[str]()
        for call in trace:
            if call.tool not in writes:
                answered |= set(map(canonical, values_in(call.answer)))
                continue
            for ref, value in Surroundings(call.arguments, {}).nodes.items():
                if not any(isinstance(step, int) for step in ref.path):
                    text = canonical(value)
                    is_given = isinstance(value, str) and not DATE.fullmatch(value) and text in answered
                    values.setdefault((call.tool, ref), []).append((text, is_given))
    ids: dict[str, list[Ref]] = {tool: [] for tool in sorted(writes)}
    for (tool, ref), own_values in values.items():
        given = [text for text, is_given in own_values if is_given]
        differ = len(given) > 1 and len(own_values) < 2 * min(len(given), len({*given}))
        if differ or sum(text in known for text, _ in own_values) >= 2:
            ids[tool].append(ref)
    return {tool: tuple(sorted(refs)) for tool, refs in ids.items()}


def label_of(ref: Ref) -> str:
    """The name of an argument or of its part, such as `order.card`."""
    return ".".join(map(str, ref.path))


def ids_in(arguments: Mapping[str, Any], ids: Iterable[Ref]) -> dict[str, str]:
    """The values of these arguments that are there, in JSON, by their labels."""
    values = ((label_of(ref), at(arguments, *ref.path)) for ref in ids)
    return {label: canonical(value) for label, value in values if value is not MISSING}


def examples_of(
    traces: Sequence[Sequence[CallRecord]], writes: Collection[str], ids: Mapping[str, Sequence[Ref]]
) -> dict[str, list[Example]]:
    """By writing tool, its calls. A document is read again behind the last call that named it."""
    examples: dict[str, list[Example]] = {}
    for number, trace in enumerate(traces):
        known, pending, answered = dict[tuple[str, str], Any](), dict[tuple[str, str], Example](), set[str]()
        behind: dict[tuple[str, str], list[Example]] = {}
        for call in trace:
            place = (call.tool, key_of(call.arguments))
            if call.tool not in writes:
                if (example := pending.pop(place, None)) is not None:
                    example.after[place] = call.answer
                elif len(since := behind.get(place, [])) == 1:
                    since[0].others_after[place] = call.answer
                behind[place] = []
                known[place] = call.answer
                answered |= _values(place, call.answer, with_key=False)
                continue
            values = {value for place, document in known.items() for value in _values(place, document, with_key=False)}
            own = ids_in(call.arguments, ids[call.tool])
            mentioned = {label: value in values for label, value in own.items()}
            before = frozenset(label for label, value in own.items() if value in answered)
            example = Example(number, call.arguments, call.answer, dict(known), mentioned, before)
            examples.setdefault(call.tool, []).append(example)
            for since in behind.values():
                since.append(example)
            named = {*own.values()}
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


def spreads_of(
    traces: Iterable[Sequence[CallRecord]], writes: Collection[str], ids: Mapping[str, Sequence[Ref]]
) -> dict[str, list[str]]:
    """By writing tool, reading tools whose answers it changes without naming what they are about.

    Such as a list of all open orders, behind the call that closes one.
    """
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
            named = {value for each in behind for value in ids_in(each.arguments, ids[each.tool]).values()}
            if not same(before, call.answer) and not named & _values(place, before):
                for each in behind:
                    spreads.setdefault(each.tool, set()).add(call.tool)
            known[place] = (call.answer, [])
    return {tool: sorted(readers) for tool, readers in sorted(spreads.items()) if readers}


def kept_tools(examples: Sequence[Example], bindings: Sequence[Binding], spreads: Collection[str]) -> tuple[str, ...]:
    """Reading tools whose documents a call never changed, although they name its ids.

    They were read again behind it at least `MIN_KEPT` times. Args: `bindings`, documents that the call's rule is about.
    """
    unchanged: Counter[str] = Counter()
    changed = {*spreads}
    for example in examples:
        around = example.around(bindings)
        bound = {place_of(binding, around) for binding in bindings} if around is not None else set()
        for place, document in example.after.items():
            if place not in bound:
                unchanged[place[0]] += 1
                changed |= set() if same(document, example.known[place]) else {place[0]}
    return tuple(sorted(tool for tool, number in unchanged.items() if number >= MIN_KEPT and tool not in changed))


def same(one: Any, other: Any) -> bool:
    """True for documents that are the same in JSON."""
    return canonical(one) == canonical(other)
