"""`TinkerLearner`: group-relative policy optimisation of adapters on Tinker."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import tinker

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.files import write_whole
from dreamgym_lg.integrations.tinker.policy import TinkerChatModel, TinkerEngine, Weights, tinker_errors
from dreamgym_lg.integrations.trl.options import STEP, StepOptions, check_options
from dreamgym_lg.integrations.trl.policy_learner import CHECKPOINT, PolicyLearner
from dreamgym_lg.integrations.trl.token_trainer import SAMPLING
from dreamgym_lg.learner import TrainingRow, group_credit
from dreamgym_lg.token_recorder import TrainablePolicy

LEARNING_RATE = 4e-5
"""Default of the reinforcement learning loop in Tinker's cookbook."""


class TinkerTrainer:
    """Takes optimiser steps on Tinker, as `TokenTrainer` takes them here. Args: `new`, options of new adapters."""

    def __init__(self, engine: TinkerEngine, options: StepOptions, new: dict[str, int]) -> None:
        self.engine, self.options, self.steps = engine, options, 0
        self._new, self._client, self._kept_steps = new, cast(Any, None), 0

    def step(self, rows: Sequence[TrainingRow], *, scale: float = 1.0, rate: float = 1.0) -> dict[str, float]:
        """Take one optimiser step by the loss `ppo`, as `TokenTrainer.step`. Raises as `tinker_errors`."""
        o, high = self.options, self.options.epsilon if self.options.epsilon_high is None else self.options.epsilon_high
        clipping = {"clip_low_threshold": 1 - o.epsilon, "clip_high_threshold": 1 + high}
        adam = {"beta1": o.adam_beta1, "beta2": o.adam_beta2, "eps": o.adam_epsilon, "weight_decay": o.weight_decay}
        rate *= o.learning_rate
        params = tinker.AdamParams(learning_rate=rate, grad_clip_norm=o.max_grad_norm, **adam)
        with tinker_errors("train"):
            client = self._client = self._client or self._create_client()
            passes = client.forward_backward([_datum(row, scale) for row in rows], "ppo", clipping)
            moved = client.optim_step(params)  # sent before the first is waited for: one cycle of the service
            result, _ = passes.result(), moved.result()
        self.steps += 1
        gap, weight = 0.0, sum(row.weight * row.segment.trainable for row in rows)
        for (segment, _, row_weight, *_), output in zip(rows, result.loss_fn_outputs, strict=True):
            tokens = zip(segment.sampled[1:], segment.logprobs[1:], output["logprobs"].tolist(), strict=True)
            gap += row_weight / weight * sum(abs(there - here) for own, there, here in tokens if own)
        loss = float(result.metrics["loss:sum"])
        return {"loss": loss, "learning_rate": rate, f"{SAMPLING}sampling_logp_difference/mean": gap}

    def _create_client(self) -> Any:
        weights, service = self.engine.weights, self.engine.service
        if weights.state is None:
            return service.create_lora_training_client(weights.base_model, **self._new).result()
        return service.create_training_client_from_state(weights.state).result()

    def save(self, file: Path, *, iteration: int, **more: Any) -> None:
        """Keep weights and optimiser on Tinker, and write their paths here. It goes on and samples from them."""
        weights, name = self.engine.weights, f"iteration-{iteration}"
        if self.steps > self._kept_steps:
            with tinker_errors("save"):
                state, sampler = self._client.save_state(name), self._client.save_weights_for_sampler(name)
                weights = weights._replace(state=state.result().path, sampler=sampler.result().path)
        write_whole(file, json.dumps({"iteration": iteration, **more, "steps": self.steps, "weights": weights}, indent=2))
        self._kept_steps, self.engine.weights = self.steps, weights

    def load(self, file: Path) -> dict[str, Any]:
        """Go on from there; returns all that was saved."""
        saved: dict[str, Any] = json.loads(file.read_text())
        self.steps = self._kept_steps = saved["steps"]
        self.engine.weights = weights = Weights(*saved["weights"])
        if self.steps:
            with tinker_errors("load"):
                self._client = self.engine.service.create_training_client_from_state_with_optimizer(weights.state).result()
        return saved


def _datum(row: TrainingRow, scale: float) -> Any:
    """A row as Tinker takes it. Number `i` of each list is about token `i + 1`. It adds up, so that advantages are weighted."""
    ids, sampled = list(row.segment.token_ids), row.segment.sampled
    weighted = [scale * row.weight * each if own else 0.0 for each, own in zip(row.advantages, sampled, strict=True)]
    inputs: dict[str, Any] = {"target_tokens": ids[1:], "logprobs": list(row.segment.logprobs)[1:], "advantages": weighted[1:]}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


class TinkerLearner(PolicyLearner):
    """`GRPOLearner` of a policy on Tinker. The same rows and clipped loss, without the KL term.

    Each iteration's weights are kept on Tinker, until they are deleted there, and their paths here.

    Args:
        policy: A `TinkerChatModel`. It samples from the new weights after each iteration.
        path: Folder of the paths; a training found there is taken up, optimiser included.
        updates, step_credit: As of `GRPOLearner`.
        learning_rate: Default: `LEARNING_RATE`.
        rank, seed: Of new adapters.
        options: Those of `OPTIONS`.

    Raises `ConfigurationError` for another policy, a `beta`, an unknown option, and another temperature than 1, at which Tinker
    computes log-probabilities.
    """

    COMPARES = True
    OPTIONS = STEP & {"weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"} | {"epsilon", "epsilon_high"}

    def __init__(
        self,
        policy: TrainablePolicy,
        path: str | Path,
        *,
        updates: int = 1,
        learning_rate: float | None = None,
        beta: float | None = None,
        rank: int = 32,
        seed: int = 0,
        step_credit: bool = False,
        **options: Any,
    ) -> None:  # not the base's, whose weights are in this process
        check_options(type(self).__name__, options, self.OPTIONS)
        engine = policy.engine if isinstance(policy, TinkerChatModel) else None
        if not isinstance(engine, TinkerEngine) or policy.temperature != 1 or beta or updates < 1:
            raise ConfigurationError(
                "learner='tinker' trains a policy tinker:MODEL, sampled there at temperature 1, without a KL term: this is a "
                f"{type(policy).__name__} at temperature {policy.temperature:g}, beta={beta}, updates={updates}"
            )
        self.path, self.temperature, self._failure = Path(path), 1.0, None
        self._updates, self._save_every = updates, 1
        self._credit = partial(group_credit, by_state=step_credit)
        step = StepOptions(learning_rate=LEARNING_RATE if learning_rate is None else learning_rate, **options)
        self._trainer = cast(Any, TinkerTrainer(engine, step, {"rank": rank, "seed": seed}))
        file = self.path / CHECKPOINT
        self._progress = self._trainer.load(file) if file.exists() else {"iteration": 0, "metrics": {}}
