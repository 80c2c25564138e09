"""A policy as a folder for production: what is in it, what is not, what of it is refused, and that it samples as before."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors import SafetensorError
from tiny_models import create_model, create_tokenizer

from dreamgym_lg import DreamGym, Model, ReplayBuffer, Step, Task, Trajectory, load_policy
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.sft import save_model
from dreamgym_lg.production import export
from dreamgym_lg.production.export import MANIFEST, export_policy, load_exported, read_manifest, write_manifest
from dreamgym_lg.production.provenance import provenance
from dreamgym_lg.statistics import wilson
from dreamgym_lg.token_recorder import TokenRecorder

CANARY = "canary-5f1e0b9c"
"""Is in everything that an export must not hold."""

AGENT = f'''
"""{CANARY}"""
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool


class Own(BaseChatModel):
    key: str = "{CANARY}"

    @property
    def _llm_type(self) -> str:
        return "own"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=tools)

    def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("own"))])


@tool
def book(city: str) -> str:
    """Book a room. {CANARY}"""
    return "{CANARY}"


graph = create_agent(Own(), [book], system_prompt="You book rooms. {CANARY}")
'''


def tiny(**options: Any) -> LocalChatModel:
    tokenizer = create_tokenizer(["Book a room.", "You book rooms.", "<tool_call>"], vocab_size=320)
    model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=1024)
    return LocalChatModel(model=model, tokenizer=tokenizer, **{"name_or_path": "org/tiny", "max_new_tokens": 12, **options})


RECORD: dict[str, Any] = {
    "policy_version": "ab12",
    "base_model": "org/tiny",
    "training": None,
    "data": {"trajectories": 0, "steps": 0, "sha256": ""},
    "experience_model": None,
    "evaluation": [],
    "versions": {"dreamgym-lg": "0.1.0"},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "mine"
    export_policy(tiny(temperature=0), folder, provenance=RECORD)
    return folder


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "mine")


def sampled(policy: LocalChatModel) -> list[int]:
    with TokenRecorder() as recorder:
        policy.invoke("Book a room, and then another.")
    (segment,) = recorder.segments()
    return [id for id, own in zip(segment.token_ids, segment.sampled, strict=True) if own]


async def test_requests_that_come_together_load_the_agent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, both = list[Path](), threading.Barrier(2)

    def load(folder: Path) -> str:
        loads.append(folder)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for a second one, which would come now
        return "graph"

    monkeypatch.setattr(export, "load_exported", load)
    monkeypatch.setattr(export, "_agent", cache(export._agent.__wrapped__))
    assert await asyncio.gather(export.agent(), export.agent()) == ["graph"] * 2 and len(loads) == 1


# --- the folder ---------------------------------------------------------------------------------------------------------------


def test_the_folder_is_a_model_a_project_and_a_card(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {
        *("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "version", "langgraph.json", "README.md", MANIFEST),
    }
    assert not list(exported.parent.glob(".*")), "no draft is left"
    manifest = read_manifest(exported)
    assert set(manifest["files"]) == names - {MANIFEST} and manifest["parameters"] > 1000 and manifest["agent"] is None
    assert json.loads((exported / "langgraph.json").read_text())["graphs"] == {"agent": "dreamgym_lg.production.export:agent"}
    card = (exported / "README.md").read_text()
    assert "* Sampling: greedy, at most 12 new tokens." in card
    assert 'base_model: "org/tiny"' in card and "not evaluated" in card and "serves it as a chat" in card


@pytest.mark.slow
def test_a_fresh_process_samples_the_same_tokens(exported: Path) -> None:
    here = sampled(load_policy(exported))
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_export import *\n"
    code += f"print(sampled(load_policy({str(exported)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == here == sampled(tiny(temperature=0)) and len(here) > 3


def test_it_samples_as_it_was_exported_and_as_its_base_did_not(tmp_path: Path) -> None:
    policy = tiny(temperature=0.7, stop=["\n"], max_new_tokens=9)
    policy.tokenizer.chat_template += "{% if thinks %}{% endif %}"
    policy.chat_template_kwargs["thinks"] = False
    policy.model.generation_config.update(do_sample=True, top_k=20, top_p=0.8, repetition_penalty=1.1)
    export_policy(policy, tmp_path / "mine", provenance=RECORD | {"sampling_chosen": "greedy 1, sampled 4"})
    loaded = load_policy(tmp_path / "mine")
    assert (loaded.temperature, loaded.stop, loaded.max_new_tokens) == (0.7, ["\n"], 9)
    assert loaded.chat_template_kwargs == {"thinks": False}
    assert load_policy(tmp_path / "mine", temperature=0).temperature == 0
    saved = json.loads((tmp_path / "mine" / "generation_config.json").read_text())
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "* Sampling: temperature 0.7, at most 9 new tokens (greedy 1, sampled 4)." in card
    assert (saved["top_k"], saved["top_p"], saved["stop_strings"]) == (0, 1.0, ["\n"]) and "repetition_penalty" not in saved


# --- what is refused ----------------------------------------------------------------------------------------------------------


def _flip(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


def _set(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(manifest | values))

    return change


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight": (_flip, "model.safetensors was changed after the export.*export the policy again"),
    "the template": (lambda f: (f / "chat_template.jinja").write_text("{{ 1 }}"), "chat_template.jinja was changed"),
    "a file less": (lambda f: (f / "tokenizer.json").unlink(), "incomplete, tokenizer.json is missing"),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "holds adapter_config.json, which the export did not",
    ),
    "a pickle": (lambda f: (f / "pytorch_model.bin").write_text(""), "holds pytorch_model.bin.*remove it"),
    "code": (lambda f: (f / "modeling.py").write_text(""), "holds modeling.py"),
    "the figures": (_set(evaluation=[{"successes": 99}]), "manifest.json was changed after the export"),
    "a later format": (_set(format=2), "has format 2, and this dreamgym-lg reads up to 1: pip install -U dreamgym-lg"),
    "half a manifest": (lambda f: (f / MANIFEST).write_text('{"format": 1'), "manifest.json is damaged"),
    "another manifest": (lambda f: (f / MANIFEST).write_text("[]"), "is no manifest of an exported policy"),
    "no folder": (shutil.rmtree, "the folder '.*mine' does not exist"),
    "no manifest": (
        lambda f: (f / MANIFEST).unlink(),
        "is no exported policy .it has no manifest.json.: give",
    ),
}


@pytest.mark.parametrize("change, told", REFUSED.values(), ids=REFUSED)
def test_what_is_not_as_it_was_written_is_refused(change: Callable[[Path], object], told: str, copied: Path) -> None:
    read_manifest(copied)
    change(copied)
    for load in (load_policy, load_exported):
        with pytest.raises(ConfigurationError, match=told):
            load(copied)


def test_what_a_server_keeps_beside_it_is_nobodys_business(copied: Path) -> None:
    (copied / ".langgraph_api").mkdir()
    (copied / ".langgraph_api" / "store.pckl").write_text("")
    assert read_manifest(copied)["format"] == 1


def test_what_cannot_be_exported(tmp_path: Path, scripted: Any, exported: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"mine exists already: overwrite=True .--overwrite. .* name another, e\.g\. .*mine-2"
    ):
        export_policy(tiny(), exported, provenance=RECORD)
    with pytest.raises(ConfigurationError, match="ScriptedModel has no weights in this process"):
        export_policy(scripted(reply=str), tmp_path / "mine", provenance=RECORD)
    with pytest.raises(ConfigurationError, match="has no weights in this process"):
        export_policy(tiny().model_copy(update={"model": None}), tmp_path / "mine", provenance=RECORD)
    with_code = tiny()
    with_code.model.config.auto_map = {"AutoModel": "modeling.Mine"}
    with pytest.raises(ConfigurationError, match="brings code of its own .config.json."):
        export_policy(with_code, tmp_path / "mine", provenance=RECORD)
    adapter = tiny()
    adapter.model.merge_and_unload = None
    with pytest.raises(ConfigurationError, match="merge_and_unload"):
        export_policy(adapter, tmp_path / "mine", provenance=RECORD)
    with pytest.raises(ConfigurationError, match="trust_remote_code= is given"):
        load_policy(exported, trust_remote_code=True)
    assert list(tmp_path.iterdir()) == []


def test_a_second_export_replaces_an_export_alone(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_manifest(copied)["created"], read_manifest(copied)["parameters"]
    with monkeypatch.context() as patched, pytest.raises(ConfigurationError):
        patched.setattr("dreamgym_lg.production.export.write_manifest", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        export_policy(tiny(), copied, provenance=RECORD, overwrite=True)
    assert (read_manifest(copied)["created"], read_manifest(copied)["parameters"]) == before, "the old one is whole"
    export_policy(tiny(max_new_tokens=7), copied, provenance=RECORD, overwrite=True)
    assert load_policy(copied).max_new_tokens == 7 and [each.name for each in copied.parent.iterdir()] == ["mine"]
    (copied / MANIFEST).unlink()
    with pytest.raises(ConfigurationError, match="holds no exported policy, so it is not overwritten"):
        export_policy(tiny(), copied, provenance=RECORD, overwrite=True)


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    from dreamgym_lg.integrations.trl.adapters import adapt

    adapt(cast(Any, (policy := tiny()).model))
    before = os.umask(0o027)
    try:
        export_policy(policy, tmp_path / "mine", provenance=RECORD)
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "mine").rglob("*")}
    assert modes == {path: 0o750 if path.is_dir() else 0o640 for path in modes}
    assert (tmp_path / "mine/base/config.json") in modes, "adapters stand beside their base"


@pytest.mark.parametrize("error", [OSError("disk full"), SafetensorError("disk full"), KeyboardInterrupt()])
def test_the_folder_is_whole_or_not_there(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (draft := tmp_path / f".mine.{2**22 + 1}.abc.draft").mkdir()
    (draft / "pytorch_model.bin").write_text("of a process that was killed")

    def fail(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("dreamgym_lg.production.export.write_manifest", fail)
        expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigurationError
        with pytest.raises(expected):
            export_policy(tiny(), tmp_path / "mine", provenance=RECORD)
    assert list(tmp_path.iterdir()) == []
    export_policy(tiny(), tmp_path / "mine", provenance=RECORD)
    assert list(read_manifest(tmp_path / "mine")["files"]).count("pytorch_model.bin") == 0


# --- where it comes from ------------------------------------------------------------------------------------------------------


def episode(id: str, *, success: bool = True, split: Any = "train", **options: Any) -> Trajectory:
    task = Task(id=f"{id} {CANARY}", instruction=f"Book {id}. {CANARY}", environment="rooms", split=split)
    step = Step(observation=CANARY, action=CANARY, next_observation=CANARY, reasoning=CANARY, reward=1, terminated=True)
    return Trajectory(task=task, steps=[step], success=success, **options)


@pytest.fixture
def gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted: Any) -> DreamGym:
    for name in ("OPENAI_API_KEY", "LANGSMITH_API_KEY", "SECRET"):
        monkeypatch.setenv(name, CANARY)
    (tmp_path / "my_app.py").write_text(AGENT)
    buffer = ReplayBuffer(tmp_path / f"{CANARY}.db")
    buffer.extend([episode("a"), episode("b", success=False), episode("t", split="test")])
    return DreamGym(
        f"{tmp_path / 'my_app.py'}:graph",
        replay_buffer=buffer,
        experience_model=Model(scripted(reply=str), version="world-1"),
        out=tmp_path / "runs" / CANARY,
        isolation="guard",
        route=["model"],
        progress=lambda *_: None,
        say=lambda _: None,
    )


def test_an_export_holds_no_secret_and_no_trace(gym: DreamGym, tmp_path: Path) -> None:
    assert CANARY.encode() in (tmp_path / f"{CANARY}.db-wal").read_bytes() + (tmp_path / f"{CANARY}.db").read_bytes()
    gym.experiment.open()
    save_model(tiny().model, tiny().tokenizer, gym.experiment.models / "trained")
    gym.export(tmp_path / "mine")
    assert read_manifest(tmp_path / "mine")["training"] is not None
    files = [path for path in (tmp_path / "mine").rglob("*") if path.is_file()]
    assert len(files) > 8
    for file in files:
        for secret in (CANARY, str(tmp_path), os.environ["PATH"], str(Path.home())):
            assert secret.encode() not in file.read_bytes(), f"{secret} in {file.name}"


def test_the_project_binds_the_policy_to_the_agent_where_it_is_written(gym: DreamGym, tmp_path: Path) -> None:
    gym.export(tmp_path / "policies" / "mine", policy=tiny(temperature=0))
    written = read_manifest(tmp_path / "policies" / "mine")["agent"]
    assert written == {"path": "../../my_app.py:graph", "route": ["model"], "pass_through": []}
    agent = load_exported(tmp_path / "policies" / "mine")
    answer = agent.invoke({"messages": [("human", "Book.")]})["messages"][-1]
    assert answer.text != "own" and answer.response_metadata["model_name"] == "mine"
    assert gym.world.graph.invoke({"messages": [("human", "Book.")]})["messages"][-1].text == "own"


async def test_the_policy_alone_is_a_chat(exported: Path) -> None:
    state = await load_exported(exported).ainvoke({"messages": [("human", "Book.")]})
    assert state["messages"][-1].response_metadata["model_name"] == "mine"


def test_a_route_that_is_a_function_is_no_part_of_a_project(gym: DreamGym, caplog: pytest.LogCaptureFixture) -> None:
    assert gym.world.source is not None and not caplog.text
    gym.world.options["route"] = lambda call: True
    assert gym.world.source is None and "give names of nodes" in caplog.text


def test_the_manifest_says_where_a_policy_comes_from(gym: DreamGym, tmp_path: Path) -> None:
    own = tiny(temperature=0)
    foreign = provenance(gym.experiment, own)
    assert foreign["training"] is None and foreign["base_model"] == "org/tiny" and foreign["experience_model"] is None
    assert foreign["data"]["trajectories"] == 2, "an evaluation task's episode is not trained on"
    assert foreign["replay_buffer"]["trajectories"]["offline"] == 3
    assert {"python", "torch", "transformers", "langgraph"} <= set(foreign["versions"])

    gym.experiment.open()
    save_model(own.model, own.tokenizer, gym.experiment.models / "trained")
    gym.replay_buffer.record_metrics(gym.experiment.run_name("stage/train/from"), 0, {"policy": "ab", "name": "org/base"})
    gym.replay_buffer.record_metrics(gym.experiment.run_name("stage/train"), 0, {"iterations": 40})
    for iteration in range(7):  # it ended early
        gym.replay_buffer.record_metrics(gym.experiment.run_name("train"), iteration, {"episodes": 8})
    trained = gym.experiment.policy("trained", 0)
    version = (gym.experiment.models / "trained" / "version").read_text()
    played: dict[str, Any] = {"source": "real", "policy_version": version, "run": gym.experiment.run_name("x/real")}
    for number, success in enumerate([True, True, False]):
        gym.replay_buffer.add(episode("t", split="test", success=success, rollout_index=number, **played))
    away = {**played, "run": gym.experiment.run_name("y/real"), "policy_version": version}
    gym.replay_buffer.add(episode("t", split="test", **away))
    gym.replay_buffer.add(episode("t", split="test", success=False, error="ModelUnavailable: away", rollout_index=1, **away))
    found = provenance(gym.experiment, trained)
    assert found["policy_version"] == version and found["base_model"] == "org/base"
    assert found["training"]["iterations"] == 7 and found["training"]["learner"] == "grpo" and "seed" in found["training"]
    assert found["experience_model"] == {"version": gym.experiment.experience_version}
    (row,) = found["evaluation"]  # of the other one an episode is missing
    assert (row["environment"], row["split"], row["successes"], row["episodes"]) == ("real", "test", 2, 3)
    assert row["interval"] == pytest.approx((0.0947, 0.9735), abs=1e-2), "three episodes of one task are not three tasks"
    save_model(tiny().model, own.tokenizer, gym.experiment.models / "filtered")
    other = (gym.experiment.models / "filtered" / "version").read_text()
    theirs = {**played, "run": gym.experiment.run_name("z/greedy"), "policy_version": other}
    gym.replay_buffer.add(episode("t", split="test", **theirs))
    gym.export(tmp_path / "mine", policy=trained)
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "| filtered imitation, no dream | real | test | greedy | 1 of 1 | 21% to 100% |" in card
    assert "| this one | real | test | as set | 2 of 3 | 9% to 97% |" in card and "by GRPO in a dream" in card
    assert "org/base" in card and (tmp_path / "mine" / "version").read_text() == version
    assert "* Dream: `world-1`.\n" in card
    gym.world.assisted = True
    gym.export(tmp_path / "assisted", policy=trained)
    assert "* Dream: `world-1`, assisted by the world's rules.\n" in (tmp_path / "assisted" / "README.md").read_text()


@pytest.mark.parametrize(
    ("successes", "claim"), [(135, "not proven: trained − filtered imitation, no dream -0.01"), (150, "proven: ")]
)
def test_where_imitation_is_as_good_the_card_says_so_and_claims_no_dream(
    successes: int, claim: str, gym: DreamGym, tmp_path: Path
) -> None:
    """Of 150 held-out tasks the base policy did 104, filtered imitation 136."""
    gym.experiment.open()
    for number, name in enumerate(("filtered", "trained")):
        policy = tiny(temperature=number)
        save_model(policy.model, policy.tokenizer, gym.experiment.models / name)
        version = (gym.experiment.models / name / "version").read_text()
        played: dict[str, Any] = {"source": "real", "policy_version": version, "run": gym.experiment.run_name(f"{name}/real")}
        gym.replay_buffer.add(episode("t", split="test", **played))
    rates = {"base": 104, "filtered": 136, "trained": successes}
    outcomes = {name: {str(task): task < n for task in range(150)} for name, n in rates.items()}
    figures = {name: {"successes": n, "episodes": 150, "interval": wilson(n, 150)} for name, n in rates.items()}
    real = {name: {"sampled": {**figures[name], "outcomes": outcomes[name]}} for name in rates}
    result = {"real": real, "filtered": 251, "offline_rl": "", "keep": {"instead_of": version}}
    (gym.experiment.out / "result.json").write_text(json.dumps(result))
    for name in ("filtered", "trained"):
        gym.export(tmp_path / name, policy=gym.experiment.policy(name, 0))
        card = (tmp_path / name / "README.md").read_text()
        assert f"The trained policy against the best one without a dream: {claim}" in card
        assert ("imitation is enough" in card) == (successes == 135)
        assert ("dream: proven" in card) == (successes == 150) and "roven in the real" not in card
    (gym.experiment.out / "result.json").write_text(json.dumps({**result, "keep": {"instead_of": "earlier weights"}}))
    gym.export(tmp_path / "unproven", policy=gym.experiment.policy("trained", 0))
    assert "against the best one without a dream" not in (tmp_path / "unproven" / "README.md").read_text()


def test_the_base_policy_says_what_it_was_made_of(gym: DreamGym, tmp_path: Path) -> None:
    own = tiny(temperature=0)
    gym.experiment.open()
    save_model(own.model, own.tokenizer, gym.experiment.models / "base")
    gym.replay_buffer.record_metrics(gym.experiment.run_name("stage/base/from"), 0, {"model": "org/start"})
    gym.export(tmp_path / "mine", policy=gym.experiment.base_policy())
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "Trained from org/start by SFT on recorded episodes of the world `agent` (seed: 0)." in card
    assert 'base_model: "org/start"' in card


def test_the_hash_is_of_the_data_whatever_its_order(tmp_path: Path) -> None:
    from dreamgym_lg.production.provenance import _data

    hashes = []
    for number, order in enumerate([("a", "b"), ("b", "a"), ("a", "c")]):
        with ReplayBuffer(tmp_path / f"{number}.db") as buffer:
            buffer.extend(map(episode, order))
            hashes.append(_data(buffer)["sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_manifest_written_by_hand_passes_its_own_check(copied: Path) -> None:
    """The hashes show changes, and not who made them: the docstring of `read_manifest` says so."""
    _flip(copied)
    (copied / MANIFEST).unlink()
    write_manifest(copied, RECORD)
    assert read_manifest(copied)["policy_version"] == "ab12"
