"""Rollouts that explore: a reply that was just refused is not given again.

A policy that is sure of a wrong action repeats it to the end of the episode, in every episode of a group: all earn the same,
and nothing is learned. So the rollouts of a training sample from the policy's distribution given that the reply is another one.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random

from langchain_core.messages import BaseMessage

from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.types import REFUSED


def refused_replies(messages: Sequence[BaseMessage]) -> set[str]:
    """The texts of the replies that were refused (`REFUSED`) since the last one that was not: nothing has changed since."""
    found = set[str]()
    for reply, answer in zip(messages[-2::-1], messages[:0:-1], strict=False):
        if reply.type == "ai":
            if not answer.additional_kwargs.get(REFUSED):
                break
            found.add(reply.text)
    return found


def go_on_otherwise(request: Request, generated: Generated, ends: Collection[int]) -> Request:
    """The request again, for a reply that begins like this one and parts from it at one of its tokens.

    Each place is drawn with its probability of being the first at which another reply differs. So the new reply has the
    policy's distribution given that it is not this one; its recorded log-probabilities are the policy's own.

    Args:
        ends: The tokens that end a reply.
    """
    before, weights = 0.0, list[float]()
    for logprob in generated.logprobs:
        weights.append(math.exp(before) * -math.expm1(logprob) + 1e-9)  # a policy may be sure to the last digit
        before += logprob
    random = Random(f"{request.seed}/{generated.text}")
    tokens = generated.sampled_ids
    (place,) = random.choices(range(len(tokens)), weights)
    left_out = ends if tokens[place] in ends else (tokens[place],)
    seed = None if request.seed is None else random.getrandbits(32)
    return replace(request, seed=seed, begins=tuple(tokens[:place]), left_out=frozenset(left_out))
