"""Reasoning without an annotator: what a recorded episode of a tool agent shows by itself, in one line a step.

Every line is made of what the prompt of its step shows (task, history, action, demonstrations), so that a model can learn to
write it. Which tool told an argument says most: a call of made-up values fails, and one of another request's is no success.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.experience.prompt_formats import first_observation, schemas, words
from dreamgym_lg.types import Step, Task

NOTHING = "nothing"
_REFUSED = re.compile(r"""^\W*(error|cannot|could not|not found|no such|unknown|invalid|refused|denied)\b|"error"\s*:""", re.I)
_ANSWER = 100
"""Characters shown of what a call was answered."""
_LITERAL = 24
"""Characters of a value that nothing told, such as a free text."""


class Played(NamedTuple):
    """One call of an episode with its answer, dreamed or recorded."""

    action: str
    answer: str
    valid: bool


class Made(NamedTuple):
    """A call of an episode, as final answers are judged by it."""

    call: str
    """The tool and where its arguments were told, not their values: `refund(order from the task)`, `refund(...) refused`."""
    answer: str


def played(exchange: Exchange) -> Played:
    """An exchange with the experience model as a call with its answer."""
    return Played(exchange.action, exchange.prediction.observation, exchange.prediction.valid)


def played_steps(steps: Sequence[Step]) -> list[Played]:
    """Recorded steps as calls with their answers."""
    return [Played(step.action, step.next_observation, step.valid) for step in steps]


def called(action: str) -> ToolCall | None:
    """The call that an action is; None for an answer, or for what is neither."""
    parsed = _parsed(action)
    return parsed if isinstance(parsed, ToolCall) else None


def calls_made(task: Task, history: Sequence[Played], tools: Collection[str] | None = None) -> list[Made]:
    """The valid calls of an episode, with where their arguments were told; of identical ones the last.

    Args: `tools`, only calls of these; None for all.
    """
    found: dict[str, Made] = {}
    for number, each in enumerate(history):
        call = called(each.action)
        if call is not None and each.valid and (tools is None or call.name in tools):
            refused = " refused" if _REFUSED.search(each.answer) else ""
            found[each.action] = Made(f"{call.name}({_arguments(task, history[:number], call)}){refused}", each.answer)
    return list(found.values())


def written(calls: Sequence[Made]) -> str:
    """The calls and the beginnings of their answers, on one line."""
    return "; ".join(f"{made.call}: {' '.join(made.answer.split())[:_ANSWER]}" for made in calls) or NOTHING


def call_reasoning(task: Task, history: Sequence[Played], step: Step, writes: Collection[str]) -> str:
    """Why a call is answered as it is: whether it is valid, reads or writes, and where its arguments were told."""
    call = called(step.action)
    if call is None:
        return "" if step.valid else "invalid, it is no tool call"
    kind = "" if not writes else "it writes" if call.name in writes else "it reads"
    refused = "it is refused" if step.valid and _REFUSED.search(step.next_observation) else ""
    parts = ["valid" if step.valid else "invalid", kind, _arguments(task, history, call), refused]
    return ", ".join(part for part in parts if part)


def untold(task: Task, history: Sequence[Played], answer: str, known: Collection[str]) -> list[str]:
    """What a final answer claims and nobody told in its episode: ids, numbers, and words of `known`, what tools tell."""
    told = words(" ".join(text for _, text in _texts(task, history)))
    said = dict.fromkeys(re.findall(r"[\w'-]+", str(_parsed(answer)).lower()))
    return [word for word in said if word not in told and (word in known or re.search(r"\d", word))]


def answer_reasoning(
    task: Task,
    history: Sequence[Played],
    found: Sequence[Step],
    claims: Sequence[str],
    *,
    success: bool,
    writes: Collection[str],
) -> str:
    """Why a final answer ends its episode in success or failure: the calls that were needed beside those that were made.

    Needed were, in a success, those that it made; else those of the first demonstration whose success made others.

    Args:
        history: The calls before it.
        found: Its demonstrations (`SimilarSuccesses`).
        claims: What it says that nobody told (`untold`).
        writes: The tools that change the world, whose calls count. Empty: all calls do.
    """
    done = [made.call for made in calls_made(task, history, writes or None)]
    needed = done if success else next((calls for step in found if (calls := _needed(step, writes)) != done), done)
    verdict = "it completes the task" if success else "it fails the task"
    fault = f"{claims[0]} is told by nobody" if claims else "it says the wrong thing"
    fault = fault if not success and (claims or needed == done) else ""
    parts = ["valid", f"needed: {_listed(needed)}", f"done: {_listed(done)}", fault, verdict]
    return ", ".join(part for part in parts if part)


def _listed(calls: Sequence[str]) -> str:
    return "; ".join(calls) or NOTHING


def _needed(step: Step, writes: Collection[str]) -> list[str]:
    """The calls that a demonstration of `SimilarSuccesses` names."""
    calls = re.findall(r"(?:after |; )(\w+\([^()]*\)(?: refused)?): ", step.reasoning)
    return [call for call in calls if not writes or call.partition("(")[0] in writes]


def success_shown(task: Task, steps: Sequence[Step]) -> Step:
    """The final answer of a recorded success as a demonstration: what was asked, what was done, what was said."""
    *calls, answer = steps
    done = written(calls_made(task, played_steps(calls)))
    reasoning = f"valid, after {done}, it completes the task"
    return replace(answer, observation=first_observation(task), reward=1.0, terminated=True, reasoning=reasoning)


def _arguments(task: Task, history: Sequence[Played], call: ToolCall) -> str:
    texts, fixed = _texts(task, history), _fixed(task, call.name)
    return ", ".join(
        f"{name}={_plain(value)}" if name in fixed else _told(name, value, texts)
        for name, value in sorted(call.arguments.items())
    )


def _fixed(task: Task, tool: str) -> set[str]:
    """The arguments of a tool that take one of a few values: which one counts, not who named it."""
    found: Mapping[str, Any] = next((schema.get("parameters", {}) for schema in schemas(task) if schema["name"] == tool), {})
    kinds = {name: json.dumps(_resolved(kind, found)) for name, kind in found.get("properties", {}).items()}
    return {name for name, kind in kinds.items() if '"enum"' in kind or '"const"' in kind or '"boolean"' in kind}


def _resolved(kind: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    named = str(kind.get("$ref", "")).rpartition("/")[2]
    return schema.get("$defs", {}).get(named, kind)


def _told(name: str, value: Any, texts: Sequence[tuple[str, str]]) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if source := next((source for source, told in texts if _tells(told, text)), ""):
        return f"{name} from {source}"
    return f"{name} from nowhere" if re.search(r"\d", text) else f"{name}={_plain(value)}"


def _plain(value: Any) -> str:
    """A value without what separates calls and arguments here."""
    return " ".join(re.sub(r"[;,():]", " ", str(value)).split())[:_LITERAL]


def _texts(task: Task, history: Sequence[Played]) -> list[tuple[str, str]]:
    """Everything that could have told a value, oldest first, each with its name.

    What a tool said of an id that nobody had told is about something else, and tells nothing.
    """
    texts = [("the task", f"{task.instruction}\n{first_observation(task)}")]
    for each in history:
        call = called(each.action)
        ids = [value for value in call.arguments.values() if isinstance(value, str)] if call is not None else []
        if not any(_told("", value, texts).endswith("from nowhere") for value in ids):
            texts.append((call.name if call is not None else "the user", each.answer))
    return texts


def _tells(text: str, value: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(value.strip())}(?!\w)", text, re.IGNORECASE)) if value.strip() else False


def _parsed(action: str) -> ToolCall | str | None:
    try:
        return parse_action(action)
    except ValueError:
        return None
