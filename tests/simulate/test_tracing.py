"""What LangSmith's server is sent of episodes, and what other tracers see: dreams are marked, and sent only where asked for."""

import json
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hotel import PAYLOAD, TASK, Hotel, Model, build
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda
from langsmith import Client, run_trees, tracing_context
from langsmith.utils import get_env_var
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent, simulated
from dreamgym_lg.simulate.wall.agent import WalledAgent, Workers
from dreamgym_lg.simulate.wall.wall import missing_for_wall
from dreamgym_lg.types import Trajectory

AGENT = Path(__file__).with_name("walled_agent.py")


class LangSmith(ThreadingHTTPServer):
    """Receives runs as LangSmith does, in its batch form."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.runs = dict[str, dict[str, Any]]()
        self.url = f"http://127.0.0.1:{self.server_port}"
        Thread(target=self.serve_forever, daemon=True).start()

    def received(self) -> list[dict[str, Any]]:
        run_trees.get_cached_client().flush()
        return list(self.runs.values())


class Receiver(BaseHTTPRequestHandler):
    server: LangSmith

    def do_GET(self) -> None:
        scale = {"scale_up_qsize_trigger": 1000, "scale_up_nthreads_limit": 1, "scale_down_nempty_trigger": 4}
        batch = {"use_multipart_endpoint": False, "size_limit": 100, "size_limit_bytes": 20_000_000, **scale}
        self.reply({"version": "0.9", "batch_ingest_config": batch})

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for run in [*sent.get("post", ()), *sent.get("patch", ())]:
            self.server.runs.setdefault(run["id"], {}).update(run)
        self.reply({})

    def reply(self, body: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def langsmith(monkeypatch: pytest.MonkeyPatch) -> Iterator[LangSmith]:
    """A server, and the environment of a production that is traced there."""
    server = LangSmith()
    for name, value in {"TRACING": "true", "ENDPOINT": server.url, "API_KEY": "ls-none", "PROJECT": "production"}.items():
        monkeypatch.setenv(f"LANGSMITH_{name}", value)
    get_env_var.cache_clear()
    monkeypatch.setattr(run_trees, "_CLIENT", None)
    yield server
    if run_trees._CLIENT is not None:
        run_trees._CLIENT.cleanup()
    get_env_var.cache_clear()
    server.shutdown()
    server.server_close()


def check_marked(runs: Sequence[dict[str, Any]], kind: str) -> None:
    assert runs
    for run in runs:
        assert f"dreamgym: {kind}" in run["tags"], run["name"]
        metadata = run["extra"]["metadata"]
        assert metadata["dreamgym"] == kind and metadata["dreamgym_run"] == "r", run["name"]
        assert (metadata["dreamgym_task"], metadata["dreamgym_episode"]) == (TASK.id, f"0/{TASK.id}/0")


async def play(agent: Any, *, real: bool = False) -> Trajectory:
    create = None if real else Hotel
    (episode,) = await rollout(agent, [TASK], create, source="real" if real else "synthetic", run="r")
    assert episode.error is None, episode.error
    return episode


def agent(**options: Any) -> SimulatedAgent:
    return SimulatedAgent(build("production", []), Model(label="policy"), **options)


async def test_production_s_tracing_is_sent_no_dream(langsmith: LangSmith) -> None:
    await play(agent())
    assert langsmith.received() == []

    async def training(_: None) -> None:  # as the training graph's node is, which is traced itself
        await play(agent())

    await RunnableLambda(training).ainvoke(None)
    assert [run["name"] for run in langsmith.received()] == ["training"]


async def test_asked_for_every_run_of_a_dream_is_marked(langsmith: LangSmith) -> None:
    with tracing_context(enabled=True, project_name="dreams", tags=["mine"]):
        episode = await play(agent())
    runs = langsmith.received()
    check_marked(runs, "dream")
    assert {run["session_name"] for run in runs} == {"dreams"} and all("mine" in run["tags"] for run in runs)
    assert {run["run_type"] for run in runs} >= {"chain", "llm", "tool"} and not episode.acts
    assert len({run["trace_id"] for run in runs}) == 1


async def test_a_real_episode_is_traced_as_ever_and_marked(langsmith: LangSmith) -> None:
    await play(agent(real=True, verify=lambda task, state: 1.0), real=True)
    check_marked(langsmith.received(), "real")


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")
async def test_behind_the_wall_the_policy_s_calls_are_one_marked_trace(langsmith: LangSmith) -> None:
    workers = Workers(f"{AGENT}:agent", count=1)
    try:
        unasked = await play(WalledAgent(workers, Model(label="policy")))
        assert len(unasked.steps) > 1 and langsmith.received() == []
        with tracing_context(enabled=True):
            await play(WalledAgent(workers, Model(label="policy")))
    finally:
        workers.close()
    check_marked(runs := langsmith.received(), "dream")
    (root,) = [run for run in runs if run.get("parent_run_id") is None]
    assert root["name"] == "dreamed episode" and root["inputs"] == {"task": TASK.instruction} and root["end_time"]
    assert {run["run_type"] for run in runs if run is not root} == {"llm"}


async def test_spans_of_opentelemetry_hold_the_mark(langsmith: LangSmith) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    client = Client(tracing_mode="otel", otel_tracer_provider=provider)
    with tracing_context(enabled=True, client=client):
        await play(agent())
    client.flush()
    spans = exporter.get_finished_spans()
    assert len(spans) > 4 and langsmith.received() == []
    for span in spans:
        assert "dreamgym: dream" in span.attributes["langsmith.span.tags"]
        assert span.attributes["langsmith.metadata.dreamgym_task"] == TASK.id
    client.cleanup()


class Tracer(BaseCallbackHandler):
    """Another tracer than LangSmith's, hung into the graph."""

    def __init__(self) -> None:
        self.tags = list[list[str]]()

    def on_chain_start(self, *_: Any, tags: Any = None, **__: Any) -> None:
        self.tags.append(tags)

    def on_chat_model_start(self, *_: Any, tags: Any = None, **__: Any) -> None:
        self.tags.append(tags)

    def on_tool_start(self, *_: Any, tags: Any = None, **__: Any) -> None:
        self.tags.append(tags)


def test_any_tracer_sees_the_mark() -> None:
    tracer = Tracer()
    graph = build("production", []).with_config(callbacks=[tracer], tags=["users"])
    with simulated(graph, policy=Model(label="policy"), environment=Hotel(), task=TASK) as episode:
        graph.invoke(PAYLOAD, {"tags": ["call"]})
    assert episode.steps and len(tracer.tags) > 4
    assert all("dreamgym: dream" in tags for tags in tracer.tags)
    before = len(tracer.tags)
    graph.invoke(PAYLOAD)
    assert len(tracer.tags) > before and not any("dreamgym: dream" in tags for tags in tracer.tags[before:])
