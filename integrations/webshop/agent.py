"""WebShop's shop as two tools, `search` and `click`, of an ordinary LangChain agent."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool, ToolException, tool
from langgraph.graph.state import CompiledStateGraph

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.integrations.webshop.environment import WebShopEnvironment
from dreamgym_lg.integrations.webshop.pages import parse_action
from dreamgym_lg.types import Step, Task, Trajectory

try:
    from langchain.agents import create_agent
except ImportError as error:
    raise MissingDependency.extra("langchain", "webshop") from error

SYSTEM_PROMPT = (
    "You shop for a user. Search, open a product by its code, choose every option that was asked for by clicking its value, "
    "and click `buy now` once; then answer the user. Only what the last page shows can be clicked."
)
BOUGHT = "Thank you for shopping with us!"
_CLOSED = "The shop is closed: the purchase was made, or the visit took too many steps."


@dataclass(slots=True)
class _Visit:
    environment: WebShopEnvironment
    reward: float = 0.0


class ShopTools:
    """Tools of any number of episodes, each in its own shop. Pass `reset_real` and `verify_real` to `DreamGym`.

    Args:
        path, max_steps: As `WebShopEnvironment`; behind `max_steps` calls the tools refuse.
    """

    def __init__(self, path: str | Path, *, max_steps: int = 15) -> None:
        self._path, self._max_steps = path, max_steps
        self._visits: ContextVar[_Visit] = ContextVar("visit")
        self.tools: list[BaseTool] = self._create_tools()

    @asynccontextmanager
    async def reset_real(self, task: Task) -> AsyncIterator[None]:
        """The shop of one real episode of the task. Raises what `WebShopEnvironment.reset` raises."""
        environment = WebShopEnvironment(self._path, max_steps=self._max_steps)
        await environment.areset(task)
        token = self._visits.set(_Visit(environment))
        try:
            yield
        finally:
            self._visits.reset(token)

    def verify_real(self, task: Task, state: Any) -> float:
        """The reward of this episode's purchase, 0 to 1; 0 without one."""
        return self._visits.get().reward

    def _create_tools(self) -> list[BaseTool]:
        @tool
        def search(words: str) -> str:
            """Search the shop for words; shows the first page of results."""
            return self._play(f"search[{words}]")

        @tool
        def click(what: str) -> str:
            """Click on what the page shows: a product's code, the value of an option, or a button such as `buy now`."""
            return self._play(f"click[{what}]")

        return [search, click]

    def _play(self, action: str) -> str:
        visit = self._visits.get(None)
        if visit is None:
            raise ToolException("no shop is open: run the agent inside `async with shop.reset_real(task)`")
        if not visit.environment.playing:
            return _CLOSED
        result = visit.environment.step(" ".join(action.split()))
        visit.reward += result.reward
        return BOUGHT if result.terminated else result.observation


def create_agent_graph(model: str | BaseChatModel, shop: ShopTools) -> CompiledStateGraph:
    """`langchain.agents.create_agent` with the tools of `shop`."""
    return create_agent(model, shop.tools, system_prompt=SYSTEM_PROMPT)


def as_tool_agent(trajectory: Trajectory) -> Trajectory:
    """Rewrite an episode of `WebShopEnvironment` as one of the tool agent.

    Each `search[...]` and `click[...]` becomes a tool call, other actions are left out; an answer ends the episode.
    """
    task = trajectory.task
    steps, seen = list[Step](), task.instruction
    for step in trajectory.steps:
        call = _as_call(step.action)
        if call is not None:
            page = BOUGHT if step.terminated else step.next_observation
            steps.append(Step(observation=seen, action=call, next_observation=page, valid=step.valid))
            seen = page
    last = trajectory.steps[-1]
    answer = render_answer("Done." if last.terminated else "I have not bought anything.")
    ended = Step(observation=seen, action=answer, next_observation="", reward=last.reward, terminated=True)
    return replace(trajectory, task=replace(task, observation=""), steps=[*steps, ended])


def _as_call(action: str) -> str | None:
    verb, argument = parse_action(action)
    names: Mapping[str, str] = {"search": "words", "click": "what"}
    return render_call(verb, {names[verb]: argument}) if verb in names else None
