"""Demonstrations of generated tasks: how many of which task. `test_template_task_generator.py` has what they show."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from desk_traces import traces

from dreamgym_lg.curriculum.demonstrations import made_demonstrations
from dreamgym_lg.types import Task, Trajectory

REFERENCE = {"reference_calls": [], "reference_answers": [], "reference_reply": "Done."}


class Varying:
    """A task generator that varies each task at every n-th attempt, in so many ways."""

    def __init__(self, every: dict[str, int], ways: dict[str, int]) -> None:
        self.every, self.ways, self.asked = every, ways, Counter[str]()

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        self.asked[task.id] += 1
        if self.asked[task.id] % self.every[task.id]:
            return None
        way = self.asked[task.id] // self.every[task.id] % self.ways.get(task.id, 1000)
        return replace(task, id=f"{task.id}/{way}", metadata=task.metadata | REFERENCE)


@pytest.mark.parametrize(
    ("every", "ways", "number", "expected"),
    [
        pytest.param({"often": 1, "rare": 10}, {}, 40, {"often": 20, "rare": 20}, id="as many of the one that rarely can be"),
        pytest.param({"often": 1, "few": 1}, {"few": 5}, 40, {"often": 35, "few": 5}, id="others take the place"),
        pytest.param({"often": 1, "never": 1000}, {}, 40, {"often": 40}, id="one that cannot be varied"),
        pytest.param({"few": 1, "fewer": 2}, {"few": 5, "fewer": 2}, 40, {"few": 5, "fewer": 2}, id="there are no more"),
        pytest.param({}, {}, 40, {}, id="no task"),
    ],
)
def test_tasks_are_demonstrated_evenly(
    every: dict[str, int], ways: dict[str, int], number: int, expected: dict[str, int]
) -> None:
    seeds = [replace(traces(1)[0].task, id=name) for name in every]
    made = made_demonstrations(seeds, Varying(every, ways), lambda task: None, number=number, rng=Random(0))
    assert Counter(each.task.id.split("/")[0] for each in made) == expected
    assert len({each.task.id for each in made}) == len(made)


def test_a_few_are_not_those_of_the_first_tasks() -> None:
    seeds = [replace(traces(1)[0].task, id=f"{number}") for number in range(100)]
    generate = Varying(dict.fromkeys((each.id for each in seeds), 1), {})
    made = made_demonstrations(seeds, generate, lambda task: None, number=10, rng=Random(0))
    assert max(int(each.task.id.split("/")[0]) for each in made) > 50


def test_refused_variations_are_no_demonstrations() -> None:
    seeds = [replace(traces(1)[0].task, id="often")]
    refused = {"often/2", "often/3"}
    made = made_demonstrations(
        seeds,
        Varying({"often": 1}, {"often": 6}),
        lambda task: "known" if task.id in refused else None,
        number=9,
        rng=Random(0),
    )
    assert {each.task.id for each in made} == {f"often/{way}" for way in range(6)} - refused
