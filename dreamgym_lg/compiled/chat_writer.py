"""A chat model writes a world's module from examples, and repairs it."""

import json
import re
from collections.abc import Sequence

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage

from dreamgym_lg.actions import tool_line
from dreamgym_lg.compiled.recordings import Recordings, Trace
from dreamgym_lg.hosted import APART, load_chat_model
from dreamgym_lg.token_recorder import unrecorded

MAX_EXAMPLES = 12
"""Recorded episodes in a prompt, for each writing tool."""
MAX_ANSWER = 1500
"""Characters of an answer in a prompt."""
MAX_FAILURES = 12

PROMPT = """You write a small Python module that answers tool calls exactly as a recorded backend does.

A reading tool returns a stored document: `state.read("get_order", order_id="K1")` gives what the call
get_order(order_id="K1") returns now, as parsed JSON or text, and raises Unknown where nothing is stored. These functions
exist already.

Write one function for each tool that writes, `def NAME(state, **args)`. It returns the answer: an object or list (written
as JSON afterwards), or a text, byte for byte as recorded, error texts included. Where the call changes what a reading tool
returns, call `state.write("get_order", new_document, order_id="K1")` for each such document. Where you cannot know, raise
Unknown, or call `state.forget(value)` to make every document that names `value` unknown. Never guess: a wrong answer is
worse than Unknown.

Available: Unknown, state, and Python's standard library without files, network and processes. Answer with one Python code
block."""


class ChatWriter:
    """Writes the functions of a world's writing tools.

    Args: `model`, a chat model or its name.
    """

    def __init__(self, model: BaseChatModel | str) -> None:
        self.model = load_chat_model(model) if isinstance(model, str) else model

    def write(self, recordings: Recordings, text: str, failures: Sequence[str]) -> str:
        """The functions as Python code. Args: `text` and `failures`, of the module to repair; empty for a first one."""
        writes = sorted({tool for trace in recordings.traces for tool, _, _ in trace.calls if tool in recordings.writes})
        parts = [
            "Tools:\n" + "\n".join(map(tool_line, recordings.tools)),
            "Tools that write: " + ", ".join(writes),
            "Recorded calls with their answers:\n\n" + "\n\n".join(_examples(recordings, writes)),
        ]
        if failures:
            report = "\n".join(f"* {failure}" for failure in failures[:MAX_FAILURES])
            parts.append(f"Your module:\n\n```python\n{text}\n```\n\nIt does not replay:\n{report}\n\nWrite it anew, repaired.")
        with unrecorded():
            reply = self.model.invoke([SystemMessage(PROMPT), HumanMessage("\n\n".join(parts))], APART)
        blocks = re.findall(r"```(?:python)?\n(.*?)```", reply.text, re.DOTALL)
        return str(blocks[-1] if blocks else reply.text).strip()


def _examples(recordings: Recordings, writes: Sequence[str]) -> list[str]:
    """Episodes in which the tools write, the same number of each."""
    chosen: dict[int, Trace] = {}
    for tool in writes:
        using = [number for number, trace in enumerate(recordings.traces) if any(call[0] == tool for call in trace.calls)]
        answers: dict[str, int] = {}
        for number in using:  # different answers first
            answers.setdefault(next(call[2] for call in recordings.traces[number].calls if call[0] == tool)[:40], number)
        for number in [*answers.values(), *using][:MAX_EXAMPLES]:
            chosen[number] = recordings.traces[number]
    return [
        "\n".join(f"{tool} {json.dumps(dict(arguments))} -> {answer[:MAX_ANSWER]}" for tool, arguments, answer in trace.calls)
        for trace in chosen.values()
    ]
