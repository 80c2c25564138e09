"""The stage `train`: the training graph of a folder, run to its end."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.dream import Dream
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import choice, evaluation, gate
from dreamgym_lg.experiment.experience_models import model_name, place_of_training
from dreamgym_lg.experiment.settings import STOP_CRITERIA, WITH_REAL_PART, Settings
from dreamgym_lg.experiment.trackers import ExperimentTrackers
from dreamgym_lg.experiment.workspace import TRAIN, Workspace
from dreamgym_lg.learner import Learner
from dreamgym_lg.metrics import iteration_line
from dreamgym_lg.splits import sharing
from dreamgym_lg.token_recorder import TrainablePolicy

if TYPE_CHECKING:
    from dreamgym_lg.graphs.training import Training
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

_DREAMED = "stage/train/dream"
"""Record name: number of iterations at the end of the dreamed part of a training."""

CreateLearner = Callable[[TrainablePolicy, Path, Settings], Learner]
"""(policy, folder of checkpoints, settings) -> the learner of the policy, e.g. `create_trl_learner`."""


def complete_settings(
    changes: dict[str, Any],
    settings: Settings,
    *,
    policy: "LocalChatModel | str | Path | None",
    iterations: int | None,
    lora: bool,
) -> str:
    """Add to changes of settings what other arguments of `train` imply. Returns a notice, or "".

    Raises `ConfigurationError` for an unknown setting.
    """
    known, notice = {field.name for field in fields(Settings)}, ""
    for name in changes:
        if name not in known:
            error = ConfigurationError.unknown("setting", name, known)
            raise ConfigurationError(f"{error} Arguments of the learner go into learner_options={{{name!r}: ...}}")
    if policy is not None:
        place = place_of_training(policy, changes.get("learner"))
        if "learner" not in changes:
            changes["learner"] = settings.learner if place == "here" else "tinker"
            notice = f"learner {changes['learner']}: the weights of {model_name(policy)} are {place}"
    if iterations is not None:
        changes["iterations"] = iterations
    if lora:
        changes.setdefault("lora", True)
    return notice


def create_trl_learner(policy: TrainablePolicy, path: Path, settings: Settings, **options: Any) -> Learner:
    """The learner that `settings.learner` names, by TRL or on Tinker. Args: `options`, further arguments of its class.

    Raises `ConfigurationError` for groups of one episode if the learner compares the episodes of a group, and as its class.
    """
    from dreamgym_lg.integrations.transformers.adapter_files import loaded_adapters
    from dreamgym_lg.integrations.trl.adapters import default_adapters, wants_adapters
    from dreamgym_lg.integrations.trl.learners import LEARNERS

    name, episodes = settings.learner, settings.num_generations
    if name == "rft":
        raise ConfigurationError("learner='rft' is created by `train` alone, which has the recorded successes: call that")
    if episodes < 2 and name != "ppo":
        raise ConfigurationError(f"num_generations={episodes}: learner={name!r} compares the episodes of a group, at least 2")
    defaults: dict[str, Any] = {"learning_rate": settings.learning_rate, "beta": settings.beta, "seed": settings.seed}
    if name == "tinker":
        from dreamgym_lg.integrations.tinker.learner import TinkerLearner

        return TinkerLearner(policy, path, **{**defaults, **options})
    adapted = wants_adapters(policy.model, settings.lora)
    defaults |= {
        "temperature": policy.temperature,
        "peft_config": default_adapters() if adapted and loaded_adapters(policy.model) is None else None,
    }
    return LEARNERS[name](policy.model, policy.tokenizer, path, **{**defaults, **options})


def served_by(work: Workspace, policy: "LocalChatModel", servers: str | Sequence[str]) -> "LocalChatModel":
    """A policy that is trained here and whose replies vLLM servers generate."""
    from dreamgym_lg.integrations.vllm.engine import ServedEngine

    engine = ServedEngine(servers, policy.tokenizer, model=policy.model, adapters=work.models / "adapters")
    return policy.model_copy(update={"engine": engine})


def train_policy(
    work: Workspace,
    policy: "LocalChatModel",
    create_learner: CreateLearner,
    *,
    report_to: Sequence[str],
    before: float,
    begin: Callable[[], None],
) -> "LocalChatModel":
    """Run the training graph to its end, and save the policy.

    Args: `before`, seconds of earlier, shorter trainings; `begin`, called when nothing refuses the training.
    """
    from dreamgym_lg.graphs.training import run_training

    start, total = time.perf_counter(), work.settings.iterations
    if work.settings.environment != "real":
        _announce_calls(work, work.dream())
        gate.check_truthful(work, resumed=work.training_began)
    _check_training(work, policy, real=work.settings.environment == "real")
    _warn_of_shared_entities(work)
    begin()
    with closing(ExperimentTrackers(report_to, work.out, {"world": work.world.name, **asdict(work.settings)})) as trackers:
        for real, iterations in _parts(work):
            training = create_training(work, policy, create_learner, real=real)
            training.report = partial(_report, work, trackers, iterations)
            if not run_training(training, work.out / "training.db", run=work.run_name(TRAIN), iterations=iterations):
                break  # a broken policy acts on no real tool
            if not real:
                if work.settings.environment == "s2r":
                    _best_policy(work, policy).save(work.models / "dreamed")  # a stage of the proof
                work.keep_record(_DREAMED, {"iterations": iterations})
    work.progress("train: done", total, total)
    kept = _best_policy(work, policy)
    kept.save(work.models / "trained")
    choice.choose_sampling(work, kept, None if work.settings.environment == "real" else work.dream())
    seconds = time.perf_counter() - start + before
    figures = {"seconds": seconds, "iterations": total} | {name: getattr(work.settings, name) for name in STOP_CRITERIA}
    work.keep_record("stage/train", figures)
    kept.name_or_path = str(work.models / "trained")
    work.say(f"trained policy: {kept.name_or_path}. Curves and episodes: dreamgym ui {work.replay_buffer.path}")
    return kept


def _best_policy(work: Workspace, policy: "LocalChatModel") -> "LocalChatModel":
    """The policy that did best in real validation so far, else this one."""
    best = (work.models / "best").exists()
    return work.policy("best").model_copy(update=policy.sampling) if best else policy  # older releases kept weights alone


def _report(work: Workspace, trackers: ExperimentTrackers, total: int, iteration: int, metrics: Mapping[str, float]) -> None:
    """Report an iteration's metrics to the terminal and the trackers."""
    work.say(iteration_line(metrics, iteration, total))
    trackers.log(iteration, metrics)


def _announce_calls(work: Workspace, dream: Dream) -> None:
    """Estimate the training's calls of hosted models, without those of the gate, and report them."""
    s, steps = work.settings, [len(each.steps) for each in work.offline() if each.steps]
    if not dream.hosted:
        return
    calls = sum(steps) / len(steps) if steps else work.world.max_steps
    training = s.iterations * min(s.num_tasks, len(work.tasks("train"))) * s.num_generations
    evaluations = evaluation.planned_evaluations(work) + 2 * (s.real_budget is not None)  # `choose_sampling`
    validation = 0 if s.references_only else evaluations * len(work.validation_tasks())
    work.say(
        f"estimate: {(training + validation) * calls:,.0f} calls of the dream's hosted models for {training:,} training and "
        f"{validation:,} validation episodes of {calls:.0f} calls each, as the traces have, and those of the gate"
    )


def _parts(work: Workspace) -> list[tuple[bool, int]]:
    """The remaining parts of the training, each as (is real, total iterations at its end).

    Raises `ConfigurationError` if the number of dreamed iterations has changed after they ended.
    """
    s = work.settings
    if s.environment != "s2r":
        return [(s.environment == "real", s.iterations)]
    assert s.real_steps is not None  # as `Settings` makes sure
    dreamed = work.record(_DREAMED).get("iterations")
    if dreamed not in (None, s.iterations):
        raise ConfigurationError(
            f"iterations={s.iterations}: the dreamed part of this training ended after {dreamed}, and its real part has "
            f"begun: give iterations={dreamed}, and more real_steps to go on"
        )
    tasks = min(s.num_tasks, len(gate.trainable_tasks(work, real=True)))
    most = -(-s.real_steps // (tasks * s.num_generations))  # an episode has a step at least
    return [*([(False, s.iterations)] if dreamed is None else []), (True, s.iterations + most)]


def _free_memory(policy: "LocalChatModel", dream: Dream | None) -> None:
    """Free the memory that generation uses, also that of the dream's models. Updates need it."""
    for model in (policy, *(dream.language_models if dream is not None else ())):
        if isinstance(model, TrainablePolicy):
            model.free_memory()


def create_training(
    work: Workspace, policy: "LocalChatModel", create_learner: CreateLearner, *, real: bool = False
) -> "Training":
    """The parts of the training graph, in the state that the folder holds. Args: `real`, for real episodes."""
    from dreamgym_lg.graphs.training import Training

    s, dream = work.settings, None if real else work.dream()
    if dream is not None and s.references_only:
        dream = dream.judged_by_traces()
    _check_training(work, policy, real=real)
    learner = create_learner(policy, work.models / "policy", s)
    policy.weights_changed()  # the learner may have loaded a checkpoint
    # `learner_options` may name a temperature of rollouts. Evaluations keep the policy's own
    player = policy.with_temperature(getattr(learner, "temperature", policy.temperature))
    agent, create_environment = work.players(player, dream)
    return Training(
        policy=player,
        agent=agent,
        learner=learner,
        source="real" if real else "synthetic",
        dream=dream,
        curriculum=create_curriculum(work, real=real),
        replay_buffer=work.replay_buffer,
        create_environment=create_environment,
        num_tasks=s.num_tasks,
        num_generations=s.num_generations,
        resample=s.resample,
        max_steps=work.world.max_steps,
        seed=s.seed,
        concurrency=s.concurrency,
        free_memory=partial(_free_memory, policy, dream),
        weights_changed=policy.weights_changed,
        evaluate=partial(_evaluate, work, policy, dream) if work.validation_tasks() else None,
        evaluate_every=s.evaluate_every,
        evaluated=len(work.validation_tasks()) if dream is not None and not s.references_only else 0,
        stop_after_uniform=s.stop_after_uniform,
        max_gap=None if real else s.max_gap,
        real_steps=s.real_steps,
        reality=work.players(player, None) if s.environment == "dream+real" else None,
        real_every=s.real_every,
        on_node=lambda node, iteration: work.progress(f"train: {node}", iteration, max(iteration, s.iterations)),
        say=work.say,
    )


def _check_training(work: Workspace, policy: "LocalChatModel", *, real: bool) -> None:
    """Raise `ConfigurationError` for settings that contradict each other, and for what a real evaluation lacks."""
    s = work.settings
    if s.real_budget and s.real_budget < evaluation.planned_evaluations(work):
        raise ConfigurationError(
            f"real_budget={s.real_budget} is not one real episode for each of the {evaluation.planned_evaluations(work)} "
            "evaluations of this training: give more of it, a larger evaluate_every, or 0"
        )
    real = real or s.environment in WITH_REAL_PART
    tasks = gate.trainable_tasks(work) if s.environment == "dream+real" else work.tasks("train")
    if real and all(task.drawn for task in tasks):
        raise ConfigurationError(
            f"environment={s.environment!r}, and all training tasks are drawn ones, whose entities no real environment knows: "
            "give other tasks too, or environment='dream'"
        )
    if real or (s.real_budget != 0 and work.validation_tasks()):
        work.world.agent(policy, real=True)  # report a missing verify_real now, not after ten iterations


def _warn_of_shared_entities(work: Workspace) -> None:
    tasks = work.tasks("train")
    if shared := sharing(tasks, [*work.tasks("validation"), *work.tasks("test")]):
        example = next(f"{id!r}, {text[:80]!r}" for id, text in shared.items())
        work.say(
            f"{len(shared)} of {len(tasks)} training tasks name an id, amount or name that a held-out task names too, or say "
            f"the same, such as {example}: its result is not that of an unseen one; split_tasks(tasks) keeps them together"
        )


def create_curriculum(work: Workspace, *, real: bool) -> Curriculum:
    """The curriculum over the training tasks, restored from the episodes trained on so far.

    No task is varied with `real` episodes, nor under `references_only`, as no recorded success judges a new task.
    """
    s = work.settings
    tasks = gate.trainable_tasks(work, real=real)
    share = 0.0 if real or s.references_only else s.synthetic_share
    curriculum = Curriculum(
        tasks,
        task_generator=work.world.task_generator(tasks, work.replay_buffer) if share else None,
        check_task=work.world.check_task,
        synthetic_share=share,
        seed=s.seed,
    )
    trained_on = work.replay_buffer.trajectories(run=work.run_name(TRAIN))
    curriculum.restore([*work.tasks("train"), *work.replay_buffer.tasks(origin="synthetic")], trained_on)
    return curriculum


def _evaluate(work: Workspace, policy: "LocalChatModel", dream: Dream | None, iteration: int) -> dict[str, Any]:
    figures = evaluation.validate(work, policy, dream, iteration)
    if episodes := figures.get("eval_real_episodes"):
        best = choice.BestPolicy(work, "best")
        best.offer(iteration, figures["eval_real_successes"] / episodes, figures["eval_real_reward_mean"], policy)
    return figures
