"""The agent: a hotel chain's booking desk, an ordinary `create_agent` graph with two tools. It knows nothing of dreamgym-lg."""

import json
from collections.abc import Sequence
from contextvars import ContextVar
from random import Random
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool

_CITIES = """Bern Oslo Rome Lima Kyiv Riga Lyon Bonn Cork Bari Faro Graz Kiel Lodz Metz Nice Pisa Sion Turin Ulm Vaduz Wels
    York Zug Basel Delft Essen Ghent Linz Malmo Narva Porto"""
CITIES = _CITIES.split()
ROOMS = {city: f"R{number}" for city, number in zip(CITIES, Random(0).sample(range(100, 1000), len(CITIES)), strict=True)}
"""The free room of each city: what the chain's database would say."""
bookings: ContextVar[list[str]] = ContextVar("bookings")
"""The rooms that this request has booked."""


def find_room(city: str) -> dict[str, str]:
    """Find the free room of a city."""
    return {"room": ROOMS[city]} if city in ROOMS else {"error": f"no hotel in {city}"}


def book(room: str) -> dict[str, str]:
    """Book a room."""
    bookings.get().append(room)
    return {"booked": room}


class OldPolicy(BaseChatModel):
    """What has answered so far, in the place of a chat model: it guesses the room of every second city."""

    @property
    def _llm_type(self) -> str:
        return "old-policy"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        city = next(message.text for message in messages if message.type == "human").rstrip(".").split()[-1]
        answers = [json.loads(message.text) for message in messages if message.type == "tool"]
        if answers and "booked" in answers[-1]:
            reply = AIMessage(f"Booked {answers[-1]['booked']}.")
        elif answers or CITIES.index(city) % 2:
            reply = _call("book", room=answers[-1]["room"] if answers else "R100")
        else:
            reply = _call("find_room", city=city)
        return ChatResult(generations=[ChatGeneration(message=reply)])


def _call(name: str, **arguments: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call_{name}"}])


graph = create_agent(OldPolicy(), [find_room, book], system_prompt="Find the city's room, book it, say which.")
