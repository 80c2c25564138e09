"""The episode graph: the same agent in the dream and in the real environment, and what counts as a step of it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.environment import Environment, check_environment, refused
from dreamgym_lg.graphs.episode import EpisodeContext, create_episode_graph, read_action
from dreamgym_lg.integrations.text_games.game import Rules, Score
from dreamgym_lg.types import Step, StepResult, Task

TASK = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")


class House(Environment):
    """The real world of conftest's `door_world`, written down a second time; `played` is every action it was given."""

    def __init__(self) -> None:
        self.played: list[str] = []
        self._open = False
        self._over = True

    def reset(self, task: Task) -> str:
        self.played, self._open, self._over = [], False, False
        return "A closed door."

    def step(self, action: str) -> StepResult:
        if self._over:
            raise RuntimeError("step before reset or after the end")
        if "magic" in action:
            return refused("There is no magic.")
        self.played.append(action)
        self._over = action == "jump" or (action == "go north" and self._open)
        match action:
            case "open door" if not self._open:
                self._open = True
                return StepResult("The door is open.", 0.5, False, False, {})
            case "go north" if self._open:
                return StepResult("You are outside.", 0.5, True, False, {"success": True})
            case "go north":
                return StepResult("The door is closed.", 0.0, False, False, {})
            case "jump":
                return StepResult("You broke a leg.", 0.0, True, False, {})
        return StepResult("What?", 0.0, False, False, {"valid": False})


def no_magic(action: str, observations: Sequence[str]) -> str | None:
    return "There is no magic." if "magic" in action else None


def policy(scripted: Any, *replies: str) -> Any:
    answers = iter(replies)
    return scripted(reply=lambda _: next(answers))


def play(agent: Any, environment: Environment, **options: Any) -> dict[str, Any]:
    graph = create_episode_graph(agent, environment, **options).compile()
    return asyncio.run(graph.ainvoke({"task": TASK}))


def outcomes(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(s.observation, s.action, s.next_observation, s.reward, s.terminated, s.valid) for s in state["steps"]]


def test_the_house_keeps_the_environment_contract() -> None:
    check_environment(House(), TASK, ["go north", "open door", "go north"])


@pytest.mark.parametrize("actions", [["go north", "dance", "open door", "go north"], ["open door", "jump"], ["magic", "jump"]])
def test_dream_or_real_is_one_argument(scripted: Any, door_world: Any, actions: list[str]) -> None:
    real = House()
    dream = Dream([Rules(no_magic), Model(scripted(reply=door_world))], judges=[Score()]).create_environment()
    really, dreamed = (play(policy(scripted, *actions), world) for world in (real, dream))
    assert outcomes(really) == outcomes(dreamed) and len(really["steps"]) == len(actions)
    assert really["success"] == dreamed["success"] == (actions[-1] == "go north")
    assert [message.text for message in really["messages"]] == [message.text for message in dreamed["messages"]]
    assert not any(step.reasoning for step in really["steps"])
    assert all(step.reasoning for step in dreamed["steps"] if step.action != "magic")


def test_the_environment_may_come_with_the_run_instead(scripted: Any) -> None:
    graph = create_episode_graph(policy(scripted, "open door", "go north", "open door", "jump")).compile()
    houses = [House(), House()]
    first, second = (asyncio.run(graph.ainvoke({"task": TASK}, context=EpisodeContext(environment=h))) for h in houses)
    assert (first["success"], second["success"]) == (True, False)
    assert [house.played for house in houses] == [["open door", "go north"], ["open door", "jump"]]


def test_the_policy_reads_the_instruction_and_a_conversation_that_only_grows(scripted: Any) -> None:
    agent = policy(scripted, "go north", "open door", "go north")
    state = play(agent, House())
    first, second, third = agent.asked
    assert [(m.type, m.text) for m in first] == [("system", "leave the house"), ("human", "A closed door.")]
    assert second[:2] == first and third[:4] == second
    assert [m.text for m in third[2:]] == ["go north", "The door is closed.", "open door", "The door is open."]
    assert state["messages"][:-2] == third and state["messages"][-1].text == "You are outside."


def test_a_refused_action_is_an_invalid_step_that_does_not_reach_the_environment(scripted: Any) -> None:
    house = House()
    state = play(policy(scripted, "open door", "magic wand", "go north"), house)
    assert house.played == ["open door", "go north"]
    assert state["steps"][1] == Step(
        observation="The door is open.",
        action="magic wand",
        next_observation="There is no magic.",
        reward=0.0,
        valid=False,
        decided_by="rules",
    )
    assert state["success"] and state["steps"][2].observation == "There is no magic."


def test_a_refused_action_does_not_reach_the_experience_model(scripted: Any, door_world: Any) -> None:
    model = scripted(reply=door_world)
    dream = Dream([Rules(no_magic), Model(model)], judges=[Score()]).create_environment()
    state = play(policy(scripted, "magic", "open door", "more magic", "go north"), dream)
    assert [step.valid for step in state["steps"]] == [False, True, False, True] and state["success"]
    assert len(model.asked) == 2


@pytest.mark.parametrize("max_steps", [1, 3])
def test_an_episode_is_truncated_after_max_steps_refused_ones_included(scripted: Any, max_steps: int) -> None:
    state = play(policy(scripted, *["magic", "go north", "magic", "open door"]), House(), max_steps=max_steps)
    assert [step.truncated for step in state["steps"]] == [False] * (max_steps - 1) + [True]
    assert not state["success"] and not any(step.terminated for step in state["steps"])


def test_an_episode_that_ends_with_its_last_step_is_not_truncated(scripted: Any) -> None:
    state = play(policy(scripted, "open door", "go north"), House(), max_steps=2)
    assert state["steps"][-1].terminated and not state["steps"][-1].truncated and state["success"]


@pytest.mark.parametrize(
    ("last", "ended", "success"),
    [
        (StepResult("o", 1.0, True, False, {"success": True}), (True, False), True),
        (StepResult("o", 1.0, True, False, {}), (True, False), False),
        (StepResult("o", 1.0, False, True, {"success": True}), (False, True), False),
    ],
)
def test_only_a_terminated_episode_succeeds_and_the_environment_may_truncate(
    scripted: Any, last: StepResult, ended: tuple[bool, bool], success: bool
) -> None:
    class Brief(House):
        def step(self, action: str) -> StepResult:
            return last

    state = play(policy(scripted, "act"), Brief())
    (step,) = state["steps"]
    assert (step.terminated, step.truncated) == ended and state["success"] == success


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("go north", "go north"),
        ("  go north \n\nBecause it is cold.", "go north"),
        ("\n\n go north", "go north"),
        ("", ""),
        (" \n\t\n ", ""),
    ],
)
def test_the_action_is_the_first_line_of_the_reply(scripted: Any, reply: str, action: str) -> None:
    assert read_action(reply) == action
    house = House()
    state = play(policy(scripted, reply, "jump"), house)
    assert house.played == [action, "jump"] and state["steps"][0].action == action


def test_an_empty_reply_is_the_empty_action_which_no_world_understands(scripted: Any, door_world: Any) -> None:
    for world in (House(), Dream([Model(scripted(reply=door_world))]).create_environment()):
        state = play(policy(scripted, "", "jump"), world)
        assert outcomes(state)[0] == ("A closed door.", "", "What?", 0.0, False, False)
