"""Training data of a local experience model: recorded episodes as the prompts and answers of the dream."""

import asyncio
import json
from typing import Any

import pytest
from orders import DONE, NOTE, ORDER, PAID, REFUND, Index, is_judging, order_task, play, trace

from dreamgym_lg.actions import render_answer
from dreamgym_lg.dream import Dream, Episode, Model, ModelJudge, Recorded, References, Verify
from dreamgym_lg.dream.judges import ends_with_message, judge_conversations
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

HOUSE = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")


def seen(action: str, outcome: str = "It opens.", *, observation: str = "A closed door.", **fields: Any) -> Step:
    return Step(observation=observation, action=action, next_observation=outcome, **fields)


def judged(episode: Trajectory, *judges: Any) -> list[Any]:
    """The conversations that an episode teaches the last of these judges."""
    return asyncio.run(judge_conversations(Dream([], judges=judges), episode))


def test_a_text_agents_episode_is_the_very_conversation_held_in_the_dream(
    scripted: Any, door_world: Any, buffer: ReplayBuffer
) -> None:
    outside = seen("go north", "Done.", observation="The door is open.", reward=1.0, terminated=True)
    other = Task(id="t1", instruction="", environment="")
    buffer.add(Trajectory(task=other, steps=[seen("open door"), outside], success=True))
    steps = [
        seen("go north", "The door is closed."),
        seen("open door", "The door is open.", observation="The door is closed."),
        seen("go north", "You are outside.", observation="The door is open.", reward=1.0, terminated=True),
    ]
    chat = scripted(reply=lambda messages: door_world(messages).replace("it brings progress", "no progress yet"))
    model = Model(chat, replay_buffer=buffer, demonstrations=1)
    play(Dream([model]).create_environment(), HOUSE, *(step.action for step in steps))
    *prompt, answer = model.training_conversation(Trajectory(task=HOUSE, steps=steps, success=True))
    assert prompt == chat.asked[-1]
    assert answer.text == "valid, it completes the task\nreward 1, success\nYou are outside."


@pytest.mark.parametrize("prompt_format", ["lines", "json"])
def test_a_tool_agents_episode_is_what_model_and_judge_are_asked_in_the_dream(buffer: ReplayBuffer, prompt_format: Any) -> None:
    """Its recorded calls and the user's replies are read as the model's own answers, as in a dream that knows them."""
    which = render_answer("Which order?")
    episode = trace(order_task(), (which, "W-204"), (ORDER, PAID), (NOTE, "Error", False), (REFUND, "ok"), DONE)
    buffer.add(trace(order_task("t2"), (ORDER, PAID), (NOTE, "Error", False), DONE))
    model = Model(None, replay_buffer=buffer, demonstrations=1, prompt_format=prompt_format)
    calls = model.training_conversation(episode)
    assert calls[:-1] == model.messages(Episode(task=order_task(), steps=episode.steps[:3], action=REFUND))
    assert calls[-1].text == model.prompt_format.answer(model.prompt_format.read(calls[-1].text))
    judge = ModelJudge(model, references=Index(buffer))
    (verdict,) = judged(episode, judge)
    assert verdict[:-1] == judge.messages(Episode(task=order_task(), steps=episode.steps[:-1], action=DONE))
    assert judge.read(verdict[-1].text).success and is_judging(verdict) and not is_judging(calls)


def test_an_episode_is_judged_with_the_traces_of_its_task_and_as_of_a_new_one(buffer: ReplayBuffer) -> None:
    episode = trace(order_task(), (ORDER, PAID), render_answer("It is paid."))
    buffer.add(episode)
    judge = ModelJudge(Model(None, prompt_format="json"), references=Index(buffer))
    known, new = judged(episode, judge)
    assert "reference" in json.loads(known[1].text) and "reference" not in json.loads(new[1].text)
    assert known[-1] == new[-1]


def test_what_an_earlier_judge_decides_teaches_nothing(buffer: ReplayBuffer) -> None:
    episode = trace(order_task(), (REFUND, "ok"), DONE)
    buffer.add(episode)
    references, judge = References(Index(buffer)), ModelJudge(Model(None))
    (as_of_a_new_task,) = judged(episode, references, judge)
    assert is_judging(as_of_a_new_task)
    assert judged(episode, Verify(lambda *_: 1), judge) == judged(episode, references) == judged(episode) == []
    in_other_words = trace(order_task(), (REFUND, "ok"), render_answer("So it is."), success=False)
    shown = ModelJudge(Model(None), references=references)
    assert len(judged(episode, references, shown)) == 1
    assert len(judged(in_other_words, references, shown)) == 2, "the words of its message are the model's to judge"


def test_the_prompt_in_training_is_the_prompt_of_a_dream_that_answers_as_recorded(scripted: Any, buffer: ReplayBuffer) -> None:
    episode = trace(order_task(), (ORDER, PAID), (NOTE, "Error", False), (REFUND, "ok"), DONE)
    buffer.add(episode)
    chat = scripted(
        reply=lambda messages: "as it was\nsuccess" if is_judging(messages) else "valid, no\nreward 0, continues\nok"
    )
    model = Model(chat)
    dream = Dream([Recorded(buffer), model], judges=[ModelJudge(model)])
    play(dream.create_environment(), order_task(), ORDER, NOTE, REFUND, DONE)
    assert chat.asked[-1] == judged(episode, ModelJudge(model))[0][:-1]
    asyncio.run(model.predict(Episode(task=order_task(), steps=episode.steps[:2], action=REFUND)))
    assert chat.asked[-1] == model.training_conversation(episode)[:-1]


@pytest.mark.parametrize("success", [True, False])
def test_a_verdict_is_the_real_outcome_with_the_reason_that_was_annotated(success: bool) -> None:
    judge = ModelJudge(Model(None))
    episode = trace(order_task(), (ORDER, PAID), DONE, success=success)
    told = "it completes the task\nsuccess" if success else "it fails the task\nfailure"
    assert judged(episode, judge)[0][-1].text == told
    *steps, last = episode.steps
    annotated = Step(observation=last.observation, action=DONE, next_observation="", terminated=True, reasoning="It was\nread.")
    ((*_, answer),) = judged(Trajectory(task=episode.task, steps=[*steps, annotated], success=success), judge)
    assert answer.text == f"It was read.\n{told.splitlines()[-1]}"


def test_an_episode_that_asked_nothing_teaches_nothing() -> None:
    model = Model(None)
    judge = ModelJudge(model)
    cut, silent = trace(order_task(), (ORDER, PAID)), trace(order_task(), DONE)
    assert not ends_with_message(cut) and ends_with_message(silent) and not ends_with_message(trace(order_task()))
    assert judged(cut, judge) == [] and model.training_conversation(silent) == []
    assert model.training_conversation(trace(order_task())) == []
    house = Trajectory(task=HOUSE, steps=[seen(render_answer("open door"))])
    assert judged(house, judge) == [] and len(model.training_conversation(house)) == 3


def test_demonstrations_are_looked_up_for_all_at_once(buffer: ReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = [trace(order_task(f"t{n}"), (ORDER, f"paid {n}"), (REFUND, "ok"), DONE) for n in range(3)]
    buffer.extend(episodes)
    model = Model(None, replay_buffer=buffer, demonstrations=1)
    monkeypatch.setattr(buffer, "similar", lambda *_, **__: pytest.fail("one by one"))
    model.retrieve(episodes)
    for number, episode in enumerate(episodes):
        calls = model.training_conversation(episode)
        assert "seen: " in calls[1].text and f"\npaid {number}\n" not in calls[1].text, "never of the same task"


def test_annotated_reasoning_is_what_the_experience_model_is_trained_on() -> None:
    first = seen("open door", reasoning="The handle turns.\nIt is not locked.")
    episode = Trajectory(task=HOUSE, steps=[first, seen("go north", observation="It opens.")])
    lines = Model(None, instructions="").training_conversation(episode)
    assert lines[2].text == "valid, The handle turns. It is not locked.\nreward 0, continues\nIt opens."
    assert lines[-1].text.startswith("valid, no progress yet\n")
    answer = json.loads(Model(None, prompt_format="json").training_conversation(episode)[2].text)
    assert answer["reasoning"] == first.reasoning and list(answer)[0] == "reasoning"
