"""A server on this machine that answers as vLLM does, with a small model behind it and faults on demand."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import uvicorn
from peft import PeftModel
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers.batch import Row
from dreamgym_lg.integrations.transformers.engine import LocalEngine
from dreamgym_lg.integrations.transformers.prefix_cache import Prefix
from dreamgym_lg.integrations.transformers.requests import Generated, Request

SLOW_SECONDS = 2.0


@dataclass(slots=True)
class IdsRequest(Request):
    ids: list[int] = field(default_factory=list)


class IdsEngine(LocalEngine):
    """Reads token ids; samples as `LocalEngine` does, so that a seed gives the same tokens."""

    def _row(self, request: Request, future: Any) -> Row:
        assert isinstance(request, IdsRequest)
        random = Random(request.seed) if request.temperature > 0 else None
        return Row(request, future, "", request.ids, Prefix(), random)


class VLLMServer:
    """`VLLMServer(model, tokenizer).start()`.

    Args:
        fault: What goes wrong with completion number n: `429`, `500`, `slow`, `cut`, `abort`, or "".
        processed: Whether log-probabilities are after temperature, as with `--logprobs-mode processed_logprobs`.
        token_ids: Whether it knows `return_token_ids`.
        lora: Whether adapters can be loaded.
        max_rank: Of adapters; beyond it vLLM's engine fails, and its server answers 500.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerFast,
        *,
        name: str = "tiny",
        fault: Callable[[int], str] = lambda number: "",
        processed: bool = True,
        token_ids: bool = True,
        lora: bool = True,
        max_rank: int = 16,
        max_model_len: int = 512,
        key: str = "",
    ) -> None:
        self.started_with, self.tokenizer, self.name = deepcopy(model), tokenizer, name
        self.fault, self.processed, self.token_ids, self.lora, self.key = fault, processed, token_ids, lora, key
        self.max_model_len, self.max_rank = max_model_len, max_rank
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.refused = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "VLLMServer":
        """Begin with the weights of the first start, without adapters."""
        self.model = deepcopy(self.started_with)
        self.engines = {self.name: IdsEngine(self.model, self.tokenizer)}
        self.socket = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = self.socket.getsockname()[1]
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        if self.lora:
            routes += [
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
            ]
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        return self

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()
        self.socket.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    async def _models(self, request: HTTPRequest) -> Response:
        self.paths.append(request.url.path)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        base = {"id": self.name, "object": "model", "root": self.name, "parent": None, "max_model_len": self.max_model_len}
        loaded = [{"id": name, "object": "model", "parent": self.name} for name in self.engines if name != self.name]
        return JSONResponse({"object": "list", "data": [base, *loaded]})

    async def _load(self, request: HTTPRequest) -> Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.engines:
            return _error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not path.is_dir():
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > self.max_rank:
            self.refused += 1
            return _error(500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}.", "InternalServerError")
        self.engines[name] = IdsEngine(PeftModel.from_pretrained(deepcopy(self.model), path), self.tokenizer)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: HTTPRequest) -> Response:
        name = (await request.json())["lora_name"]
        if self.engines.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _completions(self, request: HTTPRequest) -> Response:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        match self.fault(number):
            case "429":
                return _error(429, "Too many requests", "RateLimitError")
            case "500":
                return _error(500, "EngineCore encountered an issue.", "InternalServerError")
            case "cut":
                return Response(b'{"choices": [', headers={"content-length": "5000", "content-type": "application/json"})
            case "slow":
                await asyncio.sleep(SLOW_SECONDS)
            case "abort":
                return JSONResponse({"choices": [{"token_ids": [], "finish_reason": "abort"}]})
        if (engine := self.engines.get(body["model"])) is None:
            return _error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if len(body["prompt"]) + body["max_tokens"] > self.max_model_len:
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens.", "BadRequestError")
        asked = IdsRequest(
            (),
            temperature=body["temperature"],
            max_new_tokens=body["max_tokens"],
            seed=body["seed"],
            stop=tuple(body["stop"]),
            skipped_ids=None if body["skip_special_tokens"] else frozenset(),
            ids=body["prompt"],
        )
        said = await asyncio.wrap_future(engine.submit(asked))
        return JSONResponse(self._answer(body, said, engine))

    def _answer(self, body: dict[str, Any], said: Generated, engine: IdsEngine) -> dict[str, Any]:
        logprobs = said.logprobs if self.processed else _at_one(engine._decoder.model, said)
        tokens = [self.tokenizer.decode([token]) for token in said.sampled_ids]
        choice: dict[str, Any] = {
            "index": 0,
            "text": said.text,
            "logprobs": {"tokens": tokens, "token_logprobs": logprobs},
            "finish_reason": said.finish_reason,
        }
        if self.token_ids and body.get("return_token_ids"):
            choice |= {"token_ids": said.sampled_ids, "prompt_token_ids": said.prompt_ids}
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}


def _error(status: int, message: str, kind: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


@torch.no_grad()
def _at_one(model: Any, said: Generated) -> list[float]:
    tokens = torch.tensor([said.prompt_ids + said.sampled_ids])
    logits = model(input_ids=tokens).logits[0, len(said.prompt_ids) - 1 : -1].float()
    return list(torch.log_softmax(logits, -1).gather(1, torch.tensor(said.sampled_ids)[:, None])[:, 0].tolist())


@contextlib.contextmanager
def serving(*servers: VLLMServer) -> Any:
    for server in servers:
        server.start()
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
