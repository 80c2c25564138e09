"""Tickets that the predecessor lost are tried again in the dream; what the desk's check accepts is imitated as well.

Imitation has no example of these requests. The policy that imitates the recorded successes plays each of them several times on
the code compiled from the logs, and nothing real is touched. Then a new policy imitates the recorded successes and the shortest
of the dreamed ones (rejection sampling), for as many steps; both play the test tasks on the desk's own tools. The desk's
check, which judges in the dream, is knowledge that imitation of the logs does not have.

Run: python cookbook/desks/second_tries.py library            (a seed: about an hour on two quiet cores)
     python cookbook/desks/second_tries.py library --seed 2 --logs 100
     python cookbook/desks/second_tries.py library --real     (the tries are made on the desk's own tools: what there is to gain)
     python cookbook/desks/second_tries.py library --quick    (few steps of everything, to see it run; proves nothing)

Killed at any moment, the same command goes on.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from glue import WRITES, Desk
from run import QUICK, compile_dream, read_logs

from dreamgym_lg import DreamGym, ReplayBuffer, Settings
from dreamgym_lg.cli.console import quiet_libraries
from dreamgym_lg.statistics import paired_interval
from dreamgym_lg.types import Trajectory

MOST = 2
"""Different successes of a ticket that are imitated, so that easy ones do not crowd out the others."""


def new_successes(tries: Sequence[Trajectory]) -> list[Trajectory]:
    """The shortest different successes of each ticket, as recorded ones."""
    by_task = defaultdict[str, dict[tuple[str, ...], Trajectory]](dict)
    for each in sorted(tries, key=lambda each: len(each.steps)):
        if each.success and not each.invalid_actions:
            by_task[each.task.id].setdefault(tuple(step.action for step in each.steps), each)
    chosen = [each for successes in by_task.values() for each in islice(successes.values(), MOST)]
    return [replace(each, source="offline", run="", segments=()) for each in chosen]


def play_test(gym: DreamGym) -> dict[str, bool]:
    """Greedy success on the desk's own tools, by test task."""
    policy = gym.experiment.policy("base", temperature=0.0)
    tasks = gym.tasks("test")[: gym.experiment.settings.proof_tasks]
    _, episodes = gym.evaluate(policy, tasks=tasks, real=True, run="test", concurrency=32)
    return {each.task.id: each.success for each in episodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("desk", choices=WRITES)
    parser.add_argument("--seed", type=int, default=1, help="of the logs and of all training; default: 1")
    parser.add_argument("--logs", type=int, help="episodes of the predecessor; default: 100, --quick: 60")
    parser.add_argument("--steps", type=int, help="of each imitation, of 8 episodes; default: 120, --quick: 2")
    parser.add_argument("--tries", type=int, default=8, help="episodes of a lost ticket; default: 8")
    parser.add_argument("--real", action="store_true", help="tries on the desk's own tools, not in the dream")
    parser.add_argument("--quick", action="store_true", help="few steps of everything, to see it run; proves nothing")
    parser.add_argument("--model", default=Settings.model, help="weights that both policies begin with")
    parser.add_argument("--out", type=Path, help="folder of everything; default: runs/DESK")
    options = parser.parse_args()
    quiet_libraries(offline=False)
    logs, steps = options.logs or (60 if options.quick else 100), options.steps or (2 if options.quick else 120)
    # another number is another folder: what is trained there is not trained again
    numbers = f"seed{options.seed}-logs{logs}-steps{steps}-tries{options.tries}{'-real' if options.real else ''}"
    out = (options.out or Path("runs") / options.desk).resolve() / numbers
    settings = Settings(
        seed=options.seed, base_steps=steps, batch_size=8, policy_tokens=96, evaluate_tasks=60, proof_tasks=150,
        model=options.model,
    )  # fmt: skip
    settings = replace(settings, **QUICK) if options.quick else settings
    desk, second_desk = Desk(options.desk, out), Desk(options.desk, out / "second")
    buffer = read_logs(desk, logs, options.seed)
    gym = desk.create_gym(buffer, compile_dream(desk, buffer), settings=settings, say=print)
    gym.train_base()

    recorded = [each for each in buffer.trajectories(source="offline") if each.task.split == "train"]
    won = {each.task.id for each in recorded if each.success and not each.invalid_actions}
    lost = [task for task in gym.tasks("train") if task.id not in won][: 4 if options.quick else None]
    policy = gym.experiment.policy("base")
    _, tries = gym.evaluate(
        policy, tasks=lost, real=options.real, num_generations=options.tries, run="tries", concurrency=64
    )  # fmt: skip
    new = new_successes(tries)
    solved = len({each.task.id for each in new})
    print(f"{len(won)} of {len(recorded)} tickets have a recorded success; tried again, {solved} of {len(lost)} others do")

    second_buffer = ReplayBuffer(second_desk.out / "replay.db")
    second_buffer.extend([*recorded, *new])
    second = second_desk.create_gym(second_buffer, settings=replace(settings, environment="real"), say=print)
    second.train_base()
    first_outcomes, outcomes = play_test(gym), play_test(second)
    pairs = [(outcomes[task], first_outcomes[task]) for task in first_outcomes]
    gains, losses = pairs.count((True, False)), pairs.count((False, True))
    low, high = paired_interval(pairs)
    figures = {"recorded": sum(first_outcomes.values()), "second tries too": sum(outcomes.values()), "test tasks": len(pairs)}
    (out / "second_tries.json").write_text(json.dumps({**figures, "won": gains, "lost": losses, "new": len(new)}))
    print(f"{figures}: {(gains - losses) / len(pairs):+.2f} [{low:+.2f}, {high:+.2f}], {gains} won, {losses} lost")


if __name__ == "__main__":
    main()
