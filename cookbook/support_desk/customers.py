"""The customers of the desk that talks, as they are in reality: no dream has seen this code.

A customer knows the order and the city, says them when asked, agrees to what serves the request, and leaves when nothing is
asked any more.
"""

import re
from collections.abc import Sequence
from random import Random

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from tickets import KINDS

from dreamgym_lg import Episode, Task
from dreamgym_lg.actions import parse_action

ACCEPTED = {"where": (), "money": ("refund", "cancel", "colleague"), "broken": ("refund", "colleague")}
ACCEPTED["address"] = ("send", "colleague")
"""Words of proposals that a customer agrees to, by the rule of the request."""
PATIENCE = 8
"""Messages of the desk after which a customer leaves."""


def reply(episode: Episode) -> str | None:
    """The customer's next message; None where there is nothing left to say."""
    turns = sum(isinstance(parse_action(step.action), str) for step in episode.steps)
    return answer(episode.task, str(parse_action(episode.action))) if turns < PATIENCE else None


def answer(task: Task, message: str) -> str | None:
    """What the customer of this ticket says to a message of the desk."""
    named, city, words = task.metadata["named"], task.metadata["city"], message.casefold()
    if "?" not in message:
        return None
    if city and city not in message and re.search(r"city|where|address", words):
        return f"To {city}."
    if any(word in words for accepted in ACCEPTED.values() for word in accepted):
        others = {id for id in re.findall(r"[KC]\d+", message) if id[0] == named[0][0]} - set(named)
        if others or (city and "send" in words and city not in message):
            return f"No, I mean {' and '.join(named)}{f', to {city}' if city else ''}."
        agrees = any(word in words for word in ACCEPTED[KINDS[task.metadata["kind"]]])
        return "Yes, please." if agrees else "No, that is not what I want."
    wording = Random(task.id).choice(("{}.", "It is {}.", "That would be {}.", "{}, I think."))
    return wording.format(" and ".join(named))


def agreed(messages: Sequence[BaseMessage]) -> bool:
    """Whether every change came after a customer's yes, with nothing said in between."""
    last = ""
    for message in messages:
        if isinstance(message, HumanMessage):
            last = message.text
        changes = isinstance(message, AIMessage) and any(not call["name"].startswith("get_") for call in message.tool_calls)
        if changes and not last.startswith("Yes"):
            return False
    return True
