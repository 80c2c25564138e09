"""What is lost between a vLLM server and episodes: a server of fixed speed, many tool-calling LangGraph episodes at once.

The server is a process of its own that computes nothing and takes the time that one H200 would, about, for a 7B model (assumed,
not measured): what is new in prompts passes at 33,000 tokens a second, one call after the other (15 GFLOP a token at half of
990 TFLOP/s; the rest is in its prefix cache), and replies come at 50 tokens a second each for 256 at once, 20 for 1,024.
Compared are a bare aiohttp client that sends the same prompts, and episodes as training plays them: a LangGraph agent with
tools, `rollout`, SQLite.

`idle` is the share of the wall time, from the first to the last moment of `rollout`, in which the server has no request.
`outside` is the share of the whole time, over all episodes, in which an episode waits for no reply. Part of it is no work of
anyone's: `over`, when the episode has ended and others still play. The server reads their prompts one after the other, so that
the bare client's do not end together either.

Run: python tests/benchmarks/bench_served.py [results.json]
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict
from urllib.request import urlopen

import aiohttp
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.vllm import ServedEngine
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Task

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny"))
from tiny_models import create_tokenizer  # noqa: E402

CALLS = 8
"""Of the policy, in each episode: seven of a tool, and the answer."""
REPLY_TOKENS = 128
PROMPT_TOKENS_PER_SECOND = 33_000


class Load(NamedTuple):
    episodes: int
    tokens_per_second: float
    """Of each of so many replies at once."""


LOADS = (Load(256, 50.0), Load(1024, 20.0))

INSTRUCTION = "You help at the desk of a shop. Look orders up and answer what is asked. " * 6
OBSERVATION = "Order 1234 of a customer has shipped on the second of May and holds an apple, a pear and a plum. " * 8

SERVER = r"""
import asyncio, json, sys, time
speed, rate, mark, call, answer, calls = json.loads(sys.argv[1])
busy_until = served = busy = since = 0.0
under_way = 0

def seconds(prompt):
    global busy_until
    now = time.monotonic()
    before = [i for i, token in enumerate(prompt) if token == mark][:-1]
    new = len(prompt) - (before[-1] + len(call) if before else 0)
    busy_until = max(now, busy_until) + new / speed
    return busy_until - now + len(call) / rate

async def serve(reader, writer):
    global served, busy, since, under_way
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = [int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")]
            raw = await reader.readexactly(length[0]) if length else b""
            if raw:
                body = json.loads(raw)
                begun = time.monotonic()
                under_way += 1
                since = begun if under_way == 1 else since
                ids = answer if body["prompt"].count(mark) >= calls else call
                await asyncio.sleep(seconds(body["prompt"]))
                ended = time.monotonic()
                served += ended - begun
                under_way -= 1
                busy += 0.0 if under_way else ended - since
                logprobs = {"token_logprobs": [-0.5] * len(ids)}
                choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "logprobs": logprobs, "finish_reason": "stop"}
                said = {"choices": [choice]}
            elif "/seconds" in head:
                said, served, busy = [served, busy], 0.0, 0.0
            else:
                said = {"data": [{"id": "policy", "max_model_len": 32768}]}
            out = json.dumps(said).encode()
            head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(out)
            writer.write(head.encode() + out)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@tool
async def get_order(order_id: str, note: str = "") -> str:
    """Look up an order."""
    return OBSERVATION


class State(TypedDict, total=False):
    task: Task
    messages: Annotated[list[BaseMessage], add_messages]
    success: bool


def create_graph(policy: LocalChatModel) -> Any:
    bound = policy.bind_tools([get_order])

    async def act(state: State) -> State:
        given = state.get("messages") or [SystemMessage(INSTRUCTION), HumanMessage(state["task"].instruction)]
        reply = await bound.ainvoke(given)
        return {"messages": [reply] if state.get("messages") else [*given, reply], "success": True}

    def after(state: State) -> str:
        last = state["messages"][-1]
        return "tools" if isinstance(last, AIMessage) and last.tool_calls else END

    builder = StateGraph(State)
    builder.add_node("policy", act)
    builder.add_node("tools", ToolNode([get_order]))
    builder.add_edge(START, "policy")
    builder.add_conditional_edges("policy", after, ["tools", END])
    builder.add_edge("tools", "policy")
    return builder.compile()


def tasks(load: Load) -> list[Task]:
    return [Task(id=f"t{i}", instruction=f"Where is order {i}?", environment="bench") for i in range(load.episodes // 8)]


async def episodes(policy: LocalChatModel, load: Load, buffer: ReplayBuffer, ends: list[float]) -> Any:
    return await rollout(
        create_graph(policy),
        tasks(load),
        source="real",
        num_generations=8,
        run=f"bench {load.episodes}",
        concurrency=load.episodes,
        replay_buffer=buffer,
        on_episode=lambda _: ends.append(time.perf_counter()),
    )


async def bare(url: str, prompts: list[list[int]], load: Load, ends: list[float]) -> None:
    async def one(session: aiohttp.ClientSession) -> None:
        for prompt in prompts:
            async with session.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 512}) as response:
                json.loads(await response.read())
        ends.append(time.perf_counter())

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session) for _ in range(load.episodes)))


def timed(work: Any, ends: list[float]) -> tuple[float, float, float, Any]:
    """Seconds of the clock, of this process's CPU, the share of the first that an episode is over, and the result."""
    start, cpu = time.perf_counter(), time.process_time()
    result = asyncio.run(work)
    wall = time.perf_counter() - start
    return wall, time.process_time() - cpu, 1 - (statistics.mean(ends) - start) / wall, result


def measure(load: Load, tokenizer: Any, folder: Path) -> dict[str, float]:
    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    wordy = ids(" I look the order up" * REPLY_TOKENS)
    called = ids('<tool_call>\n{"name": "get_order", "arguments": {"order_id": "1234"}}\n</tool_call>') + [
        tokenizer.eos_token_id
    ]
    said = [[*wordy[: REPLY_TOKENS - len(end)], *end] for end in (called, [tokenizer.eos_token_id])]
    mark = tokenizer.convert_tokens_to_ids("<|assistant|>")
    given = json.dumps([PROMPT_TOKENS_PER_SECOND, load.tokens_per_second, mark, *said, CALLS])
    server = subprocess.Popen([sys.executable, "-c", SERVER, given], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        policy = LocalChatModel(engine=ServedEngine(url, tokenizer), tokenizer=tokenizer, max_new_tokens=512)
        ends, bare_ends = list[float](), list[float]()
        with ReplayBuffer(folder / f"{load.episodes}.db") as buffer:
            wall, cpu, over, played = timed(episodes(policy, load, buffer, ends), ends)
        served, busy = seconds_served(url)
        segments = [segment for episode in played for segment in episode.segments]
        assert all(episode.error is None for episode in played), next(e.error for e in played if e.error)
        assert len(segments) == load.episodes and {s.trainable for s in segments} == {CALLS * REPLY_TOKENS}
        begins = [i for i, sampled in enumerate(segments[0].sampled) if sampled and not segments[0].sampled[i - 1]]
        prompts = [list(segments[0].token_ids[:begin]) for begin in begins]
        alone, alone_cpu, alone_over, _ = timed(bare(url, prompts, load, bare_ends), bare_ends)
        alone_served, alone_busy = seconds_served(url)
    finally:
        server.kill()
        server.wait()
    return {
        "episodes": load.episodes,
        "tokens": len(segments[0].token_ids),
        "seconds_bare": alone,
        "seconds": wall,
        "of_bare": alone / wall,
        "idle": 1 - busy / wall,
        "idle_bare": 1 - alone_busy / alone,
        "outside": 1 - served / (load.episodes * wall),
        "outside_bare": 1 - alone_served / (load.episodes * alone),
        "over": over,
        "over_bare": alone_over,
        "cpu_per_call": cpu / (CALLS * load.episodes),
        "cpu_per_call_bare": alone_cpu / (CALLS * load.episodes),
    }


def seconds_served(url: str) -> tuple[float, float]:
    """How long calls have been with the server since it was last asked: added up over the episodes, and at least one."""
    with urlopen(f"{url}/seconds") as response:
        served, busy = json.loads(response.read())
        return served, busy


COLUMNS = ("bare client", "episodes", "of bare", "idle", "bare", "outside", "bare", "of it over", "bare", "CPU a call", "bare")
SHARES = ("of_bare", "idle", "idle_bare", "outside", "outside_bare", "over", "over_bare")


def main() -> None:
    texts = [INSTRUCTION, OBSERVATION, '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "1234"}}\n</tool_call>']
    tokenizer = create_tokenizer([*texts, " I look the order up"] * 9, vocab_size=800)
    results = []
    print(f"{CALLS} calls of {REPLY_TOKENS} tokens an episode")
    print(f"{'at once':>8}{'tokens':>8}" + "".join(f"{name:>13}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for load in LOADS:
            row = measure(load, tokenizer, Path(folder))
            print(
                f"{row['episodes']:>8}{row['tokens']:>8}{row['seconds_bare']:>11.1f} s{row['seconds']:>11.1f} s"
                + "".join(f"{row[share]:>13.1%}" for share in SHARES)
                + f"{1000 * row['cpu_per_call']:>10.2f} ms{1000 * row['cpu_per_call_bare']:>10.2f} ms",
                flush=True,
            )
            results.append(row)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
