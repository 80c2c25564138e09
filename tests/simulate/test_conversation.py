"""Agents that talk with a user, in the dream and on their own tools."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import desk_agent
import pytest
from desk_agent import ORDERS, answer_of, asks, asks_by_interrupt, desk, hears, own_payload, threaded
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field
from talkers import TALKERS

from dreamgym_lg import DreamGym
from dreamgym_lg.actions import ToolCall, is_answer, parse_action, render_answer, render_call, tool_schemas
from dreamgym_lg.dream import (
    Answer,
    Dream,
    Episode,
    Recorded,
    RecordedUser,
    ScriptedUser,
    TraceIndex,
    UntilHandOver,
    Verdict,
)
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent, SimulatedEpisode, simulated
from dreamgym_lg.simulate.conversation import final_answer
from dreamgym_lg.simulate.wall.agent import WalledAgent, Workers
from dreamgym_lg.simulate.wall.wall import missing_for_wall
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder
from dreamgym_lg.types import Step, Task, Trajectory

TASK = Task(id="t", instruction="Where is my order?", environment="desk", tools=[])
LOOK, REFUND = render_call("look_up", {"order": "W-2"}), render_call("refund", {"order": "W-2"})
WHICH, SURE, DONE = "Which order?", "It is lost. Shall I refund it?", "It is refunded."
ACTIONS = [render_answer(WHICH), LOOK, render_answer(SURE), REFUND, render_answer(DONE)]
REPLIES = {WHICH: "W-2", SURE: "Yes, please."}
HEARD = ["W-2", "lost", "Yes, please.", "done", ""]
OVER = render_call("hand_over", {"summary": "a lost order"})


@pytest.fixture(autouse=True)
def lost_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tools write to one dictionary: each test begins with the order lost, whatever ran before it."""
    monkeypatch.setitem(ORDERS, "W-2", "lost")


class Acts(BaseChatModel):
    """A policy that acts by a list, whatever it reads, and reports what it read and said as tokens."""

    actions: Sequence[str]
    read: list[list[BaseMessage]] = Field(default_factory=list)
    position: int = 0

    @property
    def _llm_type(self) -> str:
        return "acts"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self.bind(tools=tool_schemas(tools))

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.read.append(messages)
        parsed = parse_action(self.actions[self.position % len(self.actions)])
        self.position += 1
        message = AIMessage(parsed) if isinstance(parsed, str) else AIMessage("", tool_calls=[call(parsed, self.position)])
        if (recorder := TokenRecorder.current()) is not None:
            prompt = [token for each in messages for token in tokens(each)]
            sampled = tokens(message)
            recorder.record(TokenCall(None, prompt, sampled, [-0.5] * len(sampled), 1.0))
        return ChatResult(generations=[ChatGeneration(message=message)])


def call(parsed: Any, number: int) -> Any:
    assert isinstance(parsed, ToolCall)
    return {"name": parsed.name, "args": dict(parsed.arguments), "id": f"call-{number}"}


def tokens(message: BaseMessage) -> list[int]:
    """A template that extends."""
    return [*map(ord, f"{message.type}{message.text}{[each['args'] for each in getattr(message, 'tool_calls', ())]}")]


class Tools:
    """Answers calls as the real tools do."""

    name = "tools"

    def respond(self, episode: Episode) -> Answer | None:
        parsed = parse_action(episode.action)
        assert isinstance(parsed, ToolCall)
        return Answer({"look_up": "lost", "refund": "done", "hand_over": "a person takes over"}[parsed.name])


class Refunded:
    name = "refunded"

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict:
        success = any(step.action == REFUND for step in episode.steps)
        return Verdict(float(success), success)


async def reply(episode: Episode) -> str | None:
    """Of a customer who says what is asked, and hears every message once."""
    await asyncio.sleep(0)
    return REPLIES.get(str(parse_action(episode.action)))


def create_dream(**parts: Any) -> Dream:
    return Dream([Tools()], **{"user": ScriptedUser(reply), "judges": [Refunded()], **parts})


async def dreamed(graph: Any, policy: BaseChatModel, dream: Dream | None = None, **options: Any) -> Trajectory:
    agent = SimulatedAgent(graph, policy, **options)
    (episode,) = await rollout(agent, [TASK], (dream or create_dream()).create_environment, source="synthetic")
    return episode


async def real(graph: Any, policy: BaseChatModel, user: Any = None, **options: Any) -> Trajectory:
    @asynccontextmanager
    async def reset(task: Task) -> Any:
        ORDERS["W-2"] = "lost"
        yield

    agent = SimulatedAgent(
        graph, policy, real=True, user=user or ScriptedUser(reply), reset_real=reset,
        verify=lambda task, state: ORDERS["W-2"] == "refunded", **options,
    )  # fmt: skip
    (episode,) = await rollout(agent, [TASK], source="real")
    return episode


def talk(steps: Sequence[Step]) -> list[tuple[str, str]]:
    return [(step.action, step.next_observation) for step in steps]


@pytest.mark.parametrize("graph", [desk, threaded])
@pytest.mark.parametrize("play", [dreamed, real])
async def test_the_users_replies_are_the_next_inputs_of_the_same_thread(play: Any, graph: Any) -> None:
    policy = Acts(actions=ACTIONS)
    episode = await play(graph(), policy)
    assert episode.error is None and episode.success and episode.reward == 1
    assert talk(episode.steps) == list(zip(ACTIONS, HEARD, strict=True))
    assert [step.observation for step in episode.steps] == [TASK.instruction, *HEARD[:-1]]
    assert [step.decided_by for step in episode.steps if is_answer(step.action)] == ["user", "user", ""]
    assert [step.terminated for step in episode.steps] == [False] * 4 + [True]
    kinds = ["system", "human", "ai", "human", "ai", "tool", "ai", "human", "ai", "tool"]
    assert [message.type for message in policy.read[-1]] == kinds
    (segment,) = episode.segments
    assert segment.trainable == sum(len(tokens(message)) for message in policy.read[-1] if message.type == "ai") + len(
        tokens(AIMessage(DONE))
    )


@pytest.mark.parametrize("play", [dreamed, real])
async def test_a_recorded_user_hears_no_call_of_a_tool_that_really_runs(play: Any) -> None:
    """Its record holds them, as production made them: the agent had left it with its first message behind one."""
    steps = [Step(observation="", action=action, next_observation=heard) for action, heard in zip(ACTIONS, HEARD, strict=True)]
    user, options = RecordedUser([Trajectory(task=TASK, steps=steps)]), {"pass_through": ["look_up"]}
    index = TraceIndex(ReplayBuffer(":memory:"), writes=[], **options)
    parts = {"dream": Dream([Recorded(index), Tools()], user, [Refunded()])} if play is dreamed else {"user": user}
    episode = await play(desk(), Acts(actions=ACTIONS), **parts, **options)
    assert [step.next_observation for step in episode.steps] == ["W-2", "Yes, please.", "done", ""] and episode.success
    assert [act.kind for act in episode.acts] == ["passed through"]


async def test_both_are_the_same_but_for_who_decides() -> None:
    one, other = await dreamed(desk(), Acts(actions=ACTIONS)), await real(desk(), Acts(actions=ACTIONS))
    assert talk(one.steps) == talk(other.steps) and one.segments == other.segments


@pytest.mark.parametrize("graph", [desk, threaded])
def test_it_is_the_same_without_an_event_loop(graph: Any) -> None:
    policy = Acts(actions=ACTIONS)
    environment = create_dream().create_environment()
    with simulated(graph(), policy=policy, environment=environment, task=TASK) as episode:
        state = episode.invoke({"messages": [HumanMessage(TASK.instruction)]})
    assert talk(episode.steps) == list(zip(ACTIONS, HEARD, strict=True))[:-1]
    assert episode.last is not None and episode.last.reward == 1 and episode.last_action == ACTIONS[-1]
    assert state["messages"][-1].text == DONE


async def test_a_user_leaves_where_the_agent_hands_over() -> None:
    heard = list[str]()

    def note(episode: Episode) -> str | None:
        heard.append(episode.action)
        return "W-2"

    for user, replies in ((ScriptedUser(note), 4), (UntilHandOver(ScriptedUser(note), ["hand_over"]), 2)):
        heard.clear()
        for episode in (
            await dreamed(desk(), Acts(actions=[ACTIONS[0], OVER, render_answer("")]), create_dream(user=user)),
            await real(desk(), Acts(actions=[ACTIONS[0], OVER, render_answer("")]), user),
        ):
            over = render_answer("a person takes over", tool="hand_over")  # the tool's answer is the agent's (`return_direct`)
            assert talk(episode.steps)[:3] == [
                (ACTIONS[0], "W-2"),
                (OVER, "a person takes over"),
                (over, "W-2" * (replies > 2)),
            ]
            assert episode.error is None and episode.steps[-1].terminated and not episode.success
        assert len(heard) == replies


@pytest.mark.parametrize("play", [dreamed, real])
async def test_a_conversation_without_end_is_truncated_at_the_turn_limit(play: Any) -> None:
    policy = Acts(actions=[render_answer(WHICH)])
    episode = await play(desk(), policy, max_turns=3)
    assert [step.next_observation for step in episode.steps] == ["W-2", "W-2", "W-2", ""]
    assert episode.steps[-1].truncated and not episode.steps[-1].terminated and episode.reward == 0
    with pytest.raises(ConfigurationError, match="max_turns=0: give the most replies of the user, at least 1"):
        SimulatedEpisode(desk(), policy=policy, environment=create_dream().create_environment(), max_turns=0)


@pytest.mark.parametrize("play", [dreamed, real])
async def test_a_graph_with_a_payload_of_its_own(play: Any) -> None:
    own: dict[str, Any] = {"payload": asks, "read_message": answer_of}
    policy = Acts(actions=[ACTIONS[0], ACTIONS[2], ACTIONS[4]])
    episode = await play(own_payload(), policy, **own, next_payload=hears)
    assert [step.next_observation for step in episode.steps] == ["W-2", "Yes, please.", ""]
    assert [message.text for message in policy.read[-1]] == [TASK.instruction, WHICH, "W-2", SURE, "Yes, please."]
    episode = await play(own_payload(), Acts(actions=ACTIONS), **own)
    assert "the graph's input or state has no `messages`: give next_payload=" in str(episode.error)


@pytest.mark.parametrize("play", [dreamed, real])
async def test_questions_by_interrupt_are_the_users_to_answer(play: Any) -> None:
    replies = {WHICH: "W-2", '{"question": "Which colour?"}': "red"}
    user = ScriptedUser(lambda episode: replies.get(str(parse_action(episode.action))))
    policy = Acts(actions=[ACTIONS[4]])
    parts = {"dream": create_dream(user=user)} if play is dreamed else {"user": user}
    episode = await play(asks_by_interrupt(), policy, **parts)
    assert talk(episode.steps)[:2] == [(render_answer(WHICH), "W-2"), (render_answer('{"question": "Which colour?"}'), "red")]
    assert policy.read[-1][-1].text == "W-2, red" and episode.steps[-1].action == ACTIONS[4]
    answered = await play(asks_by_interrupt(), Acts(actions=[ACTIONS[4]]), **parts, respond=lambda asked: "mine")
    assert [step.action for step in answered.steps] == [ACTIONS[4]]


async def test_a_user_that_ends_while_the_graph_waits_for_an_answer() -> None:
    episode = await dreamed(asks_by_interrupt(), Acts(actions=[]), create_dream(user=ScriptedUser(lambda episode: None)))
    assert [(step.action, step.terminated) for step in episode.steps] == [(render_answer(WHICH), True)]


async def test_what_a_user_raises_ends_the_episode_with_its_cause() -> None:
    def fails(episode: Episode) -> str:
        raise ZeroDivisionError("the user's own")

    for episode in (
        await dreamed(desk(), Acts(actions=ACTIONS), create_dream(user=ScriptedUser(fails))),
        await real(desk(), Acts(actions=ACTIONS), ScriptedUser(fails)),
    ):
        assert f"'user' (ScriptedUser) raised ZeroDivisionError: the user's own at {__file__}:" in str(episode.error)
        assert not episode.success


def test_a_user_needs_a_judge_or_a_check() -> None:
    with ReplayBuffer(":memory:") as buffer:
        dream = create_dream(judges=[])
        with pytest.raises(ConfigurationError, match="user= would never talk, as dream= brings its own"):
            DreamGym(desk(), replay_buffer=buffer, dream=create_dream(), user=ScriptedUser(lambda episode: None), tasks=[TASK])
        with pytest.raises(ConfigurationError, match="dream= has a user and no judge: add judges=, or give verify_dream="):
            DreamGym(desk(), replay_buffer=buffer, dream=dream)
        policy, checked = Acts(actions=ACTIONS), list[int]()

        def check(task: Task, state: Any) -> bool:
            checked.append(len(state["messages"]))
            return True

        gym = DreamGym(desk(), replay_buffer=buffer, dream=dream, tasks=[TASK], verify_dream=check, say=lambda _: None)
        rate, (episode,) = gym.evaluate(policy, tasks=[TASK])
        assert rate.value == 1 and checked == [10] and episode.steps[-1].judged_by == "verify"
        # judges of the dream are not asked for a verdict that the check replaces
        judge = Refunded()
        judge.judge = lambda *_: pytest.fail("asked")  # type: ignore[method-assign]
        judged = create_dream(judges=[judge])
        gym = DreamGym(desk(), replay_buffer=buffer, dream=judged, tasks=[TASK], verify_dream=check, say=lambda _: None)
        assert gym.evaluate(Acts(actions=ACTIONS), tasks=[TASK])[0].value == 1 and checked == [10, 10]
    with pytest.raises(ConfigurationError, match="user= with real=False"):
        SimulatedAgent(desk(), Acts(actions=[]), user=ScriptedUser(reply))


def test_a_gym_talks_in_the_dream_and_with_another_user_in_reality() -> None:
    with ReplayBuffer(":memory:") as buffer:
        asked = list[str]()

        def other(episode: Episode) -> str | None:
            asked.append(episode.observation)
            return REPLIES.get(str(parse_action(episode.action)))

        gym = DreamGym(
            desk(), replay_buffer=buffer, dream=create_dream(), tasks=[TASK], say=lambda _: None,
            verify_real=lambda task, state: len(state["messages"]) == 10, user_real=ScriptedUser(other),
        )  # fmt: skip
        assert gym.evaluate(Acts(actions=ACTIONS), tasks=[TASK])[0].value == 1 and not asked
        assert gym.evaluate(Acts(actions=ACTIONS), tasks=[TASK], real=True)[0].value == 1
        assert asked == [TASK.instruction, "lost", "done"]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")
@pytest.mark.parametrize("name", ["desk", "threaded", "own_payload", "asks_by_interrupt"])
async def test_behind_the_wall_it_is_the_same(name: str) -> None:
    own = {"payload": asks, "read_message": answer_of, "next_payload": hears}
    functions: dict[str, Any] = own if name == "own_payload" else {}
    actions = ACTIONS if name in ("desk", "threaded") else [action for action in ACTIONS if is_answer(action)]
    inside = await dreamed(getattr(desk_agent, name)(), Acts(actions=actions), **functions)
    workers = Workers(f"{Path(desk_agent.__file__)}:{name}", count=1, **functions)
    try:
        agent = WalledAgent(workers, Acts(actions=actions))
        (walled,) = await rollout(agent, [TASK], create_dream().create_environment, source="synthetic")
    finally:
        workers.close()
    assert walled.error is None and len(walled.steps) > 1
    assert (walled.steps, walled.success, walled.segments) == (inside.steps, inside.success, inside.segments)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["dreamed", "real"])
def test_killed_in_the_middle_of_a_conversation_the_same_command_goes_on(tmp_path: Path, place: str) -> None:
    """Nothing lost, nothing doubled: conversations that had ended are not held again, the others from their beginning."""
    script, log = Path(__file__).parent / "killed_talk.py", tmp_path / "log"

    def run(buffer: str, dies: str) -> tuple[int, list[Trajectory], list[str]]:
        log.write_text("")
        done = subprocess.run([sys.executable, script, tmp_path / buffer, log, dies, place], capture_output=True, text=True)
        with ReplayBuffer(tmp_path / buffer) as stored:
            return done.returncode, list(stored.trajectories(segments=True)), log.read_text().split()

    code, before, _ = run("killed.db", "t4")
    assert code == -signal.SIGKILL and 0 < len(before) < 6 and all(each.task.id != "t4" for each in before)
    code, after, answered = run("killed.db", "")
    assert code == 0 and after[: len(before)] == before
    assert not {each.task.id for each in before} & set(answered), "what had ended is not held again"
    assert Counter(answered) == {each.task.id: 3 for each in after[len(before) :]}
    _, whole, _ = run("whole.db", "")
    assert sorted(after, key=lambda each: each.task.id) == sorted(whole, key=lambda each: each.task.id)
    assert all(talk(each.steps) == list(zip(ACTIONS, HEARD, strict=True)) and each.success for each in after)


# --- kinds of agents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("play", [dreamed, real])
@pytest.mark.parametrize("create", TALKERS, ids=lambda create: create.__name__)
async def test_every_kind_of_agent_talks_as_it_does_in_production(play: Any, create: Any) -> None:
    talker = create()
    actions = [each for number, action in enumerate(ACTIONS) for each in (*talker.before.get(number, ()), action)]
    policy = Acts(actions=actions)
    episode = await play(talker.graph, policy, **talker.options)
    assert episode.error is None, episode.error
    assert talk(episode.steps) == list(zip(ACTIONS, HEARD, strict=True)) and episode.success
    assert len(policy.read) == len(actions)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")
@pytest.mark.parametrize("create", TALKERS, ids=lambda create: create.__name__)
async def test_every_kind_of_agent_talks_behind_the_wall(create: Any, tmp_path: Path) -> None:
    talker, folder = create(), Path(__file__).parent
    (tmp_path / "own.py").write_text(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\nfrom talkers import {create.__name__}\n"
        f"graph = {create.__name__}().graph\n"
    )
    actions = [each for number, action in enumerate(ACTIONS) for each in (*talker.before.get(number, ()), action)]
    workers = Workers(f"{tmp_path / 'own.py'}:graph", count=1, **talker.options)
    try:
        agent = WalledAgent(workers, policy := Acts(actions=actions))
        (episode,) = await rollout(agent, [TASK], create_dream().create_environment, source="synthetic")
    finally:
        workers.close()
    assert episode.error is None, episode.error
    assert talk(episode.steps) == list(zip(ACTIONS, HEARD, strict=True)) and episode.success
    assert len(policy.read) == len(actions)


@pytest.mark.parametrize("play", [dreamed, real])
async def test_an_agent_that_asks_nothing_and_one_that_never_stops(play: Any) -> None:
    episode = await play(desk(), Acts(actions=[LOOK, REFUND, ACTIONS[-1]]))
    assert [step.action for step in episode.steps] == [LOOK, REFUND, ACTIONS[-1]] and episode.success
    graph = desk().with_config(recursion_limit=20)
    endless = await play(graph, Acts(actions=[ACTIONS[0], *[LOOK] * 100]))
    assert [step.action for step in endless.steps[:2]] == [ACTIONS[0], LOOK] and endless.steps[-1].truncated


def test_a_workers_human_message_is_the_answer_of_its_team() -> None:
    """LangGraph's supervisor pattern: workers answer with a human message that has their name."""
    asked, plan = HumanMessage("Is ticket 7 closed?"), AIMessage("I will ask the worker.")
    assert final_answer({"messages": [asked, plan, HumanMessage("It is closed.", name="worker")]}) == "It is closed."
    assert final_answer({"messages": [asked, plan, HumanMessage("Thanks.")]}) == plan.text
