"""What a policy reads of a traced task, in the dream and on real tools: production's prompt, exactly once."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import Field

from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate import SimulatedAgent
from dreamgym_lg.tasks import with_own_rules
from dreamgym_lg.traces import load_traces
from dreamgym_lg.types import StepResult, Task

create_agent = pytest.importorskip("langchain.agents").create_agent

RULES = {"role": "system", "content": "You help."}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
USERS = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}, {"role": "user", "content": "Soon!"}]
DONE = {"role": "assistant", "content": "A cat."}


class Hearing(BaseChatModel):
    """Answers, and keeps what it was asked."""

    asked: list[list[BaseMessage]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "hearing"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.asked.append(messages)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("A cat."))])


class Ends(Environment):
    """An environment that takes the first message for the end."""

    def reset(self, task: Task) -> str:
        return task.observation

    async def areset(self, task: Task) -> str:
        return task.observation

    def show_tools(self, tools: Any) -> None:
        pass

    async def astep(self, action: str) -> StepResult:
        return StepResult("", 1.0, True, False, {"success": True})

    step = None


def bare() -> Any:
    """A graph that sends its state as it is."""
    model = Hearing()
    graph = StateGraph(MessagesState)
    graph.add_node("ask", lambda state: {"messages": [model.invoke(state["messages"])]})
    return graph.add_edge(START, "ask").compile()


AGENTS = {
    "its own system message": lambda: create_agent(Hearing(), [], system_prompt="You help."),
    "a newer one": lambda: create_agent(Hearing(), [], system_prompt="You help, today."),
    "none": lambda: create_agent(Hearing(), []),
    "a plain graph": bare,
}


def played(agent: Any, task: Task, *, real: bool) -> list[dict[str, Any]]:
    """The prompt of its policy in an episode of the task."""
    policy = Hearing()
    simulated = SimulatedAgent(agent, policy, real=real, verify=(lambda task, state: 1.0) if real else None)

    async def play() -> None:
        context = EpisodeContext(environment=None if real else Ends())  # type: ignore[arg-type]
        async for _ in simulated.astream({"task": task}, None, context=context, stream_mode="values"):
            pass

    asyncio.run(play())
    (prompt,) = policy.asked
    return [{"role": {"human": "user"}.get(each.type, each.type), "content": each.content} for each in prompt]


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("real", [False, True])
def test_the_prompt_is_productions_exactly_once(name: str, real: bool, tmp_path: Any) -> None:
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": [RULES, *USERS, DONE], "reward": 1}))
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(load_traces(tmp_path / "traces.jsonl"))
        (task,) = buffer.tasks()
    rules = RULES | ({"content": "You help, today."} if name == "a newer one" else {})
    assert played(AGENTS[name](), task, real=real) == [rules, *USERS]


def test_a_task_without_messages_is_its_instruction() -> None:
    task = Task(id="t", instruction="Hi.", environment="desk")
    assert played(AGENTS["its own system message"](), task, real=False) == [RULES, {"role": "user", "content": "Hi."}]


@pytest.mark.parametrize(
    ("recorded", "prompt", "read"),
    [
        ("AB", "ABu", "ABu"),
        ("A", "AAu", "Au"),
        ("A", "CAu", "Cu"),
        ("AB", "AABu", "ABu"),
        ("A", "CDAu", "CDu"),
        ("A", "Cu", "Cu"),
        ("A", "CBu", "CBu"),
        ("", "AAu", "AAu"),
    ],
)
def test_the_agents_own_system_messages_stand_for_the_recorded_ones(recorded: str, prompt: str, read: str) -> None:
    """A letter is a system message, u the user's."""
    task = Task(
        id="t", instruction="u", environment="desk", messages=[{"role": "system", "content": each} for each in recorded]
    )
    messages = [HumanMessage("u") if each == "u" else SystemMessage(each) for each in prompt]
    assert "".join(each.text for each in with_own_rules(task, messages)) == read
