"""Who answers a graph that stops for a person: in an episode, a function of the interrupt."""

from collections.abc import Mapping
from typing import Any

from langgraph.types import Interrupt


def approve(interrupt: Interrupt) -> Any:
    """Approve whatever is asked: every action of LangChain's human-in-the-loop middleware; anything else with "yes"."""
    asked = interrupt.value
    if isinstance(asked, Mapping) and "action_requests" in asked:
        return {"decisions": [{"type": "approve"} for _ in asked["action_requests"]]}
    if isinstance(asked, list) and asked and all(isinstance(part, Mapping) and "action_request" in part for part in asked):
        return [{"type": "accept"} for _ in asked]
    return "yes"
