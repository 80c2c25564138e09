"""The agent of the README and the how-tos, as a user has it: copied beside what runs there, and never imported here."""

from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel


class Production(FakeListChatModel):
    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)


def book(city: str) -> str:
    """Book a room."""
    Path("booked.txt").touch()
    return "booked"


graph = create_agent(Production(responses=["production"]), [book])
