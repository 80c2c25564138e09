"""What a hosted dream costs beside the network: 256 concurrent episodes against the bare `openai` client on the same calls.

A server in a process of its own answers every call after a fixed time. The dream plays through `rollout`, the episode graph,
`Hosted` with its file, and the replay buffer; the bare client then sends the very same prompts, an episode's one after the
other. The last row plays with 30 % of the calls failing at random, in every way that `chat_server` knows.

Run: python tests/benchmarks/bench_hosted.py [latency in seconds]
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

from dreamgym_lg.dream import Dream, Episode, Model
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Task, Trajectory

EPISODES = 256
STEPS = 8
SERVER = Path(__file__).parents[1] / "hosted" / "chat_server.py"


class Walker(BaseChatModel):
    """A policy that costs nothing."""

    @property
    def _llm_type(self) -> str:
        return "walker"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"look {len(messages)}"))])

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return self._generate(messages)


class Recording(Model):
    """Keeps the prompts of every task, for the bare client."""

    prompts: dict[str, list[Any]]

    def messages(self, episode: Episode) -> list[BaseMessage]:
        messages = super().messages(episode)
        self.prompts[episode.task.id].append(convert_to_openai_messages(messages))
        return messages


def houses(number: int, name: str) -> list[Task]:
    return [Task(id=f"{name} {n}", instruction="leave the house", environment="house", observation="A door.")
            for n in range(number)]  # fmt: skip


@contextmanager
def server(latency: float, faults: float) -> Iterator[str]:
    command = [sys.executable, str(SERVER), str(latency), str(faults)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def dream(model: Model, tasks: Sequence[Task], buffer: ReplayBuffer) -> list[Trajectory]:
    return await rollout(
        create_episode_graph(Walker(), max_steps=STEPS).compile(), tasks,
        Dream([model]).create_environment,
        source="synthetic", run="bench", replay_buffer=buffer, concurrency=EPISODES,
    )  # fmt: skip


async def bare(url: str, episodes: Sequence[Sequence[Any]]) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def episode(prompts: Sequence[Any]) -> None:
            for prompt in prompts:
                await client.chat.completions.create(model="door", messages=prompt, temperature=0)

        await asyncio.gather(*(episode(prompts) for prompts in episodes))


def dreamed(url: str, folder: Path, **options: Any) -> tuple[float, list[Trajectory], dict[str, list[Any]], Hosted]:
    chat = ChatOpenAI(model="door", base_url=url, api_key="none", temperature=0, **options)
    hosted = Hosted(folder / f"{len(list(folder.iterdir()))}.db", concurrency=EPISODES)
    model = Recording(chat, prompt_format="json", hosted=hosted, retries=4)
    with ReplayBuffer(folder / f"replay-{len(list(folder.iterdir()))}.db") as buffer:
        model.prompts = defaultdict(list)
        asyncio.run(dream(model, houses(8, "warm"), buffer))
        model.prompts.clear()
        start = time.perf_counter()
        played = asyncio.run(dream(model, houses(EPISODES, "house"), buffer))
    return time.perf_counter() - start, played, model.prompts, hosted


def main() -> None:
    latency, calls = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0, EPISODES * STEPS
    print(f"{EPISODES} concurrent episodes of {STEPS} steps, {latency:g} s a call; calls per second", flush=True)
    with tempfile.TemporaryDirectory() as name:
        with server(latency, 0.0) as url:
            seconds, played, prompts, _ = dreamed(url, Path(name))
            assert all(each.error is None and len(each.steps) == STEPS for each in played)
            assert sum(map(len, prompts.values())) == calls
            asyncio.run(bare(url, [each[:1] for each in list(prompts.values())[:8]]))
            start = time.perf_counter()
            asyncio.run(bare(url, list(prompts.values())))
            alone = time.perf_counter() - start
        print(f"| bare openai client | {calls / alone:.0f} |")
        print(f"| dream | {calls / seconds:.0f} ({alone / seconds:.0%} of the bare client) |", flush=True)
        with server(latency, 0.3) as url:
            seconds, played, _, hosted = dreamed(url, Path(name), max_retries=10, timeout=latency + 2)
        steps, failed = sum(len(each.steps) for each in played), sum(each.error is not None for each in played)
        lost = f"{hosted.usage.failed} of {hosted.usage.calls} calls without an answer"
        outcome = f"{len(played) - failed} episodes played, {failed} recorded as failed"
        print(f"| dream, 30 % of the calls failing | {steps / seconds:.0f}; {lost}; {outcome} |")


if __name__ == "__main__":
    main()
