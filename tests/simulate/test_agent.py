"""What `rollout` plays and what goes back to production: the same agent in the dream and on its real tools."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call, wrap_tool_call
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import Pregel
from langgraph.runtime import Runtime
from worlds import TASK, Answers, played
from zoo import KINDS, RACING, Built, Kind, World, signed, view
from zoo.base import answered, ask, react, toolbox
from zoo.policy import ScriptedPolicy, policy_for

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent, SimulatedEpisode, simulated, with_policy
from dreamgym_lg.simulate.agent import ResetReal
from dreamgym_lg.types import Step, StepResult, Task, Trajectory

NO_GRAPH = ("object_with_invoke", "graph_in_a_chain", "async_checkpoints")
OWN_THREADS = ("raw_thread", "thread_pool", "timer", "stream_read_by_another", "pool_of_multiprocessing")
"""Kinds whose node asks a model in a thread or pool of its own."""


def run(built: Built, graph: Any) -> Any:
    if built.mode == "async":
        return asyncio.run(built.ainvoke(graph, built.payload))
    return built.invoke(graph, built.payload)


class Replayed(Answers):
    """Answers every action as it was answered in these steps."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.known: dict[str, list[Step]] = defaultdict(list)
        for step in steps:
            self.known[step.action].append(step)

    def step(self, action: str) -> StepResult:
        if action not in self.known:
            return super().step(action)
        found = self.known[action].pop(0)
        return StepResult(found.next_observation, 0.0, False, False, {"valid": found.valid})


# --- the dream and the real environment ---------------------------------------------------------------------------------------


def inside(episode: SimulatedEpisode, built: Built) -> Any:
    """The user's own way to run it, in an episode; a loop of its own must be inside of it."""

    async def arun() -> Any:
        async with episode:
            return await built.ainvoke(built.graph, built.payload)

    if built.mode == "async":
        return asyncio.run(arun())
    with episode:
        return built.invoke(built.graph, built.payload)


NOT_REPLAYED = ("typed_results", "returns_blocks", "node_of_plain_code")
"""What a real episode records is the text that the policy read, not the value that a tool or a node returned."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name not in NOT_REPLAYED], ids=lambda kind: kind.name)
def test_both_record_the_same_steps(kind: Kind, tmp_path: Path) -> None:
    seen: list[list[Step]] = []
    for real in (True, False):
        world = World(folder=tmp_path / str(real))
        built = kind.build(world)
        environment = None if real else Replayed(seen[0])
        options: Any = {"task": TASK, "pass_through": built.passthrough}
        episode = SimulatedEpisode(built.graph, policy=policy_for(world), environment=environment, **options)
        result = inside(episode, built)
        assert signed(result, "policy") and not signed(result, "production") and world.model_calls == 0
        assert {name for name, _ in world.effects} == (set(built.tools) if real else set())
        if real:
            built.expect(result)
        refused = [step for step in episode.steps if step.decided_by]  # what failed in the tool itself, the world answers
        assert all(step.decided_by == "schema" and not step.valid for step in refused)
        assert bool(refused) == (kind.name in ("rejected_arguments", "shell") and not real)
        seen.append(undecided(episode.steps))
    assert built.tools == () or seen[0]
    if kind.name in RACING:
        seen = [sorted(steps, key=lambda step: step.next_observation) for steps in seen]
        assert [step.action for step in seen[0]] == [step.action for step in seen[1]]
    else:
        assert seen[0] == seen[1]


def undecided(steps: Sequence[Step]) -> list[Step]:
    """The steps without what only a dream knows of them: in production, whose threads are left alone, a line is lost there."""
    return [replace(step, decided_by="", line="") for step in steps]


async def play(agent: SimulatedAgent, environment: Any, tasks: Sequence[Task] = (TASK,)) -> list[Trajectory]:
    source: Any = "synthetic" if environment else "real"
    create = (lambda: environment) if environment else None
    return await rollout(agent, tasks, create, source=source, num_generations=1)


@pytest.mark.parametrize("name", ["react_agent", "langchain_agent", "closures", "async_parallel", "rejected_arguments"])
async def test_rollout_plays_it_in_both_worlds(name: str, tmp_path: Path) -> None:
    (kind,) = [kind for kind in KINDS if kind.name == name]
    world = World(folder=tmp_path)
    built = kind.build(world)

    def verify(task: Task, state: Any) -> float:
        built.expect(state)
        return 1.0

    options: Any = {"payload": lambda task: built.payload, "pass_through": built.passthrough}
    (real,) = await play(SimulatedAgent(built.graph, policy_for(world), verify=verify, real=True, **options), None)
    assert real.error is None and real.success and real.reward == 1.0
    assert {tool for tool, _ in world.effects} == set(built.tools)
    effects = len(world.effects)
    dreamed_agent = SimulatedAgent(built.graph, policy_for(world), verify=verify, **options)
    (dreamed,) = await play(dreamed_agent, Replayed(real.steps))
    assert dreamed.error is None and dreamed.success and len(world.effects) == effects and world.model_calls == 0
    assert undecided(dreamed.steps) == undecided(real.steps) and dreamed.steps[-1].terminated
    assert dreamed.steps[-1].judged_by == real.steps[-1].judged_by == "verify"
    (judged,) = await play(SimulatedAgent(built.graph, policy_for(world), **options), Replayed(real.steps[:-1]))
    assert undecided(judged.steps[:-1]) == undecided(real.steps[:-1]) and judged.success and judged.reward == 1.0


def emptied(log: list[str], *, asynchronous: bool) -> ResetReal:
    """A context of real episodes that notes what happens around them; two at once are seen in the notes."""

    @contextmanager
    def reset(task: Task) -> Iterator[None]:
        log.append(f"in {task.id}")
        reset_for.set(task.id)
        yield
        log.append(f"out {task.id}")

    @asynccontextmanager
    async def areset(task: Task) -> AsyncIterator[None]:
        with reset(task):
            yield

    return areset if asynchronous else reset


reset_for: ContextVar[str] = ContextVar("reset_for", default="")


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_real_episodes_are_played_and_verified_in_their_context(asynchronous: bool, tmp_path: Path) -> None:
    """Synchronous ones one after the other: they share one real world."""
    log, world = list[str](), World(folder=tmp_path)

    def verify(task: Task, state: Any) -> float:
        log.append(f"verified {reset_for.get()}")
        return 1.0

    def act(state: MessagesState) -> dict[str, Any]:
        log.append(f"acted {reset_for.get()}")
        return {"messages": [world.model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").compile()
    reset = emptied(log, asynchronous=asynchronous)
    agent = SimulatedAgent(graph, ScriptedPolicy(), verify=verify, real=True, reset_real=reset)
    episodes = await play(agent, None, [replace(TASK, id=id) for id in "ab"])
    assert [episode.success for episode in episodes] == [True, True]
    expected = {id: [f"in {id}", f"acted {id}", f"verified {id}", f"out {id}"] for id in "ab"}
    assert {id: [note for note in log if note.endswith(id)] for id in "ab"} == expected
    if not asynchronous:
        assert log == expected["a"] + expected["b"]


async def test_a_context_that_fails_or_is_none_is_the_episodes_error(tmp_path: Path) -> None:
    world = World(folder=tmp_path)

    @contextmanager
    def away(task: Task) -> Iterator[None]:
        raise ConnectionError("the staging database is away")
        yield

    def agent(reset: Any) -> SimulatedAgent:
        graph = react(world.model, [toolbox(world)[0]])
        return SimulatedAgent(graph, policy_for(world), verify=lambda *_: 1.0, real=True, reset_real=reset)

    (episode,) = await play(agent(away), None)
    assert str(episode.error).startswith("ConnectionError: the staging database is away at ") and world.effects == []
    (episode,) = await play(agent(lambda task: 3), None)
    assert "reset_real returned 3" in str(episode.error)
    with pytest.raises(ConfigurationError, match="no real world to reset"):
        SimulatedAgent(None, ScriptedPolicy(), reset_real=away)


async def test_a_failed_rollout_is_data(tmp_path: Path) -> None:
    """Neither a blocked access nor a broken world ends the other episodes."""

    def node(state: MessagesState) -> dict[str, Any]:
        if "harm" in state["messages"][0].text:
            (tmp_path / "harm").write_text("done")
        return {"messages": [("ai", "fine")]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    tasks = [Task(id=text, instruction=text, environment="x") for text in ("good", "harm")]
    good, harm = await play(SimulatedAgent(graph, ScriptedPolicy()), Answers(), tasks)
    assert good.success and good.error is None
    assert harm.error and harm.error.startswith("AccessBlocked: a dreamed episode must not touch the real world: open of ")
    assert not (tmp_path / "harm").exists()


async def test_the_observations_are_what_the_policy_read(tmp_path: Path) -> None:
    world, policy = World(folder=tmp_path), ScriptedPolicy(per_reply=2, rounds=2)
    found = await played(SimulatedAgent(react(world.model, list(toolbox(world)[:2])), policy), Answers())
    read = [message.text for message in policy.asked[-1][0] if message.type == "tool"]
    assert [step.observation for step in found["steps"]] == ["book a room", *read]
    assert [step.next_observation for step in found["steps"]] == [*read, ""]


# --- back to production -------------------------------------------------------------------------------------------------------


HAND_OVER_CONTEXT = ("in_threads_async", "context_given_by_hand", "pool_that_copies_contexts", "thread_with_a_loop")
"""Kinds named in the warning whose threads are given the context all the same."""

SERVED = [kind for kind in KINDS if kind.name not in (*NO_GRAPH, *OWN_THREADS)]


@pytest.mark.parametrize("kind", SERVED, ids=lambda kind: kind.name)
def test_the_served_graph_acts_with_the_policy(kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(folder=tmp_path)
    built = kind.build(world)
    before = dict(vars(built.graph))
    policy = policy_for(world)
    served = with_policy(built.graph, policy)
    assert "threads of their own" not in caplog.text or kind.name in HAND_OVER_CONTEXT
    assert isinstance(served, type(built.graph)) and isinstance(served, Pregel) and served.name == built.graph.name
    result = run(built, served)
    built.expect(result)
    assert signed(result, "policy") and not signed(result, "production") and world.model_calls == 0 and policy.calls > 0
    assert {name for name, _ in world.effects} == set(built.tools)
    assert vars(built.graph) == before
    again = run(built, built.graph)
    assert (signed(again, "production") or built.cached) and (world.model_calls > 0 or built.cached)


@pytest.mark.parametrize("name", OWN_THREADS)
def test_nodes_that_start_threads_are_named_and_keep_their_model_there(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Production's threads are not touched, also after a dream in the same process has been."""
    (kind,) = [kind for kind in KINDS if kind.name == name]
    world = World(folder=tmp_path)
    built = kind.build(world)
    served = with_policy(built.graph, policy_for(world))
    assert "start threads of their own" in caplog.text
    inside(simulated(built.graph, policy=policy_for(world), environment=Answers(), task=TASK), built)
    assert world.model_calls == 0 and world.effects == []
    assert signed(run(built, served), "production") and world.model_calls > 0


def test_an_object_that_is_no_graph_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="object is no compiled graph"):
        with_policy(object(), ScriptedPolicy())  # type: ignore[arg-type]


def test_a_path_in_place_of_the_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="policy='policies/v1' is no chat model: .*load_policy.folder. reads"):
        with_policy(react(World(folder=tmp_path).model, toolbox(World(folder=tmp_path))), "policies/v1")  # type: ignore[arg-type]


MODES: Any = ["values", "updates", "messages", "debug", "tasks", "checkpoints", "custom"]


async def test_it_streams_in_every_mode(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = react(world.model, [toolbox(world)[0]], checkpointer=InMemorySaver())
    served = with_policy(graph, ScriptedPolicy())
    config: Any = {"configurable": {"thread_id": "1"}}
    for mode in MODES:
        config["configurable"]["thread_id"] = mode
        plain = list(graph.stream(ask(), config, stream_mode=mode))
        config["configurable"]["thread_id"] = f"{mode} served"
        chunks = list(served.stream(ask(), config, stream_mode=mode))
        config["configurable"]["thread_id"] = f"{mode} async"
        async_chunks = [chunk async for chunk in served.astream(ask(), config, stream_mode=mode)]
        assert len(chunks) == len(async_chunks) == len(plain) and bool(chunks) is (mode != "custom"), mode
        assert not any(signed(each, "production") for each in (chunks, async_chunks))
    assert served.get_state(config).values["messages"][-1].text.startswith("policy: ")
    assert graph.get_state(config).values == served.get_state(config).values, "one checkpointer"
    config["configurable"]["thread_id"] = "events"
    events = [event async for event in served.astream_events(ask(), config, version="v2")]
    assert signed(events[-1]["data"]["output"], "policy")


async def test_it_is_a_part_of_other_graphs(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    served = with_policy(react(world.model, [toolbox(world)[0]]), ScriptedPolicy())

    def after(state: MessagesState) -> dict[str, Any]:
        return {"messages": [world.model.invoke("after")]}

    graph = StateGraph(MessagesState).add_node("agent", served).add_node("after", after)
    outer = graph.add_edge(START, "agent").add_edge("agent", "after").compile()
    assert [name for name, _ in outer.get_subgraphs()] == ["agent"]
    for state in (outer.invoke(ask()), await outer.ainvoke(ask())):
        answered()({"messages": state["messages"][:-1]})
        assert state["messages"][-2].text.startswith("policy: ") and state["messages"][-1].text.startswith("production: after")
    assert len(world.effects) == 2
    parts = list(outer.stream(ask(), stream_mode="updates", subgraphs=True))
    assert [bool(namespace) for namespace, _ in parts] == [True, True, True, False, False]


async def test_policies_of_nested_graphs_answer_at_their_own_nodes(tmp_path: Path) -> None:
    """One agent was trained, then the graph around it; or one graph twice, for two nodes."""
    world, inner, outer = World(folder=tmp_path), ScriptedPolicy(label="inner"), ScriptedPolicy(label="outer")

    def says(text: str) -> Any:
        return lambda state: {"messages": [world.model.invoke(text)]}

    graph = StateGraph(MessagesState).add_node("agent", with_policy(react(world.model, []), inner))
    graph.add_node("plan", says("plan")).add_node("write", says("write"))
    whole = graph.add_edge(START, "agent").add_edge("agent", "plan").add_edge("plan", "write").compile()
    nested = with_policy(whole, outer, route=["write"])
    stacked = with_policy(nested, ScriptedPolicy(label="third"), route=["plan"])
    for served, labels in ((nested, ["inner", "production", "outer"]), (stacked, ["inner", "third", "outer"])):
        for state in (served.invoke(ask()), await served.ainvoke(ask())):
            assert [each.text.partition(":")[0] for each in state["messages"][-3:]] == labels
    with simulated(stacked, policy=ScriptedPolicy(label="new"), environment=Answers(), task=TASK) as episode:
        state = episode.invoke(ask())
    assert [each.text.partition(":")[0] for each in state["messages"][-3:]] == ["new"] * 3


def test_a_stream_left_early_leaves_nothing_behind(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    served = with_policy(react(world.model, [toolbox(world)[0]]), ScriptedPolicy())
    stream = served.stream(ask())
    assert signed(next(stream), "policy")
    assert world.model.invoke("beside").text.startswith("production: "), "the caller is no part of the episode"
    stream.close()
    assert world.model.invoke("after").text.startswith("production: ")


def test_a_dream_of_the_served_graph_is_a_dream(tmp_path: Path) -> None:
    world, old, new = World(folder=tmp_path), ScriptedPolicy(label="old"), ScriptedPolicy(label="new")
    served = with_policy(react(world.model, [toolbox(world)[0]]), old)
    with simulated(served, policy=new, environment=Answers(), task=TASK) as episode:
        state = episode.invoke(ask())
    assert signed(state, "new") and old.calls == 0 and world.effects == [] and len(episode.steps) == 1
    assert signed(served.invoke(ask()), "old") and len(world.effects) == 1


@pytest.mark.parametrize("named", [False, True])
def test_a_tools_own_model_is_trained_only_if_the_tool_passes_through(named: bool, tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    summaries = list[str]()

    @tool
    def summarise(text: str) -> str:
        """Summarise."""
        summaries.append(world.model.invoke(text).text)
        return summaries[-1]

    graph, options = react(world.model, [summarise]), {"pass_through": ["summarise"] if named else []}
    with_policy(graph, ScriptedPolicy(), **options).invoke(ask())
    assert summaries[0].startswith("policy: " if named else "production: ")
    with simulated(graph, policy=ScriptedPolicy(), environment=Answers(), task=TASK, **options) as episode:  # type: ignore[arg-type]
        episode.invoke(ask())
    assert len(summaries) == (2 if named else 1) and len(episode.steps) == (0 if named else 1)
    assert view(graph.invoke(ask()))["messages"][-1][1].startswith("production: ")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dream", "reality"])
async def test_middleware_with_synchronous_hooks_alone_runs_where_the_agent_is_awaited(mode: str, tmp_path: Path) -> None:
    """As LangChain documents it: `@wrap_model_call` and `@wrap_tool_call` on plain functions."""
    passed = list[str]()

    @wrap_model_call
    def count_models(request: Any, handler: Any) -> Any:
        passed.append("model")
        return handler(request)

    @wrap_tool_call
    def count_tools(request: Any, handler: Any) -> Any:
        passed.append("tool")
        return handler(request)

    world = World(folder=tmp_path)
    graph = create_agent(world.model, [toolbox(world)[0]], middleware=[count_models, count_tools])
    real: Any = {"real": True, "verify": lambda task, state: True} if mode == "reality" else {}
    agent = SimulatedAgent(graph, ScriptedPolicy(), **real)
    tasks = [replace(TASK, id=f"t{n}") for n in range(40)]
    episodes = await rollout(agent, tasks, None if real else Answers, source="synthetic", concurrency=40)
    assert [episode.error for episode in episodes] == [None] * 40
    assert {len(episode.steps) for episode in episodes} == {2} and passed.count("tool") == 40 and passed.count("model") == 80
    assert len(world.effects) == (40 if real else 0)


@dataclass
class Customer:
    name: str
    plan: str = "free"


@pytest.mark.parametrize("context", [Customer("Ann"), lambda task: Customer(f"Ann of {task.id}")], ids=["value", "function"])
async def test_an_agent_with_a_context_schema_is_given_its_context(context: Any, tmp_path: Path) -> None:
    def greet(state: MessagesState, runtime: Runtime[Customer]) -> dict[str, Any]:
        return {"messages": [("ai", f"Hello {runtime.context.name}")]}

    graph = StateGraph(MessagesState, context_schema=Customer)
    graph.add_node("greet", greet)
    agent = graph.add_edge(START, "greet").compile()
    (episode,) = await rollout(SimulatedAgent(agent, ScriptedPolicy(), context=context), [TASK], Answers, source="synthetic")
    expected = "Ann" if isinstance(context, Customer) else f"Ann of {TASK.id}"
    assert episode.error is None and f"Hello {expected}" in episode.steps[-1].action
    with simulated(agent, policy=ScriptedPolicy(), environment=Answers(), task=TASK, context=context) as one:
        assert one.invoke(ask())["messages"][-1].text == f"Hello {expected}"
    with pytest.raises(ConfigurationError, match="runs need a Customer with name: give context="):
        SimulatedAgent(agent, ScriptedPolicy())
    with pytest.raises(ConfigurationError, match="runs need a Customer with name: give context="):
        AgentWorld(agent)
    assert AgentWorld(agent, context=context).options["context"] is context
