"""The world's hidden part: a book that names, one after the other, the fruits that lie about."""

from collections import Counter
from dataclasses import replace

import pytest
from langchain_core.language_models import GenericFakeChatModel

from dreamgym_lg.experience.hidden_facts import Told, hidden_words, next_in_line
from dreamgym_lg.experience.model import DreamEnvironment, ExperienceModel, to_conversation
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

FRUITS = frozenset({"apple", "pear", "fig", "plum"})
HIDDEN = {"barn": FRUITS}
START = "You are in the barn. You see the book, an apple, a pear, a fig, and a plum."


def world(number: int, start: str = START) -> Task:
    return Task(id=f"barn-{number}", instruction="obey the book", environment="barn", metadata={"observation": start})


def read(fruit: str) -> Told:
    return Told("read book", f"The task is to take the {fruit}.", 0.0, True)


def take(fruit: str, reward: float = 0.25) -> Told:
    return Told(f"take {fruit}", f"You take the {fruit}.", reward, True)


LOOK = Told("look around", START, 0.0, True)


def trajectory(number: int, *told: Told) -> Trajectory:
    steps, last = [], START
    for step in told:
        steps.append(Step(observation=last, action=step.action, next_observation=step.observation, reward=step.reward,
                          valid=step.valid))  # fmt: skip
        last = step.observation
    return Trajectory(task=world(number), steps=steps, run="offline", rollout_index=number)


def order(fruits: str) -> list[Told]:
    return [step for fruit in fruits.split() for step in (read(fruit), take(fruit))]


PLAYED = [trajectory(n, LOOK, *order(fruits)) for n, fruits in enumerate(["apple pear fig plum", "plum fig pear apple"] * 10)]


def test_the_hidden_words_are_those_that_are_named_alone() -> None:
    assert hidden_words(PLAYED) == HIDDEN  # not "book", which is read, nor "the" and "take", nor what a look lists again


def test_words_that_are_rarely_named_alone_are_not_hidden() -> None:
    assert hidden_words(PLAYED[:9]) == {"barn": frozenset()}  # named in too few episodes to tell
    silent = [trajectory(n, LOOK, take("fig")) for n in range(100, 200)]
    assert hidden_words([*PLAYED, *silent]) == {"barn": frozenset()}  # named in 20 of 120 that list them


def test_of_the_past_it_is_what_was_really_named() -> None:
    told = [LOOK, *order("pear apple"), read("plum")]
    turns = next_in_line(world(0), told, HIDDEN)
    assert turns[:-1] == ["pear", "pear", "pear", "apple", "apple", "plum"]
    assert turns[-1] == "plum"  # it was named and not taken: the book still says so


@pytest.mark.parametrize("number", range(8))
def test_what_is_to_come_is_drawn_once_and_is_never_what_was(number: int) -> None:
    drawn: list[str] = []
    for _ in range(4):
        so_far = order(" ".join(drawn))
        drawn.append(next_in_line(world(number), so_far, HIDDEN)[-1])
        assert next_in_line(world(number), [*so_far, LOOK], HIDDEN)[-1] == drawn[-1]
    assert sorted(drawn) == sorted(FRUITS)
    assert next_in_line(world(number), order(" ".join(drawn)), HIDDEN)[-1] == ""


def test_every_word_comes_first_in_some_worlds() -> None:
    first = Counter(next_in_line(world(number), [], HIDDEN)[0] for number in range(400))
    assert first.keys() == FRUITS and min(first.values()) > 60  # of 100 expected; sd 8.7


def test_an_action_that_is_paid_for_without_being_named_was_in_line_and_one_that_is_not_was_not() -> None:
    assert next_in_line(world(0), [take("fig"), read("pear")], HIDDEN) == ["fig", "pear", "pear"]
    for number in range(20):
        wrong = take("fig", reward=0.0)._replace(ended=True)
        assert next_in_line(world(number), [wrong], HIDDEN)[0] != "fig"


@pytest.mark.parametrize("number", range(8))
def test_nothing_that_an_agent_does_chooses_what_comes(number: int) -> None:
    """Else a policy learns to choose: the world would be another one for each episode of a group."""
    (first,) = next_in_line(world(number), [], HIDDEN)
    for tried in [*FRUITS, "book"]:
        idle = [Told(f"examine {tried}", f"It is a {tried}.", 0.0, True), LOOK, Told(f"take {tried}", "What?", 0.0, False)]
        assert next_in_line(world(number), idle, HIDDEN) == [first] * 4


def test_words_of_one_environment_mean_nothing_in_another_nor_do_numbers_and_the_words_of_tools() -> None:
    kitchen = replace(world(0), environment="kitchen")
    assert next_in_line(kitchen, [LOOK], HIDDEN) == ["", ""]
    tools = [replace(each, task=replace(each.task, metadata={**each.task.metadata, "tools": ["book"]})) for each in PLAYED]
    assert hidden_words(tools) == {}

    def numbered(n: int) -> Trajectory:
        step = Step(observation="1 2 3", action="read", next_observation=f"take {n % 3 + 1}")
        used = Step(observation="", action=f"take {n % 3 + 1}", next_observation="Taken.")
        return Trajectory(task=world(n, "On the shelf: 1 2 3"), steps=[step, used], run="offline", rollout_index=n)

    assert hidden_words(map(numbered, range(90))) == {"barn": frozenset()}


def test_a_word_comes_again_when_its_reward_is_lost() -> None:
    back = Told("put fig in barn", "You put the fig in the barn.", -0.25, True)
    assert next_in_line(world(0), [*order("fig"), back, read("fig")], HIDDEN)[2:] == [
        next_in_line(world(0), order("fig"), HIDDEN)[2], "fig", "fig"]  # fmt: skip


def test_an_invalid_action_takes_no_turn() -> None:
    failed = Told("take the fig", "I'm not sure what you mean.", 0.0, False)
    assert next_in_line(world(0), [read("fig"), failed], HIDDEN) == ["fig"] * 3


@pytest.fixture
def replay_buffer(tmp_path):
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        buffer.add_tasks([played.task for played in PLAYED])
        buffer.extend(PLAYED)
        yield buffer


def test_a_trained_model_is_shown_it_in_hindsight_and_in_the_dream(replay_buffer: ReplayBuffer) -> None:
    experience = ExperienceModel(None, replay_buffer=replay_buffer, instructions="")
    shown = [message.text.rsplit("\n", 1)[-1] for message in to_conversation(experience, PLAYED[0])[1::2]]
    assert shown[:4] == ["next in line: apple"] * 3 + ["next in line: pear"]
    task = world(99)
    (asked,) = experience.messages(task, [], "read book", ())[1:]
    assert asked.text.endswith(f"next in line: {next_in_line(task, [], HIDDEN)[0]}")


def test_a_dreams_prompts_only_grow(replay_buffer: ReplayBuffer) -> None:
    prompts: list[list[str]] = []

    class Book(ExperienceModel):
        def messages(self, *args):
            found = super().messages(*args)
            prompts.append([message.text for message in found])
            return found

    def answers():
        while True:
            last = prompts[-1][-1]
            fruit, taken = last.rsplit(" ", 1)[-1], "> take" in last
            yield f"valid, fine\nreward {0.25 if taken else 0}, continues\n" + (
                f"You take the {fruit}." if taken else f"The task is to take the {fruit}.")  # fmt: skip

    dream = DreamEnvironment(Book(GenericFakeChatModel(messages=answers()), replay_buffer=replay_buffer, instructions=""))
    dream.reset(world(7))
    asked = []
    for _ in range(4):
        asked.append(dream.step("read book").observation.split()[-1].strip("."))
        assert dream.step(f"take {asked[-1]}").reward == 0.25
    assert sorted(asked) == sorted(FRUITS)
    assert all(after[: len(before)] == before for before, after in zip(prompts, prompts[1:], strict=False))


def test_a_prompted_model_and_one_without_a_buffer_are_not_shown_it(replay_buffer: ReplayBuffer) -> None:
    for experience in (ExperienceModel(None, replay_buffer=replay_buffer, form="json"), ExperienceModel(None, form="lines")):
        assert "in line" not in experience.messages(world(1), [], "read book", ())[-1].text
