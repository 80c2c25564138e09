"""A real OpenAI-compatible server, `transformers serve`, plays the world over HTTP; also where 30 % of the calls go wrong."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from chat_server import shares
from proxy import PROXY_FAULTS, FaultProxy

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Step, Task, Trajectory

pytestmark = pytest.mark.slow
TASKS, GENERATIONS = 8, 2
TIMEOUT = 2.0
"""Seconds until a call is given up: more than a call of this model takes, less than a slow one."""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close": "<|end|>", "content": "text"}},
}
"""How the server reads the model's answers."""

HOUSES = [
    Task(id=f"house {n}", instruction=f"leave house {n}", environment="house", observation="A door.") for n in range(TASKS)
]


def left(task: Task) -> Trajectory:
    """How the world of every house goes: what the served model is trained on."""
    opened = Step(observation="A door.", action="open door", next_observation="It is open.")
    out = Step(observation="It is open.", action="go north", next_observation="You are out.", reward=1.0, terminated=True)
    return Trajectory(task=task, steps=[opened, out], success=True)


class Served(NamedTuple):
    """A running server, and the names of its models."""

    url: str
    trained: str
    untrained: str


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same tiny model, trained until it knows the houses by heart, and untrained."""
    from tiny_models import create_model, create_tokenizer

    from dreamgym_lg.integrations.trl.rows import tokenize
    from dreamgym_lg.integrations.trl.sft import fine_tune, save_model

    roles, model = {"human": "user", "ai": "assistant"}, Model(None, instructions="")
    conversations = [
        [{"role": roles.get(m.type, m.type), "content": m.text} for m in model.training_conversation(left(task))]
        for task in HOUSES
    ]
    tokenizer = create_tokenizer([m["content"] for each in conversations for m in each], vocab_size=512)
    tokenizer.response_template = RESPONSE_TEMPLATE
    folder = tmp_path_factory.mktemp("served")
    save_model(create_model(tokenizer, hidden_size=64, layers=2), tokenizer, folder / "untrained")
    rows = tokenize(tokenizer, conversations)
    loss = fine_tune(folder / "untrained", folder / "trained", rows, steps=80, batch_size=8, learning_rate=1e-2)
    assert loss < 0.01, "the model has not learned its few answers, so nothing below could pass"
    return folder / "trained", folder / "untrained"


@pytest.fixture(scope="module")
def served(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "serve.log"
    command = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
        "--log-level",
        "error",
    ]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield Served(f"http://127.0.0.1:{port}/v1", *map(str, models))
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 80
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended: {log.read_text()[-2000:]}"
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not come up: {log.read_text()[-2000:]}")


def model_of(url: str, name: str, **options: Any) -> Model:
    from langchain_openai import ChatOpenAI

    limits = {"timeout": TIMEOUT, "max_retries": options.pop("max_retries", 15)}
    chat = ChatOpenAI(model=name, base_url=url, api_key="none", temperature=0, max_tokens=60, **limits)  # type: ignore[arg-type,call-arg]
    return Model(chat, instructions="", hosted=Hosted(concurrency=4), version="served", **options)


async def play(policy: Any, model: Model, file: Path) -> tuple[list[Trajectory], float]:
    """What is stored, every episode once, and the seconds that it took."""
    started = time.perf_counter()
    with ReplayBuffer(file) as buffer:
        played = await rollout(
            create_episode_graph(policy, max_steps=4).compile(),
            HOUSES,
            Dream([model]).create_environment,
            num_generations=GENERATIONS,
            source="synthetic",
            run="train",
            replay_buffer=buffer,
            experience_version=model.version,
        )
        seconds = time.perf_counter() - started
        stored = list(buffer.trajectories(run="train"))
    wanted = sorted((task.id, index) for task in HOUSES for index in range(GENERATIONS))
    assert sorted((each.task.id, each.rollout_index) for each in stored) == wanted and len(played) == len(wanted)
    return stored, seconds


def check_all_left(stored: list[Trajectory]) -> None:
    wanted = [("open door", "It is open.", 0.0), ("go north", "You are out.", 1.0)]
    for each in stored:
        assert each.error is None and each.success
        assert [(step.action, step.next_observation, step.reward) for step in each.steps] == wanted


async def test_a_real_server_plays_the_world(served: Served, walker: Any, tmp_path: Path) -> None:
    model = model_of(served.url, served.trained)
    stored, _ = await play(walker, model, tmp_path / "replay.db")
    check_all_left(stored)
    usage = model.hosted.usage  # type: ignore[union-attr]
    assert usage.calls - usage.failed == 2 * TASKS, "a group that acts alike shares its answers"
    assert usage.input_tokens > usage.output_tokens > 5 * 2 * TASKS, "as the server counts them"


async def test_what_an_untrained_model_says_is_a_failure_with_its_cause(served: Served, walker: Any, tmp_path: Path) -> None:
    stored, _ = await play(walker, model_of(served.url, served.untrained), tmp_path / "replay.db")
    assert all(each.error and each.error.startswith("PredictionFailed: the experience model answered") for each in stored)


@pytest.mark.parametrize("faults", [*((fault,) for fault in PROXY_FAULTS), PROXY_FAULTS], ids=[*PROXY_FAULTS, "any"])
async def test_nothing_is_lost_or_doubled(served: Served, walker: Any, tmp_path: Path, faults: tuple[str, ...]) -> None:
    """With 30 % of the calls failing: throughput is printed beside that of the same proxy without faults (`pytest -s`)."""
    rates = []
    for share in (0.0, 0.3):
        proxy = FaultProxy(served.url, fault=shares(share, 5, faults), slow=TIMEOUT + 1).start()
        try:
            model = model_of(proxy.url, served.trained)
            stored, seconds = await play(walker, model, tmp_path / f"replay-{share}.db")
            if any(each.error for each in stored):  # an unreadable body, six times in a row: played again on resume
                stored, seconds = await play(walker, model, tmp_path / f"replay-{share}.db")
        finally:
            proxy.stop()
        check_all_left(stored)
        usage = model.hosted.usage  # type: ignore[union-attr]
        assert usage.calls - usage.failed == 2 * TASKS, "every prompt was answered once"
        struck = proxy.struck.total() - proxy.struck[""]
        assert len(proxy.requests) >= 2 * TASKS + struck and bool(struck) == bool(share), "there were faults"
        rates.append(f"{share:.0%} failing: {len(stored) / seconds:.1f} episodes/s, {usage.calls / seconds:.1f} calls/s")
    print(f"\n{'/'.join(faults)}: {'; '.join(rates)}")


async def test_without_retries_what_fails_is_recorded_with_its_cause(served: Served, walker: Any, tmp_path: Path) -> None:
    proxy = FaultProxy(served.url, fault=shares(0.3, 5, PROXY_FAULTS), slow=TIMEOUT + 1).start()
    try:
        model = model_of(proxy.url, served.trained, max_retries=0, retries=0)
        stored, _ = await play(walker, model, tmp_path / "replay.db")
    finally:
        proxy.stop()
    failed = [each for each in stored if each.error is not None]
    assert 0 < len(failed) < len(stored)
    assert all(each.error and each.error.startswith("ModelUnavailable: ") for each in failed)
    check_all_left([each for each in stored if each.error is None])
