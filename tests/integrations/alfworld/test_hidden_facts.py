"""What a room hides: drawn once, and what a recorded episode revealed comes first."""

from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.integrations.alfworld.hidden_facts import hidden_facts
from dreamgym_lg.types import Prediction, Task

ROOM = "You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, a drawer 2, and a drawer 1."
USUAL = {"pen": {"drawer": 9, "bed": 1}}


def task(asks: str = "put a pen in bed.") -> Task:
    return Task(id="t", instruction=f"Your task is to: {asks}", environment="alfworld", observation=ROOM)


def played(*observations: str) -> list[Exchange]:
    answers = (Prediction("valid", seen, 0.0, terminated=False, success=False, valid=True) for seen in observations)
    return [Exchange("an action", answer) for answer in answers]


AT_DESK, AT_DRAWER = "You arrive at desk 1. On the desk 1, you see nothing.", "You arrive at drawer 1. The drawer 1 is closed."
FOUND = "You open the drawer 1. The drawer 1 is open. In it, you see a pen 3."


def test_a_recorded_episode_has_its_own_facts() -> None:
    history = played(AT_DESK, AT_DRAWER, FOUND, "You pick up the pen 3 from the drawer 1.")
    assert hidden_facts(task(), history, 0, USUAL) == ["pen at drawer 1"] * 3 + ["", ""]


def test_a_dream_goes_on_with_the_place_that_was_drawn() -> None:
    drawn = {seed: hidden_facts(task(), [], seed, USUAL)[0] for seed in range(60)}
    assert {"pen at bed 1", "pen at drawer 1", "pen at drawer 2"} <= set(drawn.values())
    assert sum("drawer" in fact for fact in drawn.values()) > 40, "there pens usually lie"
    for seed, fact in drawn.items():
        facts = hidden_facts(task(), played(AT_DESK, AT_DRAWER), seed, USUAL)
        assert facts == [fact] * 3 or fact == "pen at desk 1", "what lies elsewhere changes nothing"
        assert "desk" not in facts[-1], "it has been looked at"


def test_several_things_are_revealed_one_after_the_other() -> None:
    two = task("find two pen and put them in bed.")
    facts = hidden_facts(two, played(AT_DESK, AT_DRAWER, FOUND), 1, USUAL)
    assert facts[:3] == ["pen at drawer 1"] * 3 and facts[3] in ("pen at bed 1", "pen at drawer 2")
    lamp = task("look at pen under the desklamp.")
    facts = hidden_facts(lamp, played(AT_DRAWER, FOUND.replace("pen 3", "pen 3, and a desklamp 1")), 1, USUAL)
    assert facts == ["pen at drawer 1", "pen at drawer 1", ""]
    assert hidden_facts(task("dance."), played(AT_DESK), 0, USUAL) == ["", ""]
