"""The rows of supervised training. Conversations and recorded episodes as tokens, with loss weights."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, MessageLikeRepresentation, convert_to_messages
from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.chat_template import ChatTemplate
from dreamgym_lg.integrations.transformers.prefix_cache import PrefixCache
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.integrations.transformers.tool_format import ToolDialect
from dreamgym_lg.learner import TrainingRow, sft_row
from dreamgym_lg.rollout import Agent
from dreamgym_lg.simulate.replay import Replayed, Script, replay
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder
from dreamgym_lg.types import Trajectory

logger = logging.getLogger(__name__)

Conversation = Sequence[MessageLikeRepresentation]
"""Messages as LangChain takes them: its own, or `{"role", "content"}` with `tool_calls`."""


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    *,
    tools: Sequence[Any] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[TrainingRow]:
    """Conversations as training rows: the assistant's replies are learned, with their ends.

    Each reply stands behind the prompt that a policy would read there, so that any chat template will do. Where a template
    renders a reply otherwise in later prompts (Qwen3 drops what was thought), a conversation is several rows.

    Args: `tools`, that the model is given, as `LocalChatModel.bind_tools` takes them; `chat_template_kwargs`, of the policy.
    """
    end = reply_end(tokenizer)
    dialect = ToolDialect(tokenizer, {end})
    rows: list[TrainingRow] = []
    for conversation in conversations:
        messages, prefixes, recorder = convert_to_messages(conversation), PrefixCache(), TokenRecorder()
        for i, message in enumerate(messages):
            if isinstance(message, AIMessage):
                request = Request((), owner=0, max_new_tokens=0, template_kwargs=chat_template_kwargs or {})
                dialect.prepare(request, messages[:i], tools=tools, choice=None, response_format=None)
                reply = encode_reply(tokenizer, prefixes, request, dialect.written(message, request), end)
                recorder.record(TokenCall(None, reply.prompt_ids, reply.sampled_ids, reply.logprobs, 1.0))
        rows += [sft_row(segment) for segment in recorder.segments()]
    return rows


def reply_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a reply. Raises `ConfigurationError` where neither chat template nor tokenizer has one."""
    if (end := ChatTemplate(tokenizer).end) is None:
        raise ConfigurationError("neither the chat template nor the tokenizer ends a reply: set tokenizer.eos_token")
    return int(end)


def encode_reply(tokenizer: PreTrainedTokenizerBase, prefixes: PrefixCache, request: Request, text: str, end: int) -> Generated:
    """The reply of a policy that samples this text, as tokens. Args: `text`, with the request's forced beginning."""
    prompt, ids, _ = prefixes.encode(tokenizer, request, 1 << 30)
    sampled = [*tokenizer(text[len(request.forced) :], add_special_tokens=False)["input_ids"], end]
    generated = Generated("", ids, sampled, [0.0] * len(sampled), "stop")
    return prefixes.keep_reply(tokenizer, request, prompt, generated, {end})


def reply_lengths(row: TrainingRow) -> list[int]:
    """The length of each reply in tokens, its end token included."""
    return [len(list(part)) for own, part in groupby(row.segment.sampled) if own]


class RecordedEngine:
    """Replies with the actions of the running `replay`, for `LocalChatModel(engine=...)`: nothing is generated.

    A `TokenRecorder` gets what it would get from a model that samples these replies: prompts rendered and encoded as
    `LocalEngine` does, the tokens of earlier replies as they were "sampled".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self._end = tokenizer, reply_end(tokenizer)
        self.ends = frozenset([self._end])
        self._dialect, self._prefixes = ToolDialect(tokenizer, self.ends), PrefixCache()

    def submit(self, request: Request) -> "Future[Generated]":
        """The recorded reply. Its exception is a `ConfigurationError` for one that the request does not allow."""
        future: Future[Generated] = Future()
        try:
            future.set_result(self._reply(request))
        except Exception as error:
            future.set_exception(error)
        return future

    def clear(self) -> None:
        """Nothing to do: no keys and values are cached."""

    def _reply(self, request: Request) -> Generated:
        script = Script.current()
        reply = self._dialect.reply(script.next_action())
        if script.words and not request.forced:
            reply = f"{script.words}\n{reply}"
        if not reply.startswith(request.forced):
            raise ConfigurationError(f"the recorded reply {reply[:80]!r} does not begin with {request.forced!r}, as it has to")
        generated = encode_reply(self.tokenizer, self._prefixes, request, reply, self._end)
        if (length := len(generated.sampled_ids)) > request.max_new_tokens:
            raise ConfigurationError(
                f"the recorded reply {reply[:80]!r} has {length} tokens, and a reply may have {request.max_new_tokens}: "
                "raise policy_tokens"
            )
        return generated


def replayed_rows(
    create_agent: Callable[[BaseChatModel], Agent],
    recorded: Sequence[Trajectory],
    tokenizer: PreTrainedTokenizerBase,
    *,
    say: Callable[[str], str] = str,
    **options: Any,
) -> list[TrainingRow]:
    """Supervised rows: the tokens of rollouts whose policy acts as in these episodes.

    Episodes that do not replay are left out, and a warning says how many. Args: `say`, as of `replay`; `options`, the policy's
    `max_new_tokens` and `chat_template_kwargs`.

    Raises `ConfigurationError` if nothing replays.
    """
    agent = create_agent(LocalChatModel(engine=RecordedEngine(tokenizer), tokenizer=tokenizer, **options))

    async def replay_all() -> list[Replayed]:
        return [await replay(agent, trajectory, say=say) for trajectory in recorded]

    replayed = run_lasting(replay_all())
    misfits = [each.misfit for each in replayed if each.misfit is not None]
    text = f"{len(misfits)} of {len(recorded)} recorded successes do not replay in the graph as it is now: {misfits[:1]}"
    if len(misfits) == len(recorded):
        raise ConfigurationError(f"{text}; there is nothing to fine-tune a policy on: record traces with this graph")
    if misfits:
        logger.warning("%s; they are left out", text)
    return [sft_row(segment) for each in replayed if each.misfit is None for segment in each.segments]
