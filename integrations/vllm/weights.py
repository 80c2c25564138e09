"""A trained policy's weights for vLLM servers: LoRA adapters by name, or all weights."""

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch
from transformers import PreTrainedModel

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.integrations.transformers.adapter_files import adapter_layers, write_adapters
from dreamgym_lg.integrations.vllm.server import Refused, Server, Unanswered


class Transfer(Protocol):
    """Sends all weights of a model to one server, which samples from them afterwards."""

    def __call__(self, model: PreTrainedModel) -> None: ...


CreateTransfer = Callable[[str], Transfer]
"""Creates the transfer to the server of an address, as that server has just started."""


class WeightSync:
    """Weights that nothing changes; the base of those that bring new ones to the servers."""

    version = ""
    """Names the weights; "" for those that the servers have loaded themselves."""

    def publish(self) -> None:
        """Make a new version of the weights, which have changed."""

    def name(self, server: Server) -> str:
        """The model to request of the server."""
        return server.model

    async def confirm(self, server: Server) -> None:
        """Have the server hold the version, which is sent if it does not. Raises `Refused` or `Unanswered`."""
        server.held = self.version


class AdapterSync(WeightSync):
    """LoRA adapters, loaded by servers under a name made of their contents.

    Args:
        model: With adapters in its layers, as a learner puts them there.
        folder: Where the servers read them: for servers on other machines, on a shared file system.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model, self.folder = model, folder.absolute()
        self._folders: list[Path] = []

    def publish(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / f".draft-{uuid4().hex[:8]}"
        write_adapters(self.model, draft)
        with (draft / "adapter_model.safetensors").open("rb") as file:
            version = f"dreamgym-{hashlib.file_digest(file, 'blake2b').hexdigest()[:16]}"
        path = self.folder / version
        if path.exists():
            shutil.rmtree(draft)
        else:
            draft.rename(path)
        if version == self.version:
            return
        self.version = version
        self._folders.append(path)
        if len(self._folders) > 2:  # vLLM reads an adapter when it first uses it, and dies if it is not there
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)

    def name(self, server: Server) -> str:
        return self.version

    async def confirm(self, server: Server) -> None:
        version, before = self.version, server.held
        if version not in server.adapters:
            path = self.folder / version
            try:
                await server.post("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(path)})
            except Refused as refused:
                if "already been loaded" not in refused.text:
                    raise _not_loaded(refused, path) from refused
            except Unanswered as failed:
                if "rank" in str(failed):  # of which another try changes nothing
                    raise ConfigurationError(f"{failed}. {_RANK}") from failed
                raise
        server.held = version
        if before in server.adapters and before != version:
            with contextlib.suppress(Refused, Unanswered):  # it takes up a place, no more
                await server.post("/v1/unload_lora_adapter", {"lora_name": before})


_RANK = "It has to be started with a --max-lora-rank of at least the adapters' rank"


def _not_loaded(refused: Refused, path: Path) -> ConfigurationError:
    if refused.status == 404 and '"error"' not in refused.text:  # no such address
        return ConfigurationError(
            f"{refused}: it takes no LoRA adapters while it runs. Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "
            "vllm serve ... --enable-lora --max-lora-rank 16 (or the rank of peft_config)"
        )
    return ConfigurationError(
        f"{refused}. It has to see the folder {path} (on other machines by a shared file system: out=, --out). {_RANK}"
    )


class TransferSync(WeightSync):
    """All weights, sent to each server; one that has started anew since has another instance id, and is sent them again.

    Args:
        model: The policy's.
        create: Creates the transfer to a server.
    """

    def __init__(self, model: PreTrainedModel, create: CreateTransfer) -> None:
        self.model, self._create = model, create
        self._run, self._published = f"dreamgym-{uuid4().hex[:8]}", 0
        self._transfers: dict[str, tuple[str, Transfer]] = {}

    def publish(self) -> None:
        self._published += 1
        self.version = f"{self._run}-{self._published}"

    async def confirm(self, server: Server) -> None:
        instance = await _instance(server)
        known, transfer = self._transfers.get(server.url, ("", None))
        if transfer is not None and known == instance and server.held == self.version:
            return
        server.held = None
        if transfer is None or known != instance:
            transfer = await asyncio.to_thread(self._create, server.url)
            self._transfers[server.url] = instance, transfer
        await asyncio.to_thread(transfer, self.model)
        server.held = self.version


async def _instance(server: Server) -> str:
    """vLLM draws an id each time that it starts."""
    try:
        return str((await server.get("/server_info?config_format=json"))["vllm_config"]["instance_id"])
    except (Refused, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{server.url} takes no weights: start it with VLLM_SERVER_DEV_MODE=1 vllm serve ... "
            """--weight-transfer-config '{"backend": "nccl"}', or train with lora=True"""
        ) from error


class TRLTransfer:
    """TRL's transfer of a GPU policy's weights to a vLLM server, over NCCL.

    It needs vLLM in this environment, too.

    Args:
        url: Of the server.
    """

    def __init__(self, url: str) -> None:
        try:
            import vllm  # noqa: F401
            from trl.experimental.async_grpo.vllm_client import VLLMClient
        except ImportError as error:
            raise MissingDependency(
                f"all weights are sent to {url} by vLLM's own transfer: run pip install vllm (as trl[vllm] wants it), or train "
                "with lora=True, which needs no vLLM here"
            ) from error
        self._server: Any = VLLMClient(url)
        self._client: Any = None

    def __call__(self, model: PreTrainedModel) -> None:
        from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

        if model.device.type != "cuda":
            raise ConfigurationError("all weights are sent from one GPU to others, and the policy is on the CPU: use lora=True")
        torch.cuda.set_device(model.device)  # each thread has its own
        if self._client is None:
            dtype = getattr(torch, self._server.get_dtype().removeprefix("torch."))
            named = list(_named(model, dtype))
            described = {
                "names": [name for name, _ in named],
                "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in named],
                "shapes": [list(weight.shape) for _, weight in named],
            }
            self._dtype, self._client = dtype, WeightTransferClient(self._server, described)
            self._client.init_weight_transfer()
        self._client.pause()
        try:
            self._client.send_weights(_named(model, self._dtype))
        finally:
            self._client.resume()


def _named(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by the names of the checkpoint's, in the server's dtype; activation checkpointing wraps layers."""
    for name, parameter in model.named_parameters():
        if name.startswith("value_head."):  # PPO's critic, which a server's model has not
            continue
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter.detach().to(dtype)


def create_sync(model: Any, folder: Path, create: CreateTransfer) -> WeightSync:
    """The way to bring this model's weights to servers: adapters if it has any."""
    if adapter_layers(model):
        return AdapterSync(model, folder)
    return TransferSync(model, create)
