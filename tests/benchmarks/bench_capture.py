"""What merging policy calls by exact token prefix saves: training tokens of an episode against one row per call.

A real `LocalChatModel` (untrained, so its replies are noise of a fixed length) plays an append-only conversation; the same
with a window that forgets. Counts, no times.

Run: python tests/benchmarks/bench_capture.py
"""

import sys
from pathlib import Path

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.token_recorder import TokenRecorder

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny"))
from tiny_models import create_model, create_tokenizer  # noqa: E402

INSTRUCTION = "Your task is to read the book and to take the things it names, in their order, one after the other."
OBSERVATION = "You take it. It is in your hands now. On the table there are an apple, a pear and a plum."


def play(policy: LocalChatModel, calls: int, window: int) -> TokenRecorder:
    """An episode whose policy sees the last `window` messages, and the instruction."""
    messages: list[BaseMessage] = [HumanMessage(OBSERVATION)]
    with TokenRecorder(seed=1) as recorder:
        for _ in range(calls):
            reply = policy.invoke([SystemMessage(INSTRUCTION), *messages[-window:]])
            messages += [reply, HumanMessage(OBSERVATION)]
    return recorder


def main() -> None:
    tokenizer = create_tokenizer([INSTRUCTION, OBSERVATION] * 9, vocab_size=400)
    policy = LocalChatModel(model=create_model(tokenizer, hidden_size=32, layers=1), tokenizer=tokenizer, max_new_tokens=8)
    print(f"{'calls':>5}{'context':>14}{'segments':>10}{'tokens':>8}{'one row per call':>18}{'saved':>8}")
    for calls in (4, 10, 20):
        for name, window in (("grows", 10_000), ("window of 5", 5)):
            recorder = play(policy, calls, window)
            segments = recorder.segments()
            merged = sum(len(segment.token_ids) for segment in segments)
            single = sum(len(call.prompt_ids) + len(call.sampled_ids) for call in recorder.calls)
            print(f"{calls:>5}{name:>14}{len(segments):>10}{merged:>8}{single:>18}{1 - merged / single:>8.0%}")


if __name__ == "__main__":
    main()
