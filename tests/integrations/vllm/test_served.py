"""Replies from servers: spread over them, tried again when something fails, never taken from other weights in silence."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from tiny_models import create_model
from transformers import PreTrainedTokenizerFast
from vllm_server import SLOW_SECONDS, VLLMServer

from dreamgym_lg.errors import ConfigurationError, ContextExceeded, ModelUnavailable, ServersUnavailable
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.vllm import ServedEngine
from dreamgym_lg.token_recorder import TokenRecorder

Serve = Callable[..., VLLMServer]
Play = Callable[[LocalChatModel], Any]


async def episode(policy: LocalChatModel, number: int) -> TokenRecorder:
    with TokenRecorder(seed=number) as recorder:
        messages: list[BaseMessage] = [HumanMessage(f"say a colour {number}")]
        for _ in range(3):
            messages += [await policy.ainvoke(messages), HumanMessage("a longer observation")]
    return recorder


async def tokens_of(policy: LocalChatModel, count: int = 8) -> list[list[Any]]:
    played = await asyncio.gather(*(episode(policy, number) for number in range(count)))
    return [[(s.token_ids, s.sampled) for s in recorder.segments()] for recorder in played]


def served(here: LocalChatModel, *servers: VLLMServer | str, **options: Any) -> LocalChatModel:
    urls = [each if isinstance(each, str) else each.url for each in servers]
    engine = ServedEngine(urls, here.tokenizer, **{"model": here.model, **options})
    return here.model_copy(update={"engine": engine})


async def test_faults_leave_no_trace_in_what_is_recorded(here: LocalChatModel, serve: Serve) -> None:
    faults = {1: "429", 4: "500", 7: "cut", 9: "abort", 12: "slow", 15: "500", 16: "500"}
    server = serve(fault=lambda number: faults.get(number, ""))
    policy = served(here, server, timeout=SLOW_SECONDS / 4)
    assert await tokens_of(policy) == await tokens_of(here)
    assert len(server.requests) == 1 + 8 * 3 + len(faults), "the comparison of weights, the calls, and those tried again"


async def test_the_whole_distribution_is_asked_for(here: LocalChatModel, serve: Serve) -> None:
    server = serve()
    await served(here, server).ainvoke("say a colour", seed=3)
    body = server.requests[-1]
    asked = {name: body[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty", "seed", "return_token_ids")}
    assert asked == {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 3, "return_token_ids": True}
    assert body["prompt"] and all(isinstance(token, int) for token in body["prompt"])


async def test_calls_spread_over_servers_and_an_episode_stays_where_it_began(here: LocalChatModel, serve: Serve) -> None:
    servers = [serve(), serve()]
    policy = served(here, *servers)
    assert await tokens_of(policy) == await tokens_of(here)
    first = [{number for number in range(8) if asks(here, server, number)} for server in servers]
    assert not first[0] & first[1], "no episode has asked both"
    assert [len(each) for each in first] == [4, 4]


def asks(policy: LocalChatModel, server: VLLMServer, number: int) -> bool:
    said = [policy.tokenizer.decode(body["prompt"]) for body in server.requests]
    return any(f"say a colour {number}" in text for text in said)


async def test_the_others_answer_for_a_server_that_is_away(here: LocalChatModel, serve: Serve) -> None:
    servers = [serve(), serve()]
    policy = served(here, *servers)
    await tokens_of(policy, 2)
    servers[0].stop()
    try:
        assert await tokens_of(policy) == await tokens_of(here)
    finally:
        servers[0].start()


async def test_no_server_stops_the_run_and_a_call_that_always_fails_does_not(here: LocalChatModel, serve: Serve) -> None:
    away = served(here, "http://127.0.0.1:9", attempts=2)
    with pytest.raises(ServersUnavailable, match=r"no reply in 2 attempts, the last: http://127.0.0.1:9 did not answer"):
        await away.ainvoke("say a colour")
    server = serve()
    server.fault = lambda number: "500" if "observation" in here.tokenizer.decode(server.requests[number]["prompt"]) else ""
    policy = served(here, server, attempts=3)
    well = asyncio.gather(*(policy.ainvoke("say a colour") for _ in range(20)))
    with pytest.raises(ModelUnavailable, match="answered 500"):
        await policy.ainvoke("a longer observation")
    assert len(await well) == 20


@pytest.mark.parametrize(
    "options, message",
    [
        ({"token_ids": False}, "no token ids"),
        ({"processed": False}, "--logprobs-mode processed_logprobs"),
        ({"key": "s3cret"}, "answered 401.*api_key="),
        ({"name": "other"}, "unknown model of http.* 'tiny'; known: other"),
    ],
)
async def test_a_server_that_cannot_be_trained_from_is_refused(
    here: LocalChatModel, serve: Serve, options: dict[str, Any], message: str
) -> None:
    policy = served(here, serve(**options), name="tiny")
    for _ in range(2):  # not only the first time
        with pytest.raises(ConfigurationError, match=message):
            await policy.ainvoke("say a colour")


async def test_a_key_is_sent_and_never_told(here: LocalChatModel, serve: Serve) -> None:
    server = serve(key="s3cret")
    assert (await served(here, server, api_key="s3cret").ainvoke("say a colour")).usage_metadata["output_tokens"]
    with pytest.raises(ConfigurationError) as refused:
        await served(here, server, api_key="wr0ng").ainvoke("say a colour")
    assert "wr0ng" not in str(refused.value)


async def test_other_weights_than_the_policys_are_refused(
    here: LocalChatModel, serve: Serve, tokenizer: PreTrainedTokenizerFast
) -> None:
    other = serve(create_model(tokenizer, hidden_size=32, layers=1, max_tokens=512, seed=9))
    with pytest.raises(ConfigurationError, match="has other weights than the policy: .* differ by"):
        await served(here, other).ainvoke("say a colour")
    alone = await served(here, other, model=None).ainvoke("say a colour")  # whose weights say anything, an empty reply too
    assert alone.usage_metadata["output_tokens"], "nothing to compare with: it is not trained"


async def test_the_context_is_the_smaller_of_server_and_model(here: LocalChatModel, serve: Serve) -> None:
    server = serve(max_model_len=100)
    policy = served(here, server)
    with pytest.raises(ContextExceeded, match="may grow by 8; the model takes 100: shorten"):
        await policy.ainvoke("kitchen " * 100)
    with pytest.raises(ContextExceeded, match="the model takes 512"):
        await policy.ainvoke("kitchen " * 600)
    assert (await policy.ainvoke("say a colour")).text
    assert {len(body["prompt"]) > 100 for body in server.requests} == {False}, "it was not even asked"


@pytest.mark.parametrize("servers", [[], "localhost:8000"])
def test_servers_are_addresses(here: LocalChatModel, servers: Any) -> None:
    with pytest.raises(ConfigurationError, match="give"):
        ServedEngine(servers, here.tokenizer)


async def test_an_episode_given_up_gives_up_its_call(here: LocalChatModel, serve: Serve) -> None:
    server = serve(fault=lambda number: "slow" if number else "")
    policy = served(here, server)
    call = asyncio.create_task(policy.ainvoke("say a colour"))
    while len(server.requests) < 2:
        await asyncio.sleep(0.01)
    call.cancel()
    while policy.engine.servers[0].under_way:
        await asyncio.sleep(0.01)
    server.fault = lambda number: ""
    assert Counter([bool((await policy.ainvoke("say a colour", seed=1)).text)]) == {True: 1}
