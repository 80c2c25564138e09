"""The truthful server: a dream's part that answers calls by the tools' own code, and judges as reality does."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from agent import TOOLS, connected
from customers import agreed, reply
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.tools import StructuredTool
from tickets import Shop

from dreamgym_lg import Answer, Dream, Episode, Step, Task, Verdict
from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.dream import Schemas, ScriptedUser


class TruthfulServer:
    """A responder and a judge on a private copy of the database, where the episode's calls so far are made again.

    With `DreamGym(dream=truthful_dream(shop))` everything but the dream is in the loop: what does not learn here does not learn
    in a dream either.
    """

    name = "truth"

    def __init__(self, shop: Shop, *, talking: bool = False) -> None:
        self.shop, self.talking, self.tools = (
            shop,
            talking,
            {tool.__name__: StructuredTool.from_function(tool) for tool in TOOLS},
        )

    def respond(self, episode: Episode) -> Answer:
        with self._after(episode.steps):
            return Answer(self._call(episode.action))

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict:
        success = self.solved(episode.task, episode.steps, episode.action)
        success &= not self.talking or agreed(_messages(episode.steps))
        return Verdict(float(success), success, "every row of the database was compared")

    def solved(self, task: Task, steps: Sequence[Step], last: str) -> bool:
        """The shop's check of an episode's steps and its last action."""
        with self._after(steps):
            return self.shop.solved(task, str(parse_action(last)))

    @contextmanager
    def _after(self, steps: Sequence[Step]) -> Iterator[None]:
        """The block's tools work on a copy of the database as it is after these steps."""
        with closing(self.shop.copy()) as copy, connected(copy):
            for step in steps:
                self._call(step.action)
            yield

    def _call(self, action: str) -> str:
        call = parse_action(action)
        return json.dumps(self.tools[call.name].invoke(dict(call.arguments))) if isinstance(call, ToolCall) else ""


def _messages(steps: Sequence[Step]) -> Iterator[BaseMessage]:
    """Calls and the customer's words."""
    for step in steps:
        call = parse_action(step.action)
        if isinstance(call, ToolCall):
            yield AIMessage("", tool_calls=[{"name": call.name, "args": dict(call.arguments), "id": "call"}])
        else:
            yield HumanMessage(step.next_observation)


def truthful_dream(shop: Shop, *, talking: bool = False) -> Dream:
    """The dream in which only the agent's policy can be wrong. Args: `talking`, with the real customers."""
    server = TruthfulServer(shop, talking=talking)
    schemas = Schemas(
        list(server.tools.values())
    )  # what a graph refuses by itself, for those who measure the dream without one
    return Dream([schemas, server], ScriptedUser(reply) if talking else None, [server])
