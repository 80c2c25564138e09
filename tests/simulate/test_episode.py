"""What an episode does with a graph: who is trained, how it ends, who answers people, what of production stays untouched."""

from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.cache.memory import InMemoryCache as NodeCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_store
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy
from worlds import TASK, Answers, dream, names, played
from zoo import World
from zoo.base import ask, react, toolbox
from zoo.models import ScriptedModel
from zoo.policy import ScriptedPolicy

from dreamgym_lg.actions import parse_action
from dreamgym_lg.environment import EpisodeContext
from dreamgym_lg.errors import ConfigurationError, PredictionFailed, ServersUnavailable
from dreamgym_lg.simulate import Call, SimulatedAgent, simulated, with_policy
from dreamgym_lg.types import StepResult

# --- who is trained -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_an_outage_of_the_policy_ends_the_episode_also_where_the_agent_catches_it(streamed: bool, tmp_path: Path) -> None:
    """In production the agent handles it."""

    class Away(ScriptedPolicy):
        def _asked(self, messages: Any, kwargs: Any) -> None:
            raise ServersUnavailable("nobody answers")

    model = World(folder=tmp_path).model

    def node(state: MessagesState) -> dict[str, Any]:
        try:
            return {"messages": list(model.stream(state["messages"])) if streamed else model.invoke(state["messages"])}
        except Exception as error:
            return {"messages": [("ai", f"sorry: {error}")]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    with pytest.raises(ServersUnavailable, match="nobody answers"):
        dream(graph, Away())
    assert with_policy(graph, Away()).invoke(ask())["messages"][-1].text == "sorry: nobody answers"


def two_nodes(world: World) -> Any:
    def draft(state: MessagesState) -> dict[str, Any]:
        return {"messages": [world.model.invoke(state["messages"], stop=[" - done"])]}

    def polish(state: MessagesState) -> dict[str, Any]:
        return {"messages": [world.model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("draft", draft).add_node("polish", polish)
    return graph.add_edge(START, "draft").add_edge("draft", "polish").compile()


@pytest.mark.parametrize("trained", ["draft", "polish"])
def test_one_of_two_nodes_is_trained(trained: str, tmp_path: Path) -> None:
    world, policy = World(folder=tmp_path), ScriptedPolicy()
    episode, state = dream(two_nodes(world), policy, route=lambda call: call.node == trained)
    assert (policy.calls, world.model_calls) == (1, 1)
    assert [call.node for call in episode.calls] == [trained]
    labels = [message.text.split(":")[0] for message in state["messages"][1:]]
    assert labels == (["policy", "production"] if trained == "draft" else ["production", "policy"])


def test_one_of_two_agents_is_trained(tmp_path: Path) -> None:
    world, policy = World(folder=tmp_path), ScriptedPolicy()
    worker = create_agent(world.model, [toolbox(world)[1]], name="worker")

    @tool
    def research(topic: str) -> str:
        """Let the worker find out."""
        return worker.invoke(ask(topic))["messages"][-1].text

    boss = create_agent(world.production(), [research], name="boss")
    episode, state = dream(boss, policy, route=lambda call: call.agent == "worker")
    assert {call.agent for call in episode.calls} == {"worker"} and policy.calls == 2 and world.model_calls == 2
    assert state["messages"][-1].text.startswith("production: ") and names(episode) == ["pay"] and world.effects == []
    assert all(call.namespace.count("|") for call in episode.calls), "the worker runs inside of the boss"


def test_the_models_of_one_name_are_trained(tmp_path: Path) -> None:
    world, policy = World(folder=tmp_path), ScriptedPolicy()

    class Named(ScriptedModel):
        model_name: str

    models = [Named(label="production", model_name=name) for name in ("small", "large")]
    graph = StateGraph(MessagesState)
    graph.add_node("only", lambda state: {"messages": [model.invoke("hello") for model in models]})
    episode, state = dream(graph.add_edge(START, "only").compile(), policy, route=lambda call: call.model == "large")
    assert [message.text.split(":")[0] for message in state["messages"][1:]] == ["production", "policy"]
    assert episode.calls == [Call("only", episode.calls[0].namespace, "", "large", False)] and world.model_calls == 0


# --- how it ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_recursion_limit_truncates(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph, policy = react(world.model, [toolbox(world)[0]]), ScriptedPolicy(rounds=10**6)
    episode, state = dream(graph, policy, recursion_limit=8)
    assert episode.truncated and len(episode.steps) == 4 and len(state["messages"]) == 9
    limited = graph.with_config(recursion_limit=1000)
    assert dream(limited, policy, recursion_limit=8)[0].truncated, "the graph's own limit is production's"
    patient = ScriptedPolicy(rounds=30)
    assert dream(graph, patient)[0].truncated and not dream(graph.with_config(recursion_limit=200), patient)[0].truncated
    agent = create_agent(world.model, [toolbox(world)[0]])
    assert dream(agent, patient)[0].truncated, "create_agent's 9,999 is nobody's choice"
    assert not dream(agent.with_config(recursion_limit=200), patient)[0].truncated


async def test_a_real_episode_ends_where_the_dream_does(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph, endless = react(world.model, [toolbox(world)[0]]), ScriptedPolicy(rounds=10**6)
    for expected, options in ((25, {}), (4, {"recursion_limit": 8})):
        agent = SimulatedAgent(graph, endless, verify=lambda task, state: 1.0, real=True, **options)
        outcome = await played(agent, None)
        assert outcome["success"] is False and outcome["steps"][-1].truncated and len(outcome["steps"]) == expected + 1


@pytest.mark.parametrize("verify", [None, lambda task, state: 1.0], ids=["the world judges", "verify judges"])
async def test_a_truncated_episode_earns_nothing(verify: Any, tmp_path: Path) -> None:
    """The reward is the outcome of a task that ended: nobody is asked for the outcome of one that was cut short."""
    world, environment = World(folder=tmp_path), Answers()  # which would reward any final answer with 1
    graph = react(world.model, [toolbox(world)[0]])
    endless = SimulatedAgent(graph, ScriptedPolicy(rounds=10**6), verify=verify, recursion_limit=8)
    found = await played(endless, environment)
    assert found["success"] is False and found["steps"][-1].truncated and not found["steps"][-1].terminated
    assert sum(step.reward for step in found["steps"]) == 0 and len(environment.actions) == 4
    whole = await played(SimulatedAgent(graph, ScriptedPolicy(), verify=verify), Answers())
    assert whole["success"] is True and sum(step.reward for step in whole["steps"]) == 1


class Failing(Answers):
    def __init__(self, at: int, error: Exception) -> None:
        super().__init__()
        self.at, self.error = at, error

    def step(self, action: str) -> StepResult:
        if len(self.actions) + 1 == self.at:
            raise self.error
        return super().step(action)


@pytest.mark.parametrize("error", [PredictionFailed("no answer could be read"), KeyError("a bug in the world")])
async def test_a_failing_world_ends_the_episode_past_every_except(error: Exception, tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    book, pay, _ = toolbox(world)
    seen = list[Any]()

    def act(state: MessagesState) -> dict[str, Any]:
        reply = world.model.bind_tools([book, pay]).invoke(state["messages"])
        for call in reply.tool_calls:
            try:
                seen.append({"book": book, "pay": pay}[call["name"]].invoke(call))
            except Exception as failure:
                seen.append(failure)
        return {"messages": [AIMessage("all is well")]}

    graph = StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").compile()
    policy = ScriptedPolicy(per_reply=2)
    with pytest.raises(type(error)) as caught:
        dream(graph, policy, Failing(2, error))
    assert caught.value is error and len(seen) == 1
    with pytest.raises(type(error)):
        await played(SimulatedAgent(graph, policy), Failing(2, error))
    states = list[Any]()
    agent = SimulatedAgent(react(world.model, [book], tool_node=ToolNode([book], handle_tool_errors=True)), policy)
    with pytest.raises(type(error)):
        async for state in agent.astream({"task": TASK}, context=EpisodeContext(environment=Failing(2, error))):
            states.append(state)
    assert len(states[0]["steps"]) == 1, "what was played before is kept"


async def test_a_world_that_ends_ends_the_episode(tmp_path: Path) -> None:
    class Ending(Answers):
        truncates = False

        def step(self, action: str) -> StepResult:
            if len(self.actions) == 2:
                raise RuntimeError("a step after the end")
            result = super().step(action)
            over = len(self.actions) == 2
            return result._replace(
                terminated=over and not self.truncates,
                truncated=over and self.truncates,
                reward=0.5 * over,
                info={"success": over},
            )

    class Cut(Ending):
        truncates = True

    world = World(folder=tmp_path)
    graph, policy = react(world.model, [toolbox(world)[0]]), ScriptedPolicy(rounds=5)
    at_once, _ = dream(graph, ScriptedPolicy(per_reply=4), Ending())
    assert len(at_once.steps) == 2, "calls of the same reply that waited for their turn"
    for ending in (Ending, Cut):
        episode, state = dream(graph, policy, ending())
        assert len(episode.steps) == 2 and episode.truncated is ending.truncates and len(state["messages"]) >= 5
        found = await played(SimulatedAgent(graph, policy), ending())
        assert found["success"] is not ending.truncates
        assert sum(step.reward for step in found["steps"]) == (0.0 if ending.truncates else 0.5)
        assert len(found["steps"]) == 3 and found["steps"][-1].truncated is ending.truncates


# --- nodes of plain code ------------------------------------------------------------------------------------------------------


async def test_a_simulated_node_is_answered_by_the_world(tmp_path: Path) -> None:
    world = World(folder=tmp_path)

    def act(state: Any) -> Any:
        world.write("act", state["city"])
        return {"room": "really booked"}

    def say(state: Any) -> Any:
        return {"text": world.model.invoke(state["room"]).text}

    graph = StateGraph(dict).add_node("act", act).add_node("say", say).add_edge(START, "act").add_edge("act", "say").compile()
    answers = {"node:act": '{"room": "dreamed room", "city": "Rome"}'}
    episode, state = dream(graph, ScriptedPolicy(), Answers(answers), {"city": "Rome"}, simulate_nodes=["act"])
    assert world.effects == [] and "dreamed room" in state["text"]
    (step,) = episode.steps
    assert parse_action(step.action) == ("node:act", {"state": {"city": "Rome"}})
    async with simulated(
        graph, policy=ScriptedPolicy(), environment=Answers(answers), task=TASK, simulate_nodes=["act"]
    ) as again:
        assert "dreamed room" in (await again.ainvoke({"city": "Rome"}))["text"]
    with pytest.raises(PredictionFailed, match="node 'act' is simulated; its answer must be a JSON object"):
        dream(graph, ScriptedPolicy(), Answers({"node:act": "fine"}), {"city": "Rome"}, simulate_nodes=["act"])
    assert graph.invoke({"city": "Rome"})["text"].startswith("production") and len(world.effects) == 1


# --- what of production stays untouched ---------------------------------------------------------------------------------------


def test_checkpoints_store_and_caches_of_production_stay_untouched(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    saver, store, cache = InMemorySaver(), InMemoryStore(), NodeCache()
    store.put(("facts",), "name", {"value": "Ada"})
    book = toolbox(world)[0]
    seen = list[Any]()

    def act(state: MessagesState) -> Any:
        store = get_store()
        seen.append(store.get(("facts",), "name").value["value"])  # type: ignore[union-attr]
        store.put(("facts",), "name", {"value": "overwritten"})
        reply = world.model.bind_tools([book]).invoke(state["messages"])
        return {"messages": [reply, *(book.invoke(call) for call in reply.tool_calls)]}

    graph = StateGraph(MessagesState).add_node("act", act, cache_policy=CachePolicy()).add_edge(START, "act")
    compiled = graph.compile(checkpointer=saver, store=store, cache=cache)
    before = {key: value for key, value in vars(compiled).items() if key not in ("nodes", "channels")}
    for _ in range(2):
        policy = ScriptedPolicy()
        episode, _ = dream(compiled, policy)
        assert policy.calls == 1 and len(episode.steps) == 1, "the cache would have replayed the first episode"
    assert seen == ["Ada", "Ada"]
    assert store.get(("facts",), "name").value == {"value": "Ada"} and list(saver.list(None)) == [] and not cache._cache  # type: ignore[union-attr]
    assert {key: value for key, value in vars(compiled).items() if key not in ("nodes", "channels")} == before
    config: Any = {"configurable": {"thread_id": "production"}}
    with simulated(compiled, policy=ScriptedPolicy(), environment=Answers(), task=TASK) as episode:
        compiled.invoke(ask(), config)
        assert len(compiled.get_state(config).values["messages"]) == 3
        compiled.update_state(config, {"messages": [AIMessage("noted")]})
        assert len(list(compiled.get_state_history(config))) == 4
    assert compiled.get_state(config).values == {}


def test_a_global_llm_cache_replays_no_policy_and_learns_nothing(tmp_path: Path) -> None:
    world, cache = World(folder=tmp_path), InMemoryCache()
    graph = react(world.model, [toolbox(world)[0]])
    set_llm_cache(cache)
    try:
        policy = ScriptedPolicy()
        for calls in (2, 4):
            dream(graph, policy)
            assert policy.calls == calls
        assert not cache._cache and policy.cache is None, "the user's policy object is as it was"
        graph.invoke(ask())
        assert cache._cache
    finally:
        set_llm_cache(None)


# --- the edges ----------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is no chat model"):
        simulated(None, policy=ScriptedPolicy().bind(stop=["x"]), environment=Answers())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="recursion_limit=-1: give the most supersteps"):
        simulated(None, policy=ScriptedPolicy(), environment=Answers(), recursion_limit=-1)
    with pytest.raises(ConfigurationError, match="environment=None.: a dream needs an Environment"):
        simulated(None, policy=ScriptedPolicy(), environment=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="real=True needs verify="):
        SimulatedAgent(None, ScriptedPolicy(), real=True)


def test_an_unknown_name_in_pass_through_is_refused(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph, policy = react(world.model, list(toolbox(world))), ScriptedPolicy()
    unknown: Any = {"pass_through": ["book", "pya"]}
    for made in (
        lambda: simulated(graph, policy=policy, environment=Answers(), **unknown),
        lambda: SimulatedAgent(graph, policy, **unknown),
        lambda: with_policy(graph, policy, **unknown),
    ):
        with pytest.raises(ConfigurationError, match="unknown tool 'pya'; known: book, mail, pay. Did you mean 'pay'"):
            made()

    def node(state: dict) -> dict[str, Any]:
        return {"found": tool("late", description="Late.")(lambda city: city).invoke({"city": "Rome"})}  # type: ignore[call-overload]

    compiled = StateGraph(dict).add_node("node", node).add_edge(START, "node").compile()
    assert dream(compiled, policy, payload={"found": None}, pass_through=["late"])[1]["found"] == "Rome", "made in the run"


async def test_without_an_environment_no_real_tool_runs(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    agent = SimulatedAgent(react(world.model, [toolbox(world)[0]]), ScriptedPolicy())
    with pytest.raises(ConfigurationError, match="rollout needs create_environment="):
        await anext(agent.astream({"task": TASK}, context=EpisodeContext()))
    assert world.effects == []


def test_it_is_over_when_it_is_over(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = react(world.model, [toolbox(world)[0]])
    with (
        pytest.raises(KeyError, match="the user's own"),
        simulated(graph, policy=ScriptedPolicy(), environment=Answers(), task=TASK),
    ):
        raise KeyError("the user's own")
    assert graph.invoke(ask())["messages"][-1].text.startswith("production: ") and len(world.effects) == 1
