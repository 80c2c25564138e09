"""Scripted policies for MiniWoB++: a demonstrator for some of its tasks, and the mistakes one can make there."""

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.browsergym.actions import Element, elements, last_page, render
from dreamgym_lg.integrations.text_games.game import TextGame
from dreamgym_lg.integrations.text_games.scripted_policies import Oracle, ScriptedPolicies, View
from dreamgym_lg.types import Task

Solver = Callable[[str, str], str]
"""`(goal, page) -> right action`. It reads the page alone, so that it goes on after a mistake that the page shows."""


def create_oracle(environment: TextGame, task: Task, rng: Random) -> Oracle:
    """The demonstrator of a task of `SOLVERS`; raises `ConfigurationError` for another task.

    The goal is the first observation's `Goal: ...` line, else the instruction (`make_tasks`).
    """
    name = str(task.metadata.get("task", "")).removeprefix("miniwob.")
    if name not in SOLVERS:
        raise ConfigurationError.unknown("demonstrated task", name, SOLVERS)
    solve = SOLVERS[name]

    def right(seen: Sequence[str], valid: Sequence[str]) -> str:
        stated = re.match(r"Goal: (.*)", seen[0])
        return solve(stated[1] if stated else task.instruction, last_page(seen))

    return right


# --- Reading the page ------------------------------------------------------------------------------------------------


def _find(page: str, role: str, name: str | None = None, number: int = 0) -> Element:
    """The element of this role and name; without one the first of the role, so that there is always an action."""
    of_role = [element for element in elements(page) if element.role == role]
    named = [element for element in of_role if name is None or element.name.lower() == name.lower()]
    return (named[number : number + 1] or of_role or [Element("0", role, "", "")])[0]


def _click(element: Element) -> str:
    return render("click", {"bid": element.bid})


def _value(element: Element) -> str:
    match = re.search(r"""\bvalue=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,]+)""", element.attributes)
    return match[1].strip("'\"") if match else ""


def _submit(page: str, name: str = "Submit") -> str:
    return _click(_find(page, "button", name))


def _fill(page: str, *values: str, submit: str = "Submit") -> str:
    """Write each value into the text box of its place, then submit; of a password the page shows the length alone."""
    boxes = [element for element in elements(page) if element.role == "textbox"]
    for box, value in zip(boxes, values, strict=False):
        if _value(box) not in (value, "•" * len(value)):
            return render("fill", {"bid": box.bid, "value": value})
    return _submit(page, submit)


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal) or [""]


def _between(goal: str, before: str, after: str) -> str:
    match = re.search(f"{re.escape(before)}(.*?){re.escape(after)}", goal)
    return match[1] if match else ""


def _number(goal: str) -> int:
    """The `3rd` of a goal, from 0."""
    match = re.search(r"(\d+)(?:st|nd|rd|th)", goal)
    return int(match[1]) - 1 if match else 0


# --- Tasks -----------------------------------------------------------------------------------------------------------


def _named_button(goal: str, page: str) -> str:
    return _click(_find(page, "button", _quoted(goal)[0]))


def _dialog(goal: str, page: str) -> str:
    label = _quoted(goal)[0]
    return _click(_find(page, "button", "Close" if label == "x" else label))


def _sequence(goal: str, page: str) -> str:
    first = _find(page, "button", "ONE")
    return _click(_find(page, "button", "TWO") if "focused" in first.attributes else first)


def _option(goal: str, page: str) -> str:
    target = _find(page, "radio", _between(goal, "Select ", " and click"))
    return _submit(page) if "checked='true'" in target.attributes else _click(target)


def _checkboxes(goal: str, page: str) -> str:
    target = _between(goal, "Select ", " and click").split(", ")
    for element in elements(page):
        if element.role == "checkbox" and ("checked='true'" in element.attributes) != (element.name in target):
            return _click(element)
    return _submit(page)


def _list(goal: str, page: str) -> str:
    name, box = _between(goal, "Select ", " from the list"), _find(page, "combobox")
    return _submit(page) if _value(box) == name else render("select_option", {"bid": box.bid, "options": name})


def _tab(goal: str, page: str) -> str:
    return _click(_find(page, "link", _between(goal, "Click on ", ".")))


SOLVERS: Mapping[str, Solver] = {
    "choose-list": _list,
    "click-button": _named_button,
    "click-button-sequence": _sequence,
    "click-checkboxes": _checkboxes,
    "click-checkboxes-large": _checkboxes,
    "click-checkboxes-transfer": _checkboxes,
    "click-dialog": _dialog,
    "click-dialog-2": _dialog,
    "click-link": lambda goal, page: _click(_find(page, "clickable", _quoted(goal)[0])),
    "click-option": _option,
    "click-tab": _tab,
    "click-test": lambda goal, page: _click(_find(page, "button")),
    "click-test-2": lambda goal, page: _click(_find(page, "button", "ONE")),
    "click-test-transfer": lambda goal, page: _click(_find(page, "button", "ONE")),
    "enter-password": lambda goal, page: _fill(page, *_quoted(goal) * 2),
    "enter-text": lambda goal, page: _fill(page, _quoted(goal)[0]),
    "enter-text-dynamic": lambda goal, page: _fill(page, _quoted(goal)[0]),
    "focus-text": lambda goal, page: _click(_find(page, "textbox")),
    "focus-text-2": lambda goal, page: _click(_find(page, "textbox", number=_number(goal))),
    "login-user": lambda goal, page: _fill(page, *_quoted(goal), submit="Login"),
    "unicode-test": _named_button,
}
"""The demonstrated tasks of MiniWoB++."""


# --- Trajectories ----------------------------------------------------------------------------------------------------


def _wrong(view: View, rng: Random) -> str:
    """Another action that the page allows."""
    return rng.choice([action for action in view.valid if action != view.right] or [view.right])


POLICIES = ScriptedPolicies(
    create_oracle,
    lambda tasks: ["Submit"],
    _wrong,
    verbs=("click", "fill", "press", "tap", "type"),
    prepositions=(),
    misused=("in", "on"),
)
