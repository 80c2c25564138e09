"""The facts that a tool agent's final answer tells: those of its words that tools tell, by where they tell them.

Tools tell values in places: a JSON answer's values by their keys, without the numbers of lists; a plain text is one value. A
text of `FREE_TEXT_WORDS` words or more is read as a sentence of the tool where most of its words never change ("Order K1 is
open"): each word that does is a value with a place of its own. Any other is free text, of which only the words with a digit
are values. A place that has held one value alone tells nothing.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

Place = tuple[str, ...]
"""The tool's name and the JSON keys down to the value; of a sentence also its number of words and the word's position."""
Words = tuple[str, ...]
"""Of a value or a text: lower case, no punctuation, 20.00 as 20."""
Told = tuple[str, str]
"""A tool's name and what it answered."""

FREE_TEXT_WORDS = 4
"""From so many words on, a text is no value that an answer would have to repeat whole."""
_FIXED = 0.9
"""Share of the recorded sentences of one length from which on a word is the sentence's, not a value's (errors differ)."""
_TIME = re.compile(r"(?<=\d\d-\d\d)t(?=\d\d)")
_WORD = re.compile(r"(?<!\w)-?\d+(?:,\d{3})*(?:\.\d+)?(?=[^\W\d_]*(?!\w))|[^\W_]+")


class Answered(NamedTuple):
    """An episode that ended with an answer."""

    request: str
    told: tuple[Told, ...]
    """What the tools answered."""
    answer: str


class Facts(NamedTuple):
    """What an answer has to tell to be as right as a recorded one."""

    needed: Mapping[Place, frozenset[Words]]
    """The values that the recorded answer tells, by where its tools told them."""
    elsewhere: frozenset[Words]
    """What the tools told in other places of that episode: where it is another fact's as well, it is no contradiction."""
    repeated: frozenset[Words]
    """Values of the request that could stand in these places, and that the recorded answer says too."""
    complete: bool
    """Whether these are all that it tells: no free text, and nothing that its tools had not told."""

    def __str__(self) -> str:
        return ", ".join(sorted({" ".join(value) for values in self.needed.values() for value in values}))


class Vocabulary:
    """What tools have told, and where.

    Args:
        told: The tools' answers in the traces.
        answered: Recorded successes without writing calls: a word that more of them say untold than told is the agent's
            own wording ("I open a case"), and contradicts nothing. Where nothing was looked up, the answer is a guess.
        opaque: Tools whose answers are no facts, as they are other ones at another time.
    """

    def __init__(self, told: Iterable[Told], answered: Iterable[Answered], *, opaque: Collection[str] = ()) -> None:
        told, self._opaque = list(told), opaque
        self._sentences = _find_sentences(leaf for each in told for leaf in _leaves(*each))
        self._values = {place: found for place, found in self._read(told)[0].items() if len(found) > 1}
        said, untold = Counter[str](), Counter[str]()
        for each in (each for each in answered if each.told):
            words = set(_words(each.answer)) - set(_words(each.request))
            said.update(words)
            untold.update(words.difference(word for one in each.told for _, value in _leaves(*one) for word in value))
        self._own = {word for word, number in untold.items() if 2 * number > said[word]}
        self._known = {value for found in self._values.values() for value in found if not self._is_own(value)}

    def facts(self, recorded: Answered) -> Facts | None:
        """The facts of a recorded answer; None if it tells none."""
        request, answer = _words(recorded.request), _words(recorded.answer)
        here, free = self._read(recorded.told)
        here = {place: found for place, found in here.items() if place in self._values}
        told = {value for found in here.values() for value in found}
        said, own = dict[Place, frozenset[Words]](), False
        for place, found in here.items():
            repeated = _said(answer, self._values[place] | found) & found - _said(request, found)
            own = own or any(map(self._is_own, repeated))
            if facts := frozenset(value for value in repeated if not self._is_own(value)):
                said[place] = facts
        if not said:
            return None
        read = {word for found in said.values() for value in found for word in value}.union(request, self._own)
        half_told = (set(answer) - read) & free.union(*told)  # words of free text, a part of a value
        untold = _said(answer, self._known | told) - told - _said(request, self._known)
        asked = {value for place in said for value in _said(request, self._values[place])}
        complete = not (own or half_told or untold)
        return Facts(said, _elsewhere(here, said), frozenset(_said(answer, asked)), complete)

    def agrees(self, answer: str, facts: Facts) -> bool:
        """Whether the answer tells all these facts, and no other value of the places that they stand in."""
        words = _words(answer)
        for place, needed in facts.needed.items():
            said = _said(words, self._values.get(place, set()) | needed)
            others = said - needed - facts.elsewhere - facts.repeated
            if not needed <= said or not all(map(self._is_own, others)):
                return False
        return True

    def _is_own(self, value: Words) -> bool:
        return self._own.issuperset(value)

    def _read(self, told: Iterable[Told]) -> tuple[dict[Place, set[Words]], set[str]]:
        """The values by their places, and the words of free text."""
        values: dict[Place, set[Words]] = defaultdict(set)
        free = set[str]()
        for tool, text in told:
            for place, words in _leaves(tool, text):
                fixed = self._sentences.get((place, len(words)), {})
                if tool in self._opaque:
                    free.update(words)
                elif len(words) < FREE_TEXT_WORDS:
                    values[place].add(words)
                elif fixed and all(words[position] == word for position, word in fixed.items()):
                    for position, word in enumerate(words):
                        if position not in fixed:
                            values[*place, str(len(words)), str(position)].add((word,))
                else:
                    values[*place, "number"].update((word,) for word in words if any(map(str.isdigit, word)))
                    free.update(words)
        return values, free


def _elsewhere(told: Mapping[Place, set[Words]], needed: Collection[Place]) -> frozenset[Words]:
    return frozenset(value for place, found in told.items() if place not in needed for value in found)


def _find_sentences(leaves: Iterable[tuple[Place, Words]]) -> dict[tuple[Place, int], dict[int, str]]:
    """(place, number of words) -> the words that never change, by position, where they are half of the sentence or more."""
    texts: dict[tuple[Place, int], set[Words]] = defaultdict(set)
    for place, words in leaves:
        if len(words) >= FREE_TEXT_WORDS:
            texts[place, len(words)].add(words)
    found = {}
    for (place, length), same in texts.items():
        columns = [Counter(column).most_common(1)[0] for column in zip(*same, strict=True)]
        fixed = {position: word for position, (word, number) in enumerate(columns) if number >= _FIXED * len(same)}
        if len(same) > 1 and 2 * len(fixed) >= length:
            found[place, length] = fixed
    return found


@lru_cache(100_000)
def _leaves(tool: str, text: str) -> tuple[tuple[Place, Words], ...]:
    """The values of a tool's answer and their places; truth values and nothings are none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    return tuple((place, words) for place, value in _walk(found, (tool,)) if (words := _words(str(value))))


def _walk(value: Any, place: Place) -> Iterator[tuple[Place, str | int | float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, (*place, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, place)
    elif value is not None and not isinstance(value, bool):
        yield place, value


@lru_cache(100_000)
def _words(text: str) -> Words:
    return tuple(_plain(word) for word in _WORD.findall(_TIME.sub(" ", text.casefold())))


def _plain(word: str) -> str:
    word = word.replace(",", "")
    return word.rstrip("0").rstrip(".") if "." in word else word


def _said(words: Sequence[str], values: Collection[Words]) -> set[Words]:
    """The values that stand in a text: from its beginning, always the longest."""
    longest, position, found = max(map(len, values), default=0), 0, set[Words]()
    while position < len(words):
        lengths = range(min(longest, len(words) - position), 0, -1)
        length = next((n for n in lengths if tuple(words[position : position + n]) in values), 0)
        if length:
            found.add(tuple(words[position : position + length]))
        position += length or 1
    return found
