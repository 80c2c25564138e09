"""Compares two versions of an agent on the same tasks in the same dream."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import NormalDist, mean
from threading import Lock
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from dreamgym_lg.compiled.responder import compiled_dream
from dreamgym_lg.dream import Dream, Model, recorded_user, usual_dream
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.experience_models import load_experience_model, resolve_policy
from dreamgym_lg.experiment.workspace import logger
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.progress import OnProgress, counter
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import check_played, rollout
from dreamgym_lg.statistics import Rate, clustered_rate, mean_interval
from dreamgym_lg.types import Task, Trajectory, is_unanswered

MIN_TASKS = 10
"""Fewer tasks hide every difference in the interval."""
_CONCURRENCY = 16
CONFIDENCE = 0.98
"""Confidence of a difference's interval: one in fifty comparisons of equal versions claims a difference."""
_POWER = 1 + NormalDist().inv_cdf(0.8) / NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Difference that four in five comparisons detect, in half widths of the interval."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """Results of one version of an agent. Figures after `unanswered` are means per episode."""

    name: str
    success: Rate
    """Success rate of answered episodes with its 95 % interval, clustered by task."""
    successes: tuple[float | None, ...]
    """Success rate of each task's answered episodes; None without one."""
    unanswered: float
    """Share of episodes that ended at a call which nothing in the dream answers."""
    actions: float
    calls: float
    """Calls of the agent's chat model."""
    seconds: float
    """Wall time of these calls, which may run at the same time."""
    input_tokens: float
    """Tokens of these calls, as `output_tokens`. 0 where the model reports none."""
    output_tokens: float

    @classmethod
    def of(cls, name: str, episodes: Sequence[Trajectory], meter: "Meter") -> "Version":
        """The results of episodes, ordered by task, and of the meter on their model."""
        answered = [episode for episode in episodes if not is_unanswered(episode.error)]
        success = clustered_rate((episode.task.id, episode.success) for episode in answered)
        if success is None:
            raise ConfigurationError(f"{name}: no episode was answered to its end; the first: {episodes[0].error}")
        groups = (list(group) for _, group in groupby(episodes, key=lambda episode: episode.task.id))
        outcomes = ([each.success for each in group if not is_unanswered(each.error)] for group in groups)
        return cls(
            name=name,
            success=success,
            successes=tuple(mean(values) if values else None for values in outcomes),
            unanswered=1 - len(answered) / len(episodes),
            actions=mean(len(episode.steps) for episode in episodes),
            **{key: value / len(episodes) for key, value in meter.sums.items()},
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Success of the second version minus that of the first, paired by task.

    Tasks without an answered episode of one version are left out. Raises `ConfigurationError` where none is left.
    """

    before: Version
    after: Version

    def __post_init__(self) -> None:
        if not self._differences:
            raise ConfigurationError(
                "no task was answered to its end in both versions: add an experience model, or other tasks"
            )

    @property
    def difference(self) -> float:
        return mean(self._differences)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of `difference` at `CONFIDENCE`, over tasks."""
        return mean_interval(self._differences, CONFIDENCE)

    @property
    def differs(self) -> bool:
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def left_out(self) -> int:
        """The number of tasks without an answered episode of one version."""
        return len(self.before.successes) - len(self._differences)

    @property
    def detectable(self) -> float:
        """Smallest difference, 0 to 1, that four in five such comparisons would show."""
        margin = max(abs(end - self.difference) for end in self.interval)
        return min(1.0, _POWER * margin)

    @property
    def _differences(self) -> list[float]:
        pairs = zip(self.before.successes, self.after.successes, strict=True)
        return [b - a for a, b in pairs if a is not None and b is not None]

    def __repr__(self) -> str:
        low, high = self.interval
        claim = "no difference is shown" if not self.differs else "better" if low > 0 else "worse"
        return f"{claim}: {self.difference:+.3f} [{low:+.3f}, {high:+.3f}] over {len(self._differences)} tasks"


class SharedDream:
    """One dream of recorded tasks, in which several versions of an agent play.

    Versions with the same tools get the same answer to the same call after the same steps.

    Args:
        replay_buffer: Real traces.
        experience_model: Answers where traces do not, and judges, as for `DreamGym`.
        world: Folder of `compile_world`, which answers before the experience model.
        policy: A chat model or its name, which acts in every version. Default: each agent's own model.
        tasks: Ids of recorded tasks, or the number of tasks to draw, at least 10. Without an experience model, they are drawn
            from those that recorded successes decide.
        episodes: Number of episodes per task and version.
        seed: Decides tasks and samples.
        on_progress: Called with (label, number done, total).
        options: Arguments of `AgentWorld`.

    Raises `ConfigurationError` without experience model and world, and for unknown ids.
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        *,
        experience_model: Model | BaseChatModel | str | None = None,
        world: str | Path | None = None,
        policy: BaseChatModel | str | None = None,
        tasks: int | Sequence[str] = 200,
        episodes: int = 4,
        seed: int = 0,
        on_progress: OnProgress = lambda label, done, total: None,
        **options: Any,
    ) -> None:
        if experience_model is None and world is None:
            raise ConfigurationError("nothing answers what the traces do not: give an experience model or a compiled world")
        if isinstance(tasks, str) or (tasks < MIN_TASKS if isinstance(tasks, int) else len(set(tasks)) < max(len(tasks), 1)):
            raise ConfigurationError(f"tasks={tasks!r}: give a number from {MIN_TASKS}, or a list of ids, each once")
        self._buffer, self._world, self._policy = replay_buffer, world, policy
        self._model = None if experience_model is None else load_experience_model(experience_model, replay_buffer)
        self._wanted, self._episodes, self._seed = tasks, episodes, seed
        self._on_progress, self._options = on_progress, options
        self._tasks: list[Task] | None = None

    def compare(self, agent: Any, new_agent: Any) -> Comparison:
        """Play both versions. Args: as of `play`."""
        return Comparison(before=self.play(agent), after=self.play(new_agent))

    def play(self, agent: Any) -> Version:
        """Play every task with an agent. The first version draws the tasks; all later ones play the same.

        Args: `agent`, a graph or its path, as for `AgentWorld`.

        Raises `ConfigurationError` as `AgentWorld` does, and without a task; `EpisodesMissing` if episodes could not be played.
        """
        world = AgentWorld(agent, **self._options)
        dream = self._dream(world)
        self._tasks = self._tasks or self._draw(dream, judged=self._model is not None or world.verify_dream is not None)
        tasks, meter = [world.with_tools(task) for task in self._tasks], Meter()
        name = world.path or type(world.graph).__name__
        count = counter(self._on_progress, name, len(tasks) * self._episodes)
        playing = rollout(
            world.agent(meter.attached(resolve_policy(self._policy, world.graph)), real=False),
            tasks,
            dream.create_environment,
            source="synthetic",
            num_generations=self._episodes,
            seed=self._seed,
            concurrency=_CONCURRENCY,
            attempts=3,
            on_episode=lambda _: count(),
        )
        episodes = check_played(run_lasting(playing), again="the same comparison")
        return Version.of(name, episodes, meter)

    def _dream(self, world: AgentWorld) -> Dream:
        """Schemas and recorded answers, then the compiled world, then the experience model."""
        index = world.index(self._buffer)
        user = world.user or recorded_user(self._buffer, None if self._model is None else self._model.model)
        if self._world is not None:
            return compiled_dream(self._world, index, user=user, model=self._model)
        assert self._model is not None
        return usual_dream(self._model, index, user=user)

    def _draw(self, dream: Dream, *, judged: bool) -> list[Task]:
        """Draw tasks, only those that recorded successes decide unless all can be `judged`."""
        stored = {task.id: task for task in self._buffer.tasks(origin="real")}
        if not isinstance(self._wanted, int):
            for id in self._wanted:
                if id not in stored:
                    raise ConfigurationError.unknown("task", id, stored)
            return [stored[id] for id in self._wanted]
        decided = [task for task in stored.values() if judged or dream.decides_by_traces(task)]
        if len(decided) < len(stored):
            logger.warning(
                "recorded successes decide %d of %d tasks; an experience model judges all", len(decided), len(stored)
            )
        if len(decided) < MIN_TASKS:
            raise ConfigurationError(
                f"{len(decided)} of {len(stored)} recorded tasks can be judged, and {MIN_TASKS} are needed: import more traces "
                "with their outcome, or give an experience model"
            )
        return Random(self._seed).sample(decided, min(self._wanted, len(decided)))


class Meter(BaseCallbackHandler):
    """Counts a chat model's calls, their tokens and seconds. Args: `hosted`, their budget."""

    run_inline = raise_error = True

    def __init__(self, hosted: Hosted | None = None) -> None:
        self.sums = dict.fromkeys(("calls", "seconds", "input_tokens", "output_tokens"), 0.0)
        self._running, self._lock, self._hosted = dict[UUID, tuple[float, list[BaseMessage]]](), Lock(), hosted or Hosted()

    def attached(self, model: BaseChatModel) -> BaseChatModel:
        """A copy of the model that reports to this meter. Episodes do not see their caller's callbacks."""
        metered = copy.copy(model)
        callbacks: Any = getattr(model.callbacks, "handlers", model.callbacks)  # a list or a manager
        metered.callbacks = [*(callbacks or ()), self]
        return metered

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **_: Any) -> None:
        self._hosted.begin_call()
        self._running[run_id] = time.perf_counter(), messages[0]

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        if (call := self._running.pop(run_id, None)) is not None:
            self._hosted.end_call(call[1], None)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        answers = [getattr(each, "message", None) for each in response.generations[0]]
        usages: list[Any] = [getattr(each, "usage_metadata", None) or {} for each in answers]
        start, messages = self._running.pop(run_id)
        self._hosted.end_call(messages, answers[0])
        with self._lock:
            self.sums["calls"] += 1
            self.sums["seconds"] += time.perf_counter() - start
            for key in ("input_tokens", "output_tokens"):
                self.sums[key] += sum(usage.get(key, 0) for usage in usages)
