"""`PolicyLearner`, the base of all learners: updates that survive a crash."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError, NothingToTrain
from dreamgym_lg.integrations.transformers.adapter_files import loaded_adapters
from dreamgym_lg.integrations.trl.adapters import adapt, check_trainable
from dreamgym_lg.integrations.trl.options import ADAPTER_RATE_FACTOR, Loss, StepOptions, check_options, default_rate, precision
from dreamgym_lg.integrations.trl.token_trainer import SAMPLING, TokenTrainer
from dreamgym_lg.learner import Credit, Groups, TrainingRow, has_learning_signal
from dreamgym_lg.types import Trajectory

CHECKPOINT = "training.pt"
_SMALL_RATE, _LARGE_RATE, _ADAPTER_RATE = 2e-4, 1e-6, 1e-4
"""Largest default rates, of adapters too. Two steps at 2e-4 ended SmolLM2-135M's exploration (docs/results)."""


class PolicyLearner:
    """Trains a local policy on groups of recorded episodes, resumable after any crash.

    On a GPU, weights are float32 and passes are computed under bf16 autocast; the model's device is the one trained on. An
    episode's weight in the loss, KL term included, does not depend on its number of segments (`dreamgym_lg.learner`).

    Args:
        model: The policy's model, trained in place. Its weights have to be float32, but under LoRA.
        tokenizer: Its tokenizer.
        path: Folder of the checkpoint; an unfinished run found there is taken up, optimiser included.
        updates: Optimiser steps per iteration. Each takes its share of the rows (segments; of DPO, pairs), each used once.
        micro_batch_tokens: Tokens of one pass, padding included; a longer row has its own. Decides memory, not the gradient.
        save_every: Iterations between two checkpoints (12 bytes a trained number). The training graph repeats lost updates.
        learning_rate: Default: 2e-4 up to 50 M parameters, falling to 1e-6 at 7 B; of adapters ten times that, 1e-4 at most.
        beta: Coefficient of the KL term against the policy that training began with. Default: 0.02.
        temperature: At which the policy samples; tokens sampled at another one are refused.
        peft_config: Trains adapters of this kind beside frozen weights, e.g. `adapters.default_adapters()`; they alone are in
            the checkpoints. Default: all weights are trained, or the adapters that the policy has.
        seed: For the initial weights of new adapters.
        options: Others of `StepOptions` (`weight_decay`, `max_grad_norm`, ...).

    Raises `ConfigurationError` for an unknown option and for a model in half precision.
    """

    OPTIONS: ClassVar[frozenset[str]]
    """Names of the `StepOptions` that this learner takes."""
    BETA: ClassVar[float] = 0.02
    COMPARES: ClassVar[bool] = False
    """Scales the learning rate by the share of groups with different rewards; AdamW ignores gradient size."""
    trainer: Callable[..., TokenTrainer] = TokenTrainer
    loss: Loss = "clipped"
    _credit: Credit

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str | Path,
        *,
        updates: int = 1,
        micro_batch_tokens: int = 2048,
        save_every: int = 1,
        learning_rate: float | None = None,
        beta: float | None = None,
        temperature: float = 1.0,
        peft_config: LoraConfig | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_options(type(self).__name__, options, self.OPTIONS)
        beta = self.BETA if beta is None else beta
        _check_numbers(updates, micro_batch_tokens, save_every, temperature, options)
        check_trainable(model)
        self.model, self.path, self.temperature = model, Path(path), temperature
        self._updates, self._save_every = updates, save_every
        reference = self._prepare_weights(peft_config, seed, keep=beta > 0)
        if learning_rate is None:
            learning_rate = default_rate(model, small=_SMALL_RATE, large=_LARGE_RATE)
            if loaded_adapters(model) is not None:
                learning_rate = min(learning_rate * ADAPTER_RATE_FACTOR, _ADAPTER_RATE)
        self.beta = beta
        own = {"learning_rate": learning_rate, "beta": self.kl_weight, "temperature": temperature, "loss": self.loss}
        step = StepOptions(**{**precision(model), **own, **options})
        self._trainer = self.trainer(
            model,
            step,
            micro_batch_tokens=micro_batch_tokens,
            schedule=lambda steps: min(1.0, steps / step.warmup_steps) if step.warmup_steps else 1.0,
            reference=reference,
        )
        self._progress: dict[str, Any] = {"iteration": 0, "metrics": {}}
        if (self.path / CHECKPOINT).exists():
            saved = self._trainer.load(self.path / CHECKPOINT)
            self._progress = {name: saved[name] for name in self._progress}
        self._failure: BaseException | None = None

    def _prepare_weights(self, peft_config: LoraConfig | None, seed: int, *, keep: bool) -> dict[str, torch.Tensor] | None:
        """Put the weights in place that training begins with. Returns those of the reference.

        A second learner of this process on the same path, as the real part of a training has, begins where the first began.
        """
        path, began = vars(self.model).get("_began", (None, {}))
        again = path == self.path.absolute() and (bool(began) or not keep)
        if peft_config is not None and loaded_adapters(self.model) is not None and not again:
            raise ConfigurationError("the policy has adapters, and training goes on with them: leave out peft_config")
        if peft_config is not None:
            adapt(self.model, peft_config, seed=seed)
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        if again:
            for name, value in began.items():
                trained[name].data.copy_(value)
        else:
            began = {name: each.detach().clone() for name, each in trained.items()} if keep else {}
            object.__setattr__(self.model, "_began", (self.path.absolute(), began))
        return began if keep else None

    @property
    def kl_weight(self) -> float:
        """Coefficient of the KL term in the loss."""
        return self.beta

    def _parts(self, groups: Groups) -> Sequence[Any]:
        """The rows, of DPO pairs, that an iteration's optimiser steps share. Empty: nothing to learn."""
        return self._credit(groups)

    def _rows(self, parts: Sequence[Any]) -> tuple[Sequence[TrainingRow], dict[str, float]]:
        """The rows of one optimiser step, and further metrics. Called when its turn has come."""
        return parts, {}

    @property
    def iteration(self) -> int:
        """Number of iterations in the weights, skipped ones included. After a restart, in the last checkpoint."""
        return int(self._progress["iteration"])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last update, also after a restart."""
        return dict(self._progress["metrics"])

    def update(self, groups: Groups) -> dict[str, float]:
        """Train on an iteration's groups, save the first and every `save_every` iterations, return the metrics.

        Metrics are means over its optimiser steps, in which tokens weigh as in the loss (`kl`, `entropy`, ...). Groups that
        teach nothing leave the weights as they are (`skipped` is 1). Raises `NothingToTrain` if no episode holds a trainable
        token, `ConfigurationError` for tokens sampled at another temperature, and whatever a step raised; after that,
        `RuntimeError`: the weights are in an unknown state, a new learner on the same path goes on from the last checkpoint.
        """
        if (failure := self._failure) is not None:
            raise RuntimeError(
                f"training stopped after iteration {self.iteration} ({type(failure).__name__}: {failure}); "
                f"load the policy anew and make a new {type(self).__name__} on {self.path}: it goes on from the last checkpoint"
            ) from failure
        tokens = sum(s.trainable for group in groups for trajectory in group for s in trajectory.segments)
        if not tokens:
            causes = {trajectory.error for group in groups for trajectory in group if trajectory.error}
            raise NothingToTrain(
                f"{sum(map(len, groups))} episodes gave 0 trainable tokens. "
                + (f"Causes: {'; '.join(sorted(causes)[:3])}" if causes else "Is the policy a LocalChatModel?")
            )
        self._check_temperature([episode for group in groups for episode in group])
        model = getattr(self, "model", None)  # a subclass may train elsewhere
        if model is not None and model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # each thread has its own current device
        try:
            parts = self._parts(groups)
            share = sum(map(has_learning_signal, groups)) / len(groups) if self.COMPARES else 1.0
            metrics = {"trainable_tokens": float(tokens), "skipped": float(not parts), **self._steps(parts, share)}
            progress = {"iteration": (number := self.iteration + 1), "metrics": metrics}
            if number % self._save_every == 0 or not (self.path / CHECKPOINT).exists():
                self._trainer.save(self.path / CHECKPOINT, **progress)
        except BaseException as error:
            self._failure = error
            raise
        self._progress = progress
        return self.metrics

    def _steps(self, parts: Sequence[Any], rate: float) -> dict[str, float]:
        """Take all optimiser steps of an iteration, at `rate` times the learning rate. Returns the means of their metrics."""
        number, measured = min(self._updates, len(parts)), defaultdict[str, list[float]](list)
        for i in range(number):
            rows, metrics = self._rows(parts[i::number])
            metrics |= self._trainer.step(rows, scale=number, rate=rate)
            for name, value in metrics.items():
                if i == 0 or not name.startswith(SAMPLING):  # later steps have other weights than those sampled with
                    measured[name].append(value)
        return {name: sum(values) / len(values) for name, values in measured.items()}

    def _check_temperature(self, episodes: Sequence[Trajectory]) -> None:
        played = [segment for episode in episodes if episode.error is None for segment in episode.segments]
        others = {segment.temperature for segment in played if segment.trainable} - {self.temperature}
        if not others:
            return
        sampled_at = ", ".join(sorted("an unknown one" if other is None else str(other) for other in others))
        raise ConfigurationError(
            f"tokens were sampled at temperature {sampled_at}, and the learner computes their probabilities at "
            f"{self.temperature}: those are others. Make both the same: {type(self).__name__}(..., "
            "temperature=policy.temperature), and no temperature bound in the agent's own code. Greedy (0) replies cannot be "
            "trained on at all. Episodes stored already stay as they were sampled: begin the training in a new folder"
        )


def _check_numbers(
    updates: int, micro_batch_tokens: int, save_every: int, temperature: float, options: Mapping[str, Any]
) -> None:
    for name, number in (("updates", updates), ("micro_batch_tokens", micro_batch_tokens), ("save_every", save_every)):
        if number < 1:
            raise ConfigurationError(f"{name}={number}: it has to be at least 1")
    if temperature <= 0:
        raise ConfigurationError(
            f"temperature={temperature}: a policy that always takes the most likely token cannot be trained; "
            "sample it at a temperature above 0 (policy.with_temperature(1.0))"
        )
    if options.get("vllm_importance_sampling_correction") and updates > 1:
        raise ConfigurationError(
            f"updates={updates} with vllm_importance_sampling_correction: its weights are of the policy before the update, "
            "from which only the first step begins; give updates=1, or leave it out: tokens are clipped by that ratio then"
        )
