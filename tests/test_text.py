"""Thoughts and halves of characters."""

import pytest

from dreamgym_lg.text import clean, split_thought


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is shipped.", "It is shipped."),
        ("<think>\nIs it?\n</think>\n\nIt is shipped.", "It is shipped."),
        ("Is it?\n</think>\n\nIt is shipped.", "It is shipped."),
        ("<think>a</think>It is <think>b</think>shipped.", "It is shipped."),
        ("<think>a <think> b</think> done", "done"),
        ("<thinking>a</thinking> done", "done"),
        ("[THINK]a[/THINK]done", "done"),
        ("<think>It was cut off", ""),
        ("<think></think>", ""),
        ("Write <think> before it.", "Write <think> before it."),
        ("  kept as it is ", "  kept as it is "),
    ],
)
def test_a_thought_is_no_part_of_the_answer(text: str, answer: str) -> None:
    thought, left = split_thought(text)
    assert left == answer and bool(thought) == (text != answer)


def test_lone_surrogates_become_question_marks_anywhere() -> None:
    value = {"half \ud83d": ["\ude00", ("a\ud83d\ude00b", 3)], "whole": "😀 \ufffd é"}
    assert clean(value) == {"half ?": ["?", ["a😀b", 3]], "whole": "😀 \ufffd é"}
    text = "the same object"
    assert clean(text) is text
