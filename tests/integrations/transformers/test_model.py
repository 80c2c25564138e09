"""`LocalChatModel`: streams, messages, records, loading."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, ToolMessage

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.token_recorder import TokenRecorder


@pytest.mark.parametrize("seed", range(5))
async def test_streams_say_what_invoke_says(
    policy: LocalChatModel, seed: int, opening: Callable[[int], list[BaseMessage]]
) -> None:
    plain = await policy.ainvoke(opening(2), seed=seed, max_new_tokens=40)
    for stop in (None, [plain.text[10:14], "\ufffd\ufffd\ufffd\ufffd"]):
        options: dict[str, Any] = {"seed": seed, "max_new_tokens": 40, "stop": stop}
        whole = await policy.ainvoke(opening(2), **options)
        for chunks in (
            list(policy.stream(opening(2), **options)),
            [chunk async for chunk in policy.astream(opening(2), **options)],
        ):
            assert "".join(chunk.text for chunk in chunks) == whole.text
            total = chunks[0]
            for chunk in chunks[1:]:
                total += chunk
            assert total.usage_metadata == whole.usage_metadata
            assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


async def test_streamed_calls_are_recorded_too(
    policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]], forward_error: Callable[..., float]
) -> None:
    with TokenRecorder() as recorder:
        messages = opening(2)
        reply = "".join([chunk.text async for chunk in policy.astream(messages, seed=1)])
        await policy.ainvoke([*messages, AIMessage(reply), HumanMessage("go on")], seed=2)
    (segment,) = recorder.segments()
    assert forward_error(policy, segment) < 1e-4


def test_usage_and_metadata(policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]]) -> None:
    with TokenRecorder() as recorder:
        reply = policy.invoke(opening(2))
    (call,) = recorder.calls
    assert call.run_id is not None and str(call.run_id) in str(reply.id)
    given, sampled = len(call.prompt_ids), len(call.sampled_ids)
    assert reply.usage_metadata == {"input_tokens": given, "output_tokens": sampled, "total_tokens": given + sampled}
    assert reply.response_metadata["model_name"] == "tiny"


def test_what_callbacks_are_told_is_what_langchain_tells_them(policy: LocalChatModel) -> None:
    given: dict[str, Any] = {"stop": ["."], "seed": 3}
    assert policy._get_invocation_params(**given) == super(LocalChatModel, policy)._get_invocation_params(**given)


def test_a_model_saved_and_loaded_answers_alike(
    policy: LocalChatModel, tmp_path: Path, opening: Callable[[int], list[BaseMessage]]
) -> None:
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    loaded = LocalChatModel.from_path(tmp_path, max_new_tokens=12)
    assert loaded.invoke(opening(2), seed=1).text == policy.invoke(opening(2), seed=1).text


def no_folder(path: Path, policy: LocalChatModel) -> None:
    path.rmdir()


def no_model(path: Path, policy: LocalChatModel) -> None:
    pass


def no_weights(path: Path, policy: LocalChatModel) -> None:
    policy.model.config.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)


def broken_config(path: Path, policy: LocalChatModel) -> None:
    no_weights(path, policy)
    (path / "config.json").write_text("{")


def no_chat_template(path: Path, policy: LocalChatModel) -> None:
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").unlink()


@pytest.mark.parametrize("spoil", [no_folder, no_model, no_weights, broken_config, no_chat_template])
def test_what_is_no_model_is_refused(
    policy: LocalChatModel, tmp_path: Path, spoil: Callable[[Path, LocalChatModel], None]
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    spoil(folder, policy)
    with pytest.raises(ConfigurationError, match="policy|chat template"):
        LocalChatModel.from_path(folder)


def test_half_an_emoji_is_read_as_a_question_mark(policy: LocalChatModel) -> None:
    called = AIMessage("", tool_calls=[{"name": "look", "args": {"at": "\ud83d"}, "id": "1"}])
    messages = [HumanMessage("half \ud83d"), called, ToolMessage("\ud83d", tool_call_id="1")]
    whole = [HumanMessage("half ?"), AIMessage("", tool_calls=[{"name": "look", "args": {"at": "?"}, "id": "1"}])]
    for half, right in ((messages[:1], whole[:1]), (messages, [*whole, ToolMessage("?", tool_call_id="1")])):
        assert policy.invoke(half, seed=1, max_new_tokens=8).text == policy.invoke(right, seed=1, max_new_tokens=8).text


def test_messages_of_unknown_roles_are_refused(policy: LocalChatModel) -> None:
    with pytest.raises(ConfigurationError, match="ChatMessage cannot be rendered"):
        policy.invoke([ChatMessage(content="hm", role="narrator")])
