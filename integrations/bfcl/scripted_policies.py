"""Offline trajectories of BFCL: its ground truth really executed, and the same calls with mistakes, really executed too.

A model that saw only ground truth believes that every call succeeds, so the failing ones show each way in which none does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Literal, get_args

from dreamgym_lg.actions import ToolCall, parse_action, render_answer, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.bfcl.apis import BFCLEnvironment, allowed_values
from dreamgym_lg.integrations.bfcl.data import documents, ground_truth
from dreamgym_lg.types import Step, Task, Trajectory

Mistake = Literal["value", "missing", "extra", "type", "enum", "tool", "order"]
"""`value`: another file name, id or amount.  `missing`: a required argument left out.  `extra`: an argument that the tool
has not.  `type`: a value of another type.  `enum`: a value that is not allowed.  `tool`: a tool that does not exist.
`order`: two calls exchanged."""
MISTAKES: tuple[Mistake, ...] = get_args(Mistake)
_TRIES = 20
_WRONG_TYPE = {"string": 7, "integer": "one", "float": "a lot", "boolean": "yes", "array": "all", "dict": "everything"}

Turns = list[list[ToolCall]]


def offline_trajectories(
    tasks: Sequence[Task], *, failures: int = 1, seed: int = 0, answers: bool = False, run: str = "offline"
) -> Iterator[Trajectory]:
    """Each task's ground truth, then `failures` failed episodes with one to three mistakes each.

    The same arguments give the same trajectories. A task that no mistake makes fail (drawn 20 times) gives fewer.

    Args:
        answers: True gives the steps of `BFCLEnvironment`, where answers that end a user turn are actions. False gives one
            step a call, for an agent with scripted user turns, whose text ends the next call's observation.

    Raises `ConfigurationError`, before anything is played, for a task of an evaluation split.
    """
    for task in tasks:
        if task.split != "train":
            raise ConfigurationError(f"task {task.id} is a {task.split} task: offline trajectories of it would leak it")

    def play() -> Iterator[Trajectory]:
        for task in tasks:
            failed = [_failed(task, Random(f"{seed} {task.id} {number}")) for number in range(failures)]
            episodes = [_play(task, ground_truth(task)), *(episode for episode in failed if episode is not None)]
            for index, (steps, success) in enumerate(episodes):
                kept = steps if answers else _without_answers(steps)
                yield Trajectory(task=task, steps=kept, success=success, run=run, rollout_index=index)

    return play()


def _play(task: Task, turns: Turns) -> tuple[list[Step], bool]:
    """Steps and success of an episode of these calls, each user turn ended by an answer."""
    environment, steps, success = BFCLEnvironment(), list[Step](), False
    observation = environment.reset(task)
    for turn in turns:
        for action in [*(render_call(call.name, call.arguments) for call in turn), render_answer("Done.")]:
            result = environment.step(action)
            steps.append(
                Step(
                    observation=observation,
                    action=action,
                    next_observation=result.observation,
                    reward=result.reward,
                    terminated=result.terminated,
                    valid=result.info["valid"],
                )
            )
            observation, success = result.observation, result.info.get("success", False)
    return steps, success


def _failed(task: Task, rng: Random) -> tuple[list[Step], bool] | None:
    """An episode with mistakes that does not succeed; None if every one that was drawn succeeded all the same."""
    for _ in range(_TRIES):
        turns = ground_truth(task)
        for _ in range(rng.randint(1, 3)):
            _err(turns, task, rng)
        steps, success = _play(task, turns)
        if not success:
            return steps, success
    return None


def _without_answers(steps: Sequence[Step]) -> list[Step]:
    """One step a call: the user's words move to the next call's observation, the outcome to the last call."""
    calls, requests = list[Step](), list[str]()
    for step in steps:
        if isinstance(parse_action(step.action), ToolCall):
            before = calls[-1].next_observation if calls else steps[0].observation
            calls.append(replace(step, observation="\n\n".join([before, *(f"User: {text}" for text in requests)])))
            requests = []
        elif step.terminated:
            calls[-1] = replace(calls[-1], reward=step.reward, terminated=True)
        else:
            requests.append(step.next_observation)
    return calls


def _err(turns: Turns, task: Task, rng: Random) -> None:
    """Make one mistake somewhere in `turns`; none if the one drawn cannot be made with the call drawn."""
    places = [(turn, index) for turn, calls in enumerate(turns) for index in range(len(calls))]
    turn, index = rng.choice(places)
    mistake = rng.choice(MISTAKES)
    if mistake == "order":
        other, position = rng.choice(places)
        turns[turn][index], turns[other][position] = turns[other][position], turns[turn][index]
        return
    values = [value for calls in turns for call in calls for value in call.arguments.values() if isinstance(value, str)]
    turns[turn][index] = _mistaken(turns[turn][index], mistake, task, values, rng)


def _mistaken(call: ToolCall, mistake: Mistake, task: Task, values: Sequence[str], rng: Random) -> ToolCall:
    """`call` with this mistake; the call itself if it has no argument that allows it. Args: `values`, texts of the task."""
    owned = {name: document for owner in task.metadata["involved_classes"] for name, document in documents(owner).items()}
    if mistake == "tool":
        return ToolCall(call.name + rng.choice(["_file", "_all", "s", "_now"]), call.arguments)
    if mistake == "extra":
        return ToolCall(call.name, {**call.arguments, rng.choice(["force", "verbose", "user"]): True})
    if call.name not in owned:  # an earlier mistake renamed the tool
        return call
    parameters = owned[call.name]["parameters"]
    enums = {name for name, parameter in parameters["properties"].items() if allowed_values(parameter)}
    among = {
        "missing": [name for name in call.arguments if name in parameters["required"]],
        "enum": [name for name in call.arguments if name in enums],
        "value": [name for name in call.arguments if name not in enums],
        "type": [name for name in call.arguments if name in parameters["properties"]],
    }[mistake]
    if not among:
        return call
    name = rng.choice(among)
    if mistake == "missing":
        return ToolCall(call.name, {key: value for key, value in call.arguments.items() if key != name})
    if mistake == "type":
        return ToolCall(call.name, {**call.arguments, name: _WRONG_TYPE[parameters["properties"][name]["type"]]})
    return ToolCall(call.name, {**call.arguments, name: _other(call.arguments[name], values, rng)})


def _other(value: Any, values: Sequence[str], rng: Random) -> Any:
    """A near miss of the same type: for a text a typo, a new version, or another text of the same episode."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + rng.choice([-1, 1, 10, 1000])
        case str():
            stem, _, ending = value.rpartition(".")
            renamed = f"{stem}_v2.{ending}" if stem.strip(".") else f"{value}_v2"
            return rng.choice([renamed, value[:-1] or "x", value.swapcase(), rng.choice(values)])
        case [first, *_]:
            return [_other(first, values, rng)]
    return value
