"""The check of the environment contract: it passes what keeps it, and names each rule that is broken."""

import ast
import inspect

import pytest

from dreamgym_lg import environment
from dreamgym_lg.environment import Environment, check_environment
from dreamgym_lg.errors import ContractBroken
from dreamgym_lg.types import StepResult, Task

TASK = Task(id="door", instruction="Open the door.", environment="door")
OPENED = StepResult("The door is open.", 1.0, True, False, {"success": True})


class Door(Environment):
    """Keeps the contract; a test breaks one rule of it."""

    first = "A door."
    opened = OPENED
    stuck = StepResult("Nothing happens.", 0.0, False, False, {"valid": False})
    raises: type[Exception] | None = RuntimeError

    def __init__(self) -> None:
        self.resets = 0

    def reset(self, task: Task) -> str:
        self.resets, self.over = self.resets + 1, False
        return self.first

    def step(self, action: str) -> StepResult:
        if self.over and self.raises is not None:
            raise self.raises("the episode is over")
        if action != "open door":
            return self.stuck
        self.over = self.opened.terminated or self.opened.truncated
        return self.opened


class Forgetful(Door):
    def reset(self, task: Task) -> str:
        super().reset(task)
        return f"A door, seen {self.resets} times."


def test_what_keeps_the_contract_passes() -> None:
    check_environment(Door(), TASK, ["push door", "open door", "never played"])
    check_environment(Door(), TASK, [])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"first": "  "}, "reset must return a non-empty text, got '  '"),
        ({"opened": OPENED._replace(observation=b"open")}, "an observation must be text, got bytes"),
        ({"opened": OPENED._replace(reward="1")}, "a reward must be a number, got '1'"),
        ({"opened": OPENED._replace(truncated=True)}, "must not be both terminated and truncated"),
        ({"opened": OPENED._replace(terminated=False)}, "only in the step that terminates the episode"),
        ({"raises": None}, "a step after the end must raise RuntimeError"),
        ({"raises": None, "opened": StepResult("Late.", 0.0, False, True, {})}, "a step after the end must raise"),
        ({"stuck": Door.stuck._replace(info={})}, "must be marked info.'valid'. = False, got {} for 'zzqx"),
        ({"stuck": Door.stuck._replace(reward=0.5)}, "an invalid action must not be rewarded, got 0.5"),
    ],
)
def test_each_broken_rule_is_named(change: dict[str, object], rule: str) -> None:
    door = Door()
    for name, value in change.items():
        setattr(door, name, value)
    with pytest.raises(ContractBroken, match=rule):
        check_environment(door, TASK, ["open door"])


def test_another_answer_to_the_same_actions_is_named() -> None:
    with pytest.raises(ContractBroken, match="must give the same observations.*seen 1 times.*then.*seen 2 times"):
        check_environment(Forgetful(), TASK, ["open door"])


def test_python_without_assertions_checks_as_much() -> None:
    """`python -O` leaves every `assert` out."""
    source = ast.parse(inspect.getsource(environment))
    assert [node.lineno for node in ast.walk(source) if isinstance(node, ast.Assert)] == []
