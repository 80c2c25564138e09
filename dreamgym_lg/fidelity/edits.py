"""Failures made from recorded successes. They test a judge where real failures are few."""

import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from dreamgym_lg.actions import is_answer, parse_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Step, Trajectory

_PER_SUCCESS = 3
"""Edits of one success, at most."""


class Edit(NamedTuple):
    """A success made wrong."""

    kind: str
    calls: Sequence[Step]
    message: Step
    """The message that ends it."""


def edited_successes(successes: Sequence[Trajectory], *, writes: Collection[str], seed: int = 0) -> list[Trajectory]:
    """Episodes that must not be rewarded, made from successes. Pure: the same arguments give the same edits.

    They are never real data: `source="synthetic"`, `run="edited/<kind>"`, without success and reward, each with its original's
    task. An edit is kept only if every recorded success of the same request contradicts it. The kinds:

    * `left_out`: all calls of a writing tool are missing, which every success of the request calls,
    * `other_episode`: the calls and the message of another request, with other writing calls,
    * `no_call`: its own message without a call, where every success of the request writes,
    * `other_message`: its own calls, and the message of another request; where no success of the request writes.

    Args:
        successes: Recorded episodes that ended in success; only calls with one message at the end give edits.
        writes: Names of the tools that change the world.

    Raises `ConfigurationError` for an episode that is no success.
    """
    for each in successes:
        if not each.success or each.error:
            raise ConfigurationError(f"an episode of task {each.task.id!r} is no success: give successful episodes alone")
    usable = [each for each in successes if _is_usable(each)]
    requests: dict[str, list[Trajectory]] = defaultdict(list)
    for each in usable:
        requests[each.task.instruction].append(each)
    edits: dict[tuple[str, ...], Trajectory] = {}
    for number, success in enumerate(usable):
        rng = random.Random(f"{seed}/{number}/{success.task.id}")
        others = [each for each in usable if each.task.instruction != success.task.instruction]
        candidates = [*_edits(success, rng.sample(others, len(others)), requests[success.task.instruction], writes)]
        first_of_kind = {edit.kind: edit for edit in reversed(candidates)}
        for edit in rng.sample(list(first_of_kind.values()), len(first_of_kind))[:_PER_SUCCESS]:
            steps = [*edit.calls, replace(edit.message, next_observation=success.steps[-1].next_observation)]
            key = (success.task.id, *(step.action for step in steps))
            edits.setdefault(key, _edited(success, edit.kind, steps, len(edits)))
    return list(edits.values())


def _edits(
    success: Trajectory, others: Sequence[Trajectory], same: Sequence[Trajectory], writes: Collection[str]
) -> Iterator[Edit]:
    """Every edit of a success that all successes of its request (`same`) contradict."""
    *calls, message = success.steps
    effects = [_effects(each.steps, writes) for each in same]
    always = set.intersection(*({_tool(action) for action in each} for each in effects))
    for tool in sorted(always):
        yield Edit("left_out", [step for step in calls if _tool(step.action) != tool], message)
    if all(effects):
        yield Edit("no_call", (), message)
    messages = {each.steps[-1].action for each in same}
    for other in others:
        *other_calls, other_message = other.steps
        if all(effects) and not any(each <= _effects(other.steps, writes) for each in effects):
            yield Edit("other_episode", other_calls, other_message)
        if not any(effects) and other_message.action not in messages:
            yield Edit("other_message", calls, other_message)


def _is_usable(trajectory: Trajectory) -> bool:
    *calls, last = trajectory.steps
    return bool(calls) and is_answer(last.action) and all(parse_call(step.action) is not None for step in calls)


def _effects(steps: Sequence[Step], writes: Collection[str]) -> frozenset[str]:
    return frozenset(step.action for step in steps if step.valid and _tool(step.action) in writes)


def _tool(action: str) -> str:
    return call.name if (call := parse_call(action)) is not None else ""


def _edited(original: Trajectory, kind: str, steps: Sequence[Step], index: int) -> Trajectory:
    """The steps as an episode without reward. Each observes the answer to the one before."""
    observation, chained = original.steps[0].observation, list[Step]()
    for number, step in enumerate(steps, start=1):
        last = number == len(steps)
        step = replace(step, observation=observation, reward=0.0, terminated=last, truncated=False, reasoning="")
        chained.append(step)
        observation = step.next_observation
    run = f"edited/{kind}"
    return Trajectory(
        task=original.task, steps=chained, source="synthetic", run=run, rollout_index=index, prompt=original.prompt
    )
