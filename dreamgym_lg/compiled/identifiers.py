"""Finds the ids of entities in recorded texts, and makes new ones."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from random import Random
from typing import Any

from dreamgym_lg.compiled.recordings import Recordings
from dreamgym_lg.compiled.runtime import key_of, walk
from dreamgym_lg.splits import common_entities

Type = tuple[str, str]
"""A reading tool and its only argument."""

_ENTITY = re.compile(r"(?=.*\d)(?=.*[^\W\d_])\S+|\d{3,}|\S*@\S*|[^\W\d_a-z][\w'-]*( [^\W\d_a-z][\w'-]*)*")
"""Letters with digits, a number of three digits or more, an e-mail address, a capitalised name."""
_MAX_TRIES = 50


class Identifiers:
    """Recognises ids of entities. They are recorded only arguments of reading tools, and texts of the same form.

    Values that many episodes share (`splits.common_entities`), words without a capital, and dates are no ids.

    Args: `known`, all recorded texts, in which no new id may occur.
    """

    def __init__(self, recordings: Recordings, known: str) -> None:
        self.types: dict[str, set[Type]] = {}
        """Id as text -> the reading calls that take it."""
        self._integers = set[Type]()
        named: list[set[str]] = []
        single = {tool: names[0] for tool, names in recordings.reads.items() if len(names) == 1}
        for trace in recordings.traces:
            looked_up = [
                (tool, single[tool], arguments.get(single[tool])) for tool, arguments, _ in trace.calls if tool in single
            ]
            values = [(tool, name, str(value)) for tool, name, value in looked_up if type(value) in (str, int)]
            self._integers |= {(tool, name) for tool, name, value in looked_up if type(value) is int}
            named.append({value for *_, value in values if _ENTITY.fullmatch(value)})
            for tool, name, value in values:
                if value in named[-1]:
                    self.types.setdefault(value, set()).add((tool, name))
        for common in common_entities(named):
            del self.types[str(common)]
        self._known = known
        self._forms = self._find_forms()
        self._pattern = re.compile("|".join(rf"(?<!\w){form}(?!\w)" for form in self._forms) or "(?!)")
        self._starts: dict[str, list[tuple[int, str]]] = {}
        for value in sorted(self.types, key=len, reverse=True):
            if (first := re.search(r"\w+", value)) is not None:
                self._starts.setdefault(first[0], []).append((first.start(), value))
        self.find = lru_cache(100_000)(self._find)

    def _find_forms(self) -> dict[str, set[Type]]:
        """Regular expression of ids of letters and digits -> their types."""
        by_type: dict[Type, list[str]] = {}
        for value, types in self.types.items():
            for type in types if re.search(r"\d", value) and re.search(r"[^\W\d_]", value) else ():
                by_type.setdefault(type, []).append(value)
        forms: dict[str, set[Type]] = {}
        for type, values in by_type.items():
            exact = Counter(_pattern_of(value, letters=False) for value in values)
            counts = exact if 2 * len(exact) <= len(values) else Counter(_pattern_of(value, letters=True) for value in values)
            for form in (form for form, number in counts.items() if number > 1):
                forms.setdefault(form, set()).add(type)
        return dict(sorted(forms.items()))

    def _find(self, text: str) -> tuple[str, ...]:
        """The ids in a text, in order; of overlapping ones the first and longest."""
        spans = [match.span() for match in self._pattern.finditer(text)]
        for match in re.finditer(r"\w+", text):
            for offset, value in self._starts.get(match[0], ()):
                start = match.start() - offset
                if start >= 0 and text.startswith(value, start) and not re.match(r"\w", text[start + len(value) :]):
                    spans.append((start, start + len(value)))
        ids, end = list[str](), 0
        for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
            if start >= end:
                ids.append(text[start:stop])
                end = stop
        return tuple(ids)

    def types_of(self, value: str) -> set[Type]:
        """The reading calls that look an id up; for an unrecorded one, by its form."""
        by_form = (types for form, types in self._forms.items() if re.fullmatch(form, value))
        return self.types.get(value) or set[Type]().union(*by_form)

    def place(self, type: Type, value: str) -> tuple[str, str]:
        """Tool and arguments of the reading call that looks an id up."""
        tool, name = type
        return tool, key_of({name: int(value) if type in self._integers else value})

    def fresh(self, value: str, renaming: Mapping[str, str], rng: Random) -> dict[str, str] | None:
        """A new id as {old: new}; for a name, also each word. None if no unused one is found.

        Args: `renaming`, the replacements so far.
        """
        is_name = not re.search(r"\d", value)
        one_word = is_name and " " not in value  # other names have no other word to take
        for _ in range(_MAX_TRIES):
            if is_name:
                new = self._fresh_name(value, renaming, rng)
            else:
                new = {value: re.sub(r"\d", lambda digit: rng.choice("123456789" if digit[0] != "0" else "0123456789"), value)}
            if new and new[value] not in (value, *renaming.values()) and (one_word or new[value] not in self._known):
                return new
        return None

    def _fresh_name(self, name: str, renaming: Mapping[str, str], rng: Random) -> dict[str, str]:
        """A name composed of words of other names, each at the same position."""
        pieces = re.split(r"(\W+)", name)
        alike = [re.split(r"(\W+)", each) for each in sorted(self.types) if self.types_of(each) & self.types_of(name)]
        alike = [each for each in alike if each[1::2] == pieces[1::2] and not re.search(r"\d", "".join(each))]
        new = {piece: renaming.get(piece) or rng.choice(alike)[place] for place, piece in enumerate(pieces) if place % 2 == 0}
        return {**new, name: "".join(new.get(piece, piece) for piece in pieces)} if alike else {}


def _pattern_of(value: str, *, letters: bool) -> str:
    """A regular expression for values that differ in digits and, with `letters`, in letters."""

    def generalise(run: re.Match[str]) -> str:
        if run[0].isdigit():
            return rf"\d{{{len(run[0])}}}"
        if not letters or not re.fullmatch("[A-Za-z]+", run[0]):
            return re.escape(run[0])
        return f"[A-Z]{{{len(run[0])}}}" if run[0].isupper() else "[a-z]+"

    return re.sub(r"\d+|[A-Z]+|[a-z]+|.", generalise, value)


class Renaming(dict[str, str]):
    """Old id -> new id. Called with a document or text, it returns it with the ids replaced."""

    def __call__(self, node: Any) -> Any:
        if isinstance(node, dict):
            return {self(key): self(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self(each) for each in node]
        if isinstance(node, int) and not isinstance(node, bool):
            return int(self.get(str(node), node))
        if not isinstance(node, str) or not self:
            return node
        pattern = "|".join(map(re.escape, sorted(self, key=len, reverse=True)))
        return re.sub(rf"(?<!\w)(?:{pattern})(?!\w)", lambda match: self[match[0]], node)

    def left_in(self, text: str) -> list[str]:
        """Numbers and words of old ids in a renamed text, which spells an id differently."""
        old = {part.casefold() for value in self for part in re.findall(r"\d{3,}|[^\W\d_]{4,}", value)}
        new = {part.casefold() for value in self.values() for part in re.findall(r"\d{3,}|[^\W\d_]{4,}", value)}
        return sorted((old - new) & set(re.findall(r"\d{3,}|[^\W\d_]{4,}", text.casefold())))


def walk_ids(identifiers: Identifiers, node: Any) -> Iterable[tuple[tuple[Any, ...], str]]:
    """(path, id) of each id in a document. A path ends with the id's position among those of its text."""
    for path, value in walk(node):
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            yield from (((*path, number), each) for number, each in enumerate(identifiers.find(str(value))))
