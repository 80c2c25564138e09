"""`TinkerChatModel`: a policy whose weights are on Tinker, sampled there from token ids.

Conversations are rendered and encoded here, as of any `LocalChatModel`. Written against the package `tinker` 0.38.0.
"""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError, MissingDependency, ModelUnavailable, ServersUnavailable
from dreamgym_lg.event_loop import lasting_loop
from dreamgym_lg.files import whole_folder
from dreamgym_lg.hosted import TINKER, TINKER_FILE
from dreamgym_lg.integrations.transformers.adapter_files import write_beside_weights
from dreamgym_lg.integrations.transformers.batch import end_tokens
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.loading import load_tokenizer
from dreamgym_lg.integrations.transformers.prefix_cache import PrefixCache
from dreamgym_lg.integrations.transformers.requests import Generated, Request

try:
    import tinker
except ImportError as error:
    raise MissingDependency.extra("tinker", "tinker") from error

_service: list[Any] = []
"""The `tinker.ServiceClient` of this process, once there is one."""


@contextmanager
def tinker_errors(what: str) -> Iterator[None]:
    """Raise `ModelUnavailable` for a request that Tinker refuses, `ServersUnavailable` for any other error of it."""
    try:
        yield
    except (tinker.BadRequestError, tinker.UnprocessableEntityError) as error:
        raise ModelUnavailable(f"Tinker refused to {what}: {error}") from error
    except tinker.TinkerError as error:
        text = f"Tinker did not {what} ({type(error).__name__}: {error}): mend that, and the same call goes on"
        raise ServersUnavailable(text) from error


class Weights(NamedTuple):
    """Where a policy's weights are."""

    base_model: str
    state: str | None = None
    """Path on Tinker of adapters and optimiser. None: not trained yet."""
    sampler: str | None = None
    """Path on Tinker of the same adapters, to sample from."""


class TinkerEngine:
    """Generates replies on Tinker, whose client tries again what failed. Thread-safe. A learner sets `weights`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, weights: Weights) -> None:
        self.weights, self.service, self.ends = weights, _service[0], end_tokens(tokenizer, None)
        self._tokenizer, self._prefixes, self._client = tokenizer, PrefixCache(), None

    def submit(self, request: Request) -> "Future[Generated]":
        """Request a reply; returns at once. Its exceptions: as of `tinker_errors`."""
        return asyncio.run_coroutine_threadsafe(self._reply(request), lasting_loop("dreamgym-tinker"))

    def clear(self) -> None:
        """Sample from `weights` as they are now."""
        self._client = None

    async def _reply(self, request: Request) -> Generated:
        version = self.weights.sampler or self.weights.base_model
        prompt, ids, _ = self._prefixes.encode(self._tokenizer, request, 1 << 30)
        seed = None if request.seed is None else request.seed % 2**31
        options: dict[str, Any] = {"max_tokens": request.max_new_tokens, "temperature": request.temperature, "seed": seed}
        params = tinker.SamplingParams(**options, stop=sorted(self.ends))
        with tinker_errors("sample"):
            client = await asyncio.wrap_future(self._sampling_client().future())
            reply = await asyncio.wrap_future(client.sample(tinker.ModelInput.from_ints(ids), 1, params).future())
        (sequence,) = reply.sequences
        sampled, logprobs = list(sequence.tokens), list(sequence.logprobs or ())
        if not sampled or len(sampled) != len(logprobs):
            raise ModelUnavailable(f"Tinker sampled {len(sampled)} tokens with {len(logprobs)} log-probabilities")
        generated = Generated("", ids, sampled, logprobs, sequence.stop_reason, version)
        return self._prefixes.keep_reply(self._tokenizer, request, prompt, generated, self.ends)

    def _sampling_client(self) -> Any:
        """The future of the client that samples from `weights`."""
        client, path = self._client, self.weights.sampler
        if client is None or (client.future().done() and client.future().exception() is not None):
            where = {"base_model": self.weights.base_model} if path is None else {"model_path": path}
            client = self._client = self.service.create_sampling_client(**where)
        return client


class TinkerChatModel(LocalChatModel):
    """A policy on Tinker. `learner="tinker"` trains it; everything else treats it as a local one."""

    @classmethod
    def from_path(cls, path: str | Path, *, service: Any = None, **fields: Any) -> "TinkerChatModel":
        """The policy of a name or folder. Nothing is loaded here but the tokenizer.

        Args:
            path: `tinker:` with a base model's name, e.g. `tinker:Qwen/Qwen3-8B`, or a folder that `save` wrote.
            service: A `tinker.ServiceClient` for this process. Default: one by TINKER_API_KEY.
            fields: Of `LocalChatModel`.
        """
        with tinker_errors("connect"):
            if service is not None or not _service:
                _service[:] = [service or tinker.ServiceClient()]
            if (name := str(path)).startswith(TINKER):
                weights = Weights(name.removeprefix(TINKER))
                tokenizer = _service[0].create_sampling_client(base_model=weights.base_model).result().get_tokenizer()
            else:
                weights, tokenizer = Weights(**json.loads((Path(path) / TINKER_FILE).read_text())), load_tokenizer(path)
        return cls(engine=TinkerEngine(tokenizer, weights), tokenizer=tokenizer, **{"name_or_path": name, **fields})

    def save(self, folder: Path) -> None:
        if not isinstance(self.engine, TinkerEngine):
            raise ConfigurationError("a policy on Tinker is sampled there: leave servers= and engine= away")
        with whole_folder(folder) as draft:
            (draft / TINKER_FILE).write_text(json.dumps(self.engine.weights._asdict(), indent=2) + "\n")
            write_beside_weights(draft, self.tokenizer, self.sampling)
