"""The support desk's policy, trained in a dream and judged on its real database: the whole story in one command.

Run: python cookbook/support_desk/run.py --dreamed      (an experience model trained from 500 traces plays the tools)
     python cookbook/support_desk/run.py --truthful     (the tools' own code does, on private copies: no dream can lie here)

`agent.py`, `old_policy.py` and `tickets.py` are what a shop has anyway: its agent, how it worked so far, its staging database
with tickets and their check. What joins them to dreamgym-lg is `TruthfulServer`, `create_gym` and `train`: fewer than forty
lines of code. `--truthful` is a good first step with any agent: what goes wrong then is not the dream's fault.
"""

import argparse
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from agent import TOOLS, connected, create_desk
from old_policy import WRITES, OldPolicy, write_traces
from tickets import KINDS, Shop, create_shop

from dreamgym_lg import DreamGym, Environment, ReplayBuffer, StepResult, Task, load_traces
from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.experiment.evaluation import MODES, POLICIES
from dreamgym_lg.experiment.settings import Settings, quick
from dreamgym_lg.gym import AgentWorld
from dreamgym_lg.simulate.agent import final_answer

SETTINGS = replace(AgentWorld.settings, real_evaluation=True, evaluate_tasks=48, policy_tokens=96, learning_rate=3e-4)
"""What differs from a large model's training: short replies, a learning rate for a small one, and the staging database is
asked on the validation tickets, by which the best policy is kept."""


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


def create_gym(shop: Shop, held_out: Sequence[Task], out: Path, *, truthful: bool, settings: Settings) -> DreamGym:
    """The agent with its traces, its staging database and its check, ready to train."""

    @asynccontextmanager
    async def reset_real(task: Task) -> AsyncIterator[None]:
        with shop.fresh():
            yield

    replay_buffer = ReplayBuffer(out / "replay.db")
    replay_buffer.extend(load_traces(out / "traces.jsonl", environment="desk"))
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
        say=print,
    )


def train(gym: DreamGym, *, truthful: bool) -> None:
    """Every stage; killed at any moment, the same command goes on."""
    if not truthful:
        gym.train_experience()
    gym.train_base()
    gym.train_supervised()
    gym.train(gym.models / "supervised")


def evaluate(gym: DreamGym) -> dict[str, Any]:
    """Every policy on the held-out tickets, real and dreamed, greedy and sampled; success, and success by kind."""
    result: dict[str, Any] = {}
    for policy, (mode, temperature), real in product(POLICIES, MODES.items(), (True, False)):
        where = "real" if real else "dream"
        run = f"evaluate/{policy}/{mode}"
        rate, episodes = gym.evaluate(gym.policy(policy, temperature), real=real, run=run, seed=gym.settings.seed)
        kinds = {kind: [t.success for t in episodes if t.task.metadata["kind"] == kind] for kind in KINDS}
        by_kind = {kind: f"{sum(each)}/{len(each)}" for kind, each in kinds.items()}
        result[f"{policy}, {mode}, {where}"] = {"rate": rate._asdict(), "by_kind": by_kind}
        print(f"{policy:10} {mode:8} {where:5} {rate}  " + "  ".join(f"{kind} {told}" for kind, told in by_kind.items()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="A support desk's policy, trained in a dream, judged on its real database")
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--truthful", action="store_true", help="the tools' own code answers, on private copies")
    server.add_argument("--dreamed", action="store_true", help="an experience model trained from the traces answers")
    parser.add_argument("--seed", type=int, default=0, help="of the shop, its traces and all training")
    parser.add_argument("--traces", type=int, default=500, help="tickets that the old policy dealt with")
    parser.add_argument("--out", type=Path, default=Path("runs/desk"))
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    arguments = parser.parse_args()
    start, out, seed = time.perf_counter(), arguments.out, arguments.seed

    held_out = {"validation": 6, "test": 12} if arguments.quick else {}
    tasks = create_shop(out / "shop.db", seed=seed, train=arguments.traces, **held_out)
    shop = Shop(out / "shop.db")
    if not (out / "traces.jsonl").exists():
        write_traces(out / "traces.jsonl", shop, [task for task in tasks if task.split == "train"], seed=seed)
    settings = replace(SETTINGS, seed=seed)
    gym = create_gym(
        shop,
        [task for task in tasks if task.split != "train"],
        out,
        truthful=arguments.truthful,
        settings=quick(settings) if arguments.quick else settings,
    )
    train(gym, truthful=arguments.truthful)
    result = evaluate(gym)
    (out / "result.json").write_text(json.dumps({"seconds": time.perf_counter() - start, **result}, indent=2))
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes; {out / 'result.json'}")


if __name__ == "__main__":
    main()
