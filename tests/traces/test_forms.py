"""One conversation reads the same in the forms of every public exporter; what cannot be read is rejected by its form's name."""

import bz2
import gzip
import json
import lzma
import warnings
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.actions import parse_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.traces import load_traces
from dreamgym_lg.types import Trajectory

ASKED, ANSWER = "Where is order A7?", "It is shipped."
USER = {"role": "user", "content": ASKED}
DONE = {"role": "assistant", "content": ANSWER}
ARGUMENTS = '{"order_id": "A7"}'
FUNCTION = {"id": "c1", "type": "function", "function": {"name": "get_order", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [FUNCTION]}
SHIPPED = {"role": "tool", "tool_call_id": "c1", "content": "shipped"}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), "reward": 1, **fields}


def parts(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def said(role: str, value: str) -> dict[str, Any]:
    return {"from": role, "value": value}


def span(attributes: dict[str, Any], id: str = "s", **fields: Any) -> dict[str, Any]:
    start = {"s": 1, "t": 2, "u": 3}[id]
    return {"traceId": "t", "spanId": id, "startTimeUnixNano": str(start), "attributes": attributes, "reward": 1, **fields}


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """Attributes as OpenInference and OpenLLMetry flatten them."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: each for key, inner in items for name, each in flat(f"{prefix}.{key}", inner).items()}
    return {prefix: value}


CALL = {"id": "c1", "name": "get_order", "arguments": ARGUMENTS}
INFERENCE_CALL = {"tool_call": {"id": "c1", "function": {"name": "get_order", "arguments": ARGUMENTS}}}
ASKED_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASKED}]}
CALL_ITEM = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_order", "arguments": ARGUMENTS}
OUTPUT_ITEM = {"type": "function_call_output", "id": "fo_1", "call_id": "c1", "output": "shipped"}
ANSWER_ITEM = {"type": "message", "id": "m1", "role": "assistant", "content": [{"type": "output_text", "text": ANSWER}]}
THOUGHT_ITEM = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}
LLM_RUN = {"trace_id": "r", "parent_run_id": None, "run_type": "llm", "name": "x", "reward": 1}
GEMINI = [
    parts({"text": ASKED}),
    parts({"functionCall": {"name": "get_order", "args": {"order_id": "A7"}}, "thoughtSignature": "x"}, role="model"),
    parts({"functionResponse": {"name": "get_order", "response": {"output": "shipped"}}}, role="function"),
    parts({"text": "Let me see.", "thought": True}, {"text": ANSWER}, role="model"),
]

FORMS: dict[str, Any] = {
    "parts beside a content": [
        chat(USER, CALLING, SHIPPED, {**DONE, "content": "", "parts": [{"type": "text", "text": ANSWER}]})
    ],
    "openai chat": [chat(USER, CALLING, SHIPPED, DONE)],
    "arguments encoded twice": [
        chat(
            USER,
            {**CALLING, "tool_calls": [{"id": "c1", "function": {"name": "get_order", "arguments": json.dumps(ARGUMENTS)}}]},
            SHIPPED,
            DONE,
        )
    ],
    "legacy functions": [
        chat(
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "get_order", "arguments": ARGUMENTS}},
            {"role": "function", "name": "get_order", "content": "shipped"},
            DONE,
        )
    ],
    "legacy functions of langchain": [
        chat(
            {"type": "human", "data": {"content": ASKED}},
            {
                "type": "ai",
                "data": {"content": "", "additional_kwargs": {"function_call": {"name": "get_order", "arguments": ARGUMENTS}}},
            },
            {"type": "function", "data": {"content": "shipped", "name": "get_order"}},
            {"type": "ai", "data": {"content": ANSWER}},
        )
    ],
    "responses items": [
        {"input": [USER, THOUGHT_ITEM, CALL_ITEM, OUTPUT_ITEM], "output": [THOUGHT_ITEM, ANSWER_ITEM], "reward": 1}
    ],
    "responses items as messages": [chat(ASKED_ITEM, THOUGHT_ITEM, CALL_ITEM, OUTPUT_ITEM, ANSWER_ITEM)],
    "a request and its response": [
        {"request": {"messages": [USER, CALLING, SHIPPED]}, "response": {"body": {"choices": [{"message": DONE}]}}, "reward": 1}
    ],
    "prompt and completion": [{"prompt": [USER, CALLING, SHIPPED], "completion": [DONE], "reward": 1}],
    "anthropic blocks": [
        chat(
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "c1", "name": "get_order", "input": {"order_id": "A7"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "shipped"}]}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "text", "text": ANSWER, "citations": None}]},
        )
    ],
    "bedrock converse": [
        chat(
            {"role": "user", "content": [{"text": ASKED}]},
            {
                "role": "assistant",
                "content": [{"toolUse": {"toolUseId": "c1", "name": "get_order", "input": {"order_id": "A7"}}}],
            },
            {"role": "user", "content": [{"toolResult": {"toolUseId": "c1", "content": [{"text": "shipped"}]}}]},
            {"role": "assistant", "content": [{"reasoningContent": {"reasoningText": {"text": "hm"}}}, {"text": ANSWER}]},
        )
    ],
    "gemini contents": [{"contents": GEMINI, "reward": 1}],
    "gemini in small letters": [
        chat(
            parts({"text": ASKED}),
            parts({"function_call": {"name": "get_order", "args": {"order_id": "A7"}, "id": None}}, role="model"),
            parts({"function_response": {"name": "get_order", "response": {"result": "shipped"}}}),
            {"content": parts({"text": ANSWER}, role="model"), "role": "model"},
        )
    ],
    "a request of gemini": [
        {"request": {"contents": GEMINI[:3]}, "response": {"candidates": [{"content": GEMINI[3], "index": 0}]}, "reward": 1}
    ],
    "hugging face": [
        chat(
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "get_order", "arguments": {"order_id": "A7"}}}],
            },
            {"role": "tool", "name": "get_order", "content": "shipped"},
            DONE,
        )
    ],
    "ollama": [
        chat(
            USER,
            {
                "role": "assistant",
                "content": "",
                "thinking": "hm",
                "tool_calls": [{"function": {"name": "get_order", "arguments": {"order_id": "A7"}}}],
            },
            {"role": "tool", "tool_name": "get_order", "content": "shipped"},
            DONE,
        )
    ],
    "sharegpt": [
        {
            "conversations": [
                said("human", ASKED),
                said("function_call", '{"name": "get_order", "arguments": {"order_id": "A7"}}'),
                said("observation", "shipped"),
                said("gpt", ANSWER),
            ],
            "tools": json.dumps([{"name": "get_order", "parameters": {}}]),
            "reward": 1,
        }
    ],
    "sharegpt of hermes": [
        {
            "conversations": [
                said("human", ASKED),
                said(
                    "gpt",
                    '<think>\nhm\n</think>\n<tool_call>\n{"name": "get_order", "arguments": {"order_id": "A7"}}\n</tool_call>',
                ),
                said("tool", '<tool_response>\n{"name": "get_order", "content": "shipped"}\n</tool_response>'),
                said("gpt", f"<think>ok</think>\n{ANSWER}"),
            ],
            "reward": 1,
        }
    ],
    "the AI SDK": [
        chat(
            {"role": "user", "content": [{"type": "text", "text": ASKED}]},
            {
                "role": "assistant",
                "content": [{"type": "tool-call", "toolCallId": "c1", "toolName": "get_order", "input": {"order_id": "A7"}}],
            },
            {
                "role": "tool",
                "content": [
                    {
                        "type": "tool-result",
                        "toolCallId": "c1",
                        "toolName": "get_order",
                        "output": {"type": "text", "value": "shipped"},
                    }
                ],
            },
            {"role": "assistant", "content": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": ANSWER}]},
        )
    ],
    "a dataset row of langsmith": [
        {"inputs": {"messages": [USER]}, "outputs": {"messages": [CALLING, SHIPPED, DONE]}, "reward": 1}
    ],
    "a thread of a LangGraph server": [
        {"thread_id": "t", "values": {"messages": [USER, CALLING, SHIPPED, DONE]}, "metadata": {"thread_id": "t"}, "reward": 1}
    ],
    "a dataset row of a question": [
        {"inputs": {"question": ASKED}, "outputs": {"messages": [USER, CALLING, SHIPPED, DONE]}, "metadata": {}, "reward": 1}
    ],
    "langsmith's responses": [
        {
            **LLM_RUN,
            "id": "1",
            "start_time": "2025-01-01T00:00:00",
            "inputs": {"input": ASKED},
            "outputs": {"output": [THOUGHT_ITEM, CALL_ITEM]},
        },
        {
            **LLM_RUN,
            "id": "2",
            "start_time": "2025-01-01T00:00:02",
            "inputs": {"input": [USER, CALL_ITEM, OUTPUT_ITEM]},
            "outputs": {"output": [ANSWER_ITEM], "instructions": None},
        },
    ],
    "langsmith's anthropic": [
        {
            **LLM_RUN,
            "id": "1",
            "inputs": {"messages": [USER, CALLING, SHIPPED]},
            "outputs": {"message": {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}},
        }
    ],
    "a trace of langfuse": [
        {
            "id": "t",
            "timestamp": "2025-01-01T00:00:00Z",
            "metadata": {"thread_id": "one of many", "langgraph_step": 1},
            "input": json.dumps({"messages": [USER]}),
            "output": {"content": ANSWER},
            "scores": [{"name": "user-feedback", "value": 1}],
            "observations": [
                {
                    "id": "1",
                    "traceId": "t",
                    "type": "GENERATION",
                    "startTime": "2025-01-01T00:00:01Z",
                    "input": [USER],
                    "output": CALLING,
                },
                {
                    "id": "2",
                    "traceId": "t",
                    "type": "TOOL",
                    "name": "get_order",
                    "startTime": "2025-01-01T00:00:02Z",
                    "output": "shipped",
                },
                {  # the tool is an agent itself: what its model says is no act of this one
                    "id": "4",
                    "traceId": "t",
                    "parentObservationId": "2",
                    "type": "GENERATION",
                    "startTime": "2025-01-01T00:00:02.5Z",
                    "input": [USER, DONE, USER, DONE, USER],
                    "output": DONE,
                },
                {
                    "id": "3",
                    "traceId": "t",
                    "type": "GENERATION",
                    "startTime": "2025-01-01T00:00:03Z",
                    "input": [USER, CALLING, SHIPPED],
                    "output": {"role": "assistant", "content": ANSWER},
                },
            ],
        }
    ],
    "openinference": [
        span(
            {
                "openinference.span.kind": "LLM",
                **flat(
                    "llm.input_messages",
                    [{"message": USER}, {"message": {"role": "assistant", "tool_calls": [INFERENCE_CALL]}}],
                ),
                **flat("llm.input_messages.2", {"message": {"role": "tool", "tool_call_id": "c1", "content": "shipped"}}),
                **flat("llm.output_messages.0.message", {"role": "assistant"}),
                **flat("llm.output_messages.0.message.contents.0", {"message_content": {"type": "text", "text": ANSWER}}),
                **flat(
                    "llm.tools.0.tool", {"json_schema": json.dumps({"type": "function", "function": {"name": "get_order"}})}
                ),
            }
        )
    ],
    "openinference, as phoenix nests it": [
        span(
            {
                "openinference": {"span": {"kind": "LLM"}},
                "llm": {
                    "input_messages": [
                        {"message": USER},
                        {"message": {"role": "assistant", "tool_calls": [INFERENCE_CALL]}},
                        {"message": SHIPPED},
                    ],
                    "output_messages": [{"message": DONE}],
                },
            }
        )
    ],
    "a data frame of phoenix": [
        {
            "context.trace_id": "t",
            "context.span_id": "s",
            "span_kind": "LLM",
            "attributes": {
                "llm.input_messages": [
                    {"message.role": "user", "message.content": ASKED},
                    {
                        "message.role": "assistant",
                        "message.tool_calls": [
                            {
                                "tool_call.id": "c1",
                                "tool_call.function.name": "get_order",
                                "tool_call.function.arguments": ARGUMENTS,
                            }
                        ],
                    },
                    {"message.role": "tool", "message.tool_call_id": "c1", "message.content": "shipped"},
                ],
                "llm.output_messages": [{"message.role": "assistant", "message.content": ANSWER}],
            },
            "annotations": [{"name": "correctness", "result": {"score": 1, "label": "good"}}],
        }
    ],
    "openinference, the tools' own spans": [
        span(
            {
                "openinference.span.kind": "LLM",
                **flat("llm.input_messages.0.message", USER),
                **flat("llm.output_messages.0.message", {"role": "assistant", "tool_calls": [INFERENCE_CALL]}),
            }
        ),
        span(
            {"openinference.span.kind": "TOOL", "tool.name": "get_order", "input.value": ARGUMENTS, "output.value": "shipped"},
            "t",
        ),
        span(
            {
                "openinference.span.kind": "LLM",
                **flat("llm.input_messages", [{"message": USER}, {"message": CALLING}, {"message": SHIPPED}]),
                **flat("llm.output_messages.0.message", DONE),
            },
            "u",
        ),
    ],
    "openllmetry": [
        span(
            {
                "llm.request.type": "chat",
                **flat("gen_ai.prompt", [USER, {"role": "assistant", "tool_calls": [CALL]}, SHIPPED]),
                **flat("gen_ai.completion", [{**DONE, "finish_reason": "stop"}]),
                **flat("llm.request.functions", [{"name": "get_order", "description": "", "parameters": "{}"}]),
            }
        )
    ],
    "parts of opentelemetry": [
        span(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.input.messages": json.dumps(
                    [
                        parts({"type": "text", "content": ASKED}),
                        parts({"type": "tool_call", **CALL}, role="assistant"),
                        parts({"type": "tool_call_response", "id": "c1", "response": "shipped"}, role="tool"),
                    ]
                ),
                "gen_ai.output.messages": [
                    parts({"type": "reasoning", "content": "hm"}, {"type": "text", "content": ANSWER}, role="assistant")
                ],
            }
        )
    ],
    "langfuse's spans": [
        span(
            {
                "langfuse.observation.type": "generation",
                "langfuse.observation.input": json.dumps([USER, CALLING, SHIPPED]),
                "langfuse.observation.output": json.dumps(DONE),
            }
        )
    ],
    "the AI SDK's spans": [
        span(
            {
                "ai.operationId": "ai.generateText.doGenerate",
                "ai.prompt.messages": json.dumps([USER, CALLING, SHIPPED]),
                "ai.response.text": ANSWER,
            }
        )
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_conversation_in_every_form(form: str, write: Any) -> None:
    traces = load_traces(write(*FORMS[form]))
    (trajectory,) = traces
    assert traces.rejected == () and (trajectory.success, trajectory.reward) == (True, 1.0)
    assert [parse_action(step.action) for step in trajectory.steps] == [("get_order", {"order_id": "A7"}), ANSWER]
    assert [step.next_observation for step in trajectory.steps] == ["shipped", ""]
    assert list(trajectory.task.messages) == [{"role": "user", "content": ASKED}] and trajectory.task.instruction == ASKED
    names = [tool if isinstance(tool, str) else tool["function"]["name"] for tool in trajectory.task.tools or ()]
    assert names == ["get_order"]


def test_calls_of_one_reply_stay_together(write: Any) -> None:
    """Responses has an item a call, Gemini neither ids nor an order."""
    other = {**CALL_ITEM, "call_id": "c2", "name": "get_customer"}
    items = chat(USER, ANSWER_ITEM, CALL_ITEM, other, {**OUTPUT_ITEM, "call_id": "c2", "output": "Ada"}, OUTPUT_ITEM, DONE)
    calls = [{"functionCall": {"name": name, "args": {"order_id": "A7"}}} for name in ("get_order", "get_customer")]
    answers = [
        {"functionResponse": {"name": name, "response": {"result": text}}}
        for name, text in (("get_customer", "Ada"), ("get_order", "shipped"))
    ]
    gemini = chat(USER, parts(*calls, role="model"), parts(*answers), DONE)
    for row in (items, gemini):
        (trajectory,) = load_traces(write(row))
        assert [step.next_observation for step in trajectory.steps] == ["shipped", "Ada", ""]


BLOCK = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def reading(write: Any, *rows: Any) -> list[Trajectory]:
    traces = load_traces(write(*rows))
    assert traces.rejected == ()
    return list(traces)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, CALLING], "its call of 'get_order' was never answered"),
        ([USER, CALLING, SHIPPED, CALLING], "its last call, of 'get_order', has no answer, and its reward says"),
        (
            [USER, {"role": "assistant", "content": None}],
            "message 2 cannot be read (an assistant's message with neither text nor tool call)",
        ),
        ([USER, {"role": "assistant", "content": "<think>hm</think>"}], "a thought alone"),
        ([USER, {"role": "assistant", "content": [{"type": "hologram", "text": "x"}]}], "unknown form 'hologram'"),
        (
            [USER, {"role": "assistant", "content": "", "parts": [{"type": "tool-invocation"}]}],
            "unknown form 'tool-invocation'",
        ),
        (
            [USER, {"role": "assistant", "content": [{"type": "text", "text": "See:"}, BLOCK]}],
            "form 'image_url', which no text can hold",
        ),
        ([USER, CALLING, {**SHIPPED, "content": [BLOCK]}, DONE], "a tool's answer with a block of the form 'imageurl'"),
        ([USER, CALLING, {**SHIPPED, "content": None}, DONE], "message 3 cannot be read (a tool's answer without content)"),
        ([USER, DONE, {**USER, "content": [BLOCK]}, DONE], "a later message of the user with a block of the form 'image_url'"),
        ([{"role": "user"}, DONE], "without content"),
        ([USER, {"type": "computer_call", "call_id": "c1", "action": {}}], "no role of a message is 'computer_call'"),
        ([USER, {"type": "item_reference", "id": "m1"}], "no role of a message is 'item_reference'"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "c1"}]}], "a tool call without a name"),
        ([USER, {"role": "assistant", "content": "<tool_call>{broken</tool_call>"}], "a <tool_call> that is no JSON object"),
        (
            [{"role": "system", "content": [BLOCK]}, USER, DONE],
            "a message of the role 'system' with a block of the form 'image_url'",
        ),
    ],
)
def test_what_cannot_be_read_is_rejected_by_the_name_of_its_form(messages: Any, reason: str, write: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_traces(write(chat(*messages)))
    assert reason in str(caught.value) and "line 1" in str(caught.value)


def test_a_tools_answer_that_is_data_is_its_json(write: Any) -> None:
    values = [
        {"status": "shipped"},
        [{"type": "hotel", "name": "Ritz"}],
        [{"type": "file", "name": "a.txt"}],
        [1, 2],
        0,
        ["a"],
        [{"text": "a", "n": 1}],
    ]
    for value in values:
        (trajectory,) = reading(write, chat(USER, CALLING, {**SHIPPED, "content": value}, DONE))
        assert json.loads(trajectory.steps[0].next_observation) == value
    (trajectory,) = reading(write, chat(USER, CALLING, {**SHIPPED, "content": ""}, DONE))
    assert trajectory.steps[0].next_observation == ""


def test_an_unreadable_call_is_no_call(write: Any) -> None:
    broken = {**CALLING, "tool_calls": [{**FUNCTION, "function": {"name": "get_order", "arguments": '["A7"]'}}]}
    (trajectory,) = reading(write, chat(USER, broken, SHIPPED, DONE))
    assert not trajectory.steps[0].valid and json.loads(trajectory.steps[0].action)["arguments"] == '["A7"]'


def test_refusals_transcripts_and_custom_calls_are_read(write: Any) -> None:
    custom = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "run", "input": "ls"}}],
    }
    item = {"type": "custom_tool_call", "call_id": "c1", "name": "run", "input": "ls"}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "shipped"}
    for row in (chat(USER, custom, SHIPPED, DONE), chat(USER, item, output, DONE)):
        (trajectory,) = reading(write, row)
        assert parse_action(trajectory.steps[0].action) == ("run", {"__arg1": "ls"})
    for last in (
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "audio": {"transcript": "No."}},
    ):
        (trajectory,) = reading(write, chat(USER, last))
        assert trajectory.steps[-1].action == '{"answer": "No."}'


# --- the agent's input ------------------------------------------------------------------------------------------------------


def test_the_agents_input_is_productions(write: Any) -> None:
    """The system message is no part of the instruction, two messages are two, an image is an image."""
    system, greeting = {"role": "system", "content": "You help."}, {"role": "assistant", "content": "Hello!"}
    pictured = {"role": "user", "content": [{"type": "text", "text": ASKED}, BLOCK]}
    (trajectory,) = reading(write, chat(system, greeting, pictured, {**USER, "content": "Soon!"}, DONE))
    task = trajectory.task
    assert list(task.messages) == [system, greeting, pictured, {"role": "user", "content": "Soon!"}]
    assert task.instruction == task.observation == f"{ASKED}\n[image_url]\n\nSoon!"
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend([trajectory])
        assert buffer.tasks() == [task]


@pytest.mark.parametrize("key", ["system", "instructions", "systemInstruction"])
def test_a_system_message_beside_the_messages(key: str, write: Any) -> None:
    text = {"parts": [{"text": "You help."}]} if key == "systemInstruction" else "You help."
    (trajectory,) = reading(write, chat(USER, DONE, **{key: text}))
    assert [message["role"] for message in trajectory.task.messages] == ["system", "user"]


def test_other_images_are_other_tasks_and_are_written_as_langchain_reads_them(write: Any) -> None:
    rows = [
        chat(parts({"text": "What?"}, {"inlineData": {"mimeType": "image/png", "data": data}}), DONE)
        for data in ("AAAA", "BBBB")
    ]
    rows += [chat({"role": "user", "content": [{"type": "input_image", "image_url": "https://a.b/c.png"}]}, DONE)]
    found = reading(write, *rows)
    assert len({each.task.id for each in found}) == 3
    blocks = [each.task.messages[0]["content"][-1] for each in found]
    assert blocks[0] == {"type": "image", "mime_type": "image/png", "base64": "AAAA"}
    assert blocks[2] == {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}


def test_other_system_messages_are_other_tasks_of_the_same_words(write: Any) -> None:
    rows = [chat({"role": "system", "content": f"You talk with {name}."}, USER, DONE) for name in ("Ada", "Bob")]
    first, second = reading(write, *rows)
    assert first.task.id != second.task.id and first.task.instruction == second.task.instruction


# --- endings and verdicts ---------------------------------------------------------------------------------------------------


def ends(write: Any, *messages: Any, **fields: Any) -> Trajectory:
    (trajectory,) = reading(write, {"messages": [USER, *messages], **fields})
    return trajectory


def test_a_conversation_with_a_reward_is_over_wherever_it_ends(write: Any) -> None:
    thanks = {"role": "user", "content": "Thanks! ###STOP###"}
    for messages, last in (([DONE, thanks], ANSWER), ([CALLING, SHIPPED], "shipped"), ([CALLING, SHIPPED, thanks], "shipped")):
        for reward in (0, 1):
            trajectory = ends(write, *messages, reward=reward)
            assert parse_action(trajectory.steps[-1].action) == last
            assert trajectory.steps[-1].terminated and not trajectory.steps[-1].truncated
            assert (trajectory.success, trajectory.reward) == (bool(reward), reward)
        unknown = ends(write, *messages)
        assert unknown.steps[-1].truncated and not unknown.success


def test_a_structured_response_is_the_answer_and_no_call(write: Any) -> None:
    ticket = {"name": "Ticket", "args": {"order": "A7", "refunded": False}, "id": "c2"}
    told = {"type": "tool", "content": "Returning structured response: order='A7'", "tool_call_id": "c2", "name": "Ticket"}
    trajectory = ends(write, CALLING, SHIPPED, {"type": "ai", "content": "", "tool_calls": [ticket]}, told, reward=1)
    last = trajectory.steps[-1]
    assert json.loads(str(parse_action(last.action))) == {"order": "A7", "refunded": False} and last.terminated
    assert len(trajectory.steps) == 2 and trajectory.task.tools == ["get_order"]


RUN = {"id": "r", "run_type": "chain", "inputs": {"messages": [USER]}, "outputs": {"messages": [USER, DONE]}}


def test_of_several_feedbacks_one_named_like_a_score_is_the_reward(write: Any) -> None:
    def read(stats: Any, **options: Any) -> Trajectory:
        (trajectory,) = load_traces(write({**RUN, "feedback_stats": stats}), **options)
        return trajectory

    both = {"user_score": {"n": 1, "avg": 0}, "style": {"n": 1, "avg": 0.9}}
    assert (read(both).success, read(both, reward_key="style").reward) == (False, 0.9)
    with pytest.raises(ConfigurationError, match="unknown feedback .* 'stile'; known: style, user_score. Did you mean 'style'"):
        read(both, reward_key="stile")
    row = {"messages": [USER, DONE], "reward": 1, "feedback": {"correctness": 0}}
    for options, reward in (({}, 1), ({"reward_key": "correctness"}, 0)):
        (trajectory,) = load_traces(write(row), **options)
        assert trajectory.reward == reward, "the named feedback comes first"
    assert read({"user_score": {"avg": 1}, "latency": {"avg": 12.5}, "total_tokens": {"avg": 0.5}}).success
    assert read({"latency": {"avg": 0.5}}).steps[-1].truncated, "a measurement is no verdict"
    assert read({"sentiment": {"avg": 0.5}}).reward == 0.5, "the only one"
    for stats in ({"correct": {"avg": 1}, "quality": {"avg": 0}}, {"a": {"avg": 1}, "b": {"avg": 0}}):
        with pytest.raises(ConfigurationError, match="--reward-key KEY"):
            read(stats)
        assert read(stats, reward={"r": 1}).success, "no feedback needs to be chosen"


def test_schemas_behind_the_messages_of_langfuses_handler_are_the_tools(write: Any) -> None:
    schema = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object", "properties": {}}}}
    given, bound = [USER, CALLING, SHIPPED], {"role": "tool", "content": schema}
    call = {"id": "1", "traceId": "t", "type": "GENERATION", "startTime": "2025-01-01T00:00:01Z", "output": DONE}
    exported = {"id": "t", "input": [USER], "output": DONE, "observations": [call | {"input": [*given, bound]}]}
    attributes = {"langfuse.observation.type": "generation", "langfuse.observation.output": json.dumps(DONE)}
    spans = span(attributes | {"langfuse.observation.input": json.dumps([*given, bound])})
    for row in (exported, spans):
        (trajectory,) = load_traces(write(row))
        assert [step.next_observation for step in trajectory.steps] == ["shipped", ""]
        assert trajectory.task.tools == [schema]


def test_metadata_are_the_applications_own(write: Any) -> None:
    noted = {"intent": "where", "thread_id": "41", "ls_provider": "x", "langgraph_step": 3, "__pregel": 1, "user_id": "7"}
    (run,) = reading(write, {**RUN, "extra": {"metadata": noted}, "success": True})
    attributes = {**flat("gen_ai.prompt", [USER]), **flat("gen_ai.completion", [DONE]), "gen_ai.operation.name": "chat"}
    (traced,) = reading(write, span({**attributes, "metadata": json.dumps(noted)}))
    (flattened,) = reading(write, span({**attributes, **flat("traceloop.association.properties", noted)}))
    for trajectory in (run, traced, flattened):
        assert trajectory.task.metadata == {"intent": "where", "user_id": "7"} and trajectory.success


def test_arguments_and_answers_of_spans_are_as_they_were(write: Any) -> None:
    """An argument that is named as OpenInference names a wrapper; an answer byte for byte, though it is JSON."""
    calling = parts(
        {"type": "tool_call", "id": "c1", "name": "say", "arguments": {"message": {"text": "hi"}}}, role="assistant"
    )
    asked = [parts({"type": "text", "content": ASKED})]
    call = span({"gen_ai.operation.name": "chat", "gen_ai.input.messages": asked, "gen_ai.output.messages": [calling]})
    run = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.call.id": "c1",
        "gen_ai.tool.call.result": '{"ok":true,"n":1.0}',
    }
    (trajectory,) = reading(write, call, span(run, "t"))
    assert parse_action(trajectory.steps[0].action) == ("say", {"message": {"text": "hi"}})
    assert trajectory.steps[0].next_observation == '{"ok":true,"n":1.0}'


def test_the_verdict_around_spans_is_theirs(write: Any) -> None:
    inner = span({**flat("gen_ai.prompt", [USER]), **flat("gen_ai.completion", [DONE])})
    del inner["reward"]
    row = {"resourceSpans": [{"scopeSpans": [{"spans": [inner]}]}], "reward": 0.5, "metadata": {"intent": "where"}}
    (trajectory,) = reading(write, row)
    assert (trajectory.reward, trajectory.task.metadata) == (0.5, {"intent": "where"})


def test_a_source_without_a_reward_says_so(write: Any) -> None:
    with pytest.warns(UserWarning, match="none of 2 traces has a reward: give --rewards"):
        list(load_traces(write({"messages": [USER, DONE]}, {"messages": [USER, {**DONE, "content": "Which?"}, USER, DONE]})))
    for reward in (0, 0.5):
        with pytest.warns(UserWarning, match="none of 1 traces is a success: there is none to learn from"):
            list(load_traces(write({"messages": [USER, DONE], "reward": reward, "success": False})))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (won,) = load_traces(write({"messages": [USER, DONE], "reward": 0, "success": True}))
    assert won.success


# --- files ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress, bz2.compress])
def test_compressed_files_are_read(pack: Any, write: Any) -> None:
    rows = [chat(USER, DONE), {"messages": [USER]}]
    for text in (json.dumps(rows), json.dumps(rows, indent=1), "\n".join(map(json.dumps, rows))):
        path = write(pack(text.encode()))
        assert len(list(load_traces(path))) == 1
    packed = path.read_bytes()
    for damaged in (packed[:-20], packed[:40] + bytes(20) + packed[60:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match="cannot be decompressed"):
            list(load_traces(path))


def test_an_element_of_a_line_is_named_by_its_number(write: Any) -> None:
    (rejected,) = load_traces(write([chat(USER, DONE), chat(USER, DONE), {"messages": [USER]}])).rejected
    assert rejected.line == 1 and rejected.reason.startswith("element 3: the agent did nothing")


def test_halves_of_characters_are_cleaned_when_they_are_read(write: Any) -> None:
    row = chat({"role": "user", "content": "A \ud83d"}, {"role": "assistant", "content": "😀"}, metadata={"a": "\udc00"})
    (trajectory,) = reading(write, json.dumps(row))
    assert (trajectory.task.instruction, trajectory.task.metadata, trajectory.steps[0].action) == (
        "A ?",
        {"a": "?"},
        '{"answer": "😀"}',
    )


FAULTS = Path(__file__).parents[3] / "shared" / "data" / "faults"
TAU = FAULTS.parent / "tau" / "tau_airline_conversations.json.xz"
READ: dict[str, tuple[bool, str, str]] = {
    "structured": (True, '{"order": "A7", "refunded": false}', ""),
    "direct": (True, "document of A7", ""),
    "thinking": (True, "Your order is shipped.", ""),
    "same_call": (True, "Ordered.", ""),
    "responses_langsmith_answer": (False, ANSWER, ""),
    "responses_messages_items": (True, ANSWER, ""),
    "silent_loss_0": (True, ANSWER, ""),
    "silent_loss_2": (True, ANSWER, "shipped"),
    "silent_loss_4": (False, "", "its call of 'get_order' was never answered"),
    "silent_loss_6": (True, ANSWER, '{"status": "shipped"}'),
    "silent_loss_8": (True, ANSWER, "shipped"),
    "unclear_0": (False, ANSWER, "shipped"),
    "unclear_2": (False, ANSWER, "shipped"),
    "unclear_4": (False, ANSWER, "shipped"),
    "unclear_6": (False, ANSWER, ""),
    "verdicts_0": (True, ANSWER, "where"),
    "verdicts_2": (True, ANSWER, "where"),
    "verdicts_4": (True, ANSWER, ""),
    "verdicts_6": (True, ANSWER, "where"),
}
"""Success, final answer, and the first tool's answer, the task's intent or the reason of the rejection."""


@pytest.mark.parametrize("name", READ)
def test_inputs_that_went_wrong(name: str) -> None:
    if not FAULTS.is_dir():
        pytest.skip(f"{FAULTS} is not there: the same forms are above")
    success, answer, more = READ[name]
    if not answer:
        with pytest.raises(ConfigurationError, match=more):
            load_traces(FAULTS / f"{name}.jsonl")
        return
    first = next(iter(load_traces(FAULTS / f"{name}.jsonl")))
    assert (first.success, parse_action(first.steps[-1].action)) == (success, answer)
    assert more in ("", first.steps[0].next_observation, first.task.metadata.get("intent"))


@pytest.mark.slow
def test_conversations_of_tau_bench() -> None:
    if not TAU.is_file():
        pytest.skip(f"{TAU} is not there")
    traces = load_traces(TAU)
    trajectories = list(traces)
    assert (len(trajectories), sum(each.success for each in trajectories), traces.rejected) == (132, 40, ())
    system, first = trajectories[0].task.messages
    assert system["role"] == "system" and system["content"].startswith("# Airline Agent Policy")
    assert first == {"role": "user", "content": trajectories[0].task.instruction}
    assert first["content"].startswith("Hi! I'm looking to book a flight") and len(trajectories[0].task.tools or ()) == 14


@pytest.mark.slow
def test_no_mutilated_form_escapes_as_another_error(survives: Any) -> None:
    survives("auto", list(FORMS.values()), 300)
