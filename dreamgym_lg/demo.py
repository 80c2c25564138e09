"""The closed loop on TextWorld-Express, stage by stage: collect, models, train, evaluate.

Every stage leaves its result in one folder and is skipped once that is there, so that the same command goes on after a
crash at any moment. The recipe is that of closed_loop.md.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any

from langchain_core.messages import BaseMessage

from dreamgym_lg.curriculum import Curriculum
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience import DreamEnvironment, ExperienceModel, to_conversation
from dreamgym_lg.fidelity import judge, summarise
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Task, Trajectory

RUN = "train"
OFFLINE = "offline"
FORMAT = ""
"""The experience model trained here knows the answer's form from its training, so its prompt needs no instructions."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a result; written to the output folder and held fixed there."""

    game: str = "peckingorder"
    seed: int = 0
    worlds: int = 2500
    """Seeds tried; different first observations among them become tasks, split by their hash."""
    episodes: Mapping[str, int]
    """Offline trajectories of each behaviour."""
    demonstrations: int = 10
    """Demonstrations the base policy is fine-tuned on."""
    pretrain_steps: int = 150
    experience_steps: int = 250
    base_steps: int = 40
    iterations: int = 60
    num_tasks: int = 8
    num_generations: int = 8
    max_steps: int = 10
    learning_rate: float = 3e-4
    updates: int = 1
    beta: float = 0.02
    synthetic_share: float = 0.25
    evaluate_every: int = 15
    evaluate_tasks: int = 40
    """Validation worlds of each evaluation during training."""
    proof_tasks: int = 120
    """Held-out worlds of the proof."""
    refresh_every: int = 15
    refresh_episodes: int = 0
    """Real episodes of the current policy shown to the experience model at each refresh; 0 spends no real step."""
    refresh_steps: int = 50


EPISODES = {"demonstration": 800, "noisy": 2500, "random": 1500, "malformed": 1000, "fluent_wrong": 2500, "mixture": 1700}
GAMES = {
    "peckingorder": Settings(episodes=EPISODES),
    "twc": Settings(
        game="twc",
        episodes=EPISODES,
        demonstrations=40,
        worlds=5000,
        refresh_episodes=50,
    ),
}


def settings_for(game: str, *, quick: bool = False, **overrides: Any) -> Settings:
    """The recipe of a game; `quick` is two minutes of it, enough to see every part work and not to prove a gain."""
    if game not in GAMES:
        raise ConfigurationError.unknown("game", game, GAMES)
    settings = GAMES[game]
    if quick:
        settings = replace(
            settings,
            worlds=400,
            episodes={kind: n // 8 for kind, n in settings.episodes.items()},
            pretrain_steps=30,
            experience_steps=40,
            iterations=3,
            evaluate_every=3,
            evaluate_tasks=8,
            proof_tasks=16,
        )
    return replace(settings, **overrides)


class Demo:
    """One output folder and the stages that fill it. `progress(label, done, total)` is called throughout."""

    def __init__(self, out: Path, settings: Settings, *, progress: Callable[[str, int, int], None] = lambda *_: None):
        self.out, self.settings, self.progress = out, settings, progress
        out.mkdir(parents=True, exist_ok=True)
        file = out / "settings.json"
        if file.exists() and (found := json.loads(file.read_text())) != asdict(settings):
            changed = sorted(key for key, value in asdict(settings).items() if found.get(key) != value)
            raise ConfigurationError(
                f"{out} holds a run with another {', '.join(changed)}; go on with the same settings, or take another --out"
            )
        file.write_text(json.dumps(asdict(settings), indent=2))
        self.replay_buffer = ReplayBuffer(out / "replay.db")

    # --- what the stages share ------------------------------------------------------------------------------------------

    @cached_property
    def pool(self) -> Any:
        from dreamgym_lg.integrations.textworld_express import TextWorldExpressPool

        return TextWorldExpressPool(size=64, max_steps=self.settings.max_steps)

    @property
    def check_action(self) -> Callable[[str, Sequence[str]], str | None]:
        from dreamgym_lg.integrations.textworld_express import check_action

        return partial(check_action, self.settings.game)

    def real(self) -> AbstractContextManager[Environment]:
        return self.pool.lend()

    def dream(self, experience: ExperienceModel) -> Callable[[], AbstractContextManager[Environment]]:
        return lambda: nullcontext(DreamEnvironment(experience, check_action=self.check_action))

    def tasks(self, split: str) -> list[Task]:
        return self.replay_buffer.tasks(split=split, origin="real")

    def chat(self, path: Path, **kwargs: Any) -> Any:
        from dreamgym_lg.integrations.transformers import LocalChatModel

        return LocalChatModel.from_path(path, **kwargs)

    def experience(self) -> ExperienceModel:
        """The newest experience model in the folder."""
        path = self.newest_experience()
        model = self.chat(path, temperature=0, max_new_tokens=256)
        return ExperienceModel(model, instructions=FORMAT, retries=0, version=path.name)

    def newest_experience(self) -> Path:
        return max((self.out / "models").glob("experience-*"), key=lambda path: int(path.name.split("-")[1]))

    def policy(self, path: Path, temperature: float = 1.0) -> Any:
        return self.chat(path, temperature=temperature, max_new_tokens=16)

    @contextmanager
    def stage(self, name: str) -> Iterator[bool]:
        """Whether the stage is still to do; its time and real steps are kept with the folder."""
        done = self.record(name)
        if "seconds" in done:
            yield False
            return
        start, before = time.perf_counter(), self.pool.counter.steps
        yield True
        seconds = time.perf_counter() - start
        self.replay_buffer.record_metrics(f"stage/{name}", 0, {"seconds": seconds, "real_steps": self.pool.counter.steps - before})

    def record(self, name: str) -> dict[str, Any]:
        return next(iter(self.replay_buffer.metrics(f"stage/{name}")), {})

    # --- the stages -----------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Real worlds, split by their first observation, and offline trajectories in those of the train split."""
        from dreamgym_lg.integrations import textworld_express as twx
        from dreamgym_lg.integrations.textworld_express_behaviour import collect

        s = self.settings
        with self.stage("collect") as todo:
            if not todo:
                return
            seeds = range(s.seed * 100_000, s.seed * 100_000 + s.worlds)
            with self.pool.lend() as environment:
                self.replay_buffer.add_tasks(twx.make_tasks(s.game, seeds, environment=environment))
                episodes = collect(self.tasks("train"), environment, episodes=s.episodes, seed=s.seed, run=OFFLINE)
                total, batch = sum(s.episodes.values()), []
                for count, trajectory in enumerate(episodes, start=1):
                    batch.append(trajectory)
                    if len(batch) == 500 or count == total:
                        self.replay_buffer.extend(batch)
                        self.progress("collect real trajectories", count, total)
                        batch = []

    def train_models(self) -> None:
        """Pretrained model, experience model and base policy, all from the buffer alone."""
        s, models = self.settings, self.out / "models"
        offline = list(self.replay_buffer.trajectories(run=OFFLINE))
        Random(s.seed).shuffle(offline)
        with self.stage("experience") as todo:
            if todo:
                self._train_experience(offline, models)
        with self.stage("base") as todo:
            if todo:
                shown = [t for t in offline if t.success and not t.invalid_actions][: s.demonstrations]
                rows = [policy_conversation(trajectory) for trajectory in shown]
                self._fine_tune(
                    models / "pretrained", models / "base", rows * (24 * s.base_steps // len(rows)),
                    steps=s.base_steps, learning_rate=5e-4, label="base policy",
                )

    def _train_experience(self, offline: Sequence[Trajectory], models: Path) -> None:
        from dreamgym_lg.integrations.transformers_scratch import create_model, create_tokenizer

        s = self.settings
        seen = [self._experience_conversation(t) for t in offline[: 24 * (s.pretrain_steps + s.experience_steps)]]
        conversations = [conversation for conversation in seen if conversation]
        if not (models / "pretrained").exists():
            texts = [message["content"] for conversation in conversations for message in conversation]
            tokenizer = create_tokenizer(texts, vocab_size=1024)
            model = create_model(tokenizer, seed=s.seed)
            _save(model, tokenizer, models / "scratch")
            rows = [*conversations, *(policy_conversation(t) for t in offline)]
            self._fine_tune(
                models / "scratch", models / "pretrained", rows, steps=s.pretrain_steps,
                learning_rate=2e-3, label="pretrain", everything=True,
            )
        self._fine_tune(
            models / "pretrained", models / "experience-0", conversations, steps=s.experience_steps,
            learning_rate=2e-3, label="experience model", weight=4.0,
        )

    def _experience_conversation(self, trajectory: Trajectory) -> list[dict[str, str]]:
        form = ExperienceModel.__new__(ExperienceModel)
        form.replay_buffer, form.k, form.instructions = None, 0, FORMAT
        return plain(to_conversation(form, trajectory, self.check_action))

    def _fine_tune(
        self, start: Path, to: Path, conversations: Sequence[Sequence[dict[str, str]]], *, steps: int,
        learning_rate: float, label: str, everything: bool = False, weight: float = 1.0,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from dreamgym_lg.integrations.trl.sft import tokenize, train_sft, weigh_first_lines

        tokenizer = AutoTokenizer.from_pretrained(start)
        model = AutoModelForCausalLM.from_pretrained(start)
        order = list(conversations)
        Random(self.settings.seed).shuffle(order)
        rows = tokenize(tokenizer, order[: 24 * steps], everything=everything)
        rows = weigh_first_lines(tokenizer, rows, lines=2, weight=weight)
        train_sft(
            model, tokenizer, rows, steps=steps, learning_rate=learning_rate, seed=self.settings.seed,
            on_step=lambda step, loss: self.progress(f"{label} (loss {loss:.2f})", step, steps),
        )
        _save(model, tokenizer, to)

    def play(
        self, name: str, policy: Any, tasks: Sequence[Task], *, experience: ExperienceModel | None = None, iteration: int = 0
    ) -> list[Trajectory]:
        """One episode per task, in the real environment or, with `experience`, in the dream; recorded under `name`."""
        from dreamgym_lg.graphs.episode import EpisodeContext, create_episode_graph

        graph = create_episode_graph(policy, max_steps=self.settings.max_steps).compile()
        return asyncio.run(
            rollout(
                graph, tasks, self.dream(experience) if experience else self.real,
                context=lambda environment: EpisodeContext(environment=environment),
                source="synthetic" if experience else "real", run=name, iteration=iteration, seed=self.settings.seed,
                replay_buffer=self.replay_buffer, experience_version=experience.version if experience else "",
            )
        )

    # --- training -------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """The cyclic graph, durable: killed at any moment, the next call goes on."""
        from langgraph.checkpoint.sqlite import SqliteSaver

        from dreamgym_lg.graphs.training import create_training_graph

        with self.stage("train") as todo:
            if not todo:
                return
            training, close = self._training()
            with SqliteSaver.from_conn_string(str(self.out / "training.db")) as saver:
                graph = create_training_graph(training).compile(checkpointer=saver)
                config: Any = {"configurable": {"thread_id": RUN}, "recursion_limit": 100_000}
                begun = graph.get_state(config).values
                start = None if begun else {"run": RUN, "iterations": self.settings.iterations}
                graph.invoke(start, config, durability="sync")
            close()
            _save(training.policy.model, training.policy.tokenizer, self.out / "models" / "trained")

    def _training(self) -> tuple[Any, Callable[[], None]]:
        from dreamgym_lg.graphs.training import Training
        from dreamgym_lg.integrations import textworld_express as twx
        from dreamgym_lg.integrations.trl.grpo import GRPOLearner

        s = self.settings
        policy = self.policy(self.out / "models" / "base")
        learner = GRPOLearner(
            policy.model, policy.tokenizer, self.out / "models" / "policy", num_generations=s.num_generations,
            learning_rate=s.learning_rate, beta=s.beta, seed=s.seed, updates=s.updates,
        )
        tasks, experience = self.tasks("train"), self.experience()
        seen = [task.metadata["observation"] for task in tasks]
        curriculum = Curriculum(
            tasks, vary_task=lambda task, rng: twx.vary_task(task, rng, seen), synthetic_share=s.synthetic_share, seed=s.seed
        )
        earlier: dict[str, list[float]] = {}
        for trajectory in self.replay_buffer.trajectories(run=RUN, errors=False):
            key = (trajectory.iteration, trajectory.task.id)
            earlier.setdefault(key, []).append(trajectory.reward)
        curriculum.restore(self.replay_buffer.tasks(origin="synthetic"), {key[1]: r for key, r in sorted(earlier.items())})
        training = Training(
            policy=policy, learner=learner, experience=experience, environments=self.dream(experience), curriculum=curriculum,
            replay_buffer=self.replay_buffer, num_tasks=s.num_tasks, num_generations=s.num_generations, max_steps=s.max_steps,
            seed=s.seed, weights_changed=policy.weights_changed,
            evaluate=partial(self.compare, policy, experience), evaluate_every=s.evaluate_every,
            refresh=partial(self.refresh, policy, experience) if s.refresh_episodes else None, refresh_every=s.refresh_every,
            on_node=lambda node, iteration: self.progress(f"train: {node}", iteration, s.iterations),
        )
        return training, learner.close

    def compare(self, policy: Any, experience: ExperienceModel, iteration: int) -> dict[str, Any]:
        """The policy on validation worlds, real and dreamed, and the experience model's verdict on its real actions."""
        tasks = self.tasks("validation")[: self.settings.evaluate_tasks]
        real = self.play("validate/real", policy, tasks, iteration=iteration)
        dreamed = self.play("validate/dream", policy, tasks, iteration=iteration, experience=experience)
        verdicts = asyncio.run(judge(experience, real, check_action=self.check_action))
        return {
            "eval_real_successes": sum(t.success for t in real),
            "eval_real_episodes": len(real),
            "eval_dream_successes": sum(t.success for t in dreamed),
            "eval_dream_episodes": len(dreamed),
            "eval_invalid_recall": verdicts.invalid_recall,
            "eval_invalid_count": verdicts.invalid,
            "eval_valid_refused": verdicts.valid_refused / max(verdicts.valid, 1),
            "eval_reward_errors": verdicts.reward_errors / max(verdicts.valid + verdicts.invalid, 1),
            "eval_real_steps": sum(len(t.steps) for t in real),
        }

    def refresh(self, policy: Any, experience: ExperienceModel, iteration: int) -> dict[str, Any]:
        """Real episodes of the current policy, and some steps of training on them: half new, half offline data."""
        s = self.settings
        to = self.out / "models" / f"experience-{iteration}"
        tasks = Random(f"{s.seed}/refresh/{iteration}").sample(self.tasks("train"), s.refresh_episodes)
        real = self.play("refresh", policy, tasks, iteration=iteration)
        if not to.exists():
            new = [c for t in self.replay_buffer.trajectories(run="refresh") if (c := self._experience_conversation(t))]
            rng = Random(f"{s.seed}/mix/{iteration}")
            old = self.replay_buffer.sample(12 * s.refresh_steps, rng=rng, source="offline")
            mixed = [c for t in old if (c := self._experience_conversation(t))] + rng.choices(new, k=12 * s.refresh_steps)
            self._fine_tune(
                self.newest_experience(), to, mixed, steps=s.refresh_steps, learning_rate=5e-4, label="refresh", weight=4.0
            )
        fresh = self.chat(to)
        experience.model.model.load_state_dict(fresh.model.state_dict())
        experience.model.weights_changed()
        experience.refreshed(to.name)
        return {"real_steps": sum(len(t.steps) for t in real)}


def policy_conversation(trajectory: Trajectory) -> list[dict[str, str]]:
    """A trajectory as the conversation its policy held in the episode graph."""
    first = trajectory.steps[0].observation
    conversation = [{"role": "system", "content": trajectory.task.instruction}, {"role": "user", "content": first}]
    for step in trajectory.steps:
        conversation.append({"role": "assistant", "content": step.action})
        conversation.append({"role": "user", "content": step.next_observation})
    return conversation[:-1]


def plain(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """LangChain messages as the dictionaries that chat templates take."""
    roles = {"human": "user", "ai": "assistant"}
    return [{"role": roles.get(message.type, message.type), "content": message.text} for message in messages]


def _save(model: Any, tokenizer: Any, path: Path) -> None:
    """Write a model folder that is either whole or not there."""
    draft = path.with_name(path.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    shutil.rmtree(path, ignore_errors=True)
    draft.rename(path)
