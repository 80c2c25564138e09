"""Plays six conversations into a replay buffer, three at once; run again after a kill, it goes on.

Args: the buffer, a file that lists whom the user answered, the task in whose conversation the process is killed, or "", and the
place: `dreamed`, or `real`, on the agent's own tools and one after the other.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from dataclasses import replace

from desk_agent import ORDERS, threaded
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult
from test_conversation import ACTIONS, REPLIES, TASK, Acts, create_dream

from dreamgym_lg.actions import parse_action
from dreamgym_lg.dream import Episode, ScriptedUser
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent
from dreamgym_lg.types import Task

TASKS = [replace(TASK, id=f"t{number}") for number in range(6)]


class ByTurn(Acts):
    """Acts by what it said so far, in any number of conversations at once."""

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.position = sum(message.type == "ai" for message in messages)
        return super()._generate(messages)


@asynccontextmanager
async def reset(task: Task) -> AsyncIterator[None]:
    ORDERS["W-2"] = "lost"
    yield


def main(buffer: str, log: str, dies: str, place: str) -> None:
    def reply(episode: Episode) -> str | None:
        with open(log, "a") as file:
            file.write(f"{episode.task.id}\n")
        if episode.task.id == dies and episode.steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return REPLIES.get(str(parse_action(episode.action)))

    policy, user = ByTurn(actions=ACTIONS), ScriptedUser(reply)
    check = {"verify": lambda task, state: ORDERS["W-2"] == "refunded", "reset_real": reset}
    with ReplayBuffer(buffer) as stored:
        kept: dict[str, Any] = {"run": "talk", "replay_buffer": stored}
        if place == "real":
            agent = SimulatedAgent(threaded(), policy, real=True, user=user, **check)
            asyncio.run(rollout(agent, TASKS, source="real", concurrency=1, **kept))
        else:
            dream = create_dream(user=user)
            agent = SimulatedAgent(threaded(), policy)
            asyncio.run(rollout(agent, TASKS, dream.create_environment, source="synthetic", concurrency=3, **kept))


if __name__ == "__main__":
    main(*sys.argv[1:])
