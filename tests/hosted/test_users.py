"""A user that a hosted model plays, over an OpenAI-compatible server: bounded, counted, and kept on disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.actions import render_answer
from dreamgym_lg.dream import Episode, ModelUser
from dreamgym_lg.errors import BudgetExceeded
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.types import Task

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
