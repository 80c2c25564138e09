"""Answering a graph's interrupts, where it stops for a person: in an episode a function answers."""

from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Interrupt

MAX_INTERRUPTS = 50


def approve(interrupt: Interrupt) -> Any:
    """Approve whatever is asked: every action of LangChain's human-in-the-loop middleware; anything else with "yes"."""
    asked = interrupt.value
    if isinstance(asked, Mapping) and "action_requests" in asked:
        return {"decisions": [{"type": "approve"} for _ in asked["action_requests"]]}
    if isinstance(asked, list) and asked and all(isinstance(part, Mapping) and "action_request" in part for part in asked):
        return [{"type": "accept"} for _ in asked]
    return "yes"


class InterruptedRun:
    """One run of a graph over its interrupts: `while run.next_input()`, stream the graph with `run.input`, add each chunk."""

    def __init__(self, payload: Any, config: RunnableConfig | None, respond: Callable[[Interrupt], Any]) -> None:
        configurable = {"thread_id": uuid4().hex, **((config or {}).get("configurable") or {})}
        self.config: RunnableConfig = {**(config or {}), "configurable": configurable}
        self.input = self.state = payload
        self.given_up = False
        """More than `MAX_INTERRUPTS` answers, and it still asked."""
        self._respond = respond
        self._asked: list[Interrupt] = []
        self._rounds = 0

    def add_chunk(self, chunk: Any) -> None:
        """A chunk of the stream mode "values"."""
        if isinstance(chunk, dict) and "__interrupt__" in chunk:
            self._asked = [*self._asked, *chunk["__interrupt__"]]
            chunk = {key: value for key, value in chunk.items() if key != "__interrupt__"}
            if not chunk:
                return
        self.state = chunk

    def next_input(self) -> bool:
        """Set `input`: the payload first, then the answers to what interrupted the run. False: the run has ended."""
        asked, self._asked = self._asked, []
        self._rounds += 1
        if self._rounds > 1 and asked:
            self.given_up = self._rounds > MAX_INTERRUPTS
            self.input = Command(resume={interrupt.id: self._respond(interrupt) for interrupt in asked})
        return self._rounds == 1 or (bool(asked) and not self.given_up)
