"""A model of Qwen2.5-7B's shape on one GPU (`pytest -m gpu`), and a tiny one on the CPU, so that the code stays runnable."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft", reason="needs peft (extra train)")

BENCHMARK = Path(__file__).parent / "benchmarks" / "bench_gpu.py"


@pytest.fixture(name="bench", scope="module")
def _bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_gpu", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_measurement_runs_on_a_cpu(bench: Any) -> None:
    shape = bench.SHAPES["tiny"]
    found = bench.measure(shape, torch.device("cpu"), dtype=torch.float32)
    assert shape.episodes * shape.turns <= found.rollout_tokens <= shape.episodes * shape.turns * shape.reply  # or an end
    assert found.update_tokens > found.rollout_tokens and 0 < found.share_outside_passes < 1
    assert found.measured_update is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_engine_on_a_gpu_says_what_the_model_does(bench: Any, dtype: Any) -> None:
    """Replies are within bfloat16's rounding of a plain pass, before and after the weights have changed."""
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    shape, device = bench.SHAPES["tiny"], torch.device("cuda")
    model, tokenizer = bench.create(shape, device, dtype)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=shape.reply)
    for _ in range(2):
        for segment in (each for episode in bench.asyncio.run(bench.play_all(policy, shape)) for each in episode.segments):
            ids = torch.tensor([segment.token_ids], device=device)
            with torch.no_grad():
                logprobs = torch.log_softmax(model.eval()(ids).logits[0, :-1].float(), dim=-1)
            truth = logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu()
            sampled = torch.tensor(segment.sampled[1:]).bool()
            assert (truth - torch.tensor(segment.logprobs[1:]))[sampled].abs().mean() < 0.02
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        policy.weights_changed()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", ["half", "seven"])
def test_a_rollout_and_an_update_fit_on_one_gpu(bench: Any, shape: str, record_property: Any) -> None:
    """In 80 GB; what it measured is printed (`-s`) and in the report."""
    found = bench.measure(bench.SHAPES[shape], torch.device("cuda"), dtype=torch.bfloat16)
    print(found)
    record_property("figures", str(found))
    assert max(found.measured_update, found.measured_rollout) < 80e9
