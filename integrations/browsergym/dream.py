"""A dream of pages: what an experience model is told about an action beside the action itself."""

import re
from collections.abc import Sequence
from dataclasses import replace

from dreamgym_lg.environment import StepResult
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.integrations.browsergym.actions import Element, elements, last_page, parsed
from dreamgym_lg.types import Step, Task, Trajectory

_HIDDEN = re.compile("•+")
"""How a page shows a password."""


def described(task: Task, actions: Sequence[str], observations: Sequence[str], action: str) -> str:
    """The action with a comment that says which element it names and what the page's fields hold.

    Of every name and value it says where the instruction tells it, which a small model does not see by itself:
    `click('20')  # button 'Login' in the task, textbox is quote 1, textbox is quote 2`. The action stays the same action.

    Args: `actions` and `observations` of the episode so far, oldest first; the first observation is before the first action.
    """
    bare = action.partition("  # ")[0]
    benchmark = str(task.metadata.get("task", "miniwob")).partition(".")[0]
    page, call = last_page(observations), parsed(benchmark, bare)
    if call is None or not page:
        return bare
    written = {}
    for before in actions:
        if (made := parsed(benchmark, before)) is not None and made[0] == "fill":
            written[made[1]["bid"]] = str(made[1]["value"])
    shown = {element.bid: element for element in elements(page)}
    named = shown.get(str(call[1].get("bid", "")))
    parts = [] if named is None else [_told(task, named.role, named.name)]
    for name in ("value", "options"):
        if name in call[1]:
            parts = [_told(task, named.role if named else "", _text(call[1][name]))]
    for element in shown.values() if call[0] == "click" else ():
        parts += _held(task, element, written.get(element.bid, ""))
    return f"{bare}  # {', '.join(parts)}"


def _held(task: Task, element: Element, written: str) -> list[str]:
    """What a field holds; nothing of other elements, and of those of which only the chosen ones count."""
    found = re.search(r"""\bvalue=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", element.attributes)
    value = found[1][1:-1] if found else ""
    if "checked='true'" in element.attributes:
        return [_told(task, element.role, element.name)]
    if element.role not in ("textbox", "combobox", "searchbox", "listbox"):
        return []
    return [_told(task, element.role, written if _HIDDEN.fullmatch(value) and len(written) == len(value) else value)]


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _told(task: Task, role: str, text: str) -> str:
    quotes = re.findall(r'"([^"]*)"', task.instruction)
    if not text:
        return f"{role} empty"
    if text in quotes:
        return f"{role} is quote {quotes.index(text) + 1}"
    rest = re.sub(r'"[^"]*"', " ", task.instruction)
    inside = re.search(rf"(?<!\w){re.escape(text)}(?!\w)", rest) is not None
    return f"{role} {text[:24]!r} {'in the task' if inside else 'elsewhere'}"


def as_dreamed(trajectory: Trajectory) -> Trajectory:
    """A recorded episode with its actions `described`."""
    steps, actions, seen = list[Step](), list[str](), [trajectory.steps[0].observation] if trajectory.steps else []
    for step in trajectory.steps:
        steps.append(replace(step, action=described(trajectory.task, actions, seen, step.action)))
        actions.append(step.action)
        seen.append(step.next_observation)
    return replace(trajectory, steps=steps)


class PageDream(DreamEnvironment):
    """Pages played by an experience model, which reads every action `described`."""

    def step(self, action: str) -> StepResult:
        return super().step(self._described(action))

    async def astep(self, action: str) -> StepResult:
        return await super().astep(self._described(action))

    def _described(self, action: str) -> str:
        task = self._playing()
        seen = [str(task.metadata.get("observation", "")), *(each.prediction.observation for each in self._history)]
        return described(task, [each.action for each in self._history], seen, action)
