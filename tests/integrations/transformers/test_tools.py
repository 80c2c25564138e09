"""A tool agent's conversation is one run of tokens: what was sampled for a call is read again as it was sampled."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.requests import Request
from dreamgym_lg.integrations.transformers.tool_format import ToolDialect
from dreamgym_lg.token_recorder import TokenRecorder

FAMILIES = ["from scratch", "without tools", "qwen2.5", "qwen3", "qwen3-2507", "llama3.1", "llama3.2", "mistral"]
Make = Callable[[str], LocalChatModel]
Steer = Callable[[Callable[[Request], Any]], None]


@tool
def look(place: str, times: int = 1) -> str:
    """Look at a place."""
    return f"There is nothing in the {place}."


@tool
def wait() -> str:
    """Do nothing."""
    return "Time passes."


def odd_call(family: str, number: int) -> str:
    """A call as a model may write it and no template does: the keys turned round, spaces where none belong."""
    if family.startswith("llama3"):
        return f'{{"name" : "look",  "parameters": {{"times":{number}, "place":"box" }}}}'
    call = f'{{"arguments":  {{"times":{number}, "place":"box" }}, "name":"look"}}'
    if family == "mistral":
        return f"[TOOL_CALLS] [{call} ]"
    return f"Well. <tool_call>{call}</tool_call>\n<tool_call>\n{call}</tool_call>"


def two_looks(family: str) -> Callable[[Request], str]:
    """Calls a tool twice, then answers; and so again when it is asked again."""

    def say(request: Request) -> str:
        answered = sum(1 for message in request.conversation if message["role"] == "assistant")
        return odd_call(family, answered) if answered % 3 < 2 else "Nothing there."

    return say


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_that_appends_is_one_segment(
    family: str, streamed: bool, of_template: Make, steer: Steer, forward_error: Callable[..., float]
) -> None:
    policy = of_template(family)
    steer(two_looks(family))
    agent = create_agent(policy, [look, wait], system_prompt="Search.", name="searcher", checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    with TokenRecorder(seed=1) as recorder:
        for question in ("What is in the box?", "Are you sure?"):
            given = {"messages": [HumanMessage(question)]}
            if streamed:
                async for _ in agent.astream(given, config, stream_mode="messages"):
                    pass
            else:
                await agent.ainvoke(given, config)
    messages: list[AnyMessage] = (await agent.aget_state(config)).values["messages"]
    calls = [call for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    assert len(recorder.calls) == 6
    assert calls[0]["name"] == "look" and calls[0]["args"] == {"times": 0, "place": "box"}
    assert len({call["id"] for call in calls}) == len(calls) >= 4
    assert messages[1].name == "searcher" and messages[-1].text == "Nothing there."
    (segment,) = recorder.segments()
    assert segment.trainable == sum(len(call.sampled_ids) for call in recorder.calls)
    assert forward_error(policy, segment) < 1e-4


async def test_ids_come_from_the_seed(of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")
    steer(lambda _: '<tool_call>{"name":"look"}</tool_call><tool_call>{"name":"look"}</tool_call>')
    model = policy.bind_tools([look])

    async def ids(seed: int | None) -> set[str | None]:
        with TokenRecorder(seed=seed):
            calls = [call for _ in range(2) for call in (await model.ainvoke("Look.")).tool_calls]
        found = {call["id"] for call in calls}
        assert len(found) == len(calls) == 4, "the second question is the same and has calls of its own"
        return found

    first = await ids(1)
    assert await ids(1) == first
    assert not await ids(2) & first
    assert not await ids(None) & await ids(None)


def copies(message: AIMessage) -> AIMessage:
    return message.model_copy(deep=True)


def checkpoints(message: AIMessage) -> AIMessage:
    serde = JsonPlusSerializer()
    loaded: AIMessage = serde.loads_typed(serde.dumps_typed(message))
    return loaded


def renames(message: AIMessage) -> AIMessage:
    message.name, message.id = "searcher", "another"
    return message


@pytest.mark.parametrize("change", [copies, checkpoints, renames])
async def test_a_message_is_known_again(change: Callable[[AIMessage], AIMessage], of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")
    steer(two_looks("from scratch"))
    model = policy.bind_tools([look])
    with TokenRecorder(seed=0) as recorder:
        first = change(await model.ainvoke("Look."))
        results = [ToolMessage("Nothing.", tool_call_id=call["id"]) for call in first.tool_calls]
        await model.ainvoke([HumanMessage("Look."), first, *results])
    assert len(recorder.segments()) == 1


async def test_an_edited_call_is_written_as_it_was_edited(
    of_template: Make, steer: Steer, forward_error: Callable[..., float]
) -> None:
    policy = of_template("qwen2.5")
    steer(two_looks("qwen2.5"))
    model = policy.bind_tools([look])
    with TokenRecorder(seed=0) as recorder:
        first = await model.ainvoke("Look.")
        first.tool_calls[0]["args"]["place"] = "drawer"
        results = [ToolMessage("Nothing.", tool_call_id=call["id"]) for call in first.tool_calls]
        await model.ainvoke([HumanMessage("Look."), first, *results])
    sampled, edited = recorder.segments()
    given = policy.tokenizer.decode(recorder.calls[1].prompt_ids)
    assert '{"name": "look", "arguments": {"times": 0, "place": "drawer"}}' in given
    assert max(forward_error(policy, sampled), forward_error(policy, edited)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_trimmed_history_reads_the_calls_as_they_were_sampled(
    family: str, of_template: Make, steer: Steer, forward_error: Callable[..., float]
) -> None:
    policy = of_template(family)
    steer(two_looks(family))
    model = policy.bind_tools([look])
    with TokenRecorder(seed=0) as recorder:
        messages: list[Any] = [HumanMessage("Look.")]
        for _ in range(2):
            reply = await model.ainvoke(messages)
            messages += [reply, *(ToolMessage("Nothing.", tool_call_id=call["id"]) for call in reply.tool_calls)]
        last = next(i for i in range(len(messages) - 1, 0, -1) if isinstance(messages[i], AIMessage))
        await model.ainvoke([messages[0], *messages[last:]])
    segments = recorder.segments()
    assert len(segments) == 2
    assert odd_call(family, 1) in policy.tokenizer.decode(recorder.calls[-1].prompt_ids)
    assert max(forward_error(policy, segment) for segment in segments) < 1e-4


async def test_a_template_that_writes_old_calls_otherwise_has_its_way(
    of_template: Make, steer: Steer, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = of_template("from scratch")
    name = "call.function.name"
    written = policy.tokenizer.chat_template.replace(
        f"{{{{ {name} }}}}", f"{{{{ {name} | reverse if messages | length > 4 else {name} }}}}"
    )
    monkeypatch.setattr(policy.tokenizer, "chat_template", written)
    steer(two_looks("from scratch"))
    with TokenRecorder(seed=0) as recorder:
        await create_agent(policy, [look]).ainvoke({"messages": [HumanMessage("Look.")]})
    assert odd_call("from scratch", 0) in policy.tokenizer.decode(recorder.calls[1].prompt_ids)
    last = policy.tokenizer.decode(recorder.calls[-1].prompt_ids)
    assert '{"name": "kool", "arguments": {"times": 0, "place": "box"}}' in last and "\ue000" not in last
    assert len(recorder.segments()) > 1


async def test_a_call_of_another_model_is_written_by_the_template(of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")
    steer(lambda _: "Good.")
    call = {"name": "look", "args": {"place": "größte Kiste"}, "id": "x"}
    history = [HumanMessage("Look."), AIMessage("Yes.", tool_calls=[call]), ToolMessage("Nothing.", tool_call_id="x")]
    with TokenRecorder() as recorder:
        await policy.bind_tools([look]).ainvoke(history)
        await policy.ainvoke(history)
    told, untold = (policy.tokenizer.decode(call.prompt_ids) for call in recorder.calls)
    turns = (
        '<|user|>Look.<|end|><|assistant|>Yes.\n<tool_call>\n{"name": "look", "arguments": {"place": "größte Kiste"}}\n'
        "</tool_call><|end|><|user|><tool_response>\nNothing.\n</tool_response><|end|><|assistant|>"
    )
    assert untold == turns
    assert told.endswith(f"<|end|>{turns}") and told.startswith("<|system|><tools>\nlook(") and " Look at a place.\n" in told


@pytest.mark.parametrize(
    ("family", "shown"),
    [
        (
            "from scratch",
            '<tools>\nlook(place, times?: {"default": 1, "type": "integer"}) Look at a place.\nwait() Do nothing.\n</tools>',
        ),
        ("without tools", "# Tools\n"),
    ],
)
def test_tools_join_the_system_message(family: str, shown: str, of_template: Make, steer: Steer) -> None:
    policy = of_template(family)
    steer(lambda _: "Good.")
    with TokenRecorder() as recorder:
        policy.bind_tools([look, wait]).invoke([SystemMessage("Be brief."), HumanMessage("Look.")])
    given = policy.tokenizer.decode(recorder.calls[0].prompt_ids)
    assert given.startswith(f"<|system|>Be brief.\n\n{shown}") and given.count("<|system|>") == 1
    assert "Look at a place." in given and "Do nothing." in given
    assert given.endswith("<|end|><|user|>Look.<|end|><|assistant|>")


CONVERSATIONS = [
    [("user", "Hello")],
    [("system", "Be brief.\n"), ("user", " a\n\nb ")],
    [("system", "1"), ("user", "2"), ("assistant", "3 {{ x }} <tool_call>"), ("user", "4"), ("assistant", "")],
    [("user", "料理"), ("user", "é"), ("assistant", "\n"), ("system", "late")],
]


@pytest.mark.parametrize("turns", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_conversation_without_tools_is_rendered_as_ever(
    turns: list[tuple[str, str]], prompt: bool, of_template: Make
) -> None:
    conversation = [{"role": role, "content": content} for role, content in turns]
    new, old = (of_template(family).tokenizer for family in ("from scratch", "without tools"))
    assert new.chat_template != old.chat_template
    options: Any = {"add_generation_prompt": prompt, "return_dict": True, "return_assistant_tokens_mask": True}
    assert new.apply_chat_template(conversation, **options) == old.apply_chat_template(conversation, **options)


def test_training_sees_the_calls_as_the_assistants(of_template: Make) -> None:
    tokenizer = of_template("from scratch").tokenizer
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": "box"}}}
    conversation = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    conversation += [{"role": "tool", "name": "look", "content": "Nothing."}]
    encoded = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
    trained = [id for id, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == '<tool_call>\n{"name": "look", "arguments": {"place": "box"}}\n</tool_call><|end|>'


def test_what_is_remembered_is_bounded(of_template: Make, steer: Steer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamgym_lg.integrations.transformers.tool_format.REMEMBERED", 2)
    policy = of_template("from scratch")
    steer(two_looks("from scratch"))
    replies = [policy.bind_tools([look]).invoke("Look.") for _ in range(3)]
    dialect: ToolDialect = copy.copy(policy._tools)
    assert [dialect._recall(reply) is not None for reply in replies] == [False, True, True]
    dialect._recall(replies[1])
    replies.append(policy.bind_tools([look]).invoke("Look."))
    recalled = [dialect._recall(reply) is not None for reply in replies]
    assert recalled == [False, True, False, True], "the one longest out of use is forgotten"
