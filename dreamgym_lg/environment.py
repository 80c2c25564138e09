"""The environment contract, and the check that every adapter (real or dreamed) has to pass."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dreamgym_lg.errors import ContractBroken
from dreamgym_lg.types import Step, StepResult, Task

RULES = "rules"
"""`Step.decided_by` of an action that an environment's own rules refused. It does not count as a real step."""


class Environment(ABC):
    """A world that plays one episode at a time, in text.

    An instance serves one episode at a time; concurrent episodes need an instance each.
    """

    has_user: bool = False
    """True if a user may reply to a tool agent's message. `step` then returns the reply, or ends the episode."""

    @abstractmethod
    def reset(self, task: Task) -> str:
        """Start `task` and return its first observation. Raises `EnvironmentFailed` if the world cannot be built."""

    @abstractmethod
    def step(self, action: str) -> StepResult:
        """Play one action. Raises `RuntimeError` before `reset` and after the episode's end.

        An action that makes no sense is no error: the result holds the world's answer, and `info["valid"]` is False.
        """

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (a real world knows its own tools)
        """Receive the agent's function schemas (OpenAI's form), before its first action and when they change."""

    def show_prompt(self, text: str) -> None:  # noqa: B027 (a real world judges by its state)
        """Receive the agent's system prompt, before its first action."""

    def close(self) -> None:  # noqa: B027 (nothing to release is a fine default)
        """Release resources; may be called twice."""

    async def areset(self, task: Task) -> str:
        return await asyncio.to_thread(self.reset, task)

    async def astep(self, action: str) -> StepResult:
        return await asyncio.to_thread(self.step, action)


CreateEnvironment = Callable[[], Environment]
"""Creates the environment of one episode, which is closed after it. Called in the event loop: it must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeContext:
    """The run context of an agent's graph."""

    environment: Environment | None = None
    """Receives the agent's actions. None for a graph that was built with its environment (a server creates an empty context),
    and for an agent that acts on its own real tools."""


class PlayedAction(NamedTuple):
    """The step of one action."""

    step: Step
    success: bool
    """True if the task ended with this step, in success."""


def record_action(action: str, observation: str, result: StepResult, *, last: bool = False) -> PlayedAction:
    """Build the `Step` of an action that was played.

    Args:
        observation: The text before the action.
        result: The result of `Environment.step`.
        last: True if no further action is allowed: the step is `truncated` unless it ends the task.
    """
    step = Step(
        observation=observation,
        action=action,
        next_observation=result.observation,
        reward=result.reward,
        terminated=result.terminated,
        truncated=not result.terminated and (result.truncated or last),
        valid=bool(result.info.get("valid", True)),
        reasoning=str(result.info.get("reasoning", "")),
        decided_by=str(result.info.get("decided_by", "")),
        judged_by=str(result.info.get("judged_by", "")),
    )
    return PlayedAction(step, result.terminated and bool(result.info.get("success", False)))


def refused(observation: str) -> StepResult:
    """The result of an action that an environment's own rules refuse."""
    return StepResult(observation, 0.0, False, False, {"valid": False, "decided_by": RULES})


def check_environment(environment: Environment, task: Task, actions: Sequence[str]) -> None:
    """Check that `environment` keeps the contract on this task. For the tests of its adapter.

    Plays `actions` twice, one more step if they end the task, and one action that makes no sense. Raises `ContractBroken`
    with the first broken rule and the observed values.
    """
    first, results = played = _play(environment, task, actions)
    _require(isinstance(first, str) and first.strip(), f"reset must return a non-empty text, got {first!r}")
    for each in results:
        kind, reward, success = type(each.observation).__name__, each.reward, each.info.get("success", False)
        _require(kind == "str", f"an observation must be text, got {kind}")
        _require(isinstance(reward, (int, float)), f"a reward must be a number, got {reward!r}")
        _require(not (each.terminated and each.truncated), "a step must not be both terminated and truncated")
        _require(each.terminated or not success, "info['success'] must be True only in the step that terminates the episode")
    again = _play(environment, task, actions)
    _require(
        played == again, f"the same task and actions must give the same observations and rewards, got {played} and then {again}"
    )
    if results and (results[-1].terminated or results[-1].truncated):
        with suppress(RuntimeError):
            environment.step(actions[-1])
            raise ContractBroken("a step after the end must raise RuntimeError")
    environment.reset(task)
    result = environment.step(nonsense := "zzqx unheard-of")
    _require(
        not result.info.get("valid", True),
        f"an action that makes no sense must be marked info['valid'] = False, got {result.info} for {nonsense!r}",
    )
    _require(result.reward <= 0, f"an invalid action must not be rewarded, got {result.reward}")


def _play(environment: Environment, task: Task, actions: Sequence[str]) -> tuple[str, list[StepResult]]:
    first, results = environment.reset(task), list[StepResult]()
    for action in actions:
        results.append(environment.step(action))
        if results[-1].terminated or results[-1].truncated:
            break
    return first, results


def _require(kept: object, rule: str) -> None:
    if not kept:
        raise ContractBroken(rule)
