"""An OpenAI-compatible server of chat/completions on this machine, with faults on demand.

As a program it prints its address and answers every prompt after a fixed time: `chat_server.py LATENCY_SECONDS FAULT_SHARE`.
"""

import asyncio
import json
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

FAULTS = ("429", "500", "reset", "slow", "truncated", "malformed", "null", "prose")
"""What can go wrong: refusals, a lost or slow connection, a body that ends early, is no JSON, or lacks its answer; and an
answer that is not in the form."""

SLOW_SECONDS, RETRY_AFTER = 3.0, 0.03


def door(messages: list[dict[str, Any]]) -> str:
    """A world of two steps: `open door`, then `go north`. What was asked and answered decides, nothing is kept."""
    texts = [message["content"] for message in messages if message["role"] == "user" and message["content"][0] == "{"]
    asked = json.loads(texts[-1])  # whatever was said since, of an answer that could not be read
    if "steps" in asked:
        return annotation(len(asked["steps"]))
    action = asked["action"]
    opened = any("It is open." in message["content"] for message in messages if message["role"] == "assistant")
    out = action == "go north" and opened
    known = out or action == "open door"
    return json.dumps(
        {
            "reasoning": "it follows",
            "valid": known,
            "reward": 0.5 if known else 0,
            "terminated": out,
            "success": out,
            "observation": "You are outside." if out else "It is open." if known else "What?",
        }
    )


def annotation(steps: int) -> str:
    """What `annotate` asks for."""
    plans = [{"step": number, "transition_plan": f"Because of {number}."} for number in range(1, steps + 1)]
    modes = {"overall_plan": "leave", "success_mode": "the door", "failure_mode": "none"}
    return json.dumps({**modes, "transition_plans": plans})


def shares(share: float, seed: int = 0, faults: tuple[str, ...] = FAULTS) -> Callable[[int], str]:
    """Each call fails with this probability, in one of these ways, as its number and the seed decide."""

    def fault(number: int) -> str:
        rng = random.Random(f"{seed}/{number}")
        return rng.choice(faults) if rng.random() < share else ""

    return fault


class ChatServer:
    """`ChatServer(reply).start()`; `requests` holds the bodies that came, `most` how many were under way at once."""

    def __init__(
        self,
        reply: Callable[[list[dict[str, Any]]], str] = door,
        *,
        fault: Callable[[int], str] = lambda number: "",
        latency: float = 0.0,
        usage: bool = True,
    ) -> None:
        self.reply, self.fault, self.latency, self.usage = reply, fault, latency, usage
        self.requests: list[dict[str, Any]] = []
        self.under_way = self.most = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def start(self) -> "ChatServer":
        self.thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024), self.loop)
        self.url = f"http://127.0.0.1:{server.result().sockets[0].getsockname()[1]}/v1"
        return self

    def stop(self) -> None:
        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:])}
                method, path, _ = head[0].split()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                if (other := self.route(method, path, raw)) is not None:
                    await self._send(writer, *other)
                    continue
                body = json.loads(raw)
                self.under_way += 1
                self.most = max(self.most, self.under_way)
                try:
                    if not await self._answer(body, headers, writer):
                        return
                finally:
                    self.under_way -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client is gone, or the test is over
        finally:
            writer.close()

    def route(self, method: str, path: str, raw: bytes) -> tuple[int, str] | None:
        """Status and text of what is no chat/completions."""
        return None

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, status: int, text: str) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text.encode())}\r\n\r\n"
        writer.write((head + text).encode())
        await writer.drain()

    async def _answer(self, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        self.requests.append(body)
        fault = self.fault(len(self.requests))
        await asyncio.sleep(SLOW_SECONDS if fault == "slow" else self.latency)
        if fault == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        status, text = self._body(body, headers, fault)
        content = text.encode()
        length = len(content) + (50 if fault == "truncated" else 0)
        extra = f"retry-after: {RETRY_AFTER}\r\n" if fault == "429" else ""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {length}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        return fault != "truncated"

    def _body(self, body: dict[str, Any], headers: dict[str, str], fault: str) -> tuple[int, str]:
        if fault in ("400", "401", "429", "500"):
            message = f"no, not with {headers['authorization']}"  # as some servers and proxies do
            return int(fault), json.dumps({"error": {"message": message, "type": "x", "code": None}})
        text = "Sure, it opens!" if fault == "prose" else self.reply(body["messages"])
        if fault == "echo":
            key = "observation" if "observation" in json.loads(text) else "overall_plan"
            text = json.dumps({**json.loads(text), key: f"You sent {headers['authorization']}."})
        found: dict[str, Any] = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        }
        if self.usage:
            found["usage"] = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        if fault == "null":
            found["choices"] = None
        return 200, "<html>" if fault == "malformed" else json.dumps(found)


if __name__ == "__main__":
    served = ChatServer(latency=float(sys.argv[1]), fault=shares(float(sys.argv[2]))).start()
    print(served.url, flush=True)
    served.thread.join()
