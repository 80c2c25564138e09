"""Prompts asked by OpenAI's Batch API: half the price, an answer within a day, and no call that a crash could lose."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableBinding

from dreamgym_lg.errors import ConfigurationError, MissingDependency, ModelUnavailable
from dreamgym_lg.experience.hosted import Chat, Hosted, Usage
from dreamgym_lg.redaction import redact, secrets

if TYPE_CHECKING:
    from langchain_openai.chat_models.base import BaseChatOpenAI
    from openai import OpenAI
    from openai.types import Batch

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_REQUESTS, MOST_BYTES = 50_000, 150_000_000
"""Of one batch. OpenAI takes 50,000 requests and 200 MB."""
PRICE = 0.5
"""What a token costs in a batch, as a share of its price."""
ATTEMPTS = 3
"""Batches in which one request is asked before it is given up."""
_ENDPOINT: Final = "/v1/chat/completions"
_OVER = ("completed", "failed", "expired", "cancelled")


class _Answer(NamedTuple):
    """One line of an output or error file."""

    text: str
    error: str
    """Why there is no text; "" if there is one."""
    again: bool
    """Whether another try may go better."""
    usage: Usage


async def ask_in_batch(
    model: Chat, requests: Mapping[str, Sequence[BaseMessage]], folder: Path, *, hosted: Hosted, poll_seconds: float = 30.0
) -> AsyncIterator[tuple[str, AIMessage | ModelUnavailable]]:
    """The answer to each request, under its key, in no particular order; or why there is none after `ATTEMPTS` batches.

    Resumable: files, batches and answers are noted in `folder`. A killed call asked again with the same requests goes on
    polling the batch that it submitted, never submits it twice, and takes what was answered from there. What failed, or was
    left over by a batch that expired, is asked again in another batch.

    Args:
        model: A `ChatOpenAI`, or one with a schema bound to it (`bind_schema`).
        folder: Of this work alone; made if missing. It holds the prompts and answers, and no key.
        hosted: Its budget: a request is a call, counted as it is submitted; tokens and cost (at `PRICE`) as it is answered.
        poll_seconds: Between two looks at a batch.

    Raises `BudgetExceeded` instead of a submission that would pass `max_calls`, or after the budget is spent, once what was
    submitted is yielded; `ModelUnavailable` for a batch that the server refused or somebody cancelled; `ConfigurationError` for
    a model of another provider.
    """
    chat, options = _openai_model(model)
    work = _Folder(chat, folder, hosted)
    bodies = {key: _body(chat, options, messages) for key, messages in requests.items()}
    waiting = {key: sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32] for key, body in bodies.items()}
    by_id = {id: bodies[key] for key, id in waiting.items()}
    while waiting:
        known = work.answers()
        for key, id in list(waiting.items()):
            found, tried = known.get(id, (None, 0))
            if found is None or (found.again and tried < ATTEMPTS):
                continue
            del waiting[key]
            yield (
                key,
                ModelUnavailable(f"no answer in {tried} batches: {found.error}") if found.error else AIMessage(found.text),
            )
        if open_batches := work.open_batches():
            for file in open_batches:
                await work.submit(file)
            for file in open_batches:
                await work.finish(file, poll_seconds)
        elif waiting:
            work.note({id: by_id[id] for id in dict.fromkeys(waiting.values())})


def _openai_model(model: Chat) -> tuple["BaseChatOpenAI", Mapping[str, Any]]:
    """The model and the arguments bound to it."""
    try:
        from langchain_openai.chat_models.base import BaseChatOpenAI
    except ImportError as error:
        raise MissingDependency.extra("langchain-openai", "openai") from error
    bound = model.bound if isinstance(model, RunnableBinding) else model
    if not isinstance(bound, BaseChatOpenAI):
        raise ConfigurationError(
            f"{type(bound).__name__} cannot be asked in batches, which are OpenAI's: give a ChatOpenAI, or batch=None"
        )
    return bound, model.kwargs if isinstance(model, RunnableBinding) else {}


def _body(model: "BaseChatOpenAI", options: Mapping[str, Any], messages: Sequence[BaseMessage]) -> dict[str, Any]:
    """The request as the model itself would send it, to the endpoint that gives one message."""
    chat = model.model_copy(update={"use_responses_api": False})
    given = {name: value for name, value in options.items() if not name.startswith("ls_")}  # for LangSmith alone
    return {name: value for name, value in chat._get_request_payload(list(messages), **given).items() if name != "stream"}


class _Folder:
    """Batches under way and their answers: `<name>.json` says what was submitted, `<name>.jsonl` holds what came back."""

    def __init__(self, model: "BaseChatOpenAI", path: Path, hosted: Hosted) -> None:
        self.client: OpenAI = model.root_client
        self.path, self.hosted, self.keys = path, hosted, secrets(model)
        path.mkdir(parents=True, exist_ok=True)

    def open_batches(self) -> list[Path]:
        return [file for file in sorted(self.path.glob("*.json")) if not file.with_suffix(".jsonl").exists()]

    def answers(self) -> dict[str, tuple[_Answer, int]]:
        """The newest answer of each request, and in how many batches it has been asked."""
        found: dict[str, tuple[_Answer, int]] = {}
        for file in sorted(self.path.glob("*.jsonl")):
            for line in file.read_text().splitlines():
                row = json.loads(line)
                found[row["custom_id"]] = _read(row), found.get(row["custom_id"], (None, 0))[1] + 1
        return found

    def note(self, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        """Note new batches of these requests, as many as the budget allows; raises `BudgetExceeded` if it allows none."""
        room = self.hosted.check_budget()
        chosen = list(bodies.items())[: room if room is not None else len(bodies)]
        number = len([*self.path.glob("*.json"), *self.path.glob("*.failed"), *self.path.glob("*.cancelled")])
        for position, lines in enumerate(_split(chosen)):
            _write(self.path / f"{number + position:06}.json", json.dumps({"requests": lines}))

    async def submit(self, file: Path) -> None:
        """Submit a noted batch, if it was not."""
        state = json.loads(file.read_text())
        if "file_id" not in state:
            content = "\n".join(state["requests"]).encode()
            made = await self._call(lambda: self.client.files.create(file=("requests.jsonl", content), purpose="batch"))
            state |= {"file_id": made.id, "uploaded": made.created_at}
            _write(file, json.dumps(state))
        if "batch_id" not in state:
            batch = await self._call(lambda: self._find_or_create(state["file_id"], state["uploaded"]))
            self.hosted.charge(f"submitted/{batch.id}", Usage(calls=len(state["requests"])))
            state |= {"batch_id": batch.id}
            _write(file, json.dumps(state))

    async def finish(self, file: Path, poll_seconds: float) -> None:
        """Wait for a submitted batch and keep its answers."""
        state = json.loads(file.read_text())
        while (batch := await self._call(lambda: self.client.batches.retrieve(state["batch_id"]))).status not in _OVER:
            await asyncio.sleep(poll_seconds)
        await self._keep(file, batch, [json.loads(line)["custom_id"] for line in state["requests"]])

    def _find_or_create(self, file_id: str, uploaded: int) -> "Batch":
        """The batch of an uploaded file. One is looked for first: a call may have been killed after the server had made it."""
        for batch in self.client.batches.list(limit=100):  # newest first
            if batch.input_file_id == file_id:
                return batch
            if batch.created_at < uploaded:
                break
        return self.client.batches.create(input_file_id=file_id, endpoint=_ENDPOINT, completion_window="24h")

    async def _keep(self, file: Path, batch: "Batch", ids: Sequence[str]) -> None:
        lines = list[str]()
        for part in filter(None, (batch.output_file_id, batch.error_file_id)):
            text = (await self._call(partial(self.client.files.content, part))).text
            lines += [redact(line, self.keys) for line in text.splitlines() if line.strip()]
        if batch.status in ("failed", "cancelled") and not lines:
            file.rename(file.with_suffix(f".{batch.status}"))  # asked again, it is another batch
            causes = "; ".join(str(each.message) for each in batch.errors.data or ()) if batch.errors else "no cause is given"
            raise ModelUnavailable(redact(f"batch {batch.id} is {batch.status}: {causes}", self.keys)[:500])
        if batch.status != "completed":
            logger.warning("batch %s is %s before all of its %d requests were answered", batch.id, batch.status, len(ids))
        told = {json.loads(line)["custom_id"] for line in lines}
        unanswered = {"code": "unanswered", "message": f"the batch is {batch.status}"}
        lines += [json.dumps({"custom_id": id, "error": unanswered}) for id in ids if id not in told]
        used = Usage()
        for line in lines:
            used = used.plus(_read(json.loads(line)).usage)
        given, got = self.hosted.prices
        cost = PRICE * (used.input_tokens * given + used.output_tokens * got) / 1e6
        self.hosted.charge(f"answered/{batch.id}", used._replace(cost=cost))
        _write(file.with_suffix(".jsonl"), "\n".join(lines))

    async def _call(self, call: Callable[[], T]) -> T:
        return await self.hosted.retried(lambda: asyncio.to_thread(call), self.keys)


def _split(requests: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[list[str]]:
    """Lines of one request file after the other, each within the limits of a batch."""
    lines, size = list[str](), 0
    for id, body in requests:
        line = json.dumps({"custom_id": id, "method": "POST", "url": _ENDPOINT, "body": body})
        if lines and (len(lines) == MOST_REQUESTS or size + len(line) > MOST_BYTES):
            yield lines
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1  # json.dumps writes ASCII
    yield lines


def _read(row: Mapping[str, Any]) -> _Answer:
    response = row.get("response") or {}
    body, status = response.get("body") or {}, response.get("status_code", 0)
    counted = body.get("usage") or {}
    usage = Usage(input_tokens=counted.get("prompt_tokens", 0), output_tokens=counted.get("completion_tokens", 0))
    choices = body.get("choices") or [{}]
    text = (choices[0].get("message") or {}).get("content")
    if status == 200 and isinstance(text, str):
        return _Answer(text, "", False, usage)
    error = row.get("error") or body.get("error") or {"message": f"status {status}, and no text"}
    refused = 400 <= status < 500 and status not in (408, 409, 425, 429)
    return _Answer("", f"{error.get('message')}"[:500], not refused, usage._replace(failed=1))


def _write(file: Path, text: str) -> None:
    """A file that is either whole or as it was."""
    draft = file.with_name(f"{file.name}.tmp")
    draft.write_text(text)
    draft.replace(file)
