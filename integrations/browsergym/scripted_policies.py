"""Scripted policies for MiniWoB++: a demonstrator for some of its tasks, and the mistakes one can make there."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.browsergym.actions import Element, elements, last_page, render
from dreamgym_lg.integrations.browsergym.environment import BrowserGym
from dreamgym_lg.integrations.text_games import scripted_policies
from dreamgym_lg.integrations.text_games.scripted_policies import Mistakes, Oracle, View
from dreamgym_lg.types import Task, Trajectory

Solver = Callable[[str, str], str]
"""`(goal, page) -> right action`. It reads the page alone, so that it goes on after a mistake that the page shows."""


def create_oracle(task: Task) -> Oracle:
    """The demonstrator of a task of `SOLVERS`; raises `ConfigurationError` for another task.

    The goal is the first observation's `Goal: ...` line, else the instruction (`make_tasks`).
    """
    name = str(task.metadata.get("task", "")).removeprefix("miniwob.")
    if name not in SOLVERS:
        raise ConfigurationError.unknown("demonstrated task", name, SOLVERS)
    solve = SOLVERS[name]

    def right(seen: Sequence[str], valid: Sequence[str]) -> str:
        told = re.match(r"Goal: (.*)", seen[0])
        return solve(told[1] if told else task.instruction, last_page(seen))

    return right


# --- Reading the page ------------------------------------------------------------------------------------------------


def _find(page: str, role: str, name: str | None = None, number: int = 0) -> Element:
    """The element of this role and name; without one the first of the role, so that there is always an action."""
    found = [element for element in elements(page) if element.role == role]
    named = [element for element in found if name is None or element.name.lower() == name.lower()]
    return (named[number : number + 1] or found or [Element("0", role, "", "")])[0]


def _click(element: Element) -> str:
    return render("click", {"bid": element.bid})


def _value(element: Element) -> str:
    found = re.search(r"""\bvalue=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,]+)""", element.attributes)
    return found[1].strip("'\"") if found else ""


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
    found = re.search(f"{re.escape(before)}(.*?){re.escape(after)}", goal)
    return found[1] if found else ""


def _number(goal: str) -> int:
    """The `3rd` of a goal, from 0."""
    found = re.search(r"(\d+)(?:st|nd|rd|th)", goal)
    return int(found[1]) - 1 if found else 0


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
    wanted = _find(page, "radio", _between(goal, "Select ", " and click"))
    return _submit(page) if "checked='true'" in wanted.attributes else _click(wanted)


def _checkboxes(goal: str, page: str) -> str:
    wanted = _between(goal, "Select ", " and click").split(", ")
    for element in elements(page):
        if element.role == "checkbox" and ("checked='true'" in element.attributes) != (element.name in wanted):
            return _click(element)
    return _submit(page)


def _choice(goal: str, page: str, name: str, submit: str) -> str:
    box = _find(page, "combobox")
    return _submit(page, submit) if _value(box) == name else render("select_option", {"bid": box.bid, "options": name})


def _list(goal: str, page: str) -> str:
    return _choice(goal, page, _between(goal, "Select ", " from the list"), "Submit")


def _scroll_list(goal: str, page: str) -> str:
    options = [element for element in elements(page) if element.role == "option"]
    wanted = _between(goal, "Select ", " from the scroll list").split(", ")
    if all(("selected=True" in option.attributes) == (option.name in wanted) for option in options):
        return _submit(page)
    return render("select_option", {"bid": _find(page, "listbox").bid, "options": wanted})


def _dropdown(goal: str, page: str) -> str:
    return _choice(goal, page, _between(goal, "Choose ", " from the dropdown"), _quoted(goal)[0])


def _cased(goal: str, page: str) -> str:
    text = _quoted(goal)[0]
    return _fill(page, text.upper() if "upper" in goal else text.lower())


def _date(goal: str, page: str) -> str:
    month, day, year = (_between(goal, "Enter ", " as the date").split("/") + ["", ""])[:3]
    return _spun(page, "Date", f"{year}-{month}-{day}", {"Month": month, "Day": day, "Year": year})


def _time(goal: str, page: str) -> str:
    clock, half = (_between(goal, "Enter ", " as the time").split(" ") + [""])[:2]
    hour, minute = (clock.split(":") + ["0"])[:2]
    value = f"{int(hour) % 12 + (12 if half == 'PM' else 0):02}:{minute}"
    return _spun(page, "InputTime", value, {"Hours": hour, "Minutes": minute, "AM/PM": "2" if half == "PM" else "1"})


def _spun(page: str, role: str, value: str, parts: Mapping[str, str]) -> str:
    shown = all(int(_value(_find(page, "spinbutton", name)) or 0) == int(part) for name, part in parts.items())
    return _submit(page) if shown else render("fill", {"bid": _find(page, role).bid, "value": value})


def _tab(goal: str, page: str) -> str:
    return _click(_find(page, "link", _between(goal, "Click on ", ".")))


def _section(goal: str, page: str) -> str:
    section = _find(page, "tab")
    return _submit(page) if "expanded=True" in section.attributes else _click(section)


def _table(goal: str, page: str) -> str:
    cells = [element.name for element in elements(page) if element.role == "cell"]
    values = dict(zip(cells[::2], cells[1::2], strict=False))
    return _fill(page, values.get(_between(goal, "value of ", " into"), ""))


def _word(goal: str, page: str) -> str:
    words = _find(page, "paragraph").name.split()
    return _fill(page, words[min(_number(goal), len(words) - 1)].strip(",.") if words else "")


def _arithmetic(goal: str, page: str) -> str:
    left, sign, right = re.findall(r"'(-?\d+) ([x+-]) (-?\d+) ='", page)[0]
    operation = {"x": operator.mul, "+": operator.add, "-": operator.sub}[sign]
    return _fill(page, str(operation(int(left), int(right))))


def _algebra(goal: str, page: str) -> str:
    left, sign, right, result = re.findall(r"'(-?\w+) ([+-]) (-?\w+) = (-?\d+)'", page)[0]
    if left == "x":
        return _fill(page, str(int(result) - int(right) if sign == "+" else int(result) + int(right)))
    return _fill(page, str(int(result) - int(left) if sign == "+" else int(left) - int(result)))


def _copied(goal: str, page: str) -> str:
    texts = [_value(element) for element in elements(page) if element.role == "textbox"]
    return _fill(page, *[max(texts, key=len, default="")] * 2)


SOLVERS: Mapping[str, Solver] = {
    "choose-list": _list,
    "click-button": _named_button,
    "click-button-sequence": _sequence,
    "click-checkboxes": _checkboxes,
    "click-checkboxes-large": _checkboxes,
    "click-checkboxes-transfer": _checkboxes,
    "click-collapsible-nodelay": _section,
    "click-dialog": _dialog,
    "click-dialog-2": _dialog,
    "click-link": lambda goal, page: _click(_find(page, "clickable", _quoted(goal)[0])),
    "click-option": _option,
    "click-scroll-list": _scroll_list,
    "click-tab": _tab,
    "click-test": lambda goal, page: _click(_find(page, "button")),
    "click-test-2": lambda goal, page: _click(_find(page, "button", "ONE")),
    "click-test-transfer": lambda goal, page: _click(_find(page, "button", "ONE")),
    "copy-paste": _copied,
    "enter-date": _date,
    "enter-password": lambda goal, page: _fill(page, *_quoted(goal) * 2),
    "enter-text": lambda goal, page: _fill(page, _quoted(goal)[0]),
    "enter-text-2": _cased,
    "enter-text-dynamic": lambda goal, page: _fill(page, _quoted(goal)[0]),
    "enter-time": _time,
    "find-word": _word,
    "focus-text": lambda goal, page: _click(_find(page, "textbox")),
    "focus-text-2": lambda goal, page: _click(_find(page, "textbox", number=_number(goal))),
    "form-sequence-3": _dropdown,
    "login-user": lambda goal, page: _fill(page, *_quoted(goal), submit="Login"),
    "read-table": _table,
    "simple-algebra": _algebra,
    "simple-arithmetic": _arithmetic,
    "unicode-test": _named_button,
}
"""The demonstrated tasks of MiniWoB++."""


# --- Trajectories ----------------------------------------------------------------------------------------------------


def _wrong(view: View, rng: Random) -> str:
    """Another action that the page allows."""
    return rng.choice([action for action in view.valid if action != view.right] or [view.right])


MISTAKES = Mistakes(
    wrong=_wrong,
    verbs=("click", "fill", "press", "tap", "type"),
    prepositions=(),
    misused=("in", "on"),
)


def scripted_trajectories(
    tasks: Sequence[Task], environment: BrowserGym, *, episodes: Mapping[str, int], seed: int, run: str = "offline"
) -> Iterator[Trajectory]:
    """`episodes[kind]` trajectories of each `Kind`, the tasks (of `SOLVERS`) taken in turn; played while iterated over.

    Raises `ConfigurationError`, before anything is played, for an unknown kind, no task, or one of an evaluation split.
    """
    return scripted_policies.scripted_trajectories(
        tasks,
        environment,
        episodes=episodes,
        seed=seed,
        run=run,
        create_oracle=lambda task, rng: create_oracle(task),
        mistakes=MISTAKES,
        words=["Submit"],
    )
