"""The parts of a dream of pages: actions described to the experience model, and endings of recorded successes."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dreamgym_lg.dream import Answer, Episode, Verdict
from dreamgym_lg.integrations.browsergym.actions import Element, elements, last_page, parsed
from dreamgym_lg.integrations.browsergym.environment import OVER
from dreamgym_lg.tasks import first_observation
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


def as_taught(trajectory: Trajectory) -> Trajectory:
    """A recorded episode with its actions `described`."""
    episode = described_episode(Episode(task=with_first_page(trajectory), steps=trajectory.steps))
    return replace(trajectory, steps=episode.steps)


def with_first_page(trajectory: Trajectory) -> Task:
    """The task of a recorded episode, which begins with the page that was really seen first."""
    first = trajectory.steps[0].observation if trajectory.steps else ""
    return replace(trajectory.task, observation=first)


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
            last, name = as_taught(trajectory).steps[-1], str(trajectory.task.metadata.get("task"))
            found.setdefault(name, {}).setdefault(ending(trajectory.task, last.action), set()).add(trajectory.task.id)
    return found


class RecordedEndings:
    """Recorded successes decide the outcome where there are some of the same kind of task.

    An episode is a success if it ends as one of them did, in the same words about this task's own values, and no other is. The
    model alone rewards too much. As a responder it ends the episode there, as a judge it refuses other successes.

    Args: `endings`, of recorded successes (`recorded_endings`).
    """

    name = "references"

    def __init__(self, endings: Endings) -> None:
        self._endings = endings

    def respond(self, episode: Episode) -> Answer | None:
        if not self._ends(episode):
            return None
        return Answer(OVER, reasoning="valid, it completes the task", verdict=Verdict(1.0, True, "a recorded success ended so"))

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        if answer is None or answer.verdict is None or not self._of_kind(episode):
            return None
        if self._ends(episode):
            return answer.verdict
        if answer.verdict.success:
            return Verdict(0.0, False, "no recorded success of this kind of task ended so", answer.verdict.terminated)
        return None

    def _of_kind(self, episode: Episode) -> Mapping[str, Collection[str]]:
        return self._endings.get(str(episode.task.metadata.get("task")), {})

    def _ends(self, episode: Episode) -> bool:
        action = described_episode(episode).action
        tasks = set(self._of_kind(episode).get(ending(episode.task, action), ()))
        return bool(tasks - (set() if episode.own_traces else {episode.task.id}))


def described_episode(episode: Episode) -> Episode:
    """The episode with every action `described`."""
    steps, actions, seen = list[Step](), list[str](), [first_observation(episode.task)]
    for step in episode.steps:
        steps.append(replace(step, action=described(episode.task, actions, seen, step.action)))
        actions.append(step.action)
        seen.append(step.next_observation)
    return replace(episode, steps=steps, action=described(episode.task, actions, seen, episode.action))
