"""Generates `world.py`, the Python module of a world, from rules."""

import json
import keyword
import re
from collections.abc import Mapping, Sequence

from dreamgym_lg.compiled.enumerate_rules import Case, Rule
from dreamgym_lg.compiled.examples import MIN_KEPT, Binding, label_of
from dreamgym_lg.compiled.expressions import (
    MENTIONED,
    Arithmetic,
    Build,
    Const,
    Expression,
    Extend,
    Fixed,
    Key,
    Later,
    Put,
    Ref,
    Refuse,
    Sorted,
    Text,
)
from dreamgym_lg.compiled.recordings import Recordings
from dreamgym_lg.compiled.runtime import IMPORTED
from dreamgym_lg.compiled.trees import MIXED, Branch, Condition, Tree, conditions_of

HEAD = f'''"""The backend of {{traces}} recorded episodes.

Compiled from recorded traces. Each function answers a tool's calls on the documents of one episode (`state`) and raises
`Unknown` where it does not know the answer. REPLAY.md says how exactly each does.
"""

from typing import Any

from runtime import {IMPORTED}  # noqa

READS = {{reads!r}}
"""Tools that change nothing, with their arguments."""
DEFAULTS: dict[str, dict[str, Any]] = {{defaults!r}}
"""Default values of their arguments: a call is the same whether or not it writes one out."""
JSON: dict[str, dict[str, Any]] = {{styles!r}}
"""How each tool writes JSON."""
MAY_CHANGE: dict[str, list[str]] = {{may_change!r}}
"""Writing tool -> look-ups that it may change although they share no id with the call, such as a list of open orders."""
NEVER_CHANGES: dict[str, list[str]] = {{never_changes!r}}
"""Writing tool -> look-ups about its ids that never changed in {MIN_KEPT} recorded checks."""
'''


def write_source(recordings: Recordings, functions: str) -> str:
    """The text of `world.py`. Args: `functions`, the code of the writing tools."""
    styles = {tool: dict(style) for tool, style in recordings.styles.items()}
    defaults = {tool: values for tool, values in recordings.defaults.items() if tool in recordings.reads}
    effects = {"may_change": dict(recordings.may_change), "never_changes": dict(recordings.never_changes)}
    head = HEAD.format(traces=len(recordings.traces), reads=dict(recordings.reads), styles=styles, defaults=defaults, **effects)
    return "\n\n\n".join([head.rstrip(), *map(_reading, recordings.reads), *filter(None, [functions])]) + "\n"


def write_rules(rules: Mapping[str, Rule | None]) -> str:
    """The code of the writing tools' functions."""
    return "\n\n\n".join(_writing(tool, rule) for tool, rule in sorted(rules.items()))


def _reading(tool: str) -> str:
    return f'def {tool}(state: State, /, **arguments: Any) -> Any:\n    return state.read("{tool}", **arguments)'


def _writing(tool: str, rule: Rule | None) -> str:
    head = f"def {tool}(state: State, /, **args: Any) -> Any:\n"
    if rule is None:
        return head + '    raise Unknown("no rule was found")'
    names = {binding.name: _identifier(binding.name) for binding in rule.bindings}
    mentioned = {condition.left.path[0] for condition in conditions_of(rule.tree) if condition.left.root == MENTIONED}
    flags = ", ".join(f"{label_of(ref)!r}: state.mentions({_code(ref, {})})" for ref in rule.ids if label_of(ref) in mentioned)
    lines = [f"    {MENTIONED} = {{{flags}}}"] if mentioned else []
    lines += [
        f"    {names[b.name]} = {_with_keys(f'state.read({b.tool!r}, **{_call(b, names)})', rule.keys.get(b.name))}"
        for b in rule.bindings
    ]
    lines += _check_alike(rule.alike, names, "    ")
    lines += [f"    check_apart({_call(one, names)}, {_call(other, names)})" for one, other in rule.apart]
    lines += [f"    check_seen({_at(ref, names)}, {list(values)!r})" for ref, values in rule.seen.items()]
    lines += [f"    state.check_mentions({_code(ref, names)})" for ref in rule.named]
    lines += [f"    state.check_mentions({_code(ref, names)}, changed=True)" for ref in rule.answered]
    return head + "\n".join([*lines, *_branches(rule.tree, rule, names, "    ")])


def _with_keys(code: str, keys: Sequence[str] | None) -> str:
    return f"with_keys({code}, {list(keys)!r})" if keys else code


def _branches(tree: Tree, rule: Rule, names: Mapping[str, str], indent: str) -> list[str]:
    if isinstance(tree, Branch):
        yes = _branches(tree.yes, rule, names, indent + "    ")
        test = _condition(tree.condition, names)
        if tree.others:
            others = ", ".join("not " * (not agrees) + _condition(other, names) for other, agrees in tree.others)
            test = f"agreed({test}, {others})"
        return [f"{indent}if {test}:", *yes, *_branches(tree.no, rule, names, indent)]
    if tree == MIXED:
        return [f'{indent}raise Unknown("such calls were answered in ways that nothing tells apart")']
    return _case(rule.cases[tree], rule, names, indent)


def _case(case: Case, rule: Rule, names: Mapping[str, str], indent: str) -> list[str]:
    lines = _check_alike(case.alike, names, indent)
    if isinstance(case.answer, Refuse):
        return [*lines, f"{indent}return {_code(case.answer, names)}"]
    bindings = {binding.name: binding for binding in rule.bindings}
    lines.append(f"{indent}answer = {_code(case.answer, names)}")
    for binding in map(bindings.__getitem__, case.unknown):
        lines.append(f"{indent}state.forget_answer({binding.tool!r}, **{_call(binding, names)})")
    if rule.ids:
        named = ", ".join(_at(ref, names) for ref in rule.ids)
        unknown = {bindings[name].tool for name in case.unknown}
        kept = sorted({*rule.never_changes, *(binding.tool for binding in rule.bindings)} - unknown)
        linked = ", linked=True" if case.unknown else ""
        lines.append(f"{indent}state.forget({named}, keep={kept!r}{linked})")
    if rule.may_change:
        lines.append(f"{indent}state.forget_answers({', '.join(map(repr, rule.may_change))})")
    for name, document in case.effects:
        binding = bindings[name]
        lines.append(f"{indent}state.write({binding.tool!r}, {_code(document, names)}, **{_call(binding, names)})")
    return [*lines, f"{indent}return answer"]


def _check_alike(alike: Sequence[tuple[Condition, bool]], names: Mapping[str, str], indent: str) -> list[str]:
    """A line that raises `Unknown` unless all these conditions have their outcomes."""
    tests = ["not " * (not holds) + _condition(condition, names) for condition, holds in alike]
    return [f"{indent}agreed(True, {', '.join(dict.fromkeys(tests))})"] if tests else []


def _call(binding: Binding, names: Mapping[str, str]) -> str:
    """The arguments of the binding's reading call, as a dictionary."""
    return "{" + ", ".join(f"{name!r}: {_code(ref, names)}" for name, ref in binding.sources) + "}"


def _condition(condition: Condition, names: Mapping[str, str]) -> str:
    left, right = _at(condition.left, names), condition.right
    match condition.kind, right:
        case "exists", _:
            return f"{left} is not MISSING"
        case "equals", _:
            return f"same({left}, {json.loads(right)!r})"
        case "same", _:
            return f"same({left}, {_at(right, names)})"
        case "named", _:
            return f"named({_at(right, names)}, {left})"
        case kind, Arithmetic():
            pair = [_code(condition.left, names), _code(right, names)]
            return f"at_most({', '.join(pair if kind == 'below' else reversed(pair))})"
        case _, Ref():
            return f"at_most({left}, {_at(right, names)})"
    last_below, first_above = right
    return f"below({left}, {last_below!r}, {first_above!r})"


def _at(ref: Ref, names: Mapping[str, str]) -> str:
    return f"at({', '.join([_root(ref, names), *(_step(step, names) for step in ref.path)])})"


def _code(expression: Expression, names: Mapping[str, str]) -> str:
    match expression:
        case Const(text):
            return repr(json.loads(text))
        case Ref(_, path):
            return _root(expression, names) + "".join(f"[{_step(step, names)}]" for step in path)
        case Sorted(start):
            return f"sorted({_code(start, names)})"
        case Later(start, unit, number):
            return f"later({_code(start, names)}, {unit}={_code(number, names)})"
        case Arithmetic(left, sign, right):
            return f"rounded({_code(left, names)} {sign} {_code(right, names)})"
        case Fixed(number, digits):
            return f"fixed({_code(number, names)}, {digits})"
        case Text(pieces):
            return " + ".join(repr(piece) if isinstance(piece, str) else f"str({_code(piece, names)})" for piece in pieces)
        case Refuse(text):
            return f"Refusal({_code(text, names)})"
        case Extend(start, values):
            return f"[*{_code(start, names)}, {', '.join(_code(value, names) for value in values)}]"
        case Put(start, changes):
            places = (f"([{', '.join(_step(step, names) for step in path)}], {_code(new, names)})" for path, new in changes)
            return f"put({_code(start, names)}, [{', '.join(places)}])"
        case Build():
            return _built(expression, names)


def _built(build: Build, names: Mapping[str, str]) -> str:
    values = [_code(value, names) for value in build.values]
    if build.keys is None:
        return f"[{', '.join(values)}]"
    return "{" + ", ".join(f"{key!r}: {value}" for key, value in zip(build.keys, values, strict=True)) + "}"


def _root(ref: Ref, names: Mapping[str, str]) -> str:
    """The variable of a reference's root."""
    return names.get(ref.root, ref.root)


def _step(step: Key, names: Mapping[str, str]) -> str:
    return f"{names.get(step[0], step[0])}[{step[1]!r}]" if isinstance(step, tuple) else repr(step)


def _identifier(name: str) -> str:
    plain = re.sub(r"\W", "_", name)
    return f"{plain}_" if keyword.iskeyword(plain) or plain in ("args", "state", "answer") else plain
