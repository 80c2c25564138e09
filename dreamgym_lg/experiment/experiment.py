"""The closed loop on TextWorld-Express, stage by stage: collect, train_models, train, evaluate.

Every stage leaves its result in one folder and is skipped once that is there, so that the same command goes on after a
crash at any moment. The recipe is that of closed_loop.md.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experience.model import DreamEnvironment, ExperienceModel, to_conversation
from dreamgym_lg.experiment.evaluation import compare
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import check_played, real_steps, rollout
from dreamgym_lg.types import Split, Task, Trajectory

TRAIN, OFFLINE, REFRESH = "train", "offline", "refresh"
"""Names under which trajectories are recorded; those of evaluations begin with `validate/` and `proof/`."""

Messages = list[dict[str, str]]
"""A conversation as chat templates take it."""


class Demo:
    """One output folder and the stages that fill it; `progress(label, done, total)` is called throughout, `say(text)` at
    each evaluation.

    Raises `ConfigurationError` if the folder was made with other settings.
    """

    def __init__(self, out: Path, settings: Settings, *, progress: Callable[[str, int, int], None] = lambda *_: None,
                 say: Callable[[str], None] = lambda _: None):  # fmt: skip
        self.out, self.settings, self.progress, self.say = out, settings, progress, say
        self.models = out / "models"
        self.models.mkdir(parents=True, exist_ok=True)
        file, wanted = out / "settings.json", json.loads(json.dumps(asdict(settings)))
        if file.exists() and (found := json.loads(file.read_text())) != wanted:
            changed = sorted(key for key in wanted if found.get(key) != wanted[key])
            raise ConfigurationError(f"{out} holds a run with another {', '.join(changed)}: keep to it, or take another --out")
        file.write_text(json.dumps(wanted, indent=2))
        self.replay_buffer, self._beside = ReplayBuffer(out / "replay.db"), dict[str, Any]()

    # --- what the stages share ------------------------------------------------------------------------------------------

    @cached_property
    def pool(self) -> Any:
        from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpressPool

        return TextWorldExpressPool(size=64, max_steps=self.settings.max_steps, check=self.settings.check)

    @cached_property
    def check_action(self) -> Callable[[str, Sequence[str]], str | None]:
        from dreamgym_lg.integrations.textworld_express.text import check_action

        return partial(check_action, self.settings.game, check=self.settings.check)

    def tasks(self, split: Split, *, fold: str = "train") -> list[Task]:
        return [task for task in self.replay_buffer.tasks(split=split, origin="real") if task.metadata["fold"] == fold]

    def policy(self, name: str, temperature: float = 1.0) -> Any:
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

        return LocalChatModel.from_path(self.models / name, temperature=temperature, max_new_tokens=16)

    def experience(self, name: str | None = None, *, own_process: bool = True) -> ExperienceModel:
        """An experience model of the folder, by default the newest; in a process of its own it computes beside the policy."""
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

        name = self.newest_experience() if name is None else name
        own_process = own_process and (os.cpu_count() or 1) > 1
        model = self._beside.get(name) if own_process else None
        if name and model is None:
            model = LocalChatModel.from_path(self.models / name, temperature=0, max_new_tokens=256, own_process=own_process)
            self._beside = {name: model} if own_process else self._beside
        return ExperienceModel(
            model, replay_buffer=self.replay_buffer, demonstrations=self.settings.retrieved, demonstration_characters=80,
            instructions="", retries=0, version=name,
        )  # fmt: skip

    def dream(self, experience: ExperienceModel) -> Environment:
        return DreamEnvironment(experience, check_action=self.check_action)

    def newest_experience(self) -> str:
        found = [path.name for path in self.models.glob("experience-*[0-9]")]
        return max(found, key=lambda name: int(name.split("-")[1]), default="")

    @contextmanager
    def stage(self, name: str) -> Iterator[bool]:
        """Whether the stage is still to do; its wall time is added up over crashes only if it ends."""
        if self.seconds(name) is not None:
            yield False
            return
        start = time.perf_counter()
        yield True
        self.replay_buffer.record_metrics(f"stage/{name}", 0, {"seconds": time.perf_counter() - start})

    def seconds(self, name: str) -> float | None:
        return next((row["seconds"] for row in self.replay_buffer.metrics(f"stage/{name}")), None)

    def play(
        self, name: str, policy: Any, tasks: Sequence[Task], *, experience: ExperienceModel | None = None, iteration: int = 0
    ) -> list[Trajectory]:
        """One episode per task, in the real environment or, with `experience`, in the dream; recorded under `name`.

        Raises `EpisodesMissing` if an episode could not be played in three attempts: nothing is concluded from the others.
        """
        from dreamgym_lg.graphs.episode import create_episode_graph

        episodes = rollout(
            create_episode_graph(policy, max_steps=self.settings.max_steps).compile(),
            tasks,
            partial(self.dream, experience) if experience else self.pool.create,
            source="synthetic" if experience else "real",
            run=name,
            iteration=iteration,
            seed=self.settings.seed,
            attempts=3,
            replay_buffer=self.replay_buffer,
            experience_version=experience.version if experience else "",
        )
        return list(check_played(run_lasting(episodes)))

    # --- the stages -----------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Real worlds, split by their first observation, and offline trajectories in those of the train split."""
        from dreamgym_lg.integrations.textworld_express.environment import make_tasks
        from dreamgym_lg.integrations.textworld_express.scripted_policies import collect

        s, first = self.settings, self.settings.seed * 100_000
        with self.stage("collect") as todo:
            if not todo:
                return
            with self.pool.lend() as environment:
                self.replay_buffer.add_tasks(make_tasks(s.game, range(first, first + s.worlds), environment=environment))
                unseen = make_tasks(s.game, range(first, first + s.transfer_tasks), environment=environment, fold="test")
                self.replay_buffer.add_tasks(unseen)
                tasks, total = self.tasks("train"), sum(s.episodes.values())
                episodes = collect(tasks, environment, episodes=s.episodes, seed=s.seed, run=OFFLINE)
                for done in range(0, total, 500):
                    self.replay_buffer.extend(islice(episodes, 500))
                    self.progress("collect real trajectories", min(done + 500, total), total)

    def train_models(self) -> None:
        """Tokenizer, experience model and, from its weights, the base policy: all from the buffer alone."""
        s = self.settings
        offline = list(self.replay_buffer.trajectories(run=OFFLINE))
        Random(s.seed).shuffle(offline)
        with self.stage("experience") as todo:
            if todo:
                self._train_experience(offline)
        with self.stage("base") as todo:
            if todo:
                shown = [t for t in offline if t.success and not t.invalid_actions][: s.demonstrations]
                epochs = -(-s.batch_size * s.base_steps // len(shown))
                self._fine_tune("base policy", "experience-0", "base", [policy_conversation(t) for t in shown] * epochs,
                                steps=s.base_steps, learning_rate=7e-4, lr_scheduler_type="constant_with_warmup",
                                until=partial(self._earns_something, self.experience()))  # fmt: skip

    def _earns_something(self, experience: ExperienceModel, model: Any, tokenizer: Any, step: int) -> bool:
        """Whether the base policy is good enough to be improved: groups that never earn anything teach GRPO nothing.

        Asked in the dream, so that it spends no real step; a loss does not tell, for copying comes late and suddenly.
        """
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

        if step % 10:
            return False
        policy = LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=16)
        episodes = self.play("base/dream", policy, self.tasks("train")[:64], experience=experience, iteration=step)
        if enough := sum(t.reward for t in episodes) >= self.settings.base_reward * len(episodes):
            self.progress("base policy (it earns enough)", step, step)
        return enough

    def _train_experience(self, offline: Sequence[Trajectory]) -> None:
        from dreamgym_lg.integrations.transformers.tiny_models import create_model, create_tokenizer
        from dreamgym_lg.integrations.trl.sft import save_model

        s = self.settings
        conversations = self._experience_data(offline[: s.batch_size * s.experience_steps])
        # with the policy's own texts among them: a word that begins a message is another token than one after a space
        acted = [policy_conversation(trajectory) for trajectory in offline]
        tokenizer = create_tokenizer(m["content"] for conversation in [*conversations, *acted] for m in conversation)
        save_model(create_model(tokenizer, seed=s.seed), tokenizer, self.models / "scratch")
        self._fine_tune("experience model", "scratch", "experience-0", conversations, steps=s.experience_steps,
                        learning_rate=2e-3, first_lines_weight=4.0)  # fmt: skip

    def _experience_data(self, trajectories: Sequence[Trajectory]) -> list[Messages]:
        asked = self.experience("")
        asked.retrieve(trajectories)
        found = (to_conversation(asked, trajectory, self.check_action) for trajectory in trajectories)
        roles = {"human": "user", "ai": "assistant"}
        return [[{"role": roles.get(m.type, m.type), "content": m.text} for m in messages] for messages in found if messages]

    def _fine_tune(
        self, label: str, start: str, to: str, conversations: Sequence[Messages], *, steps: int, **options: Any
    ) -> None:
        from dreamgym_lg.integrations.trl.sft import fine_tune

        fine_tune(
            self.models / start, self.models / to, conversations, steps=steps, seed=self.settings.seed,
            batch_size=self.settings.batch_size,
            on_step=lambda step, loss: self.progress(f"{label} (loss {loss:.2f})", step, steps), **options,
        )  # fmt: skip

    def train(self) -> None:
        """The cyclic graph, durable: killed at any moment, the next call goes on."""
        from dreamgym_lg.graphs.training import run_training
        from dreamgym_lg.integrations.trl.sft import save_model

        with self.stage("train") as todo:
            if not todo:
                return
            training, close = self.training()
            run_training(training, self.out / "training.db", run=TRAIN, iterations=self.settings.iterations)
            close()
            self.progress("train: done", self.settings.iterations, self.settings.iterations)
            save_model(training.policy.model, training.policy.tokenizer, self.models / "trained")

    def training(self) -> tuple[Any, Callable[[], None]]:
        """The parts of the training graph, as the folder has them by now, and what closes them."""
        from dreamgym_lg.graphs.training import Training
        from dreamgym_lg.integrations.textworld_express.text import vary_task
        from dreamgym_lg.integrations.trl.grpo import GRPOLearner

        s, policy, experience, tasks = self.settings, self.policy("base"), self.experience(), self.tasks("train")
        learner = GRPOLearner(
            policy.model, policy.tokenizer, self.models / "policy", num_generations=s.num_generations,
            learning_rate=s.learning_rate, beta=s.beta, seed=s.seed,
        )  # fmt: skip
        seen = [str(task.metadata["observation"]) for task in tasks]
        vary = partial(_vary, vary_task, seen)
        curriculum = Curriculum(tasks, vary_task=vary, synthetic_share=s.synthetic_share, seed=s.seed)
        played = self.replay_buffer.trajectories(run=TRAIN, errors=False)
        curriculum.restore(self.replay_buffer.tasks(origin="synthetic"), played)
        training = Training(
            policy=policy, learner=learner, experience=experience, curriculum=curriculum, replay_buffer=self.replay_buffer,
            create_environment=partial(self.dream, experience), source="synthetic", say=self.say,
            num_tasks=s.num_tasks, num_generations=s.num_generations, max_steps=s.max_steps, seed=s.seed,
            weights_changed=policy.weights_changed,
            evaluate=partial(compare, self, policy, experience), evaluate_every=s.evaluate_every,
            refresh=partial(self.refresh, policy, experience) if s.refresh_episodes else None, refresh_every=s.refresh_every,
            on_node=lambda node, iteration: self.progress(f"train: {node}", iteration, s.iterations),
        )  # fmt: skip
        return training, learner.close

    def refresh(self, policy: Any, experience: ExperienceModel, iteration: int) -> dict[str, Any]:
        """Real episodes of the current policy, and training of the experience model on them: half new, half offline data."""
        s, name = self.settings, f"experience-{iteration}"
        tasks = Random(f"{s.seed}/refresh/{iteration}").sample(self.tasks("train"), s.refresh_episodes)
        episodes = self.play(REFRESH, policy, tasks, iteration=iteration)
        if not (self.models / name).exists():
            rng, half = Random(f"{s.seed}/mix/{iteration}"), s.batch_size * s.refresh_steps // 2
            new = self._experience_data(list(self.replay_buffer.trajectories(run=REFRESH)))
            old = self._experience_data(self.replay_buffer.sample(half, rng=rng, source="offline"))
            self._fine_tune("refresh", experience.version, name, [*old, *rng.choices(new, k=half)], steps=s.refresh_steps,
                            learning_rate=5e-4, first_lines_weight=4.0)  # fmt: skip
        experience.model = self.experience(name).model
        experience.refreshed(name)
        return {"real_steps": real_steps(episodes, self.check_action)}

    def real_episode(self) -> Iterator[tuple[str, str]]:
        """The trained policy, loaded as a chat model into the agent graph with the real environment: (speaker, text)."""
        from dreamgym_lg.graphs.episode import create_episode_graph

        with self.pool.lend() as environment:
            graph = create_episode_graph(self.policy("trained", 0), environment, max_steps=self.settings.max_steps).compile()
            state = run_lasting(graph.ainvoke({"task": self.tasks("test")[0]}))
        speakers = {"system": "task", "human": "environment", "ai": "policy"}
        yield from ((speakers[message.type], message.text) for message in state["messages"])
        yield "outcome", "success" if state["success"] else "no success"


def _vary(vary_task: Callable[..., Task | None], seen: Sequence[str], task: Task, rng: Random) -> Task | None:
    return next((new for _ in range(5) if (new := vary_task(task, rng, seen)) is not None), None)


def policy_conversation(trajectory: Trajectory) -> Messages:
    """A trajectory as the conversation its policy held in the episode graph."""
    first = trajectory.steps[0].observation
    conversation = [{"role": "system", "content": trajectory.task.instruction}, {"role": "user", "content": first}]
    for step in trajectory.steps:
        conversation += [{"role": "assistant", "content": step.action}, {"role": "user", "content": step.next_observation}]
    return conversation[:-1]
