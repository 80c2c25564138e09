"""`Experiment`: the stages `collect, train_experience, train_base, train_filtered, ..., prove` on any world."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream.annotate import Annotate
from dreamgym_lg.dream.users import model_user
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import choice, evaluation, gate, imitation, supervised
from dreamgym_lg.experiment.advice import Advice, advise
from dreamgym_lg.experiment.experience_models import place_of_training
from dreamgym_lg.experiment.lock import only_process
from dreamgym_lg.experiment.rejection import RejectionLearner
from dreamgym_lg.experiment.settings import START_KIND, TRAINING, Settings
from dreamgym_lg.experiment.start import begin_with, check_policy, is_stored, record_start, start_weights
from dreamgym_lg.experiment.trackers import check_trackers
from dreamgym_lg.experiment.training import CreateLearner, complete_settings, create_trl_learner, served_by, train_policy
from dreamgym_lg.experiment.workspace import OFFLINE, TRAIN_OVERRIDES, USER, Workspace
from dreamgym_lg.experiment.world import World
from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.learner import LearnerName
from dreamgym_lg.replay.rows import trajectory_key
from dreamgym_lg.rollout import check_played

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel


class Experiment(Workspace):
    """Runs the training stages of one world in one folder. Durable: after a crash the same calls resume.

    ```python
    run = Experiment(TextWorldExpressWorld("peckingorder"), "runs/mine")
    run.prepare()  # collect(), train_experience(), train_base() and the other baselines
    run.train()
    run.prove()
    ```

    Args:
        create_learner: Creates the learner. Default: the one that `Settings.learner` names.
        policy: The policy that training begins with, or its path or hub name. Default: the best baseline.
        report_to: Trackers of each iteration's metrics: `tensorboard`, `wandb`, `mlflow`, `trackio`.
        workspace: Arguments of `Workspace`: `replay_buffer`, `experience_model`, `engine`, `progress` and `say`.
    """

    def __init__(
        self,
        world: World,
        out: str | Path,
        settings: Settings | None = None,
        *,
        create_learner: CreateLearner = create_trl_learner,
        policy: "LocalChatModel | str | Path | None" = None,
        report_to: str | Sequence[str] = "none",
        **workspace: Any,
    ) -> None:
        super().__init__(world, out, settings, **workspace)
        self.create_learner, self.start_policy, self.report_to = create_learner, policy, check_trackers(report_to)
        self.trained: LocalChatModel | None = None
        """The policy that `train` returned; None before."""

    # --- data and models -------------------------------------------------------------------------------------------------

    def prepare(self, model: "StartModel" = None, *, baselines: Sequence[str] | None = None) -> None:
        """Run every stage before training: collect data, train the dream's local models and the baselines.

        Args: `model`, initial weights of the policies, as for `train_base`; `baselines`, names of those to train besides `sft`:
        `sft-filtered` (`train_filtered`), `dpo` (`train_offline`), `sft-drawn` (`train_drawn`). Default: all; none of an
        experiment that was given a policy.
        """
        stages = self._baselines(baselines)
        if baselines and self.start_policy is not None:
            raise ConfigurationError("policy= is given, and training begins with it, not with a baseline: leave out baselines=")
        if model is not None:
            self._begin_with(model)
        self.collect()
        if self.settings.environment != "real" and self.world.needs_model:
            self.train_experience()
        if self.settings.environment != "real" and self._lacks_user:
            self.train_user()
        self.train_base(model)
        for stage in stages:
            stage()

    def _begin_with(self, model: "StartModel") -> None:
        """Check and record the policies' initial weights, before the slow stages begin."""
        if self.start_policy is not None:
            raise ConfigurationError("policy= is given, and training begins with it: leave out one of the two")
        if not isinstance(model, str | Path) and not hasattr(model, "tokenizer"):
            raise ConfigurationError(f"{model!r} is no model: baselines go into baselines=[...]")
        self.open()
        begin_with(self, model)

    def collect(self) -> None:
        """Store the world's tasks and collect real trajectories. Scripted policies and the start policy play train tasks."""
        s = self.settings
        with self.stage("collect") as todo:
            if not todo:
                return
            for split in ("train", "validation", "test"):
                self.replay_buffer.add_tasks(self.world.tasks(split, limit=s.tasks, seed=s.seed))
            scripted = {kind: number for kind, number in s.episodes.items() if kind != START_KIND}
            self._collect_by_start(s.episodes.get(START_KIND, 0))
            if not (total := sum(scripted.values())):
                return
            episodes = iter(self.world.collect(self.tasks("train"), scripted, seed=s.seed))
            offline = (replace(trajectory, run=self.run_name(OFFLINE)) for trajectory in episodes)
            keys = set[object]()
            for done in range(0, total, 100):
                batch = list(islice(offline, 100))
                if len(keys | (new := set(map(trajectory_key, batch)))) < len(keys) + len(batch):
                    raise ConfigurationError(f"{self.world.name}: collect() repeats a rollout_index of a task: number them")
                keys |= new
                self.replay_buffer.extend(batch)
                self.progress("collect real trajectories", min(done + 100, total), total)

    def _collect_by_start(self, number: int) -> None:
        """Collect real episodes with the start policy before any training."""
        if not number or not (tasks := [task for task in self.tasks("train") if not task.drawn]):
            return
        policy = self.policy_at(start_weights(self)) if self.start_policy is None else self.base_policy()
        for done in range(0, number, len(tasks)):
            batch, iteration = tasks[: number - done], 1 + done // len(tasks)  # 0 holds those of scripted policies
            check_played(self.play(OFFLINE, policy, batch, iteration=iteration, source="offline"))
            self.progress("collect real trajectories", done + len(batch), number)

    def train_experience(self, model: "StartModel" = None, *, annotator: BaseChatModel | Annotate | str | None = None) -> None:
        """Fine-tune a local experience model on the offline trajectories. Does nothing with `experience_model=`.

        Training ends early once the loss on held-out tasks stops falling (`Workspace.experience_data`).

        Args:
            model: Initial weights: a local chat model, its path or hub name. Default: `Settings.model`.
            annotator: A chat model that writes the missing reasoning of recorded steps, or its name. With a budget:
                `partial(annotate, model=..., hosted=Hosted(...))`; a later call asks only about steps that still lack it.
                Default: a rule writes it (`in_hindsight`).

        Raises `ConfigurationError` without a recorded success, for `model` together with `experience_model=`, and for another
        model or annotator than that of the finished stage.
        """
        if self._experience_model is not None:
            if model is not None:
                raise ConfigurationError("experience_model= is given, so there is none to train: leave out one of the two")
            return
        self._run_stage("experience", supervised.train_experience_model, model=model, annotator=annotator)

    def train_user(self, model: "StartModel" = None, *, goals: BaseChatModel | str | None = None) -> None:
        """Fine-tune a local model to reply as recorded users did. It serves the world's `ModelUser(None)`.

        Training ends early once the loss on held-out conversations stops falling (`Workspace.experience_data`).

        Args:
            model: Initial weights, as of `train_experience`.
            goals: A chat model that writes the goals of recorded users in hindsight (`write_goals`), or its name. Default:
                their own messages.

        Raises `ConfigurationError` without a recorded conversation of a training task.
        """
        self._run_stage("user", supervised.train_user_model, model=model, goals=goals)

    def train_base(self, model: "StartModel" = None) -> None:
        """Fine-tune the base policy on every offline success.

        It plays the validation tasks three times during training, in reality unless `real_budget` is 0. The best weights are
        kept as `models/base`, a baseline that the dream has to beat with the same data.

        Args: `model`, its initial weights, as of `train_experience`.

        Raises `ConfigurationError` without a success, and as `train_experience` does.
        """
        if self.start_policy is not None:
            if model is not None:
                raise ConfigurationError("policy= is given, and training begins with it: leave out one of the two")
            return
        if self.record(evaluation.START):
            begin_with(self, model)  # a finished stage knows its model by name alone
        self._run_stage("base", imitation.train_base_policy, model=model)

    def train_filtered(self) -> None:
        """Fine-tune `models/filtered` on the best recorded episodes, failures among them: a baseline without a dream.

        Initial weights and procedure are those of `train_base`. Does nothing where the best episodes are the successes, or
        where the experiment was given a policy.
        """
        self._train_baseline("filtered", imitation.train_filtered_policy)

    def train_offline(self) -> None:
        """Fine-tune `models/offline_rl` on better and worse recorded episodes (`imitation.train_offline_policy`)."""
        self._train_baseline("offline_rl", imitation.train_offline_policy)

    def train_drawn(self) -> None:
        """Fine-tune `models/drawn` on successes and references of drawn tasks (`draw_tasks`), where there are some."""
        if any(task.drawn for task in self.tasks("train")):  # else they may come later
            self._train_baseline("drawn", imitation.train_drawn_policy)

    def _train_baseline(self, name: str, train: Callable[[Workspace], None]) -> None:
        if self.start_policy is None:
            self._run_stage(name, train)

    def _run_stage(self, name: str, train: Callable[..., None], **start: Any) -> None:
        """Run a stage that is still to do. Args: `start`, the models that it starts from."""
        with self.stage(name, **start) as todo:
            if todo:
                train(self, **start)

    def _baselines(self, names: Sequence[str] | None) -> list[Callable[[], None]]:
        """The methods that train these baselines, in order; None: all. Raises `ConfigurationError` for an unknown name."""
        methods = self.train_base, self.train_filtered, self.train_offline, self.train_drawn
        stages = dict(zip(imitation.BASELINES, methods, strict=True))
        if unknown := [name for name in names or () if name not in stages]:
            raise ConfigurationError.unknown("baseline", unknown[0], stages)
        return [stage for name, stage in stages.items() if names is None or name in names]

    def advise(self, learner: LearnerName | None = None) -> Advice:
        """Say whether to train, collect more traces, or stop at imitation (`advice.advise`). Plays an iteration's episodes.

        Args: `learner`, the one to train with; default: the settings'.
        """
        settings = self.settings
        self.settings = replace(settings, learner=learner or settings.learner)
        try:
            return advise(self, self.base_policy())
        finally:
            self.settings = settings

    # --- training ----------------------------------------------------------------------------------------------------------

    def train(
        self,
        policy: "LocalChatModel | str | Path | None" = None,
        iterations: int | None = None,
        *,
        servers: str | Sequence[str] = (),
        force: bool = False,
        report_to: str | Sequence[str] | None = None,
        learner_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> "LocalChatModel":
        """Train the policy with the training graph, in the place that `Settings.environment` names.

        Stores the policy as `models/trained` and returns it: the one with the highest success in real validation episodes
        (`real_budget`), or the newest without such episodes. After a crash the same call resumes. A finished training continues
        with more `iterations` or `real_steps`; one that ended by its gap to reality, with a wider `max_gap`.

        Args:
            policy: A local chat model, or the path or hub name of one: the weights that training begins with. Default: the
                experiment's policy, or the baseline that wins the most validation tasks. The trained policy: training goes on.
            iterations: Total number of iterations. Default: the settings'.
            servers: Addresses of vLLM servers of the policy's model. They generate the replies, and get the new weights after
                each update (`ServedEngine`). Default: replies are generated in this process.
            force: Train even if the gate refuses the dream; its reasons are only reported.
            report_to: Trackers in place of the experiment's; `"none"` for none.
            learner_options: Arguments of the learner's class, as TRL names them; `peft_config` implies `lora`.
            settings: Other values of `Settings` (`learner`, `lora`, `num_tasks`, ...).

        Raises `ConfigurationError` without a task or a policy to train, for an unknown setting and while another process uses
        the folder, `UntruthfulDream` if the gate refuses the dream (`max_false_success`), `NothingToTrain` if no episode can be
        learned from, `MissingDependency` without the extra `train`.
        """
        self.adopt_settings()
        self.report_to = self.report_to if report_to is None else check_trackers(report_to)
        options = dict(learner_options or {})
        notice = complete_settings(
            settings, self.settings, policy=policy, iterations=iterations, lora=options.get("peft_config") is not None
        )
        start = policy if policy is not None else self.start_policy
        learner = self._create_learner(settings.get("learner", self.settings.learner), start, options)
        if start is not None:
            check_policy(self, start)  # a refused call must not write its settings
            trained_here = start is self.start_policy and self.trained is not None
            if self.training_began and is_stored(self, start, "trained") and not trained_here:
                start = None  # the KL term and DPO compare with the weights that training began with
        if notice:
            self.say(notice)
        self.out.mkdir(parents=True, exist_ok=True)
        with only_process(self.out):
            self.open(replace(self.settings, **settings))
            # `environment` needs `real_steps`; what else may change is that of the newest call
            self.keep_record(TRAIN_OVERRIDES, dict.fromkeys((TRAINING | {"real_steps"}) & settings.keys(), True))
            self._check_trainable()
            self.force, self.start_policy = force, start
            self.trained = self._train(learner, servers)
        return self.trained

    def _create_learner(self, name: str, start: object, options: Mapping[str, Any]) -> CreateLearner:
        """How the learner of this name is made. Raises `ConfigurationError` for arguments that `rft` does not take."""
        if name != "rft":
            return partial(self.create_learner, **options)
        if options or start is not None or self.create_learner is not create_trl_learner:
            raise ConfigurationError(
                "learner='rft' imitates as train_base() does, from the same weights: leave out policy=, learner_options= "
                "and create_learner="
            )
        return partial(RejectionLearner, self)

    def _train(self, learner: CreateLearner, servers: str | Sequence[str]) -> "LocalChatModel":
        """Run the training, or load the result of one that has ended with these settings."""
        if self.training_ended(self.settings):
            more, trained = "more iterations= go on", f"trained policy: {self.models / 'trained'}"
            self.say(f"the training in {self.out} has ended, and these settings train nothing; {more}. {trained}")
            return self.policy("trained")
        start, begun = self.base_policy(), self.training_began or bool(self.record(evaluation.START_POLICY))
        begin = partial(record_start, self, start, self.start_policy)
        start = served_by(self, start, servers) if servers else start
        seconds = self.seconds("train") or 0
        return train_policy(
            self, start, learner, report_to=self.report_to, before=seconds, begin=(lambda: None) if begun else begin
        )

    @property
    def _lacks_user(self) -> bool:
        """True where the world's user is a local model that is not trained yet."""
        user = model_user(self.world.user)
        return user is not None and user.model is None and not (self.models / USER).exists()

    def _check_trainable(self) -> None:
        """Raise `ConfigurationError` without a task or a user's model."""
        if self.settings.environment != "real" and self._lacks_user:
            raise ConfigurationError(f"{self.out} holds no user, and user= has no model: call train_user() first")
        if not self.tasks("train"):
            raise ConfigurationError(
                f"{self.out} has no task of the split 'train': call collect() first; for a DreamGym, pass tasks= or a replay "
                "buffer with traces"
            )

    def trained_policy(self) -> "LocalChatModel | None":
        """The trained policy, of this process or an earlier one; None before training."""
        if self.trained is None and (self.models / "trained").exists():
            self.trained = self.policy("trained")
        return self.trained

    def kept_policy(self) -> "LocalChatModel | None":
        """The policy for production, with the temperature that validation found best; None without one.

        It is the trained one, or the baseline that is as good on the validation tasks, where `prove` played them. Before a
        training it is the best baseline.
        """
        keep, trained = choice.kept_policy(self), self.trained_policy()
        if not keep:
            return trained
        if trained is None or keep["policy"] != "trained":
            policy = self.policy(keep["policy"], None if trained is None else trained.temperature)
        else:
            policy = trained
        return policy.with_temperature(0) if keep["mode"] == "greedy" else policy

    def base_policy(self) -> "LocalChatModel":
        """The policy that training begins with: a given one, or the best baseline.

        Raises `ConfigurationError` without one, or for one that cannot be trained.
        """
        policy = self.start_policy
        if policy is None:
            if path := self.record(evaluation.START_POLICY).get("path"):
                return self.policy_at(path)
            if not (self.models / "base").exists():
                raise ConfigurationError(f"{self.out} holds no base policy: call train_base() first, or give train() a policy")
            return self.policy(choice.start_baseline(self))
        place = place_of_training(policy, self.settings.learner)
        local = self.policy_at(policy) if isinstance(policy, str | Path) else policy
        if local.model is None and place == "here":
            raise ConfigurationError("the policy has no weights in this process, so that it cannot be trained: give model=")
        return local

    def fidelity(self, *, limit: int = gate.LIMIT) -> Judgement:
        """Measure the dream's verdicts and answers on recorded episodes (`gate.measure`).

        The same experience model and the same episodes are measured once. Args: `limit`, episodes of each kind at most.

        Raises `ConfigurationError` without an experience model, and for a world whose dream is not the experience model's.
        """
        return gate.measure(self, self.dream(), limit=limit)

    # --- evaluation --------------------------------------------------------------------------------------------------------

    def prove(self, baselines: Sequence[str] = ()) -> dict[str, Any]:
        """Evaluate every policy on held-out tasks, real and dreamed; write `result.json` (`evaluation.prove`).

        Args: `baselines`, as for `prepare`; missing ones are trained first, from the weights that a given policy began with.
        """
        given, stages = self.start_policy, self._baselines(baselines)
        self.start_policy = None if self.training_began else given  # else no baseline is trained
        try:
            for stage in stages:
                stage()
        finally:
            self.start_policy = given
        return evaluation.prove(self)
