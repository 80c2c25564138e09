"""tau-bench's agent, an ordinary LangChain graph with the policy as system message, and the worlds that play it."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import BaseTool, ToolException
from langgraph.graph.state import CompiledStateGraph

from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.integrations.tau.common import Database
from dreamgym_lg.integrations.tau.domain import Domain, DomainName, load_domain, load_tasks
from dreamgym_lg.types import Task

try:
    from langchain.agents import create_agent
except ImportError as error:
    raise MissingDependency.extra("langchain", "tau") from error


class ServiceDesk:
    """The tools of any number of episodes at once, each on a fresh database.

    With a `DreamGym`: `DreamGym(create_agent_graph(model, desk), tasks=load_tasks(name, path), reset_real=desk.reset_real,
    verify_real=desk.verify_real, ...)`. In the dream the tools are never run.
    """

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self._database: ContextVar[Database] = ContextVar("database")
        self.tools: list[BaseTool] = domain.tools(self._current)

    @asynccontextmanager
    async def reset_real(self, task: Task) -> AsyncIterator[None]:
        """The database of one real episode."""
        token = self._database.set(self.domain.create_database())
        try:
            yield
        finally:
            self._database.reset(token)

    def verify_real(self, task: Task, state: Mapping[str, Any]) -> float:
        """The official reward of the episode whose graph ended in this state (`messages`)."""
        said = [each.text for each in state["messages"] if isinstance(each, AIMessage) and not each.tool_calls]
        return self.domain.reward(task, self._current(), said)

    def _current(self) -> Database:
        try:
            return self._database.get()
        except LookupError:
            raise ToolException("no database is open: run the agent inside `async with desk.reset_real(task)`") from None


def create_agent_graph(model: str | BaseChatModel, desk: ServiceDesk) -> CompiledStateGraph:
    """`langchain.agents.create_agent` with the tools of `desk` and its domain's policy."""
    return create_agent(model, desk.tools, system_prompt=desk.domain.policy)


class TauWorld(AgentWorld):
    """The tasks of one domain for the `create_agent` graph; real episodes run on its database and earn the official reward.

    Args:
        domain: `airline` or `retail`.
        data: The folder of the packed files (`load_domain`). Default: $TAU_DATA, else ~/.cache/tau-bench.
        options: Further ones of `AgentWorld`.
    """

    def __init__(self, domain: DomainName, data: str | Path | None = None, **options: Any) -> None:
        where = data or os.environ.get("TAU_DATA") or Path("~/.cache/tau-bench")
        self.desk = ServiceDesk(load_domain(domain, where))
        super().__init__(
            create_agent_graph(FakeListChatModel(responses=[]), self.desk),  # the policy is put in its place
            tasks=load_tasks(domain, where),
            reset_real=self.desk.reset_real,
            verify_real=self.desk.verify_real,
            **options,
        )
        self.name = f"tau-{domain}"
        self.arguments = {"data": str(where)}


airline, retail = partial(TauWorld, "airline"), partial(TauWorld, "retail")
