"""The dream: its parts are asked in order, one loop steps them, and every caller gets the same of it."""

import asyncio
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from orders import CANCEL, DONE, NOTE, ORDER, PAID, REFUND, TOOLS, Says, SaysLater, order_task, play, tool, trace

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.dream import (
    Answer,
    Dream,
    Episode,
    Model,
    ModelJudge,
    ModelUser,
    Recorded,
    RecordedUser,
    References,
    Schemas,
    ScriptedUser,
    UntilHandOver,
    Verdict,
    Verify,
)
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.environment import check_environment
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed, PredictionFailed
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, StepResult, Task

DOOR = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")
WON, LOST = Verdict(1.0, True, "it is done"), Verdict(0.0, False, "it is not")


# --- an episode -------------------------------------------------------------------------------------------------------


def test_a_dream_keeps_the_environment_contract(scripted: Any, door_world: Any) -> None:
    environment = Dream([Model(scripted(reply=door_world))]).create_environment()
    check_environment(environment, DOOR, ["go north", "dance", "open door", "go north"])
    check_environment(environment, DOOR, ["jump"])
    check_environment(environment, DOOR, ["open door"])


def test_a_text_agents_episode(scripted: Any, door_world: Any) -> None:
    environment = Dream([Model(scripted(reply=door_world))]).create_environment()
    assert environment.reset(DOOR) == "A closed door."
    refused = environment.step("dance")
    info = {"success": False, "valid": False, "reasoning": "invalid, it is not understood"}
    assert refused.info == {**info, "decided_by": "model", "judged_by": "model"}
    environment.step("open door")
    last = environment.step("go north")
    assert last[:4] == ("You are outside.", 1.0, True, False) and last.info["success"]
    with pytest.raises(RuntimeError, match=r"call reset\(task\)"):
        environment.step("go north")
    assert environment.reset(DOOR) == "A closed door." and environment.steps == []


def test_a_tool_agents_episode_and_who_decided_it(buffer: ReplayBuffer) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), (REFUND, "ok"), DONE))
    index = TraceIndex(buffer, writes=["refund"])
    dream = Dream([Recorded(index), Says(Answer("a note"), "model")], judges=[Says(), References(index)])
    environment = dream.create_environment()
    read, noted, refunded, last = play(environment, order_task(), ORDER, NOTE, REFUND, DONE)
    assert [read.observation, noted.observation, refunded.observation, last.observation] == [PAID, "a note", "ok", ""]
    assert [each.info["decided_by"] for each in (read, noted, refunded, last)] == ["recorded", "model", "recorded", ""]
    assert [each.info["judged_by"] for each in (read, noted, refunded, last)] == ["", "", "", "references"]
    assert last[1:4] == (1.0, True, False) and last.info["reasoning"].endswith("are those of a recorded success")
    assert [each.terminated for each in environment.steps] == [False, False, False, True]
    assert [(each.decided_by, each.judged_by) for each in environment.steps][::3] == [("recorded", ""), ("", "references")]
    assert [each.observation for each in environment.steps] == ["Task t1.", PAID, "a note", "ok"]


def test_stepping_needs_a_reset_and_a_dream_a_first_observation() -> None:
    environment = Dream([Says(Answer("fine"))]).create_environment()
    for act in (lambda: environment.step("open door"), lambda: environment.show_tools(TOOLS)):
        with pytest.raises(RuntimeError, match="step before reset"):
            act()
    with pytest.raises(ConfigurationError, match="task 'blank' has no observation and no instruction"):
        environment.reset(Task(id="blank", instruction="", environment=""))


def test_tools_that_appear_are_the_tasks_from_then_on() -> None:
    part = Says(Answer("fine"))
    environment = Dream([part], judges=[Verify(lambda *_: 1)]).create_environment()
    environment.reset(Task(id="t", instruction="go", environment=""))
    environment.step(ORDER)
    environment.show_tools(TOOLS[:1])
    environment.show_tools(TOOLS)
    environment.step(ORDER)
    assert [each.task.tools for each in part.episodes] == [None, TOOLS]
    assert environment.step(DONE).info["judged_by"] == "verify"


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Says, SaysLater])
def test_the_first_part_that_knows_decides(kind: type[Says]) -> None:
    silent, first, last = kind(None, "silent"), kind(Answer("first", reasoning="why"), "first"), kind(Answer("last"), "last")
    judges = [kind(None, "silent"), kind(WON, "judge"), kind(LOST, "late")]
    environment = Dream([silent, first, last], judges=judges).create_environment()
    call, message = play(environment, order_task(), ORDER, DONE)
    assert (call.observation, call.info["reasoning"], call.info["decided_by"]) == ("first", "why", "first")
    assert (message.reward, message.info["reasoning"], message.info["judged_by"]) == (1, "it is done", "judge")
    assert silent.episodes and not last.episodes and not judges[2].episodes
    (episode,) = first.episodes
    assert (episode.action, episode.steps, episode.own_traces, episode.observation) == (ORDER, (), True, "Task t1.")
    ((episode, answer),) = judges[1].episodes
    assert (episode.action, answer, episode.observation) == (DONE, None, "first") and episode.steps[0].action == ORDER


@pytest.mark.parametrize(
    ("parts", "method"),
    [
        ({"responders": [Says(), object()]}, "respond"),
        ({"responders": [Says(name=None)]}, "respond"),  # type: ignore[arg-type]
        ({"responders": [], "user": object()}, "reply"),
        ({"responders": [], "judges": [Recorded]}, "judge"),
    ],
)
def test_what_is_no_part_is_refused(parts: dict[str, Any], method: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"has no name or no method {method}\(\)"):
        Dream(**parts)


def test_an_action_that_nobody_answers_is_a_failed_prediction() -> None:
    environment = Dream([Says(None, "recorded"), Says(None, "rules")], judges=[Says(WON)]).create_environment()
    environment.reset(order_task())
    for action in (ORDER, '{"name": "get_order", "arguments": "{"}'):
        with pytest.raises(PredictionFailed, match=r"no responder of the dream \(recorded, rules\) answers .*get_order"):
            environment.step(action)
    assert environment.step(DONE).reward == 1, "it goes on where it was"
    with pytest.raises(PredictionFailed, match=r"\(it has none\) answers 'look'"):
        play(Dream([]).create_environment(), DOOR, "look")


@pytest.mark.parametrize("judges", [[], [Says()]])
def test_a_message_that_nobody_judges_is_a_setting_to_mend(judges: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match="no judge of the dream decides the outcome of task 't1': add one"):
        play(Dream([Says(Answer("fine"))], judges=judges).create_environment(), order_task(), ORDER, DONE)


def test_a_part_that_raises_leaves_the_episode_where_it_was() -> None:
    class Broken(Says):
        def respond(self, episode: Episode) -> Answer:
            if episode.action == CANCEL:
                raise OSError("away")
            return Answer("fine")

    environment = Dream([Broken()]).create_environment()
    environment.reset(order_task())
    with pytest.raises(
        EnvironmentFailed,
        match=r"respond\(\) of the dream's 'says' \(Broken\) raised OSError: away at .*test_dream\.py:\d+ in respond",
    ):
        environment.step(CANCEL)
    assert environment.steps == [] and environment.step(ORDER).observation == "fine"


@pytest.mark.parametrize("later", [False, True])
def test_a_part_that_returns_something_else_is_named_with_its_rule(later: bool) -> None:
    says = SaysLater if later else Says
    user = ScriptedUser(lambda episode: 3)  # type: ignore[arg-type, return-value]
    for action, dream, error in (
        (ORDER, Dream([says("fine")]), "respond() of the dream's 'says' (Says) returned 'fine': let it return Answer or None"),
        (
            DONE,
            Dream([], judges=[says(0.5)]),
            "judge() of the dream's 'says' (Says) returned 0.5: let it return Verdict or None",
        ),
        (DONE, Dream([], user), "reply() of the dream's 'user' (ScriptedUser) returned 3: let it return str or None"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(error.replace("(Says)", f"({says.__name__})"))):
            play(dream.create_environment(), order_task(), action)


RETURNS = {"type": "object", "required": ["status"], "properties": {"status": {"enum": ["paid", "sent"], "type": "string"}}}


@pytest.mark.parametrize("text", ["id='W-204' status='paid'", '{"id": 1}', '["paid"]', '{"status": "lost"}', '{"status": 1}'])
def test_an_answer_in_another_structure_than_the_tool_returns_is_passed_over(text: str) -> None:
    """LangChain writes an object of pydantic's like the first: a policy can read it, and nothing that wants the object."""
    typed = order_task(tools=[tool("get_order", returns=RETURNS), tool("refund")])
    environment = Dream([Says(Answer(text), "recorded"), Says(Answer(PAID), "model")]).create_environment()
    get, refund = play(environment, typed, ORDER, REFUND)
    assert (get.observation, get.info["decided_by"]) == (PAID, "model")
    assert (refund.observation, refund.info["decided_by"]) == (text, "recorded"), "a tool of text returns any text"
    (error,) = play(Dream([Says(Answer(text, valid=False))]).create_environment(), typed, ORDER)
    assert (error.observation, error.info["valid"]) == (text, False), "an error is a text"
    with pytest.raises(PredictionFailed, match="no responder"):
        play(Dream([Says(Answer(text))]).create_environment(), typed, ORDER)


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_a_tool_ends_nothing_and_a_message_always_ends_where_no_user_replies() -> None:
    ends = Answer("ended?", verdict=Verdict(1.0, True))
    environment = Dream([Says(ends)], judges=[Says(Verdict(0.5, False, terminated=False))]).create_environment()
    call, message = play(environment, order_task(), ORDER, DONE)
    assert call[1:4] == (0.0, False, False) and not call.info["success"] and call.info["judged_by"] == ""
    assert message[1:4] == (0.5, True, False) and not message.info["success"]


@pytest.mark.parametrize(
    ("verdict", "reward", "terminated"),
    [
        (Verdict(0.5, False, terminated=False), 0, False),
        (Verdict(7.0, True), 1, True),
        (Verdict(0.3, False), 0, True),
        (Verdict(1.0, True, terminated=False), 0, False),
        (None, 0, False),
    ],
)
def test_an_answers_own_view_of_the_outcome_counts_by_its_success_alone(
    verdict: Verdict | None, reward: float, terminated: bool
) -> None:
    (result,) = play(Dream([Says(Answer("So.", verdict=verdict), "world")]).create_environment(), DOOR, "look")
    assert result[1:4] == (reward, terminated, False) and result.info["success"] == (reward == 1)
    assert result.info["judged_by"] == ("world" if verdict else "")


def test_a_judge_decides_before_the_answers_own_view_after_each_action_of_a_text_agent() -> None:
    judge = Says(Verdict(0.25, False, terminated=False), "score")
    environment = Dream([Says(Answer("So.", verdict=Verdict(1.0, True)))], judges=[judge]).create_environment()
    results = play(environment, DOOR, "look", "go")
    assert [each[1:3] for each in results] == [(0.25, False)] * 2
    assert [each.info["judged_by"] for each in results] == ["score"] * 2
    assert [(episode.action, answer.observation) for episode, answer in judge.episodes] == [("look", "So."), ("go", "So.")]


def test_a_user_replies_until_it_has_nothing_to_say_and_then_the_judges_decide() -> None:
    replies = {"Which order?": "W-204.", "Anything else?": None}

    def reply(episode: Episode) -> str | None:
        return replies[episode.action[12:-2]]

    judge = Says(WON, "judge")
    dream = Dream([Says(Answer(PAID), "shop")], ScriptedUser(reply), [judge])
    environment = dream.create_environment()
    which, call, last = play(environment, order_task(), render_answer("Which order?"), ORDER, render_answer("Anything else?"))
    assert which == StepResult(
        "W-204.", 0.0, False, False, {"success": False, "valid": True, "reasoning": "", "decided_by": "user", "judged_by": ""}
    )
    assert call.info["decided_by"] == "shop" and last[:4] == ("", 1.0, True, False)
    ((episode, _),) = judge.episodes
    assert [step.next_observation for step in episode.steps] == ["W-204.", PAID]
    assert [(step.decided_by, step.judged_by) for step in environment.steps] == [("user", ""), ("shop", ""), ("", "judge")]


def test_a_user_hears_no_text_agent_and_no_call() -> None:
    user = Says("hello", "user")
    dream = Dream([Says(Answer("So."), "world")], user)
    assert play(dream.create_environment(), DOOR, DONE, ORDER)[0].info["decided_by"] == "world"
    assert play(dream.create_environment(), order_task(), ORDER)[0].info["decided_by"] == "world"
    assert not user.episodes


# --- resumed ----------------------------------------------------------------------------------------------------------


def test_a_resumed_dream_goes_on_behind_recorded_steps_without_the_tasks_own_traces(buffer: ReplayBuffer) -> None:
    part, judge = Says(Answer("fine")), Says(WON)
    recorded = [
        Step(observation="Task t1.", action=REFUND, next_observation="ok"),
        Step(observation="ok", action=NOTE, next_observation="Error", valid=False),
    ]
    environment = Dream([part], judges=[judge]).resume(order_task(), recorded)
    result = environment.step(ORDER)
    assert result.observation == "fine" and environment.steps[2].observation == "Error"
    assert environment.step(DONE).terminated
    (episode,) = part.episodes
    assert (episode.steps, episode.own_traces, episode.observation) == (tuple(recorded), False, "Error")
    ((episode, _),) = judge.episodes
    assert len(episode.steps) == 3 and not episode.own_traces and len(recorded) == 2
    assert Dream([part]).resume(DOOR).step("look").observation == "fine"
    with pytest.raises(ConfigurationError, match="no observation"):
        Dream([part]).resume(Task(id="t", instruction="", environment=""))


def test_no_part_sees_a_call_that_langchain_refuses() -> None:
    """In a graph it reaches no environment; where there is none, `Schemas` refuses it, also among recorded steps."""
    unknown, part, judge = render_call("fly", {}), Says(Answer("fine")), Says(WON)
    dream = Dream([Schemas(), part], judges=[judge])
    environment = dream.create_environment()
    refused, *_ = play(environment, order_task(), unknown, ORDER, DONE)
    assert not refused.info["valid"] and [step.action for step in environment.steps] == [unknown, ORDER, DONE]
    assert environment.steps[1].observation == refused.observation, "the policy saw it"
    recorded = Step(observation="Task t1.", action=unknown, next_observation="no such tool", valid=False)
    fine = Step(observation="no such tool", action=ORDER, next_observation="fine")
    dream.resume(order_task(), [recorded, fine]).step(DONE)
    behind = [[step.action for step in episode.steps] for episode, _ in judge.episodes]
    assert [episode.steps for episode in part.episodes] == [()] and behind == [[ORDER], [ORDER]]
    assert part.episodes[0].observation == "Task t1."


# --- callers ----------------------------------------------------------------------------------------------------------


def by_step(environment: Any, of: Task, *actions: str) -> list[Any]:
    return play(environment, of, *actions)


def by_astep(environment: Any, of: Task, *actions: str) -> list[Any]:
    async def episode() -> list[Any]:
        await environment.areset(of)
        return [await environment.astep(action) for action in actions]

    return asyncio.run(episode())


def by_step_in_a_loop(environment: Any, of: Task, *actions: str) -> list[Any]:
    async def episode() -> list[Any]:
        return play(environment, of, *actions)

    return asyncio.run(episode())


def by_step_of_many_threads(environment: Any, of: Task, *actions: str) -> list[Any]:
    def episode(_: int) -> list[Any]:
        return play(environment.dream.create_environment(), of, *actions)

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(episode, range(16))
    assert all(each == first for each in others)
    return first


@pytest.mark.parametrize("way", [by_astep, by_step_in_a_loop, by_step_of_many_threads])
@pytest.mark.parametrize("kind", [Says, SaysLater])
def test_synchronous_and_asynchronous_callers_get_the_same(way: Callable[..., Any], kind: type[Says]) -> None:
    user = kind(None, "user")
    user.reply = lambda episode: "yes" if not any(step.decided_by == "user" for step in episode.steps) else None  # type: ignore[method-assign]
    dream = Dream([kind(Answer(PAID), "shop")], user, [kind(WON, "judge")])
    actions = (ORDER, render_answer("Shall I?"), REFUND, DONE)
    expected = by_step(dream.create_environment(), order_task(), *actions)
    assert way(dream.create_environment(), order_task(), *actions) == expected
    assert [each.info["decided_by"] for each in expected] == ["shop", "user", "shop", ""]


def test_synchronous_episodes_share_one_event_loop_of_another_thread(scripted: Any) -> None:
    loops = set[Any]()

    class Where(Says):
        async def respond(self, episode: Episode) -> Answer:
            loops.add((asyncio.get_running_loop(), threading.current_thread().name))
            return Answer("fine")

    by_step_of_many_threads(Dream([Where()]).create_environment(), DOOR, "look", "go")
    assert [name for _, name in loops] == ["dreamgym-dream"]


def test_a_synchronous_part_that_steps_another_dream_is_told_instead_of_waiting_for_ever() -> None:
    inner = Dream([Says(Answer("inner"))])

    class Nested(Says):
        def respond(self, episode: Episode) -> Answer:
            return Answer(play(inner.create_environment(), DOOR, "look")[0].observation)

    class NestedLater(Says):
        async def respond(self, episode: Episode) -> Answer:
            environment = inner.create_environment()
            environment.reset(DOOR)
            return Answer((await environment.astep("look")).observation)

    with pytest.raises(EnvironmentFailed, match="waits for that loop: call the async method there"):
        play(Dream([Nested()]).create_environment(), DOOR, "look")
    assert play(Dream([NestedLater()]).create_environment(), DOOR, "look")[0].observation == "inner"


def test_what_a_part_raises_is_raised_in_the_callers_thread() -> None:
    class Broken(Says):
        async def respond(self, episode: Episode) -> Answer:
            raise PredictionFailed("unreadable")

    for way in (by_step, by_astep, by_step_in_a_loop):
        with pytest.raises(PredictionFailed, match="unreadable"):
            way(Dream([Broken()]).create_environment(), DOOR, "look")


# --- of all parts -----------------------------------------------------------------------------------------------------


def test_the_version_names_every_model_once_or_is_the_users_own(scripted: Any) -> None:
    model = Model(scripted(reply=str), version="experience-3")
    assert Dream([Says(), model], judges=[ModelJudge(model)]).version == "experience-3"
    assert Dream([model], judges=[ModelJudge(scripted(reply=str))]).version == "experience-3+ScriptedModel/judge-lines-1"
    assert Dream([model], version="mine").version == "mine" and Dream([Says()]).version == "dream"


def test_where_a_part_names_no_version_nobody_knows_whether_the_dream_is_the_same(scripted: Any, buffer: ReplayBuffer) -> None:
    model, judge = Model(scripted(reply=str), version="m"), scripted(reply=str)
    user = UntilHandOver(ModelUser(model.model, judge=judge), ["hand_over"])
    library = Dream([Schemas(), Recorded(buffer), model], RecordedUser([], otherwise=user), [References(buffer)])
    assert library.versions == ("", "", "m", "ScriptedModel/user-2+ScriptedModel/user-judge-1", "")
    assert RecordedUser([]).version == "" and RecordedUser([], otherwise=ScriptedUser(lambda _: None)).version is None
    for mine in (Says(), Verify(lambda task, steps: 1.0)):
        assert Dream([model], judges=[mine]).versions is None


def test_models_and_budgets_are_listed_each_once(scripted: Any, buffer: ReplayBuffer) -> None:
    small, large = scripted(reply=str), scripted(reply=str)
    one, other = Hosted(max_calls=1), Hosted(max_calls=2)
    model = Model(small, hosted=one)
    dream = Dream([Recorded(buffer), model], judges=[ModelJudge(model), ModelJudge(large, hosted=other)])
    assert [each is known for each, known in zip(dream.language_models, (small, large), strict=True)] == [True, True]
    assert dream.hosted == [one, other]
    assert Dream([Recorded(buffer)]).hosted == Dream([Recorded(buffer)]).language_models == []


def test_traces_decide_a_task_if_no_language_model_judges_before_them(buffer: ReplayBuffer, scripted: Any) -> None:
    buffer.add(trace(order_task(), (REFUND, "ok"), DONE))
    references, model = References(buffer), ModelJudge(scripted(reply=str))
    for judges, decided in (
        ([references, model], True),
        ([Verify(lambda *_: None), references], True),
        ([model, references], False),
    ):
        dream = Dream([], judges=judges)
        assert dream.decides_by_traces(order_task()) is decided
        assert not dream.decides_by_traces(order_task("t2"))


def test_any_call_of_the_same_meaning_is_a_call(buffer: ReplayBuffer) -> None:
    environment = Dream([Says(Answer("fine"))], judges=[Says(WON)]).create_environment()
    (result,) = play(environment, order_task(), render_call("answer", {"answer": "Done."}))
    assert not result.terminated, "a tool may be named answer"
