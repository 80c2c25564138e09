"""The recorded calls that a world is compiled from."""

import json
import keyword
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

from langchain_core.tools import BaseTool

from dreamgym_lg.actions import parse_call, tool_schemas
from dreamgym_lg.compiled.examples import MIN_KEPT, CallRecord, find_ids, find_may_change, kind_of
from dreamgym_lg.compiled.expressions import canonical
from dreamgym_lg.compiled.runtime import (
    IMPORTED,
    Refusal,
    as_recorded,
    is_default,
    key_of,
    naming,
    only_argument,
    parsed,
    possible_ids,
    values_in,
)
from dreamgym_lg.dream.parts import Episode
from dreamgym_lg.dream.schemas import Schemas
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.splits import common_entities, tied_groups
from dreamgym_lg.tasks import argument_schemas, find_tool_uses, schemas
from dreamgym_lg.types import Trajectory

FOLDS = 5
_OWN_NAMES = ("READS", "DEFAULTS", "JSON", "MAY_CHANGE", "NEVER_CHANGES", "Any", "str", "sorted")
RESERVED = frozenset([*IMPORTED.split(", "), *_OWN_NAMES])
"""Names that `world.py` itself uses, so that no tool may have them."""
STYLES: Sequence[Mapping[str, Any]] = (
    {},
    {"ensure_ascii": False},
    {"separators": (",", ":")},
    {"separators": (",", ":"), "ensure_ascii": False},
    {"indent": 2},
    {"indent": 2, "ensure_ascii": False},
)
"""Common JSON formats of tools, as arguments of `json.dumps`."""

Documents = dict[tuple[str, str], str]
"""(reading tool, arguments in JSON) -> answer in JSON."""
Call = tuple[str, Mapping[str, Any], str | Refusal]
"""Tool, arguments, answer."""
Kind = tuple[str, str | None]
"""Tool, and kind of its answer (`kind_of`)."""


class Trace(NamedTuple):
    """The tool calls of a recorded episode, in order."""

    task: str
    calls: Sequence[Call]


def _calls(trajectory: Trajectory, schemas: Schemas) -> Iterator[Call]:
    """The calls of an episode, without those that a schema refuses: no tool saw them."""
    for step in trajectory.steps:
        if (call := parse_call(step.action)) is None:
            continue
        if step.valid:
            yield call.name, call.arguments, step.next_observation
        elif schemas.respond(Episode(task=trajectory.task, action=step.action)) is None:
            yield call.name, call.arguments, Refusal(step.next_observation)


@dataclass(frozen=True)
class Recordings:
    """The traces to compile, and their tools."""

    traces: Sequence[Trace]
    writes: frozenset[str]
    schemas: Mapping[str, Mapping[str, Any]]
    """Tool name -> its schema in OpenAI's form, if known."""

    @classmethod
    def of(
        cls, replay_buffer: ReplayBuffer, *, tools: Sequence[BaseTool], writes: Collection[str] | None, environment: str | None
    ) -> "Recordings":
        """The real episodes of a buffer's train tasks.

        Raises `ConfigurationError` for several environments, and if no called tool is known to only read.
        """
        recorded = replay_buffer.real_trajectories(split="train")
        chosen = [each for each in recorded if environment in (None, each.task.environment)]
        with_calls = (each for each in chosen if any(parse_call(step.action) for step in each.steps))
        worlds = sorted({each.task.environment for each in with_calls})
        if len(worlds) > 1:
            raise ConfigurationError(
                f"the traces are of {len(worlds)} environments, each with a database of its own: compile one alone, e.g. "
                f"environment={worlds[0]!r}, or import the traces of each into a replay buffer of their own"
            )
        schemas_of_tools = Schemas(tools)
        traces = [Trace(each.task.id, list(_calls(each, schemas_of_tools))) for each in chosen]
        # a tool that only ever failed may be one that the policy made up
        called = {tool for trace in traces for tool, _, answer in trace.calls if isinstance(answer, str)}
        # Tool names become function names in `world.py`: a trace must not inject code.
        for tool in sorted(called):
            if not tool.isidentifier() or keyword.iskeyword(tool) or tool in RESERVED or tool.startswith("__"):
                raise ConfigurationError(
                    f"the tool {tool[:80]!r} cannot be compiled: its name cannot be that of a Python function"
                )
        offered = {function["name"]: function for each in chosen for function in schemas(each.task)}
        uses = find_tool_uses(tools, {*called, *offered}, writes=writes)
        if not any(not uses[tool].writes for tool in called):
            advice = ": name those that change something in writes= (--writes)" if writes is None else ""
            raise ConfigurationError(
                f"{len(called)} tools are called in {len(traces)} recorded episodes, and none of them is known to read only. "
                f"A world is compiled from what reading tools return{advice}"
            )
        functions = {name: function for name, function in offered.items() if "parameters" in function}
        functions |= {schema["function"]["name"]: schema["function"] for schema in tool_schemas(tools)}
        written = frozenset(tool for tool, use in uses.items() if use.writes)
        recordings = cls(traces, written, functions)._as_received()._in_one_form()
        return recordings._filtered(lambda tool, answer: isinstance(answer, str) or tool in called & written)

    @property
    def defaults(self) -> dict[str, dict[str, Any]]:
        """Reading tool -> default values of its arguments. Without None, which `key_of` leaves out."""
        values = {
            tool: {name: field["default"] for name, field in argument_schemas(function).items() if _has_default(field)}
            for tool, function in sorted(self.schemas.items())
            if tool not in self.writes
        }
        return {tool: fields for tool, fields in values.items() if fields}

    def _as_received(self) -> "Recordings":
        """The recordings with arguments of the tools' types (`received`)."""

        def convert(tool: str, arguments: Mapping[str, Any], answer: str | Refusal) -> Call:
            return tool, received(self.schemas.get(tool), arguments), answer

        return replace(self, traces=[Trace(task, [convert(*call) for call in calls]) for task, calls in self.traces])

    def _in_one_form(self) -> "Recordings":
        """The recordings with each look-up in one form (`as_recorded`)."""
        defaults, varied = self.defaults, dict[str, set[str]]()
        for tool, arguments, _ in self.calls:
            own = defaults.get(tool, {})
            varied.setdefault(tool, set()).update(
                n for n, value in arguments.items() if n in own and not is_default(own, n, value)
            )

        def convert(tool: str, arguments: Mapping[str, Any], answer: str | Refusal) -> Call:
            return tool, as_recorded(arguments, defaults.get(tool, {}), varied[tool]), answer

        return replace(self, traces=[Trace(task, [convert(*call) for call in calls]) for task, calls in self.traces])

    def without_refusals(self, kinds: Collection[Kind] | None = None) -> "Recordings":
        """The recordings without refusals of these kinds; by default without any."""
        return self._filtered(
            lambda tool, answer: isinstance(answer, str) or (kinds is not None and (tool, kind_of(answer)) not in kinds)
        )

    def _filtered(self, keeps: Callable[[str, str | Refusal], bool]) -> "Recordings":
        """The recordings with those calls alone whose tool and answer are kept."""
        return replace(self, traces=[Trace(task, [c for c in calls if keeps(c[0], c[2])]) for task, calls in self.traces])

    @property
    def calls(self) -> Iterator[Call]:
        """The calls of all traces."""
        return (call for trace in self.traces for call in trace.calls)

    @property
    def called_writes(self) -> list[str]:
        """Names of the writing tools that were called, sorted."""
        return sorted({tool for tool, _, _ in self.calls if tool in self.writes})

    @cached_property
    def tools(self) -> list[Mapping[str, Any]]:
        """The schema of each recorded tool; if unknown, one inferred from the recorded arguments."""
        recorded: dict[str, list[Mapping[str, Any]]] = {}
        for tool, arguments, _ in self.calls:
            recorded.setdefault(tool, []).append(arguments)
        return [self.schemas.get(tool) or _schema(tool, arguments) for tool, arguments in sorted(recorded.items())]

    @cached_property
    def styles(self) -> Mapping[str, Mapping[str, Any]]:
        """Tool -> the JSON format of most of its answers, one of `STYLES`."""
        answers: dict[str, list[str]] = {}
        for tool, _, answer in self.calls:
            answers.setdefault(tool, []).extend([answer] if isinstance(answer, str) else [])
        return {
            tool: STYLES[max(range(len(STYLES)), key=list(chain(*map(_styles_of, texts))).count)]
            for tool, texts in sorted(answers.items())
        }

    @cached_property
    def reads(self) -> Mapping[str, Sequence[str]]:
        """Reading tool -> names of its recorded arguments."""
        reads: dict[str, dict[str, None]] = {}
        for tool, arguments, _ in self.calls:
            if tool not in self.writes:
                reads.setdefault(tool, {}).update(dict.fromkeys(arguments))
        return {tool: tuple(names) for tool, names in sorted(reads.items())}

    @cached_property
    def _looked_up(self) -> frozenset[str]:
        """The values, in JSON, that were a look-up's only argument."""
        return frozenset(only_argument(key_of(arguments)) for tool, arguments, _ in self.calls if tool in self.reads)

    @cached_property
    def common_values(self) -> frozenset[Hashable]:
        """Values in JSON that too many documents contain to be an entity's (`common_entities`)."""
        documents = {(tool, key_of(arguments)): answer for tool, arguments, answer in self.calls if tool in self.reads}
        named = [
            {json.dumps(value) for value in values_in([json.loads(key), parsed(answer, self.styles[tool])])}
            for (tool, key), answer in documents.items()
        ]
        return common_entities(named)

    def first_documents(self, trace: Trace, *, is_name: Callable[[str], object] = bool) -> Documents:
        """The documents as they were before the trace's first writing call.

        Left out is what a writing call may have changed before it was read: documents that contain one of the call's values,
        documents that these refer to, and those of tools in `may_change`.
        """
        documents, read, written, may_change = Documents(), Documents(), set[str](), set[str]()
        is_common = self.common_values.__contains__
        for tool, arguments, answer in trace.calls:
            if isinstance(answer, Refusal):
                continue
            if tool in self.writes:
                values = [each for each in values_in(dict(arguments)) if not isinstance(each, str) or is_name(each)]
                written |= possible_ids(values, self._looked_up)
                may_change |= {*self.may_change.get(tool, ())}
                continue
            place, text = (tool, key_of(arguments)), json.dumps(parsed(answer, self.styles[tool]))
            read[place] = text
            if tool not in may_change and place not in naming(read, written, is_common, linked=True):
                documents.setdefault(place, text)
        return documents

    @cached_property
    def records(self) -> list[list[CallRecord]]:
        """The calls of each trace, with JSON answers parsed."""
        return [
            [CallRecord(tool, arguments, parsed(answer, self.styles[tool])) for tool, arguments, answer in trace.calls]
            for trace in self.traces
        ]

    @cached_property
    def may_change(self) -> Mapping[str, Sequence[str]]:
        """Writing tool -> reading tools that it may change without sharing an id (`find_may_change`)."""
        return find_may_change(self.records, self.writes, find_ids(self.records, self.writes))

    @cached_property
    def never_changes(self) -> Mapping[str, Sequence[str]]:
        """Writing tool -> reading tools that it never changed in `MIN_KEPT` later reads."""
        is_common = self.common_values.__contains__
        unchanged: dict[tuple[str, str], Counter[bool]] = {}
        for trace in self.records:
            read, writes_since = Documents(), dict[tuple[str, str], list[str]]()
            for call in trace:
                if isinstance(call.answer, Refusal):
                    continue
                if call.tool in self.writes:
                    names = possible_ids(values_in(dict(call.arguments)), self._looked_up)
                    for place in naming(read, names, is_common, linked=True):
                        writes_since.setdefault(place, []).append(call.tool)
                    continue
                place, text = (call.tool, key_of(call.arguments)), json.dumps(call.answer)
                for tool in writes_since.pop(place, ()):
                    unchanged.setdefault((tool, call.tool), Counter())[read[place] == text] += 1
                read[place] = text
        kept = [pair for pair, same in unchanged.items() if same[True] >= MIN_KEPT and not same[False]]
        writers = sorted({writer for writer, _ in kept})
        return {writer: sorted(reader for tool, reader in kept if tool == writer) for writer in writers}

    def folds(self, count: int = FOLDS) -> Iterator[tuple["Recordings", Sequence[Trace]]]:
        """(recordings to compile, left-out traces) of each fold. Every trace is left out once.

        Both sides share no looked-up entity, but for entities in more than a tenth of the traces. A group of traces that
        share entities and is larger than a fold is split; traces that share an entity with a part of it are on neither side.
        """
        looked_up = [frozenset(_entity(call[1]) for call in trace.calls if call[0] in self.reads) for trace in self.traces]
        common = common_entities(looked_up)
        keys = [(entities - common) | {f"task {trace.task}"} for entities, trace in zip(looked_up, self.traces, strict=True)]
        counts = Counter(key for trace_keys in keys for key in trace_keys)
        size = -(-len(keys) // count)
        parts: list[set[int]] = [set() for _ in range(count)]
        for group in sorted(tied_groups(keys), key=len, reverse=True):
            # traces of the same frequent entity go to the same part, so that few traces are on neither side
            group.sort(key=lambda number: sorted(((counts[key], key) for key in keys[number]), reverse=True))
            for start in range(0, len(group), size):
                min(parts, key=len).update(group[start : start + size])
        for part in filter(None, parts):
            left_out = frozenset[str]().union(*(keys[number] for number in part))
            rest = [trace for trace, trace_keys in zip(self.traces, keys, strict=True) if not trace_keys & left_out]
            yield replace(self, traces=rest), [self.traces[number] for number in sorted(part)]


@lru_cache(maxsize=10_000)  # each fold asks for the same answers
def _styles_of(text: str) -> tuple[int, ...]:
    """Indices of the `STYLES` that write this JSON exactly so."""
    return tuple(number for number, style in enumerate(STYLES) if not isinstance(parsed(text, style), str))


def _has_default(field: Any) -> bool:
    if not isinstance(field, Mapping) or field.get("default") is None:
        return False
    try:
        return bool(json.dumps(field["default"], allow_nan=False))
    except (TypeError, ValueError):  # infinity, say, which `world.py` could not write
        return False


def _entity(arguments: Mapping[str, Any]) -> str:
    """The entity of a reading call: the value of its only argument, or all arguments."""
    return canonical(next(iter(arguments.values())) if len(arguments) == 1 else dict(arguments))


_TYPES: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def received(function: Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments by the types of the tool's schema, as LangChain hands them to it.

    Args: `function`, the schema in OpenAI's form; None for an unknown one.
    """
    return {**_as_typed(arguments, (function or {}).get("parameters"))}


def _as_typed(value: Any, schema: Any) -> Any:
    """A value by its JSON schema: 8 is 8.0 where the tool takes a number. Any other value is unchanged."""
    if not isinstance(schema, Mapping) or value is None or isinstance(value, bool):
        return value
    forms = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(forms, list):
        rest = [each for each in forms if each != {"type": "null"}]
        return _as_typed(value, rest[0]) if len(rest) == 1 else value
    with suppress(ValueError, OverflowError):
        match schema.get("type"), value:
            case "number", int() | str():
                return number if math.isfinite(number := float(value)) else value
            case "integer", str():
                return int(value)
            case "integer", float() if value.is_integer():
                return int(value)
            case "array", list():
                items = [_as_typed(each, schema.get("items")) for each in value]
                return sorted(items, key=canonical) if schema.get("uniqueItems") else items
            case "object", Mapping():
                fields = argument_schemas({"parameters": schema})
                return {name: _as_typed(each, fields.get(name)) for name, each in value.items()}
    return value


def _schema(tool: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A schema that accepts all recorded arguments of a tool."""
    names = dict.fromkeys(name for arguments in calls for name in arguments)
    types = {name: {_TYPES.get(type(each[name])) for each in calls if name in each} for name in names}
    return {
        "name": tool,
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": next(iter(kinds))} if len(kinds) == 1 and None not in kinds else {}
                for name, kinds in types.items()
            },
            "required": [name for name in names if all(name in arguments for arguments in calls)],
        },
    }
