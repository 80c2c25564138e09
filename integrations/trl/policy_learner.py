"""`PolicyLearner`: what all learners share, the long training of a `PolicyTrainer` and its checkpoints.

One `train()` stays alive for the whole run, in a thread of its own: called anew per iteration it would reset optimiser and
schedule. `PolicyLearner.update` hands it an iteration's rows and returns when their optimiser steps are done and saved.
"""

import json
import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from dreamgym_lg.errors import ConfigurationError, MissingDependency, NothingToTrain, writing
from dreamgym_lg.learner import Credit, Groups, TrainingRow
from dreamgym_lg.types import Trajectory

try:
    from datasets import IterableDataset
    from peft import LoraConfig
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PrinterCallback,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from trl import GRPOConfig
except ImportError as error:
    raise MissingDependency.extra("trl", "train") from error

from dreamgym_lg.integrations.trl.adapters import FASTER, check_adapters
from dreamgym_lg.integrations.trl.memory import check_memory, estimate_memory
from dreamgym_lg.integrations.trl.options import SMALL, check_learner, check_reference, default_rate, precision
from dreamgym_lg.integrations.trl.policy_trainer import PolicyTrainer, Stopped, Update
from dreamgym_lg.integrations.trl.ranks import join_ranks

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


_LAST_WORD = 10.0
"""Seconds that a trainer's thread has to end; where another process has died, it may wait for that."""

_Result = tuple[str | None, dict[str, float]]
"""The checkpoint written after an iteration, if one was, and the iteration's metrics."""


class _Results(TrainerCallback):
    """Reports the metrics of an iteration's optimiser steps at its end, once they are saved if they are."""

    trainer: PolicyTrainer

    def __init__(self, done: "queue.SimpleQueue[_Result | BaseException]") -> None:
        self.done = done
        self.logs: list[dict[str, float]] = []

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        self.logs.append(logs or {})
        if self.trainer.ends_iteration and not control.should_save:
            self.report(None)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.report(f"checkpoint-{state.global_step}")

    def report(self, checkpoint: str | None) -> None:
        names = {name for logs in self.logs for name in logs}
        shown = {name: [logs[name] for logs in self.logs if isinstance(logs.get(name), (int, float))] for name in names}
        self.logs = []
        metrics = {name: sum(values) / len(values) for name, values in shown.items() if values}
        self.done.put((checkpoint, metrics))


class PolicyLearner:
    """Trains a local policy on groups of recorded episodes, resumable after any crash; the base of all learners here.

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
        learning_rate: Default: 2e-4 for a model of up to 50 M parameters, 1e-6 for a larger one; of adapters, ten times that.
        beta: Coefficient of the KL term against the policy that training began with. Default: 0.02.
        temperature: At which the policy samples; tokens sampled at another one are refused.
        peft_config: Trains adapters of this kind beside frozen weights, e.g. `adapters.default_adapters()`. The KL term's
            reference is the model without them, and they alone are in the checkpoints. Default: all weights are trained.
        config: Other arguments of TRL's `GRPOConfig` that concern an optimiser step (`weight_decay`, `max_grad_norm`, ...).

    Raises `ConfigurationError` for an option that is unknown, set already or without effect here, and for a model in half
    precision; also where an update would not fit into the device's memory (`memory.estimate_memory`).
    """

    OPTIONS: ClassVar[frozenset[str]]
    """What it takes besides the arguments above."""
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
        if peft_config is None:
            check_reference(model, beta)
        self.model, self.path, self.temperature = model, Path(path), temperature
        self._updates, self._save_every = updates, save_every
        self._tokenizer, self._micro_batch_tokens, self._peft_config = tokenizer, micro_batch_tokens, peft_config
        if learning_rate is None:
            learning_rate = default_rate(model, small=2e-4, large=self.LARGE_RATE) * (FASTER if peft_config else 1)
        given = {"learning_rate": learning_rate, "beta": beta, "temperature": temperature, "seed": seed, **self.loss}
        self._done: queue.SimpleQueue[_Result | BaseException] = queue.SimpleQueue()
        self._ranks = join_ranks(model.device)
        self._serves = self._ranks is not None and self._ranks.rank > 0
        self._leads = not self._serves
        self._trainer = self._create_trainer({**given, **config})
        self._progress, self._all_saved = self._read_progress(), True
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if self._progress["checkpoint"] and not self._serves:
            self._start()

    def _create_trainer(self, config: dict[str, Any]) -> PolicyTrainer:
        if self._serves:
            config = {**config, "report_to": "none"}
        args = _arguments(self.model, self.path, config, frozen=self._peft_config is not None)
        self._check_memory(args)
        trainer = self.trainer(
            model=self.model,
            reward_funcs=_scored_elsewhere,
            args=args,
            processing_class=self._tokenizer,
            train_dataset=IterableDataset.from_generator(_prompts),
            callbacks=[results := _Results(self._done)],
            peft_config=deepcopy(self._peft_config),  # PEFT writes into it which layers it has found
        )
        results.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        trainer.feed, trainer.micro_batch_tokens = queue.SimpleQueue(), self._micro_batch_tokens
        trainer.ranks = self._ranks
        trainer.use_vllm = trainer.vllm_importance_sampling_correction  # what TRL asks besides; it generates nothing here
        return trainer

    def _check_memory(self, args: GRPOConfig) -> None:
        """Say what an update needs, and raise `ConfigurationError` if the device has less. Nothing more is loaded before."""
        estimate = estimate_memory(
            self.model,
            dtype=self.model.dtype,
            peft_config=self._peft_config,
            tokens=self._micro_batch_tokens,
            reference=args.beta > 0,
            autocast=args.bf16 or args.fp16,
            checkpointing=bool(args.activation_checkpointing),
        )
        if self.model.device.type == "cuda" or self.model.num_parameters() > SMALL:
            logger.warning("an update on %s needs %s", self.model.device, estimate)
        lora = self._peft_config is not None
        check_memory(estimate, self.model.device, micro_batch_tokens=self._micro_batch_tokens, lora=lora)

    def _parts(self, groups: Groups) -> Sequence[Any]:
        """What the optimiser steps of an iteration divide among themselves; empty where there is nothing to learn."""
        return self._credit(groups)

    def _rows(self, parts: Sequence[Any]) -> Sequence[TrainingRow]:
        """The rows of one optimiser step, made of its share of the parts when its turn has come."""
        return parts

    @property
    def iteration(self) -> int:
        """How many iterations' updates are in the weights (skipped ones included); after a restart, in the last checkpoint."""
        return int(self._progress["iteration"])

    @property
    def metrics(self) -> dict[str, float]:
        """What the last update returned, also after a restart."""
        return dict(self._progress.get("metrics", {}))

    def update(self, groups: Groups) -> dict[str, float]:
        """One iteration: train on the groups, save if it is the turn (`save_every`), return the metrics.

        They are means over its passes and optimiser steps, in which tokens weigh as in the loss (`kl`, `entropy`, ...).
        Groups that teach nothing leave the weights as they are (`skipped` is 1). Raises `NothingToTrain` if no episode
        holds a trainable token, `ConfigurationError` for tokens sampled at another temperature, and whatever the trainer
        raised; after that, `RuntimeError`: the weights are in an unknown state, a new learner on the same path goes on from
        the last checkpoint.
        """
        if self._serves:
            raise ConfigurationError("rank 0 alone gives episodes to its learner; on every other rank call serve()")
        if self._failure is not None:
            raise RuntimeError(
                f"training stopped after iteration {self.iteration} ({type(self._failure).__name__}: {self._failure}); "
                f"load the policy anew and make a new {type(self).__name__} on {self.path}: it goes on from the last checkpoint"
            ) from self._failure
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
            if self._thread is None:
                self._start()
            saved, logs = self._step(parts, save=(self.iteration + 1) % self._save_every == 0)
            checkpoint, self._all_saved = saved or checkpoint, saved is not None
            metrics |= logs
        self._progress = {"iteration": self.iteration + 1, "checkpoint": checkpoint, "metrics": metrics}
        if self._all_saved:
            self._write_progress()
        return metrics

    def _step(self, parts: Sequence[Any], *, save: bool) -> _Result:
        """All optimiser steps of an iteration."""
        steps = min(self._updates, len(parts))
        for i in range(steps):
            last = i == steps - 1
            rows = partial(self._rows, parts[i::steps])
            self._trainer.feed.put(Update(rows, steps, first=i == 0, last=last, save=last and save))
        return self._result()

    def serve(self) -> None:
        """On a rank above 0, take a share of every update of rank 0's learner, until that is closed.

        Raises `ProcessLost` when another process of the training has died, and whatever the trainer raised.
        """
        self._train(threading.Event())
        while not self._done.empty():
            self._result()

    def close(self) -> None:
        """End the trainer's thread, and the other ranks' `serve`; nothing more is saved."""
        leads, self._leads = self._leads, False
        if self._ranks is not None and leads and self._thread is None:
            self._ranks.broadcast((None, None))  # as the trainer does at its end
        if self._thread is not None:
            self._trainer.feed.put(None)
            self._thread.join(None if self._ranks is None else _LAST_WORD)
            self._thread = None
            self._progress = self._read_progress()  # another update would go on from there

    def _result(self) -> _Result:
        result = self._done.get()
        if isinstance(result, BaseException):
            self._failure = result
            raise result
        return result

    def _start(self) -> None:
        """Begin the one long `train()`; returns once a resumed checkpoint's weights are in place."""
        ready = threading.Event()

        class Ready(TrainerCallback):
            def on_train_begin(self, *_: object, **__: object) -> None:
                ready.set()

        self._trainer.add_callback(Ready())
        self._thread = threading.Thread(target=self._train, args=(ready,), name="dreamgym-learner", daemon=True)
        self._thread.start()
        ready.wait()
        if not self._done.empty():  # it ended before it began
            self._result()

    def _train(self, ready: threading.Event) -> None:
        checkpoint = self._progress["checkpoint"]
        try:
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)  # each thread has its own current device
            self._trainer.train(resume_from_checkpoint=str(self.path / checkpoint) if checkpoint else None)
            self._done.put(RuntimeError(f"the trainer ended by itself at step {self._trainer.state.global_step}"))
        except Stopped:
            pass
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"micro_batch_tokens={self._micro_batch_tokens}: so many tokens are in one pass; fewer need less memory, for "
                "the same gradient"
            )
            self._done.put(error)
        except BaseException as error:
            self._done.put(error)
        finally:
            ready.set()

    def _check_temperature(self, episodes: Sequence[Trajectory]) -> None:
        played = [segment for episode in episodes if episode.error is None for segment in episode.segments]
        others = {segment.temperature for segment in played if segment.trainable} - {self.temperature}
        if not others:
            return
        found = ", ".join(sorted("an unknown one" if other is None else str(other) for other in others))
        raise ConfigurationError(
            f"tokens were sampled at temperature {found}, and the learner computes their probabilities at {self.temperature}: "
            f"those are others. Make both the same: {type(self).__name__}(..., temperature=policy.temperature), and no "
            "temperature bound in the agent's own code. Greedy (0) replies cannot be trained on at all. Episodes stored "
            "already stay as they were sampled: begin the training in a new folder"
        )

    @property
    def _progress_file(self) -> Path:
        return self.path / "progress.json"

    def _read_progress(self) -> dict[str, Any]:
        if not self._progress_file.exists():
            return {"iteration": 0, "checkpoint": None}
        return dict(json.loads(self._progress_file.read_text()))

    def _write_progress(self) -> None:
        """The one moment at which an update counts: a crash before it repeats the update from the checkpoint before."""
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
    """The trainer insists on prompts; the rows bring their own."""
    while True:
        yield {"prompt": ""}


def _scored_elsewhere(**_: object) -> list[float]:
    raise AssertionError("rewards come with the recorded trajectories")
