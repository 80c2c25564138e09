"""The environment contract, and the check that every adapter (real or dreamed) has to pass."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dreamgym_lg.types import StepResult, Task

INVALID_REWARD = 0.0
"""Reward of an invalid action (paper, section 4: an invalid action leads to a failure observation and reward 0)."""

CheckAction = Callable[[str, Sequence[str]], str | None]
"""`Environment.check_action`, as a function."""


class Environment(ABC):
    """A world that plays one episode at a time, in text.

    An instance serves one episode at once; concurrent episodes need an instance each.
    """

    @abstractmethod
    def reset(self, task: Task) -> str:
        """Start `task` and return its first observation. Raises `EnvironmentFailed` if the world cannot be built."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Play one action, `RuntimeError` before `reset` or after an episode's end.

        An action that makes no sense is no error: it is answered as the world answers it, with `info["valid"]` False.
        """

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        """The answer to an action that is invalid whatever the world holds, or None to let it be played.

        The same check stands before the real environment and before the experience model, so that a dream cannot accept
        what production would refuse. Args: `observations`, everything the policy has seen in this episode, oldest first.
        """
        return None

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (a real world knows its own tools)
        """Told what the agent can call (function schemas in OpenAI's form), before its first action and when more appear."""

    def close(self) -> None:  # noqa: B027 (nothing to release is a fine default)
        """Release what the instance holds; an instance may be closed twice."""

    async def areset(self, task: Task) -> str:
        return await asyncio.to_thread(self.reset, task)

    async def astep(self, action: str) -> StepResult:
        return await asyncio.to_thread(self.step, action)


def checked(answer: str) -> StepResult:
    """The step that an action refused by `check_action` amounts to."""
    return StepResult(answer, INVALID_REWARD, False, False, {"valid": False})


def check_environment(environment: Environment, task: Task, actions: Sequence[str]) -> None:
    """Raise `AssertionError`, naming the broken rule, unless `environment` keeps the contract on this task.

    Plays `actions` (until termination) twice and a nonsense action once. Run it in the tests of every adapter.
    """

    def play() -> tuple[str, list[StepResult]]:
        first = environment.reset(task)
        results: list[StepResult] = []
        for action in actions:
            results.append(environment.step(action))
            if results[-1].terminated or results[-1].truncated:
                break
        return first, results

    first, results = play()
    assert isinstance(first, str) and first.strip(), f"reset must return a non-empty text, got {first!r}"
    for result in results:
        assert isinstance(result.observation, str), f"an observation must be text, got {type(result.observation).__name__}"
        assert isinstance(result.reward, (int, float)), f"a reward must be a number, got {result.reward!r}"
        assert not (result.terminated and result.truncated), "terminated and truncated exclude each other"
        assert result.terminated or not result.info.get("success", False), "success only with termination"
    assert (first, results) == play(), "the same task and actions must give the same observations and rewards"
    if results and results[-1].terminated:
        try:
            environment.step(actions[-1])
        except RuntimeError:
            pass
        else:
            raise AssertionError("a step after the end must raise RuntimeError")
    environment.reset(task)
    nonsense = "zzqx unheard-of"
    answer = environment.check_action(nonsense, [first])
    result = checked(answer) if answer is not None else environment.step(nonsense)
    assert not result.info.get("valid", True), "an action that makes no sense must be marked info['valid'] = False"
    assert result.reward <= 0, f"an invalid action must not be rewarded, got {result.reward}"
