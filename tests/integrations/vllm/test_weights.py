"""After an update the servers have the new weights, and a server that has not is found out before it is sampled from."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import BaseMessage, HumanMessage
from peft import LoraConfig, inject_adapter_in_model
from test_served import episode, served, tokens_of
from vllm_server import VLLMServer

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.vllm import server as vllm_client
from dreamgym_lg.integrations.vllm.weights import AdapterSync
from dreamgym_lg.token_recorder import TokenRecorder

Serve = Callable[..., VLLMServer]


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    """An update, of the adapters if there are any."""
    torch.manual_seed(seed)
    named = [(name, value) for name, value in model.named_parameters() if "lora_" in name] or list(model.named_parameters())
    for _, value in named:
        value += 0.3 * torch.randn_like(value)


@pytest.fixture
def adapted(here: LocalChatModel, serve: Serve) -> LocalChatModel:
    """The servers' model has none."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    inject_adapter_in_model(config, here.model)
    here.model.peft_config = {"default": config}  # as TRL's trainers leave it
    return here


@pytest.mark.slow
async def test_each_update_is_what_the_servers_sample_from(adapted: LocalChatModel, serve: Serve, tmp_path: Path) -> None:
    servers = [serve(), serve()]
    policy = served(adapted, *servers, adapters=tmp_path)
    versions = []
    for update in range(4):
        if update:
            change(adapted.model, update)
        policy.weights_changed()
        adapted.weights_changed()
        expected = await tokens_of(adapted)
        assert await tokens_of(policy) == expected
        versions.append(policy.engine.policy_version)
        (segment,) = (await episode(policy, 1)).segments()
        assert segment.policy_version == versions[-1] and segment.policy_version.startswith("dreamgym-")
        assert [set(server.engines) for server in servers] == [{"tiny", versions[-1]}] * 2, "the one before is unloaded"
    assert len(set(versions)) == 4
    assert {path.name for path in tmp_path.iterdir()} == set(versions[-2:])
    policy.weights_changed()
    assert policy.engine.policy_version == versions[-1], "the same weights have the same version"


async def test_a_server_that_restarts_is_given_its_adapters_again(
    adapted: LocalChatModel, serve: Serve, tmp_path: Path
) -> None:
    server = serve()
    policy = served(adapted, server, adapters=tmp_path)
    change(adapted.model, 1)
    policy.weights_changed()
    adapted.weights_changed()
    expected = await tokens_of(adapted)
    server.restart()
    assert set(server.engines) == {"tiny"}
    assert await tokens_of(policy) == expected


async def test_weights_lost_since_they_were_asked_for_are_noticed_by_the_call(
    adapted: LocalChatModel, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    policy = served(adapted, server, adapters=tmp_path)
    change(adapted.model, 1)
    policy.weights_changed()
    adapted.weights_changed()
    expected = await tokens_of(adapted)
    monkeypatch.setattr(vllm_client, "RESTART_SECONDS", 60.0)
    asked = len(server.paths)
    assert await tokens_of(policy) == expected and len(server.paths) <= asked + 1, "it is not asked at every call"
    server.engines.pop(policy.engine.policy_version)
    assert await tokens_of(policy) == expected
    server.restart()
    assert await tokens_of(policy) == expected


def test_the_adapters_in_use_are_kept_when_earlier_weights_come_back(adapted: LocalChatModel, tmp_path: Path) -> None:
    sync, first = AdapterSync(adapted.model, tmp_path), copy.deepcopy(adapted.model.state_dict())
    sync.publish()
    for update in range(2):
        change(adapted.model, update)
        sync.publish()
        adapted.model.load_state_dict(first)
        sync.publish()
        assert (tmp_path / sync.version / "adapter_model.safetensors").exists()
    assert len(list(tmp_path.iterdir())) == 2


async def test_an_episode_over_an_update_has_a_segment_for_each_version(
    adapted: LocalChatModel, serve: Serve, tmp_path: Path
) -> None:
    policy = served(adapted, serve(), adapters=tmp_path)
    with TokenRecorder(seed=1) as recorder:
        messages: list[BaseMessage] = [HumanMessage("say a colour")]
        for update in range(2):
            change(adapted.model, update)
            policy.weights_changed()
            messages += [await policy.ainvoke(messages), HumanMessage("a longer observation")]
    segments = recorder.segments()
    assert len({segment.policy_version for segment in segments}) == len(segments) == 2


def test_what_servers_lack_is_said(adapted: LocalChatModel, serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--enable-lora"):
        served(adapted, serve(lora=False), adapters=tmp_path).weights_changed()
    policy, sync = served(adapted, serve(), adapters=tmp_path), AdapterSync(adapted.model, tmp_path / "elsewhere")
    policy.engine._sync, sync.publish = sync, lambda: None
    sync.version = "dreamgym-nowhere"
    with pytest.raises(ConfigurationError, match="has to see the folder .*dreamgym-nowhere"):
        policy.weights_changed()


def test_a_rank_that_a_server_does_not_take_is_said_at_once(adapted: LocalChatModel, serve: Serve, tmp_path: Path) -> None:
    server = serve(max_rank=2)
    with pytest.raises(ConfigurationError, match="LoRA rank 4 is greater.*--max-lora-rank of at least the adapters' rank"):
        served(adapted, server, adapters=tmp_path).weights_changed()
    assert server.refused == 1


def test_a_policy_without_adapters_is_refused(here: LocalChatModel, serve: Serve) -> None:
    with pytest.raises(ConfigurationError, match="this one has none: lora=True"):
        served(here, serve()).weights_changed()
