"""The demo's experiment, as small as it can be and have all its parts: `dreamgym demo small_run.py:create_experiment`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dreamgym_lg import Experiment, Task, Trajectory
from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld


class CutShort(TextWorldExpressWorld):
    """Noisy successes are left before their last action, so that filtered imitation has more to imitate than successes."""

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        for number, each in enumerate(super().collect(tasks, episodes, seed=seed)):
            if each.success and number >= episodes["demonstration"] and len(each.steps) > 1:
                *steps, last = each.steps[:-1]
                each = replace(each, steps=[*steps, replace(last, truncated=True)], success=False)
            yield each


def create_experiment(out: Path) -> Experiment:
    world = CutShort("peckingorder")
    few = {"evaluate_tasks": 3, "proof_tasks": 2, "num_tasks": 2, "num_generations": 3}
    few |= {"tasks": 60, "experience_steps": 4, "base_steps": 8, "batch_size": 2, "iterations": 3, "evaluate_every": 3}
    ungated = {"max_false_success": None, "max_gap": None}
    episodes = {"demonstration": 16, "noisy": 30, "random": 10}
    model = str(Path(__file__).parent / "small_base")
    return Experiment(world, out, replace(world.settings, seed=3, model=model, episodes=episodes, **few, **ungated))
