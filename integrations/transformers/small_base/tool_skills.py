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


def _result(tool: Tool, fields: Mapping[str, str]) -> dict[str, Any]:
    return {"role": "tool", "name": tool.name, "content": json.dumps(fields)}


def _reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
