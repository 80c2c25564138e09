"""The same server with OpenAI's Batch API: files, batches, output and error files."""

import json
from collections.abc import Callable
from typing import Any

from chat_server import ChatServer


class BatchServer(ChatServer):
    """`fate(number)` decides how a batch ends: `completed`, `expired` after half of its requests, `failed` or `cancelled`.

    `fault(number)` decides of each request, as of a chat: `500` and `400` are answered in the error file, `prose` and `echo`
    in the output file. `lost` names a path and how many of its next calls are carried out but answered with 500.
    """

    def __init__(
        self, *args: Any, fate: Callable[[int], str] = lambda number: "completed", polls: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.fate, self.polls = fate, polls
        self.files: dict[str, str] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.lost = {"": 0}
        self.calls: list[str] = []

    def route(self, method: str, path: str, raw: bytes) -> tuple[int, str] | None:
        path = path.partition("?")[0]
        self.calls.append(f"{method} {path}")
        found = self._route(method, path.removeprefix("/v1/").split("/"), raw)
        if found is not None and self.lost.get(f"{method} {path}", 0):
            self.lost[f"{method} {path}"] -= 1
            return 500, json.dumps({"error": {"message": "lost"}})
        return found

    def _route(self, method: str, path: list[str], raw: bytes) -> tuple[int, str] | None:
        match method, path:
            case "POST", ["files"]:
                content = next(part for part in raw.split(b"\r\n--") if b"filename=" in part).partition(b"\r\n\r\n")[2]
                return 200, json.dumps(self._file(content.decode()))
            case "GET", ["files", id, "content"]:
                return 200, self.files[id]
            case "POST", ["batches"]:
                return 200, json.dumps(self._batch(json.loads(raw)))
            case "GET", ["batches"]:
                return 200, json.dumps({"object": "list", "data": [*reversed(self.batches.values())], "has_more": False})
            case "GET", ["batches", id]:
                return 200, json.dumps(self._polled(self.batches[id]))
        return None

    def _file(self, content: str) -> dict[str, Any]:
        id = f"file-{len(self.files)}"
        self.files[id] = content
        return {"id": id, "object": "file", "bytes": len(content), "created_at": 1, "filename": "x", "purpose": "batch",
                "status": "processed"}  # fmt: skip

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        id = f"batch-{len(self.batches)}"
        self.batches[id] = {"id": id, "object": "batch", "created_at": 1, "status": "validating", "polls": self.polls, **asked}
        return self.batches[id]

    def _polled(self, batch: dict[str, Any]) -> dict[str, Any]:
        if batch["status"] in ("validating", "in_progress"):
            batch["polls"] -= 1
            batch["status"] = "in_progress"
            if batch["polls"] <= 0:
                self._end(batch)
        return batch

    def _end(self, batch: dict[str, Any]) -> None:
        batch["status"] = fate = self.fate(len(self.batches))
        if fate == "failed":
            batch["errors"] = {"object": "list", "data": [{"code": "x", "message": "no such model, sk-canary-9f8e7d6c5b4a"}]}
        if fate in ("failed", "cancelled"):
            return
        lines = [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines()]
        good, bad = list[str](), list[str]()
        for position, line in enumerate(lines):
            if fate == "expired" and position >= len(lines) / 2:
                error = {"code": "batch_expired", "message": "This request could not be executed in time."}
                bad.append(json.dumps({"custom_id": line["custom_id"], "response": None, "error": error}))
                continue
            self.requests.append(line["body"])
            fault = self.fault(len(self.requests))
            status, text = self._body(line["body"], {"authorization": "Bearer sk-canary-9f8e7d6c5b4a"}, fault)
            response = {"status_code": status, "request_id": "r", "body": json.loads(text)}
            row = json.dumps({"id": "x", "custom_id": line["custom_id"], "response": response, "error": None})
            (good if status == 200 else bad).append(row)
        batch["output_file_id"] = self._file("\n".join(good))["id"] if good else None
        batch["error_file_id"] = self._file("\n".join(bad))["id"] if bad else None
