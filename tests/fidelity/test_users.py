"""Users that a language model plays, measured on recorded conversations, refused by the gate, and masked in a dream."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import tool

from dreamgym_lg import Dream, DreamGym, Episode, ReplayBuffer, Step, Task, Trajectory
from dreamgym_lg.actions import render_answer, render_call, tool_schemas
from dreamgym_lg.dream import Answer, ModelUser, ScriptedUser, Verdict
from dreamgym_lg.errors import ConfigurationError, UntruthfulDream
from dreamgym_lg.experiment import gate, supervised
from dreamgym_lg.fidelity.judgement import PartJudgement, ajudge
from dreamgym_lg.fidelity.steps import measure_steps
from dreamgym_lg.fidelity.users import AGAINST, EARLY, EVADED, INVENTED, LATE, UNTOLD
from dreamgym_lg.learner import group_credit
from dreamgym_lg.metrics import describe
from dreamgym_lg.types import Segment

WHICH, SURE, DONE = "Which order?", "Shall I refund it, 25 EUR?", "It is refunded."


def conversation(number: int) -> Trajectory:
    order, first = {"order": f"W-1{number:02}"}, "I want my money back."
    turns = [
        (render_answer(WHICH), f"It is W-1{number:02}."),
        (render_call("look_up", order), "paid"),
        (render_answer(SURE), "Yes, please."),
        (render_call("refund", order), "done"),
        (render_answer(DONE), ""),
    ]
    steps = [Step(observation="", action=action, next_observation=answer) for action, answer in turns]
    steps[0] = Step(observation=first, action=turns[0][0], next_observation=turns[0][1])
    steps[-1] = Step(observation="", action=turns[-1][0], next_observation="", terminated=True, reward=1)
    goal = {"goal": "You want a refund of an order.", "facts": order}
    task = Task(id=f"t{number}", instruction=first, environment="desk", tools=["look_up", "refund"], goal=goal)
    return Trajectory(task=task, steps=steps, success=True, run="traces")


TRACES = [conversation(number) for number in range(24)]


def last_line(messages: list[BaseMessage]) -> str:
    """The agent's message, without another user's reply above it."""
    return messages[-1].text.splitlines()[-1]


def truthful(messages: list[BaseMessage]) -> str:
    side = json.loads(messages[0].text.rpartition("\n\n")[2])
    return {WHICH: side["facts"]["order"], SURE: "Yes, please."}.get(last_line(messages), "END")


class Plays:
    """Answers every call, and judges every episode a success."""

    name = "plays"

    def respond(self, episode: Episode) -> Answer:
        return Answer("done")

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict:
        return Verdict(1.0, True)


def dream_of(user: Any) -> Dream:
    return Dream([Plays()], user, [Plays()])


def user_part(user: Any, traces: list[Trajectory] = TRACES) -> PartJudgement:
    judgement = asyncio.run(ajudge(dream_of(user), traces, writes=["refund"]))
    (part,) = [part for part in judgement.parts if part.role == "user"]
    return part


@pytest.mark.parametrize(
    ("reply", "errors", "refused"),
    [
        (truthful, {}, ""),
        (lambda messages: "It is W-999.", {INVENTED: 48, UNTOLD: 24, LATE: 24}, "gives 48 of 48"),
        (lambda messages: "I do not know.", {UNTOLD: 24, LATE: 24}, "does not tell 24 of 24"),
        (lambda messages: "END", {UNTOLD: 24, EARLY: 48}, "ends 48 of 48"),
        (lambda messages: truthful(messages).replace("END", "Thank you."), {LATE: 24}, "does not end 24 of 24"),
    ],
)
def test_a_users_errors_are_counted_by_kind_and_refused(
    scripted: Any, reply: Callable[[list[BaseMessage]], str], errors: dict[str, int], refused: str
) -> None:
    part = user_part(ModelUser(scripted(reply=reply)))
    assert {kind: rate.successes for kind, rate in part.errors.items() if rate.successes} == errors
    assert part.by_model and part.errors[UNTOLD].episodes == part.errors[LATE].episodes == 24
    assert all(rate.low <= rate.value <= rate.high for rate in part.errors.values())
    judgement = asyncio.run(ajudge(dream_of(ModelUser(scripted(reply=reply))), TRACES))
    causes = "; ".join(gate.refusals(judgement, 0.05, ["user"]))
    assert (refused in causes and "above 0.2" in causes) if refused else not causes


def other_words(episode: Episode) -> str | None:
    return None if episode.action == render_answer(DONE) else "Something else."


def test_no_reply_of_a_user_has_to_be_word_for_word() -> None:
    """Of a conversation's five steps two are the user's: they are measured by kinds of error, and by no comparison of words."""
    steps = asyncio.run(measure_steps(dream_of(ScriptedUser(other_words)), TRACES[:1]))
    assert steps.steps == 3 and steps.normalised and (steps.normalised.successes, steps.normalised.steps) == (2, 3)


def test_a_chat_model_judges_what_no_rule_sees(scripted: Any) -> None:
    def judge(messages: list[BaseMessage]) -> str:
        reply = json.loads(messages[-1].text)["reply"]
        against, answers = reply == "A voucher will do.", "voucher" not in reply
        return json.dumps({"reason": "", "contradicts": against, "answers": answers})

    def gives_in(messages: list[BaseMessage]) -> str:
        return "A voucher will do." if messages[-1].text == SURE else truthful(messages)

    part = user_part(ModelUser(scripted(reply=gives_in), judge=scripted(reply=judge)))
    assert str(part.errors[AGAINST]).startswith("0.50") and part.errors[EVADED].successes == 24
    assert "contradicts its goal" in part.examples[AGAINST][0]
    honest = user_part(ModelUser(scripted(reply=truthful), judge=scripted(reply=judge)))
    assert honest.errors[AGAINST].successes == honest.errors[EVADED].successes == 0


def test_a_contradiction_and_an_invention_are_two_faults(scripted: Any) -> None:
    def part(reply: str, contradicts: bool) -> PartJudgement:
        verdict = json.dumps({"reason": "", "contradicts": contradicts, "answers": True})
        return user_part(ModelUser(scripted(reply=lambda _: reply), judge=scripted(reply=lambda _: verdict)))

    against = part("A voucher will do.", contradicts=True)
    assert against.errors[INVENTED].successes == against.errors[EVADED].successes == 0
    assert against.errors[AGAINST].successes == against.errors[AGAINST].episodes > 0
    invented = part("It is W-999.", contradicts=False)
    assert invented.errors[INVENTED].value == 1 and AGAINST not in invented.errors, "its judge reads no such reply"


def test_few_cases_prove_nothing_and_a_function_is_not_measured(scripted: Any) -> None:
    few = asyncio.run(ajudge(dream_of(ModelUser(scripted(reply=truthful))), TRACES[:3]))
    assert "was measured on 9 replies; fewer than 20 prove nothing" in "; ".join(gate.refusals(few, 0.05, ["user"]))
    function = asyncio.run(ajudge(dream_of(ScriptedUser(lambda episode: "?")), TRACES[:3]))
    assert not [part for part in function.parts if part.role == "user"]


@tool
def look_up(order: str) -> str:
    """Look an order up."""
    return "paid"


@tool
def refund(order: str) -> str:
    """Refund an order."""
    return "done"


def create_gym(tmp_path: Path, scripted: Any, reply: Any, **options: Any) -> DreamGym:
    buffer = ReplayBuffer(":memory:")
    buffer.extend(TRACES)
    model = scripted(reply=lambda _: "as asked\nsuccess")
    graph = create_agent(Asks(), [look_up, refund])
    options = {"experience_model": model, "user": ModelUser(scripted(reply=reply)), "say": lambda _: None, **options}
    return DreamGym(graph, replay_buffer=buffer, tasks=[each.task for each in TRACES], out=tmp_path, **options)


@pytest.mark.slow
def test_the_gate_measures_a_user_where_the_agents_own_check_judges_too(tmp_path: Path, scripted: Any) -> None:
    gym = create_gym(tmp_path / "a", scripted, lambda _: "It is W-999.", verify_dream=lambda task, state: 1.0)
    with pytest.raises(UntruthfulDream, match="the user 'user' does not end 24 of 24"):
        gate.check_truthful(gym.experiment)
    gate.check_truthful(create_gym(tmp_path / "b", scripted, truthful, verify_dream=lambda task, state: 1.0).experiment)


def test_a_turn_against_the_goal_ends_the_episode_which_teaches_nothing_and_is_counted(tmp_path: Path, scripted: Any) -> None:
    lies = {"t1", "t2"}

    def reply(messages: list[BaseMessage]) -> str:
        side = json.loads(messages[0].text.rpartition("\n\n")[2])
        return "It is W-999." if side["facts"]["order"] in ("W-101", "W-102") else truthful(messages)

    gym, said = create_gym(tmp_path, scripted, reply, writes=["refund"]), list[str]()
    gym.experiment.say = said.append
    rate, episodes = gym.evaluate(Asks(), tasks=[each.task for each in TRACES[:4]])
    assert (rate.successes, rate.episodes) == (2, 4)
    assert {each.task.id for each in episodes if each.error} == lies
    assert all(each.error is None or each.error.startswith("UserFault: the user tells w999") for each in episodes)
    assert "2 of 4 dreamed episodes could not be played to their end" in said[-1] and "UserFault: " in said[-1]
    figures = describe([episodes])
    assert (figures["user_faults"], figures["unreadable_episodes"], figures["train_success"]) == (2, 0, 1.0)
    tokens = Segment(token_ids=[1], sampled=[1], logprobs=[-1.0], temperature=1.0)
    group = [Trajectory(**{**vars_of(each), "segments": [tokens]}) for each in (*episodes[:2], failed(episodes[0]))]
    assert len(group_credit([group])) == 2, "the success and the failure alone"


def Asks() -> Any:
    """A policy that asks, looks up, reads back, refunds and says so."""
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage
    from langchain_core.outputs import ChatGeneration, ChatResult

    class Policy(BaseChatModel):
        @property
        def _llm_type(self) -> str:
            return "asks"

        def bind_tools(self, tools: Any, **_: Any) -> Any:
            return self.bind(tools=tool_schemas(tools))

        def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
            said = [message.text for message in messages if message.type == "human"]
            calls = [message for message in messages if message.type == "tool"]
            if len(said) == 1:
                reply = AIMessage(WHICH)
            elif len(calls) == 0 or (len(said) > 2 and len(calls) == 1):
                call = {
                    "name": ("look_up", "refund")[len(calls)],
                    "args": {"order": said[1].rstrip(".")},
                    "id": f"c{len(calls)}",
                }
                reply = AIMessage("", tool_calls=[call])
            else:
                reply = AIMessage(SURE if len(said) == 2 else DONE)
            return ChatResult(generations=[ChatGeneration(message=reply)])

    return Policy()


def vars_of(trajectory: Trajectory) -> dict[str, Any]:
    return {name: getattr(trajectory, name) for name in trajectory.__dataclass_fields__}


def failed(trajectory: Trajectory) -> Trajectory:
    steps = [*trajectory.steps[:-1], Step(observation="", action=render_answer(DONE), next_observation="", terminated=True)]
    return Trajectory(**{**vars_of(trajectory), "steps": steps, "success": False, "rollout_index": 1})


@pytest.mark.slow
def test_a_local_user_is_trained_on_the_traces_and_plays_in_the_dream(tmp_path: Path, scripted: Any) -> None:
    pytest.importorskip("trl", reason="needs trl")
    from tiny_models import SMALL_BASE

    from dreamgym_lg import Settings

    settings = Settings(real_budget=0, batch_size=2, user_steps=2)
    gym = create_gym(tmp_path, scripted, truthful, user=ModelUser(None), settings=settings)
    with pytest.raises(ConfigurationError, match=r"holds no user, and user= has no model: call train_user\(\) first"):
        gym.train(SMALL_BASE, iterations=1)
    gym.train_user(SMALL_BASE)
    written = (tmp_path / "models" / "user" / "version").read_text()
    user = gym.experiment.dream().user
    assert isinstance(user, ModelUser) and user.model is not None and user.version == f"{written}/user-2"
    taught, held_out = gym.experiment.experience_data()
    assert held_out and gym.experiment.held_out_offline() == held_out, "the gate measures it on what it was not trained on"
    messages = user.messages(Episode(task=TRACES[0].task, action=TRACES[0].steps[0].action))
    assert isinstance(user.model.invoke(messages).text, str)
    gym.train_user(SMALL_BASE)
    assert (tmp_path / "models" / "user" / "version").read_text() == written, "once"


def test_a_user_is_measured_on_what_it_was_not_trained_on_also_beside_more_traces(
    tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="needs trl")

    def trained(work: Any, *_: Any, **__: Any) -> None:
        (work.models / "user").mkdir()

    monkeypatch.setattr(supervised, "fine_tune", trained)
    monkeypatch.setattr(supervised, "tokenized", lambda start, conversations: [])
    gym = create_gym(tmp_path, scripted, truthful, user=ModelUser(None))
    work = gym.experiment
    gym.train_user("a/model")
    taught = {each.task.id for each in work.experience_data()[0]}
    gym.replay_buffer.extend(replace(each, task=replace(each.task, id=f"more-{each.task.id}")) for each in TRACES)
    assert len(taught) > 1 and taught.isdisjoint(each.task.id for each in work.held_out_offline())


def test_corrected_outcomes_leave_tasks_held_out_or_not(tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tasks are held out depends on outcomes: with others, the gate took trained ones for unseen ones."""
    pytest.importorskip("trl", reason="needs trl")
    monkeypatch.setattr(supervised, "fine_tune", lambda work, *_, **__: (work.models / "user").mkdir())
    monkeypatch.setattr(supervised, "tokenized", lambda start, conversations: [])
    gym = create_gym(tmp_path, scripted, truthful, user=ModelUser(None))
    work, buffer = gym.experiment, gym.replay_buffer
    both = [replace(each, rollout_index=n, success=n % 2 == 0) for each in TRACES for n in range(1, 21)]
    buffer.extend(replace(each, task=replace(each.task, split="train")) for each in both)
    gym.train_user("a/model")
    before = [each.task.id for each in work.held_out_offline()]
    buffer.extend(replace(each, success=False) for each in both)
    assert buffer.corrections() == 240 and [each.task.id for each in work.held_out_offline()] == before


class Taught(Exception):
    """Holds the rows of a training in place of it."""


def learned_spans(tokenizer: Any, row: Any) -> list[str]:
    """The texts that a row trains, each without a break."""
    runs = groupby(zip(row.segment.token_ids, row.segment.sampled, strict=True), lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for learned, run in runs if learned]


@pytest.mark.slow
def test_the_base_policy_learns_every_turn_of_the_agent(tmp_path: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason="needs trl")
    from tiny_models import SMALL_BASE

    from dreamgym_lg.integrations.transformers.loading import load_tokenizer

    def fine_tune(work: Any, label: str, start: Any, to: str, rows: Any, *, held_out: Any = (), **_: Any) -> None:
        raise Taught([*rows, *held_out])

    monkeypatch.setattr("dreamgym_lg.experiment.imitation.fine_tune", fine_tune)
    gym, tokenizer = create_gym(tmp_path, scripted, truthful), load_tokenizer(SMALL_BASE)
    with pytest.raises(Taught) as taught:
        gym.train_base(SMALL_BASE)
    (rows,) = taught.value.args
    assert len(rows) == len(TRACES)
    spans = [learned_spans(tokenizer, row) for row in rows]
    for parts, number in zip(((WHICH,), ("look_up", "W-1"), (SURE,), ("refund", "W-1"), (DONE,)), range(5), strict=True):
        assert all(len(each) == 5 and all(part in each[number] for part in parts) for each in spans)
    assert not any(text in span for each in spans for span in each for text in ("Yes, please.", "It is W-1", "paid"))
