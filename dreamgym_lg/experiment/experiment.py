"""`Experiment`: the stages `collect, train_experience, train_base, train_supervised, train, prove` on any world."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.training_data import to_conversation
from dreamgym_lg.experiment import evaluation
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.workspace import Workspace
from dreamgym_lg.experiment.world import Messages, World
from dreamgym_lg.learner import Learner
from dreamgym_lg.rollout import check_played, real_steps
from dreamgym_lg.token_recorder import TrainablePolicy
from dreamgym_lg.types import Task, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.graphs.training import Training
    from dreamgym_lg.integrations.transformers import LocalChatModel

TRAIN, OFFLINE, REFRESH = "train", "offline", "refresh"
"""Names under which trajectories are recorded; those of evaluations begin with `validate/` and `proof/`."""

CreateLearner = Callable[[TrainablePolicy, Path, Settings], Learner]
"""Creates what trains a policy, with its checkpoints in a folder, e.g. `create_grpo_learner`."""


def create_grpo_learner(policy: TrainablePolicy, path: Path, settings: Settings, **options: Any) -> Learner:
    """GRPO by TRL. Args: `options`, further arguments of `GRPOLearner`."""
    from dreamgym_lg.integrations.trl.grpo import GRPOLearner

    if settings.num_generations < 2:
        raise ConfigurationError(f"num_generations={settings.num_generations}: a group needs at least 2 episodes to compare")
    given = {
        "learning_rate": settings.learning_rate,
        "beta": settings.beta,
        "temperature": policy.temperature,
        "seed": settings.seed,
    }
    return GRPOLearner(policy.model, policy.tokenizer, path, **{**given, **options})


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
        learner: Creates what trains the policy. Default: `create_grpo_learner`.
        policy: The policy that training begins with, or its path or hub name. Default: the base policy of `train_base`.
        arguments: Those of `Workspace`.
    """

    def __init__(
        self,
        world: World,
        out: str | Path,
        settings: Settings | None = None,
        *,
        learner: CreateLearner = create_grpo_learner,
        policy: "LocalChatModel | str | Path | None" = None,
        **arguments: Any,
    ) -> None:
        super().__init__(world, out, settings, **arguments)
        self.learner, self._policy = learner, policy
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

    def train_experience(self) -> None:
        """Fine-tune a local experience model, from scratch, on the offline trajectories. Nothing to do for a given one."""
        with self.stage("experience") as todo:
            if todo and self._given is None:
                self._train_experience(self.offline())

    def train_base(self) -> None:
        """Fine-tune the base policy on a few offline successes until its dreamed episodes earn something."""
        s = self.settings
        with self.stage("base") as todo:
            if not todo or self._policy is not None:
                return
            self._fine_tune(
                "base policy", "experience-0", "base", self._demonstrations(s.base_steps), steps=s.base_steps,
                learning_rate=7e-4, lr_scheduler_type="constant_with_warmup",
                until=partial(self._earns_something, self.experience()),
            )  # fmt: skip

    def train_supervised(self) -> None:
        """The baseline without any dream: the base policy's own demonstrations until its real validation success stops rising.

        Same start and same data as the base policy; every `CHECKED` steps the policy is played on the validation tasks, and
        the best one is kept.
        """
        s = self.settings
        with self.stage("supervised") as todo:
            if not todo or self._policy is not None or not s.supervised_steps:
                return
            self._fine_tune(
                "supervised baseline", "experience-0", "supervised-last", self._demonstrations(s.supervised_steps),
                steps=s.supervised_steps, learning_rate=7e-4, lr_scheduler_type="constant_with_warmup",
                until=self._stopped_rising,
            )  # fmt: skip

    def offline(self) -> list[Trajectory]:
        """The collected trajectories, or all imported ones, in an order drawn by the seed."""
        found = list(self.replay_buffer.trajectories(source="offline", split="train", errors=False))
        Random(self.settings.seed).shuffle(found)
        return found

    def held_out_offline(self) -> list[Trajectory]:
        """The collected trajectories that `train_experience` did not take, in `offline`'s order; all, for a given model.

        A refresh draws on all of them.
        """
        s = self.settings
        return self.offline()[0 if self._given is not None else s.batch_size * s.experience_steps :]

    def _demonstrations(self, steps: int) -> list[Messages]:
        """Offline successes without an invalid action, repeated to last for so many optimiser steps."""
        s = self.settings
        shown = [t for t in self.offline() if t.success and not t.invalid_actions][: s.demonstrations]
        if not shown:
            raise ConfigurationError("no offline trajectory is a success: there is nothing to fine-tune a base policy on")
        return [self.world.conversation(t) for t in shown] * -(-s.batch_size * steps // len(shown))

    def _earns_something(self, experience: ExperienceModel, model: Any, tokenizer: Any, step: int) -> bool:
        """Whether the base policy is good enough to be improved: groups that never earn anything teach GRPO nothing.

        Asked in the dream, so that it spends no real step; a loss does not tell, for copying comes late and suddenly.
        """
        if step % 10:
            return False
        policy = self._wrapped(model, tokenizer)
        episodes = self.play("base/dream", policy, self.tasks("train")[:64], experience=experience, iteration=step)
        if enough := sum(t.reward for t in episodes) >= self.settings.base_reward * len(episodes):
            self.progress("base policy (it earns enough)", step, step)
        return enough

    def _stopped_rising(self, model: Any, tokenizer: Any, step: int) -> bool:
        """Whether the supervised baseline's real validation success has stopped rising."""
        if step % CHECKED and step != self.settings.supervised_steps:
            return False
        best, policy = _Best(self, "supervised"), self._wrapped(model, tokenizer)
        episodes = check_played(self.play("validate/supervised", policy, self._panel(), iteration=step))
        successes = sum(trajectory.success for trajectory in episodes)
        best.offer(step, successes, sum(t.reward for t in episodes) / max(len(episodes), 1), policy)
        self.say(f"supervised for {step} steps: real {successes}/{len(episodes)}")
        return step - best.at >= PATIENCE * CHECKED

    def _wrapped(self, model: Any, tokenizer: Any) -> Any:
        from dreamgym_lg.integrations.transformers import LocalChatModel

        return LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=self.settings.policy_tokens)

    def _train_experience(self, offline: Sequence[Trajectory]) -> None:
        from dreamgym_lg.integrations.transformers.tiny_models import create_model, create_tokenizer
        from dreamgym_lg.integrations.trl.sft import save_model

        s = self.settings
        conversations = self._experience_data(offline[: s.batch_size * s.experience_steps])
        # with the policy's own texts among them: a word that begins a message is another token than one after a space
        acted = [self.world.conversation(trajectory) for trajectory in offline]
        tokenizer = create_tokenizer(m["content"] for conversation in [*conversations, *acted] for m in conversation)
        save_model(create_model(tokenizer, seed=s.seed), tokenizer, self.models / "scratch")
        self._fine_tune("experience model", "scratch", "experience-0", conversations, steps=s.experience_steps,
                        learning_rate=2e-3, first_lines_weight=4.0)  # fmt: skip

    def _experience_data(self, trajectories: Sequence[Trajectory]) -> list[Messages]:
        asked = self.experience("")
        asked.retrieve(trajectories)
        found = (to_conversation(asked, trajectory, self.world.check_action) for trajectory in trajectories)
        roles = {"human": "user", "ai": "assistant"}
        return [[{"role": roles.get(m.type, m.type), "content": m.text} for m in messages] for messages in found if messages]

    def _fine_tune(
        self, label: str, start: str, to: str, conversations: Sequence[Messages], *, steps: int, **options: Any
    ) -> None:
        from dreamgym_lg.integrations.trl.sft import fine_tune

        s = self.settings
        needed = s.batch_size * steps
        fine_tune(
            self.models / start, self.models / to, list(conversations) * -(-needed // max(len(conversations), 1)),
            steps=steps, seed=s.seed, batch_size=s.batch_size,
            on_step=lambda step, loss: self.progress(f"{label} (loss {loss:.2f})", step, steps), **options,
        )  # fmt: skip

    # --- training ----------------------------------------------------------------------------------------------------------

    def train(
        self, policy: "LocalChatModel | str | Path | None" = None, iterations: int | None = None, **options: Any
    ) -> "LocalChatModel":
        """Train the policy in the dream by the cyclic training graph; it is stored as `models/trained` and returned.

        With `real_evaluation` that is the policy with the highest real success on the validation tasks, never one chosen by
        the dream; otherwise the newest. Killed at any moment, the same call goes on; with more `iterations`, a finished
        training goes on too.

        Args:
            policy: A local chat model, or the path or hub name of one: the weights that training begins with. Default: the
                experiment's policy, or the base policy of `train_base`.
            iterations: How many there shall be in all. Default: the settings'.
            options: Other values of `Settings` (`num_tasks`, `learning_rate`, ...), and arguments of the learner.

        Raises `ConfigurationError` without a task or a policy to train, `NothingToTrain` if the episodes give nothing to
        learn from, `MissingDependency` without the extra `train`.
        """
        known = {field.name for field in fields(Settings)}
        given = {name: value for name, value in options.items() if name in known}
        if iterations is not None:
            given["iterations"] = iterations
        self.settings = replace(self.settings, **given)
        self._policy = policy if policy is not None else self._policy
        if not self.tasks("train"):
            raise ConfigurationError("there is no task of the split 'train': pass tasks=, or import traces first")
        local = self.base_policy()
        self.open()
        done = next(iter(self.replay_buffer.metrics(self.run_name("stage/train"))), {})
        if done.get("iterations", 0) >= self.settings.iterations:
            self.trained = self.policy("trained")
        else:
            learner = partial(self.learner, **{name: value for name, value in options.items() if name not in known})
            self.trained = self._train(local, learner, float(done.get("seconds", 0)))
        return self.trained

    def base_policy(self) -> "LocalChatModel":
        """The policy that training begins with. Raises `ConfigurationError` without one, or for one that cannot be trained."""
        from dreamgym_lg.integrations.transformers import LocalChatModel

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

    def _train(self, policy: "LocalChatModel", create_learner: CreateLearner, before: float) -> "LocalChatModel":
        """Run the training graph to its end, and keep the policy. Args: `before`, seconds of earlier, shorter trainings."""
        from dreamgym_lg.graphs.training import run_training
        from dreamgym_lg.integrations.trl.sft import save_model

        start, wanted = time.perf_counter(), self.settings.iterations
        if not (self.models / "base").exists():
            save_model(policy.model, policy.tokenizer, self.models / "base")  # what the proof compares with
        training, close = self.training(policy, create_learner)
        try:
            run_training(training, self.out / "training.db", run=self.run_name(TRAIN), iterations=wanted)
        finally:
            close()
        self.progress("train: done", wanted, wanted)
        if best := (self.models / "best").exists():
            shutil.copytree(self.models / "best", self.models / "trained", dirs_exist_ok=True)
        else:
            save_model(policy.model, policy.tokenizer, self.models / "trained")
        figures = {"seconds": time.perf_counter() - start + before, "iterations": wanted}
        self.replay_buffer.record_metrics(self.run_name("stage/train"), 0, figures)
        return self.policy("trained") if best else policy

    def training(
        self, policy: "LocalChatModel", create_learner: CreateLearner | None = None
    ) -> tuple["Training", Callable[[], None]]:
        """The parts of the training graph, as the folder has them by now, and what closes them."""
        from dreamgym_lg.graphs.training import Training

        s, experience = self.settings, self.experience()
        learner = (create_learner or self.learner)(policy, self.models / "policy", s)
        policy.weights_changed()  # those of a checkpoint may be in place now
        tasks = self.tasks("train")
        vary = self.world.task_generator(tasks)
        curriculum = Curriculum(tasks, vary_task=vary, synthetic_share=s.synthetic_share if vary else 0, seed=s.seed)
        trained_on = self.replay_buffer.trajectories(run=self.run_name(TRAIN), errors=False)
        curriculum.restore(self.replay_buffer.tasks(origin="synthetic"), trained_on)
        training = Training(
            policy=policy,
            agent=self.world.agent(policy, real=False),
            learner=learner,
            source="synthetic",
            experience=experience,
            curriculum=curriculum,
            replay_buffer=self.replay_buffer,
            create_environment=partial(self.world.create_dream, experience),
            num_tasks=s.num_tasks,
            num_generations=s.num_generations,
            max_steps=self.world.max_steps,
            seed=s.seed,
            concurrency=s.concurrency,
            weights_changed=policy.weights_changed,
            evaluate=partial(self._evaluate, policy, experience) if self._panel() else None,
            evaluate_every=s.evaluate_every,
            refresh=partial(self.refresh, policy, experience) if s.refresh_episodes else None,
            refresh_every=s.refresh_every,
            on_node=lambda node, iteration: self.progress(f"train: {node}", iteration, s.iterations),
            say=self.say,
        )
        return training, learner.close

    def _panel(self) -> list[Task]:
        return self.tasks("validation")[: self.settings.evaluate_tasks]

    def _evaluate(self, policy: "LocalChatModel", experience: ExperienceModel, iteration: int) -> dict[str, Any]:
        figures = evaluation.validate(self, policy, experience, iteration)
        if self.settings.real_evaluation:
            _Best(self, "best").offer(iteration, figures["eval_real_successes"], figures["eval_real_reward_mean"], policy)
        return figures

    def refresh(self, policy: "LocalChatModel", experience: ExperienceModel, iteration: int) -> dict[str, Any]:
        """Real episodes of the current policy, and training of the experience model on them: half new, half offline data."""
        s, name = self.settings, f"experience-{iteration}"
        tasks = Random(f"{s.seed}/refresh/{iteration}").sample(self.tasks("train"), s.refresh_episodes)
        episodes = self.play(REFRESH, policy, tasks, iteration=iteration)
        if not (self.models / name).exists():
            rng, half = Random(f"{s.seed}/mix/{iteration}"), s.batch_size * s.refresh_steps // 2
            new = self._experience_data(list(self.replay_buffer.trajectories(run=self.run_name(REFRESH))))
            old = self._experience_data(self.replay_buffer.sample(half, rng=rng, source="offline"))
            self._fine_tune(
                "refresh", self.newest_experience(), name, [*old, *rng.choices(new, k=half)], steps=s.refresh_steps,
                learning_rate=5e-4, first_lines_weight=4.0,
            )  # fmt: skip
        experience.model = self.experience(name).model
        experience.refreshed(name)
        return {"real_steps": real_steps(episodes, self.world.check_action)}

    # --- evaluation --------------------------------------------------------------------------------------------------------

    def prove(self) -> dict[str, Any]:
        """Every policy of the folder on held-out tasks, real and dreamed; writes `result.json` (`evaluation.prove`)."""
        return evaluation.prove(self)

    def real_episode(self) -> Iterator[tuple[str, str]]:
        """The trained policy, loaded as a chat model into the agent graph with the real environment: (speaker, text)."""
        policy, task = self.policy("trained", 0), self.tasks("test")[0]
        (episode,) = self.play("shown", policy, [task])
        yield "task", task.instruction
        yield "environment", episode.steps[0].observation
        for step in episode.steps:
            yield "policy", step.action
            yield "environment", step.next_observation
        yield "outcome", "success" if episode.success else "no success"


class _Best:
    """The policy that did best on the real validation tasks so far, in `models/NAME`; ties go to the newest."""

    def __init__(self, work: Workspace, name: str) -> None:
        self.work, self.name, self.run = work, name, work.run_name(f"best/{name}")

    @property
    def at(self) -> int:
        """The iteration or step of the best; 0 before any."""
        return int(next((row["at"] for row in self.work.replay_buffer.metrics(self.run)), 0))

    def offer(self, at: int, successes: float, reward: float, policy: TrainablePolicy) -> None:
        """Keep this policy if no earlier one has more successes or, with as many, a higher mean reward."""
        from dreamgym_lg.integrations.trl.sft import save_model

        before = next((row for row in self.work.replay_buffer.metrics(self.run)), None)
        if before is None or (successes, reward) >= (before["successes"], before["reward"]):
            save_model(policy.model, policy.tokenizer, self.work.models / self.name)
            self.work.replay_buffer.record_metrics(self.run, 0, {"at": at, "successes": successes, "reward": reward})


CHECKED, PATIENCE = 50, 3
"""The supervised baseline is evaluated every so many steps, and ends after so many evaluations without a better one."""
