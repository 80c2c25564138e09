"""A desk that somebody else wrote: its logs, a dream compiled from them, every baseline, and the proof on its real tools.

Run: python cookbook/desks/run.py clinic               (a seed: about an hour and a half on two quiet cores)
     python cookbook/desks/run.py library --seed 2
     python cookbook/desks/run.py library --learner rft --logs 100   (second tries: tickets that the logs lost are played in the
                                                                      dream; what the desk's check accepts is imitated too)
     python cookbook/desks/run.py library --learner rft --logs 100 --imputed   (a loan or reader that no log looked up has the
                                                                      recorded state of another: `library_states.py`)
     python cookbook/desks/run.py clinic --real        (on the desk's own tools in place of the dream: the ceiling)
     python cookbook/desks/run.py clinic --quick       (few steps of everything, to see it run; proves nothing)

Killed at any moment, the same command goes on.
"""

import argparse
from pathlib import Path
from typing import Any

from glue import SECOND_TRIES, TRAINING, WRITES, Desk, EpisodeDatabase, compile_dream, read_logs
from library_states import imputed_dream

from dreamgym_lg import ReplayBuffer, Settings, Task
from dreamgym_lg.cli.console import quiet_libraries
from dreamgym_lg.compiled import Compiled, draw_tasks
from dreamgym_lg.dream import TraceIndex
from dreamgym_lg.experiment.evaluation import shown_episodes
from dreamgym_lg.report.proof import write_report

QUICK: dict[str, Any] = {"base_steps": 2, "batch_size": 4, "iterations": 1, "num_tasks": 4, "num_generations": 2}
QUICK |= {"evaluate_tasks": 2, "proof_tasks": 2}


def draw(desk: Desk, buffer: ReplayBuffer, number: int, seed: int) -> list[Task]:
    """Tasks drawn from the logs' successes; killed, it goes on with the same."""
    if not number or (drawn := [task for task in buffer.tasks(origin="synthetic") if task.drawn]):
        return drawn if number else []
    buffer.add_tasks(desk.tasks("validation", "test"))  # no new id is one of theirs
    index = TraceIndex(buffer, tools=desk.agent.make_tools(EpisodeDatabase()), writes=WRITES[desk.name])
    drawn, dropped = draw_tasks(Compiled(desk.out / "world"), index, number, seed=seed)
    buffer.add_tasks(drawn)
    print(f"drawn tasks: {len(drawn)}; dropped, by reason: {dict(dropped)}", flush=True)
    return drawn


def choose_settings(options: argparse.Namespace) -> Settings:
    """Of held-out tasks the dream knows no entity. GRPO takes tasks with a recorded success, second tries all others."""
    rft = options.learner == "rft"
    grpo = {**TRAINING, "iterations": 4, "references_only": not options.real}
    chosen = {**SECOND_TRIES, "num_tasks": options.logs} if rft else grpo
    chosen |= {"seed": options.seed, "environment": "real" if options.real else "dream", "model": options.model}
    chosen |= QUICK if options.quick else {}
    chosen |= {"base_steps": options.steps} if options.steps else {}
    return Settings(**chosen | ({"iterations": options.iterations} if options.iterations else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("desk", choices=WRITES)
    parser.add_argument("--seed", type=int, default=1, help="of the logs and of all training; default: 1")
    parser.add_argument("--logs", type=int, default=300, help="episodes of the predecessor; default: 300")
    parser.add_argument("--steps", type=int, help="of each imitation, of 8 episodes; default: 120; --quick: 2, of 4")
    parser.add_argument("--learner", choices=("grpo", "rft"), default="grpo", help="default: grpo")
    parser.add_argument("--iterations", type=int, help="of the learner; default: 4 of GRPO, 1 of second tries")
    parser.add_argument("--drawn", type=int, help="tasks drawn from the logs' successes; default: 400 of GRPO in the dream")
    parser.add_argument("--imputed", action="store_true", help="give what no log looked up a recorded state; library only")
    parser.add_argument("--real", action="store_true", help="train on the desk's own tools: what there is to gain")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    parser.add_argument("--model", default=Settings.model, help="weights that the policy begins with")
    parser.add_argument("--out", type=Path, help="folder of everything; default: one of these numbers under runs")
    options = parser.parse_args()
    if options.imputed and options.desk != "library":
        parser.error(
            f"--imputed: what is right in another state than the database's is known of the library, not of {options.desk}"
        )
    quiet_libraries(offline=False)
    chosen = [name for name in ("imputed", "real", "quick") if getattr(options, name)]
    kind = "-".join([options.learner, f"seed{options.seed}", f"logs{options.logs}", *chosen])
    desk = Desk(options.desk, (options.out or Path("runs") / f"{options.desk}-{kind}").resolve())
    buffer = read_logs(desk, 60 if options.quick else options.logs, options.seed)
    dream, usual = compile_dream(desk, buffer), 0 if options.quick or options.real or options.learner == "rft" else 400
    if options.imputed:
        dream = imputed_dream(desk, dream, buffer, options.seed)
    drawn = draw(desk, buffer, usual if options.drawn is None else options.drawn, options.seed)
    settings = choose_settings(options)
    gym = desk.create_gym(buffer, dream, drawn, settings=settings, say=lambda line: print(line, flush=True))
    gym.prepare()
    gym.train()
    result, work = gym.prove(), gym.experiment
    print(write_report(result, buffer.metrics(work.run_name("train")), shown_episodes(work), desk.out))


if __name__ == "__main__":
    main()
