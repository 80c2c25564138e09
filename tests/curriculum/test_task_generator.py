"""What is checked of generated tasks, and those that a chat model writes."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from langchain_core.messages import BaseMessage
from langchain_core.tools import StructuredTool

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.compiled.responder import EndState
from dreamgym_lg.curriculum.task_generator import ChatTaskGenerator, TaskChecks, read_proposals, read_selection, variation
from dreamgym_lg.dream import Dream, ModelJudge, Recorded, References, Verify
from dreamgym_lg.errors import BudgetExceeded, ConfigurationError, PredictionFailed
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Split, Step, Task, Trajectory

SYSTEM = "You are the support desk of a shop."
REQUESTS = ("Please refund order {}, it arrived broken.", "Where is order {}?", "I want to return {} to you.")


def trace(number: int, split: Split = "train") -> Trajectory:
    """A success: the order is looked up, and the answer given."""
    order = f"A-{1000 + number}"
    asked = REQUESTS[number % 3].format(order)
    task = Task(
        id=f"desk/{number}",
        instruction=f"{SYSTEM}\n\n{asked}",
        environment="desk",
        observation=asked,
        metadata={"customer": f"C-{number % 40}"},
        split=split,
    )
    record = json.dumps({"order": order, "status": "delivered", "amount": 5 + number})
    look_up = Step(observation=asked, action=render_call("lookup_order", {"order_id": order}), next_observation=record)
    answer = Step(observation=record, action=render_answer("Done."), next_observation="", reward=1.0, terminated=True)
    return Trajectory(task=task, steps=[look_up, answer], success=True, run="traces")


TRACES = [trace(number) for number in range(120)]
SEED = TRACES[0].task
HELD_OUT = trace(501, "test").task


def varied(text: str, rubric: str = "the money is back") -> Task:
    return variation(SEED, text, rubric=rubric)


def checks(**options: Any) -> TaskChecks:
    given = {"evaluation": [HELD_OUT], "trajectories": TRACES, **options}
    return TaskChecks([each.task for each in TRACES], **given)


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Please refund order A-1003, and tell me where A-1004 is.", None),
        ("Please refund order A-1000 today, because it arrived broken.", None),
        (TRACES[5].task.observation, "known"),
        (TRACES[5].task.observation.upper() + "!", "known"),
        (HELD_OUT.observation, "held_out"),
        ("The order A-1501 arrived broken, please refund it.", "held_out"),
        ("Please refund order A-9999 today, because it arrived broken.", "invented"),
        ("Please refund order A-1003 to Mr Smith today.", "invented"),
        ("Please refund order A-1003 by 2031-05-06 at last.", "invented"),
    ],
)
def test_what_is_refused(text: str, reason: str | None) -> None:
    assert checks()(varied(text)) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Please cancel the car that I reserved last week, I am u7@mail.com.", None),
        ("Please cancel the car that I reserved last week, I am u5@mail.com!", "held_out"),
        ("What does u5@mail.com pay at present?", "held_out"),
        ("I am u5@mail.com.", "held_out"),
        ("May I have a larger car?", "held_out"),
    ],
)
def test_what_a_held_out_task_is_about_is_nothing_to_train_on(text: str, reason: str | None) -> None:
    requests = [
        "Please cancel the car that I reserved last week, I am u5@mail.com.",
        "May I have a larger car?",
        *(f"I am u{n}@mail.com, what is my plan?" for n in range(20, 30)),
    ]
    held_out = [replace(HELD_OUT, observation=request) for request in requests]
    assert TaskChecks([], evaluation=held_out)(varied(text)) == reason


def test_what_many_tasks_name_is_nothing_that_a_held_out_task_is_about() -> None:
    known = [replace(SEED, id=f"t{n}", observation=f"Send K-{n} to Bonn.") for n in range(20)]
    held_out = replace(HELD_OUT, observation="Send K-77 to Bonn.")
    check = TaskChecks(known, evaluation=[held_out])
    assert [check(varied(text)) for text in ("K-1 has to go to Bonn.", "K-77 has to go to Berne.")] == [None, "held_out"]


def test_every_word_of_a_name_has_to_be_recorded_wherever_it_stands() -> None:
    """A trace holds first and last name apart, a request has them as one."""
    customer = json.dumps({"first": "Anna", "last": "Berg", "card": 4100.0})
    step = Step(observation="", action=render_call("get", {"id": "K-1"}), next_observation=customer)
    check = TaskChecks([], evaluation=[], trajectories=[Trajectory(task=SEED, steps=[step])])
    requests = ("I am Anna Berg: K1 cost $4,100.00!", "I am Anna Dahl, of K-1.", "I am Anna Berg, and paid 4,200 for K-1.")
    assert [check(varied(request)) for request in requests] == [None, "invented", "invented"]


def test_some_judge_has_to_decide_a_task() -> None:
    task = varied("Refund A-1003 and then A-1004.", rubric=" ")
    assert checks()(task) == "no_judge"
    assert checks(judged=lambda task: True)(task) is None, "a recorded success does"


def test_an_accepted_task_is_known_from_then_on_but_not_to_itself() -> None:
    check, task = checks(), varied("Refund A-1003 and then A-1004.")
    assert check(task) is None
    assert check(task) is None, "a killed run that samples again gets the same tasks"
    assert check(replace(task, id="other")) == "known"


def test_values_are_not_checked_without_traces() -> None:
    assert checks(trajectories=None)(varied("Please pay back A-9999 to Mr Smith today.")) is None


def test_what_a_user_wrote_into_a_tasks_metadata_survives() -> None:
    own = {"generated": "2025-01-02", "tools": [], "intent": 3, "reference_calls": "none"}
    task = variation(replace(SEED, metadata={**SEED.metadata, **own}), "Refund A-1003.", rubric="It is refunded.")
    assert own.items() <= task.metadata.items() and checks()(task) is None


# --- a chat model -----------------------------------------------------------------------------------------------------

PROPOSALS = [
    {"task": f"Refund A-100{n} and A-1010.", "rubric": f"A-100{n} and A-1010 are refunded.", "change": "two orders"}
    for n in range(3)
]


def answers(*, chosen: int = 2) -> Any:
    def reply(messages: Sequence[BaseMessage]) -> str:
        asked = json.loads(messages[-1].text)
        if "variations" in asked:
            return json.dumps({"reason": "it needs two calls", "chosen": chosen})
        return json.dumps({"tasks": PROPOSALS})

    return reply


def episodes(task: Task, *rewards: float) -> list[Trajectory]:
    return [
        Trajectory(
            task=task,
            steps=[Step(observation="", action=f"act for {reward}", next_observation="done", reward=reward)],
            rollout_index=n,
        )
        for n, reward in enumerate(rewards)
    ]


def test_a_chat_model_proposes_and_selects(scripted: Any) -> None:
    model = scripted(reply=answers())
    other = replace(SEED, id="o", observation="Where is A-1020?")
    played = [*episodes(other, 0.0, 1.0, 1.0), *episodes(SEED, 1.0, 0.0, 0.5)]
    task = ChatTaskGenerator(model)(SEED, played, random.Random(0))
    assert task is not None and task.observation == "Refund A-1001 and A-1010."
    assert task.instruction == SEED.instruction.replace(SEED.observation, "Refund A-1001 and A-1010.")
    assert (task.origin, task.parent_id, task.split) == ("synthetic", SEED.id, "train")
    assert task.rubric == "A-1001 and A-1010 are refunded."
    assert task.metadata["customer"] == SEED.metadata["customer"]

    proposed, selected = (json.loads(asked[-1].text) for asked in model.asked)
    assert proposed["number"] == 4 and [each["task"] for each in proposed["seed_tasks"]] == [
        SEED.observation, "Where is A-1020?",
    ]  # fmt: skip
    assert proposed["seed_tasks"][0]["rewards"] == [0.0, 0.5, 1.0]
    shown = [each["steps"][0]["action"] for each in proposed["seed_tasks"][0]["episodes"]]
    assert shown == ["act for 0.0", "act for 1.0"]
    assert [each["number"] for each in selected["variations"]] == [1, 2, 3]


def test_none_is_chosen_or_the_answer_cannot_be_read(scripted: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert ChatTaskGenerator(scripted(reply=answers(chosen=0)))(SEED, [], random.Random(0)) is None
    assert not caplog.records
    for reply in (answers(chosen=4), lambda _: "Sure!"):
        assert ChatTaskGenerator(scripted(reply=reply))(SEED, [], random.Random(0)) is None
    assert [record.message[:31] for record in caplog.records] == [
        "no variation of task desk/0: 'c",
        "no variation of task desk/0: th",
    ]


def test_a_spent_budget_is_not_taken_for_a_task_that_cannot_be_varied(scripted: Any) -> None:
    generate = ChatTaskGenerator(scripted(reply=answers()), hosted=Hosted(max_calls=2))
    assert generate(SEED, [], random.Random(0)) is not None
    with pytest.raises(BudgetExceeded):
        generate(SEED, [], random.Random(0))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}", "'tasks' in the answer: Field required"),
        ('{"tasks": []}', "no 'tasks'"),
        (
            '{"tasks": [{"task": "x", "rubric": ""}]}',
            "'tasks.0.rubric' in the answer: .*at least 1 character.*'tasks.0.change'",
        ),
    ],
)
def test_proposals_that_cannot_be_used(text: str, told: str) -> None:
    with pytest.raises(PredictionFailed, match=told):
        read_proposals(text)


@pytest.mark.parametrize("chosen", [-1, 4, "2", None, True])
def test_a_choice_that_is_none(chosen: object) -> None:
    with pytest.raises(
        PredictionFailed, match="expected a number from 0 to 3|'chosen' in the answer: Input should be a valid integer"
    ):
        read_selection(json.dumps({"reason": "", "chosen": chosen}), 3)


def test_in_a_game_what_is_seen_first_is_varied_and_the_instruction_stays() -> None:
    game = Task(id="g", instruction="Win.", environment="game", observation="A hall.", seed=3)
    task = variation(game, "A cellar.", rubric="won")
    assert (task.instruction, task.observation, task.seed) == ("Win.", "A cellar.", 3)
    bare = variation(replace(game, observation=""), "Win twice.", rubric="won")
    assert bare.instruction == "Win twice." and bare.observation == ""


# --- an agent of one's own --------------------------------------------------------------------------------------------


@pytest.fixture
def agent_world(scripted: Any) -> Callable[..., AgentWorld]:
    agents = pytest.importorskip("langchain.agents")

    def lookup_order(order_id: str) -> str:
        """Look up an order."""
        return ""

    def make(tasks: Sequence[Task], **options: Any) -> AgentWorld:
        tool = StructuredTool.from_function(lookup_order, metadata={"writes": False})
        graph = agents.create_agent(scripted(reply=answers()), [tool])
        return AgentWorld(graph, tasks=tasks, **options)

    return make


def test_an_agents_tasks_are_varied_by_what_was_given_and_checked_against_its_traces(agent_world: Any, scripted: Any) -> None:
    tasks = [*(each.task for each in TRACES), HELD_OUT]
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(TRACES)
        buffer.add_tasks(tasks)
        world = agent_world(tasks)
        assert world.task_generator(tasks, buffer) is None, "no model is asked that nobody named"
        world = agent_world(tasks, task_generator=scripted(reply=answers()))
        generate = world.task_generator(world.tasks("train"), buffer)
        assert isinstance(generate, ChatTaskGenerator)
        made = generate(SEED, [], random.Random(0))
        assert made is not None and world.check_task(made) is None
        assert world.check_task(varied(HELD_OUT.observation)) == "held_out"
        own = agent_world(tasks, task_generator=lambda task, episodes, rng: task).task_generator(tasks, buffer)
        assert own(SEED, [], random.Random(0)) == SEED
    assert AgentWorld.settings.synthetic_share == 0.25


def test_in_a_dream_of_ones_own_its_judges_have_to_decide_a_generated_task(agent_world: Any, scripted: Any) -> None:
    """A rubric decides nothing there: without a model nobody reads it."""
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(TRACES)
        references = References(buffer)
        own_check = Verify(lambda task, steps: 1.0)
        cases = [([references], "no_judge"), ([EndState(Mock(), references), references], "no_judge")]
        cases += [([references, own_check], None), ([references, ModelJudge(scripted(reply=answers()))], None)]
        for judges, reason in cases:
            dream = Dream([Recorded(buffer)], judges=judges)
            world = agent_world([each.task for each in TRACES], task_generator=lambda *_: None, dream=dream)
            world.task_generator(world.tasks("train"), buffer)
            assert world.check_task(varied("Refund A-1003 and then A-1004.", rubric="both are refunded")) == reason


def test_a_task_generator_that_is_none_is_refused(agent_world: Any) -> None:
    with pytest.raises(ConfigurationError, match="task_generator=3: give a chat model or its name"):
        agent_world([], task_generator=3)
    with pytest.raises(ConfigurationError, match="'nobody:gpt'"):
        agent_world([], task_generator="nobody:gpt")
