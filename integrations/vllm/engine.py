"""`ServedEngine`: replies of a local policy from vLLM servers, as token ids and log-probabilities.

The conversation is rendered and encoded here as `LocalEngine` does, earlier replies as the tokens that were sampled, and sent
to `/v1/completions`. After each update the servers get the new weights, before anything is sampled from them.
"""

import asyncio
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import aiohttp
import torch
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError, ModelUnavailable, ServersUnavailable
from dreamgym_lg.event_loop import lasting_loop, wait_in_loop
from dreamgym_lg.integrations.transformers.batch import end_tokens
from dreamgym_lg.integrations.transformers.prefix_cache import TOKENS_ONLY, PrefixCache, check_length
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.integrations.vllm.server import Refused, Server, Unanswered, create_session
from dreamgym_lg.integrations.vllm.weights import AdapterSync

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOP = "dreamgym-served"
"""Name of the event loop of all engines."""

BACKOFF = (0.5, 30.0)
"""First and longest upper bound of the random wait between two tries, in seconds."""

MAX_LOGPROB_GAP = 0.1
"""Largest mean difference to the policy's log-probabilities, in nats; in bfloat16 it is some 0.002."""

_PROBE = Request([{"role": "user", "content": "Tell me something."}], temperature=0.5, max_new_tokens=16, seed=0)

_WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling options that a model's generation settings would otherwise set, cutting the distribution."""


class ServedEngine:
    """Generates a policy's replies on vLLM servers. Thread-safe.

    ```python
    LocalChatModel(model=model, tokenizer=tokenizer, engine=ServedEngine("http://localhost:8000", tokenizer, model=model))
    ```
    A call goes to the server with the fewest calls under way, those of an episode to the same one, which has its keys and
    values. What may succeed at another try (429, 500, a lost connection) is tried again, if it can be on another server. A
    reply is not streamed: its text comes in one piece.

    The servers compute log-probabilities as training does only with `vllm serve ... --logprobs-mode processed_logprobs`; a
    short reply of each is compared with `model` before the first call.

    Args:
        servers: Addresses; each serves the same model.
        tokenizer: The policy's.
        model: The policy's, whose LoRA adapters a learner changes: `clear` brings them to the servers. None: a policy that is
            not trained.
        name: Under which the servers serve the model. Default: the only one they have.
        adapters: Folder for LoRA adapters, which the servers read.
        api_key: Key that the servers ask for.
        timeout: Seconds after which a call is given up and tried again.
        attempts: Tries of one call.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: PreTrainedModel | None = None,
        name: str | None = None,
        adapters: str | Path = "adapters",
        api_key: str | None = None,
        timeout: float = 600.0,
        attempts: int = 6,
    ) -> None:
        addresses = [servers] if isinstance(servers, str) else list(servers)
        if not addresses or attempts < 1:
            raise ConfigurationError(
                f"servers={servers!r}, attempts={attempts}: give one server or more, and one attempt or more"
            )
        self.servers = [Server(address, name) for address in addresses]
        self.ends = end_tokens(tokenizer, model)
        self._tokenizer, self._model, self._attempts = tokenizer, model, attempts
        self._adapters = Path(adapters)
        config = model.config.get_text_config() if model is not None else None
        self._max_tokens = getattr(config, "max_position_embeddings", 1 << 30)
        self._sync: AdapterSync | None = None
        self._prefixes = PrefixCache()
        self._chosen: OrderedDict[int, Server] = OrderedDict()
        self._loop = lasting_loop(_LOOP)
        session = wait_in_loop(_LOOP, create_session(api_key, timeout))
        for server in self.servers:
            server.session = session
        weakref.finalize(self, _close, session, self._loop)

    @property
    def policy_version(self) -> str:
        """Name of the weights that replies are sampled from. "" for those that the servers have loaded themselves."""
        return self._sync.version if self._sync is not None else ""

    def submit(self, request: Request) -> "Future[Generated]":
        """Request a reply; returns at once.

        Its exceptions: `ServersUnavailable` if no server answers, `ModelUnavailable` if they answer others alone,
        `ConfigurationError` for servers of another model or without token ids, `ContextExceeded`.
        """
        return asyncio.run_coroutine_threadsafe(self._reply(request), self._loop)

    def clear(self) -> None:
        """Bring the model's present weights to the servers. Raises as `submit`, if none of them can have them."""
        if self._model is None:
            return
        self._sync = self._sync or AdapterSync(self._model, self._adapters)
        self._sync.publish()
        wait_in_loop(_LOOP, self._confirm_all())

    # --- in the loop's thread: nothing below needs a lock -------------------------------------------------------------------

    async def _confirm_all(self) -> None:
        confirmed = await asyncio.gather(
            *(self._retried(self._confirm, server) for server in self.servers), return_exceptions=True
        )
        failed = [each for each in confirmed if isinstance(each, BaseException)]
        wrong = [each for each in failed if not isinstance(each, ServersUnavailable)]
        if wrong or len(failed) == len(self.servers):
            raise (wrong or failed)[0]
        for error in failed:
            logger.warning("the others play without it: %s", error)

    async def _confirm(self, server: Server) -> None:
        """Make sure that the server has the present weights. Raises `Unanswered`, or `ConfigurationError` if it never will."""
        version = self.policy_version
        if server.is_confirmed(version):
            return
        async with server.lock:
            if server.is_confirmed(version):
                return
            try:
                await server.describe()
                if self._sync is not None:
                    await self._sync.confirm(server)
                else:
                    server.held = version
            except Refused as refused:
                raise ConfigurationError(f"{refused}: is it a vLLM server, and api_key= the right one?") from refused
            if not server.checked:
                await self._check(server)
                server.checked = True

    async def _check(self, server: Server) -> None:
        """Raise `ConfigurationError` if the server's log-probabilities are not those that training computes."""
        if self._model is None:
            return
        _, ids, _ = PrefixCache().encode(self._tokenizer, _PROBE, 1 << 30)
        reply = _to_generated(server, ids, await self._complete(server, _PROBE, ids))
        gaps = {}
        for temperature in (_PROBE.temperature, 1.0):
            computed = await asyncio.to_thread(_log_probs, self._model, ids, reply.sampled_ids, temperature)
            gaps[temperature] = fmean(abs(a - b) for a, b in zip(computed, reply.logprobs, strict=True))
        gap = gaps.pop(_PROBE.temperature)
        if gap <= MAX_LOGPROB_GAP:
            return
        if gaps[1.0] <= MAX_LOGPROB_GAP:
            raise ConfigurationError(
                f"{server.url} gives log-probabilities before temperature, and training needs those that were sampled from: "
                "start it with --logprobs-mode processed_logprobs"
            )
        raise ConfigurationError(
            f"{server.url} has other weights than the policy: the log-probabilities of a reply of {self._model_name(server)!r} "
            f"differ by {gap:.2f} nats a token: serve the model that the policy is loaded from"
        )

    async def _reply(self, request: Request) -> Generated:
        prompt, ids, prefix = self._prefixes.encode(self._tokenizer, request, self._max_tokens)
        generated = await self._retried(self._sample, request, ids, not prefix.ids)
        return self._prefixes.keep_reply(self._tokenizer, request, prompt, generated, self.ends)

    async def _sample(self, request: Request, ids: list[int], begins: bool) -> Generated:
        """The tokens of a reply, without its text."""
        server = self._choose(request.owner, begins)
        server.under_way += 1
        try:
            await self._confirm(server)
            check_length(request, ids, server.max_tokens)
            version = self._model_name(server)
            return _to_generated(server, ids, await self._complete(server, request, ids), version)
        except Refused as refused:
            if refused.status == 404:  # it has lost the adapter, or the model: `_confirm` finds out which
                server.held = None
                raise Unanswered(str(refused)) from refused
            raise ConfigurationError(str(refused)) from refused
        finally:
            server.under_way -= 1

    def _choose(self, owner: int | None, begins: bool) -> Server:
        """The server with the episode's keys and values, else the least busy. None that just failed."""
        now = time.monotonic()
        before = self._chosen.pop(owner, None) if owner is not None else None
        if before is None or begins or before.avoided_until > now:
            before = min(self.servers, key=lambda server: (server.avoided_until > now, server.under_way))
        if owner is not None:
            self._chosen[owner] = before
            if len(self._chosen) > TOKENS_ONLY:
                self._chosen.popitem(last=False)
        return before

    def _model_name(self, server: Server) -> str:
        """The model to request of the server. The newest adapters, or the one that it has loaded itself."""
        return self.policy_version or server.model

    async def _complete(self, server: Server, request: Request, ids: list[int]) -> Any:
        body: dict[str, Any] = {
            "model": self._model_name(server),
            "prompt": ids,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            **_WHOLE_DISTRIBUTION,
            "seed": request.seed,
            "stop": list(request.stop),
            "stop_token_ids": sorted(self.ends),
            "skip_special_tokens": request.skipped_ids is None,
            "logprobs": 0,
            "return_token_ids": True,
        }
        return await server.post("/v1/completions", body)

    async def _retried(self, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """The result of a call, tried again where another try may succeed."""
        begun = time.monotonic()
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=BACKOFF[0], max=BACKOFF[1]),
            retry=retry_if_exception_type(Unanswered),
            reraise=True,
        )

        try:
            return await retrying(call, *arguments)
        except Unanswered as error:
            text = f"no reply in {self._attempts} attempts, the last: {error}"
            if any(server.answered > begun for server in self.servers):
                raise ModelUnavailable(f"{text}. Other calls were answered meanwhile") from error
            raise ServersUnavailable(
                f"{text}. Start the servers ({', '.join(server.url for server in self.servers)}) and run the same command "
                "again: it goes on where it was"
            ) from error


def _close(session: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop) -> None:
    asyncio.run_coroutine_threadsafe(session.close(), loop)


def _to_generated(server: Server, ids: list[int], answer: Any, version: str = "") -> Generated:
    """The reply without its text. Raises `ConfigurationError` for an answer without tokens and log-probabilities."""
    try:
        choice = answer["choices"][0]
        sampled, prompt, reason = choice.get("token_ids"), choice.get("prompt_token_ids"), choice["finish_reason"]
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Unanswered(f"{server.url} answered what cannot be read: {str(answer)[:300]}") from error
    if reason not in ("stop", "length"):  # "abort": it is about to end
        raise Unanswered(f"{server.url} ended a reply early ({reason})")
    if not sampled or logprobs is None or len(sampled) != len(logprobs):
        raise ConfigurationError(
            f"{server.url} returns no token ids with their log-probabilities: it has to be vLLM 0.10.2 or later"
        )
    if prompt is not None and prompt != ids:
        raise ConfigurationError(f"{server.url} read other tokens than it was sent, so that a reply cannot be trained on")
    return Generated("", ids, sampled, logprobs, reason, version)


@torch.no_grad()
def _log_probs(model: PreTrainedModel, ids: list[int], sampled: list[int], temperature: float) -> list[float]:
    """Log-probabilities of the tokens sampled after `ids`, as training computes them."""
    training = model.training
    model.eval()
    try:
        tokens = torch.tensor([ids + sampled], device=model.device)
        logits = model(input_ids=tokens).logits[0, len(ids) - 1 : -1].float() / temperature
    finally:
        model.train(training)
    chosen = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, len(ids) :, None])
    return [float(each) for each in chosen[:, 0]]
