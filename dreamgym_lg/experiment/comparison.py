"""A change test. Two versions of an agent, compared on the same tasks in the same dream."""

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

_CONCURRENCY = 16
CONFIDENCE = 0.98
"""Confidence of a difference's interval. Of comparisons without a difference, one in fifty claims one."""
_POWER = 1 + NormalDist().inv_cdf(0.8) / NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
"""Of the interval's half: a difference so large is outside of four in five intervals."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """How one version of an agent did. All but the successes are means of an episode."""

    name: str
    success: Rate
    """With its 95 % interval, of answered episodes; those of one task count as alike."""
    successes: tuple[float | None, ...]
    """Share of successes of each task, of answered episodes; None without one."""
    unanswered: float
    """Share of episodes that ended at a call which nothing in the dream answers."""
    actions: float
    calls: float
    """Answers of the agent's chat model."""
    seconds: float
    """That these calls took, others beside them."""
    input_tokens: float
    """Of these calls, as is `output_tokens`. 0 where the model reports none."""
    output_tokens: float

    @classmethod
    def of(cls, name: str, episodes: Sequence[Trajectory], meter: "Meter") -> "Version":
        """The version that played these episodes, the meter on its model. Those of a task stand together."""
        answered = [episode for episode in episodes if not is_unanswered(episode.error)]
        success = clustered_rate((episode.task.id, episode.success) for episode in answered)
        if success is None:
            raise ConfigurationError(f"{name}: no episode was answered to its end; the first: {episodes[0].error}")
        groups = (list(group) for _, group in groupby(episodes, key=lambda episode: episode.task.id))
        outcomes = ([each.success for each in group if not is_unanswered(each.error)] for group in groups)
        return cls(
            name=name,
            success=success,
            successes=tuple(mean(own) if own else None for own in outcomes),
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
        """The difference that four in five such comparisons would show, 0 to 1."""
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
    """Recorded tasks and one dream of them, in which versions of an agent play.

    The same call behind the same steps has the same answer for each version, as far as their tools are the same.

    Args:
        replay_buffer: Real traces.
        experience_model: Answers where traces do not, and judges: as of `DreamGym`.
        world: Folder of `compile_world`, which answers before the experience model.
        policy: A chat model or its name, which acts in every version. Default: each agent's own model.
        tasks: Ids of recorded tasks, or how many are drawn, at least 10. Without an experience model, of those that recorded
            successes decide.
        episodes: Of each task and version.
        seed: Decides tasks and samples.
        on_progress: (label, number done, total).
        options: Of `AgentWorld`.

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
        self._buffer, self._world, self._policy = replay_buffer, world, policy
        self._model = None if experience_model is None else load_experience_model(experience_model, replay_buffer)
        self._wanted, self._episodes, self._seed = tasks, episodes, seed
        self._on_progress, self._options = on_progress, options
        self._tasks: list[Task] | None = None

    def compare(self, agent: Any, new_agent: Any) -> Comparison:
        """Play both versions. Args: as of `play`."""
        return Comparison(before=self.play(agent), after=self.play(new_agent))

    def play(self, agent: Any) -> Version:
        """Play every task with an agent, a graph or where it is written. All versions play the tasks that the first decides.

        Raises `ConfigurationError` as `AgentWorld` does, and without a task; `EpisodesMissing` for episodes that could not be
        played.
        """
        own = AgentWorld(agent, **self._options)
        dream = self._dream(own)
        self._tasks = self._tasks or self._draw(dream, judged=self._model is not None or own.verify_dream is not None)
        tasks, meter, name = [own.with_tools(task) for task in self._tasks], Meter(), own.path or type(own.graph).__name__
        total = len(tasks) * self._episodes
        count = counter(self._on_progress, name, total)
        playing = rollout(
            own.agent(meter.attached(resolve_policy(self._policy, own.graph)), real=False),
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

    def _dream(self, own: AgentWorld) -> Dream:
        """Schemas and recorded answers, then the compiled world, then the experience model."""
        index = own.index(self._buffer)
        user = own.user or recorded_user(self._buffer, None if self._model is None else self._model.model)
        if self._world is not None:
            return compiled_dream(self._world, index, user=user, model=self._model)
        assert self._model is not None
        return usual_dream(self._model, index, user=user)

    def _draw(self, dream: Dream, *, judged: bool) -> list[Task]:
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
        if len(decided) < 10:
            raise ConfigurationError(
                f"{len(decided)} of {len(stored)} recorded tasks can be judged, and 10 are needed: import more traces with "
                "their outcome, or give an experience model"
            )
        return Random(self._seed).sample(decided, min(self._wanted, len(decided)))


class Meter(BaseCallbackHandler):
    """Sums the answers of a chat model, their tokens and seconds. Args: `hosted`, their budget."""

    run_inline = raise_error = True

    def __init__(self, hosted: Hosted | None = None) -> None:
        self.sums = dict.fromkeys(("calls", "seconds", "input_tokens", "output_tokens"), 0.0)
        self._began, self._lock, self._hosted = dict[UUID, tuple[float, list[BaseMessage]]](), Lock(), hosted or Hosted()

    def attached(self, model: BaseChatModel) -> BaseChatModel:
        """The model, listened to. Episodes do not see their caller's callbacks."""
        metered = copy.copy(model)
        own: Any = getattr(model.callbacks, "handlers", model.callbacks)  # a list or a manager
        metered.callbacks = [*(own or ()), self]
        return metered

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **_: Any) -> None:
        self._hosted.begin_call()
        self._began[run_id] = time.perf_counter(), messages[0]

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        if (began := self._began.pop(run_id, None)) is not None:
            self._hosted.end_call(began[1], None)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        answers = [getattr(each, "message", None) for each in response.generations[0]]
        usages: list[Any] = [getattr(each, "usage_metadata", None) or {} for each in answers]
        began, messages = self._began.pop(run_id)
        self._hosted.end_call(messages, answers[0])
        with self._lock:
            self.sums["calls"] += 1
            self.sums["seconds"] += time.perf_counter() - began
            for key in ("input_tokens", "output_tokens"):
                self.sums[key] += sum(usage.get(key, 0) for usage in usages)
