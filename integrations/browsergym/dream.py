"""A dream of pages: what an experience model is told about an action beside the action itself."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dreamgym_lg.environment import CheckAction, StepResult
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.grounding import Decision
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.integrations.browsergym.actions import Element, elements, last_page, parsed
from dreamgym_lg.integrations.browsergym.environment import OVER
from dreamgym_lg.types import Prediction, Step, Task, Trajectory

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


Endings = Mapping[str, Mapping[str, Collection[str]]]
"""By the name of a benchmark's task: how its recorded successes ended (`ending`), and in which tasks."""


def ending(task: Task, shown: str) -> str:
    """What two last actions of one kind of task have in common if both do what was asked. Args: `shown`, a `described` action.

    The values of the task and empty fields are left out, and a quote of it that nothing names is told:
    `click: button 'Close' elsewhere, unnamed 'x'`.
    """
    call, _, told = shown.partition("  # ")
    parts = [re.sub(r"'.*' in the task$", "in the task", part) for part in told.split(", ") if not part.endswith(" empty")]
    quotes = enumerate(re.findall(r'"([^"]*)"', task.instruction), start=1)
    parts += [f"unnamed {quote!r}" for number, quote in quotes if not re.search(rf"is quote {number}\b", told)]
    return f"{call.partition('(')[0]}: {', '.join(parts)}"


def recorded_endings(recorded: Iterable[Trajectory]) -> Endings:
    """How the successes among these episodes ended."""
    found: dict[str, dict[str, set[str]]] = {}
    for trajectory in recorded:
        if trajectory.success:
            last, name = as_dreamed(trajectory).steps[-1], str(trajectory.task.metadata.get("task"))
            found.setdefault(name, {}).setdefault(ending(trajectory.task, last.action), set()).add(trajectory.task.id)
    return found


class PageDream(DreamEnvironment):
    """Pages played by an experience model, which reads every action `described`.

    Recorded successes decide the outcome where there are some of the same kind of task: an episode is a success if it ends
    as one of them did, in the same words about this task's own values, and no other is. The model alone pays too much.

    Args: `endings`, of recorded successes (`recorded_endings`); others as of `DreamEnvironment`.
    """

    def __init__(self, experience: ExperienceModel, *, check_action: CheckAction, endings: Endings) -> None:
        super().__init__(experience, check_action=check_action)
        self._endings = endings

    def step(self, action: str) -> StepResult:
        return super().step(self._described(action))

    async def astep(self, action: str) -> StepResult:
        return await super().astep(self._described(action))

    def _recorded_endings(self) -> Mapping[str, Collection[str]]:
        return self._endings.get(str(self._playing().metadata.get("task")), {})

    def _known(self, action: str) -> Decision | None:
        task = self._playing()
        tasks = set(self._recorded_endings().get(ending(task, action), ()))
        if not tasks - ({task.id} if self._unseen else set()):
            return None
        reasoning = "valid, it completes the task: a recorded success ended so"
        return Decision(Prediction(reasoning, OVER, 1.0, True, True, True), "effects")

    def _advance(self, action: str, found: tuple[Step, ...], prediction: Prediction, decided_by: str) -> StepResult:
        if decided_by == "model" and prediction.success and self._recorded_endings():
            prediction, decided_by = prediction._replace(reward=0.0, success=False), "effects"
        return super()._advance(action, found, prediction, decided_by)

    def _described(self, action: str) -> str:
        task = self._playing()
        seen = [str(task.metadata.get("observation", "")), *(each.prediction.observation for each in self._history)]
        return described(task, [each.action for each in self._history], seen, action)
