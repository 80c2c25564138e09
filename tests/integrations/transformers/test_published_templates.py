"""Every chat template that TRL's wheel ships, as models are published with them: system, tools, a thread of production's."""

import functools
import re
from importlib.util import find_spec
from itertools import compress
from pathlib import Path

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from tiny_models import create_tokenizer
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.actions import render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_template import ChatTemplate
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.integrations.transformers.tool_format import ToolDialect, render
from dreamgym_lg.integrations.trl.rows import tokenize

_SPEC = find_spec("trl")
assert _SPEC is not None and _SPEC.origin is not None
FOLDER = Path(_SPEC.origin).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))

MORE_ENDS = {
    "gptoss": ["<|return|>", "<|call|>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    **{name: ["<turn|>", "<|tool_response>"] for name in NAMES if name.startswith("gemma4")},
}
"""Tokens that end a reply by the model's generation settings, where its template shows others."""
OWN_FORMAT = {name for name in NAMES if re.match(r"gemma4|glm4|gptoss|lfm2_|llama3_|nemotron|qwen2_5$|qwen3", name)}
"""Templates whose own format of tool calls is used."""
SPECIAL = re.compile(
    r"<\|[^|>'\" ]+\|>|<｜[^｜>]+｜>|<\|?[a-z_]*turn[a-z_]*\|?>|</s>|<end_of_utterance>|<\|[a-z_]+>|<[a-z_]+\|>"
)


@tool
def look(place: str, times: int = 1) -> str:
    """Look at a place."""
    return place


LOOK = convert_to_openai_tool(look)
THREAD: list[BaseMessage] = [
    SystemMessage("Search well."),
    HumanMessage("What is in the box and the bag?"),
    AIMessage(
        "",
        tool_calls=[
            {"name": "look", "args": {"place": "box"}, "id": "call_1234567890abcdef"},
            {"name": "look", "args": {"place": "bag"}, "id": "call_fedcba0987654321"},
        ],
    ),
    ToolMessage("an apple", tool_call_id="call_1234567890abcdef"),
    ToolMessage("a pear", tool_call_id="call_fedcba0987654321"),
    AIMessage("An apple and a pear."),
    HumanMessage("And in the hat?"),
]


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = create_tokenizer(["What is in the box and the bag?"], vocab_size=320)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template))), "bos_token": "<s>"})
    tokenizer.chat_template, tokenizer.name_or_path = template, name
    return tokenizer


def prompt(dialect: ToolDialect, tokenizer: PreTrainedTokenizerFast, messages: list[BaseMessage]) -> tuple[Request, str]:
    request = Request(())
    dialect.prepare(request, messages, tools=[LOOK], choice=None, response_format=None)
    return request, render(tokenizer, request)


def test_there_are_enough_of_them() -> None:
    assert len(NAMES) >= 28 and len(OWN_FORMAT) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_a_thread_of_production_goes_on_and_is_trained_on(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ends = {ChatTemplate(tokenizer).end, *map(tokenizer.convert_tokens_to_ids, MORE_ENDS.get(name, []))}
    dialect = ToolDialect(tokenizer, ends)
    assert (dialect.template_format is not None) == (name in OWN_FORMAT)

    request, text = prompt(dialect, tokenizer, THREAD)
    for words in ("Search well.", "Look at a place.", "an apple", "a pear", "And in the hat?"):
        assert words in text
    call = dialect.reply(render_call("look", {"place": "hat", "times": 2}))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    message = AIMessage(**dialect.read(request, Generated(call, ids, [1], [0.0], "stop")))
    assert [(each["name"], each["args"]) for each in message.tool_calls] == [("look", {"place": "hat", "times": 2})]

    answered = [*THREAD, message, ToolMessage("a plum", tool_call_id=message.tool_calls[0]["id"])]
    _, later = prompt(dialect, tokenizer, answered)
    assert "a plum" in later
    if name in OWN_FORMAT:
        assert later.startswith(text + call), "what was sampled is read again as it was"

    learned = ""
    for row in tokenize(tokenizer, [[*answered, AIMessage("A plum.")]], tools=[LOOK]):
        learned += tokenizer.decode(list(compress(row.segment.token_ids, row.segment.sampled)))
    assert learned.count("A plum.") == learned.count("An apple and a pear.") == 1 and learned.count("look") == 3
    assert "a plum" not in learned and "Search well." not in learned


def test_turns_are_fitted_to_what_a_template_takes() -> None:
    """Gemma has no system role and wants turns in turn; Llama one call at once."""
    gemma, llama = ChatTemplate(tokenizer_of("gemma")), ChatTemplate(tokenizer_of("llama3_1"))
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert gemma.fitted(talk) == [{"role": "user", "content": "S\n\na\n\nb"}]
    assert gemma.fitted([{"role": "assistant", "content": "Hello."}])[0]["role"] == "user"
    assert llama.fitted(talk) == talk
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "xy"]
    results = [{"role": "tool", "tool_call_id": name, "name": name, "content": name} for name in "xy"]
    turns = llama.fitted([talk[1], {"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert [turn.get("tool_call_id") or [call["id"] for call in turn.get("tool_calls", [])] for turn in turns] == [
        [], ["x"], "x", ["y"], "y",
    ]  # fmt: skip


def test_a_template_that_renders_nothing_is_refused() -> None:
    tokenizer = create_tokenizer(["a"], vocab_size=300)
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ConfigurationError, match="renders no user message: set tokenizer.chat_template"):
        ChatTemplate(tokenizer)
    refuses = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{refuses}{{{{ m.content }}}}{{% endfor %}}"
    with pytest.raises(ConfigurationError, match="refuses a conversation of user, tool: no tools"):
        render(tokenizer, Request([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]))
