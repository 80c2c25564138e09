"""The change test: it finds a planted loss, claims nothing without one, and plays both versions in the same worlds."""

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from typer.testing import CliRunner, Result

from dreamgym_lg import ReplayBuffer, Task, Trajectory, load_traces
from dreamgym_lg.cli.app import app
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import comparison as comparison_module
from dreamgym_lg.experiment.comparison import Comparison, Meter, SharedDream, Version
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.simulate.wall.wall import missing_for_wall
from dreamgym_lg.statistics import Rate, mean_interval
from dreamgym_lg.user_code import load_agent

sys.path.insert(0, str(Path(__file__).parents[1] / "hosted"))

from chat_server import ChatServer

pytest_plugins = "pytester"
DESK = Path(__file__).parents[2] / "cookbook" / "support_desk"

# --- the statistics ----------------------------------------------------------------------------------------------------------


def version(successes: Any) -> Version:
    shares = tuple(None if each is None else float(each) for each in successes)
    figures: Any = dict.fromkeys(("unanswered", "actions", "calls", "seconds", "input_tokens", "output_tokens"), 1)
    return Version(name="v", success=Rate.of(1, 2), successes=shares, **figures)


def claims(loss: float, *, tasks: int, episodes: int, runs: int, rates: tuple[float, float]) -> tuple[int, int]:
    """How many of so many simulated comparisons claim a difference, and how many fail at 0; each task has its own rate.

    Args: `rates`, the parameters of the beta distribution that the tasks' rates are drawn from.
    """
    rng, differ, fail = np.random.default_rng([tasks, episodes, round(100 * loss)]), 0, 0
    for _ in range(runs):
        before = rng.beta(*rates, tasks)
        after = np.clip(before - loss, 0, 1)
        played = (version(rng.binomial(episodes, each) / episodes) for each in (before, after))
        comparison = Comparison(before=next(played), after=next(played))
        differ, fail = differ + comparison.differs, fail + (comparison.interval[1] < 0)
    return differ, fail


MIXED, EASY = (1.5, 1), (30, 1)
"""Of a rate of 0.6 in the mean, and of 0.97."""


@pytest.mark.parametrize("rates", [MIXED, EASY], ids=["mixed", "easy"])
@pytest.mark.parametrize("episodes", [1, 4])
@pytest.mark.parametrize("tasks", [12, 40, 200])
def test_an_agent_does_not_differ_from_itself(tasks: int, episodes: int, rates: tuple[float, float]) -> None:
    differ, fail = claims(0.0, tasks=tasks, episodes=episodes, runs=1000, rates=rates)
    assert differ <= 50
    assert fail <= 25, "with --fail-below 0, the strictest that a change without effect can pass"


def test_what_no_dream_answers_counts_for_neither_version() -> None:
    comparison = Comparison(before=version([1, 1, None, 0.5, 1]), after=version([1, 0, 0, None, None]))
    assert comparison.difference == -0.5 and comparison.left_out == 3
    with pytest.raises(ConfigurationError, match="no task was answered to its end in both versions"):
        Comparison(before=version([1, None]), after=version([None, 0]))
    task = Task(id="t", instruction="", environment="e")
    failed, cut = (Trajectory(task=task, steps=(), success=False, error=error) for error in (None, "Unanswered: x"))
    played = Version.of("v", [failed, cut, cut, failed], Meter())
    assert played.success.episodes == 2 and played.unanswered == 0.5 and played.successes == (0,)
    with pytest.raises(ConfigurationError, match="v: no episode was answered to its end; the first: Unanswered: x"):
        Version.of("v", [cut], Meter())


def test_a_budget_counts_a_failed_call_and_that_it_failed() -> None:
    class Silent(GenericFakeChatModel):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            raise ConnectionError("no host")

    budget = Hosted()
    with pytest.raises(ConnectionError):
        (meter := Meter(budget)).attached(Silent(messages=iter(()))).invoke("hello")
    assert (budget.usage.calls, budget.usage.failed, meter._running) == (1, 1, {})


def test_ten_points_are_found_with_200_tasks() -> None:
    differ, fail = claims(0.1, tasks=200, episodes=4, runs=1000, rates=MIXED)
    assert differ >= 800 and fail == differ


def test_what_could_have_been_found_is_said() -> None:
    rng = np.random.default_rng(0)
    same = rng.beta(*MIXED, 200)
    comparison = Comparison(**{side: version(rng.binomial(4, same) / 4) for side in ("before", "after")})
    assert 0.05 < comparison.detectable < 0.1
    differ, _ = claims(comparison.detectable * 1.1, tasks=200, episodes=4, runs=300, rates=(5, 3))  # few rates below the loss
    assert 0.7 < differ / 300 < 0.97


def test_a_difference_has_its_sign() -> None:
    better = Comparison(before=version([0.0, 0.25] * 25), after=version([1.0, 0.75] * 25))
    assert better.interval[0] > 0
    assert str(better).startswith("better: +0.750")
    assert str(Comparison(before=better.after, after=better.before)).startswith("worse: -0.750")


def test_few_tasks_prove_nothing() -> None:
    assert mean_interval([1.0] * 9) == (-1.0, 1.0)
    low, high = mean_interval([0.0, 1.0] * 50)
    assert 0.4 < low < 0.5 < high < 0.6
    same = Comparison(before=version([1.0] * 12), after=version([1.0] * 12))
    assert str(same) == "no difference is shown: +0.000 [-0.311, +0.311] over 12 tasks" and 0.3 < same.detectable < 0.5
    few = Comparison(before=version([0.0]), after=version([1.0]))
    assert not few.differs and few.detectable == 1


# --- a real graph, a buffer on disk and a model over HTTP --------------------------------------------------------------------

AGENTS = """
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def look(booking: int) -> str:
    'Look at a booking.'
    raise AssertionError("the real tool ran")


@tool
def cancel(booking: int) -> str:
    'Cancel a booking.'
    raise AssertionError("the real tool ran")


def create(prompt):
    return create_agent(ChatOpenAI(model="production", base_url={url!r}, api_key="none"), [look, cancel], system_prompt=prompt)


graph = create("Look at the booking, then cancel it.")
new_graph = create("Be brief.")
"""


class Models(ChatServer):
    """The agents' model, which does as its prompt says, and the experience model."""

    def _body(self, body: dict[str, Any], headers: dict[str, str], fault: str) -> tuple[int, str]:
        status, text = super()._body(body, headers, fault)
        system, user, *rest = body["messages"]
        names = ["look", "cancel"][sum(each["role"] == "tool" for each in rest) :]
        if "then cancel it" in system["content"] and names:
            arguments = json.dumps({"booking": int(user["content"].split()[-1])})
            call = {"id": names[0], "type": "function", "function": {"name": names[0], "arguments": arguments}}
            answer = json.loads(text)
            answer["choices"][0]["message"] |= {"content": None, "tool_calls": [call]}
            text = json.dumps(answer)
        return status, text

    def calls(self, model: str) -> int:
        return sum(request["model"] == model for request in self.requests)


def say(messages: list[dict[str, Any]]) -> str:
    if not messages[-1]["content"].startswith("{"):
        return "Done."
    verdict = {"reasoning": "it is there", "valid": True, "reward": 0, "terminated": False, "success": False}
    return json.dumps({**verdict, "observation": "It is for two nights."})


TASKS = 12


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Models]:
    """The two agents, the traces of a person who cancelled at once, and their models."""
    pytest.importorskip("langchain_openai", reason="needs langchain_openai")
    server = Models(say)
    server.start()
    (tmp_path / "agents.py").write_text(AGENTS.replace("{url!r}", repr(server.url)))
    for name, value in {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none"}.items():
        monkeypatch.setenv(name, value)
    with ReplayBuffer(tmp_path / "replay.db") as buffer, (tmp_path / "traces.jsonl").open("w") as file:
        for number in range(TASKS):
            call = {"id": "1", "type": "function", "function": {"name": "cancel", "arguments": f'{{"booking": {number}}}'}}
            messages = [
                {"role": "user", "content": f"Please cancel booking {number}"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "cancelled"},
                {"role": "assistant", "content": "Done."},
            ]
            file.write(json.dumps({"id": f"t{number}", "messages": messages, "reward": 1}) + "\n")
        file.flush()
        buffer.extend(load_traces(tmp_path / "traces.jsonl"))
    yield server
    server.stop()


def compare(folder: Path, *names: str, **options: object) -> Result:
    given = {"replay-buffer": folder / "replay.db", "experience-model": "openai:dreamer", "writes": "cancel", "episodes": 2}
    arguments = [part for key, value in (given | options).items() for part in (f"--{key}", str(value))]
    prices = ["--prices", "10", "50"]
    return CliRunner().invoke(app, ["compare", *(f"{folder / 'agents.py'}:{name}" for name in names), *arguments, *prices])


@pytest.mark.slow
def test_a_worse_prompt_fails_and_the_same_agent_does_not(house: Models, tmp_path: Path) -> None:
    worse = compare(tmp_path, "graph", "new_graph", **{"fail-below": -0.02})
    output = " ".join(worse.output.split())
    assert worse.exit_code == 1, output
    assert re.search(r"worse: -1\.000 \[-1\.000, -0\.\d+\] over 12 tasks", output), output
    assert "an episode costs 0.00600 dollars before and 0.00200 after" in output, "300 and 60 tokens, and 100 and 20"
    assert "failed: the loss is certainly beyond -0.020" in output
    assert house.calls("production") == TASKS * 2 * (3 + 1) and 0 < house.calls("dreamer") <= TASKS
    same = compare(tmp_path, "graph", "graph", **{"fail-below": 0, "isolation": "guard"})
    assert same.exit_code == 0, same.output
    assert "no difference is shown: +0.000" in same.output
    failed = compare(tmp_path, "graph", "no_graph", **{"fail-below": 0, "isolation": "guard"})
    assert failed.exit_code == 2


@pytest.mark.slow
def test_calls_and_tokens_are_the_servers(house: Models, tmp_path: Path) -> None:
    agents = tmp_path / "agents.py"
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        shared = SharedDream(buffer, experience_model="openai:dreamer", episodes=2, writes=["cancel"], isolation="guard")
        comparison = shared.compare(f"{agents}:graph", f"{agents}:new_graph")
        with pytest.raises(ConfigurationError, match="unknown task 'none'; known: traces/"):
            SharedDream(buffer, experience_model="openai:dreamer", tasks=["none"]).play(f"{agents}:graph")
        with pytest.raises(ConfigurationError, match="nothing answers what the traces do not"):
            SharedDream(buffer)
        for tasks in (0, -1, 9, [], "traces", ["a", "a"]):
            with pytest.raises(ConfigurationError, match="give a number from 10, or a list of ids, each once"):
                SharedDream(buffer, experience_model="openai:dreamer", tasks=tasks)
    before, after = comparison.before, comparison.after
    assert (before.success.value, after.success.value, before.success.episodes) == (1, 0, TASKS * 2)
    assert (before.calls, before.input_tokens, before.output_tokens, before.actions) == (3, 300, 60, 3)
    assert (after.calls, after.input_tokens, after.output_tokens, after.actions) == (1, 100, 20, 1)
    assert before.seconds > 0
    assert (before.calls + after.calls) * TASKS * 2 == house.calls("production")


@pytest.mark.slow
def test_policy_and_experience_model_of_one_provider_share_no_connections(house: Models, tmp_path: Path) -> None:
    """They are asked in two event loops, and providers' packages cache their clients."""
    played = compare(tmp_path, "graph", "graph", policy="openai:production", episodes=1, isolation="guard")
    assert played.exit_code == 0, played.output
    assert "no difference is shown: +0.000" in played.output and house.calls("dreamer") > 0


def test_few_tasks_are_refused(tmp_path: Path, house: Models) -> None:
    with ReplayBuffer(":memory:") as buffer:
        shared = SharedDream(buffer, experience_model="openai:dreamer", isolation="guard")
        with pytest.raises(ConfigurationError, match="0 of 0 recorded tasks can be judged, and 10 are needed: import"):
            shared.play(f"{tmp_path / 'agents.py'}:graph")


class Agent(GenericFakeChatModel):
    """Does what a function of its messages says."""

    messages: Any = ()
    act: Any

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.act(messages))])


def _asks_first(messages: list[BaseMessage]) -> AIMessage:
    """Asks for the number, cancels that booking, and says so."""
    said = [each.text for each in messages if isinstance(each, HumanMessage)]
    if isinstance(messages[-1], ToolMessage):
        return AIMessage("It is cancelled.")
    if len(said) == 1:
        return AIMessage("Which booking?")
    call = {"name": "cancel", "args": {"booking": int(said[-1].split()[-1])}, "id": "1"}
    return AIMessage("", tool_calls=[call])


def test_recorded_users_talk_with_both_versions(tmp_path: Path, scripted: Any) -> None:
    agent_of = pytest.importorskip("langchain.agents", reason="needs langchain").create_agent

    def cancel(booking: int) -> str:
        """Cancel a booking."""
        raise AssertionError("the real tool ran")

    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        for number in range(10):
            messages: list[BaseMessage] = [HumanMessage(f"I am guest {number}, please cancel my booking.")]
            for reply in (f"It is number {number}", None):
                messages.append(_asks_first(messages))
                messages += [HumanMessage(reply)] if reply else []
            messages += [ToolMessage("cancelled", tool_call_id="1"), AIMessage("It is cancelled.")]
            record = {"id": f"t{number}", "messages": convert_to_openai_messages(messages), "reward": 1}
            with (tmp_path / "traces.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        buffer.extend(load_traces(tmp_path / "traces.jsonl"))
        nobody = scripted(reply=lambda messages: "END")
        shared = SharedDream(buffer, experience_model=nobody, episodes=1, writes=["cancel"], isolation="guard")
        acts = _asks_first, lambda messages: AIMessage("It is cancelled.")
        comparison = shared.compare(*(agent_of(Agent(act=act), [cancel]) for act in acts))
    assert comparison.before.success.value == 1 and comparison.before.actions == 3, "question, call, answer"
    assert comparison.after.success.value == 0 and str(comparison).startswith("worse: -1.000")


@pytest.mark.parametrize("place", ["my_app.py", "package/my_app.py"])
@pytest.mark.parametrize("checkouts", [("old", "new"), ("repository/old", "repository")], ids=["beside", "inside"])
def test_two_checkouts_of_a_project_are_two_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, checkouts: tuple[str, str]
) -> None:
    """As in CI, `old/my_app.py:graph new/my_app.py:graph`: each with the modules beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in (*checkouts, checkouts[0]):
        file = tmp_path / name / place
        file.parent.mkdir(parents=True, exist_ok=True)
        if "/" in place:
            (file.parent / "__init__.py").touch()
        (file.parent / "rules_of_two.py").write_text(f"RULE = {name!r}")
        module = "package.rules_of_two" if "/" in place else "rules_of_two"
        file.write_text(f"from {module} import RULE\n\n\ndef graph():\n    return [RULE]")
        assert load_agent(f"{file}:graph") == [name]


def test_a_project_around_another_agents_folder_keeps_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    inner = tmp_path / "agents_within" / "first"
    inner.mkdir(parents=True)
    (inner / "parts.py").write_text("class Part: ...")
    (inner / "own_agent.py").write_text("def graph():\n    return []")
    late = "def graph():\n    from agents_within.first.parts import Part\n\n    return [Part]"
    (tmp_path / "whole_agent.py").write_text(late)
    (before,) = load_agent(f"{tmp_path / 'whole_agent.py'}:graph")
    load_agent(f"{inner / 'own_agent.py'}:graph")
    assert load_agent(f"{tmp_path / 'whole_agent.py'}:graph") == [before]


# --- the pytest plugin -------------------------------------------------------------------------------------------------------

PLUGIN = "dreamgym_lg.pytest_plugin"
USERS_TESTS = """
import pytest


@pytest.mark.dream(tasks=IDS, episodes=2, writes=["cancel"])
def test_it_cancels(dream):
    played = dream.play("agents.py:graph")
    assert played.success.value == 1 and played.success.episodes == 4


@pytest.mark.dream(writes=["cancel"], episodes=1, isolation="guard")
def test_brevity_costs_nothing(dream):
    assert not dream.compare("agents.py:graph", "agents.py:new_graph").differs


@pytest.mark.dream(replay_buffer="none.db")
def test_without_traces(dream):
    pass
"""


@pytest.mark.slow
def test_a_users_tests_play_in_the_dream(house: Models, tmp_path: Path, pytester: pytest.Pytester) -> None:
    for name in ("agents.py", "replay.db"):
        (pytester.path / name).write_bytes((tmp_path / name).read_bytes())
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        ids = [task.id for task in buffer.tasks()][:2]
    pytester.makepyfile(USERS_TESTS.replace("IDS", repr(ids)))
    pytester.makeini("[pytest]\ndream_replay_buffer = replay.db\ndream_experience_model = openai:dreamer\n")
    installed = [each.value for each in entry_points(group="pytest11")]
    done = pytester.runpytest_subprocess("--strict-markers", *([] if PLUGIN in installed else ["-p", PLUGIN]))
    done.assert_outcomes(passed=1, failed=1, errors=1)
    for line in ("*worse: -1.000*", "*ConfigurationError: *none.db does not exist*"):
        done.stdout.fnmatch_lines([line])
    assert house.calls("production") > 0


def test_a_tests_model_and_world_are_folders_below_pytests_root(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever pytest was started."""
    shared: dict[str, Any] = {}
    monkeypatch.setattr(comparison_module, "SharedDream", lambda buffer, **arguments: shared.update(arguments))
    root = pytester.path
    for name in ("models/exp", "world", "sub"):
        (root / name).mkdir(parents=True)
    ReplayBuffer(root / "replay.db").close()
    ini = "dream_replay_buffer = replay.db\ndream_experience_model = models/exp\ndream_world = world\n"
    pytester.makeini(f"[pytest]\n{ini}")
    (root / "sub" / "test_it.py").write_text("def test_it(dream):\n    pass\n")
    monkeypatch.chdir(root / "sub")
    installed = [each.value for each in entry_points(group="pytest11")]
    pytester.runpytest_inprocess(*([] if PLUGIN in installed else ["-p", PLUGIN])).assert_outcomes(passed=1)
    assert shared == {"experience_model": str(root / "models" / "exp"), "world": str(root / "world")}


# --- a compiled world --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason="a compiled world needs the wall")
def test_a_version_that_looks_nothing_up_is_worse(tmp_path: Path) -> None:
    pytest.importorskip("langchain", reason="needs langchain")
    sys.path.insert(0, str(DESK))
    try:
        from old_policy import WRITES, write_traces
        from tickets import Shop, create_shop
    finally:
        sys.path.remove(str(DESK))
    tasks = create_shop(tmp_path / "shop.db", seed=1, train=96, validation=0, test=0)
    write_traces(tmp_path / "traces.jsonl", Shop(tmp_path / "shop.db"), tasks, seed=1)
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        buffer.extend(load_traces(tmp_path / "traces.jsonl"))
        compile_world(buffer, tmp_path / "world", writes=WRITES)
    (tmp_path / "agents.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DESK)!r})\nfrom agent import create_desk\nfrom old_policy import OldPolicy\n"
        "good = create_desk(OldPolicy(habit='good'))\nhasty = create_desk(OldPolicy(habit='answers_at_once'))\n"
    )
    arguments = ["--replay-buffer", str(tmp_path / "replay.db"), "--world", str(tmp_path / "world"), "--episodes", "1"]
    arguments += [each for tool in WRITES for each in ("--writes", tool)]

    def run(first: str, second: str, isolation: str) -> tuple[int, str]:
        names = [f"{tmp_path / 'agents.py'}:{name}" for name in (first, second)]
        result = CliRunner().invoke(app, ["compare", *names, *arguments, "--fail-below", "0", "--isolation", isolation])
        return result.exit_code, " ".join(result.output.split())

    code, output = run("good", "hasty", "process")
    assert code == 1, output
    assert "worse: -" in output
    code, output = run("good", "good", "guard")
    assert code == 0, output
    assert "no difference is shown: +0.000" in output
