"""The commands `dreamgym demo`, `collect`, `train`, `eval`, `export`, and functions that open an experiment."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from dreamgym_lg.cli.console import chosen, console, errors_shown, quiet_libraries
from dreamgym_lg.dream import Dream, usual_dream
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.choice import no_policy
from dreamgym_lg.experiment.experience_models import load_experience_model, place_of_training
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.imitation import BASELINES
from dreamgym_lg.experiment.settings import read_settings
from dreamgym_lg.experiment.trackers import TRACKERS, check_trackers
from dreamgym_lg.experiment.world import World, load_world, world_names
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.hosted import EXAMPLE_MODEL
from dreamgym_lg.learner import LearnerName
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.user_code import load_object

WORLD_HELP = (
    f"A world's name ({', '.join(f'[b]{name}[/b]' for name in world_names())}), [b]FILE.py:NAME[/b] of an experiment or a "
    "world of your own, or the folder of an experiment."
)
LEARNERS, TRACKER_NAMES, BASELINE_NAMES = (
    ", ".join(f"[b]{name}[/b]" for name in names) for names in ((*get_args(LearnerName), "gepa"), TRACKERS, BASELINES)
)
PLACES = "Where it trains: [b]dream[/b], [b]real[/b], [b]s2r[/b] (dream, then --real-steps), [b]dream+real[/b] (in turn)."
SERVERS_HELP = "A vLLM server of the policy's model, e.g. http://gpu1:8000, that generates its replies; may be repeated."

WorldArgument = Annotated[str, typer.Argument(metavar="WORLD", help=WORLD_HELP)]
OptionalWorld = Annotated[str | None, typer.Argument(metavar="WORLD", help=WORLD_HELP)]
Seed = Annotated[int | None, typer.Option(help="Decides worlds, weights and samples. Default: 1, or the experiment's own.")]
Out = Annotated[Path | None, typer.Option(help="Output folder. Default: runs/WORLD-seedSEED, or the experiment's own.")]
Iterations = Annotated[int | None, typer.Option(min=1, help="Training iterations; may be raised later. Default: the world's.")]
Learner = Annotated[str | None, typer.Option(help=f"What trains the policy: {LEARNERS}. Default: the world's.")]
Where = Annotated[str | None, typer.Option("--environment", help=PLACES)]
RealSteps = Annotated[int | None, typer.Option(min=1, help="Real steps after which a real training ends; may be raised later.")]
Force = Annotated[bool, typer.Option("--force", help="Train in a dream that the gate refuses, and without max_gap.")]
ReferencesOnly = Annotated[bool, typer.Option("--references-only", help="Train only on tasks that recorded successes judge.")]
Lora = Annotated[bool, typer.Option("--lora", help="Train adapters beside the policy's weights, in less memory (lora).")]
BASELINE_HELP = f"A policy that the dream has to beat: {BASELINE_NAMES}; may be repeated. Default: all; none with --policy."
Baselines = Annotated[list[str] | None, typer.Option("--baseline", help=BASELINE_HELP)]
Servers = Annotated[list[str] | None, typer.Option(help=SERVERS_HELP)]
ReportTo = Annotated[list[str] | None, typer.Option(help=f"A tracker of its metrics: {TRACKER_NAMES}; may be repeated.")]
MODEL_HELP = "Weights that policy and experience model begin with: a folder, a GGUF file, a hub name. Default: smollm2-135m."
Model = Annotated[str | None, typer.Option(help=MODEL_HELP)]
POLICY_HELP = "What training begins with: a folder, a hub name, [b]tinker:MODEL[/b]; with --reflection a hosted model."
PolicyName = Annotated[str | None, typer.Option("--policy", help=POLICY_HELP)]
REFLECTION_HELP = (
    f"Learner [b]gepa[/b]: the model that writes new prompts for the DreamGym of FILE.py:NAME, e.g. {EXAMPLE_MODEL}."
)
Reflection = Annotated[str | None, typer.Option(help=REFLECTION_HELP)]
To = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write the trained policy to.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, help="At which the export samples; 0 is greedy. Default: what validation found best.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an exported policy in that folder.")]
EXPERIENCE_HELP = f"With --replay-buffer: the experience model, {EXAMPLE_MODEL} or a local one's folder, for instance."
ModelName = Annotated[str | None, typer.Option("--experience-model", help=EXPERIENCE_HELP)]


def open_experiment(
    name: str,
    *,
    loaded: object = None,
    seed: int | None = None,
    out: Path | None = None,
    existing: bool = False,
    **settings: Any,
) -> Experiment:
    """Open the experiment of a world's name, of `FILE.py:NAME`, or of a folder.

    Args:
        loaded: The object behind `FILE.py:NAME` if it is loaded already.
        seed, out: Seed and folder of an experiment on a world; for an `Experiment`, in place of its own.
        existing: True to open only an experiment that the folder holds already, with its stored settings.
        settings: Values of its `Settings`; None keeps a value.

    Raises `ConfigurationError` for any other name.
    """
    quiet_libraries(offline=not is_object(name))
    changes: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if _is_folder(name):
        if seed is not None or out is not None:
            raise ConfigurationError(f"{name} is a folder, and its experiment has a seed: leave --seed and --out away")
        return open_folder(Path(name), **changes)
    if loaded is None:
        arguments = {key: value for key, value in (("seed", seed), ("out", out)) if value is not None}
        loaded = load_object(name, **arguments) if is_object(name) else load_world(name)
    work = loaded.experiment if isinstance(loaded, DreamGym) else loaded
    if not isinstance(work, Experiment | World):
        raise ConfigurationError(f"{name} is of type {type(work).__name__}; give an Experiment, a World, or what creates one")
    number = 1 if seed is None else seed
    if seed is not None or (isinstance(work, World) and not existing):
        changes["seed"] = number
    if isinstance(work, World):
        folder = out or Path("runs") / f"{work.name.rpartition('/')[2]}-seed{number}"
        if existing:
            return open_folder(folder, work, **changes)  # the command refuses values that differ from the folder's
        return Experiment(work, folder, replace(work.settings, **changes))
    work.settings, work.out = replace(work.settings, **changes), out or work.out
    return work


def open_folder(folder: Path, world: World | None = None, **settings: Any) -> Experiment:
    """Open the experiment in `folder`, with the settings that are stored there.

    Args: `world`, default: the installed one whose name is stored there; `settings`, values to change.

    Raises `ConfigurationError` for a folder without an experiment or with one on another world, and if its world is not
    installed.
    """
    advice = "in place of the folder, give FILE.py:NAME of the Experiment"
    if not folder.exists():
        raise ConfigurationError(f"{ConfigurationError.missing_folder(folder)} `dreamgym train WORLD` makes one")
    if (stored := read_settings(folder)) is None:
        raise ConfigurationError(
            f"{str(folder)!r} is no folder of an experiment: it has no settings.json (`dreamgym train WORLD` makes one)"
        )
    if (folder / "run").exists():
        raise ConfigurationError(f"the episodes of {folder} are in a replay buffer elsewhere: {advice}")
    name = stored["world"].rpartition("/")[2]
    if world is None and name not in world_names():
        raise ConfigurationError(
            f"{folder} holds an experiment on the world {stored['world']!r}, which no installed package has; {advice}"
        )
    world = world or load_world(name, **stored["arguments"])
    if world.name != stored["world"]:
        raise ConfigurationError(
            f"{folder} holds an experiment on the world {stored['world']!r}, not {world.name!r}: take another folder"
        )
    work = Experiment(world, folder)
    work.settings = replace(work.settings, **settings)
    return work


@contextmanager
def opened_dream(
    world: str | None, file: Path | None, model: str | None, loaded: object = None
) -> Iterator[tuple[ReplayBuffer, Dream, Experiment | None]]:
    """Yield a replay buffer, its dream, and the experiment if there is one.

    Raises `ConfigurationError` unless there is either a `world`, or a buffer's `file` with an experience `model`.
    """
    if (world is None) == (file is None):
        raise ConfigurationError("give either a WORLD, or --replay-buffer with --experience-model")
    if world is not None:
        if model:
            raise ConfigurationError(f"{world} has an experience model of its own: leave --experience-model away")
        work = open_experiment(world, loaded=loaded, existing=True)
        if not work.can_dream:
            again = f"`python {world.partition(':')[0]}`" if is_object(world) else "`dreamgym train` with the same options"
            raise ConfigurationError(f"{work.out} holds no experience model yet: run {again} first")
        with work.replay_buffer as buffer:
            yield buffer, work.dream(), work
        return
    assert file is not None
    if not model:
        raise ConfigurationError(
            f"--replay-buffer needs --experience-model, e.g. {EXAMPLE_MODEL} or runs/mine/models/experience-0"
        )
    if not file.exists():
        raise ConfigurationError(f"the replay buffer {file} does not exist: `dreamgym import` makes one of your traces")
    with ReplayBuffer(file) as buffer:
        yield buffer, usual_dream(load_experience_model(model, buffer)), None


def is_object(name: str) -> bool:
    """True for `FILE.py:NAME` or `package.module:NAME`."""
    return ":" in name or name.endswith(".py")


def _is_folder(name: str) -> bool:
    """True if the name is a path. A world's name is one only if a folder of that name holds an experiment."""
    path = Path(name)
    if (path / "settings.json").exists():
        return True
    return not is_object(name) and name not in world_names() and (path.name != name or path.exists())


@contextmanager
def _opened(name: str, *, report_to: list[str] | None = None, **options: Any) -> Iterator[Experiment]:
    """`open_experiment` with output on the console, and with trackers if any are named."""
    with errors_shown(resumes=True):
        console.print(f"opening {name}", soft_wrap=True)  # loading may take long
        work = open_experiment(name, **options)
        work.report_to = check_trackers(report_to) if report_to else work.report_to
        work.say = console.print
        yield work


def demo(
    world: WorldArgument = "peckingorder",
    seed: Seed = None,
    out: Out = None,
    iterations: Iterations = None,
    learner: Learner = None,
    model: Model = None,
    report_to: ReportTo = None,
) -> None:
    """Run every stage: collect, train in the dream, evaluate in reality, write the report."""
    settings = {"iterations": iterations, "learner": learner, "model": model}
    with _opened(world, seed=seed, out=out, report_to=report_to, **settings) as work:
        work.prepare()
        work.train(force=True)  # a demonstration reports what the gate finds, and goes on
        work.prove()
        _show(work)


def collect(world: WorldArgument, seed: Seed = None, out: Out = None) -> None:
    """Record the world's tasks and real offline trajectories in the replay buffer."""
    with _opened(world, seed=seed, out=out) as work:
        work.collect()
        buffer = work.replay_buffer
        console.print(f"{buffer.count('trajectories'):,} trajectories, {buffer.count('steps'):,} steps in {work.out}")


def train(
    world: WorldArgument,
    seed: Seed = None,
    out: Out = None,
    iterations: Iterations = None,
    learner: Learner = None,
    environment: Where = None,
    real_steps: RealSteps = None,
    force: Force = False,
    references_only: ReferencesOnly = False,
    lora: Lora = False,
    model: Model = None,
    baselines: Baselines = None,
    servers: Servers = None,
    report_to: ReportTo = None,
    policy: PolicyName = None,
    reflection: Reflection = None,
) -> None:
    """Collect data if needed, train experience model and baselines, then the policy.

    A dream that rewards what it must not is refused, with the figure. With --reflection, prompts are improved; --out gets them.
    """
    if reflection is not None or learner == "gepa":
        others = chosen(seed=seed, iterations=iterations, environment=environment, real_steps=real_steps, lora=lora)
        others |= chosen(model=model, references_only=references_only, baseline=baselines, servers=servers, report_to=report_to)
        return _improve(world, policy, reflection, out, learner=learner, force=force, others=others)
    settings = chosen(iterations=iterations, learner=learner, environment=environment, real_steps=real_steps)
    settings |= chosen(references_only=references_only, lora=lora)
    with _opened(world, seed=seed, out=out, report_to=report_to, model=model, **settings) as work:
        options = settings | ({"policy": policy} if policy else {}) | ({"max_gap": None} if force else {})
        if policy:
            place_of_training(policy, learner)  # report a wrong policy now, not after the other stages
        work.start_policy = policy or work.start_policy
        work.prepare(baselines=baselines)
        if work.start_policy is None and not work.training_began:
            work.advise()
        work.train(servers=servers or (), force=force, **options)


def _improve(
    name: str,
    policy: str | None,
    reflection: str | None,
    out: Path | None,
    *,
    learner: str | None,
    force: bool,
    others: Collection[str] = (),
) -> None:
    """Improve the prompts of an agent, and write them to a folder. Args: `others`, names of further options, refused here."""
    from dreamgym_lg.production.export import check_free

    with errors_shown(resumes=True):
        if learner not in (None, "gepa"):
            raise ConfigurationError(f"--reflection improves prompts, and --learner {learner} trains weights: leave one away")
        if others:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
            raise ConfigurationError(f"learner gepa improves prompts, and makes no use of {names}: leave that away")
        quiet_libraries(offline=False)
        gym = load_object(name) if is_object(name) else None
        if not isinstance(gym, DreamGym) or reflection is None:
            raise ConfigurationError("learner gepa needs FILE.py:NAME of a DreamGym, and --reflection MODEL")
        gym.experiment.say = console.print
        check_free(folder := out or gym.experiment.out / "prompts")  # before the search
        improved = gym.train(policy, learner="gepa", reflection=reflection, force=force)
        console.print(str(improved), markup=False)
        if improved.changes:
            improved.export(folder)
            console.print(f"prompts: {folder}", soft_wrap=True)


def evaluate(world: WorldArgument, seed: Seed = None, out: Out = None) -> None:
    """Evaluate all policies on held-out real tasks; write result.json and the report."""
    with _opened(world, seed=seed, out=out, existing=True) as work:
        work.prove()
        _show(work)


def export(world: WorldArgument, folder: To, temperature: Temperature = None, overwrite: Overwrite = False) -> None:
    """Write the best policy to a folder for production: weights, tokenizer, manifest, model card, langgraph.json."""
    from dreamgym_lg.production.export import export_policy
    from dreamgym_lg.production.provenance import provenance

    with _opened(world, existing=True) as work:
        if (policy := work.kept_policy()) is None:
            raise ConfigurationError(no_policy(work))
        policy = policy if temperature is None else policy.with_temperature(temperature)
        origin = provenance(work, policy)
        export_policy(policy, folder, provenance=origin, agent=work.world.source, overwrite=overwrite)
        console.print(f"policy: {folder}", soft_wrap=True)


def _show(work: Experiment) -> None:
    from dreamgym_lg.experiment.evaluation import shown_episodes
    from dreamgym_lg.report.proof import summary_table, write_report

    result = json.loads((work.out / "result.json").read_text())
    metrics = work.replay_buffer.metrics(work.run_name("train"))
    html = write_report(result, metrics, shown_episodes(work), work.out)
    console.print(summary_table(result))
    console.print(f"report: {html}\nfigures: {work.out / 'result.json'}", soft_wrap=True)
