"""A dream of pages, and the agent that plays it as it plays real ones; without a browser. The pages are of our own making."""

from itertools import compress
from typing import Any

import pytest

pytest.importorskip("browsergym", reason="browsergym is not installed: pip install 'dreamgym-lg[browsergym]'")

from browser_parts import ToolPolicy
from langchain_core.messages import BaseMessage

from dreamgym_lg.dream import Model
from dreamgym_lg.environment import check_environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.integrations.browsergym.child import _without_repetition
from dreamgym_lg.integrations.browsergym.environment import OVER
from dreamgym_lg.integrations.browsergym.world import BrowserGymWorld
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Step, Task, Trajectory

PAGE = """RootWebArea 'Sign in', focused
\tStaticText 'Name'
\t[3] textbox ''
\t[5] textbox ''
\t[6] combobox '' value='red', hasPopup='menu', expanded=False
\t\t[7] option 'red', selected=True
\t\t[8] option 'blue', selected=False
\t[9] radio 'by post', checked='true'
\t[11] button 'Enter'
"""
FILLED = PAGE.replace("[3] textbox ''", "[3] textbox '' value='ada'").replace("[5] textbox ''", "[5] textbox '' value='••'")
TASK = Task(
    id="sign-in-0",
    instruction='Sign in as "ada" with "p7", in blue, and press Enter.',
    environment="miniwob",
    observation=PAGE,
    seed=0,
    metadata={"task": "miniwob.login-user"},
)
DONE = f"valid, it completes the task\nreward 1, success\n{OVER}"


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("fly('11')", "\"fly('11')\" is no action; the actions are"),
        ("click(11)", "click: bid: Input should be a valid string"),
        ("click('11', '12', '13', '14')", "click takes the arguments bid, button, modifiers"),
    ],
)
def test_what_is_no_action_reaches_no_dream(scripted: Any, action: str, why: str) -> None:
    model = scripted(reply=lambda _: DONE)
    episode = world().create_dream(Model(model, prompt_format="lines", instructions="")).create_environment()
    episode.reset(TASK)
    result = episode.step(action)
    assert not model.asked and why in result.observation and not result.info["valid"]
    assert result.info["decided_by"] == "rules"


def test_lines_that_say_nothing_are_left_out() -> None:
    text = "\n".join(
        [
            "RootWebArea 'T'",
            "\t[1] paragraph ''",
            "\t\t[2] LabelText ''",
            "\t\t\t[3] radio 'a', checked='false'",
            "\t\t\tStaticText 'a'",
            "\t[4] paragraph ''",
            "\t\tStaticText 'some words'",
            "\t\tStaticText ''",
            "\t[5] textbox '' value='x', focused",
            "\t\tStaticText 'x'",
            "\t[6] LabelText 'named'",
        ]
    )
    kept = [line.strip() for line in _without_repetition(text).split("\n")]
    assert kept == [
        "RootWebArea 'T'",
        "[3] radio 'a', checked='false'",
        "[4] paragraph ''",
        "StaticText 'some words'",
        "[5] textbox '' value='x', focused",
        "[6] LabelText 'named'",
    ]


def world() -> BrowserGymWorld:
    return BrowserGymWorld(names=["login-user"], actions=["click", "fill", "select_option"], max_steps=4)


def play(policy: ToolPolicy, experience: Model) -> Trajectory:
    made = world()
    (episode,) = run_lasting(
        rollout(made.agent(policy, real=False), [TASK], made.create_dream(experience).create_environment, source="synthetic")
    )
    return episode


def test_an_agent_with_tools_plays_a_dreamed_page(scripted: Any, asked_action: Any) -> None:
    def answer(messages: list[BaseMessage]) -> str:
        return DONE if asked_action(messages) == "click('11')" else f"valid, on\nreward 0, continues\n{FILLED}"

    model = scripted(reply=answer)
    policy = ToolPolicy(calls=["fill('3', 'ada')", "fill('5', 'p7')", "click('11')", "click('11')"])
    episode = play(policy, Model(model, prompt_format="lines", instructions=""))
    assert episode.success and episode.reward == 1 and episode.error is None
    assert [step.action for step in episode.steps] == policy.calls[:3], "recorded as played; nothing is asked after the end"
    assert [asked_action(prompt) for prompt in model.asked] == policy.calls[:3]
    assert sorted(policy.told) == ["click", "fill", "select_option"]


def test_an_episode_is_cut_after_as_many_replies_as_steps(scripted: Any) -> None:
    experience = Model(scripted(reply=lambda _: f"valid, on\nreward 0, continues\n{PAGE}"), prompt_format="lines")
    cut = play(ToolPolicy(calls=["click('3')"] * 9), experience)
    assert len(cut.steps) == 4 and cut.steps[-1].truncated and not cut.success
    refused = play(ToolPolicy(calls=["no call"] * 9), experience)
    assert refused.error is None and not refused.steps and not refused.success, "LangChain refuses the arguments, four times"


def test_the_dream_keeps_the_environment_contract(scripted: Any) -> None:
    dream = world().create_dream(Model(scripted(reply=lambda _: DONE), prompt_format="lines", instructions=""))
    check_environment(dream.create_environment(), TASK, ["click('11')"])


def test_traces_are_learned_from_as_the_policy_calls() -> None:
    pytest.importorskip("torch")
    from tiny_models import SMALL_BASE

    from dreamgym_lg.integrations.transformers.loading import load_tokenizer

    steps = [
        Step(observation=PAGE, action="fill('3', 'ada')", next_observation=FILLED),
        Step(observation=FILLED, action="click('11')", next_observation=OVER, reward=1.0, terminated=True),
    ]
    recorded = Trajectory(task=TASK, steps=steps, success=True)
    tokenizer = load_tokenizer(SMALL_BASE)
    (row,) = world().policy_rows([recorded], tokenizer, max_new_tokens=64)
    learned = tokenizer.decode(list(compress(row.segment.token_ids, row.segment.sampled)))
    assert learned.count("<tool_call>") == 2 and '{"name": "click", "arguments": {"bid": "11"}}' in learned
    assert "[11] button 'Enter'" in tokenizer.decode(row.segment.token_ids) and OVER not in tokenizer.decode(
        row.segment.token_ids
    )


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="action of miniwob"):
        BrowserGymWorld(actions=["fly"])
