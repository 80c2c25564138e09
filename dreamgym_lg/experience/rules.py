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
from dreamgym_lg.experience.prompt_formats import first_observation
from dreamgym_lg.types import Step, Task

NOTHING_DONE = "nothing"
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


def played(exchange: Exchange) -> Played:
    return Played(exchange.action, exchange.prediction.observation, exchange.prediction.valid)


def calls_made(task: Task, history: Sequence[Played], tools: Collection[str] | None = None) -> dict[str, str]:
    """The valid calls of an episode with where their arguments were told, `refund(order from the task)`, and their answers.

    Args: `tools`, only calls of these; None for all.
    """
    found: dict[str, str] = {}
    for number, each in enumerate(history):
        call = _parsed(each.action)
        if isinstance(call, ToolCall) and each.valid and (tools is None or call.name in tools):
            found[f"{call.name}({_arguments(task, history[:number], call)})"] = each.answer
    return found


def written(calls: Mapping[str, str]) -> str:
    """The calls and the beginnings of their answers, on one line."""
    return "; ".join(f"{call}: {' '.join(answer.split())[:_ANSWER]}" for call, answer in calls.items()) or NOTHING_DONE


def call_reasoning(task: Task, history: Sequence[Played], step: Step, writes: Collection[str]) -> str:
    """Why a call is answered as it is: whether it is valid, reads or writes, and where its arguments were told."""
    call = _parsed(step.action)
    if not isinstance(call, ToolCall):
        return "" if step.valid else "invalid, it is no tool call"
    kind = "" if not writes else "it writes" if call.name in writes else "it reads"
    refused = "it is refused" if step.valid and _REFUSED.search(step.next_observation) else ""
    parts = ["valid" if step.valid else "invalid", kind, _arguments(task, history, call), refused]
    return ", ".join(part for part in parts if part)


def answer_reasoning(
    task: Task, history: Sequence[Played], answer: Step, found: Sequence[Step], *, success: bool, writes: Collection[str]
) -> str:
    """Why a final answer ends its episode in success or failure, by what the successes of similar tasks did.

    Args:
        history: The calls before it.
        found: Its demonstrations (`SimilarSuccesses`).
        writes: The tools that change the world: only their calls can be missing or too many. Empty: all calls.
    """
    if success:
        return "valid, what like tasks needed is done, it completes the task"
    made = calls_made(task, history, writes or None)
    return f"valid, {_fault(task, history, answer, made, [_needed(step, writes) for step in found])}, it fails the task"


def _fault(task: Task, history: Sequence[Played], answer: Step, made: Collection[str], likes: Sequence[Sequence[str]]) -> str:
    """What told this episode apart from the success that it resembles most."""
    if unheard := [call for call in made if "from nowhere" in call]:
        return f"{unheard[0]} is about something else"
    likes = sorted(likes, key=lambda needed: len(set(needed) ^ set(made)))
    needed = likes[0] if likes else []
    if missing := [call for call in needed if call not in made]:
        return f"{missing[0]} is missing"
    if likes and (more := [call for call in made if call not in needed]):
        return f"{more[0]} was not asked for"
    told = " ".join(text for _, text in _texts(task, history))
    said = re.findall(r"[\w-]*\d[\w-]*", str(_parsed(answer.action)))
    if unheard := [word for word in said if not _tells(told, word)]:
        return f"it says {unheard[0]} from nowhere"
    return "it does not answer the task"


def _needed(step: Step, writes: Collection[str]) -> list[str]:
    """The calls that a demonstration of `SimilarSuccesses` names."""
    calls = re.findall(r"(?:after |; )(\w+\([^()]*\)): ", step.reasoning)
    return [call for call in calls if not writes or call.partition("(")[0] in writes]


def success_shown(task: Task, steps: Sequence[Step]) -> Step:
    """The final answer of a recorded success as a demonstration: what was asked, what was done, what was said."""
    *calls, answer = steps
    done = written(calls_made(task, [Played(step.action, step.next_observation, step.valid) for step in calls]))
    reasoning = f"valid, after {done}, it completes the task"
    return replace(answer, observation=first_observation(task), reward=1.0, terminated=True, reasoning=reasoning)


def _arguments(task: Task, history: Sequence[Played], call: ToolCall) -> str:
    texts = _texts(task, history)
    return ", ".join(_told(name, value, texts) for name, value in sorted(call.arguments.items()))


def _told(name: str, value: Any, texts: Sequence[tuple[str, str]]) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if source := next((source for source, told in texts if _tells(told, text)), ""):
        return f"{name} from {source}"
    if re.search(r"\d", text):
        return f"{name} from nowhere"
    return f"{name}={' '.join(re.sub(r'[;()]', ' ', text).split())[:_LITERAL]}"


def _texts(task: Task, history: Sequence[Played]) -> list[tuple[str, str]]:
    """Everything that could have told a value, oldest first, each with its name."""
    texts = [("the task", f"{task.instruction}\n{first_observation(task)}")]
    for played in history:
        call = _parsed(played.action)
        texts.append((call.name if isinstance(call, ToolCall) else "the user", played.answer))
    return texts


def _tells(text: str, value: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(value.strip())}(?!\w)", text, re.IGNORECASE)) if value.strip() else False


def _parsed(action: str) -> ToolCall | str | None:
    try:
        return parse_action(action)
    except ValueError:
        return None
