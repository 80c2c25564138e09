"""The chat templates that models are published with (TRL's wheel has them): what each makes of an episode."""

from collections.abc import Callable

import pytest
from langchain_core.messages import BaseMessage, HumanMessage

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.requests import Request
from dreamgym_lg.metrics import check_health, describe, rewritten_segments
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Step, Task, Trajectory

Make = Callable[[str], LocalChatModel]
Steer = Callable[[Callable[[Request], str]], None]

TURNS = 3


def episode(policy: LocalChatModel) -> Trajectory:
    messages: list[BaseMessage] = []
    with TokenRecorder(seed=0) as recorder:
        for turn in range(TURNS):
            messages.append(HumanMessage(f"take the apple on table {turn}"))
            messages.append(policy.invoke(messages))
    step = Step(observation="o", action="a", next_observation="p", reward=1.0)
    task = Task(id="t", instruction="i", environment="e")
    return Trajectory(task=task, steps=(step,), source="synthetic", segments=recorder.segments())


@pytest.mark.parametrize(
    ("family", "reply", "segments"),
    [
        *((family, "the apple", 1) for family in ("qwen2.5", "qwen3-2507", "llama3.1", "llama3.2", "mistral", "gemma3")),
        ("qwen2.5", "<think>\nit is red\n</think>\n\nthe apple", 1),
        ("qwen3", "<think>\nit is red\n</think>\n\nthe apple", TURNS),
    ],
)
def test_into_how_many_segments_a_template_splits_an_episode(
    family: str, reply: str, segments: int, of_template: Make, steer: Steer
) -> None:
    """Qwen3's leaves out what was thought before the last question."""
    steer(lambda request: reply)
    played = episode(of_template(family))
    assert len(played.segments) == segments
    assert sum(segment.trainable for segment in played.segments) >= TURNS * 3
    assert rewritten_segments(played) == list(played.segments[1:])
    figures = describe([[played]])
    prompts = sum(list(segment.sampled).index(1) for segment in played.segments[1:])
    assert figures["reread_share"] == prompts / sum(len(segment.token_ids) for segment in played.segments)
    alarms = check_health([figures])
    assert [alarm.name for alarm in alarms] == (["split"] if segments > 1 else [])
    if alarms:
        assert alarms[0].text.startswith("2 of the 3 segments of 1 episodes read again")


def test_calls_that_have_nothing_to_do_with_each_other_are_not_rewritten(of_template: Make, steer: Steer) -> None:
    """Two conversations of one agent, and one question asked twice."""
    steer(lambda request: "the apple")
    policy = of_template("qwen3")
    with TokenRecorder(seed=0) as recorder:
        for words in ("take the apple", "take the apple", "You are in the kitchen. There is a table."):
            policy.invoke(words)
    step = Step(observation="o", action="a", next_observation="p", reward=1.0)
    task = Task(id="t", instruction="i", environment="e")
    played = Trajectory(task=task, steps=(step,), source="synthetic", segments=recorder.segments())
    assert len(played.segments) == 3 and rewritten_segments(played) == []


def test_a_templates_own_variables_reach_it(of_template: Make, steer: Steer) -> None:
    read: list[str] = []
    steer(lambda request: "the apple")
    policy = of_template("qwen3")
    for given in ({}, {"enable_thinking": False}):
        with TokenRecorder(seed=0) as recorder:
            policy.model_copy(update={"chat_template_kwargs": given}).invoke("take the apple")
        read.append(policy.tokenizer.decode(recorder.calls[0].prompt_ids))
    assert read[0].endswith("assistant\n") and read[1] == read[0] + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [("enable_thinkin", "which the chat template does not read"), ("tools", "which are given by bind_tools")],
)
def test_a_variable_that_would_do_nothing_is_refused(name: str, told: str, of_template: Make) -> None:
    policy = of_template("qwen3")
    with pytest.raises(ConfigurationError, match=f"chat_template_kwargs has '{name}', {told}"):
        LocalChatModel(model=policy.model, tokenizer=policy.tokenizer, chat_template_kwargs={name: False})
