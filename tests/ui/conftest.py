"""A small replay buffer as a run leaves it: offline episodes, two iterations of training in the dream, an evaluation."""

from pathlib import Path

import pytest

from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.types import Act, Step, Task, Trajectory

ATTACK = "<script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\">\"'>{{ 7 * 7 }}"

DOOR = Task(id="door/1", instruction="Leave the house.", environment="house", observation="A hall.")
VARIED = Task(id="door/2", instruction="Leave by 100% of doors.", environment="house", origin="synthetic", parent_id="door/1")
EVIL = Task(id=ATTACK, instruction=ATTACK, environment=ATTACK, metadata={ATTACK: ATTACK}, parent_id=ATTACK, split="test")


def step(action: str, answer: str, reward: float = 0.0, **more: object) -> Step:
    return Step(observation="A hall.", action=action, next_observation=answer, reward=reward, **more)  # type: ignore[arg-type]


OPENED = step("open door", "The door is open.", 0.5, reasoning="The key fits, so it opens.", decided_by="model")
OUT = step(
    "go north",
    "You are outside.",
    0.5,
    terminated=True,
    reasoning="It was so before.",
    decided_by="recorded",
    judged_by="references",
)
STUCK = step("fly", "What?", valid=False, truncated=True, decided_by="schema", line="agent.py:7 in act")


def fill(buffer: ReplayBuffer) -> None:
    dreamed = {"source": "synthetic", "run": "train", "experience_version": "experience-0"}
    notes = {"notes": "A key lies here."}
    blocked = Act("blocked", 1, "os.remove of orders.db", line="agent.py:12 in clean")
    evil = Trajectory(
        task=EVIL,
        steps=[step(ATTACK, ATTACK, reasoning=ATTACK, line=ATTACK)],
        source="real",
        run=ATTACK,
        error=ATTACK,
        policy_version=ATTACK,
        experience_version=ATTACK,
        annotation={ATTACK: ATTACK},
        acts=[Act("raised", 1, ATTACK, ATTACK, ATTACK)],
    )
    buffer.extend(
        [
            Trajectory(task=DOOR, steps=[OPENED, OUT], success=True, run="offline"),
            Trajectory(task=DOOR, steps=[STUCK], rollout_index=0, **dreamed),
            Trajectory(task=DOOR, steps=[OPENED, OUT], success=True, rollout_index=1, annotation=notes, **dreamed),
            Trajectory(task=DOOR, steps=[OPENED, STUCK], rollout_index=2, acts=[blocked], **dreamed),
            Trajectory(task=VARIED, steps=[OPENED, OUT], success=True, iteration=1, **dreamed),
            Trajectory(task=VARIED, error="ModelUnavailable: no answer", iteration=1, rollout_index=1, **dreamed),
            evil,
        ]
    )
    for iteration in range(4):
        figures = {"train_success": 0.25 * iteration, "kl": 0.9, "uniform_groups": 0.5, "curriculum_value": 0.21}
        buffer.record_metrics("train", iteration, figures)
    evaluated = {"eval_real_successes": 6, "eval_real_episodes": 10, "eval_dream_successes": 8, "eval_dream_episodes": 10}
    buffer.record_metrics("train", 1, evaluated | {"eval_gap": 0.2, "failed_episodes": 1, "first_error": ATTACK})
    buffer.record_metrics(ATTACK, 0, {"failed_episodes": 1, "first_error": ATTACK})


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "replay.db"
    with ReplayBuffer(path) as buffer:
        fill(buffer)
    return path
