"""Conversations with tools: calls that are asked for, and calls that follow from what an earlier one returned."""

import json
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.integrations.transformers.small_base.names import Conversation, Names

_ACTS = "find get look show list open close send cancel check update set start stop read write add drop search change"
ACTS = _ACTS.split()
DESCRIBED = ["{act} the {thing}.", "Use it to {act} a {thing}.", "{act}s one {thing} by its {key}.", "{act} {thing}"]


class Tool(NamedTuple):
    """A tool of one conversation: `{act}_{thing}`, or `{act}` alone."""

    act: str
    thing: str
    name: str
    keys: list[str]
    """Its arguments: all are strings and required."""
    description: str

    def schema(self) -> dict[str, Any]:
        parameters = {"properties": {key: {"type": "string"} for key in self.keys}, "required": self.keys, "type": "object"}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _tools(rng: Random, names: Names, count: int) -> list[Tool]:
    """So many tools, no two of one name. Some conversations have one kind of thing, some have tools named by the act alone."""
    one, alone, made = names.word(), rng.random() < 0.25, list[Tool]()
    shared = rng.random() < 0.4
    for act in rng.sample(ACTS, count):
        thing = one if shared else rng.choice([rng.choice(names.words), names.word()])
        keys = [f"{thing}_id" if rng.random() < 0.6 else names.word()]
        keys += [names.word() for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))]
        described = rng.choice(DESCRIBED).format(act=act, thing=thing, key=keys[0])
        made.append(Tool(act, thing, act if alone else f"{act}_{thing}", list(dict.fromkeys(keys)), described))
    return made


def call_tools(rng: Random, names: Names) -> Conversation:
    """Calls of the tools that are asked for, with ids and names as arguments; their results; an answer that quotes them."""
    tools = _tools(rng, names, rng.choice([1, 1, 2, 2, 3, 4]))
    return _conversation(rng, names, tools, [_asked(rng, names, tools) for _ in range(rng.choice([1, 1, 2]))])


def follow_calls(rng: Random, names: Names) -> Conversation:
    """A thing is looked up, and what is found there says what to call next: the argument, or which tool."""
    tools = _tools(rng, names, rng.choice([2, 2, 3, 3, 4]))
    rounds = [rng.choice([_chained, _decided])(rng, names, tools) for _ in range(rng.choice([1, 1, 2]))]
    return _conversation(rng, names, tools, rounds)


def _asked(rng: Random, names: Names, tools: list[Tool]) -> list[dict[str, Any]]:
    """A request, and one to three calls that it names."""
    asked = [(tool, _arguments(rng, names, tool.keys)) for tool in rng.sample(tools, rng.randint(1, min(3, len(tools))))]
    said = " Then ".join(_request(rng, tool, arguments) for tool, arguments in asked)
    if rng.random() < 0.3:  # what is asked for is one of several that were named
        others = names.several(rng.randint(2, 10), rng.choice([names.id, names.name]))
        others.insert(rng.randrange(len(others)), rng.choice(list(asked[0][1].values())))
        said = f"{rng.choice(['The list', 'Here', 'Known'])}: {', '.join(others)}.\n{said}"
    turns = []
    for tool, arguments in asked:
        turns += [_call(tool, arguments), _result(tool, result := {**arguments, **_fields(rng, names)})]
    field = rng.choice(list(result))
    said += rng.choice([f" What is the {field}?", f" Tell me the {field}."])
    return [_user(said), *turns, _reply(f"The {field} is {result[field]}.")]


def _chained(rng: Random, names: Names, tools: list[Tool]) -> list[dict[str, Any]]:
    """A request of which the second call's first argument is a value that the first one returns."""
    look, then = rng.sample(tools, 2)
    fields = _fields(rng, names, at_least=2)
    field = rng.choice(list(fields))
    arguments = {then.keys[0]: fields[field]} | _arguments(rng, names, then.keys[1:])
    more = "".join(f", {key} {arguments[key]}" for key in then.keys[1:])
    return _followed(rng, names, look, fields, f" Then {then.act} its {field}{more}.", then, arguments)


def _decided(rng: Random, names: Names, tools: list[Tool]) -> list[dict[str, Any]]:
    """A request of which the second call's tool depends on a value that the first one returns."""
    look, *others = rng.sample(tools, len(tools))
    fields, cases = _fields(rng, names), dict(zip(names.several(len(others), names.word), others, strict=True))
    field, (value, then) = rng.choice(list(fields)), rng.choice(list(cases.items()))
    fields[field] = value
    arguments = _arguments(rng, names, then.keys)
    rules = " ".join(f"{value}: {tool.name}." for value, tool in cases.items())
    more = "".join(f" {key} {value}." for key, value in arguments.items())
    return _followed(rng, names, look, fields, f" Look at its {field}. {rules}{more}", then, arguments)


def _followed(
    rng: Random,
    names: Names,
    look: Tool,
    fields: dict[str, str],
    order: str,
    then: Tool,
    arguments: Mapping[str, str],
) -> list[dict[str, Any]]:
    """A request to look something up, an order of what to do then, both calls, and an answer that quotes the second one."""
    first, found = _arguments(rng, names, look.keys), _fields(rng, names)
    field = rng.choice(list(found))
    shown = {**first, **fields} if rng.random() < 0.5 else fields
    turns = [_call(look, first), _result(look, shown), _call(then, arguments), _result(then, found)]
    return [_user(f"{_request(rng, look, first)}{order} Say the {field}."), *turns, _reply(f"{field} {found[field]}")]


class Rules(NamedTuple):
    """Which tool deals with a record, by the value of one of its fields; the last value asks for none."""

    field: str
    values: list[str]
    cases: dict[str, Tool]
    said: str


def work_through(rng: Random, names: Names) -> Conversation:
    """One to three things are looked up, each is dealt with by rules that say which tool its record asks for, if any.

    Who asks may own them: then a first call says which ones there are, and the first or last of them is meant.
    """
    first, *others = _tools(rng, names, rng.choice([2, 3, 3, 4, 5]))
    look, rules = first._replace(keys=first.keys[:1]), _rules(rng, names, others)
    (key,), owned = look.keys, rng.random() < 0.35
    things = names.several(rng.randint(1, 4) if owned else rng.choice([1, 1, 2, 2, 3]), names.id)
    said, turns, tools = _asks_for(rng, names, look, things), [], [look, *others]
    if owned:
        owner, id_ = names.word(), names.id()
        tool = Tool(look.act, owner, f"{look.act}_{owner}s", [f"{owner}_id"], f"{look.act} the {owner}.")
        which, at = rng.choice([("first", 0), ("last", -1)])
        said = f"I am {owner} {id_}. Look at my {which} {look.thing}."
        turns += [_call(tool, {f"{owner}_id": id_}), _result(tool, {f"{owner}_id": id_, "all": things})]
        things, tools = [things[at]], [*tools, tool]
    for thing in things:
        record = {**_fields(rng, names), rules.field: rng.choice(rules.values)}
        record = dict(rng.sample(list(record.items()), len(record)))
        turns += [_call(look, {key: thing}), _result(look, {key: thing, **record} if rng.random() < 0.5 else record)]
        if (then := rules.cases.get(record[rules.field])) is not None:
            more = {name: rng.choice(list(record.values())) for name in then.keys[1:]}
            said += "".join(f" {name} of {thing}: {value}." for name, value in more.items())
            turns += [_call(then, {then.keys[0]: thing, **more}), _result(then, {"now": then.act})]
    value = record[rules.field]
    turns.append(_reply(rng.choice([f"The {rules.field} of {thing} is {value}.", f"{thing} {value}"])))
    made = _conversation(rng, names, tools, [[_user(said), *turns]])
    made.messages[0]["content"] = f"{rules.said}\n{made.messages[0]['content']}"
    return made


def _rules(rng: Random, names: Names, tools: list[Tool]) -> Rules:
    field, *values = names.several(len(tools) + 2, names.word)
    cases = dict(zip(values, tools, strict=False))
    said = [rng.choice([f"{value}: {tool.name}.", f"If it is {value}, {tool.act} it."]) for value, tool in cases.items()]
    said.append(rng.choice([f"{values[-1]}: nothing.", f"If it is {values[-1]}, do nothing."]))
    rng.shuffle(said)
    told = f"Look at the {field} of each. {' '.join(said)} Say at the end: The {field} of it is ..."
    return Rules(field, values, cases, told)


def _asks_for(rng: Random, names: Names, look: Tool, things: list[str]) -> str:
    told = ", ".join(things[:-1]) + f" and {things[-1]}" if len(things) > 1 else things[0]
    return rng.choice([f"It is about {told}.", f"Please look at {look.thing} {told}.", f"{names.word()}: {told}."])


# --- The world's side -----------------------------------------------------------------------------------------------


def answer_calls(rng: Random, names: Names) -> Conversation:
    """What tools answer: records that were noted, as they were changed since; and whether all was done that the task asks."""
    kind, *keys = names.several(rng.randint(3, 5), names.word)
    records = {thing: {key: names.word() for key in keys} for thing in names.several(rng.randint(2, 5), names.id)}
    look, change = f"{rng.choice(ACTS)}_{kind}", f"{rng.choice(['set', 'change', 'update'])}_{kind}"
    noted = "\n".join(f"{look} {json.dumps({kind: thing})}: {json.dumps(record)}" for thing, record in records.items())
    wanted = {
        thing: (rng.choice(keys), names.word()) for thing in rng.sample(list(records), rng.randint(1, min(3, len(records))))
    }
    task = " and ".join(f"set the {key} of {thing} to {value}" for thing, (key, value) in wanted.items())
    system = f"The tools: {look}({kind})\n{change}({kind}, field, value)\nTask: {task}.\nnotes:\n{noted}"
    texts, done = [system + "\n"], dict[str, tuple[str, str]]()
    plan = [thing for thing in wanted if rng.random() < 0.8]
    for _ in range(rng.randint(2, 6)):
        if plan and rng.random() < 0.5:
            thing = plan.pop(0)
            key, value = wanted[thing] if rng.random() < 0.8 else (rng.choice(keys), names.word())
            action, answer = {"name": change, "arguments": {kind: thing, "field": key, "value": value}}, {key: value}
            records[thing][key], done[thing], first = value, (key, value), "valid, it writes"
        else:
            thing = rng.choice(list(records)) if rng.random() < 0.85 else names.id()
            action, first = {"name": look, "arguments": {kind: thing}}, "valid, it reads"
            answer = records.get(thing, {"error": f"no {thing}"})
            first += "" if thing in records else ", refused"
        texts[-1] += f"> {json.dumps(action)}"
        texts += [f"{first}\nreward 0, continues\n{json.dumps(answer)}", ""]
    calls = "; ".join(f"{change}({thing}, {key}, {value})" for thing, (key, value) in done.items()) or "nothing"
    missing = next((thing for thing in wanted if done.get(thing) != wanted[thing]), None)
    verdict = "valid\nreward 1, success" if missing is None else f"valid, {missing} is wrong\nreward 0, failure"
    texts[-1] += f'> {{"answer": "{rng.choice(["Done.", "It is done.", names.word()])}"}}\ncalls so far: {calls}'
    texts.append(f"{verdict}\n(nothing)")
    return Conversation([{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)])


def _conversation(rng: Random, names: Names, tools: list[Tool], rounds: list[list[dict[str, Any]]]) -> Conversation:
    """The rounds one after the other, sometimes after a system message and a greeting."""
    system = [{"role": "system", "content": f"You help with {names.word()}."}] if rng.random() < 0.4 else []
    greeting = rng.choice(["", "Hello, ", f"I am {names.word().capitalize()}. ", f"My {names.word()} is {names.name()}. "])
    rounds[0][0]["content"] = greeting + rounds[0][0]["content"]
    offered = [tool.schema() for tool in rng.sample(tools, len(tools))]
    return Conversation([*system, *(turn for turns in rounds for turn in turns)], offered)


def _arguments(rng: Random, names: Names, keys: list[str]) -> dict[str, str]:
    return dict(zip(keys, names.several(len(keys), rng.choice([names.id, names.id, names.name])), strict=True))


def _fields(rng: Random, names: Names, at_least: int = 1) -> dict[str, str]:
    """What a call returns."""
    keys = names.several(rng.randint(at_least, 4), names.word)
    return {key: rng.choice([names.id, names.name])() for key in keys}


def _request(rng: Random, tool: Tool, arguments: Mapping[str, str]) -> str:
    """In words; a single argument is often named without its key."""
    given = " and ".join(f"{key} {value}" for key, value in arguments.items())
    if len(arguments) == 1 and rng.random() < 0.4:
        (given,) = arguments.values()
    act, thing = tool.act, tool.thing
    return rng.choice(
        [f"please {act} the {thing} with {given}.", f"{act} my {thing}: {given}.", f"can you {act} {thing} {given}?"]
    )


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _call(tool: Tool, arguments: Mapping[str, str]) -> dict[str, Any]:
    function = {"name": tool.name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _result(tool: Tool, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "name": tool.name, "content": json.dumps(fields)}


def _reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
