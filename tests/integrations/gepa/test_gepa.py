"""The prompt learner finds a planted flaw in the dream, shows the gain with real tools, and claims nothing without one.

The policy obeys the texts that it reads; the reflecting model mends what its feedback names.
"""

import asyncio
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gepa", reason="needs gepa")

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from typer.testing import CliRunner

from dreamgym_lg import Dream, DreamGym, Hosted, Model, ReplayBuffer, Settings, Task, load_traces, with_policy
from dreamgym_lg.actions import parse_call
from dreamgym_lg.cli.app import app
from dreamgym_lg.dream.parts import Answer, Episode
from dreamgym_lg.errors import BudgetExceeded, ConfigurationError
from dreamgym_lg.experiment.experience_models import resolve_policy
from dreamgym_lg.production.export import read_manifest
from dreamgym_lg.production.prompts import load_prompts, with_prompts
from dreamgym_lg.simulate.wall.wall import missing_for_wall

WALL = pytest.mark.skipif(bool(missing_for_wall()), reason="needs the wall")

RULE = {
    "look first": "Look the order up first.",
    "in cents": "The amount is in cents.",
    "polite end": "End with: Have a nice day.",
}
"""The sentence that the policy obeys, by the flaw that its absence is. An episode shows the first one."""
SYSTEM = "You are the desk of a shop. Refund the order."
WHERE = {"look first": "system message of model", "polite end": "system message of model", "in cents": "description of refund"}


def texts(*flaws: str) -> tuple[str, str]:
    """The system message and the description of `refund`, without the sentences of these flaws."""
    kept = [rule for flaw, rule in RULE.items() if flaw not in flaws]
    description = f"Refund an order. {RULE['in cents']}" if "in cents" not in flaws else "Refund an order."
    return " ".join([SYSTEM, *(rule for rule in kept if rule != RULE["in cents"])]), description


class Clerk(BaseChatModel):
    """Obeys the system message and the descriptions of its tools, word for word."""

    calls: list[int] = []

    @property
    def _llm_type(self) -> str:
        return "clerk"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools)

    def _generate(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> ChatResult:
        system, done = messages[0].text, [each.text for each in messages if each.type == "tool"]
        order = int(re.findall(r"\d+", next(each.text for each in messages if each.type == "human"))[0])
        described = json.dumps([getattr(each, "description", each) for each in kwargs.get("tools", ())])
        euros = 1 if RULE["in cents"] not in described else 100
        if RULE["look first"] in system and not done:
            reply = AIMessage("", tool_calls=[{"name": "look", "args": {"order": order}, "id": "1"}])
        elif len(done) < 1 + (RULE["look first"] in system):
            price = int(done[0]) if done else 1
            reply = AIMessage("", tool_calls=[{"name": "refund", "args": {"order": order, "amount": price * euros}, "id": "2"}])
        else:
            reply = AIMessage("Done. Have a nice day." if RULE["polite end"] in system else "Done.")
        self.calls.append(1)
        size = sum(len(each.text) for each in messages)
        reply.usage_metadata = {"input_tokens": size, "output_tokens": 7, "total_tokens": size + 7}
        return ChatResult(generations=[ChatGeneration(message=reply)])


class Teacher(GenericFakeChatModel):
    """Adds the sentence that the feedback asks for to the text that it is shown."""

    messages: Any = iter(())
    prompts: list[str] = []

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        prompt = messages[0].text
        self.prompts.append(prompt)
        current = prompt.split("```")[1].strip()
        lack = re.findall(r"it lacks: (.+)", prompt)
        reply = AIMessage(f"```\n{current} {RULE[lack[0].strip()]}\n```" if lack else f"```\n{current} Be brief.\n```")
        reply.usage_metadata = {"input_tokens": 1000, "output_tokens": 50, "total_tokens": 1050}
        return ChatResult(generations=[ChatGeneration(message=reply)])


class Till:
    """Answers every call in the dream: an order costs its number."""

    name = "till"

    def respond(self, episode: Episode) -> Answer:
        call = parse_call(episode.action)
        return Answer(str(call.arguments["order"]) if call.name == "look" else "refunded")


def lack(task: Task, calls: list[tuple[str, dict[str, Any]]], message: str) -> str:
    """The flaw that an episode shows; "" for a success. The dream's judge and the real check share it."""
    number = int(re.findall(r"\d+", task.instruction)[0])
    if [name for name, _ in calls] != ["look", "refund"]:
        return "look first"
    if calls[1][1]["amount"] != number * 100:
        return "in cents"
    return "" if message.endswith("Have a nice day.") else "polite end"


class Judge:
    """Says why an episode failed."""

    name = "judge"

    def judge(self, episode: Episode, answer: Answer | None) -> Any:
        from dreamgym_lg import Verdict

        if answer is not None:
            return None
        calls = [parse_call(step.action) for step in episode.steps]
        fault = lack(episode.task, [(c.name, dict(c.arguments)) for c in calls], json.loads(episode.action)["answer"])
        reward = list(RULE).index(fault) / 3 if fault else 1.0
        return Verdict(reward, not fault, f"it lacks: {fault}" if fault else "all is there")


def really(task: Task, state: Any) -> float:
    calls = [(call["name"], call["args"]) for message in state["messages"] for call in getattr(message, "tool_calls", ())]
    return float(not lack(task, calls, state["messages"][-1].text))


LEDGER: list[int] = []
"""What the real tool refunded."""


def desk(*flaws: str) -> Any:
    system, description = texts(*flaws)

    @tool(description="Look up what an order cost, in euros.")
    def look(order: int) -> int:
        return order

    @tool(description=description)
    def refund(order: int, amount: int) -> str:
        LEDGER.append(amount)
        return "refunded"

    return create_agent(Clerk(), [look, refund], system_prompt=system)


TASKS = [
    Task(id=f"{split}{n}", instruction=f"Refund order {n + 2}.", environment="desk", split=split)
    for split, number in (("train", 9), ("validation", 6), ("test", 12))
    for n in range(number)
]


def gym(folder: Path, *flaws: str, **options: Any) -> DreamGym:
    dream = Dream([Till()], judges=[Judge()], version="till")
    settings = Settings(max_false_success=None, concurrency=1)
    given = {"dream": dream, "tasks": TASKS, "verify_real": really, "settings": settings, "out": folder / "run", **options}
    folder.mkdir(exist_ok=True)
    return DreamGym(given.pop("graph", None) or desk(*flaws), replay_buffer=ReplayBuffer(folder / "replay.db"), **given)


@pytest.mark.parametrize("flaw", RULE)
def test_a_planted_flaw_is_found_in_the_dream_and_the_gain_is_shown_in_reality(tmp_path: Path, flaw: str) -> None:
    LEDGER.clear()
    lines, teacher = list[str](), Teacher()
    work = gym(tmp_path, flaw, say=lines.append)
    improved = work.train(learner="gepa", reflection=teacher, episodes=120)
    assert not LEDGER, "no real tool ran"
    assert RULE[flaw] in improved.changes[WHERE[flaw]][1]
    assert improved.scores == (pytest.approx(list(RULE).index(flaw) / 3), 1)
    assert "decided by judge: it lacks:" in teacher.prompts[0] and "(answered by till)" in teacher.prompts[0]
    assert "learner gepa: at most 120 dreamed episodes on 9 training and 6 validation tasks" in lines[0]
    gain = improved.compare(real=True)
    assert gain.differs and gain.difference == 1 and gain.interval[0] > 0 and len(gain.after.successes) == 12
    assert str(gain).startswith("better: +1.000") and len(LEDGER) == 24
    assert improved.compare().difference == 1, "in the dream, too"
    assert f"+{improved.changes[WHERE[flaw]][1]}" in str(improved)


def test_without_a_flaw_nothing_is_claimed(tmp_path: Path) -> None:
    teacher = Teacher()
    improved = gym(tmp_path).train(learner="gepa", reflection=teacher, episodes=120)
    assert not improved.changes and improved.scores == (1, 1) and not teacher.prompts
    assert str(improved) == "no text did better than the original"
    gain = improved.compare(real=True)
    assert not gain.differs and str(gain).startswith("no difference is shown: +0.000")


def test_a_reflection_that_mends_nothing_claims_nothing(tmp_path: Path) -> None:
    class Lost(Teacher):
        def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
            return ChatResult(generations=[ChatGeneration(message=AIMessage(f"```\nBe brief. {len(self.prompts)}\n```"))])

    lines = list[str]()
    improved = gym(tmp_path, "in cents", say=lines.append).improve_prompts(reflection=Lost(), episodes=60)
    assert not improved.changes and not improved.compare(real=True).differs
    assert any(re.match(r"the search ends: \d+ of episodes=60 are spent", line) for line in lines)


def test_a_text_that_no_call_holds_is_said(tmp_path: Path) -> None:
    lines = list[str]()
    parts = {"rules": "Refund the order.", "date": "Today is 2026-11-01."}
    improved = gym(tmp_path, "look first", say=lines.append).improve_prompts(reflection=Teacher(), episodes=90, texts=parts)
    assert improved.changes == {"rules": (parts["rules"], f"{parts['rules']} {RULE['look first']}")}
    assert any(line.startswith("no call held date word for word") for line in lines)


def test_parts_of_several_messages_and_tools_in_any_form_are_replaced() -> None:
    class Echo(GenericFakeChatModel):
        def _generate(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> ChatResult:
            shown = json.dumps([[each.text for each in messages], kwargs.get("tools")])
            return ChatResult(generations=[ChatGeneration(message=AIMessage(shown))])

    changes = {"a": ("Be kind.", "Be short."), "b": ("Be kind. Be", "Be brief and"), "description of f": ("Be kind.", "f.")}
    model, matched = Echo(messages=iter(())), set[str]()
    forms = [
        {"type": "function", "function": {"name": "f", "description": "Be kind.", "parameters": {}}},
        {"name": "f", "description": "Be kind.", "input_schema": {}},
        {"toolSpec": {"name": "g", "description": "Be kind."}},
    ]
    asked = [("system", "Hi. Be kind."), ("system", "Be kind. Be quick."), ("user", "Be kind.")]
    read = json.loads(with_prompts(model, changes, matched=matched).invoke(asked, tools=forms).text)
    assert read[0] == ["Hi. Be short.\n\nBe brief and quick.", "Be kind."]
    assert [json.dumps(each).count("Be kind.") for each in read[1]] == [0, 0, 1] and matched == set(changes)
    assert json.loads(model.invoke(asked, tools=forms).text)[1] == forms, "the model itself is as it was"
    assert type(with_prompts(model, {})).__qualname__ == type(model).__qualname__


@pytest.mark.parametrize("kept", ["_stream", None])
async def test_a_model_streams_with_new_texts_as_it_did_before(kept: str | None) -> None:
    class Streams(GenericFakeChatModel):
        pass

    if kept is None:
        Streams._stream = BaseChatModel._stream  # type: ignore[method-assign]
    model = with_prompts(Streams(messages=iter([AIMessage("a b"), AIMessage("a b")])), {"a": ("x", "y")})
    assert len([chunk async for chunk in model.astream([("system", "x")])]) >= (3 if kept else 1)
    assert (await model.ainvoke("x")).text == "a b"


def test_the_prompts_go_to_production_and_back(tmp_path: Path) -> None:
    improved = gym(tmp_path, "look first", "in cents").improve_prompts(reflection=Teacher(), episodes=120)
    assert set(improved.changes) == {WHERE["look first"], WHERE["in cents"]}
    improved.export(tmp_path / "prompts")
    files = {file.name for file in (tmp_path / "prompts").iterdir()}
    texts_of = {"1-system-message-of-model.txt", "2-description-of-refund.txt"}
    assert files == {*texts_of, "changes.diff", "manifest.json", "README.md"}
    assert (
        "mean reward on the tasks that chose them: 1.000, before 0.000"
        in (tmp_path / "prompts" / "README.md").read_text().lower()
    )
    assert read_manifest(tmp_path / "prompts")["scores"] == [0, 1]
    assert RULE["in cents"] in (tmp_path / "prompts" / "2-description-of-refund.txt").read_text()
    assert (tmp_path / "prompts" / "changes.diff").read_text() == str(improved)
    changes = load_prompts(tmp_path / "prompts")
    assert changes == improved.changes
    LEDGER.clear()
    graph = desk("look first", "in cents")
    served = with_policy(graph, with_prompts(Clerk(), changes))
    asked = {"messages": [("user", "Refund order 5.")]}
    assert served.invoke(asked)["messages"][-1].text == "Done. Have a nice day." and LEDGER == [500]
    assert really(TASKS[3], served.invoke(asked)) and not really(TASKS[3], graph.invoke(asked)), "the graph is as it was"
    with pytest.raises(ConfigurationError, match="exists already"):
        improved.export(tmp_path / "prompts")
    (tmp_path / "prompts" / "1-system-message-of-model.txt").write_text("Refund all.")
    with pytest.raises(ConfigurationError, match="was changed after the export"):
        load_prompts(tmp_path / "prompts")


DESK = """
import sys

sys.path.insert(0, {here!r})
from test_gepa import LEDGER, Teacher, Judge, TASKS, Till, desk, really

from dreamgym_lg import Dream, DreamGym, ReplayBuffer, Settings

graph = desk("look first", "in cents")


def gym():
    dream = Dream([Till()], judges=[Judge()], version="till")
    given = {{"dream": dream, "tasks": TASKS, "verify_real": really, "isolation": "guard", "out": {out!r}}}
    settings = Settings(max_false_success=None, concurrency=1)
    return DreamGym(__file__ + ":graph", replay_buffer=ReplayBuffer({out!r} + ".db"), settings=settings, **given)
"""


def test_the_command_line_improves_prompts_and_langgraph_json_names_the_agent_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "project" / "my_desk.py"
    file.parent.mkdir()
    file.write_text(DESK.format(here=str(Path(__file__).parent), out=str(tmp_path / "run")))
    monkeypatch.setattr("dreamgym_lg.integrations.gepa.learner.resolve_policy", lambda model, graph: given_or_own(model, graph))
    arguments = ["train", f"{file}:gym", "--reflection", "test:teacher", "--out", str(tmp_path / "exported")]
    done = CliRunner().invoke(app, arguments)
    output = " ".join(done.output.split())
    assert done.exit_code == 0, output
    assert f"+{SYSTEM} {RULE['polite end']} {RULE['look first']}" in output and "learner gepa: at most 300" in output
    folder = (tmp_path / "exported").rename(tmp_path / "moved")
    (served,) = json.loads((folder / "langgraph.json").read_text())["graphs"].values()
    module, _, name = served.partition(":")
    monkeypatch.setenv("DREAMGYM_POLICY", str(folder))
    graph = asyncio.run(getattr(importlib.import_module(module), name)())
    said = graph.invoke({"messages": [("user", "Refund order 5.")]})["messages"]
    assert said[-1].text == "Done. Have a nice day." and [c["name"] for m in said for c in getattr(m, "tool_calls", ())] == [
        "look",
        "refund",
    ]
    assert json.loads(json.dumps(said[3].tool_calls[0]["args"])) == {"order": 5, "amount": 500}
    refused = CliRunner().invoke(app, [*arguments[:-1], str(folder)])
    assert refused.exit_code == 2 and "exists already: name another" in " ".join(refused.output.split())
    refused = CliRunner().invoke(app, ["serve", str(folder)])
    assert refused.exit_code == 2 and "holds prompts and no weights" in " ".join(refused.output.split())
    lacks = "needs FILE.py:NAME of a DreamGym, and --reflection"
    for wrong, why in (
        (["peckingorder", "--reflection", "x"], lacks),
        ([f"{file}:gym", "--learner", "gepa"], lacks),
        ([f"{file}:gym", "--reflection", "x", "--learner", "grpo"], "--learner grpo trains weights: leave one away"),
        (
            [f"{file}:gym", "--reflection", "x", "--iterations", "5", "--seed", "3", "--references-only", "--baseline", "dpo"],
            "makes no use of --seed, --iterations, --references-only, --baseline: leave that away",
        ),
        ([f"{file}:gym", "--policy", "openai:gpt-5.4-mini"], "its weights are elsewhere: give reflection="),
    ):
        refused = CliRunner().invoke(app, ["train", *wrong])
        assert refused.exit_code and why in " ".join(refused.output.split()), refused.output


@pytest.mark.parametrize("policy", [None, Clerk(), "openai:gpt-5.4-mini"], ids=["own", "object", "name"])
def test_the_policy_decides_what_is_trained_and_a_line_says_why(tmp_path: Path, policy: Any, monkeypatch: Any) -> None:
    lines, name = list[str](), policy if isinstance(policy, str) else "Clerk" if policy else "the agent's own model"
    work = gym(tmp_path, "look first", say=lines.append)
    if policy is not None:
        for options in ({}, {"learner": "grpo"}):
            with pytest.raises(ConfigurationError, match=f"the policy {name} cannot be trained, its weights are elsewhere"):
                work.train(policy, **options)
        assert not lines, "nothing is said of a choice that was not made"
    monkeypatch.setattr("dreamgym_lg.integrations.gepa.learner.resolve_policy", lambda model, graph: given_or_own(model, graph))
    assert work.train(policy, reflection=Teacher(), episodes=90).scores[1] == 1
    assert lines[0] == f"learner gepa: the weights of {name} are elsewhere"


def given_or_own(model: Any, graph: Any) -> Any:
    """`resolve_policy`, which knows two models by names."""
    known = {"test:teacher": Teacher, "openai:gpt-5.4-mini": Clerk}
    return known[model]() if isinstance(model, str) else resolve_policy(model, graph)


# --- the budget --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit, spent",
    [({"max_calls": 30}, 30), ({"max_tokens": 3000}, 3000), ({"max_cost": 0.005, "prices": (1.0, 10.0)}, 0.005)],
)
def test_a_budget_ends_the_search_within_one_call(tmp_path: Path, limit: dict[str, Any], spent: float) -> None:
    hosted, clerk, teacher = Hosted(**limit), Clerk(calls=[]), Teacher(prompts=[])
    lines = list[str]()
    improved = gym(tmp_path, "look first", say=lines.append).improve_prompts(
        reflection=teacher, policy=clerk, hosted=hosted, episodes=10_000
    )
    (kind,) = (name for name in ("calls", "tokens", "cost") if f"max_{name}" in limit)
    assert hosted.usage.calls == len(clerk.calls) + len(teacher.prompts) > 0
    largest = {"calls": 0, "tokens": 1050, "cost": 0.0015}[kind]
    assert spent <= hosted.usage.limited[kind] <= spent + largest
    assert any(f"of max_{kind}=" in line for line in lines) and not improved.changes
    assert f"Limits of agent and reflection together: {kind} " in lines[0]


@pytest.mark.parametrize("concurrency", [2, 6])
def test_beside_each_other_so_many_calls_may_pass_a_limit_of_tokens(tmp_path: Path, concurrency: int) -> None:
    hosted, clerk = Hosted(max_tokens=2000), Clerk(calls=[])
    work = gym(tmp_path, "look first", settings=Settings(max_false_success=None, concurrency=concurrency))
    work.improve_prompts(reflection=Teacher(prompts=[]), policy=clerk, hosted=hosted, episodes=10_000)
    assert 2000 <= hosted.usage.limited["tokens"] <= 2000 + max(1050, concurrency * 300)


def test_a_limit_of_calls_is_kept_by_many_episodes_at_once_and_by_an_agent_that_catches_its_error(tmp_path: Path) -> None:
    def answer(state: MessagesState) -> dict[str, Any]:
        try:
            return {"messages": [Clerk().invoke([("system", SYSTEM), *state["messages"]])]}
        except Exception:
            return {"messages": [AIMessage("Sorry.")]}

    node = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile()
    for graph, name in ((desk("look first"), "desk"), (node, "node")):
        hosted, clerk, teacher = Hosted(max_calls=30), Clerk(calls=[]), Teacher(prompts=[])
        work = gym(tmp_path / name, graph=graph, settings=Settings(max_false_success=None, concurrency=16))
        improved = work.improve_prompts(reflection=teacher, policy=clerk, hosted=hosted, episodes=10_000)
        assert hosted.usage.calls == len(clerk.calls) + len(teacher.prompts) == 30 and not improved.changes


def test_a_budget_that_the_first_evaluation_spends_is_an_error_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    clerk = Clerk(calls=[])
    with pytest.raises(BudgetExceeded, match=r"3 of max_calls=3 are spent \(.*prompts.db counts them\)"):
        gym(tmp_path, "look first").improve_prompts(reflection=Teacher(), policy=clerk, hosted=Hosted(max_calls=3))
    assert len(clerk.calls) == 3
    with pytest.raises(ConfigurationError, match="episodes=5: there are 3 texts, 9 training tasks, 6 episodes"):
        gym(tmp_path, "look first").improve_prompts(reflection=Teacher(), policy=clerk, episodes=5)
    assert gym(tmp_path, "look first").improve_prompts(reflection=Teacher(), policy=clerk, episodes=120).scores == (0, 1)


# --- models over HTTP, an agent behind the wall ------------------------------------------------------------------------------

AGENT = """
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def cancel(booking: int) -> str:
    'Cancel a booking.'
    raise AssertionError("the real tool ran")


model = ChatOpenAI(model="production", base_url={url!r}, api_key="none")
graph = create_agent(model, [cancel], system_prompt="Be brief.")
"""


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """The message of the agents' model, which does as its prompt says, of the experience model, or of the reflecting one."""
    if body["model"] == "dreamer":
        verdict = {"reasoning": "it is there", "valid": True, "reward": 0, "terminated": False, "success": False}
        return {"content": json.dumps({**verdict, "observation": "It is cancelled."})}
    if body["model"] == "teacher":
        return {"content": "```\nCancel it by the tool.\n```"}
    system, user, *rest = body["messages"]
    if system["content"] != "Cancel it by the tool." or rest:
        return {"content": "Done."}
    arguments = json.dumps({"booking": int(user["content"].split()[-1])})
    call = {"id": "1", "type": "function", "function": {"name": "cancel", "arguments": arguments}}
    return {"content": None, "tool_calls": [call]}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("langchain_openai", reason="needs langchain_openai")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "hosted")
    from chat_server import ChatServer

    class Models(ChatServer):
        def _body(self, body: dict[str, Any], headers: dict[str, str], fault: str) -> tuple[int, str]:
            status, text = super()._body(body, headers, fault)
            whole = json.loads(text)
            whole["choices"][0]["message"] |= answer(body)
            return status, json.dumps(whole)

    served = Models(lambda messages: "").start()
    (tmp_path / "my_agent.py").write_text(AGENT.replace("{url!r}", repr(served.url)))
    monkeypatch.setenv("OPENAI_BASE_URL", served.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    yield served
    served.stop()


def bookings(number: int) -> Any:
    """Traces of a person who cancelled."""
    for n in range(number):
        call = {"id": "1", "type": "function", "function": {"name": "cancel", "arguments": f'{{"booking": {n}}}'}}
        messages = [
            {"role": "user", "content": f"Please cancel booking {n}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "cancelled"},
            {"role": "assistant", "content": "Done."},
        ]
        yield {"id": f"t{n}", "messages": messages, "reward": 1}


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["guard", pytest.param("process", marks=WALL)])
def test_calls_and_tokens_are_those_of_the_servers_log(tmp_path: Path, server: Any, isolation: str) -> None:
    hosted, lines = Hosted(prices=(1.0, 4.0)), list[str]()
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        (tmp_path / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bookings(12)))
        buffer.extend(load_traces(tmp_path / "traces.jsonl"))
        work = DreamGym(
            f"{tmp_path / 'my_agent.py'}:graph",
            replay_buffer=buffer,
            experience_model=Model("openai:dreamer", replay_buffer=buffer, hosted=hosted),
            writes=["cancel"],
            isolation=isolation,
            settings=Settings(max_false_success=None, references_only=True, concurrency=1),
            out=tmp_path / "run",
            say=lines.append,
        )
        improved = work.train("openai:production", reflection="openai:teacher", episodes=60, hosted=hosted)
        assert improved.changes == {"system message of model": ("Be brief.", "Cancel it by the tool.")}
        assert "learner gepa: the weights of openai:production are elsewhere" in lines
        assert "each about 2.0 calls," in next(line for line in lines if "dreamed episodes" in line)
        asked, usage = len(server.requests), hosted.usage
        assert {request["model"] for request in server.requests} == {"production", "teacher", "dreamer"}
        assert (usage.calls, usage.input_tokens, usage.output_tokens) == (asked, 100 * asked, 20 * asked)
        assert usage.cost == pytest.approx((100 * 1.0 + 20 * 4.0) / 1e6 * asked)
        assert (
            work.train("openai:production", reflection="openai:teacher", episodes=60, hosted=hosted).scores == improved.scores
        )
        assert len(server.requests) == asked, "the same call again asks nothing"


# --- durability --------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from pathlib import Path

sys.path.insert(0, {here!r})
import test_gepa as t

seen = []


class Dying(t.Clerk):
    def _generate(self, *args, **kwargs):
        seen.append(1)
        if len(seen) > int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._generate(*args, **kwargs)


hosted = t.Hosted()
work = t.gym(Path(sys.argv[1]), "look first", "in cents", "polite end", say=lambda line: None)
improved = work.improve_prompts(reflection=t.Teacher(), policy=Dying(), episodes=200, hosted=hosted)
print(t.json.dumps([improved.changes, hosted.usage.limited]))
"""


def run(folder: Path, calls: int) -> Any:
    """The changes and the spending of a search in a process that kills itself after so many calls; None if it did."""
    folder.mkdir(exist_ok=True)
    (folder / "search.py").write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    command = [sys.executable, str(folder / "search.py"), str(folder), str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_at_any_moment_the_same_call_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    changes, spent = run(tmp_path / "whole", 10_000)
    assert {name: RULE[flaw] in changes[name][1] for flaw, name in WHERE.items()} == {name: True for name in WHERE.values()}
    kills, result = 0, None
    while (result := run(tmp_path / "killed", 60)) is None:
        kills += 1
        assert kills < 20
    assert kills >= 2 and result[0] == changes
    repeated = result[1]["calls"] - spent["calls"]
    assert 0 < repeated <= 4 * kills, "only the calls of the episode that each kill broke off are repeated"
