"""The curriculum: V is the group's variance, and what is picked depends on seed, iteration and values alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import pvariance
from typing import Any

import pytest

from dreamgym_lg.curriculum.curriculum import Curriculum, value
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Step, Task, Trajectory

TASKS = [Task(id=f"t{n}", instruction="", environment="") for n in range(20)]


def vary(task: Task, trajectories: Sequence[Trajectory], rng: random.Random) -> Task:
    return replace(task, id=f"{task.id}~{rng.randrange(10**9)}", origin="synthetic", parent_id=task.id)


def curriculum(**options: Any) -> Curriculum:
    """One that has seen variance in three of its tasks."""
    made = Curriculum(TASKS, **{"task_generator": vary, **options})
    for n in range(4):
        made.update(group(TASKS[n], [0.0] * n + [1.0]))
    return made


def group(task: Task, rewards: Sequence[float], iteration: int = 0) -> list[Trajectory]:
    return [episode(task, reward, iteration, rollout_index=n) for n, reward in enumerate(rewards)]


def episode(task: Task, reward: float, iteration: int, **fields: Any) -> Trajectory:
    step = Step(observation="", action="", next_observation="", reward=reward)
    return Trajectory(task=task, steps=[step], iteration=iteration, **fields)


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.id for task in tasks]


@pytest.mark.parametrize("seed", range(20))
def test_v_is_the_population_variance(seed: int) -> None:
    rng = random.Random(seed)
    rewards = [rng.uniform(-2, 2) for _ in range(rng.randint(1, 16))]
    assert value(rewards) == pytest.approx(pvariance(rewards))


@pytest.mark.parametrize("seed", range(20))
def test_v_of_rewards_between_0_and_1_is_at_most_a_quarter(seed: int) -> None:
    rng = random.Random(seed)
    assert 0 <= value([rng.random() for _ in range(rng.randint(1, 16))]) <= 0.25


def test_v_is_largest_where_half_succeed_and_0_without_a_difference() -> None:
    assert value([0.0, 1.0] * 4) == 0.25
    assert max(range(9), key=lambda n: value([1.0] * n + [0.0] * (8 - n))) == 4
    assert value([]) == value([0.7]) == value([1.0] * 8) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_a_sample_is_distinct_and_keeps_to_the_share(share: float) -> None:
    for iteration in range(10):
        tasks = curriculum(synthetic_share=share).sample(8, iteration=iteration)
        assert len(set(ids(tasks))) == 8
        assert sum(task.origin == "synthetic" for task in tasks) == int(8 * share)


def test_a_share_of_less_than_a_task_is_none() -> None:
    assert {task.origin for task in curriculum(synthetic_share=0.25).sample(3, iteration=0)} == {"real"}


def test_originals_take_the_place_of_variations_that_cannot_be_written() -> None:
    impossible = [
        Curriculum(TASKS, task_generator=vary, synthetic_share=0.5),  # no variance seen yet
        curriculum(task_generator=None, synthetic_share=0.5),
        curriculum(task_generator=lambda task, episodes, rng: None, synthetic_share=0.5),
    ]
    for each in impossible:
        tasks = each.sample(8, iteration=0)
        assert len(set(ids(tasks))) == 8 and {task.origin for task in tasks} == {"real"}


def test_the_same_variation_written_twice_counts_once() -> None:
    def the_same(task: Task, trajectories: Sequence[Trajectory], rng: random.Random) -> Task:
        return replace(task, id="same", origin="synthetic")

    same = curriculum(task_generator=the_same, synthetic_share=0.5)
    tasks = same.sample(8, iteration=0)
    assert len(set(ids(tasks))) == 8 and ids(tasks).count("same") == 1


def test_the_tasks_with_the_highest_v_are_varied_and_none_without_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamgym_lg.curriculum.curriculum._SEEDS", 2)
    made = Curriculum(TASKS, task_generator=vary)
    for n, rewards in enumerate([[0, 0], [0, 0.2], [0, 1], [0, 0.9], [1, 1]]):
        made.update(group(TASKS[n], rewards, 3))
    parents = {made.propose(random.Random(seed)).parent_id for seed in range(40)}  # type: ignore[union-attr]
    assert parents == {"t2", "t3"}


def test_the_generator_is_shown_the_last_episodes_of_the_tasks_that_are_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Sequence[Trajectory]] = []
    monkeypatch.setattr("dreamgym_lg.curriculum.curriculum._SEEDS", 2)
    made = curriculum(task_generator=lambda task, episodes, rng: shown.append(episodes))
    made.propose(random.Random(0))
    assert ids([each.task for each in shown[0]]) == ["t1"] * 2 + ["t2"] * 3, "highest V first; t0 and t3 have less"
    made.update([replace(each, error="lost") for each in group(TASKS[5], [0.0, 1.0], 1)])
    assert made.values == {"t5": 0.0} and made.propose(random.Random(0)) is None, "a failed episode has no reward"


def test_refused_tasks_are_counted_by_reason_and_another_is_asked_for() -> None:
    answers = iter(["known", "no_rubric", "known", "known", "known", None, "known"])
    made = curriculum(check_task=lambda task: next(answers), synthetic_share=0.25)
    tasks = made.sample(8, iteration=0)
    assert sum(task.origin == "synthetic" for task in tasks) == 1, "four tries for the first, two for the second"
    assert made.pop_metrics() == {"refused_known": 4, "refused_no_rubric": 1, "generated_tasks": 1}
    unwritten = curriculum(task_generator=lambda task, episodes, rng: None, synthetic_share=0.125)
    unwritten.sample(8, iteration=0)
    assert unwritten.pop_metrics() == {"refused_not_written": 4, "generated_tasks": 0} and not unwritten.pop_metrics()


def test_a_variation_may_itself_be_varied() -> None:
    made = Curriculum(TASKS[:1], task_generator=vary, synthetic_share=1.0)
    made.update(group(TASKS[0], [0.0, 0.5]))
    (first,) = made.sample(1, iteration=0)
    assert made[first.id] == first and first.parent_id == "t0"
    made.update(group(first, [0.0, 1.0], 1))
    (second,) = made.sample(1, iteration=1)
    assert second.parent_id == first.id


def test_a_sample_repeats_for_the_same_seed_iteration_and_values_and_differs_otherwise() -> None:
    drawn = curriculum(seed=1).sample(8, iteration=5)
    assert drawn == curriculum(seed=1).sample(8, iteration=5)
    assert drawn != curriculum(seed=2).sample(8, iteration=5)
    assert drawn != curriculum(seed=1).sample(8, iteration=6)


def test_every_original_task_gets_its_turn() -> None:
    made = curriculum(synthetic_share=0.0)
    assert {id for iteration in range(30) for id in ids(made.sample(8, iteration=iteration))} == set(ids(TASKS))


def test_a_task_that_the_dream_could_not_answer_is_picked_only_where_too_few_are_left() -> None:
    made = curriculum(synthetic_share=0.0)
    unanswered = [
        episode(task, 0.0, 1, error="Unanswered: no responder knows", rollout_index=n) for n, task in enumerate(TASKS[:15])
    ]
    for each in unanswered:
        made.update([each, episode(each.task, 1.0, 1, rollout_index=99)])
    restored = Curriculum(TASKS, synthetic_share=0.0)
    restored.restore([], unanswered)
    for iteration in range(5):
        assert {task.id for task in made.sample(5, iteration=iteration)} == {task.id for task in TASKS[15:]}
        assert ids(restored.sample(5, iteration=iteration)) == ids(made.sample(5, iteration=iteration))
    assert len(made.sample(8, iteration=9)) == 8, "rather those than fewer"


def test_fewer_tasks_than_asked_for_are_all_of_them() -> None:
    assert sorted(ids(Curriculum(TASKS[:3]).sample(8, iteration=0))) == ["t0", "t1", "t2"]


def test_real_iterations_have_neither_variations_nor_drawn_tasks() -> None:
    """No real environment knows the entities of a drawn task. An iteration of `dream+real` played them there."""
    drawn = [replace(task, origin="synthetic", drawn={"steps": []}) for task in TASKS[3:]]
    made = Curriculum([*TASKS[:3], *drawn], task_generator=vary, synthetic_share=0.5)
    made.update(group(TASKS[0], [0.0, 1.0]))
    assert sorted(ids(made.sample(8, iteration=1, real=True))) == ["t0", "t1", "t2"]
    assert sorted(ids(made.sample_more(8, iteration=1, used={"t0"}, real=True))) == ["t1", "t2"]
    assert len(made.sample(8, iteration=1)) == 8 == len(made.sample_more(8, iteration=1, used={"t0"}))


@pytest.mark.parametrize("seed", range(5))
def test_only_tasks_of_the_last_iteration_are_varied(seed: int) -> None:
    """A run of 40 iterations in which every group has some variance, and the first ones the highest."""
    made, rng = Curriculum(TASKS, task_generator=vary, synthetic_share=0.25, seed=seed), random.Random(seed)
    played: dict[str, int] = {}
    ages: list[int] = []
    for iteration in range(40):
        tasks = made.sample(8, iteration=iteration)
        ages += [iteration - played[task.parent_id] for task in tasks if task.parent_id]
        for task in tasks:
            made.update(group(task, [0.0, rng.random() / (iteration + 1)], iteration))
            played[task.id] = iteration
    assert len(ages) == 39 * 2 and set(ages) == {1}


def test_after_an_iteration_without_variance_what_was_solved_is_varied() -> None:
    """An agent whose recorded tasks are all solved already would else meet no other: a variation may be harder."""
    made = Curriculum(TASKS, task_generator=vary)
    made.update(group(TASKS[5], [0.0, 0.0], 1))
    assert made.propose(random.Random(0)) is None
    made.update([episode(TASKS[6], 1.0, 1, success=True), episode(TASKS[6], 1.0, 1, success=True, rollout_index=1)])
    assert {made.propose(random.Random(seed)).parent_id for seed in range(9)} == {"t6"}  # type: ignore[union-attr]
    made.update(group(TASKS[7], [0.0, 1.0], 1))
    assert {made.propose(random.Random(seed)).parent_id for seed in range(9)} == {"t7"}  # type: ignore[union-attr]


def test_after_an_iteration_in_which_nothing_was_solved_nothing_is_varied() -> None:
    made = curriculum()
    made.update(group(TASKS[5], [1.0, 1.0], 1))
    assert made.propose(random.Random(0)) is None and made.values == {"t5": 0.0}
    assert made.update(group(TASKS[0], [0.0, 1.0])) == 0.25 and made.values == {"t5": 0.0}, "an old group is too late"


def test_a_restored_curriculum_goes_on_as_the_one_that_never_stopped() -> None:
    seen: list[Sequence[Trajectory]] = []

    def vary_and_note(task: Task, trajectories: Sequence[Trajectory], rng: random.Random) -> Task:
        seen.append(trajectories)
        return vary(task, trajectories, rng)

    steady, episodes, synthetic = Curriculum(TASKS, task_generator=vary_and_note), list[Trajectory](), list[Task]()
    for iteration in range(6):
        tasks = steady.sample(8, iteration=iteration)
        synthetic += [task for task in tasks if task.origin == "synthetic"]
        for task in tasks:
            rewards = [float((len(task.id) + n * iteration) % 2) for n in range(4)]
            played = group(task, rewards, iteration)
            episodes += played
            steady.update(played)
    assert synthetic and 0.25 in steady.values.values(), "the test would say nothing"
    failed = [episode(task, 0.5, 5, error="ConnectionError: away") for task in TASKS]
    random.Random(0).shuffle(episodes)
    resumed = Curriculum(TASKS, task_generator=vary_and_note)
    resumed.restore(synthetic, [*failed, *episodes])
    assert resumed.values == steady.values and all(resumed[task.id] == task for task in synthetic)
    seen.clear()
    assert resumed.sample(8, iteration=6) == steady.sample(8, iteration=6)
    assert len(seen) == 4 and seen[:2] == seen[2:], "the generator is shown the same episodes"


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_evaluation_task_is_refused_by_name(split: Any) -> None:
    held_out = Task(id="held-out", instruction="", environment="", split=split)
    with pytest.raises(ConfigurationError, match="evaluation tasks must not be trained on: held-out"):
        Curriculum([*TASKS, held_out])


def test_arguments_outside_what_is_allowed_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one task"):
        Curriculum([])
    for share in (-0.1, 1.5):
        with pytest.raises(ConfigurationError, match=rf"synthetic_share={share} must lie in \[0, 1\]"):
            Curriculum(TASKS, synthetic_share=share)
