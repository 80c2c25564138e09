"""Training by the facade, with a tiny model: a `create_agent` graph, a scripted world, real GRPO, and the way back."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_models import create_model, create_tokenizer

from dreamgym_lg import Dream, DreamGym, Model, ReplayBuffer, Schemas, Step, Task, Verify
from dreamgym_lg.actions import parse_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.batch import Batch
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

CALL = '<tool_call>\n{"name": "book", "arguments": {"city": "Rome"}}\n</tool_call>'
TASKS = [Task(id=id, instruction=f"Book room {id}.", environment="rooms", split=split)
         for id, split in [("a", "train"), ("b", "train"), ("c", "train"), ("t", "test")]]  # fmt: skip


class World(BaseChatModel):
    """A scripted experience model: every room is booked. It is the graph's production model too, which nobody asks."""

    @property
    def _llm_type(self) -> str:
        return "world"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        answer = AIMessage("valid, no progress yet\nreward 0, continues\nA dreamed room.")
        return ChatResult(generations=[ChatGeneration(message=answer)])


class Killed(BaseException):
    """As a process is: past every `except Exception`."""


@pytest.fixture(autouse=True)
def books_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's first reply in each episode is steered to be a tool call; all it says after that is drawn as ever."""
    draw = Batch._draw

    def steered(self: Any, logprobs: Any) -> Any:
        tokens, tokenizer = draw(self, logprobs), self.decoder.tokenizer
        wanted = [*tokenizer(CALL, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for i, row in enumerate(self.rows):
            if not any(entry["role"] == "tool" for entry in row.request.conversation):
                tokens[i] = wanted[min(len(row.sampled), len(wanted) - 1)]  # a reply that has ended waits for the batch
        return tokens

    monkeypatch.setattr(Batch, "_draw", steered)


@pytest.fixture
def booked() -> list[str]:
    return []


@pytest.fixture
def graph(booked: list[str]) -> Any:
    @tool
    def book(city: str) -> str:
        """Book a room."""
        booked.append(city)
        return "A real room."

    return create_agent(World(), [book], system_prompt="You book rooms.")


def policy() -> LocalChatModel:
    tokenizer = create_tokenizer(["Book a room.", CALL, "You book rooms."], vocab_size=320)
    model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=2048)
    return LocalChatModel(model=model, tokenizer=tokenizer, name_or_path="tiny", max_new_tokens=60)


def odd(task: Task, state: Any) -> float:
    """A reward that differs within a group, and that has nothing to do with the task."""
    return float(len(state["messages"][-1].text) % 2)


def weights(policy: LocalChatModel) -> Any:
    """Of the policy's model."""
    return torch.cat([values.detach().flatten() for values in policy.model.parameters()]).clone()


Make = Callable[..., DreamGym]


@pytest.fixture
def make(graph: Any, tmp_path: Path) -> Make:
    buffer = ReplayBuffer(tmp_path / "replay.db")

    def make(out: Path = tmp_path / "run", **options: Any) -> DreamGym:
        usual = {"experience_model": World(), "verify_dream": odd}
        parts = {"tasks": TASKS, "verify_real": odd, **({} if "dream" in options else usual), **options}
        return DreamGym(graph, replay_buffer=buffer, out=out, **parts)

    return make


SETTINGS: dict[str, Any] = {"num_tasks": 2, "num_generations": 4, "learning_rate": 1e-2, "beta": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["grpo", "ppo"])
def test_training_changes_the_weights_in_the_dream_alone(make: Make, booked: list[str], tmp_path: Path, learner: str) -> None:
    nodes = list[tuple[str, int]]()
    gym, tiny = make(progress=lambda label, done, total: nodes.append((label, done))), policy()
    before = weights(tiny)
    trained = gym.train(tiny, 2, learner=learner, **SETTINGS)

    saved = torch.load(gym.experiment.models / "policy" / "training.pt")["weights"]
    assert any(name.startswith("critic.") for name in saved) == (learner == "ppo"), "the named one trains"
    assert trained is tiny is gym.experiment.trained and not torch.equal(before, weights(tiny))
    assert booked == []
    episodes = list(gym.replay_buffer.trajectories(run=gym.experiment.run_name("train"), segments=True))
    assert len(episodes) == 2 * 2 * 4 and all(episode.error is None for episode in episodes)
    assert all(episode.steps[0].next_observation == "A dreamed room." for episode in episodes)
    assert all(episode.task.split == "train" for episode in episodes)
    call = tiny.tokenizer(CALL, add_special_tokens=False)["input_ids"]
    for episode in episodes:
        (segment,) = episode.segments  # the conversation only grows: one row of a batch, both replies in it
        assert segment.trainable > len(call) + 1
        assert "You book rooms." in tiny.tokenizer.decode(segment.token_ids)
    assert len({episode.reward for episode in episodes}) == 2
    metrics = gym.replay_buffer.metrics(gym.experiment.run_name("train"))
    assert [each["iteration"] for each in metrics] == [0, 1] and all(each["trainable_tokens"] > 0 for each in metrics)
    assert ("train: rollout", 1) in nodes


@pytest.mark.slow
def test_a_killed_training_goes_on_where_it_was(make: Make, tmp_path: Path) -> None:
    def kill(label: str, iteration: int, total: int) -> None:
        if (label, iteration) == ("train: update_policy", 1):
            raise Killed

    whole = make(tmp_path / "whole").train(policy(), 2, **SETTINGS)
    killed = make(tmp_path / "killed", progress=kill, report_to="tensorboard")
    with pytest.raises(Killed):
        killed.train(policy(), 2, **SETTINGS)
    assert killed.experiment.trained is None
    nodes = list[tuple[str, int]]()
    gym = make(tmp_path / "killed", progress=lambda label, done, total: nodes.append((label, done)))
    resumed = gym.train(policy(), 2, **SETTINGS)
    assert nodes[0] == ("train: update_policy", 1), "nothing that was finished is done again"
    # Adam makes a step of a gradient that is nothing but rounding: what threads add in another order may differ by a little,
    # a lost optimiser state or a repeated update by whole steps
    torch.testing.assert_close(weights(whole), weights(resumed), rtol=0, atol=SETTINGS["learning_rate"] / 10)

    played = gym.replay_buffer.count("trajectories", run=gym.experiment.run_name("train"))
    again = gym.train(policy(), 2, **SETTINGS)
    torch.testing.assert_close(weights(again), weights(resumed))
    assert gym.replay_buffer.count("trajectories", run=gym.experiment.run_name("train")) == played
    more = gym.train(policy(), 3, report_to=["tensorboard"], **SETTINGS)
    shown = EventAccumulator(str(tmp_path / "killed" / "tensorboard"))
    shown.Reload()
    assert {"dream/success", "policy/loss", "policy/entropy", "curriculum/value"} <= set(shown.Tags()["scalars"])
    assert [event.step for event in shown.Scalars("policy/loss")] == [0, 2], "iteration 1 was resumed without a tracker"
    assert gym.replay_buffer.count("trajectories", run=gym.experiment.run_name("train")) == played + 8
    assert not torch.equal(weights(more), weights(resumed))


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 3])
def test_a_killed_training_takes_the_iterations_of_the_call_that_resumes_it(make: Make, iterations: int) -> None:
    def kill(label: str, iteration: int, total: int) -> None:
        if (label, iteration) == ("train: update_policy", 0):
            raise Killed

    with pytest.raises(Killed):
        make(progress=kill).train(policy(), 2, **SETTINGS)
    gym = make()
    gym.train(policy(), iterations, **SETTINGS)
    assert [each["iteration"] for each in gym.replay_buffer.metrics(gym.experiment.run_name("train"))] == list(
        range(iterations)
    )


@pytest.mark.slow
def test_another_policy_is_refused_by_name(make: Make) -> None:
    """It was not noticed: the training went on with the weights of its checkpoint."""
    tiny, other = policy(), policy()
    other.name_or_path = "other"
    gym = make()
    gym.train(tiny, 1, **SETTINGS)
    for iterations in (1, 2):
        with pytest.raises(ConfigurationError, match="trains the policy 'tiny', and 'other' is given"):
            gym.train(other, iterations, **SETTINGS)
    assert gym.train(tiny, 1, **SETTINGS) is not None, "by now it is called by its folder"


@pytest.mark.slow
def test_another_folder_is_another_training(make: Make, tmp_path: Path) -> None:
    one, two = make(tmp_path / "one" / "run"), make(tmp_path / "two" / "run")
    one.train(policy(), 1, **SETTINGS)
    two.train(policy(), 1, **SETTINGS)
    assert one.experiment.run_name("train") != two.experiment.run_name("train")
    played = two.replay_buffer.count("trajectories", run=two.experiment.run_name("train"))
    assert played == 8, "played anew, not read from the other training"


@pytest.mark.slow
def test_the_trained_policy_evaluates_and_goes_back_to_production(make: Make, booked: list[str], tmp_path: Path) -> None:
    gym = make()
    gym.train(policy(), 1, **SETTINGS)
    rate, _ = gym.evaluate(num_generations=2)
    assert rate.episodes == 2 and booked == []
    assert gym.evaluate(real=True)[0].episodes == 1 and booked == ["Rome"]

    exported = gym.export(tmp_path / "policies" / "tiny")
    messages = exported.invoke({"messages": [("human", "Book room t.")]})["messages"]
    assert messages[2].text == "A real room." and len(booked) == 2
    loaded = LocalChatModel.from_path(tmp_path / "policies" / "tiny", max_new_tokens=60)
    torch.testing.assert_close(weights(loaded), weights(gym.experiment.trained))
    gym.export(tmp_path / "policies" / "tiny")  # as a finished script does that runs again
    with pytest.raises(ConfigurationError, match="tiny exists already"):
        gym.export(tmp_path / "policies" / "tiny", policy=gym.experiment.trained.with_temperature(0))
    again = gym.export(policy=loaded.with_temperature(0)).invoke({"messages": [("human", "Book room t.")]})["messages"]
    assert again[1].tool_calls[0]["args"] == {"city": "Rome"} and len(booked) == 3


@pytest.mark.slow
def test_a_dream_of_ones_own_parts_trains_evaluates_and_is_named_by_the_export(
    make: Make, booked: list[str], tmp_path: Path
) -> None:
    def odd_answer(task: Task, steps: Sequence[Step]) -> float:
        return float(len(str(parse_action(steps[-1].action))) % 2)

    def gym(**options: Any) -> DreamGym:
        return make(dream=Dream([Schemas(), Model(World())], judges=[Verify(odd_answer)], version="mine-1"), **options)

    gym().train(policy(), 2, **SETTINGS)
    work = gym().experiment
    episodes = list(work.replay_buffer.trajectories(run=work.run_name("train")))
    assert len(episodes) == 16 and {each.experience_version for each in episodes} == {"mine-1"} and booked == []
    assert {each.steps[0].decided_by for each in episodes} == {"model"} and len({each.reward for each in episodes}) == 2
    assert {each.steps[-1].judged_by for each in episodes} == {"verify"}
    (_, (episode,)) = gym().evaluate(gym().experiment.trained_policy())
    assert episode.experience_version == "mine-1" and episode.steps[-1].judged_by == "verify"
    gym().export(tmp_path / "tiny")
    assert json.loads((tmp_path / "tiny" / "manifest.json").read_text())["experience_model"] == {"version": "mine-1"}
    assert "* Dream: `mine-1`.\n" in (tmp_path / "tiny" / "README.md").read_text()
    said = list[str]()
    other = Dream([Schemas(), Model(World())], judges=[Verify(odd_answer)], version="mine-2")
    make(dream=other, say=said.append).train(policy(), 2, **SETTINGS)
    assert "has ended, and these settings train nothing" in said[1]


@pytest.mark.slow
def test_adapters_are_trained_and_exported_as_they_are(make: Make, tmp_path: Path) -> None:
    """Killed once; the same call with the very policy that has adapters by then goes on from the checkpoint."""

    def kill(label: str, iteration: int, total: int) -> None:
        if (label, iteration) == ("train: update_policy", 1):
            raise Killed

    tiny = policy()
    base = weights(tiny)
    with pytest.raises(Killed):
        make(progress=kill).train(tiny, 2, lora=True, **SETTINGS)
    gym = make()
    trained = gym.train(tiny, 2, lora=True, **SETTINGS)
    saved = gym.experiment.policy("start").model.state_dict()
    now = {name.replace(".base_layer", ""): value for name, value in trained.model.state_dict().items()}
    frozen = {name: value for name, value in now.items() if "lora_" not in name}
    assert saved.keys() <= frozen.keys() and all(torch.equal(saved[name], frozen[name]) for name in saved)
    gym.export(tmp_path / "exported")
    exported = LocalChatModel.from_path(tmp_path / "exported", max_new_tokens=60)
    assert torch.equal(weights(exported), weights(trained)) and weights(trained).numel() > base.numel()
    assert any(value.any() for name, value in exported.model.state_dict().items() if "lora_B" in name)
    ask = [[("human", f"Book room {name}.")] for name in "tuv"]
    answers = [[each.with_temperature(0).invoke(one).text for one in ask] for each in (trained, exported)]
    assert answers[0] == answers[1]


def test_a_policy_without_weights_is_refused(make: Make, tmp_path: Path) -> None:
    elsewhere = policy().model_copy(update={"model": None})
    with pytest.raises(ConfigurationError, match="no weights in this process.*model="):
        make().train(elsewhere, 1, **SETTINGS)
