"""The story: traces, a dream of them, imitation, training in the dream, and the proof on the real database."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agent import TOOLS
from glue import SETTINGS, create_gym, train
from langchain_core.tools import StructuredTool
from old_policy import WRITES, write_traces
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tickets import Shop, create_shop
from truthful_server import TruthfulServer, truthful_dream

from dreamgym_lg import Dream, Experiment, ReplayBuffer, Step, Task, Verify, load_traces
from dreamgym_lg.actions import readable
from dreamgym_lg.cli.console import quiet_libraries
from dreamgym_lg.compiled import Compiled, Imputed, compile_world, compiled_dream, draw_tasks
from dreamgym_lg.dream import RecordedUser, TraceIndex
from dreamgym_lg.experiment.evaluation import shown_episodes
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.report.proof import read_claim, summary_table, write_report

HELD_OUT = {"validation": 8, "test": 20}
MANY_HELD_OUT = {"validation": 60, "test": 150}
BASELINES = ("sft", "sft-filtered")
"""What the dream has to beat here. The others take the demo's time again: `--all-baselines`."""
SECOND_TRIES: dict[str, Any] = {
    **{"learner": "rft", "references_only": False, "iterations": 1, "num_generations": 8, "synthetic_share": 0.0},
    **{"base_steps": None, "policy_tokens": 96, "evaluate_tasks": 60, "proof_tasks": 150},
}
"""Settings of second tries: every ticket that no trace solved, eight times. Each imitation takes twelve passes."""
DESK_TOOLS = [StructuredTool.from_function(tool) for tool in TOOLS]
say = partial(print, flush=True)


def tell(arguments: argparse.Namespace) -> None:
    """Every stage, each into the folder `arguments.out`; killed at any moment, the same command goes on."""
    quiet_libraries(offline=False)
    start, out, seed, talking = time.perf_counter(), arguments.out, arguments.seed, arguments.talking
    settings, held_out = choose_settings(arguments), MANY_HELD_OUT if arguments.second_tries else HELD_OUT
    held_out = {"test": 2, "validation": 0} if arguments.quick else held_out
    tasks = create_shop(out / "shop.db", seed=seed, train=arguments.traces, vague=talking, **held_out)
    shop = Shop(out / "shop.db")
    if not (out / "traces.jsonl").exists():
        say(f"1. traces: the old policy deals with {arguments.traces} tickets")
        write_traces(out / "traces.jsonl", shop, [task for task in tasks if task.split == "train"], seed=seed, talking=talking)
    dream = None
    if not arguments.dreamed:
        say(f"2. a dream: {'the tools themselves answer' if arguments.truthful else 'code is compiled from the traces'}")
        dream = truthful_dream(shop, talking=talking) if arguments.truthful else compile_dream(out, talking=talking)
        dream = imputed_dream(out, shop, seed) if arguments.second_tries else dream
    unseen = [task for task in tasks if task.split != "train"]
    # conversations are not drawn, and second tries are made of what the traces lost
    others = arguments.quick or arguments.dreamed or arguments.truthful or talking or arguments.second_tries
    if arguments.drawn and not others:
        # about orders and customers that no trace holds: the compiled world knows all of them
        replay_buffer = ReplayBuffer(out / "replay.db")
        replay_buffer.add_tasks(unseen)  # no new id is then one of theirs
        drawn = [task for task in replay_buffer.tasks(origin="synthetic") if task.drawn]  # killed, it goes on with the same
        if not drawn:
            index = TraceIndex(replay_buffer, tools=DESK_TOOLS, writes=WRITES)
            drawn, dropped = draw_tasks(Compiled(out / "world"), index, arguments.drawn, seed=seed)
            say(f"drawn tasks: {len(drawn)}; dropped, by reason: {dict(dropped)}")  # a tool in none is unlearned
        unseen += drawn
    gym = create_gym(shop, unseen, out, talking=talking, dream=dream, settings=settings, say=say)
    say(f"3. imitation of the recorded successes, then {settings.iterations} iterations in the dream")
    train(gym, () if arguments.all_baselines or arguments.second_tries else BASELINES)
    say(f"4. the proof: every policy deals with {held_out['test']} tickets that it has not seen, on the real database")
    result, work = gym.prove(), gym.experiment
    Console().print(before_and_after(work), summary_table(result))
    if result["offline_rl"] is None:
        rest = read_claim({**result, "offline_rl": "", "drawn": 0})
        left_out = "Offline RL and imitation of the drawn tasks were" if result["drawn"] else "Offline RL was"
        say(f"{left_out} left out (--all-baselines trains all). Against the other rows: {rest.verdict}")
        say(f"{settings.base_steps} steps of imitation are few: 120 won 77 of 100 tickets (docs/results/history.md)")
    page = write_report(result, work.replay_buffer.metrics(work.run_name("train")), shown_episodes(work), out)
    say(f"report: {page}; {(time.perf_counter() - start) / 60:.1f} minutes in this run")
    if arguments.quick:
        say("Two tickets prove nothing: the same command without --quick takes about 15 minutes")
    say("with your own agent: dreamgym try my_app.py:graph traces.jsonl")


def before_and_after(work: Experiment) -> Table:
    """One ticket as the start weights and as the trained policy dealt with it in the proof, side by side."""
    proof = [each for each in work.replay_buffer.trajectories(source="real") if "/real/" in each.run and each.steps]
    start, trained = ({each.task.id: each for each in proof if f"/{name}/sampled" in each.run} for name in ("start", "trained"))
    both = [start[id] for id in start if id in trained]
    before = max(both, key=lambda each: trained[each.task.id].success - each.success)  # the first of those that were learned
    after = trained[before.task.id]
    table = Table("before training", f"after: {'solved' if after.success else 'not solved'}", title=before.task.instruction)
    table.add_row(*(Text("\n".join(map(written, each.steps))) for each in (before, after)))
    return table


def written(step: Step) -> str:
    answer = "" if step.terminated else f"\n  -> {step.next_observation}"
    return f"{readable(step.action)}{answer}"


def choose_settings(arguments: argparse.Namespace) -> Settings:
    """The demo's settings. As a judge a small experience model is refused by the gate: so recorded successes judge."""
    # 30 steps win few tickets, 120 win 44 of 48 for validation (one seed, docs/results/history.md): the demo has little time
    options: dict[str, Any] = {"references_only": not arguments.truthful, "base_steps": 30, "batch_size": 8}
    options |= {"model": arguments.model}
    # for what else an experience model answers, a short training and one similar recorded step are enough
    options |= {"experience_steps": 60, "retrieved": 1}
    options |= {"iterations": arguments.iterations, "num_tasks": 4, "num_generations": 6}
    options |= {**SECOND_TRIES, "num_tasks": arguments.traces} if arguments.second_tries else {}
    if arguments.quick:  # enough to see every part work; nothing is validated in between
        options |= {"base_steps": 3, "experience_steps": 30, "iterations": 1, "num_tasks": 2, "num_generations": 2}
        options |= {"real_budget": 0, "max_false_success": None, "max_gap": None}
    return replace(SETTINGS, seed=arguments.seed, **options)


def compile_dream(out: Path, *, talking: bool) -> Dream:
    """The dream of recorded answers and of code compiled from the traces."""
    replay_buffer = ReplayBuffer(out / "replay.db")
    replay_buffer.extend(load_traces(out / "traces.jsonl", environment="desk"))
    if not (out / "world").exists():
        compile_world(replay_buffer, out / "world", tools=DESK_TOOLS, writes=WRITES)
    index = TraceIndex(replay_buffer, tools=DESK_TOOLS, writes=WRITES)
    return compiled_dream(out / "world", index, user=RecordedUser(replay_buffer) if talking else None)


def imputed_dream(out: Path, shop: Shop, seed: int) -> Dream:
    """The same, where an order that no trace looked up has the recorded state of another, and the shop's check knows it."""
    dream, index = (
        compile_dream(out, talking=False),
        TraceIndex(ReplayBuffer(out / "replay.db"), tools=DESK_TOOLS, writes=WRITES),
    )
    imputed = Imputed(Compiled(out / "world"), index, seed=seed)

    def check(task: Task, steps: Sequence[Step]) -> float:
        *calls, last = steps
        imagined = any(step.decided_by == imputed.name for step in calls)
        server = TruthfulServer(shop.showing(imputed.documents(task)) if imagined else shop)
        return float(server.solved(task, calls, last.action))

    schemas, *others = dream.responders
    return Dream([schemas, imputed, *others], None, [*dream.judges, Verify(check)])
