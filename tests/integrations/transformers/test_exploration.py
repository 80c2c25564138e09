"""Rollouts that do not give a refused reply again."""

from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.exploration import go_on_otherwise, refused_replies
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.types import REFUSED

END = 9


def turn(reply: str, *, refused: bool) -> list[BaseMessage]:
    return [AIMessage(reply), HumanMessage("So?", additional_kwargs={REFUSED: True} if refused else {})]


def test_what_was_refused_since_the_last_reply_that_was_not() -> None:
    task: list[BaseMessage] = [HumanMessage("Open the door.")]
    assert refused_replies(task) == set()
    early = [*task, *turn("kick", refused=True), *turn("knock", refused=False)]
    assert refused_replies(early) == set(), "the world may be another one now"
    assert refused_replies([*early, *turn("smash", refused=True), *turn("push", refused=True)]) == {"smash", "push"}


def reply(*logprobs: float) -> Generated:
    return Generated("kick it", [1], [5, 6, END][: len(logprobs)], list(logprobs), "stop")


def test_it_parts_from_a_reply_where_the_policy_may_have_said_something_else() -> None:
    """By Bayes: the first difference is at a place with the probability of that, among all other replies."""
    again = [go_on_otherwise(Request([], seed=seed), reply(-0.5, -2.0, -0.1), {END, 8}) for seed in range(3000)]
    first, second, third = torch.tensor([-0.5, -2.0, -0.1]).exp().tolist()
    expected = torch.tensor([1 - first, first * (1 - second), first * second * (1 - third)])
    places = Counter((request.begins, request.left_out) for request in again)
    ways = [((), {5}), ((5,), {6}), ((5, 6), {END, 8})]
    shares = torch.tensor([places[begins, frozenset(left_out)] / 3000 for begins, left_out in ways])
    assert torch.allclose(shares, expected / expected.sum(), atol=0.03) and shares.sum() == 1
    assert len({request.seed for request in again}) > 2990, "the new tokens are drawn by numbers of their own"


def test_a_policy_that_is_sure_to_the_last_digit_parts_somewhere() -> None:
    asked = [go_on_otherwise(Request([], seed=seed), reply(0.0, 0.0, 0.0), {END}) for seed in range(60)]
    assert {len(each.begins) for each in asked} == {0, 1, 2}
    assert go_on_otherwise(Request([]), reply(-0.1), {END}).seed is None


class Sure:
    """An engine that says "kick" unless it may not, then "push", and after that "wait"."""

    ends = frozenset({END})

    def __init__(self) -> None:
        self.asked: list[frozenset[int]] = []

    def submit(self, request: Request) -> "Future[Generated]":
        self.asked.append(request.left_out)
        tokens = next(token for token in (2, 3, 4) if token not in request.left_out)
        done: Future[Generated] = Future()
        done.set_result(Generated({2: "kick", 3: "push", 4: "wait"}[tokens], [1], [tokens], [-0.1], "stop"))
        return done

    def clear(self) -> None: ...


@pytest.mark.parametrize(
    ("refused", "options", "said", "asked"),
    [
        ([], {}, "kick", [()]),
        (["wait"], {}, "kick", [()]),
        (["kick"], {}, "push", [(), (2,)]),
        (["kick"], {"explores": False}, "kick", [()]),
        (["kick"], {"temperature": 0.0}, "kick", [()]),
        (["kick", "push"], {}, "kick", [(), (2,), (3,)]),
    ],
)
async def test_a_model_that_explores_asks_once_more_for_each_refused_reply(
    refused: list[str], options: dict[str, Any], said: str, asked: list[tuple[int, ...]], policy: LocalChatModel
) -> None:
    """A reply that comes back after that is taken as it is: there may be no other."""
    messages = [HumanMessage("Open the door."), *(each for reply in refused for each in turn(reply, refused=True))]
    for call in ("invoke", "ainvoke"):
        model = LocalChatModel(engine=(engine := Sure()), tokenizer=policy.tokenizer, **{"explores": True, **options})
        answer = model.invoke(messages) if call == "invoke" else await model.ainvoke(messages)
        assert answer.text == said and engine.asked == [frozenset(each) for each in asked]
