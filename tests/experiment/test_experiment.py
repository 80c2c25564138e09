"""What holds for an experiment on any world: its folder, its stages, the policy it keeps, how worlds are found."""

import json
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import SMALL_BASE, create_model, create_tokenizer

from dreamgym_lg import Dream, Environment, Experiment, Model, ReplayBuffer, Settings, Step, Task, Trajectory, World
from dreamgym_lg.cli.experiment import open_folder
from dreamgym_lg.environment import record_action, refused
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import imitation, start, supervised
from dreamgym_lg.experiment import world as worlds
from dreamgym_lg.experiment.evaluation import FILTERED, count_real_steps, summarise, validate
from dreamgym_lg.experiment.experience_models import load_experience_model
from dreamgym_lg.experiment.imitation import best_episodes, train_base_policy
from dreamgym_lg.experiment.lock import only_process
from dreamgym_lg.experiment.supervised import train_experience_model
from dreamgym_lg.experiment.world import load_world
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.rows import reply_lengths
from dreamgym_lg.integrations.trl.sft import save_model
from dreamgym_lg.statistics import wilson
from dreamgym_lg.types import StepResult


def test_a_local_experience_model_is_asked_as_it_was_trained(tmp_path: Path) -> None:
    folder, buffer = tmp_path / "run" / "models" / "experience-0", ReplayBuffer(":memory:")
    tokenizer = create_tokenizer(["valid"], vocab_size=320)
    save_model(create_model(tokenizer, hidden_size=32, layers=1, max_tokens=256), tokenizer, folder)
    experience = load_experience_model(str(folder), buffer)
    assert experience.version.endswith("/experience-lines-2") and experience.k == 3, "no experiment's: prompted as any other"
    (tmp_path / "run" / "settings.json").write_text(
        '{"world": "agent", "arguments": {}, "retrieved": 2, "retrieved_characters": 70}'
    )
    experience = load_experience_model(str(folder), buffer)
    form = experience.prompt_format
    assert (experience.version, experience.k, form.instructions, form.characters) == ("experience-0", 2, "", 70)
    assert experience.model.temperature == 0 and experience.prompter.retries == 0
    with pytest.raises(ConfigurationError, match="Did you mean .*experience-0'"):
        load_experience_model(str(folder.with_name("experience")), buffer)
    with pytest.raises(ConfigurationError, match="nobody/nothing"):
        load_experience_model("nobody/nothing", buffer)
    assert Experiment(Doors(), tmp_path / "other", experience_model=str(folder)).experience().version == "experience-0"


def test_a_folder_of_a_version_without_a_setting_goes_on_with_its_default(tmp_path: Path) -> None:
    run = Experiment(Doors(), tmp_path)
    run.open()
    file = tmp_path / "settings.json"
    older = json.loads(file.read_text())
    del older["proof_tasks"]
    file.write_text(json.dumps(older))
    Experiment(Doors(), tmp_path).open()
    assert run.stored_settings() == run.settings
    with pytest.raises(ConfigurationError, match="was made with proof_tasks=120, and proof_tasks=7 is given"):
        Experiment(Doors(), tmp_path, replace(run.settings, proof_tasks=7)).open()


def test_progress_is_one_line_of_a_terminal_and_some_lines_of_a_file(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("dreamgym_lg.progress._reached", {})
    monkeypatch.setattr("dreamgym_lg.progress._starts", {})
    for terminal, shown in ((False, "train: 1/2\ntrain: 2/2\n"), (True, "\x1b[Ktrain: 1/2\r\x1b[Ktrain: 2/2\n")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        for done in (1, 2):
            Experiment(Doors(), "nowhere").progress("train", done, 2)
        assert capsys.readouterr().err == shown


def test_a_folder_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    """Two that train in one would mix their episodes; a killed one leaves nothing to clear away."""
    program = "import sys; from pathlib import Path; from dreamgym_lg.experiment.lock import only_process\n"
    program += "with only_process(Path(sys.argv[1])): print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        refused = pytest.raises(ConfigurationError, match=f"process {other.pid} is at work in .*: wait until it has ended")
        with refused:
            Experiment(Doors(), tmp_path).collect()
        before = (tmp_path / "settings.json").read_text()
        with refused:
            Experiment(Doors(), tmp_path).train(iterations=99)
        assert (tmp_path / "settings.json").read_text() == before, "what the other process trains with"
        other.kill()
    run = Experiment(Doors(), tmp_path)
    run.collect()
    assert len(run.offline()) == 5
    with only_process(tmp_path / "models"):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    with only_process(tmp_path / "models"):
        child.kill()


class Door(Environment):
    """Open the door: `open` succeeds, anything else is invalid."""

    def reset(self, task: Task) -> str:
        return "A closed door."

    def step(self, action: str) -> StepResult:
        if action == "open":
            return StepResult("It is open.", 1.0, True, False, {"success": True, "valid": True})
        return StepResult("What?", 0.0, False, False, {"success": False, "valid": False})


class Doors(World):
    name = "tests/doors"
    settings = Settings(episodes={"opens": 3, "fails": 2}, evaluate_tasks=2, policy_tokens=8, model=str(SMALL_BASE))
    max_steps = 2

    def tasks(self, split: Any, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        counts = {"train": 4, "validation": 2, "test": 2}
        return [self._task(f"{split}-{number}", split) for number in range(counts[split])]

    def _task(self, id: str, split: Any) -> Task:
        return Task(id=id, instruction="Open the door.", environment=self.name, split=split, observation="A closed door.")

    def create_environment(self) -> Environment:
        return Door()

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterable[Trajectory]:
        for kind, count in episodes.items():
            for index in range(count):
                action = "open" if kind == "opens" else "kick"
                step = record_action(action, "A closed door.", Door().step(action)).step
                yield Trajectory(task=tasks[index], steps=[step], success=kind == "opens", rollout_index=ord(kind[0]) + index)


class Shut(World):
    """The least that a world gives."""

    name = "tests/shut"
    tasks, create_environment = Doors.tasks, Doors.create_environment
    _task = Doors._task


@pytest.fixture
def work(tmp_path: Path) -> Experiment:
    return Experiment(Doors(), tmp_path / "run")


def test_collecting_stores_tasks_and_trajectories_once(work: Experiment) -> None:
    work.collect()
    work.collect()
    assert [len(work.tasks(split)) for split in ("train", "validation", "test")] == [4, 2, 2]
    assert len(work.offline()) == 5 and work.seconds("collect") is not None
    assert count_real_steps(work) == {"offline": 5, "train": 0, "evaluation": 0}


def test_imported_traces_are_learned_from_beside_collected_ones(work: Experiment) -> None:
    work.open()
    work.replay_buffer.add_tasks(work.world.tasks("train"))
    task = work.tasks("train")[0]
    step = Step(observation="", action="left", next_observation="", reward=1, terminated=True)
    for run in ("traces", "other-1/offline"):
        work.replay_buffer.add(Trajectory(task=task, steps=[step], success=True, run=run, rollout_index=77))
    assert {each.run for each in work.offline()} == {"traces", "other-1/offline"}
    work.collect()
    assert {each.run for each in work.offline()} == {"traces", work.run_name("offline")}, "another experiment's are its own"
    assert len(work.offline()) == 6


def test_what_the_experience_model_was_not_trained_on_is_held_out(work: Experiment, scripted: Any) -> None:
    work.collect()
    work.settings = replace(work.settings, batch_size=1, experience_steps=2)
    taught, held_out = work.experience_data()
    trained = {each.task.id for each in taught}
    assert taught == work.offline()[:2] and len(work.offline()) == 5
    assert held_out == work.held_out_offline() == [each for each in work.offline() if each.task.id not in trained] != []
    assert len(taught + held_out) < 5, "another episode of a trained task is neither"
    work.settings = replace(work.settings, experience_steps=5)
    assert work.held_out_offline() == []
    hosted = Experiment(Doors(), work.out, work.settings, experience_model=scripted(reply=str))
    assert len(hosted.held_out_offline()) == 5, "a given model was trained on none of them"
    own_dream = Experiment(Doors(), work.out, work.settings)
    own_dream.world.needs_model = False
    assert len(own_dream.held_out_offline()) == 5, "a dream of one's own trains none"


@pytest.mark.parametrize(("has", "dtype"), [("amx_bf16", "bfloat16"), ("avx512_bf16", "bfloat16"), ("avx2", "auto")])
def test_a_trained_experience_model_answers_in_what_the_processor_is_fast_in(
    work: Experiment, monkeypatch: pytest.MonkeyPatch, has: str, dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {has: True})
    given = dict[str, Any]()
    monkeypatch.setattr(LocalChatModel, "from_path", lambda path, **options: given.update(options))
    work._local("experience-0")
    assert given["dtype"] == dtype


def test_a_world_without_scripted_policies_says_what_to_do(tmp_path: Path) -> None:
    bare = Experiment(Shut(), tmp_path)
    bare.collect()
    assert len(bare.tasks("train")) == 4 and bare.offline() == []
    with pytest.raises(
        ConfigurationError,
        match=r"let the start policy collect \(Settings\(episodes={'start': 50}\)\), or import.*load_traces",
    ):
        Experiment(Shut(), tmp_path / "other", Settings(episodes={"random": 1})).collect()
    with pytest.raises(ConfigurationError, match="no offline trajectory of 0 is a success"):
        train_base_policy(bare)


def test_what_is_prepared_is_not_prepared_again_where_the_base_policy_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(work: Experiment, model: object) -> None:
        raise ConfigurationError("no real tools")

    few: dict[str, Any] = {"experience_steps": 1, "base_steps": 1}
    work = Experiment(Doors(), tmp_path / "run", replace(Doors.settings, **few), progress=lambda *_: None)
    monkeypatch.setattr(imitation, "train_base_policy", fails)
    with pytest.raises(ConfigurationError, match="no real tools"):
        work.prepare()
    version = (work.models / "experience-0" / "version").read_text()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="'typo/weights'"):
            work.prepare("typo/weights", baselines=["sft"])  # not kept as the folder's start
    monkeypatch.setattr(start, "tokenizer_of", lambda path: None)
    begun = list[Any]()
    monkeypatch.setattr(imitation, "train_base_policy", lambda _, model: begun.append(model))
    work.prepare("mine/weights", baselines=["sft"])
    work.prepare(baselines=["sft"])
    assert begun == ["mine/weights"]
    work.prepare("mine/weights", baselines=["sft"])
    work.train_experience(str(SMALL_BASE))  # the default, by its name
    with pytest.raises(ConfigurationError, match=f"made of the model '{SMALL_BASE}', and 'others' is given"):
        work.train_experience("others")
    for wrong, told in (("others", "begin with 'mine/weights', and 'others' is given"), (["sft"], "baselines go into")):
        with pytest.raises(ConfigurationError, match=told):
            work.prepare(wrong, baselines=["sft"])  # type: ignore[arg-type]
    work.start_policy = "mine/policy"
    with pytest.raises(ConfigurationError, match="leave out one of the two"):
        work.prepare("mine/weights")
    with pytest.raises(ConfigurationError, match="policy= is given, .* not with a baseline: leave out baselines="):
        work.prepare(baselines=["sft", "dpo"])
    work.prepare()
    assert not (work.models / "offline_rl").exists()
    assert (work.models / "experience-0" / "version").read_text() == version and work.seconds("base") is not None


def test_the_initial_weights_of_policies_are_written_once(tmp_path: Path) -> None:
    """A refused call, and the experience model's own start, replaced them: a proof then played another start."""

    def start(seed: int = 0, **options: Any) -> LocalChatModel:
        tokenizer = create_tokenizer(["open the door kick"], vocab_size=320)
        model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=512, seed=seed)
        return LocalChatModel(model=model, tokenizer=tokenizer, **options)

    settings = replace(Doors.settings, base_steps=1, experience_steps=1, policy_tokens=16)
    work = Experiment(Doors(), tmp_path / "run", settings, progress=lambda *_: None)
    work.collect()
    work.train_base(start())
    version = (work.models / "start" / "version").read_text()
    work.train_experience(start(seed=1))
    work.prepare(start(), baselines=["sft"])
    for other in (start(seed=1), start(stop=["!"])):
        for call in (work.prepare, work.train_base):
            with pytest.raises(ConfigurationError, match="given, with other weights or prompts: take another folder"):
                call(other)
    assert (work.models / "start" / "version").read_text() == version


def test_a_policy_that_could_not_say_what_was_recorded_is_not_trained(work: Experiment) -> None:
    """Its replies are cut off where the recorded ones go on: a game of long names looked unlearnable for that alone."""
    work.collect()
    opened = [trajectory for trajectory in work.offline() if trajectory.success]
    rows = partial(work.world.policy_rows, opened, create_tokenizer(["open the door"]), max_new_tokens=8)
    (length,) = {length for row in rows() for length in reply_lengths(row)}
    assert rows(max_new_tokens=length) == rows() and length > 1
    with pytest.raises(ConfigurationError, match=f"3 of 3 .* policy_tokens={length - 1} .* raise .* to {length} or more"):
        rows(max_new_tokens=length - 1)


def played(score: float, *, success: bool = False, **last: Any) -> Trajectory:
    step = Step(observation="a", action="b", next_observation="c", reward=score)
    steps = [step, replace(step, **{"reward": 0.0, **last})]
    return Trajectory(task=Task(id="t", instruction="i", environment="e"), steps=steps, success=success)


def test_filtered_imitation_is_of_episodes_that_earned_nearly_as_much_as_the_best() -> None:
    best = [played(4, success=True, terminated=True), played(3, truncated=True), played(1, reward=2, terminated=True)]
    others = [played(3, terminated=True), played(4, valid=False), played(2, truncated=True)]
    assert best_episodes([*others, *best]) == best
    assert best_episodes([played(0, terminated=True), played(-1)]) == [], "a reward of 0 is none"
    assert best_episodes([]) == []


class PaysHalf(Doors):
    """Its failures earn nearly as much as its successes."""

    def collect(self, *arguments: Any, **options: Any) -> Iterable[Trajectory]:
        for each in super().collect(*arguments, **options):
            yield each if each.success else replace(each, steps=[replace(each.steps[0], reward=0.9, valid=True)])


def filtered(work: Experiment) -> list[int]:
    """The recorded numbers of episodes that the filtered policy imitated."""
    return [row["episodes"] for row in work.replay_buffer.metrics(work.run_name(FILTERED))]


def test_the_filtered_policy_begins_as_the_base_policy_and_is_trained_once(tmp_path: Path) -> None:
    tokenizer, said = create_tokenizer(["open the door kick"], vocab_size=320), list[str]()
    start = LocalChatModel(model=create_model(tokenizer, hidden_size=32, layers=1, max_tokens=256), tokenizer=tokenizer)
    settings = replace(Doors.settings, base_steps=1, policy_tokens=16)
    work = Experiment(PaysHalf(), tmp_path / "run", settings, progress=lambda *_: None, say=said.append)
    work.collect()
    work.train_base(start)
    work.train_filtered()
    version = (work.models / "filtered" / "version").read_text()
    work.train_filtered()
    Experiment(PaysHalf(), work.out, progress=lambda *_: None).train_filtered()
    assert (work.models / "filtered" / "version").read_text() == version, "what is done is not done again"
    assert filtered(work) == [5] and [line.partition(":")[0] for line in said if "policy after" in line] == [
        f"{name} policy after 1 of 1 steps" for name in ("base", "filtered")
    ]
    sizes = [sum(value.numel() for value in work.policy(name).model.parameters()) for name in ("base", "filtered")]
    assert sizes == [sum(value.numel() for value in start.model.parameters())] * 2
    assert {path.name for path in work.models.iterdir()} == {"start", "base", "filtered"}


def likelihood(work: Experiment, name: str, action: str) -> float:
    """Of an action behind the closed door, in nats."""
    policy = work.policy(name)
    recorded = next(each for each in work.offline() if each.steps[0].action == action)
    (row,) = work.world.policy_rows([recorded], policy.tokenizer, max_new_tokens=16)
    ids, learned = torch.tensor([row.segment.token_ids]), torch.tensor(row.segment.sampled[1:]) == 1
    with torch.no_grad():
        logprobs = torch.log_softmax(policy.model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    return float(logprobs[learned].sum())


@pytest.mark.parametrize(
    ("batch_size", "how"), [(4, "DPO on 2 of 2 pairs"), (16, "advantage-weighted imitation of 5 episodes")]
)
def test_offline_rl_prefers_the_better_episodes_and_goes_on_where_it_was_killed(
    tmp_path: Path, batch_size: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException): ...

    def make(**options: Any) -> Experiment:
        return Experiment(Doors(), tmp_path / "run", settings, **{"progress": lambda *_: None, "say": said.append, **options})

    def kill(label: str, done: int, total: int) -> None:
        if (label.partition(" ")[0], done) == ("offline_rl", 2):
            raise Killed

    tokenizer, said = create_tokenizer(["open the door kick"], vocab_size=320), list[str]()
    start = LocalChatModel(model=create_model(tokenizer, hidden_size=32, layers=1, max_tokens=256), tokenizer=tokenizer)
    settings = replace(Doors.settings, base_steps=3, policy_tokens=16, batch_size=batch_size)
    work = make()
    work.collect()
    with pytest.raises(ConfigurationError, match="holds no base policy: call train_base"):
        work.train_offline()
    with pytest.raises(ConfigurationError, match="unknown baseline 'sft-filterd'.*Did you mean 'sft-filtered'"):
        work.prepare(baselines=["sft-filterd"])
    work.train_base(start)
    with pytest.raises(Killed):
        make(progress=kill).train_offline()
    assert not (work.models / "offline_rl").exists()
    work.train_offline()
    played = work.replay_buffer.trajectories(run=f"validate/{work.record('stage/offline_rl/best')['folder']}")
    assert {each.iteration for each in played} == {1, 2, 3}, "that of the pass before the kill too"
    version = (work.models / "offline_rl" / "version").read_text()
    make().train_offline()
    assert (work.models / "offline_rl" / "version").read_text() == version, "what is done is not done again"
    assert any(line.startswith(f"offline RL: {how}") for line in said)
    assert {path.name for path in work.models.iterdir()} == {"start", "base", "offline_rl"}
    assert not list((work.out / "checkpoints").rglob("*.pt")), "the checkpoints are gone"
    policies = ("base" if how.startswith("DPO") else "start", "offline_rl")
    before, after = (likelihood(work, name, "open") - likelihood(work, name, "kick") for name in policies)
    assert after > before


@pytest.mark.parametrize("batch_size", [4, 16], ids=["DPO", "weighted imitation"])
@pytest.mark.parametrize("validated", [True, False])
def test_baselines_are_prompted_and_stopped_as_their_start(tmp_path: Path, validated: bool, batch_size: int) -> None:
    """They learned and played other prompts than it (Qwen3's thinking was on again), and were exported so."""
    tokenizer = create_tokenizer(["open the door kick nothink"], vocab_size=320)
    tokenizer.chat_template += "{% if quiet %}nothink {% endif %}"
    model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=256)
    own: dict[str, Any] = {"stop": ["!"], "chat_template_kwargs": {"quiet": True}}
    settings = replace(Doors.settings, base_steps=1, batch_size=batch_size, policy_tokens=16, evaluate_tasks=2 * validated)
    work = Experiment(Doors(), tmp_path / "run", settings, progress=lambda *_: None)
    work.collect()
    work.train_base(LocalChatModel(model=model, tokenizer=tokenizer, **own))
    work.train_offline()
    for name in ("base", "offline_rl"):
        assert {key: work.policy(name).sampling[key] for key in own} == own
    (recorded, *_), options = work.offline(), {"max_new_tokens": 16, "chat_template_kwargs": own["chat_template_kwargs"]}
    work.play("here", work.policy("base"), work.tasks("test")[:1])
    (played,) = work.replay_buffer.trajectories(run="here", segments=True)
    (episode,) = imitation.with_segments(work, [recorded], work.models / "start")
    (row,) = work.world.policy_rows([recorded], tokenizer, **options)
    assert [*row.segment.token_ids] == [*episode.segments[0].token_ids]
    for segment in (row.segment, played.segments[0]):
        assert tokenizer.decode(segment.token_ids[: segment.sampled.index(1)]).endswith("nothink ")


@pytest.mark.parametrize("more", [True, False], ids=["more traces", "the same"])
def test_a_killed_imitation_keeps_its_evaluations_only_where_its_rows_are_the_same(
    more: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException): ...

    def kill(label: str, done: int, total: int) -> None:
        if label.startswith("base policy") and done == 2:
            raise Killed

    monkeypatch.setattr("dreamgym_lg.integrations.trl.sft.SAVE_SECONDS", 0)
    tokenizer = create_tokenizer(["open the door kick"], vocab_size=320)
    start = LocalChatModel(model=create_model(tokenizer, hidden_size=32, layers=1, max_tokens=256), tokenizer=tokenizer)
    work = Experiment(Doors(), tmp_path / "run", replace(Doors.settings, base_steps=3, policy_tokens=16), progress=kill)
    work.collect()
    with pytest.raises(Killed):
        work.train_base(start)
    before = work.record("stage/base/best")["folder"]
    if more:
        recorded = next(each for each in work.offline() if each.success)
        work.replay_buffer.add(replace(recorded, task=work.tasks("train")[3], rollout_index=9))
    work.progress = lambda *_: None
    work.train_base(start)
    after = work.record("stage/base/best")["folder"]
    played = [len(list(work.replay_buffer.trajectories(run=f"validate/{folder}"))) for folder in (before, after)]
    assert played == ([2, 6] if more else [6, 6]) and (before != after) == more


@pytest.mark.parametrize(("steps", "groups", "pairs"), [(3, 2, 4), (4, 3, 6), (None, 9, 18)])
def test_dpo_takes_no_more_steps_than_imitation_may(
    steps: int | None, groups: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imitation, "preference_pairs", lambda groups: [pair for group in groups for pair in group])
    work: Any = SimpleNamespace(settings=Settings(base_steps=steps, batch_size=8))
    recorded: Any = [["a pair", "another"]] * 9 + [[]]
    chosen, number = imitation._limit_pairs(work, recorded)
    assert (len(chosen), number) == (groups, pairs) and all(chosen)


def test_where_there_is_nothing_to_filter_it_is_said(tmp_path: Path) -> None:
    said = list[str]()
    work = Experiment(Doors(), tmp_path / "run", progress=lambda *_: None, say=said.append)
    work.collect()
    assert filtered(work) == []
    work.train_filtered()
    work.train_filtered()
    assert said == ["no filtered imitation: no recorded episode but the successes earned 75% of the highest reward"]
    assert filtered(work) == [0] and not (work.models / "filtered").exists()


def test_recorded_answers_that_the_dream_would_cut_off_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, said = list[str](), list[str]()
    monkeypatch.setattr(supervised, "fine_tune", lambda work, label, *_, **__: trained.append(label))
    for tokens in (3, 200):
        settings = replace(Doors.settings, experience_tokens=tokens)
        work = Experiment(Doors(), tmp_path / str(tokens), settings, say=said.append)
        work.collect()
        train_experience_model(work)
    assert trained == ["experience model"] * 2
    assert len(said) == 1
    assert re.match(r"5 of 5 answers .* experience_tokens=3 tokens .*: raise experience_tokens .* to \d\d or more", said[0])


def test_a_folder_keeps_its_settings_and_only_iterations_may_change(work: Experiment, tmp_path: Path) -> None:
    work.collect()
    Experiment(Doors(), work.out).open(replace(work.settings, iterations=99, num_tasks=3))
    assert Experiment(Doors(), work.out).settings == replace(work.settings, iterations=99, num_tasks=3)
    (work.out / "training.db").touch()
    with pytest.raises(ConfigurationError, match="was made with num_tasks=3, and num_tasks=4 is given"):
        Experiment(Doors(), work.out).open(replace(work.settings, num_tasks=4))
    with pytest.raises(ConfigurationError, match="seed=0, num_tasks=3, and seed=8, num_tasks=4 are given: give the old values"):
        Experiment(Doors(), work.out).open(replace(work.settings, num_tasks=4, seed=8))
    with pytest.raises(ConfigurationError, match="was made with retrieved=3, and retrieved=2 is given: give the old value"):
        Experiment(Doors(), work.out, replace(Experiment(Doors(), work.out).settings, retrieved=2)).collect()
    with pytest.raises(ConfigurationError, match="was made with world='tests/doors'"):
        Experiment(Shut(), work.out).open()


def test_what_train_was_called_with_holds_for_the_same_script_again(work: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script gives its own settings to the constructor, and others to `train`."""
    monkeypatch.setattr(Experiment, "_train", lambda *_: None)
    monkeypatch.setattr(Experiment, "_check_trainable", lambda *_: None)
    settings = replace(Doors.settings, retrieved=3)
    work = Experiment(Doors(), work.out, settings)
    work.collect()
    work.train(num_tasks=3, evaluate_every=2)
    (work.out / "training.db").touch()
    again = Experiment(Doors(), work.out, settings)
    again.collect()
    assert again.settings == replace(settings, num_tasks=3, evaluate_every=2)
    Experiment(Doors(), work.out, settings).train(iterations=99)
    with pytest.raises(ConfigurationError, match="was made with num_tasks=3, and num_tasks=4 is given"):
        Experiment(Doors(), work.out, settings).train(num_tasks=4)
    with pytest.raises(ConfigurationError, match="was made with num_generations="):
        Experiment(Doors(), work.out, replace(settings, num_generations=7)).collect()


def test_a_folder_of_another_version_says_so(work: Experiment) -> None:
    work.collect()
    file = work.out / "settings.json"
    file.write_text(file.read_text().replace('"base_steps"', '"base_paces"'))
    with pytest.raises(ConfigurationError, match="by another version of dreamgym-lg .*base_paces.*take another folder"):
        Experiment(Doors(), work.out)


def test_names_in_a_shared_buffer_are_this_folders_own(work: Experiment, tmp_path: Path) -> None:
    assert work.run_name("train") == "train"
    buffer = ReplayBuffer(tmp_path / "shared.db")
    names = [Experiment(Doors(), tmp_path / out, replay_buffer=buffer).run_name("train") for out in ("a", "b", "a")]
    assert names[0] == names[2] != names[1] and names[0].startswith("a-") and names[0].endswith("/train")


def test_real_validation_plays_the_real_environment_and_counts_its_steps(work: Experiment, scripted: Any) -> None:
    work.collect()
    flatters = scripted(reply=lambda _: "valid, it completes the task\nreward 1, success\nIt is open.")
    dream = Dream([Model(flatters, retries=0)])
    figures = validate(work, scripted(reply=lambda _: "kick"), dream, 1)
    assert figures["eval_dream_successes"] == 2 and figures["eval_real_successes"] == 0
    assert count_real_steps(work)["evaluation"] == 4
    work.settings = replace(work.settings, real_budget=0)
    assert not any(name.startswith("eval_real") for name in validate(work, scripted(reply=lambda _: "kick"), dream, 2))


def test_no_proof_without_a_policy_or_a_held_out_task(work: Experiment) -> None:
    with pytest.raises(ConfigurationError, match="holds no policy: call prepare"):
        work.prove()
    (work.models / "trained").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="no task of the split 'test'"):
        work.prove()


def test_training_needs_a_base_policy(work: Experiment) -> None:
    work.collect()
    with pytest.raises(ConfigurationError, match="holds no base policy: call train_base"):
        work.train()
    with pytest.raises(ConfigurationError, match="cannot be trained"):
        work.train(Random())  # type: ignore[arg-type]


def test_worlds_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch, work: Experiment) -> None:
    points = [EntryPoint("doors", "tests_doors:Doors", worlds.GROUP), EntryPoint("wrong", "builtins:dict", worlds.GROUP)]
    monkeypatch.setattr(worlds, "entry_points", lambda group: points)
    monkeypatch.setitem(__import__("sys").modules, "tests_doors", SimpleNamespace(Doors=Doors))
    assert isinstance(load_world("doors"), Doors)
    with pytest.raises(ConfigurationError, match="it has to be a World"):
        load_world("wrong")
    with pytest.raises(ConfigurationError, match="unknown world 'dors'.*Did you mean 'doors'"):
        load_world("dors")
    work.collect()
    again = open_folder(work.out, iterations=7)
    assert again.settings == replace(work.settings, iterations=7) and len(again.offline()) == 5
    with pytest.raises(ConfigurationError, match="has no settings.json"):
        open_folder(work.out / "models")


def test_a_folder_is_opened_with_the_arguments_its_world_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Wide(Doors):
        def __init__(self, width: int = 1) -> None:
            self.width, self.arguments = width, {"width": width}

    point = SimpleNamespace(name="doors", load=lambda: Wide)
    monkeypatch.setattr(worlds, "entry_points", lambda group: [point])
    Experiment(Wide(3), tmp_path / "run").collect()
    world = open_folder(tmp_path / "run").world
    assert isinstance(world, Wide) and world.width == 3
    with pytest.raises(ConfigurationError, match="made with arguments={'width': 3}, and arguments={'width': 1} is given"):
        Experiment(Wide(), tmp_path / "run").collect()


def test_the_policy_with_the_most_real_successes_is_kept_the_newest_of_equals(work: Experiment) -> None:
    from dreamgym_lg.experiment.choice import BestPolicy

    saved: list[tuple[Any, str]] = []
    offers = [(5, 4, 0.5), (10, 5, 0.2), (20, 4, 0.9), (30, 5, 0.1), (40, 5, 0.2), (50, 6, 0.0)]
    for at, successes, reward in offers:
        best = BestPolicy(work, "best")  # anew each time, as after a crash
        policy: Any = SimpleNamespace(save=lambda path, at=at: saved.append((at, path.name)))
        best.offer(at, successes, reward, policy)
    assert [model for model, _ in saved] == [5, 10, 40, 50] and {name for _, name in saved} == {"best"}


def test_an_engine_of_ones_own_answers_for_the_policy(work: Experiment, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from concurrent.futures import Future

    from tiny_models import create_model, create_tokenizer

    from dreamgym_lg.integrations.transformers.requests import Generated, Request
    from dreamgym_lg.integrations.trl.sft import save_model

    class Fixed:
        ends: frozenset[int] = frozenset()

        def submit(self, request: Request) -> "Future[Generated]":
            done: Future[Generated] = Future()
            done.set_result(Generated("open", [1], [2], [-0.5], "stop"))
            return done

        def clear(self) -> None: ...

    tokenizer = create_tokenizer(["open the door"] * 9, vocab_size=300)
    save_model(create_model(tokenizer, hidden_size=32, layers=1), tokenizer, work.models / "base")
    asked: list[Path] = []

    def engine(path: Path) -> Fixed:
        asked.append(path)
        return Fixed()

    served = Experiment(Doors(), work.out, engine=engine)
    served.collect()
    episodes = served.play("validate/real", served.base_policy(), served.tasks("test"))
    assert asked == [work.models / "base"] and [episode.success for episode in episodes] == [True, True]


def test_a_summary_counts_every_rollout_failed_ones_as_no_success() -> None:
    def episode(*valid: bool, **fields: Any) -> Trajectory:
        steps = [Step(observation="", action="", next_observation="", reward=float(each), valid=each) for each in valid]
        return Trajectory(task=Task(id="t", instruction="Go.", environment="t"), steps=steps, **fields)

    summary = summarise(
        [
            episode(False, True, success=True),
            episode(True),
            episode(False, error="PredictionFailed: what?"),
            episode(error="EnvironmentFailed: java died"),
        ]
    )
    assert (summary["successes"], summary["episodes"], summary["failed"]) == (1, 4, 2)
    assert summary["interval"] == list(wilson(1, 4))
    assert summary["invalid_action_share"] == 2 / 4 and summary["reward_mean"] == 2 / 4


def test_a_summary_of_nothing_claims_nothing() -> None:
    summary = summarise([])
    assert (summary["successes"], summary["episodes"], summary["failed"]) == (0, 0, 0)
    assert summary["interval"] == [0.0, 1.0] and summary["invalid_action_share"] == summary["reward_mean"] == 0.0


def test_actions_that_the_worlds_own_rules_refuse_are_no_real_steps(work: Experiment) -> None:
    class Strict(Door):
        def step(self, action: str) -> StepResult:
            return refused("No such word.") if action == "xyzzy" else super().step(action)

    steps = [record_action(action, "A closed door.", Strict().step(action)).step for action in ("xyzzy", "kick", "open")]
    work.replay_buffer.add(Trajectory(task=work.world.tasks("test")[0], steps=steps, source="real", run="validate/real"))
    assert count_real_steps(work)["evaluation"] == 2
