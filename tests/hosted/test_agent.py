"""An unmodified tool agent in a hosted dream of a world that nobody has seen: tool schemas and a task, no trajectory."""

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from dreamgym_lg.dream import Dream, Model, usual_dream
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent, simulated
from dreamgym_lg.types import Task


@tool
def find_room(city: str) -> dict[str, int]:
    """Find a free room."""
    raise AssertionError("the real tool ran")


def hotel(messages: list[dict[str, Any]]) -> str:
    """Both the tool and the judge."""
    asked = json.loads(messages[-1]["content"])
    if "message" in asked:
        return json.dumps({"reason": "the room was told", "success": asked["message"] in asked["steps"][0]["answer"]})
    answer = {"room": len(json.loads(asked["action"])["arguments"]["city"])}
    verdict = {"reasoning": "as asked", "valid": True, "reward": 0, "terminated": False, "success": False}
    return json.dumps({**verdict, "observation": json.dumps(answer)})


async def test_it_works_cold_and_nothing_real_is_touched(serve: Any, chat_model: Any, scripted: Any) -> None:
    class Clerk(scripted):  # type: ignore[misc]
        def _generate(self, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
            result = super()._generate(messages, *args, **kwargs)
            if messages[-1].type == "human":
                asked = {"name": "find_room", "args": {"city": messages[-1].text.split()[-1]}, "id": "1"}
                result.generations[0].message = AIMessage("", tool_calls=[asked])
            return result

    policy = Clerk(reply=lambda messages: messages[-1].text)
    server = serve(hotel)
    graph = create_agent(chat_model(server, model="production"), [find_room])
    tasks = [Task(id=city, instruction=f"Find a room in {city}", environment="hotel") for city in ("Bern", "Geneva")]
    with ReplayBuffer(":memory:") as buffer:
        model = Model(chat_model(server), replay_buffer=buffer)
        assert not model.retrieves
        episodes = await rollout(
            SimulatedAgent(graph, policy),
            tasks,
            usual_dream(model).create_environment,
            source="synthetic",
            run="cold",
            replay_buffer=buffer,
        )
    assert [episode.error for episode in episodes] == [None, None]
    assert [episode.steps[0].next_observation for episode in episodes] == ['{"room": 4}', '{"room": 6}']
    assert all(episode.success and episode.reward == 1 and len(episode.steps) == 2 for episode in episodes)
    assert all(request["model"] == "door" for request in server.requests), "production's own model was not called"
    system = server.requests[0]["messages"][0]["content"]
    assert "Find a free room." in system and "find_room" in system


def test_connections_outlive_an_evaluation(serve: Any, chat_model: Any, tmp_path: Any) -> None:
    """A provider's async client keeps connections that belong to one event loop: with a new loop each time, the second
    evaluation of the same model found them closed."""
    server = serve(lambda messages: "It is done.")
    policy = chat_model(server)
    tasks = [Task(id=city, instruction=f"Find a room in {city}", environment="hotel", split="test") for city in "abcd"]
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        gym = DreamGym(
            create_agent(policy, [find_room]),
            out=tmp_path / "gym",
            replay_buffer=buffer,
            experience_model=chat_model(server),
            tasks=tasks,
            verify_real=lambda task, state: float("done" in state["messages"][-1].text),
        )
        for _ in range(3):
            rate, episodes = gym.evaluate(policy, real=True, concurrency=2)
            assert [episode.error for episode in episodes] == [None] * 4
            assert rate.successes == 4


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_a_hosted_policy_gives_structured_answers(serve: Any, chat_model: Any, way: str) -> None:
    """ChatOpenAI's own `parsed` is None where nobody asked its client for a class."""

    class Route(BaseModel):
        desk: str

    policy = chat_model(serve(lambda messages: json.dumps({"desk": "cards"})))
    async with simulated(None, policy=policy, environment=Dream([]).create_environment()) as episode:
        router = ChatOpenAI(model="production", api_key="x").with_structured_output(Route)
        route = router.invoke("My card is lost") if way == "invoke" else await router.ainvoke("My card is lost")
    assert route == Route(desk="cards") and episode.calls
