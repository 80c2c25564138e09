"""The 500 episodes that an LLM played in WebShop with ReAct prompts (Yao et al., 2023), as offline trajectories."""

import json
import lzma
from pathlib import Path
from typing import Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.text import one_line
from dreamgym_lg.types import Step, Task, Trajectory

ENVIRONMENT = "webshop/react"
"""Not `webshop`: that shop showed other pages, answered `Invalid action!`, and took `think[...]` for an action."""


def load_react_trajectories(path: str | Path) -> list[Trajectory]:
    """The recorded episodes, each with its score as the reward of its last step.

    They are text alone: their tasks can be played nowhere, and none of their products is among the small data's. In the full
    catalogue they are the test goals of the human instructions, so do not evaluate on those what was trained on these.

    Args:
        path: xz-compressed JSON: a list of `{id, instruction, steps: [{action, observation}], score}`, the first action of each
            being `reset`, its score None if nothing was bought.

    Raises `ConfigurationError` for another file.
    """
    try:
        with lzma.open(Path(path).expanduser()) as packed:
            return [_trajectory(episode) for episode in json.load(packed)]
    except (OSError, EOFError, KeyError, IndexError, TypeError, ValueError, lzma.LZMAError) as error:
        raise ConfigurationError(f"{path} is no file of ReAct's WebShop episodes ({error!r})") from error


def _trajectory(episode: dict[str, Any]) -> Trajectory:
    first, *played = episode["steps"]
    score, observation = episode["score"], one_line(first["observation"])
    steps = list[Step]()
    for position, one in enumerate(played, start=1):
        last = position == len(played)
        shown = one_line(one["observation"])
        steps.append(
            Step(
                observation=steps[-1].next_observation if steps else observation,
                action=one["action"],
                next_observation=shown,
                reward=score or 0.0 if last else 0.0,
                terminated=last and score is not None,
                truncated=last and score is None,
                valid=shown != "Invalid action!",
            )
        )
    task = Task(
        id=f"react-{episode['id']}",
        instruction=episode["instruction"],
        environment=ENVIRONMENT,
        observation=observation,
    )
    return Trajectory(task=task, steps=steps, success=score == 1, run="react")
