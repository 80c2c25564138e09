"""Runs as LangChain's own LangSmith tracer posts them, and as an export of them may be cut, ordered and scored."""

import json
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_core.tracers import LangChainTracer
from langsmith.schemas import Run

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.traces import load_traces

GIVEN = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Where to?"}]


class Recorder:
    """In place of `langsmith.Client`: keeps the runs that the tracer posts."""

    tracing_queue = info = otel_exporter = None

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def create_run(self, **fields: Any) -> None:
        self.runs[str(fields["id"])] = fields

    def update_run(self, **fields: Any) -> None:
        self.runs[str(fields["run_id"])] |= {key: value for key, value in fields.items() if value is not None}

    def exported(self) -> list[dict[str, Any]]:
        """The runs through LangSmith's own schema, as `Client.list_runs` gives them, in order of their start."""
        known = Run.model_fields
        runs = [Run(**{key: value for key, value in run.items() if key in known}) for run in self.runs.values()]
        return [json.loads(run.model_dump_json()) for run in runs]


@pytest.fixture
def runs(make_agent) -> list[dict[str, Any]]:
    recorder = Recorder()
    make_agent().invoke({"messages": [("user", "Where to?")]}, {"callbacks": [LangChainTracer(client=recorder)]})  # type: ignore[arg-type]
    return recorder.exported()


def test_a_root_run_with_its_calls(runs, steps, seen, write) -> None:
    assert {run["run_type"] for run in runs} == {"chain", "llm", "tool"}
    for path in (write(*runs), write(json.dumps(runs[::-1], indent=1)), write(json.dumps(runs))):
        (trajectory,) = load_traces(path)
        assert seen(trajectory) == steps
        assert (trajectory.task.messages, trajectory.task.tools) == (GIVEN, ["search", "weather"])


def test_a_system_message_of_the_application_stands_behind_the_agents_own(make_agent, write) -> None:
    recorder = Recorder()
    told = {"messages": [("system", "Today is Monday."), ("user", "Where to?")]}
    make_agent().invoke(told, {"callbacks": [LangChainTracer(client=recorder)]})  # type: ignore[arg-type]
    (trajectory,) = load_traces(write(*recorder.exported()))
    assert trajectory.task.messages == [GIVEN[0], {"role": "system", "content": "Today is Monday."}, GIVEN[1]]


def test_the_schemas_of_what_the_model_was_bound_to(runs, write) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "search", "map")]
    (call, *_) = [run for run in runs if run["run_type"] == "llm"]
    call["extra"] = {"invocation_params": {"tools": tools}}
    (trajectory,) = load_traces(write(*runs), reward={runs[0]["trace_id"]: 0.5})
    assert trajectory.task.tools == [tools[2], tools[1], tools[0]] and trajectory.reward == 0.5


def test_a_root_run_alone(runs, steps, seen, write) -> None:
    (trajectory,) = load_traces(write(runs[0]))
    assert seen(trajectory) == steps
    assert trajectory.task.messages == GIVEN[1:]  # create_agent keeps the system message out of its state


def test_without_the_roots_outputs_it_is_put_together_from_its_calls(runs, steps, seen, write) -> None:
    runs[0]["outputs"] = None
    (trajectory,) = load_traces(write(*runs))
    assert (seen(trajectory), trajectory.task.messages) == (steps, GIVEN)
    answer = {"role": "assistant", "content": "Go to Rome."}
    runs[0].update(inputs={"messages": [{"role": "user", "content": "Where to?"}]}, outputs={"output": answer})
    (trajectory,) = load_traces(write(*runs))
    assert seen(trajectory) == steps
    (trajectory,) = load_traces(write(*runs[1:]))  # not even the root run
    assert seen(trajectory) == steps


def test_a_run_that_failed_after_a_tool_keeps_what_the_tool_answered(runs, steps, seen, write) -> None:
    last = max(position for position, run in enumerate(runs) if run["run_type"] == "llm")
    before = [position for position, run in enumerate(runs[:last]) if run["run_type"] == "llm"][-1]
    first = [run for run in runs[1:before] if run["run_type"] != "chain"]
    (trajectory,) = load_traces(write(runs[0] | {"outputs": None, "error": "killed"}, *first))
    assert seen(trajectory) == steps[:2]
    assert trajectory.steps[-1].truncated and not trajectory.success


def test_a_tools_error_and_a_plain_result_are_answers(runs, write) -> None:
    tools = sorted((run for run in runs if run["run_type"] == "tool"), key=lambda run: str(run["name"]))
    tools[0].update(error="ValueError: no index", outputs=None)
    tools[1]["outputs"] = {"output": {"celsius": 20}}
    calls = [run for run in runs if run["run_type"] == "llm"][:1]
    (trajectory,) = load_traces(write(*calls, *tools))
    assert [(step.next_observation, step.valid) for step in trajectory.steps] == [
        ("ValueError: no index", False),
        ('{"celsius": 20}', True),
    ]


def test_runs_inside_runs(runs, steps, seen, write) -> None:
    root = runs[0] | {"outputs": None, "child_runs": []}
    root["child_runs"] = [run | {"trace_id": None, "parent_run_id": None} for run in runs[1:]]
    (trajectory,) = load_traces(write(root))
    assert seen(trajectory) == steps


def test_an_agent_used_as_a_tool_is_no_act_of_its_own(make_agent, write, seen) -> None:
    @tool
    def travel_agent(question: str) -> str:
        """Ask another agent."""
        return str(make_agent().invoke({"messages": [("user", question)]})["messages"][-1].text)

    asked = [{"name": "travel_agent", "args": {"question": "Where to?"}, "id": "t1"}]
    agent = make_agent([AIMessage("", tool_calls=asked), AIMessage("Rome, they say.")], tools=[travel_agent])
    recorder = Recorder()
    tracer = LangChainTracer(client=recorder)  # type: ignore[arg-type]
    agent.invoke({"messages": [("user", "Ask them.")]}, {"callbacks": [tracer]})
    runs = recorder.exported()
    assert sum(run["run_type"] == "llm" for run in runs) == 5
    runs[0]["outputs"] = None
    (trajectory,) = load_traces(write(*runs))
    assert [after for _, _, after in seen(trajectory)] == ["Go to Rome.", ""]


def test_other_calls_of_the_same_trace_stay_apart(runs, steps, seen, write) -> None:
    llm = next(run for run in runs if run["run_type"] == "llm")
    question = {"role": "user", "content": "Where to?"}
    said = {"outputs": {"choices": [{"message": {"role": "assistant", "content": "safe"}}]}}
    aside = [
        llm | said | {"id": name, "start_time": start, "inputs": {"messages": [{"role": "system", "content": name}, question]}}
        for name, start in (("guard", "2020-01-01T00:00:00"), ("title", "2090-01-01T00:00:00Z"))
    ]
    runs[0]["outputs"] = None
    (trajectory,) = load_traces(write(*aside, *runs))
    assert (seen(trajectory), trajectory.task.messages) == (steps, GIVEN)


@pytest.mark.parametrize(
    ("stats", "reward", "success"),
    [
        (None, 0.0, False),
        ({"user_score": {"n": 2, "avg": 0.5, "values": {}}}, 0.5, True),
        ({"user_score": {"n": 1, "avg": 0}, "b": {"n": 1, "avg": 1}, "note": {"n": 1, "avg": None}}, 0.0, False),
    ],
)
def test_feedback_is_the_reward(stats, reward, success, runs, write) -> None:
    (trajectory,) = load_traces(write(runs[0] | {"feedback_stats": stats}))
    assert (trajectory.reward, trajectory.success) == (reward, success)


def test_traces_stay_apart_and_bad_ones_are_named(runs, write) -> None:
    other = {"id": "r2", "trace_id": "T2", "run_type": "chain", "inputs": {}, "outputs": {"output": "text"}}
    late = {"id": "r3", "trace_id": "T3", "run_type": "chain", "start_time": "yesterday"}
    odd = runs[0] | {"id": "r4", "trace_id": "T4", "feedback_stats": {"score": {"avg": float("nan")}}}
    traces = load_traces(write(*runs, other, late, {"inputs": {}}, "{", odd))
    with pytest.warns(UserWarning, match="1 traces read, 5 rejected"):
        assert len(list(traces)) == 1
    first = len(runs) + 1
    assert [each.line for each in traces.rejected] == list(range(first, first + 5))
    said = ("trace T2: no human message", "start time", "not a run", "not JSON", "feedback 'score' is 'nan'")
    for each, reason in zip(traces.rejected, said, strict=True):
        assert reason in each.reason


def test_a_single_model_call_is_a_trace(write) -> None:
    run = {"id": "1", "run_type": "llm", "inputs": {"messages": [{"role": "user", "content": "hi"}]}}
    outputs = [
        {"choices": [{"message": {"role": "assistant", "content": "hello"}}]},
        {"generations": [[{"text": "hello", "message": {"type": "ai", "data": {"content": "hello", "type": "ai"}}}]]},
        {"role": "assistant", "content": "hello"},
    ]
    found = load_traces(write(*[run | {"id": str(number), "outputs": each} for number, each in enumerate(outputs)]))
    assert [trajectory.steps[-1].action for trajectory in found] == ['{"answer": "hello"}'] * 3
    with pytest.raises(ConfigurationError, match="were inputs and outputs recorded"):
        load_traces(write(run | {"inputs": {}}))


@pytest.mark.slow
def test_no_mutilated_run_escapes_as_another_error(runs, survives) -> None:
    survives("langsmith", [runs, runs[:1]], 200)
