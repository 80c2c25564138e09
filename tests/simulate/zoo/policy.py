"""What answers in place of the production model while a graph is simulated."""

from typing import Any

from langchain_core.messages import BaseMessage
from pydantic import Field

from zoo.base import World
from zoo.models import ScriptedModel


class ScriptedPolicy(ScriptedModel):
    """Behaves as the production models do, under its own label; `asked` holds every call's messages and arguments.

    It leaves `cache` unset on purpose, as a careless user would: under a global LLM cache it counts fewer calls.
    """

    label: str = "policy"
    asked: list[tuple[list[BaseMessage], dict[str, Any]]] = Field(default_factory=list)

    @property
    def calls(self) -> int:
        """How often it was asked."""
        return len(self.asked)

    def _asked(self, messages: list[BaseMessage], kwargs: dict[str, Any]) -> None:
        self.asked.append((list(messages), kwargs))


def policy_for(world: World, label: str = "policy") -> ScriptedPolicy:
    """A policy that makes as many calls, in the same order, as the kind's own model would: build the kind first."""
    return ScriptedPolicy(label=label, **world.script)
