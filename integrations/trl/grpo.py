"""GRPO by TRL's `GRPOTrainer`, fed with recorded groups of trajectories instead of its own generations.

One `train()` stays alive for the whole run, in a thread of its own: called anew per iteration it would reset optimiser and
schedule. `GRPOLearner.update` hands it an iteration's groups and returns when their optimiser steps are done and saved.
"""

import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dreamgym_lg.errors import ConfigurationError, MissingDependency, NothingToTrain
from dreamgym_lg.integrations.trl.rows import Rows, to_rows
from dreamgym_lg.types import Segment, Trajectory

try:
    from datasets import IterableDataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad
except ImportError as error:
    raise MissingDependency.extra("trl", "train") from error

for _name in ("_generate_and_score_completions", "_get_per_token_logps_and_entropies"):
    if not hasattr(GRPOTrainer, _name):
        raise MissingDependency(f"this TRL has no GRPOTrainer.{_name}; run: pip install 'trl>=1.16,<1.17'")

class _Stopped(Exception):
    """Ends the trainer's thread."""


class _Trainer(GRPOTrainer):
    """Takes rows from a queue where TRL would generate and score."""

    feed: "queue.SimpleQueue[Rows | None]"

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        rows = self.feed.get()
        if rows is None:
            raise _Stopped
        self.model.train()  # while this waited, the engine may have put it into evaluation mode
        missing = -len(rows) % self.args.steps_per_generation
        # the batch is split into equal parts: rows without a trainable token fill it up and add nothing to the loss
        filler = (Segment(token_ids=rows[0][0].token_ids, sampled=(), logprobs=()), 0.0)
        return self._batch([*rows, *[filler] * missing])

    def _batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        prompts, completions, masks, logprobs = [], [], [], []
        for segment, _ in rows:
            first = list(segment.sampled).index(1) if segment.trainable else len(segment.token_ids) - 1
            prompts.append(torch.tensor(segment.token_ids[:first]))
            completions.append(torch.tensor(segment.token_ids[first:]))
            masks.append(torch.tensor(segment.sampled[first:] if segment.trainable else [0]))
            logprobs.append(torch.tensor(segment.logprobs[first:] if segment.trainable else [0.0]))
        token = self._tokenizer.pad_token_id
        tool_mask = pad(masks, padding_value=0)
        output = {
            "prompt_ids": pad(prompts, padding_value=token, padding_side="left"),
            "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"),
            "completion_ids": pad(completions, padding_value=token),
            "completion_mask": pad([torch.ones_like(ids) for ids in completions], padding_value=0),
            "tool_mask": tool_mask,
            "old_per_token_logps": pad(logprobs, padding_value=0.0),
            "advantages": torch.tensor([advantage for _, advantage in rows]),
            "num_items_in_batch": tool_mask.sum(),
        }
        output = {key: value.to(self.accelerator.device) for key, value in output.items()}
        if self.beta != 0.0:
            output["ref_per_token_logps"] = self._reference(output)
        return output

    @torch.no_grad()
    def _reference(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        kept = batch["completion_ids"].size(1)
        return self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, kept, batch_size=16)[0]


class _Steps(TrainerCallback):
    """Saves after the last optimiser step of an update, then reports its metrics."""

    def __init__(self, steps: int, done: "queue.SimpleQueue[Any]") -> None:
        self.steps, self.done, self.count = steps, done, 0
        self.logs: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1
        control.should_save = self.count % self.steps == 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.logs.append(logs or {})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        names = {name for logs in self.logs for name in logs}
        shown = {name: [logs[name] for logs in self.logs if isinstance(logs.get(name), (int, float))] for name in names}
        self.logs = []
        metrics = {name: sum(values) / len(values) for name, values in shown.items() if values}
        self.done.put((f"checkpoint-{state.global_step}", metrics))


_SETTINGS: Mapping[str, Any] = {
    "max_steps": 1_000_000,
    "lr_scheduler_type": "constant",
    "loss_type": "grpo",
    "logging_steps": 1,
    "save_strategy": "no",
    "save_total_limit": 2,
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": False,
    "activation_checkpointing": False,
    "ignore_data_skip": True,
}


class GRPOLearner:
    """Trains a local policy on groups of recorded episodes, resumable after any crash.

    Args:
        model: The policy's `PreTrainedModel`, trained in place.
        tokenizer: Its tokenizer.
        path: Folder of the checkpoints; an unfinished run found there is taken up, optimiser included.
        num_generations: Episodes per group, at least 2.
        updates: Optimiser steps per iteration; every row is used once.
        micro_batch: Parts a step's rows are split into (gradient accumulation), for memory.
        config: Anything else of TRL's `GRPOConfig`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, path: str | Path, *, num_generations: int = 8, updates: int = 1, micro_batch: int = 2,
        learning_rate: float = 1e-6, beta: float = 0.02, temperature: float = 1.0, seed: int = 0, **config: Any,
    ) -> None:  # fmt: skip
        if num_generations < 2:
            raise ConfigurationError(f"num_generations={num_generations}: a group needs at least 2 episodes to compare")
        if beta and not model.config._name_or_path:
            raise ConfigurationError(
                f"beta={beta} needs the reference policy's weights, and this model was made in memory: save it and load it "
                "with LocalChatModel.from_path, or set beta=0"
            )
        self.model, self.path = model, Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        args: dict[str, Any] = {
            **_SETTINGS, "output_dir": str(self.path), "num_generations": num_generations, "learning_rate": learning_rate,
            "per_device_train_batch_size": num_generations, "steps_per_generation": updates * micro_batch,
            "gradient_accumulation_steps": micro_batch, "beta": beta, "temperature": temperature, "seed": seed,
            "use_cpu": model.device.type == "cpu", **config,
        }  # fmt: skip
        self._trainer = _Trainer(
            model=model, reward_funcs=_scored_elsewhere, args=GRPOConfig(**args), processing_class=tokenizer,
            train_dataset=IterableDataset.from_generator(_prompts), callbacks=[_Steps(updates, self._done)],
        )  # fmt: skip
        self._trainer.remove_callback(PrinterCallback)
        self._trainer.feed = queue.SimpleQueue()
        self._progress = self._read_progress()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        if self._progress["checkpoint"]:
            self._start()

    @property
    def iteration(self) -> int:
        """How many iterations' updates are in the weights (skipped ones included)."""
        return int(self._progress["iteration"])

    @property
    def metrics(self) -> dict[str, float]:
        """What the last update returned, also after a restart."""
        return dict(self._progress.get("metrics", {}))

    def update(self, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """One iteration: train on the groups, save, return the metrics (means over its optimiser steps).

        Groups that are all uniform leave the weights as they are (`skipped` is 1). Raises `NothingToTrain` if no episode
        holds a trainable token, and whatever the trainer raised; after that, `RuntimeError`: the weights are in an unknown
        state, a new learner on the same path goes on from the last checkpoint.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"training stopped after iteration {self.iteration} ({type(self._failure).__name__}: {self._failure}); "
                f"load the policy anew and make a new GRPOLearner on {self.path}: it goes on from the last checkpoint"
            ) from self._failure
        tokens = sum(s.trainable for group in groups for trajectory in group for s in trajectory.segments)
        if not tokens:
            causes = {trajectory.error for group in groups for trajectory in group if trajectory.error}
            raise NothingToTrain(
                f"{sum(map(len, groups))} episodes gave 0 trainable tokens. "
                + (f"Causes: {'; '.join(sorted(causes)[:3])}" if causes else "Is the policy a LocalChatModel?")
            )
        rows = to_rows(groups)
        metrics: dict[str, float] = {"trainable_tokens": float(tokens), "skipped": float(not rows)}
        checkpoint = self._progress["checkpoint"]
        if rows:
            if self._thread is None:
                self._start()
            self._trainer.feed.put(rows)
            checkpoint, logs = self._result()
            metrics |= logs
        self._write_progress({"iteration": self.iteration + 1, "checkpoint": checkpoint, "metrics": metrics})
        return metrics

    def close(self) -> None:
        """End the trainer's thread; everything is saved already."""
        if self._thread is not None:
            self._trainer.feed.put(None)
            self._thread.join()
            self._thread = None

    def _result(self) -> tuple[str, dict[str, float]]:
        result = self._done.get()
        if isinstance(result, BaseException):
            self._failure = result
            raise result
        return result

    def _start(self) -> None:
        """Begin the one long `train()`; returns once a resumed checkpoint's weights are in place."""
        ready = threading.Event()

        class Ready(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                ready.set()

        self._trainer.add_callback(Ready())
        self._thread = threading.Thread(target=self._train, args=(ready,), name="dreamgym-grpo", daemon=True)
        self._thread.start()
        ready.wait()
        if not self._done.empty():  # it ended before it began
            self._result()

    def _train(self, ready: threading.Event) -> None:
        checkpoint = self._progress["checkpoint"]
        try:
            self._trainer.train(resume_from_checkpoint=str(self.path / checkpoint) if checkpoint else None)
            self._done.put(RuntimeError(f"the trainer ended by itself at step {self._trainer.state.global_step}"))
        except _Stopped:
            pass
        except BaseException as error:
            self._done.put(error)
        finally:
            ready.set()

    @property
    def _progress_file(self) -> Path:
        return self.path / "progress.json"

    def _read_progress(self) -> dict[str, Any]:
        if not self._progress_file.exists():
            return {"iteration": 0, "checkpoint": None}
        return dict(json.loads(self._progress_file.read_text()))

    def _write_progress(self, progress: dict[str, Any]) -> None:
        """The one moment at which an update counts: a crash before it repeats the update from the checkpoint before."""
        draft = self._progress_file.with_suffix(".tmp")
        draft.write_text(json.dumps(progress))
        draft.replace(self._progress_file)
        self._progress = progress


def _prompts() -> Iterator[dict[str, str]]:
    """The trainer insists on prompts; the rows bring their own."""
    while True:
        yield {"prompt": ""}


def _scored_elsewhere(**_: Any) -> list[float]:
    raise AssertionError("rewards come with the recorded trajectories")
