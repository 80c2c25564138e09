"""Dreamed steps a second in a compiled world, behind the wall; the aim is 200 on one core, and 2 ms for an episode's reset.

The traces are those of the support desk's old policy (cookbook/support_desk).
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from dreamgym_lg import Dream, Episode, ReplayBuffer, load_traces
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.responder import Compiled

DESK = Path(__file__).parents[2] / "cookbook" / "support_desk"
TRACES, PASSES = 200, 8


def main() -> None:
    sys.path.insert(0, str(DESK))
    from old_policy import WRITES, write_traces
    from tickets import Shop, create_shop

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = create_shop(folder / "shop.db", seed=0, train=TRACES, validation=0, test=0)
        write_traces(folder / "traces.jsonl", Shop(folder / "shop.db"), tasks, seed=0)
        with ReplayBuffer(":memory:") as replay_buffer:
            replay_buffer.extend(load_traces(folder / "traces.jsonl"))
            began = time.perf_counter()
            compile_world(replay_buffer, folder / "world", writes=WRITES, on_progress=lambda *_: None)
            compiled = time.perf_counter() - began
            trajectories = list(replay_buffer.trajectories())
        world = Compiled(folder / "world")
        environment, resets, firsts, steps, seconds, answered = Dream([world]).create_environment(), [], [], 0, 0.0, 0
        for _ in range(PASSES):
            first = []
            for trajectory in trajectories:
                began = time.perf_counter()
                environment.reset(trajectory.task)
                resets.append(time.perf_counter() - began)
                for number, step in enumerate(trajectory.steps[:-1]):  # the last one is the message
                    episode = Episode(task=trajectory.task, steps=trajectory.steps[:number], action=step.action)
                    began = time.perf_counter()
                    answered += world.respond(episode) is not None
                    took = time.perf_counter() - began
                    first += [took] if not number else []
                    steps, seconds = steps + 1, seconds + took
            firsts.append(first)
        world.close()
    fastest = list(map(min, zip(*firsts, strict=True)))  # what else the machine does is in none of all passes
    print(f"{TRACES} traces compiled in {compiled:.1f} s")
    print(f"{steps / seconds:,.0f} steps a second, {answered} of {steps} answered")
    print(f"reset: {median(resets) * 1000:.4f} ms; first step of an episode: {median(sum(firsts, [])) * 1000:.2f} ms, "
          f"of {PASSES} passes the fastest: at most {max(fastest) * 1000:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
