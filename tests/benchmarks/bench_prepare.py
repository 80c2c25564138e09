"""How much sooner `prepare()` is done when the two supervised trainings run at once: both ways in one run, in turn.

Run: python tests/benchmarks/bench_prepare.py [EXPERIENCE_STEPS BASE_STEPS]     (default: 30 75, four minutes on two cores)
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny"))

from tiny_models import SMALL_BASE  # noqa: E402

from dreamgym_lg import Experiment  # noqa: E402
from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld  # noqa: E402


def prepared(folder: Path, experience_steps: int, base_steps: int, prepare: Callable[[Experiment], None]) -> float:
    """Seconds from recorded episodes to both models."""
    world = TextWorldExpressWorld("peckingorder")
    settings = replace(world.settings, seed=1, model=str(SMALL_BASE), experience_steps=experience_steps, base_steps=base_steps)
    run = Experiment(world, folder, settings, progress=lambda *_: None, say=lambda _: None)
    run.collect()
    start = time.perf_counter()
    prepare(run)
    return time.perf_counter() - start


def in_turn(run: Experiment) -> None:
    run.train_experience()
    run.train_base()


def main() -> None:
    steps = [int(given) for given in sys.argv[1:3]] or [30, 75]
    print(f"{torch.get_num_threads()} threads, {steps[0]} steps of the experience model, {steps[1]} of the base policy")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            one = prepared(Path(folder) / f"in-turn-{number}", *steps, in_turn)
            other = prepared(Path(folder) / f"at-once-{number}", *steps, Experiment.prepare)
            print(f"in turn {one:.1f} s, at once {other:.1f} s: {one / other:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
