"""`Settings`: the numbers of an experiment, and its file of them."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.learner import LearnerName

Place = Literal["dream", "real", "s2r", "dream+real"]
WITH_REAL_PART = ("s2r", "dream+real")

CHANGED_LATER = {
    "iterations", "stop_after_uniform", "max_gap", "real_budget", "real_steps",
    "max_false_success",  # checked before training begins; `--force` lifts it together with `max_gap`
}  # fmt: skip
"""Settings that may change between two runs in the same folder. The record of a training that has ended keeps its own."""
TRAINING = {
    "environment", "learner", "num_tasks", "num_generations", "resample", "concurrency", "learning_rate", "beta", "lora",
    "real_every", "synthetic_share", "evaluate_every", "evaluate_tasks", "references_only",
}  # fmt: skip
"""Settings that only training reads."""
CHANGEABLE = CHANGED_LATER | TRAINING
"""Settings that may change until training has begun."""
STOP_CRITERIA = ("stop_after_uniform", "max_gap", "environment", "real_steps")
"""Settings that decide when a training ends. With other values, a training that has ended continues."""

_POSITIVE = (
    "iterations", "num_tasks", "num_generations", "concurrency", "batch_size", "evaluate_every", "base_steps", "real_every",
    "proof_tasks",
)  # fmt: skip
_SHARES = ("synthetic_share", "max_false_success")


START_KIND = "start"
"""Key of `Settings.episodes` for the episodes that the start policy plays."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers of an experiment, fixed in its folder.

    `CHANGEABLE` may change until training has begun, `CHANGED_LATER` also afterwards.
    """

    seed: int = 0
    """Decides the tasks, the models' first weights and every sample."""
    tasks: int | None = None
    """Number of tasks to take from the world, all splits together. None: all. A `DreamGym` uses all its tasks."""
    episodes: Mapping[str, int] = field(default_factory=dict)
    """Number of offline trajectories to collect, by scripted policy of the world. The key `start` is the policy that training
    begins with, for a world without scripted policies."""

    model: str = "smollm2-135m"
    """Initial weights of policy and local experience model. A folder, a GGUF file or a hub name."""

    retrieved: int = 3
    """Real transitions in every prompt of the experience model: k of the paper's top-k. 0: none, and no turns for a user."""
    retrieved_characters: int = 1000
    """Maximum characters of each of their observations."""
    experience_steps: int = 400
    """Optimiser steps of the experience model's supervised training."""
    user_steps: int = 100
    """Maximum optimiser steps of the local user's supervised training."""
    experience_tokens: int = 512
    """Maximum tokens of an answer of the experience model."""

    base_steps: int | None = None
    """Optimiser steps of an imitating policy. None: twelve passes over its episodes, at least 60 and at most 600 steps."""
    policy_tokens: int = 256
    """Maximum tokens of a policy's reply, its end included. `train_base` refuses recorded replies that have more."""
    batch_size: int = 16
    """Conversations of an optimiser step, in all supervised training."""
    supervised_learning_rate: float | None = None
    """Learning rate of all supervised training. None: 2e-3 up to 50 M parameters, falling to 2e-4 at 7 B; without
    `lora` 7e-4, falling to 1e-5."""

    environment: Place = "dream"
    """Place of training episodes. `s2r` is the paper's sim-to-real: `iterations` in the dream, then further ones in the real
    environment until `real_steps` are spent. `dream+real` (Dyna): every `real_every`-th iteration is real, until they are
    spent; the dream answers from these episodes too."""
    real_steps: int | None = None
    """Number of real steps after which training ends, or with `dream+real` its real iterations. The iteration that reaches it
    is finished. Failed episodes count, evaluations do not. None: no limit; `s2r` and `dream+real` need one."""
    real_every: int = 4
    """Of `dream+real`: one of so many iterations is real."""
    learner: LearnerName = "grpo"
    """Method that trains the policy on an iteration's episodes. `grpo`: rewards relative to the task's other episodes; `ppo`:
    relative to a critic's value; `dpo`: prefers a task's better episodes; `rft`: plays tasks without a recorded success and
    imitates the new successes with the recorded ones; `tinker`: as `grpo`, with weights on Tinker."""
    iterations: int = 40
    """Iterations of the training graph: each plays `num_tasks` times `num_generations` episodes and updates the policy."""
    num_tasks: int = 8
    """Groups of an iteration."""
    num_generations: int = 8
    """Episodes of a group: at least 2, but for `ppo`."""
    resample: int = 0
    """Maximum further groups of an iteration, on other tasks, in place of uniform ones (all episodes earned the same). Only for
    `grpo` and `dpo`, whose learning rate is multiplied by the share of groups that are not uniform."""
    concurrency: int = 64
    """Episodes played at once."""
    learning_rate: float | None = None
    """Learning rate of the policy's updates. None: 2e-4 up to 50 M parameters, falling to 1e-6 at 7 B; under `lora` ten times
    that, 1e-4 at most. `rft` uses `supervised_learning_rate`."""
    beta: float | None = None
    """KL coefficient against the start policy; `dpo`: TRL's `beta` of its loss. None: 0.02, of `dpo` 0.1."""
    lora: bool | None = None
    """Train adapters beside frozen weights, in all training. They are `default_adapters`, or the `peft_config` given to
    `train`; frozen weights keep the saved precision. False: all weights, in float32. None: above 50 M parameters."""
    references_only: bool = False
    """Train only on tasks that recorded successes judge (`References`), never the experience model. Use when the experience
    model is a poor judge. No task variations are generated."""
    synthetic_share: float = 0.25
    """Fraction of generated tasks in an iteration: the paper's lambda."""
    stop_after_uniform: int = 5
    """Iterations in a row without a difference of reward that end training. 0: never."""

    evaluate_every: int = 10
    """Iterations between two evaluations on the validation tasks."""
    evaluate_tasks: int = 32
    """Validation tasks of each evaluation; 0: no evaluation while training."""
    real_budget: int | None = None
    """Number of real validation episodes over the whole training, spread evenly. The policy that does best in them is kept.
    None: all validation tasks each time. 0: none; otherwise each imitation (`train_base`, an update of `rft`) plays all
    validation tasks in reality three times, which does not count here."""
    max_false_success: float | None = 0.05
    """Largest share of failures, 0 to 1, that the dream may reward. `train` refuses a worse dream, and one that misses too many
    real successes or was measured on too few cases (`gate`). None: no gate."""
    max_gap: float | None = 0.3
    """Dreamed minus real validation success above which training ends. The 95 % interval of the difference has to exclude 0.
    None: no limit."""
    proof_tasks: int = 120
    """Held-out tasks of the proof."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if (number := getattr(self, name)) is not None and number < 1:
                raise ConfigurationError(f"{name}={number!r}: give a number of at least 1")
        for name in _SHARES:
            if (share := getattr(self, name)) is not None and not 0 <= share <= 1:
                raise ConfigurationError(f"{name}={share!r}: give a share between 0 and 1")
        if self.learner not in get_args(LearnerName):
            raise ConfigurationError.unknown("learner", str(self.learner), get_args(LearnerName))
        if self.resample < 0 or (self.resample and self.learner in ("ppo", "rft")):
            raise ConfigurationError(f"resample={self.resample}, learner={self.learner!r}: give 0, or learner='grpo' or 'dpo'")
        if self.references_only and self.learner == "rft":
            raise ConfigurationError(
                "references_only=True: recorded successes judge no task that learner='rft' plays; give False"
            )
        if self.environment not in get_args(Place):
            raise ConfigurationError.unknown("environment", str(self.environment), get_args(Place))
        if self.environment in WITH_REAL_PART and not self.real_steps:
            real = f"with real_steps={self.real_steps}: give the steps of its real part"
            raise ConfigurationError(f"environment={self.environment!r} {real}")
        if self.environment == "dream" and self.real_steps is not None:
            raise ConfigurationError(
                f"real_steps={self.real_steps}: a training in the dream spends none; give environment='real' or 's2r' with it"
            )


def read_settings(folder: Path) -> dict[str, Any] | None:
    """The settings, `world` and `arguments` of a folder. None for a new one.

    A setting that is newer than the folder has its default.
    """
    file = folder / "settings.json"
    if not file.exists():
        return None
    try:
        stored = asdict(Settings()) | json.loads(file.read_text())
        Settings(**{name: value for name, value in stored.items() if name not in ("world", "arguments")})
        return {**stored, "world": str(stored["world"]), "arguments": dict(stored["arguments"])}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{file} cannot be read, or was written by another version of dreamgym-lg ({type(error).__name__}: {error}): "
            "take another folder"
        ) from error


def check_same(folder: Path, stored: Mapping[str, Any], current: Mapping[str, Any], changeable: Collection[str]) -> None:
    """Raise `ConfigurationError` where a folder was made with other values. Args: `changeable`, names that may differ."""
    earlier, new = dict[str, Any](), dict[str, Any]()
    for key in current:
        before, now = stored.get(key), current[key]
        if key in changeable or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):  # name only the arguments of a world that differ
            names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            before, now = ({name: each[name] for name in names if name in each} for each in (before, now))
        earlier[key], new[key] = before, now
    if earlier:
        made, given = (", ".join(f"{key}={value!r}" for key, value in each.items()) for each in (earlier, new))
        several = len(earlier) > 1
        raise ConfigurationError(
            f"{folder} was made with {made}, and {given} {'are' if several else 'is'} given: give the old "
            f"value{'s' * several}, or another folder (out=, --out)"
        )
