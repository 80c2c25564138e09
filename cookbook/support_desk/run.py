"""The support desk's policy, trained in a dream and judged on its real database: the whole story in one command.

Run: python cookbook/support_desk/run.py --dreamed      (an experience model trained from 500 traces plays the tools)
     python cookbook/support_desk/run.py --truthful     (the tools' own code does, on private copies: no dream can lie here)

With `--talking` customers leave things out, and the desk asks, reads back and waits for a yes (`customers.py`).

`agent.py`, `old_policy.py` and `tickets.py` are what a shop has anyway: its agent, how it worked so far, its staging database
with tickets and their check. `glue.py` joins them to dreamgym-lg. `--truthful` is a good first step with any agent: what goes
wrong then is not the dream's fault.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from glue import SETTINGS, create_gym, train
from old_policy import write_traces
from tickets import KINDS, Shop, create_shop
from truthful_server import truthful_dream

from dreamgym_lg import DreamGym, Trajectory
from dreamgym_lg.experiment.evaluation import DREAMED, MODES
from dreamgym_lg.experiment.settings import quick
from dreamgym_lg.report.proof import POLICIES
from dreamgym_lg.statistics import Rate


def evaluate(gym: DreamGym) -> dict[str, dict[str, tuple[int, int]]]:
    """The traces, and every policy on the held-out tickets: success, and by kind.

    A truthful server dreams some too. In an experience model's dream no recorded success judges a held-out ticket.
    """
    result = {"old policy, its own tickets, real": _counted(list(gym.replay_buffer.trajectories(source="offline")))}
    dreamed = [] if gym.experiment.settings.references_only else [("trained", DREAMED, False)]
    policies = [name for name in POLICIES if (gym.experiment.models / name).exists()]
    for policy, mode, real in (*product(policies, MODES, [True]), *dreamed):
        name = f"{policy}, {mode}, {'real' if real else 'dream'}"
        _, episodes = gym.evaluate(gym.experiment.policy(policy, MODES[mode]), real=real, run=f"evaluate/{policy}/{mode}")
        result[name] = _counted(episodes)
    for name, counted in result.items():
        successes, played = counted["all"]
        kinds = "  ".join(f"{kind} {good}/{all}" for kind, (good, all) in counted.items() if kind != "all")
        print(f"{name:34} {Rate.of(successes, played)}  {kinds}")
    return result


def _counted(episodes: Sequence[Trajectory]) -> dict[str, tuple[int, int]]:
    """(successes, episodes) of all, and of each kind."""
    groups = {"all": episodes}
    groups |= {kind: [each for each in episodes if each.task.metadata["kind"] == kind] for kind in KINDS}
    return {name: (sum(each.success for each in group), len(group)) for name, group in groups.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="A support desk's policy, trained in a dream, judged on its real database")
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--truthful", action="store_true", help="the tools' own code answers, on private copies")
    server.add_argument("--dreamed", action="store_true", help="an experience model trained from the traces answers")
    parser.add_argument("--talking", action="store_true", help="the desk that talks, with customers who leave things out")
    parser.add_argument("--seed", type=int, default=0, help="of the shop, its traces and all training")
    parser.add_argument("--traces", type=int, default=500, help="tickets that the old policy dealt with")
    parser.add_argument("--out", type=Path, default=Path("runs/desk"))
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    arguments = parser.parse_args()
    start, out, seed, talking = time.perf_counter(), arguments.out, arguments.seed, arguments.talking

    # as a judge the experience model is refused by the gate: recorded successes judge, and for what else it answers a short
    # training and one similar recorded step are enough
    less = {"references_only": True, "experience_steps": 60, "retrieved": 1}
    dreamed: dict[str, Any] = {} if arguments.truthful else less
    settings, held_out = replace(SETTINGS, seed=seed, **dreamed), {}
    if arguments.quick:
        settings = replace(quick(settings), iterations=1, num_tasks=2, num_generations=4, base_steps=4)
        held_out = {"validation": 6, "test": 12}
    tasks = create_shop(out / "shop.db", seed=seed, train=arguments.traces, vague=talking, **held_out)
    shop = Shop(out / "shop.db")
    if not (out / "traces.jsonl").exists():
        write_traces(out / "traces.jsonl", shop, [task for task in tasks if task.split == "train"], seed=seed, talking=talking)
    unseen = [task for task in tasks if task.split != "train"]
    dream = truthful_dream(shop, talking=talking) if arguments.truthful else None
    gym = create_gym(shop, unseen, out, talking=talking, dream=dream, settings=settings, say=print)
    train(gym)
    result = evaluate(gym)
    (out / "result.json").write_text(json.dumps({"seconds": time.perf_counter() - start, "successes": result}, indent=2))
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes; {out / 'result.json'}")


if __name__ == "__main__":
    main()
