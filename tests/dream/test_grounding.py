"""What grounds the experience model: the demonstrations it is shown, and the records it is trained on."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.training_data import recorded_exchanges, to_conversation
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

TASK = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")
FINE = "valid, why not\nreward 0, continues\nNothing happens."


@pytest.fixture
def buffer() -> Iterator[ReplayBuffer]:
    with ReplayBuffer(":memory:") as buffer:
        yield buffer


def seen(action: str, outcome: str = "It opens.", *, observation: str = "A closed door.", **fields: Any) -> Step:
    return Step(observation=observation, action=action, next_observation=outcome, **fields)


def recorded(*steps: Step, task: Task = TASK, **fields: Any) -> Trajectory:
    return Trajectory(task=task, steps=steps, **fields)


def play(environment: DreamEnvironment, actions: Sequence[str]) -> None:
    environment.reset(TASK)
    for action in actions:
        environment.step(action)


# --- demonstrations -------------------------------------------------------------------------------------------------


def test_demonstrations_are_neither_of_the_same_task_nor_of_an_evaluation_task(buffer: ReplayBuffer) -> None:
    others = [Task(id=split, instruction="", environment="", split=split) for split in ("train", "validation", "test")]
    for task in [TASK, *others]:
        buffer.add(recorded(seen("open door", f"seen in {task.id}"), task=task, source="offline"))
    buffer.add(recorded(seen("open door", "dreamed"), task=others[0], source="synthetic", rollout_index=1))
    experience = ExperienceModel(None, replay_buffer=buffer, demonstrations=5)

    def found(task: Task) -> list[str]:
        return [step.next_observation for step in experience.demonstrations("A closed door.", "open door", task)]

    assert found(TASK) == ["seen in train"]
    assert found(others[0]) == ["seen in t0"]
    assert found(others[2]) == ["seen in t0", "seen in train"]


def test_the_nearest_demonstrations_are_shown_and_new_ones_after_a_refresh(scripted: Any, buffer: ReplayBuffer) -> None:
    other = Task(id="t1", instruction="", environment="")
    buffer.add(recorded(seen("open door", "It opens."), seen("eat apple", "Tasty."), task=other))
    model = scripted(reply=lambda _: FINE)
    experience = ExperienceModel(model, replay_buffer=buffer, demonstrations=1)
    play(DreamEnvironment(experience), ["eat apple"])
    assert "Tasty." in model.asked[0][-1].text and "It opens." not in model.asked[0][-1].text
    buffer.add(recorded(seen("go north", "Blocked."), task=other, source="real", rollout_index=1))
    assert experience.demonstrations("A closed door.", "go north", TASK)[0].next_observation == "Blocked."
    buffer.add(recorded(seen("eat apple", "Rotten."), task=other, source="real", rollout_index=2))
    experience.k = 2
    assert len(experience.demonstrations("A closed door.", "eat apple", TASK)) == 1, "the same while nothing changed"
    experience.refreshed("2")
    found = experience.demonstrations("A closed door.", "eat apple", TASK)
    assert [step.next_observation for step in found] == ["Tasty.", "Rotten."]


def test_demonstrations_looked_up_together_are_those_looked_up_one_by_one(buffer: ReplayBuffer) -> None:
    tasks = [Task(id=f"t{n}", instruction="", environment="") for n in range(3)]
    things = ["door", "box", "lamp", "window"]
    steps = [[seen(f"open {thing}", f"{task.id} {thing}") for thing in things] for task in tasks]
    episodes = [recorded(*each, task=task) for each, task in zip(steps, tasks, strict=True)]
    buffer.extend(episodes)
    together, single = (ExperienceModel(None, replay_buffer=buffer, demonstrations=2) for _ in range(2))
    together.retrieve(episodes)
    buffer.close()
    with pytest.raises(Exception, match="closed database"):
        single.demonstrations("A closed door.", "open box", tasks[0])
    for task in tasks:
        found = together.demonstrations("A closed door.", "open box", task)
        assert sorted(step.next_observation for step in found) == sorted(f"{t.id} box" for t in tasks if t is not task)


def test_demonstrations_need_a_buffer_to_come_from() -> None:
    with pytest.raises(ConfigurationError, match="demonstrations=3 needs a replay_buffer"):
        ExperienceModel(None, demonstrations=3)


# --- training data --------------------------------------------------------------------------------------------------


def refuse_magic(task: Task, action: str, observations: Sequence[str]) -> str | None:
    """Refuses magic, and everything once the policy has seen a dragon."""
    return "No magic here." if "magic" in action or "A dragon!" in observations else None


def test_what_check_action_refuses_never_reaches_the_experience_model() -> None:
    steps = [
        seen("magic", "No magic here.", valid=False),
        seen("open door", "A dragon!", observation="No magic here."),
        seen("fight", "No magic here.", observation="A dragon!", valid=False),
    ]
    experience = ExperienceModel(None)
    assert [each.action for each in recorded_exchanges(experience, recorded(*steps), refuse_magic)] == ["open door"]
    assert [each.action for each in recorded_exchanges(experience, recorded(*steps))] == ["magic", "open door", "fight"]
    texts = [message.text for message in to_conversation(experience, recorded(*steps), refuse_magic)]
    assert len(texts) == 3 and "> open door" in texts[1].splitlines() and "magic" not in "".join(texts)
    assert to_conversation(experience, recorded(steps[0]), refuse_magic) == []


def test_training_data_is_the_very_conversation_held_in_the_dream(scripted: Any, door_world: Any, buffer: ReplayBuffer) -> None:
    other = Task(id="t1", instruction="", environment="")
    outside = seen("go north", "Done.", observation="The door is open.", reward=1.0, terminated=True)
    buffer.add(recorded(seen("open door"), outside, task=other, success=True))
    episode = recorded(
        seen("go north", "The door is closed."),
        seen("open door", "The door is open.", observation="The door is closed.", reward=0.5),
        seen("go north", "You are outside.", observation="The door is open.", reward=0.5, terminated=True),
        success=True,
    )
    model = scripted(reply=door_world)
    experience = ExperienceModel(model, replay_buffer=buffer, demonstrations=1)
    play(DreamEnvironment(experience), [step.action for step in episode.steps])
    *prompt, answer = to_conversation(experience, episode)
    assert prompt == model.asked[-1]
    assert answer.text == "valid, it completes the task\nreward 0.5, success\nYou are outside."


def test_annotated_reasoning_is_what_the_experience_model_is_trained_on() -> None:
    first = seen("open door", reasoning="The handle turns.\nIt is not locked.")
    episode = recorded(first, seen("go north", observation="It opens."))
    lines = to_conversation(ExperienceModel(None, instructions=""), episode)
    assert lines[2].text == "valid, The handle turns. It is not locked.\nreward 0, continues\nIt opens."
    assert lines[-1].text.startswith("valid, no progress yet\n")
    answer = json.loads(to_conversation(ExperienceModel(None, prompt_format="json"), episode)[2].text)
    assert answer["reasoning"] == first.reasoning and list(answer)[0] == "reasoning"


def test_what_was_retrieved_is_forgotten_beyond_a_bound(buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer.add(recorded(seen("open door"), task=Task(id="t1", instruction="", environment="")))
    monkeypatch.setattr("dreamgym_lg.experience.model._REMEMBERED_DEMONSTRATIONS", 3)
    experience = ExperienceModel(None, replay_buffer=buffer, demonstrations=1)
    for number in range(10):
        assert experience.demonstrations("A closed door.", f"open door {number}", TASK)
    assert [action for _, action, _ in experience._found] == ["open door 7", "open door 8", "open door 9"]


def test_it_is_grounded_once_there_is_something_to_retrieve(buffer: ReplayBuffer) -> None:
    experience = ExperienceModel(None, replay_buffer=buffer, demonstrations=1)
    assert not experience.grounded
    buffer.add(recorded(seen("open door")))
    assert experience.grounded and not ExperienceModel(None, replay_buffer=buffer).grounded
