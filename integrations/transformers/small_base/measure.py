"""How exactly the small base copies: `python -m dreamgym_lg.integrations.transformers.small_base.measure [FOLDER]`.

Greedy, on names that are built from other sounds than those of pretraining. Each figure is two: the share of replies in which
the name stands whole, and of those that are right in every character.
"""

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from langchain_core.messages import AIMessage, HumanMessage

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.small_base import SMALL_BASE
from dreamgym_lg.integrations.transformers.small_base.names import Names
from dreamgym_lg.integrations.transformers.small_base.skills import ORDINALS

LENGTHS = (2, 5, 10, 20)
ONSETS = ["br", "cl", "dr", "fl", "gr", "pl", "qu", "sh", "sk", "st", "str", "th", "tr", "ch", "sp", "x", "y", "wh"]
_RHYMES = "aim ance ay ead eep ick ield oast oom orn ound ull urk yle ax ose ish ern"
RHYMES = _RHYMES.split()


def unseen_word(rng: Random) -> str:
    """A word of one to three syllables that pretraining's invented words do not have: `quoast`, `strielday`."""
    return "".join(rng.choice(ONSETS) + rng.choice(RHYMES) for _ in range(rng.choice([1, 2, 2, 3])))


def _two_words(rng: Random) -> str:
    return f"{unseen_word(rng)} {unseen_word(rng)}"


class Probe(NamedTuple):
    """One question, and what is right."""

    said: str
    tools: list[dict[str, Any]]
    """One of them is called, whatever the model would choose; none for an answer in words."""
    reply: str
    """Of a call: its arguments as JSON."""
    name: str
    """What the reply has to copy."""


def _pick(rng: Random, things: list[str]) -> Probe:
    thing = rng.choice(things)
    said = f"You see {', '.join(f'a {each}' for each in things)}.\nYour task is to take the {thing}."
    return Probe(said, [], f"take {thing}", thing)


def _ordinal(rng: Random, things: list[str]) -> Probe:
    at = rng.randrange(min(len(things), len(ORDINALS)))
    return Probe(f"Here: {', '.join(things)}.\nWhat is the {ORDINALS[at]}?", [], things[at], things[at])


def _last(rng: Random, things: list[str]) -> Probe:
    return Probe(f"Here: {', '.join(things)}.\nWhat is the last one?", [], things[-1], things[-1])


def _argument(rng: Random, things: list[str]) -> Probe:
    thing = rng.choice(things)
    schema = {"properties": {"parcel_id": {"type": "string"}}, "required": ["parcel_id"], "type": "object"}
    function = {"name": "find_parcel", "description": "Find one parcel by its parcel_id.", "parameters": schema}
    said = f"The list: {', '.join(things)}.\nplease find the parcel with parcel_id {thing}."
    return Probe(said, [{"type": "function", "function": function}], json.dumps({"parcel_id": thing}), thing)


KINDS: dict[str, tuple[Callable[[Random, list[str]], Probe], str]] = {
    "one word": (_pick, "word"),
    "two words": (_pick, "words"),
    "id": (_pick, "id"),
    "id as JSON argument": (_argument, "id"),
    "two words as JSON argument": (_argument, "words"),
    "k-th of the list": (_ordinal, "word"),
    "last of the list": (_last, "word"),
}


def probes(kind: str, length: int, count: int) -> list[Probe]:
    """So many probes of one of `KINDS`, over lists of `length` names."""
    ask, named = KINDS[kind]
    found = []
    for i in range(count):
        rng = Random(f"{kind}/{length}/{i}")
        names = Names(rng, [unseen_word(rng) for _ in range(200)])
        draw: dict[str, Callable[[], str]] = {
            "word": partial(unseen_word, rng),
            "words": partial(_two_words, rng),
            "id": names.id,
        }
        found.append(ask(rng, names.several(length, draw[named])))
    return found


def measure(policy: LocalChatModel, asked: list[Probe]) -> tuple[float, float]:
    """Two shares of the replies: in which the name stands whole, and that are right in every character."""
    tools = asked[0].tools
    model = policy.bind_tools(tools, tool_choice="any") if tools else policy
    replies = [_said(reply) for reply in model.batch([[HumanMessage(probe.said)] for probe in asked])]
    named = [re.search(rf"(?<![\w#-]){re.escape(p.name)}(?![\w-])", r) for p, r in zip(asked, replies, strict=True)]
    exact = [reply == probe.reply for probe, reply in zip(asked, replies, strict=True)]
    return sum(map(bool, named)) / len(asked), sum(exact) / len(asked)


def _said(reply: AIMessage) -> str:
    return json.dumps(reply.tool_calls[0]["args"]) if reply.tool_calls else reply.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=SMALL_BASE)
    parser.add_argument("--count", type=int, default=100, help="probes of each kind and length")
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = LocalChatModel.from_path(given.folder, dtype="float32", temperature=0, max_new_tokens=48)
    print(f"| list length | {' | '.join(map(str, LENGTHS))} |\n|{' --- |' * (len(LENGTHS) + 1)}")
    for kind in KINDS:
        shares = [measure(policy, probes(kind, length, given.count)) for length in LENGTHS]
        print(f"| {kind} | {' | '.join(f'{named:.2f}, {exact:.2f}' for named, exact in shares)} |", flush=True)


if __name__ == "__main__":
    main()
