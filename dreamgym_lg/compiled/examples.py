"""Examples to learn rules from: writing calls with the documents read before and after them."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dreamgym_lg.compiled.expressions import DATE, MENTIONED, Ref, Scope, canonical, evaluate
from dreamgym_lg.compiled.runtime import MISSING, Refusal, at, key_of, values_in
from dreamgym_lg.splits import words

MIN_KEPT = 10
"""Unchanged documents that show that a writing tool never changes those of a reading tool."""


def kind_of(answer: object) -> str | None:
    """A refusal's words, those with a digit as 0; None for another answer."""
    if not isinstance(answer, Refusal):
        return None
    return " ".join("0" if any(map(str.isdigit, word)) else word for word in words(answer.text))


_WORD = re.compile(r"\w(?:[\w@./-]*\w)?")


class CallRecord(NamedTuple):
    """A recorded call: its arguments, and its answer, parsed where it is JSON, or `Refusal`."""

    tool: str
    arguments: Mapping[str, Any]
    answer: Any


class Binding(NamedTuple):
    """A document that a rule reads: its reading tool, and the source of each argument."""

    name: str
    tool: str
    sources: tuple[tuple[str, Ref], ...]


@dataclass
class Example:
    """A writing call with the documents read before and after it."""

    trace: int
    arguments: Mapping[str, Any]
    answer: Any
    known: Mapping[tuple[str, str], Any]
    """Documents before the call, by reading tool and arguments in JSON."""
    mentioned: Mapping[str, bool]
    """Label of an id argument -> True if a known document contains the id."""
    answered: frozenset[str]
    """Labels of the id arguments whose id an earlier answer contains, even one that has changed since."""
    after: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Documents that contain one of the call's ids, as they were read after it."""
    others_after: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Other documents, read after this writing call and before the next one."""

    def scope(self, bindings: Sequence[Binding]) -> Scope | None:
        """The call's arguments and bound documents; None if one of these is unknown."""
        scope = Scope(self.arguments, {MENTIONED: self.mentioned})
        for binding in bindings:
            if (place := place_of(binding, scope)) is None or place not in self.known:
                return None
            scope = Scope(self.arguments, {**scope.documents, binding.name: self.known[place]})
        return scope


def place_of(binding: Binding, scope: Scope) -> tuple[str, str] | None:
    """The reading call (tool, arguments) of a binding; None if a source is missing."""
    try:
        return binding.tool, key_of({name: evaluate(ref, scope) for name, ref in binding.sources})
    except LookupError:
        return None


Keys = Mapping[str, Mapping[str, Collection[str]]]
"""Reading tool -> argument -> values in JSON with which it was called."""


def recorded_keys(traces: Iterable[Iterable[CallRecord]], writes: Collection[str]) -> Keys:
    """The recorded argument values of each reading tool."""
    keys: dict[str, dict[str, set[str]]] = {}
    for call in (call for trace in traces for call in trace if call.tool not in writes):
        arguments = keys.setdefault(call.tool, {})
        for name, value in call.arguments.items():
            arguments.setdefault(name, set()).add(canonical(value))
    return keys


def find_ids(traces: Sequence[Sequence[CallRecord]], writes: Collection[str]) -> dict[str, tuple[Ref, ...]]:
    """Writing tool -> its arguments, and parts of arguments, that are ids of entities.

    An id is a value that reading tools are called with, or a text from an earlier answer, mostly different in each call.
    """
    read_keys = [values for arguments in recorded_keys(traces, writes).values() for values in arguments.values()]
    looked_up = {value for values in read_keys if len(values) > 1 for value in values}
    values: dict[tuple[str, Ref], list[tuple[str, bool]]] = {}
    for trace in traces:
        answered = set[str]()
        for call in trace:
            if call.tool not in writes:
                answered |= _contents(call.answer)
                continue
            for ref, value in Scope(call.arguments, {}).nodes.items():
                if not any(isinstance(step, int) for step in ref.path):
                    text = canonical(value)
                    is_copied = isinstance(value, str) and not DATE.fullmatch(value) and text in answered
                    values.setdefault((call.tool, ref), []).append((text, is_copied))
    ids: dict[str, list[Ref]] = {tool: [] for tool in sorted(writes)}
    for (tool, ref), pairs in values.items():
        copied = [text for text, is_copied in pairs if is_copied]
        mostly_different = len(copied) > 1 and len(pairs) < 2 * min(len(copied), len({*copied}))
        if mostly_different or sum(text in looked_up for text, _ in pairs) >= 2:
            ids[tool].append(ref)
    return {tool: tuple(sorted(refs)) for tool, refs in ids.items()}


def label_of(ref: Ref) -> str:
    """The name of an argument or of its part, such as `order.card`."""
    return ".".join(map(str, ref.path))


def id_arguments(arguments: Mapping[str, Any], ids: Iterable[Ref]) -> dict[str, str]:
    """Label -> value in JSON of each of these arguments that the call has."""
    values = ((label_of(ref), at(arguments, *ref.path)) for ref in ids)
    return {label: canonical(value) for label, value in values if value is not MISSING}


def examples_of(
    traces: Sequence[Sequence[CallRecord]], writes: Collection[str], ids: Mapping[str, Sequence[Ref]]
) -> dict[str, list[Example]]:
    """Writing tool -> an example for each of its calls."""
    examples: dict[str, list[Example]] = {}
    for number, trace in enumerate(traces):
        known, pending, answered = dict[tuple[str, str], Any](), dict[tuple[str, str], Example](), set[str]()
        since_read: dict[tuple[str, str], list[Example]] = {}
        for call in trace:
            place = (call.tool, key_of(call.arguments))
            if call.tool not in writes:
                if (example := pending.pop(place, None)) is not None:
                    example.after[place] = call.answer
                elif len(since := since_read.get(place, [])) == 1:
                    since[0].others_after[place] = call.answer
                since_read[place] = []
                known[place] = call.answer
                answered |= _contents(call.answer)
                continue
            values = {value for document in known.values() for value in _contents(document)}
            call_ids = id_arguments(call.arguments, ids[call.tool])
            mentioned = {label: value in values for label, value in call_ids.items()}
            before = frozenset(label for label, value in call_ids.items() if value in answered)
            example = Example(number, call.arguments, call.answer, dict(known), mentioned, before)
            examples.setdefault(call.tool, []).append(example)
            if isinstance(call.answer, Refusal):  # nothing changes
                continue
            for since in since_read.values():
                since.append(example)
            named = {*call_ids.values()}
            # such a document may have changed: unknown until it is read again, after the last call that names it
            pending = {place: each for place, each in pending.items() if not named & _values(place, each.known[place])}
            pending |= {place: example for place, document in known.items() if named & _values(place, document)}
            known = {place: document for place, document in known.items() if place not in pending}
    return examples


def _values(place: tuple[str, str], document: Any) -> set[str]:
    """The values in a document and in its reading call's arguments, as JSON."""
    return _contents(document).union(map(canonical, json.loads(place[1]).values()))


def _contents(document: Any) -> set[str]:
    """The values in a document as JSON; of a text also its words."""
    words = _WORD.findall(document) if isinstance(document, str) else ()
    return {canonical(value) for value in (*values_in(document), *words)}


def find_may_change(
    traces: Iterable[Sequence[CallRecord]], writes: Collection[str], ids: Mapping[str, Sequence[Ref]]
) -> dict[str, list[str]]:
    """Writing tool -> reading tools whose answers it changes without naming one of its ids.

    An example is the list of all open orders, after a call that opens one.
    """
    may_change: dict[str, set[str]] = {}
    for trace in traces:
        known = dict[tuple[str, str], tuple[Any, list[CallRecord]]]()
        for call in trace:
            place = (call.tool, key_of(call.arguments))
            if isinstance(call.answer, Refusal):
                continue
            if call.tool in writes:
                for _, writes_since in known.values():
                    writes_since.append(call)
                continue
            before, writes_since = known.get(place, (call.answer, []))
            named = {value for each in writes_since for value in id_arguments(each.arguments, ids[each.tool]).values()}
            if not equal_json(before, call.answer) and not named & _values(place, before):
                for each in writes_since:
                    may_change.setdefault(each.tool, set()).add(call.tool)
            known[place] = (call.answer, [])
    return {tool: sorted(readers) for tool, readers in sorted(may_change.items()) if readers}


def find_never_changed(
    examples: Sequence[Example], bindings: Sequence[Binding], may_change: Collection[str]
) -> tuple[str, ...]:
    """Reading tools whose documents contain the call's ids and never changed in `MIN_KEPT` later reads.

    Args: `bindings`, the documents of the tool's rule, which do not count.
    """
    unchanged: Counter[str] = Counter()
    changed = {*may_change}
    for example in examples:
        scope = example.scope(bindings)
        bound = {place_of(binding, scope) for binding in bindings} if scope is not None else set()
        for place, document in example.after.items():
            if place not in bound:
                unchanged[place[0]] += 1
                changed |= set() if equal_json(document, example.known[place]) else {place[0]}
    return tuple(sorted(tool for tool, number in unchanged.items() if number >= MIN_KEPT and tool not in changed))


def equal_json(one: Any, other: Any) -> bool:
    """True for documents that are equal as JSON."""
    return canonical(one) == canonical(other)
