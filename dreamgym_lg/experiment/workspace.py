"""The folder of an experiment: its settings, replay buffer, models and stages."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
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
from dreamgym_lg.files import write_new, write_whole
from dreamgym_lg.progress import counter, show_progress
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import Agent, rollout, superstep_limit
from dreamgym_lg.types import Source, Split, Task, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
    from dreamgym_lg.integrations.transformers.requests import Engine

logger = logging.getLogger(__name__)

TRAIN, OFFLINE = "train", "offline"
"""Run names of training and of offline trajectories; those of evaluations begin with `validate/` and `proof/`."""

EXPERIENCE, USER = "experience-0", "user"
"""Names of the local experience model and user in the folder."""

MIN_CASES = 20
"""Least number of real failures, and of real successes, to measure a judge on. Training on fewer needs `force=True`."""

TRAIN_OVERRIDES = "stage/train/settings"
"""Record name: names of the settings that `train` was called with."""

DATA = "stage/experience/data"
"""Record name: numbers of offline trajectories, and of held-out tasks, when the experience model or the user was trained."""


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
        engine: Creates the engine that generates the policy's replies, from the folder of its weights. At `Engine.clear` the
            engine has to take the new weights. Default: replies are generated in this process.
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
        engine: "Callable[[Path], Engine] | None" = None,
        progress: Callable[[str, int, int], None] = show_progress,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self.world, self.out = world, Path(out)
        self.settings = settings or self.stored_settings() or world.settings
        self.engine, self.progress, self.say = engine, progress, say
        self._buffer, self._prefix = replay_buffer, "" if replay_buffer is None else None
        self._experience_model = experience_model
        self.force = False
        """True to train even if the gate refuses the dream."""
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

        Raises `ConfigurationError` otherwise. Settings of training may change until it has begun. Those given for a training
        that has ended are not written.
        """
        changeable: Collection[str] = CHANGED_LATER if self.training_began else CHANGEABLE
        if ended := settings is not None and self.training_ended(settings):
            changeable = CHANGED_LATER - {"iterations"}  # fewer would have given another policy
        stored, current = read_settings(self.out), self.check_settings(settings, changeable)
        self.settings = settings or self.settings
        self.models.mkdir(parents=True, exist_ok=True)
        if stored is None or (settings is not None and not ended and stored != current):
            write_whole(self.out / "settings.json", json.dumps(current, indent=2))

    def stored_settings(self) -> Settings | None:
        """The folder's settings. None for a new one, and for another world's."""
        if (stored := read_settings(self.out)) is None or stored.pop("world") != self.world.name:
            return None
        stored.pop("arguments")
        return Settings(**stored)

    def check_settings(self, settings: Settings | None = None, changeable: Collection[str] = CHANGEABLE) -> dict[str, object]:
        """The content of `settings.json` for these settings. Args: `changeable`, names that may differ from the stored ones.

        Raises `ConfigurationError` if the folder was made with another world or other settings, and for settings that do not
        fit this world.
        """
        if settings is None:
            self.adopt_settings()
        if (settings or self.settings).references_only and not self.world.judged_by_dream:
            raise ConfigurationError(
                "references_only=True, and the dreamed episodes of this world are judged by its own check (of a DreamGym: "
                "verify_dream=), never by recorded successes: leave references_only away"
            )
        world = {"world": self.world.name, "arguments": dict(self.world.arguments)}
        current = dict(json.loads(json.dumps({**world, **asdict(settings or self.settings)})))
        check_same(self.out, read_settings(self.out) or current, current, changeable)
        return current

    def adopt_settings(self) -> None:
        """Take over the settings that `train` was called with, once training has begun. So its script goes on."""
        if not self.training_began or not (stored := read_settings(self.out)):
            return
        names = stored.keys() & self.record(TRAIN_OVERRIDES)
        if self.settings.real_steps is not None:
            names -= {"real_steps"}  # more of them go on
        earlier = {name: stored[name] for name in sorted(names) if getattr(self.settings, name) != stored[name]}
        if earlier:
            self.settings = replace(self.settings, **earlier)
            values = ", ".join(f"{name}={value!r}" for name, value in earlier.items())
            self.say(f"{self.out} goes on with {values}, as train() was called before")

    @property
    def training_began(self) -> bool:
        return (self.out / "training.db").exists()

    def training_ended(self, settings: Settings) -> bool:
        """True if a training with these settings has nothing left to do here."""
        done = self.record("stage/train")
        same_end = all(done.get(name) == getattr(settings, name) for name in STOP_CRITERIA)
        return same_end and done.get("iterations", 0) >= settings.iterations

    def run_name(self, name: str) -> str:
        """Run name of episodes and metrics. In a shared buffer it has a prefix of this folder."""
        if self._prefix is None:
            file = self.out / "run"
            if not file.exists():
                write_new(file, f"{self.out.name}-{uuid4().hex[:8]}/")
            self._prefix = file.read_text()
        return f"{self._prefix}{name}"

    def record(self, name: str) -> dict[str, Any]:
        """The figures kept under this name; empty without any."""
        return next(iter(self.replay_buffer.metrics(self.run_name(name))), {})

    def keep_record(self, name: str, figures: Mapping[str, float | int | str | None]) -> None:
        """Keep figures under this name, in place of earlier ones."""
        self.replay_buffer.record_metrics(self.run_name(name), 0, figures)

    @contextmanager
    def stage(self, name: str, **start: object) -> Iterator[bool]:
        """Yield True if the stage is still to do. Its wall time is recorded afterwards.

        Args: `start`, the models that it starts from. Raises `ConfigurationError` if a finished one started from others.
        """
        self.open()
        record, names = f"stage/{name}/from", {key: model_name(value) for key, value in start.items()}
        if self.seconds(name) is not None:
            recorded = self.record(record)
            if recorded.get("model") == "None":  # it started from the default model
                recorded["model"] = self.record(f"stage/{name}/start").get("path", self.settings.model)
            for key, value in names.items():
                if start[key] is not None and recorded.get(key, value) != value:
                    raise ConfigurationError(
                        f"{self.out} holds what {name!r} made of the {key} {recorded[key]!r}, and {value!r} is given: take "
                        "another folder"
                    )
            yield False
            return
        start_time = time.perf_counter()
        with only_process(self.out):
            if todo := self.seconds(name) is None:  # another process may have ended it meanwhile
                self.keep_record(record, names)
            yield todo
            if todo:
                self.keep_record(f"stage/{name}", {"seconds": time.perf_counter() - start_time})

    def seconds(self, name: str) -> float | None:
        """Wall seconds of a finished stage's last process; None for an unfinished one."""
        return self.record(f"stage/{name}").get("seconds")

    # --- tasks, models, episodes -------------------------------------------------------------------------------------------

    def tasks(self, split: Split) -> list[Task]:
        """The world's real tasks of a split."""
        return self.world.stored_tasks(self.replay_buffer, split)

    def validation_tasks(self) -> list[Task]:
        """The validation tasks of every evaluation during training."""
        return self.tasks("validation")[: self.settings.evaluate_tasks]

    def offline(self, *, reorder: bool = False) -> list[Trajectory]:
        """The imported and the collected trajectories, in an order drawn by the seed.

        Others' collected ones are left out if this experiment collected some. Those added after the training that `DATA`
        records stay at the end: its held-out ones stay the same. Args: `reorder`, True to draw the order of all.
        """
        episodes = list(self.replay_buffer.trajectories(source="offline", split="train", errors=False))
        own = self.run_name(OFFLINE)
        if any(each.run == own for each in episodes):
            episodes = [each for each in episodes if each.run == own or not each.run.endswith(f"/{OFFLINE}")]
        environments = {task.environment for split in get_args(Split) for task in self.tasks(split)}
        episodes = [episode for episode in episodes if episode.task.environment in environments]
        count = len(episodes) if reorder else int(self.record(DATA).get("trajectories", len(episodes)))
        shuffled = episodes[:count]
        Random(self.settings.seed).shuffle(shuffled)
        return shuffled + episodes[count:]

    def experience_data(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Offline trajectories that the experience model is trained on, and those held out.

        A tenth of the tasks is held out; up to three tenths, until the gate has `MIN_CASES` failures and successes. Tasks that
        the optimiser steps do not reach are held out too, and so is everything recorded later.
        """
        offline, needed = self.offline(), self.settings.batch_size * self.settings.experience_steps
        data = self.record(DATA)
        count = int(data.get("trajectories", len(offline)))
        earlier, later = offline[:count], offline[count:]
        number = int(data.get("held_out", held_out_tasks(earlier)))
        held_out = set([*dict.fromkeys(each.task.id for each in earlier)][:number])
        trained = [each for each in earlier if each.task.id not in held_out][:needed]
        tasks = {each.task.id for each in trained}
        return trained, [each for each in earlier if each.task.id not in tasks] + later

    def held_out_offline(self) -> list[Trajectory]:
        """The offline trajectories that neither the experience model nor the user was trained on."""
        to_train = self.world.needs_model and self._experience_model is None
        trained = to_train or self._is_trained or (self.models / USER).exists()
        return self.experience_data()[1] if trained else self.offline()

    def policy(self, name: str, temperature: float | None = None) -> "LocalChatModel":
        """A policy of the folder: `base`, `trained`, or another in `models`."""
        return self.policy_at(self.models / name, temperature)

    def policy_at(self, path: str | Path, temperature: float | None = None) -> "LocalChatModel":
        """Load a model folder, hub name or `tinker:MODEL` as a policy that can be trained. It samples as it was saved.

        Weights become float32, unless LoRA trains. Replies of a policy from elsewhere are cut off at this `policy_tokens`.
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
        """The world's user if a language model plays it. It is shown recorded turns, unless `retrieved` is 0."""
        if (user := model_user(self.world.user)) is not None:
            user.show_turns(self.replay_buffer if self.settings.retrieved else None)
        return user

    @property
    def can_dream(self) -> bool:
        """True if there is an experience model, or the world needs none."""
        return not self.world.needs_model or self._experience_model is not None or self._is_trained

    def experience(self) -> Model:
        """The experience model: the given one, else the folder's. Without weights, it can only prepare training data."""
        if self._experience_model is not None:
            self._experience_model = load_experience_model(self._experience_model, self.replay_buffer, self.settings)
            return self._experience_model
        local, version = (self._local(EXPERIENCE), EXPERIENCE) if self._is_trained else (None, "")
        return as_trained(local, self.settings, self.replay_buffer, version)

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
        if not self.world.needs_model:
            return self.dream().version
        if (model := self._experience_model) is None:
            return EXPERIENCE if self._is_trained else ""
        return model.version if isinstance(model, Model) else model_name(model)

    @property
    def _is_trained(self) -> bool:
        return (self.models / EXPERIENCE).exists()

    def play(self, *args: Any, **options: Any) -> list[Trajectory]:
        """`aplay` for synchronous code."""
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
        """Play and record episodes of each task, in the `dream` or, without one, in reality.

        A failing episode is tried three times, or once if the guard or the wall stopped it, and then returned with its `error`.
        Args: `name`, the run name without this folder's prefix; `source`, of real episodes, `offline` to learn from them.
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
            recursion_limit=superstep_limit(self.world.max_steps),
            replay_buffer=self.replay_buffer,
            experience_version=dream.version if dream is not None else "",
            on_episode=lambda _: count(),
        )

    def players(self, policy: BaseChatModel, dream: Dream | None) -> tuple[Agent, CreateEnvironment | None]:
        """The agent of episodes, and the factory of their environments. Real without `dream`."""
        self.model_user()  # shows recorded turns to the user of real episodes too
        create_environment = self.world.create_environment if dream is None else dream.create_environment
        return self.world.agent(policy, real=dream is None), create_environment


def held_out_tasks(offline: Sequence[Trajectory]) -> int:
    """The number of tasks, from the first, that `experience_data` holds out."""
    outcomes = dict[str, Counter[bool]]()
    for each in offline:
        outcomes.setdefault(each.task.id, Counter())[each.success] += 1
    few = sum(min(each[True], each[False]) < MIN_CASES for each in accumulate(outcomes.values()))
    return max(int(0.1 * len(outcomes)), min(int(0.3 * len(outcomes)), few + 1))
