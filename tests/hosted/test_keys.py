"""A key is a secret: it reaches no buffer, no checkpoint, no log, no exception and no other file, whatever a server echoes."""

import asyncio
import json
import logging
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import shares
from house import CANARY, houses
from langgraph.checkpoint.sqlite import SqliteSaver
from pydantic import SecretStr

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.dream.annotate import annotate
from dreamgym_lg.errors import ModelUnavailable
from dreamgym_lg.graphs.training import Training, create_training_graph
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.redaction import redact, secrets
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Trajectory

FAULTS = ("400", "401", "429", "500", "echo")
"""Each echoes the request's authorization, in an error or in the answer itself."""


class Learner:
    iteration, metrics = 0, dict[str, float]()

    def update(self, groups: Any) -> dict[str, float]:
        self.iteration += 1
        return {}


def bare(episode: Trajectory) -> list[Step]:
    return [replace(step, reasoning="") for step in episode.steps]


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, False], ids=["Hosted given", "Hosted by default"])
async def test_no_file_and_no_log_holds_the_key(
    serve: Any, chat_model: Any, walker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve(fault=shares(0.5, faults=FAULTS))
    model = Model(chat_model(server, max_retries=1), hosted=Hosted(tmp_path / "hosted.db") if own else None)
    dream = Dream([model])
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        training = Training(
            policy=walker,
            learner=Learner(),
            source="synthetic",
            dream=dream,
            num_tasks=12,
            num_generations=2,
            replay_buffer=buffer,
            create_environment=dream.create_environment,
            curriculum=Curriculum(houses(12)),
        )
        with SqliteSaver.from_conn_string(str(tmp_path / "training.db")) as saver:
            graph = create_training_graph(training).compile(checkpointer=saver)
            config: Any = {"configurable": {"thread_id": "train"}}
            start: Any = {"run": "train", "iterations": 2}
            await asyncio.to_thread(graph.invoke, start, config, durability="sync")
        stored = list(buffer.trajectories())
        buffer.extend(replace(each, source="offline", run="old", steps=bare(each)) for each in stored if each.steps)
        annotated = await annotate(buffer, chat_model(server), hosted=model.hosted)
        told = [*((str(each), each.error) for each in stored), dict(annotated.failed)]
        (tmp_path / "report.json").write_text(json.dumps(told))
        found = written(tmp_path)
    assert annotated.written and any("[key]" in cause for cause in annotated.failed.values())
    assert len(found) > 10_000 and b"You sent Bearer [key]." in found, "answers that echoed it are stored without it"
    assert any(each.error and "with Bearer [key]" in each.error for each in stored), "and so are errors"
    assert CANARY.encode() not in found and CANARY not in caplog.text


@pytest.mark.parametrize("fault", FAULTS[:-1])
def test_no_exception_holds_the_key(serve: Any, chat_model: Any, fault: str) -> None:
    model = Model(chat_model(serve(fault=lambda number: fault)))
    environment = Dream([model]).create_environment()
    environment.reset(houses(1)[0])
    with pytest.raises(ModelUnavailable) as caught:
        environment.step("open door")
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    cause: BaseException | None = caught.value
    while cause is not None:
        told, cause = told + repr(cause), cause.__cause__ or cause.__context__
    assert "Bearer [key]" in told and CANARY not in told
    assert CANARY not in repr(vars(model)) + repr(vars(model.hosted))


def test_keys_are_found_wherever_a_model_keeps_them(serve: Any, chat_model: Any) -> None:
    headers = {"Authorization": "Bearer other-canary", "X-Api-Key": "third-canary", "X-Trace": "no-secret-at-all"}
    model = chat_model(serve(), default_headers=headers, openai_proxy=None, model_kwargs={"extra": {"token": "fourth-canary"}})
    assert secrets(model.bind(stop=["x"])) == {CANARY, "other-canary", "third-canary", "fourth-canary"}
    assert secrets(chat_model(serve(), api_key=SecretStr("EMPTY"))) == set(), "a word that stands for no key is no secret"
    text = "no host at http://user:pa55word@host/v1?key=third-canary"
    assert redact(text, ["third-canary"]) == "no host at http://[key]@host/v1?key=[key]"
