"""tau-bench's agent, an ordinary `create_agent` graph, and its worlds."""

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import BaseTool, ToolException
from langgraph.graph.state import CompiledStateGraph

from dreamgym_lg.actions import tool_schemas
from dreamgym_lg.dream.users import ModelUser, RecordedUser, UntilHandOver
from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.hosted import name_of
from dreamgym_lg.integrations.tau.common import Database
from dreamgym_lg.integrations.tau.domain import HAND_OVER, Domain, DomainName, load_conversations, load_domain, load_tasks
from dreamgym_lg.types import Task, Trajectory

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
        answers = [each.text for each in state["messages"] if isinstance(each, AIMessage) and not each.tool_calls]
        return self.domain.reward(task, self._current(), answers)

    def _current(self) -> Database:
        try:
            return self._database.get()
        except LookupError:
            raise ToolException("no database is open: run the agent inside `async with desk.reset_real(task)`") from None


def create_agent_graph(model: str | BaseChatModel, desk: ServiceDesk) -> CompiledStateGraph:
    """`langchain.agents.create_agent` with the tools of `desk` and its domain's policy."""
    return create_agent(model, desk.tools, system_prompt=desk.domain.policy)


class _AnyModel(FakeListChatModel):
    """Stands in the graph where the policy will; it is never asked."""

    responses: list[str] = []

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tool_schemas(tools), **kwargs)


class TauWorld(AgentWorld):
    """The tasks of one domain, on its database and with the official reward.

    Args:
        domain: `airline` or `retail`.
        data: The folder of the packed files (`load_domain`). Default: $TAU_DATA, else ~/.cache/tau-bench.
        user: The chat model that plays the customers, by name or not. Default: $TAU_USER, else the recorded customers of
            `load_conversations`. Where the agent leaves the record, a real episode ends as failed, and in a dream the user that
            `train_user` trains on them goes on.
        options: Further ones of `AgentWorld`.

    Raises `ConfigurationError` as `load_domain`, also where no customer is recorded.
    """

    settings = replace(AgentWorld.settings, episodes={"recorded": 1000}, retrieved=1, retrieved_characters=300)  # long already

    def __init__(
        self, domain: DomainName, data: str | Path | None = None, *, user: BaseChatModel | str | None = None, **options: Any
    ) -> None:
        where = Path(data or os.environ.get("TAU_DATA") or "~/.cache/tau-bench").expanduser()
        model = user or os.environ.get("TAU_USER") or None
        self.desk = ServiceDesk(load_domain(domain, where))
        kept = model is None or (where / f"tau_{domain}_conversations.json.xz").exists()
        self.conversations = load_conversations(domain, where) if kept else []
        recorded = RecordedUser(self.conversations)
        customer = ModelUser(model) if model else RecordedUser(self.conversations, otherwise=ModelUser(None))
        super().__init__(
            create_agent_graph(_AnyModel(), self.desk).with_config(recursion_limit=100),  # of a turn: 30 steps, officially
            tasks=load_tasks(domain, where) if model else [each.task for each in self.conversations],
            payload=lambda task: {"messages": [HumanMessage(task.instruction)]},  # the graph has the policy that a record holds
            reset_real=self.desk.reset_real,
            verify_real=self.desk.verify_real,
            user=UntilHandOver(customer, [HAND_OVER]),
            user_real=UntilHandOver(customer if model else recorded, [HAND_OVER]),
            **options,
        )
        self.name = f"tau-{domain}"
        self.arguments = {"data": str(where), "user": model if isinstance(model, str | None) else name_of(model)}

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """At most `episodes["recorded"]` recorded conversations of the split `train`."""
        trained = (each for each in self.conversations if each.task.split == "train")
        return islice(trained, episodes.get("recorded", 0))


airline, retail = partial(TauWorld, "airline"), partial(TauWorld, "retail")
