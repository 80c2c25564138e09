"""The facade: what its constructor refuses, training that goes on, evaluation in dream and reality, the way back."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import BaseTool, tool
from langgraph.graph import START, StateGraph
from pydantic import Field

from dreamgym_lg import (
    Dream,
    DreamGym,
    Model,
    ModelJudge,
    Recorded,
    References,
    ReplayBuffer,
    Step,
    Task,
    Trajectory,
    load_traces,
)
from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.dream import TraceIndex
from dreamgym_lg.errors import ConfigurationError, EpisodesMissing
from dreamgym_lg.experiment.gate import check_truthful
from dreamgym_lg.gym import _label, _split
from dreamgym_lg.statistics import wilson

create_agent = pytest.importorskip("langchain.agents").create_agent


class Says(BaseChatModel):
    """Books a room, then answers with `answer`."""

    answer: str = "done"
    city: str = "Rome"
    """Empty: it is left away, which the tool does not allow."""
    asked: list[int] = Field(default_factory=list)
    """An entry a call; an episode asks a copy of its policy, which shares it."""

    @property
    def _llm_type(self) -> str:
        return "says"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.asked.append(len(messages))
        booked = any(isinstance(message, ToolMessage) for message in messages)
        call = {"name": "book", "args": {"city": self.city} if self.city else {}, "id": "1"}
        message = AIMessage(self.answer) if booked else AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=message)])


class World(BaseChatModel):
    """A scripted experience model and judge: every room is booked, every answer with "done" in it a success."""

    @property
    def _llm_type(self) -> str:
        return "world"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        action = [line for line in messages[-1].text.splitlines() if line.startswith("> ")][-1]
        text = "valid, no progress yet\nreward 0, continues\nA dreamed room."
        if '"answer"' in action:
            text = f"it ends\n{'success' if 'done' in action else 'failure'}"
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


def tasks() -> list[Task]:
    splits = [("a", "train"), ("b", "train"), ("c", "test")]
    return [Task(id=id, instruction=f"Book room {id}.", environment="rooms", split=split) for id, split in splits]


class Agent:
    """A `create_agent` graph with a real tool, and what that tool did."""

    def __init__(self) -> None:
        self.booked: list[str] = []
        self.production = Says(answer="production")

        @tool
        def book(city: str) -> str:
            """Book a room."""
            self.booked.append(city)
            return "A real room."

        self.tool: BaseTool = book
        self.graph = create_agent(self.production, [book])

    def verify(self, task: Task, state: Any) -> float:
        return float("A real room." in [message.text for message in state["messages"]])


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def buffer(tmp_path: Path) -> ReplayBuffer:
    return ReplayBuffer(tmp_path / "replay.db")


def gym_of(agent: Agent, buffer: ReplayBuffer, **options: Any) -> DreamGym:
    out = Path(getattr(buffer, "_name", buffer)).parent / "gym"  # the first test gives a path as a buffer
    model = None if options.get("dream") else World()
    given = {"replay_buffer": buffer, "experience_model": model, "tasks": tasks(), "out": out, **options}
    return DreamGym(agent.graph, **given)


def test_what_the_constructor_refuses(agent: Agent, buffer: ReplayBuffer) -> None:
    with pytest.raises(ConfigurationError, match="ReplayBuffer"):
        gym_of(agent, "replay.db")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Did you mean 'pass_through'"):
        gym_of(agent, buffer, pass_trough=["book"])
    with pytest.raises(ConfigurationError, match="Did you mean 'book'"):
        gym_of(agent, buffer, pass_through=["boook"])
    with pytest.raises(ConfigurationError, match="is no chat model"):
        gym_of(agent, buffer, experience_model=3)
    with pytest.raises(ConfigurationError, match="nobody:gpt"):
        gym_of(agent, buffer, experience_model="nobody:gpt")
    with pytest.raises(ConfigurationError, match="payload=3 is no function"):
        gym_of(agent, buffer, payload=3)
    with pytest.raises(ConfigurationError, match="option of DreamGym 'verify'.*Did you mean 'verify_"):
        gym_of(agent, buffer, verify=agent.verify)
    with pytest.raises(ConfigurationError, match="writes='book': give a list"):
        gym_of(agent, buffer, writes="book")
    with pytest.raises(ConfigurationError, match="split of task 't'.*Did you mean 'test'"):
        Task(id="t", instruction="", environment="", split="tst")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="holds no compiled graph"):
        DreamGym(object(), replay_buffer=buffer, experience_model=World())


def test_a_graph_that_could_leak_is_refused_with_what_to_do(buffer: ReplayBuffer, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "orders.db")

    def act(state: dict) -> dict:
        connection.execute("DELETE FROM orders")
        return {}

    graph = StateGraph(dict).add_node("act", act).add_edge(START, "act").compile()
    with pytest.raises(ConfigurationError, match="sqlite3.Connection in act.*simulate_nodes"):
        DreamGym(graph, replay_buffer=buffer, experience_model=World())
    gym = DreamGym(graph, replay_buffer=buffer, experience_model=World(), simulate_nodes=["act"])
    assert gym.examine().problems == []


def test_tasks_are_those_given_or_the_real_ones_of_the_buffer(agent: Agent, buffer: ReplayBuffer) -> None:
    step = Step(observation="Book.", action='{"answer": "done"}', next_observation="", reward=1, terminated=True)
    recorded = Task(id="t", instruction="Book.", environment="traces", observation="Book.")
    buffer.add(Trajectory(task=recorded, steps=[step], success=True))
    assert [task.id for task in gym_of(agent, buffer, tasks=()).world.all_tasks] == ["t"]
    said = list[str]()
    assert [task.id for task in gym_of(agent, buffer, say=said.append).world.all_tasks] == ["a", "b", "c"]
    assert {task.id for task in buffer.tasks()} == {"t", "a", "b", "c"}
    assert said[0].startswith("tasks of the environment 'rooms' are given, and the traces are of 'traces': what was recorded")
    held_out = replace(recorded, id="h", instruction="Book one.", observation="", split="test")
    assert [task.id for task in gym_of(agent, buffer, tasks=[held_out], say=said.append).world.all_tasks] == ["t", "h"]
    assert len(said) == 1
    others = [held_out, replace(recorded, id="o", instruction="Book two.", observation="")]
    assert [task.id for task in gym_of(agent, buffer, tasks=others, say=said.append).world.all_tasks] == ["h", "o"]
    assert said[1].startswith("1 training tasks of the traces are not in tasks=")
    with pytest.raises(ConfigurationError, match="tasks= has 1 ids more than once, such as 'o': give each task once"):
        gym_of(agent, buffer, tasks=[*others, others[1]])


def test_another_worlds_traces_in_the_buffer_are_no_data_of_this_one(agent: Agent, buffer: ReplayBuffer) -> None:
    step = Step(observation="Book.", action='{"arguments": {"city": "Rome"}, "name": "book"}', next_observation="Booked.")
    for name in ("rooms", "cars"):
        task = Task(id=name, instruction=f"Book {name}.", environment=name)
        buffer.add(Trajectory(task=task, steps=[replace(step, next_observation=name)], success=True))
    gym = gym_of(agent, buffer, task_generator=lambda *_: None)
    assert [each.task.id for each in gym.experiment.offline()] == ["rooms"]
    shown = gym.experiment.experience().demonstrations("Book.", step.action, tasks()[0])
    assert [each.next_observation for each in shown] == ["rooms"]
    gym.world.task_generator(tasks()[:2], buffer)
    made = Task(id="m", instruction="Book cars.", environment="rooms", rubric="They are booked.", origin="synthetic")
    assert gym.world.check_task(made) is None, "a task of another world is no known one"
    assert gym.world.check_task(replace(made, id="n", instruction="Book room a.")) == "known"


def test_a_task_is_held_out_by_giving_it_with_another_split_and_not_given_back(agent: Agent, buffer: ReplayBuffer) -> None:
    step = Step(observation="Book.", action="book", next_observation="Booked.")
    recorded = Task(id="t", instruction="Book.", environment="traces", observation="Book.")
    buffer.add(Trajectory(task=recorded, steps=[step], success=True))
    assert buffer.similar("Book.", "book") == [step]
    gym_of(agent, buffer, tasks=[*tasks(), replace(recorded, split="test")])
    assert buffer.similar("Book.", "book") == []
    assert [task.split for task in buffer.tasks() if task.id == "t"] == ["test"]
    with pytest.raises(ConfigurationError, match="'t' is stored with split 'test' and given with split 'train'"):
        gym_of(agent, buffer, tasks=[recorded])


def test_imported_traces_are_tasks_whose_dream_can_be_played(agent: Agent, buffer: ReplayBuffer, tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "book", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "A room."}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Booked."}, {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages, "success": True}))
    buffer.extend(load_traces(tmp_path / "traces.jsonl"))
    gym = gym_of(agent, buffer, tasks=())
    rate, (episode,) = gym.evaluate(Says(), tasks=gym.tasks("train"))
    assert rate.successes == 1 and agent.booked == [] and episode.task.instruction == "A room."


def booked(task: Task, city: str, index: int = 0) -> Trajectory:
    """A recorded success that booked a room there."""
    call = Step(observation=task.instruction, action=render_call("book", {"city": city}), next_observation="A real room.")
    answer = Step(observation="A real room.", action=render_answer("done"), next_observation="", reward=1, terminated=True)
    return Trajectory(task=task, steps=[call, answer], success=True, run="traces", rollout_index=index)


def test_traces_decide_in_the_dream_what_they_know(agent: Agent, buffer: ReplayBuffer) -> None:
    train, other, _ = tasks()
    buffer.add(booked(train, "Oslo"))

    def decided(task: Task, city: str, **options: Any) -> list[tuple[str, str, float]]:
        gym = gym_of(agent, buffer, **options)
        (episode,) = gym.evaluate(Says(city=city), tasks=[task])[1]
        (stored,) = buffer.trajectories(run=episode.run)
        assert stored.steps == tuple(episode.steps)
        shown = [step.next_observation.split(" invoking")[0] for step in stored.steps]
        by = [step.decided_by or step.judged_by for step in stored.steps]
        return [(text, part, step.reward) for text, part, step in zip(shown, by, stored.steps, strict=True)]

    known, dreamed = ("A real room.", "recorded", 0), ("A dreamed room.", "model", 0)
    assert decided(train, "Oslo") == [known, ("", "references", 1)]
    assert decided(train, "Rome") == [dreamed, ("", "references", 0)]
    assert decided(train, "Oslo", experience_model=Model(World())) == [known, ("", "references", 1)]
    assert decided(other, "Oslo") == [known, ("", "model", 1)]
    world = Model(World())
    own = Dream([Recorded(buffer), world], judges=[ModelJudge(world)])
    assert decided(train, "Rome", dream=own) == [dreamed, ("", "model", 1)]
    own = Dream([world], judges=[References(buffer)])
    assert decided(train, "Oslo", dream=own) == [dreamed, ("", "references", 1)]
    assert decided(train, "Rome", writes=[]) == [dreamed, ("", "model", 1)], "nothing is written: the answer alone counts"
    assert decided(train, "Rome", verify_dream=lambda task, state: 1) == [dreamed, ("", "verify", 1)]
    assert decided(train, "") == [("Error", "schema", 0), ("", "references", 0)]
    assert agent.booked == []


def test_a_folder_refuses_another_dream_and_takes_the_same_script_again(agent: Agent, buffer: ReplayBuffer) -> None:
    """Other parts or functions were not noticed: the old result came back."""
    world = Model(World())

    def dream(*judges: Any) -> Dream:
        return Dream([Recorded(buffer), world], judges=[*judges, ModelJudge(world)])

    def gym(**options: Any) -> DreamGym:
        given = {"dream": dream(), "payload": lambda task: task, **options}
        return gym_of(agent, buffer, **given)

    gym().experiment.open()
    gym(dream=dream(), payload=lambda task: task).experiment.open()  # a lambda has no address
    gym(tasks=tasks()[:1], verify_real=agent.verify).experiment.open()  # more may be imported, and asked of reality, later
    parts = r"arguments={'dream': \['recorded', 'model', 'references', 'model'\]} is given: give"
    with pytest.raises(ConfigurationError, match=r"arguments={'dream': \['recorded', 'model', 'model'\]}, and " + parts):
        gym(dream=dream(References(buffer))).experiment.open()
    with pytest.raises(ConfigurationError, match=r"was made with arguments={'dream': .*}, and arguments={} is given"):
        gym(dream=None).evaluate(Says())
    with pytest.raises(ConfigurationError, match="{'payload': '<lambda>'}, and arguments={'payload': 'tasks'} is"):
        gym(payload=partial(tasks, 3)).experiment.open()
    with pytest.raises(ConfigurationError, match="made with arguments={}, and arguments={'verify_dream': 'verify'} is given"):
        gym(verify_dream=agent.verify).experiment.check_settings()


def test_writes_of_unknown_names_are_refused_at_once(agent: Agent, buffer: ReplayBuffer) -> None:
    with pytest.raises(ConfigurationError, match="unknown tool in writes 'boook'.*Did you mean 'book'"):
        gym_of(agent, buffer, writes=["boook"])
    with pytest.raises(ConfigurationError, match="writes='book': give a list"):
        gym_of(agent, buffer, writes="book")
    with pytest.raises(ConfigurationError, match="unknown tool in writes 'boook'.*Did you mean 'book'"):
        gym_of(agent, buffer, dream=Dream([Recorded(TraceIndex(buffer, writes=["boook"]))]))


def test_writes_of_tools_that_really_run_are_refused(agent: Agent, buffer: ReplayBuffer) -> None:
    with pytest.raises(ConfigurationError, match="tool 'book' in writes really runs in a dream.*Leave it out; verify_dream="):
        gym_of(agent, buffer, writes=["book"], pass_through=["book"])


def test_a_writing_tool_that_no_trace_calls_may_be_named(agent: Agent, buffer: ReplayBuffer) -> None:
    index = TraceIndex(buffer, writes=["book"])
    gym = gym_of(agent, buffer, dream=Dream([Recorded(index), Model(World())], judges=[ModelJudge(World())]))
    assert gym.evaluate(Says(), tasks=tasks()[:1])[1][0].error is None and index.writes("book")


def test_a_dream_beside_an_experience_model_is_refused(agent: Agent, buffer: ReplayBuffer) -> None:
    with pytest.raises(ConfigurationError, match="dream= brings its own parts"):
        gym_of(agent, buffer, dream=Dream([Model(World())]), experience_model=World())


def test_the_doctor_of_a_gym_knows_its_traces(agent: Agent, buffer: ReplayBuffer) -> None:
    def use(**options: Any) -> str:
        return next(part.use for part in gym_of(agent, buffer, **options).examine().parts if part.name == "book")

    assert use() == "unknown: counts as writing" and use(writes=[]) == "reads: writes= does not name it"
    assert gym_of(agent, buffer).world.writing_tools(buffer) == {"book"}
    assert gym_of(agent, buffer, pass_through=["book"]).world.writing_tools(buffer) == set()


def test_every_task_has_the_schemas_of_the_graph_in_the_dream_as_in_the_buffer(
    agent: Agent, buffer: ReplayBuffer, tmp_path: Path
) -> None:
    """A trace that called no tool told that its task needs none, and the dream showed other tools than training data."""
    said = {"messages": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "done"}], "success": True}
    (tmp_path / "traces.jsonl").write_text(json.dumps(said))
    buffer.extend(load_traces(tmp_path / "traces.jsonl"))
    buffer.add_tasks([Task(id="game", instruction="Take it.", environment="kitchen")])
    gym_of(agent, buffer)
    shown = {task.id: task.tools for task in buffer.tasks()}
    (schema,) = shown["a"] or ()
    assert schema["function"]["name"] == "book" and schema["function"]["parameters"]["properties"].keys() == {"city"}
    assert shown.pop("game") is None and all(tools == [schema] for tools in shown.values())

    model = Prompts()
    gym = gym_of(agent, buffer, experience_model=Model(model))
    gym.evaluate(Says(), tasks=[task for task in buffer.tasks() if task.environment == "traces"])
    (recorded,) = buffer.trajectories(run="traces")
    assert model.systems == {Model(model).prompt_format.head(recorded.task)}


class Prompts(World):
    """Keeps the system prompts that it is asked with."""

    systems: set[str] = Field(default_factory=set)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.systems.add(messages[0].text)
        return super()._generate(messages)


def test_a_malformed_call_is_kept_as_it_was_written(agent: Agent, buffer: ReplayBuffer) -> None:
    """It was stored as an empty answer, and the experience model was asked whether that is a success."""

    class Garbled(Says):
        def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
            bad = {"name": "book", "args": '{"city": "Ro', "id": "1", "error": "cut off", "type": "invalid_tool_call"}
            return ChatResult(generations=[ChatGeneration(message=AIMessage("", invalid_tool_calls=[bad]))])

    gym = gym_of(agent, buffer, verify_real=agent.verify)
    for real in (False, True):
        rate, (episode,) = gym.evaluate(Garbled(), real=real)
        (step,) = episode.steps
        assert rate.successes == 0 and json.loads(step.action) == {"name": "book", "arguments": '{"city": "Ro'}
        assert step.terminated and not step.valid and step.reward == 0


def test_unreadable_answers_in_an_evaluation_are_told(agent: Agent, buffer: ReplayBuffer) -> None:
    class Mumbles(World):
        def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
            mumbled = ChatResult(generations=[ChatGeneration(message=AIMessage("hm"))])
            return mumbled if "room b" in messages[0].text else super()._generate(messages)

    said = list[str]()
    two = [replace(task, split="test") for task in tasks()[:2]]
    gym = gym_of(agent, buffer, tasks=two, experience_model=Mumbles(), say=said.append)
    assert gym.evaluate(Says())[0].successes == 1
    assert len(said) == 1 and said[0].startswith("1 of 2 dreamed episodes could not be played to their end")


def test_a_dream_of_ones_own_is_recorded_by_its_version(agent: Agent, buffer: ReplayBuffer) -> None:
    own = Dream([Model(World())], judges=[ModelJudge(World())], version="mine-1")
    gym = gym_of(agent, buffer, dream=own)
    _, (episode,) = gym.evaluate(Says())
    assert episode.source == "synthetic" and episode.experience_version == "mine-1"


def test_a_folder_that_cannot_be_written_is_named(agent: Agent, buffer: ReplayBuffer, tmp_path: Path) -> None:
    """A full disk was a plain OSError of settings.json; here a file is where the folder should be."""
    (tmp_path / "gym").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written.*free space or permissions"):
        gym_of(agent, buffer).experiment.run_name("train")


def test_an_experience_model_is_kept_and_a_chat_model_is_grounded(agent: Agent, buffer: ReplayBuffer) -> None:
    mine = Model(World())
    other = ReplayBuffer(":memory:")
    own, others = (gym_of(agent, each, experience_model=mine).experiment.experience() for each in (buffer, other))
    assert (own.replay_buffer, others.replay_buffer, mine.replay_buffer) == (buffer, other, None), "each gym has its traces"
    assert own.prompter is mine.prompter is others.prompter and own.k == 0
    mine = Model(World(), replay_buffer=buffer)
    assert gym_of(agent, buffer, experience_model=mine).experiment.experience() is mine
    made = gym_of(agent, buffer).experiment.experience()
    assert made.replay_buffer is buffer and made.k == 3


def test_evaluation_in_the_dream_touches_nothing_and_in_reality_the_tools_run(agent: Agent, buffer: ReplayBuffer) -> None:
    gym = gym_of(agent, buffer, verify_real=agent.verify)
    rate, (dreamed,) = gym.evaluate(Says())
    assert (rate.successes, rate.episodes) == (1, 1) and rate.low < 1 == rate.high
    assert agent.booked == [] and agent.production.asked == []
    assert dreamed.task.id == "c" and dreamed.source == "synthetic" and dreamed.steps[0].next_observation == "A dreamed room."

    rate, (real,) = gym.evaluate(Says(answer="no idea"), real=True)
    assert rate.successes == 1 and agent.booked == ["Rome"] and agent.production.asked == []
    assert real.source == "real" and real.steps[0].next_observation == "A real room."


def test_the_real_check_judges_no_dream_and_the_dreams_no_reality(agent: Agent, buffer: ReplayBuffer) -> None:
    """A check on real tools finds nothing done in a dream: it said 0 of a policy that the experience model gives 1."""
    gym = gym_of(agent, buffer, verify_real=agent.verify)
    assert gym.evaluate(Says())[0].successes == 1, "the experience model judges"
    gym = gym_of(agent, buffer, verify_real=agent.verify, verify_dream=lambda task, state: 0.0)
    assert gym.evaluate(Says())[0].successes == 0
    assert gym.evaluate(Says(), real=True)[0].successes == 1


def test_the_real_world_is_reset_around_each_real_episode(agent: Agent, buffer: ReplayBuffer) -> None:
    @contextmanager
    def reset(task: Task) -> Iterator[None]:
        agent.booked.clear()
        yield
        booked.append(list(agent.booked))

    booked = list[list[str]]()
    two = [replace(task, split="test") for task in tasks()]
    gym = gym_of(agent, buffer, tasks=two, verify_real=agent.verify, reset_real=reset)
    gym.evaluate(Says())
    assert booked == []
    gym.evaluate(Says(), real=True)
    assert booked == [["Rome"]] * 3


def test_an_evaluation_is_played_anew_unless_its_run_is_named(agent: Agent, buffer: ReplayBuffer) -> None:
    gym = gym_of(agent, buffer, verify_real=agent.verify)
    assert gym.evaluate(Says())[0].successes == 1
    assert gym.evaluate(Says(answer="no"))[0].successes == 0, "the first policy's episodes must not stand in for the second's"
    policy = Says()
    for _ in range(2):
        gym.evaluate(policy, run="named")
    assert len(policy.asked) == 2, "a named evaluation goes on where it was"
    assert gym.evaluate(Says(), run="named", real=True)[0].successes == 1 and agent.booked == ["Rome"]


def test_evaluation_runs_where_a_loop_runs_already(agent: Agent, buffer: ReplayBuffer) -> None:
    gym = gym_of(agent, buffer)

    async def notebook() -> list[int]:
        return [gym.evaluate(Says())[0].successes, (await gym.aevaluate(Says()))[0].successes]

    assert asyncio.run(notebook()) == [1, 1]


def test_what_evaluation_and_export_need(agent: Agent, buffer: ReplayBuffer, tmp_path: Path) -> None:
    gym = gym_of(agent, buffer)
    with pytest.raises(ConfigurationError, match="no policy to evaluate"):
        gym.evaluate()
    with pytest.raises(ConfigurationError, match="tasks holds 'h1'; each has to be a Task, such as those of DreamGym.tasks"):
        gym.evaluate(Says(), tasks=["h1"])
    with pytest.raises(ConfigurationError, match="no policy to export"):
        gym.export()
    with pytest.raises(ConfigurationError, match="verify"):
        gym.evaluate(Says(), real=True)
    with pytest.raises(ConfigurationError, match="never trained on"):
        gym_of(agent, buffer, tasks=tasks()[:2]).evaluate(Says())
    with pytest.raises(ConfigurationError, match="no weights in this process"):
        gym.export(tmp_path / "policy", policy=Says())
    with pytest.raises(ConfigurationError, match="cannot be trained"):
        gym_of(agent, buffer, out=tmp_path / "run").train(Says(), 1)
    with pytest.raises(ConfigurationError, match="split 'train'"):
        gym_of(agent, ReplayBuffer(":memory:"), tasks=tasks()[2:], out=tmp_path / "none").train("none", 1)


def test_there_is_no_rate_while_an_episode_is_missing(agent: Agent, buffer: ReplayBuffer) -> None:
    """The same call, with the run that the error names, plays what is missing alone."""

    class Away(Says):
        failures: int

        def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
            if "city b" in str(messages) and len(self.asked) < self.failures:
                self.asked.append(0)
                raise ConnectionError("401: the key has expired")
            return super()._generate(messages, *args, **kwargs)

    two = [replace(task, split="test", instruction=f"Book city {task.id}.") for task in tasks()[:2]]
    gym = gym_of(agent, buffer, tasks=two, verify_dream=lambda task, state: 1.0)
    with pytest.raises(EpisodesMissing, match="1 of 2 episodes.*401: the key has expired") as caught:
        gym.evaluate(Away(failures=1000))
    run = str(caught.value).split("run='")[-1].split("'")[0]
    policy = Away(failures=0)
    rate, episodes = gym.evaluate(policy, run=run)
    assert (rate.successes, rate.episodes) == (2, 2) and len(policy.asked) == 2, "one episode of two calls"
    assert gym.evaluate(Away(failures=2))[0].successes == 2, "played again twice within one call"
    with pytest.raises(ConfigurationError, match="policy_version='Away', and policy_version='Says' is given now"):
        gym.evaluate(Says(), run=run)
    with pytest.raises(ConfigurationError, match="tasks= has 1 ids more than once, such as 'a'"):
        gym.evaluate(policy, tasks=[two[0], two[0]])


def test_two_hosted_models_of_one_class_are_two_policies(agent: Agent, buffer: ReplayBuffer) -> None:
    class Hosted(Says):
        model_name: str

    gym = gym_of(agent, buffer, verify_dream=lambda task, state: 1.0)
    gym.evaluate(Hosted(model_name="large"), run="proof")
    with pytest.raises(ConfigurationError, match="policy_version='large', and policy_version='small' is given now"):
        gym.evaluate(Hosted(model_name="small"), run="proof")


def test_export_is_the_graph_with_real_tools_and_the_policy(agent: Agent, buffer: ReplayBuffer) -> None:
    exported = gym_of(agent, buffer).export(policy=Says(answer="trained"))
    state = exported.invoke({"messages": [("human", "Book.")]})
    assert state["messages"][-1].text == "trained" and agent.booked == ["Rome"] and agent.production.asked == []
    assert agent.graph.invoke({"messages": [("human", "Book.")]})["messages"][-1].text == "production"


def test_an_object_with_invoke_is_played_as_it_is(agent: Agent, buffer: ReplayBuffer) -> None:
    class Desk:
        graph = agent.graph

        def invoke(self, question: str) -> str:
            return self.graph.invoke({"messages": [("human", question)]})["messages"][-1].text

    gym = DreamGym(
        Desk(), out=Path(buffer._name).parent / "gym",
        replay_buffer=buffer, experience_model=World(), tasks=tasks(), payload=lambda task: task.instruction,
        verify_dream=lambda task, state: state == "done",
    )  # fmt: skip
    assert gym.evaluate(Says())[0].successes == 1 and agent.booked == []
    assert gym.evaluate(Says(answer="no"))[0].successes == 0


@pytest.mark.slow
def test_the_names_of_the_first_example_are_exported_lazily() -> None:
    statement = (
        "import dreamgym_lg, sys; assert 'dreamgym_lg.gym' not in sys.modules; "
        "from dreamgym_lg import Dream, DreamGym, Experiment, Model, ReplayBuffer, load_traces, with_policy; "
        "assert not {'torch', 'transformers', 'trl'} & set(sys.modules); print(DreamGym.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=60)
    assert done.stdout == "DreamGym\n", done.stderr
    import dreamgym_lg

    assert all(getattr(dreamgym_lg, name) is not None for name in dreamgym_lg.__all__)
    with pytest.raises(AttributeError, match="DreamGim"):
        dreamgym_lg.DreamGim  # noqa: B018


def recorded(number: int) -> Trajectory:
    task = Task(id=f"t{number}", instruction=f"Book room R-{number}.", environment="traces", tools=["book"])
    step = Step(observation=task.instruction, action='{"answer": "done"}', next_observation="", reward=1.0, terminated=True)
    return Trajectory(task=task, steps=[step], success=True, run="traces")


def test_without_a_held_out_task_a_fifth_of_the_traces_validates_and_a_fifth_is_for_the_proof(
    agent: Agent, buffer: ReplayBuffer, tmp_path: Path
) -> None:
    buffer.extend(map(recorded, range(20)))
    said: list[str] = []
    gym = gym_of(agent, buffer, tasks=[], out=tmp_path / "new", say=said.append)
    held_out = gym.tasks("validation")
    assert [len(gym.tasks(split)) for split in ("train", "validation", "test")] == [12, 4, 4]
    assert "of the traces' 20, 4 are for validation now and 4 for the proof" in said[0]
    assert {each.task.id for each in buffer.trajectories(split="train")} == {task.id for task in gym.tasks("train")}
    buffer.extend(map(recorded, range(20)))  # the script runs again
    buffer.add(replace(recorded(int(held_out[0].id[1:])), run="newer traces"))
    again = gym_of(agent, buffer, tasks=[], out=tmp_path / "new", say=said.append)
    assert again.tasks("validation") == held_out and len(said) == 1


def test_nothing_is_held_out_for_a_proof_that_a_dream_of_all_traces_would_spoil(
    agent: Agent, buffer: ReplayBuffer, tmp_path: Path
) -> None:
    buffer.extend(map(recorded, range(20)))
    said: list[str] = []
    drawn = replace(recorded(3).task, id="drawn", origin="synthetic", drawn={"documents": [], "steps": []})
    for name, own in (("dream", {"dream": Dream([]), "tasks": []}), ("drawn", {"tasks": [drawn]})):
        with ReplayBuffer(tmp_path / f"{name}.db") as other:
            other.extend(map(recorded, range(20)))
            gym = gym_of(agent, other, out=tmp_path / name, say=said.append, **own)
            assert [len(gym.tasks(split)) for split in ("validation", "test")] == [4, 0]
    assert all("hold out before you draw tasks or compile a world" in line for line in said[:2])


def test_the_proof_gets_nothing_where_too_little_would_be_left_to_train_on() -> None:
    def named(number: int) -> Task:
        return Task(id=f"t{number}", instruction=f"Book room R-{number % 4}.", environment="traces", tools=["book"])

    split = Counter(task.split for task in _split([named(number) for number in range(12)], proof=True))
    assert split == {"train": 9, "validation": 3}, "with a proof it would be half of them"


@pytest.mark.parametrize("run", ["elsewhere/train", "elsewhere/prompts/ab12"])
def test_validation_tasks_of_ones_own_few_traces_and_a_training_that_has_begun_are_left_alone(
    run: str, agent: Agent, buffer: ReplayBuffer, tmp_path: Path
) -> None:
    buffer.extend(map(recorded, range(9)))
    assert not gym_of(agent, buffer, tasks=[], out=tmp_path / "few").tasks("validation")
    (begun := gym_of(agent, buffer, tasks=[], out=tmp_path / "begun")).experiment.open()
    buffer.extend(map(recorded, range(9, 20)))
    assert not gym_of(agent, buffer, tasks=[], out=begun.experiment.out).tasks("validation")
    said: list[str] = []
    buffer.extend([replace(recorded(n), source="synthetic", run=run) for n in range(20)])
    assert not gym_of(agent, buffer, tasks=[], out=tmp_path / "after", say=said.append).tasks("validation")
    assert "no task is held out: " in said[0] and f"the run {run!r}" in said[0]
    buffer.add_tasks([Task(id="own", instruction="Book room R-99.", environment="traces", split="test")])
    assert not gym_of(agent, buffer, tasks=[], out=tmp_path / "own").tasks("validation")


def test_the_interval_of_an_evaluation_takes_the_episodes_of_a_task_for_alike(agent: Agent, buffer: ReplayBuffer) -> None:
    gym = gym_of(agent, buffer)
    held_out = [Task(id=f"h{n}", instruction=f"Book H-{n}.", environment="rooms", split="test") for n in range(4)]
    rate, episodes = gym.evaluate(Says(), tasks=held_out, num_generations=8)
    assert (rate.successes, rate.episodes, len(episodes)) == (32, 32, 32)
    assert (rate.low, rate.high) == wilson(4, 4), "32 episodes of 4 tasks are 4 trials where no two of a task differ"


def test_training_refuses_traces_without_any_reward(agent: Agent, buffer: ReplayBuffer, tmp_path: Path) -> None:
    """They were failures without a word; then the gate said that the dream pays 41 of 50 and asked for more failures."""
    rows = [
        {"messages": [{"role": "user", "content": f"Book in {city}."}, {"role": "assistant", "content": "done"}]}
        for city in ("Rome", "Oslo", "Bern")
    ]
    (tmp_path / "traces.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.warns(UserWarning, match="none of 3 traces has a reward"):
        buffer.extend(load_traces(tmp_path / "traces.jsonl", environment="rooms"))
    gym = gym_of(agent, buffer, experience_model=None)
    for stage in (gym.train_experience, gym.train_base, partial(check_truthful, gym.experiment)):
        with pytest.raises(ConfigurationError, match=r"none of 3 traces has a reward, and .*: give --rewards"):
            stage()


@pytest.mark.parametrize(("temperature", "name"), [(0.0, "base-greedy"), (1.0, "base-sampled")])
def test_an_evaluation_is_named_by_policy_and_mode(temperature: float, name: str) -> None:
    policy: Any = SimpleNamespace(name_or_path="runs/mine/models/base", temperature=temperature)
    assert _label(policy) == name


def test_arguments_of_another_kind_are_named() -> None:
    with ReplayBuffer(":memory:") as buffer:
        for options, wrong in (({"dream": []}, r"dream=\[\] is no Dream"), ({"settings": {}}, r"settings=\{\} is no Settings")):
            with pytest.raises(ConfigurationError, match=wrong):
                DreamGym(object(), replay_buffer=buffer, **options)
