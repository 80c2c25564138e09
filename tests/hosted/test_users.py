"""A user that a hosted model plays, over an OpenAI-compatible server: bounded, counted, and kept on disk."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.dream import Answer, Dream, Episode, ModelUser, Verdict
from dreamgym_lg.errors import BudgetExceeded
from dreamgym_lg.experiment import gate
from dreamgym_lg.fidelity.judgement import ajudge
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

TASK = Task(id="t", instruction="Where is my order?", environment="desk", tools=[], metadata={"wants": "to know of W-204"})
ASKED = Episode(task=TASK, action=render_answer("Which order?"))


def wanting(model: Any, **options: Any) -> ModelUser:
    return ModelUser(model, goal=lambda task: task.metadata["wants"], **options)


def reply(messages: list[dict[str, Any]]) -> str:
    assert messages[0]["role"] == "system" and '"goal": "to know of W-204"' in messages[0]["content"]
    return "W-204." if messages[-1]["content"] == "Which order?" else "END"


def test_a_hosted_user_replies_once_whatever_the_process(serve: Any, chat_model: Any, tmp_path: Path) -> None:
    server = serve(reply)
    for calls in (1, 1):
        with ReplayBuffer(tmp_path / "replay.db") as buffer:
            assert asyncio.run(wanting(chat_model(server), replay_buffer=buffer).reply(ASKED)) == "W-204."
        assert len(server.requests) == calls
    assert [message["role"] for message in server.requests[0]["messages"]] == ["system", "user", "assistant", "user"]


def test_a_budget_ends_its_calls(serve: Any, chat_model: Any) -> None:
    user = wanting(chat_model(serve(reply)), hosted=Hosted(max_calls=1))
    assert asyncio.run(user.reply(ASKED)) == "W-204."
    with pytest.raises(BudgetExceeded, match="max_calls=1"):
        asyncio.run(user.reply(Episode(task=TASK, action=render_answer("And your name?"))))


class Plays:
    """Answers every call, and judges every episode a success."""

    name = "plays"

    def respond(self, episode: Episode) -> Answer:
        return Answer("paid")

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict:
        return Verdict(1.0, True)


ASK, LOOK, DONE = render_answer("Which order?"), render_call("look_up", {"order": "W-204"}), render_answer("It is on its way.")


def recorded(number: int) -> Trajectory:
    task = replace(TASK, id=f"t{number}", goal={"goal": "You want to know where your order is.", "facts": {"order": "W-204"}})
    turns = [(task.instruction, ASK, "W-204."), ("W-204.", LOOK, "paid")]
    steps = [Step(observation=seen, action=action, next_observation=answer) for seen, action, answer in turns]
    end = Step(observation="paid", action=DONE, next_observation="", reward=1, terminated=True)
    return Trajectory(task=task, steps=[*steps, end], success=True, run="traces")


@pytest.mark.parametrize(("word", "refused"), [("W-204.", ""), ("I do not know.", "does not tell 24 of 24")])
def test_a_hosted_user_talks_in_a_dream_and_is_measured_by_the_gate(
    word: str, refused: str, serve: Any, chat_model: Any
) -> None:
    server = serve(lambda messages: word if messages[-1]["content"] == "Which order?" else "END")
    dream = Dream([Plays()], ModelUser(chat_model(server)), [Plays()])
    environment = dream.create_environment()
    environment.reset(recorded(0).task)
    results = [environment.step(action) for action in (ASK, LOOK, DONE)]
    assert [(each.observation, each.info["decided_by"]) for each in results] == [(word, "user"), ("paid", "plays"), ("", "")]
    assert results[-1].terminated and results[-1].reward == 1 and len(server.requests) == 2
    judgement = asyncio.run(ajudge(dream, [recorded(number) for number in range(24)], writes=[]))
    refusals = "; ".join(gate.refusals(judgement, 0.05, ["user"]))
    assert refused in refusals and bool(refusals) == bool(refused), refusals
    # 24 alike conversations are two prompts, both known from the dream where it told what the recorded user did
    assert len(server.requests) == (3 if refused else 2)
