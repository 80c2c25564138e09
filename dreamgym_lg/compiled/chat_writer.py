"""Lets a chat model write a world's module from examples, and repair it."""

import json
import re
from collections.abc import Sequence
from hashlib import sha256

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.messages.utils import count_tokens_approximately

from dreamgym_lg.actions import tool_line
from dreamgym_lg.compiled.recordings import Recordings, Trace
from dreamgym_lg.compiled.runtime import Refusal
from dreamgym_lg.hosted import Hosted, load_chat_model, name_of
from dreamgym_lg.token_recorder import unrecorded

MAX_EXAMPLES = 12
"""Recorded episodes in a prompt for each writing tool, at most."""
MAX_ANSWER = 1500
"""Characters of a recorded answer in a prompt, at most."""
MAX_FAILURES = 12
TOKENS_PER_FUNCTION = 400
"""Estimated tokens of a tool's function."""

PROMPT = """You write a small Python module that answers tool calls exactly as a recorded backend does.

A reading tool returns a stored document: `state.read("get_order", order_id="K1")` gives what the call
get_order(order_id="K1") returns now, as parsed JSON or text, and raises Unknown where nothing is stored. These functions
exist already.

Write one function for each tool that writes, `def NAME(state, /, **args)`. It returns the answer: an object or list (written
as JSON afterwards), or a text, byte for byte as recorded, or `Refusal(text)` for a call that ends in an error. Pass over
errors that are not the backend's own, such as a person's rejection of a call or a limit of calls. Where the call changes
what a reading tool returns, call `state.write("get_order", new_document, order_id="K1")` for each such document. Where you
cannot know, raise Unknown, or call `state.forget(value)` to make every document that names `value` unknown. Never guess: a
wrong answer is worse than Unknown.

Available: Unknown, Refusal, state, and Python's standard library without files, network and processes. Answer with one
Python code block."""


class ChatWriter:
    """Repairs and writes the functions of a world's writing tools.

    Args: `model`, a chat model or its name; `hosted`, where its answers are kept.
    """

    def __init__(self, model: BaseChatModel | str, hosted: Hosted) -> None:
        self.model = load_chat_model(model) if isinstance(model, str) else model
        self.hosted = hosted

    def estimate(self, recordings: Recordings, rounds: int, text: str, failures: Sequence[str]) -> str:
        """A sentence with the calls, tokens and price of all rounds, at most. Other arguments are as of `write`."""
        read = rounds * count_tokens_approximately(self._prompt(recordings, text, failures))
        written = rounds * TOKENS_PER_FUNCTION * len(recordings.called_writes)
        read += (rounds - 1) * written // max(rounds, 1)  # a reply may be longer than the module before it
        return (
            f"estimate: at most {rounds} calls of {name_of(self.model)}, about {read:,} tokens read and {written:,} written, "
            f"{self.hosted.price(read, written)}; {self.hosted.path} keeps the answers"
        )

    def write(self, recordings: Recordings, text: str, failures: Sequence[str]) -> str:
        """The functions as Python code. Args: `text` of the module to repair, and its `failures`."""
        messages = self._prompt(recordings, text, failures)
        key = sha256(json.dumps([name_of(self.model), *(each.text for each in messages)]).encode()).hexdigest()
        if (reply := self.hosted.recall(key)) is None:
            with unrecorded():
                reply = self.hosted.ask(self.model, messages).text
            self.hosted.remember(key, reply)
        blocks = re.findall(r"```(?:python)?\n(.*?)```", reply, re.DOTALL)
        return str(blocks[-1] if blocks else reply).strip()

    def _prompt(self, recordings: Recordings, text: str, failures: Sequence[str]) -> list[BaseMessage]:
        writes = recordings.called_writes
        parts = [
            "Tools:\n" + "\n".join(map(tool_line, recordings.tools)),
            "Tools that write: " + ", ".join(writes),
            "Recorded calls with their answers:\n\n" + "\n\n".join(_examples(recordings, writes)),
        ]
        report = "\n".join(f"* {failure}" for failure in failures[:MAX_FAILURES])
        parts.append(
            f"The module so far:\n\n```python\n{text}\n```\n\nIt does not replay:\n{report}\n\n"
            "Write the functions of all tools that write, repaired."
        )
        return [SystemMessage(PROMPT), HumanMessage("\n\n".join(parts))]


def _examples(recordings: Recordings, writes: Sequence[str]) -> list[str]:
    """Up to `MAX_EXAMPLES` episodes with each writing tool, as text."""
    chosen: dict[int, Trace] = {}
    for tool in writes:
        calling = [number for number, trace in enumerate(recordings.traces) if any(call[0] == tool for call in trace.calls)]
        by_answer: dict[str, int] = {}
        for number in calling:  # different answers first
            answers = (_shown(call[2]) for call in recordings.traces[number].calls if call[0] == tool)
            by_answer.setdefault(next(answers)[:40], number)
        for number in [*by_answer.values(), *calling][:MAX_EXAMPLES]:
            chosen[number] = recordings.traces[number]
    return [
        "\n".join(f"{tool} {json.dumps(dict(own))} -> {_shown(answer)[:MAX_ANSWER]}" for tool, own, answer in trace.calls)
        for trace in chosen.values()
    ]


def _shown(answer: str | Refusal) -> str:
    return answer if isinstance(answer, str) else repr(answer)
