"""ALFWorld's text alone: the first observation of a game."""

import re
from collections import Counter

from dreamgym_lg.integrations.text_games.game import one_line


def first_observation(problem: str) -> str:
    """The engine's first observation, to the letter, from a PDDL problem: all receptacles."""
    identifiers = sorted({name.lower() for name in re.findall(r"\(receptacleAtLocation ([^?\s]\S*) ", problem)})
    kinds = [name.split("_bar_")[0] + ("basin" if "basin" in name else "") for name in identifiers]
    left = Counter(kinds)
    phrases = []
    for kind in kinds:  # ALFWorld numbers things of a kind downwards
        phrases.append(f"a {kind} {left[kind]}")
        left[kind] -= 1
    listed = ", ".join([*phrases[:-1], f"and {phrases[-1]}" if phrases[:-1] else phrases[-1]]) if phrases else "nothing"
    return f"You are in the middle of a room. Looking quickly around you, you see {listed}."


def without_frame(introduction: str) -> str:
    """The engine's first text without its banner and without the task, which the instruction holds."""
    return one_line(introduction.split("\n\n")[1])
