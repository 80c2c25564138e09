"""A person's episode in a world, dreamed or real, and a tool agent's actions as a person types them."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from dreamgym_lg.actions import ToolCall, parse_action, render_answer, render_call
from dreamgym_lg.environment import Environment, play_action
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

PLAY, PERSON = "play", "person"
"""Under which run recorded sessions are stored, and who acted or answered there."""


class Session:
    """One episode of a person: checked and cut short as the episode graph does it for a policy."""

    def __init__(self, environment: Environment, task: Task, max_steps: int | None = None) -> None:
        self.environment, self.task, self.max_steps = environment, task, max_steps
        self.begin()

    def begin(self) -> None:
        """Start anew. Should the world fail now, the session is over."""
        self.steps: list[Step] = []
        self.over, self.success = True, False
        self.error: str | None = None
        self.first = self.environment.reset(self.task)
        self.over = False

    def act(self, action: str) -> Step:
        """Play one action; an error of the experience model leaves the session where it was."""
        if self.over:
            raise ConfigurationError("the episode is over: /reset, /undo, /next or /quit")
        observation = self.steps[-1].next_observation if self.steps else self.first
        try:
            played = play_action(self.environment, action, observation, last=len(self.steps) + 1 == self.max_steps)
        except EnvironmentFailed as error:
            self.over, self.error = True, f"{type(error).__name__}: {error}"
            raise
        self.steps.append(played.step)
        self.success, self.over = played.success, played.step.terminated or played.step.truncated
        return played.step

    def undo(self) -> None:
        """Play all but the last action again: the same actions give the same world."""
        if not self.steps:
            raise ConfigurationError("there is no action to take back")
        earlier = self.steps[:-1]
        self.begin()
        for step in earlier:
            self.act(step.action)

    def trajectory(self, dream: str) -> Trajectory:
        """The episode so far; one that was left is truncated. Args: `dream`, its version, "" for the real environment.

        A dreamed one is `synthetic`: taken for real, the dream would be grounded in itself.
        """
        *steps, last = self.steps
        return Trajectory(
            task=self.task,
            steps=[*steps, replace(last, truncated=not last.terminated)],
            success=self.success,
            source="synthetic" if dream else "real",
            error=self.error,
            experience_version=dream,
        )


def store_played(buffer: ReplayBuffer, played: Trajectory, *, policy_version: str = PERSON) -> None:
    """Store an episode as run `play`, under the first rollout index that is free."""
    for index in count():
        if buffer.add(replace(played, run=PLAY, rollout_index=index, policy_version=policy_version)):
            return


def stored_task(buffer: ReplayBuffer, task_id: str) -> Task:
    """The task of this id. Raises `ConfigurationError` if there is none."""
    tasks = {task.id: task for task in buffer.tasks()}
    if task_id not in tasks:
        raise ConfigurationError.unknown("task", task_id, tasks)
    return tasks[task_id]


def typed_call(line: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The action that a person means by `name key=value ...` or by a call in JSON, which is passed on unchecked.

    A value is JSON where it can be read as such and the schema does not ask for a string. Raises `ConfigurationError` for an
    unknown tool or argument, a missing argument, and a line that cannot be read.
    """
    try:
        if line.startswith("{"):
            action = parse_action(line)
            return render_call(*action) if isinstance(action, ToolCall) else render_answer(action)
        name, *words = shlex.split(line)
    except ValueError as error:
        raise ConfigurationError(f"{line[:80]!r} cannot be read ({error}); write NAME KEY=VALUE ... or JSON") from None
    known = {tool["name"]: tool.get("parameters") or {} for tool in tools}
    if name not in known:
        raise ConfigurationError.unknown("tool", name, known)
    properties: Mapping[str, Any] = known[name].get("properties", {})
    arguments: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign:
            raise ConfigurationError(f"{word!r} is no argument; write KEY=VALUE, in quotes where it has spaces")
        if properties and key not in properties:
            raise ConfigurationError.unknown(f"argument of {name}", key, properties)
        arguments[key] = _value(text, properties.get(key, {}))
    if missing := [key for key in known[name].get("required", ()) if key not in arguments]:
        raise ConfigurationError(f"{name} lacks {', '.join(missing)}; /tools shows what it takes")
    return render_call(name, arguments)


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
