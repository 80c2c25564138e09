"""An engine that replies with recorded actions, for the exact tokens of such a policy."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from langchain_core.language_models import BaseChatModel
from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.prefix_cache import PrefixCache
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.integrations.transformers.tool_format import ToolDialect
from dreamgym_lg.integrations.trl.rows import TokenizedConversation, labelled, replied, reply_end
from dreamgym_lg.rollout import Agent
from dreamgym_lg.simulate.replay import Replayed, Script, replay
from dreamgym_lg.types import Trajectory

logger = logging.getLogger(__name__)


class RecordedEngine:
    """Replies with the actions of the running `replay`, for `LocalChatModel(engine=...)`: nothing is generated.

    A `TokenRecorder` gets what it would get from a model that samples these replies: prompts rendered and encoded as
    `LocalEngine` does, the tokens of earlier replies as they were "sampled".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._end = reply_end(tokenizer)
        self._dialect = ToolDialect(tokenizer, self.ends)
        self._prefixes = PrefixCache()

    @property
    def ends(self) -> frozenset[int]:
        return frozenset([self._end])

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
        generated = replied(self.tokenizer, self._prefixes, request, reply, self._end)
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
    max_new_tokens: int,
    say: Callable[[str], str] = str,
) -> list[TokenizedConversation]:
    """Supervised rows: the tokens of rollouts whose policy acts as in these episodes.

    Episodes that do not replay are left out, and a warning says how many. Args: `say`, as of `replay`.

    Raises `ConfigurationError` if nothing replays.
    """
    agent = create_agent(LocalChatModel(engine=RecordedEngine(tokenizer), tokenizer=tokenizer, max_new_tokens=max_new_tokens))

    async def replay_all() -> list[Replayed]:
        return [await replay(agent, trajectory, say=say) for trajectory in recorded]

    replayed = run_lasting(replay_all())
    misfits = [each.misfit for each in replayed if each.misfit is not None]
    text = f"{len(misfits)} of {len(recorded)} recorded successes do not replay in the graph as it is now: {misfits[:1]}"
    if len(misfits) == len(recorded):
        raise ConfigurationError(f"{text}; there is nothing to fine-tune a policy on: record traces with this graph")
    if misfits:
        logger.warning("%s; they are left out", text)
    return [labelled(segment) for each in replayed if each.misfit is None for segment in each.segments]
