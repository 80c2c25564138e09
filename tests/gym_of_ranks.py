"""A training script as a user writes it, for `test_ranks.py`: `torchrun --nproc-per-node 2 gym_of_ranks.py FOLDER [KILLED]`.

With `KILLED`, rank 1 kills itself amid the second update.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from test_gym_train import SETTINGS, TASKS, World, odd

from dreamgym_lg import DreamGym, ReplayBuffer
from dreamgym_lg.integrations.trl.ranks import Ranks


def die_in_second_update() -> None:
    add_up, calls = Ranks.add_up_gradients, list[Ranks]()

    def fatal(self: Ranks, parameters: Any) -> None:
        calls.append(self)
        if len(calls) == 2 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        add_up(self, parameters)

    Ranks.add_up_gradients = fatal  # type: ignore[method-assign]


def main(folder: Path) -> DreamGym:
    graph = create_agent(World(), [], system_prompt="You book rooms.")
    gym = DreamGym(
        graph, replay_buffer=ReplayBuffer(folder / "replay.db"), experience_model=World(), tasks=TASKS, out=folder / "run",
        verify_dream=odd, verify_real=odd,
    )  # fmt: skip
    gym.train(folder.parent / "start", 3, policy_tokens=8, **SETTINGS)
    rate, _ = gym.evaluate(num_generations=2)
    gym.export(folder / "exported")
    print(f"evaluated {rate.episodes} episodes", flush=True)
    return gym


if __name__ == "__main__":
    if sys.argv[2:]:
        die_in_second_update()
    main(Path(sys.argv[1]))
