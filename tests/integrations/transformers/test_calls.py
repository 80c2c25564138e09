"""Calls in sampled text, of every family, whole and broken."""

import json
from copy import deepcopy
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call_chunk

from dreamgym_lg.integrations.transformers.call_format import Call, parse_reply, safe_length
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.token_recorder import TokenRecorder

NAMES = frozenset({"look", "wait"})
LOOK = '{"name": "look", "arguments": {"place": "box"}}'
LLAMA = '{"name": "look", "parameters": {"place": "box"}}'
look, wait = Call("look", {"place": "box"}), Call("wait", {})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Nothing there.", "Nothing there.", []),
        (f"<tool_call>\n{LOOK}\n</tool_call>", "", [look]),
        (f"Well.\n<tool_call>{LOOK}</tool_call> Then", "Well.\n", [look]),
        (f'<tool_call>{LOOK}</tool_call>\n<tool_call>{{"name": "wait"}}</tool_call>', "", [look, wait]),
        (f'<tool_call>{LOOK}<tool_call>{{"name": "wait", "arguments": null}}', "", [look, wait]),
        ('<tool_call>{"name": "look", "arguments": "{\\"place\\": \\"box\\"}"}</tool_call>', "", [look]),
        (f"<tool_call>{LOOK.replace('box', '</tool_call>')}</tool_call>", "", [Call("look", {"place": "</tool_call>"})]),
        ('<tool_call>{"name": "jump", "arguments": {}}</tool_call>', "", [Call("jump", {})]),
        (f"[TOOL_CALLS] [{LOOK}]", "", [look]),
        (f'Yes.[TOOL_CALLS][{LOOK}, {{"name": "wait", "arguments": {{}}, "id": "abcdefghi"}}]', "Yes.", [look, wait]),
        (LLAMA, "", [look]),
        (f'\n{LLAMA}; {{"name": "wait", "parameters": {{}}}}', "\n", [look, wait]),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", [look, look]),
        (f"<|python_tag|>{LLAMA}<|python_tag|>{LLAMA}", "", [look, look]),
        ('{"name": "jump", "parameters": {}}', '{"name": "jump", "parameters": {}}', []),
        ('{"answer": "look"}', '{"answer": "look"}', []),
        (f"I would say {LLAMA}", f"I would say {LLAMA}", []),
    ],
)
def test_calls_are_read(text: str, content: str, calls: list[Call]) -> None:
    reply = parse_reply(text, NAMES)
    assert reply.content == content
    assert reply.calls == calls
    assert reply.invalid == []


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("<tool_call>", None, "not JSON: Expecting value at character 0"),
        ('<tool_call>\n{"name": "look", "arguments": {"place": "b', "look", "not JSON: Unterminated string"),
        ('<tool_call>{"name": "look", "arguments": {"place": NaN}}</tool_call>', "look", "not JSON: NaN"),
        ('<tool_call>{"arguments": {}}</tool_call>', None, 'no JSON object with a "name"'),
        ('<tool_call>{"name": 3}</tool_call>', None, 'no JSON object with a "name"'),
        ('<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "look", 'the "arguments" are no JSON object: [1]'),
        ('<tool_call>{"name": "look", "arguments": "box"}</tool_call>', "look", "not JSON: Expecting value"),
        (f"<tool_call>{LOOK} hm</tool_call>", "look", "'hm' follows the JSON object"),
        ("<tool_call>" + "[" * 3_000, None, "recursion"),
        ('[TOOL_CALLS] [{"name": "look", ', "look", "not JSON"),
        ("[TOOL_CALLS] []", None, 'no JSON object with a "name"'),
        ("<|python_tag|>print(1)", None, "not JSON: Expecting value at character 0"),
        ('{"name": "look", "parameters": {"place"', "look", "not JSON: Expecting ':' delimiter"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, name: str | None, reason: str) -> None:
    reply = parse_reply(text, NAMES)
    assert (reply.content, reply.calls) == ("", [])
    (invalid,) = reply.invalid
    assert invalid.name == name
    assert reason in invalid.reason
    chunk: Any = tool_call_chunk(name=invalid.name, args=invalid.text, id="1", index=0)
    merged = AIMessageChunk("", tool_call_chunks=[chunk], chunk_position="last")
    assert not merged.tool_calls and merged.invalid_tool_calls, "LangChain does not mend it to a call"


def test_good_and_bad_calls_stand_side_by_side() -> None:
    reply = parse_reply(f'<tool_call>{LOOK}</tool_call><tool_call>{{"name": "wait"</tool_call><tool_call>{LOOK}', NAMES)
    assert reply.calls == [look, look]
    assert [invalid.name for invalid in reply.invalid] == ["wait"]
    reply = parse_reply(f"[TOOL_CALLS][{LOOK}, 3]", NAMES)
    assert reply.calls == [look]
    assert reply.invalid[0].text == "[TOOL_CALLS]3"


@pytest.mark.parametrize(
    "text",
    [
        f"Well, <b>then</b>.\n<tool_call>{LOOK}</tool_call>",
        f"a < b [TO <|p{'[TOOL_CALLS]'}[{LOOK}]",
        f" \n{LLAMA}",
        f"Yes<|python_tag|>{LLAMA}",
        json.dumps({"answer": [1, 2]}),
        "Just words [TOOL",
    ],
)
def test_what_is_streamed_is_never_taken_back(text: str) -> None:
    content = parse_reply(text, NAMES).content
    shown = [safe_length(text[:end]) for end in range(len(text) + 1)]
    assert shown == sorted(shown)
    assert content.startswith(text[: shown[-1]])
    if "Well" in text:
        assert shown[-1] == len(content), "words before a call are not held back"


THOUGHT = '<think>\nMaybe <tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>?\n</think>\n\n'


@pytest.mark.parametrize("reply", ["Nothing there.", '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'])
@pytest.mark.parametrize("lone", [False, True])
async def test_a_call_that_reasoning_names_is_none(reply: str, lone: bool, of_template: Any, steer: Any) -> None:
    """Its tokens are trained, and the next prompt goes on from them."""
    thought = THOUGHT.removeprefix("<think>") if lone else THOUGHT
    policy = of_template("qwen2.5")
    steer(lambda request: thought + reply)
    model = policy.bind_tools([{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "wait")])
    with TokenRecorder(seed=0) as recorder:
        message = await model.ainvoke("Look.")
        called = [ToolMessage("Time passes.", tool_call_id=call["id"]) for call in message.tool_calls]
        await model.ainvoke([HumanMessage("Look."), message, *called, HumanMessage("And now?")])
    assert [call["name"] for call in message.tool_calls] == (["wait"] if called else [])
    assert "<think>" not in message.text and message.additional_kwargs["reasoning_content"].startswith("Maybe <tool_call>")
    (segment,) = recorder.segments()
    assert segment.trainable == sum(len(call.sampled_ids) for call in recorder.calls)
    assert "Maybe" in policy.tokenizer.decode(recorder.calls[0].sampled_ids)

    text = "".join([chunk.text async for chunk in model.astream("Look.")])
    assert text == message.text or (lone and text.endswith(message.text)), "what was said before a lone end is streamed by then"


@pytest.mark.parametrize(
    "reply",
    [
        f"{THOUGHT.removeprefix('<think>')}Nothing there.",
        f"{THOUGHT.removeprefix('<think>')}<tool_call>\n{LOOK}\n</tool_call>",
        "Nothing at all there.",
        "Maybe.</think>It is < 3 <think>or 4</think>, I see. ",
        f"Maybe, {'and maybe ' * 100}",
    ],
)
def test_a_thought_that_the_prompt_opens_is_not_streamed(reply: str, of_template: Any, steer: Any) -> None:
    policy = of_template("qwen2.5")
    tokenizer = deepcopy(policy.tokenizer)
    tokenizer.chat_template += "{%- if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    model = LocalChatModel(model=policy.model, tokenizer=tokenizer, max_new_tokens=120)
    steer(lambda request: reply)
    for bound in (model, model.bind_tools([{"type": "function", "function": {"name": "look", "parameters": {}}}])):
        whole, pieces = bound.invoke("Look.", seed=0), list(bound.stream("Look.", seed=0))
        streamed = sum(pieces[1:], pieces[0])
        for part in ("text", "tool_calls", "additional_kwargs"):
            assert getattr(streamed, part) == getattr(whole, part)
        assert not whole.text.startswith("Nothing there") or len([piece for piece in pieces if piece.text]) > 2
