"""What a room hides: drawn once, and what a recorded episode revealed comes first."""

from dataclasses import replace

from dreamgym_lg.integrations.alfworld.text import hidden_facts
from dreamgym_lg.types import Step, Task

ROOM = "You are in the middle of a room. Looking quickly around you, you see a bed 1, a desk 1, a drawer 2, and a drawer 1."
USUAL = {"pen": {"drawer": 9, "bed": 1}}


def task(asks: str = "put a pen in bed.") -> Task:
    return Task(id="t", instruction=f"Your task is to: {asks}", environment="alfworld", observation=ROOM)


def played(*observations: str) -> list[Step]:
    return [Step(observation="", action="an action", next_observation=seen) for seen in observations]


def facts_of(of: Task, history: list[Step], seed: int) -> list[str]:
    return hidden_facts(replace(of, seed=seed), history, USUAL)


AT_DESK, AT_DRAWER = "You arrive at desk 1. On the desk 1, you see nothing.", "You arrive at drawer 1. The drawer 1 is closed."
FOUND = "You open the drawer 1. The drawer 1 is open. In it, you see a pen 3."


def test_a_recorded_episode_has_its_own_facts() -> None:
    history = played(AT_DESK, AT_DRAWER, FOUND, "You pick up the pen 3 from the drawer 1.")
    assert facts_of(task(), history, 0) == ["pen at drawer 1"] * 3 + ["", ""]


def test_a_dream_goes_on_with_the_place_that_was_drawn() -> None:
    drawn = {seed: facts_of(task(), [], seed)[0] for seed in range(60)}
    assert {"pen at bed 1", "pen at drawer 1", "pen at drawer 2"} <= set(drawn.values())
    assert sum("drawer" in fact for fact in drawn.values()) > 40, "there pens usually lie"
    for seed, fact in drawn.items():
        facts = facts_of(task(), played(AT_DESK, AT_DRAWER), seed)
        assert facts == [fact] * 3 or fact == "pen at desk 1", "what lies elsewhere changes nothing"
        assert "desk" not in facts[-1], "it has been looked at"


def test_several_things_are_revealed_one_after_the_other() -> None:
    two = task("find two pen and put them in bed.")
    facts = facts_of(two, played(AT_DESK, AT_DRAWER, FOUND), 1)
    assert facts[:3] == ["pen at drawer 1"] * 3 and facts[3] in ("pen at bed 1", "pen at drawer 2")
    lamp = task("look at pen under the desklamp.")
    facts = facts_of(lamp, played(AT_DRAWER, FOUND.replace("pen 3", "pen 3, and a desklamp 1")), 1)
    assert facts == ["pen at drawer 1", "pen at drawer 1", ""]
    assert facts_of(task("dance."), played(AT_DESK), 0) == ["", ""]
