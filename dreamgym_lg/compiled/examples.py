"""Writing calls of traces, with the documents known before and read again behind them."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dreamgym_lg.compiled.expressions import Ref, Surroundings, canonical, evaluate
from dreamgym_lg.compiled.runtime import key_of, values_in
from dreamgym_lg.compiled.trees import MENTIONED

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


def find_ids(traces: Sequence[Sequence[CallRecord]], writes: Collection[str]) -> dict[str, tuple[str, ...]]:
    """By writing tool, the arguments that name entities."""
    keys = recorded_keys(traces, writes)
    return {tool: _id_arguments(tool, traces, keys) for tool in sorted(writes)}


def _id_arguments(tool: str, traces: Iterable[Iterable[CallRecord]], keys: Keys) -> tuple[str, ...]:
    """The arguments of a writing tool with which reading tools were called, too."""
    known = {value for own in keys.values() for values in own.values() for value in values if len(values) > 1}
    calls = [call for trace in traces for call in trace if call.tool == tool]
    counts = Counter(name for call in calls for name, value in call.arguments.items() if canonical(value) in known)
    return tuple(sorted(name for name, number in counts.items() if number >= 2))


def examples_of(
    traces: Sequence[Sequence[CallRecord]], writes: Collection[str], ids: Mapping[str, Sequence[str]]
) -> dict[str, list[Example]]:
    """By writing tool, its calls. A document is read again behind the last call that named it."""
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


def spreads_of(
    traces: Iterable[Sequence[CallRecord]], writes: Collection[str], ids: Mapping[str, Sequence[str]]
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
            if not same(before, call.answer):
                for each in behind:
                    named = {canonical(each.arguments[name]) for name in ids[each.tool] if name in each.arguments}
                    spreads.setdefault(each.tool, set()).update(() if named & _values(place, before) else (call.tool,))
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
