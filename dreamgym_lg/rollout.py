"""Rollouts: many episodes at once, each recorded exactly once."""

import asyncio
import contextvars
import gc
import logging
import random
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from langsmith.env import get_langchain_env_var_metadata
from langsmith.run_helpers import get_tracing_context, tracing_context
from langsmith.run_trees import get_cached_client

from dreamgym_lg.environment import RULES, CreateEnvironment, EpisodeContext
from dreamgym_lg.errors import AccessBlocked, ConfigurationError, ContextExceeded, EpisodesMissing, RunStopped
from dreamgym_lg.redaction import environment_secrets, without_keys
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Source, Step, Task, Trajectory, is_missing, is_unanswered
from dreamgym_lg.user_code import error_text

logger = logging.getLogger(__name__)

_GC_THRESHOLD = 50_000
"""New objects between two garbage collections while episodes play. Python's own default is 700 to 2,000."""


class Agent(Protocol):
    """Plays episodes: a compiled graph whose state has `steps` and `success`, or a `SimulatedAgent`."""

    @property
    def astream(self) -> Callable[..., AsyncIterator[Any]]: ...


async def rollout(
    graph: Agent,
    tasks: Sequence[Task],
    create_environment: CreateEnvironment | None = None,
    *,
    source: Source,
    num_generations: int = 1,
    run: str = "",
    iteration: int = 0,
    seed: int = 0,
    concurrency: int = 64,
    attempts: int = 1,
    replay_buffer: ReplayBuffer | None = None,
    policy_version: str = "",
    experience_version: str = "",
    recursion_limit: int = 200,
    on_episode: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Play `num_generations` episodes of every task; results ordered by task, then rollout index.

    Each episode has its own context and sampling seed, and is stored as soon as it ends, without secrets of the environment
    (`environment_secrets`). An exception becomes a trajectory with an `error`. An episode that is stored under the same (run,
    iteration, task, index) is read instead of played, unless it could not be played (`missing_episodes`).

    Args:
        create_environment: None for an agent that acts on its own real tools.
        source: Who answers: `synthetic` for a dream, `real` for the real environment.
        run: Name that the episodes are stored under; needed with `replay_buffer`.
        attempts: Maximum rounds. Failed episodes are played again after all others have ended, except those that would fail
            again (`AccessBlocked`, `ConfigurationError`, `ContextExceeded`).
        on_episode: Called with each episode as soon as it has been played and stored.

    Raises:
        ConfigurationError: A count below 1, no `run` for the `replay_buffer`, or stored episodes of another source,
            `policy_version` or `experience_version` under the same run and iteration.
        RunStopped: No episode can continue, say because a budget is spent. Raised once the others have ended. Stopped episodes
            are not stored; the next call plays them.
    """
    for name, count in {"num_generations": num_generations, "concurrency": concurrency, "attempts": attempts}.items():
        if count < 1:
            raise ConfigurationError(f"{name}={count}: at least 1")
    keys = {(task.id, index): task for task in tasks for index in range(num_generations)}
    played_by = {"source": source, "policy_version": policy_version, "experience_version": experience_version}
    episodes = {} if replay_buffer is None else _stored_episodes(replay_buffer, keys, run, iteration, played_by)
    stored_as = {"run": run, "iteration": iteration, **played_by}
    slots = asyncio.Semaphore(concurrency)
    playing = _Player(graph, create_environment, recursion_limit, seed, stored_as, replay_buffer, on_episode, slots)
    with _rare_garbage_collection():
        for _ in range(attempts):
            todo = [key for key in keys if key not in episodes or _can_retry(episodes[key])]
            episodes |= await _play_round({key: partial(playing.play, keys[key], key[1]) for key in todo})
    if playing.outgrown:
        logger.warning(
            "%d of %d episodes are cut short, without success, where they outgrew the policy's context; the first: %s",
            *(len(playing.outgrown), len(keys), playing.outgrown[0]),
        )
    return [episodes[task.id, index] for task in tasks for index in range(num_generations)]


def superstep_limit(max_steps: int) -> int:
    """The `recursion_limit` of episodes of `max_steps` actions. A world's own agent may have more nodes than two."""
    return max(200, 2 * max_steps + 5)


def _can_retry(trajectory: Trajectory) -> bool:
    """True for a failed episode that may succeed when it is played again unchanged."""
    permanent = (AccessBlocked.__name__, ConfigurationError.__name__, ContextExceeded.__name__)
    return is_missing(trajectory.error) and str(trajectory.error).partition(":")[0] not in permanent


def missing_episodes(episodes: list[Trajectory]) -> list[Trajectory]:
    """Episodes that an evaluation lacks. Those that could not be played, or all if every one failed."""
    failed = [episode for episode in episodes if episode.error]
    return failed if len(failed) == len(episodes) else [episode for episode in failed if is_missing(episode.error)]


def check_played(episodes: list[Trajectory], again: str = "the same command") -> list[Trajectory]:
    """Return the episodes of an evaluation. Raises `EpisodesMissing` if any is missing (`missing_episodes`).

    Args: `again`, for the message: the command that plays the missing ones again.
    """
    if missing := missing_episodes(episodes):
        causes = "; ".join(dict.fromkeys(str(episode.error) for episode in missing[:3]))
        advice = "Train the experience model longer or on more traces, or take another one"
        if any(is_missing(episode.error) for episode in missing):
            advice = "Mend that"
        elif all(is_unanswered(episode.error) for episode in missing):
            advice = "Take tasks about what the traces looked up, play these in reality (real=True), or add an experience model"
        run, place, number = missing[0].run, "", "all"
        if run:  # stored under this name
            place, number = f" (run {run!r})", f"only these {len(missing)}"
        raise EpisodesMissing(
            f"{len(missing)} of {len(episodes)} episodes{place} could not be played, and there is no verdict without them; the "
            f"first causes: {causes.rstrip('.')}. {advice}; then {again} plays {number} again"
        )
    return episodes


def real_steps(episodes: Iterable[Trajectory]) -> int:
    """Number of steps that reached the environment, not refused by its own rules."""
    return sum(step.decided_by != RULES for episode in episodes for step in episode.steps)


def _without_secrets(trajectory: Trajectory) -> Trajectory:
    """The trajectory with secrets of the environment variables replaced."""
    if not (keys := environment_secrets()):
        return trajectory
    clean = partial(without_keys, keys=keys)

    def cleaned(step: Step) -> Step:
        texts = (step.observation, step.action, step.next_observation, step.reasoning)
        observation, action, answer, reasoning = map(clean, texts)
        return replace(step, observation=observation, action=action, next_observation=answer, reasoning=reasoning)

    return replace(
        trajectory,
        error=trajectory.error and clean(trajectory.error),
        steps=[cleaned(step) for step in trajectory.steps],
        acts=[act._replace(text=clean(act.text), answer=clean(act.answer)) for act in trajectory.acts],
    )


Key = tuple[str, int]
"""Task id and rollout index."""


def _stored_episodes(
    replay_buffer: ReplayBuffer, keys: Collection[Key], run: str, iteration: int, played_by: Mapping[str, str]
) -> dict[Key, Trajectory]:
    """The stored episodes among these keys, except missing ones (`missing_episodes`)."""
    if not run:
        raise ConfigurationError(
            "run='' with a replay_buffer: episodes are stored under a run's name and read back by it; give run='...', "
            "a name for each policy and purpose"
        )
    stored = replay_buffer.trajectories(run=run, iteration=iteration, segments=True)
    episodes = {key: each for each in stored if (key := (each.task.id, each.rollout_index)) in keys}
    for missing in missing_episodes(list(episodes.values())):
        del episodes[missing.task.id, missing.rollout_index]
    for each in episodes.values():
        for name, value in played_by.items():
            if (before := getattr(each, name)) != value:
                raise ConfigurationError(
                    f"run {run!r} holds episodes of iteration {iteration} with {name}={before!r}, and {name}={value!r} is "
                    "given now; they are not the same episodes: give another run name, or what they were played with"
                )
    return episodes


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage less often, and never look through objects that exist already."""
    threshold = gc.get_threshold()
    # the caller or another rollout may have done this; the threshold is checked first, as counting frozen objects is slow
    if not 0 < threshold[0] < _GC_THRESHOLD or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()


async def _play_round(todo: dict[Key, Callable[[], Any]]) -> dict[Key, Trajectory]:
    """Play these episodes concurrently, each in an empty context.

    If one raises, the others are cancelled before the error is passed on.
    """
    playing: list[asyncio.Task[Any]] = []
    try:
        for play in todo.values():
            playing.append(asyncio.create_task(play(), context=contextvars.Context()))
            await asyncio.sleep(0)  # let the first ones run while the last ones begin
        ended = await asyncio.gather(*playing)
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
    for each in ended:
        if isinstance(each, RunStopped):
            raise each
    return dict(zip(todo, ended, strict=True))


@dataclass
class _Player:
    """Plays the episodes of one rollout and stores each as it ends."""

    graph: Agent
    create_environment: CreateEnvironment | None
    recursion_limit: int
    seed: int
    stored_as: Mapping[str, Any]
    """Run, iteration, source and versions, the same for all episodes."""
    replay_buffer: ReplayBuffer | None
    on_episode: Callable[[Trajectory], None] | None
    slots: asyncio.Semaphore
    outgrown: list[str] = field(default_factory=list)
    """Error messages of episodes that were truncated because they exceeded the policy's context."""
    tracing: Mapping[str, Any] = field(default_factory=lambda: caller_tracing())

    async def play(self, task: Task, index: int) -> Trajectory | RunStopped:
        name = f"{self.stored_as['iteration']}/{task.id}/{index}"
        recorder = TokenRecorder(seed=random.Random(f"{self.seed}/{name}").getrandbits(40))
        about = {"dreamgym_run": self.stored_as["run"], "dreamgym_task": task.id, "dreamgym_episode": name}
        dreamed = self.stored_as["source"] == "synthetic"
        try:
            async with self.slots:
                with episode_tracing("dream" if dreamed else "real", about, caller=self.tracing):
                    played = await self._act(task, recorder)
        except RunStopped as stopped:
            return stopped
        played |= {"segments": recorder.segments(), **self.stored_as}
        trajectory = _without_secrets(Trajectory(task=task, rollout_index=index, **played))
        if self.replay_buffer is not None:
            self.replay_buffer.add(trajectory)
        if self.on_episode is not None:
            self.on_episode(trajectory)
        return trajectory

    async def _act(self, task: Task, recorder: TokenRecorder) -> dict[str, Any]:
        """Steps, acts, success and error of one episode. It is truncated at the policy's context limit."""
        state, cause = dict[str, Any](), None
        try:
            with closing(self.create_environment()) if self.create_environment else nullcontext() as environment, recorder:
                context = EpisodeContext(environment=environment)
                config = {"recursion_limit": self.recursion_limit}
                async for values in self.graph.astream({"task": task}, config, context=context, stream_mode="values"):
                    state = values
        except RunStopped:
            raise
        except Exception as error:
            # a first prompt that is too long is an error of the settings; a dream's model raises `PredictionFailed` instead
            if isinstance(error, ContextExceeded) and (steps := list(state.get("steps", ()))):
                state = {**state, "success": False, "steps": [*steps[:-1], replace(steps[-1], truncated=True)]}
                self.outgrown.append(str(error))
            else:
                cause = error_text(error)
        success = cause is None and state.get("success", False)
        return {"steps": state.get("steps", ()), "acts": state.get("acts", ()), "success": success, "error": cause}


# --- tracing -----------------------------------------------------------------------------------------------------------

MARK = "dreamgym"
"""Metadata key of a trace, with the value `dream` or `real`. The tag is `dreamgym: dream` or `dreamgym: real`."""

_TRACING_OPTIONS = ("project_name", "client", "replicas", "tags", "metadata", "enabled")


def caller_tracing() -> dict[str, Any]:
    """The caller's `langsmith.tracing_context`, for episodes that begin in a context of their own."""
    return {name: value for name, value in get_tracing_context().items() if name in _TRACING_OPTIONS and value is not None}


@contextmanager
def episode_tracing(
    kind: Literal["dream", "real"], about: Mapping[str, str] | None = None, *, caller: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Mark every LangSmith run in the block with the kind of its episode.

    Dreamed episodes are sent to LangSmith only inside `tracing_context(enabled=True)`: the environment variable that turns on
    tracing for production must not send thousands of dreams there.

    Args:
        about: Further metadata, such as the episode's task.
        caller: The caller's tracing context. Default: that of the running code.
    """
    context = dict(caller_tracing() if caller is None else caller)
    if kind == "dream":
        context.setdefault("enabled", False)
    if context.get("enabled"):
        # done here, as the guard would stop the first trace's call of git and its sending thread
        get_langchain_env_var_metadata()
        context.setdefault("client", get_cached_client())
    tags, metadata = context.get("tags", []), context.get("metadata", {})
    if MARK not in metadata:  # else an outer block has marked it
        context |= {"tags": [*tags, f"{MARK}: {kind}"], "metadata": {**metadata, MARK: kind, **(about or {})}}
    with tracing_context(**context):
        yield
