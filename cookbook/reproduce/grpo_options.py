"""What GRPO's options add: ECHO, step credit and further groups, in the real environment of a text game.

Run: python cookbook/reproduce/grpo_options.py peckingorder --base-steps 7 --seeds 1 2
     python cookbook/reproduce/grpo_options.py coin --base-steps 5 --seeds 1 2

An option takes three to four minutes a seed. All begin with the same imitation and train on the same tasks. Killed, the same
command goes on.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamgym_lg import Experiment
from dreamgym_lg.integrations.textworld_express.text import GAMES
from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld

OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "echo": {"learner_options": {"echo": 0.05}},
    "credit": {"learner_options": {"step_credit": True}},
    "resample": {"resample": 8},
}
SMALL = Path(__file__).parents[2] / "tests" / "tiny" / "small_base"
SETTINGS: Mapping[str, Any] = {
    **{"tasks": 600, "episodes": {"noisy": 60}, "batch_size": 4, "environment": "real", "policy_tokens": 24},
    **{"num_tasks": 8, "num_generations": 8, "evaluate_tasks": 30},
}


def train(option: str, folder: Path, arguments: argparse.Namespace, seed: int) -> list[dict[str, float]]:
    """The metrics of each iteration. A training that has ended is not done again."""
    if (done := folder / f"{option}.json").exists():
        return json.loads(done.read_text())  # type: ignore[no-any-return]
    world, iterations = TextWorldExpressWorld(arguments.game), arguments.iterations
    numbers = {"seed": seed, "base_steps": arguments.base_steps, "model": str(arguments.model)}
    settings = replace(world.settings, **SETTINGS, **numbers, iterations=iterations, evaluate_every=iterations)
    if not (base := folder / "base").exists():
        first = Experiment(world, folder / "draft", settings)
        first.collect()
        first.train_base()
        first.replay_buffer.close()
        (folder / "draft").rename(base)
    shutil.rmtree(folder / option, ignore_errors=True)
    shutil.copytree(base, folder / option, ignore=shutil.ignore_patterns("settings.json"))
    experiment = Experiment(world, folder / option, settings)
    experiment.train(base / "models" / "base", **OPTIONS[option])
    metrics = experiment.replay_buffer.metrics(experiment.run_name("train"))
    experiment.replay_buffer.close()
    done.write_text(json.dumps(metrics))
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2], metavar="SEED")
    parser.add_argument("--base-steps", type=int, default=7, help="of the imitation that all begin with; default: 7")
    parser.add_argument("--iterations", type=int, default=6, help="default: 6")
    parser.add_argument("--model", type=Path, default=SMALL, help="start of the policy; default: 3 million parameters")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_options"))
    arguments = parser.parse_args()
    print("| seed | option | episodes | real steps | success by iteration | mean | validation |\n|---|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        for option in OPTIONS:
            folder = arguments.out / f"{arguments.game}-seed{seed}-base{arguments.base_steps}"
            rows = train(option, folder, arguments, seed)
            success, last = [row.get("train_success", 0.0) for row in rows], rows[-1]
            episodes, steps = (round(sum(row[name] for row in rows)) for name in ("episodes", "real_steps"))
            by_iteration, mean = ", ".join(f"{each:.2f}" for each in success), sum(success) / len(success)
            validation = f"{last['eval_real_successes']:.0f} of {last['eval_real_episodes']:.0f}"
            print(f"| {seed} | {option} | {episodes} | {steps} | {by_iteration} | {mean:.2f} | {validation} |", flush=True)


if __name__ == "__main__":
    main()
