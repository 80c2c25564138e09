"""A user's existing traces as offline trajectories, which ground the dream: `replay_buffer.extend(load_traces(...))`."""

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.base import BaseCheckpointSaver

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.traces import checkpoints, langsmith, otel, rows
from dreamgym_lg.traces.conversation import ParsedConversation, called_tools, to_trajectory
from dreamgym_lg.traces.prefixes import Prefixes
from dreamgym_lg.traces.rows import Conversation, Rejected
from dreamgym_lg.traces.verdicts import Range, Verdict, finite, is_success, scaled, verdict
from dreamgym_lg.types import Split, Trajectory

__all__ = ["Format", "Rejected", "Reward", "Traces", "load_traces"]

Format = Literal["auto", "messages", "langsmith", "otel"]
Reward = Callable[[Sequence[BaseMessage]], float] | Mapping[str, float]
"""A conversation's score, above 0 for a success: a function of its messages, or scores by id (`Conversation.id`)."""

_Conversations = Iterator[Conversation | Rejected]
_ANY_OUTCOME = "any outcome"
"""The outcome of each conversation of a thread: the longest one is kept, whatever the others' outcomes."""
_READERS: Mapping[str, Callable[[Iterator[rows.TraceRow | Rejected]], _Conversations]] = {
    "messages": rows.conversations,
    "langsmith": langsmith.conversations,
    "otel": otel.conversations,
}


class Traces(Iterable[Trajectory]):
    """The trajectories of one source, read anew at each iteration, and its rejected rows."""

    def __init__(
        self,
        name: str,
        read: Callable[[], _Conversations],
        environment: str,
        reward: Reward | None,
        reward_range: Range,
        reward_key: str | None,
        held_out: float,
    ) -> None:
        self._name, self._read, self._environment, self._share = name, read, environment, held_out
        self._reward, self._range, self._key = reward, reward_range, reward_key
        self._rejected: tuple[Rejected, ...] | None = None
        self._rewards: dict[bytes, float] = {}
        self.folded = 0
        """Traces left out at the last reading: a longer one of the thread begins with them, or a later row corrects them."""

    def __iter__(self) -> Iterator[Trajectory]:
        rejected, read, successes, known, folded = list[Rejected](), 0, 0, 0, 0
        outcomes = defaultdict[tuple[str, int], list[tuple[float, bool]]](list)
        for conversation in self._read():
            trajectory = conversation if isinstance(conversation, Rejected) else self._trajectory(conversation)
            if isinstance(trajectory, Rejected):
                rejected.append(trajectory)
            elif trajectory is None:
                folded += 1
            else:
                read, successes, known = read + 1, successes + trajectory.success, known + trajectory.has_outcome
                yield self._with_split(_numbered(trajectory, outcomes[trajectory.task.id, trajectory.rollout_index]))
        reported, self._rejected, self.folded = self._rejected is not None, tuple(sorted(rejected)), folded
        if reported or not read:
            return
        if rejected:
            warnings.warn(f"{self._name}: {read} traces read, {_summary(self._rejected)}", stacklevel=2)
        if lack := lacking_rewards(read, successes, known):
            warnings.warn(f"{self._name}: {lack}", stacklevel=2)

    @property
    def rejected(self) -> Sequence[Rejected]:
        """The rows that could not be read, by line. Reads the source once if it has not been read to its end."""
        if self._rejected is None:
            for _ in self:
                pass
        return self._rejected or ()

    def _with_split(self, trajectory: Trajectory) -> Trajectory:
        position = _position(trajectory)
        split: Split = "test" if position < self._share or position == self._lowest else "train"
        return replace(trajectory, task=replace(trajectory.task, split=split))

    @cached_property
    def _lowest(self) -> float | None:
        """The lowest position, if no task's is in the share: that task is held out. Else None.

        Reads the source up to the first task in the share.
        """
        positions = set[float]()
        for conversation in self._read() if self._share else ():
            if isinstance(conversation, Conversation) and isinstance(trajectory := self._trajectory(conversation), Trajectory):
                positions.add(_position(trajectory))
                if min(positions) < self._share:
                    return None
        return min(positions) if len(positions) > 1 else None  # of one alone nothing would be left to train on

    @cached_property
    def _surveyed(self) -> tuple[list[Mapping[str, Any] | str], Prefixes, dict[tuple[str, int], tuple[float, bool]]]:
        """The agent's tools, beginnings of conversations, and last outcomes of those with ids.

        The tools are every schema in the source, and names where a conversation came without schemas.
        Reads the source once to its end. Raises `ConfigurationError` if `reward` names a conversation that is not in it, and if
        `reward_key` names a feedback that none has.
        """
        tools: dict[str, Mapping[str, Any] | str] = {}
        feedback, prefixes, last = set[str](), Prefixes(), dict[tuple[str, int], tuple[float, bool]]()
        unknown = set(self._reward) if isinstance(self._reward, Mapping) else set[str]()
        for conversation in self._read():
            if isinstance(conversation, Conversation):
                unknown -= {conversation.id, conversation.thread}
                feedback |= {*(conversation.fields.get("feedback") or {})}
                tools |= {str(tool["function"]["name"]): tool for tool in conversation.tools}
                for name in () if conversation.tools else called_tools(conversation.messages):
                    tools.setdefault(name, name)
                with suppress(ValueError):  # one that is rejected replaces no shorter one
                    parsed = ParsedConversation.parse(conversation.messages)
                    scored_later = conversation.thread and callable(self._reward)
                    verdict = None if scored_later else self._verdict(conversation)
                    read = to_trajectory(conversation, parsed, self._environment, verdict, ())
                    if (conversation.id or conversation.thread) and read.has_outcome:
                        last[read.task.id, read.rollout_index] = read.reward, read.success
                    prefixes.add(conversation, self._outcome(conversation))
        if unknown:
            raise ConfigurationError(
                f"reward= has {len(unknown)} ids of no conversation in {self._name}, e.g. {min(unknown)!r}: give thread ids of "
                "a checkpointer or of rows, trace ids of LangSmith or OpenTelemetry, or what the rows have as `id`"
            )
        if self._key is not None and self._key not in feedback:
            raise ConfigurationError.unknown("feedback (reward_key)", self._key, feedback)
        return [tools[name] for name in sorted(tools)], prefixes, last

    def _trajectory(self, conversation: Conversation) -> Trajectory | Rejected | None:
        """The trajectory of a conversation; None if a longer or later one replaces it."""
        tools, prefixes, last = self._surveyed
        try:
            parsed = ParsedConversation.parse(conversation.messages)
            if prefixes.fold(conversation, self._outcome(conversation)):
                return None
            read = to_trajectory(conversation, parsed, self._environment, self._verdict(conversation), tools)
            outcome = read.reward, read.success
            return None if read.has_outcome and last.get((read.task.id, read.rollout_index), outcome) != outcome else read
        except ConfigurationError:  # of `reward`, and no fault of the row
            raise
        except ValueError as error:
            return Rejected(conversation.line, f"{conversation.place}{error}")

    def _outcome(self, conversation: Conversation) -> str:
        """The outcome that a longer conversation must have to replace this one. Within a thread, any outcome will do."""
        if conversation.thread and callable(self._reward):
            return _ANY_OUTCOME  # a function scores all, and is not called for what is left out
        verdict = self._verdict(conversation)
        return "" if verdict is None else _ANY_OUTCOME if conversation.thread else repr(verdict)

    def _verdict(self, conversation: Conversation) -> Verdict | None:
        if callable(self._reward):
            reward = self._called_once(self._reward, conversation)
        elif keys := [each for each in (conversation.id, conversation.thread) if each in (self._reward or {})]:
            reward = (self._reward or {})[keys[0]]
        else:
            return verdict(conversation.fields, self._range, self._key)
        try:
            return Verdict(scaled(finite(reward, "reward"), "reward", self._range), is_success(reward, self._range))
        except ValueError as error:
            raise ConfigurationError(f"reward= of line {conversation.line} of {self._name}: {error}") from error

    def _called_once(self, reward: Callable[[Sequence[BaseMessage]], float], conversation: Conversation) -> float:
        """The reward of these messages. A model may give it, and the source is read several times."""
        key = blake2b(repr(conversation.messages).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key not in self._rewards:
            self._rewards[key] = reward(conversation.messages)
        return self._rewards[key]


def _numbered(trajectory: Trajectory, outcomes: list[tuple[float, bool]]) -> Trajectory:
    """Number trajectories that differ in their outcome alone. Args: `outcomes`, of all like it so far."""
    if not trajectory.has_outcome:
        return trajectory
    if (outcome := (trajectory.reward, trajectory.success)) not in outcomes:
        outcomes.append(outcome)
    return replace(trajectory, rollout_index=trajectory.rollout_index + outcomes.index(outcome))


def _position(trajectory: Trajectory) -> float:
    """A hash of the task's words, 0 to 1. A hash of the id would put the same words with other metadata in both splits."""
    words = f"{trajectory.task.environment}/{trajectory.task.instruction}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(words, digest_size=8).digest()) / 2**64


def load_traces(
    path_or_checkpointer: str | os.PathLike[str] | BaseCheckpointSaver[Any],
    *,
    format: Format = "auto",
    environment: str = "traces",
    reward: Reward | None = None,
    reward_range: Range = (0, 1),
    reward_key: str | None = None,
    held_out: float = 0.0,
) -> Traces:
    """Recorded conversations of a tool agent as offline trajectories, for `ReplayBuffer.extend`.

    Every tool call is a step, and so is each message of the agent, or a tool's answer in its place, that a user answered. The
    last step is the final answer and has the reward. A conversation with a reward is over. One without is truncated: its
    outcome is unknown, and it counts as no failure.

    A task's `messages` are the prompt up to the agent's first act, its instruction the user's words among them; its `metadata`
    and `rubric` are a row's. Its `tools` are those of the whole source, by their schemas where these were recorded, else by
    name; `DreamGym` puts the schemas of its graph in their place. Its id depends on all of these but the tools, and on
    `environment`.

    What cannot be read is in `Traces.rejected` by line and reason, and one warning tells how much; nothing is replaced by an
    empty text. A conversation read twice is one trajectory to a replay buffer; a new outcome replaces the old one (within one
    source, if it has an id). Of a thread that was exported turn by turn, only the longest trace is given; `Traces.folded`
    counts the others. Without ids of threads, a shorter trace is also given if its known outcome differs.

    Args:
        path_or_checkpointer: A file of JSON Lines or JSON (also .xz, .gz, .bz2), a LangGraph checkpointer, or a `SqliteSaver`'s
            file (the newest `messages` of every thread).
        format: `messages`: conversations in the forms of `traces.messages`, with an answer beside them or not. `langsmith`:
            exported runs, Langfuse's too. `otel`: OpenTelemetry spans. `auto`: the first that a row fits. Rows of `messages`
            are read one at a time; the others are held, since a trace is many rows.
        environment: The tasks' environment, part of their ids.
        reward: Overrides the recorded rewards. A function of the messages, called once for each conversation, or numbers by a
            conversation's id (a thread, a trace, a row's `id`).
        reward_range: The lowest and the highest reward, scaled to 0 to 1. Above 0 is a success unless `success` says otherwise.
        reward_key: The feedback that is the reward. Default: a row's `reward`, `score` or `success`, else the only feedback or
            the only one named like a score.
        held_out: The share of the tasks, 0 to 1, that get the split `test`, by a hash of their words: nothing is trained on
            them, nothing retrieved from them, and `DreamGym.evaluate` plays them. Of two tasks or more it is one at least.

    Raises `ConfigurationError` if the file does not exist, if nothing in it can be read, if `reward` gives a number outside of
    `reward_range` or names an unknown conversation, or for a `held_out` that is no share.
    """
    if not all(map(isfinite, reward_range)) or reward_range[0] >= reward_range[1]:
        raise ConfigurationError(f"reward_range={reward_range!r}: give the lowest and the highest reward, e.g. (0, 100)")
    if not 0 <= held_out <= 1:
        raise ConfigurationError(f"held_out={held_out!r}: give the share of the tasks to keep from training, 0 to 1")
    if format not in get_args(Format):
        raise ConfigurationError.unknown("format", format, get_args(Format))
    if isinstance(path_or_checkpointer, BaseCheckpointSaver):
        checkpointer, name = path_or_checkpointer, type(path_or_checkpointer).__name__
        read = partial(checkpoints.conversations, checkpointer)
    else:
        path, name = Path(path_or_checkpointer), os.fspath(path_or_checkpointer)
        if not path.is_file():
            raise ConfigurationError(f"{name} is not a file; give a file of traces or a LangGraph checkpointer")
        stored = format == "auto" and checkpoints.is_sqlite(path)
        read = partial(checkpoints.of_file, path) if stored else partial(_of_file, path, format)
    traces = Traces(name, read, environment, reward, reward_range, reward_key, held_out)
    if next(iter(traces), None) is None:
        what = "" if format == "auto" else f" as {format}"
        raise ConfigurationError(f"{name}: nothing in it can be read{what}; {_summary(traces.rejected)}")
    return traces


def _of_file(path: Path, format: str) -> _Conversations:
    recorded = rows.read_rows(path)
    if format == "auto":
        for row in recorded:
            if not isinstance(row, Rejected) and (format := _format_of(row.value)):
                recorded = chain([row], recorded)
                break
            yield row if isinstance(row, Rejected) else Rejected(row.line, f"{row.place}no messages, no run and no span")
    if format in _READERS:
        yield from _READERS[format](recorded)


def _format_of(value: object) -> str:
    if langsmith.is_run(value):
        return "langsmith"
    if otel.is_span(value):
        return "otel"
    return "messages" if rows.holds_conversation(value) else ""


def lacking_rewards(traces: int, successes: int, known: int) -> str:
    """The warning for traces without a success. "" where there is one. Args: `known`, traces with an outcome."""
    if successes or not traces:
        return ""
    if known:
        return f"none of {traces} traces is a success: there is none to learn from"
    return f"none of {traces} traces has a reward: give --rewards (`dreamgym import`) or reward=, or each row one"


def _summary(rejected: Sequence[Rejected]) -> str:
    if not rejected:
        return "it holds no conversation"
    reasons = "; ".join(f"line {each.line}: {each.reason}" for each in rejected[:3])
    return f"{len(rejected)} rejected ({reasons}{'; ...' if len(rejected) > 3 else ''})"
