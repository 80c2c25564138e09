"""Conversations about records: which of a list is meant by what it says, and numbers, dates and times that are compared."""

import json
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.integrations.transformers.small_base.names import Conversation, Names
from dreamgym_lg.integrations.transformers.small_base.tool_skills import ACTS, Tool, replies, tool_call, tool_result, user_says

Value = str | int | float
ORDERED = ["number", "amount", "date", "time"]
"""The kinds of values that are compared; the others are `word`, `name` and `id`."""


class Records(NamedTuple):
    """Records of one kind of thing, each with the same keys in the same order."""

    thing: str
    key: str
    """Of their ids, which stand anywhere in a record."""
    kinds: dict[str, str]
    """The kind of each other key's values."""
    rows: list[dict[str, Value]]

    def shown(self, rng: Random) -> str:
        """As JSON, as lines, or in a field of their own."""
        if (style := rng.randrange(3)) == 0:
            return "\n".join(rng.choice(["- ", ""]) + ", ".join(f"{k}: {v}" for k, v in row.items()) for row in self.rows)
        return json.dumps(self.rows if style == 1 else {f"{self.thing}s": self.rows})

    def tells(self, rng: Random, row: dict[str, Value]) -> list[str]:
        """Keys whose values tell a record from all others; none where it has a twin."""
        told, left = list[str](), [each for each in self.rows if each is not row]
        for key in rng.sample(list(self.kinds), len(self.kinds)):
            if not left:
                break
            others = [each for each in left if each[key] == row[key]]
            told += [key] if len(others) < len(left) else []
            left = others
        return [] if left else told

    def named(self, rng: Random, row: dict[str, Value], told: list[str]) -> str:
        """The record in words, by these keys: `blue parcel`, `parcel with colour blue and day 2026-03-01`."""
        if len(told) == 1 and self.kinds[told[0]] in ("word", "name") and rng.random() < 0.5:
            return f"{row[told[0]]} {self.thing}"
        if rng.random() < 0.3:
            return f"{self.thing} {rng.choice(['of', 'for', 'on', 'at'])} {' and '.join(str(row[key]) for key in told)}"
        return f"{self.thing} with {' and '.join(f'{key} {row[key]}' for key in told)}"


def draw_records(rng: Random, names: Names, count: int) -> Records:
    """So many records, some fields of which have the same value in several."""
    thing, *keys = names.several(rng.randint(3, 5), names.word)
    key = rng.choice(["id", f"{thing}_id", names.word()])
    kinds = {each: rng.choice(["word", "word", "name", "id", *ORDERED]) for each in keys if each != key}
    pools = {
        each: [names.value(kind) for _ in range(rng.choice([2, 3, count, count, 2 * count]))] for each, kind in kinds.items()
    }
    order = rng.sample([key, *kinds], len(kinds) + 1)
    rows = []
    for id_ in names.several(count, names.id):
        row: dict[str, Value] = {each: rng.choice(pool) for each, pool in pools.items()} | {key: id_}
        rows.append({each: row[each] for each in order})
    return Records(thing, key, kinds, rows)


def pick_records(rng: Random, names: Names) -> Conversation:
    """Questions about a list of records: which one has a value, a field of the one that has it, the largest and smallest."""
    records = draw_records(rng, names, rng.choice([2, 2, 3, 3, 4, 5, 6]))
    texts = [records.shown(rng) + "\n"]
    for _ in range(rng.randint(4, 8)):
        asked, answer = _question(rng, names, records)
        texts[-1] += asked
        texts += [answer, ""]
    return Conversation([{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts[:-1])])


def _question(rng: Random, names: Names, records: Records) -> tuple[str, str]:
    row, key = rng.choice(records.rows), records.key
    field, kind = rng.choice(list(records.kinds.items()))
    chance, told = rng.random(), records.tells(rng, row)
    if chance < 0.1:
        strange = {each: names.value(kind) for each, kind in records.kinds.items()}
        if not any(each[field] == strange[field] for each in records.rows):
            return f"Which {records.named(rng, strange, [field])}?", "none"
    if kind in ORDERED and chance < 0.25:
        values = [each[field] for each in records.rows]
        most, least = ("last", "first") if kind in ("date", "time") else ("most", "least")
        word, wanted = rng.choice([(most, max(values)), (least, min(values))])  # type: ignore[type-var]
        if values.count(wanted) == 1:
            return f"Which has the {word} {field}?", str(records.rows[values.index(wanted)][key])
    if chance < 0.4 or not told:
        return f"The {field} of {row[key]}?", str(row[field])
    if chance < 0.75:
        return rng.choice(["Which is the ", "Find the ", "Which "]) + f"{records.named(rng, row, told)}?", str(row[key])
    return f"What is the {field} of the {records.named(rng, row, told)}?", str(row[field])


def compare(rng: Random, names: Names) -> Conversation:
    """Two numbers, dates or times: whether one is more than the other or than a limit, which one is, and what to do then."""
    texts = [""]
    for _ in range(rng.randint(3, 6)):
        kind = rng.choice(ORDERED)
        key, other, thing = names.several(3, names.word)
        value, limit = names.near(kind)
        more = rng.choice(["after", "later than"] if kind in ("date", "time") else ["more than", "above"])
        less = rng.choice(["before", "earlier than"] if kind in ("date", "time") else ["less than", "below"])
        word, holds = rng.choice([(more, value > limit), (less, value < limit)])  # type: ignore[operator]
        record = {key: value, other: limit}
        shown = json.dumps(dict(rng.sample(list(record.items()), 2)) if rng.random() < 0.5 else record)
        style = rng.randrange(4)
        if style == 0:
            texts[-1] += f"{shown}\nIs {key} {word} {other}?"
            answer = "yes" if holds else "no"
        elif style == 1:
            texts[-1] += f"{json.dumps({key: value})}\nIs {key} {word} {limit}?"
            answer = "yes" if holds else "no"
        else:
            do, else_do = rng.sample(ACTS, 2)
            than = other if style == 2 else str(limit)
            texts[-1] += f"If {key} is {word} {than}, {do} it, else {else_do} it.\n{thing}: {shown}"
            answer = f"{do if holds else else_do} {thing}"
        texts += [answer, ""]
    return Conversation([{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts[:-1])])


def choose_record(rng: Random, names: Names) -> Conversation:
    """A list is looked up; the record that is meant is dealt with by its id, unless a rule or the call itself refuses."""
    records = draw_records(rng, names, rng.choice([1, 2, 2, 3, 3, 4]))
    row = rng.choice(records.rows)
    if not (told := records.tells(rng, row)) and len(records.rows) > 1:
        return choose_record(rng, names)
    thing, owner, owner_id = records.thing, names.word(), names.id()
    look = rng.choice(ACTS)
    lister = Tool(look, owner, rng.choice([f"{look}_{thing}s", f"{look}_{owner}"]), [f"{owner}_id"], f"{look} the {owner}.")
    tools = _deeds(rng, names, thing, look)
    then = rng.choice(tools)
    arguments: dict[str, Any] = {then.keys[0]: row[records.key]}
    arguments |= {each: names.value(then.kinds.get(each, "word")) for each in then.keys[1:]}
    given = "".join(rng.choice([f", {k} {v}", f" with {k} {v}", f" {v}"]) for k, v in list(arguments.items())[1:])
    said = rng.choice(["my ", "the "]) + (records.named(rng, row, told) if told else thing)
    asked = rng.choice(
        [
            f"I am {owner} {owner_id}. Please {then.act} {said}{given}.",
            f"{then.act} {said}{given}. {owner}: {owner_id}.",
            f"Hello, {owner_id} here, can you {then.act} {said}{given}?",
        ]
    )
    rule, refusal = _rule(rng, names, records, row, then)
    shown: Any = records.rows if rng.random() < 0.5 else {f"{owner}_id": owner_id, f"{thing}s": records.rows}
    turns = [user_says(asked), tool_call(lister, {f"{owner}_id": owner_id}), tool_result(lister, shown)]
    if refusal:
        turns.append(replies(refusal))
    elif rng.random() < 0.15:
        why = names.word()
        turns += [tool_call(then, arguments), tool_result(then, {"error": f"it is {why}"}), replies(f"Sorry, it is {why}.")]
    else:
        turns += [tool_call(then, arguments), tool_result(then, {"now": then.act}), replies(f"{row[records.key]}: {then.act}.")]
    system = [{"role": "system", "content": f"You help with {thing}s.{rule}"}]
    return Conversation([*system, *turns], [tool.schema() for tool in rng.sample([lister, *tools], len(tools) + 1)])


def _deeds(rng: Random, names: Names, thing: str, look: str) -> list[Tool]:
    """Tools that do something to a thing, by its id."""
    made = []
    for act in rng.sample([each for each in ACTS if each != look], rng.randint(2, 4)):
        kinds = {names.word(): rng.choice(["word", "id", *ORDERED]) for _ in range(rng.choice([0, 0, 1, 1, 2]))}
        made.append(Tool(act, thing, f"{act}_{thing}", [f"{thing}_id", *kinds], f"{act} the {thing}.", kinds))
    return made


def _rule(rng: Random, names: Names, records: Records, row: dict[str, Value], then: Tool) -> tuple[str, str]:
    """A rule about what may be done with a record, and the answer where it forbids what is asked ("" where it does not)."""
    if rng.random() < 0.4:
        return "", ""
    field, kind = rng.choice(list(records.kinds.items()))
    value, act, thing = row[field], then.act, records.thing
    refusal = f"No, its {field} is {value}."
    if kind in ORDERED and rng.random() < 0.7:
        limit = names.near(kind, value)[1]
        above = value > limit  # type: ignore[operator]
        word = ("after" if above else "before") if kind in ("date", "time") else ("more than" if above else "less than")
        other = {"after": "before", "before": "after", "more than": "less than", "less than": "more than"}[word]
        forbids = rng.random() < 0.5 and value != limit
        return f" Do not {act} a {thing} if its {field} is {word if forbids else other} {limit}.", refusal if forbids else ""
    forbids = rng.random() < 0.5
    bad = value if forbids else names.value(kind)
    return f" Do not {act} a {thing} if its {field} is {bad}.", refusal if bad == value else ""
