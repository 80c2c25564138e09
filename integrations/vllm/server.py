"""A vLLM server as its client sees it: its models, its weights, its restarts."""

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
from pydantic_core import from_json, to_json

from dreamgym_lg.errors import ConfigurationError

RESTART_SECONDS = 2.0
"""No server restarts faster: one that answered since then has not restarted."""

AVOIDED_SECONDS = 5.0
"""Seconds for which other servers are preferred to one that has failed."""

KEEPALIVE_SECONDS = 4.0
"""Seconds after which an idle connection is closed; vLLM closes it after 5."""

_QUICK = aiohttp.ClientTimeout(total=30.0, sock_connect=10.0)
"""Timeout of requests about the server itself."""

_TRANSIENT = (408, 409, 425, 429)


class Unanswered(Exception):
    """No usable answer from a server, which another try may bring."""


class Refused(Exception):
    """A server refused the request itself: the same one would be refused again."""

    def __init__(self, url: str, status: int, text: str) -> None:
        super().__init__(f"{url} answered {status}: {text[:500]}")
        self.status, self.text = status, text


async def create_session(api_key: str | None, timeout: float) -> aiohttp.ClientSession:
    """The connections to all servers, for the event loop that it runs in."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 10.0)),
    )


class Server:
    """One server. It is used in one event loop alone.

    Args:
        url: Its address, `/v1` at the end or not.
        model: The name under which it serves the policy's model; None: the only one it has.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigurationError(f"server {url!r} is no address; give e.g. 'http://localhost:8000'")
        self.requested, self.model, self.max_tokens = model, model or "", 0
        self.adapters: set[str] = set()
        """Names of the LoRA adapters that it lists."""
        self.under_way = 0
        """Calls for replies, from its choice on."""
        self.avoided_until = 0.0
        self.answered = -math.inf
        """Time of its last answer, by `time.monotonic`."""
        self.doubted = True
        """True once a call has failed since the last `describe`."""
        self.held: str | None = None
        """The version of the policy's weights that it was last known to have."""
        self.checked = False
        """True once its log-probabilities have been compared with the policy's."""
        self.lock = asyncio.Lock()
        self.session: aiohttp.ClientSession

    def is_confirmed(self, version: str) -> bool:
        """True if it surely has these weights: it had them and cannot have restarted since."""
        fresh = time.monotonic() - self.answered < RESTART_SECONDS
        return self.checked and not self.doubted and self.held == version and fresh

    async def get(self, path: str) -> Any:
        return await self._ask(self.session.get(self.url + path, timeout=_QUICK))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        return await self._ask(self.session.post(self.url + path, data=to_json(body), headers=headers))

    async def describe(self) -> None:
        """Read the list of its models. Raises `ConfigurationError` if the policy's is not there."""
        self.doubted = False
        listed = await self.get("/v1/models")
        cards = listed.get("data", ()) if isinstance(listed, dict) else ()
        base = {card["id"]: card for card in cards if not card.get("parent")}
        if not base:
            raise ConfigurationError(f"{self.url} lists no model at /v1/models: is it a vLLM server?")
        self.adapters = {card["id"] for card in cards if card.get("parent")}
        if self.requested is not None and self.requested not in base:
            raise ConfigurationError.unknown(f"model of {self.url}", self.requested, base)
        self.model = self.requested or next(iter(base))  # further ones are other names of the same
        self.max_tokens = base[self.model].get("max_model_len") or 1 << 30

    async def _ask(self, request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Any:
        """The answer, JSON or text. Raises `Unanswered` or `Refused`."""
        try:
            async with request as response:
                raw = await response.read()
            if response.status >= 500 or response.status in _TRANSIENT:
                raise Unanswered(f"{self.url} answered {response.status}: {raw[:300].decode(errors='replace')}")
            if response.status >= 400:
                raise Refused(self.url, response.status, raw.decode(errors="replace"))
            answer = from_json(raw) if "json" in response.headers.get("content-type", "") else raw.decode()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._avoid()
            raise Unanswered(f"{self.url} did not answer ({type(error).__name__}: {error})") from error
        except Unanswered:
            self._avoid()
            raise
        self.answered = time.monotonic()
        return answer

    def _avoid(self) -> None:
        self.avoided_until, self.doubted = time.monotonic() + AVOIDED_SECONDS, True
