"""`Experiment`: the stages `collect, train_experience, train_base, train, prove` on any world."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.annotate import Annotate
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experiment import evaluation, gate, supervised
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.trackers import Trackers, check_trackers
from dreamgym_lg.experiment.workspace import OFFLINE, REFRESH, TRAIN, Workspace, logger, policy_version
from dreamgym_lg.experiment.world import Rollouts, World
from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.launch import launched
from dreamgym_lg.learner import Learner
from dreamgym_lg.progress import show_progress
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import check_played, real_steps
from dreamgym_lg.token_recorder import TrainablePolicy
from dreamgym_lg.types import Task

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel
    from dreamgym_lg.experiment.workspace import CreateEngine
    from dreamgym_lg.graphs.training import Training
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
    from dreamgym_lg.integrations.trl.ranks import Ranks

_ENDS = ("stop_after_uniform", "stop_after_collapse", "max_gap", "environment", "real_steps")
"""Settings that decide where a training ends: one that has ended goes on with others."""
_DREAMED = "stage/train/dream"
"""Where it is recorded after how many iterations the dreamed part of a training was over."""

CreateLearner = Callable[[TrainablePolicy, Path, Settings], Learner]
"""Creates what trains a policy, with its checkpoints in a folder, e.g. `create_trl_learner`."""


def create_trl_learner(policy: TrainablePolicy, path: Path, settings: Settings, **options: Any) -> Learner:
    """The learner that `settings.learner` names, by TRL. Args: `options`, further arguments of its class.

    Raises `ConfigurationError` for groups of one where it compares the episodes of a group, and as its class does.
    """
    from dreamgym_lg.integrations.trl.adapters import default_adapters
    from dreamgym_lg.integrations.trl.learners import LEARNERS

    name, episodes = settings.learner, settings.num_generations
    if episodes < 2 and name not in ("ppo", "rft"):
        raise ConfigurationError(f"num_generations={episodes}: learner={name!r} compares the episodes of a group, at least 2")
    given = {
        "learning_rate": settings.learning_rate,
        "beta": settings.beta,
        "temperature": policy.temperature,
        "seed": settings.seed,
        "peft_config": default_adapters() if settings.lora else None,
    }
    return LEARNERS[name](policy.model, policy.tokenizer, path, **{**given, **options})


class Experiment(Workspace):
    """One world, one folder, and the stages that fill it. Durable: killed at any moment, the same calls go on.

    ```python
    run = Experiment(TextWorldExpressWorld("peckingorder"), "runs/mine")
    run.collect()
    run.train_experience()
    run.train_base()
    run.train()
    run.prove()
    ```

    Args:
        create_learner: Creates what trains the policy. Default: the learner that `Settings.learner` names.
        policy: The policy that training begins with, or its path or hub name. Default: the base policy of `train_base`.
        report_to: The trackers that `train` sends each iteration's metrics to: `tensorboard`, `wandb`, `mlflow`, `trackio`.
        world, out, settings, replay_buffer, experience_model, engine, rollouts, progress, say: As of `Workspace`.
    """

    def __init__(
        self,
        world: World,
        out: str | Path,
        settings: Settings | None = None,
        *,
        create_learner: CreateLearner = create_trl_learner,
        policy: "LocalChatModel | str | Path | None" = None,
        replay_buffer: ReplayBuffer | None = None,
        experience_model: ExperienceModel | BaseChatModel | str | None = None,
        engine: "CreateEngine | None" = None,
        rollouts: Rollouts | None = None,
        report_to: str | Sequence[str] = "none",
        progress: Callable[[str, int, int], None] = show_progress,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        super().__init__(
            world,
            out,
            settings,
            replay_buffer=replay_buffer,
            experience_model=experience_model,
            engine=engine,
            rollouts=rollouts,
            progress=progress,
            say=say,
        )
        self.create_learner, self._policy, self.report_to = create_learner, policy, check_trackers(report_to)
        self.trained: LocalChatModel | None = None
        """What `train` returned; None before."""

    # --- data and models -------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Store the world's tasks and, where it has scripted policies, real offline trajectories of the train split."""
        s = self.settings
        with self.stage("collect") as todo:
            if not todo:
                return
            for split in ("train", "validation", "test"):
                self.replay_buffer.add_tasks(self.world.tasks(split, limit=s.tasks, seed=s.seed))
            for name, tasks in self.world.panels(limit=s.panel_tasks, seed=s.seed).items():
                self.replay_buffer.add_tasks(replace(task, metadata={**task.metadata, "panel": name}) for task in tasks)
            if not (total := sum(s.episodes.values())):
                return
            episodes = iter(self.world.collect(self.tasks("train"), s.episodes, seed=s.seed))
            named = (replace(trajectory, run=self.run_name(OFFLINE)) for trajectory in episodes)
            for done in range(0, total, 100):
                self.replay_buffer.extend(islice(named, 100))
                self.progress("collect real trajectories", min(done + 100, total), total)

    def train_experience(self, model: "StartModel" = None, *, annotator: BaseChatModel | Annotate | str | None = None) -> None:
        """Fine-tune a local experience model on the offline trajectories. Nothing to do if the experiment was given one.

        It ends early once the loss on a tenth of the tasks, which it does not see, has stopped falling (tool agents).

        Args:
            model: Whose weights it begins with: a local chat model, its path or hub name. Default: the small base.
            annotator: A chat model that writes the reasoning of steps that have none, or its name. With a budget or by OpenAI's
                Batch API: `partial(annotate, model=..., hosted=Hosted(...), batch=folder)`; called again after a crash or with
                more budget, nothing is asked twice. Default: rules, for a tool agent's.

        Raises `ConfigurationError` if nothing recorded is a success, for a model beside a given `experience_model`, and for
        another model than the finished stage began with.
        """
        if self._given is not None:
            if model is not None:
                raise ConfigurationError("experience_model= is given, so there is none to train: leave out one of the two")
            return
        with self._stage_from("experience", model) as todo:
            if todo:
                supervised.train_experience_model(self, model, annotator)

    def train_base(self, model: "StartModel" = None) -> None:
        """Fine-tune the base policy, where training in the dream begins, on every offline success.

        It is played on the validation tasks as it learns, in reality unless `real_budget` is 0; its training ends when its
        success stops rising, and the best one is kept as `models/base`. So it is also what a dream has to beat: supervised
        training on the same data, as far as that goes.

        Args: `model`, whose weights it begins with, as of `train_experience`.

        Raises `ConfigurationError` without a success, and as `train_experience` does.
        """
        if self._policy is not None:
            if model is not None:
                raise ConfigurationError("policy= is given, and training begins with it: leave out one of the two")
            return
        with self._stage_from("base", model) as todo:
            if todo:
                supervised.train_base_policy(self, model)

    @contextmanager
    def _stage_from(self, name: str, model: "StartModel") -> Iterator[bool]:
        """`stage`, of a training that begins with these weights. Raises `ConfigurationError` if it has begun with others."""
        given = str(getattr(model, "name_or_path", model))
        if self._serves:
            yield False
            return
        with self.stage(name) as todo:
            run = self.run_name(f"stage/{name}/from")
            began = next((row["model"] for row in self.replay_buffer.metrics(run)), given)
            if not todo and model is not None and began != given:
                raise ConfigurationError(
                    f"{self.out} holds what {name!r} made of the model {began!r}, and {given!r} is given: take another folder"
                )
            if todo:
                self.replay_buffer.record_metrics(run, 0, {"model": given})
            yield todo

    # --- training ----------------------------------------------------------------------------------------------------------

    def train(
        self,
        policy: "LocalChatModel | str | Path | None" = None,
        iterations: int | None = None,
        *,
        servers: str | Sequence[str] = (),
        report_to: str | Sequence[str] | None = None,
        **options: Any,
    ) -> "LocalChatModel":
        """Train the policy by the cyclic training graph, in the dream or where `Settings.environment` says.

        It is stored as `models/trained` and returned: with real validation episodes (`real_budget`) the policy with the highest
        real success, never one chosen by the dream; otherwise the newest. Killed at any moment, the same call goes on; with
        more `iterations` or `real_steps`, a finished training goes on too, and so does one that a gap to reality ended with a
        wider or no `max_gap`. Where `torchrun` or `accelerate launch` started several processes, rank 0 does all this, and the
        others take a share of each update; there the call ends the process once the training is over.

        Args:
            policy: A local chat model, or the path or hub name of one: the weights that training begins with. Default: the
                experiment's policy, or the base policy of `train_base`.
            iterations: How many there shall be in all. Default: the settings'.
            servers: Addresses of vLLM servers that serve the policy's model: they generate its replies, with the new weights
                after each update (`ServedEngine`). Default: the weights in this process.
            report_to: Other trackers than the experiment's; `"none"` for none.
            options: Other values of `Settings` (`learner`, `lora`, `num_tasks`, ...), and arguments of the learner
                (`peft_config`, which implies `lora`, ...).

        Raises `ConfigurationError` without a task or a policy to train, `UntruthfulDream` if the dream pays too much of what
        it must not (`max_false_success`; asked before the first iteration), `NothingToTrain` if the episodes give nothing to
        learn from, `MissingDependency` without the extra `train`.
        """
        self.report_to = self.report_to if report_to is None else check_trackers(report_to)
        known = {field.name for field in fields(Settings)}
        given = {name: value for name, value in options.items() if name in known}
        if iterations is not None:
            given["iterations"] = iterations
        if options.get("peft_config") is not None:
            given.setdefault("lora", True)
        learner = partial(self.create_learner, **{name: value for name, value in options.items() if name not in known})
        if self._serves:
            self._serve(policy if policy is not None else self._policy, learner)
        self.open(replace(self.settings, **given))
        self._policy = policy if policy is not None else self._policy
        if not self.tasks("train"):
            raise ConfigurationError(
                f"{self.out} has no task of the split 'train': call collect() first; for a DreamGym, pass tasks= or a replay "
                "buffer with traces"
            )
        done = next(iter(self.replay_buffer.metrics(self.run_name("stage/train"))), {})
        same_end = all(done.get(name) == getattr(self.settings, name) for name in _ENDS)
        finished = done.get("iterations", 0) >= self.settings.iterations and same_end
        start = None if finished else self.base_policy()
        if self._policy is not None:
            self._check_policy(self._policy)
        if start is None:
            self.trained = self._like(self._policy, self.policy("trained"))
        else:
            start = self._served(start, servers) if servers else start
            self.trained = self._train(start, learner, float(done.get("seconds", 0)))
        if (ranks := self._ranks()) is not None:
            ranks.close()
        return self.trained

    def _ranks(self) -> "Ranks | None":
        """The other processes of this launch."""
        if launched() is None:
            return None
        from dreamgym_lg.integrations.trl.ranks import join_ranks

        return join_ranks()

    def _serve(self, policy: "LocalChatModel | str | Path | None", create_learner: CreateLearner) -> NoReturn:
        """Take a share of each update of rank 0's learner until its training is over; then the process ends."""
        from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner

        assert (ranks := self._ranks()) is not None
        self._policy, self.engine = policy, None
        while (told := ranks.broadcast()) is not None:
            self.settings = told
            learner = create_learner(self.base_policy(), self.models / "policy", told)
            if not isinstance(learner, PolicyLearner):
                raise ConfigurationError(f"{type(learner).__name__} trains in one process: start the script without a launcher")
            learner.serve()
        raise SystemExit(0)

    def _check_policy(self, given: "LocalChatModel | str | Path") -> None:
        """Raise `ConfigurationError` for another policy than the one that training in this folder began with."""
        run, version = self.run_name("stage/train/from"), policy_version(Path(given) if isinstance(given, str) else given)
        began = next((row["policy"] for row in self.replay_buffer.metrics(run)), None)
        own = [policy_version(self.models / name) for name in ("base", "trained")]
        if began is None:
            name = str(getattr(given, "name_or_path", given))
            self.replay_buffer.record_metrics(run, 0, {"policy": version, "name": name})
        elif version not in (began, *own):
            raise ConfigurationError(
                f"{self.out} trains the policy {began!r}, and {version!r} is given: give the first one, or take another folder "
                "(out=, --out)"
            )

    def base_policy(self) -> "LocalChatModel":
        """The policy that training begins with. Raises `ConfigurationError` without one, or for one that cannot be trained."""
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

        given = self._policy
        if given is None:
            if not (self.models / "base").exists():
                raise ConfigurationError(f"{self.out} holds no base policy: call train_base() first, or give train() a policy")
            return self.policy("base")
        if not isinstance(given, LocalChatModel | str | Path):
            raise ConfigurationError(f"policy={given!r} cannot be trained; give a LocalChatModel, or a path or name of one")
        local = self.policy_at(given) if isinstance(given, str | Path) else given
        if local.model is None:
            raise ConfigurationError("the policy has a process of its own, which trains nothing: load it without own_process")
        return local

    def _served(self, policy: "LocalChatModel", servers: str | Sequence[str]) -> "LocalChatModel":
        """The same weights, to be trained here, with replies from these servers."""
        from dreamgym_lg.integrations.vllm.engine import ServedEngine

        engine = ServedEngine(servers, policy.tokenizer, model=policy.model, adapters=self.models / "adapters")
        return policy.model_copy(update={"engine": engine})

    def _train(self, policy: "LocalChatModel", create_learner: CreateLearner, before: float) -> "LocalChatModel":
        """Run the training graph to its end, and keep the policy. Args: `before`, seconds of earlier, shorter trainings."""
        from dreamgym_lg.graphs.training import run_training
        from dreamgym_lg.integrations.trl.sft import save_model

        start, wanted = time.perf_counter(), self.settings.iterations
        if self.settings.environment != "real" and not (self.out / "training.db").exists():
            gate.check_truthful(self)
        if not (self.models / "base").exists():
            save_model(policy.model, policy.tokenizer, self.models / "base")  # what the proof compares with
        with closing(Trackers(self.report_to, self.out, {"world": self.world.name, **asdict(self.settings)})) as trackers:
            for real, iterations in self._parts():
                training, close = self.training(policy, create_learner, real=real)
                training.report = trackers.log
                try:
                    run_training(training, self.out / "training.db", run=self.run_name(TRAIN), iterations=iterations)
                finally:
                    close()
                if not real:
                    self.replay_buffer.record_metrics(self.run_name(_DREAMED), 0, {"iterations": iterations})
        self.progress("train: done", wanted, wanted)
        kept = self._like(policy, self.policy("best")) if (self.models / "best").exists() else policy
        save_model(kept.model, kept.tokenizer, self.models / "trained")
        seconds = time.perf_counter() - start + before
        figures = {"seconds": seconds, "iterations": wanted} | {name: getattr(self.settings, name) for name in _ENDS}
        self.replay_buffer.record_metrics(self.run_name("stage/train"), 0, figures)
        kept.name_or_path = str(self.models / "trained")
        return kept

    def _parts(self) -> list[tuple[bool, int]]:
        """What is left of the training: whether a part is real, and how many iterations there shall be in all at its end.

        Raises `ConfigurationError` for another number of dreamed iterations than a real part has begun after.
        """
        s = self.settings
        if s.environment != "s2r":
            return [(s.environment == "real", s.iterations)]
        assert s.real_steps is not None  # as `Settings` makes sure
        dreamed = next((row["iterations"] for row in self.replay_buffer.metrics(self.run_name(_DREAMED))), None)
        if dreamed not in (None, s.iterations):
            raise ConfigurationError(
                f"iterations={s.iterations}: the dreamed part of this training ended after {dreamed}, and its real part has "
                f"begun: give iterations={dreamed}, and more real_steps to go on"
            )
        most = -(-s.real_steps // (s.num_tasks * s.num_generations))  # an episode has a step at least
        return [*([(False, s.iterations)] if dreamed is None else []), (True, s.iterations + most)]

    @staticmethod
    def _like(given: "LocalChatModel | str | Path | None", loaded: "LocalChatModel") -> "LocalChatModel":
        """The loaded policy, sampling as the given one did."""
        if given is None or isinstance(given, str | Path):
            return loaded
        names = "temperature", "max_new_tokens", "stop", "chat_template_kwargs", "guided"
        return loaded.model_copy(update={name: getattr(given, name) for name in names})

    def training(
        self, policy: "LocalChatModel", create_learner: CreateLearner | None = None, *, real: bool = False
    ) -> tuple["Training", Callable[[], None]]:
        """The parts of the training graph, as the folder has them by now, and what closes them. Args: `real`, not dreamed."""
        from dreamgym_lg.graphs.training import Training

        s, experience = self.settings, None if real else self.experience()
        self._check_training(policy, real=real)
        if (ranks := self._ranks()) is not None:
            ranks.broadcast(s)
        learner = (create_learner or self.create_learner)(policy, self.models / "policy", s)
        policy.weights_changed()  # those of a checkpoint may be in place now
        agent, create_environment = self.players(policy, experience)
        training = Training(
            policy=policy,
            agent=agent,
            learner=learner,
            source="real" if real else "synthetic",
            experience=experience if self.world.asks_experience else None,
            check_action=self.world.check_action,
            curriculum=self._curriculum(real=real),
            replay_buffer=self.replay_buffer,
            create_environment=create_environment,
            num_tasks=s.num_tasks,
            num_generations=s.num_generations,
            max_steps=self.world.max_steps,
            seed=s.seed,
            concurrency=s.concurrency,
            free_memory=policy.free_memory,
            weights_changed=policy.weights_changed,
            evaluate=partial(self._evaluate, policy, experience) if self.validation_tasks() else None,
            evaluate_every=s.evaluate_every,
            evaluated=len(self.validation_tasks()) if experience is not None and not s.references_only else 0,
            stop_after_uniform=s.stop_after_uniform,
            stop_after_collapse=s.stop_after_collapse,
            max_gap=None if real else s.max_gap,
            real_steps=s.real_steps,
            refresh=partial(self.refresh, policy, experience) if s.refresh_episodes and experience is not None else None,
            refresh_every=s.refresh_every,
            on_node=lambda node, iteration: self.progress(f"train: {node}", iteration, max(iteration, s.iterations)),
            say=self.say,
        )
        return training, learner.close

    def _check_training(self, policy: "LocalChatModel", *, real: bool) -> None:
        """Raise `ConfigurationError` for settings that contradict each other, and for what a real evaluation lacks."""
        s = self.settings
        if getattr(policy, "guided", False) is True:
            raise ConfigurationError(
                "guided=True: what the policy samples under a schema has other probabilities than the learner gives it; train "
                "without it, or with guided='train' all the same"
            )
        if s.refresh_episodes and self._given is not None:
            raise ConfigurationError(
                f"refresh_episodes={s.refresh_episodes} trains the local experience model further, and experience_model= is "
                "given: set refresh_episodes=0"
            )
        if s.real_budget and s.real_budget < evaluation.planned_evaluations(s):
            raise ConfigurationError(
                f"real_budget={s.real_budget} is not one real episode for each of the {evaluation.planned_evaluations(s)} "
                "evaluations of this training: give more of it, a larger evaluate_every, or 0"
            )
        if real or s.environment == "s2r" or (s.real_budget != 0 and self.validation_tasks()):
            self.world.agent(policy, real=True)  # what a real evaluation lacks is said now, not after ten iterations

    def _curriculum(self, *, real: bool) -> Curriculum:
        """The curriculum over the training tasks, as the episodes trained so far have left it; `real` ones are not varied."""
        s, tasks = self.settings, self.tasks("train") if real else gate.trainable_tasks(self)
        share = 0.0 if real else s.synthetic_share
        curriculum = Curriculum(
            tasks,
            task_generator=self.world.task_generator(tasks, self.replay_buffer) if share else None,
            check_task=self._check_task,
            synthetic_share=share,
            seed=s.seed,
        )
        trained_on = self.replay_buffer.trajectories(run=self.run_name(TRAIN), errors=False)
        curriculum.restore(self.replay_buffer.tasks(origin="synthetic"), trained_on)
        return curriculum

    def _check_task(self, task: Task) -> str | None:
        if self.settings.references_only and not self.world.judged_by_traces([task], self.replay_buffer):
            return "no_reference"
        return self.world.check_task(task)

    def _evaluate(self, policy: "LocalChatModel", experience: ExperienceModel | None, iteration: int) -> dict[str, Any]:
        figures = evaluation.validate(self, policy, experience, iteration)
        if episodes := figures.get("eval_real_episodes"):
            best = evaluation.BestPolicy(self, "best")
            best.offer(iteration, figures["eval_real_successes"] / episodes, figures["eval_real_reward_mean"], policy)
        return figures

    def refresh(self, policy: "LocalChatModel", experience: ExperienceModel, iteration: int) -> dict[str, Any]:
        """Real episodes of the current policy, and training of the experience model on them: half new, half offline data."""
        s, name = self.settings, f"experience-{iteration}"
        tasks = Random(f"{s.seed}/refresh/{iteration}").sample(self.tasks("train"), s.refresh_episodes)
        episodes = check_played(self.play(REFRESH, policy, tasks, iteration=iteration))
        if not (self.models / name).exists():
            supervised.refresh_experience_model(self, name, iteration)
        experience.model = self.experience(name).model
        experience.refreshed(name)
        return {"real_steps": real_steps(episodes, self.world.check_action)}

    def fidelity(self, *, limit: int = gate.LIMIT) -> Judgement:
        """What the dream pays of recorded episodes and edits of them, and whether its answers agree (`gate.measure`).

        The same experience model and the same episodes are measured once. Args: `limit`, episodes of each kind at most.

        Raises `ConfigurationError` without an experience model, and for a world whose dream is not the experience model's.
        """
        return gate.measure(self, self.experience(), limit=limit)

    # --- evaluation --------------------------------------------------------------------------------------------------------

    def prove(self) -> dict[str, Any]:
        """Every policy of the folder on held-out tasks, real and dreamed; writes `result.json` (`evaluation.prove`)."""
        return evaluation.prove(self)

    def real_episode(self) -> Iterator[tuple[str, str]]:
        """The trained policy, loaded as a chat model into the agent graph with the real environment: (speaker, text)."""
        policy, task = self.policy("trained", 0), self.tasks("test")[0]
        (episode,) = self.play(f"shown/{policy_version(policy)}", policy, [task])
        yield "task", task.instruction
        yield "environment", episode.steps[0].observation
        for step in episode.steps:
            yield "policy", step.action
            yield "environment", step.next_observation
        yield "outcome", "success" if episode.success else "no success"
