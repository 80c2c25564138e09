"""What follows from the text of ALFWorld alone: the check of an action, and how a game begins."""

import re
from collections import Counter
from collections.abc import Sequence

from dreamgym_lg.integrations.text_games.text import one_line

NOTHING_HAPPENS = "Nothing happens."
"""The environment's answer to an action that is impossible here and to one that it does not understand, alike."""

_FORMS = re.compile(
    r"look|inventory|help"
    r"|(?:go to|open|close|examine|use) (?P<one>\S.*)"
    r"|(?:take (?P<taken>\S.*) from|(?:move|put) (?P<moved>\S.*) (?:to|in/on)) (?P<where>\S.*)"
    r"|(?:heat|cool|clean|slice) (?P<what>\S.*) with (?P<tool>\S.*)"
)
_NAME = re.compile(r"(?<!\w)([a-z]+ \d+)(?!\w)")


def check_action(action: str, observations: Sequence[str]) -> str | None:
    """`NOTHING_HAPPENS` for an action of no known verb form or with a name, such as `drawer 2`, not observed so far, else None.

    Pure and without the engine, so that a dream can hold it. The engine itself would take 2 in 1,000 of its admissible
    actions without their names having been shown, since places can share a spot; here nobody can, in dream or reality.
    """
    form = _FORMS.fullmatch(action.strip())
    if form is None:
        return NOTHING_HAPPENS
    named = {name for name in form.groups() if name}
    return None if named <= names(observations) else NOTHING_HAPPENS


def names(observations: Sequence[str]) -> set[str]:
    """Every object and receptacle that the observations show, such as `drawer 2`."""
    return {name for observation in observations for name in _NAME.findall(observation)}


def first_observation(problem: str) -> str:
    """What a game shows at its start, from its PDDL problem: all receptacles. The engine says the same, to the letter."""
    identifiers = sorted({name.lower() for name in re.findall(r"\(receptacleAtLocation ([^?\s]\S*) ", problem)})
    kinds = [name.split("_bar_")[0] + ("basin" if "basin" in name else "") for name in identifiers]
    left = Counter(kinds)
    shown = []
    for kind in kinds:  # ALFWorld numbers things of a kind downwards
        shown.append(f"a {kind} {left[kind]}")
        left[kind] -= 1
    listed = ", ".join([*shown[:-1], f"and {shown[-1]}" if shown[:-1] else shown[-1]]) if shown else "nothing"
    return f"You are in the middle of a room. Looking quickly around you, you see {listed}."


def without_frame(introduction: str) -> str:
    """The engine's first text without its banner and without the task, which the instruction holds."""
    return one_line(introduction.split("\n\n")[1])
