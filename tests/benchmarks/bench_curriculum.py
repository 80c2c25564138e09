"""How many groups teach nothing: sampling uniformly, and with variations of the tasks with the highest variance.

Run: python tests/benchmarks/bench_curriculum.py [--seeds 10]

The policy is simulated; curriculum, templates and checks are real. Each task has a probability of success: that of its kind of
request, and a part of its own. A group whose episodes differ raises the skill in its kind, one that does not teaches nothing.
`noise` is how much of a task's difficulty is its own (standard deviation, in logits): a variation shares the kind's part alone,
so that with much noise varying a task says little.
"""

import argparse
import json
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.curriculum.task_generator import TaskChecks
from dreamgym_lg.curriculum.template_task_generator import TemplateTaskGenerator
from dreamgym_lg.types import Split, Step, Task, Trajectory

KINDS, WORDINGS = 30, ("Please do {kind} with order {order}.", "I want {kind}, and it is about order {order}.")
LEARNED = 0.5
"""Logits of skill in its kind that a group with the highest variance brings."""


@dataclass
class Policy:
    """Succeeds with a probability for each task, and gets better at the kinds of its mixed groups."""

    rng: random.Random
    noise: float
    skill: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    difficulty: dict[str, float] = field(default_factory=dict)

    def probability(self, task: Task) -> float:
        kind, own = task.metadata["kind"], task.metadata["observation"]
        for name, spread in ((kind, 4.0), (own, self.noise)):
            self.difficulty.setdefault(name, self.rng.gauss(2.0 if name == kind else 0.0, spread))
        return 1 / (1 + math.exp(self.difficulty[kind] + self.difficulty[own] - self.skill[kind]))

    def play(self, task: Task, iteration: int, episodes: int) -> list[Trajectory]:
        probability = self.probability(task)
        return [
            Trajectory(
                task=task,
                steps=[Step(observation="", action="", next_observation="", reward=float(self.rng.random() < probability))],
                iteration=iteration,
                rollout_index=number,
            )
            for number in range(episodes)
        ]


def trace(number: int, rng: random.Random, split: Split = "train") -> Trajectory:
    kind, order = f"service{rng.randrange(KINDS)}", f"A-{1000 + number}"
    asked = rng.choice(WORDINGS).format(kind=kind, order=order)
    record = json.dumps({"order": order, "status": rng.choice(("open", "closed")), "owner": f"C-{number}"})
    steps, seen = list[Step](), asked
    for name, answer in (("lookup", record), (kind, "done")):
        action = render_call(name, {"order_id": order})
        steps.append(Step(observation=seen, action=action, next_observation=answer))
        seen = answer
    steps.append(Step(observation=seen, action=render_answer("Done."), next_observation="", reward=1.0, terminated=True))
    metadata = {"observation": asked, "kind": kind}
    return Trajectory(
        task=Task(id=order, instruction=asked, environment="desk", metadata=metadata, split=split), steps=steps, success=True
    )


def run(share: float, *, noise: float, seed: int, iterations: int = 40) -> Mapping[str, float]:
    """One training. Uniform groups are counted over all iterations; success is the mean probability on held-out tasks."""
    rng = random.Random(f"traces/{seed}")
    traces = [trace(number, rng) for number in range(300)]
    held_out = [trace(number, rng, "test").task for number in range(1000, 1100)]
    tasks, policy = [each.task for each in traces], Policy(random.Random(f"policy/{seed}"), noise)
    before = statistics.mean(map(policy.probability, held_out))
    curriculum = Curriculum(
        tasks,
        task_generator=TemplateTaskGenerator(traces, writes=lambda tool: tool != "lookup"),
        check_task=TaskChecks(tasks, evaluation=held_out, trajectories=traces),
        synthetic_share=share,
        seed=seed,
    )
    uniform: dict[str, list[bool]] = {"real": [], "synthetic": []}
    counts = Counter[str]()
    for iteration in range(iterations):
        for task in curriculum.sample(8, iteration=iteration):
            value = curriculum.update(policy.play(task, iteration, 8))
            uniform[task.origin].append(value == 0)
            policy.skill[task.metadata["kind"]] += LEARNED * value / 0.25
        counts.update(curriculum.pop_metrics())
    after = statistics.mean(map(policy.probability, held_out))
    refused = sum(number for name, number in counts.items() if name.startswith("refused"))
    return {
        "uniform": statistics.mean(uniform["real"] + uniform["synthetic"]),
        "of generated": statistics.mean(uniform["synthetic"] or [math.nan]),
        "before": before,
        "after": after,
        "generated": counts["generated_tasks"],
        "refused": refused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The share of uniform groups, by the share of generated tasks")
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    columns = ("noise", "share", "uniform groups", "fewer in", "of generated", "before", "after", "generated", "refused")
    print("".join(f"{name:>16}" for name in columns))
    for noise in (0.5, 2.0, 8.0):
        plain: list[float] = []
        for share in (0.0, 0.25, 0.5):
            found = [run(share, noise=noise, seed=seed) for seed in range(seeds)]
            mean = {name: statistics.mean(each[name] for each in found) for name in found[0]}
            uniform = [each["uniform"] for each in found]
            plain = plain or uniform
            fewer = sum(now < then for now, then in zip(uniform, plain, strict=True))
            spread = f"{mean.pop('uniform'):.3f} ± {statistics.stdev(uniform):.3f}"
            row = (noise, share, spread, f"{fewer}/{seeds}", *(f"{value:.3f}".removesuffix(".000") for value in mean.values()))
            print("".join(f"{value:>16}" for value in row), flush=True)


if __name__ == "__main__":
    main()
