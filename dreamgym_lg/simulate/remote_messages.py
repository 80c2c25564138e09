"""Validates messages of a worker that plays an episode, and recreates errors from them."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from dreamgym_lg import errors
from dreamgym_lg.errors import DreamGymError, EnvironmentFailed, RunStopped
from dreamgym_lg.simulate.agent import AgentState
from dreamgym_lg.text import clean, printable

Message = dict[str, Any]


class _Sent(TypedDict, total=False):
    """The fields of a message: exactly one of `ask`, `ended` and `failed` is set."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    episode: int
    number: int | None
    ask: Literal["policy", "stream", "step"]
    args: list[Any]
    state: AgentState
    ended: Literal[True]
    failed: str
    text: str


_SENT: TypeAdapter[Any] = TypeAdapter(_Sent)
_CALL = TypeAdapter[Any](tuple[list[int | tuple[int, str]], list[str] | None, dict[str, Any]])
_ARGUMENTS = {"policy": _CALL, "stream": _CALL, "step": TypeAdapter[Any](tuple[str, list[dict[str, Any]] | None, str | None])}
_NEEDED = {"ask": {"number", "args"}, "ended": set[str](), "failed": {"number", "text"}}


def read_message(sent: Any) -> Message:
    """A message of the worker, validated. Raises `ValueError` for wrong types or ranges."""
    message: Message = _SENT.validate_python(clean(sent))
    if "ask" in message:
        message["args"] = _ARGUMENTS[message["ask"]].validate_python(message.get("args"))
    rewards = [step.reward for step in message.get("state", {}).get("steps", ())]
    if (message.get("number") or 1) < 1 or not all(-1 <= reward <= 1 for reward in rewards):
        raise ValueError(f"its number {message.get('number')} or one of its rewards {rewards} is outside of its range")
    if [needed <= message.keys() for kind, needed in _NEEDED.items() if kind in message] != [True]:
        raise ValueError(f"no message: {', '.join(message)}")
    return message


def read_error(message: Message, own: Mapping[int, Exception]) -> Exception:
    """The error of a message: one of `own`, or of this library. An agent cannot send a `RunStopped`."""
    if message["number"] in own:
        return own[message["number"]]
    kind = getattr(errors, message["failed"] or "-", None)
    if isinstance(kind, type) and issubclass(kind, DreamGymError) and not issubclass(kind, RunStopped):
        return kind(printable(message["text"]))
    return EnvironmentFailed(f"in the walled worker: {printable(message['text'])}")
