"""Training in the dream, in the real environment, and first in one and then in the other; every real step is counted."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dreamgym_lg import Environment, Experiment, Model, Settings, Task, World
from dreamgym_lg.environment import refused
from dreamgym_lg.errors import ConfigurationError, EpisodesMissing
from dreamgym_lg.experiment import advice
from dreamgym_lg.experiment.choice import choose_policy
from dreamgym_lg.experiment.evaluation import START, check_dreamed, count_real_steps, shown_episodes
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.experiment.lock import only_process
from dreamgym_lg.experiment.training import _warn_of_shared_entities, create_trl_learner
from dreamgym_lg.production.provenance import model_card, provenance
from dreamgym_lg.report.proof import _rows, _title, claims
from dreamgym_lg.types import Step, StepResult, Trajectory

pytest.importorskip("trl")
from tiny_models import create_model, create_tokenizer  # noqa: E402

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel  # noqa: E402
from dreamgym_lg.integrations.transformers.requests import Generated, Request  # noqa: E402
from dreamgym_lg.integrations.trl.sft import save_model  # noqa: E402


class Door(Environment):
    def reset(self, task: Task) -> str:
        return "A closed door."

    def step(self, action: str) -> StepResult:
        if action == "smash":
            return refused("You have no hammer.")
        opens = action == "open"
        return StepResult("It is open." if opens else "What?", float(opens), opens, False, {"success": opens, "valid": opens})


class Doors(World):
    name = "tests/doors"
    max_steps = 3

    def tasks(self, split: Any, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        door = "A closed door."
        ids = [f"{split}-{n}" for n in range(4)]
        return [Task(id=id, instruction="Open it.", environment=self.name, split=split, observation=door) for id in ids]

    def create_environment(self) -> Environment:
        return Door()


class Turns:
    """An engine whose replies take turns."""

    ends: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.asked = 0

    def submit(self, request: Request) -> "Future[Generated]":
        done: Future[Generated] = Future()
        self.asked += 1
        word = ("open", "kick", "smash")[self.asked % 3]
        done.set_result(Generated(word, [1], [2], [-0.5], "stop"))
        return done

    def clear(self) -> None: ...


class Counts:
    """A learner that has nothing but its durable count."""

    metrics: dict[str, float] = {"skipped": 0.0}

    def __init__(self, _: Any, path: Path, settings: Settings, **options: Any) -> None:
        self.file = path.with_suffix(".count")

    @property
    def iteration(self) -> int:
        return int(self.file.read_text()) if self.file.exists() else 0

    def update(self, groups: Any) -> dict[str, float]:
        self.file.write_text(str(self.iteration + 1))
        return self.metrics


Make = Callable[..., Experiment]
NUMBERS: dict[str, Any] = {
    "num_tasks": 2,
    "num_generations": 2,
    "concurrency": 1,
    "synthetic_share": 0.0,
    "max_false_success": None,
}


@pytest.fixture
def make(tmp_path: Path, scripted: Any) -> Make:
    tokenizer = create_tokenizer(["open the door"] * 9, vocab_size=300)
    save_model(create_model(tokenizer, hidden_size=32, layers=1), tokenizer, tmp_path / "run" / "models" / "base")
    dream = scripted(reply=lambda _: "valid, no progress yet\nreward 0, continues\nA dreamed door.")

    def make(policy_tokens: int = 9, **options: Any) -> Experiment:
        work = Experiment(
            Doors(),
            tmp_path / "run",
            Settings(evaluate_tasks=0, real_budget=0, policy_tokens=policy_tokens),
            create_learner=Counts,
            **{"engine": lambda _: Turns(), "experience_model": Model(dream, retries=0), **options},
        )
        if not (work.out / "settings.json").exists():
            work.collect()
        return work

    return make


def played(work: Experiment) -> list[str]:
    """Where the episodes of each iteration were played."""
    found: dict[int, set[str]] = {}
    for each in work.replay_buffer.trajectories(run="train"):
        found.setdefault(each.iteration, set()).add(each.source)
    assert all(len(places) == 1 for places in found.values())
    return [places.pop() for _, places in sorted(found.items())]


def counted(work: Experiment) -> int:
    """The steps that were not refused beforehand, from the records and from the metrics."""
    stored = work.replay_buffer.trajectories(source="real")
    steps = sum(step.action != "smash" for each in stored for step in each.steps)
    assert (
        steps == sum(row.get("real_steps", 0) for row in work.replay_buffer.metrics("train")) == count_real_steps(work)["train"]
    )
    return steps


def test_real_training_ends_when_its_steps_are_spent_and_goes_on_with_more(make: Make) -> None:
    said: list[str] = []
    work = make(say=said.append)
    work.train(iterations=9, environment="real", real_steps=8, **NUMBERS)
    first, spent = len(played(work)), counted(work)
    assert set(played(work)) == {"real"} and spent >= 8 and first < 9
    assert {each.experience_version for each in work.replay_buffer.trajectories(run="train")} == {""}
    assert said[-3] == f"the run ends after {first} of 9 iterations: {spent} real steps are spent (real_steps=8)"
    work.train(iterations=9, environment="real", real_steps=8, **NUMBERS)
    assert len(played(work)) == first, "it has ended"
    again = make()
    again.train(iterations=9, environment="real", real_steps=spent + 1, **NUMBERS)
    assert len(played(again)) == first + 1 and counted(again) > spent


@pytest.mark.parametrize(("policy_tokens", "share"), [(1, 1.0), (2, 0.0)])
def test_a_run_counts_replies_that_are_cut_off(policy_tokens: int, share: float, make: Make) -> None:
    work = make(policy_tokens=policy_tokens)  # every reply has one token
    work.train(iterations=2, environment="real", **NUMBERS)
    assert [row["cut_reply_share"] for row in work.replay_buffer.metrics("train")] == [share] * 2


def test_the_start_policy_collects_where_a_world_has_no_scripted_one(make: Make, tmp_path: Path) -> None:
    settings = Settings(episodes={"start": 6}, model=str(make().models / "base"), concurrency=1, policy_tokens=9)
    work = Experiment(Doors(), tmp_path / "other", settings, engine=lambda _: Turns())
    for _ in range(2):
        work.collect()
    recorded = work.offline()
    assert [each.source for each in recorded] == ["offline"] * 6 and {each.success for each in recorded} == {True}
    assert len({each.task.id for each in recorded}) == 4 and count_real_steps(work)["evaluation"] == 0
    assert count_real_steps(work)["offline"] >= 6, "what its own rules refuse is no real step"


def test_scripted_policies_and_the_start_policy_collect_beside_each_other(make: Make, tmp_path: Path) -> None:
    """The second kind of one task was taken for stored already, and lost."""

    class Scripted(Doors):
        numbered = True

        def collect(self, tasks: Any, episodes: Any, *, seed: int) -> Iterator[Trajectory]:
            step = Step(observation="A closed door.", action="kick", next_observation="What?", terminated=True)
            for number in range(min(episodes["kicks"], 6)):
                index = number // len(tasks) if self.numbered else 0
                yield Trajectory(task=tasks[number % len(tasks)], steps=[step], rollout_index=index)

    settings = Settings(episodes={"start": 6, "kicks": 300}, model=str(make().models / "base"), policy_tokens=9)
    for _ in range(2):
        (work := Experiment(Scripted(), tmp_path / "other", settings, engine=lambda _: Turns())).collect()
    assert Counter(len(each.steps) == 1 and each.steps[0].action == "kick" for each in work.offline()) == {True: 6, False: 6}
    work = Experiment(Scripted(), tmp_path / "third", settings, engine=lambda _: Turns())
    work.world.numbered = False  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="tests/doors: .* repeats a rollout_index of a task"):
        work.collect()


def test_a_collection_that_cannot_be_played_is_no_finished_stage(make: Make, tmp_path: Path) -> None:
    class Staging(Door):
        def reset(self, task: Task) -> str:
            if down:
                raise ConnectionError("staging is down")
            return super().reset(task)

    class Away(Doors):
        def create_environment(self) -> Environment:
            return Staging()

    down = ["down"]
    settings = Settings(episodes={"start": 6}, model=str(make().models / "base"), policy_tokens=9)
    work = Experiment(Away(), tmp_path / "other", settings, engine=lambda _: Turns())
    with pytest.raises(EpisodesMissing, match="4 of 4 episodes .*staging is down.*then the same command plays only these 4"):
        work.collect()
    down.clear()
    work.collect()
    assert len(work.offline()) == 6


def test_the_environment_of_the_page_is_prepared_and_trained(make: Make, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "world.md").read_text()
    (block,) = (each for each in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "class Doors(" in each)
    names: dict[str, Any] = {}
    exec(block.replace("runs/doors", str(tmp_path / "page")), names)
    few: dict[str, Any] = {"model": str(make().models / "base"), "episodes": {"start": 6}, "concurrency": 1, "policy_tokens": 9}
    settings = replace(names["Doors"].settings, environment="real", evaluate_tasks=0, base_steps=2, batch_size=2, **few)
    turns = Turns()
    turns.asked = 2  # the first episode opens at once
    work = Experiment(names["Doors"](), tmp_path / "other", settings, create_learner=Counts, engine=lambda _: turns)
    work.prepare()
    work.train(iterations=2, **{**NUMBERS, "environment": "real"})
    assert len(work.offline()) == 6 and played(work) == ["real"] * 2 and (work.models / "trained").exists()


def test_second_tries_are_imitated_from_the_start_weights(make: Make, tmp_path: Path) -> None:
    settings = Settings(
        **{
            "episodes": {"start": 2},
            "model": str(make().models / "base"),
            "base_steps": 2,
            "batch_size": 2,
            "evaluate_tasks": 0,
        },
        **{"environment": "real", "learner": "rft", "concurrency": 1, "policy_tokens": 9, "num_tasks": 9, "num_generations": 3},
    )
    said, turns = list[str](), Turns()
    turns.asked = 2  # the first episode opens at once, the others after two invalid actions
    work = Experiment(Doors(), tmp_path / "other", settings, engine=lambda _: turns, say=said.append)
    work.prepare(baselines=["sft"])
    turns.asked = 2
    for iterations in (1, 1, 2):  # ended, and gone on with
        work.train(iterations=iterations)
    solved = {each.task.id for each in work.offline() if not each.invalid_actions}
    tried = {each.task.id for each in work.replay_buffer.trajectories(run="train")}
    assert len(solved) == 1 and len(tried) == 3 and not solved & tried, "tasks that no recorded success solves"
    imitations = [line for line in said if line.startswith("rft0 policy: 2 episodes, 2 steps of 2; it begins with")]
    assert len(imitations) == 1, "a recorded success and a new one; the second iteration adds none"
    assert [row["solved_tasks"] for row in work.replay_buffer.metrics("train")] == [1, 1]
    trained, imitated = (dict(work.policy(name).model.named_parameters()) for name in ("trained", "rft0"))
    assert all(value.equal(imitated[name]) for name, value in trained.items())


def test_rollouts_sample_at_a_temperature_of_their_own_and_nothing_else_does(make: Make, scripted: Any) -> None:
    endings = cycle(("reward 1, success", "reward 0, failure"))
    model = Model(scripted(reply=lambda _: f"valid, as it comes\n{next(endings)}\nA dreamed door."), retries=0)
    work = make(engine=None, experience_model=model)
    work.create_learner = create_trl_learner
    (work.out / "settings.json").unlink()
    work.settings = replace(work.settings, evaluate_tasks=1)
    work.train(iterations=2, learner_options={"temperature": 1.7, "micro_batch_tokens": 512}, **NUMBERS)
    drawn = {
        each.run: {segment.temperature for segment in each.segments}
        for each in work.replay_buffer.trajectories(source="synthetic", segments=True)
    }
    assert drawn.pop("train") == {1.7} and len(drawn) > 1 and set().union(*drawn.values()) <= {0.0, 1.0}
    rows = work.replay_buffer.metrics("train")
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in rows if not row["skipped"]]
    assert gaps and max(gaps) < 1e-4, "the learner computes probabilities at the same temperature"
    assert work.policy("trained").temperature == 1


@pytest.fixture
def few(make: Make, tmp_path: Path) -> Callable[..., Experiment]:
    """An experiment of few steps in reality, whose start policy has collected episodes."""
    small = {"base_steps": 2, "batch_size": 2, "evaluate_tasks": 0, "concurrency": 1, "policy_tokens": 9}
    settings = Settings(episodes={"start": 6}, model=str(make().models / "base"), environment="real", **small)  # type: ignore[arg-type]
    turns = Turns()
    turns.asked = 2  # the first episode opens at once

    def few(**options: Any) -> Experiment:
        given = {"settings": settings, "create_learner": Counts, "engine": lambda _: turns, **options}
        work = Experiment(Doors(), tmp_path / "few", **given)
        work.collect()
        return work

    return few


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Other weights than those of the settings."""
    tokenizer = create_tokenizer(["open the door"] * 9, vocab_size=300)
    save_model(create_model(tokenizer, hidden_size=32, layers=1, seed=1), tokenizer, tmp_path / "other")
    return tmp_path / "other"


def test_training_begins_with_the_weights_of_the_baselines(few: Callable[..., Experiment], other: Path) -> None:
    """A proof played the untrained and the imitating policy of one model, and the trained one of another."""
    few().train_base()
    with pytest.raises(ConfigurationError, match=r"begin with '.*base', and '.*other' is given, with other weights"):
        few().train(other, 1, **{**NUMBERS, "environment": "real"})
    few().train(few().settings.model, 1, **{**NUMBERS, "environment": "real"})
    result = few().prove()
    assert list(result["real"]) == ["start", "base", "trained"] and result["began"] == ""


@pytest.mark.parametrize("restarted", [True, False])
def test_baselines_begin_with_the_weights_that_training_was_given(
    few: Callable[..., Experiment], other: Path, restarted: bool
) -> None:
    """They began with those of the settings, or none was trained; and `models/base`, the only copy, was overwritten."""
    (work := few()).train(other, 1, **{**NUMBERS, "environment": "real"})
    assert list(work.prove()["real"]) == ["start", "trained"]
    work = few() if restarted else work
    work.say = (said := list[str]()).append
    result = work.prove(baselines=["sft"])
    assert list(result["real"]) == ["start", "base", "trained"]
    (line,) = (each for each in said if each.startswith("base policy: "))
    assert line.endswith(f"it begins with {work.models / 'start'}")
    kept, own = (work.policy_at(path).model.state_dict() for path in (work.models / "start", other))
    assert all(value.equal(kept[name]) for name, value in own.items())
    assert provenance(work, work.policy("trained"))["base_model"] == "other"


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_the_trained_policy_goes_on_from_where_training_began(
    few: Callable[..., Experiment], given: bool, loaded: bool
) -> None:
    """KL term and DPO compared with the trained policy, and that was recorded as the start."""
    began = list[Path]()

    def create_learner(policy: LocalChatModel, *arguments: Any, **options: Any) -> Counts:
        began.append(Path(policy.name_or_path))
        return Counts(policy, *arguments, **options)

    numbers = {**NUMBERS, "environment": "real"}
    (work := few(create_learner=create_learner)).train_base()
    work.train(work.settings.model if given else None, 1, **numbers)
    trained = work.models / "trained"
    again = few(create_learner=create_learner)
    again.train(again.policy_at(trained) if loaded else trained, 2, **numbers)
    assert began == [Path(work.settings.model) if given else work.models / "base"] * 2 and len(played(again)) == 2
    assert again.prove()["began"] == ("" if given else "base")


def test_an_ended_training_refuses_settings_and_goes_on_with_more_iterations(make: Make) -> None:
    make().train(iterations=2, **NUMBERS)
    settings = (make().out / "settings.json").read_text()
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"num_task": 5}, r"unknown setting 'num_task'.*Did you mean 'num_tasks'\?.*learner_options={'num_task': ...}"),
        ({"iterations": 1}, "was made with iterations=2, and iterations=1 is given"),
    ]
    for options, message in refusals:
        with pytest.raises(ConfigurationError, match=message):
            make().train(**{"iterations": 2, **NUMBERS, **options})
    assert (make().out / "settings.json").read_text() == settings, "what is refused changes nothing"
    said: list[str] = []
    (work := make(say=said.append)).train(iterations=2, learner_options={"updates": 5}, **NUMBERS)
    assert len(played(work)) == 2 and "has ended, and these settings train nothing" in said.pop()
    work.settings = replace(work.settings, real_budget=None)  # as `dreamgym init` says, for the proof
    work.train(iterations=2, **NUMBERS)
    assert len(played(work)) == 2 and "has ended, and these settings train nothing" in said.pop()
    assert work.settings.real_budget is None and (work.out / "settings.json").read_text() == settings, (
        "what it was trained with"
    )
    work.train(iterations=3, learner_options={"updates": 5}, **NUMBERS)
    assert len(played(work)) == 3 and not any("has ended" in each for each in said)


def test_a_training_that_began_with_the_base_policy_refuses_another_and_writes_nothing(make: Make) -> None:
    make().train(iterations=1, **NUMBERS)
    settings = (make().out / "settings.json").read_text()
    for iterations in (1, 2):
        with pytest.raises(ConfigurationError, match="trains the policy .*, and 'other' is given"):
            (work := make()).train("other", iterations, **NUMBERS)
        assert work.start_policy is None, "train_base() still trains"
    assert (make().out / "settings.json").read_text() == settings
    make().train(make().models / "base", 1, **NUMBERS)


def test_a_policy_trained_in_reality_alone_is_proven_without_an_experience_model(make: Make) -> None:
    work = make(experience_model=None)
    work.train(iterations=1, environment="real", **NUMBERS)
    result = work.prove()
    assert set(result["real"]) == {"base", "trained"} and result["dream"] == {}
    assert all(found["episodes"] == 4 for modes in result["real"].values() for found in modes.values())
    metrics = work.replay_buffer.metrics("train")
    assert metrics[0]["train_success"] == 1, "the door was opened in every episode"
    title = _title(result)
    assert title.startswith("Trained in the real environment, ") and work.experience_version == ""
    other = Experiment(Doors(), work.out, replace(work.settings, iterations=40))
    assert other.prove()["iterations"] == 1, "it was trained so"
    assert provenance(other, other.policy("trained"))["training"]["settings"]["iterations"] == 1
    with ThreadPoolExecutor(1) as another:
        another.submit((lock := only_process(work.out)).__enter__).result()
        with pytest.raises(ConfigurationError, match="is at work in"):
            work.prove()
        another.submit(lock.__exit__, None, None, None).result()


class Says:
    """An engine that opens the door greedily, or never, and now and then at temperature 1."""

    ends: frozenset[int] = frozenset()

    def __init__(self, *, opens: bool) -> None:
        self.opens, self.turns = opens, Turns()

    def submit(self, request: Request) -> "Future[Generated]":
        if request.temperature:
            return self.turns.submit(request)
        done: Future[Generated] = Future()
        done.set_result(Generated("open" if self.opens else "kick", [1], [2], [-0.5], "stop"))
        return done

    def clear(self) -> None: ...


@pytest.mark.parametrize("opens", [True, False])
def test_the_export_samples_as_validation_found_best_and_its_card_says_so(make: Make, opens: bool) -> None:
    said: list[str] = []
    work = make(experience_model=None, engine=lambda _: Says(opens=opens), say=said.append)
    work.settings = replace(work.settings, evaluate_tasks=4, real_budget=None)
    (work.out / "settings.json").unlink()
    work.train(iterations=1, environment="real", **NUMBERS)
    kept = work.kept_policy()
    assert kept is not None and kept.temperature == (0 if opens else 1)
    why = f"successes on 4 validation tasks (real): greedy {4 if opens else 0}, sampled 4"
    assert f"{why}; export is {'greedy' if opens else 'at temperature 1'}" in said
    assert provenance(work, kept)["sampling_chosen"] == why
    assert provenance(work, kept.with_temperature(0.5 if opens else 0))["sampling_chosen"] == "", "the user's own"


def test_the_proof_and_a_new_process_sample_as_was_trained(make: Make) -> None:
    class Hears(Turns):
        def submit(self, request: Request) -> "Future[Generated]":
            heard.add((request.temperature, request.max_new_tokens, request.stop, str(request.template_kwargs)))
            return super().submit(request)

    heard = set[tuple[Any, ...]]()
    sampling: dict[str, Any] = {
        "temperature": 0.7,
        "max_new_tokens": 5,
        "stop": ["!"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    tokenizer = create_tokenizer(["open the door"] * 9, vocab_size=300)
    tokenizer.chat_template += "{% if enable_thinking %}{% endif %}"
    model = create_model(tokenizer, hidden_size=32, layers=1)
    work = make()
    shutil.rmtree(work.models / "base")
    save_model(model, tokenizer, work.models / "best")  # as an earlier release kept it: without how it samples
    work.train(LocalChatModel(model=model, tokenizer=tokenizer, engine=Hears(), **sampling), 1, environment="real", **NUMBERS)
    trained = heard.copy()
    later = Experiment(Doors(), work.out, engine=lambda _: Hears())
    result = later.prove()
    assert trained == {(0.7, 5, ("!",), "{'enable_thinking': False}")} and heard == trained | {(0, *[*trained][0][1:])}
    kept = later.kept_policy()
    assert kept is not None and kept.sampling == sampling
    assert claims(result)[0]["sentence"].startswith("Real success (temperature 0.7) on 4 held-out episodes: ")
    elsewhere = Experiment(Doors(), later.out.with_name("other"), replace(later.settings, policy_tokens=6))
    assert elsewhere.policy_at(later.models / "trained").sampling == sampling | {"max_new_tokens": 6}


def test_the_kept_policy_is_chosen_on_validation_tasks_and_the_start_is_a_row_of_its_own(make: Make) -> None:
    work = make(experience_model=None)
    work.train(iterations=1, environment="real", **NUMBERS)
    work.settings = replace(work.settings, evaluate_tasks=4)
    for file in ("settings.json", "result.json"):
        (work.out / file).unlink(missing_ok=True)
    work.engine = lambda path: Says(opens=path.name == "base")
    work.replay_buffer.record_metrics(work.run_name(START), 0, {"path": str(work.models / "base")})
    result = work.prove()
    assert list(result["real"]) == ["start", "base", "trained"]
    assert all(set(modes) == {"greedy", "sampled"} for modes in result["real"].values()) and "start" not in result["validation"]
    assert [result["validation"][name]["greedy"]["successes"] for name in ("base", "trained")] == [4, 0]
    assert result["shared_entities"] == {f"test-{n}": "a closed door" for n in range(4)}, "they say what training tasks say"
    keep = result["keep"]
    assert (keep["policy"], keep["mode"]) == ("base", "greedy")
    assert keep["why"].startswith("successes on 4 real validation tasks: base (greedy) 4, base (sampled) ")
    kept = work.kept_policy()
    assert kept is not None and kept.temperature == 0 and kept.name_or_path == str(work.models / "base")


def test_without_a_training_the_baselines_are_proven_and_the_best_is_exported(make: Make) -> None:
    work = make(experience_model=None)
    work.settings = replace(work.settings, evaluate_tasks=4)
    shutil.copytree(work.models / "base", work.models / "offline_rl")
    (work.models / "offline_rl" / "version").write_text("another")
    assert (kept := work.kept_policy()) is not None and kept.name_or_path == str(work.models / "base")
    work.engine = lambda path: Says(opens=path.name == "offline_rl")
    work.replay_buffer.record_metrics(work.run_name(START), 0, {"path": str(work.models / "base")})
    result = work.prove()
    assert list(result["real"]) == ["start", "base", "offline_rl"]
    assert _title(result).startswith("Policies without a dream, in the real environment: tests/doors")
    assert result["iterations"] == 0 and result["began"] == ""
    assert [each.source for each in shown_episodes(work)] == ["real"] * 3
    greedy = next(each for each in claims(result) if "(greedy)" in each["sentence"])
    assert "start, untrained 0.00" in greedy["sentence"] and "offline RL, no dream 1.00" in greedy["sentence"]
    assert greedy["word"] == "not proven" and "4 of 4 held-out tasks share" in greedy["verdict"]
    greedy = claims(result | {"shared_entities": {}})[-1]
    assert greedy["verdict"].startswith("proven: offline RL, no dream − start, untrained +1.00"), "of the one validation chose"
    assert not any(row.policy == "trained" for row in _rows(result))
    assert (result["keep"]["policy"], result["keep"]["mode"]) == ("offline_rl", "greedy")
    kept = work.kept_policy()
    assert kept is not None and kept.temperature == 0 and kept.name_or_path == str(work.models / "offline_rl")
    (work.out / "training.db").touch()
    assert work.kept_policy() is None, "a training has begun and not ended"
    with pytest.raises(ConfigurationError, match=r"no trained policy: its training has not ended, and the same train\(\) goes"):
        work.prove()
    (work.out / "training.db").unlink()
    work.engine = lambda _: Says(opens=True)
    assert work.train(iterations=1, environment="real", **NUMBERS).name_or_path == str(work.models / "trained")
    kept = work.kept_policy()
    assert kept is not None and kept.name_or_path == str(work.models / "trained"), "the old proof was of other policies"


def test_what_held_out_tasks_show_chooses_no_policy() -> None:
    def result(validation: dict[str, int], test: dict[str, int]) -> dict[str, Any]:
        def rates(numbers: dict[str, int]) -> dict[str, Any]:
            def rate(n: int) -> dict[str, Any]:
                return {
                    "successes": n,
                    "episodes": 40,
                    "interval": [0, 1],
                    "outcomes": {str(task): task < n for task in range(40)},
                }

            return {name: {"sampled": rate(n)} for name, n in numbers.items()}

        return {"validation": rates(validation), "real": rates(test), "filtered": 0, "offline_rl": ""}

    better, worse = {"base": 20, "trained": 30}, {"base": 30, "trained": 20}

    def choose(validation: dict[str, int], test: dict[str, int]) -> str:
        return choose_policy(result(validation, test), "trained")[0]

    assert choose(better, worse) == "trained" and choose(worse, better) == "base"
    assert choose({"base": 20, "trained": 20}, better) == "base", "as good: without a dream"
    assert [choose({}, test) for test in (better, worse)] == ["trained", "base"], "nothing else tells"


def test_sim_to_real_dreams_first_and_goes_on_in_the_part_that_was_killed(make: Make) -> None:
    class Killed(BaseException): ...

    def kill(label: str, iteration: int, total: int) -> None:
        if (label, iteration) == ("train: update_policy", 3):
            raise Killed

    options = {"iterations": 2, "environment": "s2r", "real_steps": 16, **NUMBERS}
    with pytest.raises(Killed):
        make(progress=kill).train(**options)
    nodes: list[tuple[str, int]] = []
    work = make(progress=lambda label, done, total: nodes.append((label, done)))
    work.train(**options)
    assert nodes[0] == ("train: update_policy", 3), "nothing that was finished is done again"
    assert played(work)[:4] == ["synthetic", "synthetic", "real", "real"] and set(played(work)[2:]) == {"real"}
    spent = counted(work)
    assert spent >= 16 and Counts(None, work.models / "policy", work.settings).iteration == len(played(work))
    per_iteration = [row["real_steps"] for row in work.replay_buffer.metrics("train") if row.get("real_steps")]
    assert spent - per_iteration[-1] < 16, "the iteration that reaches the limit is the last"
    with pytest.raises(ConfigurationError, match="iterations=3: the dreamed part of this training ended after 2"):
        make().train(**{**options, "iterations": 3})
    assert json.loads((work.out / "settings.json").read_text())["environment"] == "s2r"
    result = work.prove()
    assert list(result["real"]) == ["base", "dreamed", "trained"] and set(result["real"]["dreamed"]) == {"greedy", "sampled"}
    dreamed = list(work.replay_buffer.trajectories(run="train", source="synthetic"))
    assert result["dreamed_steps"]["decided_by"] == {"model": sum(len(each.steps) for each in dreamed)}
    rollouts = [row["seconds_rollout"] for row in work.replay_buffer.metrics("train")]
    assert result["dreamed_steps"]["seconds"] == sum(rollouts[:2]) < sum(rollouts), "the real part is left out"
    versions = [policy_version(work.models / name) for name in ("dreamed", "trained")]
    played_by = {each.run.rpartition("/")[2] for each in work.replay_buffer.trajectories(source="real") if "proof" in each.run}
    assert versions[0] != versions[1] and played_by >= {*versions}
    rest = {"sampling": work.policy("trained").sampling, "agent": None, "parameters": 1, "created": "today"}
    card = model_card("mine", provenance(work, work.policy("trained")) | rest)
    assert "| dream, before the real part | real | test | sampled | " in card


def test_a_policy_that_broke_in_the_dream_acts_on_no_real_tool(make: Make) -> None:
    class Breaks(Turns):
        def submit(self, request: Request) -> "Future[Generated]":
            reply = super().submit(request)
            if self.asked > 12:  # four episodes of three steps
                reply.result().sampled_ids.extend([2] * 8)
                reply.result().logprobs.extend([-0.5] * 8)
            return reply

    work = make(say=(said := list[str]()).append, engine=lambda _: Breaks())
    for _ in range(2):
        work.train(iterations=5, environment="s2r", real_steps=16, **NUMBERS)
    assert played(work) == ["synthetic"] * 2 and Counts(None, work.models / "policy", work.settings).iteration == 1
    told = "the run ends after 1 of 5 iterations: the policy is broken: 100% of the policy's replies are cut off"
    assert any(line.startswith(told) for line in said)
    assert "has ended" in said[-1] and (work.models / "trained").exists()


@pytest.mark.parametrize("gated", [True, False])
def test_advice_says_what_was_measured_before_a_training(make: Make, gated: bool) -> None:
    said: list[str] = []
    work = make(say=said.append)
    (work.out / "settings.json").unlink()
    numbers = {**NUMBERS, "evaluate_tasks": 4, "real_budget": None, "max_false_success": 0.05 if gated else None}
    work.settings = replace(work.settings, **numbers)
    work.replay_buffer.record_metrics(work.run_name(START), 0, {"path": str(work.models / "base")})
    work.replay_buffer.record_metrics(work.run_name("stage/base/best"), 0, {"folder": "base-1", "validation": "real 4"})
    work.replay_buffer.record_metrics(work.run_name("best/base-1"), 0, {"successes": 3, "reward": 0.75})
    first, again = work.advise(), work.advise()
    began = policy_version(work.models / "base")
    assert first == again and first.verdict == "collect"
    runs = Counter(each.run for each in work.replay_buffer.trajectories() if "advice" in each.run or "start" in each.run)
    assert runs == {f"validate/start/{began}": 4, f"advice/{began}/dream@{work.dream().version}": 4}, (
        "what is stored is not played again"
    )
    line = said[-1]
    assert line.startswith("advice: collect. start, untrained 4 of 4 validation tasks; imitation of every success 3 of 4 valid")
    assert "2 of 2 dreamed groups teach nothing. " in line
    told = "the gate refuses the dream: the responder 'model' accepts 4 of 4 invalid" if gated else "import successes for"
    assert first.why.startswith(told) and line.endswith(first.why)
    kept = work.record("advice")
    assert (kept["verdict"], kept["why"], kept["learner"]) == (*first, "grpo") and kept["figures"] in line
    work.settings = replace(work.settings, environment="real")
    assert work.advise() == ("train", "train() may add to it, and prove() tells whether it did"), "without a dream"
    for panel, changed in (
        ("real 1", {"evaluate_tasks": 1}),
        ("real 0", {"evaluate_tasks": 0}),
        ("dreamed 4", {"real_budget": 0}),
    ):
        del said[:]
        work.settings = replace(work.settings, **{"evaluate_tasks": 4, "real_budget": None, **changed})
        assert work.advise().verdict == "train"
        assert f"leaves out validation, as the baselines had other tasks (now {panel}, then real 4)" in said[0]
        assert "validation tasks" not in said[1], "3 of 1 was an error, and 3 of 4 of other tasks says nothing"


@pytest.mark.parametrize("start", [True, False], ids=["of the start policy", "of the groups"])
def test_no_advice_follows_from_episodes_that_were_stopped_from_outside(
    start: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(work: Any, run: str, *_: Any, **__: Any) -> list[Trajectory]:
        return [unreadable, away] if run.startswith("validate/start/") == start else [unreadable]

    task = Task(id="new", instruction="open", environment="doors")
    unreadable = Trajectory(task=task, steps=(), error="PredictionFailed: x")
    away = replace(unreadable, error="ModelUnavailable: y")
    work = make()
    (work.out / "settings.json").unlink()
    numbers = {**NUMBERS, "evaluate_tasks": 4, "real_budget": None, "max_false_success": None}
    work.settings = replace(work.settings, **numbers)
    monkeypatch.setattr(type(work), "play", play)
    with pytest.raises(EpisodesMissing, match="ModelUnavailable: y"):
        work.advise()
    away = unreadable
    assert work.advise().verdict == "collect", "all may fail"


def test_advice_says_how_many_groups_the_dream_left_without_an_answer() -> None:
    played = Trajectory(task=Task(id="new", instruction="open", environment="doors"), steps=())
    groups = [[replace(played, error="Unanswered: x"), played], [played], [played]]
    line = "2 of 3 dreamed groups teach nothing, 1 of them because the dream did not answer"
    assert advice._useless_groups(groups, lambda group: group is groups[2]) == [line]
    assert advice._useless_groups(groups[1:], bool) == ["0 of 2 dreamed groups teach nothing"]
    assert advice._useless_groups([], bool) == []


def test_advice_says_what_second_tries_would_imitate() -> None:
    task = Task(id="new", instruction="open", environment="doors")
    won, lost = (Trajectory(task=task, steps=(), success=success) for success in (True, False))
    known = replace(won, task=replace(task, id="known"))
    groups = [[lost, won], [lost, lost], [known, known]]
    assert advice._second_tries(groups, {"known"}) == [
        "the dream solves 1 of 2 tasks that no trace solves, and learner='rft' would imitate them"
    ]
    assert advice._second_tries(groups[1:], {"known"}) == []


def test_nobody_is_advised_to_train_where_drawn_tasks_lost_a_tool(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "conclude", lambda *_: advice.Advice("train", "it may add"))
    monkeypatch.setattr(advice, "underrepresented_tools", lambda *_: ["refund"])
    work = make()
    (work.out / "settings.json").unlink()
    work.settings = replace(work.settings, **{**NUMBERS, "real_budget": 0, "max_false_success": None})
    verdict, why = work.advise()
    assert verdict == "collect" and "hardly call refund" in why


def test_a_group_of_one_episode_teaches_ppo(make: Make) -> None:
    work, said = make(say=(lines := list[str]()).append), lines
    (work.out / "settings.json").unlink()
    own = {**NUMBERS, "real_budget": 0, "max_false_success": None, "learner": "ppo", "num_generations": 1}
    work.settings = replace(work.settings, **own)
    work.advise()
    assert "0 of 2 dreamed groups teach nothing" in said[-1]
    work.advise("grpo")
    assert "2 of 2 dreamed groups teach nothing" in said[-1] and work.settings.learner == "ppo"


def test_dream_and_reality_take_turns_until_the_real_steps_are_spent(make: Make) -> None:
    class Killed(BaseException): ...

    def kill(label: str, iteration: int, total: int) -> None:
        if (label, iteration) == ("train: update_policy", 3):
            raise Killed

    options = {"iterations": 8, "environment": "dream+real", "real_steps": 12, "real_every": 2, **NUMBERS}
    with pytest.raises(Killed):
        make(progress=kill).train(**options)
    reported: list[str] = []
    work = make(say=reported.append)
    work.train(**options)
    places, spent = played(work), counted(work)
    turns = places.count("real")
    assert len(places) == 8 and places == ["synthetic", "real"] * turns + ["synthetic"] * (8 - 2 * turns) and turns < 4
    per_iteration = [row["real_steps"] for row in work.replay_buffer.metrics("train") if "real_steps" in row]
    assert spent >= 12 > spent - per_iteration[-1] and len(per_iteration) == turns
    versions = {each.source: each.experience_version for each in work.replay_buffer.trajectories(run="train")}
    assert versions["real"] == "" != versions["synthetic"]
    found = work.replay_buffer.similar("A closed door.", "open", k=9)
    assert any(step.next_observation == "It is open." for step in found), "the dream is shown what was really played"
    assert sum("real success" in line for line in reported if line.startswith("iteration ")) == turns - 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"environment": "reality"}, "unknown environment 'reality'; known: dream, dream.real, real, s2r"),
        ({"iterations": -1}, "iterations=-1: give a number of at least 1"),
        ({"proof_tasks": 0}, "proof_tasks=0: give a number of at least 1"),
        ({"synthetic_share": 1.5}, "synthetic_share=1.5: give a share between 0 and 1"),
        ({"environment": "s2r"}, "environment='s2r' with real_steps=None: give the steps of its real part"),
        ({"real_steps": 100}, "real_steps=100: a training in the dream spends none"),
        ({"environment": "s2r", "real_steps": 0}, "real_steps=0"),
        ({"environment": "dream+real"}, "environment='dream.real' with real_steps=None: give the steps of its real part"),
        ({"resample": 4, "learner": "ppo"}, "resample=4, learner='ppo': give 0, or"),
    ],
)
def test_where_it_cannot_train_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Settings(**given)


def test_training_says_how_many_tasks_name_what_a_held_out_one_names() -> None:
    said: list[str] = []
    texts = {"train": ["Refund K-100.", "Where is K-101?"], "validation": ["Cancel K-102."], "test": ["Where is k100?"]}
    tasks = {
        split: [Task(id=f"{split} {number}", instruction=text, environment="desk") for number, text in enumerate(each)]
        for split, each in texts.items()
    }
    _warn_of_shared_entities(SimpleNamespace(tasks=tasks.__getitem__, say=said.append))  # type: ignore[arg-type]
    assert len(said) == 1 and said[0].startswith("1 of 2 training tasks name an id, amount or name that a held-out task names")
    assert "such as 'train 0'" in said[0]


def test_a_dream_that_answers_no_held_out_task_ends_no_training(make: Make) -> None:
    """It used to be `EpisodesMissing`, after hours."""
    work = make(say=(said := list[str]()).append)
    task = Doors().tasks("test")[0]
    unanswered, refused_ = (Trajectory(task=task, error=f"{kind}: about an id") for kind in ("Unanswered", "AccessBlocked"))
    assert check_dreamed(work, [unanswered] * 3) == []
    assert said == ["nothing was evaluated in the dream: it answers none of 3 episodes; Unanswered: about an id"]
    assert check_dreamed(work, both := [unanswered, Trajectory(task=task)]) == both and "1 of 2 dreamed episodes" in said.pop()
    with pytest.raises(EpisodesMissing):
        check_dreamed(work, [unanswered, refused_])
