"""Runs a compiled world: the documents of one episode, and the module that changes them.

It needs only the standard library: this file is the program of the walled process, and a copy of it is in each world's folder.
"""

import json
import re
import resource
import sqlite3
import sys
from calendar import monthrange
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, BinaryIO, NamedTuple

IMPORTED = (
    "MISSING, Refusal, State, Unknown, agreed, at, at_most, below, check_apart, check_seen, fixed, later, named, put, rounded, "
    "same, with_keys"
)
"""Names that `world.py` imports from this file."""
MEMORY = 2**30
"""Bytes of address space that a world may use."""


class Unknown(LookupError):
    """The world does not know the answer; the dream then asks its next responder."""


class Refusal(NamedTuple):
    """The answer of a tool that ends in an error. In JSON a list of its text."""

    text: str


class State:
    """The documents of one episode: the answer of each reading call, by tool and arguments.

    Changes go to a layer of the episode's own above the shared `layers`, so that a new episode copies nothing.
    """

    def __init__(self, *layers: Mapping[tuple[str, str], Any]) -> None:
        self._changed, self._learned = dict[tuple[str, str], Any](), dict[tuple[str, str], Any]()
        self._layers = (self._changed, self._learned, *layers)

    @property
    def documents(self) -> dict[tuple[str, str], Any]:
        """All current documents, in JSON; None for an unknown one."""
        return {place: text for layer in reversed(self._layers) for place, text in layer.items()}

    @property
    def changes(self) -> dict[tuple[str, str], Any]:
        """The documents that differ from those before any writing call."""
        before = State(*self._layers[1:]).documents
        return {place: text for place, text in self._changed.items() if before.get(place) != text}

    def read(self, tool: str, /, **arguments: Any) -> Any:
        """The document that this reading call returns. Raises `Unknown` if there is none."""
        place = (tool, key_of(arguments))
        stored = next((layer[place] for layer in self._layers if place in layer), None)
        if stored is None:
            raise Unknown(f"no recorded answer of {tool} {place[1]}")
        return json.loads(stored)

    def write(self, tool: str, document: Any, /, **arguments: Any) -> None:
        """Set the document that this reading call returns; it is copied."""
        self._changed[tool, key_of(arguments)] = json.dumps(document)

    def learn(self, tool: str, document: Any, /, **arguments: Any) -> None:
        """Add a document that a recorded call returned. Unless it was changed or forgotten, it counts as unchanged."""
        place = (tool, key_of(arguments))
        (self._changed if place in self._changed else self._learned)[place] = json.dumps(document)

    def copy(self) -> "State":
        """An independent copy."""
        other = State(*self._layers[2:])
        other.take(self)
        return other

    def take(self, other: "State") -> None:
        """Take over the changes of another state with the same first documents."""
        self._changed.update(other._changed)
        self._learned.update(other._learned)

    def mentions(self, value: Any) -> bool:
        """True if a known document contains this value."""
        name = json.dumps(value)
        return any(text is not None and contains(text, name) for text in self.documents.values())

    def check_mentions(self, value: Any, *, changed: bool = False) -> None:
        """Raise `Unknown` unless a known document contains this value, or (`changed`) contained it earlier."""
        texts = (text for layer in self._layers[1:] for text in layer.values())
        if not self.mentions(value) and not (changed and any(contains(text, json.dumps(value)) for text in texts)):
            raise Unknown(f"no known document names {value!r}")

    def forget_answer(self, tool: str, /, **arguments: Any) -> None:
        """Make the document of this reading call unknown."""
        self._changed[tool, key_of(arguments)] = None

    def forget_answers(self, *tools: str) -> None:
        """Make all documents of these reading tools unknown."""
        for place in self.documents:
            if place[0] in tools:
                self._changed[place] = None

    def forget(self, *values: Any, keep: Iterable[str] = (), linked: bool = False) -> None:
        """Make documents unknown that one of these values names (`possible_ids`, `naming`).

        Common values do not count (`common_in`). Args: `keep`, tools whose documents stay; `linked`, True to forget also the
        documents that those refer to, such as the customer of an order.
        """
        stored = self._known
        is_common, has_number = common_in(stored), any(type(value) is int for value in values)
        looked_up = {only_argument(key) for _, key in stored} if has_number else ()
        for place in naming(stored, possible_ids(values, looked_up), is_common, linked=linked):
            if place[0] not in keep:
                self._changed[place] = None

    def about(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The known documents that a call's arguments refer to, and those that these refer to."""
        call = ("", "{}")  # treated as one more document
        stored = {**self._known, call: json.dumps(dict(arguments))}
        direct = linked_to([call], stored, is_common := common_in(stored))
        return [*direct, *linked_to(direct, stored, is_common)]

    @property
    def _known(self) -> dict[tuple[str, str], str]:
        return {place: text for place, text in self.documents.items() if text is not None}


Steps = Iterable[tuple[str, Mapping[str, Any], str | Sequence[str] | None]]
"""(tool, arguments, answer) of an episode's calls. An error is a list of its text; None is computed by the module."""


def key_of(arguments: Mapping[str, Any]) -> str:
    """The arguments of a reading call as a key: sorted JSON without None."""
    return json.dumps({name: value for name, value in arguments.items() if value is not None}, sort_keys=True)


def as_recorded(arguments: Mapping[str, Any], defaults: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A look-up's arguments in one form, whether or not it writes out defaults.

    Args: `names`, arguments of which other values were recorded: their defaults are filled in, and all others left out.
    """
    filled = {name: value for name, value in defaults.items() if name in names} | dict(arguments)
    return {name: value for name, value in filled.items() if name in names or not is_default(defaults, name, value)}


def is_default(defaults: Mapping[str, Any], name: str, value: Any) -> bool:
    """True for a value that equals the argument's default as JSON."""
    return name in defaults and json.dumps(value, sort_keys=True) == json.dumps(defaults[name], sort_keys=True)


def values_in(document: Any) -> list[Any]:
    """All scalars of a document, at any depth."""
    return [value for _, value in walk(document)]


def walk(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, value) of each scalar of a document, at any depth."""
    if isinstance(document, (dict, list)):
        for step, part in document.items() if isinstance(document, dict) else enumerate(document):
            yield from walk(part, (*path, step))
    else:
        yield path, document


def contains(document: str, name: str) -> bool:
    """True if a document contains this value (both in JSON). 50 does not contain 5.

    A document that is a text contains its words.
    """
    if document[0] == name[0] == '"' and len(name) > 2 and name[1:-1] in document:
        word = re.escape(json.loads(name))  # K1 is no part of K1-2, nor anna of anna@x.com
        return re.search(rf"(?<!\w)(?<!\w[@./-]){word}(?!\w|[@./-]\w)", json.loads(document)) is not None
    if name not in document or name[0] in '"[{':
        return name in document
    return re.search(rf"(?<![^\[:, ]){re.escape(name)}(?![^,\]}}])", document) is not None


def only_argument(key: str) -> str:
    """The only argument of a reading call, in JSON; "" for several or none. Args: `key`, of `key_of`."""
    values = list(json.loads(key).values())
    return json.dumps(values[0]) if len(values) == 1 else ""


def possible_ids(values: Sequence[Any], looked_up: Collection[str]) -> set[str]:
    """Possible ids among the values, in JSON: texts, and whole numbers among `looked_up`.

    Args: `looked_up`, values that are the only argument of a reading call. Others, such as a page, are counts.
    """
    texts = {json.dumps(value) for value in values if isinstance(value, str) and value}
    return texts | {json.dumps(value) for value in values if type(value) is int}.intersection(looked_up)


def naming(
    documents: Mapping[tuple[str, str], str], names: Iterable[str], is_common: Callable[[str], bool], *, linked: bool
) -> list[tuple[str, str]]:
    """The documents that have one of these values, in JSON, in arguments or content.

    Common values do not count, but for numbers that are the only argument: 1 names the cart that is looked up by 1.

    Args: `linked`, True to add the documents that those refer to (`linked_to`).
    """
    rare, numbers = {name for name in names if not is_common(name)}, {name for name in names if name[0] != '"'}
    places = [
        place
        for place, text in documents.items()
        if any(contains(place[1], name) or contains(text, name) for name in rare)
        or (numbers and only_argument(place[1]) in numbers)
    ]
    return [*places, *(linked_to(places, documents, is_common) if linked else ())]


def common_in(documents: Mapping[tuple[str, str], str]) -> Callable[[str], bool]:
    """A test for values (in JSON) that more than max(5, 10 %) documents contain."""
    limit = max(5, len(documents) / 10)
    texts = [(key, text) for (_, key), text in documents.items()]
    return lambda name: sum(contains(key, name) or contains(text, name) for key, text in texts) > limit


def linked_to(
    places: Sequence[tuple[str, str]], documents: Mapping[tuple[str, str], str], is_common: Callable[[str], bool]
) -> list[tuple[str, str]]:
    """Other documents whose arguments all occur in one of these documents, none of them common."""
    linked = list[tuple[str, str]]()
    contents = [{json.dumps(value) for value in values_in(json.loads(documents[place]))} for place in places]
    for place in documents if contents else ():
        keys = {json.dumps(value) for value in json.loads(place[1]).values()}
        if keys and place not in places and any(keys <= values for values in contents) and not any(map(is_common, keys)):
            linked.append(place)
    return linked


class Module:
    """A world's module and first documents. It keeps no state between requests.

    Each request replays the episode's calls on a new state, so that no episode influences another.

    Args: `folder`, with `world.py` and `world.db`.
    """

    def __init__(self, folder: Path) -> None:
        self.source = load_module((folder / "world.py").read_bytes(), folder / "world.py")
        self.admitted: Mapping[str, bool] = json.loads((folder / "rules.json").read_text())["admitted"]
        self.documents, self.by_task = _documents(folder / "world.db")

    def state(self, task: str, *, own: bool = True) -> State:
        """A new state; the task's own first documents come before those of others. Args: `own`, False to leave these out."""
        if own:
            return State(self.by_task.get(task, {}), self.documents)
        return State(*(documents for other, documents in reversed(self.by_task.items()) if other != task))  # the newest first

    def respond(self, task: str, steps: Steps, call: tuple[str, Mapping[str, Any]], own: bool = True) -> str | Refusal | None:
        """The answer to a call after these steps; None if unknown or not admitted. Args: `own`, as for `state`."""
        state = self.state(task, own=own)
        self._take(steps, state)
        return answer_of(self.source, state, *call) if self.admitted.get(call[0]) else None

    def replay(self, steps: Steps) -> list[str | Refusal | None]:
        """The module's answer to each recorded call, given after the recorded ones before it."""
        state = State(self.documents)
        return [follow(self.source, state, tool, arguments, answer or "") for tool, arguments, answer in steps]

    def changes(self, task: str, steps: Steps, own: bool = True) -> dict[str, str | None]:
        """`"tool arguments"` -> document that the steps changed; None for an unknown one.

        If the module cannot compute a step, there is an unknown one, "". Args: `own`, as for `state`.
        """
        is_known = self._take(steps, state := self.state(task, own=own))
        unknown = {} if is_known else {"": None}
        return unknown | {f"{tool} {key}": text for (tool, key), text in state.changes.items()}

    def untracked_writes(self, task: str, steps: Steps, own: bool = True) -> list[str]:
        """Writing calls, as `"tool arguments"`, whose effect no document shows. Sorted; `own` is as for `state`.

        A tool that changes documents in other cases did nothing where it changed none: that call is left out.
        """
        untracked, state = list[str](), self.state(task, own=own)
        for tool, arguments, answer in steps:
            if answer is None:
                answer = computed = answer_of(self.source, state, tool, arguments)
            else:
                computed = follow(self.source, state, tool, arguments, answer)
            shown = tool in self.source.READS or (computed == answer and computed is not None and self._changes(tool))
            if not shown and (answer is None or isinstance(answer, str)):
                untracked.append(f"{tool} {key_of(arguments)}")
        return sorted(untracked)

    def _changes(self, tool: str) -> bool:
        """True if the tool's function, or one that it calls, writes documents."""
        function = getattr(self.source, tool)
        called = (getattr(self.source, name, None) for name in function.__code__.co_names)
        return any("write" in each.__code__.co_names for each in (function, *called) if isinstance(each, FunctionType))

    def lookups(self, task: str, steps: Steps, call: tuple[str, Mapping[str, Any]]) -> list[list[Any]]:
        """[tool, arguments, answer] of look-ups of the entities in a call, before that call."""
        state, looks = self.state(task), list[list[Any]]()
        self._take(steps, state)
        for tool, key in state.about(call[1]):
            answer = answer_of(self.source, state.copy(), tool, json.loads(key)) if self.admitted.get(tool) else None
            looks += [[tool, json.loads(key), answer]] if isinstance(answer, str) else []
        return looks

    def _take(self, steps: Steps, state: State) -> bool:
        """Apply these steps to a state. False if a step without an answer gets none, or an error, from the module."""
        is_known = True
        for tool, arguments, answer in steps:
            if answer is None:
                is_known &= isinstance(answer_of(self.source, state, tool, arguments), str)
            else:
                follow(self.source, state, tool, arguments, answer)
        return is_known


def answer_of(source: ModuleType, state: State, tool: str, arguments: Mapping[str, Any]) -> str | Refusal | None:
    """The module's answer as text, or its refusal. None if unknown, or if the arguments do not fit."""
    try:
        answer = getattr(source, tool)(state, **_received(source, tool, arguments))
        return answer if isinstance(answer, (str, Refusal)) else json.dumps(answer, **source.JSON.get(tool, {}))
    except (Unknown, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None


def follow(
    source: ModuleType, state: State, tool: str, arguments: Mapping[str, Any], answer: str | Sequence[str]
) -> str | Refusal | None:
    """Apply a recorded call and return the module's answer.

    Where they differ, learn the document or forget the effect. An error that the module does not give changed nothing.
    """
    trial = state.copy()
    computed = answer_of(source, trial, tool, arguments)
    if computed == (answer if isinstance(answer, str) else Refusal(*answer)):
        state.take(trial)
    elif not isinstance(answer, str):
        pass
    elif tool in source.READS:
        state.learn(tool, parsed(answer, source.JSON.get(tool, {})), **_received(source, tool, arguments))
    else:
        state.forget(*values_in(dict(arguments)), keep=source.NEVER_CHANGES.get(tool, ()), linked=True)
        state.forget_answers(*source.MAY_CHANGE.get(tool, ()))
    return computed


def _received(source: ModuleType, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    defaults = source.DEFAULTS.get(tool)
    return as_recorded(arguments, defaults, source.READS[tool]) if defaults else arguments


MISSING = object()
"""Returned by `at` for a path that does not exist."""


def at(document: Any, *path: Any) -> Any:
    """The part of a document at this path; `MISSING` if there is none."""
    for step in path:
        if not isinstance(document, (dict, list)) or isinstance(document, list) != isinstance(step, int):
            return MISSING
        try:
            document = document[step]
        except LookupError:
            return MISSING
    return document


def with_keys(document: Any, keys: Sequence[str]) -> Any:
    """The document, if it has exactly these keys. Raises `Unknown` otherwise: no recorded call had such a document."""
    if not isinstance(document, Mapping) or sorted(document) != sorted(keys):
        raise Unknown(f"in all recorded calls this document has the keys {', '.join(keys)}, and no others")
    return document


def same(one: Any, other: Any) -> bool:
    """True for values that are equal as JSON. 1 equals neither true nor "1"; nothing equals null."""
    return _present(one, other) and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _present(*values: Any) -> bool:
    return not any(each is MISSING or each is None for each in values)


def agreed(*tests: bool) -> bool:
    """The common outcome of tests that all fit the examples. Raises `Unknown` if they differ."""
    if len(set(tests)) > 1:
        raise Unknown("the recorded calls allow several rules, and they differ here")
    return tests[0]


def check_seen(one: Any, values: Sequence[Any]) -> None:
    """Raise `Unknown` for anything but one of the recorded values. Args: `values`, with None for nothing there."""
    if (None if one is MISSING else one) not in values:
        raise Unknown(f"no recorded call had {one!r}")


def check_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise `Unknown` if two reading calls are the same. In the recorded calls they were always different."""
    if key_of(one) == key_of(other):
        raise Unknown(f"no recorded call names {dict(one)} twice")


def at_most(one: Any, other: Any) -> bool:
    """True if both are numbers and `one <= other`."""
    return type(one) in (int, float) and type(other) in (int, float) and bool(one <= other)  # and no bool


def below(one: Any, last_below: float, first_above: float) -> bool:
    """True if `one <= last_below`, False if `one >= first_above`. Raises `Unknown` in between."""
    if at_most(one, one) and last_below < one < first_above:
        raise Unknown(f"the outcome for {one} is unknown: no recorded value lies between {last_below} and {first_above}")
    return at_most(one, last_below)


def named(document: Any, value: Any) -> bool:
    """True if a document contains a value; of a list, all items, if they differ."""
    if not _present(document, value):
        return False
    content, names = {json.dumps(each) for each in values_in(document)}, [json.dumps(each) for each in values_in(value)]
    return content.issuperset(names) and len({*names}) == len(names)


def later(day: Any, *, months: Any = 0, days: Any = 0) -> str:
    """A date (YYYY-MM-DD) plus months (at most to their last day) and days. Raises `Unknown` for no date."""
    try:
        start = date.fromisoformat(day)
        year, month = divmod(start.year * 12 + start.month - 1 + months, 12)
        first = date(year, month + 1, 1)
        return (first.replace(day=min(start.day, monthrange(year, month + 1)[1])) + timedelta(days)).isoformat()
    except (TypeError, ValueError, OverflowError) as error:
        raise Unknown(f"{day!r} is no date, or its sum with {months!r} months and {days!r} days is none") from error


def rounded(number: Any) -> int | float:
    """A number, rounded to six decimals if it is a float. Raises `Unknown` for anything else."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise Unknown(f"{number!r} is no number")
    return round(number, 6) if isinstance(number, float) else number


def fixed(number: Any, digits: int) -> str:
    """A number as text with `digits` decimals. Raises `Unknown` for anything else."""
    return f"{rounded(number):.{digits}f}"


def put(document: Any, changes: Iterable[tuple[Sequence[Any], Any]]) -> Any:
    """A copy of a document with new values at these paths. Raises `LookupError` for a missing path."""
    copy = json.loads(json.dumps(document))
    for path, value in changes:
        inner = copy
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]]  # raises if missing
        inner[path[-1]] = value
    return copy


def parsed(text: str | Refusal, style: Mapping[str, Any]) -> Any:
    """The JSON value that `json.dumps` writes exactly so in this style. Else the text or refusal."""
    if isinstance(text, Refusal):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if not isinstance(value, str) and json.dumps(value, **style) == text else text


def load_module(code: str | bytes, path: Path) -> ModuleType:
    """Run a world's code, which imports this file as `runtime`."""
    sys.modules.setdefault("runtime", sys.modules[__name__])
    module = ModuleType("compiled_world")
    module.__file__ = str(path)
    exec(compile(code, path, "exec"), vars(module))
    for name, earlier in (("MAY_CHANGE", "SPREADS"), ("NEVER_CHANGES", "KEEPS"), ("DEFAULTS", "")):
        vars(module).setdefault(name, vars(module).get(earlier, {}))  # a world of an earlier version
    return module


def _documents(path: Path) -> tuple[dict[tuple[str, str], Any], dict[str, dict[tuple[str, str], Any]]]:
    """All documents by (tool, arguments), the newest of each; and those of each task."""
    documents, by_task = dict[tuple[str, str], Any](), dict[str, dict[tuple[str, str], Any]]()
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT task, tool, arguments, document FROM documents ORDER BY id")
        for task, tool, key, document in rows:
            documents[tool, key] = by_task.setdefault(task, {})[tool, key] = document
    return documents, by_task


def serve(folder: Path, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests, one JSON object a line: a method of `Module` (`ask`) and its arguments."""
    for limit, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, 2**20)):
        resource.setrlimit(limit, (value, value))
    module = Module(folder)
    for line in requests:
        request = json.loads(line)
        result = getattr(module, request.pop("ask"))(**request)
        replies.write(json.dumps({"result": result}).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
