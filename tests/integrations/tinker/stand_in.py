"""A stand-in of Tinker: the clients of its package, with a small model in this process and checkpoints in a folder.

Its types are the package's own where that is installed, else as small as they can be.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import torch

try:
    import tinker
except ImportError:
    tinker = ModuleType("tinker")

    class Numbers(list[float]):
        def tolist(self) -> list[float]:
            return list(self)

    class ModelInput(SimpleNamespace):
        @classmethod
        def from_ints(cls, tokens: list[int]) -> "ModelInput":
            return cls(tokens=tokens)

        def to_ints(self) -> list[int]:
            return self.tokens

    class Datum(SimpleNamespace):
        def __init__(self, model_input: ModelInput, loss_fn_inputs: dict[str, list[float]]) -> None:
            super().__init__(model_input=model_input, loss_fn_inputs={k: Numbers(v) for k, v in loss_fn_inputs.items()})

    class TinkerError(Exception): ...

    class BadRequestError(TinkerError): ...

    class UnprocessableEntityError(TinkerError): ...

    for each in (ModelInput, Datum, TinkerError, BadRequestError, UnprocessableEntityError):
        setattr(tinker, each.__name__, each)
    tinker.SamplingParams = tinker.AdamParams = SimpleNamespace  # type: ignore[attr-defined]
    sys.modules["tinker"] = tinker

SamplingHook = Callable[[list[int], list[int]], int | None]
"""(prompt, tokens sampled so far) -> the next token in place of a drawn one."""


class Done:
    """A future of Tinker's that is over."""

    def __init__(self, value: Any) -> None:
        self._future: Future[Any] = Future()
        self._future.set_result(value)

    def future(self) -> "Future[Any]":
        return self._future

    def result(self, timeout: float | None = None) -> Any:
        return self._future.result(timeout)


class Service:
    """A `ServiceClient`. Args: `base`, the model of every name; `folder`, of its checkpoints, which outlive the process."""

    def __init__(self, base: Any, tokenizer: Any, folder: Path, hook: SamplingHook = lambda prompt, sampled: None) -> None:
        self.base, self.tokenizer, self.folder, self.hook = base, tokenizer, folder, hook
        self.data: list[list[Any]] = []
        """What `forward_backward` was sent."""
        self.sampled_from: list[str] = []
        self.created: list[tuple[Any, ...]] = []
        folder.mkdir(exist_ok=True)

    def create_lora_training_client(self, base_model: str, rank: int = 32, seed: int | None = None) -> Done:
        self.created.append((base_model, rank, seed))
        return Done(Training(self, deepcopy(self.base)))

    def create_training_client_from_state(self, path: str) -> Done:
        return Done(self._restored(path, optimizer=False))

    def create_training_client_from_state_with_optimizer(self, path: str) -> Done:
        return Done(self._restored(path, optimizer=True))

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> Done:
        model = deepcopy(self.base)
        if model_path is not None:
            model.load_state_dict(torch.load(self.file(model_path))["model"])
        return Done(Sampling(self, model.eval(), str(model_path or base_model)))

    def _restored(self, path: str, *, optimizer: bool) -> "Training":
        self.created.append((path, optimizer))
        saved, training = torch.load(self.file(path)), Training(self, deepcopy(self.base))
        training.model.load_state_dict(saved["model"])
        if optimizer:
            training.optimizer.load_state_dict(saved["optimizer"])
        return training

    def file(self, path: str) -> Path:
        return self.folder / path.removeprefix("tinker://").replace("/", "-")


class Training:
    """A `TrainingClient` that trains all weights. Its losses are written out by the documentation."""

    def __init__(self, service: Service, model: Any) -> None:
        self.service, self.model = service, model.train()
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.run = uuid4().hex[:8]

    def forward_backward(self, data: list[Any], loss_fn: str, loss_fn_config: dict[str, float]) -> Done:
        assert loss_fn == "ppo"
        self.service.data.append(data)
        total, outputs = 0.0, []
        for datum in data:
            ids = torch.tensor([datum.model_input.to_ints()])
            target, old, advantages = (
                torch.tensor(datum.loss_fn_inputs[name].tolist()) for name in ("target_tokens", "logprobs", "advantages")
            )
            logprobs = torch.log_softmax(self.model(ids).logits[0].float(), dim=-1).gather(1, target.long()[:, None])[:, 0]
            ratio = (logprobs - old).exp()
            near = ratio.clamp(loss_fn_config["clip_low_threshold"], loss_fn_config["clip_high_threshold"])
            loss = -torch.min(ratio * advantages, near * advantages).sum()
            loss.backward()
            total += loss.item()
            outputs.append({"logprobs": logprobs.detach()})
        return Done(SimpleNamespace(metrics={"loss:sum": total}, loss_fn_outputs=outputs))

    def optim_step(self, params: Any) -> Done:
        for group in self.optimizer.param_groups:
            group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": params.eps}
            group["weight_decay"] = params.weight_decay
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), params.grad_clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Done(None)

    def save_state(self, name: str) -> Done:
        return self._saved(f"tinker://{self.run}/weights/{name}", optimizer=self.optimizer.state_dict())

    def save_weights_for_sampler(self, name: str) -> Done:
        return self._saved(f"tinker://{self.run}/sampler_weights/{name}")

    def _saved(self, path: str, **more: Any) -> Done:
        torch.save({"model": self.model.state_dict(), **more}, self.service.file(path))
        return Done(SimpleNamespace(path=path))


class Sampling:
    """A `SamplingClient`."""

    def __init__(self, service: Service, model: Any, path: str) -> None:
        self.service, self.model, self.path = service, model, path

    def get_tokenizer(self) -> Any:
        return self.service.tokenizer

    @torch.no_grad()
    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Done:
        assert num_samples == 1
        self.service.sampled_from.append(self.path)
        read, params, sampled, logprobs = prompt.to_ints(), sampling_params, list[int](), list[float]()
        generator = torch.Generator().manual_seed(params.seed or 0)
        while len(sampled) < params.max_tokens and not (sampled and sampled[-1] in params.stop):
            logits = self.model(torch.tensor([read + sampled])).logits[0, -1].float()
            spread = torch.log_softmax(logits / (params.temperature or 1.0), dim=-1)
            drawn = (
                torch.multinomial(spread.exp(), 1, generator=generator).item() if params.temperature else spread.argmax().item()
            )
            chosen = self.service.hook(read, sampled)
            sampled.append(int(drawn if chosen is None else chosen))
            logprobs.append(spread[sampled[-1]].item())
        reason = "stop" if sampled[-1] in params.stop else "length"
        return Done(SimpleNamespace(sequences=[SimpleNamespace(tokens=sampled, logprobs=logprobs, stop_reason=reason)]))
