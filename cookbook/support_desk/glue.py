"""All that joins the shop's agent, database and traces to dreamgym-lg: fewer than forty lines of code, imports included."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent import create_desk
from customers import agreed, reply
from old_policy import WRITES, OldPolicy
from tickets import Shop

from dreamgym_lg import DreamGym, ReplayBuffer, Task, load_traces
from dreamgym_lg.dream import RecordedUser, ScriptedUser
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.imitation import BASELINES
from dreamgym_lg.simulate.conversation import final_answer

SETTINGS = replace(AgentWorld.settings, iterations=10, evaluate_every=5, evaluate_tasks=48, real_budget=None, policy_tokens=48)
"""Replies are short, and the staging database is asked on the validation tickets, by which the best policy is kept."""


def create_gym(shop: Shop, held_out: Sequence[Task], out: Path, *, talking: bool = False, **options: Any) -> DreamGym:
    """The agent with its traces, its staging database and its check, ready to train.

    Args: `talking`, the agent that talks, with its real customers; `options`, of `DreamGym`.
    """

    @asynccontextmanager
    async def reset_real(task: Task) -> AsyncIterator[None]:
        with shop.fresh():
            yield

    replay_buffer = ReplayBuffer(out / "replay.db")
    replay_buffer.extend(load_traces(out / "traces.jsonl", environment="desk"))
    if talking:  # in the dream the recorded customers talk, and then whoever `train_user` makes of them
        options = {"user_real": ScriptedUser(reply), **options}
        options |= {} if options.get("dream") else {"user": RecordedUser(replay_buffer)}
    return DreamGym(
        f"{Path(__file__).parent / 'old_policy.py'}:talking_desk" if talking else create_desk(OldPolicy()),
        replay_buffer=replay_buffer,
        tasks=held_out,
        writes=WRITES,
        reset_real=reset_real,
        verify_real=lambda task, state: shop.solved(task, final_answer(state)) and (not talking or agreed(state["messages"])),
        out=out,
        **options,
    )


def train(gym: DreamGym, baselines: Sequence[str] = ()) -> None:
    """Every stage; killed at any moment, the same command goes on. Args: `baselines`, default all."""
    gym.prepare(baselines=baselines or BASELINES)
    gym.train()
