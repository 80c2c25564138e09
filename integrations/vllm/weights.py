"""A trained policy's weights for vLLM servers: LoRA adapters by name."""

import contextlib
import hashlib
import shutil
from pathlib import Path
from uuid import uuid4

from transformers import PreTrainedModel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.adapter_files import adapter_layers, write_adapters
from dreamgym_lg.integrations.vllm.server import Refused, Server, Unanswered


class AdapterSync:
    """LoRA adapters, loaded by servers under a name made of their contents.

    Args:
        model: With adapters in its layers, as a learner puts them there.
        folder: Where the servers read them: for servers on other machines, on a shared file system.

    Raises `ConfigurationError` for a model without adapters.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        if not adapter_layers(model):
            raise ConfigurationError("servers take the LoRA adapters of a policy in training, and this one has none: lora=True")
        self.model, self.folder = model, folder.absolute()
        self.version = ""
        """Names the weights. "" before the first `publish`."""
        self._folders: list[Path] = []

    def publish(self) -> None:
        """Write a new version of the weights, which have changed."""
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
        self._folders = [each for each in self._folders if each != path] + [path]  # an earlier version may come again
        if len(self._folders) > 2:  # vLLM reads an adapter when it first uses it, and dies if it is not there
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)

    async def confirm(self, server: Server) -> None:
        """Have the server hold the version, which is sent if it does not. Raises `Refused` or `Unanswered`."""
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
