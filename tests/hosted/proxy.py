"""A proxy in front of a real OpenAI-compatible server, in which calls go wrong on demand."""

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from chat_server import RETRY_AFTER, ChatServer

PROXY_FAULTS = ("429", "500", "reset", "slow", "truncated", "malformed")
"""The proxy refuses the first two itself; the others befall an answer for which the server has worked."""


class FaultProxy(ChatServer):
    """`FaultProxy(upstream_url, fault=...).start()`; `struck` counts what befell the calls, "" for nothing."""

    def __init__(self, upstream: str, *, fault: Callable[[int], str] = lambda number: "", slow: float = 8.0) -> None:
        super().__init__(fault=fault)
        self.upstream, self.slow = upstream, slow
        self.struck: Counter[str] = Counter()

    async def _answer(self, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        self.requests.append(body)
        fault = self.fault(len(self.requests))
        self.struck[fault] += 1
        if fault in ("429", "500"):
            status, content = int(fault), json.dumps({"error": {"message": "not now"}}).encode()
        else:
            status, content = await self._forward(body)
        if fault == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        if fault == "slow":
            await asyncio.sleep(self.slow)
        if fault == "malformed":
            content = content[:-1] + b",,"
        sent = content[: len(content) // 2] if fault == "truncated" else content
        extra = f"retry-after: {RETRY_AFTER}\r\n" if fault == "429" else ""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + sent)
        await writer.drain()
        return fault != "truncated"

    async def _forward(self, body: dict[str, Any]) -> tuple[int, bytes]:
        async with httpx.AsyncClient(timeout=120) as client:
            answer = await client.post(f"{self.upstream}/chat/completions", json=body)
        return answer.status_code, answer.content
