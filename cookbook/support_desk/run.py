"""The support desk's policy, trained in a dream and judged on its real database: the whole story in one command.

Run: python cookbook/support_desk/run.py --dreamed      (an experience model trained from 500 traces plays the tools)
     python cookbook/support_desk/run.py --truthful     (the tools' own code does, on private copies: no dream can lie here)

`agent.py`, `old_policy.py` and `tickets.py` are what a shop has anyway: its agent, how it worked so far, its staging database
with tickets and their check. What joins them to dreamgym-lg is `glue` and, for `--truthful`, `TruthfulServer`: a good first
step with any agent, for what goes wrong then is not the dream's fault.
"""

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agent import TOOLS, connected, create_desk
from old_policy import WRITES, OldPolicy, write_traces
from tickets import KINDS, Shop, create_shop

from dreamgym_lg import DreamGym, Environment, ReplayBuffer, StepResult, Task, Trajectory, load_traces
from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.gym import AgentWorld
from dreamgym_lg.simulate.agent import final_answer


class TruthfulServer(Environment):
    """Answers an agent's calls as its tools do: by their own code, on a copy of the database that only this episode has."""

    def __init__(self, shop: Shop) -> None:
        self.shop, self.tools = shop, {tool.__name__: tool for tool in TOOLS}

    def reset(self, task: Task) -> str:
        self.task, self.database = task, self.shop.copy()
        return task.instruction

    def step(self, action: str) -> StepResult:
        call = parse_action(action)
        with connected(self.database):
            if isinstance(call, ToolCall):
                return StepResult(json.dumps(self.tools[call.name](**call.arguments)), 0.0, False, False, {})
            success = self.shop.solved(self.task, call)
        return StepResult("", float(success), True, False, {"success": success})


def create_gym(shop: Shop, held_out: Sequence[Task], out: Path, *, truthful: bool, seed: int, **options: Any) -> DreamGym:
    """The agent with its traces, its check and its staging database, ready to train."""

    @asynccontextmanager
    async def reset_real(task: Task) -> Any:
        with shop.fresh():
            yield

    replay_buffer = ReplayBuffer(out / "replay.db")
    replay_buffer.extend(load_traces(out / "traces.jsonl", environment="desk"))
    settings = replace(AgentWorld.settings, seed=seed, real_evaluation=True, policy_tokens=96, learning_rate=3e-4, **options)
    return DreamGym(
        create_desk(OldPolicy()),
        replay_buffer=replay_buffer,
        experience_model=None,
        tasks=[*replay_buffer.tasks(split="train"), *held_out],
        writes=WRITES,
        reset_real=reset_real,
        verify_real=lambda task, state: shop.solved(task, final_answer(state)),
        create_environment=partial(TruthfulServer, shop) if truthful else None,
        out=out,
        settings=settings,
    )
