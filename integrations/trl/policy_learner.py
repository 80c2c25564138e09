"""`PolicyLearner`, the base of all learners: updates that survive a crash."""

import json
import logging
import queue
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from datasets import IterableDataset
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig

from dreamgym_lg.errors import ConfigurationError, NothingToTrain, writing
from dreamgym_lg.integrations.transformers.adapter_files import ADAPTER, loaded_adapters
from dreamgym_lg.integrations.trl.adapters import check_adapters, restart
from dreamgym_lg.integrations.trl.long_training import LongTraining, Result
from dreamgym_lg.integrations.trl.memory import check_memory, estimate_memory
from dreamgym_lg.integrations.trl.options import (
    ADAPTER_RATE_FACTOR,
    FROM_SCRATCH_MAX_PARAMETERS,
    check_learner,
    check_reference,
    default_rate,
    precision,
)
from dreamgym_lg.integrations.trl.policy_trainer import OptimizerStep, PolicyTrainer
from dreamgym_lg.integrations.trl.ranks import join_ranks
from dreamgym_lg.learner import Credit, Groups, TrainingRow
from dreamgym_lg.types import Trajectory

logger = logging.getLogger(__name__)

_SETTINGS: Mapping[str, Any] = {
    "max_steps": 1_000_000,
    # TRL refuses groups of one; no prompt of a batch is ever looked at
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "save_total_limit": 2,
    "report_to": "none",
    "disable_tqdm": True,
    "ignore_data_skip": True,
    "vllm_importance_sampling_correction": False,
}

_END_SECONDS = 10.0
"""Seconds that a trainer's thread has to end; where another process has died, it may wait for that."""


class PolicyLearner:
    """Trains a local policy on groups of recorded episodes, resumable after any crash.

    On a GPU, weights are float32 and passes are computed under bf16 autocast; the model's device is the one trained on. An
    episode's weight in the loss, KL term included, does not depend on its number of segments (`dreamgym_lg.learner`).

    Args:
        model: The policy's model, trained in place. Its weights have to be float32, but under LoRA.
        tokenizer: Its tokenizer.
        path: Folder of the checkpoints; an unfinished run found there is taken up, optimiser included.
        updates: Optimiser steps per iteration. Each takes its share of the rows (segments; of DPO, pairs), each used once.
        micro_batch_tokens: In one forward and backward pass, padding included, at most; a longer row has a pass of its own. It
            decides the memory that a step needs, not its gradient: the passes of a step are added up.
        save_every: Iterations between two checkpoints, which hold 12 bytes for each trained number. Updates that a crash loses
            are repeated by the training graph, from the recorded episodes.
        learning_rate: Default: 2e-4 up to 50 M parameters, falling to 1e-6 at 7 B; of adapters, ten times that.
        beta: Coefficient of the KL term against the policy that training began with. Default: 0.02.
        temperature: At which the policy samples; tokens sampled at another one are refused.
        peft_config: Trains adapters of this kind beside frozen weights, e.g. `adapters.default_adapters()`. The KL term's
            reference is the model without them, and they alone are in the checkpoints. Default: all weights are trained, or
            the adapters that the policy has; the reference has those that training began with.
        config: Other arguments of TRL's `GRPOConfig` that concern an optimiser step (`weight_decay`, `max_grad_norm`, ...).

    Raises `ConfigurationError` for an option that is unknown, set already or without effect here, and for a model in half
    precision; also where an update would not fit into the device's memory (`memory.estimate_memory`).
    """

    OPTIONS: ClassVar[frozenset[str]]
    """Further arguments, of `GRPOConfig` or its own."""
    BETA: ClassVar[float] = 0.02
    LARGE_RATE: ClassVar[float] = 1e-6
    trainer: ClassVar[type[PolicyTrainer]] = PolicyTrainer
    loss: Mapping[str, Any] = {"loss_type": "dapo"}
    """Of `GRPOConfig`: the clipped loss of a token, added up as the rows weigh."""
    _credit: Credit

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str | Path,
        *,
        updates: int = 1,
        micro_batch_tokens: int = 8192,
        save_every: int = 1,
        learning_rate: float | None = None,
        beta: float | None = None,
        temperature: float = 1.0,
        peft_config: LoraConfig | None = None,
        seed: int = 0,
        **config: Any,
    ) -> None:
        beta = self.BETA if beta is None else beta
        check_learner(type(self).__name__, self.OPTIONS, updates, micro_batch_tokens, save_every, temperature, config)
        check_adapters(model, peft_config)
        self._view = loaded_adapters(model)
        if self._view is not None:
            restart(self._view)
        elif peft_config is None:
            check_reference(model, beta)
        self.model, self.path, self.temperature = model, Path(path), temperature
        self._updates, self._save_every = updates, save_every
        self._tokenizer, self._micro_batch_tokens, self._peft_config = tokenizer, micro_batch_tokens, peft_config
        self._lora = peft_config or (self._view.peft_config[ADAPTER] if self._view is not None else None)
        if learning_rate is None:
            learning_rate = default_rate(model, small=2e-4, large=self.LARGE_RATE) * (ADAPTER_RATE_FACTOR if self._lora else 1)
        own = {"learning_rate": learning_rate, "beta": beta, "temperature": temperature, "seed": seed, **self.loss}
        self._ranks = join_ranks(model.device)
        self.is_worker = self._ranks is not None and self._ranks.rank > 0
        self.is_leader = not self.is_worker
        self._trainer = self._create_trainer({**own, **config})
        self._training = LongTraining(self._trainer, self.path)
        self._progress, self._all_saved = self._read_progress(), True
        if self._progress["checkpoint"] and self.is_leader:
            self._training.start(self._progress["checkpoint"])

    def _create_trainer(self, config: dict[str, Any]) -> PolicyTrainer:
        if self.is_worker:
            config = {**config, "report_to": "none"}
        args = _arguments(self.model, self.path, config, frozen=self._lora is not None)
        self._check_memory(args)
        trainer = self.trainer(
            model=self._view or self.model,
            reward_funcs=_scored_elsewhere,
            args=args,
            processing_class=self._tokenizer,
            train_dataset=IterableDataset.from_generator(_prompts),
            peft_config=deepcopy(self._peft_config),  # PEFT writes into it which layers it has found
        )
        trainer.remove_callback(PrinterCallback)
        trainer.feed, trainer.micro_batch_tokens = queue.SimpleQueue(), self._micro_batch_tokens
        trainer.ranks = self._ranks
        trainer.use_vllm = trainer.vllm_importance_sampling_correction  # without it TRL ignores the correction
        return trainer

    def _check_memory(self, args: GRPOConfig) -> None:
        """Log the memory that an update needs; raise `ConfigurationError` if the device has less."""
        estimate = estimate_memory(
            self.model,
            dtype=self.model.dtype,
            peft_config=self._lora,
            tokens=self._micro_batch_tokens,
            reference=args.beta > 0,
            autocast=args.bf16 or args.fp16,
            checkpointing=bool(args.activation_checkpointing),
        )
        if self.model.device.type == "cuda" or self.model.num_parameters() > FROM_SCRATCH_MAX_PARAMETERS:
            logger.warning("an update on %s needs %s", self.model.device, estimate)
        lora = self._lora is not None
        check_memory(estimate, self.model.device, micro_batch_tokens=self._micro_batch_tokens, lora=lora)

    def _parts(self, groups: Groups) -> Sequence[Any]:
        """The rows (of DPO: pairs) that the optimiser steps of an iteration share; empty: nothing to learn."""
        return self._credit(groups)

    def _rows(self, parts: Sequence[Any]) -> Sequence[TrainingRow]:
        """The rows of one optimiser step, of its share of the parts; called when its turn has come."""
        return parts

    @property
    def iteration(self) -> int:
        """Number of iterations in the weights, skipped ones included; after a restart, in the last checkpoint."""
        return int(self._progress["iteration"])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last update, also after a restart."""
        return dict(self._progress.get("metrics", {}))

    def update(self, groups: Groups) -> dict[str, float]:
        """Train on an iteration's groups, save every `save_every` iterations, return the metrics.

        Metrics are means over its passes and optimiser steps, in which tokens weigh as in the loss (`kl`, `entropy`, ...).
        Groups that teach nothing leave the weights as they are (`skipped` is 1). Raises `NothingToTrain` if no episode
        holds a trainable token, `ConfigurationError` for tokens sampled at another temperature, and whatever the trainer
        raised; after that, `RuntimeError`: the weights are in an unknown state, a new learner on the same path goes on from
        the last checkpoint.
        """
        if self.is_worker:
            raise ConfigurationError("rank 0 alone gives episodes to its learner; on every other rank call run_worker_rank()")
        if (failure := self._training.failure) is not None:
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
        parts = self._parts(groups)
        metrics: dict[str, float] = {"trainable_tokens": float(tokens), "skipped": float(not parts)}
        checkpoint = self._progress["checkpoint"]
        if parts:
            if not self._training.is_running:
                self._training.start(checkpoint)
            saved, logs = self._run(parts, save=(self.iteration + 1) % self._save_every == 0)
            checkpoint, self._all_saved = saved or checkpoint, saved is not None
            metrics |= logs
        self._progress = {"iteration": self.iteration + 1, "checkpoint": checkpoint, "metrics": metrics}
        if self._all_saved:
            self._write_progress()
        return metrics

    def _run(self, parts: Sequence[Any], *, save: bool) -> Result:
        """Take all optimiser steps of an iteration."""
        number = min(self._updates, len(parts))
        return self._training.run(
            OptimizerStep(
                partial(self._rows, parts[i::number]), number, first=i == 0, last=i == number - 1, save=save and i == number - 1
            )
            for i in range(number)
        )

    def run_worker_rank(self) -> None:
        """Take a share of rank 0's updates, on another rank, until its learner is closed.

        Raises `ProcessLost` when another process of the training has died, and whatever the trainer raised.
        """
        self._training.run_here(self._progress["checkpoint"])

    def close(self) -> None:
        """End the trainer's thread, and `run_worker_rank` on the other ranks; nothing more is saved."""
        was_leader, self.is_leader = self.is_leader, False
        if self._ranks is not None and was_leader and not self._training.is_running:
            self._ranks.broadcast((None, None))  # as the trainer does at its end
        if self._training.is_running:
            self._training.end(timeout=None if self._ranks is None else _END_SECONDS)
            self._progress = self._read_progress()  # another update would go on from there

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

    @property
    def _progress_file(self) -> Path:
        return self.path / "progress.json"

    def _read_progress(self) -> dict[str, Any]:
        if not self._progress_file.exists():
            return {"iteration": 0, "checkpoint": None}
        return dict(json.loads(self._progress_file.read_text()))

    def _write_progress(self) -> None:
        """Make the update count: a crash before this moment repeats it from the checkpoint before."""
        draft = self._progress_file.with_suffix(".tmp")
        with writing(self._progress_file):
            draft.write_text(json.dumps(self._progress))
            draft.replace(self._progress_file)


def _arguments(model: PreTrainedModel, path: Path, config: Mapping[str, Any], *, frozen: bool) -> GRPOConfig:
    arguments: dict[str, Any] = {
        **_SETTINGS,
        **precision(model, config, frozen=frozen),
        "output_dir": str(path),
        "lr_scheduler_type": "constant_with_warmup" if "warmup_steps" in config else "constant",
        # TRL loads the reference by the model's name: of the hub's revisions it has to be the same
        "model_init_kwargs": {"revision": commit} if (commit := getattr(model.config, "_commit_hash", None)) else None,
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    args = GRPOConfig(**arguments)
    args._n_gpu = min(args.n_gpu, 1)  # one process trains on one GPU, whatever else is visible
    return args


def _prompts() -> Iterator[dict[str, str]]:
    """Endless empty prompts, without which TRL does not train; the rows bring their own."""
    while True:
        yield {"prompt": ""}


def _scored_elsewhere(**_: object) -> list[float]:
    raise AssertionError("rewards come with the recorded trajectories")
