"""The conversations that the small base is pretrained on: skills over random words, every answer right by construction.

Nothing here is about any world. Names are words of `words.txt` (no name of a game in it), invented words and ids; what is
learned is to copy, look up, count, follow changes, call a tool by its schema, and judge an action against what was said.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from dreamgym_lg.integrations.transformers.small_base.names import Conversation, Names
from dreamgym_lg.integrations.transformers.small_base.tool_skills import (
    answer_calls,
    call_tools,
    follow_calls,
    work_through,
)

ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
_VERBS = "take get pick push pull find choose select use carry lift touch press grab want"
VERBS = _VERBS.split()


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
    size, places = _size(rng, 9), rng.randint(2, 6)
    drawn = names.several(size + places)
    things, spare = drawn[:size], drawn[size:]
    if rng.random() < 0.5:
        texts = [f"The list: {', '.join(things)}\n"]
        for extra in spare[: rng.randint(1, 3)]:
            if len(things) > 1 and rng.random() < 0.6:
                gone = things.pop(rng.randrange(len(things)))
                texts[-1] += f"Without {gone}."
            else:
                things.append(extra)
                texts[-1] += f"And {extra}."
            texts += [", ".join(things), ""]
        return Conversation(_turns(*texts[:-1]))
    where = {thing: rng.choice(spare) for thing in things}
    texts = ["\n".join(f"The {thing} is in the {place}." for thing, place in where.items()) + "\n"]
    for _ in range(rng.randint(3, 6)):
        thing = rng.choice(list(where))
        if rng.random() < 0.5:
            where[thing] = rng.choice(spare)
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


def all_marked(rng: Random, names: Names) -> Conversation:
    """Each of the things with one of several marks, once, in the order in which they were shown."""
    marks = names.several(rng.randint(2, 4), names.word)
    things = names.several(_size(rng, 12))
    marked = [(rng.choice(marks), thing) for thing in things]
    wanted, verb = rng.choice(marked)[0], rng.choice(VERBS)
    shown = _listed(rng, [f"{mark} {thing}" for mark, thing in marked])
    steps = [thing for mark, thing in marked if mark == wanted]
    order = f"{verb.capitalize()} all that is {wanted}."
    texts = [rng.choice([f"{order}\n{shown}", f"You see {shown}\n{order}"])]
    return Conversation(_turns(*_acted(rng, texts, [(f"{verb} {step}", step) for step in steps], f"You {verb} the ")))


def put_away(rng: Random, names: Names) -> Conversation:
    """Things that lie in wrong places are taken one by one, each put where it belongs; the others stay."""
    size, count = _size(rng, 9), rng.randint(2, 6)
    drawn = names.several(size + count)
    things, places = drawn[:size], drawn[size:]
    lies = {thing: rng.choice([*places, ""]) for thing in things}
    belongs = {thing: rng.choice(places) for thing in things}
    told = [f"{thing}: {place}" for thing, place in belongs.items()]
    said = [f"The {thing} belongs in the {place}." for thing, place in belongs.items()]
    rng.shuffle(told)
    rng.shuffle(said)
    rule = rng.choice([" ".join(said), "\n".join(told)])
    room = [f"a {place} that contains {_and([t for t in things if lies[t] == place])}" for place in places]
    room += [f"a {thing}" for thing in things if not lies[thing]]
    rng.shuffle(room)
    shown = " ".join(rng.choice(["You see ", "There is also ", "You also see "]) + f"{part}." for part in room)
    order = [t for part in room for t in things if f"a {t}" == part or (lies[t] and part.startswith(f"a {lies[t]} that"))]
    take, put = rng.choice(VERBS), rng.choice(["put", "place", "leave"])
    acts = []
    for thing in order:
        if lies[thing] != belongs[thing]:
            acts += [(f"{take} {thing}", f"{take} the {thing}")]
            acts += [(f"{put} {thing} in {belongs[thing]}", f"{put} the {thing} in the {belongs[thing]}")]
    verbs = f"You may {take} and {put}. Do what has to be done.\n"
    texts = [rng.choice([f"{verbs}{rule}\n{shown}", f"{verbs}{shown}\n{rule}"])]
    return Conversation(_turns(*_acted(rng, texts, acts[:8], "You "))) if acts else put_away(rng, names)


def _and(things: list[str]) -> str:
    return " and ".join(f"a {thing}" for thing in things) or "nothing"


def _acted(rng: Random, texts: list[str], acts: list[tuple[str, str]], answer: str) -> list[str]:
    """The texts, then each action and what it gives. Args: `acts`, actions with the end of the answer."""
    short = rng.random() < 0.2
    for action, then in acts:
        texts += [action, "ok" if short else f"{answer}{then}."]
    return texts[:-1]


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


def rules(rng: Random, names: Names) -> Conversation:
    """What has to be done with each of some records, by rules that say so for every value of one field."""
    field, *values = names.several(rng.randint(3, 6), names.word)
    done = {value: rng.choice(VERBS) for value in values}
    said = " ".join(rng.choice([f"{value}: {verb} it.", f"If it is {value}, {verb} it."]) for value, verb in done.items())
    texts = [f"{said}\n"]
    for thing in names.several(rng.randint(2, 5), rng.choice([names.id, names.name])):
        others = {names.word(): names.word() for _ in range(rng.randint(0, 2))}
        record = {"id": thing, **others, field: rng.choice(values)}
        if rng.random() < 0.5:
            record = dict(rng.sample(list(record.items()), len(record)))
        texts[-1] += f"{json.dumps(record)}\n" + rng.choice(["What now?", "What is to be done?", ""])
        texts += [f"{done[record[field]]} {thing}", ""]
    return Conversation(_turns(*texts[:-1]))


SKILLS: dict[Callable[[Random, Names], Conversation], int] = {
    repeat: 2,
    questions: 5,
    changes: 3,
    lookup: 3,
    game: 4,
    all_marked: 4,
    put_away: 5,
    judge: 3,
    rules: 3,
    call_tools: 5,
    follow_calls: 4,
    work_through: 6,
    answer_calls: 5,
}
"""Each skill with its share."""


def conversation(seed: int | str, words: list[str] | None = None) -> Conversation:
    """One conversation; the same for the same seed. Args: `words`, instead of `known_words()`."""
    rng = Random(f"small base/{seed}")
    (skill,) = rng.choices(list(SKILLS), weights=list(SKILLS.values()))
    return skill(rng, Names(rng, words))
