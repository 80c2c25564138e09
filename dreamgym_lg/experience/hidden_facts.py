"""The hook by which a world says what of it is hidden: drawn once by the world's seed, and told to the experience model.

A model at temperature 0 fills the hidden part of a world by habit: the same things first in every world, some never. A policy
then learns the habit. So the world draws it, and the prompt of each step holds the fact that the world reveals next; in
training data it is what the real episode revealed.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Protocol, runtime_checkable

from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.types import Prediction, Task


class HiddenFacts(Protocol):
    """What a world is about to reveal, for `ExperienceModel(hidden_facts=...)`."""

    def __call__(self, task: Task, history: Sequence[Exchange], seed: int, /) -> Sequence[str]:
        """One fact for each step of `history` and one for the step to come: what the world reveals next, "" for none.

        It is a pure function. What `history` has revealed comes before what is drawn, so that a recorded episode gets its own
        facts; nothing else that an agent does may change a draw, or the rollouts of one task would face different worlds.

        Args:
            seed: `world_seed(task)`, of which all draws are made (`draw_order`).
        """


@runtime_checkable
class Telling(Protocol):
    """`HiddenFacts` that can also correct an answer of the experience model which says something else than the drawn fact."""

    def tell(self, action: str, observation: str, fact: str, /) -> str:
        """What the world answers to a valid action, by `fact`; `observation`, the model's answer, where `fact` does not say.

        A small model that is shown "grapefruit" may write "grape", and a policy learns from worlds that contradict themselves.
        """


def told(hidden_facts: HiddenFacts | None, action: str, prediction: Prediction, fact: str) -> Prediction:
    """The prediction, its observation corrected by `hidden_facts.tell`; unchanged if that does not exist, `fact` is "", or the
    action is invalid."""
    if not fact or not prediction.valid or not isinstance(hidden_facts, Telling):
        return prediction
    return prediction._replace(observation=hidden_facts.tell(action, prediction.observation, fact))


def world_seed(task: Task) -> int:
    """What decides all that a task leaves open: its `metadata["seed"]`, else a number that its id stands for."""
    seed = task.metadata.get("seed")
    return seed if isinstance(seed, int) else int.from_bytes(blake2b(task.id.encode(), digest_size=4).digest())


def draw_order(names: Iterable[str], seed: int) -> list[str]:
    """The different names in an order drawn by `seed`. Leaving one name out does not change the order of the others."""
    return sorted(set(names), key=lambda name: blake2b(f"{seed}/{name}".encode()).digest())
