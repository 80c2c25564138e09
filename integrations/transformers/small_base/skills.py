"""The conversations that the small base is pretrained on: skills over random words, every answer right by construction.

Nothing here is about any world. Names are words of `words.txt` (no name of a game in it), invented words and ids; what is
learned is to copy, look up, count, follow changes, call a tool by its schema, and judge an action against what was said.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
_VERBS = "take get pick push pull find choose select use carry lift touch press grab want"
VERBS = _VERBS.split()


class Conversation(NamedTuple):
    """Messages with `role` and `content`, the assistant's with `tool_calls`, and the tools that were offered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@lru_cache(1)
def known_words() -> list[str]:
    """English words, none of them part of a name of TextWorld-Express or ALFWorld."""
    return Path(__file__).with_name("words.txt").read_text().split()


# --- Names ----------------------------------------------------------------------------------------------------------


class Names:
    """Draws the names of one conversation, often from few syllables: names of like pieces are what copying mistakes.

    Args:
        rng: The conversation's own.
        words: The words to draw from; None for `known_words()`.
    """

    def __init__(self, rng: Random, words: list[str] | None = None) -> None:
        self.rng, self.words = rng, words or known_words()
        few = rng.random() < 0.35
        self.syllables = [self._syllable() for _ in range(rng.randint(4, 9))] if few else []
        self.known_share = rng.choice([0.0, 0.3, 0.6, 0.9])
        self.pair_share = rng.choice([0.0, 0.2, 0.5, 0.9])

    def word(self) -> str:
        if self.rng.random() < self.known_share:
            return self.rng.choice(self.words)
        pieces = [
            self.rng.choice(self.syllables) if self.syllables else self._syllable() for _ in range(self.rng.randint(2, 3))
        ]
        return "".join(pieces)

    def name(self) -> str:
        """One word, or two."""
        return f"{self.word()} {self.word()}" if self.rng.random() < self.pair_share else self.word()

    def id(self) -> str:
        """Letters and digits, like `W-20418`, `ord_7f3a`, `#5512`, `48-kz-901`."""
        rng = self.rng
        head = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 3)))
        head = rng.choice([head, head.upper(), head.upper(), self.rng.choice(self.words)])
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 7)))
        mixed = "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(4, 7)))
        shapes = [
            f"{head}-{digits}",
            f"{head}_{mixed}",
            f"{head}{digits}",
            digits,
            f"#{digits}",
            f"{head}-{digits[:2]}-{mixed}",
            mixed,
        ]
        return rng.choice(shapes)

    def several(self, count: int, draw: Callable[[], str] | None = None) -> list[str]:
        """So many different ones, none contained in another."""
        found: list[str] = []
        for _ in range(50 * count):
            new = (draw or self.name)()
            if len(found) < count and not any(new in old or old in new for old in found):
                found.append(new)
        return found if len(found) == count else self.several(count, self.id)

    def _syllable(self) -> str:
        end = self.rng.choice(["", "", *CONSONANTS[:6]])
        return self.rng.choice(CONSONANTS) + self.rng.choice(VOWELS) + end


def _size(rng: Random, most: int = 20) -> int:
    """A list's length: 2 to `most`, short ones more often."""
    return 2 + int((most - 1) * rng.random() ** 1.7)


def _kind(rng: Random, names: Names) -> Callable[[], str]:
    return names.id if rng.random() < 0.25 else names.name


def _listed(rng: Random, things: list[str]) -> str:
    """The things in a row, in one of several ways."""
    style = rng.randrange(5)
    if style == 0:
        return ", ".join(f"a {thing}" for thing in things[:-1]) + f" and a {things[-1]}"
    if style == 1:
        return "".join(f"\n- {thing}" for thing in things)
    if style == 2:
        return json.dumps(things)
    if style == 3:
        return "".join(f"\n{i}. {thing}" for i, thing in enumerate(things, 1))
    return ", ".join(things)


def _turns(*texts: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


# --- Skills ---------------------------------------------------------------------------------------------------------


def repeat(rng: Random, names: Names) -> Conversation:
    """Say again what was said: all of it, or item after item."""
    things = names.several(_size(rng), _kind(rng, names))
    told = _listed(rng, things).strip()
    if rng.random() < 0.5:
        return Conversation(_turns(f"Repeat: {told}", told))
    return Conversation(_turns(f"One a line: {told}", "\n".join(things)))


def questions(rng: Random, names: Names) -> Conversation:
    """A list of things and questions about it: one that is named, the k-th, the last, the next, whether there is one."""
    things = names.several(_size(rng), _kind(rng, names))
    begun = rng.choice(["You see ", "There is ", "Here: ", "The list: ", "In this place you notice ", "Known: "])
    texts = [f"{begun}{_listed(rng, things)}."]
    for _ in range(rng.randint(3, 8)):
        asked, answer = _question(rng, names, things)
        texts[-1] += ("\n" if len(texts) == 1 else "") + asked
        texts += [answer, ""]
    return Conversation(_turns(*texts[:-1]))


def _question(rng: Random, names: Names, things: list[str]) -> tuple[str, str]:
    at = rng.randrange(len(things))
    thing, verb = things[at], rng.choice(VERBS)
    kind = rng.randrange(8)
    if kind <= 2:
        order = [f"{verb.capitalize()} the {thing}.", f"Your task is to {verb} the {thing}.", f"Now: {verb} {thing}"]
        return rng.choice(order), f"{verb} {thing}"
    if kind == 3 and at < len(ORDINALS):
        return f"What is the {ORDINALS[at]}?", thing
    if kind == 3 or kind == 4:
        return rng.choice([("What is the last one?", things[-1]), ("What is the first?", things[0])])
    if kind == 5 and at + 1 < len(things):
        return f"What comes after {thing}?", things[at + 1]
    if kind == 6:
        asked = names.name()
        shown = thing if rng.random() < 0.5 else asked
        return f"Is {shown} there?", "yes" if shown in things else "no"
    return f"Name it: {thing}", thing


def changes(rng: Random, names: Names) -> Conversation:
    """What is taken, added and left, in a list that is written anew; or where each thing is, after some went elsewhere."""
    things = names.several(_size(rng, 9))
    if rng.random() < 0.5:
        spare, texts = names.several(6), [f"The list: {', '.join(things)}\n"]
        things = [thing for thing in things if thing not in spare]
        for extra in spare[: rng.randint(1, 3)]:
            if len(things) > 1 and rng.random() < 0.6:
                gone = things.pop(rng.randrange(len(things)))
                texts[-1] += f"Without {gone}."
            else:
                things.append(extra)
                texts[-1] += f"And {extra}."
            texts += [", ".join(things), ""]
        if any(name not in texts[0] for name in things if name not in spare):  # several() met a name twice
            return repeat(rng, names)
        return Conversation(_turns(*texts[:-1]))
    places = names.several(rng.randint(2, 6))
    where = {thing: rng.choice(places) for thing in things if not any(thing in p or p in thing for p in places)}
    if not where:
        return repeat(rng, names)
    texts = ["\n".join(f"The {thing} is in the {place}." for thing, place in where.items()) + "\n"]
    for _ in range(rng.randint(3, 6)):
        thing = rng.choice(list(where))
        if rng.random() < 0.5:
            where[thing] = rng.choice(places)
            texts[-1] += f"You put the {thing} in the {where[thing]}.\n"
            thing = rng.choice([thing, rng.choice(list(where))])
        texts[-1] += f"Where is the {thing}?"
        texts += [f"in the {where[thing]}", ""]
    return Conversation(_turns(*texts[:-1]))


def lookup(rng: Random, names: Names) -> Conversation:
    """Fields of a record or lines of a table, by their key, and a key by its value."""
    keys = names.several(_size(rng, 12), names.word)
    values = names.several(len(keys), rng.choice([names.name, names.id]))
    record = dict(zip(keys, values, strict=True))
    style = rng.randrange(3)
    shown = (
        json.dumps(record) if style == 0 else "\n".join(f"{k}: {v}" if style == 1 else f"{k} = {v}" for k, v in record.items())
    )
    texts = [shown + "\n"]
    for _ in range(rng.randint(3, 7)):
        key = rng.choice(keys)
        if rng.random() < 0.75:
            texts[-1] += rng.choice([f"What is {key}?", f"{key}?", f"Give the {key}."])
            texts += [record[key], ""]
        else:
            texts[-1] += f"Which one is {record[key]}?"
            texts += [key, ""]
    return Conversation(_turns(*texts[:-1]))


def game(rng: Random, names: Names) -> Conversation:
    """A place with things, an order that names some of them in a row, and the action of each turn."""
    things, place = names.several(_size(rng, 12)), names.name()
    steps = rng.sample(things, min(len(things), rng.randint(1, 6)))
    verb = rng.choice(VERBS)
    seen = [f"You are in the {place}.", *(f"{rng.choice(['There is also', 'You see', 'You also see'])} a {t}." for t in things)]
    if rng.random() < 0.5:
        seen = [f"You are in the {place}. You see {_listed(rng, things)}."]
    order = f"Your task: {verb} the " + rng.choice([" and the ", ", then the "]).join(steps) + "."
    first = rng.choice([f"{order}\n{' '.join(seen)}", f"{' '.join(seen)}\n{order}"])
    texts = [first]
    for i, step in enumerate(steps):
        texts.append(f"{verb} {step}")
        if i + 1 < len(steps):
            texts.append(f"You {verb} the {step}.")
    system = [{"role": "system", "content": f"You may {verb} or {rng.choice(VERBS)}."}] if rng.random() < 0.3 else []
    return Conversation([*system, *_turns(*texts)])


def judge(rng: Random, names: Names) -> Conversation:
    """The world's side: what an action gives. A thing that was taken before, or was never there, makes it invalid."""
    things, verb = names.several(_size(rng, 9)), rng.choice(VERBS)
    there, order = list(things), rng.sample(things, min(len(things), rng.randint(1, 4)))
    task = f"{verb} the {', then the '.join(order)}"
    texts = [f"Task: {task}.\nYou see {_listed(rng, things)}.\n"]
    for _ in range(rng.randint(2, 4)):
        chance = rng.random()
        wanted = order[0] if order and chance < 0.5 else rng.choice(things) if chance < 0.85 else names.name()
        texts[-1] += f"> {verb} {wanted}"
        if wanted not in there:
            texts.append(f"invalid, no {wanted}\nreward 0, continues\nYou see no {wanted}.")
        else:
            there.remove(wanted)
            right = bool(order) and wanted == order[0]
            order = order[1:] if right else order
            status = "continues" if right and order else "success" if right else "failure"
            texts.append(f"valid\nreward {int(status == 'success')}, {status}\nYou {verb} the {wanted}.")
            if status != "continues":
                break
        texts.append("")
    return Conversation(_turns(*texts[: len(texts) - (len(texts) % 2)]))


# --- Tools ----------------------------------------------------------------------------------------------------------

_ACTS = "find get look show list open close send cancel check update set start stop read write add drop search change"
ACTS = _ACTS.split()
DESCRIBED = ["{act} the {thing}.", "Use it to {act} a {thing}.", "{act}s one {thing} by its {key}."]


def _tool(rng: Random, names: Names) -> tuple[dict[str, Any], list[str]]:
    act, thing = rng.choice(ACTS), rng.choice([rng.choice(names.words), names.word()])
    keys = [f"{thing}_id" if i == 0 and rng.random() < 0.6 else names.word() for i in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    keys = list(dict.fromkeys(keys))
    described = rng.choice(DESCRIBED).format(act=act, thing=thing, key=keys[0])
    properties = {key: {"type": "string"} for key in keys}
    function = {
        "name": f"{act}_{thing}",
        "description": described,
        "parameters": {"properties": properties, "required": keys, "type": "object"},
    }
    return {"type": "function", "function": function}, keys


def call_tools(rng: Random, names: Names) -> Conversation:
    """Calls of the tool that is asked for, with ids and names as arguments; their results; an answer that quotes them."""
    made = [_tool(rng, names) for _ in range(rng.choice([1, 1, 2, 3]))]
    made = list({tool["function"]["name"]: (tool, keys) for tool, keys in made}.values())
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": "You help with " + names.word() + "."})
    asked = []
    for tool, keys in rng.sample(made, rng.randint(1, min(2, len(made)))):
        values = names.several(len(keys), rng.choice([names.id, names.id, names.name]))
        asked.append((tool["function"]["name"], dict(zip(keys, values, strict=True))))
    greeting = rng.choice(["", "Hello, ", f"I am {names.word().capitalize()}. ", f"My {names.word()} is {names.name()}. "])
    said = " Then ".join(_request(rng, name, arguments) for name, arguments in asked)
    messages.append({"role": "user", "content": greeting + said})
    for name, arguments in asked:
        messages.append(_call(name, arguments))
        fields = names.several(rng.randint(1, 3), names.word)
        result = dict(zip(fields, names.several(len(fields), _kind(rng, names)), strict=True))
        messages.append({"role": "tool", "name": name, "content": json.dumps({**arguments, **result})})
    field = rng.choice(fields)
    messages.append({"role": "assistant", "content": f"The {field} is {result[field]}."})
    # which field the answer is about is said beforehand
    first = next(message for message in messages if message["role"] == "user")
    first["content"] += f" What is the {field}?"
    return Conversation(messages, [tool for tool, _ in rng.sample(made, len(made))])


def _request(rng: Random, name: str, arguments: dict[str, str]) -> str:
    act, _, thing = name.partition("_")
    given = " and ".join(f"{key} {value}" for key, value in arguments.items())
    return rng.choice(
        [f"please {act} the {thing} with {given}.", f"{act} my {thing}: {given}.", f"can you {act} {thing}, {given}?"]
    )


def _call(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


SKILLS: dict[Callable[[Random, Names], Conversation], int] = {
    repeat: 2,
    questions: 5,
    changes: 3,
    lookup: 3,
    game: 4,
    judge: 3,
    call_tools: 5,
}
"""Each skill with its share."""


def conversation(seed: int | str, words: list[str] | None = None) -> Conversation:
    """One conversation; the same for the same seed. Args: `words`, instead of `known_words()`."""
    rng = Random(f"small base/{seed}")
    (skill,) = rng.choices(list(SKILLS), weights=list(SKILLS.values()))
    return skill(rng, Names(rng, words))
