"""The command line of an experiment: the three forms of a WORLD, its help, its errors, and what each command leaves."""

import json
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click
import pytest
import typer.main
from typer.testing import CliRunner

from dreamgym_lg import Experiment
from dreamgym_lg.cli.app import app
from dreamgym_lg.cli.experiment import open_experiment, open_folder
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import world as worlds
from dreamgym_lg.experiment.world import load_world
from dreamgym_lg.production.export import read_manifest

COMMANDS: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OF_A_WORLD = {"demo", "collect", "train", "eval", "export", "fidelity", "play"}

APP = """
from dreamgym_lg import Environment, Experiment, Settings, Step, Task, Trajectory, World
from dreamgym_lg.types import StepResult

class Door(Environment):
    def reset(self, task):
        return "A closed door."

    def step(self, action):
        return StepResult("It is open.", 1.0, True, False, {"success": True})

class Doors(World):
    name = "house/doors"
    settings = Settings(seed=7, episodes={"opens": 24}, iterations=5)

    def tasks(self, split, *, limit=None, seed=0):
        return [Task(id=f"{split}-{seed}", instruction="Open the door.", environment=self.name, split=split)]

    def create_environment(self):
        return Door()

    def collect(self, tasks, episodes, *, seed):
        step = Step(observation="A closed door.", action="open", next_observation="It is open.", reward=1.0, terminated=True)
        for index in range(episodes["opens"]):
            yield Trajectory(task=tasks[0], steps=[step], success=True, rollout_index=index)

class Stopped(Doors):
    def collect(self, tasks, episodes, *, seed):
        raise KeyboardInterrupt

class Broken(Doors):
    def tasks(self, split, *, limit=None, seed=0):
        from dreamgym_lg.errors import EnvironmentFailed
        raise EnvironmentFailed("the hinge [bold]broke[/bold]")

world = Doors()
experiment = Experiment(world, "runs/own")
another = Experiment(world, "runs/own")

def create_world():
    return Doors()

def create_experiment():
    return Experiment(Doors(), "runs/own")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with my_world.py in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_world", raising=False)
    (tmp_path / "my_world.py").write_text(APP)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})
    assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
    return shown.exit_code, shown.output


def refused(*arguments: str) -> str:
    """What a command says that ends with an error: it is said once, without a traceback."""
    code, shown = run(*arguments)
    assert code == 2, shown
    assert shown.count("error:") == 1 and "Traceback" not in shown
    return shown


# --- help ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_a_command_s_help_are_commands(command: str, folder: Path) -> None:
    for name in ("replay.db", "traces.jsonl"):
        (folder / name).touch()
    examples = str(COMMANDS[command].epilog).removeprefix("Examples: ").split("; ")
    for example in examples:
        program, name, *arguments = shlex.split(example.removeprefix("[b]").removesuffix("[/b]"))
        assert (program, name) == ("dreamgym", command)
        COMMANDS[name].make_context(name, arguments)
    assert examples[0].removeprefix("[b]").removesuffix("[/b]") in run(command, "--help")[1]


@pytest.mark.parametrize("command", sorted(OF_A_WORLD))
def test_help_says_the_three_forms_of_a_world(command: str) -> None:
    shown = " ".join(run(command, "--help")[1].replace("│", " ").split())
    assert f"A world's name ({', '.join(worlds.world_names())})" in shown
    assert "FILE.py:NAME of an experiment or a world" in shown and "the folder of an experiment" in shown


def test_commands_that_only_read_an_experiment_take_no_settings() -> None:
    options = {name: {each.name for each in command.params} for name, command in COMMANDS.items()}
    everywhere = {"world", "seed", "out", "iterations", "learner", "report_to", "model"}
    of_training = {
        "force",
        "references_only",
        "environment",
        "real_steps",
        "lora",
        "servers",
        "baselines",
        "policy",
        "reflection",
    }
    assert options["demo"] == options["train"] - of_training == everywhere
    assert options["eval"] == options["collect"] == {"world", "seed", "out"}
    assert options["export"] == {"world", "folder", "temperature", "overwrite"}


def test_force_lifts_the_gap_of_the_settings_alone_and_the_gate_for_one_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[dict[str, object]]()
    monkeypatch.setattr(Experiment, "prepare", lambda self, baselines: None)
    monkeypatch.setattr(Experiment, "advise", lambda self: None)
    monkeypatch.setattr(Experiment, "train", lambda self, **options: given.append(options))
    for options in ([], ["--force"]):
        assert run("train", "peckingorder", *options)[0] == 0
    assert given == [{"servers": (), "force": False}, {"servers": (), "force": True, "max_gap": None}]
    assert open_experiment("peckingorder").settings.max_gap == 0.3


def test_settings_of_a_training_reach_it_and_so_hold_for_later_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[dict[str, object]]()
    monkeypatch.setattr(Experiment, "prepare", lambda self, baselines: None)
    monkeypatch.setattr(Experiment, "advise", lambda self: None)
    monkeypatch.setattr(Experiment, "train", lambda self, **options: given.append(options))
    assert run("train", "peckingorder", "--lora", "--environment", "real", "--iterations", "3")[0] == 0
    assert given[0].items() >= {"lora": True, "environment": "real", "iterations": 3}.items() and "model" not in given[0]


def test_the_learner_and_where_it_trains_are_settings(folder: Path) -> None:
    usual = open_experiment("peckingorder").settings
    given = {"learner": "ppo", "environment": "s2r", "real_steps": 500}
    assert open_experiment("peckingorder", **given).settings == replace(usual, **given)
    assert "unknown learner 'pppo'; known: dpo, grpo, ppo, rft, tinker" in refused("train", "peckingorder", "--learner", "pppo")
    assert "give the steps of its real part" in refused("train", "peckingorder", "--environment", "s2r")


# --- a world's name -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", sorted(OF_A_WORLD - {"export"}))
def test_an_unknown_world_names_the_nearest(command: str, folder: Path) -> None:
    assert "unknown world 'peckingoder'" in (shown := refused(command, "peckingoder"))
    assert "Did you mean 'peckingorder'?" in shown
    assert {path.name for path in folder.iterdir()} == {"my_world.py"}, "nothing was made"


def test_a_name_has_a_folder_of_its_own_for_each_seed(folder: Path) -> None:
    first, second = open_experiment("twc"), open_experiment("twc", seed=2, iterations=9, num_tasks=3)
    assert (str(first.out), first.settings.seed) == ("runs/twc-seed1", 1)
    assert (str(second.out), second.settings.seed) == ("runs/twc-seed2", 2)
    assert str(open_experiment("twc", seed=0).out) == "runs/twc-seed0"
    assert (second.settings.iterations, second.settings.num_tasks) == (9, 3)
    assert open_experiment("twc", references_only=True).settings.references_only and not second.settings.references_only
    assert first.settings.iterations == first.world.settings.iterations
    assert open_experiment("twc", out=folder / "here").out == folder / "here"


def test_a_world_s_name_is_no_path_though_a_folder_is_called_so(folder: Path) -> None:
    (folder / "twc").mkdir()
    assert open_experiment("twc").world.name == "textworld_express/twc"


def test_what_reads_an_experiment_takes_the_settings_that_it_was_made_with(folder: Path) -> None:
    open_experiment("twc", seed=2, num_tasks=9).open()
    assert open_experiment("twc", seed=2, existing=True).settings.num_tasks == 9
    open_experiment("twc", seed=2).open()  # what only training reads may change until it has begun
    (folder / "runs" / "twc-seed2" / "training.db").touch()
    with pytest.raises(ConfigurationError, match="was made with num_tasks=9, and num_tasks=8 is given"):
        open_experiment("twc", seed=2).open()
    with pytest.raises(ConfigurationError, match="was made with seed=2, and seed=3 is given"):
        open_experiment("twc", seed=3, out=folder / "runs" / "twc-seed2", existing=True).check_settings()
    open_experiment("twc", seed=2, num_tasks=9, max_gap=0.9).open()  # what ended by the gap goes on
    for command in ("eval", "fidelity", "play"):
        shown = refused(command, "twc")
        assert (
            "the folder 'runs/twc-seed1' does not exist. Did you mean 'runs/twc-seed2'? `dreamgym train WORLD` makes" in shown
        )
    assert not (folder / "runs" / "twc-seed1").exists()


def test_a_folder_of_other_settings_is_left_alone(folder: Path) -> None:
    other = open_experiment("twc", out=folder / "run")
    other.open()
    before = (folder / "run" / "settings.json").read_text()
    shown = refused("collect", "peckingorder", "--out", "run")
    assert "world='textworld_express/twc'" in shown and "and world='textworld_express/peckingorder'" in shown
    assert "on the world 'textworld_express/twc', not 'textworld_express/peckingorder'" in refused(
        "eval", "peckingorder", "--out", "run"
    )
    assert (folder / "run" / "settings.json").read_text() == before


# --- FILE.py:NAME -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["world", "Doors", "create_world"])
def test_a_world_of_ones_own(name: str, folder: Path) -> None:
    given = f"my_world.py:{name}"
    assert run("collect", given)[0] == 0
    made = open_folder(folder / "runs" / "doors-seed1", open_experiment(given).world)
    assert made.settings.seed == 1 and [task.id for task in made.tasks("train")] == ["train-1"]
    assert len(made.offline()) == 24

    code, shown = run("collect", given, "--seed", "3", "--out", "there")
    assert code == 0 and "24 trajectories, 24 steps in there" in shown
    assert [task.id for task in open_experiment(given, out=folder / "there", existing=True).tasks("train")] == ["train-3"]


@pytest.mark.parametrize("name", ["experiment", "create_experiment"])
def test_an_experiment_of_ones_own_keeps_its_seed_and_folder_unless_told(name: str, folder: Path) -> None:
    given = f"my_world.py:{name}"
    code, shown = run("collect", given)
    assert code == 0 and "24 trajectories, 24 steps in runs/own" in shown
    assert json.loads(Path("runs/own/settings.json").read_text())["seed"] == 7
    assert [task.id for task in open_experiment(given).tasks("train")] == ["train-7"]

    sys.modules.pop("my_world")
    assert run("collect", given, "--seed", "3", "--out", "there")[0] == 0
    assert json.loads(Path("there/settings.json").read_text())["seed"] == 3
    sys.modules.pop("my_world")
    assert "was made with seed=7, and seed=3 is given" in refused("collect", given, "--seed", "3")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("my_world.py", "FILE.py:NAME"),
        ("my_world.py:wrld", "Did you mean 'world'?"),
        ("my_world.py:Door", "of type Door; give an Experiment, a World"),
        ("none.py:world", "none.py is not a file"),
    ],
)
def test_what_is_no_experiment_is_said(given: str, said: str, folder: Path) -> None:
    assert said in refused("train", given)


# --- a folder -----------------------------------------------------------------------------------------------------------------


def test_a_folder_is_opened_with_its_settings(folder: Path) -> None:
    open_experiment("twc", seed=5, num_tasks=2).open()
    again = open_experiment("runs/twc-seed5", iterations=99)
    assert (again.world.name, again.settings.seed) == ("textworld_express/twc", 5)
    assert (again.settings.num_tasks, again.settings.iterations) == (2, 99)
    for option in (["--seed", "1"], ["--out", "x"]):
        assert "leave --seed and --out away" in refused("train", "runs/twc-seed5", *option)


@pytest.mark.parametrize("command", ["train", "eval", "fidelity", "play", "serve"])
def test_a_mistyped_folder_is_one_that_does_not_exist(command: str, folder: Path) -> None:
    (folder / "runs" / "mine").mkdir(parents=True)
    assert "the folder 'runs/mien' does not exist. Did you mean 'runs/mine'?" in refused(command, "runs/mien")


@pytest.mark.parametrize("name", ["runs/mien", "./mien", "models/mine/experience-0"])
def test_a_mistyped_model_folder_is_no_name_of_the_hub(name: str, folder: Path) -> None:
    from dreamgym_lg.integrations.transformers.loading import load_tokenizer

    (folder / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"the folder '.*' does not exist"):
        load_tokenizer(name)


def test_the_version_is_the_package_s() -> None:
    assert run("--version") == (0, f"{version('dreamgym-lg')}\n")


FACTORIES = """
from my_world import Doors, Experiment

def seeded(seed, *, out="runs/own"):
    return Experiment(Doors(), out)

def configured(*, config):
    assert config == {"configurable": {}}
    return Experiment(Doors(), "runs/own")

def needy(store, *, runtime):
    raise AssertionError
"""


def test_a_factory_gets_the_arguments_that_it_names(folder: Path) -> None:
    (folder / "factories.py").write_text(FACTORIES)
    assert open_experiment("factories.py:seeded", seed=3, out=Path("there")).out == Path("there")
    assert open_experiment("factories.py:seeded", seed=3).settings.seed == 3
    assert open_experiment("factories.py:configured").world.name == "house/doors"
    shown = refused("collect", "factories.py:needy", "--seed", "2")
    assert "needs store, runtime; a factory's parameters may be named config, seed" in shown


@pytest.mark.slow
def test_bars_of_other_libraries_do_not_drown_ours(folder: Path) -> None:
    code = (
        "import sys; from dreamgym_lg.cli import app; assert 'tqdm' not in sys.modules; "
        "app.root(); from tqdm.auto import tqdm; list(tqdm(range(3)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("path", [".", "file.txt"])
def test_a_path_of_no_experiment_says_what_its_folder_holds(path: str, folder: Path) -> None:
    (folder / "file.txt").touch()
    for command in ("train", "eval", "fidelity", "play"):
        assert f"'{path}' is no folder of an experiment: it has no settings.json" in refused(command, path)


def test_a_folder_on_an_uninstalled_world_says_how_to_name_it(folder: Path) -> None:
    assert run("collect", "my_world.py:experiment")[0] == 0
    shown = refused("eval", "runs/own")
    assert "world 'house/doors', which no installed package has" in shown and "FILE.py:NAME" in shown


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"world": "textworld_express/twc", "temperature_of_old": 1}'])
def test_settings_that_cannot_be_read_are_refused(text: str, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "settings.json").write_text(text)
    assert "cannot be read, or was written by another version" in refused("eval", "run")


# --- what ends a command ------------------------------------------------------------------------------------------------------


def test_errors_of_a_stage_are_shown_as_they_are(folder: Path) -> None:
    assert "the hinge [bold]broke[/bold]" in refused("collect", "my_world.py:Broken")


def test_ctrl_c_says_how_to_go_on(folder: Path) -> None:
    code, shown = run("collect", "my_world.py:Stopped")
    assert code == 130 and "stopped; the same command goes on" in shown and "Traceback" not in shown


def test_a_foreign_database_is_refused(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "replay.db").write_bytes(b"this is no database, but long enough to be read as one" * 40)
    assert "replay.db" in refused("collect", "my_world.py:world", "--out", "run")


# --- export --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(folder: Path) -> Experiment:
    work = Experiment(load_world("twc"), folder / "made")
    work.open()
    return work


def test_export_writes_the_trained_policy_to_a_new_folder(made: Experiment, folder: Path) -> None:
    from tiny_models import create_model, create_tokenizer

    from dreamgym_lg.integrations.trl.sft import save_model

    assert "holds no policy: call prepare() or train() (`dreamgym train`) first" in refused("export", "made", "policies/mine")
    tokenizer = create_tokenizer(["open the door"], vocab_size=320)
    save_model(create_model(tokenizer, hidden_size=32, layers=1), tokenizer, made.models / "trained")
    code, shown = run("export", "made", "policies/mine")
    assert code == 0 and "policies/mine" in shown
    manifest = read_manifest(folder / "policies" / "mine")
    assert manifest["policy_version"] == (made.models / "trained" / "version").read_text()
    assert manifest["training"]["world"] == "textworld_express/twc" and manifest["agent"] is None
    assert manifest["sampling"]["temperature"] == 1
    assert "policies/mine exists already" in refused("export", "made", "policies/mine")
    assert run("export", "made", "policies/mine", "--temperature", "0", "--overwrite")[0] == 0
    assert read_manifest(folder / "policies" / "mine")["sampling"]["temperature"] == 0
    assert "device='gpu' is no device" in refused("serve", "policies/mine", "--device", "gpu")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot be listened on" in refused("serve", "policies/mine", "--port", str(taken.getsockname()[1]))


def test_serve_refuses_what_is_no_export_and_listens_on_loopback(folder: Path) -> None:
    assert "the folder 'nowhere' does not exist" in refused("serve", "nowhere")
    told = {option.name: option.default for option in COMMANDS["serve"].params}
    assert told == {"folder": None, "host": "127.0.0.1", "port": 8000, "device": "auto"}


def test_commands_need_what_comes_before(made: Experiment) -> None:
    assert "holds no policy" in refused("eval", "made")
    assert "fidelity" not in refused("fidelity", "made") and "no experience model yet" in refused("fidelity", "made")
    assert "no experience model yet" in refused("play", "made")


def test_world_names_are_asked_of_the_installed_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(worlds, "entry_points", lambda group: [EntryPoint("doors", "my_world:Doors", group)])
    assert run("collect", "doors")[0] == 0
    assert len(open_experiment("runs/doors-seed1").offline()) == 24


@pytest.mark.slow
def test_a_finished_run_is_reported_anew(finished_run: Path) -> None:
    (finished_run / "report.html").unlink()
    code, shown = run("eval", str(finished_run))
    assert code == 0 and "report:" in shown, shown
    assert (finished_run / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_finished_training_is_left_as_it_is(finished_run: Path) -> None:
    before = {path.name: path.read_bytes() for path in (finished_run / "models" / "trained").iterdir()}
    code, shown = run("train", str(finished_run))
    assert code == 0 and "trained policy:" in shown, shown
    assert {path.name: path.read_bytes() for path in (finished_run / "models" / "trained").iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("import os; os.environ['SUPPORT_KEY']", "the environment variable 'SUPPORT_KEY' is not set at agent.py:3"),
        ("int('x')", "ValueError: invalid literal for int() with base 10: 'x' at agent.py:3"),
    ],
)
def test_what_an_agent_lacks_at_import_names_file_and_line(line: str, cause: str, folder: Path) -> None:
    (folder / "agent.py").write_text(f"\n\n{line}\ngraph = 1\n")
    assert f"agent.py could not be loaded: {cause}" in refused("doctor", "agent.py:graph")
