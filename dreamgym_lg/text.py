"""Text as models and files bring it: without halves of characters, without thoughts."""

import re
from typing import Any

_THOUGHT = re.compile(r"<(think|thinking|thought)>.*?</\1>|\[THINK\].*?\[/THINK\]", re.DOTALL)
_OPENED_BEFORE = re.compile(r"\A.*?(?:</(?:think|thinking|thought)>|\[/THINK\])", re.DOTALL)
_CUT_OFF = re.compile(r"\A\s*(?:<(?:think|thinking|thought)>|\[THINK\]).*", re.DOTALL)
OPENINGS = ("<think>", "<thinking>", "<thought>", "[THINK]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def split_thought(text: str) -> tuple[str, str]:
    """The thought and the answer in a reply; the thought is "" without one.

    A thought stands in `<think>...</think>`. Where only its end is there, the prompt's template began it; where a reply begins
    with one that has no end, it was cut off there and the answer is "".
    """
    thoughts, answer = list[str](), text
    for pattern in (_THOUGHT, _OPENED_BEFORE, _CUT_OFF):
        thoughts += [match[0] for match in pattern.finditer(answer)]
        answer = pattern.sub("", answer)
    return ("".join(thoughts), answer.strip()) if thoughts else ("", text)


def opened_thought(prompt: str) -> str:
    """The opening of a thought that a prompt ends with; else "". The reply goes on in that thought."""
    return next((opening for opening in OPENINGS if prompt.rstrip().endswith(opening)), "")


def split_reply(text: str, prompt: str, *, unfinished: bool) -> tuple[str, str]:
    """As `split_thought`, for a reply to a prompt that may have opened the thought.

    Args: `unfinished`, True for a reply that goes on or was cut off; one that ends without ending a thought is all answer.
    """
    opened = opened_thought(prompt) if unfinished or _OPENED_BEFORE.match(text) else ""
    return split_thought(opened + text)


def clean(value: Any) -> Any:
    """Text or JSON with `?` for lone surrogates. They are half an emoji of a cut-off answer, which UTF-8 cannot hold."""
    if isinstance(value, str):
        if value.isascii() or not _SURROGATE.search(value):
            return value
        joined = value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # two halves are one character
        return joined.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {clean(key): clean(each) for key, each in value.items()}
    return [clean(each) for each in value] if isinstance(value, list | tuple) else value


def printable(text: str) -> str:
    """The text without control characters but those of lines. It may be shown in a terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else " " for each in text)
