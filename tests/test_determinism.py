"""The spread that an environment adds by itself: none in a world of its own, some where it draws anew."""

import json
import random
from contextlib import nullcontext
from typing import Any

import pytest

from dreamgym_lg.determinism import replay_variance
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience import DreamEnvironment, ExperienceModel
from dreamgym_lg.types import Task

TASK = Task(id="t", instruction="leave", environment="house", metadata={"observation": "A door."})


async def test_a_world_of_its_own_has_no_spread(scripted: Any, door_world: Any) -> None:
    model = scripted(reply=door_world)
    found = await replay_variance(
        lambda: nullcontext(DreamEnvironment(ExperienceModel(model))), TASK, ["open door", "go north", "never played"], 4
    )
    assert found == (4, 1.0, 0.0, 4, 1, None)
    assert len(model.asked) == 8, "asked each time: what is measured is the model, not its memory"


async def test_a_model_that_changes_its_mind_is_found_out_and_its_memory_hides_it(scripted: Any) -> None:
    rng = random.Random(0)

    def reply(_: Any) -> str:
        answer = {"reasoning": "", "valid": True, "reward": rng.choice([0, 1]), "terminated": False, "success": False}
        return json.dumps({**answer, "observation": "Well."})

    model = scripted(reply=reply)
    fresh = await replay_variance(
        lambda: nullcontext(DreamEnvironment(ExperienceModel(model, form="json"))), TASK, ["a", "b"], 20
    )
    assert fresh.worlds == 4 and fresh.first_difference == 1 and 0.4 < fresh.reward_sd < 1 and fresh.successes == 0
    shared = ExperienceModel(model, form="json")
    kept = await replay_variance(lambda: nullcontext(DreamEnvironment(shared)), TASK, ["a", "b"], 20)
    assert kept.worlds == 1 and kept.reward_sd == 0 and kept.first_difference is None


async def test_one_that_ends_earlier_differs(scripted: Any) -> None:
    ends = iter(["failure", "continues", "continues"])
    model = scripted(reply=lambda _: f"valid, why\nreward 0, {next(ends)}\nWell.")
    found = await replay_variance(
        lambda: nullcontext(DreamEnvironment(ExperienceModel(model))), TASK, ["a", "b"], 2
    )  # fmt: skip
    assert (found.worlds, found.first_difference) == (2, 1)


async def test_one_replay_has_no_spread() -> None:
    with pytest.raises(ConfigurationError, match="at least 2"):
        await replay_variance(lambda: nullcontext(None), TASK, [], 1)  # type: ignore[arg-type, return-value]
