"""Retrieval: the right neighbours, the same ones everywhere, and no more of them than asked for."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings

from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.replay.retrieval import ACTION_SHARE, DIMENSION, StepIndex, phi
from dreamgym_lg.types import Step, Task, Trajectory

KITCHEN = "You are in the kitchen. There is a fridge, a stove and a closed cupboard."
GARDEN = "You are in the garden. There is an apple tree and a path to the north."


Indexed = tuple[int, str, str, str, str, str]
"""Id, environment, task, observation, action, next observation."""


def step(
    id: int, observation: str, action: str, next_observation: str = "", task_id: str = "t", environment: str = "e"
) -> Indexed:
    return id, environment, task_id, observation, action, next_observation


def index_of(*steps: Indexed) -> StepIndex:
    index = StepIndex()
    index.add(steps)
    return index


def search(index: StepIndex, observation: str, action: str, k: int = 3, exclude_task: str | None = None) -> list[int]:
    return index.nearest(phi([(observation, action)]), k, exclude_task=exclude_task)[0]


def random_steps(count: int, rng: random.Random) -> list[Indexed]:
    """Few words, few tasks: equal keys, equal contents and equal vectors of unequal texts all occur."""
    words = ["key", "Key", "door", "lamp", "north", "open"]

    def text(longest: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(0, longest)))

    return [step(id, text(5), text(2), rng.choice("xy"), f"t{rng.randrange(4)}") for id in range(1, count + 1)]


def brute_force(steps: list[Indexed], query: tuple[str, str], k: int, exclude_task: str | None) -> list[int]:
    vector = phi([query])[0].astype(np.float64)
    if not vector.any():
        return []
    first: dict[tuple[str, ...], int] = {}
    for id, _, task, *content in steps:
        if task != exclude_task:
            first.setdefault(tuple(content), id)
    keys = phi([(observation, action) for observation, action, _ in first]).astype(np.float64)
    scores = {id: float((key * vector).sum()) for id, key in zip(first.values(), keys, strict=True)}
    return sorted(scores, key=lambda id: (-scores[id], id))[:k]


def test_the_obvious_neighbour_comes_first() -> None:
    index = index_of(
        step(1, GARDEN, "go north"),
        step(2, KITCHEN, "open fridge"),
        step(3, KITCHEN, "open cupboard"),
        step(4, GARDEN, "open cupboard"),
    )
    assert search(index, KITCHEN, "open cupboard", k=4) == [3, 4, 2, 1]
    assert search(index, "The garden. An apple tree, a path.", "walk north", k=1) == [1]


@pytest.mark.parametrize("seed", range(3))
def test_top_k_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    steps = random_steps(200, rng)
    index = StepIndex()
    for start in range(0, 200, 7):
        index.add(steps[start : start + 7])
    assert len(index) == len({each[3:5] for each in steps}) < 200
    for query in [each[3:5] for each in random_steps(15, rng)]:
        for k, excluded in ((1, None), (5, "t1"), (5, "unknown"), (40, None), (1000, "t0")):
            assert search(index, *query, k, excluded) == brute_force(steps, query, k, excluded)


def test_many_queries_at_once_find_what_each_finds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    index = index_of(*random_steps(200, rng))
    queries = [each[3:5] for each in random_steps(30, rng)]
    alone = [search(index, *query, 5) for query in queries]
    assert index.nearest(phi(queries), 5) == alone
    monkeypatch.setattr("dreamgym_lg.replay.retrieval._SCORES_AT_ONCE", 7 * len(index))
    assert index.nearest(phi(queries), 5) == alone


def test_the_same_content_is_given_once_and_different_outcomes_each() -> None:
    index = index_of(
        step(1, KITCHEN, "wait", "nothing"),
        step(2, KITCHEN, "wait", "nothing"),
        step(3, KITCHEN, "wait", "a cat comes in"),
    )
    assert len(index) == 1
    assert search(index, KITCHEN, "wait", k=10) == [1, 3]
    assert search(index, KITCHEN, "wait", k=1) == [1]


def test_an_excluded_task_hides_its_own_steps_but_not_the_same_ones_of_others() -> None:
    index = index_of(
        step(1, KITCHEN, "wait", task_id="a"),
        step(2, KITCHEN, "open fridge", task_id="a"),
        step(3, KITCHEN, "wait", task_id="a"),
        step(4, KITCHEN, "wait", task_id="b"),
        step(5, GARDEN, "wait", task_id="b"),
    )
    assert sorted(search(index, KITCHEN, "wait", 10)) == [1, 2, 5]
    assert search(index, KITCHEN, "wait", 10, "a") == [4, 5]
    assert search(index, KITCHEN, "wait", 10, "b") == [1, 2]


def test_an_environment_shows_its_own_steps_alone() -> None:
    index = index_of(
        step(1, KITCHEN, "wait", task_id="a", environment="inn"),
        step(2, KITCHEN, "wait", task_id="b", environment="castle"),
        step(3, KITCHEN, "open fridge", task_id="b", environment="castle"),
        step(4, KITCHEN, "wait", task_id="c", environment="castle"),
    )
    (vector,) = (phi([(KITCHEN, "wait")]),)
    assert index.nearest(vector, 9) == [[1, 2, 3]]
    assert index.nearest(vector, 9, environment="castle") == [[2, 3]]
    assert index.nearest(vector, 9, environment="castle", exclude_task="b") == [[4]]
    assert index.nearest(vector, 9, environment="moon") == [[]]


def test_nothing_is_found_for_nothing() -> None:
    assert search(StepIndex(), KITCHEN, "wait") == []
    index = index_of(step(1, KITCHEN, "wait"), step(2, "", ""), step(3, "...", "!"))
    assert search(index, KITCHEN, "wait", k=0) == []
    assert search(index, "", "") == search(index, "?!", " ") == [], "no word, no neighbour"
    assert search(index, KITCHEN, "wait", k=5) == [1, 2, 3], "what has no words comes last"


def test_phi_is_a_unit_vector_whose_halves_weigh_as_stated() -> None:
    vectors = phi([(KITCHEN, "open it"), ("rain on glass", "open it"), (KITCHEN, "say hello"), ("", "open it"), ("", "")])
    assert vectors.shape == (5, DIMENSION) and vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1, 1, 0])
    # What 256 dimensions blur: unrelated texts collide in a few of them.
    assert float(vectors[0] @ vectors[1]) == pytest.approx(ACTION_SHARE, abs=0.15)
    assert float(vectors[0] @ vectors[2]) == pytest.approx(1 - ACTION_SHARE, abs=0.15)
    assert phi([]).shape == (0, DIMENSION)


def test_words_count_whatever_their_case_and_their_order_counts_too() -> None:
    assert np.array_equal(phi([("The Red KEY", "Take!")]), phi([("the red key", "take")]))
    assert not np.array_equal(phi([("red key", "take")]), phi([("key red", "take")]))
    assert not np.array_equal(phi([("take", "key")]), phi([("key", "take")])), "an action is not an observation"


def test_languages_without_spaces_are_read_by_character() -> None:
    index = index_of(step(1, "花园里有一棵树", "向北走"), step(2, "厨房里有一个冰箱", "打开冰箱"))
    assert search(index, "你在厨房里,看见冰箱", "打开", k=1) == [2]


def test_a_row_does_not_depend_on_what_it_is_computed_with() -> None:
    pairs = [each[3:5] for each in random_steps(50, random.Random(0))]
    assert np.array_equal(phi(pairs), np.concatenate([phi([pair]) for pair in pairs]))


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["random", *(pytest.param(each, marks=pytest.mark.slow) for each in "01")])
def test_vectors_are_the_same_in_every_process(hash_seed: str) -> None:
    script = (
        "import sys; from dreamgym_lg.replay.retrieval import phi;"
        "sys.stdout.write(phi([('a red key lies here', 'take key'), ('ü 料理', '')]).tobytes().hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    answer = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout == phi([("a red key lies here", "take key"), ("ü 料理", "")]).tobytes().hex()


class Colours(Embeddings):
    """Knows red and blue; counts what it was asked to embed."""

    def __init__(self) -> None:
        self.documents: list[str] = []
        self.down = False

    def embed_query(self, text: str) -> list[float]:
        return [3.0 * ("red" in text or "crimson" in text), 3.0 * ("blue" in text), 0.01]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        if self.down:
            raise ConnectionError("embedding service")
        self.documents += texts
        return [self.embed_query(text) for text in texts]


def test_a_langchain_model_can_stand_in_and_is_asked_once_for_each_key() -> None:
    colours = Colours()
    task = Task(id="t", instruction="", environment="")
    red, blue = (Step(observation=f"a {c} door", action="open", next_observation=c) for c in ("red", "blue"))
    with ReplayBuffer(":memory:", embeddings=colours) as buffer:
        assert buffer.similar("a crimson thing", "look") == []
        buffer.add(Trajectory(task=task, steps=[blue, red, blue]))
        assert buffer.similar("a crimson thing", "look") == [red, blue]
        assert buffer.similar("blue", "", k=1) == [blue]
        assert sorted(colours.documents) == ["a blue door\nopen", "a red door\nopen"]
        colours.down = True
        new = Step(observation="a red and blue door", action="open", next_observation="new")
        buffer.add(Trajectory(task=task, steps=[new, red], rollout_index=1))
        with pytest.raises(ConnectionError):
            buffer.similar("red", "")
        colours.down = False
        assert buffer.similar("red blue", "", k=1) == [new], "a failed call is made up for by the next"
        assert len(buffer.similar("red blue", "", k=9)) == 3
