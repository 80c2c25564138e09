"""A training whose replies come from a server, which restarts in the middle of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from typer.testing import CliRunner
from vllm_server import VLLMServer

from dreamgym_lg import DreamGym, Environment, Experiment, ReplayBuffer, Settings, Task, World
from dreamgym_lg.cli import experiment
from dreamgym_lg.cli.app import app
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import StepResult

TASKS = [Task(id=id, instruction=f"Book room {id}.", environment="rooms", split="train") for id in "abc"]


class Dream(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)


def odd(task: Task, state: Any) -> float:
    return float(len(state["messages"][-1].text) % 2)


def greedy(policy: LocalChatModel) -> list[list[int]]:
    with TokenRecorder() as recorder:
        for text in ("say a colour", "the kitchen", "a longer observation"):
            policy.with_temperature(0).invoke(text)
    return [list(call.sampled_ids) for call in recorder.calls]


class Rooms(World):
    name = "tests/rooms"
    max_steps = 1

    def tasks(self, split: Any, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        return [replace(task, environment=self.name) for task in TASKS if task.split == split]

    def create_environment(self) -> Environment:
        return Hotel()


class Hotel(Environment):
    def reset(self, task: Task) -> str:
        return "the kitchen"

    def step(self, action: str) -> StepResult:
        return StepResult("What?", 0.0, True, False, {"success": False})


def test_the_command_trains_adapters_with_replies_from_the_servers_it_is_given(
    here: LocalChatModel, serve: Callable[..., VLLMServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: dict[str, Any] = {"iterations": 1, "num_tasks": 2, "num_generations": 2, "synthetic_share": 0.0, "real_budget": 0}
    work = Experiment(Rooms(), tmp_path / "run", Settings(environment="real", **numbers), policy=here)
    monkeypatch.setattr(experiment, "load_object", lambda given: work)
    servers = [serve(name="tiny"), serve(name="tiny")]
    addresses = [part for server in servers for part in ("--servers", server.url)]
    shown = CliRunner().invoke(app, ["train", "my_app.py:experiment", "--lora", *addresses])
    assert shown.exit_code == 0, shown.output
    assert work.settings.lora and (work.models / "trained").exists()
    assert sum(len(server.requests) for server in servers) >= 4 and all(server.requests for server in servers)


@pytest.mark.slow
def test_a_policy_is_trained_with_replies_from_a_server(
    here: LocalChatModel, serve: Callable[..., VLLMServer], tmp_path: Path
) -> None:
    @tool
    def book(city: str) -> str:
        """Book a room."""
        raise AssertionError("the real tool")

    server = serve(name="tiny")
    restarts: list[str] = []

    def progress(label: str, done: int, total: int) -> None:
        if "update" in label and not restarts:
            restarts.append(label)
            server.restart()

    said = "valid, no progress yet\nreward 0, continues\nA dreamed room."
    world = Dream(messages=iter([AIMessage(said)] * 999))
    gym = DreamGym(
        create_agent(world, [book]),
        replay_buffer=ReplayBuffer(tmp_path / "replay.db"),
        experience_model=world,
        tasks=TASKS,
        out=tmp_path / "run",
        verify_dream=odd,
        progress=progress,
    )
    before = greedy(here)
    settings: dict[str, Any] = {"num_tasks": 2, "num_generations": 4, "learning_rate": 5e-2, "beta": 0.0}
    trained = gym.train(here, 2, lora=True, servers=server.url, **settings)

    assert restarts
    episodes = list(gym.replay_buffer.trajectories(run=gym.experiment.run_name("train"), segments=True))
    assert len(episodes) == 2 * 2 * 4 and all(episode.error is None for episode in episodes)
    versions = [{s.policy_version for each in episodes if each.iteration == i for s in each.segments} for i in range(2)]
    assert [len(each) for each in versions] == [1, 1] and versions[0] != versions[1]
    assert len(server.requests) > 16, "the server has said it all"
    merged = gym.experiment.policy("trained").model_copy(update={"max_new_tokens": 8})
    assert greedy(trained) == greedy(merged) != before, "merged here, adapters there"
