"""The support desk: a language model learns from its traces, then in a dream of them, and is judged on the real database.

Run: python cookbook/support_desk/run.py                 (code compiled from the traces answers: no further model)
     python cookbook/support_desk/run.py --dreamed       (an experience model trained from the traces answers what they do not)
     python cookbook/support_desk/run.py --truthful      (the tools' own code answers, on private copies: no dream can lie here)

With `--talking` customers leave things out, and the desk asks, reads back and waits for a yes (`customers.py`).

`agent.py`, `old_policy.py` and `tickets.py` are what a shop has anyway: its agent, how it worked so far, its staging database
with tickets and their check. `glue.py` joins them to dreamgym-lg. `--truthful` is a good first step with any agent: what goes
wrong then is not the dream's fault.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent import TOOLS
from glue import SETTINGS, create_gym, train
from langchain_core.tools import StructuredTool
from old_policy import WRITES, write_traces
from rich.console import Console
from tickets import Shop, create_shop
from truthful_server import truthful_dream

from dreamgym_lg import Dream, ReplayBuffer, load_traces
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.drawing import draw_tasks
from dreamgym_lg.compiled.responder import Compiled, compiled_dream
from dreamgym_lg.dream import RecordedUser, TraceIndex
from dreamgym_lg.experiment.evaluation import shown_episodes
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.report.proof import summary_table, write_report


def compile_dream(out: Path, *, talking: bool) -> Dream:
    """The dream of recorded answers and of code compiled from the traces."""
    replay_buffer, tools = ReplayBuffer(out / "replay.db"), [StructuredTool.from_function(tool) for tool in TOOLS]
    replay_buffer.extend(load_traces(out / "traces.jsonl", environment="desk"))
    if not (out / "world").exists():
        compile_world(replay_buffer, out / "world", tools=tools, writes=WRITES)
    index = TraceIndex(replay_buffer, tools=tools, writes=WRITES)
    return compiled_dream(out / "world", index, user=RecordedUser(replay_buffer) if talking else None)


def quick(settings: Settings) -> Settings:
    """A few minutes: enough to see every part work, not to prove a gain."""
    few = {"batch_size": 4, "experience_steps": 30, "base_steps": 10, "iterations": 1, "num_tasks": 2, "num_generations": 2}
    return replace(settings, max_false_success=None, max_gap=None, **few)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A support desk's policy, trained in a dream, judged on its real database")
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--truthful", action="store_true", help="the tools' own code answers, on private copies")
    server.add_argument("--dreamed", action="store_true", help="an experience model trained from the traces answers")
    parser.add_argument("--talking", action="store_true", help="the desk that talks, with customers who leave things out")
    parser.add_argument("--seed", type=int, default=1, help="of the shop, its traces and all training")
    parser.add_argument("--traces", type=int, default=200, help="tickets that the old policy dealt with")
    parser.add_argument("--drawn", type=int, default=0, help="train on so many new tasks, drawn from the traces' successes")
    parser.add_argument("--iterations", type=int, default=2, help="of training; may be raised later")
    parser.add_argument("--model", default=SETTINGS.model, help="weights that the policy begins with")
    parser.add_argument("--out", type=Path, help="folder of everything; default: runs/desk-seedSEED")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    return parser.parse_args()


def main() -> None:
    arguments, start = parse_arguments(), time.perf_counter()
    seed, talking = arguments.seed, arguments.talking
    out = arguments.out or Path("runs") / f"desk-seed{seed}{'-quick' if arguments.quick else ''}"
    # as a judge a small experience model is refused by the gate: recorded successes judge, and for what else it answers a
    # short training and one similar recorded step are enough
    options: dict[str, Any] = {"references_only": not arguments.truthful, "experience_steps": 60, "retrieved": 1}
    options |= {"iterations": arguments.iterations, "model": arguments.model, "num_tasks": 4, "num_generations": 6}
    settings, held_out = replace(SETTINGS, seed=seed, **options), {"validation": 8, "test": 24}
    if arguments.quick:
        settings = quick(settings)
        held_out = {"validation": 1, "test": 2}
    tasks = create_shop(out / "shop.db", seed=seed, train=arguments.traces, vague=talking, **held_out)
    shop = Shop(out / "shop.db")
    if not (out / "traces.jsonl").exists():
        write_traces(out / "traces.jsonl", shop, [task for task in tasks if task.split == "train"], seed=seed, talking=talking)
    dream = None
    if not arguments.dreamed:
        dream = truthful_dream(shop, talking=talking) if arguments.truthful else compile_dream(out, talking=talking)
    unseen = [task for task in tasks if task.split != "train"]
    if arguments.drawn:  # about orders and customers that no trace holds: the compiled world knows all of them
        index = TraceIndex(ReplayBuffer(out / "replay.db"), writes=WRITES)
        unseen += draw_tasks(Compiled(out / "world"), index, arguments.drawn, seed=seed).tasks
    gym = create_gym(shop, unseen, out, talking=talking, dream=dream, settings=settings, say=print)
    train(gym)
    result, work = gym.prove(), gym.experiment
    Console().print(summary_table(result))
    page = write_report(result, work.replay_buffer.metrics(work.run_name("train")), shown_episodes(work), out)
    print(f"report: {page}; {(time.perf_counter() - start) / 60:.1f} minutes in this run")
    print("with your own agent: dreamgym try my_app.py:graph traces.jsonl")


if __name__ == "__main__":
    main()
