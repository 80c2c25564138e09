"""The policy's side channel: sampled tokens and their probabilities, by episode.

The policy is any `BaseChatModel`; one that can be trained reports every call to the recorder of the running episode. Token
ids never travel in messages: those end up in checkpoints and streams, and text re-encoded is not what was sampled.
"""

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.types import Segment

SAMPLING_FILE = "sampling.json"
"""Beside a policy's saved weights: the fields of the policy that decide its replies."""


class TrainablePolicy(BaseChatModel):
    """A chat model that a learner can train; it reports its tokens to the `TokenRecorder`.

    `integrations.transformers.chat_model.LocalChatModel` is one. A base class, because a protocol cannot ask for a chat model.
    """

    model: Any
    """The `transformers.PreTrainedModel` that a learner changes in place. None for weights that are elsewhere."""
    tokenizer: Any
    """The model's `transformers.PreTrainedTokenizerBase`."""
    temperature: float
    """Divisor of the logits before a token is drawn. A learner has to compute its log-probabilities at the same one."""

    def free_memory(self) -> None:
        """Called before each update: give back the memory that only generation needs."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Called after each update: drop what was computed with the old weights."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the weights, or where they are, and `SAMPLING_FILE`, whole or not at all. `load_named_policy` reads it.

        Its file `version` names these weights. Raises `ConfigurationError` where there are none or the disk is full.
        """


class TokenCall(NamedTuple):
    """One call of the policy, token by token."""

    run_id: UUID | None
    """LangChain's id of the call, by which a trace and its tokens are joined."""
    prompt_ids: Sequence[int]
    """Tokens that the policy read."""
    sampled_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural log-probability of each sampled token under the distribution it was drawn from."""
    temperature: float
    """At which the tokens were sampled; 0 is greedy."""
    policy_version: str = ""
    """Of the weights that sampled them, as the server of the policy names them."""


_current: ContextVar["TokenRecorder | None"] = ContextVar("dreamgym_token_recorder", default=None)


class TokenRecorder:
    """Collects the policy's calls inside `with recorder:`, also of tasks and threads with its context.

    `seed` fixes the sampling of an episode: call n draws from (seed, n), whatever else runs beside it.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self.calls: list[TokenCall] = []
        self._seed = seed
        self._drawn = 0
        self._lock = threading.Lock()
        self._tokens: list[Token[TokenRecorder | None]] = []

    def __enter__(self) -> "TokenRecorder":
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())

    @staticmethod
    def current() -> "TokenRecorder | None":
        """The recorder of the episode this code runs in; None outside of one."""
        return _current.get()

    def record(self, call: TokenCall) -> None:
        with self._lock:
            self.calls.append(call)

    def next_seed(self) -> int | None:
        """The seed of the episode's next policy call; None if the episode was given none."""
        if self._seed is None:
            return None
        with self._lock:
            self._drawn += 1
            return (self._seed * 1_000_003 + self._drawn) % 2**63

    def segments(self) -> list[Segment]:
        """The recorded calls, merged by exact token prefix.

        A call whose prompt tokens begin with everything an earlier segment holds continues that segment (the longest such
        one of its temperature and policy version); any other call begins a new segment. No token is ever
        re-encoded.
        """
        with self._lock:
            calls = list(self.calls)
        open_rows: list[tuple[tuple[float, str], list[int], list[int], list[float]]] = []
        for call in calls:
            if not call.sampled_ids:
                continue
            prompt = list(call.prompt_ids)
            drawn = call.temperature, call.policy_version
            fits = [row for row in open_rows if row[0] == drawn and prompt[: len(row[1])] == row[1]]
            if fits:
                _, ids, sampled, logprobs = max(fits, key=lambda row: len(row[1]))
            else:
                ids, sampled, logprobs = [], [], []
                open_rows.append((drawn, ids, sampled, logprobs))
            new = prompt[len(ids) :] + list(call.sampled_ids)
            ids += new
            sampled += [0] * (len(new) - len(call.sampled_ids)) + [1] * len(call.sampled_ids)
            logprobs += [0.0] * (len(new) - len(call.sampled_ids)) + list(call.logprobs)
        return [
            Segment(token_ids=ids, sampled=sampled, logprobs=logprobs, temperature=temperature, policy_version=version)
            for (temperature, version), ids, sampled, logprobs in open_rows
        ]


@contextmanager
def unrecorded() -> Iterator[None]:
    """Calls inside belong to no episode: a world's model is not trained as the policy."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
