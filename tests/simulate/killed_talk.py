"""Plays six conversations into a replay buffer, three at once; run again after a kill, it goes on.

Args: the buffer, a file that lists whom the user answered, and the task in whose conversation the process is killed, or "".
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from dataclasses import replace

from desk_agent import threaded
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatResult
from test_conversation import ACTIONS, REPLIES, TASK, Acts, create_dream

from dreamgym_lg.actions import parse_action
from dreamgym_lg.dream import Episode, ScriptedUser
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent

TASKS = [replace(TASK, id=f"t{number}") for number in range(6)]


class ByTurn(Acts):
    """Acts by what it said so far, in any number of conversations at once."""

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.position = sum(message.type == "ai" for message in messages)
        return super()._generate(messages)


def main(buffer: str, log: str, dies: str) -> None:
    def reply(episode: Episode) -> str | None:
        with open(log, "a") as file:
            file.write(f"{episode.task.id}\n")
        if episode.task.id == dies and episode.steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return REPLIES.get(str(parse_action(episode.action)))

    agent, dream = SimulatedAgent(threaded(), ByTurn(actions=ACTIONS)), create_dream(user=ScriptedUser(reply))
    with ReplayBuffer(buffer) as stored:
        kept = {"source": "synthetic", "run": "talk", "replay_buffer": stored, "concurrency": 3}
        asyncio.run(rollout(agent, TASKS, dream.create_environment, **kept))


if __name__ == "__main__":
    main(*sys.argv[1:])
