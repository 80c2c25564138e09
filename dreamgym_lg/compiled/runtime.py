"""Runs a compiled world: documents of one episode, and the module that changes them.

Standard library alone: this file is the program of the walled process, and a copy of it makes a world's folder complete.
"""

import importlib.util
import json
import resource
import sqlite3
import sys
from calendar import monthrange
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

IMPORTED = (
    "MISSING, State, Unknown, agreed, at, at_most, below, check_apart, check_seen, fixed, later, named, put, rounded, same, "
    "with_keys"
)
"""What the module of a world imports from here."""
MEMORY = 2**30
"""Bytes of address space that a world may use."""


class Unknown(LookupError):
    """The world does not know the answer: the next responder of the dream is asked."""


class State:
    """The documents of one episode: what each reading call returns, by tool and arguments.

    Writes go to a layer of the episode's own, so that a new episode costs nothing.
    """

    def __init__(self, *layers: Mapping[tuple[str, str], Any]) -> None:
        self._changed, self._learned = dict[tuple[str, str], Any](), dict[tuple[str, str], Any]()
        self._layers = (self._changed, self._learned, *layers)

    @property
    def documents(self) -> dict[tuple[str, str], Any]:
        """All documents as they are now, in JSON; None for one that is unknown."""
        return {place: text for layer in reversed(self._layers) for place, text in layer.items()}

    @property
    def changes(self) -> dict[tuple[str, str], Any]:
        """The documents that are not as they were before a writing call."""
        before = State(*self._layers[1:]).documents
        return {place: text for place, text in self._changed.items() if before.get(place) != text}

    def read(self, tool: str, /, **arguments: Any) -> Any:
        """The document that this call of a reading tool returns. Raises `Unknown` where none was recorded."""
        place = (tool, key_of(arguments))
        stored = next((layer[place] for layer in self._layers if place in layer), None)
        if stored is None:
            raise Unknown(f"no recorded answer of {tool} {place[1]}")
        return json.loads(stored)

    def write(self, tool: str, document: Any, /, **arguments: Any) -> None:
        """From now on this call of a reading tool returns `document`, which is copied."""
        self._changed[tool, key_of(arguments)] = json.dumps(document)

    def learn(self, tool: str, document: Any, /, **arguments: Any) -> None:
        """This call returned `document`, and would have before, unless it was forgotten in between."""
        place = (tool, key_of(arguments))
        (self._changed if place in self._changed else self._learned)[place] = json.dumps(document)

    def copy(self) -> "State":
        """A state that changes by itself."""
        other = State(*self._layers[2:])
        other.take(self)
        return other

    def take(self, other: "State") -> None:
        """Become as another state of the same first documents."""
        self._changed.update(other._changed)
        self._learned.update(other._learned)

    def mentions(self, value: Any) -> bool:
        """True if a known document names this value."""
        name = json.dumps(value)
        return any(text is not None and name in text for text in self.documents.values())

    def check_mentions(self, value: Any, *, changed: bool = False) -> None:
        """Raises `Unknown` for a value that no known document names.

        Args: `changed`, True where one suffices that has changed since.
        """
        texts = (text for layer in self._layers[1:] for text in layer.values())
        if not self.mentions(value) and not (changed and any(json.dumps(value) in text for text in texts)):
            raise Unknown(f"no known document names {value!r}")

    def forget_answer(self, tool: str, /, **arguments: Any) -> None:
        """The document that this call of a reading tool returns is unknown from now on."""
        self._changed[tool, key_of(arguments)] = None

    def forget_answers(self, *tools: str) -> None:
        """All documents of these reading tools are unknown from now on."""
        for place in self.documents:
            if place[0] in tools:
                self._changed[place] = None

    def forget(self, *values: Any, keep: Iterable[str] = (), linked: bool = False) -> None:
        """Documents whose arguments or contents name one of these values are unknown from now on.

        Common values are left out (`common_in`). Args: `keep`, tools whose documents stay; `linked`, True to forget also what
        those documents name, such as the customer of an order.
        """
        stored = self._known
        is_common = common_in(stored)
        names = {json.dumps(value) for value in values if isinstance(value, str) and value}
        places = naming(stored, {name for name in names if not is_common(name)})
        for place in (*places, *(linked_to(places, stored, is_common) if linked else ())):
            if place[0] not in keep:
                self._changed[place] = None

    def about(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The known documents of what a call's arguments name, and of what these name."""
        call = ("", "{}")  # is one more document
        stored = {**self._known, call: json.dumps(dict(arguments))}
        direct = linked_to([call], stored, is_common := common_in(stored))
        return [*direct, *linked_to(direct, stored, is_common)]

    @property
    def _known(self) -> dict[tuple[str, str], str]:
        return {place: text for place, text in self.documents.items() if text is not None}


Steps = Iterable[tuple[str, Mapping[str, Any], str | None]]
"""Tool, arguments and answer of an episode's calls. An answer of None stands for the module's own."""


def key_of(arguments: Mapping[str, Any]) -> str:
    """The arguments of a reading call in comparable form, without those that are None."""
    return json.dumps({name: value for name, value in arguments.items() if value is not None}, sort_keys=True)


def values_in(document: Any) -> list[Any]:
    """The texts and numbers of a document, at whatever depth."""
    if isinstance(document, dict):
        return [each for value in document.values() for each in values_in(value)]
    if isinstance(document, list):
        return [each for value in document for each in values_in(value)]
    return [document]


def naming(documents: Mapping[tuple[str, str], str], names: Iterable[str]) -> list[tuple[str, str]]:
    """The documents whose arguments or contents name one of these values, which are in JSON."""
    return [place for place, text in documents.items() if any(name in place[1] or name in text for name in names)]


def common_in(documents: Mapping[tuple[str, str], str]) -> Callable[[str], bool]:
    """Tells values, in JSON, that many documents name. More than five and more than a tenth: they are no entity's."""
    most = max(5, len(documents) / 10)
    return lambda name: sum(name in key or name in text for (_, key), text in documents.items()) > most


def linked_to(
    places: Sequence[tuple[str, str]], documents: Mapping[tuple[str, str], str], is_common: Callable[[str], bool]
) -> list[tuple[str, str]]:
    """The other documents all of whose arguments one of these documents holds. Args: `is_common`, of a value in JSON."""
    linked = list[tuple[str, str]]()
    held = [{json.dumps(value) for value in values_in(json.loads(documents[place]))} for place in places]
    for place in documents if held else ():
        own = {json.dumps(value) for value in json.loads(place[1]).values()}
        if own and place not in places and any(own <= each for each in held) and not any(map(is_common, own)):
            linked.append(place)
    return linked


class Module:
    """A world's module with its first documents. It holds no state of an episode.

    `respond` makes an episode's calls anew on a fresh state, so that nothing of one episode reaches another.

    Args: `folder`, with `world.py` and `world.db`.
    """

    def __init__(self, folder: Path, *, source: ModuleType | None = None) -> None:
        self.source = source or _load(folder / "world.py")
        self.admitted: Mapping[str, bool] = json.loads((folder / "rules.json").read_text())["admitted"]
        self.documents, self.by_task = _documents(folder / "world.db")

    def state(self, task: str) -> State:
        return State(self.by_task.get(task, {}), self.documents)

    def respond(self, task: str, steps: Steps, call: tuple[str, Mapping[str, Any]]) -> str | None:
        """The answer to a call behind these steps. None if this world does not know it."""
        state = self._after(task, steps)
        return answer_of(self.source, state, *call) if self.admitted.get(call[0]) else None

    def replay(self, steps: Steps) -> list[str | None]:
        """The module's own answer to each recorded call, behind the recorded ones."""
        state = State(self.documents)
        return [follow(self.source, state, tool, arguments, answer or "") for tool, arguments, answer in steps]

    def changes(self, task: str, steps: Steps) -> dict[str, str | None]:
        """The documents that writing calls changed, by `tool arguments`. None for an unknown one."""
        return {f"{tool} {key}": text for (tool, key), text in self._after(task, steps).changes.items()}

    def lookups(self, task: str, steps: Steps, call: tuple[str, Mapping[str, Any]]) -> list[list[Any]]:
        """Look-ups of what a call names, before it. Tool, arguments and the world's answer."""
        state, looks = self._after(task, steps), list[list[Any]]()
        for tool, key in state.about(call[1]):
            answer = answer_of(self.source, state.copy(), tool, json.loads(key)) if self.admitted.get(tool) else None
            looks += [] if answer is None else [[tool, json.loads(key), answer]]
        return looks

    def _after(self, task: str, steps: Steps) -> State:
        state = self.state(task)
        for tool, arguments, answer in steps:
            if answer is None:
                answer = answer_of(self.source, state, tool, arguments)
            else:
                follow(self.source, state, tool, arguments, answer)
        return state


def answer_of(source: ModuleType, state: State, tool: str, arguments: Mapping[str, Any]) -> str | None:
    """The module's answer as text; None where it knows none or cannot take the arguments."""
    try:
        answer = getattr(source, tool)(state, **arguments)
        return answer if isinstance(answer, str) else json.dumps(answer, **source.JSON.get(tool, {}))
    except (Unknown, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None


def follow(source: ModuleType, state: State, tool: str, arguments: Mapping[str, Any], answer: str) -> str | None:
    """Make a call with a known answer. The unforeseen is learned or forgotten. Returns its own answer."""
    tried = state.copy()
    own = answer_of(source, tried, tool, arguments)
    if own == answer:
        state.take(tried)
    elif tool in source.READS:
        state.learn(tool, parsed(answer, source.JSON.get(tool, {})), **arguments)
    else:
        state.forget(*values_in(dict(arguments)), keep=getattr(source, "KEEPS", {}).get(tool, ()), linked=True)
        state.forget_answers(*source.SPREADS.get(tool, ()))
    return own


MISSING = object()
"""Returned by `at` where there is nothing."""


def at(document: Any, *path: Any) -> Any:
    """The part of a document at these keys and indices; `MISSING` where there is none."""
    for step in path:
        if not isinstance(document, (dict, list)) or isinstance(document, list) != isinstance(step, int):
            return MISSING
        try:
            document = document[step]
        except LookupError:
            return MISSING
    return document


def with_keys(document: Any, keys: Sequence[str]) -> Any:
    """The document, if it has these keys and no others. Else raises `Unknown`: no recorded call was about such a one."""
    if not isinstance(document, Mapping) or sorted(document) != sorted(keys):
        raise Unknown(f"no recorded call was about a document other than one with {', '.join(keys)}")
    return document


def same(one: Any, other: Any) -> bool:
    """True for values that are equal as JSON. 1 is neither true nor "1", and nothing equals null."""
    return _present(one, other) and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _present(*values: Any) -> bool:
    return not any(each is MISSING or each is None for each in values)


def agreed(*tests: bool) -> bool:
    """The outcome of all tests, which the examples did not tell apart. Raises `Unknown` where they differ."""
    if len(set(tests)) > 1:
        raise Unknown("the recorded calls allow several rules, and they differ here")
    return tests[0]


def check_seen(one: Any, values: Sequence[Any]) -> None:
    """Raises `Unknown` for a text that was never seen."""
    if isinstance(one, str) and one not in values:
        raise Unknown(f"nothing is known of {one!r}")


def check_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raises `Unknown` where two reading calls of a tool are the same one. No recorded call was about one document twice."""
    if key_of(one) == key_of(other):
        raise Unknown(f"no recorded call was about {dict(one)} twice")


def at_most(one: Any, other: Any) -> bool:
    """True if both are numbers and the first is not larger."""
    numbers = [each for each in (one, other) if isinstance(each, (int, float)) and not isinstance(each, bool)]
    return len(numbers) == 2 and numbers[0] <= numbers[1]


def below(one: Any, last_below: float, first_above: float) -> bool:
    """True below a limit of which only the nearest values are known. Raises `Unknown` between them."""
    if at_most(one, one) and last_below < one < first_above:
        raise Unknown(f"nothing is known of {one}, between {last_below} and {first_above}")
    return at_most(one, last_below)


def named(document: Any, value: Any) -> bool:
    """True if a document holds a value. Of a list each one, and none twice."""
    if not _present(document, value):
        return False
    held, names = {json.dumps(each) for each in values_in(document)}, [json.dumps(each) for each in values_in(value)]
    return held.issuperset(names) and len({*names}) == len(names)


def later(day: Any, *, months: Any = 0, days: Any = 0) -> str:
    """A date as text (YYYY-MM-DD) so much later; the last of its month at most. Raises `Unknown` for anything else."""
    try:
        start = date.fromisoformat(day)
        year, month = divmod(start.year * 12 + start.month - 1 + months, 12)
        first = date(year, month + 1, 1)
        return (first.replace(day=min(start.day, monthrange(year, month + 1)[1])) + timedelta(days)).isoformat()
    except (TypeError, ValueError, OverflowError) as error:
        raise Unknown(f"{day!r} is no date, or the one behind it is none") from error


def rounded(number: Any) -> int | float:
    """A computed number, without the noise of binary fractions. Raises `Unknown` for anything else."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise Unknown(f"{number!r} is no number")
    return round(number, 6) if isinstance(number, float) else number


def fixed(number: Any, digits: int) -> str:
    """A number with so many digits behind its point. Raises `Unknown` for anything else."""
    return f"{rounded(number):.{digits}f}"


def put(document: Any, changes: Iterable[tuple[Sequence[Any], Any]]) -> Any:
    """A copy of a document with other values at these paths. Raises `LookupError` for a place that is not there."""
    copy = json.loads(json.dumps(document))
    for path, value in changes:
        inner = copy
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]]  # nothing new is put there
        inner[path[-1]] = value
    return copy


def parsed(text: str, style: Mapping[str, Any]) -> Any:
    """The JSON value that a text is in this style, byte for byte. An object, list or number, else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if not isinstance(value, str) and json.dumps(value, **style) == text else text


def _load(path: Path) -> ModuleType:
    sys.modules.setdefault("runtime", sys.modules[__name__])  # what the module imports from
    spec = importlib.util.spec_from_file_location("compiled_world", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _documents(path: Path) -> tuple[dict[tuple[str, str], Any], dict[str, dict[tuple[str, str], Any]]]:
    """Every document by (tool, arguments), the newest of all tasks; and those of each task."""
    everywhere, by_task = dict[tuple[str, str], Any](), dict[str, dict[tuple[str, str], Any]]()
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        for task, tool, key, document in connection.execute(
            "SELECT task, tool, arguments, document FROM documents ORDER BY id"
        ):
            everywhere[tool, key] = by_task.setdefault(task, {})[tool, key] = document
    return everywhere, by_task


def serve(folder: Path, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests, a JSON object a line. `ask`, the name of a method of `Module`, and its arguments."""
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
