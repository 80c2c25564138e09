"""The folder of an experiment: its settings, replay buffer, models and stages."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, get_args
from uuid import uuid4

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.dream.users import ModelUser, model_user
from dreamgym_lg.environment import CreateEnvironment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.experience_models import (
    as_trained,
    load_experience_model,
    load_named_policy,
    model_name,
    policy_version,
    saved_sampling,
)
from dreamgym_lg.experiment.lock import only_process
from dreamgym_lg.experiment.settings import CHANGEABLE, CHANGED_LATER, STOP_CRITERIA, Settings, check_same, read_settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.files import write_whole
from dreamgym_lg.hosted import name_of
from dreamgym_lg.progress import counter, show_progress
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import Agent, rollout
from dreamgym_lg.types import Source, Split, Task, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
    from dreamgym_lg.integrations.transformers.requests import Engine

    CreateEngine = Callable[[Path], Engine]

logger = logging.getLogger(__name__)

TRAIN, OFFLINE = "train", "offline"
"""Run names of trajectories; those of evaluations begin with `validate/` and `proof/`."""

EXPERIENCE, USER = "experience-0", "user"
"""Names of the local experience model and user in the folder."""

MIN_CASES = 20
"""Real failures, and real successes, that measure a judge at least. With fewer, training needs `force=True`."""

DATA = "stage/experience/data"
"""Record of how many trajectories the experience model, or else the user, was trained from; and of the tasks held out."""


class Workspace:
    """The folder, replay buffer and models that all stages of an experiment share.

    Every stage leaves its result in the folder and is skipped once that is there.

    Args:
        world: Tasks and real environment.
        out: The folder; made when the first stage begins.
        settings: Default: the world's.
        replay_buffer: Holds traces and episodes. Default: `replay.db` in the folder.
        experience_model: A `Model`, any chat model, a name like `openai:gpt-5.4-mini`, or the folder of a local one
            (`runs/mine/models/experience-0`). Default: the local one that `train_experience` trains.
        engine: Creates what generates the policy's replies from the folder of its weights; it has to follow them when
            `Engine.clear` is called. Default: the weights in this process.
        progress: Called with a label, the amount done and the total. Default: `show_progress`.
        say: Called with one line at each evaluation and with every warning. Default: a logged warning.
    """

    def __init__(
        self,
        world: World,
        out: str | Path,
        settings: Settings | None = None,
        *,
        replay_buffer: ReplayBuffer | None = None,
        experience_model: Model | BaseChatModel | str | None = None,
        engine: "CreateEngine | None" = None,
        progress: Callable[[str, int, int], None] = show_progress,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self.world, self.out = world, Path(out)
        self.settings = settings or self.stored_settings() or world.settings
        self.engine, self.progress, self.say = engine, progress, say
        self._buffer, self._prefix = replay_buffer, "" if replay_buffer is None else None
        self._given = experience_model
        self.force = False
        """Whether `train` goes on where the gate refuses the dream."""
        self._loaded: dict[str, LocalChatModel] = {}

    # --- the folder ------------------------------------------------------------------------------------------------------

    @property
    def models(self) -> Path:
        return self.out / "models"

    @property
    def replay_buffer(self) -> ReplayBuffer:
        if self._buffer is None:
            self.out.mkdir(parents=True, exist_ok=True)
            self._buffer = ReplayBuffer(self.out / "replay.db")
        return self._buffer

    def open(self, settings: Settings | None = None) -> None:
        """Make the folder, or check that it was made with this world and these settings. Args: `settings`, those to train with.

        Raises `ConfigurationError` otherwise. What only training reads may change until it has begun, and nothing once a
        training with these settings has ended.
        """
        free = CHANGED_LATER if (self.out / "training.db").exists() else CHANGEABLE
        free = free if settings is None or not self.training_ended(settings) else set()
        stored, current = read_settings(self.out), self.check_settings(settings, free)
        self.settings = settings or self.settings
        self.models.mkdir(parents=True, exist_ok=True)
        if stored is None or (settings is not None and stored != current):
            write_whole(self.out / "settings.json", json.dumps(current, indent=2))

    def stored_settings(self) -> Settings | None:
        """The folder's settings. None for a new one, and for another world's."""
        if (stored := read_settings(self.out)) is None or stored.pop("world") != self.world.name:
            return None
        stored.pop("arguments")
        return Settings(**stored)

    def check_settings(self, settings: Settings | None = None, free: Collection[str] = CHANGEABLE) -> dict[str, object]:
        """The content of the folder's `settings.json`. Args: `settings`, other ones; `free`, names that may differ.

        Raises `ConfigurationError` if the folder was made with another world or other settings, and for settings that this
        world contradicts.
        """
        if (settings or self.settings).references_only and not self.world.judged_by_dream:
            raise ConfigurationError(
                "references_only=True, and the dreamed episodes of this world are judged by its own check (of a DreamGym: "
                "verify_dream=), never by recorded successes: leave references_only away"
            )
        world = {"world": self.world.name, "arguments": dict(self.world.arguments)}
        current = dict(json.loads(json.dumps({**world, **asdict(settings or self.settings)})))
        check_same(self.out, read_settings(self.out) or current, current, free)
        return current

    def training_ended(self, settings: Settings) -> bool:
        """True if a training with these settings has nothing left to do here."""
        done = self.record("stage/train")
        same_end = all(done.get(name) == getattr(settings, name) for name in STOP_CRITERIA)
        return same_end and done.get("iterations", 0) >= settings.iterations

    def run_name(self, name: str) -> str:
        """Run name of episodes and metrics. In a shared buffer it begins with this folder's."""
        if self._prefix is None:
            file = self.out / "run"
            if not file.exists():
                write_whole(file, f"{self.out.name}-{uuid4().hex[:8]}/")
            self._prefix = file.read_text()
        return f"{self._prefix}{name}"

    def record(self, name: str) -> dict[str, Any]:
        """The figures kept under this name; empty before."""
        return next(iter(self.replay_buffer.metrics(self.run_name(name))), {})

    def keep_record(self, name: str, figures: Mapping[str, float | int | str | None]) -> None:
        """Keep figures under this name. One kept before is replaced."""
        self.replay_buffer.record_metrics(self.run_name(name), 0, figures)

    @contextmanager
    def stage(self, name: str, **start: object) -> Iterator[bool]:
        """Yield whether the stage is still to do. Its wall time is recorded at its end.

        Args: `start`, models that it begins with. Raises `ConfigurationError` where a finished one began with others.
        """
        self.open()
        began, names = f"stage/{name}/from", {key: model_name(value) for key, value in start.items()}
        if self.seconds(name) is not None:
            before = self.record(began)
            if before.get("model") == "None":  # the default one was taken
                before["model"] = self.record(f"stage/{name}/start").get("path", self.settings.model)
            for key, value in names.items():
                if start[key] is not None and before.get(key, value) != value:
                    raise ConfigurationError(
                        f"{self.out} holds what {name!r} made of the {key} {before[key]!r}, and {value!r} is given: take "
                        "another folder"
                    )
            yield False
            return
        begun = time.perf_counter()
        with only_process(self.out):
            if todo := self.seconds(name) is None:  # no other process has ended it since
                self.keep_record(began, names)
            yield todo
            if todo:
                self.keep_record(f"stage/{name}", {"seconds": time.perf_counter() - begun})

    def seconds(self, name: str) -> float | None:
        """Wall time of a finished stage; None for one that has not ended."""
        return self.record(f"stage/{name}").get("seconds")

    # --- tasks, models, episodes -------------------------------------------------------------------------------------------

    def tasks(self, split: Split) -> list[Task]:
        """The world's real tasks of a split."""
        return self.world.stored_tasks(self.replay_buffer, split)

    def validation_tasks(self) -> list[Task]:
        """The validation tasks that evaluations while training are played on."""
        return self.tasks("validation")[: self.settings.evaluate_tasks]

    def offline(self) -> list[Trajectory]:
        """The collected trajectories, or else all imported ones, in an order drawn by the seed.

        What came after the training that `DATA` records is at the end: which of the others were held out from it stays.
        """
        usable = partial(self.replay_buffer.trajectories, source="offline", split="train", errors=False)
        episodes = list(usable(run=self.run_name(OFFLINE))) or list(usable())
        own = {task.environment for split in get_args(Split) for task in self.tasks(split)}
        episodes = [episode for episode in episodes if episode.task.environment in own]
        before = episodes[: (known := int(self.record(DATA).get("trajectories", len(episodes))))]
        Random(self.settings.seed).shuffle(before)
        return before + episodes[known:]

    def check_outcomes(self, why: str) -> None:
        """Raise `ConfigurationError` where there are recorded trajectories and none of them has an outcome.

        Args: `why`, what needs them.
        """
        recorded = [each for each in self.offline() if each.steps]
        if recorded and not any(each.has_outcome for each in recorded):
            raise ConfigurationError(
                f"none of {len(recorded)} traces has a reward, and {why}: give --rewards (`dreamgym import`), reward= "
                "(load_traces), or a `reward` in each row"
            )

    def experience_data(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Offline trajectories that the experience model is trained on, and those held out.

        A tenth of the tasks is held out, and up to three tenths until the gate has `MIN_CASES` failures and successes. So are
        tasks that are not reached: it is trained on no more episodes than its steps take.
        """
        offline, needed = self.offline(), self.settings.batch_size * self.settings.experience_steps
        before = offline[: int((data := self.record(DATA)).get("trajectories", len(offline)))]
        number = int(data.get("held_out", _held_out_tasks(before)))
        held_out = set([*dict.fromkeys(each.task.id for each in before)][:number])
        trained = [trajectory for trajectory in before if trajectory.task.id not in held_out][:needed]
        tasks = {trajectory.task.id for trajectory in trained}
        return trained, [each for each in before if each.task.id not in tasks] + offline[len(before) :]

    def keep_data(self) -> None:
        """Record what a model is now trained from (`DATA`). Later traces and corrected outcomes leave it held out or not."""
        self.keep_record(DATA, {"trajectories": len(self.offline())})
        self.keep_record(DATA, {"held_out": _held_out_tasks(self.offline())})

    def held_out_offline(self) -> list[Trajectory]:
        """The offline trajectories that `train_experience` and `train_user` did not take; all, where neither was trained."""
        trained = self._given is None or (self.models / USER).exists()
        return self.experience_data()[1] if trained else self.offline()

    def policy(self, name: str, temperature: float | None = None) -> "LocalChatModel":
        """A policy of the folder: `base`, `trained`, or another in `models`."""
        return self.policy_at(self.models / name, temperature)

    def policy_at(self, path: str | Path, temperature: float | None = None) -> "LocalChatModel":
        """Load a model folder, hub name or `tinker:MODEL` as a policy that can be trained. It samples as it was saved.

        Weights here are float32, under LoRA as they were saved. Of another experiment's policy, replies have `policy_tokens`.
        """
        from dreamgym_lg.integrations.trl.adapters import wants_adapters

        options: dict[str, Any] = {"max_new_tokens": self.settings.policy_tokens}
        options |= saved_sampling(path) if Path(path).parent == self.models else {}
        options |= {} if temperature is None else {"temperature": temperature}
        policy = load_named_policy(path, **options)
        if policy.model is not None and not wants_adapters(policy.model, self.settings.lora):
            policy.model.float()
        return policy if self.engine is None else policy.model_copy(update={"engine": self.engine(Path(path))})

    def dream(self) -> Dream:
        """A dream of this folder's world."""
        dream = self.world.create_dream(self.experience())
        user = self.model_user()
        if user is not None and user.model is None and (self.models / USER).exists():
            user.prompter.renew(policy_version(self.models / USER), self._local(USER))
        return dream

    def model_user(self) -> ModelUser | None:
        """The world's user that a language model plays. It sees recorded turns of this buffer, unless `retrieved` is 0."""
        if (user := model_user(self.world.user)) is not None:
            user.show_turns(self.replay_buffer if self.settings.retrieved else None)
        return user

    @property
    def can_dream(self) -> bool:
        """True if there is an experience model, or the world needs none."""
        return not self.world.needs_model or self._given is not None or self._is_trained

    def experience(self, *, untrained: bool = False) -> Model:
        """The experience model: the given one, else the folder's.

        Args: `untrained`, one without weights, as until it is trained: it prepares training data.
        """
        if self._given is not None:
            self._given = load_experience_model(self._given, self.replay_buffer, self.settings)
            return self._given
        if untrained or not self._is_trained:
            return as_trained(None, self.settings, self.replay_buffer, "")
        return as_trained(self._local(EXPERIENCE), self.settings, self.replay_buffer, EXPERIENCE)

    def _local(self, name: str) -> "LocalChatModel":
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
        from dreamgym_lg.integrations.transformers.loading import computes_bfloat16

        if name not in self._loaded:
            self._loaded[name] = LocalChatModel.from_path(
                self.models / name,
                dtype="bfloat16" if computes_bfloat16() else "auto",  # nobody learns from its log-probabilities
                temperature=0,
                max_new_tokens=self.settings.experience_tokens,
                max_batch_size=64,
            )
        return self._loaded[name]

    @property
    def experience_version(self) -> str:
        """The dream's version, without loading a model; "" before an experience model is trained."""
        model = self._given
        if not self.world.needs_model:
            return self.dream().version
        if model is None:
            return EXPERIENCE if self._is_trained else ""
        return model.version if isinstance(model, Model) else model if isinstance(model, str) else name_of(model)

    @property
    def _is_trained(self) -> bool:
        return (self.models / EXPERIENCE).exists()

    def play(self, *args: Any, **options: Any) -> list[Trajectory]:
        """As `aplay`, for code without an event loop."""
        return run_lasting(self.aplay(*args, **options))

    async def aplay(
        self,
        name: str,
        policy: BaseChatModel,
        tasks: Sequence[Task],
        *,
        dream: Dream | None = None,
        iteration: int = 0,
        source: Source = "real",
        num_generations: int = 1,
    ) -> list[Trajectory]:
        """Episodes of each task, in the real environment or, with `dream`, there; recorded under `name`.

        What cannot be played is tried three times, what the guard or the wall stopped once, and comes back with its `error`.

        Args: `source`, of real episodes: `offline` for those that are learned from.
        """
        agent, create_environment = self.players(policy, dream)
        count = counter(self.progress, f"episodes ({' '.join(name.split('/')[:4])})", len(tasks) * num_generations)
        return await rollout(
            agent,
            tasks,
            create_environment,
            source="synthetic" if dream is not None else source,
            run=self.run_name(name),
            iteration=iteration,
            num_generations=num_generations,
            seed=self.settings.seed,
            concurrency=self.settings.concurrency,
            attempts=3,
            recursion_limit=max(200, 2 * self.world.max_steps + 5),
            replay_buffer=self.replay_buffer,
            experience_version=dream.version if dream is not None else "",
            on_episode=lambda _: count(),
        )

    def players(self, policy: BaseChatModel, dream: Dream | None) -> tuple[Agent, CreateEnvironment | None]:
        """The agent of episodes, and the factory of their environments. Real without `dream`."""
        self.model_user()  # a real one sees the same as a dreamed one
        create_environment = self.world.create_environment if dream is None else dream.create_environment
        return self.world.agent(policy, real=dream is None), create_environment


def _held_out_tasks(offline: Sequence[Trajectory]) -> int:
    """The number of tasks, from the first, that `experience_data` holds out."""
    outcomes = dict[str, Counter[bool]]()
    for each in offline:
        outcomes.setdefault(each.task.id, Counter())[each.success] += 1
    few = sum(min(each[True], each[False]) < MIN_CASES for each in accumulate(outcomes.values()))
    return max(int(0.1 * len(outcomes)), min(int(0.3 * len(outcomes)), few + 1))
